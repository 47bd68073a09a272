"""The table of README.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from peer.run import Result

PATH = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"


def counts(results: Sequence[Result]) -> str:
    """How many of each outcome."""
    return ", ".join(f"{sum(r.outcome == outcome for r in results)} {outcome}" for outcome in
                     ("passed", "adapted", "failed", "left out"))  # fmt: skip


def table(results: Sequence[Result]) -> str:
    """A row per test function, with the cases of a parametrised one counted."""
    by_function: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_function[result.name.split("[", 1)[0]].append(result)
    lines = [f"{len(results)} tests: {counts(results)}.", "", "| test | result |", "|---|---|"]
    for name, cases in by_function.items():
        module, _, function = name.partition(".py::")
        said: dict[str, int] = defaultdict(int)
        for case in cases:
            why = ", ".join(case.compared) or case.why.partition("\n")[0]
            said[f"{case.outcome}: {why}" if why else case.outcome] += 1
        text = "; ".join(f"{outcome}" + (f" ({n})" if len(cases) > 1 else "") for outcome, n in said.items())
        title = f"{module.removeprefix('test_')}: {function.removeprefix('test_')}"
        lines.append(f"| {title} | {text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def write(results: Sequence[Result]) -> None:
    """Put the table into README.md."""
    text = PATH.read_text("utf8")
    head, _, rest = text.partition(BEGIN)
    PATH.write_text(head + BEGIN + table(results) + END + rest.partition(END)[2], "utf8")
