"""AsyncChat and Chat.astream(): the same history as without an event loop, one reply at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from loops import Run

from lfmfast import AsyncModel, AsyncStream, BusyError, ContextFullError, Model

GREEDY: dict[str, Any] = {"temperature": 0}
ENDLESS: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


# --- chats ---


def test_chat_is_the_same(lfm2_tiny: Model, run_async: Run[Any]) -> None:
    texts = ["My name is Ada.", "What is my name?", "What is the capital of France?"]
    expected = lfm2_tiny.chat()
    answers = [expected.send(text, **GREEDY) for text in texts]

    async def main() -> None:
        chat = AsyncModel(lfm2_tiny).chat()
        for text, answer in zip(texts, answers, strict=True):
            assert (await chat.send(text, **GREEDY)).tokens == answer.tokens
        assert chat.messages == expected.messages
        assert (await chat.regenerate(**GREEDY)).text == answers[-1].text
        stream = chat.regenerate(stream=True, **GREEDY)
        assert "".join([piece.text async for piece in stream]) == answers[-1].text
        assert chat.messages == expected.messages
        with pytest.raises(ContextFullError):
            await chat.send("word " * 3000)  # short
        with pytest.raises(ContextFullError):
            await chat.send("word " * 9000)  # in a thread
        assert chat.messages == expected.messages
        options = {"prefill": "The capital of France", "max_tokens": 8, **GREEDY}
        pieces = [piece async for piece in lfm2_tiny.chat().astream(texts[-1], **options)]
        assert "".join(piece.text for piece in pieces) == lfm2_tiny.chat().send(texts[-1], **options).text

    run_async(main)


def test_left_reply_is_kept_as_far_as_it_came(lfm2_tiny: Model, run_async: Run[Any]) -> None:
    async def main() -> None:
        chat = lfm2_tiny.chat()
        seen = ""
        async for piece in chat.astream("Tell me a story.", **ENDLESS):
            seen += piece.text
            if len(seen) > 20:
                break
        again = await chat.asend("What is the capital of France?", max_tokens=4, **GREEDY)  # waits for the end of the first
        assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2
        assert chat.messages[1]["content"].startswith(seen) and chat.messages[3]["content"] == again.text

    run_async(main)


def test_one_reply_at_a_time(lfm2_tiny: Model, run_async: Run[Any]) -> None:
    question, answer = "What is the capital of France?", "The capital of France is Paris."

    async def main() -> None:
        chat = AsyncModel(lfm2_tiny).chat()
        done = await asyncio.gather(*(chat.send(question, **GREEDY) for _ in range(5)))
        assert [c.text for c in done] == [answer] * 5
        assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 5

        stream = chat.stream("Tell me a story.", **ENDLESS)
        await stream.__anext__()
        for use in (lambda: chat.stream(question), lambda: chat.chat.send(question), chat.chat.reset):
            with pytest.raises(BusyError):
                use()
        others = [asyncio.ensure_future(chat.send(question, **GREEDY)) for _ in range(3)]
        await asyncio.sleep(0.02)
        assert not any(task.done() for task in others)
        others[0].cancel()  # one that waits for its turn
        await asyncio.wait(others[:1])
        await stream.aclose()
        assert [(await task).text for task in others[1:]] == [answer] * 2
        assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 8

        async def ask() -> AsyncStream:
            return chat.stream(question)

        async with chat.stream("Tell me a story.", **ENDLESS):
            waiting = await asyncio.ensure_future(ask())
            waiting.cancel()
            assert (await waiting.result()).finish_reason == "cancelled"
            gone = await asyncio.ensure_future(ask())
            del gone
        assert (await chat.send(question, **GREEDY)).text == answer

    run_async(main)


def test_chat_of_a_loop_and_of_threads(lfm2_tiny: Model, run_async: Run[Any]) -> None:
    question, answer = "What is the capital of France?", "The capital of France is Paris."
    chat = lfm2_tiny.chat()

    async def main() -> None:
        waits: list[Awaitable[Any]] = []
        for _ in range(5):
            waits += [asyncio.to_thread(chat.send, question, **GREEDY), chat.asend(question, **GREEDY)]
        assert [done.text for done in await asyncio.gather(*waits)] == [answer] * 10

    run_async(main)
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 10
