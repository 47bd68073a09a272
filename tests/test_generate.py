"""Many prompts, several answers, priorities, deadlines, the queue; replies that come back as text."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import child
import pytest
from exact import opened

from lfmfast import (
    ClosedError,
    Completion,
    ContextFullError,
    DeadlineError,
    Model,
    ParameterError,
    QueueFullError,
    TemplateError,
)
from lfmfast._engine import Mailbox
from lfmfast._replies import Chunk, ReplyMemory
from lfmfast._request import Asked
from lfmfast.stream import Answer
from lfmfast.templates import Segment

GREEDY: dict[str, Any] = {"temperature": 0, "repeat_penalty": 1.0}
ENDLESS: dict[str, Any] = {**GREEDY, "ignore_eos": True}
WILD: dict[str, Any] = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repeat_penalty": 1.0, "ignore_eos": True}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def read(model: Model) -> int:
    """Prompt tokens that were processed so far."""
    stats = model.engine.stats()
    return stats["n_prompt"] - stats["n_cached"]


# --- several answers to one prompt ---


@pytest.mark.parametrize("name", ["tiny_f32_path", "tiny_moe_path", "tiny_dense_path"])
def test_n_answers_read_the_prompt_once(request: pytest.FixtureRequest, name: str) -> None:
    prompt = user("Say something, anything. " * 8)
    with opened(request.getfixturevalue(name)) as model:
        steps: list[tuple[int, int]] = []
        answers = model.generate(prompt, n=40, seed=7, max_tokens=6, progress=lambda *at: steps.append(at), **WILD)
        assert read(model) == answers[0].usage.prompt_tokens
        assert steps == [(i + 1, 40) for i in range(40)]
        assert len({answer.tokens for answer in answers}) > 30
        for i in (0, 1, 39):
            assert model.generate(prompt, seed=7 + i, max_tokens=6, **WILD).tokens == answers[i].tokens
        assert len({answer.tokens for answer in model.generate(prompt, n=4, max_tokens=6, **GREEDY)}) == 1
        assert len({answer.tokens for answer in model.generate(prompt, n=8, max_tokens=6, **WILD)}) > 3  # fresh seeds


def test_the_last_seed_is_followed_by_the_first(tiny_f32: Model) -> None:
    answers = tiny_f32.generate([20, 21, 22], n=2, seed=2**32 - 2, max_tokens=8, **WILD)
    assert answers[1].tokens == tiny_f32.generate([20, 21, 22], seed=0, max_tokens=8, **WILD).tokens


@pytest.mark.parametrize("n", [0, -1, True, 1.0, "2", None])
def test_bad_n(tiny_f32: Model, n: Any) -> None:
    with pytest.raises(ParameterError, match="n must be"):
        tiny_f32.generate("x", n=n, max_tokens=1)


def test_n_is_for_one_prompt(tiny_f32: Model) -> None:
    with pytest.raises(ParameterError, match="single prompt"):
        tiny_f32.generate(["x", "y"], n=2, max_tokens=1)


# --- many prompts ---


def test_many_prompts_in_order(tiny_f32_path: Path) -> None:
    system = {"role": "system", "content": "Answer in one word, please. " * 10}
    prompts: list[Any] = [[system, *user(f"Question {i}, {'long ' * (i % 7)}?")] for i in range(50)]
    prompts[13], prompts[14] = "plain text", list(range(20, 40))
    with opened(tiny_f32_path) as model, opened(tiny_f32_path, n_parallel=1) as alone:
        options = {"max_tokens": 5, "seed": 3, **WILD}
        # Most as token ids, so that requests wait for slots however slowly prompts are rendered here.
        answers = model.generate([p if i % 10 == 3 else model.encode(p) for i, p in enumerate(prompts)], **options)
        assert model.engine.stats()["n_slots"] == 16
        n_shared = len(alone.tokenize("system\n" + system["content"]))
        n_tokens = sum(answer.usage.prompt_tokens for answer in answers)
        assert read(model) < n_tokens - 46 * n_shared  # the system prompt is read once (twice, before it is known to be shared)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == alone.generate(prompt, cache_prompt=False, **options).tokens


def test_one_prompt_in_a_list(lfm2_tiny: Model) -> None:
    question = user("What is the capital of France?")
    assert [done.text for done in lfm2_tiny.generate([question], **GREEDY)] == [lfm2_tiny.generate(question, **GREEDY).text]
    assert isinstance(lfm2_tiny.generate(question, progress=lambda *_: None, **GREEDY), Completion)


def test_an_error_ends_all_or_stands_in_its_place(tiny_f32_path: Path) -> None:
    bad: list[Any] = ["fine", [20] * 600, [{"role": "user"}], "fine too", b"bytes"]
    with opened(tiny_f32_path) as model:
        answers = model.generate(bad[:4], max_tokens=3, return_errors=True, **ENDLESS)
        assert [type(answer) for answer in answers] == [Completion, ContextFullError, TemplateError, Completion]
        answers = model.generate(bad[1], n=2, max_tokens=3, return_errors=True)
        assert [type(answer) for answer in answers] == [ContextFullError] * 2
        for wrong, kind in ((bad[1], ContextFullError), (bad[2], TemplateError), (bad[4], ParameterError)):
            before = model.engine.stats()["n_requests"]
            with pytest.raises(kind):
                model.generate(["x"] * 3 + [wrong] + ["x"] * 1000, max_tokens=400, **ENDLESS)
            stats = model.engine.stats()
            assert (stats["n_running"], stats["n_queued"]) == (0, 0)
            assert stats["n_requests"] - before <= 3
        with pytest.raises(ParameterError, match="temperature"):  # not one error for each
            model.generate(["x", "y"], temperature=-1, return_errors=True)
        assert model.generate("x", max_tokens=2, **ENDLESS).usage.completion_tokens == 2


def test_an_exception_in_progress_ends_all(tiny_f32_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        if done == 2:
            raise KeyError("mine")

    with opened(tiny_f32_path) as model:
        with pytest.raises(KeyError, match="mine"):
            model.generate(["x"] * 1000, max_tokens=3, progress=progress, **ENDLESS)
        stats = model.engine.stats()
        assert (stats["n_running"], stats["n_queued"]) == (0, 0)
        assert stats["n_requests"] < 100


def test_closing_the_model_ends_all(tiny_f32_path: Path) -> None:
    model = opened(tiny_f32_path)
    threading.Timer(0.2, model.close).start()
    with pytest.raises(ClosedError):
        model.generate(["x"] * 100_000, max_tokens=200, **ENDLESS)


@pytest.mark.parametrize("n_parallel", [1, 3, None])
def test_a_short_queue_is_never_overrun(tiny_f32_path: Path, n_parallel: int | None) -> None:
    """Also while another thread fills it."""
    with opened(tiny_f32_path, n_queue=1, n_parallel=n_parallel) as model:
        stop = threading.Event()

        def other() -> None:
            while not stop.is_set():
                try:
                    model.generate("other", max_tokens=2, **ENDLESS)
                except QueueFullError:
                    time.sleep(0.001)

        thread = threading.Thread(target=other)
        thread.start()
        try:
            answers = model.generate([f"prompt {i}" for i in range(60)], max_tokens=3, **ENDLESS)
        finally:
            stop.set()
            thread.join()
        assert [answer.usage.completion_tokens for answer in answers] == [3] * 60


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill sends no Ctrl-C there")
@pytest.mark.parametrize("what", ["many", "n"])
def test_ctrl_c_cancels_all(tiny_f16_path: Path, what: str) -> None:
    out = child.run("""
        import os, signal, sys, threading
        from lfmfast import Model
        what, path = sys.argv[1:]
        with Model(path, n_ctx=4096, n_threads=1) as model:
            def progress(done, total):
                if done == 3: threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
            options = dict(max_tokens=300, temperature=0, ignore_eos=True, progress=progress)
            try:
                if what == "many": model.generate([f"prompt {i}" for i in range(100_000)], **options)
                else: model.generate("prompt", n=100_000, **options)
            except KeyboardInterrupt:
                stats = model.engine.stats()
                print("stopped", stats["n_running"], stats["n_queued"], stats["n_requests"] < 1000)
            print(model.generate("x", max_tokens=2, ignore_eos=True).usage.completion_tokens)
    """, what, tiny_f16_path)
    assert out.split() == ["stopped", "0", "0", "True", "2"]


# --- the queue ---


def test_priorities(tiny_f32_path: Path) -> None:
    with opened(tiny_f32_path, n_parallel=1) as model:
        running = model.stream("x", max_tokens=400, **ENDLESS)
        next(running)  # it has the place
        priorities = [0, -3, 5, 0, 2**31 - 1, -(2**31), 5]
        mailbox = Mailbox()
        streams = [model._native_stream(Asked(model.encode(f"prompt {i}")), Answer(), max_tokens=2, priority=p,
                                        mailbox=mailbox, mailbox_id=i, **ENDLESS)
                   for i, p in enumerate(priorities)]  # fmt: skip
        running.close()
        order: list[int] = []
        while len(order) < len(streams):  # in the order in which they had their first news
            order += [i for i in mailbox.wait(50) or () if i not in order]
        assert order == sorted(range(len(priorities)), key=lambda i: -priorities[i])


def test_deadline_in_the_queue_and_in_the_prompt(tiny_q4_path: Path) -> None:
    with Model(tiny_q4_path, n_ctx=8192, n_threads=1, n_parallel=1) as model:
        with model.stream("x", max_tokens=-1, **ENDLESS) as running:
            next(running)
            with pytest.raises(DeadlineError, match="1 ms"):
                model.generate("y", max_tokens=1, t_max_prompt_ms=1)
            assert running.finish_reason is None
        long = [20 + i % 100 for i in range(8000)]
        with pytest.raises(DeadlineError):
            model.generate(long, max_tokens=1, t_max_prompt_ms=30)
        answers = model.generate([long, "y"], max_tokens=1, t_max_prompt_ms=30, return_errors=True)
        assert isinstance(answers[0], DeadlineError)
        assert model.generate("y", max_tokens=1, t_max_prompt_ms=60_000).usage.completion_tokens == 1


def test_deadline_of_the_answer(tiny_f32: Model) -> None:
    done = tiny_f32.generate("x", t_max_predict_ms=5, **ENDLESS)
    assert done.finish_reason == "length"
    assert 1 <= done.usage.completion_tokens < tiny_f32.n_ctx - done.usage.prompt_tokens
    assert tiny_f32.generate("x", max_tokens=5, t_max_predict_ms=60_000, **ENDLESS).usage.completion_tokens == 5


def test_the_queue_is_full(tiny_f32_path: Path) -> None:
    with opened(tiny_f32_path, n_parallel=1, n_queue=2) as model:
        running = model.stream("x", max_tokens=400, **ENDLESS)
        next(running)
        waiting = [model.stream("y", max_tokens=1), model.stream("z", max_tokens=1)]
        with pytest.raises(QueueFullError, match="2 requests wait"):
            model.stream("w", max_tokens=1)
        running.close()
        assert [stream.result().usage.completion_tokens for stream in waiting] == [1, 1]


@pytest.mark.parametrize("name", ["priority", "cache_reuse", "t_max_prompt_ms", "t_max_predict_ms"])
def test_bad_options(tiny_f32: Model, name: str) -> None:
    for value in (1.5, "1", True, 2**31, *(() if name == "priority" else (-1,))):
        with pytest.raises(ParameterError, match=name):
            tiny_f32.stream("x", max_tokens=1, **{name: value})


# --- replies that come back as text ---


def wild_turn(model: Model, messages: list[dict[str, str]], seed: int) -> tuple[Completion, list[dict[str, str]]]:
    """A random reply of text only, and the conversation as a client would send it back with the next question."""
    no_text = [*model.native.control_tokens.values(), *filter(None, map(model.token_id, ("<think>", "</think>")))]
    done = model.generate(messages, max_tokens=40, seed=seed, logit_bias=dict.fromkeys(no_text, -100.0), **WILD)
    return done, [*messages, {"role": "assistant", "content": done.text}, *user("And then?")]


@pytest.mark.parametrize("name", ["tiny_f32_path", "tiny_moe_path", "tiny_dense_path"])
def test_replies_sent_back_as_text_are_not_read_again(request: pytest.FixtureRequest, name: str) -> None:
    with opened(request.getfixturevalue(name), n_ctx=2048) as model, opened(request.getfixturevalue(name), n_ctx=2048) as cold:
        messages = user("Tell me.")
        n_other = 0
        for seed in range(8):
            before, sent = messages, messages
            done, messages = wild_turn(model, sent, seed)
            n_other += model.tokenize(done.text) != list(done.tokens)
            again = model.generate(messages, max_tokens=8, **ENDLESS)
            # All of the prompt and the reply but its last token, which was not read yet.
            assert again.usage.cached_tokens == done.usage.prompt_tokens + done.usage.completion_tokens - 1
            ids = model.encode(messages)
            assert ids[: done.usage.prompt_tokens + len(done.tokens)] == [*model.encode(before), *done.tokens]
            reference = cold.generate(ids, max_tokens=8, cache_prompt=False, **ENDLESS)
            assert again.tokens == reference.tokens
        assert n_other == 8  # else this test shows nothing


def test_all_ways_to_a_reply_remember_it(tiny_f32_path: Path) -> None:
    options = {"max_tokens": 30, **WILD}
    with opened(tiny_f32_path) as model:
        question = user("Tell me.")
        answers = [*model.generate(question, n=3, seed=1, **options), *model.generate([question, question], seed=9, **options)]
        stream = model.stream(question, seed=20, **options)
        for _ in stream:
            pass
        chat = model.chat()
        answers += [stream.result(), chat.send("Tell me.", seed=30, **options)]
        with model.stream(question, seed=40, **options) as stream:  # left early
            for _ in itertools.islice(stream, 5):
                pass
        texts = [(answer.text, answer.tokens) for answer in answers] + [(stream.text, stream.tokens)]
        for text, tokens in texts:
            ids = model.encode([*question, {"role": "assistant", "content": text}])
            where = len(model.encode(question))
            assert ids[where : where + len(tokens)] == list(tokens)
        # A chat that is begun with such a history uses it too.
        other = model.chat(messages=chat.messages)
        done = other.send("And then?", max_tokens=1, **ENDLESS)
        assert done.usage.cached_tokens >= answers[-1].usage.prompt_tokens + len(answers[-1].tokens) - 1


def test_only_replies_are_remembered(tiny_f32_path: Path) -> None:
    with opened(tiny_f32_path) as model:
        done, messages = wild_turn(model, user("Tell me."), 3)
        assert len(model._replies) == 1
        plain = model.tokenize("user\n" + done.text)
        asked = model.encode(user(done.text))  # the same text, said by the user
        assert any(asked[i : i + len(plain)] == plain for i in range(len(asked)))
        changed = [messages[0], {"role": "assistant", "content": done.text + "!"}]
        tokens = model.tokenize("assistant\n" + done.text + "!")
        ids = model.encode(changed)
        assert any(ids[i : i + len(tokens)] == tokens for i in range(len(ids)))


def test_without_the_cache_nothing_is_taken_from_memory(tiny_f32_path: Path) -> None:
    with opened(tiny_f32_path) as model, opened(tiny_f32_path) as fresh:
        _, messages = wild_turn(model, user("Tell me."), 3)
        options = {"max_tokens": 1, "cache_prompt": False, **ENDLESS}
        n = model.generate(messages, **options).usage.prompt_tokens
        assert n == len(fresh.encode(messages)) != len(model.encode(messages))


def test_reply_with_control_tokens_in_it(tiny_f32_path: Path) -> None:
    """The parts between control tokens are remembered each for itself, with what is before them."""
    with opened(tiny_f32_path) as model:
        start = model.token_id("<|tool_call_start|>")
        assert start is not None
        done = model.generate(user("Tell me."), max_tokens=60, seed=5, logit_bias={start: 10.0}, **WILD)
        n_parts = done.tokens.count(start)
        assert n_parts >= 2
        chunks = model._replies.answer(model._encode(user("Tell me."))[1], done.tokens)
        again = model._replies.encode([Segment(chunk.text, chunk.special) for chunk in chunks])
        assert again == chunks
        plain = model._replies.encode([Segment(chunk.text, chunk.special) for chunk in chunks], remembered=False)
        assert sum(a != b for a, b in zip(plain, chunks, strict=True)) == len(model._replies) > 2


class Letters:
    """A vocabulary of letters in which pairs are tokens too."""

    def token_id(self, text: str) -> int | None:
        return {"<s>": 1000, "<e>": 1001}.get(text)

    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]:
        pairs = [text[i : i + 2] for i in range(0, len(text), 2)]
        return [ord(p[0]) * 1000 * 1000 + ord(p[1]) if len(p) == 2 else ord(p) for p in pairs]

    def detokenize(self, tokens: Any, *, special: bool = False) -> str:
        return "".join(chr(t // 10**6) + chr(t % 10**6) if t >= 10**6 else chr(t) for t in tokens)

    def is_control(self, token: int) -> bool:
        return token in (1000, 1001)


def test_the_memory_is_bounded_and_the_last_use_counts() -> None:
    memory = ReplyMemory(Letters(), max_entries=10, max_bytes=5000)
    opening = [Chunk("<s>", True, (1000,)), Chunk("a\n", False, (97, 10))]

    def remember(text: str) -> None:
        memory.watcher(opening)(type("Reply", (), {"tokens": [ord(c) for c in text], "reader": None})())

    def ids(text: str) -> tuple[int, ...]:
        return memory.encode([Segment(text, False)], opening[:1])[0].ids

    for i in range(10):
        remember(f"text {i}")
    assert ids("a\ntext 0") == tuple(map(ord, "a\ntext 0"))
    remember("text 10")
    assert len(memory) == 10
    assert ids("a\ntext 0") == tuple(map(ord, "a\ntext 0"))  # used last, so the next oldest went
    assert ids("a\ntext 1") == tuple(Letters().tokenize("a\ntext 1"))
    remember("x" * 4000)  # takes too much of the room
    assert len(memory) == 10
    for i in range(10):
        remember(f"{i}" + "y" * 150)
    assert len(memory) < 10
    assert memory._ids.n_bytes <= 5000
    memory.remember([*opening[:1], Chunk("a\nzz", False, tuple(map(ord, "a\nzz")))], 1)
    assert ids("a\nzz") == tuple(map(ord, "a\nzz"))
    memory.remember([*opening[:1], Chunk("a\nzz", False, tuple(Letters().tokenize("a\nzz")))], 1)
    assert ids("a\nzz") == tuple(Letters().tokenize("a\nzz"))  # the last time it was generated as the tokenizer has it


def test_memory_from_several_threads(tiny_f32_path: Path) -> None:
    with opened(tiny_f32_path) as model:
        failures: list[BaseException] = []

        def talk(k: int) -> None:
            try:
                rng = random.Random(k)
                messages = user(f"Thread {k}")
                for _ in range(4):
                    done, messages = wild_turn(model, messages, rng.randrange(1000))
                    assert done.usage.completion_tokens == 40
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=talk, args=(k,)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert len(model._replies) == 24


def test_a_first_token_that_comes_too_late_is_an_error(tiny_q4_path: Path) -> None:
    """Also when a single pass reads the whole prompt, and nothing could stop it on the way."""
    with Model(tiny_q4_path, n_ctx=1024, n_threads=1, n_ubatch=1000) as model:
        prompt = [20 + i % 500 for i in range(900)]
        with pytest.raises(DeadlineError, match="1 ms"):
            model.generate(prompt, max_tokens=4, t_max_prompt_ms=1)
        assert model.generate(prompt, max_tokens=4, t_max_prompt_ms=60_000, ignore_eos=True).usage.completion_tokens == 4
