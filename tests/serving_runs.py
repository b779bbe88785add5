"""Runs serve.py in a separate process, and sends it requests as bytes, for the tests of the server."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from forked import ROOT, Forked

if TYPE_CHECKING:
    import openai

# A logit_bias that allows only letters, so that a generated text has the same tokens when it is encoded again
LETTERS = {str(letter): 100.0 for letter in range(97, 123)}


class Running:
    """Runs serve.py in a process, whose output so far is `log`."""

    def __init__(self, folder: Path, *options: str, apart: bool = False) -> None:
        """Starts the server.

        `apart` starts it as a user does, as an interpreter of its own, which starts another one for the engine. By default both
        processes are forked, which saves the two seconds that torch's import takes.
        """
        self._log = folder / f"serve-{time.monotonic_ns()}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        command = "serve.py", "port=0", "kernel=reference", *options
        self._log.touch()
        self.process: subprocess.Popen[bytes] | Forked
        if apart:
            with self._log.open("w") as log:
                self.process = subprocess.Popen([sys.executable, str(ROOT / command[0]), *command[1:]], stdout=log, stderr=log,
                                                env=environment, cwd=folder)
        else:
            self.process = Forked(folder, command, environment, log=self._log)
        until = time.monotonic() + 120
        while "\nready" not in self.log and self.process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        if "\nready" in self.log:
            self.url = next(word for word in self.log.split() if word.startswith("http://")).rstrip(";")
            self.port = int(self.url.rpartition(":")[2])

    @property
    def log(self) -> str:
        return self._log.read_text()

    def exchange(self, *parts: bytes, wait: float = 20) -> bytes:
        """Sends these bytes, and returns the server's response until it closes the connection, or until nothing more arrives.

        The parts are sent one after the other, so that the server receives them separately.
        """
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait) as connection:
            for part in parts:
                connection.sendall(part)
                time.sleep(0.05 * (len(parts) > 1))
            received = b""
            try:
                while part := connection.recv(65536):
                    received += part
            except (TimeoutError, ConnectionResetError):
                pass
        return received

    def running_texts(self) -> float:
        return self.metric("timemix_rows") + self.metric("timemix_queue")

    def metric(self, name: str) -> float:
        page = httpx.get(f"{self.url}/metrics").text
        return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(f"{name} "))

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))               # noqa: PTH208  numbers, not paths

    def resident(self) -> int:
        """Returns the resident bytes of the server's processes, without mapped files."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return sum(1024 * int(line.split()[1]) for pid in (self.process.pid, *children)
                   for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon"))

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def serving(folder: Path, *options: str, apart: bool = False) -> Iterator[Running]:
    """Yields a server that has started, and stops it when the block ends."""
    running = Running(folder, *options, apart=apart)
    try:
        assert running.process.poll() is None, running.log
        yield running
    finally:
        running.end()


@contextmanager
def client_of(server: Running) -> Iterator["openai.OpenAI"]:
    import openai  # imported here, because it takes half a second

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def reset(connection: socket.socket) -> None:
    """Closes the connection with a TCP reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


def wait_until(condition: Callable[[], bool], seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "the condition did not become true in time"
        time.sleep(0.05)


def post(path: str, body: object, headers: str = "") -> bytes:
    """Returns the bytes of a POST request with `connection: close`."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(content)}\r\nconnection: close\r\n{headers}\r\n"
            .encode() + content)
