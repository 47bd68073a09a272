"""How bench.engine shows its numbers, and the targets that they are held to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from bench import report

Runs = dict[str, list[dict[str, Any]]]  # results of each side, one per repeat


@dataclass(frozen=True)
class Verdict:
    """A number and its target."""

    name: str
    value: float
    limit: float
    at_least: bool

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        return (f"{self.name}: {self.value:.3g}, target {'>=' if self.at_least else '<='} {self.limit:g}: "
                f"{'met' if self.met else 'missed'}")


def values(runs: Runs, side: str, key: str) -> list[float]:
    return [run[key] for run in runs[side]]


def middle(runs: Runs, side: str, key: str) -> float:
    return statistics.median(values(runs, side, key))


def servers(runs: Runs) -> list[str]:
    return [side for side in runs if side not in ("ours", "batched-bench")]


def ratios(runs: Runs, key: str, name: str, limit: float, *, smaller_is_better: bool = False) -> Iterator[Verdict]:
    """How many times better our median is than that of each llama-server."""
    for side in servers(runs) if "ours" in runs else ():
        ours, theirs = middle(runs, "ours", key), middle(runs, side, key)
        if smaller_is_better:
            yield Verdict(f"{name}, {side} / ours", theirs / ours, limit, True)
        else:
            yield Verdict(f"{name}, ours / {side}", ours / theirs, limit, True)


def shared(runs: Runs) -> Iterator[Verdict]:
    print("a  system prompt of 1,000 tokens read before; eight questions of 30 tokens at once, 8 tokens each "
          "(min / median / max)")
    for side in runs:
        print(f"  {side:14} {report.spread(values(runs, side, 'wall_s'), 3)} s, prompt tokens processed "
              f"{report.spread(values(runs, side, 'processed'), 0)} of {middle(runs, side, 'prompt'):,.0f}")
    yield from ratios(runs, "wall_s", "wall time", 10, smaller_is_better=True)
    if "ours" in runs:
        yield Verdict("prompt tokens processed, worst run", max(values(runs, "ours", "processed")), 400, False)


def distinct(runs: Runs) -> Iterator[Verdict]:
    print("b  eight distinct prompts of 150 tokens at once, 64 tokens each: tok/s in all; while all eight decode")
    for side in runs:
        in_all = f"{report.spread(values(runs, side, 'rate'))}; " if side != "batched-bench" else "samples nothing; "
        print(f"  {side:14} {in_all}{report.spread(values(runs, side, 'decode_rate'))}")
    yield from ratios(runs, "rate", "tok/s in all", 1.25)
    if "ours" in runs:
        yield Verdict("tok/s while decoding, ours / batched-bench",
                      middle(runs, "ours", "decode_rate") / middle(runs, "batched-bench", "decode_rate"), 0.95, True)


def _turns(runs: Runs, side: str, key: str) -> list[float]:
    return [statistics.median(turn) for turn in zip(*(run[key] for run in runs[side]), strict=True)]


def _chat(runs: Runs, title: str) -> Iterator[Verdict]:
    print(f"c  {title}: prompt tokens processed (time to first token, ms), medians per turn")
    print(f"  {'turn':4} {'new':>5}" + "".join(f" {side:>16}" for side in runs))
    for turn, new in enumerate(_turns(runs, next(iter(runs)), "new")):
        row = "".join(f" {_turns(runs, side, 'processed')[turn]:7.0f} ({_turns(runs, side, 'ttft_ms')[turn]:6.0f})"
                      for side in runs)
        print(f"  {turn + 1:4} {new:5.0f}{row}")
    for side in runs:
        later = [sum(run["ttft_ms"][1:]) for run in runs[side]]
        print(f"  {side:14} time to first token, sum of the later turns {report.spread(later)} ms")
    if "ours" in runs:
        more = [p - n for run in runs["ours"] for p, n in zip(run["processed"], run["new"], strict=True)]
        yield Verdict("prompt tokens processed besides the new ones, worst turn", max(more), 8, False)
        times = _turns(runs, "ours", "ttft_ms")
        yield Verdict("time to first token, last turn / second", times[-1] / times[1], 1.5, False)


def chat(runs: Runs) -> Iterator[Verdict]:
    yield from _chat(runs, "chat of six turns, history sent as text")


def chat_cut(runs: Runs) -> Iterator[Verdict]:
    yield from _chat(runs, "the same, the first half of each past reply cut away")


def single(runs: Runs) -> Iterator[Verdict]:
    print("d  one stream, 128 tokens: tok/s after the first")
    for side in runs:
        print(f"  {side:14} {report.spread(values(runs, side, 'rate'))}")
    yield from ratios(runs, "rate", "tok/s", 1.03)


def stall(runs: Runs) -> Iterator[Verdict]:
    print("e  seven streams, a prompt of 2,000 tokens comes: ms between their tokens until its first token")
    for side in runs:
        print(f"  {side:14} p99 {report.spread(values(runs, side, 'p99_ms'))}, longest "
              f"{report.spread(values(runs, side, 'max_ms'))}; median {middle(runs, side, 'median_ms'):.1f}, before it came "
              f"{middle(runs, side, 'before_ms'):.1f}; its first token after {middle(runs, side, 'ttft_ms'):,.0f}")
    yield from ratios(runs, "p99_ms", "p99 of the time between tokens", 2, smaller_is_better=True)


def hand_over(runs: Runs) -> Iterator[Verdict]:
    print("f  from the engine having a piece to the program having it, medians of a run, us (min / median / max)")
    for kind in ("sync", "async"):
        latencies = [run[kind]["latency_us"] for run in runs["ours"]]
        print(f"  {kind:14} {report.spread(latencies)}; the engine's own cost per token "
              f"{report.spread([run[kind]['emit_us'] for run in runs['ours']])}")
        yield Verdict(f"{kind}, us", statistics.median(latencies), 30, False)


REPORTS: dict[str, Callable[[Runs], Iterator[Verdict]]] = {
    "shared": shared, "distinct": distinct, "chat": chat, "chat-cut": chat_cut, "single": single, "stall": stall,
    "hand-over": hand_over,
}
