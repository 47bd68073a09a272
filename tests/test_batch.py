"""Batches without a process of their own: what lines mean, what is written, what is in memory."""

from __future__ import annotations

import gzip
import importlib.util
import io
import itertools
import json
import os
import sys
import tracemalloc
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lfmfast import Completion, ParameterError, Timings, Usage
from lfmfast.batch import Form, Output, open_source, run
from lfmfast.batch import output as outputs
from lfmfast.batch import reader as readers
from lfmfast.batch.output import Ranges, begun_with, sidecar
from lfmfast.batch.progress import summary
from lfmfast.batch.reader import BatchFileError, Record
from lfmfast.batch.request import Request, template_columns
from lfmfast.batch.run import AHEAD, Counts
from lfmfast.errors import BusyError, ClosedError, ContextFullError

PARIS = [{"role": "user", "content": "What is the capital of France?"}]
HEADER = {"made": "by a test"}


def read(value: Any, number: int = 1, **form: Any) -> Request:
    """The request in a line."""
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return Form(**{"seed": 1, **form}).read(Record(number, raw, len(raw)))


def body(body: Any, url: str = "/v1/chat/completions", **more: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body, **more}


def done(text: str, n: int = 1) -> Completion:
    return Completion(text, (1,) * n, "stop", Usage(5, n, 2), Timings(5, 2, 1.0, n, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0), raw=text)


class Echo:
    """In place of a model: answers with the prompt, in an order of its own."""

    def __init__(self, order: Callable[[list[int]], int] = lambda running: 0, n_ahead: int = 8) -> None:
        self.order, self.n_ahead = order, n_ahead
        self.asked: list[tuple[Any, dict[str, Any]]] = []
        self.keeps = True

    def generate_each(self, requests: Iterable[Any], n_ahead: int | None = None) -> Iterator[tuple[int, Any]]:
        coming, running, n = iter(requests), dict[int, Any](), 0
        while True:
            while len(running) < self.n_ahead and (item := next(coming, StopIteration)) is not StopIteration:
                if item is None:
                    break
                if self.keeps:
                    self.asked.append(item)  # type: ignore[arg-type]
                running[n] = item
                n += 1
            if not running:
                return
            i = list(running)[self.order(list(running))]
            prompt, _ = running.pop(i)
            yield i, prompt if isinstance(prompt, Exception) else done(str(prompt))


def answer(path: Path, lines: Iterable[Any], model: Any, *, ordered: bool = True, columns: bool = True, header: Any = HEADER,
           **options: Any) -> Counts:  # fmt: skip
    """Run a batch to its end."""
    records = (Record(n, json.dumps(line).encode() + b"\n", 10) for n, line in enumerate(lines, 1))
    output = Output(str(path), header, ordered=ordered)
    form = options.pop("form", Form(seed=1))
    try:
        counts = run(model, records, output, form, columns=columns, name="tiny", **options)
    finally:
        output.close()
    output.finish()
    return counts


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf8").splitlines()]


# --- lines ---


@pytest.mark.parametrize(
    ("line", "prompts", "options", "n"),
    [
        (body({"messages": PARIS, "model": "m", "user": "u", "stream": False}), [PARIS], {}, 1),
        (body({"messages": PARIS, "max_completion_tokens": 3, "n": 2, "seed": 4}), [PARIS], {"max_tokens": 3}, 2),
        (body({"messages": PARIS, "logprobs": True, "top_logprobs": 2}), [PARIS], {"logprobs": 2}, 1),
        (body({"messages": PARIS, "logprobs": True}), [PARIS], {"logprobs": 0}, 1),
        (body({"messages": PARIS, "logprobs": False, "temperature": None}), [PARIS], {}, 1),
        (body({"messages": PARIS, "logit_bias": {"7": -100}}), [PARIS], {"logit_bias": {7: -100}}, 1),
        (body({"messages": PARIS, "chat_template_kwargs": {"a": 1}}), [PARIS], {"template_options": {"a": 1}}, 1),
        (body({"prompt": ["x", "y"], "logprobs": 2}, "/v1/completions"), ["x", "y"], {"logprobs": 2}, 1),
        (body({"prompt": [5, 6], "echo": False}, "/v1/completions"), [[5, 6]], {}, 1),
        ({"messages": PARIS, "top_k": 5, "custom_id": "q"}, [PARIS], {"top_k": 5}, 1),
        ({"prompt": "x", "stop": ["y"], "messages": None}, ["x"], {"stop": ["y"]}, 1),
    ],
)
def test_lines(line: Any, prompts: Any, options: Any, n: int) -> None:
    request = read(line)
    assert request.error is None
    assert (request.prompts, request.options, request.n) == (prompts, options, n)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "not JSON: .* at character 1"),
        (b'{"prompt": NaN}', "NaN is no JSON number"),
        (b'{"prompt": "\xff"}', "not UTF-8 .byte 0xff at 12"),
        (b"[" * 100_000, "not JSON"),
        (b"1" * 5000, "not JSON"),
        ([], "not a JSON object, but list"),
        ({}, "one of messages and prompt"),
        ({"prompt": "x", "messages": PARIS}, "not both"),
        ({"prompt": 3}, "prompt must be a text or token ids, not 3"),
        ({"prompt": []}, "prompt must be"),
        ({"messages": "x"}, "messages must be an array"),
        ({"prompt": "x", "n": 2}, "n can't be given here: --n"),
        ({"prompt": "x", "pin": True}, "pin can't"),
        ({"prompt": "x", "seed": "7"}, "seed must be an integer"),
        ({"prompt": "x", "template_options": 3}, "template_options must be an object"),
        ({"prompt": "x", "template_options": {"tools": []}}, "template_options can't set tools"),
        ({"prompt": "x", "tools": {}}, "tools must be an array"),
        ({"prompt": "x", "cache_prompt": 1}, "cache_prompt must be true or false"),
        ({"prompt": "x", "custom_id": 3}, "custom_id must be a string"),
        (body({"messages": PARIS}, custom_id=None), "custom_id is missing"),
        (body({"messages": PARIS}, "/v1/embeddings"), "url must be .*, not '/v1/embeddings'"),
        (body({"messages": PARIS}, method="GET"), "method must be POST"),
        (body("x"), "body must be an object"),
        (body({}), "messages are missing"),
        (body({}, "/v1/completions"), "prompt is missing"),
        (body({"messages": PARIS, "stream": True}), "stream is not supported"),
        (body({"messages": PARIS, "reasoning_effort": "high"}), "reasoning_effort is not supported"),
        (body({"messages": PARIS, "functions": [{}]}), "functions is not supported"),
        (body({"messages": PARIS, "wished": 1}), "wished is not supported"),
        (body({"messages": PARIS, "n": 0}), "n must be from 1 to 128"),
        (body({"messages": PARIS, "top_logprobs": 2}), "top_logprobs needs logprobs"),
        (body({"messages": PARIS, "logprobs": 2}), "logprobs must be true or false"),
        (body({"prompt": ["x"] * 100, "n": 11}, "/v1/completions"), "at most 1024"),
        (body({"prompt": ["x", 3]}, "/v1/completions"), "prompt must be"),
    ],
)
def test_lines_that_are_wrong(line: Any, why: str) -> None:
    with pytest.raises(ParameterError, match=why):
        raise read(line).error or AssertionError


def test_a_line_is_stronger_than_the_command() -> None:
    form: dict[str, Any] = {"options": {"max_tokens": 5, "json_schema": {}, "repeat_penalty": 1.1}, "n": 3}
    assert read({"prompt": "x"}, **form).options == form["options"]
    assert read({"prompt": "x"}, **form).n == 3
    assert read(body({"messages": PARIS, "n": 2, "max_tokens": 9}), **form).n == 2
    assert read(body({"messages": PARIS, "max_tokens": 9}), **form).options["max_tokens"] == 9
    assert "json_schema" not in read({"prompt": "x", "regex": "a+"}, **form).options
    assert "repeat_penalty" not in read({"prompt": "x", "repetition_penalty": 1.2}, **form).options


def test_seeds_are_of_the_line_and_the_command() -> None:
    seeds = {(seed, number): read({"prompt": "x"}, number, seed=seed).seed for seed in (1, 2) for number in range(1, 200)}
    assert len(set(seeds.values())) == len(seeds)
    assert seeds[2, 7] == read({"prompt": "other"}, 7, seed=2).seed
    assert read({"prompt": "x", "seed": 9}).seed == 9
    assert read({"prompt": "x", "seed": -1}, 3).seed == read({"prompt": "x"}, 3).seed
    assert 0 <= read(body({"messages": PARIS, "seed": 2**63})).seed < 2**32 - 1


def test_columns_and_templates() -> None:
    line = {"q": "Why?", "talk": [{"role": "user", "content": "Hi", "name": None}], "n": 3, "none": None}
    assert read(line, column="q").prompts == [[{"role": "user", "content": "Why?"}]]
    assert read(line, column="q", raw=True).prompts == ["Why?"]
    assert read(line, column="talk").prompts == [[{"role": "user", "content": "Hi"}]]
    assert read(line, template="{{{q}}} {n}", raw=True).prompts == ["{Why?} 3"]
    system = {"role": "system", "content": "Be brief."}
    assert read(line, column="q", system="Be brief.").prompts == [[system, {"role": "user", "content": "Why?"}]]
    assert read({"messages": [{"role": "system", "content": "x"}]}, system="y").prompts[0][0]["content"] == "x"
    for form, why in (({"column": "x"}, "'x' is missing"), ({"column": "none"}, "'none' is null"),
                      ({"column": "n"}, "a text or messages, not 3")):  # fmt: skip
        assert why in str(read(line, **form).error)
    assert template_columns("{a} {b} {a} {{c}}") == ["a", "b"]
    for bad in ("none", "{", "{a.b}", "{a[0]}", "{a!r}", "{a:>3}", "{}"):
        with pytest.raises(ParameterError, match="template"):
            template_columns(bad)


# --- files ---


def test_kinds_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "\ufeff" + "".join(json.dumps({"prompt": f"ü{n}" * 20}) + "\n" for n in range(1000))
    data = lines.encode()
    zstd = importlib.import_module("compression.zstd" if importlib.util.find_spec("compression") else "zstandard")
    frames = zstd.compress(data[:5000]) + zstd.compress(data[5000:])
    for name, content in (("a.jsonl", data), ("a.jsonl.gz", gzip.compress(data)), ("a.zst", frames), ("b.jsonl", data[:-1])):
        path = tmp_path / name
        path.write_bytes(content)
        source = open_source(str(path))
        records = list(source.records)
        source.close()
        assert [record.read()["prompt"] for record in records] == [f"ü{n}" * 20 for n in range(1000)]
        assert [record.number for record in records] == list(range(1, 1001))
        assert sum(record.size for record in records) == source.total == len(content)
    for name, content in (("c.gz", gzip.compress(data)[:-20]), ("c.zst", frames[:-20]), ("d.gz", data), ("d.zst", data)):
        path = tmp_path / name
        path.write_bytes(content)
        source = open_source(str(path))
        with pytest.raises(BatchFileError, match="damaged or cut"):
            list(source.records)
        source.close()
    monkeypatch.setattr(readers, "LINE_MAX", 100)
    lines_of = readers._lines("x", io.BytesIO(b"a" * 1000 + b"\nb\n" + b"c" * 100 + b"\n" + b"d" * 101), None)
    records = list(lines_of)
    assert [record.raw for record in records] == [b"", b"b\n", b"c" * 100 + b"\n", b""]
    assert "more than 100 bytes" in str(records[0].error)


def test_parquet(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    rows = [{"custom_id": f"c{n}", "q": f"Q{n}", "messages": PARIS} for n in range(700)]
    parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=300)
    source = open_source(str(path), ["q"])
    assert [record.values for record in source.records] == [{"q": f"Q{n}", "custom_id": f"c{n}"} for n in range(700)]
    assert (source.total, source.is_table) == (700, True)
    source.close()
    source = open_source(str(path))
    request = Form(seed=1).read(next(source.records))
    assert (request.custom_id, request.prompts) == ("c0", [PARIS])
    source.close()
    with pytest.raises(ParameterError, match="no column x; it has custom_id, q, messages"):
        open_source(str(path), ["x"])
    (tmp_path / "b.parquet").write_bytes(b"nothing")
    with pytest.raises(BatchFileError, match="no Parquet file"):
        open_source(str(tmp_path / "b.parquet"))


# --- what is written ---


def test_ranges() -> None:
    import random

    numbers = list(range(1, 300, 2)) + list(range(2, 200, 3))
    random.Random(1).shuffle(numbers)
    done, known = Ranges(), set[int]()
    for number in numbers:
        done.add(number)
        known.add(number)
        assert len(done) == len(known)
    assert [n for n in range(400) if n in done] == sorted(known)
    for number in range(400):
        done.add(number)
    assert done._ends == [0, 400]


ORDERS: dict[str, Callable[[list[int]], int]] = {"first": lambda _: 0, "last": lambda _: -1, "mixed": lambda r: sum(r) % len(r)}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ordered", [True, False])
def test_order(tmp_path: Path, order: str, ordered: bool) -> None:
    path = tmp_path / "out.jsonl"
    lines = [{"prompt": f"{n % 7} {n}"} for n in range(200)]
    lines[50] = lines[150] = {}
    counts = answer(path, lines, Echo(ORDERS[order]), ordered=ordered, window=32)
    numbers = [line["line"] for line in results(path)]
    assert sorted(numbers) == list(range(1, 201))
    assert (numbers == sorted(numbers)) is ordered
    assert (counts.lines, counts.failed, counts.size) == (200, 2, 2000)
    assert not sidecar(path).exists()
    for line in results(path):
        assert line["text"] == lines[line["line"] - 1].get("prompt")


def test_prompts_that_begin_alike_go_together(tmp_path: Path) -> None:
    systems = [{"role": "system", "content": f"System {n}. " * 10} for n in range(4)]
    lines = [{"messages": [systems[n % 4], {"role": "user", "content": f"{n}"}]} for n in range(128)]
    model = Echo()
    answer(tmp_path / "out", lines, model, window=64)
    seen = [prompt[0]["content"] for prompt, _ in model.asked]
    changes = sum(a != b for a, b in itertools.pairwise(seen))
    assert changes == 7  # four kinds in each of two windows, where the file has 127 changes
    assert {int(prompt[1]["content"]) for prompt, _ in model.asked[:64]} == set(range(64))


def test_a_slow_line_does_not_fill_memory(tmp_path: Path) -> None:
    model = Echo(lambda running: len(running) - 1 if len(running) > 1 else 0)  # the first one comes last
    n_waiting = []
    path = tmp_path / "out"
    lines = ({"prompt": f"{n:06}"} for n in range(2000))
    answer(path, lines, model, window=10, progress=lambda counts: n_waiting.append(counts.lines))
    assert [line["line"] for line in results(path)] == list(range(1, 2001))
    assert len(model.asked) == 2000

    class Watching(Output):
        most = 0

        def expect(self, number: int) -> bool:
            done = super().expect(number)
            Watching.most = max(Watching.most, self.n_waiting)
            return done

    output = Watching(str(tmp_path / "again"), HEADER)
    records = (Record(n, json.dumps({"prompt": f"{n:06}"}).encode(), 1) for n in range(1, 2001))
    run(model, records, output, Form(seed=1), columns=True, name="x", window=10)  # type: ignore[arg-type]
    output.close()
    assert Watching.most <= (AHEAD + 2) * 10


def test_memory_is_flat(tmp_path: Path) -> None:
    peaks = []
    for n in (2_000, 20_000):
        model = Echo(ORDERS["mixed"])
        model.keeps = False
        tracemalloc.start()
        answer(tmp_path / f"{n}", ({"prompt": f"{i % 97} {'x' * 500}"} for i in range(n)), model, window=64)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] + 50_000


@pytest.mark.parametrize("ordered", [True, False])
def test_going_on_after_every_byte(tmp_path: Path, ordered: bool) -> None:
    """The output and the sidecar are cut wherever a kill can cut them."""
    lines = [{"prompt": f"{n % 3} {n}"} if n != 5 else {} for n in range(12)]

    class Killed(Exception):
        pass

    def die(counts: Counts) -> None:
        if counts.lines == 7:
            raise Killed

    path = tmp_path / "begun"
    with pytest.raises(Killed):
        answer(path, lines, Echo(ORDERS["mixed"], n_ahead=4), ordered=ordered, progress=die, window=8)
    written, ahead = path.read_bytes(), sidecar(path).read_bytes()
    head = ahead.index(b"\n") + 1
    cuts = [(n, len(ahead)) for n in range(0, len(written) + 1, 7)]
    cuts += [(len(written), n) for n in (*range(head, len(ahead), 7), len(ahead))]
    for n, (cut, cut_ahead) in enumerate(cuts):
        path = tmp_path / f"{n}"
        path.write_bytes(written[:cut])
        sidecar(path).write_bytes(ahead[:cut_ahead])
        model = Echo(ORDERS["mixed"], n_ahead=4)
        counts = answer(path, lines, model, ordered=ordered, window=8)
        numbers = [line["line"] for line in results(path)]
        assert sorted(numbers) == list(range(1, 13))
        assert not ordered or numbers == list(range(1, 13))
        assert counts.failed == 1
        assert counts.before + counts.lines == 12
        assert path.read_bytes()[:cut].startswith(written[: written[:cut].rfind(b"\n") + 1])
        if (cut, cut_ahead) == (len(written), len(ahead)):
            assert len(model.asked) <= 5  # what had an answer is not asked again, in order or not


def test_the_sidecar_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "out"
    most = 0

    def look(counts: Counts) -> None:
        nonlocal most
        most = max(most, sidecar(path).stat().st_size)

    answer(path, ({"prompt": f"{n:05}"} for n in range(5000)), Echo(ORDERS["mixed"]), window=16, progress=look)
    assert most < path.stat().st_size / 3


def test_files_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("mine\n")
    with pytest.raises(ParameterError, match="is there already"):
        Output(str(path), HEADER)
    sidecar(path).write_text(json.dumps(HEADER) + "\n")
    with pytest.raises(BatchFileError, match="line 1 is no result"):
        Output(str(path), HEADER)
    assert path.read_text() == "mine\n"
    outputs.remove(path)
    first = Output(str(path), HEADER)
    assert begun_with(path) == HEADER
    with pytest.raises(BusyError, match="another process"):
        Output(str(path), HEADER)
    first.close()
    sidecar(path).write_text("{")
    with pytest.raises(BatchFileError, match="is damaged"):
        begun_with(path)


def test_the_lock_of_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Msvcrt(types.ModuleType):
        """Locks bytes from where a file stands, as the original does."""

        LK_NBLCK = 2
        locked: ClassVar[set[int]] = set()

        def locking(self, fd: int, mode: int, n_bytes: int) -> None:
            at = os.lseek(fd, 0, os.SEEK_CUR)
            if mode != self.LK_NBLCK or n_bytes != 1 or at in self.locked:
                raise PermissionError(13, "Permission denied")
            self.locked.add(at)

    monkeypatch.setitem(sys.modules, "msvcrt", Msvcrt("msvcrt"))
    path = tmp_path / "out"
    path.write_bytes(b"line\n")
    with path.open("ab", buffering=0) as first, path.open("ab", buffering=0) as second, monkeypatch.context() as windows:
        windows.setattr(sys, "platform", "win32")
        outputs._lock(first, path)
        with pytest.raises(BusyError, match="another process writes to"):
            outputs._lock(second, path)
        first.write(b"next\n")
    assert path.read_bytes() == b"line\nnext\n"
    assert min(Msvcrt.locked) > 1 << 32


def test_what_is_not_the_lines_fault_ends_the_batch(tmp_path: Path) -> None:
    class Failing(Echo):
        def generate_each(self, requests: Iterable[Any], n_ahead: int | None = None) -> Iterator[tuple[int, Any]]:
            for n, _ in enumerate(requests):
                yield n, ContextFullError("too long", 9, 8) if n % 2 else ClosedError("gone") if n > 4 else done("fine")

    path = tmp_path / "out"
    with pytest.raises(ClosedError):
        answer(path, [{"prompt": f"{n:02}"} for n in range(20)], Failing(), columns=False)
    errors = [line["error"] for line in results(path)]
    assert errors == [None if n % 2 else {"code": "context_length_exceeded", "message": f"line {n}: too long", "line": n}
                      for n in range(1, 7)]  # fmt: skip
    assert sidecar(path).exists()


def test_summary() -> None:
    counts = Counts(lines=10, failed=1, before=5, prompt_tokens=500, cached_tokens=400, completion_tokens=900)
    text = summary(counts, 3.0)
    assert text == ("15 lines (1 failed), 5 of them earlier in 0:03, 900 tokens written, 300 tok/s, "
                    "80% of prompts cached")  # fmt: skip
    assert summary(Counts(), 0.0) == "0 lines in 0:00, 0 tokens written, 0.0 tok/s, 0% of prompts cached"
