"""GET /: the chat page. One answer with everything in it: it asks nothing of any other host."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

__all__ = ["ROUTES", "chat_page"]

_LINK = re.compile(r'<link rel="stylesheet" href="([\w.]+)">|<script src="([\w.]+)"></script>')


class _Page(NamedTuple):
    body: bytes
    headers: dict[str, str]


def _file(name: str) -> str:
    return resources.files(__package__).joinpath("page", name).read_text("utf8")


@functools.cache
def _page() -> _Page:
    """index.html with its style and scripts put into it.

    The policy names them by their hashes, so that nothing else runs, even if a model's answer found a way into the page.
    """
    hashes: dict[str, list[str]] = {"style": [], "script": []}

    def put(match: re.Match[str]) -> str:
        kind = "style" if match[1] else "script"
        text = _file(match[1] or match[2])
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
        return f"<{kind}>{text}</{kind}>"

    body = _LINK.sub(put, _file("index.html")).encode()
    policy = {
        "default-src": ["'none'"], "script-src": hashes["script"], "style-src": hashes["style"], "connect-src": ["'self'"],
        "img-src": ["data:"], "base-uri": ["'none'"], "form-action": ["'none'"], "frame-ancestors": ["'none'"],
    }  # fmt: skip
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {' '.join(values)}" for name, values in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    }
    return _Page(body, headers)


async def chat_page(request: Request) -> Response:
    """The page, or 304 if the browser has it."""
    page = _page()
    if request.headers.get("If-None-Match") == page.headers["ETag"]:
        return Response(status_code=304, headers=page.headers)
    return Response(page.body, media_type="text/html", headers=page.headers)


ROUTES = [Route("/", chat_page), Route("/index.html", chat_page)]
