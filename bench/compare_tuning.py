"""llama-server's best settings for a file of prompts: each is tried once on this machine, and remembered."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import modelgen

from bench import peers, report
from bench.compare_scenarios import SCENARIOS
from bench.compare_sides import Setting
from bench.words import Words

# Slots, and flags beside: first the number of slots, then the flags with the best number. llama-server can go on with a hybrid
# model's prompt only from checkpoints that it makes 4 and 4 + -ub tokens before the end of a prompt: with a shared beginning
# and questions of 64 tokens a small -ub lets it keep nearly all of that beginning.
SLOTS = (8, 16, 32)
FLAGS = {"batch": (["-kvu"], ["-ub", "256"]), "batch-shared": (["-kvu"], ["-ub", "96"], ["-ub", "128"])}
LINES = 3  # prompts for each slot, at least N_LINES
N_LINES = 48
SECONDS = 25

Tried = list[dict[str, Any]]


def best(tried: Tried) -> dict[str, Any]:
    """The fastest that ran."""
    return max(tried, key=lambda entry: float(entry.get("rate", 0)))


def _file(key: str, model_file: Path, args: argparse.Namespace) -> Path:
    made_of = (key, SCENARIOS[key], model_file.name, model_file.stat().st_size, args.threads, report.cpu_name(), peers.build(),
               peers.flags(), SLOTS, FLAGS[key], LINES, N_LINES, SECONDS)  # fmt: skip
    return modelgen.bench_dir() / f"llama-server-{key}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:10]}.json"


def tuned(keys: list[str], model_file: Path, words: Words, args: argparse.Namespace,
          run_once: Callable[..., dict[str, Any]]) -> dict[str, Tried]:  # fmt: skip
    """For each batch what was tried, with its rate."""
    found = {}
    for key in keys:
        path = _file(key, model_file, args)
        if args.tune or not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(_try_all(key, model_file, words, args, run_once)))
        found[key] = json.loads(path.read_text())
    return found


def _try_all(key: str, model_file: Path, words: Words, args: argparse.Namespace,
             run_once: Callable[..., dict[str, Any]]) -> Tried:  # fmt: skip
    scenario = SCENARIOS[key]

    def attempt(n_parallel: int, options: list[str]) -> dict[str, Any]:
        shorter = replace(scenario, n_clients=n_parallel, n_lines=max(N_LINES, LINES * n_parallel), seconds=SECONDS)
        setting = Setting(str(model_file), args.threads, n_parallel, scenario.n_ctx, options)
        result = run_once("llama-server", setting, shorter, shorter.conversations(words, -1))
        entry = {"n_parallel": n_parallel, "options": options, **result}
        print(f"llama-server, {scenario.title}: -np {n_parallel} {' '.join(options)}: "
              f"{result.get('rate', result.get('failed'))}", file=sys.stderr, flush=True)  # fmt: skip
        return entry

    tried = [attempt(n, []) for n in SLOTS]
    n_best = best(tried)["n_parallel"]
    return tried + [attempt(n_best, options) for options in FLAGS[key]]
