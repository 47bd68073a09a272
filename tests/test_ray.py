"""lfmfast.ray: rows in, rows with answers out; and a job on a Ray cluster of this machine, one of whose actors is killed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import psutil
import pytest

from lfmfast import ParameterError
from lfmfast.batch.request import Form
from lfmfast.ray import LFM2Predictor, resources

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/ray_batch.py"
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Japan": "Tokyo"}
LOAD = {"n_ctx": 512, "n_threads": 1}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context")  # Ray's own, of its own defaults
QUESTION = "What is the capital of {country}?"


@pytest.fixture(scope="module")
def arrow() -> Any:
    return pytest.importorskip("pyarrow")


@pytest.fixture
def predictor(lfm2_tiny_path: Path, arrow: Any) -> Iterator[Any]:
    """Makes predictors of the small model."""
    made: list[LFM2Predictor] = []

    def make(**options: Any) -> LFM2Predictor:
        made.append(LFM2Predictor(str(lfm2_tiny_path), **{"temperature": 0, "load": LOAD, "seed": 5, **options}))
        return made[-1]

    yield make
    for one in made:
        one._model.close()


def messages(country: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": QUESTION.format(country=country)}]


def test_rows(predictor: Any, arrow: Any) -> None:
    one = predictor(template=QUESTION)
    countries = [*CAPITALS, None, "France"]
    table = one(arrow.table({"id": range(6), "country": countries}))
    assert table.column("text").to_pylist() == [country and f"The capital of {country} is {CAPITALS[country]}."
                                                for country in countries]  # fmt: skip
    assert table.column("error").to_pylist() == [None] * 4 + ["'country' is null", None]
    assert table.column("id").to_pylist() == [*range(6)]
    assert table.column("completion_tokens")[0].as_py() == 11
    empty = one(table.select(["country"]).slice(0, 0))
    assert empty.schema.field("error").type == arrow.string()


@pytest.mark.slow
def test_batches_of_every_format(predictor: Any, arrow: Any) -> None:
    needs.module("ray.data")
    one = predictor(max_tokens=5)
    table = arrow.table({"messages": [messages(country) for country in CAPITALS]})
    expected = one(table).column("text")
    for batch in (table.to_pandas(), {"messages": table.column("messages").to_numpy()}):
        assert one(batch).column("text").equals(expected)


def test_prompts_of_every_kind(predictor: Any, arrow: Any) -> None:
    talk = [{"role": "user", "content": "My name is Ada.", "name": None}, {"role": "assistant", "content": "Hello, Ada!"},
            {"role": "user", "content": "What is my name?"}]  # fmt: skip
    asked = arrow.table({"messages": [messages("France"), talk, [], None, [{"role": "user", "content": "word " * 2000}]]})
    one = predictor()
    table = one(asked)
    assert table.column("text").to_pylist() == ["The capital of France is Paris.", "Your name is Ada.", None, None, None]
    errors = table.column("error").to_pylist()
    assert errors[:2] == [None, None]
    assert "messages must be" in errors[2]
    assert "one of messages and prompt" in errors[3]
    assert "512" in errors[4]
    ids = one._model.tokenize("1, 2, 3,")
    one = predictor(max_tokens=4)
    expected = one._model.generate("1, 2, 3,", temperature=0, max_tokens=4).text
    assert one(arrow.table({"prompt": ["1, 2, 3,"]})).column("text").to_pylist() == [expected]
    assert one(arrow.table({"prompt": [ids]})).column("text").to_pylist() == [expected]
    body = {"messages": messages("Spain"), "max_tokens": 20, "seed": 7}
    lines = [{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}]
    lines.append({"custom_id": "b", "method": "POST", "url": "/v1/embeddings", "body": {"messages": messages("Italy")}})
    table = one(arrow.Table.from_pylist(lines))
    assert table.column("text").to_pylist() == ["The capital of Spain is Madrid.", None]
    assert table.column("seed")[0].as_py() == 7
    assert "url must be" in table.column("error")[1].as_py()


def test_seeds_are_of_the_rows(predictor: Any, arrow: Any) -> None:
    wild: dict[str, Any] = {"temperature": 3.0, "max_tokens": 8, "ignore_eos": True}
    column: dict[str, Any] = {"prompt_column": "q", "raw": True, **wild}
    one = predictor(id_column="id", n=2, **column)
    rows = arrow.table({"id": [3, 4, 5], "q": ["Once"] * 3})
    whole = one(rows).select(["text", "seed"]).to_pylist()
    assert len({text for row in whole for text in row["text"]}) == 6
    parts = [one(rows.slice(i, 1)).select(["text", "seed"]).to_pylist()[0] for i in (2, 0, 1)]  # wherever a row is computed
    assert [parts[1], parts[2], parts[0]] == whole
    assert whole[0]["seed"][0] == Form(seed=5).seed_of(3)  # that of line 3 of `lfmfast batch --seed 5`
    for row in whole:
        for text, seed in zip(row["text"], row["seed"], strict=True):
            assert one._model.generate("Once", seed=seed, **wild).text == text
    plain = predictor(**column)
    seeds = plain(arrow.table({"q": ["a", "b", "a"]})).column("seed").to_pylist()
    assert (seeds[0] == seeds[2], seeds[0] == seeds[1]) == (True, False)
    assert predictor(seed=None, **column)._form.seed != predictor(seed=None, **column)._form.seed


def test_forms_and_names(predictor: Any, arrow: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    one = predictor(prompt_column="text", json_schema=schema, prefix="answer_", system_prompt="Be brief.")
    table = one(arrow.table({"text": ["Hi"]}))
    assert json.loads(table.column("answer_text")[0].as_py()) == {"a": 7}
    assert "answer_error" in table.column_names
    with pytest.raises(ParameterError, match="has a column text already"):
        predictor(prompt_column="text")(arrow.table({"text": ["Hi"]}))
    with pytest.raises(ParameterError, match="no column q; it has x"):
        predictor(prompt_column="q")(arrow.table({"x": ["Hi"]}))
    with pytest.raises(ParameterError, match="no column messages or prompt"):
        predictor()(arrow.table({"x": ["Hi"]}))


@pytest.mark.parametrize(("options", "why"), [
    ({"temprature": 1}, "no option temprature"), ({"temperature": -1}, "temperature must be"), ({"raw": True}, "raw needs"),
    ({"prompt_column": "a", "template": "{a}"}, "can't be given together"), ({"template": "a"}, "has no column in it"),
    ({"n": 0}, "n must be"), ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems can't be enforced"),
])  # fmt: skip
def test_options_that_are_wrong(predictor: Any, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ParameterError, match=why):
        predictor(**options)


def test_what_is_not_a_rows_fault_ends_the_batch(predictor: Any, arrow: Any) -> None:
    one = predictor(template=QUESTION)
    one._model.close()
    with pytest.raises(Exception, match="closed"):
        one(arrow.table({"country": ["France"]}))


def test_resources() -> None:
    assert resources((1, 3), num_cpus=0.5, num_gpus=0.25) == {"concurrency": (1, 3), "num_cpus": 0.5, "num_gpus": 0.25}
    with pytest.raises(ParameterError, match="concurrency must be"):
        resources(0, num_cpus=1)
    from lfmfast.ray import _cpus_of_each

    with pytest.raises(ParameterError, match="has 1 CPUs, which is too few for 40 actors"):
        _cpus_of_each([1], 40)


# --- on a cluster ---


def family(process: psutil.Process) -> dict[int, str]:
    """Process ids of all that a process began, and what they call themselves."""
    found = {}
    for child in process.children(recursive=True):
        try:
            found[child.pid] = " ".join(child.cmdline())
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_an_actor_is_killed(tmp_path: Path, lfm2_tiny_path: Path, arrow: Any) -> None:
    parquet = importlib.import_module("pyarrow.parquet")
    needs.module("ray.data")
    countries = [*CAPITALS, None] * 200
    parquet.write_table(arrow.table({"id": range(1000), "country": countries}), tmp_path / "in.parquet")
    command = [sys.executable, str(EXAMPLE), "in.parquet", "out", "--template", QUESTION, "--model", str(lfm2_tiny_path),
               "--actors", "2", "--batch-size", "100", "--max-tokens", "30"]  # fmt: skip
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "", "RAY_AUTH_MODE": "disabled"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=tmp_path, env=environment)
    seen: dict[int, str] = {}
    actors, killed, n_busy = set[int](), None, 0
    try:
        while process.poll() is None:
            now = family(psutil.Process(process.pid))
            seen |= now
            working = {pid: name for pid, name in now.items() if "LFM2Predictor" in name}
            actors |= working.keys()
            busy = [pid for pid, name in working.items() if ".submit" in name]
            n_busy += bool(busy)
            if killed is None and n_busy == 3:
                killed = busy[0]
                os.kill(killed, 9)
            time.sleep(0.01)
    except psutil.NoSuchProcess:
        pass
    finally:
        process.kill()
        process.wait()
    said = (tmp_path / "log").read_text("utf8", errors="replace")
    assert process.returncode == 0, said[-5000:]
    assert killed is not None, said[-5000:]
    assert len(actors) >= 3, f"the actor {killed} was not replaced"
    rows = parquet.read_table(tmp_path / "out").sort_by("id").to_pylist()
    assert [row["id"] for row in rows] == [*range(1000)]
    for row in rows:
        country = row["country"]
        assert row["text"] == (country and f"The capital of {country} is {CAPITALS[country]}.")
        assert (row["error"] is None) == (country is not None)
    deadline = time.monotonic() + 60
    while left := [pid for pid in seen if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, [seen[pid] for pid in left]
        time.sleep(0.1)
