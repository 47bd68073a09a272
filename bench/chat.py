"""Decode speed of `chat.stream` against llama-bench on the same file, threads and build flags.

    python -m bench.chat [--shape 350M] [--threads N] [--repeats 5]

Each side runs in a process of its own, in turns. llama-bench decodes tokens without sampling any or making text of them;
chat.stream samples with the model's default parameters, detokenises, and hands pieces to Python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import modelgen

from bench import peers, report

QUESTION = "Write a long story about a small boat that watches the big ships sail away, and then leaves the harbor itself."


class Recorder:
    """A stream's native side, with the time from the engine's hand-over of a piece to Python having it."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.hand_over_us: list[float] = []

    def wait(self) -> Any:
        items = self._native.wait()
        if items:  # of several, the last one: the others waited for Python to ask
            self.hand_over_us.append(time.monotonic_ns() / 1e3 - items[-1][-1])
        return items

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)


def worker(model_file: str, n_threads: int, n_tokens: int, greedy: bool) -> dict[str, Any]:
    """One measurement of ours: tokens per second as a user of the Python API sees them, and the engine's split."""
    from lfmfast import Model

    sampling = {"temperature": 0.0, "repeat_penalty": 1.0} if greedy else {}
    with Model(model_file, n_ctx=2048, n_threads=n_threads) as model:
        chat = model.chat()
        chat.send("Hello", max_tokens=8, **sampling)  # llama-bench warms up too: weights and buffers are touched
        chat.reset()
        last, begin, n_seen = None, 0.0, 0
        stream = chat.stream(QUESTION, max_tokens=n_tokens, **sampling)
        stream._native = recorder = Recorder(stream._native)
        for piece in stream:
            if not begin and piece.tokens:
                begin, n_seen = time.perf_counter(), -len(piece.tokens)
            n_seen += len(piece.tokens)
            last = piece
        seconds = time.perf_counter() - begin
    t = last.timings
    parts = ("predicted", "decode", "sample", "text", "emit")
    per_token = {name: 1e3 * getattr(t, f"{name}_ms") / (t.predicted_tokens - 1) for name in parts}
    per_token["hand-over"] = statistics.median(recorder.hand_over_us)
    per_token["outside"] = statistics.median(recorder.outside_us)
    return {"rate": n_seen / seconds, "engine_rate": t.predicted_per_second, "tokens": t.predicted_tokens,
            "finish_reason": last.finish_reason, "us_per_token": per_token}


def ours(model_file: Path, n_threads: int, n_tokens: int, greedy: bool) -> dict[str, Any]:
    """Run `worker` in a process of its own."""
    command = [sys.executable, "-m", "bench.chat", "--worker", str(model_file), "--threads", str(n_threads), "-n",
               str(n_tokens), *(["--greedy"] * greedy)]
    done = subprocess.run(command, cwd=Path(__file__).resolve().parent.parent, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True)
    if done.returncode:
        raise SystemExit(f"lfmfast failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if result["tokens"] < n_tokens:
        raise SystemExit(f"only {result['tokens']} of {n_tokens} tokens were generated ({result['finish_reason']})")
    return result


def theirs(model_file: Path, n_threads: int, n_tokens: int) -> float:
    """Tokens per second of llama-bench's tg test."""
    command = [peers.program("llama-bench"), "-m", model_file, "-p", 0, "-n", n_tokens, "-t", n_threads, "-r", 1, "-o", "json"]
    done = subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"llama-bench failed with status {done.returncode}:\n{done.stderr[-2000:]}")
    return float(json.loads(done.stdout)[0]["avg_ts"])


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="350M", choices=modelgen.SHAPES)
    parser.add_argument("--quant", default="Q4_K_M", choices=modelgen.oracle.FTYPES)
    parser.add_argument("--model", type=Path, help="a GGUF instead of a generated one")
    parser.add_argument("--threads", type=int, default=report.cpu_count())
    parser.add_argument("-n", "--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--greedy", action="store_true", help="temperature 0 and no penalty, instead of the model's defaults")
    parser.add_argument("--check", type=float, metavar="RATIO", help="exit with status 1 when the median ratio is below")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        print(json.dumps(worker(args.worker, args.threads, args.tokens, args.greedy)))
        return 0
    import lfmfast

    model_file = args.model or modelgen.bench_model(args.shape, args.quant)
    peers.program("llama-bench")
    print(f"machine    {report.machine()}")
    print(f"model      {report.file(model_file)}")
    print(f"run        {args.threads} threads, {args.tokens} tokens, {args.repeats} repeats in turns")
    print(f"lfmfast    {json.dumps(lfmfast.build_info())}")
    print(f"peer       llama-bench of the same source, {' '.join(peers.flags())}")
    their_rates, our_runs = [], []
    for turn in range(args.repeats + 1):
        pair = [lambda: their_rates.append(theirs(model_file, args.threads, args.tokens)),
                lambda: our_runs.append(ours(model_file, args.threads, args.tokens, args.greedy))]
        for measure in pair if turn % 2 else reversed(pair):
            measure()
        print(f"  {'warm-up, not counted' if not turn else f'turn {turn}'}: llama-bench {their_rates[-1]:.1f}, "
              f"chat.stream {our_runs[-1]['rate']:.1f} tok/s", flush=True)
    their_rates, our_runs = their_rates[1:], our_runs[1:]
    rates = [run["rate"] for run in our_runs]
    ratio = statistics.median(rates) / statistics.median(their_rates)
    print(f"llama-bench tg{args.tokens}    {report.spread(their_rates)} tok/s (min / median / max)")
    print(f"chat.stream         {report.spread(rates)} tok/s, {'greedy' if args.greedy else 'default sampling'}")
    turns = [a / b for a, b in zip(rates, their_rates, strict=True)]
    print(f"ratio of medians    {ratio:.3f}; per turn {report.spread(turns, 3)}")
    us = {name: statistics.median([run["us_per_token"][name] for run in our_runs]) for name in our_runs[0]["us_per_token"]}
    print(f"per token, mean     {us['predicted']:.0f} us: llama_decode {us['decode']:.0f}, sampling {us['sample']:.1f}, "
          f"detokenising and stop strings {us['text']:.1f}, hand-over {us['emit']:.1f}")
    print(f"per token, median   {us['outside']:.0f} us outside llama_decode; "
          f"Python has the piece {us['hand-over']:.0f} us after the hand-over")
    return 0 if args.check is None or ratio >= args.check else 1


if __name__ == "__main__":
    sys.exit(main())
