"""Notices and a progress bar on stderr."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from types import TracebackType
from typing import TextIO

_log = logging.getLogger("lfmfast")


def say(message: str, progress: bool | None = None) -> None:
    """Tell the user something that changes what he gets; `progress` False: only the log."""
    _log.info(message)
    if progress is not False and sys.stderr is not None:
        print(message, file=sys.stderr, flush=True)


def format_bytes(n: float) -> str:
    """
    >>> format_bytes(999), format_bytes(229_100_000), format_bytes(5.04e9)
    ('999 B', '229.1 MB', '5.0 GB')
    """
    for unit in ("B", "kB", "MB"):
        if n < 999.95:
            return f"{n:.0f} B" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} GB"


def format_seconds(s: float) -> str:
    """
    >>> format_seconds(4), format_seconds(75.2), format_seconds(3700)
    ('0:04', '1:15', '1:01:40')
    """
    minutes, seconds = divmod(round(s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Bar:
    """A one-line bar for bytes: share, amount, rate and time left. `show` None: only on a terminal."""

    def __init__(self, label: str, start: int, total: int | None, show: bool | None = None) -> None:
        self._label, self._start, self._done, self._total = label, start, start, total
        self._began = time.monotonic()
        self._drawn = 0.0
        stream = sys.stderr
        self._stream: TextIO | None = stream if show or (show is None and stream is not None and stream.isatty()) else None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._stream and self._drawn:
            self._draw(time.monotonic())
            self._stream.write("\n")
            self._stream.flush()

    def update(self, done: int) -> None:
        self._start = min(self._start, done)  # the server made us start again
        self._done = done
        now = time.monotonic()
        if self._stream and now - self._drawn >= 0.1:
            self._drawn = now
            self._draw(now)

    def _draw(self, now: float) -> None:
        assert self._stream is not None
        rate = (self._done - self._start) / max(now - self._began, 1e-3)
        amount = format_bytes(self._done)
        if self._total:
            left = (self._total - self._done) / rate if rate else 0.0
            timing = f"ETA {format_seconds(left)}" if self._done < self._total else f"in {format_seconds(now - self._began)}"
            amount = f"{100 * self._done // self._total:3d}%  {amount} of {format_bytes(self._total)}"
        else:
            timing = ""
        tail = f"  {amount}  {format_bytes(rate)}/s  {timing}"
        width = shutil.get_terminal_size().columns - 1
        label = self._label if len(self._label) + len(tail) <= width else self._label[: max(width - len(tail) - 1, 0)] + "…"
        fill = min(width - len(label) - len(tail) - 2, 30)
        bar = ""
        if self._total and fill >= 8:
            full = fill * self._done // self._total
            bar = f"  {'━' * full}{'╌' * (fill - full)}"
        self._stream.write(f"\r{label}{bar}{tail}"[: width + 1] + "\033[K")
        self._stream.flush()
