"""Chat: history, what is read again and what is not, leaving early, errors, threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from lfmfast import BusyError, Chat, ContextFullError, Model, ParameterError, TemplateError

GREEDY: dict[str, Any] = {"temperature": 0, "repeat_penalty": 1.0}
HELPFUL = "You are a helpful assistant."
THINK = HELPFUL + " Think step by step."


@pytest.fixture
def chat(lfm2_tiny: Model) -> Chat:
    return lfm2_tiny.chat()


def roles(chat: Chat) -> str:
    return "".join(message["role"][0] for message in chat.messages)


def in_step(chat: Chat) -> bool:
    """Whether the ids that are kept are those of the whole conversation rendered anew."""
    messages = chat.messages
    rendered = chat.model.template.render(messages, tools=chat.tools, add_generation_prompt=False, **chat._options)
    return rendered.text == "".join(chunk.text for block in chat._blocks for chunk in block)


def test_remembers(chat: Chat) -> None:
    assert chat.send("My name is Ada.", **GREEDY).text == "Nice to meet you, Ada!"
    assert chat.send("What is my name?", **GREEDY).text == "Your name is Ada."
    assert roles(chat) == "uaua"
    assert chat.messages[-1] == {"role": "assistant", "content": "Your name is Ada."}
    assert in_step(chat)


def test_real_model_remembers(smollm2: Model) -> None:
    chat = smollm2.chat(HELPFUL)
    chat.send("My dog is called Rex.", max_tokens=30, **GREEDY)
    # A beginning that leaves one answer: a model this small rarely answers a question by itself.
    again = chat.send("What is my dog called?", prefill="Your dog is called", max_tokens=3, **GREEDY)
    assert "Rex" in again.text
    assert again.usage.cached_tokens > 40


def test_only_what_is_new_is_read(lfm2_tiny: Model) -> None:
    lfm2_tiny.engine.forget()
    chat = lfm2_tiny.chat(HELPFUL)
    before = 0
    for text in ["My name is Ada.", "What is the capital of France?", "Count from 1 to 5.", "Tell me a story.",
                 "What is my name?"]:  # fmt: skip
        done = chat.send(text, **GREEDY)
        new = len(lfm2_tiny.tokenize(f"user\n{text}assistant\n")) + 6  # the turns' control tokens and line breaks
        assert done.usage.prompt_tokens - before <= new + (len(lfm2_tiny.tokenize(HELPFUL)) + 6 if before == 0 else 0)
        assert done.usage.cached_tokens == before
        before = done.usage.prompt_tokens + done.usage.completion_tokens - 1
        assert chat.timings == done.timings
    assert done.text == "Your name is Ada."
    assert chat.n_tokens == len(lfm2_tiny.encode(chat.messages)) - 3  # without the next reply's opening


def test_stream_and_history(chat: Chat) -> None:
    stream = chat.stream("My name is Ada.", **GREEDY)
    assert chat.messages == []  # nothing before the end
    text = "".join(piece.text for piece in stream)
    assert chat.messages == [{"role": "user", "content": "My name is Ada."}, {"role": "assistant", "content": text}]
    chat.messages.clear()
    assert len(chat.messages) == 2  # a copy was cleared


def test_other_splits_of_the_reply_are_kept(lfm2_tiny: Model) -> None:
    """A reply made of other tokens than the tokenizer would take is not read again."""
    chat = lfm2_tiny.chat()
    forbidden = lfm2_tiny.tokenize(" nice")[0], lfm2_tiny.tokenize("Nice")[0]
    done = chat.send("My name is Ada.", logit_bias=dict.fromkeys(forbidden, -100.0), **GREEDY)
    text = chat.messages[-1]["content"]
    again = chat.send("What is my name?", **GREEDY)
    assert again.usage.cached_tokens == done.usage.prompt_tokens + len(done.tokens)
    chat.send("What is my name?", stop="is", **GREEDY)
    assert chat.messages[-1]["content"] == "Your name "
    assert chat.messages[1]["content"] == text
    assert in_step(chat)


def test_spelled_reply_is_kept(lfm2_tiny: Model) -> None:
    chat = lfm2_tiny.chat()
    spelled = dict.fromkeys(range(270, 1278), -100.0)  # only single bytes are left
    done = chat.send("What is my name?", logit_bias=spelled, max_tokens=12, **GREEDY)
    assert lfm2_tiny.tokenize(done.text) != list(done.tokens)
    again = chat.send("Hello!", max_tokens=1)
    assert again.usage.cached_tokens >= done.usage.prompt_tokens + len(done.tokens) - 1


def test_reset(lfm2_tiny: Model) -> None:
    for system, left in ((None, ""), (HELPFUL, "s")):
        chat = lfm2_tiny.chat(system)
        chat.send("My name is Ada.", **GREEDY)
        chat.reset()
        assert roles(chat) == left
        assert chat.send("What is my name?", **GREEDY).text == "I do not know your name yet."


def test_fork(chat: Chat) -> None:
    chat.send("My name is Ada.", **GREEDY)
    other = chat.fork()
    first = chat.send("What is my name?", **GREEDY)
    second = other.send("What is the capital of France?", **GREEDY)
    assert (first.text, second.text) == ("Your name is Ada.", "The capital of France is Paris.")
    assert second.usage.cached_tokens >= 25  # goes on where the first reply ended, not from the start
    assert roles(chat) == roles(other) == "uaua"
    assert chat.messages[:2] == other.messages[:2]
    assert in_step(chat) and in_step(other)


def test_regenerate(chat: Chat) -> None:
    chat.send("My name is Ada.", **GREEDY)
    first = chat.send("Name a color.", temperature=1, top_k=0, seed=1)
    others = {chat.regenerate(temperature=1, top_k=0, seed=seed).text for seed in range(12)}
    assert len(others) > 1
    again = chat.regenerate(temperature=1, top_k=0, seed=1)
    assert again.text == first.text
    assert again.usage.cached_tokens == again.usage.prompt_tokens
    assert roles(chat) == "uaua"
    text = "".join(piece.text for piece in chat.regenerate(stream=True, **GREEDY))
    assert chat.messages[-1]["content"] == text
    before = chat.messages
    with pytest.raises(ParameterError):
        chat.regenerate(temperature=-1)
    assert chat.messages == before
    chat.reset()
    with pytest.raises(TemplateError, match="no reply to regenerate"):
        chat.regenerate()


def test_trim(lfm2_tiny: Model) -> None:
    chat = lfm2_tiny.chat(HELPFUL)
    chat.send("My name is Ada.", **GREEDY)
    for _ in range(4):
        chat.send("Count from 1 to 12.", **GREEDY)
    n = chat.n_tokens
    assert chat.trim(n) == 0
    assert chat.trim(n - 1) == 2
    assert roles(chat) == "s" + "ua" * 4
    assert chat.n_tokens < n
    assert chat.send("What is my name?", **GREEDY).text == "I do not know your name yet."
    assert in_step(chat)
    assert chat.trim(keep_turns=1) == 8
    assert chat.messages[1]["content"] == "What is my name?"
    assert chat.trim(0) == 0  # the last turn stays
    assert chat.trim(keep_turns=0) == 2
    assert roles(chat) == "s"
    for bad in ({"max_tokens": -1}, {"keep_turns": -1}, {"max_tokens": 1.5}, {"max_tokens": 1, "keep_turns": 1}):
        with pytest.raises(ParameterError):
            chat.trim(**bad)  # type: ignore[arg-type]


def test_context_full_changes_nothing(lfm2_tiny_path: Path) -> None:
    with Model(lfm2_tiny_path, n_ctx=256) as model:
        chat = model.chat(HELPFUL)
        chat.send("My name is Ada.", **GREEDY)
        before, ids = chat.messages, chat._ids()
        with pytest.raises(ContextFullError) as caught:
            chat.send("Repeat: " + "river " * 300)
        assert caught.value.n_ctx == model.n_ctx < caught.value.n_tokens
        assert (chat.messages, chat._ids()) == (before, ids)
        assert chat.send("What is my name?", **GREEDY).text == "Your name is Ada."
        while True:  # until the context is full: the last reply ends there
            try:
                done = chat.send("Tell me a story.", **GREEDY)
            except ContextFullError:
                break
            if done.finish_reason == "length":
                assert done.usage.total_tokens == model.n_ctx + 1
        assert chat.trim() > 0
        assert chat.send("What is the capital of France?", **GREEDY).text == "The capital of France is Paris."


def test_tools_and_tool_results(lfm2_tiny: Model, reference: dict[str, Any]) -> None:
    chat = lfm2_tiny.chat(HELPFUL, tools=reference["tools"])
    call = chat.send("What is the weather in Paris?", **GREEDY)
    assert (call.text, call.raw) == ("", '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>')
    assert [(c.name, c.parsed) for c in call.tool_calls] == [("get_weather", {"city": "Paris"})]
    assert (chat.messages[-1]["content"], chat.messages[-1]["tool_calls"][0]["id"]) == ("", call.tool_calls[0].id)
    answer = chat.send({"role": "tool", "content": '{"temperature": 21, "sky": "sunny"}'}, **GREEDY)
    assert answer.text == "It is 21 degrees and sunny in Paris."
    assert answer.usage.cached_tokens == call.usage.prompt_tokens + len(call.tokens)  # the call's own tokens were kept
    assert in_step(chat)


# --- thoughts ---


@pytest.mark.parametrize("keep", [False, True])
def test_thoughts_of_past_turns(lfm2_tiny: Model, keep: bool) -> None:
    """The template strips them from all but the last reply, unless told to keep them; the history has them in any case."""
    chat = lfm2_tiny.chat(THINK, keep_past_thinking=keep)
    chat.send("My name is Ada.", **GREEDY)
    second = chat.send("What is my name?", **GREEDY)
    assert (second.reasoning, second.text) == ("The user is called Ada.", "Your name is Ada.")
    third = chat.send("What is the capital of France?", **GREEDY)
    assert third.text.endswith("The capital of France is Paris.")
    assert all(message["reasoning_content"] and "think" not in message["content"] for message in chat.messages[2::2])
    rendered = lfm2_tiny.template.render(chat.messages, add_generation_prompt=False, keep_past_thinking=keep).text
    assert rendered.count("<think>") == (3 if keep else 1)
    assert in_step(chat)
    fourth = chat.send("What is my name?", **GREEDY)
    whole = lfm2_tiny.generate(chat.messages[:-1], cache_prompt=False, template_options={"keep_past_thinking": keep}, **GREEDY)
    assert (fourth.text, fourth.usage.prompt_tokens) == (whole.text, whole.usage.prompt_tokens)
    if keep:
        assert fourth.usage.cached_tokens == third.usage.prompt_tokens + len(third.tokens)


def test_prefilled_reply(chat: Chat) -> None:
    done = chat.send("What is the capital of France?", prefill="The capital of", **GREEDY)
    assert done.text == " France is Paris."
    assert chat.messages[-1]["content"] == "The capital of France is Paris."
    assert in_step(chat)
    chat.send("My name is Ada.", **GREEDY)
    assert chat.send("What is my name?", prefill="Your", **GREEDY).text == " name is Ada."
    assert chat.regenerate(prefill="Your name", **GREEDY).text == " is Ada."


# --- leaving early, errors ---


def test_left_early(chat: Chat) -> None:
    chat.send("My name is Ada.", **GREEDY)
    for _ in range(20):
        for n, _piece in enumerate(chat.stream("Tell me a story.", **GREEDY)):
            if n == 3:
                break
    assert roles(chat) == "ua" * 21
    assert all(0 < len(message["content"]) < 400 for message in chat.messages[3::2])
    assert in_step(chat)
    chat.trim(keep_turns=1)
    assert chat.send("My name is Grace.", **GREEDY).text == "Nice to meet you, Grace!"
    assert chat.send("What is my name?", **GREEDY).text == "Your name is Grace."


def test_cut_by_max_tokens_goes_on(chat: Chat) -> None:
    done = chat.send("My name is Ada.", max_tokens=3, **GREEDY)
    assert (done.finish_reason, chat.messages[-1]["content"]) == ("length", done.text)
    assert chat.send("What is my name?", **GREEDY).text == "Your name is Ada."
    assert in_step(chat)


def test_nothing_said_leaves_no_trace(chat: Chat) -> None:
    chat.send("My name is Ada.", **GREEDY)
    before, ids = chat.messages, chat._ids()
    chat.model._engine.forget()
    stream = chat.stream("Repeat: " + "river " * 200)
    stream.close()
    if not stream.tokens:
        assert (chat.messages, chat._ids()) == (before, ids)
    for bad in ({"temperature": -1}, {"nonsense": 1}, {"stop": [""]}):
        with pytest.raises(ParameterError):
            chat.send("x", **bad)
    for content in (5, [{"type": "video"}], {"content": "no role"}):
        with pytest.raises(TemplateError):
            chat.send(content)  # type: ignore[arg-type]
    assert chat.messages[:2] == before
    chat.reset()
    chat.send("My name is Ada.", **GREEDY)
    assert chat.send("What is my name?", **GREEDY).text == "Your name is Ada."


def test_busy(chat: Chat) -> None:
    stream = chat.stream("Tell me a story.")
    next(stream)
    for call in (lambda: chat.send("x"), chat.reset, chat.fork, chat.trim, lambda: chat.n_tokens, chat.regenerate):
        with pytest.raises(BusyError, match="still being streamed"):
            call()
    stream.close()
    assert chat.send("My name is Ada.", **GREEDY).text == "Nice to meet you, Ada!"


def test_threads_take_turns(chat: Chat) -> None:
    chat.send("My name is Ada.", **GREEDY)
    texts: list[str] = []

    def work() -> None:
        for _ in range(5):
            texts.append(chat.send("What is my name?", **GREEDY).text)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["Your name is Ada."] * 20
    assert roles(chat) == "ua" * 21


def test_two_chats_on_one_model(lfm2_tiny: Model) -> None:
    ada, grace = lfm2_tiny.chat(), lfm2_tiny.chat()
    first, second = ada.stream("My name is Ada.", **GREEDY), grace.stream("My name is Grace.", **GREEDY)
    assert (second.result().text, first.result().text) == ("Nice to meet you, Grace!", "Nice to meet you, Ada!")
    assert ada.send("What is my name?", **GREEDY).text == "Your name is Ada."
    assert grace.send("What is my name?", **GREEDY).text == "Your name is Grace."


def test_jinja_template(smollm2: Model) -> None:
    """A model of another family: rendered with its own template, same bookkeeping."""
    chat = smollm2.chat()
    for text in ("Hi", "Say one word.", "And another."):
        chat.send(text, max_tokens=5, **GREEDY)
        assert in_step(chat)
    last = chat.send("Thanks", max_tokens=1)
    assert last.usage.prompt_tokens - last.usage.cached_tokens < 20


def test_cached_logprobs_equal_cold(lfm2_tiny_f32_path: Path) -> None:
    with Model(lfm2_tiny_f32_path, n_ctx=1024, n_threads=1, type_k="f32", type_v="f32", flash_attn=False) as model:
        chat = model.chat(HELPFUL)
        for text in ["My name is Ada.", "Count from 1 to 5.", "What is the capital of France?", "What is my name?"]:
            done = chat.send(text, logprobs=model.n_vocab, **GREEDY)
            cold = model.generate(chat.messages[:-1], logprobs=model.n_vocab, cache_prompt=False, **GREEDY)
            assert (cold.text, cold.usage.prompt_tokens) == (done.text, done.usage.prompt_tokens)
            for a, b in zip(done.logprobs or (), cold.logprobs or (), strict=True):
                mine, theirs = dict(a.top), dict(b.top)
                assert max(abs(mine[token] - theirs[token]) for token in theirs) < 1e-4
