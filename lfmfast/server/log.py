"""What the server writes to stderr: the access log, and what goes wrong."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator

from lfmfast.server.state import RequestRecord

__all__ = ["log_request", "logging_to_stderr"]

access = logging.getLogger("lfmfast.access")

#: Lines that may wait to be written, if nobody reads them; further ones are lost rather than held up.
MAX_WAITING = 10_000


def log_request(record: RequestRecord, method: str, path: str) -> None:
    """One line: who asked what, how it ended, and what it cost."""
    if not access.isEnabledFor(logging.INFO):
        return
    facts: dict[str, object] = {
        "id": record.id,
        "method": method,
        "path": path,
        "status": record.status,
        "ms": round((time.perf_counter() - record.began) * 1e3, 1),
    }
    if record.first_token_ms is not None:
        facts |= {
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "predicted_tokens": record.predicted_tokens,
            "first_token_ms": round(record.first_token_ms, 1),
            "tokens_per_second": round(record.tokens_per_second or 0.0, 1),
            "finish_reason": record.finish_reason,
        }
    access.info("request", extra={"facts": facts})


class _Format(logging.Formatter):
    """A line of text, or a JSON object."""

    def __init__(self, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, object] | None = getattr(record, "facts", None)
        if self._as_json:
            when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
            rest = facts if facts is not None else {"message": super().format(record)}
            return json.dumps({"time": when, "level": record.levelname.lower(), "logger": record.name, **rest})
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        if facts is None:
            return f"{when} {record.levelname.lower()}: {super().format(record)}"
        return f"{when} {_line(facts)}"


def _line(f: dict[str, object]) -> str:
    path = str(f["path"]).encode("unicode_escape").decode()  # no line of its own, and no colours
    line = f"{f['id']} {f['method']} {path} {f['status']} {f['ms']} ms"
    if "prompt_tokens" in f:
        line += (
            f" · prompt {f['prompt_tokens']} ({f['cached_tokens']} cached), answer {f['predicted_tokens']} tokens"
            f" · first after {f['first_token_ms']} ms, {f['tokens_per_second']} tok/s · {f['finish_reason']}"
        )
    return line


class _Queue(logging.handlers.QueueHandler):
    """Writing is another thread's work: a terminal or a pipe that nobody reads would hold up the event loop."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        record.msg, record.args = record.getMessage(), None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self.queue.put_nowait(record)


@contextlib.contextmanager
def logging_to_stderr(*, as_json: bool = False, verbose: bool = False) -> Iterator[None]:
    """Logs of lfmfast and of uvicorn go to stderr meanwhile."""
    waiting: queue.Queue[logging.LogRecord | None] = queue.Queue(MAX_WAITING)
    writer = threading.Thread(target=_write, args=(waiting, _Format(as_json)), name="lfmfast-log", daemon=True)
    handler = _Queue(waiting)
    levels = {"lfmfast": logging.WARNING, "lfmfast.server": logging.INFO, "lfmfast.access": logging.INFO,
              "uvicorn": logging.WARNING}  # fmt: skip
    loggers = {logging.getLogger(name): level for name, level in levels.items()}
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    for logger, level in loggers.items():
        is_root = "." not in logger.name
        logger.setLevel(logging.DEBUG if verbose and logger.name != "uvicorn" else level)
        logger.propagate = not is_root
        if is_root:
            logger.addHandler(handler)
    writer.start()
    try:
        yield
    finally:
        for logger, number, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(number)
            logger.propagate = propagate
        with contextlib.suppress(queue.Full):
            waiting.put_nowait(None)
            writer.join(2)


def _write(waiting: queue.Queue[logging.LogRecord | None], format: _Format) -> None:
    # Past sys.stderr and logging's handlers: a thread that waits in them for a reader would hold up the end of the process.
    while (record := waiting.get()) is not None:
        line = format.format(record) + "\n"
        try:
            data = line.encode("utf-8", "replace")
            fd = sys.stderr.fileno()
            while data:
                data = data[os.write(fd, data) :]
        except (OSError, ValueError, AttributeError):  # it is closed, or no file
            with contextlib.suppress(Exception):
                sys.stderr.write(line)
