"""The application: routes, life, errors."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from lfmfast.aio import AsyncModel
from lfmfast.server.body import json_response
from lfmfast.server.errors import TYPES, ApiError
from lfmfast.server.middleware import Gate
from lfmfast.server.settings import Settings
from lfmfast.server.sse import DIRECT_SEND
from lfmfast.server.state import ServerState, Slot

__all__ = ["Load", "create_app"]

log = logging.getLogger("lfmfast.server")

Load = Callable[[], Awaitable[AsyncModel]]

#: Modules whose ROUTES are served, in the order in which they are looked at.
MODULES = ("openai", "completion", "system", "slots", "anthropic", "responses", "page", "openapi")


def create_app(settings: Settings, load: Load, *, ended: Callable[[Exception | None], None] | None = None) -> Starlette:
    """The server as an ASGI application.

    Parameters
    ----------
    settings : Settings
    load : callable
        Opens the model; called when the server has begun, which answers 503 until it is done. The model is closed at the end.
    ended : callable, optional
        Called when loading has ended, with the exception if it has failed.
    """
    state = ServerState(settings)

    async def bring_up() -> None:
        try:
            model = await load()
        except Exception as error:
            state.failure = error
            if ended is not None:
                ended(error)
            else:
                log.error("the model could not be loaded: %s", error)
            return
        state.slots = [Slot(i) for i in range(n_slots(model))]
        state.loaded = model
        if ended is not None:
            ended(None)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        loading = asyncio.ensure_future(bring_up())
        try:
            yield
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            model, state.loaded = state.loaded, None
            if model is not None:
                await model.close()

    app = _App(routes=routes(settings), lifespan=lifespan, middleware=[Middleware(Gate, state=state)],
                    exception_handlers={HTTPException: _http_error})  # fmt: skip
    app.state.server = state
    return app


class _App(Starlette):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[DIRECT_SEND] = send
        await super().__call__(scope, receive, send)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, status = request.url.path, error.status_code
    message = {404: f"there is no {path}", 405: f"{path} does not take {request.method}"}.get(status, error.detail)
    known = ApiError(status, TYPES.get(status, "invalid_request_error"), message, headers=dict(error.headers or {}))
    return json_response(known.body(), known.status, known.headers)


def routes(settings: Settings) -> list[BaseRoute]:
    """All endpoints that there are with these settings."""
    found: list[BaseRoute] = []
    for name in MODULES:
        if (name != "page" or settings.page) and importlib.util.find_spec(f"lfmfast.server.{name}") is not None:
            found += importlib.import_module(f"lfmfast.server.{name}").ROUTES
    return found


def n_slots(model: AsyncModel) -> int:
    return model.model.engine.stats()["n_slots"]
