"""Tests HTTP itself, with requests written as bytes (RFC 9110 and 9112), and the ids of requests."""

import gzip
import json
import re
import socket
import zlib

import httpx
import pytest
from serving_runs import Running, post, wait_until
from test_limits import ENDLESS, OK

pytestmark = pytest.mark.programs

GET = b"GET /health HTTP/1.1\r\n"
HOST = b"host: localhost\r\n"
CLOSE = b"connection: close\r\n"
BODY = json.dumps(OK).encode()
LENGTH = b"content-length: %d\r\n" % len(BODY)
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)

REQUESTS: dict[str, tuple[bytes, int]] = {
    "no Host": (GET + CLOSE + b"\r\n", 400),
    "no Host, with a body": (b"POST /v1/completions HTTP/1.1\r\n" + LENGTH + b"\r\n" + BODY, 400),
    "an empty Host": (GET + b"host:\r\n" + CLOSE + b"\r\n", 400),
    "two Hosts": (GET + HOST + HOST + CLOSE + b"\r\n", 400),
    "two Hosts in HTTP/1.0": (b"GET /health HTTP/1.0\r\n" + HOST + HOST + b"\r\n", 400),
    "HTTP/1.0 without Host": (b"GET /health HTTP/1.0\r\n\r\n", 200),
    "HTTP/0.9": (b"GET /health\r\n\r\n", 400),
    "HTTP/0.9 by name": (b"GET /health HTTP/0.9\r\n\r\n", 400),
    "HTTP/2.0 by name": (b"GET /health HTTP/2.0\r\n" + HOST + CLOSE + b"\r\n", 400),
    "HTTP/1.2": (b"GET /health HTTP/1.2\r\n" + HOST + CLOSE + b"\r\n", 400),
    "a whole address": (b"GET http://localhost:80/health HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n", 200),
    "a whole address without Host": (b"GET http://localhost/health HTTP/1.1\r\n" + CLOSE + b"\r\n", 400),
    "a whole address without a path": (b"GET http://localhost HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n", 200),
    "a whole address of others": (b"GET http://evil.example/v1/models HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n", 403),
    "a whole address and another Host": (b"GET http://localhost/ready HTTP/1.1\r\nhost: evil.org\r\n" + CLOSE + b"\r\n", 200),
    "a method in small letters": (b"get /health HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n", 400),
    "an unknown method": (b"FOO /health HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n", 400),
    "a method of another kind": (b"PROPFIND /health HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n", 405),
    "HEAD": (b"HEAD /health HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n", 200),
    "HEAD of a POST": (b"HEAD /v1/completions HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n", 405),
    "OPTIONS": (b"OPTIONS /health HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n", 405),
    "OPTIONS of all": (b"OPTIONS * HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n", 404),
    "two lengths": (POST + LENGTH + LENGTH + b"\r\n" + BODY, 400),
    "a length and chunks": (POST + LENGTH + CHUNKED + b"\r\n" + CHUNKS, 400),
    "chunks and a length": (POST + CHUNKED + LENGTH + b"\r\n" + CHUNKS, 400),
    "a length with a sign": (POST + b"content-length: +%d\r\n\r\n" % len(BODY) + BODY, 400),
    "a length that is too small": (POST + CLOSE + b"content-length: 5\r\n\r\n" + BODY, 400),
    "chunks": (POST + CLOSE + CHUNKED + b"\r\n" + CHUNKS, 200),
    "chunks in HTTP/1.0": (POST.replace(b"1.1", b"1.0") + CHUNKED + b"\r\n" + CHUNKS, 400),
    "chunks of gzip": (POST + CLOSE + b"transfer-encoding: gzip, chunked\r\n\r\n" + CHUNKS, 400),
    "100-continue": (POST + CLOSE + LENGTH + b"expect: 100-continue\r\n\r\n" + BODY, 100),
    "100-continue of a large body": (POST + b"content-length: 9999999\r\nexpect: 100-continue\r\n\r\n", 413),
    "something after the last body": (POST + CLOSE + LENGTH + b"\r\n" + BODY + b"something\r\n\r\n", 200),
    "something after a body": (POST + LENGTH + b"\r\n" + BODY + b"something\r\n\r\n", 200),
    "a request without Host after a body": (POST + LENGTH + b"\r\n" + BODY + GET + b"\r\n", 200),
    "blanks around a value": (POST.replace(b"localhost", b" localhost \t ") + CLOSE + b"transfer-encoding: chunked \r\n\r\n"
                              + CHUNKS, 200),
    "a header with a space before its colon": (GET + b"host : localhost\r\n" + CLOSE + b"\r\n", 400),
}

LARGE = gzip.compress(b" " * 2**22)      # this unpacks to 4 MiB, which is more than max_body_mib=1


def as_post(content: bytes, *headers: bytes) -> bytes:
    return POST + CLOSE + b"content-length: %d\r\n" % len(content) + b"".join(b"%s\r\n" % each for each in headers) \
        + b"\r\n" + content


JSON = b"content-type: application/json; charset="
GZIP = b"content-encoding: gzip"
WORDS = json.dumps({**OK, "prompt": "é"}, ensure_ascii=False)
REQUESTS |= {
    "gzip": (as_post(gzip.compress(BODY), GZIP), 200),
    "GZIP in capitals": (as_post(gzip.compress(BODY), b"Content-Encoding: X-GZIP"), 200),
    "gzip in chunks": (POST + CLOSE + CHUNKED + GZIP + b"\r\n\r\n%x\r\n%s\r\n0\r\n\r\n"
                       % (len(gzip.compress(BODY)), gzip.compress(BODY)), 200),
    "identity": (as_post(BODY, b"content-encoding: identity"), 200),
    "an empty encoding": (as_post(BODY, b"content-encoding:"), 200),
    "brotli": (as_post(BODY, b"content-encoding: br"), 415),
    "deflate": (as_post(zlib.compress(BODY), b"content-encoding: deflate"), 415),
    "gzip twice": (as_post(gzip.compress(gzip.compress(BODY)), b"content-encoding: gzip, gzip"), 415),
    "gzip in two headers": (as_post(gzip.compress(BODY), GZIP, GZIP), 415),
    "gzip that is none": (as_post(BODY, GZIP), 400),
    "gzip that is cut": (as_post(gzip.compress(BODY)[:-9], GZIP), 400),
    "gzip with something after it": (as_post(gzip.compress(BODY) + b"x", GZIP), 400),
    "gzip of nothing": (as_post(b"", GZIP), 400),
    "gzip of too much": (as_post(LARGE, GZIP), 413),
    "gzip of 4 GiB": (as_post(gzip.compress(LARGE * 64), GZIP), 400),
    "a byte order mark": (as_post(b"\xef\xbb\xbf" + BODY), 200),
    "a byte order mark in gzip": (as_post(gzip.compress(b"\xef\xbb\xbf" + BODY), GZIP), 200),
    "UTF-16 unsaid": (as_post(BODY.decode().encode("utf-16")), 400),
    "latin-1 unsaid": (as_post(WORDS.encode("latin-1")), 400),
    "half a surrogate pair": (as_post(json.dumps({**OK, "prompt": "\ud83d", "stop": "\ude00"}).encode()), 200),
    "a charset": (as_post(WORDS.encode(), JSON + b"utf-8"), 200),
    "a charset in quotes": (as_post(WORDS.encode(), JSON + b'"UTF-8"'), 200),
    "latin-1": (as_post(WORDS.encode("latin-1"), JSON + b"ISO-8859-1"), 200),
    "UTF-16": (as_post(WORDS.encode("utf-16"), JSON + b"utf-16"), 200),
    "a charset that it is not in": (as_post(b"\xff", JSON + b"utf-16"), 400),
    "a charset that nobody knows": (as_post(BODY, JSON + b"klingon"), 415),
    "a charset that is a program": (as_post(BODY, JSON + b"rot13"), 415),
    "no type": (as_post(BODY), 200), "a form's type": (as_post(BODY, b"content-type: application/x-www-form-urlencoded"), 200),
    "an expectation in HTTP/1.0": (as_post(BODY, b"expect: 100-continue").replace(b"HTTP/1.1", b"HTTP/1.0"), 200),
    "chunks with extensions and a trailer": (POST + CLOSE + CHUNKED + b"\r\n%x;a=b\r\n%s\r\n0\r\nx: y\r\n\r\n"
                                             % (len(BODY), BODY), 200),
    "one byte a chunk": (POST + CLOSE + CHUNKED + b"\r\n" + b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
                         + b"0\r\n\r\n", 200),
    "HEAD of the page": (b"HEAD / HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n", 200),
    "HEAD of a list": (b"HEAD /v1/models/ HTTP/1.1\r\n" + HOST + CLOSE + b"\r\n", 200)}


@pytest.mark.parametrize(("data", "status"), REQUESTS.values(), ids=REQUESTS)
def test_requests_are_answered_as_http_says(server: Running, data: bytes, status: int) -> None:
    answer = server.exchange(data)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    if status == 100:
        assert b"\r\n\r\nHTTP/1.1 200 OK\r\n" in answer
    if status >= 400 and not data.startswith(b"HEAD"):
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    if data.startswith(b"HEAD"):
        assert answer.endswith(b"\r\n\r\n")
    assert (b"\r\naccept-encoding: gzip\r\n" in answer) == (status == 415)


def test_a_stream_in_http_1_0_has_no_chunks_and_ends_with_the_connection(server: Running) -> None:
    request = post("/v1/completions", {**OK, "stream": True, "seed": 1})
    new = server.exchange(request)
    old = server.exchange(request.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"close", b"keep-alive"))
    head, _, body = old.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body.endswith(b"data: [DONE]\n\n")
    assert body.count(b"data: ") == new.count(b"data: ") > 1
    assert all(line.startswith(b"data: ") for line in body.split(b"\n\n")[:-1])


def request_id(answer: bytes | httpx.Response) -> str:
    if isinstance(answer, httpx.Response):
        return answer.headers["x-request-id"]
    value, = re.findall(rb"(?im)^x-request-id: (.*)\r$", answer.partition(b"\r\n\r\n")[0])
    return value.decode("latin-1")


@pytest.mark.parametrize(("path", "body", "status"), [
    ("/v1/completions", OK, 200), ("/v1/completions", {**OK, "stream": True}, 200), ("/v1/completions", {"n": 0}, 400),
    ("/v1/completions", {"model": "other"}, 404), ("/nothing", {}, 404), ("/health", {}, 405)], ids=str)
def test_each_answer_has_the_requests_id(server: Running, path: str, body: object, status: int) -> None:
    """A request's id is the client's own, or one that the server makes. The log has the ids of requests that failed."""
    own = httpx.post(server.url + path, json=body, headers={"X-Request-Id": f"my-id.{path}:{status}"}, timeout=60)
    others = [httpx.post(server.url + path, json=body, timeout=60) for _ in range(2)]
    assert [answer.status_code for answer in (own, *others)] == [status] * 3
    assert request_id(own) == f"my-id.{path}:{status}"
    assert len({request_id(answer) for answer in others}) == 2
    assert all(request_id(answer).startswith("req_") for answer in others)
    logged = [line for line in server.log.splitlines() if request_id(others[0]) in line]
    assert len(logged) == (status >= 400)
    assert all(str(status) in line and path in line for line in logged)


def test_an_invalid_id_is_not_returned(server: Running) -> None:
    for wrong in (b"", b"two words", b"a" * 513, "é".encode(), b"a\tb"):
        answer = server.exchange(GET + HOST + CLOSE + b"x-request-id: " + wrong + b"\r\n\r\n")
        assert request_id(answer).startswith("req_"), wrong


def test_a_request_refused_before_it_is_read_has_an_id(server: Running) -> None:
    assert request_id(server.exchange(b"GET /health HTTP/1.1\r\nx-request-id: mine\r\n\r\n")) == "mine"
    for data in (b"\x16\x03\x01\r\n\r\n", HOST, POST + b"x-request-id: late\r\ncontent-length: 99\r\n\r\n{"):
        answer_id = request_id(server.exchange(data))
        assert answer_id == "late" if b"late" in data else answer_id.startswith("req_")
        assert f" {answer_id}: " in server.log


def test_the_log_says_why_a_request_failed_whose_client_went_away(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(POST + b"x-request-id: gone\r\ncontent-length: 99\r\n\r\n{")
    wait_until(lambda: " gone: " in server.log)


def test_each_of_two_requests_of_a_connection_has_its_id(server: Running) -> None:
    first, second = (GET + HOST + b"x-request-id: %s\r\n" % name for name in (b"first", b"second"))
    answers = server.exchange(first + b"\r\n" + second + b"\r\n" + GET + HOST + CLOSE + b"\r\n")
    assert [name.decode()[:4] for name in re.findall(rb"x-request-id: (.*)\r", answers)] == ["firs", "seco", "req_"]


@pytest.mark.usefixtures("idle")
def test_a_stream_is_not_cut_by_what_follows_its_request(server: Running) -> None:
    request = post("/v1/completions", {**ENDLESS, "max_tokens": 300}).replace(b"close", b"keep-alive")
    answer = server.exchange(request + b"x y\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"data: [DONE]" in answer
    wait_until(lambda: server.running_texts() == 0)
