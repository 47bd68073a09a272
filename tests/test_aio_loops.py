"""AsyncModel and the life of event loops and processes: several of them, closed ones, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import child
import psutil
import pytest
from loops import Run, is_idle, new_loop, until, wait_until

import lfmfast._dispatch as dispatch
from lfmfast import AsyncChat, AsyncModel, AsyncStream, ClosedError, Model, ModelLoadError

OPEN: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_gpu_layers": 0}
GREEDY: dict[str, Any] = {"temperature": 0}
ENDLESS: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
STORY = [{"role": "user", "content": "Tell me a story."}]


# --- loops ---


def test_two_loops_in_two_threads(lfm2_tiny: Model, loop_kind: str) -> None:
    expected = lfm2_tiny.generate(STORY, max_tokens=40, **ENDLESS).text
    results: list[list[str]] = []

    async def main() -> list[str]:
        model = AsyncModel(lfm2_tiny)
        return [c.text for c in await asyncio.gather(*(model.generate(STORY, max_tokens=40, **ENDLESS) for _ in range(4)))]

    def work() -> None:
        loop = new_loop(loop_kind)
        results.append(loop.run_until_complete(main()))
        loop.close()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == [[expected] * 4] * 2


def test_loop_closed_with_streams(lfm2_tiny: Model, loop_kind: str) -> None:
    async def begin(chat: AsyncChat) -> list[AsyncStream]:
        model = AsyncModel(lfm2_tiny)
        streams = [model.stream(STORY, **ENDLESS), chat.stream("Tell me a story.", **ENDLESS), model.stream("Once", **ENDLESS)]
        for stream in streams[:2]:
            await stream.__anext__()
        return streams

    chat = AsyncModel(lfm2_tiny).chat()
    loop = new_loop(loop_kind)
    streams = loop.run_until_complete(begin(chat))
    loop.close()
    wait_until(lambda: is_idle(lfm2_tiny) and all(stream._request.over for stream in streams))
    assert chat.messages == []
    assert chat.chat.send("What is the capital of France?", **GREEDY).text == "The capital of France is Paris."

    async def read() -> None:
        with pytest.raises(ClosedError, match="loop"):
            await streams[2].result()

    asyncio.run(read())


def test_loop_closed_while_a_thread_reads_the_prompt(lfm2_tiny: Model, loop_kind: str) -> None:
    question, answer = "What is the capital of France?", "The capital of France is Paris."
    chat = lfm2_tiny.chat()
    chat.send(question, **GREEDY)
    at_work, go_on = threading.Event(), threading.Event()
    reply = chat._reply

    def slow_reply(*arguments: Any) -> Any:
        at_work.set()
        assert go_on.wait(60)
        return reply(*arguments)

    chat._reply = slow_reply  # type: ignore[method-assign]

    async def begin() -> AsyncStream:
        return chat.astream(" " * 20000, **ENDLESS)

    loop = new_loop(loop_kind)
    stream = loop.run_until_complete(begin())
    assert at_work.wait(60)
    loop.close()
    wait_until(lambda: stream._request.over)
    go_on.set()
    del chat._reply
    wait_until(lambda: chat._owner is None)  # the thread gives the turn back
    assert chat.send(question, **GREEDY).text == answer
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 2
    wait_until(lambda: is_idle(lfm2_tiny))


def test_nothing_leaks(lfm2_tiny: Model, loop_kind: str) -> None:
    rng, process = random.Random(1), psutil.Process()

    async def one(model: AsyncModel, i: int) -> None:
        way = rng.randrange(5)
        stream = model.stream(f"Number {i}", max_tokens=rng.randrange(1, 30), **ENDLESS)
        if way == 0:
            await stream.result()
        elif way == 1:
            async for _ in stream:
                break
        elif way == 2:
            task = asyncio.ensure_future(stream.result())
            await asyncio.sleep(rng.random() * 0.01)
            task.cancel()
            await asyncio.wait([task])
        elif way == 3:
            async with stream:
                await stream.__anext__()
        else:
            del stream

    async def main(n: int) -> None:
        model = AsyncModel(lfm2_tiny)
        for start in range(0, n, 10):
            await asyncio.gather(*(one(model, i) for i in range(start, start + 10)))
        await until(lambda: is_idle(lfm2_tiny))

    def rounds(n: int) -> None:
        for _ in range(n):
            loop = new_loop(loop_kind)
            loop.run_until_complete(main(30))
            loop.close()
        gc.collect()

    def n_open() -> int:
        return process.num_handles() if sys.platform == "win32" else process.num_fds()

    def n_news_threads() -> int:
        return sum(thread.name == "lfmfast-news" for thread in threading.enumerate())

    rounds(1)
    wait_until(lambda: n_news_threads() == 0)
    before = n_open(), process.num_threads()
    rounds(10)
    wait_until(lambda: n_news_threads() == 0)
    assert (n_open(), process.num_threads()) <= before
    assert not [known for known in dispatch._dispatchers.values() if (d := known()) is not None and d.requests]


# --- loading ---


@pytest.mark.slow
def test_loading(lfm2_tiny_path: Path, slow_model_path: Path, tmp_path: Path, run_async: Run[Any]) -> None:
    shares: list[float] = []

    def hold(share: float) -> None:
        shares.append(share)
        time.sleep(0.001)

    async def main() -> None:
        seen: list[float] = []
        async with await AsyncModel.load(lfm2_tiny_path, **OPEN, progress=seen.append) as model:
            assert seen[-1] == 1.0 and model.model.path == str(lfm2_tiny_path)
        with pytest.raises(ModelLoadError):
            await AsyncModel.load(tmp_path / "missing.gguf")
        task = asyncio.ensure_future(AsyncModel.load(slow_model_path, **OPEN, use_mmap=False, progress=hold))
        await until(lambda: shares)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_async(main)
    assert shares[-1] < 1.0  # it was not finished
    gc.collect()  # a model that is left open would warn, which is an error here


# --- processes ---

ENDINGS = {
    "task left alone": "asyncio.ensure_future(read(model.stream('Once', ignore_eos=True))); await asyncio.sleep(0.05)",
    "stream in a global": "globals()['kept'] = model.stream('Once', ignore_eos=True); await kept.__anext__()",
    "chat in a global": "globals()['kept'] = model.chat().stream('Once', ignore_eos=True); await kept.__anext__()",
    "stream not begun": "model.stream('Once', ignore_eos=True)",
    "long prompt on its way": "globals()['kept'] = model.stream('Once upon a time. ' * 4000)",
    "long prompt, dropped": "model.stream('Once upon a time. ' * 4000)",
    "in a reference cycle": "s = model.stream('Once', ignore_eos=True); s.me = s; await s.__anext__()",
    "async generator left": "globals()['kept'] = pieces(); await kept.__anext__()",
    "failed": "asyncio.ensure_future(read(model.stream('Once', ignore_eos=True))); await asyncio.sleep(0.02); raise Left",
}
ENDING = """
    import asyncio, gc, sys
    from lfmfast import AsyncModel, Model, _dispatch
    _dispatch._no_descriptors = sys.argv[2] == "thread"
    class Left(Exception): pass
    async def read(stream):
        async for piece in stream: pass
    async def pieces():
        async for piece in model.stream("Once", ignore_eos=True): yield piece
    async def main():
        asyncio.get_running_loop().slow_callback_duration = 60  # a busy machine is no noise of ours
        BODY
    with Model(sys.argv[1], n_ctx=512, n_threads=1, n_gpu_layers=0) as opened:
        model = AsyncModel(opened)
        try: asyncio.run(main())
        except Left: pass
        while opened.engine.stats()["n_running"]: pass
        opened.generate("Once", max_tokens=2)
"""


@pytest.mark.parametrize("delivery", ["descriptor", "thread"])
@pytest.mark.parametrize("name", ENDINGS)
def test_quiet_end(name: str, delivery: str, lfm2_tiny_path: Path) -> None:
    child.run(ENDING.replace("BODY", ENDINGS[name]), lfm2_tiny_path, delivery, flags=("-X", "dev"), timeout=120)


@pytest.mark.parametrize("delivery", ["descriptor", "thread"])
def test_quiet_exit_with_everything_open(delivery: str, lfm2_tiny_path: Path) -> None:
    assert child.run("""
        import asyncio, sys
        from lfmfast import AsyncModel, Model, _dispatch
        _dispatch._no_descriptors = sys.argv[2] == "thread"
        async def main():
            stream = model.stream("Once", ignore_eos=True)
            await stream.__anext__()
            return stream
        model = AsyncModel(Model(sys.argv[1], n_ctx=512, n_threads=1, n_gpu_layers=0))
        loop = asyncio.new_event_loop()
        stream = loop.run_until_complete(main())
        print("end")
    """, lfm2_tiny_path, delivery, timeout=120) == "end\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork() here")
def test_fork(lfm2_tiny_path: Path) -> None:
    out = child.run("""
        import asyncio, os, sys
        from lfmfast import AsyncModel, ForkError, Model
        options = dict(n_ctx=512, n_threads=1, n_gpu_layers=0)
        async def begin():
            stream = model.stream("Once", ignore_eos=True, temperature=0)
            await stream.__anext__()
            return stream
        async def use():
            bad = 0
            for wait in (stream.__anext__, stream.result, stream.aclose):
                try: await wait()
                except ForkError: bad += 1
            async with await AsyncModel.load(sys.argv[1], **options) as own:
                return bad, len((await own.generate([1, 2], max_tokens=2, ignore_eos=True)).tokens)
        with Model(sys.argv[1], **options) as opened:
            model = AsyncModel(opened)
            loop = asyncio.new_event_loop()
            stream = loop.run_until_complete(begin())
            pid = os.fork()
            if pid == 0:
                good = asyncio.run(use()) == (3, 2)
                del stream
                os._exit(0 if good else 1)
            print(os.waitpid(pid, 0)[1])
            before = len(stream.tokens)
            loop.run_until_complete(asyncio.sleep(0.05))  # the parent's news still come
            print(len(stream.tokens) > before)
            loop.run_until_complete(stream.aclose())
            loop.close()
    """, lfm2_tiny_path, timeout=120, flags=("-W", "ignore::DeprecationWarning"))  # 3.12 and later warn of any such fork
    assert out.split() == ["0", "True"]
