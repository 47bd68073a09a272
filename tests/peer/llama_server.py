"""`lfmfast serve` under llama-server's flags: what its tests start instead of llama-server.

Flags of the two are the same but for those listed here, which `lfmfast serve` does not have, or which it need not have.
"""

from __future__ import annotations

import os
import sys

DROPPED = {"--backend_sampling": 0}  # with the number of values that follow


def translated(arguments: list[str]) -> list[str]:
    """Arguments for `lfmfast serve`."""
    result: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument in DROPPED:
            for _ in range(DROPPED[argument]):
                next(rest)
        else:
            result.append(argument)
    return result


if __name__ == "__main__":
    command = [sys.executable, "-m", "lfmfast", "serve", *translated(sys.argv[1:])]
    os.execv(command[0], command)
