"""Many requests at once: lfmfast's engine against llama-server and llama-batched-bench.

    python -m bench.engine [--only a,b] [--repeats 3] [--json FILE]

    a  eight questions to one system prompt that was read before      wall time, prompt tokens processed
    b  eight distinct prompts                                         tokens per second, in all and while decoding
    c  a chat whose history is sent as text; past replies cut         prompt tokens processed and time to first token, per turn
    d  one stream                                                     tokens per second
    e  seven streams, and a long prompt comes                         time between their tokens until it is read
    f  a piece's way from the engine to Python                        microseconds

Each measurement runs in a process of its own, warmed up, the sides in turns; llama-server is a process more, asked over HTTP.
All sides get the same prompts, fresh ones in each repeat, and generate the same number of tokens with LFM2.5's sampling.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import modelgen

from bench import engine_scenarios as scenarios
from bench import engine_sides as sides
from bench import peers, report
from bench.engine_report import REPORTS, Runs, Verdict
from bench.words import Words, word_list, words_model

LETTERS = {"a": ["shared"], "b": ["distinct"], "c": ["chat", "chat-cut"], "d": ["single"], "e": ["stall"], "f": ["hand-over"]}
SIDES = ["ours", *sides.SERVERS]


def worker(args: argparse.Namespace) -> dict[str, Any]:
    """One measurement of one side."""
    name, inputs = args.scenario, json.load(sys.stdin)
    side = sides.start(args.worker, str(args.model), args.threads, shlex.split(args.server_args))
    try:
        sides.warm_up(side)
        if name == "hand-over":
            from bench import hand_over

            assert isinstance(side, sides.Ours)
            return {"sync": hand_over.hand_over(side.model, inputs), "async": hand_over.hand_over_async(side.model, inputs)}
        return scenarios.SCENARIOS[name][1](side, inputs) | {"facts": side.facts()}
    except (sides.PeerError, OSError, ValueError) as error:
        raise SystemExit(f"{error!r}\n{side.fault()}") from error
    finally:
        side.close()


def measure(side: str, scenario: str, inputs: Any, model_file: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run `worker` in a process of its own."""
    if side == "batched-bench":
        return {"decode_rate": sides.batched_bench(model_file, args.threads, *scenarios.N_DISTINCT)}
    command = [sys.executable, "-m", "bench.engine", "--worker", side, "--scenario", scenario, "--model", str(model_file),
               "--threads", str(args.threads), "--server-args", args.server_args]
    done = subprocess.run(command, cwd=Path(__file__).resolve().parent.parent, input=json.dumps(inputs), capture_output=True,
                          text=True)
    if done.returncode:
        raise SystemExit(f"{scenario}, {side}: failed with status {done.returncode}\n{done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run(scenario: str, words: Words, model_file: Path, args: argparse.Namespace) -> Runs:
    """All repeats of a scenario; the side that begins changes."""
    wanted = ["ours"] if scenario == "hand-over" else list(args.sides)
    if scenario == "distinct" and "ours" in wanted:
        wanted.append("batched-bench")
    runs: Runs = {side: [] for side in wanted if side in args.sides or side == "batched-bench"}
    for repeat in range(args.repeats):
        inputs = 128 if scenario == "hand-over" else scenarios.SCENARIOS[scenario][0](words, Random(f"{scenario} {repeat}"))
        order = list(runs)
        for side in order[repeat % len(order):] + order[:repeat % len(order)]:
            progress(f"{scenario}: {repeat + 1}/{args.repeats} {side}")
            runs[side].append(measure(side, scenario, inputs, model_file, args))
    progress("")
    return runs


def progress(text: str) -> None:
    """Replace the line on the terminal."""
    if sys.stderr.isatty():
        print(f"\r{text:60}\r", end="", file=sys.stderr, flush=True)


def print_head(model_file: Path, args: argparse.Namespace) -> None:
    """What is measured, on what."""
    print(f"machine    {report.machine()}")
    print(f"model      {report.file(model_file)}")
    print(f"run        {args.threads} threads, {sides.N_PARALLEL} sequences of {sides.N_CTX} tokens, "
          f"{args.repeats} repeats in turns")
    print(f"sampling   {json.dumps(sides.SAMPLING)}")
    if "ours" in args.sides:
        import lfmfast

        print(f"lfmfast    {json.dumps(lfmfast.build_info())}")
    print(f"peers      llama-server and llama-batched-bench of the same source, {' '.join(peers.flags())}")
    for name, options in sides.SERVERS.items():
        if name in args.sides:
            print(f"           {name}: llama-server -t {args.threads} -c {sides.N_PARALLEL * sides.N_CTX} --no-webui "
                  f"{' '.join(options)} {args.server_args}")


def main(argv: list[str] | None = None) -> int:
    """Run the scenarios and print them with their targets."""
    args = sides.arguments(__doc__, argv, LETTERS, SIDES)
    if args.worker:
        print(json.dumps(worker(args)))
        return 0
    for name in ("llama-server", "llama-batched-bench"):
        peers.program(name)
    if args.model:
        model_file, words = args.model, word_list(args.model)
    else:
        model_file, words = words_model(modelgen.bench_model(args.shape, args.quant))
    print_head(model_file, args)
    raw: dict[str, Runs] = {}
    verdicts: list[Verdict] = []
    for scenario in [name for letter in args.only for name in LETTERS[letter]]:
        runs = run(scenario, words, model_file, args)
        if not runs:
            continue
        raw[scenario] = runs
        print(flush=True)
        for verdict in REPORTS[scenario](runs):
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
