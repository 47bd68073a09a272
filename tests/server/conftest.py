"""A live `lfmfast serve`, in a process of its own."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import needs
import pytest
from page_backend import Backend, Seen


class Live:
    """A server that runs. Requests of its own go through http.client: what a test sends is what the server gets."""

    def __init__(self, model: Path, *flags: str, **environment: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        command = [sys.executable, "-m", "lfmfast", "serve", "-m", str(model), "--port", str(self.port), "-ngl", "0", *flags]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (as long as the server runs)
        # In this folder, so that `-m lfmfast` finds the installed package.
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
                                        cwd=Path(__file__).parent, env={**os.environ, **environment})  # fmt: skip
        self.url = f"http://127.0.0.1:{self.port}"

    def wait(self, timeout_s: float = 60) -> None:
        """Until the model is loaded."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not start: {self.log()}", pytrace=False)
            time.sleep(0.02)

    def log(self) -> str:
        """What it wrote to stdout and stderr so far."""
        self._log.seek(0)
        text = self._log.read()
        self._log.seek(0, os.SEEK_END)
        return text

    def request(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None,
                timeout_s: float = 60) -> tuple[int, dict[str, str], bytes]:  # fmt: skip
        """Status, headers with lower-case names, and body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, Any]:
        status, _, body = self.request("GET", path)
        return status, json.loads(body)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Send JSON, read JSON."""
        status, _, answer = self.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json",
                                                                                   **(headers or {})})  # fmt: skip
        return status, json.loads(answer)

    def stop(self, timeout_s: float = 40) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        return self.process.returncode

    def close(self) -> None:
        self.stop()
        self._log.close()


@contextmanager
def serving(model: Path, *flags: str, **environment: str) -> Iterator[Live]:
    """A server, started and stopped; it must still be alive at the end, and end well."""
    server = Live(model, *flags, **environment)
    try:
        server.wait()
        yield server
        assert server.process.poll() is None, f"the server ended: {server.log()[-5000:]}"
        assert server.stop() == 0, server.log()[-5000:]
        _, found, fault = server.log().partition("Traceback")
        assert not found, fault[:5000]
    finally:
        server.close()


@pytest.fixture(scope="session")
def serve() -> Callable[..., Any]:
    """`with serve(model, *flags) as server`."""
    return serving


@pytest.fixture(scope="session")
def live(lfm2_tiny_path: Path) -> Iterator[Live]:
    """The trained tiny model, served with llama-server's defaults for a chat."""
    with serving(lfm2_tiny_path, "-np", "4", "--ctx-per-slot", "2048", "-t", "1", "--metrics") as server:
        yield server


# --- the chat page ---

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")


@pytest.fixture(scope="module")  # while it is there, no other event loop can run
def browser() -> Iterator[Any]:
    from playwright import sync_api

    with sync_api.sync_playwright() as playwright:
        path = needs.program(*BROWSERS, playwright.chromium.executable_path)  # the last is what `playwright install` fetches
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def backend() -> Iterator[Backend]:
    backend = Backend()
    backend.start()
    yield backend
    backend.stop()


@pytest.fixture
def seen(browser: Any, backend: Backend) -> Iterator[Seen]:
    seen = Seen(browser, backend)
    yield seen
    errors, foreign = seen.errors, seen.foreign
    seen.context.close()
    assert errors == []
    assert foreign == []
