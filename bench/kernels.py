"""Our matrix products on the CPU against ggml's, in one build: the same program with LFMFAST_KERNELS=0.

    python -m bench.kernels [--shape 350M] [--quant Q4_K_M Q8_0] [--threads N] [--repeats 5] [--sequences 1 8 16]

Prefill of a prompt, and decode of several sequences in one pass, at the level of `lfmfast.lowlevel`: no sampling, no text.
Each side runs in a process of its own, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import modelgen

from bench import report

N_PREFILLED = 16  # tokens of each sequence before decode is measured


def worker(model_file: str, n_threads: int, n_prompt: int, sequences: list[int]) -> dict[str, float]:
    """Seconds to load, and tokens per second: of the best of three prefills, of a median decode step."""
    import numpy as np

    from lfmfast.lowlevel import Batch, Context, Model

    tokens = np.random.default_rng(0).integers(20, 1200, 4096).tolist()
    begin = time.perf_counter()
    model = Model.load(model_file)
    result = {"load": time.perf_counter() - begin}

    def seconds(context: Context, batch: Batch) -> float:
        begin = time.perf_counter()
        context.decode(batch)
        _ = context.logits.size
        return time.perf_counter() - begin

    with Context(model, n_ctx=n_prompt, n_threads=n_threads) as context:
        batch, times = Batch(n_prompt), []
        batch.extend(tokens[:n_prompt], 0)
        for _ in range(3):
            context.clear()
            times.append(seconds(context, batch))
    result[f"prefill {n_prompt}"] = n_prompt / min(times)
    for n in sequences:
        with Context(model, n_ctx=64 * n, n_seq_max=n, n_threads=n_threads) as context:
            batch, times = Batch(N_PREFILLED * n, n), []
            for seq in range(n):
                batch.extend(tokens[N_PREFILLED * seq:][:N_PREFILLED], 0, seq_id=seq)
            context.decode(batch)
            for step in range(24):
                batch.clear()
                for seq in range(n):
                    batch.add(tokens[seq + step], N_PREFILLED + step, seq, output=True)
                times.append(seconds(context, batch))
        result[f"decode {n}"] = n / statistics.median(times)
    return result


def measure(kernels: str, model_file: Path, n_threads: int, n_prompt: int, sequences: list[int]) -> dict[str, float]:
    """Run `worker` in a process of its own."""
    command = [sys.executable, "-m", "bench.kernels", "--worker", str(model_file), "--threads", str(n_threads), "--prompt",
               str(n_prompt), "--sequences", *map(str, sequences)]
    done = subprocess.run(command, cwd=Path(__file__).resolve().parent.parent, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, env={**os.environ, "LFMFAST_KERNELS": kernels})
    if done.returncode:
        raise SystemExit(f"failed with LFMFAST_KERNELS={kernels}:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(model_file: Path, args: argparse.Namespace) -> None:
    """One model, both sides in turns."""
    print(f"model      {report.file(model_file)}")
    runs: list[tuple[dict[str, float], dict[str, float]]] = []
    for turn in range(args.repeats + 1):
        pair = {}
        for kernels in (args.kernels, "0") if turn % 2 else ("0", args.kernels):
            pair[kernels] = measure(kernels, model_file, args.threads, args.prompt, args.sequences)
        if turn:
            runs.append((pair[args.kernels], pair["0"]))
    for name in runs[0][0]:
        ours, ggml = [run[0][name] for run in runs], [run[1][name] for run in runs]
        ratios = [a / b for a, b in zip(ours, ggml, strict=True)]
        unit = "s" if name == "load" else "tokens/s"
        sides = f"ours {report.spread(ours, 2)}, ggml {report.spread(ggml, 2)} {unit}"
        print(f"  {name:<12} {sides}; ratio {report.spread(ratios, 2)}")


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="350M", choices=modelgen.SHAPES)
    parser.add_argument("--quant", nargs="+", default=["Q4_K_M"], choices=modelgen.oracle.FTYPES)
    parser.add_argument("--model", type=Path, help="a GGUF instead of a generated one")
    parser.add_argument("--threads", type=int, default=report.cpu_count())
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kernels", default="1", help="for LFMFAST_KERNELS: avx512vnni, avxvnni, avx2; 1: the best here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        print(json.dumps(worker(args.worker, args.threads, args.prompt, args.sequences)))
        return 0
    import lfmfast

    print(f"machine    {report.machine()}")
    print(f"run        {args.threads} threads, {args.repeats} repeats in turns, LFMFAST_KERNELS={args.kernels} and 0")
    print(f"lfmfast    {json.dumps(lfmfast.build_info())}")
    for model_file in [args.model] if args.model else [modelgen.bench_model(args.shape, quant) for quant in args.quant]:
        compare(model_file, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
