"""Scripts in a process of their own: what may kill a process, or must be seen to end quietly, runs there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ATTEMPT = """
import json, sys, traceback
import lfmfast
def attempt(name, action):
    print(json.dumps({"trying": name}), flush=True)
    try:
        value, kind = action(), "ok"
    except Exception as e:
        value, kind = str(e), type(e).__name__
        if not isinstance(e, (lfmfast.LfmfastError, TypeError, OverflowError, MemoryError)):
            traceback.print_exc()
    print(json.dumps({"name": name, "kind": kind, "value": value}, default=str), flush=True)
"""


def run(script: str, *arguments: object, timeout: float = 300, flags: tuple[str, ...] = (), **environment: str) -> str:
    """What the script printed. It must end by itself with status 0 and leave stderr empty."""
    # In this folder, so that `import lfmfast` finds the installed package.
    command = [sys.executable, *flags, "-c", textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout,
                          cwd=Path(__file__).parent, env={**os.environ, **environment})
    ending = f"ended with status {done.returncode} after printing ...{done.stdout[-500:]}\nstderr: {done.stderr[-3000:]}"
    assert (done.returncode, done.stderr) == (0, ""), ending
    return done.stdout


def attempts(script: str, *arguments: object, **options: Any) -> dict[str, tuple[str, Any]]:
    """(exception class or "ok", message or result) of each `attempt(name, action)` in the script, by name."""
    lines = [json.loads(line) for line in run(ATTEMPT + textwrap.dedent(script), *arguments, **options).splitlines()]
    return {line["name"]: (line["kind"], line["value"]) for line in lines if "name" in line}
