"""`lfmfast serve` against llama-server: the same flags, the same requests, over HTTP.

    python -m bench.server [--only a,b] [--repeats 3] [--json FILE]

    a  1 client, 8 clients, 32 clients, distinct prompts, streamed     time to first token, tokens per second
    b  eight questions to one system prompt that was read before       time to first token, wall time
    c  CPU time of a streamed token, one thread computing              microseconds besides the thread that computes

Each measurement starts its server anew, in a process of its own, warmed up; the sides take turns. Both have as many slots as
there are clients, and `/v1/chat/completions` is asked with LFM2.5's sampling, written out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import modelgen
import psutil

from bench import engine_sides as sides
from bench import peers, report
from bench.engine_report import Runs, Verdict, middle, values
from bench.engine_scenarios import ask_all, text, wall
from bench.words import Words, word_list, words_model

N_CTX = 2048  # tokens of a slot
N_PROMPT, N_TOKENS = 150, 64
N_CLIENTS = {"1 client": 1, "8 clients": 8, "32 clients": 32, "shared": 8, "cpu": 8}
LETTERS = {"a": ["1 client", "8 clients", "32 clients"], "b": ["shared"], "c": ["cpu"]}
SIDES = {"ours": [sys.executable, "-m", "lfmfast", "serve"], "llama-server": []}


def conversations(scenario: str, words: Words, rng: Random) -> list[Any]:
    """One per client, and for "shared" one that is read before."""
    n = N_CLIENTS[scenario]
    if scenario == "shared":
        system = {"role": "system", "content": text(words, rng, 1000)}
        return [[system, {"role": "user", "content": text(words, rng, 30)}] for _ in range(n + 1)]
    return [[{"role": "user", "content": text(words, rng, N_PROMPT)}] for _ in range(n)]


def cpu_times(pid: int) -> dict[int, tuple[float, float]]:
    """CPU seconds of each thread, on Linux to the nanosecond, and those of them in the system, in steps of 10 ms."""
    times = {}
    for thread in psutil.Process(pid).threads():
        total, exact = thread.user_time + thread.system_time, Path(f"/proc/{pid}/task/{thread.id}/schedstat")
        with contextlib.suppress(OSError):
            total = int(exact.read_text().split()[0]) / 1e9
        times[thread.id] = total, thread.system_time
    return times


def worker(args: argparse.Namespace) -> dict[str, Any]:
    """One measurement of one side."""
    asked, n = json.load(sys.stdin), N_CLIENTS[args.scenario]
    threads = 1 if args.scenario == "cpu" else args.threads
    options = ["-np", str(n), *shlex.split(args.server_args if args.worker != "ours" else "")]
    side = sides.Server(str(args.model), threads, options, n * N_CTX, SIDES[args.worker])
    try:
        for request in [side.ask([{"role": "user", "content": "hello"}], 4) for _ in range(n)]:
            request.read()
        if args.scenario == "shared":
            side.ask(asked[0], 8).read()
            asked = asked[1:]
        before = cpu_times(side.pid)
        done = ask_all(side, asked, N_TOKENS)
        after = cpu_times(side.pid)
        gone = [before.get(thread, (0.0, 0.0)) for thread in after]
        spent = sorted(((now[0] - then[0], now[1] - then[1]) for now, then in zip(after.values(), gone, strict=True)),
                       reverse=True)  # fmt: skip
    except (sides.PeerError, OSError, ValueError) as error:
        raise SystemExit(f"{error!r}\n{side.fault()}") from error
    finally:
        side.close()
    n_generated = sum(r.n_generated for r in done)
    return {"rate": n_generated / wall(done), "wall_s": wall(done), "ttft_ms": [1e3 * r.first for r in done],
            "processed": sum(r.n_processed for r in done), "other_us": 1e6 * sum(total for total, _ in spent[1:]) / n_generated,
            "system_us": 1e6 * sum(system for _, system in spent[1:]) / n_generated,
            "all_us": 1e6 * sum(total for total, _ in spent) / n_generated}  # fmt: skip


def measure(side: str, scenario: str, asked: Any, model_file: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run `worker` in a process of its own."""
    command = [sys.executable, "-m", "bench.server", "--worker", side, "--scenario", scenario, "--model", str(model_file),
               "--threads", str(args.threads), "--server-args", args.server_args]  # fmt: skip
    done = subprocess.run(command, cwd=Path(__file__).resolve().parent.parent, input=json.dumps(asked), capture_output=True,
                          text=True)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{scenario}, {side}: failed with status {done.returncode}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run(scenario: str, words: Words, model_file: Path, args: argparse.Namespace) -> Runs:
    """All repeats; the side that begins changes."""
    runs: Runs = {side: [] for side in args.sides}
    for repeat in range(args.repeats):
        asked = conversations(scenario, words, Random(f"{scenario} {repeat}"))
        for side in args.sides[repeat % len(args.sides):] + args.sides[:repeat % len(args.sides)]:
            runs[side].append(measure(side, scenario, asked, model_file, args))
    return runs


def ttft(runs: Runs, side: str) -> list[float]:
    """The middle client's time to first token, of each repeat."""
    return [statistics.median(run["ttft_ms"]) for run in runs[side]]


def show(scenario: str, runs: Runs) -> list[Verdict]:
    """Print a scenario; its targets."""
    both = len(runs) == len(SIDES)
    if scenario == "cpu":
        print("c  8 clients, one thread computes: CPU time per streamed token, us (min / median / max)")
        for side in runs:
            system = statistics.mean(values(runs, side, "system_us"))
            print(f"  {side:14} besides the thread that computes {report.spread(values(runs, side, 'other_us'))}, of it about "
                  f"{system:.0f} in the system; in all {report.spread(values(runs, side, 'all_us'), 0)}")
        return [Verdict("the server's own work, us per token", middle(runs, side, "other_us"), 80, False)
                for side in runs if side == "ours"]  # fmt: skip
    title = f"a  {scenario}, prompts of {N_PROMPT} tokens"
    if scenario == "shared":
        title = "b  8 clients, a system prompt of 1,000 tokens"
    print(f"{title}, {N_TOKENS} tokens each (min / median / max)")
    for side in runs:
        print(f"  {side:14} {report.spread(values(runs, side, 'rate'))} tok/s in all; first token of the middle client after "
              f"{report.spread(ttft(runs, side), 0)} ms; {middle(runs, side, 'processed'):,.0f} prompt tokens processed")
    if not both:
        return []
    rate = middle(runs, "ours", "rate") / middle(runs, "llama-server", "rate")
    first = statistics.median(ttft(runs, "ours")) / statistics.median(ttft(runs, "llama-server"))
    return [Verdict(f"{scenario}: tok/s, ours / llama-server", rate, 1.2 if N_CLIENTS[scenario] > 1 else 1.0, True),
            Verdict(f"{scenario}: time to first token, ours / llama-server", first, 0.8 if N_CLIENTS[scenario] == 8 else 1.0,
                    False)]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run the scenarios and print them with their targets."""
    args = sides.arguments(__doc__, argv, LETTERS, SIDES)
    if args.worker:
        print(json.dumps(worker(args)))
        return 0
    peers.program("llama-server")
    if args.model:
        model_file, words = args.model, word_list(args.model)
    else:
        model_file, words = words_model(modelgen.bench_model(args.shape, args.quant))
    print(f"machine    {report.machine()}")
    print(f"model      {report.file(model_file)}")
    print(f"run        -t {args.threads} -np CLIENTS -c {N_CTX} times CLIENTS, {args.repeats} repeats in turns")
    print(f"sampling   {json.dumps(sides.SAMPLING)}")
    print(f"peer       llama-server of the same source, {' '.join(peers.flags())} {args.server_args}")
    raw: dict[str, Runs] = {}
    verdicts: list[Verdict] = []
    for scenario in [name for letter in args.only for name in LETTERS[letter]]:
        raw[scenario] = run(scenario, words, model_file, args)
        print(flush=True)
        for verdict in show(scenario, raw[scenario]):
            print(f"  {verdict}", flush=True)
            verdicts.append(verdict)
    if verdicts:
        print(f"\n{sum(v.met for v in verdicts)} of {len(verdicts)} targets met; "
              f"load at the end {os.getloadavg()[0] if hasattr(os, 'getloadavg') else float('nan'):.1f}")
    if args.json:
        args.json.write_text(json.dumps({"machine": report.machine(), "model": model_file.name, "threads": args.threads,
                                         "verdicts": [vars(v) | {"met": v.met} for v in verdicts], "runs": raw}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
