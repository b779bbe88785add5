"""A local server that implements the part of the Hub's HTTP interface that huggingface_hub uses to download.

    GET /api/models/ORG/REPO[/revision/REV]          the commit, the files with their sizes, the card
    GET, HEAD /ORG/REPO/resolve/REV/PATH             a file, or a Range of it
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

from forked import Forked

ROOT = Path(__file__).parent.parent
MAIN = "main"


@dataclass
class Repository:
    """A repository: its files by path, the token that clients need (None if it is public), and the model card's fields."""

    files: dict[str, bytes]
    token: str | None = None
    gated: bool = False
    revisions: tuple[str, ...] = (MAIN,)
    card: Mapping[str, Any] = field(default_factory=dict)

    @property
    def commit(self) -> str:
        digest = hashlib.sha1()
        for name, content in sorted(self.files.items()):
            digest.update(name.encode() + content)
        return digest.hexdigest()


class HubServer(ThreadingHTTPServer):
    """Serves repositories by name.

    `requests` lists (method, path, Range) of each request so far. A response with a file breaks off after `cut` bytes. If
    `refusal` is set, it is the status, the body and the headers of every response.
    """

    daemon_threads = True

    def __init__(self, repositories: dict[str, Repository]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.requests: list[tuple[str, str, str | None]] = []
        self.cut: int | None = None
        self.refusal: tuple[int, bytes, dict[str, str]] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def downloads(self) -> list[str]:
        """Returns the paths of the files that have been sent, without the repositories' names."""
        return [path.partition("/resolve/")[2].partition("/")[2] for method, path, _ in self.requests
                if method == "GET" and "/resolve/" in path]


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path, self.headers.get("Range")))
        if self.server.refusal:
            self._send(*self.server.refusal)
            return
        match = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/]+)(?:/(revision|resolve)/([^/]+)(?:/(.*))?)?", path)
        repository = self.server.repositories.get(match[1]) if match else None
        if match is None or repository is None:
            self._error(404, "RepoNotFound")
        elif repository.token and self.headers.get("authorization") != f"Bearer {repository.token}":
            self._error(403, "GatedRepo") if repository.gated else self._error(401, "RepoNotFound")
        elif (match[3] or MAIN) not in (*repository.revisions, repository.commit):
            self._error(404, "RevisionNotFound")
        elif match[2] == "resolve":
            self._file(repository, match[4])
        else:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in repository.files.items()]
            self._send(200, json.dumps({"id": match[1], "sha": repository.commit, "siblings": siblings,
                                        "cardData": repository.card}).encode())

    def _file(self, repository: Repository, name: str) -> None:
        if name not in repository.files:
            self._error(404, "EntryNotFound")
            return
        content = repository.files[name]
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": repository.commit,
                   "Accept-Ranges": "bytes"}
        status, start = 200, 0
        if (range_match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")):
            status, start = 206, int(range_match[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(status, content[start:], headers)

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = self.server.cut if "/resolve/" in self.path else None
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None and cut < len(body):
            self.close_connection = True


@contextmanager
def hub_server(repositories: dict[str, Repository]) -> Iterator[HubServer]:
    server = HubServer(repositories)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def environment(endpoint: str, home: Path, **more: str) -> dict[str, str]:
    """Returns the environment of a process that downloads from `endpoint` into a cache in `home`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return {**inherited, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", "no_proxy": "*",
            "PYTHONPATH": str(ROOT), **more}


def python(code: str, variables: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=folder, env=variables)


def timemix(*arguments: str, variables: Mapping[str, str], folder: Path, input: str = "") -> subprocess.CompletedProcess[str]:
    return forked_python("-m", "rwkv.tools", *arguments, variables=variables, folder=folder, input=input)


def forked_python(*command: str, variables: Mapping[str, str], folder: Path,
                  input: str = "") -> subprocess.CompletedProcess[str]:
    """Runs Python in a separate process that need not import torch. The process imports huggingface_hub with `variables`."""
    process = Forked(folder, command, dict(variables), input=input)
    output, error = process.communicate(timeout=240)
    return subprocess.CompletedProcess(command, process.returncode or 0, output, error)
