"""The engine against a simple reference: whatever is admitted, cancelled, shared, saved or restarted in whatever order, every
request gets what it would have got alone, from nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from lfmfast import LfmfastError, SamplingParams, StateError
from lfmfast._engine import Engine, Stream
from lfmfast._model import Model

GREEDY = SamplingParams(temperature=0).resolved()
N_TOP = 4
TOLERANCE = 1e-4  # of log probabilities; F32 weights and cache, no flash attention

Row = tuple[int, float, dict[int, float]]  # a token, its log probability, and those of the likeliest tokens


def engine(model: Model, **options: Any) -> Engine:
    defaults: dict[str, Any] = {
        "n_ctx": 512, "n_batch": 48, "n_ubatch": 48, "n_threads": 1, "n_threads_batch": 1, "type_k": "f32", "type_v": "f32",
        "flash_attn": False, "offload_kqv": False, "n_parallel": 1, "n_parallel_max": 1, "n_queue": 64,
        "cache_bytes": 1 << 26, "max_stall_ms": 1000,
    }  # fmt: skip
    return Engine(model, **{**defaults, **options})


def read(stream: Stream) -> list[Row]:
    rows: list[Row] = []
    while not stream.done:
        for _, tokens, logprobs, _, _ in stream.wait():
            rows += [(t, lp, dict(top)) for t, (lp, top) in zip(tokens, logprobs or (), strict=True)]
    return rows


def assert_same(ours: list[Row], expected: list[Row], *, part: bool = False) -> None:
    """Equal tokens and log probabilities; where two tokens tie within the tolerance, whichever came ends the comparison."""
    if not part:
        assert len(ours) == len(expected)
    for (token, logprob, top), (wanted, wanted_logprob, wanted_top) in zip(ours, expected, strict=False):
        for other in top.keys() & wanted_top.keys():
            assert abs(top[other] - wanted_top[other]) < TOLERANCE
        if token != wanted:
            assert abs(logprob - wanted_logprob) < TOLERANCE
            return
        assert abs(logprob - wanted_logprob) < TOLERANCE


class Reference:
    """One sequence, every prompt read from its first token on."""

    def __init__(self, model: Model) -> None:
        self._engine = engine(model)
        self._known: dict[tuple[tuple[int, ...], int], list[Row]] = {}

    def __call__(self, prompt: list[int], n: int) -> list[Row]:
        key = (tuple(prompt), n)
        if key not in self._known:
            stream = self._engine.submit(prompt, GREEDY, max_tokens=n, n_logprobs=N_TOP, cache_prompt=False)
            self._known[key] = read(stream)
        return self._known[key]

    def close(self) -> None:
        self._engine.close()


class Machine(RuleBasedStateMachine):
    path: Path
    faults: int = 0
    n_steps = 0  # of all runs of a class

    running = Bundle("running")
    ended = Bundle("ended")

    def __init__(self) -> None:
        super().__init__()
        self.model = Model.load(self.path, n_gpu_layers=0)
        self.reference = Reference(self.model)
        self.rng = random.Random(7)
        self.n_read = self.n_failed = 0
        self.base = self.fresh(70)
        self.n_restarts = 0
        self.engine: Engine | None = None
        self.restart(3, 3, 1 << 26, 16)

    def fresh(self, n: int) -> list[int]:
        return [self.rng.randrange(20, self.model.n_vocab - 4) for _ in range(n)]

    @invariant()
    def count(self) -> None:
        type(self).n_steps += 1

    def submit(self, prompt: list[int], n: int, **options: Any) -> tuple[list[int], int, Stream]:
        assert self.engine is not None
        return prompt, n, self.engine.submit(prompt, GREEDY, max_tokens=n, n_logprobs=N_TOP, **options)

    def rows(self, stream: Stream) -> list[Row] | None:
        """What a request gave; None if it failed twice in a row, the second time alone."""
        self.n_read += 1
        try:
            return read(stream)
        except LfmfastError as error:
            assert self.faults and "injected" in str(error)
            self.n_failed += 1
            return None

    @rule(target=running, cut=st.integers(1, 70), n_fresh=st.sampled_from([0, 1, 2, 7, 60]), n=st.integers(1, 6),
          priority=st.integers(0, 1), cache=st.sampled_from([True, True, True, False]))
    def new(self, cut: int, n_fresh: int, n: int, priority: int, cache: bool) -> Any:
        return self.submit(self.base[:cut] + self.fresh(n_fresh), n, priority=priority, cache_prompt=cache)

    @rule(target=running, request=running, n=st.integers(1, 6))
    def same_again(self, request: Any, n: int) -> Any:
        return self.submit(request[0], n)

    @rule(target=running, request=ended, kept=st.integers(0, 6), n_fresh=st.integers(0, 3), n=st.integers(1, 6))
    def go_on(self, request: Any, kept: int, n_fresh: int, n: int) -> Any:
        prompt, answer = request
        return self.submit((prompt + answer[:kept] + self.fresh(n_fresh))[:400], n)

    @rule(target=ended, request=consumes(running))
    def finish(self, request: Any) -> Any:
        prompt, n, stream = request
        rows = self.rows(stream)
        if rows is None:
            return prompt, []
        # Cancelled: of an engine that was closed meanwhile.
        assert_same(rows, self.reference(prompt, n), part=stream.finish_reason == "cancelled")
        return prompt, [row[0] for row in rows]

    @rule(request=consumes(running))
    def cancel(self, request: Any) -> None:
        prompt, n, stream = request
        stream.cancel()
        assert_same(self.rows(stream) or [], self.reference(prompt, n), part=True)

    @rule(request=consumes(running))
    def drop(self, request: Any) -> None:
        """A stream that nobody reads any more."""

    @rule(n=st.integers(1, 70))
    def pin_and_unpin(self, n: int) -> None:
        _, _, stream = self.submit(self.base[:n], 0, pin=True)
        assert self.engine is not None
        try:
            read(stream)
        except LfmfastError as error:
            small = self.cache_bytes < 1 << 20 and "do not fit in the cache" in str(error)
            assert small or (self.faults and ("injected" in str(error) or "can't be pinned" in str(error)))
        else:
            assert self.engine.unpin(self.base[:n])

    @rule(request=ended, pin=st.booleans())
    def save_and_load(self, request: Any, pin: bool) -> None:
        assert self.engine is not None
        try:
            saved = self.engine.save(request[0])
        except StateError:  # nothing of it is kept any more
            return
        assert saved["tokens"] == request[0][: len(saved["tokens"])]
        try:
            self.restart(2, 4, 1 << 26, 256)
            self.engine.load(saved, pin=pin)
        except LfmfastError as error:
            assert self.faults and "injected" in str(error)
            return
        rows = self.rows(self.submit([*saved["tokens"], 21], 3)[2])
        if rows is not None:
            assert_same(rows, self.reference([*saved["tokens"], 21], 3))

    @rule()
    def forget(self) -> None:
        assert self.engine is not None
        self.engine.forget()

    @rule(n_parallel=st.integers(1, 3), grown=st.integers(0, 3), cache_bytes=st.sampled_from([0, 200_000, 1 << 26]),
          checkpoint_tokens=st.sampled_from([5, 64]))  # fmt: skip
    def restart(self, n_parallel: int, grown: int, cache_bytes: int, checkpoint_tokens: int) -> None:
        if self.engine is not None:
            self.engine.close()
        self.n_restarts += 1
        self.cache_bytes = cache_bytes
        self.engine = engine(self.model, n_parallel=n_parallel, n_parallel_max=n_parallel + grown, cache_bytes=cache_bytes,
                             checkpoint_tokens=checkpoint_tokens, _faults_every=self.faults, _faults_seed=self.n_restarts)

    def teardown(self) -> None:
        assert self.engine is not None
        rows = self.rows(self.submit(self.base, 2)[2])  # the queue still moves
        if rows is not None:
            assert_same(rows, self.reference(self.base, 2))
        assert self.n_failed <= 3 + self.n_read // 4
        self.engine.close()
        self.reference.close()
        self.model.close()


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[type[Machine]]:
    name, faults = request.param
    path: Path = request.getfixturevalue(name)
    yield type("Run", (Machine,), {"path": path, "faults": faults})


def run(machine: type[Machine], n_examples: int, n_steps: int) -> None:
    run_state_machine_as_test(machine, settings=settings(
        max_examples=n_examples, stateful_step_count=n_steps, deadline=None, derandomize=True, database=None,
        phases=(Phase.generate,), suppress_health_check=list(HealthCheck)))


@pytest.mark.slow
@pytest.mark.parametrize("machine", [(name, 0) for name in ("tiny_f32_path", "lfm2_tiny_f32_path", "tiny_dense_path",
                                                            "tiny_moe_path")], indirect=True, ids=lambda p: p[0])
def test_every_request_gets_what_it_would_have_got_alone(machine: type[Machine]) -> None:
    run(machine, 12, 100)
    assert machine.n_steps >= 1000


@pytest.mark.slow
@pytest.mark.parametrize("machine", [("tiny_f32_path", 9), ("tiny_dense_path", 9)], indirect=True, ids=lambda p: p[0])
def test_failed_passes_cost_nothing_but_time(machine: type[Machine]) -> None:
    """Every ninth call or so fails: passes that are broken off or refused, states that are refused, cuts that fail."""
    run(machine, 12, 100)
    assert machine.n_steps >= 1000


def test_growth_stays_within_its_memory(tiny_f32_path: Path) -> None:
    model = Model.load(tiny_f32_path, n_gpu_layers=0)
    prompts = [[20 + i + k % 50 for k in range(60)] for i in range(6)]
    one = engine(model, n_parallel_max=8)
    read(one.submit(prompts[0], GREEDY, max_tokens=0))
    saved = one.save(prompts[0])
    a_sequence = len(saved["rows"]) // len(saved["tokens"]) * one.n_ctx
    one.close()
    for n_sequences, expected in ((3.5, 3), (1.5, 1), (100, 6)):
        grown = engine(model, n_parallel_max=6, growth_bytes=int(n_sequences * a_sequence))
        streams = [grown.submit(prompt, GREEDY, max_tokens=40, n_logprobs=0) for prompt in prompts]
        answers = [read(stream) for stream in streams]
        assert all(answers)
        assert grown.stats()["n_slots"] == expected
        grown.close()
    model.close()
