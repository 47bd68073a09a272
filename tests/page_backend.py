"""What the chat page talks to in its tests: answers that are known, in pieces that are given out one by one."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lfmfast.server import page

SAMPLING = {"temperature": 0.30000001192, "top_k": 0, "top_p": 1.0, "min_p": 0.15, "repeat_penalty": 1.05, "seed": 4294967295,
            "presence_penalty": 0.0, "frequency_penalty": 0.0, "n_predict": -1}  # fmt: skip


class Backend:
    """Settings of the next answer, and the bodies of the requests that came."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.answer = "Hello."
        self.thoughts = ""
        self.calls: list[tuple[str, str]] = []  # names and arguments
        self.finish_reason = "stop"
        self.pieces = 8  # characters in each
        self.hold_after: int | None = None  # pieces after which the stream waits for ever
        self.cut_after: int | None = None  # pieces after which the connection ends
        self.error: tuple[int, dict[str, Any]] | None = None
        self.late_error: str | None = None
        self.loading = False
        self.key: str | None = None
        self.pause = 0.0
        self.is_gone = threading.Event()  # the client of a held stream has left
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.address = ""

    # -- endpoints ----------------------------------------------------------------------------------------------------

    def _refusal(self, request: Request) -> Response | None:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"code": 401, "message": "Invalid API Key", "type": "authentication_error"}}, 401)
        if self.loading:
            return JSONResponse({"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}, 503)
        return None

    async def props(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse({
            "default_generation_settings": {"params": SAMPLING, "n_ctx": 4096}, "model_alias": "LFM2.5-1.2B-Instruct",
            "model_path": "/models/LFM2.5-1.2B-Instruct-Q4_K_M.gguf",
        })  # fmt: skip

    async def chat(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        if (refusal := self._refusal(request)) is not None:
            return refusal
        if self.error is not None:
            status, error = self.error
            return JSONResponse({"error": {"code": status, **error}}, status)
        return StreamingResponse(self._events(), media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[bytes]:
        def event(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
            chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}
            return f"data: {json.dumps(chunk)}\n\n".encode()

        yield b": awake\n\n"
        yield event({"role": "assistant", "content": None})
        yield event({}, prompt_progress={"total": 1000, "cache": 0, "processed": 400, "time_ms": 9})
        texts = (("reasoning_content", self.thoughts), ("content", self.answer))
        pieces = [(kind, text[i : i + self.pieces]) for kind, text in texts for i in range(0, len(text), self.pieces)]
        for i, (kind, text) in enumerate(pieces):
            if i == self.hold_after:
                try:
                    await asyncio.sleep(3600)
                finally:
                    self.is_gone.set()
            if i == self.cut_after:
                return
            await asyncio.sleep(self.pause)
            yield event({kind: text}, timings={"predicted_n": i + 1, "predicted_per_second": 87.654})
        for i, (name, arguments) in enumerate(self.calls):
            yield event({"tool_calls": [{"index": i, "id": f"call_{i}", "type": "function",
                                         "function": {"name": name, "arguments": ""}}]})  # fmt: skip
            for letter in arguments:
                yield event({"tool_calls": [{"index": i, "function": {"arguments": letter}}]})
        if self.late_error is not None:
            error = {"code": 500, "message": self.late_error, "type": "server_error"}
            yield f"data: {json.dumps({'error': error})}\n\n".encode()
            return
        n = len(pieces)
        yield event({}, self.finish_reason, timings={"predicted_n": n, "predicted_per_second": 87.654})
        usage = {"prompt_tokens": 30, "completion_tokens": n, "total_tokens": 30 + n,
                 "prompt_tokens_details": {"cached_tokens": 12}}  # fmt: skip
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode()

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        routes = [*page.ROUTES, Route("/props", self.props), Route("/v1/chat/completions", self.chat, methods=["POST"])]
        config = uvicorn.Config(Starlette(routes=routes), host="127.0.0.1", port=0, log_level="error", lifespan="off",
                                timeout_graceful_shutdown=0)  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        for _ in range(500):
            if self._server.started:
                break
            time.sleep(0.02)
        self.address = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        assert self._server is not None and self._thread is not None
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)


def until(page: Any, expression: str) -> None:
    """Wait until it is true. Playwright's own wait_for_function asks the page to evaluate a text, which its policy forbids."""
    for _ in range(600):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"never: {expression}")


class Seen:
    """A page, what it asked other hosts for, and what went wrong in it."""

    def __init__(self, browser: Any, backend: Backend, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1000, "height": 700}, **options})
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.foreign: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda said: self.errors.append(said.text) if "Content Security Policy" in said.text else None)
        self.page.on("dialog", lambda dialog: (self.errors.append("a dialog opened"), dialog.dismiss()))
        self.page.on("request", lambda request: self.foreign.append(request.url)
                     if not request.url.startswith((backend.address, "data:")) else None)  # fmt: skip
        self.page.goto(backend.address)

    def ready(self) -> Any:
        self.page.wait_for_selector("#state[data-state=ready]")
        return self.page

    def ask(self, text: str = "Hi") -> None:
        self.page.fill("#input", text)
        self.page.press("#input", "Enter")

    def ended(self) -> None:
        self.page.wait_for_selector("#send:visible")

    @property
    def answer(self) -> Any:
        return self.page.locator(".message.assistant .body > .markdown").last
