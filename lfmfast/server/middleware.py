"""Gate: what every request goes through before and after its endpoint."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lfmfast.server.body import json_response
from lfmfast.server.errors import ApiError, to_api_error, unavailable
from lfmfast.server.log import log_request
from lfmfast.server.settings import Settings
from lfmfast.server.state import RequestRecord, ServerState, current_record

__all__ = ["PUBLIC", "Gate"]

#: Answered without a key. The page asks for one itself.
PUBLIC = frozenset({"/", "/index.html", "/openapi.json", "/health", "/v1/health"})
#: Answered without a model: the page shows that it is being loaded.
ALWAYS = frozenset({"/", "/index.html", "/openapi.json"})

#: nginx's status of a request whose client went away; only in the log.
CLIENT_GONE = 499

Header = tuple[bytes, bytes]


class Gate:
    """Request ids, keys, CORS, limits, errors, the access log."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._settings = state.settings
        self._keys = [_digest(key.encode()) for key in state.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict[bytes, bytes](scope["headers"])
        record = RequestRecord(f"req-{secrets.token_hex(8)}", time.perf_counter())
        added: list[Header] = [(b"x-request-id", record.id.encode()), *cors_headers(self._settings, headers.get(b"origin"))]
        token = current_record.set(record)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        try:
            if scope["method"] == "OPTIONS":  # browsers send no key with it
                await _preflight(headers, sending)
                return
            self._check(scope, headers)
            await self._app(scope, self._limited(headers, receive), sending)
        except ClientDisconnect:
            record.status = record.status or CLIENT_GONE
        except Exception as error:
            known = to_api_error(error)
            if record.status:  # too late to say it; the connection is cut, so that the client sees that this is not all
                raise
            await json_response(known.body(), known.status, known.headers)(scope, receive, sending)
        finally:
            current_record.reset(token)
            self._state.count_request(record)
            if self._settings.access_log:
                log_request(record, scope["method"], scope["path"])

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Whether the request may go on to an endpoint."""
        path: str = scope["path"]
        if self._keys and path not in PUBLIC and not self._has_key(headers):
            raise ApiError(401, "authentication_error", "Invalid API Key")
        if path in ALWAYS:
            return
        if self._state.draining:
            error = unavailable("the server is shutting down", 5)
            error.headers["Connection"] = "close"
            raise error
        _ = self._state.model

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        given = headers.get(b"authorization") or headers.get(b"x-api-key", b"")
        if given[:7].lower() == b"bearer ":
            given = given[7:]
        seen = _digest(given.strip())
        # All are compared, and digests of one length: the time tells nothing about the keys.
        return sum(hmac.compare_digest(seen, key) for key in self._keys) > 0

    def _limited(self, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """Receive a body of at most so many bytes, from a client that does not pause for too long."""
        limit = self._settings.max_body_bytes
        if (length := headers.get(b"content-length", b"0")).isdigit() and int(length) > limit:
            raise _too_large(limit)
        n_bytes, complete = 0, False

        async def limited() -> Message:
            nonlocal n_bytes, complete
            if complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self._settings.body_timeout_s)
            except asyncio.TimeoutError:
                raise ApiError(408, "timeout_error", "the rest of the body did not come in time",
                               headers={"Connection": "close"}) from None  # fmt: skip
            n_bytes += len(message.get("body", b""))
            if n_bytes > limit:
                raise _too_large(limit)
            complete = not message.get("more_body", False)
            return message

        return limited


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "invalid_request_error", f"the body has more than {limit} bytes", headers={"Connection": "close"})


async def _preflight(headers: dict[bytes, bytes], send: Send) -> None:
    answer = [(b"content-length", b"0")]
    if b"origin" in headers:
        answer += [
            (b"access-control-allow-credentials", b"true"),
            (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
            (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"*")),
            (b"access-control-max-age", b"600"),
        ]
    await send({"type": "http.response.start", "status": 200, "headers": answer})
    await send({"type": "http.response.body", "body": b""})


def cors_headers(settings: Settings, origin: bytes | None) -> list[Header]:
    """What tells a browser that a page of this origin may read the answer."""
    if origin is None:
        return []
    allowed = settings.cors_origins
    known = origin.decode("latin-1")
    if allowed == "*" or (_is_local(known) if allowed == "localhost" else known in allowed.split(",")):
        return [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]
    return [(b"vary", b"Origin")]


def _is_local(origin: str) -> bool:
    try:
        return urlsplit(origin).hostname in ("localhost", "127.0.0.1", "::1")
    except ValueError:
        return False
