"""GET /openapi.json: a description of all endpoints, for people's tools and for tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

import lfmfast
from lfmfast.server.body import json_response
from lfmfast.server.middleware import PUBLIC
from lfmfast.server.openapi.answers import ANSWERS
from lfmfast.server.openapi.operations import OPERATIONS, STATUSES, Operation
from lfmfast.server.openapi.requests import BODIES
from lfmfast.server.openapi.schema import STRING, Schema, const, either, obj, ref
from lfmfast.server.state import state_of

__all__ = ["ROUTES", "describe"]


def describe(routes: Iterable[BaseRoute], *, has_keys: bool = False) -> dict[str, Any]:
    """The OpenAPI 3.1 description of a server.

    Parameters
    ----------
    routes : iterable of Route
        Of the application. Their paths and methods are described; several paths of one endpoint are one description.
    has_keys : bool
        Whether requests need an API key.

    Examples
    --------
    >>> from lfmfast.server.app import routes
    >>> from lfmfast.server.settings import Settings
    >>> sorted(describe(routes(Settings()))["paths"]["/props"])
    ['get', 'post']
    """
    paths: dict[str, Any] = {}
    first: dict[Any, str] = {}
    for route in routes:
        assert isinstance(route, Route)
        path = route.path.replace(":path}", "}")
        same = first.setdefault(route.endpoint, path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation = _DESCRIPTION if route.endpoint is description else OPERATIONS[route.endpoint][method]
            described = _operation(operation, has_keys and path not in PUBLIC)
            described["operationId"] = f"{method.lower()}{path.translate(_NO_MARKS)}"
            if same != path:
                described["description"] = f"The same as {same}."
            paths.setdefault(path, {})[method.lower()] = described
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "lfmfast serve", "version": lfmfast.__version__, "license": {"name": "MIT", "identifier": "MIT"}},
        "paths": paths,
        "components": {"schemas": BODIES | ANSWERS},
    }
    if has_keys:
        found["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return found


_NO_MARKS = str.maketrans({"/": "_", "{": "", "}": "", "-": "_", ".": "_"})


def _operation(operation: Operation, needs_key: bool) -> dict[str, Any]:
    takes_body = operation.body is not None
    always = (503, *((400, 408, 413) if takes_body else (400,) if operation.parameters else ()), *((401,) if needs_key else ()))
    error = {"content": {"application/json": {"schema": ref(operation.error)}}}
    found: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {"200": {"description": "The answer.", "content": _content(operation)}},
    }
    for status in sorted({*always, *operation.errors}):
        found["responses"][str(status)] = {"description": STATUSES[status], **(error if status >= 400 else {})}
    if needs_key:
        found["security"] = [{"bearer": []}, {"x-api-key": []}]
    if operation.parameters:
        found["parameters"] = list(operation.parameters)
    if operation.body is not None:
        content = {"application/json": {"schema": ref(operation.body)}}
        found["requestBody"] = {"required": operation.body_required, "content": content}
    return found


def _content(operation: Operation) -> Schema:
    if "/" in operation.answer:
        return {operation.answer.partition(";")[0]: {"schema": {"type": "string"}}}
    found: Schema = {"application/json": {"schema": ref(operation.answer)}}
    if operation.event is not None:  # of each event
        inner = {"anyOf": [ref(operation.event), ref(operation.error)]}
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": inner}
        data = either(const("[DONE]"), data) if operation.ends_with_done else data
        found["text/event-stream"] = {"schema": obj({"data": data}, {"event": STRING})}
    return found


_DESCRIPTION = Operation(summary="This description", answer="Description")


async def description(request: Request) -> Response:
    """GET /openapi.json."""
    has_keys = bool(state_of(request).settings.api_keys)
    return json_response(describe(request.app.routes, has_keys=has_keys))


ROUTES = [Route("/openapi.json", description)]
