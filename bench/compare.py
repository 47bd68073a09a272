"""lfmfast against others, in one run: tokens per second, and the time to the first token.

    python -m bench.compare                     all of it (about half an hour on two cores); makes bench/results/compare.*
    python -m bench.compare --quick --results somewhere      a few tokens of each: to see that all works
    python -m bench.compare --only single,8 --sides lfmfast,llama-cpp-python
    python -m bench.compare --draw bench/results/compare.json      page and chart again, nothing is measured

    single        one stream
    8, 32         so many clients with prompts of 150 tokens
    shared        8 clients, two questions each, one system prompt of 500 tokens
    chat          six turns, history sent as text
    batch         a file of 500 prompts
    batch-shared  the same with one system prompt of 500 tokens

Sides are lfmfast (in Python; a file: `lfmfast batch`), `lfmfast serve`, llama-server of the source that lfmfast is built from,
llama-cpp-python (compiled here), xllamacpp (its wheel), and OpenVINO GenAI with a conversion of its own. Each runs in processes
of its own, the packages in virtual environments of their own, which the first run makes in LFMFAST_BENCH_DIR (minutes). All get
the same model file (but OpenVINO), threads, sampling and conversations, in turns. A side that fails gets a row that says why.

A library answers in its own process, a server over HTTP, with one streaming client per slot. For a file a server's slots are
kept full by connections that stay open and ask for whole answers; llama-server's number of slots and other flags are the best
of those in bench/compare_tuning.py, tried here once and remembered (--tune: again). Ollama has no package for pip.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import modelgen

from bench import compare_report as texts
from bench import compare_tuning as tuning
from bench import report
from bench.compare_scenarios import SCENARIOS, Scenario, measure
from bench.compare_sides import KINDS, OVER_HTTP, Kind, Setting
from bench.engine import progress
from bench.engine_sides import SAMPLING, PeerError
from bench.words import Words, word_list, words_model

RESULTS = Path(__file__).parent / "results"
TIMEOUT_S = 900
ONE_BY_ONE_S = 60  # of a file, for a side that answers one line after another: its rate does not change
NOTES = ("llama-cpp-python answers one request at a time: what comes together waits in a queue",
         "Ollama: not run, it has no package for pip",
         "the time of `lfmfast batch` includes its start and the loading of the model, that of the others does not",
         "ggml's code for AMX is left out of all that is compiled here: it gives wrong results with several sequences, and "
         "with some versions of gcc ends the process")  # fmt: skip


def worker(name: str) -> dict[str, Any]:
    """One measurement, asked for on stdin."""
    asked = json.load(sys.stdin)
    setting, scenario = Setting(**asked["setting"]), Scenario(**asked["scenario"])
    start = None if name == "lfmfast" and scenario.is_batch else KINDS[name].start
    try:
        return measure(start, setting, asked["conversations"], scenario)
    except (PeerError, RuntimeError, SystemExit) as error:
        return {"failed": str(error)}


def run_once(name: str, setting: Setting, scenario: Scenario, conversations: list[Any]) -> dict[str, Any]:
    """`worker` in a process of its own; whatever goes wrong is its result."""
    command = [sys.executable, "-m", "bench.compare", "--worker", name]
    process = subprocess.Popen(command, cwd=Path(__file__).resolve().parent.parent, stdin=subprocess.PIPE, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip
    asked = {"setting": asdict(setting), "scenario": asdict(scenario), "conversations": conversations}
    try:
        out, err = process.communicate(json.dumps(asked), timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {TIMEOUT_S} s"}
    finally:
        if process.poll() is None:
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)  # with the server that it started
            else:
                process.kill()
            process.communicate()
    lines = out.splitlines()
    if process.returncode or not lines:
        last = err.strip().splitlines()[-1:] or ["it said nothing"]
        return {"failed": f"ended with status {process.returncode}: {last[0]}"}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def wanted(name: str, scenario: Scenario) -> bool:
    """Whether a side has a place in a scenario."""
    return not (scenario.is_batch and name == "lfmfast-serve")


def setting_of(name: str, scenario: Scenario, model_file: Path, args: argparse.Namespace, tuned: dict[str, Any]) -> Setting:
    """How a side is started. A server other than ours gets llama-server's best settings for a file."""
    setting = Setting(str(model_file), args.threads, scenario.n_clients, scenario.n_ctx, shape="" if args.model else args.shape)
    if scenario.is_batch and KINDS[name].how == OVER_HTTP and tuned:
        best = tuning.best(tuned)
        setting = replace(setting, n_parallel=best["n_parallel"], options=best["options"])
    return setting


def run(key: str, scenario: Scenario, record: texts.Record, model_file: Path, words: Words, args: argparse.Namespace) -> None:
    """A scenario, into the record."""
    sides = [name for name, about in record["sides"].items() if wanted(name, scenario) and "missing" not in about]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    record["scenarios"][key] = {"title": scenario.title, "batch": scenario.is_batch, **asdict(scenario), "runs": runs}
    tuned = record["tuning"].get(key, [])
    n_repeats = 1 if scenario.is_batch else args.repeats
    for repeat in range(n_repeats):
        conversations = scenario.conversations(words, repeat)
        for name in sides[repeat % len(sides):] + sides[:repeat % len(sides)] if sides else []:
            if any("failed" in run for run in runs[name]):
                continue
            setting = setting_of(name, scenario, model_file, args, tuned)
            clients = scenario if setting.n_parallel == scenario.n_clients else replace(scenario, n_clients=setting.n_parallel)
            if scenario.is_batch and not KINDS[name].parallel:
                clients = replace(clients, seconds=min(clients.seconds, ONE_BY_ONE_S))
            progress(f"{key}: {repeat + 1}/{n_repeats} {name}")
            result = run_once(name, setting, clients, conversations)
            runs[name].append(result)
            if "failed" in result:
                print(f"{key}, {name}: {result['failed']}", file=sys.stderr, flush=True)
    progress("")


def about(kind: Kind, shape: str) -> dict[str, Any]:
    """Title and version of a side, or why it is missing. What it needs is made now."""
    values: dict[str, Any] = {"title": kind.title, "how": kind.how, "ours": kind.title.startswith("lfmfast")}
    try:
        values["about"] = kind.about(shape)
    except (Exception, SystemExit) as error:  # whatever a peer's build does, the others run
        values["missing"] = str(error) or repr(error)
    return values


def write(record: texts.Record, folder: Path) -> list[Path]:
    """compare.json, compare.md and the chart."""
    from bench import compare_chart

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "compare.json", folder / "compare.md"]
    paths[0].write_text(json.dumps(record, indent=1) + "\n", "utf8")
    paths[1].write_text(texts.markdown(record), "utf8")
    return paths + compare_chart.draw(record, folder)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--only", default=",".join(SCENARIOS), help="scenarios, with commas (default: all)")
    parser.add_argument("--sides", default=",".join(KINDS), help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="a few tokens of each; the numbers say nothing")
    parser.add_argument("--repeats", type=int, default=2, help="of all but the batches (2)")
    parser.add_argument("--threads", type=int, default=report.cpu_count(), help="of each side (all CPUs)")
    parser.add_argument("--shape", default="350M", choices=modelgen.SHAPES)
    parser.add_argument("--quant", default="Q4_K_M", choices=modelgen.oracle.FTYPES)
    parser.add_argument("--model", type=Path, help="a GGUF instead of a generated one")
    parser.add_argument("--tune", action="store_true", help="look for llama-server's best settings again (some minutes)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="where to write (bench/results)")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="write page and chart from numbers of an earlier run")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    for flag, known in (("only", SCENARIOS), ("sides", KINDS)):
        given = getattr(args, flag).split(",")
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"--{flag} {','.join(unknown)}: choose from {', '.join(known)}")
        setattr(args, flag, [name for name in known if name in given])
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    args = arguments(argv)
    if args.worker:
        print(json.dumps(worker(args.worker)))
        return 0
    if args.draw:
        record = json.loads(args.draw.read_text("utf8"))
        print(*write(record, args.draw.parent if args.results == RESULTS else args.results), sep="\n")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not without ending what runs
    if args.model:
        model_file, words = args.model.resolve(), word_list(args.model)
    else:
        model_file, words = words_model(modelgen.bench_model(args.shape, args.quant))
    shape = "" if args.model else args.shape
    record: texts.Record = {
        "made": datetime.date.today().isoformat(), "machine": report.machine(), "threads": args.threads,
        "model": report.file(model_file) if args.model else f"LFM2.5-{args.shape} shape, {args.quant}, random weights, "
                                                           f"{model_file.stat().st_size / 1e6:,.0f} MB",
        "sampling": json.dumps(SAMPLING), "repeats": args.repeats,
        "caveat": "A quick run: its numbers say nothing." if args.quick else "",
        "notes": list(NOTES), "sides": {name: about(KINDS[name], shape) for name in args.sides}, "tuning": {}, "scenarios": {},
    }  # fmt: skip
    print(*(f"{key:10} {record[key]}" for key in ("machine", "model", "threads", "sampling")), sep="\n")
    print(*(f"{name:18} {values.get('about') or 'missing: ' + values['missing']}" for name, values in record["sides"].items()),
          sep="\n", flush=True)  # fmt: skip
    if "llama-server" in args.sides and "missing" not in record["sides"]["llama-server"] and not args.quick:
        batches = [name for name in args.only if SCENARIOS[name].is_batch]
        record["tuning"] = tuning.tuned(batches, model_file, words, args, run_once)
    for key in args.only:
        run(key, SCENARIOS[key].quick() if args.quick else SCENARIOS[key], record, model_file, words, args)
        print("\n" + texts.text(record, key), flush=True)
        paths = write(record, args.results)
    for verdict in texts.verdicts(record) if not args.quick else []:
        print(verdict)
    print("\nwritten: " + ", ".join(str(path) for path in paths))
    return 0


if __name__ == "__main__":
    sys.exit(main())
