"""JSON bodies: read with limits, and written."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lfmfast.server.errors import invalid
from lfmfast.server.state import state_of

__all__ = ["json_bytes", "json_response", "parse_object", "read_object"]

#: A value as UTF-8 JSON; what floats can't say there (NaN, infinities) becomes null.
json_bytes = msgspec.json.Encoder().encode


def parse_object(data: bytes, max_nesting: int) -> dict[str, Any]:
    """The object that a body is.

    Raises
    ------
    ApiError
        400: no JSON, no object, or one that is nested too deep.
    """
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise invalid(f"the body is nested more than {max_nesting} deep") from None
    except (ValueError, msgspec.MsgspecError) as error:  # also for bytes that are no UTF-8, and lone surrogates
        raise invalid(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid(f"the body must be a JSON object, not {_kind(value)}")
    if data.count(b"[") + data.count(b"{") > max_nesting and _is_deeper(value, max_nesting):
        raise invalid(f"the body is nested more than {max_nesting} deep")
    return value


async def read_object(request: Request) -> dict[str, Any]:
    """The object in a request's body; raises as :func:`parse_object`."""
    return parse_object(await request.body(), state_of(request).settings.max_nesting)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(value), status, headers, media_type="application/json")


def _kind(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _is_deeper(value: Any, limit: int) -> bool:
    layer: list[Any] = [value]
    for _ in range(limit):
        inner: list[Any] = []
        for item in layer:
            values = item.values() if isinstance(item, dict) else item
            inner += [v for v in values if isinstance(v, (dict, list))]
        if not inner:
            return False
        layer = inner
    return True
