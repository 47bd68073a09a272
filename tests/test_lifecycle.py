"""From the first object to the end of the process: memory, threads, fork, exit, the GIL, and half-made objects."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import child
import modelgen
import psutil
import pytest

from lfmfast import BusyError, ClosedError, Model

OPEN: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_gpu_layers": 0}
ENDLESS: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
STORY = [{"role": "user", "content": "Tell me a story."}]
COLOR = [{"role": "user", "content": "Name a color."}]


def megabytes() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 1e6


# --- memory ---


def test_opening_and_closing_leaves_nothing(lfm2_tiny_path):
    process = psutil.Process()
    for i in range(30):
        with Model(lfm2_tiny_path, **OPEN) as model:
            chat = model.chat()
            chat.send("My name is Ada.", max_tokens=4)
            for _ in chat.stream("Tell me a story.", **ENDLESS):
                break
        del model, chat, _
        if i == 9:
            before, n_threads, n_files = megabytes(), process.num_threads(), len(process.open_files())
    # A leaked model is 5 MB, a leaked context 2 MB, both 20 times.
    assert megabytes() - before < 15
    assert process.num_threads() <= n_threads
    assert len(process.open_files()) <= n_files


def test_failed_loading_leaves_nothing(tmp_path, lfm2_tiny_path):
    path = modelgen.copy_model(lfm2_tiny_path, tmp_path / "m.gguf", without=("blk.6.ffn_down.weight",))
    for i in range(40):
        with pytest.raises(OSError, match=r"blk\.6\.ffn_down"):
            Model(path, **OPEN)
        with pytest.raises(ValueError, match="n_batch"):
            Model(lfm2_tiny_path, **OPEN, n_batch=0)
        if i == 9:
            before = megabytes()
    assert megabytes() - before < 15


def test_requests_leave_nothing(lfm2_tiny):
    before = 0.0
    for i in range(300):
        lfm2_tiny.generate([{"role": "user", "content": f"Repeat: river number {i}"}], max_tokens=6, temperature=0)
        with lfm2_tiny.stream(STORY, **ENDLESS) as stream:
            next(stream)
        chat = lfm2_tiny.chat("You are a helpful assistant.")
        chat.send("Hello!", max_tokens=3)
        if i == 99:
            before = megabytes()
    assert megabytes() - before < 15


@pytest.mark.slow
def test_two_thousand_requests_with_cancels_leave_nothing(lfm2_tiny_path):
    """Side by side, with a cache that is full all the time."""
    process = psutil.Process()

    def some(model: Model, seed: int) -> int:
        rng, n_cancelled = random.Random(seed), 0
        for i in range(250):
            stream = model.stream(f"{seed} {'river ' * rng.randrange(40)} {i}", max_tokens=rng.randrange(12), seed=i)
            for _ in range(rng.randrange(8)):
                next(stream, None)
            if rng.random() < 0.4:
                stream.cancel()
            if rng.random() < 0.7:
                n_cancelled += stream.result().finish_reason == "cancelled"
            elif rng.random() < 0.5:
                stream.close()
        return n_cancelled

    with Model(lfm2_tiny_path, n_parallel=4, cache_bytes=2_000_000, **OPEN) as model, ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(some, [model] * 8, range(8)))  # all threads and buffers exist
        before, n_threads, n_files = megabytes(), process.num_threads(), len(process.open_files())
        assert sum(pool.map(some, [model] * 8, range(8, 16)))
        stats = model.engine.stats()
        assert (stats["n_requests"] > 2000, stats["n_running"], stats["n_queued"]) == (True, 0, 0)
        assert stats["cache_bytes"] <= 2_000_000
        assert stats["n_evicted"] > 1000
        assert megabytes() - before < 15
        assert (process.num_threads(), len(process.open_files())) == (n_threads, n_files)


# --- threads ---


@pytest.mark.slow
def test_eight_threads_get_what_one_gets(lfm2_tiny, reference):
    prompts = [case["prompt"] for case in reference["cases"].values()]

    def ask(i: int) -> tuple[str, tuple[int, ...], str | None]:
        if i % 5 == 4:
            done = lfm2_tiny.generate(COLOR, temperature=1.0, seed=i % 7, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0)
        else:
            done = lfm2_tiny.generate(prompts[i % len(prompts)], temperature=0, max_tokens=12)
        return done.text, done.tokens, done.finish_reason

    n_calls = 400
    expected = {i: ask(i) for i in range(min(n_calls, 35 * len(prompts)))}
    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(lambda t: [ask(i) for i in range(t, n_calls, 8)], range(8)))
    assert [seen[i % 8][i // 8] for i in range(n_calls)] == [expected[i] for i in range(n_calls)]


def test_chats_in_threads_do_not_mix(lfm2_tiny):
    names = ["Ada", "Tom", "Eva", "Max", "Mia", "Leo"]

    def talk(name: str) -> list[str]:
        chat, answers = lfm2_tiny.chat(), []
        for _ in range(5):
            chat.reset()
            answers += [chat.send(text, temperature=0).text for text in (f"My name is {name}.", "What is my name?")]
        return answers

    alone = {name: talk(name) for name in names}
    with ThreadPoolExecutor(len(names)) as pool:
        assert dict(zip(names, pool.map(talk, names), strict=True)) == alone
    assert alone["Ada"][-1] == "Your name is Ada."


def test_one_chat_from_many_threads(lfm2_tiny):
    chat = lfm2_tiny.chat()
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(lambda _: chat.send("What is the capital of France?", temperature=0).text, range(12)))
    assert done == ["The capital of France is Paris."] * 12
    assert [m["role"] for m in chat.messages] == ["user", "assistant"] * 12
    with chat.stream("Tell me a story.", **ENDLESS) as stream:
        next(stream)
        with pytest.raises(BusyError):
            chat.send("Hello!")
    assert chat.send("What is the capital of France?", temperature=0).text == "The capital of France is Paris."


@pytest.mark.parametrize("delay", [0, 0.0005, 0.002, 0.005, 0.01, 0.03])
def test_closing_while_another_thread_generates(lfm2_tiny_path, delay):
    for _ in range(4):
        model = Model(lfm2_tiny_path, **OPEN)
        endings, started = [], threading.Event()

        def generate(model: Model, started: threading.Event, endings: list[object]) -> None:
            try:
                while True:
                    for piece in model.stream(STORY, **ENDLESS):
                        started.set()
                        if piece.finish_reason == "cancelled":
                            endings.append("cancelled")
            except ClosedError as error:
                endings.append(error)

        threads = [threading.Thread(target=generate, args=(model, started, endings)) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert started.wait(60)
        time.sleep(delay)
        model.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert sum(isinstance(e, ClosedError) for e in endings) == 3
        model.close()
        with pytest.raises(ClosedError):
            model.generate(STORY)


# --- the GIL ---


@contextmanager
def ticker() -> Iterator[None]:
    """Fails when a thread that wants to run every 10 ms does not, while the body runs."""
    ticks, stop = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.wait(0.01):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    begin, first = time.perf_counter(), ticks
    try:
        yield
    finally:
        seconds, seen = time.perf_counter() - begin, ticks - first
        stop.set()
        thread.join()
    assert seconds > 0.1, f"{seconds:.3f} s are too short to say anything"
    assert seen >= 3 + seconds / 0.01 * 0.3, f"{seen} ticks in {seconds:.2f} s"


@pytest.mark.slow
def test_other_threads_run_meanwhile(slow_model_path):
    with ticker():  # load: about 270 MB, read into memory
        for _ in range(3):
            model = Model(slow_model_path, **{**OPEN, "n_ctx": 2048}, use_mmap=False)
            model.close()
    with Model(slow_model_path, **{**OPEN, "n_ctx": 2048}, use_mmap=False) as model:
        with ticker():  # prefill
            model.generate([5 + i % 900 for i in range(600)], max_tokens=1)
        with ticker():  # decode
            model.generate([5, 6], max_tokens=60, **ENDLESS)
        text = "The quick brown fox, 123 times. " * 60000
        with ticker():
            ids = model.tokenize(text)
        with ticker():
            assert len(model.detokenize(ids * 8)) == len(text) * 8


# --- Ctrl-C ---


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill sends no Ctrl-C there")
@pytest.mark.parametrize("phase", ["load", "stream", "send"])
def test_ctrl_c(phase, slow_model_path):
    out = child.run("""
        import os, signal, sys, threading, time
        from lfmfast import Model
        phase, path = sys.argv[1:]
        def interrupt(): os.kill(os.getpid(), signal.SIGINT)
        options = dict(n_ctx=4096, n_threads=1, use_mmap=False)
        model = None if phase == "load" else Model(path, **options)
        threading.Timer(0.02 if phase == "load" else 0.4, interrupt).start()
        try:
            if phase == "load":
                while True: Model(path, **options).close()
            chat = model.chat()
            if phase == "send": chat.send("Hello", temperature=0, ignore_eos=True)
            for piece in chat.stream("Hello", temperature=0, ignore_eos=True): pass
        except KeyboardInterrupt:
            print("interrupted")
        if phase != "load":
            print("usable", chat.send("Hello", max_tokens=3, temperature=0).usage.completion_tokens)
            model.close()
    """, phase, slow_model_path)
    assert out.splitlines() == ["interrupted"] + ["usable 3"] * (phase != "load")


# --- the end of the process ---

EXITS = {
    "live model": "model = Model(path, **options)",
    "live model, used": "model = Model(path, **options); model.generate([1, 2], max_tokens=3)",
    "live stream": "model = Model(path, **options); stream = model.stream([1, 2], ignore_eos=True); next(stream)",
    "stream, model gone": "stream = Model(path, **options).stream([1, 2], ignore_eos=True); next(stream)",
    "stream not begun": "model = Model(path, **options); stream = model.stream([1, 2], ignore_eos=True)",
    "live chat": "chat = Model(path, **options).chat(); chat.send('Hello!')",
    "chat mid-reply": "chat = Model(path, **options).chat(); s = chat.stream('Tell me a story.', ignore_eos=True); next(s)",
    "generator function": """
        def pieces():
            with Model(path, **options) as model:
                yield from model.stream([1, 2], ignore_eos=True)
        g = pieces(); next(g)""",
    "cycle": "model = Model(path, **options); model.me = model; model.s = model.stream([1, 2], ignore_eos=True); del model",
    "daemon thread": """
        from lfmfast import ClosedError
        def work():
            model = Model(path, **options)
            try:
                while True:
                    for piece in model.stream([1, 2], ignore_eos=True, max_tokens=100): begun.set()
            except ClosedError:
                pass
        begun = threading.Event()
        threading.Thread(target=work, daemon=True).start(); begun.wait()""",
    "daemon thread, shared model": """
        model = Model(path, **options)
        def work():
            for piece in model.stream([1, 2], ignore_eos=True): begun.set()
        begun = threading.Event()
        threading.Thread(target=work, daemon=True).start(); begun.wait()""",
    "thread": """
        model = Model(path, **options)
        def work():
            for piece in model.stream([1, 2], ignore_eos=True, max_tokens=200): begun.set()
        begun = threading.Event()
        threading.Thread(target=work).start(); begun.wait()""",
    "sys.exit": "model = Model(path, **options); next(model.stream([1, 2], ignore_eos=True)); sys.exit(0)",
    "atexit": "import atexit; model = Model(path, **options); atexit.register(lambda: model.generate([1, 2], max_tokens=2))",
    "two models": "a = Model(path, **options); b = Model(path, **options); s = a.stream([1, 2], ignore_eos=True); next(s)",
    "low level": """
        from lfmfast import lowlevel
        model = lowlevel.Model.load(path)
        context = lowlevel.Context(model, n_ctx=256)
        batch = lowlevel.Batch(8); batch.extend([1, 2, 3], 0); context.decode(batch)
        logits = context.logits; row = logits[0]; del context, model""",
    "only imported": "pass",
    "failed": """
        try: Model("missing.gguf")
        except OSError: pass""",
}


@pytest.mark.parametrize("name", EXITS)
@pytest.mark.parametrize("numpy_first", [False, True], ids=["", "numpy first"])
def test_quiet_exit(name, numpy_first, lfm2_tiny_path):
    head = ("import numpy; numpy.ones((200, 200)) @ numpy.ones((200, 200))\n" if numpy_first else "") + (
        "import sys, threading\nfrom lfmfast import Model\npath = sys.argv[1]\noptions = dict(n_ctx=512, n_threads=2)\n")
    script = EXITS[name]
    body = "\n".join(line.removeprefix(" " * 8) for line in script.splitlines()) if script.startswith("\n") else script
    assert child.run(f"{head}{body}\nprint('end')", lfm2_tiny_path, timeout=120) in ("end\n", "")


def test_quiet_exit_in_development_mode(lfm2_tiny_path):
    child.run("""
        import sys
        from lfmfast import Model
        with Model(sys.argv[1], n_ctx=512, n_threads=1) as model:
            chat = model.chat()
            chat.send("My name is Ada.", max_tokens=5)
            for piece in chat.stream("Tell me a story.", ignore_eos=True):
                break
    """, lfm2_tiny_path, flags=("-X", "dev"))


# --- fork ---

FORK = """
    import os, sys, threading, time
    from lfmfast import ForkError, Model
    model, closed, dropped = (Model(sys.argv[1], n_ctx=512, n_threads=2) for _ in range(3))
    chat = model.chat()
    chat.send("My name is Ada.", temperature=0)
    stream = model.stream("Once", ignore_eos=True, temperature=0)
    time.sleep(0.1)  # some pieces are ready: they are not the child's either
    next(stream)
    uses = {
        "generate": lambda: model.generate([1, 2]), "next": lambda: next(stream), "chat": lambda: chat.send("Hello!"),
        "tokenize": lambda: model.tokenize("a"), "detokenize": lambda: model.detokenize([1]), "close": lambda: closed.close(),
        "chat.stream": lambda: chat.stream("a"), "metadata": lambda: model.native.metadata,
    }
    pid = os.fork()
    if pid == 0:
        bad = []
        for name, use in uses.items():
            try:
                use()
                bad.append(name + " worked")
            except ForkError as e:
                if str(os.getppid()) not in str(e): bad.append(name + " " + str(e))
            except BaseException as e:
                bad.append(f"{name} raised {e!r}")
        with Model(sys.argv[1], n_ctx=512, n_threads=1) as own:  # a model of its own is fine
            if not own.generate([1, 2], max_tokens=2).tokens: bad.append("own")
        del chat, stream, dropped  # `model` is left for the end of the process
        if bad: print(bad)
        sys.exit(len(bad))
    _, status = os.waitpid(pid, 0)
    stream.close()
    dropped.close()
    print("child", status, "parent", chat.send("What is my name?", temperature=0).text)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fork(lfm2_tiny_path):
    # Python 3.12 and later warn of any fork while there are threads.
    out = child.run(FORK, lfm2_tiny_path, flags=("-W", "ignore::DeprecationWarning", "-W", "error::ResourceWarning"))
    assert out == "child 0 parent Your name is Ada.\n"


# --- objects that are half made, or gone ---


def test_native_objects_made_without_their_arguments(tiny_f16_path):
    """Every attribute of every native object that `__new__` gives: an exception at most."""
    out = child.run("""
        import importlib, inspect, sys
        import lfmfast
        from lfmfast import lowlevel
        n = 0
        for module in ("_model", "_context", "_sampler", "_template", "_engine"):
            module = importlib.import_module("lfmfast." + module)
            for cls in [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]:
                for make in (lambda: cls.__new__(cls), cls):
                    try:
                        thing = make()
                    except (TypeError, ValueError):
                        continue
                    for name in dir(cls):
                        if name.startswith("__") and name not in ("__repr__", "__len__", "__iter__", "__next__"):
                            continue
                        try:
                            value = getattr(thing, name)
                            if callable(value): value()
                        except Exception:
                            pass
                        n += 1
                    del thing
        print("uses", n > 10)
    """)
    assert out == "uses True\n"


def test_destructors_are_silent(lfm2_tiny_path):
    child.run("""
        import gc, sys, warnings
        from lfmfast import Model, lowlevel
        warnings.simplefilter("ignore", ResourceWarning)
        path = sys.argv[1]
        for wrong in ({"n_ctx": -1}, {"type_k": "zz"}, {"n_threads": "a"}):
            try: Model(path, **wrong)
            except ValueError: pass
        Model.__new__(Model).__del__()
        stream = Model(path, n_ctx=512, n_threads=1).stream([1, 2], ignore_eos=True)
        gc.collect()
        next(stream, None)
        del stream
        context = lowlevel.Context(lowlevel.Model.load(path), n_ctx=256)
        batch = lowlevel.Batch(4); batch.extend([1, 2], 0); context.decode(batch)
        logits = context.logits
        total = logits.sum()
        del context; gc.collect()
        assert logits.sum() == total
        del logits; gc.collect()
    """, lfm2_tiny_path)
