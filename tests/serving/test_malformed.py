"""Sends hundreds of malformed requests, and requests that schemathesis derives from the server's own schema."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving_runs import Running, post, reset, wait_until
from test_limits import BODIES, ENDLESS, OK, WRONG, check_error
from test_responses import WRONG as OF_RESPONSES

pytestmark = [pytest.mark.programs, pytest.mark.soak]

COMPLETIONS, CHAT, STATES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/states", "/v1/responses"
POSTS = (COMPLETIONS, CHAT, RESPONSES, "/tokenize", "/detokenize")
GETS = ("/v1/models", "/v1/models/tiny", "/tokenizer_info", "/health", "/ready", "/metrics", "/openapi.json", "/")
MESSAGES: list[Any] = [None, [], "hi", {}, [3], [{}], [{"role": "user"}], [{"role": "nobody", "content": "x"}],
                       [{"role": "user", "content": 3}], [{"role": "user", "content": [{"type": "image_url"}]}],
                       [{"role": "user", "content": "x", "tool_calls": [{}]}], [{"role": [], "content": "x"}]]
VALID_IN_CHAT = [("logprobs", True)]
CHECKS = ("not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
          "negative_data_rejection,unsupported_method,allow_header_conformance")
MORE_MEMORY = 16 * 2**20                 # an allocator may keep this many bytes
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
UNFINISHED = {"half a first line": b"POST /v1/comp", "half a header": HEAD + b"content-le", "half the headers": HEAD,
              "half a body": HEAD + b'content-length: 50\r\n\r\n{"prompt":',
              "half a chunk": HEAD + b'transfer-encoding: chunked\r\n\r\n50\r\n{"prompt":'}
NO_REQUESTS = {"a wrong length": HEAD + b"content-length: x\r\n\r\n", "a negative length": HEAD + b"content-length: -1\r\n\r\n",
               "a wrong chunk": HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", "no HTTP": b"\x16\x03\x01\r\n\r\n",
               "a wrong version": b"GET / HTTP/9.9\r\n\r\n", "long headers": HEAD + b"a: " + b"b" * 100_000,
               "a huge body": HEAD + b"content-length: 5000000\r\n\r\n" + b" " * 2**20,
               "10,000 stops": post(COMPLETIONS, {**OK, "stop": ["a"] * 10_000})}


def test_malformed_requests_do_not_change_a_server(server: Running) -> None:
    """All requests are sent twice, because memory that the first round allocates does not count."""
    trials = _trials(server)
    assert len(trials) >= 300
    for _ in range(2):
        wait_until(lambda: server.running_texts() == 0)
        memory, files = server.resident(), server.open_files()
        with ThreadPoolExecutor(8) as threads:
            for future in [threads.submit(trial) for trial in trials]:
                future.result()
        wait_until(lambda: server.running_texts() == 0)
        wait_until(lambda: server.open_files() <= files)             # noqa: B023  called at once
    assert server.resident() <= memory + MORE_MEMORY
    assert httpx.post(server.url + COMPLETIONS, json=OK).status_code == 200
    assert "Traceback" not in server.log


def _trials(server: Running) -> list[Callable[[], None]]:
    """Returns functions, each of which sends a request and checks the answer."""
    def body(path: str, content: bytes) -> None:
        check_error(httpx.post(server.url + path, content=content, timeout=60))

    def method(name: str, path: str) -> None:
        answer = httpx.request(name, server.url + path, timeout=60)
        check_error(answer)
        assert answer.status_code == 405

    def raw(data: bytes) -> None:
        head, _, content = server.exchange(data).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 4"), head
        assert json.loads(content)["error"]["message"]

    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    fields = [(COMPLETIONS, {**OK, name: value}) for name, value in WRONG]
    fields += [(CHAT, {**chat, name: value}) for name, value in WRONG if (name, value) not in VALID_IN_CHAT]
    fields += [(CHAT, {**chat, "messages": messages}) for messages in MESSAGES]
    fields += [(RESPONSES, {"input": "a", "max_output_tokens": 1, name: value}) for name, value in OF_RESPONSES]
    contents = [(path, json.dumps(fields).encode()) for path, fields in fields]
    contents += [(path, content) for path in (*POSTS, STATES) for content in BODIES]
    methods = [(name, path) for paths, names in ((POSTS, ("GET", "PUT", "DELETE")), (GETS, ("POST", "PUT", "DELETE")))
               for path in paths for name in names]
    return [*(partial(body, *each) for each in contents), *(partial(method, *each) for each in methods),
            *(partial(raw, data) for data in (*UNFINISHED.values(), *NO_REQUESTS.values())),
            *(partial(_hang_up, server, data) for data in UNFINISHED.values() for _ in range(4)),
            *(partial(_hang_up, server, post(COMPLETIONS, OK)) for _ in range(10)),
            *(partial(_hang_up, server, post(COMPLETIONS, ENDLESS)) for _ in range(10))]


def _hang_up(server: Running, data: bytes) -> None:
    """Sends the data, and resets the connection without reading the answer."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(data)
    reset(connection)


@pytest.mark.skipif(find_spec("schemathesis") is None, reason="needs the package schemathesis")
def test_requests_derived_from_the_schema_get_answers_of_the_schema(start: Callable[..., Running], tmp_path: Path) -> None:
    """The server never answers 5xx and refuses wrong bodies and methods.

    Every answer has a status, a type and a form of the schema.
    """
    server = start("max_tokens=8", "max_rows=8", "max_queue=64")
    run = subprocess.run([Path(sys.executable).parent / "schemathesis", "run", f"{server.url}/openapi.json",
                          "--phases", "examples,coverage,fuzzing", "--max-examples", "40", "--seed", "0", "--no-color",
                          "--request-timeout", "60", "--checks", CHECKS, "--continue-on-failure"],
                         capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert server.process.poll() is None
