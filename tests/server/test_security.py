"""Keys, origins, limits, bad bodies: in this process; slow clients against a real socket."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from starlette.routing import Mount
from starlette.testclient import TestClient

from lfmfast import AsyncModel, errors
from lfmfast.server import app as server_app
from lfmfast.server import protocol
from lfmfast.server.app import create_app
from lfmfast.server.errors import ApiError, to_api_error
from lfmfast.server.settings import Settings

KEY, OTHER = "sk-this-is-the-secret-key", "sk-schlüssel"
ENDPOINTS = ["/v1/models", "/props", "/slots", "/metrics", "/tokenize", "/v1/chat/completions", "/completion", "/v1/messages",
             "/v1/responses", "/slots/0", "/nothing"]  # fmt: skip


class NoModel:
    """Stands for a model where none is needed."""

    class model:
        class engine:
            @staticmethod
            def stats() -> dict[str, int]:
                return {"n_slots": 1}

    async def close(self) -> None:
        pass


async def at_once() -> AsyncModel:
    return NoModel()  # type: ignore[return-value]


@contextmanager
def server(settings: Settings | None = None, load: Any = at_once) -> Iterator[TestClient]:
    with TestClient(create_app(settings or Settings(), load)) as client:
        yield client


@pytest.fixture
def locked() -> Iterator[TestClient]:
    with server(Settings(api_keys=(KEY, OTHER))) as client:
        yield client


def error(answer: Any, status: int, kind: str) -> str:
    assert answer.status_code == status
    found = answer.json()["error"]
    assert (found["code"], found["type"]) == (status, kind)
    return str(found["message"])


# --- keys ---


def test_public_endpoints(locked: TestClient) -> None:
    for path in ("/health", "/v1/health", "/"):
        assert locked.get(path).status_code == 200


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("headers", [
    {}, {"Authorization": "Bearer wrong"}, {"Authorization": ""}, {"Authorization": "Bearer "}, {"Authorization": KEY[:-1]},
    {"X-Api-Key": KEY + "x"}, {"Authorization": "Bearer wrong", "X-Api-Key": KEY}, {"Authorization": f"Basic {KEY}"},
])  # fmt: skip
def test_nothing_without_a_key(locked: TestClient, path: str, headers: dict[str, str]) -> None:
    for answer in (locked.get(path, headers=headers), locked.post(path, json={}, headers=headers)):
        assert error(answer, 401, "authentication_error") == "Invalid API Key"


@pytest.mark.parametrize("headers", [
    {"Authorization": f"Bearer {KEY}"}, {"Authorization": f"bearer {KEY}"}, {"Authorization": KEY}, {"X-Api-Key": KEY},
    {"Authorization": f"Bearer {OTHER}".encode()},
])  # fmt: skip
def test_with_a_key(locked: TestClient, headers: Any) -> None:
    error(locked.get("/nothing", headers=headers), 404, "not_found_error")


def test_keys_are_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(api_keys=(KEY,))
    assert KEY not in repr(settings)
    with caplog.at_level(logging.DEBUG), server(settings) as client:
        for key in (KEY, "sk-a-wrong-one"):
            client.get("/v1/models?key=sk-in-a-query", headers={"Authorization": f"Bearer {key}"})
            client.post("/v1/chat/completions", content=b"{", headers={"X-Api-Key": key})
    assert "/v1/models" in str([getattr(r, "facts", None) for r in caplog.records])
    ours = [r for r in caplog.records if not r.name.startswith("httpx")]  # the client's own
    seen = str([(r.getMessage(), getattr(r, "facts", None)) for r in ours])
    assert not [key for key in (KEY, "sk-a-wrong-one", "sk-in-a-query") if key in seen]


# --- browsers ---


@pytest.mark.parametrize("origin", ["localhost", "web.mydomain.fr", "https://example.com", "null"])
def test_preflight_needs_no_key(locked: TestClient, origin: str) -> None:
    answer = locked.options("/v1/chat/completions", headers={"Origin": origin, "Access-Control-Request-Method": "POST",
                                                             "Access-Control-Request-Headers": "authorization"})  # fmt: skip
    assert answer.status_code == 200 and not answer.content
    found = {name: answer.headers[f"access-control-{name}"] for name in ("allow-origin", "allow-methods", "allow-headers")}
    assert found == {"allow-origin": origin, "allow-methods": "GET, POST, DELETE, OPTIONS", "allow-headers": "authorization"}
    assert answer.headers["vary"] == "Origin"


def test_refusals_can_be_read_by_pages_too(locked: TestClient) -> None:
    headers = {"Origin": "https://example.com"}
    for answer in (locked.get("/v1/models", headers=headers), locked.get("/health", headers=headers)):
        assert answer.headers["access-control-allow-origin"] == "https://example.com"
    assert "access-control-allow-origin" not in locked.get("/health").headers


@pytest.mark.parametrize("allowed, origin, may", [
    ("localhost", "http://localhost", True), ("localhost", "http://localhost:8080", True),
    ("localhost", "http://127.0.0.1:3000", True), ("localhost", "http://[::1]:3000", True),
    ("localhost", "http://evil.com", False), ("localhost", "http://localhost.evil.com", False),
    ("localhost", "http://notlocalhost", False), ("localhost", "http://[", False), ("localhost", "null", False),
    ("https://a.com,https://b.com", "https://b.com", True), ("https://a.com", "https://a.com.evil.com", False),
    ("https://a.com", "http://a.com", False),
])  # fmt: skip
def test_origins(allowed: str, origin: str, may: bool) -> None:
    with server(Settings(cors_origins=allowed)) as client:
        for ask in (client.options, client.get):
            answer = ask("/health", headers={"Origin": origin})
            assert answer.status_code == 200
            assert answer.headers.get("access-control-allow-origin") == (origin if may else None)


# --- bodies ---

DEEP = b'{"a":' * 200 + b"1" + b"}" * 200
BAD = {
    "empty": b"", "not JSON": b"hello", "cut": b'{"messages": [', "two": b"{}{}", "an array": b"[1]", "a number": b"1",
    "null": b"null", "not UTF-8": b'{"prompt": "\xff\xfe"}', "other encoding": '{"prompt": "你好"}'.encode("gbk"),
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"), "lone surrogate": b'{"prompt": "\\ud800"}', "NUL": b'{"prompt": "a\0b"}',
    "NaN": b'{"temperature": NaN}', "deep": DEEP, "very deep": b"[" * 1_000_000, "deep pairs": b'{"a":[' * 5000 + b"]}" * 5000,
    "a huge number": b'{"seed": 1' + b"0" * 100_000 + b"}", "single quotes": b"{'a': 1}",
}  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/completion", "/tokenize", "/apply-template", "/v1/completions"])
@pytest.mark.parametrize("name", BAD)
def test_bad_bodies_are_400(path: str, name: str) -> None:
    with server() as client:
        answer = client.post(path, content=BAD[name])
        assert answer.status_code == 400, answer.text
        assert "error" in answer.json()


def test_nesting_up_to_the_limit() -> None:
    body = {"a": [{"b": [1, "[[[[[["]}]}
    with server(Settings(max_nesting=4)) as client:
        assert "messages" in error(client.post("/apply-template", json=body), 400, "invalid_request_error")
        message = error(client.post("/apply-template", json={"a": [{"b": [[1]]}]}), 400, "invalid_request_error")
        assert "nested more than 4 deep" in message


def test_brackets_in_a_text_are_no_nesting() -> None:
    with server() as client:
        message = error(client.post("/apply-template", json={"text": "[{" * 1000}), 400, "invalid_request_error")
        assert "messages" in message


def test_large_bodies_are_refused_by_what_they_say_and_by_what_they_are() -> None:
    with server(Settings(max_body_bytes=1000)) as client:
        message = error(client.post("/tokenize", content=b"x" * 1001), 413, "invalid_request_error")
        assert "1000" in message
        parts = (b"x" * 600 for _ in range(2))  # no Content-Length
        error(client.post("/tokenize", content=parts), 413, "invalid_request_error")
        assert error(client.post("/tokenize", content=b"x" * 1000), 400, "invalid_request_error")


# --- what exceptions become ---


@pytest.mark.parametrize("raised, status, kind", [
    (errors.ParameterError("temperature"), 400, "invalid_request_error"),
    (errors.TemplateError("role"), 400, "invalid_request_error"),
    (errors.QueueFullError("full"), 503, "unavailable_error"), (errors.ClosedError("closed"), 503, "unavailable_error"),
    (errors.DeadlineError("late"), 408, "timeout_error"), (errors.DecodeError("failed"), 500, "server_error"),
    (ValueError("a secret"), 500, "server_error"),
])  # fmt: skip
def test_exceptions_as_answers(monkeypatch: pytest.MonkeyPatch, raised: Exception, status: int, kind: str) -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        raise raised

    monkeypatch.setattr(server_app, "routes", lambda settings: [Mount("/x", fails)])
    with server() as client:
        answer = client.get("/x/")
        message = error(answer, status, kind)
        assert ("secret" in message) is False
        assert ("retry-after" in answer.headers) is (status == 503)


def test_a_full_context_tells_both_counts() -> None:
    body = to_api_error(errors.ContextFullError("too long", 700, 512)).body()["error"]
    assert (body["code"], body["type"]) == (400, "exceed_context_size_error")
    assert (body["n_prompt_tokens"], body["n_ctx"]) == (700, 512)


# --- loading and ending ---


def test_while_loading_and_after_it_failed() -> None:
    gate = threading.Event()

    async def load() -> AsyncModel:
        await asyncio.to_thread(gate.wait)
        raise errors.ModelLoadError("no such file")

    ended = threading.Event()
    with TestClient(create_app(Settings(), load, ended=lambda error: ended.set())) as client:
        for path in ("/health", "/v1/models", "/slots", "/nothing"):
            answer = client.get(path)
            assert error(answer, 503, "unavailable_error") == "Loading model"
            assert answer.headers["retry-after"]
        assert client.get("/").status_code == 200
        gate.set()
        assert ended.wait(30)
        error(client.get("/health"), 500, "server_error")


def test_nothing_new_while_ending() -> None:
    with server() as client:
        assert client.get("/health").status_code == 200
        client.app.state.server.draining = True  # type: ignore[attr-defined]
        for answer in (client.get("/health"), client.post("/v1/chat/completions", json={})):
            assert "shutting down" in error(answer, 503, "unavailable_error")
            assert answer.headers["connection"] == "close"


def test_a_cancelled_load_closes_nothing_twice() -> None:
    async def never() -> AsyncModel:
        await asyncio.sleep(1000)
        raise ApiError(500, "server_error", "not reached")

    with server(load=never) as client:
        assert client.get("/health").status_code == 503


# --- slow clients ---


@contextmanager
def listening(settings: Settings, app: Any = None) -> Iterator[Callable[[], socket.socket]]:
    """Gives connections to a real server."""
    app = create_app(settings, at_once) if app is None else app
    config = uvicorn.Config(app, http=protocol.limited_protocol(settings.header_timeout_s), log_config=None, access_log=False,
                            ws="none", lifespan="on", timeout_keep_alive=round(settings.idle_timeout_s))  # fmt: skip
    running, listener = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=running.run, args=([listener],), daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.01)

    def connect() -> socket.socket:
        return socket.create_connection(listener.getsockname(), timeout=30)

    try:
        yield connect
    finally:
        running.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def rest(connection: socket.socket) -> bytes:
    data = b""
    try:
        while part := connection.recv(65536):
            data += part
    except ConnectionResetError:  # what was sent was not all read
        pass
    return data


SOON = Settings(header_timeout_s=0.2, body_timeout_s=0.2, idle_timeout_s=1, access_log=False)


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: "])
def test_headers_that_do_not_come(sent: bytes) -> None:
    with listening(SOON) as connect, connect() as connection:
        connection.sendall(sent)
        assert rest(connection) == b""


def test_headers_of_a_second_request_that_do_not_come() -> None:
    with listening(SOON) as connect, connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea")
        assert rest(connection).count(b"HTTP/1.1 200") == 1


def test_headers_without_an_end() -> None:
    with listening(Settings(access_log=False)) as connect, connect() as connection:
        line = b"X-Filler: " + b"x" * 1000 + b"\r\n"
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + line * 60)
        with pytest.raises(OSError):
            for _ in range(1000):
                connection.sendall(line)
                time.sleep(0.001)
            raise AssertionError("it takes headers without an end")


def test_a_body_that_does_not_come() -> None:
    with listening(SOON) as connect, connect() as connection:
        connection.sendall(b'POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"content"')
        head, _, body = rest(connection).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head.lower()
        assert json.loads(body)["error"]["type"] == "timeout_error"


def test_a_client_that_leaves_in_the_middle_of_its_body(caplog: pytest.LogCaptureFixture) -> None:
    app = create_app(Settings(), at_once)
    with caplog.at_level(logging.INFO), listening(Settings(), app) as connect:
        with connect() as connection:
            connection.sendall(b'POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"content"')
            time.sleep(0.2)
        for _ in range(3000):
            if app.state.server.n_by_status:
                break
            time.sleep(0.01)
    assert app.state.server.n_by_status == {499: 1}
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_an_idle_connection_ends_and_a_busy_one_does_not() -> None:
    with listening(Settings(header_timeout_s=0.3, idle_timeout_s=1, access_log=False)) as connect, connect() as connection:
        for _ in range(3):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
            time.sleep(0.4)
        assert rest(connection) == b""


@pytest.mark.parametrize(
    "junk", [b"\r\n" * 5, b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 200, b"GET\r\n\r\n"]
)
def test_what_is_no_http_does_no_harm(junk: bytes) -> None:
    with listening(SOON) as connect:
        with connect() as connection:
            connection.sendall(junk)
            rest(connection)
        with connect() as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert rest(connection).startswith(b"HTTP/1.1 200")
