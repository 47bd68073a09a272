"""Runs llama-server's own tests on llama-server, and then on `lfmfast serve`; see README.md here.

    python -m peer.run [--only EXPRESSION] [--model tiny,smollm2] [--readme]       (in tests/)
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [p for p in (str(TESTS), str(TESTS.parent)) if p not in sys.path]

import oracle  # noqa: E402
from peer import model, plan, readme, rewrite  # noqa: E402

from bench import peers  # noqa: E402  (it takes the repository off the path again)


@dataclass
class Result:
    """What became of one test."""

    name: str
    outcome: str  # passed, adapted, failed, left out
    why: str = ""
    compared: tuple[str, ...] = ()  # with llama-server's


def suite(folder: Path) -> Path:
    """Lay the changed tests out in a folder, at the depth from which they find templates; returns where to run them."""
    source = oracle.llama_cpp_dir() / "tools" / "server" / "tests"
    target = folder / "tools" / "server" / "tests"
    if target.exists():
        return target
    (target / "unit").mkdir(parents=True)
    (folder / "models").symlink_to(oracle.llama_cpp_dir() / "models", target_is_directory=True)
    # Names of headers in any case, as HTTP has them: a server in Python writes them in lower case.
    utils = (source / "utils.py").read_text("utf8").replace("= dict(response.headers)", "= response.headers")
    (target / "utils.py").write_text(utils, "utf8")
    (target / "wget.py").write_text("# imported by the tests, and used by none that is run\n")
    (target / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    serial\n")
    for name in plan.MODULES:
        (target / "unit" / f"{name}.py").write_text(rewrite.module(source / "unit" / f"{name}.py"), "utf8")
    return target


def wrapper(folder: Path) -> Path:
    """A program that takes llama-server's flags."""
    path = folder / "lfmfast-server"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).with_name("llama_server.py")}" "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def free_port() -> int:
    """A port that nothing listens at now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run(side: str, program: Path, where: Path, model_file: Path, only: str | None) -> dict[str, dict[str, str]]:
    """The tests on one of the servers; results by test. Modules run side by side, as most of the time is waiting."""

    def run_one(module: str) -> dict[str, dict[str, str]]:
        return run_module(module, side, program, where, model_file, only)

    with ThreadPoolExecutor(max(2, os.cpu_count() or 1)) as pool:
        return {name: result for results in pool.map(run_one, plan.MODULES) for name, result in results.items()}


def run_module(module: str, side: str, program: Path, where: Path, model_file: Path,
               only: str | None) -> dict[str, dict[str, str]]:  # fmt: skip
    """One module in a process of its own."""
    results = where / f"results-{side}-{module}.json"
    if results.exists() and side == "llama-server":  # of an earlier run in a folder that was kept
        return read_results(results)
    # Without this the programs would talk to a proxy, and without the other, llama-server's tests would count as our own.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "LFMFAST_SERVE", "PYTEST_"))}
    path = [str(where), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(path), "PEER_RUN": side, "PEER_RESULTS": str(results),
                    "PEER_NOTES": str(where / f"notes-{module}.json"), "PEER_MODEL": str(model_file), "PORT": str(free_port()),
                    "LLAMA_SERVER_BIN_PATH": str(program), "NO_PROXY": "127.0.0.1,localhost"}  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-p", "peer.plugin", "-q", "-c",
               str(where / "pytest.ini"), "--rootdir", str(where), "-p", "no:cacheprovider", "-p", "no:hypothesispytest",
               f"unit/{module}.py", *(["-k", only] if only else [])]  # fmt: skip
    log = where / f"{side}-{module}.log"
    with log.open("w") as out:
        subprocess.run(command, cwd=where, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    if not results.exists():
        raise SystemExit(f"the tests did not run on {side}; see {log}")
    return read_results(results)


def read_results(path: Path) -> dict[str, dict[str, str]]:
    """Results by test."""
    read: dict[str, dict[str, str]] = json.loads(path.read_text("utf8"))
    return read


def compare(model_file: Path, folder: Path, only: str | None = None) -> list[Result]:
    """Both runs, and the result of each test."""
    where = suite(folder)
    theirs = run("llama-server", peers.program("llama-server"), where, model_file, only)
    ours = run("lfmfast", wrapper(folder), where, model_file, only)
    notes = [json.loads((where / f"notes-{module}.json").read_text("utf8")) for module in plan.MODULES]
    return judged(theirs, ours, {key: value for part in notes for key, value in part.items()})


def judged(theirs: dict[str, dict[str, str]], ours: dict[str, dict[str, str]], notes: dict[str, Any]) -> list[Result]:
    """The result of each test, in the order of the modules."""
    compared: dict[str, set[str]] = {}
    for key in notes:
        test, site, _ = key.split("\t")
        compared.setdefault(plan.short(test), set()).add(rewrite.subject(site))
    results = []
    for name, reference in sorted(theirs.items(), key=lambda item: plan.MODULES.index(item[0].partition(".py")[0])):
        if reference["outcome"] != "passed":
            results.append(Result(name, "left out", reference["why"] if reference["outcome"] == "left out" else
                                  f"llama-server itself: {reference['why'] or reference['outcome']}"))  # fmt: skip
        elif ours.get(name, {}).get("outcome") == "passed":
            what = tuple(sorted(compared.get(name, ())))
            results.append(Result(name, "adapted" if what else "passed", compared=what))
        else:
            results.append(Result(name, "failed", ours.get(name, {}).get("why", "did not run")))
    return results


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="EXPRESSION", help="tests to run, as pytest -k")
    parser.add_argument("--model", default="tiny", help="tiny, smollm2, or a GGUF file (default: tiny)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the tests and the logs there")
    parser.add_argument("--readme", action="store_true", help="write the table of README.md anew")
    args = parser.parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="lfmfast-peer-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if args.model == "smollm2":
            from lfmfast import _demo

            path = _demo.path() if _demo.path().exists() else _demo.fetch(progress=False)
        else:
            path = model.write(folder / "tiny.gguf") if args.model == "tiny" else Path(args.model)
        results = compare(path, folder, args.only)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    for result in results:
        print(f"{result.outcome:8} {result.name}" + (f"  ({', '.join(result.compared)})" if result.compared else ""))
        if result.why:
            print("         " + result.why.replace("\n", "\n         "))
    print(readme.counts(results))
    if args.readme:
        readme.write(results)
    return 1 if any(r.outcome == "failed" for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
