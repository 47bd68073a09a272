"""How bench.compare shows its numbers in text: ratios with ties and losses, and a page in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from bench import report
from bench.engine_report import Verdict

TIE = 0.03  # a ratio that is no further from 1 is a tie, as is one whose sides' ranges overlap
TARGETS = (("batch", "llama-server", 1.3), ("batch", "llama-cpp-python", 5.0), ("batch-shared", "llama-server", 3.0))

Record = dict[str, Any]  # what compare.json holds


def runs(record: Record, scenario: str, side: str) -> list[dict[str, Any]]:
    """The measurements that came to their end."""
    return [run for run in record["scenarios"][scenario]["runs"].get(side, []) if "failed" not in run]


def rates(record: Record, scenario: str, side: str) -> list[float]:
    """Tokens per second, of each repeat."""
    return [float(run["rate"]) for run in runs(record, scenario, side)]


def why_not(record: Record, scenario: str, side: str) -> str:
    """Why a side has no number, in a line."""
    failed = [run["failed"] for run in record["scenarios"][scenario]["runs"].get(side, []) if "failed" in run]
    return str(record["sides"][side].get("missing") or (failed[0] if failed else "left out")).splitlines()[0]


def ours(record: Record, scenario: str, side: str) -> str | None:
    """The side of lfmfast that a peer is compared with: a server with the server, a library with the library."""
    how = record["sides"][side]["how"]
    for name, about in record["sides"].items():
        is_ours = about["ours"] and name != side and not record["sides"][side]["ours"]
        if is_ours and (record["scenarios"][scenario]["batch"] or about["how"] == how) and rates(record, scenario, name):
            return str(name)
    return None


def ratio(record: Record, scenario: str, side: str) -> float | None:
    """How many times more tokens per second lfmfast gives."""
    name = ours(record, scenario, side)
    theirs = rates(record, scenario, side)
    if name is None or not theirs:
        return None
    return statistics.median(rates(record, scenario, name)) / statistics.median(theirs)


def outcome(record: Record, scenario: str, side: str) -> str:
    """The ratio in words: "2.2 times", "tie (1.02)", "lost (0.87 times)"; nothing where there is none."""
    value = ratio(record, scenario, side)
    name = ours(record, scenario, side)
    if value is None or name is None:
        return ""
    a, b = rates(record, scenario, name), rates(record, scenario, side)
    overlap = len(a) > 1 and len(b) > 1 and min(a) <= max(b) and min(b) <= max(a)
    if overlap or abs(value - 1) <= TIE:
        return f"tie ({value:.2f})"
    times = f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 10 else f"{value:.0f}"
    return f"{times} times" if value > 1 else f"lost ({times} times)"


def note(record: Record, scenario: str, side: str) -> str:
    """What is special about a number: a part of the file only."""
    asked = record["scenarios"][scenario].get("n_lines", 0)
    done = [int(run["n_lines"]) for run in runs(record, scenario, side) if "n_lines" in run]
    return f"first {min(done)} lines" if done and asked and min(done) < asked else ""


def cell(record: Record, scenario: str, side: str) -> str:
    """A cell of the table of rates."""
    values = rates(record, scenario, side)
    if not values:
        return "not run" if record["sides"][side].get("missing") else "failed"
    shown = f"{statistics.median(values):.1f}"
    more = [part for part in (outcome(record, scenario, side), note(record, scenario, side)) if part]
    return f"{shown} ({'; '.join(more)})" if more else shown


def sides_of(record: Record, scenario: str) -> list[str]:
    """Sides that have a place in a scenario: lfmfast answers a batch in one way."""
    batch = record["scenarios"][scenario]["batch"]
    return [name for name, about in record["sides"].items() if not (batch and about["ours"] and about["how"] == "over HTTP")]


def _table(record: Record, names: list[str], title: str) -> Iterator[str]:
    about = record["sides"]
    yield f"| {title} | " + " | ".join(about[name]["title"] for name in names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for scenario, values in record["scenarios"].items():
        yield f"| {values['title']} | " + " | ".join(
            cell(record, scenario, name) if name in sides_of(record, scenario) else "" for name in names) + " |"


def _first_tokens(record: Record) -> Iterator[str]:
    names = list(record["sides"])
    yield "| milliseconds | " + " | ".join(record["sides"][name]["title"] for name in names) + " |"
    yield "|---" * (len(names) + 1) + "|"
    for scenario, values in record["scenarios"].items():
        if values["batch"]:
            continue
        cells = []
        for name in names:
            times = [float(run["ttft_ms"]) for run in runs(record, scenario, name) if run["ttft_ms"] is not None]
            cells.append(f"{statistics.median(times):,.0f}" if times else "")
        yield f"| {values['title']} | " + " | ".join(cells) + " |"


def _tried(record: Record) -> Iterator[str]:
    for scenario, tried in record["tuning"].items():
        yield f"| {record['scenarios'].get(scenario, {}).get('title', scenario)} | tok/s |"
        yield "|---|---|"
        for entry in sorted(tried, key=lambda entry: -entry.get("rate", 0)):
            rate = f"{entry['rate']:.1f}" if "rate" in entry else f"failed: {entry['failed'].splitlines()[0][:80]}"
            yield f"| `-np {entry['n_parallel']} {' '.join(entry['options'])}`".rstrip("` ") + f"` | {rate} |"
        yield ""


def markdown(record: Record) -> str:
    """The page."""
    lines = ["# lfmfast and others, in one run", "",
             f"Written by `python -m bench.compare`; all numbers are in compare.json. {record['caveat']}".rstrip(), "",
             "![tokens per second](compare.svg)", "",
             f"- machine: {record['machine']}; {record['made']}",
             f"- model: {record['model']}, {record['threads']} threads, sampling {record['sampling']}",
             f"- medians of {record['repeats']} repeats in turns (files: once), each side in its own process", ""]  # fmt: skip
    lines += ["## Tokens per second", "",
              "In brackets: how many times more lfmfast gives, with like compared: a library with the library, a server with "
              "`lfmfast serve`, and everybody with `lfmfast batch` where it is a file.", ""]  # fmt: skip
    lines += _table(record, list(record["sides"]), "tok/s")
    lines += ["", "## Time to the first token", "", "Of the middle request; in a chat of the middle turn.", ""]
    lines += _first_tokens(record)
    lines += ["", "## What was compared", ""]
    for name, about in record["sides"].items():
        lines.append(f"- {about['title']} ({about['how']}): " + (f"not run: {about['missing']}" if "missing" in about
                                                                  else f"{about['about']}"))  # fmt: skip
        for scenario in record["scenarios"]:
            if name in sides_of(record, scenario) and not rates(record, scenario, name) and "missing" not in about:
                lines.append(f"  - {record['scenarios'][scenario]['title']}: failed: {why_not(record, scenario, name)}")
    lines += [f"- {text}" for text in record["notes"]]
    if record["tuning"]:
        lines += ["", "## llama-server's best settings for a file", "", "Tried on the first prompts; the best one ran.", "",
                  *_tried(record)]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def verdicts(record: Record) -> list[Verdict]:
    """The targets that batches are held to."""
    found = []
    for scenario, side, limit in TARGETS:
        if scenario in record["scenarios"] and side in record["sides"]:
            value = ratio(record, scenario, side)
            if value is not None:
                title = record["scenarios"][scenario]["title"]
                found.append(Verdict(f"{title}: tok/s, lfmfast batch / {side}", value, limit, True))
    return found


def text(record: Record, scenario: str) -> str:
    """A scenario for the terminal."""
    lines = [f"{record['scenarios'][scenario]['title']}: tok/s (min / median / max)"]
    for side in sides_of(record, scenario):
        values = rates(record, scenario, side)
        shown = report.spread(values) if values else f"not run: {why_not(record, scenario, side)}"
        lines.append(f"  {record['sides'][side]['title']:18}{shown}  {outcome(record, scenario, side)} "
                     f"{note(record, scenario, side)}".rstrip())
    return "\n".join(lines)
