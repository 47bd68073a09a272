"""`lfmfast batch` as a process: killed, interrupted, through pipes, with tables, and what it says."""

from __future__ import annotations

import io
import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lfmfast.batch.output import begun_with, sidecar
from lfmfast.batch.progress import Progress
from lfmfast.batch.run import Counts

MODEL = Path(__file__).parent / "data/lfm2-tiny/lfm2-tiny-f16.gguf"
BATCH = [sys.executable, "-m", "lfmfast", "batch"]
OPTIONS = ["-m", str(MODEL), "-t", "1", "-c", "512", "--seed", "5"]
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo"}


@pytest.fixture(autouse=True)
def in_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # `python -m lfmfast` in the repository would take the source folder
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def batch(*arguments: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run([*BATCH, *map(str, arguments), *OPTIONS], capture_output=True, text=True, encoding="utf-8",
                          timeout=300, **given)  # fmt: skip


def question(country: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is the capital of {country}?"}]


def write(path: str, lines: list[Any]) -> Path:
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines), "utf8")
    return Path(path)


def results(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def openai_line(number: int, **body: Any) -> dict[str, Any]:
    country = list(CAPITALS)[number % 4]
    return {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/chat/completions",
            "body": {"model": "tiny", "messages": question(country), **body}}  # fmt: skip


def contents(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each result by its custom_id, what does not change from run to run."""
    found = {}
    for line in lines:
        body = line["response"] and line["response"]["body"]
        found[line["custom_id"]] = line["id"], line["error"], body and (body["choices"], body["seed"])
    return found


# --- stopped ---


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in (path, sidecar(path)) if file.exists())


def start_until(command: list[str], path: Path, grown: int, patience: float) -> subprocess.Popen[str]:
    """Begin, and come back when so many bytes were written, or some time has gone by, or it has ended."""
    before, began = size(path), time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and size(path) - before < grown and time.monotonic() - began < patience:
        time.sleep(0.001)
    return process


def check_killed(done: subprocess.CompletedProcess[str], path: Path, n: int, ordered: bool) -> None:
    """Every line has its result, once."""
    assert done.returncode == 1, done.stderr
    assert f"{n} lines (10 failed)" in done.stderr
    got = results(path.read_text("utf8"))
    ids = [line["custom_id"] for line in got]
    assert sorted(ids) == sorted(f"request-{i}" for i in range(n))
    assert not ordered or ids == [f"request-{i}" for i in range(n)]
    assert sum(line["error"] is not None for line in got) == 10
    assert not sidecar(path).exists()


@pytest.mark.slow
@pytest.mark.parametrize("order", [[], ["--unordered"]], ids=["ordered", "unordered"])
def test_killed_twenty_times(order: list[str]) -> None:
    n, path = 600, Path("out.jsonl")
    lines: list[Any] = [openai_line(i, max_tokens=8 + i % 25, ignore_eos=True, temperature=0) for i in range(n)]
    for i in range(0, n, n // 10):
        lines[i]["body"]["top_k"] = "wrong"
    source = write("in.jsonl", lines)
    command = [*BATCH, str(source), "-o", str(path), *order, "--window", "32", *OPTIONS]
    chance = random.Random(len(order))
    n_kills = n_grown = 0
    seen: list[str] = []
    while n_kills < 20:
        before = size(path)
        if n_kills % 4:
            process = start_until(command, path, chance.randrange(1, 3000), 60)
        else:
            process = start_until(command, path, 10**9, chance.uniform(0, 1.2))
        ended = process.poll()
        process.kill()
        _, said = process.communicate()
        if ended is not None:  # faster than we are: once more from the beginning
            check_killed(subprocess.CompletedProcess(command, ended, "", said), path, n, not order)
            path.unlink()
            seen = []
            continue
        n_kills += 1
        n_grown += size(path) != before
        whole = path.read_text("utf8").rpartition("\n")[0].splitlines() if path.exists() else []
        assert whole[: len(seen)] == seen  # what was written stays
        seen = whole
    assert n_grown >= 10
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    check_killed(done, path, n, not order)
    got = contents(results(path.read_text("utf8")))
    assert batch(source, "-o", "whole.jsonl").returncode == 1
    whole = contents(results(Path("whole.jsonl").read_text("utf8")))
    differing = [name for name, value in got.items() if value != whole[name]]
    assert len(differing) <= n // 20  # where two tokens are all but equally likely, the company in a pass decides


def test_interrupted() -> None:
    source = write("in.jsonl", [openai_line(i, max_tokens=30, ignore_eos=True) for i in range(150)])
    path = Path("out.jsonl")
    command = [*BATCH, str(source), "-o", str(path), *OPTIONS]
    process = start_until(command, path, 3000, 60)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "the same command goes on from here" in said
    assert "Traceback" not in said
    assert path.read_text("utf8").endswith("\n") or path.stat().st_size == 0
    done = batch(source, "-o", path)
    assert done.returncode == 0, done.stderr
    assert [line["custom_id"] for line in results(path.read_text("utf8"))] == [f"request-{i}" for i in range(150)]


def test_what_was_begun_is_gone_on_with_as_it_was() -> None:
    source = write("in.jsonl", [{"messages": question("France"), "max_tokens": 40, "ignore_eos": True}] * 100)
    path = Path("out.jsonl")
    process = start_until([*BATCH, str(source), "-o", str(path), *OPTIONS], path, 2500, 60)
    process.kill()
    process.communicate()
    before = path.read_bytes()
    begun = begun_with(path)
    assert begun is not None
    for change, why in ((["--temp", "0.5"], "options was {}, and is {'temperature': 0.5}"), (["--n", "2"], "--n was 1"),
                        (["--unordered"], "--unordered was False"), (["-sys", "Be brief."], "-sys was None"),
                        (["--format", "openai"], "columns was True")):  # fmt: skip
        done = batch(source, "-o", path, *change)
        assert done.returncode == 2
        assert f"was begun otherwise: {why}" in done.stderr
    write("in.jsonl", [{"messages": question("Italy")}] * 100)
    done = batch(source, "-o", path)
    assert (done.returncode, "first line was" in done.stderr) == (2, True)
    assert path.read_bytes() == before
    assert begun_with(path) == begun
    done = batch(source, "-o", path, "--overwrite", "--temp", "0")
    assert done.returncode == 0, done.stderr
    assert {line["text"] for line in results(path.read_text("utf8"))} == {"The capital of Italy is Rome."}
    done = batch(source, "-o", path)
    assert (done.returncode, "is there already" in done.stderr) == (2, True)


# --- in and out ---


def test_pipes_flags_and_exit_codes() -> None:
    lines = [{"messages": question("France")}, {"messages": question("Italy"), "custom_id": "it"}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    done = batch("-", "-o", "-", "--temp", "0", stdin=text)
    assert done.returncode == 0, done.stderr
    assert [line["text"] for line in results(done.stdout)] == [f"The capital of {name}." for name in ("France is Paris",
                                                                                                    "Italy is Rome")]
    assert [line["custom_id"] for line in results(done.stdout)] == [None, "it"]
    assert "2 lines in 0:0" in done.stderr
    done = batch("-", "-o", "-", "--format", "openai", "--max-tokens", "3", "--n", "2", "--temp", "0", stdin=text + "\n{}\n")
    assert done.returncode == 1
    first, _, last = results(done.stdout)
    assert [choice["message"]["content"] for choice in first["response"]["body"]["choices"]] == ["The capital of"] * 2
    assert first["response"]["body"]["usage"]["completion_tokens"] == 6
    assert last["error"]["line"] == 4
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    Path("schema.json").write_text(json.dumps(schema))
    for given in (json.dumps(schema), "schema.json"):
        done = batch("-", "-o", "-", "--schema", given, "--temp", "0", stdin=text)
        assert [json.loads(line["text"]) for line in results(done.stdout)] == [{"a": 7}] * 2
    Path("yes.gbnf").write_text('root ::= "yes"')
    for given, text_of in ((["--regex", "[a-c]{3}"], "[abc]{3}"), (["--grammar", 'root ::= "no"'], "no"),
                           (["--grammar-file", "yes.gbnf"], "yes")):  # fmt: skip
        done = batch("-", "-o", "-", *given, stdin=text)
        assert all(re.fullmatch(text_of, line["text"]) for line in results(done.stdout)), done.stderr
    done = batch("-", "-o", "-", "--max-tokens", "2", "--typical", "0.9", "--top-nsigma", "1", "--xtc-probability", "0.1",
                 "--xtc-threshold", "0.2", "--dynatemp-range", "0.1", "--dynatemp-exp", "1", "--dry-multiplier", "0.5",
                 "--dry-base", "2", "--dry-allowed-length", "3", "--dry-penalty-last-n", "64", "--dry-sequence-breaker", "none",
                 "--samplers", "dry;top_k;temperature", "-l", "15-inf", "-l", "16+2.5", stdin=text)  # fmt: skip
    assert (done.returncode, len(results(done.stdout))) == (0, 2), done.stderr
    done = batch("-", "-o", "-", "--max-tokens", "2", "--mirostat", "2", "--mirostat-lr", "0.2", "--mirostat-ent", "4", "-l",
                 "79+1000", stdin=text)  # fmt: skip
    assert {line["text"] for line in results(done.stdout)} == {"bb"}
    assert not list(Path().glob("*.progress"))


def test_an_empty_file() -> None:
    Path("in.jsonl").write_text("\n\n")
    done = batch("in.jsonl", "-o", "out.jsonl")
    assert (done.returncode, Path("out.jsonl").read_bytes()) == (0, b"")


def test_tables() -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"country": name, "n": i} for i, name in enumerate(CAPITALS)] + [{"country": None, "n": 9}]
    parquet.write_table(arrow.Table.from_pylist(rows), "in.parquet")
    done = batch("in.parquet", "-o", "out.parquet", "--template", "What is the capital of {country}?", "--temp", "0")
    assert done.returncode == 1, done.stderr
    table = parquet.read_table("out.parquet").to_pylist()
    assert [row["text"] for row in table] == [*(f"The capital of {c} is {t}." for c, t in CAPITALS.items()), None]
    assert [row["line"] for row in table] == [1, 2, 3, 4, 5]
    assert table[4]["error"] == "line 5: 'country' is null"
    assert sorted(path.name for path in Path().iterdir()) == ["in.parquet", "out.parquet"]
    done = batch("in.parquet", "-o", "out.parquet", "--prompt-column", "country")
    assert (done.returncode, "is there already" in done.stderr) == (2, True)
    done = batch("in.parquet", "-o", "out.parquet", "--overwrite", "--prompt-column", "country", "--raw", "--n", "2", "-n", "3")
    assert done.returncode == 1, done.stderr
    table = parquet.read_table("out.parquet").to_pylist()
    assert [row["text"] and len(row["text"]) for row in table] == [2, 2, 2, 2, None]
    assert table[0]["seed"][1] == table[0]["seed"][0] + 1
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}}}}]  # fmt: skip
    asked = [{"role": "system", "content": "You are a helpful assistant."},
             {"role": "user", "content": "What is the weather in Paris?"}]  # fmt: skip
    write("in.jsonl", [{"messages": asked, "tools": tools}, openai_line(1, n=2)])
    done = batch("in.jsonl", "-o", "calls.parquet", "--temp", "0")
    assert done.returncode == 1
    table = parquet.read_table("calls.parquet").to_pylist()
    assert json.loads(table[0]["tool_calls"])[0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert table[1]["error"] == "line 2: a table has one answer for each line, or with --n lists of them"


def test_a_damaged_file_is_not_taken_for_a_short_one() -> None:
    import gzip

    lines = "".join(json.dumps({"prompt": f"{i}", "max_tokens": 1}) + "\n" for i in range(300)).encode()
    Path("in.jsonl.gz").write_bytes(gzip.compress(lines)[:-30])
    done = batch("in.jsonl.gz", "-o", "out.jsonl")
    assert done.returncode == 1
    assert "in.jsonl.gz is damaged or cut" in done.stderr
    assert sidecar(Path("out.jsonl")).exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["in.jsonl"], "output"),
        (["none.jsonl", "-o", "x"], "none.jsonl: No such file"),
        (["in.jsonl", "-o", "x.gz"], "a packed output could not be gone on with"),
        (["in.jsonl", "-o", "x", "--window", "0"], "--window must be from 1 to 100000, not 0"),
        (["in.jsonl", "-o", "x", "--n", "129"], "--n must be from 1 to 128, not 129"),
        (["in.jsonl", "-o", "x", "--format", "csv"], "--format must be openai or columns, not 'csv'"),
        (["in.jsonl", "-o", "x.parquet", "--format", "openai"], "a table has columns"),
        (["in.jsonl", "-o", "x", "--raw"], "--raw needs --prompt-column or --template"),
        (["in.jsonl", "-o", "x", "--prompt-column", "a", "--template", "{a}"], "can't be given together"),
        (["in.jsonl", "-o", "x", "--template", "a"], "the template has no column in it"),
        (["in.jsonl", "-o", "x", "--temp", "-1"], "temperature must be"),
        (["in.jsonl", "-o", "x", "--schema", "{}", "--regex", "a"], "--schema and --regex can't be given together"),
        (["in.jsonl", "-o", "x", "--regex", "("], "regex"),
        (["in.jsonl", "-o", "x", "--grammar", "x"], "rammar"),
        (["in.jsonl", "-o", "x", "-l", "7"], "--logit-bias must be a token id, a sign and a number, as in 15043+1, not '7'"),
        (["in.jsonl", "-o", "x", "--samplers", "top_k;x"], "samplers: there is no 'x'"),
        (["in.jsonl", "-o", "x", "--schema", "{"], "--schema is no JSON"),
        (["in.jsonl", "-o", "x", "--schema", '{"type": "array", "uniqueItems": true}'], "uniqueItems can't be enforced"),
    ],
)
def test_usage(arguments: list[str], why: str) -> None:
    write("in.jsonl", [{"prompt": "x"}])
    done = batch(*arguments)
    assert done.returncode == (1 if "none" in arguments[0] else 2)
    assert why in done.stderr
    assert [path.name for path in Path().iterdir()] == ["in.jsonl"]


# --- how far it is ---


@pytest.mark.skipif(sys.platform == "win32", reason="pexpect has no terminals there")
def test_the_bar_on_a_terminal() -> None:
    import pexpect

    write("in.jsonl", [{"messages": question(list(CAPITALS)[i % 4]), "max_tokens": 30, "ignore_eos": True} for i in range(120)])
    terminal = pexpect.spawn(BATCH[0], [*BATCH[1:], "in.jsonl", "-o", "out.jsonl", *OPTIONS], dimensions=(24, 110),
                             encoding="utf-8", timeout=120)  # fmt: skip
    terminal.expect("\r *[0-9]+%  [━╌]{8,}  [0-9]+ lines?, [0-9.,]+ tok/s, [0-9]+% of prompts cached, ETA [0-9:]+\x1b\\[K")
    terminal.expect("\r\x1b\\[K120 lines in [0-9:]+, 3,600 tokens written, .* tok/s, [0-9]+% of prompts cached\r\n")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0
    assert len(results(Path("out.jsonl").read_text("utf8"))) == 120


class Screen(io.StringIO):
    live = True

    def isatty(self) -> bool:
        return self.live


@pytest.mark.parametrize("live", [True, False])
def test_progress(monkeypatch: pytest.MonkeyPatch, live: bool) -> None:
    screen, now = Screen(), 100.0
    screen.live = live
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setenv("COLUMNS", "100")
    progress = Progress(1000)
    counts = Counts(lines=20, failed=1, size=250, prompt_tokens=100, cached_tokens=75, completion_tokens=3000)
    progress(counts)
    assert screen.getvalue() == ""  # not so soon
    now += 40
    progress(counts)
    progress.close()
    text = screen.getvalue()
    assert "25%" in text
    assert "20 lines (1 failed), 75.0 tok/s, 75% of prompts cached, ETA 2:00" in text
    assert (text.count("\n"), "━" in text, text.endswith("\033[K")) == ((0, True, True) if live else (1, False, False))
    assert all(len(line.replace("\033[K", "")) < 100 for line in text.split("\r"))
