"""Our matrix products on the CPU against ggml's, in one build (the same program with LFMFAST_KERNELS=0), and OpenVINO's.

    python -m bench.kernels [--shape 350M] [--quant Q4_K_M Q8_0] [--threads N] [--repeats 5] [--sequences 1 8 16] [--peer none]

Prefill of a prompt, and decode of several sequences in one pass, at the level of `lfmfast.lowlevel`: no sampling, no text;
OpenVINO's pipeline takes the most likely token. Each side runs in a process of its own, in turns. What the speed costs stands
beside it: how far the logits differ from those of the same weights before they were quantised.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import modelgen
import numpy as np

from bench import report
from bench.peers import openvino

N_PREFILLED = 16  # tokens of each sequence before decode is measured
N_JUDGED = 128    # tokens whose logits are compared


def prompt(n: int) -> list[int]:
    """Token ids, the same ones on all sides."""
    tokens: list[int] = np.random.default_rng(0).integers(20, 1200, 4096)[:n].tolist()
    return tokens


def worker(model_file: str, n_threads: int, n_prompt: int, sequences: list[int]) -> dict[str, float]:
    """Seconds to load, and tokens per second: of the best of three prefills, of a median decode step."""
    from lfmfast.lowlevel import Batch, Context, Model

    tokens = prompt(4096)
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


def logits(model_file: str, n_threads: int, target: str) -> None:
    """Write the logits of all positions of a prompt."""
    from lfmfast.lowlevel import Batch, Context, Model

    with Context(Model.load(model_file), n_ctx=N_JUDGED, n_threads=n_threads) as context:
        batch = Batch(N_JUDGED)
        batch.extend(prompt(N_JUDGED), 0, output="all")
        context.decode(batch)
        np.save(target, context.logits)


def run_worker(kernels: str, model_file: Path, n_threads: int, *options: str) -> str:
    """Run `worker` or `logits` in a process of its own; returns what it printed."""
    command = [sys.executable, "-m", "bench.kernels", "--worker", str(model_file), "--threads", str(n_threads), *options]
    done = subprocess.run(command, cwd=Path(__file__).resolve().parent.parent, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, env={**os.environ, "LFMFAST_KERNELS": kernels})
    if done.returncode:
        raise SystemExit(f"failed with LFMFAST_KERNELS={kernels}:\n{done.stderr[-2000:]}")
    return done.stdout


class Side:
    """What is measured: our kernels, ggml's, or OpenVINO (`kernels` None), which has the same shape and weights in 4 bits."""

    def __init__(self, name: str, kernels: str | None, model_file: Path, args: argparse.Namespace) -> None:
        self.name, self._kernels, self._model_file, self._args = name, kernels, model_file, args

    def measure(self) -> dict[str, float]:
        """As `worker`."""
        args = self._args
        if self._kernels is None:
            return openvino.measure(args.shape, n_threads=args.threads, n_prompt=args.prompt, sequences=args.sequences)
        printed = run_worker(self._kernels, self._model_file, args.threads, "--prompt", str(args.prompt), "--sequences",
                             *map(str, args.sequences))  # fmt: skip
        result: dict[str, float] = json.loads(printed.splitlines()[-1])
        return result

    def logits(self, target: Path) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Of the first tokens of the prompt, written to `target` on the way."""
        if self._kernels is None:
            openvino.logits(self._args.shape, prompt(N_JUDGED), target)
        else:
            run_worker(self._kernels, self._model_file, self._args.threads, "--logits", str(target))
        rows: np.ndarray[Any, np.dtype[np.float32]] = np.load(target)
        return rows


def print_quality(sides: list[Side], args: argparse.Namespace) -> None:
    """How far the logits of each side point where those of the unquantised weights do: the mean cosine."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "logits.npy"
        exact = Side("F16", "0", modelgen.bench_model(args.shape, "F16"), args).logits(file)
        cosines = []
        for side in sides:
            rows = side.logits(file)
            cosine = (rows * exact).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(exact, axis=1)
            cosines.append(f"{side.name} {cosine.mean():.3f}")
        print(f"  {'cosine':<12} {', '.join(cosines)} of the logits to those of the weights in F16")


def compare(model_file: Path, args: argparse.Namespace) -> None:
    """One model, all sides in turns."""
    print(f"model      {report.file(model_file)}")
    sides = [Side("ours", args.kernels, model_file, args), Side("ggml", "0", model_file, args)]
    if args.peer == "openvino" and not args.model and openvino.has(args.shape):
        sides.append(Side("openvino", None, model_file, args))
        print(f"openvino   {openvino.SETTINGS}; {openvino.PACKAGES[1]}")
    runs: list[dict[str, dict[str, float]]] = []
    for turn in range(args.repeats + 1):  # the first one does not count
        runs.append({side.name: side.measure() for side in (sides if turn % 2 else sides[::-1])})
    for name in runs[0]["ours"]:
        values = {side.name: [run[side.name][name] for run in runs[1:]] for side in sides}
        ratios = [f"{report.spread([a / b for a, b in zip(values['ours'], values[side.name], strict=True)], 2)} of {side.name}"
                  for side in sides[1:]]  # fmt: skip
        unit = "s" if name == "load" else "tokens/s"
        print(f"  {name:<12} {', '.join(f'{side} {report.spread(v, 2)}' for side, v in values.items())} {unit}; "
              f"ratio {', '.join(ratios)}")  # fmt: skip
    if not args.model:
        print_quality(sides, args)


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
    parser.add_argument("--kernels", default="1", help="for LFMFAST_KERNELS: amx, avx512vnni, avxvnni, avx2; 1: the best here")
    parser.add_argument("--package", type=Path, help="folder with the lfmfast to measure, such as one built for AVX2 alone")
    parser.add_argument("--peer", default="openvino", choices=["openvino", "none"], help="besides ggml")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--logits", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker and args.logits:
        logits(args.worker, args.threads, args.logits)
        return 0
    if args.worker:
        print(json.dumps(worker(args.worker, args.threads, args.prompt, args.sequences)))
        return 0
    if args.package:  # instead of the installed one, here and in the workers
        sys.path.insert(0, str(args.package.resolve()))
        os.environ["PYTHONPATH"] = str(args.package.resolve())
    import lfmfast

    print(f"machine    {report.machine()}")
    print(f"run        {args.threads} threads, {args.repeats} repeats in turns, LFMFAST_KERNELS={args.kernels} and 0")
    print(f"lfmfast    {json.dumps(lfmfast.build_info())}")
    for model_file in [args.model] if args.model else [modelgen.bench_model(args.shape, quant) for quant in args.quant]:
        compare(model_file, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
