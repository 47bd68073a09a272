"""Fields of request bodies: what they become, and what is refused."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest

from lfmfast import SamplingParams
from lfmfast.server.errors import ApiError
from lfmfast.server.fields import REFUSED, Generation, parse_conversation, parse_generation
from lfmfast.server.settings import Settings

HUGE = 10**5000  # too long even to be written in an error message
LARGE = 10**400  # more than a float can hold
USER = {"role": "user", "content": "Hello"}
ASSISTANT = {"role": "assistant", "content": "Hel"}


def parse(body: dict[str, Any], *, chat: bool = True, **settings: Any) -> Generation:
    return parse_generation(body, Settings(**settings), chat=chat)


def refusal(body: dict[str, Any], *, chat: bool = True) -> str:
    with pytest.raises(ApiError) as caught:
        parse(body, chat=chat)
    assert caught.value.status == 400 and caught.value.type == "invalid_request_error"
    return caught.value.message


def test_nothing_said_is_the_servers_defaults():
    plain = parse({})
    assert plain.sampling == SamplingParams() and plain.n == 1 and plain.n_predict == plain.n_probs == -1 and not plain.stream
    mine = parse({}, sampling=SamplingParams(top_k=7), n_predict=9, cache_prompt=False, cache_reuse=3, sse_ping_s=2.0)
    assert mine.sampling.top_k == 7 and (mine.n_predict, mine.cache_prompt, mine.cache_reuse, mine.ping_s) == (9, False, 3, 2.0)


def test_null_is_the_same_as_nothing():
    names = [*REFUSED, "temperature", "seed", "stop", "n", "logprobs", "top_logprobs", "logit_bias", "stream", "stream_options",
             "max_tokens", "samplers", "response_fields", "id_slot", "ignore_eos", "dry_sequence_breakers"]  # fmt: skip
    assert parse(dict.fromkeys(names)) == parse({})


def test_a_request_overrides_the_servers_sampling():
    sampling = parse({"temperature": 0.5}, sampling=SamplingParams(temperature=1, top_k=7)).sampling
    assert (sampling.temperature, sampling.top_k) == (0.5, 7)


SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "min_p": 0.1, "repeat_penalty": 1.1, "frequency_penalty": -0.5, "presence_penalty": 0.5,
    "typical_p": 0.9, "top_n_sigma": 1.5, "xtc_probability": 0.2, "xtc_threshold": 0.3, "dynatemp_range": 0.1,
    "dynatemp_exponent": 1.5, "dry_multiplier": 0.8, "dry_base": 1.5, "mirostat_tau": 4.0, "mirostat_eta": 0.2, "top_k": 5,
    "repeat_last_n": 32, "dry_allowed_length": 3, "dry_penalty_last_n": -1, "mirostat": 2, "min_keep": 1, "seed": 42,
    "ignore_eos": True,
}  # fmt: skip


def test_every_sampling_field_arrives():
    assert parse(dict(SAMPLING)).sampling == SamplingParams(**SAMPLING)
    named = {field for field in SamplingParams.__dataclass_fields__ if field not in SAMPLING}
    assert named == {"logit_bias", "samplers", "dry_sequence_breakers", "repetition_penalty"}  # the tests below


def test_whole_numbers_may_have_a_point():
    assert parse({"top_k": 40.0, "max_tokens": 5.0, "seed": 3.0}).sampling.top_k == 40
    assert "'top_k' must be an integer" in refusal({"top_k": 40.5})


def test_repetition_penalty_is_repeat_penalty():
    assert parse({"repetition_penalty": 1.1}).sampling.repeat_penalty == 1.1
    assert parse({"repetition_penalty": 1.1, "repeat_penalty": 1.1}).sampling.repeat_penalty == 1.1
    assert "repeat_penalty and repetition_penalty" in refusal({"repetition_penalty": 1.1, "repeat_penalty": 1.2})


SEEDS = [(0, 0), (-1, -1), (2**32 - 1, -1), (2**32 + 5, 5), (2**64 - 1, -1), (-2, 2**32 - 2)]


@pytest.mark.parametrize(("seed", "kept"), SEEDS)
def test_seeds_keep_32_bits(seed: int, kept: int):
    assert parse({"seed": seed}).sampling.seed == kept


def test_samplers_by_name_and_by_letter():
    assert parse({"samplers": ["top_k", "temp"]}).sampling.samplers == ("top_k", "temperature")
    assert parse({"samplers": "kt"}).sampling.samplers == ("top_k", "temperature")
    everything = parse({"samplers": "edskypmxt"}).sampling.samplers
    assert everything == parse({"samplers": list(everything or ())}).sampling.samplers and len(everything or ()) == 9
    assert "'samplers'" in refusal({"samplers": "kz"})
    assert "top_z" in refusal({"samplers": ["top_z"]})


def test_sequence_breakers():
    assert parse({"dry_sequence_breakers": ["\n", "*"]}).sampling.dry_sequence_breakers == ("\n", "*")
    for wrong in ([], 5, [1], {"a": 1}):
        assert "dry_sequence_breakers" in refusal({"dry_sequence_breakers": wrong})


def test_logit_bias_in_all_forms():
    generation = parse({"logit_bias": [[7, -1.5], ["the", 2], [8, False], ["no", False]]})
    assert generation.sampling.logit_bias == {7: -1.5, 8: -math.inf}
    assert generation.text_bias == (("the", 2.0), ("no", -math.inf))
    generation = parse({"logit_bias": {"7": -100, "the": False}})
    assert generation.sampling.logit_bias == {7: -100.0} and generation.text_bias == (("the", -math.inf),)
    assert parse({"logit_bias": {}}) == parse({}) == parse({"logit_bias": []})
    for wrong in ("x", 1, [1], [[1]], [[1, 2, 3]], [[1, True]], [[1, "2"]], [[None, 1]], [[-1, 1]], [[True, 1]], {"1": None},
                  {"1": HUGE}, [[HUGE, 1]], {"1": 1e300}):  # fmt: skip
        assert "logit_bias" in refusal({"logit_bias": wrong})


def test_logit_bias_as_text_becomes_tokens(lfm2_tiny_path):
    from lfmfast import Model

    with Model(lfm2_tiny_path, n_ctx=64, n_gpu_layers=0, n_threads=1) as model:
        generation = parse({"logit_bias": [["Paris is", False], [5, 1.5], [10**6, 1]]})
        bias = generation.resolved(model).logit_bias
        tokens = model.tokenize("Paris is")
        assert len(tokens) > 1 and bias == {5: 1.5, **dict.fromkeys(tokens, -math.inf)}


def test_how_many_tokens():
    assert parse({"max_tokens": 5}).n_predict == 5
    assert parse({"max_tokens": 5, "max_completion_tokens": 6}).n_predict == 6
    assert parse({"max_tokens": 5, "max_completion_tokens": 6, "n_predict": 7}).n_predict == 7
    assert parse({"max_tokens": 0}).n_predict == 0
    assert parse({"max_tokens": -1}).n_predict == -1
    assert parse({"max_tokens": 50}, n_predict=9).n_predict == 50
    assert parse({"max_tokens": -1}, n_predict=9).n_predict == parse({}, n_predict=9).n_predict == 9
    assert "'max_tokens'" in refusal({"n_predict": 7, "max_tokens": "x"}) and "'n'" in refusal({"n_cmpl": 2, "n": 0})
    for wrong in (-2, "5", 1.5, True, HUGE, [5]):
        assert "'max_tokens' must be an integer" in refusal({"max_tokens": wrong})


def test_stop_strings():
    assert parse({"stop": "a"}).stop == ["a"] and parse({"stop": ["a", "", "b"]}).stop == ["a", "b"]
    for wrong in (1, [1], {"a": 1}, [["a"]]):
        assert "'stop'" in refusal({"stop": wrong})


def test_texts_that_cost_time_at_each_token_are_few():
    for name in ("stop", "dry_sequence_breakers"):
        assert f"'{name}' can have at most" in refusal({name: ["x"] * 300})
        assert f"'{name}' can have at most" in refusal({name: ["x" * 20000]})
        parse({name: ["x"] * 256})
    assert "'logit_bias' can have at most" in refusal({"logit_bias": [["x" * 10000, 1], ["y" * 10000, 1]]})


def test_log_probabilities_of_chats():
    assert parse({"logprobs": True}).n_probs == 20 and parse({"logprobs": True, "top_logprobs": 3}).n_probs == 3
    assert parse({"logprobs": True, "top_logprobs": 0}).n_probs == 0
    assert parse({"logprobs": False}).n_probs == -1
    assert parse({"n_probs": 4}).n_probs == 4 and parse({"n_probs": 0}).n_probs == -1
    assert "top_logprobs" in refusal({"top_logprobs": 3})
    assert "'top_logprobs'" in refusal({"logprobs": True, "top_logprobs": -1})
    for field, wrong in (("logprobs", "x"), ("logprobs", 3), ("top_logprobs", -1)):
        assert f"'{field}'" in refusal({"n_probs": 2, field: wrong})
    assert "'logprobs' must be true or false" in refusal({"logprobs": 5})


def test_log_probabilities_of_texts():
    assert parse({"logprobs": 5}, chat=False).n_probs == 5 and parse({"logprobs": 0}, chat=False).n_probs == 0
    assert parse({"logprobs": True}, chat=False).n_probs == 20 and parse({"logprobs": None}, chat=False).n_probs == -1
    assert "'logprobs'" in refusal({"logprobs": -1}, chat=False)


def test_how_many_answers():
    assert parse({"n": 3}).n == 3 and parse({"n_cmpl": 2, "n": 3}).n == 2
    for wrong in (0, -1, 10**6, "2", True):
        assert "'n' must be an integer" in refusal({"n": wrong})


def test_answers_with_a_seed_differ():
    generation = parse({"n": 2, "seed": 5})
    params = generation.sampling.resolved()
    assert [generation.options(params, i)["sampling"].seed for i in range(2)] == [5, 6]
    free = parse({"n": 2}).sampling.resolved()
    assert [generation.options(free, i)["sampling"].seed for i in range(2)] == [-1, -1]


def test_what_an_answer_has_to_be():
    schema = {"type": "object"}
    for given in ({"grammar": "root ::= [a-z]"}, {"json_schema": schema}, {"json_schema": True},
                  {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}):  # fmt: skip
        for chat in (True, False):
            generation = parse({**given, "response_format": given.get("response_format", {"type": "text"})}, chat=chat)
            assert generation.constraint == given and given.items() <= generation.options(generation.sampling).items()
    assert "'json_schema' and 'grammar'" in refusal({"grammar": "root ::= [a-z]", "json_schema": schema})
    assert "'grammar' and 'response_format'" in refusal({"grammar": "x", "response_format": {"type": "json_object"}})


def test_budgets_of_thoughts():
    for name in ("reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens"):
        assert parse({name: 0}).reasoning == {"reasoning_budget": 0}
    both = {"reasoning_budget_tokens": 5, "thinking_budget_tokens": 6, "reasoning_budget_message": "enough"}
    assert parse(both).reasoning == {"reasoning_budget": 5, "reasoning_budget_message": "enough"}
    assert parse({}, reasoning_budget=7).reasoning == {"reasoning_budget": 7}
    assert parse({"reasoning_budget": 8}, reasoning_budget=7).reasoning == {"reasoning_budget": 8}
    assert parse({"reasoning_budget": -1}, reasoning_budget=7).reasoning == {"reasoning_budget": 7}  # as llama-server


def test_limits_in_time():
    assert parse({"t_max_predict_ms": 50}).t_max_predict_ms == 50 and parse({"t_max_predict_ms": -1}).t_max_predict_ms is None
    assert parse({"t_max_predict_ms": 2**40}).t_max_predict_ms == 2**31 - 1
    assert parse({"t_max_prompt_ms": 50}).t_max_prompt_ms == 50


def test_switches():
    body = dict.fromkeys(("stream", "timings_per_token", "return_progress", "return_tokens", "verbose"), True)
    generation = parse({**body, "stream_options": {"include_usage": True}, "cache_prompt": False, "id_slot": 2,
                        "response_fields": ["a/b"], "sse_ping_interval": 5, "n_cache_reuse": 8})  # fmt: skip
    assert all(getattr(generation, name) for name in body)
    assert parse({}, verbose=True).verbose and not parse({"verbose": False}, verbose=True).verbose
    assert generation.include_usage and not generation.cache_prompt and generation.id_slot == 2
    assert (generation.response_fields, generation.ping_s, generation.cache_reuse) == (("a/b",), 5.0, 8)
    for name in (*body, "cache_prompt", "ignore_eos"):
        for wrong in (1, "true", [], HUGE):
            assert f"'{name}' must be true or false" in refusal({name: wrong})
    assert "'stream_options' must be an object" in refusal({"stream_options": [1]})
    assert "'include_usage'" in refusal({"stream_options": {"include_usage": 1}})


@pytest.mark.parametrize(("name", "value"), [
    ("grammar_lazy", True), ("grammar_triggers", [{}]), ("preserved_tokens", ["<x>"]), ("post_sampling_probs", True),
    ("lora", [{"id": 0, "scale": 1}]), ("adaptive_target", 0.5), ("n_indent", 2), ("echo", True),
    ("best_of", 2), ("suffix", "x"), ("functions", [{}]), ("function_call", {"name": "f"}), ("modalities", ["audio"]),
    ("audio", {"voice": "x"}), ("web_search_options", {}), ("reasoning_effort", "low"), ("reasoning_control", True),
])  # fmt: skip
def test_what_is_not_there_is_refused_by_name(name: str, value: Any):
    assert f"'{name}' is not supported yet" in refusal({name: value})


@pytest.mark.parametrize(("name", "value"), [
    ("grammar", ""), ("response_format", {"type": "text"}), ("post_sampling_probs", False), ("lora", []),
    ("adaptive_target", -1), ("echo", False), ("best_of", 1), ("suffix", ""), ("functions", []), ("modalities", ["text"]),
    ("reasoning_budget_tokens", -1), ("reasoning_budget_message", ""), ("grammar_lazy", False), ("n_indent", 0),
])  # fmt: skip
def test_what_asks_for_nothing_is_not_refused(name: str, value: Any):
    assert parse({name: value}) == parse({})


@pytest.mark.parametrize(("name", "value"), [
    ("temperature", -1), ("temperature", "0.5"), ("temperature", True), ("temperature", LARGE), ("top_p", 1.5), ("top_k", -2),
    ("top_k", LARGE), ("mirostat", 3), ("repeat_penalty", 0), ("min_p", [0.1]), ("seed", "x"), ("seed", LARGE),
    ("response_format", "json"), ("grammar", ["x"]), ("json_schema", "x"), ("reasoning_budget", -2),
    ("thinking_budget_tokens", LARGE), ("reasoning_budget_message", 1), ("id_slot", -2), ("n_probs", 10**6),
    ("sse_ping_interval", "x"), ("sse_ping_interval", 1e-9), ("response_fields", [1]),
])  # fmt: skip
def test_values_out_of_their_limits_are_refused_by_name(name: str, value: Any):
    assert name in refusal({name: value})


def test_unknown_fields_are_in_the_debug_log_only(caplog):
    with caplog.at_level(logging.DEBUG, logger="lfmfast.server"):
        assert parse({"tempreature": 1, "user": "ada", "id_slot": 0}) == parse({"id_slot": 0})
    assert [record.getMessage() for record in caplog.records] == ["fields that have no meaning here: 'tempreature'"]


# --- conversations ---


def talk(body: dict[str, Any], **settings: Any) -> Any:
    return parse_conversation(body, Settings(**settings))


def talk_refusal(body: dict[str, Any]) -> str:
    with pytest.raises(ApiError) as caught:
        talk(body)
    assert caught.value.status == 400
    return caught.value.message


def test_messages_are_needed():
    for wrong in ({}, {"messages": None}, {"messages": "x"}, {"messages": []}, {"messages": {"role": "user"}},
                  {"messages": [1, 2]}, {"messages": [USER, "x"]}):  # fmt: skip
        assert "'messages" in talk_refusal(wrong)


def test_a_last_message_of_the_assistant_is_continued():
    assert talk({"messages": [USER, ASSISTANT]}).continue_final_message
    assert not talk({"messages": [USER, ASSISTANT], "continue_final_message": False}).continue_final_message
    assert not talk({"messages": [USER]}).continue_final_message
    by_wish = {"continue_final_message": True, "add_generation_prompt": False}
    assert talk({"messages": [USER, ASSISTANT], **by_wish}).continue_final_message
    assert "can't both be true" in talk_refusal({"messages": [USER, ASSISTANT], "continue_final_message": True,
                                                 "add_generation_prompt": True})  # fmt: skip
    assert "two messages" in talk_refusal({"messages": [USER, ASSISTANT, ASSISTANT]})
    called = {**ASSISTANT, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    assert "tool calls" in talk_refusal({"messages": [USER, called]})


def test_add_generation_prompt_goes_to_the_template():
    asked = talk({"messages": [USER], "add_generation_prompt": False})
    assert asked.template_options == {"add_generation_prompt": False} and not asked.continue_final_message


def test_tools():
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert talk({"messages": [USER], "tools": tools}).tools == tools
    assert talk({"messages": [USER], "tools": tools, "tool_choice": "auto"}).tools == tools
    hidden = talk({"messages": [USER], "tools": tools, "tool_choice": "none"})
    assert hidden.prompt_options()["tools"] is None and hidden.options()["tool_choice"] == "none"
    assert talk({"messages": [USER], "tools": []}).tools is None
    for choice in (None, "auto", "required", {"type": "function", "function": {"name": "f"}}):
        asked = talk({"messages": [USER], "tools": tools, "tool_choice": choice})
        assert asked.options()["tool_choice"] == choice and asked.prompt_options()["tools"] == tools
    for choice in ("f", ["auto"], 1, {}, {"type": "function"}, {"type": "function", "function": {"name": 1}},
                   {"function": {"name": "f"}}, {"type": "allowed_tools", "mode": "auto", "tools": []}):  # fmt: skip
        assert "'tool_choice'" in talk_refusal({"messages": [USER], "tools": tools, "tool_choice": choice})
    assert "'tools'" in talk_refusal({"messages": [USER], "tools": {"name": "f"}})
    for name in ("parallel_tool_calls", "parse_tool_calls"):
        assert talk({"messages": [USER], name: None}).options()[name] is True
        assert talk({"messages": [USER], "tools": tools, name: False}).options()[name] is False
        assert f"'{name}'" in talk_refusal({"messages": [USER], "tools": tools, name: "no"})


def test_what_becomes_of_thoughts():
    assert talk({"messages": [USER]}).reasoning_format == "auto"
    assert talk({"messages": [USER]}, reasoning_format="none").reasoning_format == "none"
    for name in ("auto", "deepseek", "none"):
        assert talk({"messages": [USER], "reasoning_format": name}).options()["reasoning_format"] == name
    for wrong in ("deepseek-legacy", "x", "", 1, 0, False, ["none"], {}):
        assert "'reasoning_format'" in talk_refusal({"messages": [USER], "reasoning_format": wrong})


def test_variables_of_the_template():
    asked = talk({"messages": [USER], "chat_template_kwargs": {"a": 1}}, chat_template_kwargs={"a": 0, "b": 2})
    assert asked.template_options == {"a": 1, "b": 2}
    assert "'chat_template_kwargs'" in talk_refusal({"messages": [USER], "chat_template_kwargs": [1]})
    assert "'tools'" in talk_refusal({"messages": [USER], "chat_template_kwargs": {"tools": []}})
