"""AsyncModel and AsyncStream: the same answers as without an event loop, and nobody is held up."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loops import Run, is_idle, until, wait_until

import lfmfast._dispatch as dispatch
from lfmfast import (
    AsyncModel,
    AsyncStream,
    ClosedError,
    ContextFullError,
    DeadlineError,
    DecodeError,
    Model,
    ParameterError,
    QueueFullError,
)

OPEN: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_gpu_layers": 0}
GREEDY: dict[str, Any] = {"temperature": 0}
ENDLESS: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
COLOR = [{"role": "user", "content": "Name a color."}]
STORY = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture(scope="module")
def slow(slow_model_path: Path) -> Iterator[Model]:
    """Work that takes long enough to be interrupted."""
    with Model(slow_model_path, **{**OPEN, "n_ctx": 2048}, n_ubatch=64, cache_bytes=0) as model:
        yield model


# --- answers ---


def test_answers_are_those_of_the_sync_stream(lfm2_tiny: Model, run_async: Run[Any], reference: dict[str, Any]) -> None:
    prompts = [case["prompt"] for case in reference["cases"].values()]
    options: list[dict[str, Any]] = [{"max_tokens": 12, **GREEDY}, {"max_tokens": 8, "logprobs": 2, **GREEDY},
                                     {"stop": ["a"], "max_tokens": 20, **GREEDY}, {"seed": 3, "temperature": 1.0}]  # fmt: skip
    for option in options:
        option["cache_prompt"] = False  # or log probabilities differ in the last digits

    async def main() -> list[tuple[Any, ...]]:
        model, seen = AsyncModel(lfm2_tiny), []
        for prompt in prompts:
            for option in options:
                stream = model.stream(prompt, **option)
                pieces = [piece async for piece in stream]
                done = await stream.result()
                assert "".join(p.text for p in pieces) == done.text
                assert [t for p in pieces for t in p.tokens] == list(done.tokens)
                assert pieces[-1].usage == stream.usage == done.usage
                seen.append((done.text, done.tokens, done.finish_reason, done.logprobs, stream.stop_string))
        return seen

    expected = []
    for prompt in prompts:
        for option in options:
            stream = lfm2_tiny.stream(prompt, **option)
            done = stream.result()
            expected.append((done.text, done.tokens, done.finish_reason, done.logprobs, stream.stop_string))
    assert run_async(main) == expected


def test_all_pieces_at_a_time(lfm2_tiny: Model, run_async: Run[Any]) -> None:
    async def main() -> None:
        model = AsyncModel(lfm2_tiny)
        stream = model.stream(STORY, max_tokens=30, **GREEDY)
        first = await stream.pieces()
        await until(lambda: stream.finish_reason is not None)
        rest = await stream.pieces()
        assert first and len(rest) > 1 and rest[-1].usage == stream.usage
        assert [t for piece in first + rest for t in piece.tokens] == list(stream.tokens)
        assert await stream.pieces() == [] == await stream.pieces()
        with pytest.raises(DeadlineError):
            await model.stream(STORY, t_max_prompt_ms=0, cache_prompt=False).pieces()

    run_async(main)


def test_how_far_a_prompt_is_read(lfm2_tiny: Model, run_async: Run[Any]) -> None:
    prompt = [5 + i % 900 for i in range(400)]

    async def main() -> None:
        model = AsyncModel(lfm2_tiny)
        lfm2_tiny.engine.forget()
        for is_kept in (False, True):
            stream = model.stream(prompt, max_tokens=1, **GREEDY)
            assert stream.n_prompt == len(prompt)
            task, seen = asyncio.ensure_future(stream.pieces()), []
            while not task.done():
                seen.append(stream.n_read)
                await asyncio.sleep(0.0005)
            assert seen == sorted(seen) and seen[-1] <= stream.n_read == len(prompt)
            assert await stream.result() and stream.usage is not None and stream.timings is not None
            assert stream.n_cached == stream.usage.cached_tokens and (stream.n_cached > 0) == is_kept
            assert stream.prompt_ms == stream.timings.prompt_ms

    run_async(main)


def test_sixteen_streams_in_one_loop(lfm2_tiny: Model, run_async: Run[Any]) -> None:
    prompts = [[{"role": "user", "content": f"Repeat: number {i}"}] for i in range(16)]

    async def main() -> list[str]:
        model = AsyncModel(lfm2_tiny)

        async def read(prompt: Any) -> str:
            return "".join([piece.text async for piece in model.stream(prompt, max_tokens=16, **GREEDY)])

        return await asyncio.gather(*map(read, prompts))

    assert run_async(main) == [lfm2_tiny.generate(prompt, max_tokens=16, **GREEDY).text for prompt in prompts]


def test_generate_many(lfm2_tiny: Model, run_async: Run[Any]) -> None:
    prompts: list[Any] = ["Once", [1, 5, 7], COLOR, "Once upon"]

    async def main() -> None:
        model, progress = AsyncModel(lfm2_tiny), []
        done = await model.generate(prompts, max_tokens=6, progress=lambda *n: progress.append(n), **GREEDY)
        assert [c.text for c in done] == [lfm2_tiny.generate(p, max_tokens=6, **GREEDY).text for p in prompts]
        assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]
        wrong = [*prompts, [{"role": "nobody"}], "too long " * 3000]
        done = await model.generate(wrong, max_tokens=6, return_errors=True, **GREEDY)
        assert [type(c).__name__ for c in done] == ["Completion"] * 4 + ["TemplateError", "ContextFullError"]
        with pytest.raises(ContextFullError):
            await model.generate([*prompts, "too long " * 3000], **ENDLESS)
        assert is_idle(lfm2_tiny)
        for n in (1, 3):
            options = {"n": n, "seed": 5, "temperature": 2.0, "top_k": 0, "min_p": 0.0, "top_p": 1.0, "cache_prompt": False}
            several, expected = await model.generate(COLOR, **options), lfm2_tiny.generate(COLOR, **options)
            assert [c.text for c in several] == [c.text for c in expected] if n > 1 else several.text == expected.text
        with pytest.raises(ParameterError, match="n is for a single prompt"):
            await model.generate(prompts, n=2)

    run_async(main)


def test_generate_waits_for_a_place_in_the_queue(lfm2_tiny_path: Path, run_async: Run[Any]) -> None:
    async def main() -> None:
        async with await AsyncModel.load(lfm2_tiny_path, **OPEN, n_parallel=1, n_queue=2) as model:
            done = await model.generate([f"Number {i}" for i in range(12)], max_tokens=4, **GREEDY)
            expected = model.model.generate([f"Number {i}" for i in range(12)], max_tokens=4, **GREEDY)
            assert [c.text for c in done] == [c.text for c in expected]

    run_async(main)


def test_long_prompts_are_read_like_short_ones(lfm2_tiny: Model, run_async: Run[Any]) -> None:
    text = "a " * 9000 + "b"
    tokens = lfm2_tiny.encode(text)

    async def main() -> None:
        model = AsyncModel(lfm2_tiny)
        stream = model.stream(text)  # no error yet: a thread is at it
        assert stream._request.native is None
        with pytest.raises(ContextFullError, match=str(len(tokens))):
            async with stream:
                pytest.fail("entered")
        stream = model.stream(text)
        with pytest.raises(ContextFullError):
            await stream.result()
        spaces = [{"role": "user", "content": " " * 20000}]  # many characters in few tokens
        if len(lfm2_tiny.encode(spaces)) < lfm2_tiny.n_ctx:
            assert (await model.generate(spaces, max_tokens=3, **GREEDY)).tokens

    run_async(main)


# --- cancelling ---


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prompt", "answer"])
def test_cancelled_task(phase: str, slow: Model, run_async: Run[Any]) -> None:
    prompt = [5 + i % 900 for i in range(1900 if phase == "prompt" else 8)]

    async def main() -> None:
        stream = AsyncModel(slow).stream(prompt, **ENDLESS)

        async def read() -> None:
            async for _ in stream:
                pass

        task = asyncio.ensure_future(read())
        native = stream._request.native
        assert native is not None
        await until((lambda: native.n_read > 0) if phase == "prompt" else (lambda: len(stream.tokens) > 2))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: stream._request.over)
        assert stream.finish_reason == "cancelled"
        if phase == "prompt":
            assert stream.tokens == () and native.n_read < len(prompt)
        assert is_idle(slow)
        assert [piece async for piece in stream] == []

    run_async(main)


def test_all_ways_to_leave(lfm2_tiny: Model, run_async: Run[Any]) -> None:
    async def main() -> None:
        model = AsyncModel(lfm2_tiny)
        async for _ in model.stream(STORY, **ENDLESS):
            break  # and the stream is dropped
        await until(lambda: is_idle(lfm2_tiny))

        async with model.stream(STORY, **ENDLESS) as stream:
            assert (await stream.__anext__()).tokens
        assert is_idle(lfm2_tiny) and stream.finish_reason == "cancelled"  # it has stopped, not only been asked to
        await stream.aclose()
        assert [piece async for piece in stream] == []

        stream = model.stream(STORY, **ENDLESS)
        stream.cancel()
        pieces = [piece async for piece in stream]
        assert pieces[-1].finish_reason == "cancelled" == (await stream.result()).finish_reason

        stream = model.stream(STORY, **ENDLESS)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(stream.result(), 0.05)
        await until(lambda: is_idle(lfm2_tiny))

        stream = model.stream(STORY, **ENDLESS)
        stream.me = stream  # type: ignore[attr-defined]
        del stream
        gc.collect()
        await until(lambda: is_idle(lfm2_tiny))

    run_async(main)


def test_closing_the_model(lfm2_tiny_path: Path, run_async: Run[Any]) -> None:
    async def main() -> None:
        model = await AsyncModel.load(lfm2_tiny_path, **OPEN)
        streams = [model.stream(STORY, **ENDLESS) for _ in range(3)]
        await streams[0].__anext__()
        await model.close()
        assert [(await stream.result()).finish_reason for stream in streams] == ["cancelled"] * 3
        with pytest.raises(ClosedError):
            model.stream(STORY)

    run_async(main)


# --- consumers ---


def test_a_slow_consumer_holds_nobody_up(lfm2_tiny: Model, run_async: Run[Any]) -> None:
    expected = lfm2_tiny.generate(STORY, max_tokens=300, **ENDLESS)

    async def main() -> None:
        model = AsyncModel(lfm2_tiny)
        idle = model.stream(STORY, max_tokens=300, logprobs=0, **ENDLESS)
        first = await idle.__anext__()
        assert (await model.generate(STORY, max_tokens=300, **ENDLESS)).tokens == expected.tokens
        await until(lambda: idle.finish_reason)
        rest = [piece async for piece in idle]
        assert len(rest) == 1 and rest[0].finish_reason == "length"
        assert first.tokens + rest[0].tokens == expected.tokens and first.text + rest[0].text == expected.text
        assert [v.token for v in (*(first.logprobs or ()), *(rest[0].logprobs or ()))] == list(expected.tokens)

        few = model.stream(STORY, max_tokens=20, **ENDLESS)
        await until(lambda: few.finish_reason)
        assert [piece.tokens async for piece in few] == [p.tokens for p in lfm2_tiny.stream(STORY, max_tokens=20, **ENDLESS)]

    run_async(main)


@pytest.mark.skipif(sys.platform == "win32", reason="loops watch no descriptors there")
def test_one_wake_up_for_all_that_happened(lfm2_tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[int]] = []
    deliver = dispatch.Dispatcher._deliver
    monkeypatch.setattr(dispatch.Dispatcher, "_deliver", lambda self, ids: (batches.append(list(ids)), deliver(self, ids)))

    async def main() -> None:
        streams = [AsyncModel(lfm2_tiny).stream(f"Number {i}", max_tokens=20, **ENDLESS) for i in range(8)]
        # The loop stands still meanwhile.
        wait_until(lambda: is_idle(lfm2_tiny) and all(s._request.native.finish_reason for s in streams))
        assert [len((await stream.result()).tokens) for stream in streams] == [20] * 8

    asyncio.run(main())
    assert [sorted(ids) for ids in batches] == [list(range(8))]


def test_the_error_after_the_last_piece(lfm2_tiny: Model, run_async: Run[Any]) -> None:
    class Native:  # both came before anybody looked, and were told as one
        done = False

        def __init__(self) -> None:
            self.items = [(b"abc", (1,), None, 0, 0)]

        def poll(self) -> list[Any]:
            items, self.items = self.items, []
            if not items:
                raise DecodeError("no more")
            return items

        def cancel(self) -> None: ...

    async def main() -> None:
        native: Any = Native()
        stream = AsyncStream(dispatch.Request(lfm2_tiny, lambda submit: native, long=False))
        assert (await stream.__anext__()).text == "abc"
        with pytest.raises(DecodeError):
            await stream.__anext__()
        with pytest.raises(StopAsyncIteration):
            await stream.__anext__()
        with pytest.raises(RuntimeError, match="before its end"):
            await stream.result()

    run_async(main)


# --- errors ---


def test_errors_at_submission(lfm2_tiny: Model, run_async: Run[Any]) -> None:
    async def main() -> None:
        model = AsyncModel(lfm2_tiny)
        with pytest.raises(ContextFullError):
            model.stream([5] * 3000)
        with pytest.raises(ParameterError, match="max_tokens"):
            model.stream("a", max_tokens=-2)
        with pytest.raises(ParameterError, match="temprature"):
            await model.generate("a", temprature=1)
        assert (await model.generate(COLOR, **GREEDY)).text == lfm2_tiny.generate(COLOR, **GREEDY).text

    run_async(main)
    with pytest.raises(RuntimeError, match="no running event loop"):
        AsyncModel(lfm2_tiny).stream("a")


def test_full_queue(lfm2_tiny_path: Path, run_async: Run[Any]) -> None:
    async def main() -> None:
        async with await AsyncModel.load(lfm2_tiny_path, **OPEN, n_parallel=1, n_queue=1) as model:
            first = model.stream(STORY, **ENDLESS)
            await first.__anext__()
            waiting = model.stream(COLOR, **GREEDY)
            with pytest.raises(QueueFullError):
                model.stream(COLOR)
            first.cancel()
            assert (await waiting.result()).text == model.model.generate(COLOR, **GREEDY).text

    run_async(main)


@pytest.mark.slow
def test_deadline(slow: Model, run_async: Run[Any]) -> None:
    async def main() -> None:
        model = AsyncModel(slow)
        late = model.stream([5 + i % 900 for i in range(1900)], t_max_prompt_ms=1)
        fine = model.stream([5, 6, 7], max_tokens=3, **ENDLESS)
        with pytest.raises(DeadlineError):
            async for _ in late:
                pytest.fail("a piece")
        assert len((await fine.result()).tokens) == 3

    run_async(main)
