"""Answers that are held to a grammar, a schema or the form of a call, by the engine."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exact import opened
from grammar_oracle import OracleGrammar
from peer import model as peer_model

from lfmfast import Model, ParameterError, SamplingParams, ToolCall
from lfmfast._replies import ReplyMemory
from lfmfast.lowlevel import Batch, Context, SamplerChain
from lfmfast.messages import assistant_message

GREEDY: dict[str, Any] = {"temperature": 0.0}
WORDS = 'root ::= item (", " item){2,6} "."\nitem ::= [a-m]+ | "[" [0-9]{1,3} "]"\n'


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


class Reference:
    """llama.cpp's way (common_sampler_sample), a token at a time: sample, ask the grammar, and only then sample again out of
    what it allows."""

    def __init__(self, model: Model, grammar: str) -> None:
        self.native = model.native
        self.grammar = OracleGrammar(grammar)
        self.pieces = [self.native.piece(token) for token in range(model.n_vocab)]
        self.ends = [token for token in range(model.n_vocab) if self.native.is_eog(token)]
        self.text = ""

    def allows(self, token: int) -> bool:
        if token in self.ends:
            return self.grammar.accepts(self.text)
        piece = self.pieces[token]
        return bool(piece) and piece.isascii() and not self.native.is_control(token) and self.grammar.begins(
            self.text + piece.decode())

    def run(self, context: Context, prompt: list[int], chain: SamplerChain, n: int) -> tuple[list[int], int]:
        """The tokens of the answer, and how many of them were sampled twice."""
        batch, tokens, out, n_again = Batch(max(len(prompt), 1)), prompt, list[int](), 0
        for token in prompt:
            chain.accept(token)
        position = 0
        while len(out) < n:
            batch.clear()
            batch.extend(tokens, position)
            context.decode(batch)
            position += len(tokens)
            logits = np.array(context.logits[-1])
            token = chain.sample(logits)
            if not self.allows(token):
                n_again += 1
                mask = np.array([self.allows(t) for t in range(len(logits))])
                token = chain.sample(np.where(mask, logits, -np.inf).astype(np.float32))
            chain.accept(token)
            if token in self.ends:
                break
            out.append(token)
            self.text += self.pieces[token].decode()
            tokens = [token]
        return out, n_again


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sampling_is_llama_cpps(tiny_f32_path: Path, seed: int) -> None:
    params = SamplingParams(temperature=1.2, top_k=40, min_p=0.02, repeat_penalty=1.1, repeat_last_n=16, seed=seed).resolved()
    with opened(tiny_f32_path) as model:
        prompt = model.encode("Some words: ")
        done = model.generate(prompt, grammar=WORDS, sampling=params, max_tokens=40)
        context = Context(model.native, n_ctx=512, n_threads=1, type_k="f32", type_v="f32", flash_attn=False)
        expected, n_again = Reference(model, WORDS).run(context, prompt, SamplerChain(model.n_vocab, params), len(done.tokens))
    assert list(done.tokens) == expected
    assert n_again > 3
    if done.finish_reason == "stop":
        assert OracleGrammar(WORDS).accepts(done.text)


def test_many_at_once_each_by_its_own(tiny_f32: Model) -> None:
    def ask(i: int) -> str:
        return tiny_f32.generate(user("Go."), regex=f"({i:02d}-[a-c]{{3}})+;", temperature=1.5, seed=i, max_tokens=60).text

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(24)))
    for i, text in enumerate(found):
        assert re.fullmatch(rf"({i:02d}-[a-c]{{3}})+;?|({i:02d}-[a-c]{{3}})*[0-9a-c-]*", text)
    assert found == [ask(i) for i in range(24)]


def test_several_answers_to_one_prompt(tiny_f32: Model) -> None:
    done = tiny_f32.generate(user("Go."), n=4, regex="[ab]{12}", temperature=1.5, seed=5)
    assert all(re.fullmatch("[ab]{12}", item.text) for item in done)
    assert len({item.text for item in done}) > 1


def test_it_ends_where_nothing_may_follow(tiny_f32: Model) -> None:
    """No end token is needed: so it ends with ignore_eos too."""
    for options in ({}, {"ignore_eos": True}):
        done = tiny_f32.generate("x", grammar='root ::= "abc"', **GREEDY, **options)
        assert (done.text, done.finish_reason) == ("abc", "stop")
        assert done.usage.completion_tokens == len(done.tokens)


def test_formats(lfm2_tiny: Model) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
    question = user("What is the capital of France?")
    by_schema = lfm2_tiny.generate(question, json_schema=schema, **GREEDY)
    assert json.loads(by_schema.text)["city"] in ("Paris", "Rome")
    wrapped = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    assert lfm2_tiny.generate(question, response_format=wrapped, **GREEDY).text == by_schema.text
    some = lfm2_tiny.generate(question, response_format={"type": "json_object"}, max_tokens=30, **GREEDY)
    assert some.text.startswith("{")
    assert lfm2_tiny.generate(question, response_format={"type": "text"}, **GREEDY).text == "The capital of France is Paris."
    assert lfm2_tiny.generate(question, regex="(Rome|Paris)", **GREEDY).text in ("Rome", "Paris")
    with pytest.raises(ParameterError, match="grammar and regex can't be given together"):
        lfm2_tiny.generate(question, grammar='root ::= "a"', regex="a")
    for options in ({"json_schema": {"not": {}}}, {"json_schema": 5}, {"grammar": "root ::= x"}, {"regex": "(?=a)"},
                    {"response_format": {"type": "xml"}}):  # fmt: skip
        with pytest.raises(ParameterError):
            lfm2_tiny.generate(question, **options)


def test_thoughts_are_free(lfm2_tiny: Model) -> None:
    messages = [{"role": "system", "content": "You are a helpful assistant. Think step by step."}, *user("My name is Ada.")]
    done = lfm2_tiny.generate(messages, regex="[A-Z]{3}", **GREEDY)
    assert done.reasoning == "The user is called Ada."
    assert re.fullmatch("[A-Z]{3}", done.text)
    prefilled = [*messages, {"role": "assistant", "content": "<think>"}]
    done = lfm2_tiny.generate(prefilled, regex="[A-Z]{3}", continue_final_message=True, **GREEDY)
    assert done.reasoning == "The user is called Ada."
    assert re.fullmatch("[A-Z]{3}", done.text)


def test_reasoning_budget(lfm2_tiny: Model) -> None:
    messages = [{"role": "system", "content": "You are a helpful assistant. Think step by step."}, *user("My name is Ada.")]
    whole = lfm2_tiny.generate(messages, **GREEDY)
    assert (whole.reasoning, whole.text) == ("The user is called Ada.", "Nice to meet you, Ada!")
    for budget, thought in ((0, ""), (2, "The user"), (100, whole.reasoning), (-1, whole.reasoning)):
        done = lfm2_tiny.generate(messages, reasoning_budget=budget, **GREEDY)
        assert (done.reasoning, done.text) == (thought, whole.text)
    done = lfm2_tiny.generate(messages, reasoning_budget=1, reasoning_budget_message=" is short.", **GREEDY)
    assert done.reasoning == "The is short."
    assert done.raw.startswith("<think>The is short.</think>")
    with pytest.raises(ParameterError, match="reasoning_budget must be from -1"):
        lfm2_tiny.generate(messages, reasoning_budget=-2)
    kept = lfm2_tiny.generate(messages, reasoning_format="none", **GREEDY)
    assert (kept.reasoning, kept.text) == ("", "<think>The user is called Ada.</think>Nice to meet you, Ada!")


# --- calls ---


def test_tool_choice(lfm2_tiny: Model, reference: dict[str, Any]) -> None:
    tools = reference["tools"]
    hello = user("Hello!")
    named = {"type": "function", "function": {"name": "get_weather"}}
    assert not lfm2_tiny.generate(hello, tools=tools, **GREEDY).tool_calls
    for choice, names in (("required", {"get_weather", "add"}), (named, {"get_weather"})):
        done = lfm2_tiny.generate(hello, tools=tools, tool_choice=choice, max_tokens=60, **GREEDY)
        assert {call.name for call in done.tool_calls} <= names
        assert done.tool_calls and done.finish_reason == "tool_calls"
        assert done.raw.startswith("<|tool_call_start|>[") and done.raw.endswith("]<|tool_call_end|>")
    asked = user("What is the weather in Paris?")
    forced = {lfm2_tiny.token_id("<|tool_call_start|>"): 100.0}
    for choice, n in (("none", 0), ("auto", 1)):  # without tools what looks like a call is text
        done = lfm2_tiny.generate(asked, tools=tools, tool_choice=choice, logit_bias=forced, max_tokens=1, **GREEDY)
        assert ("<|tool_call_start|>" in done.text) == (n == 0)
    none = lfm2_tiny.generate(asked, tools=tools, tool_choice="none", **GREEDY)
    assert (none.text, none.tool_calls) == (lfm2_tiny.generate(asked, **GREEDY).text, ())  # as if there were none
    for choice, tools_, said in (("required", None, "needs tools"), ("always", tools, "not 'always'"),
                                 ({"function": {"name": "f"}}, tools, "no tool .f."),
                                 ({}, tools, "name a function")):  # fmt: skip
        with pytest.raises(ParameterError, match=said):
            lfm2_tiny.generate(asked, tools=tools_, tool_choice=choice)
    for more in ({"tool_choice": "required"}, {"parallel_tool_calls": False}):
        with pytest.raises(ParameterError, match="can't be enforced together"):
            lfm2_tiny.generate(asked, tools=tools, regex="[ab]", **more)
    assert lfm2_tiny.generate(hello, tools=tools, tool_choice="required", json_schema={}, max_tokens=60, **GREEDY).tool_calls


def test_calls_or_an_answer_of_a_form(lfm2_tiny: Model, reference: dict[str, Any]) -> None:
    asked, tools = user("What is the weather in Paris?"), reference["tools"]
    form: dict[str, Any] = {"json_schema": {"enum": ["sunny", "rainy"]}, "tools": tools, "max_tokens": 60}
    assert [call.name for call in lfm2_tiny.generate(asked, **form, **GREEDY).tool_calls] == ["get_weather"]
    marker = lfm2_tiny.token_id("<|tool_call_start|>")
    assert marker is not None
    for seed in range(5):
        done = lfm2_tiny.generate(asked, **form, seed=seed, temperature=1.5, logit_bias={marker: -50.0})
        assert json.loads(done.text) in ("sunny", "rainy") and not done.tool_calls
    one = lfm2_tiny.generate(asked, **form, parallel_tool_calls=False, **GREEDY)
    assert len(one.tool_calls) == 1 and one.finish_reason == "tool_calls"
    # Grammars and patterns are for the whole answer.
    assert lfm2_tiny.generate(asked, tools=tools, regex="ab+c", max_tokens=60).text.startswith("ab")


def test_models_without_tokens_around_calls(tmp_path: Path, reference: dict[str, Any]) -> None:
    tools = reference["tools"]
    with Model(peer_model.write(tmp_path / "plain.gguf"), n_ctx=512, n_gpu_layers=0) as model:
        assert model.token_id("<|tool_call_start|>") is None
        done = model.generate(user("Hi"), tools=tools, tool_choice="required", max_tokens=40)
        assert done.raw.startswith(("<|tool_call_start|>[get_weather(", "<|tool_call_start|>[add("))
        for seed in range(4):
            form = model.generate(user("Hi"), tools=tools, json_schema={"const": "x"}, max_tokens=40, temperature=1, seed=seed)
            assert form.raw == '"x"' or form.raw.startswith("<|tool_call_start|>")
        with pytest.raises(ParameterError, match="no tokens around calls"):
            model.generate(user("Hi"), tools=tools, parallel_tool_calls=False)
        assert len(model.generate(user("Hi"), reasoning_budget=0, max_tokens=5).tokens) == 5  # it has no thoughts either


def test_calls_that_are_cut(lfm2_tiny: Model, reference: dict[str, Any]) -> None:
    asked, tools = user("What is the weather in Paris and Rome?"), reference["tools"]
    whole = lfm2_tiny.generate(asked, tools=tools, **GREEDY)
    assert [call.parsed for call in whole.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}]
    for n in range(1, len(whole.tokens)):
        cut = lfm2_tiny.generate(asked, tools=tools, max_tokens=n, **GREEDY)
        assert cut.finish_reason == "length"
        assert whole.raw.startswith(cut.raw)
        assert all(isinstance(call.parsed, dict) for call in cut.tool_calls)
    again = {lfm2_tiny.token_id("<|tool_call_start|>"): 100.0}  # a model that would begin one block after the other
    one = lfm2_tiny.generate(asked, tools=tools, parallel_tool_calls=False, logit_bias=again, max_tokens=80, **GREEDY)
    assert (len(one.tool_calls), one.finish_reason) == (1, "tool_calls")
    text = lfm2_tiny.generate(asked, tools=tools, parse_tool_calls=False, **GREEDY)
    assert (text.text, text.tool_calls, text.finish_reason) == (whole.raw, (), "stop")


def test_strict_tools_hold_a_call_to_its_schema(lfm2_tiny: Model) -> None:
    def tool(strict: bool) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
        return {"type": "function", "function": {"name": "get_weather", "description": "Get the weather in a city.",
                                                 "parameters": parameters, "strict": strict}}  # fmt: skip

    asked = user("What is the weather in Paris?")
    assert lfm2_tiny.generate(asked, tools=[tool(False)], **GREEDY).tool_calls[0].parsed == {"city": "Paris"}
    (held,) = lfm2_tiny.generate(asked, tools=[tool(True)], **GREEDY).tool_calls
    assert held.parsed["city"] in ("Rome", "Oslo")
    assert lfm2_tiny.generate(user("Hello!"), tools=[tool(True)], **GREEDY).tool_calls == ()  # and forces none


def test_history_has_calls_as_they_were_written(lfm2_tiny: Model, reference: dict[str, Any]) -> None:
    """A reply that comes back in OpenAI's parts is read as the tokens that it was generated as."""
    tools = reference["tools"]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are a helpful assistant. Think step by step."},
                                      *user("What is the weather in Paris?")]  # fmt: skip
    done = lfm2_tiny.generate(messages, tools=tools, **GREEDY)
    calls = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in done.tool_calls]
    told = [{"role": "tool", "tool_call_id": calls[0]["id"], "content": '{"temperature": 21, "sky": "sunny"}'}]
    whole = [*messages, {"role": "assistant", "content": None, "reasoning_content": done.reasoning, "tool_calls": calls}, *told]
    read = lfm2_tiny.encode(whole, tools=tools)
    begin = [*lfm2_tiny.encode(messages, tools=tools), *done.tokens]
    assert read[: len(begin)] == begin
    after = lfm2_tiny.generate(whole, tools=tools, **GREEDY)
    assert after.usage.cached_tokens >= len(begin) - 1
    assert after.text == "It is 21 degrees and sunny in Paris."
    dropped = [*messages, {"role": "assistant", "content": "", "tool_calls": calls}, *told]  # as most clients do
    assert lfm2_tiny.tokenize('[get_weather(city="Paris")]') == [
        t for t in lfm2_tiny.encode(dropped, tools=tools) if t in set(lfm2_tiny.tokenize('[get_weather(city="Paris")]'))
    ][-len(lfm2_tiny.tokenize('[get_weather(city="Paris")]')) :]
    assert lfm2_tiny.token_id("<think>") not in lfm2_tiny.encode(dropped, tools=tools)


def test_replies_in_parts_become_what_was_written(lfm2_tiny: Model) -> None:
    memory = ReplyMemory(lfm2_tiny.native, max_entries=8, max_bytes=4000)
    called = assistant_message("", "T", [ToolCall("c", "f", '{"a": "x"}')])
    raw = "<think>\nT\n</think>\n\n<|tool_call_start|>[f(a='x')]<|tool_call_end|>"
    memory.remember_raw(called, raw)
    assert memory.as_written([called]) == [{"role": "assistant", "content": raw}]
    as_object = {**called, "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": "x"}}}]}
    assert memory.as_written([as_object]) == [{"role": "assistant", "content": raw}]
    dropped = {**called, "reasoning_content": None}
    assert memory.as_written([dropped])[0]["content"] == raw.rpartition("</think>")[2].strip()
    other = assistant_message("", "T", [ToolCall("c", "f", '{"a": "y"}')])
    broken = {"role": "assistant", "tool_calls": [5]}
    assert memory.as_written([other, broken, {"role": "user", "content": "x"}])[:2] == [other, broken]
    for _ in range(300):  # the same reply again takes no room
        memory.remember_raw(called, raw)
    assert memory.as_written([called]) == [{"role": "assistant", "content": raw}]
    memory.remember_raw(assistant_message("long", "T", ()), "x" * 5000)  # more than all the room
    for i in range(40):
        memory.remember_raw(assistant_message("", "T", [ToolCall("c", "f", f'{{"a": {i}}}')]), raw)
    assert memory.as_written([called]) == [called]  # the oldest are forgotten
