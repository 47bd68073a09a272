"""A small HTTP server that speaks the Hub's protocol as huggingface_hub uses it, and can be told to misbehave."""

from __future__ import annotations

import hashlib
import http.server
import json
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

REPO = "Liquid/Tiny-GGUF"


@dataclass
class FakeHub:
    """What the server has, what it should do wrong, and what it was asked."""

    files: dict[str, bytes]
    url: str = ""
    commit: str = "1234567890abcdef1234567890abcdef12345678"
    token: str | None = None
    status: int = 200
    code: str = ""
    cut_after: list[int] = field(default_factory=list)  # bytes of the body before the connection is cut, one per request
    ranges: bool = True
    damage: bool = False
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)

    def seen(self, method: str, part: str = "") -> list[dict[str, str]]:
        return [headers for m, path, headers in self.requests if m == method and part in path]


def make_handler(fake: FakeHub) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def answer(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"", cut: int | None = None) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body if cut is None else body[:cut])
            if cut is not None:
                self.close_connection = True

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            fake.requests.append((self.command, path, {k.lower(): v for k, v in self.headers.items()}))
            if path.startswith("/cdn/"):
                self.cdn(path.removeprefix("/cdn/"))
            elif fake.token and self.headers.get("Authorization") != f"Bearer {fake.token}":
                self.answer(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            elif fake.status != 200:
                self.answer(fake.status, {"X-Error-Code": fake.code} if fake.code else {})
            elif path.startswith(f"/api/models/{REPO}/revision/"):
                if path.rpartition("/")[2] not in ("main", fake.commit):
                    self.answer(404, {"X-Error-Code": "RevisionNotFound"})
                    return
                body = {"id": REPO, "sha": fake.commit, "siblings": [{"rfilename": name} for name in fake.files]}
                self.answer(200, {"Content-Type": "application/json"}, json.dumps(body).encode())
            elif path.startswith((f"/{REPO}/resolve/{fake.commit}/", f"/{REPO}/resolve/main/")):
                name = path.split("/", 5)[5]
                data = fake.files[name]
                headers = {"X-Repo-Commit": fake.commit, "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"'}
                headers |= {
                    "X-Linked-Size": str(len(data)),
                    "Location": fake.url.replace("127.0.0.1", "localhost") + f"/cdn/{name}",
                }
                self.answer(302, headers)
            else:
                self.answer(404, {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def cdn(self, name: str) -> None:
            data = fake.files[name][::-1] if fake.damage else fake.files[name]
            status, start = 200, 0
            if fake.ranges and (span := self.headers.get("Range")):
                status, start = 206, int(span.removeprefix("bytes=").rstrip("-"))
                if start >= len(data):
                    self.answer(416)
                    return
            cut = fake.cut_after.pop(0) if fake.cut_after else None
            self.answer(status, {"Accept-Ranges": "bytes"}, data[start:], cut)

    return Handler


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is part of the tests."""
