"""bench.compare: what it writes of given numbers, what it says of itself, and a run on the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests" / "data" / "lfm2-tiny" / "lfm2-tiny-f16.gguf"
PNG = b"\x89PNG\r\n\x1a\n"


def compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "bench.compare", *map(str, arguments)], cwd=ROOT, stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, timeout=500)  # fmt: skip


def side(title: str, how: str, *, ours: bool = False, **more: str) -> dict[str, object]:
    return {"title": title, "how": how, "ours": ours, **({"about": f"{title} 1.0"} | more if "missing" not in more else more)}


def runs(*rates: float, **more: int) -> list[dict[str, float]]:
    return [{"rate": rate, "ttft_ms": 100.0, **more} for rate in rates]


@pytest.fixture
def record() -> dict[str, object]:
    http, python = "over HTTP", "in Python"
    return {
        "made": "2026-01-02", "machine": "a machine", "model": "a model", "threads": 2, "sampling": "{}", "repeats": 3,
        "caveat": "", "notes": ["a note"],
        "tuning": {"batch": [{"n_parallel": 8, "options": ["-kvu"], "rate": 70.0},
                             {"n_parallel": 32, "options": [], "failed": "no"}]},
        "sides": {"lfmfast": side("lfmfast", python, ours=True), "other-library": side("other library", python),
                  "lfmfast-serve": side("lfmfast serve", http, ours=True), "other-server": side("other server", http),
                  "absent": side("absent", python, missing="it could not be installed")},
        "scenarios": {
            "single": {"title": "one stream", "batch": False, "runs": {
                "lfmfast": runs(50, 51, 52), "other-library": runs(60, 61, 62), "lfmfast-serve": runs(50, 51, 60),
                "other-server": runs(49, 55, 56)}},
            "8": {"title": "8 clients", "batch": False, "runs": {
                "lfmfast": runs(200), "other-library": [{"failed": "it fell over\nlog"}], "lfmfast-serve": runs(180),
                "other-server": runs(60)}},
            "batch": {"title": "a file", "batch": True, "n_lines": 500, "runs": {
                "lfmfast": runs(240, n_lines=500), "other-library": runs(20, n_lines=90),
                "other-server": runs(80, n_lines=500)}},
        },
    }  # fmt: skip


def test_page_and_chart_are_made_of_recorded_numbers(record, tmp_path):
    (tmp_path / "compare.json").write_text(json.dumps(record))
    done = compare("--draw", tmp_path / "compare.json")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "compare.md").read_text()
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in page.splitlines()
            if line.startswith("|")}  # fmt: skip
    table = page.split("## Time to")[0]
    assert "| one stream | 51.0 | 61.0 (lost (0.84 times)) | 51.0 | 55.0 (tie (0.93)) | not run |" in table  # like with like
    assert "| 8 clients | 200.0 | failed | 180.0 | 60.0 (3.0 times) | not run |" in table
    assert "| a file | 240.0 | 20.0 (12 times; first 90 lines) |  | 80.0 (3.0 times) | not run |" in table
    assert rows["`-np 8 -kvu`"] == ["70.0"]
    assert rows["`-np 32`"] == ["failed: no"]
    for said in ("a machine", "a model", "2026-01-02", "it could not be installed", "8 clients: failed: it fell over",
                 "a note"):  # fmt: skip
        assert said in page
    assert (tmp_path / "compare.png").read_bytes().startswith(PNG)
    assert ET.parse(tmp_path / "compare.svg").getroot().tag.endswith("svg")


def test_a_chart_of_the_same_numbers_is_the_same(record, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "compare.json").write_text(json.dumps(record))
        assert compare("--draw", tmp_path / name / "compare.json").returncode == 0
    assert (tmp_path / "a" / "compare.svg").read_bytes() == (tmp_path / "b" / "compare.svg").read_bytes()


def test_help_names_scenarios_sides_and_files():
    done = compare("--help")
    assert done.returncode == 0
    for said in ("single", "batch-shared", "llama-server", "llama-cpp-python", "xllamacpp", "Ollama", "--quick", "--draw",
                 "bench/results", "minutes"):  # fmt: skip
        assert said in done.stdout


@pytest.mark.parametrize(("flag", "value", "said"), [("--only", "single,nine", "nine: choose from single, 8"),
                                                    ("--sides", "lfmfst", "lfmfst: choose from lfmfast")])  # fmt: skip
def test_unknown_names_are_refused(flag, value, said):
    done = compare(flag, value)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.slow
def test_a_run_on_the_tiny_model(tmp_path):
    done = compare("--quick", "--sides", "lfmfast,lfmfast-serve", "--model", MODEL, "--repeats", 1, "--threads", 1, "--only",
                   "single,shared,chat,batch-shared", "--results", tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "compare.json").read_text())
    assert list(record["scenarios"]) == ["single", "shared", "chat", "batch-shared"]
    for name, values in record["scenarios"].items():
        n_answers = values["n_lines"] or values["n_clients"] * values["n_rounds"]
        expected = ["lfmfast"] if values["batch"] else ["lfmfast", "lfmfast-serve"]
        assert sorted(values["runs"]) == expected
        for [run] in values["runs"].values():
            assert "failed" not in run, f"{name}: {run}"
            assert run["n_generated"] == n_answers * values["n_tokens"]
            assert run["rate"] > 0
    assert "A quick run: its numbers say nothing." in (tmp_path / "compare.md").read_text()


@pytest.mark.slow
def test_a_side_that_fails_says_why_and_the_others_run(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_API_KEY", "secret")  # so the server refuses the benchmark's requests
    done = compare("--quick", "--sides", "lfmfast,lfmfast-serve", "--model", MODEL, "--repeats", 2, "--only", "single",
                   "--results", tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    both = json.loads((tmp_path / "compare.json").read_text())["scenarios"]["single"]["runs"]
    assert [run["rate"] > 0 for run in both["lfmfast"]] == [True, True]
    [failed] = both["lfmfast-serve"]  # it is not asked again
    assert "status 401" in failed["failed"]
    assert "one stream: failed: " in (tmp_path / "compare.md").read_text()
