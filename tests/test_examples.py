"""The examples, run as their users run them."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@contextmanager
def service(model: Path, **environment: str) -> Iterator[int]:
    """The service in a process of its own; gives its port. It must end quietly when it is asked to."""
    process = subprocess.Popen([sys.executable, "-m", "uvicorn", "fastapi_service:app", "--port", "0", "--no-access-log"],
                               cwd=EXAMPLES, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                               env={**os.environ, "MODEL": str(model), "N_CTX": "2048", **environment})  # fmt: skip
    lines: list[str] = []
    found = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if "running on" in line:
                found.set()
        found.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert found.wait(120)
        port = re.search(r"running on \S+:(\d+)", "".join(lines))
        assert port, "".join(lines)
        yield int(port[1])
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            reader.join()
            assert process.stderr is not None
            process.stderr.close()
    noise = [line for line in lines if not line.startswith("INFO:")]
    assert not noise, "".join(noise)


def ask(port: int, content: str, **options: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **options}
    connection.request("POST", "/chat", json.dumps(body), {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def health(port: int) -> dict[str, int]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/health")
    found: dict[str, int] = json.load(connection.getresponse())
    connection.close()
    return found


def wait_for(port: int, **expected: int) -> None:
    end = time.monotonic() + 60
    while (seen := health(port)) != {**seen, **expected}:
        assert time.monotonic() < end, seen
        time.sleep(0.01)


def test_answers(lfm2_tiny_path: Path) -> None:
    with service(lfm2_tiny_path) as port:
        connection, response = ask(port, "What is the capital of France?")
        assert (response.status, response.getheader("Content-Type")) == (200, "text/event-stream; charset=utf-8")
        seen = list(events(response))
        connection.close()
        assert "".join(e.get("text", "") for e in seen) == "The capital of France is Paris."
        assert len(seen) > 3 and seen[-1]["finish_reason"] == "stop"
        connection, response = ask(port, "word " * 4000)
        assert response.status == 422 and "4" in json.load(response)["detail"]
        connection.close()


@pytest.mark.slow
def test_disconnects_deadlines_and_a_full_queue(slow_model_path: Path) -> None:
    long = "Tell me all about it. " * 60
    with service(slow_model_path, N_PARALLEL="1", N_QUEUE="1") as port:
        first, response = ask(port, "Hello", max_tokens=1900)
        assert "text" in next(events(response))
        second, _ = ask(port, long, max_tokens=1)
        wait_for(port, n_running=1, n_queued=1)
        third, refused = ask(port, "Hello")
        assert (refused.status, refused.getheader("Retry-After")) == (503, "1")
        for connection in (third, second):
            connection.close()
        wait_for(port, n_running=1, n_queued=0)  # the second left the queue when its client left
        first.close()
        response.close()
        wait_for(port, n_running=0, n_queued=0)

        reading, response = ask(port, long, max_tokens=1900)  # its status is sent, and nothing else yet
        wait_for(port, n_running=1)
        reading.close()
        response.close()
        wait_for(port, n_running=0)

        late, response = ask(port, long + "!", deadline_ms=1)
        assert [e.get("error") for e in events(response)] == ["DeadlineError"]
        late.close()
        last, response = ask(port, "Hello", max_tokens=2)
        assert list(events(response))[-1]["completion_tokens"] == 2
        last.close()


@pytest.mark.parametrize(("question", "shown"), [
    ("What is 3 plus 4?", ["  add(a=3, b=4)", "3 plus 4 is 7."]),
    ("What is the weather in Paris and Rome?", ["  get_weather(city='Paris')", "  get_weather(city='Rome')",
                                                "It is 21 degrees and sunny in Paris and 28 degrees and sunny in Rome."]),
])  # fmt: skip
def test_tools(lfm2_tiny_path: Path, question: str, shown: list[str]) -> None:
    environment = {**os.environ, "MODEL": str(lfm2_tiny_path)}
    done = subprocess.run([sys.executable, "tools.py", question], cwd=EXAMPLES, env=environment,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert (done.stdout.splitlines(), done.stderr, done.returncode) == (shown, "", 0)
