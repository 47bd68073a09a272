"""The chart of bench.compare: a panel for each scenario, bars from zero, numbers beside them, no meaning in colour alone."""

from __future__ import annotations

import statistics
import textwrap
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench.compare_report import Record, note, outcome, rates, sides_of, why_not

OURS, THEIRS = "#0072b2", "#b8b8b8"  # dark blue and light grey differ in lightness too
COLUMNS = 2
STYLE = {"font.size": 9, "font.family": "DejaVu Sans", "svg.hashsalt": "bench.compare", "svg.fonttype": "path"}


def name(record: Record, scenario: str, side: str) -> str:
    """A bar's name: in a batch lfmfast is `lfmfast batch`."""
    about = record["sides"][side]
    if about["ours"] and record["scenarios"][scenario]["batch"]:
        return "lfmfast batch"
    return str(about["title"])


def _panel(axes: Axes, record: Record, scenario: str) -> None:
    sides = sides_of(record, scenario)
    values = {side: rates(record, scenario, side) for side in sides}
    longest = max((max(v) for v in values.values() if v), default=1.0)
    for row, side in enumerate(sides):
        about = record["sides"][side]
        if not values[side]:
            reason = textwrap.shorten(f"not run: {why_not(record, scenario, side)}", 60, placeholder=" ...")
            axes.text(longest * 0.01, row, reason, va="center", color="#444444", style="italic")
            continue
        middle = statistics.median(values[side])
        axes.barh(row, middle, 0.68, color=OURS if about["ours"] else THEIRS, edgecolor="black", linewidth=0.6)
        spread = [[middle - min(values[side])], [max(values[side]) - middle]]
        if len(values[side]) > 1:
            axes.errorbar(middle, row, xerr=spread, color="black", capsize=2, linewidth=0.8)
        result = outcome(record, scenario, side)
        if result.startswith("lost"):
            result = result.replace("lost", "lfmfast slower")
        elif result and not result.startswith("tie"):
            result = f"lfmfast {result}"
        shown = f"  {middle:.0f}" if middle >= 10 else f"  {middle:.1f}"
        shown += f"   {result}" if result else ""
        part = note(record, scenario, side)
        axes.text(max(values[side]), row, shown + (f" ({part})" if part else ""), va="center",
                  fontweight="bold" if about["ours"] else "normal")  # fmt: skip
    axes.set_yticks(range(len(sides)), [name(record, scenario, side) for side in sides])
    for label, side in zip(axes.get_yticklabels(), sides, strict=True):
        label.set_fontweight("bold" if record["sides"][side]["ours"] else "normal")
    axes.set_ylim(len(sides) - 0.45, -0.55)
    axes.set_xlim(0, longest * 1.95)  # room for the text
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= longest * 1.02])
    axes.set_xlim(0, longest * 1.95)
    axes.set_title(record["scenarios"][scenario]["title"], loc="left", fontsize=10, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def draw(record: Record, folder: Path) -> list[Path]:
    """Write compare.svg and compare.png; their paths."""
    scenarios = list(record["scenarios"])
    n_rows = -(-len(scenarios) // COLUMNS)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(n_rows, COLUMNS, figsize=(12, 1.1 + 2.05 * n_rows), squeeze=False, layout="constrained")
        cells = list(grid.flat)
        for axes, scenario in zip(cells, scenarios, strict=False):
            _panel(axes, record, scenario)
        for axes in cells[len(scenarios):]:
            axes.axis("off")
        about = f"{record['model']}, {record['threads']} threads, {record['machine']}, {record['made']}"
        figure.suptitle("Tokens per second: longer is better\n", x=0.01, ha="left", fontsize=14, fontweight="bold")
        figure.text(0.01, 1 - 0.42 / figure.get_figheight(), about + ("; " + record["caveat"] if record["caveat"] else ""),
                    va="center", fontsize=8.5)  # fmt: skip
        figure.supxlabel("median of the repeats, whiskers from least to most; each panel has its own scale, from zero. "
                         "\u201clfmfast 2 times\u201d: it gives twice as many.", x=0.01, ha="left", fontsize=8.5)  # fmt: skip
        paths = [folder / "compare.svg", folder / "compare.png"]
        figure.savefig(paths[0], facecolor="white", metadata={"Date": None})
        figure.savefig(paths[1], facecolor="white", dpi=110)
        plt.close(figure)
    return paths
