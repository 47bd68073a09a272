"""Many threads on the public API at once. Where there is a GIL, threads change places as often as can be."""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import child
import numpy as np
import pytest

from lfmfast import BusyError, ClosedError, Model, ParameterError
from lfmfast._dispatch import Dispatcher
from lfmfast.jinja_sandbox import compile_template
from lfmfast.lowlevel import Batch, Context, SamplerChain
from lfmfast.lowlevel import Model as NativeModel
from lfmfast.stream import Answer

N = 8
OPEN: dict[str, Any] = {"n_ctx": 2048, "n_threads": 1, "n_gpu_layers": 0}
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """Runs the jobs in a thread each, begun at the same moment; their results, or what they raised."""
    gate = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        gate.wait(60)
        try:
            return job()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(120) for future in [pool.submit(run, job) for job in jobs]]


# --- free threading ---


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="not a free-threaded Python")
def test_the_gil_stays_off(lfm2_tiny_path: Path) -> None:
    # A module that is not made for it would switch the GIL on, with a warning, and stderr has to be empty.
    script = """
        import sys
        import lfmfast, lfmfast.lowlevel
        with lfmfast.Model(sys.argv[1], n_ctx=512, n_gpu_layers=0) as model:
            model.chat().send("What is the capital of France?", max_tokens=20)
        print(sys._is_gil_enabled())
        """
    assert child.run(script, lfm2_tiny_path) == "False\n"


def test_first_use_by_many_threads() -> None:
    script = """
        import threading, lfmfast
        names = [name for name in lfmfast.__all__ if name != "__version__"]
        gate, seen = threading.Barrier(8), []
        def work(i):
            gate.wait()
            seen.append(tuple(id(getattr(lfmfast, name)) for name in names[i:] + names[:i])[len(names) - i:][:1])
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        [t.start() for t in threads]; [t.join() for t in threads]
        print(len(seen))
        """
    assert child.run(script) == "8\n"


# --- models ---


def test_all_of_a_model_at_once(lfm2_tiny: Model) -> None:
    text = "Call me <|im_end|> Ada. " * 50
    ids = lfm2_tiny.tokenize(text)

    def generate() -> bool:
        return all(lfm2_tiny.generate(FRANCE, temperature=0, max_tokens=20).text == PARIS for _ in range(6))

    def chat() -> bool:
        talk = lfm2_tiny.chat()
        talk.send("My name is Ada.", temperature=0)
        return talk.fork().send("What is my name?", temperature=0).text == "Your name is Ada."

    def tokens() -> bool:
        return all(lfm2_tiny.tokenize(text) == ids and lfm2_tiny.detokenize(ids) == text for _ in range(200))

    def prompts() -> bool:
        return all(lfm2_tiny.detokenize(lfm2_tiny.encode(FRANCE), special=True).count("<|im_start|>") == 2 for _ in range(200))

    def facts() -> bool:
        return all(lfm2_tiny.engine.stats()["n_cached"] >= 0 and lfm2_tiny.native.metadata for _ in range(200))

    assert together(*[generate, chat, tokens, prompts, facts] * 2) == [True] * 10


def test_first_use_of_a_model(lfm2_tiny_path: Path) -> None:
    for _ in range(3):
        with Model(lfm2_tiny_path, **OPEN) as model:
            first = [lambda: model.template.render(FRANCE).text, lambda: model.end_tokens, lambda: dict(model.metadata),
                     lambda: model.default_sampling, lambda: model.encode(FRANCE)]  # fmt: skip
            results = together(*[job for job in first for _ in range(4)])
            for i, job in enumerate(first):
                assert results[4 * i : 4 * i + 4] == [job()] * 4


@pytest.mark.parametrize("delay", [0.0, 0.002, 0.01])
def test_closing_while_it_is_in_use(lfm2_tiny_path: Path, delay: float) -> None:
    def until_closed(use: Callable[[Model], object]) -> type[Exception]:
        try:
            while True:
                use(model)
        except Exception as error:
            return type(error)

    uses: list[Callable[[Model], object]] = [
        lambda m: m.tokenize("The quick brown fox. " * 20), lambda m: m.native.description, lambda m: m.engine.stats(),
        lambda m: m.engine.n_ctx, lambda m: m.generate("Once upon", max_tokens=2), lambda m: m.encode(FRANCE),
        lambda m: m.native.is_eog(2), lambda m: m.engine.forget(), lambda m: m.chat().send("Hello!", max_tokens=1),
    ]  # fmt: skip
    for _ in range(4):
        model = Model(lfm2_tiny_path, **OPEN)
        closing = threading.Timer(delay, lambda m=model: (m.close(), m.close()))
        closing.start()
        endings = together(*[lambda use=use: until_closed(use) for use in uses])
        closing.join()
        assert [ending for ending in endings if ending is not ClosedError] in ([], [RuntimeError])
        assert model.closed and model.native.closed and model.engine.closed


def test_many_close(lfm2_tiny_path: Path) -> None:
    for _ in range(5):
        model = Model(lfm2_tiny_path, **OPEN)
        stream = model.stream("Once upon a", ignore_eos=True, max_tokens=2000)
        assert together(*[model.close] * N, *[model.native.close] * 2, *[model.engine.close] * 2) == [None] * (N + 4)
        assert stream.result().finish_reason == "cancelled"


def test_one_chat_is_left_and_asked(lfm2_tiny: Model) -> None:
    # Who leaves a reply gives the chat's turn back, once, whoever else does the same.
    for _ in range(10):
        chat = lfm2_tiny.chat()
        answer = chat.stream("Tell me a story.", ignore_eos=True, max_tokens=500)._answer
        ended: list[int] = []
        on_end = answer.on_end
        answer.on_end = lambda a, on_end=on_end, ended=ended: (ended.append(1), on_end(a))
        together(*[answer.finish] * N)
        assert ended == [1]
        assert chat.send(FRANCE[0]["content"], temperature=0).text  # its turn is free


def test_an_answer_ends_once() -> None:
    for _ in range(300):
        ended: list[Answer] = []
        answer = Answer(ended.append)
        together(*[answer.finish] * 4)
        assert ended == [answer]


# --- templates and grammars ---


def test_templates_are_compiled_at_once() -> None:
    sources = [f"{{{{ messages[0].content }}}}-{i}" for i in range(100)]  # more than are kept

    def work(first: int) -> list[str]:
        order = [*sources[first:], *sources[:first]]
        return sorted(compile_template(source).render({"messages": [{"content": "x"}]}) for source in order)

    expected = sorted(f"x-{i}" for i in range(100))
    assert together(*[lambda i=i: work(i * 12) for i in range(N)]) == [expected] * N


def test_grammars_are_made_and_used_at_once(lfm2_tiny: Model) -> None:
    pytest.importorskip("llguidance")

    def ask(i: int) -> Any:
        schema = {"type": "object", "properties": {"n": {"const": i}}, "required": ["n"], "additionalProperties": False}
        return json.loads(lfm2_tiny.generate(FRANCE, json_schema=schema, temperature=0, max_tokens=30).text)["n"]

    jobs = [lambda i=i: [ask(10 * i + k // 2) for k in range(10)] + [ask(7)] for i in range(N)]
    assert together(*jobs) == [[10 * i + k // 2 for k in range(10)] + [7] for i in range(N)]


# --- event loops ---


def test_a_dispatcher_closes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    closed: list[int] = []
    real = Dispatcher._close_fds
    monkeypatch.setattr(Dispatcher, "_close_fds", lambda self: (closed.append(1), real(self)))
    loop = asyncio.new_event_loop()
    try:
        for _ in range(20):
            dispatcher = Dispatcher(loop)
            closed.clear()
            assert together(*[dispatcher.close] * N) == [None] * N
            assert closed == [1] and dispatcher.closed
    finally:
        loop.close()


# --- by hand ---


def test_a_batch_that_is_being_decoded_stays_as_it_is(slow_model_path: Path) -> None:
    model = NativeModel.load(slow_model_path, n_gpu_layers=0)
    with Context(model, n_ctx=1024, n_batch=1024, n_threads=1) as context:
        batch = Batch(512)
        batch.extend([5 + i % 900 for i in range(512)], 0)
        done = threading.Event()

        def decode() -> None:
            try:
                context.decode(batch)
            finally:
                done.set()

        thread = threading.Thread(target=decode)
        thread.start()
        refused = set()
        while not done.is_set():
            for name, change in (("add", lambda: batch.add(1, 512)), ("extend", lambda: batch.extend([1, 2], 512))):
                with pytest.raises((BusyError, ParameterError)) as caught:  # the second: it is full
                    change()
                if caught.type is BusyError:
                    refused.add(name)
        thread.join()
        assert refused == {"add", "extend"} and len(batch) == 512 and context.seq_pos_max(0) == 511
        batch.clear()
        batch.add(1, 512)
    model.close()


def test_a_context_at_once(tiny_f32_path: Path) -> None:
    model = NativeModel.load(tiny_f32_path, n_gpu_layers=0)
    context = Context(model, n_ctx=512, n_seq_max=N)
    refusals = (BusyError, BufferError)

    def work(seq: int) -> int:
        batch, n_done = Batch(4), 0
        while n_done < 20:
            batch.clear()
            batch.add(5 + seq, n_done, seq, output=True)
            try:
                context.decode(batch)
                n_done += 1
                row = context.logits
                assert row.shape == (1, model.n_vocab) and np.isfinite(row).all()
                del row
            except refusals:
                pass
        return n_done

    assert together(*[lambda i=i: work(i) for i in range(N)]) == [20] * N
    assert [context.seq_pos_max(i) for i in range(N)] == [19] * N
    together(*[context.close] * N)
    assert context.closed
    model.close()


def test_a_batch_filled_by_many(tiny_f32_path: Path) -> None:
    batch = Batch(N * 200)
    together(*[lambda: [batch.add(1, 0) for _ in range(200)]] * N)
    assert len(batch) == N * 200


def test_a_chain_is_made_once() -> None:
    chain = SamplerChain(8, temperature=0)
    with pytest.raises(ParameterError, match="twice"):
        chain.__init__(16)  # type: ignore[misc]
    assert chain.n_vocab == 8 and chain.sample(np.eye(8, dtype=np.float32)[3]) == 3
    fresh = [SamplerChain.__new__(SamplerChain) for _ in range(50)]
    for made in fresh:
        results = together(*[lambda made=made: made.__init__(8, temperature=0)] * 4)
        assert sum(result is None for result in results) == 1
