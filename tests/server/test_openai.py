"""OpenAI's endpoints: shapes and meanings of answers, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from inprocess import Live

CHAT = "/v1/chat/completions"
ADA = [{"role": "user", "content": "My name is Ada."}]
SYSTEM = {"role": "system", "content": "You are a helpful assistant. Think of the sea and of ships and of a harbor."}
STORY = [SYSTEM, {"role": "user", "content": "Tell me a story."}]
COLOR = [{"role": "user", "content": "Name a color."}]
GREEDY = {"temperature": 0, "repeat_penalty": 1}


@pytest.fixture(scope="module")
def server(lfm2_tiny_path: Path) -> Iterator[Live]:
    with Live(lfm2_tiny_path) as live:
        yield live


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def reason_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    return str(choices[-1]["finish_reason"])


# --- chat ---


@pytest.mark.parametrize("path", [CHAT, "/chat/completions"])
def test_an_answer(server: Live, path: str):
    server.model.engine.forget()
    answer = server.post(path, {"messages": ADA, **GREEDY})
    n_prompt = len(server.model.encode(ADA))
    assert answer["choices"] == [{"finish_reason": "stop", "index": 0,
                                  "message": {"role": "assistant", "content": "Nice to meet you, Ada!"}}]  # fmt: skip
    n = answer["usage"]["completion_tokens"]
    assert answer["usage"] == {"prompt_tokens": n_prompt, "completion_tokens": n, "total_tokens": n_prompt + n,
                               "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip
    assert n == len(server.model.tokenize("Nice to meet you, Ada!")) + 1  # the end token counts
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-") and answer["model"] == "tiny"
    assert answer["system_fingerprint"].startswith("b") and answer["created"] > 0
    times = answer["timings"]
    assert (times["prompt_n"], times["cache_n"], times["predicted_n"]) == (n_prompt, 0, n)
    assert times["prompt_per_second"] > 0 and times["predicted_per_token_ms"] > 0
    again = server.post(path, {"messages": ADA, **GREEDY})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == again["timings"]["cache_n"] > 0
    assert again["id"] != answer["id"]


def test_a_stream(server: Live):
    chunks = server.chunks(CHAT, {"messages": ADA, **GREEDY})
    assert [choice["delta"] for choice in chunks[0]["choices"]] == [{"role": "assistant", "content": None}]
    assert chunks[-1]["choices"] == [{"finish_reason": "stop", "index": 0, "delta": {}}]
    assert text_of(chunks) == "Nice to meet you, Ada!" and reason_of(chunks) == "stop" and len(chunks) > 6
    for chunk in chunks[1:-1]:
        assert list(chunk["choices"][0]["delta"]) == ["content"] and chunk["choices"][0]["delta"]["content"]
    assert len({chunk["id"] for chunk in chunks}) == 1 and {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert not any("usage" in chunk for chunk in chunks)
    assert [i for i, chunk in enumerate(chunks) if "timings" in chunk] == [len(chunks) - 1]


def test_usage_at_the_end_of_a_stream(server: Live):
    *chunks, last = server.chunks(CHAT, {"messages": ADA, "stream_options": {"include_usage": True}, **GREEDY})
    whole = server.post(CHAT, {"messages": ADA, **GREEDY})
    assert last["choices"] == [] and last["usage"] == whole["usage"] and "timings" in last
    assert not any("usage" in chunk or "timings" in chunk for chunk in chunks) and reason_of(chunks) == "stop"


def test_text_that_is_cut_inside_characters(server: Live):
    asked = {"messages": [{"role": "user", "content": "Say hello in Japanese."}], **GREEDY}
    chunks = server.chunks(CHAT, asked)
    assert text_of(chunks) == "こんにちは 👋" == server.post(CHAT, asked)["choices"][0]["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("more", "text", "reason"), [
    ({"max_tokens": 3}, "Nice to meet", "length"),
    ({"max_completion_tokens": 3, "max_tokens": 9}, "Nice to meet", "length"),
    ({"stop": " you"}, "Nice to meet", "stop"),
    ({"stop": ["zzz", "you"]}, "Nice to meet ", "stop"),
    ({"max_tokens": 0}, "", "length"),
    ({"logit_bias": [["Nice", False], [" to", False]], "max_tokens": 1}, None, "length"),
])  # fmt: skip
def test_how_an_answer_ends(server: Live, stream: bool, more: dict[str, Any], text: str | None, reason: str):
    body = {"messages": ADA, **GREEDY, **more}
    if stream:
        chunks = server.chunks(CHAT, body)
        seen, why = text_of(chunks), reason_of(chunks)
    else:
        choice = server.post(CHAT, body)["choices"][0]
        seen, why = choice["message"]["content"], choice["finish_reason"]
    assert why == reason and (seen == text if text is not None else not seen.startswith("Nice"))


def test_the_end_token_can_be_ignored(server: Live):
    answer = server.post(CHAT, {"messages": ADA, "ignore_eos": True, "max_tokens": 40, **GREEDY})
    assert answer["usage"]["completion_tokens"] == 40 and answer["choices"][0]["finish_reason"] == "length"


def test_running_out_of_context(server: Live):
    answer = server.post(CHAT, {"messages": ADA, "ignore_eos": True, **GREEDY})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == server.model.n_ctx + 1  # the last token is sampled, and not read


def test_seeds(server: Live):
    def colors(**more: Any) -> list[str]:
        answers = server.post(CHAT, {"messages": COLOR, "temperature": 2, "n": 8, **more})
        return [choice["message"]["content"] for choice in answers["choices"]]

    first = colors(seed=7)
    assert first == colors(seed=7) and len(set(first)) > 1
    assert colors(seed=8)[:7] == first[1:]  # answer i has seed + i


def test_several_answers(server: Live):
    server.model.engine.forget()
    answer = server.post(CHAT, {"messages": ADA, "n": 3, **GREEDY})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"Nice to meet you, Ada!"}
    one = server.post(CHAT, {"messages": ADA, **GREEDY})["usage"]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 3 * one["completion_tokens"] and usage["prompt_tokens"] == one["prompt_tokens"]


def test_several_answers_in_one_stream(server: Live):
    server.model.engine.forget()
    before = server.stats()
    body = {"messages": STORY, "n": 3, "stream_options": {"include_usage": True}, **GREEDY}
    chunks = server.chunks(CHAT, body)
    after = server.stats()
    n_prompt = len(server.model.encode(STORY))
    assert after["n_prompt"] - before["n_prompt"] - (after["n_cached"] - before["n_cached"]) == n_prompt  # it was read once
    story = text_of(chunks)
    assert len(story) > 200 and {text_of(chunks, i) for i in range(3)} == {story}
    assert {reason_of(chunks, i) for i in range(3)} == {"stop"}
    order = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"]]
    assert order[:3] == [0, 1, 2] and order != sorted(order)  # side by side, not one after the other
    assert chunks[-1]["usage"]["prompt_tokens"] == n_prompt and chunks[-1]["choices"] == []


def test_log_probabilities(server: Live):
    body = {"messages": ADA, "logprobs": True, "top_logprobs": 3, **GREEDY}
    choice = server.post(CHAT, body)["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(item["token"] for item in content) == choice["message"]["content"]
    for item in content:
        assert bytes(item["bytes"]).decode() == item["token"] and item["logprob"] <= 0 and len(item["top_logprobs"]) == 3
        best = item["top_logprobs"]
        assert best[0]["id"] == item["id"] and [top["logprob"] for top in best] == sorted(t["logprob"] for t in best)[::-1]
    chunks = server.chunks(CHAT, body)
    streamed = [item for chunk in chunks for c in chunk["choices"] if c.get("logprobs") for item in c["logprobs"]["content"]]
    assert [item["id"] for item in streamed] == [item["id"] for item in content]
    only = server.post(CHAT, {**body, "top_logprobs": 0})["choices"][0]["logprobs"]["content"]
    assert [item["top_logprobs"] for item in only] == [[]] * len(content)


def test_bytes_of_a_character_that_is_several_tokens(server: Live):
    body = {"messages": [{"role": "user", "content": "Say hello in Japanese."}], "logprobs": True, **GREEDY}
    content = server.post(CHAT, body)["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(item["bytes"]) for item in content).decode() == "こんにちは 👋"
    assert "" in [item["token"] for item in content]


def test_timings_of_each_token(server: Live):
    body = {"messages": ADA, "timings_per_token": True, "stream_options": {"include_usage": True}, **GREEDY}
    chunks = server.chunks(CHAT, body)
    n_prompt = len(server.model.encode(ADA))
    assert "timings" not in chunks[0]
    counts = [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk]
    assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == chunks[-1]["usage"]["completion_tokens"]
    for chunk in chunks[1:]:
        if "timings" in chunk:
            assert chunk["timings"]["prompt_n"] + chunk["timings"]["cache_n"] == n_prompt


@pytest.mark.parametrize("n", [1, 2])
def test_progress_of_reading(server: Live, n: int):
    server.model.engine.forget()
    body = {"messages": [{"role": "user", "content": "one two three " * 40}], "return_progress": True, "n": n, "max_tokens": 3,
            **GREEDY}  # fmt: skip
    n_prompt = len(server.model.encode(body["messages"]))
    for is_again in (False, True):
        chunks = server.chunks(CHAT, body)
        for i in range(n):
            mine = [chunk for chunk in chunks if chunk["choices"][0]["index"] == i]
            seen = [chunk["prompt_progress"] for chunk in mine if "prompt_progress" in chunk]
            done = [p["processed"] for p in seen]
            assert {p["total"] for p in seen} == {n_prompt} and len({p["cache"] for p in seen}) == 1
            assert done[0] == seen[0]["cache"] and done[-1] == n_prompt and done == sorted(set(done))
            assert (seen[0]["cache"] > 0) == (is_again or i > 0)
            last = max(k for k, chunk in enumerate(mine) if "prompt_progress" in chunk)
            assert not any(chunk["choices"][0]["delta"].get("content") for chunk in mine[:last])


def test_going_on_with_the_last_message(server: Live):
    begun = [*ADA, {"role": "assistant", "content": "Nice to"}]
    assert server.post(CHAT, {"messages": begun, **GREEDY})["choices"][0]["message"]["content"] == " meet you, Ada!"
    wish = {"continue_final_message": True, "add_generation_prompt": False}
    assert server.post(CHAT, {"messages": begun, **wish, **GREEDY})["choices"][0]["message"]["content"] == " meet you, Ada!"


def test_content_in_parts_and_a_reply_that_comes_back(server: Live):
    parts = [{"role": "user", "content": [{"type": "text", "text": "My name "}, {"type": "text", "text": "is Ada."}]}]
    answer = server.post(CHAT, {"messages": parts, **GREEDY})["choices"][0]["message"]
    talk = [*parts, answer, {"role": "user", "content": "What is my name?"}]
    second = server.post(CHAT, {"messages": talk, **GREEDY})
    assert second["choices"][0]["message"]["content"] == "Your name is Ada."
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > len(server.model.encode(parts))  # the reply too


def test_tools_are_shown_to_the_model(server: Live):
    add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {
        "a": {"type": "number"}, "b": {"type": "number"}}}}}  # fmt: skip
    asked = {"messages": [{"role": "user", "content": "What is 3 plus 4?"}], "tools": [add]}
    n_with = server.post(f"{CHAT}/input_tokens", asked)["input_tokens"]
    n_none = server.post(f"{CHAT}/input_tokens", {**asked, "tool_choice": "none"})["input_tokens"]
    assert n_with > n_none == server.post(f"{CHAT}/input_tokens", {"messages": asked["messages"]})["input_tokens"]
    assert server.post(CHAT, {**asked, "max_tokens": 1})["usage"]["prompt_tokens"] == n_with


def test_verbose_shows_the_prompt(server: Live):
    whole = server.post(CHAT, {"messages": ADA, "verbose": True, "max_tokens": 2, **GREEDY})
    assert whole["__verbose"]["prompt"].endswith("My name is Ada.<|im_end|>\n<|im_start|>assistant\n")
    assert whole["__verbose"]["generation_settings"]["n_predict"] == 2
    assert "__verbose" not in server.post(CHAT, {"messages": ADA, "verbose": False, "max_tokens": 2, **GREEDY})
    chunks = server.chunks(CHAT, {"messages": ADA, "verbose": True, "max_tokens": 2, **GREEDY})
    assert [i for i, chunk in enumerate(chunks) if "__verbose" in chunk] == [len(chunks) - 1]


def test_a_prompt_that_is_too_long(server: Live):
    body = {"messages": [{"role": "user", "content": "one two " * 2000}]}
    for stream in (False, True):
        error = server.post(CHAT, {**body, "stream": stream}, 400)["error"]
        assert error["type"] == "exceed_context_size_error" and error["n_ctx"] == server.model.n_ctx < error["n_prompt_tokens"]


@pytest.mark.parametrize("messages", [
    None, "string", [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}], [ADA[0], {}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], [{"role": "user"}],
    [*ADA, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
])  # fmt: skip
def test_messages_that_are_none(server: Live, messages: Any):
    assert "message" in server.refusal(CHAT, {"messages": messages}).lower()


def test_a_field_that_is_refused_is_named(server: Live):
    for body in ({"response_format": {"type": "xml"}}, {"grammar": "root ::= x"}, {"temperature": "hot"}):
        for stream in (False, True):
            assert next(iter(body)) in server.refusal(CHAT, {"messages": ADA, "stream": stream, **body})


def test_a_time_limit(server: Live):
    answer = server.post(CHAT, {"messages": STORY, "t_max_predict_ms": 1, "ignore_eos": True})
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] < 500


# --- text ---


def test_a_text(server: Live):
    body = {"prompt": "Once upon a", "max_tokens": 4, **GREEDY}
    answer = server.post("/v1/completions", body)
    assert answer["object"] == "text_completion"
    assert answer["choices"][0].keys() == {"text", "index", "logprobs", "finish_reason"}
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] == 4
    chunks = server.chunks("/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answer["choices"][0]["text"] != ""
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1]["usage"]["total_tokens"] == answer["usage"]["total_tokens"] and "timings" in chunks[-1]
    *_, last = server.chunks("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4


def test_texts_to_several_prompts(server: Live):
    prompts = ["Once upon a", server.model.encode("The capital of"), ["Once", 5, "x"]]
    body = {"max_tokens": 4, **GREEDY}
    single = [server.post("/v1/completions", {"prompt": prompt, **body}) for prompt in prompts]
    answer = server.post("/v1/completions", {"prompt": prompts, **body, "n": 2})
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [one["choices"][0]["text"] for one in single for _ in range(2)]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in single)
    assert answer["usage"]["completion_tokens"] == 24
    chunks = server.chunks("/v1/completions", {"prompt": prompts, **body})
    streamed = ["".join(c["text"] for k in chunks for c in k["choices"] if c["index"] == i) for i in range(3)]
    assert streamed == texts[::2]


def test_log_probabilities_of_a_text(server: Live):
    body = {"prompt": "Once upon a", "max_tokens": 4, "logprobs": 2, **GREEDY}
    choice = server.post("/v1/completions", body)["choices"][0]
    lists = choice["logprobs"]
    assert "".join(lists["tokens"]) == choice["text"]
    assert lists["text_offset"] == [len("".join(lists["tokens"][:i])) for i in range(4)]
    assert [item["logprob"] for item in lists["content"]] == lists["token_logprobs"]
    assert [len(top) for top in lists["top_logprobs"]] == [2] * 4
    streamed = [c["logprobs"] for chunk in server.chunks("/v1/completions", body) for c in chunk["choices"] if c["logprobs"]]
    assert [offset for item in streamed for offset in item["text_offset"]] == lists["text_offset"]


def test_prompts_that_are_none(server: Live):
    for prompt in (None, [], [[]], {}, 1, [1.5], ["a", None], [True], {"prompt_string": 1}, [[1, "a", []]]):
        assert "prompt" in server.refusal("/v1/completions", {"prompt": prompt})
    assert "token id" in server.refusal("/v1/completions", {"prompt": [-1]})
    assert "'echo'" in server.refusal("/v1/completions", {"prompt": "a", "echo": True})


def test_the_official_client(server: Live):
    with openai.OpenAI(api_key="none", base_url=f"http://127.0.0.1:{server.port}/v1") as client:
        answer = client.chat.completions.create(model="x", messages=ADA, temperature=0, n=2, logprobs=True, top_logprobs=2)
        assert [choice.message.content for choice in answer.choices] == ["Nice to meet you, Ada!"] * 2
        assert answer.choices[0].logprobs.content[0].top_logprobs[0].token == "Nice"
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="x", messages=[{"role": "user", "content": "one " * 3000}], stream=True)
        assert json.loads(caught.value.response.text)["error"]["type"] == "exceed_context_size_error"
