"""Tests of what a server withstands: wrong requests, clients that disconnect, stall or pipeline requests, and signals."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from programs import Run, one_sentence
from serving_runs import ROOT, Running, post, reset, wait_until

from rwkv.config import ServeConfig
from rwkv.errors import UserError
from rwkv.serving.http.connections import UNREAD_S
from rwkv.serving.server import _bind

pytestmark = pytest.mark.programs

ENDLESS = {"prompt": "a", "max_tokens": 100_000, "stream": True, "logit_bias": {"0": -100}}
OK = {"prompt": "a", "max_tokens": 1}
WRONG: list[tuple[str, Any]] = [
    *[("temperature", value) for value in (-1, 2.1, "1", [], {}, True)],
    *[("top_p", value) for value in (-0.1, 1.1, "x")],
    *[("top_k", value) for value in (-2, 1.5, 2**40)],
    *[("min_p", value) for value in (-1, 2)], *[("presence_penalty", value) for value in (-2.1, 3, "a")],
    *[("frequency_penalty", value) for value in (-2.1, 3, [])], *[("repetition_penalty", value) for value in (0, -1, 1000)],
    *[("seed", value) for value in (-2**63 - 1, 2**63, 2**70, 1.5, "1")],
    *[("n", value) for value in (0, -1, 129, 5, "2", 1.5)],
    *[("max_tokens", value) for value in (-2, 2**40, 1.5, "9")],
    *[("stop", value) for value in ("", [""], ["a"] * 33, ["a"] * 10_000, 3, [3], "x" * 257, {})],
    *[("logit_bias", value) for value in ({"a": 1}, {"256": 1}, {"-1": 1}, {"1": 101}, {"1": "x"}, [], {"²": 1},
                                          {"9" * 5000: 1})],
    *[("logprobs", value) for value in (-1, 21, True, "x")], *[("echo", value) for value in (1, "yes")],
    *[("stream", value) for value in (1, "yes", [])], *[("best_of", value) for value in (0, 2, "x")],
    *[("suffix", value) for value in ("x", 3)], *[("model", value) for value in ("other", 3, [])],
    *[("prompt", value) for value in ([], 3, [[]], ["a", 1], [[1], "a"], [-1], [256], [[256]], [1.5], {"a": 1}, "\0",
                                      ["a"] * 129, [2**70], "a" * 40_000)],
    *[("stream_options", value) for value in ({"include_usage": True}, {"x": 1}, 3)],
    ("unknown", 1), *[("tools", value) for value in ([], [{}])],
]
BODIES = [b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff\xfe", b'{"prompt": NaN}', b'{"temperature": NaN, "prompt": "a"}',
          b'{"temperature": 1e999, "prompt": "a"}', b"[" * 100_000,
          b'{"prompt": "a", "seed": Infinity}', b'{"prompt": "a"} x']


def check_error(answer: httpx.Response, param: str | None = None) -> None:
    """Asserts that the answer is a 4xx error in OpenAI's format, which names `param`."""
    assert 400 <= answer.status_code < 500, answer.text[:300]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param:
        assert str(error["param"]).startswith(param)


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda each: str(each)[:20])
def test_a_wrong_field_is_named(api: httpx.Client, field: str, value: Any) -> None:
    check_error(api.post("/completions", json={**OK, field: value}), field)


@pytest.mark.parametrize("path", ["/completions", "/chat/completions", "/responses", "/states"])
def test_a_wrong_body_is_refused(api: httpx.Client, path: str) -> None:
    for body in BODIES:
        check_error(api.post(path, content=body))


def test_a_small_server_names_its_limits(start: Callable[..., Running]) -> None:


    """Tests the limits on tokens, prompts, states, connections and origins.

    By default, a text has as many tokens as the limit allows.
    """
    server = start("max_tokens=3", "max_prompt_tokens=30", "states_mib=0", "max_connections=2", "cors=https://page.example")
    with socket.create_connection(("127.0.0.1", server.port)), socket.create_connection(("127.0.0.1", server.port)):
        head = server.exchange(b"").partition(b"\r\n\r\n")[0]
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 1\r\n" in head
    with httpx.Client(base_url=f"{server.url}/v1", timeout=60) as api:
        answer = api.post("/completions", json={"prompt": "a", "logit_bias": {"0": -100}}).json()
        assert answer["usage"]["completion_tokens"] == 3
        check_error(api.post("/completions", json={"prompt": "abcd" * 3, "n": 3, "echo": True, "logprobs": 1}), "echo")
        # Claude Code searches messages for the first phrase, and LiteLLM for the second
        chat = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "a" * 40}]}
        for path, body in (("/messages", chat), ("/chat/completions", chat), ("/responses", {"input": "a" * 40})):
            message = api.post(path, json=body).json()["error"]["message"].lower()
            assert re.search(r"prompt is too long: \d+ tokens > 30 maximum", message)
            assert "this model's maximum context length is 30 tokens" in message
        for path, body in (("/states", {"prompt": "a"}), ("/completions", {"prompt": "a", "save_state": True})):
            check_error(api.post(path, json=body))
        check_error(api.post("/states", content=b"x", headers={"content-type": "application/octet-stream"}))
        page, other = {"origin": "https://page.example"}, {"origin": "https://other.example"}
        for headers, status in ((page, 200), (page | {"host": "page.example"}, 200), (other, 403)):
            assert api.get("/models", headers=headers).status_code == status


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/completions", 405), ("PUT", "/v1/models", 405),
                                                        ("POST", "/health", 405), ("GET", "/v1/nothing", 404),
                                                        ("GET", "/../../etc/passwd", 404), ("GET", "/v1/models/%ff%fe", 404)])
def test_another_method_or_path_is_an_error_of_the_interface(server: Running, method: str, path: str, status: int) -> None:
    answer = httpx.request(method, server.url + path)
    check_error(answer)
    assert answer.status_code == status
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(("path", "endpoint"), [
    ("/chat/completions", "/v1/chat/completions"), ("/v1/v1/models", "/v1/models"), ("/v1/api/tags", "/api/tags")])
def test_an_unknown_path_that_is_like_an_endpoint_s_names_the_endpoint(server: Running, path: str, endpoint: str) -> None:
    assert f" {endpoint}:" in httpx.get(server.url + path).json()["error"]["message"]
    assert "endpoint" not in httpx.get(f"{server.url}/nothing").json()["error"]["message"]


@pytest.mark.soak
def test_idle_connections_stay_open_until_a_new_connection_needs_their_place(start: Callable[..., Running]) -> None:
    """A proxy reuses connections after many idle seconds. At the limit, the connection that was idle longest is closed."""
    server = start("max_connections=2")

    first, second, third = (HTTPConnection("127.0.0.1", server.port, timeout=20) for _ in range(3))

    def ask(connection: HTTPConnection) -> int:
        connection.request("GET", "/health")
        with connection.getresponse() as answer:
            answer.read()
        return answer.status

    with closing(first), closing(second), closing(third):
        assert [ask(second), ask(first)] == [200, 200]
        used = second.sock
        time.sleep(5.5)                  # uvicorn itself closes connections after 5 seconds
        assert [ask(second), ask(third)] == [200, 200]
        assert first.sock.recv(1) == b""
        assert ask(second) == 200
        assert second.sock is used


def test_the_servers_limit_ends_answers_of_requests_for_more_tokens(start: Callable[..., Running]) -> None:
    server = start("max_tokens=3")
    messages = [{"role": "user", "content": "a"}]
    always = {"logit_bias": {"0": -100}}                         # the answer cannot end by itself

    def ask(path: str, body: dict[str, Any]) -> Any:
        answer = httpx.post(server.url + path, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    for path, body in (("/v1/completions", {"prompt": "a", "max_tokens": 4}),
                       ("/v1/chat/completions", {"messages": messages, "max_tokens": 64_000}),
                       ("/v1/chat/completions", {"messages": messages, "max_completion_tokens": 64_000})):
        answer = ask(path, body | always)
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 3)
    answer = ask("/v1/responses", {"input": "a", "max_output_tokens": 64_000} | always)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (answer["max_output_tokens"], answer["usage"]["output_tokens"]) == (3, 3)
    answer = ask("/v1/responses", {"input": "a", "max_output_tokens": -1} | always)
    assert (answer["max_output_tokens"], answer["usage"]["output_tokens"]) == (None, 3)
    answer = ask("/v1/messages", {"model": "tiny", "messages": messages, "max_tokens": 64_000} | always)
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 3)
    long = {"stream": False, "format": {"type": "array", "minItems": 9}, "options": {"num_predict": 64_000}}
    for path, prompt in (("/api/chat", {"messages": messages}), ("/api/generate", {"prompt": "a", "raw": True})):
        answer = ask(path, long | prompt)
        assert (answer["done_reason"], answer["eval_count"]) == ("length", 3)


def test_a_large_body_is_refused(server: Running) -> None:
    announced = server.exchange(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n\r\n")
    assert b" 413 " in announced
    assert announced.count(b"HTTP/1.1 ") == 1, "the deadline for the rest is no second answer"
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    assert b" 413 " in server.exchange(chunked + (b"20000\r\n" + b" " * 0x20000 + b"\r\n") * 11)


def test_a_client_that_closes_can_send_all_of_a_body_that_is_refused(server: Running) -> None:
    """As urllib does, the client sends the whole body, more than sockets buffer, and then reads the answer."""
    body = post("/v1/completions", b" " * 2**25)
    for request, status in ((body, 413), (body.replace(b"/v1/completions", b"/v1/nothing", 1), 404),
                            (body.replace(b"HTTP/1.1", b"HTTP/1.0", 1), 413)):
        answer = server.exchange(request)
        assert f" {status} ".encode() in answer
        assert answer.count(b"HTTP/1.1 ") == 1


def test_invalid_data_is_answered_and_the_connection_closed(server: Running) -> None:
    """The data arrive at the same time: no HTTP, a proxy's method, long headers, half a header, nothing and half a body."""
    wrong = {b"\x16\x03\x01 hello\r\n\r\n": 400, b"CONNECT a:1 HTTP/1.1\r\nhost: localhost\r\n\r\n": 400,
             b"GET / HTTP/1.1\r\nhost: localhost\r\na: " + b"b" * 100_000: 431, b"GET /hea": 408, b"": 408,
             b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99\r\n\r\n{": 408}
    with ThreadPoolExecutor(len(wrong)) as threads:
        for (data, status), answer in zip(wrong.items(), threads.map(server.exchange, wrong), strict=True):
            assert f" {status} ".encode() in answer.partition(b"\r\n")[0], data[:40]


def test_a_request_that_asks_for_http_2_is_answered_in_http_1(server: Running) -> None:
    """Java's HttpClient asks in this way.

    The request arrives whole, and cut in its headers and its body. The connection's next request is answered too.
    """
    body = json.dumps(OK).encode()
    request = (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
               b"HTTP2-Settings: AAEAAEAA\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    last = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    for parts in ([request + last], [request[:70], request[70:-5], request[-5:] + last]):
        answers = server.exchange(*parts)
        assert (answers.count(b" 200 OK"), answers.count(b"text_completion")) == (2, 1), answers
    many = request.replace(b"POST /v1/completions", b"PUT /health") * 1500
    assert server.exchange(many + last).count(b" 405 ") == 1500


def test_many_incomplete_requests_block_no_other_request(server: Running) -> None:
    before = server.open_files()
    halves = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    for half in halves:
        half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
    assert httpx.post(f"{server.url}/v1/completions", json=OK).status_code == 200
    for half in halves[:100]:
        reset(half)
    wait_until(lambda: server.open_files() <= before + 5)
    for half in halves[100:]:
        half.close()


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize(("body", "times"), [({**ENDLESS, "n": 3}, 1), (ENDLESS, 2)], ids=["three", "two requests"])
def test_a_client_that_goes_away_frees_its_rows(server: Running, body: dict[str, Any], times: int) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(post("/v1/completions", body).replace(b"close", b"keep-alive") * times)
        wait_until(lambda: server.running_texts() == body.get("n", 1))
    wait_until(lambda: server.running_texts() == 0)


@pytest.mark.usefixtures("idle")
def test_a_full_queue_is_429_and_those_in_it_are_served(server: Running) -> None:
    connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
    for connection in connections:
        connection.sendall(post("/v1/completions", ENDLESS))
    wait_until(lambda: server.running_texts() == 8)
    answer = httpx.post(f"{server.url}/v1/completions", json=OK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) >= 1
    assert httpx.post(f"{server.url}/v1/completions", json={**OK, "n": 5}).status_code == 400
    with ThreadPoolExecutor(1) as thread:
        for connection in connections[:1]:
            connection.close()
        wait_until(lambda: server.running_texts() == 7)
        later = thread.submit(httpx.post, f"{server.url}/v1/completions", json=OK, timeout=60)
        for connection in connections[1:]:
            connection.close()
        assert later.result().status_code == 200


@pytest.mark.usefixtures("idle")
def test_a_request_that_waits_behind_a_client_that_goes_away_is_served(server: Running) -> None:
    """One sequence runs, a request of four sequences waits for four free rows, and a later request needs only one row."""
    def connect(body: dict[str, Any]) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(post("/v1/completions", body))
        return connection

    running = connect({**ENDLESS, "stream": False})
    wait_until(lambda: server.metric("timemix_rows") == 1)
    large = connect({**ENDLESS, "n": 4})
    wait_until(lambda: server.metric("timemix_queue") == 4)
    with ThreadPoolExecutor(1) as thread:
        later = thread.submit(httpx.post, f"{server.url}/v1/completions", json=OK, timeout=10)
        wait_until(lambda: server.metric("timemix_queue") == 5)
        large.close()
        assert later.result().status_code == 200
    running.close()


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_a_client_that_leaves_the_queue_is_not_a_failure_in_the_log(server: Running, path: str) -> None:
    body = {"input": ["a"] * 3} if path == "/v1/embeddings" else {**ENDLESS, "stream": False}
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**ENDLESS, "n": 4}, timeout=60), \
            socket.create_connection(("127.0.0.1", server.port)) as waiting:
        wait_until(lambda: server.metric("timemix_rows") == 4)
        waiting.sendall(post(path, body, "x-request-id: left-the-queue\r\n"))
        wait_until(lambda: server.metric("timemix_queue") > 0)
        waiting.close()
        wait_until(lambda: server.metric("timemix_queue") == 0)
        httpx.post(f"{server.url}/v1/completions", json={"prompt": 7}, headers={"x-request-id": "later"})
        wait_until(lambda: "later" in server.log)
    assert "left-the-queue" not in server.log


@pytest.mark.usefixtures("idle")
def test_a_stream_outlives_the_deadline_for_requests(server: Running) -> None:
    """Some clients send a newline after a body.

    The server must not take the newline for a request that arrives too slowly (receive_s=1.5).
    """
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(post("/v1/completions", ENDLESS))
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.sendall(b"\r\n")
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            assert connection.recv(65536), "the stream was cut"


def test_a_server_whose_engine_ends_says_why_and_ends(start: Callable[..., Running]) -> None:
    server = start("max_rows=1", "max_tokens=100000")
    engine = max(map(int, Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()))
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(httpx.post, f"{server.url}/v1/completions", json=ENDLESS | {"stream": False}, timeout=60)
        wait_until(lambda: server.running_texts() == 1)
        os.kill(engine, signal.SIGKILL)
        assert answer.result().json()["error"]["code"] == "engine_ended"
    assert server.process.wait(20) == 1, "a supervisor restarts the server only after a failure"
    assert "engine     the engine has stopped (SIGKILL" in server.log


def test_encoding_a_long_text_delays_no_other_request(server: Running) -> None:
    """The body has almost 1 MiB, the limit here, and asks for the strings of its 840,000 tokens."""
    long = {"prompt": "ab cd\n" * 140_000, "return_token_strs": True}
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(httpx.post, f"{server.url}/tokenize", json=long, timeout=60)
        others = 0
        while not answer.done():
            httpx.get(f"{server.url}/health", timeout=60)
            others += 1
        assert answer.result().json()["count"] == 840_000
    assert others > 3, "they were answered when the text had been encoded"


@pytest.mark.usefixtures("idle")
@pytest.mark.soak                        # the test waits for half a minute
def test_a_client_that_stops_reading_is_cancelled(server: Running) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(post("/v1/completions", {**ENDLESS, "logprobs": 5}))
        wait_until(lambda: server.running_texts() == 1)
        wait_until(lambda: server.running_texts() == 0, 60)


@pytest.mark.soak                        # the test waits for a minute
def test_an_answer_that_nobody_reads_is_dropped(server: Running) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(post("/tokenize", {"prompt": "a" * 900_000, "return_token_strs": True}))
        time.sleep(2 * UNREAD_S + 5)
        received = b"".join(iter(lambda: connection.recv(2**20), b""))
    head, _, body = received.partition(b"\r\n\r\n")
    announced = int(head.partition(b"content-length: ")[2].split()[0])
    assert len(body) < announced, "the rest is not kept for a reader who may never come"


def test_a_key_is_asked_for_and_cors_names_pages(start: Callable[..., Running], tmp_path: Path) -> None:
    """The log shows an example of a request, but not the API key, because many may read the log."""
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbfpepper\r\n\r\n  open \n")
    server = start("api_key=sesame", f"api_key_file={tmp_path / 'keys'}", "cors=https://page.example")
    first, *_, last = (line.split(maxsplit=1) for line in server.log.splitlines())
    key, page = {"authorization": "Bearer sesame"}, {"origin": "https://page.example"}
    with httpx.Client(base_url=server.url, timeout=60) as api:
        for headers, status in (({}, 401), ({"authorization": "Bearer other"}, 401), ({"authorization": "sesame"}, 401),
                                ({"x-api-key": ""}, 401), ({"x-api-key": "open"}, 200),
                                ({"authorization": "Bearer pepper"}, 200),
                                (key, 200), (key | page, 200)):
            assert api.get("/v1/models", headers=headers).status_code == status
        allowed = api.get("/health", headers=page)
        assert (allowed.status_code, allowed.headers["access-control-expose-headers"]) == (200, "x-request-id")
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        assert "access-control-allow-credentials" not in allowed.headers
        assert "access-control-allow-origin" not in api.get("/health", headers={"origin": "http://x"}).headers
        preflight = page | {"access-control-request-method": "POST",
                            "access-control-request-headers": "authorization,content-type,x-stainless-lang"}
        assert api.options("/v1/chat/completions", headers=preflight).status_code == 200
        foreign = api.options("/v1/chat/completions", headers=preflight | {"origin": "http://x.example"})
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "wrong_origin")
        line = next(line for line in server.log.splitlines() if foreign.headers["x-request-id"] in line)
        assert "'http://x.example'" in line, "a browser hides the reason, so the log must have it"
        # Chrome asks whether a public page may use a server in the user's own network
        private = api.options("/v1/models", headers=preflight | {"access-control-request-private-network": "true"})
        assert (private.status_code, private.headers["access-control-allow-private-network"]) == (200, "true")
    assert (first[0], last[0]) == ("loading", "try")
    assert not any(word in server.log for word in ("sesame", "pepper"))
    program, *arguments = shlex.split(last[1].replace("$KEY", "sesame"))
    assert program == "curl"
    if shutil.which("curl") is not None:
        result = subprocess.run([program, "-sS", "--fail", *arguments], capture_output=True, text=True, timeout=60, check=True)
        assert '"content"' in result.stdout


@pytest.mark.parametrize(("headers", "status"), [
    ({"host": "evil.example"}, 403), ({"host": "evil.example:80"}, 403), ({"host": "[::1"}, 403),
    ({"host": "laptop.local"}, 200), ({"host": "localhost.:8000"}, 200), ({"host": "evil.example."}, 403),
    ({"host": "[::1]:8000"}, 200), ({"host": "192.168.0.7"}, 200),
    ({"origin": "http://evil.example"}, 403), ({"origin": "null"}, 403),
    ({"host": "evil.example", "origin": "http://evil.example"}, 403),
    ({"host": "localhost:8000", "origin": "http://localhost:8000"}, 200),
    ({"host": "localhost:8000", "origin": "http://localhost:3000"}, 403)])
def test_pages_of_others_are_refused(server: Running, headers: dict[str, str], status: int) -> None:
    answer = httpx.get(f"{server.url}/v1/models", headers=headers)
    assert answer.status_code == status
    assert ("error" in answer.json()) == (status == 403)


def refuses_connections(server: Running) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", server.port)) != 0


def test_an_idle_server_ends_at_once(start: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends immediately, even without uvloop."""
    (tmp_path / "uvloop.py").write_text("raise ModuleNotFoundError(\"No module named 'uvloop'\", name='uvloop')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = start("dtype=bfloat16", "grace_s=60", apart=True)
    assert "on cpu, bfloat16" in server.log
    assert "asyncio" in server.log
    assert httpx.post(f"{server.url}/v1/completions", json=OK, timeout=60).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(8) == 0, "it waited for grace_s, or the engine had to be killed"


def test_a_signal_while_the_model_loads_ends_the_engine_too(checkpoint: Path) -> None:
    command = [sys.executable, str(ROOT / "serve.py"), "port=0", f"checkpoint={checkpoint}", "tokenizer=byte"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        # multiprocessing's own process comes first, and then the engine
        wait_until(lambda: len(children.read_text().split()) == 2)
        time.sleep(0.3)
        engine = max(map(int, children.read_text().split()))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
        assert not Path(f"/proc/{engine}").exists()


@pytest.mark.parametrize("stream", [False, True])
def test_a_signal_lets_running_texts_end_and_refuses_waiting_requests(start: Callable[..., Running], stream: bool) -> None:
    server = start("dtype=int4", "max_rows=1", "grace_s=1", "max_tokens=100000")
    assert "on cpu, int4" in server.log
    with ThreadPoolExecutor(1) as thread, \
            httpx.stream("POST", f"{server.url}/v1/completions", json=ENDLESS, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        waiting = thread.submit(httpx.post, f"{server.url}/v1/completions", json={**ENDLESS, "stream": stream}, timeout=60)
        wait_until(lambda: server.metric("timemix_queue") == 1)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: refuses_connections(server))
        assert waiting.result().status_code == (200 if stream else 503)
        error = json.loads(waiting.result().text.removeprefix("data: ").partition("\n")[0])["error"]
        assert error["code"] == "not_begun"
        request_id = waiting.result().headers["x-request-id"]
        assert f"failed     503 POST /v1/completions {request_id}: {error['message']}" in server.log
        events = [line.removeprefix("data: ") for line in lines if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(20) == 0


def test_a_second_signal_ends_the_server_at_once(start: Callable[..., Running]) -> None:
    server = start("max_tokens=100000")
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ENDLESS, timeout=60) as answer:
        lines = answer.iter_lines()      # without a reference to the generator, the connection closes
        next(lines)
        for _ in range(2):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        assert server.process.wait(10) == 0
    assert "Traceback" not in server.log


def test_a_port_is_taken_before_the_model_is_loaded() -> None:
    """Two servers that load at the same time cannot both have the port."""
    with _bind(ServeConfig(port=0)) as first, pytest.raises(UserError):
        _bind(ServeConfig(port=first.getsockname()[1]))


@pytest.mark.parametrize("host", ["[::1]", "localhost:8000", "http://127.0.0.1", "ü..b", "…"])
def test_a_host_that_is_neither_an_address_nor_a_name_is_refused(host: str) -> None:
    with pytest.raises(UserError, match="host= must be"):
        _bind(ServeConfig(host=host, port=0))


def test_a_missing_package_is_named_before_the_model_is_loaded() -> None:
    code = "import sys; sys.modules['msgspec'] = None; from rwkv.programs import serve; serve.main()"
    run = subprocess.run([sys.executable, "-c", code, "checkpoint=nothing.pth"], capture_output=True, text=True, cwd=ROOT)
    message = "error: serving requires the package msgspec: run pip install -e '.[serve]' in a clone of the repository\n"
    assert (run.returncode, run.stderr) == (2, message)


def test_a_damaged_checkpoint_is_reported_in_one_sentence(start: Callable[..., Running], tmp_path: Path) -> None:
    """The error is printed after the address, which is a URL with brackets if the host is an IPv6 address."""
    try:
        _bind(ServeConfig(host="::1", port=0)).close()
    except UserError:
        pytest.skip("this machine has no IPv6")
    (tmp_path / "nothing.pth").write_bytes(b"no weights")
    failed = start("host=::1", f"checkpoint={tmp_path / 'nothing.pth'}")
    assert failed.process.wait(60) == 2
    assert "address    http://[::1]:" in failed.log
    error = failed.log.splitlines()[-1]
    assert error.startswith("error: ")
    assert "nothing.pth" in error
    assert "Traceback" not in failed.log


@pytest.mark.parametrize(("options", "words"), [
    (("port=70000",), "port"), (("cors=*", "api_key=x"), "cors"),
    *[((f"cors={origin}",), "cors") for origin in ("localhost:3000", "https://page.example/", "https://*.example", "[https://a]")]])
def test_a_mistake_is_reported_in_one_sentence(run: Run, options: tuple[str, ...], words: str) -> None:
    one_sentence(run("serve", "checkpoint=nothing.pth", *options), words)


def test_origins_are_as_browsers_write_them() -> None:
    """The scheme and host of a web page are in lower case. Safari writes an extension's id in capitals."""
    origins = ["null", "http://[::1]:3000", "app://obsidian.md", "chrome-extension://abcdefgh",
               "safari-web-extension://8D5E1B2C-0A1B-4C3D-9E8F-001122334455"]
    assert ServeConfig(cors=origins).cors == origins
    for wrong in ("https://Page.example", "HTTPS://page.example", "Safari-web-extension://A", "app://obsidian.md/"):
        with pytest.raises(UserError, match="cors"):
            ServeConfig(cors=[wrong])


@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"null\n", b"\xff\xfea\0"])
def test_a_file_without_keys_does_not_open_the_server(run: Run, tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "keys").write_bytes(content)
    one_sentence(run("serve", "checkpoint=nothing.pth", f"api_key_file={tmp_path / 'keys'}"), "api_key_file=")
