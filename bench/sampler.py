"""Time per token of the sampler against llama.cpp's chain.

    python -m bench.sampler [--rounds 30] [--all]

Both sides are native code in one thread of one process that bench/sampler.cpp makes, linked with the libraries of the installed
package: the same rows of logits (normal, standard deviation 3), the same parameters and seed, rounds of 16 calls in turns. It
stops if the tokens differ. llama.cpp's time is that of its own tools: list all candidates, run the chain, accept.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import report

ROOT = Path(__file__).resolve().parent.parent


def build(folder: Path) -> Path:
    """Compile bench/sampler.cpp against the installed package's libraries and the headers of the source tree."""
    import lfmfast

    package = Path(lfmfast.__file__).parent
    llama = Path(os.environ.get("LFMFAST_LLAMA_CPP_DIR") or ROOT / "extern" / "llama.cpp")
    program = folder / "sampler"
    command = [
        os.environ.get("CXX", "c++"),
        "-std=c++17",
        "-O3",
        "-DNDEBUG",
        f"-I{ROOT / 'lfmfast'}",
        f"-I{llama / 'include'}",
        f"-I{llama / 'ggml' / 'include'}",
        str(ROOT / "bench" / "sampler.cpp"),
        "-o",
        str(program),
        f"-L{package}",
        "-llfmfast-engine",
        "-llfmfast-llama",
        "-llfmfast-ggml",
        "-llfmfast-ggml-base",
        f"-Wl,-rpath,{package}",
        "-pthread",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"could not build the benchmark:\n{' '.join(command)}\n{done.stderr}")
    return program


def show(lines: list[list[str]], every_variant: bool) -> None:
    """Tables of microseconds per token, median (best)."""
    read = {(line[1], line[2]): float(line[3]) for line in lines if line[0] == "read"}
    best_variant = next(line[2] for line in lines if line[0] == "read")
    for n, variant in read:
        if variant != best_variant and not every_variant:
            continue
        print(f"\n{int(n):,} logits, {variant}: reading a row takes {read[n, variant]:.1f} us")
        print(f"  {'us per token, median (best)':28} {'lfmfast':>16} {'llama.cpp':>18} {'ratio':>7} {'/ read':>7}")
        for line in lines:
            if line[0] == "pair" and (line[1], line[3]) == (n, variant) and not line[2].startswith("16 rows"):
                ours, ours_best, theirs, theirs_best = map(float, line[4:])
                print(
                    f"  {line[2]:28} {ours:7.1f} ({ours_best:6.1f}) {theirs:9.1f} ({theirs_best:6.1f}) {theirs / ours:6.1f}x"
                    f" {ours / read[n, variant]:6.1f}x"
                )
    print()
    for line in lines:
        if line[0] == "pair" and line[2].startswith("16 rows"):
            two, two_best, one, one_best = map(float, line[4:])
            print(
                f"sample_batch, 16 rows of {int(line[1]):,}, LFM2.5 defaults: 1 thread {one:.0f} ({one_best:.0f}) us, "
                f"2 threads {two:.0f} ({two_best:.0f}) us, {one / two:.2f}x ({one_best / two_best:.2f}x)"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="rounds of 16 calls per side (default: 30)")
    parser.add_argument("--all", action="store_true", help="also AVX2 and scalar code where the CPU has better")
    arguments = parser.parse_args()
    print(report.machine())
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([str(build(Path(folder))), str(arguments.rounds)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    show([line.split("\t") for line in done.stdout.splitlines()], arguments.all)


if __name__ == "__main__":
    main()
