"""A server in a thread of the test's own process, so that a test can look into it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import uvicorn

from lfmfast import AsyncModel
from lfmfast.server.app import create_app
from lfmfast.server.settings import Settings
from lfmfast.server.state import ServerState


class Live:
    """The application behind uvicorn, at a free port."""

    def __init__(self, path: Path, settings: Settings | None = None, **options: Any) -> None:
        self._options = {"n_ctx": 1024, "n_threads": 1, "n_gpu_layers": 0, "n_parallel": 4, **options}
        self._path = path
        self._app = create_app(settings or Settings(aliases=("tiny",)), self._load)
        config = uvicorn.Config(self._app, log_config=None, access_log=False, ws="none", lifespan="on")
        self._server = uvicorn.Server(config)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    async def _load(self) -> AsyncModel:
        return await AsyncModel.load(self._path, **self._options)

    @property
    def state(self) -> ServerState:
        state: ServerState = self._app.state.server
        return state

    @property
    def model(self) -> Any:
        return self.state.model.model

    def __enter__(self) -> Live:
        self._thread.start()
        until(lambda: self.state.loaded is not None or self.state.failure is not None)
        assert self.state.failure is None
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        """The object that is answered, after a look at the status."""
        answer = self.client.post(path, json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def refusal(self, path: str, body: Any) -> str:
        """Why a body is refused."""
        error = self.post(path, body, 400)["error"]
        assert error["code"] == 400 and error["type"] == "invalid_request_error"
        return str(error["message"])

    def frames(self, path: str, body: Any) -> Iterator[str]:
        """What is behind "data: " in the events of a stream."""
        with self.client.stream("POST", path, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    yield line.removeprefix("data: ")
                else:
                    assert not line or line.startswith(":")

    def chunks(self, path: str, body: Any, done: bool = True) -> list[dict[str, Any]]:
        """The objects in the events; `done`: they end as OpenAI's do."""
        frames = list(self.frames(path, body))
        if done:
            assert frames.pop() == "[DONE]"
        return [json.loads(frame) for frame in frames]

    def leave_after(self, path: str, body: Any, n_bytes: int) -> bytes:
        """Ask, read so many bytes of the answer, and go away without a word."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            client.sendall(head.encode() + data)
            client.settimeout(30)
            seen = b""
            while len(seen) < n_bytes:
                seen += client.recv(4096)
        return seen

    def stats(self) -> dict[str, int]:
        stats: dict[str, int] = self.model.engine.stats()
        return stats


def until(what: Any, seconds: float = 30) -> None:
    """Wait until `what()` is true."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)
