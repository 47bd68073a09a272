"""From the engine having a piece to a Python program having it: latency per piece, and what handing over costs the engine."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

QUESTION = "Write a long story about a small boat that watches the big ships sail away, and then leaves the harbor itself."


class Recorder:
    """A stream's native side that notes when the engine had each piece, and which pieces Python was waiting for."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.ready_us: list[float] = []
        self.awaited: list[int] = []  # of several that come at once, only the last: the others waited for Python to ask

    def wait(self, *arguments: Any) -> Any:
        items = self._native.wait(*arguments)
        if items:
            self.ready_us += [item[-1] for item in items]
            self.awaited.append(len(self.ready_us) - 1)
        return items

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def latencies(self, seen_us: list[float]) -> list[float]:
        """Microseconds, given when the program had each piece."""
        return [seen_us[i] - self.ready_us[i] for i in self.awaited if i < len(seen_us)]


def _result(recorder: Recorder, seen_us: list[float], timings: Any) -> dict[str, float]:
    return {"latency_us": statistics.median(recorder.latencies(seen_us)),
            "emit_us": 1e3 * timings.emit_ms / max(1, timings.predicted_tokens)}


def hand_over(model: Any, n_tokens: int) -> dict[str, float]:
    """Medians of one `Model.stream`."""
    stream = model.stream([{"role": "user", "content": QUESTION}], max_tokens=n_tokens, ignore_eos=True)
    stream._native = recorder = Recorder(stream._native)
    seen = []
    for _ in stream:
        seen.append(time.monotonic_ns() / 1e3)
    return _result(recorder, seen, stream.timings)


def hand_over_async(model_file: str, n_threads: int, n_tokens: int) -> dict[str, float] | None:
    """Medians of one `AsyncModel.stream`; None where this version has none."""
    try:
        from lfmfast.aio import AsyncModel
    except ImportError:
        return None

    async def run() -> dict[str, float]:
        async with AsyncModel(model_file, n_ctx=2048, n_threads=n_threads) as model:
            stream = model.stream([{"role": "user", "content": QUESTION}], max_tokens=n_tokens, ignore_eos=True)
            stream._native = recorder = Recorder(stream._native)
            seen = []
            async for _ in stream:
                seen.append(time.monotonic_ns() / 1e3)
            return _result(recorder, seen, stream.timings)

    return asyncio.run(run())
