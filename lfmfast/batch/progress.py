"""How far a batch is, on stderr: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import shutil
import sys
import time

from lfmfast._progress import format_seconds
from lfmfast.batch.run import Counts

__all__ = ["Progress", "summary"]

BAR_S, LINE_S = 0.1, 30.0


def _lines(counts: Counts) -> str:
    n = counts.lines + counts.before
    return f"{n:,} line{'' if n == 1 else 's'}{f' ({counts.failed:,} failed)' if counts.failed else ''}"


def _work(counts: Counts, seconds: float) -> str:
    rate = counts.completion_tokens / max(seconds, 1e-3)
    cached = 100 * counts.cached_tokens // max(counts.prompt_tokens, 1)
    return f"{rate:,.{1 if rate < 100 else 0}f} tok/s, {cached}% of prompts cached"


def summary(counts: Counts, seconds: float) -> str:
    """What was done, in a line.

    >>> summary(Counts(lines=10, failed=1, prompt_tokens=500, cached_tokens=400, completion_tokens=900), 3.0)
    '10 lines (1 failed) in 0:03, 900 tokens written, 300 tok/s, 80% of prompts cached'
    """
    before = f", {counts.before:,} of them earlier" if counts.before else ""
    return f"{_lines(counts)}{before} in {format_seconds(seconds)}, {counts.completion_tokens:,} tokens written, " + _work(
        counts, seconds
    )


class Progress:
    """Call it with the counts after each line.

    Parameters
    ----------
    total : int, optional
        What `Counts.size` comes to, if that is known.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._began = self._said = time.monotonic()
        self._live = sys.stderr.isatty()
        self._drawn = False

    def __call__(self, counts: Counts) -> None:
        now = time.monotonic()
        if now - self._said < (BAR_S if self._live else LINE_S):
            return
        self._said = now
        seconds = now - self._began
        share, left = self._share(counts, seconds)
        text = f"{_lines(counts)}, {_work(counts, seconds)}{left}"
        if not self._live:
            print(f"{'' if share is None else f'{share:.0%}, '}{text}", file=sys.stderr, flush=True)
            return
        width = shutil.get_terminal_size().columns - 1
        bar = ""
        if share is not None:
            fill = min(width - len(text) - 8, 30)
            full = int(fill * share)
            bar = f"{share:4.0%}  " + (f"{'━' * full}{'╌' * (fill - full)}  " if fill >= 8 else "")
        self._drawn = True
        print("\r" + (bar + text)[:width] + "\033[K", end="", file=sys.stderr, flush=True)

    def _share(self, counts: Counts, seconds: float) -> tuple[float | None, str]:
        if not self._total:
            return None, ""
        share, here = min(counts.size / self._total, 1.0), counts.size - counts.size_before
        left = (self._total - counts.size) * seconds / here if here > 0 else 0.0
        return share, f", ETA {format_seconds(left)}" if left > 0 else ""

    def close(self) -> None:
        """Take the bar away."""
        if self._drawn:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began
