"""Batches with a model: the answers are those that it gives by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import child
import pytest

from lfmfast import AsyncModel, Completion, Model, ParameterError, TemplateError
from lfmfast.batch import Form, Output, open_source, run

PARIS = [{"role": "user", "content": "What is the capital of France?"}]


def body(body: Any, url: str = "/v1/chat/completions") -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body}


def answer(folder: Path, lines: Iterable[Any], model: Model, form: Form, columns: bool) -> list[dict[str, Any]]:
    """The results of a batch."""
    source, path = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    opened, output = open_source(str(source)), Output(str(path), {})
    try:
        counts = run(model, opened.records, output, form, columns=columns, name="tiny")
    finally:
        output.close()
        opened.close()
    results = [json.loads(line) for line in path.read_text("utf8").splitlines()]
    assert (counts.lines, counts.failed) == (len(results), sum(line["error"] is not None for line in results))
    return results


def test_answers_are_those_of_the_model(lfm2_tiny: Model, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}  # fmt: skip
    system = {"role": "system", "content": "You are a helpful assistant."}
    weather = [system, {"role": "user", "content": "What is the weather in Paris?"}]
    thinking = [{"role": "system", "content": f"{system['content']} Think step by step."}, *weather[1:]]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    lines = [
        body({"messages": [system, *PARIS], "model": "mine", "logprobs": True, "top_logprobs": 1}),
        body({"messages": weather, "tools": [tool]}),
        body({"messages": thinking, "tools": [tool]}),
        body({"messages": PARIS, "max_tokens": 60, "response_format": form}),
        body({"prompt": ["1, 2, 3,", "4, 5, 6,"], "max_tokens": 4, "n": 2}, "/v1/completions"),
        body({"messages": PARIS, "top_k": True}),
        body({"messages": PARIS, "top_k": 1}),
        body({"messages": [{"role": "user"}]}),
        body({"messages": PARIS, "t_max_prompt_ms": 0}),
        body({"messages": PARIS, "temperature": 5, "seed": 3, "n": 2, "max_tokens": 9, "ignore_eos": True}),
    ]
    results = answer(tmp_path, lines, lfm2_tiny, Form(seed=5, options={"temperature": 0}), columns=False)
    bodies = [line["response"] and line["response"]["body"] for line in results]
    messages = [None if bodies[n] is None else bodies[n]["choices"][0].get("message") for n in range(10)]
    assert [n for n, line in enumerate(results) if line["error"]] == [5, 7, 8]
    assert messages[0] == {"role": "assistant", "content": "The capital of France is Paris."}
    assert bodies[0]["model"] == "mine"
    assert len(bodies[0]["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 1
    assert bodies[0]["usage"]["completion_tokens"] == 11
    for n in (1, 2):
        assert messages[n]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
        assert bodies[n]["choices"][0]["finish_reason"] == "tool_calls"
    assert messages[2]["reasoning_content"] == "I call the weather tool."
    assert isinstance(json.loads(messages[3]["content"])["a"], int)
    assert [choice["index"] for choice in bodies[4]["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in bodies[4]["choices"][:2]] == [lfm2_tiny.generate("1, 2, 3,", temperature=0,
                                                                                          max_tokens=4).text] * 2  # fmt: skip
    errors = [line["error"] and line["error"]["message"] for line in results]
    assert errors[5].startswith("line 6: top_k must be an integer")
    assert errors[7].startswith("line 8: ")
    assert "line 9: no token within" in errors[8]
    direct = lfm2_tiny.generate(PARIS, temperature=5, seed=3, n=2, max_tokens=9, ignore_eos=True)
    assert [choice["message"]["content"] for choice in bodies[9]["choices"]] == [one.text for one in direct]
    assert bodies[9]["seed"] == 3


def test_a_recorded_seed_gives_the_answer_again(lfm2_tiny: Model, tmp_path: Path) -> None:
    wild = {"temperature": 3.0, "max_tokens": 8, "ignore_eos": True}
    seen = answer(tmp_path, [{"prompt": "Once", **wild}] * 6, lfm2_tiny, Form(seed=9, n=2), columns=True)
    assert len({text for line in seen for text in line["text"]}) > 6
    for line in seen:
        for text, seed in zip(line["text"], line["seed"], strict=True):
            assert lfm2_tiny.generate("Once", seed=seed, **wild).text == text


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_many_prompts_are_asked_as_those_of_a_file(lfm2_tiny: Model, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    asked: list[Any] = []
    encode = Model._asked
    monkeypatch.setattr(Model, "_asked", lambda self, prompt, **how: (asked.append(prompt), encode(self, prompt, **how))[1])
    prompts = [f"{'AB'[i % 2]} {'x' * i}" for i in range(8)]
    options: dict[str, Any] = {"max_tokens": 1, "return_errors": True}
    if kind == "sync":
        done = lfm2_tiny.generate([*prompts, 3, []], **options)
        several = lfm2_tiny.generate("Once", n=3, seed=4, temperature=3.0, max_tokens=4, ignore_eos=True)
    else:
        model = AsyncModel(lfm2_tiny)
        done = asyncio.run(model.generate([*prompts, 3, []], **options))
        several = asyncio.run(model.generate("Once", n=3, seed=4, temperature=3.0, max_tokens=4, ignore_eos=True))
    assert [prompt for prompt in asked if prompt in prompts] == sorted(prompts)
    assert [one.usage.prompt_tokens for one in done[:8]] == [len(lfm2_tiny.encode(prompt)) for prompt in prompts]
    assert all(isinstance(one, (ParameterError, TemplateError)) for one in done[8:])
    for i, one in enumerate(several):
        assert one.text == lfm2_tiny.generate("Once", seed=4 + i, temperature=3.0, max_tokens=4, ignore_eos=True).text
    assert asked.count("Once") == 4  # the prompt of several answers is made ready once


def test_generate_each_takes_no_more_than_it_needs(lfm2_tiny: Model) -> None:
    taken = 0

    def requests() -> Iterator[Any]:
        nonlocal taken
        while True:
            taken += 1
            yield ("x", {"max_tokens": 1}) if taken % 3 else None

    seen = []
    coming = lfm2_tiny.generate_each(requests(), n_ahead=3)
    for i, one in coming:
        assert isinstance(one, Completion)
        seen.append(i)
        if len(seen) == 10:
            break
    coming.close()
    assert len(set(seen)) == 10
    assert taken < 30
    stats = lfm2_tiny.engine.stats()
    assert (stats["n_running"], stats["n_queued"]) == (0, 0)
    mixed = dict(lfm2_tiny.generate_each([("x", {"max_tokens": 1}), ("x", {"top_k": 1, "max_tokens": 1}),
                                          ("x", {"top_k": True, "max_tokens": 1}), (3, {})]))  # type: ignore[list-item]
    assert [type(mixed[n]) for n in range(4)] == [Completion, Completion, ParameterError, ParameterError]
    with pytest.raises(ParameterError, match="n_ahead"):
        lfm2_tiny.generate_each([], n_ahead=0)


@pytest.mark.slow
def test_memory_stays_flat(lfm2_tiny_path: Path, tmp_path: Path) -> None:
    """Six thousand lines more take no more memory, with the engine and all it keeps of what it read."""
    printed = child.run(
        """
        import json, sys
        import psutil
        from lfmfast import Model
        from lfmfast.batch import Form, Output, run
        from lfmfast.batch.reader import Record
        N = 12_000
        sizes = []
        def lines():
            for n in range(1, N + 1):
                raw = json.dumps({"prompt": f"{n % 7} {n}" if n % 100 else n, "max_tokens": 1 + n % 2}).encode()
                yield Record(n, raw, len(raw))
        def look(counts):
            if counts.lines % (N // 4) == 0:
                sizes.append(psutil.Process().memory_info().rss)
        output = Output(sys.argv[2], {})
        with Model(sys.argv[1], n_ctx=256, n_threads=1, n_gpu_layers=0, cache_bytes=1 << 20) as model:
            counts = run(model, lines(), output, Form(seed=1), columns=True, name="tiny", progress=look)
        output.close()
        output.finish()
        print(json.dumps([counts.lines, counts.failed, *sizes]))
        """, lfm2_tiny_path, tmp_path / "out.jsonl", timeout=550)  # fmt: skip
    n_lines, n_failed, *sizes = json.loads(printed)
    assert (n_lines, n_failed, len(sizes)) == (12_000, 120, 4)
    assert sizes[3] - sizes[1] < 8 << 20, sizes
