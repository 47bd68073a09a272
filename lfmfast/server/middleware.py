"""Gate: what every request goes through before and after its endpoint."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lfmfast.server.body import json_response
from lfmfast.server.errors import to_api_error
from lfmfast.server.state import RequestRecord, ServerState, current_record

__all__ = ["Gate"]


class Gate:
    """Request ids, errors, keys, limits, the access log."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(self._state.new_id("req-"), time.perf_counter())
        token = current_record.set(record)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            if record.status:  # too late to say it otherwise
                raise
            known = to_api_error(error)
            await json_response(known.body(), known.status, known.headers)(scope, receive, sending)
        finally:
            current_record.reset(token)

