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
        self.first: tuple[int, ...] = ()  # tokens of the first piece noted; a piece may have come before this was put in place
        self.ready_us: list[float] = []
        self.awaited: list[int] = []  # of several that come at once, only the last: the others waited for Python to ask

    def wait(self) -> Any:
        return self._note(self._native.wait())

    def poll(self) -> Any:
        return self._note(self._native.poll())

    def _note(self, items: Any) -> Any:
        if items:
            self.first = self.first or items[0][1]
            self.ready_us += [item[-1] for item in items]
            self.awaited.append(len(self.ready_us) - 1)
        return items

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def result(self, seen: list[tuple[tuple[int, ...], float]], timings: Any) -> dict[str, float]:
        """Median latency, given each piece's tokens and when the program had it; and the engine's cost per token."""
        before = next(i for i, (tokens, _) in enumerate(seen) if tokens == self.first)
        times = [us for _, us in seen[before:]]
        latencies = [times[i] - self.ready_us[i] for i in self.awaited if i < len(times)]
        return {"latency_us": statistics.median(latencies), "emit_us": 1e3 * timings.emit_ms / max(1, timings.predicted_tokens)}


def hand_over(model: Any, n_tokens: int) -> dict[str, float]:
    """Medians of one `Model.stream`."""
    stream = model.stream([{"role": "user", "content": QUESTION}], max_tokens=n_tokens, ignore_eos=True)
    stream._native = recorder = Recorder(stream._native)
    seen = []
    for piece in stream:
        seen.append((piece.tokens, time.monotonic_ns() / 1e3))
    return recorder.result(seen, stream.timings)


def hand_over_async(model: Any, n_tokens: int) -> dict[str, float]:
    """Medians of one `AsyncModel.stream`."""
    from lfmfast.aio import AsyncModel

    async def run() -> dict[str, float]:
        stream = AsyncModel(model).stream([{"role": "user", "content": QUESTION}], max_tokens=n_tokens, ignore_eos=True)
        stream._request.native = recorder = Recorder(stream._request.native)  # type: ignore[assignment]
        seen = []
        async for piece in stream:
            seen.append((piece.tokens, time.monotonic_ns() / 1e3))
        return recorder.result(seen, stream.timings)

    return asyncio.run(run())
