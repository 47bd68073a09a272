"""SamplerChain picks, token for token, what llama.cpp's own chain picks."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_sampler_oracle import OracleChain, library

from lfmfast._sampler import SamplerChain, log_probs, simd_variants, use_simd
from lfmfast.errors import ParameterError, SamplingError
from lfmfast.params import SAMPLERS, SamplingParams

VARIANTS = simd_variants()
KINDS = ("normal", "peaked", "flat", "ties", "few ties", "masked", "constant", "high", "sorted")


def make_row(rng: np.random.Generator, n: int, kind: str) -> np.ndarray:
    row = rng.normal(0.0, 3.0, n).astype(np.float32)
    if kind == "peaked":
        row[rng.integers(n, size=3)] += np.float32(rng.uniform(5, 30))
    elif kind == "flat":
        row *= np.float32(0.01)
    elif kind == "ties":
        row = np.round(row * 2) / 2
    elif kind == "few ties":
        row = np.round(row * 64) / 64
    elif kind == "masked":
        row[rng.random(n) < rng.choice([0.1, 0.9, 0.999])] = -np.inf
        row[rng.choice(n, min(n, 2), replace=False)] = 1.0  # two, as logit_bias may forbid one
    elif kind == "constant":
        row[:] = rng.choice([-3.5, 0.0, 7.25])
    elif kind == "high":
        row = row * 10 + 50
    elif kind == "sorted":
        row = np.sort(row)[:: rng.choice([-1, 1])]
    return np.ascontiguousarray(row, dtype=np.float32)


def maybe(rng: np.random.Generator, share: float, *choices: Any) -> Any:
    return choices[rng.integers(len(choices))] if rng.random() < share else None


def make_params(rng: np.random.Generator, n: int, usual: bool) -> tuple[SamplingParams, list[list[int]]]:
    """Random parameters; `usual`: only what people set."""
    r = rng.random
    rare = 0.0 if usual else 0.3
    values: dict[str, Any] = {
        "seed": int(rng.integers(2**32 - 1)),
        "temperature": maybe(rng, 0.8, 0.0, 0.1, 0.3, 0.8, 1.5, float(r() * 2)),
        "top_k": maybe(rng, 0.6, 1, 2, 5, 20, 40, 50, 80, 128, 129, 300, int(rng.integers(1, 2 * n + 2))),
        "top_p": maybe(rng, 0.4, 0.95, 0.9, 0.1, 0.0, float(r())),
        "min_p": maybe(rng, 0.5, 0.05, 0.15, 0.5, 1.0, float(r())),
        "repeat_penalty": maybe(rng, 0.6, 1.05, 1.3, 0.8, 3.0),
        "frequency_penalty": maybe(rng, 0.2, 0.1, -0.2, 1.0),
        "presence_penalty": maybe(rng, 0.2, 0.3, -0.5, 5.0),
        "repeat_last_n": maybe(rng, 0.4, 0, 1, 3, 64, 200, -1),
        "min_keep": maybe(rng, rare, 0, 1, 2, 10, n),
        "top_n_sigma": maybe(rng, rare, 0.5, 1.0, 3.0),
        "typical_p": maybe(rng, rare, 0.2, 0.9, float(r())),
        "xtc_probability": maybe(rng, rare, 0.1, 0.5, 1.0),
        "xtc_threshold": maybe(rng, rare, 0.01, 0.1, 0.3, 0.6),
        "dynatemp_range": maybe(rng, rare, 0.3, 1.0),
        "dynatemp_exponent": maybe(rng, rare, 0.5, 2.0),
        "dry_multiplier": maybe(rng, rare, 0.8, 2.0),
        "dry_base": maybe(rng, rare, 1.0, 1.2, 2.5),
        "dry_allowed_length": maybe(rng, rare, 0, 1, 3),
        "dry_penalty_last_n": maybe(rng, rare, 5, 64, -1),
        "mirostat": maybe(rng, rare * 0.4, 1, 2),
        "mirostat_tau": maybe(rng, rare, 2.0, 8.0),
        "mirostat_eta": maybe(rng, rare, 0.01, 0.5),
        "logit_bias": None if r() > 0.3 else {int(t): float(rng.choice([5.0, -4.0, 0.5])) for t in rng.integers(n, size=3)},
    }
    if n > 8 and r() < 0.1:
        values["logit_bias"] = {int(rng.integers(n)): -math.inf}
    if not usual and r() < 0.4:
        names = list(rng.permutation(SAMPLERS))
        values["samplers"] = tuple(str(name) for name in names[: rng.integers(len(names) + 1)])
    breakers = [[int(t) for t in rng.integers(min(n, 30), size=rng.integers(1, 4))] for _ in range(4)]
    return SamplingParams(**{k: v for k, v in values.items() if v is not None}), breakers


def compare(
    rng: np.random.Generator, n: int, params: SamplingParams, breakers: list[list[int]], n_tokens: int, kinds=KINDS
) -> int:
    """A stream of tokens from both chains; returns how many rows went the exact way for ties."""
    ours, theirs = SamplerChain(n, params, dry_breakers=breakers), OracleChain(n, params, breakers)
    prompt = rng.integers(min(n, 12), size=rng.integers(40))  # few distinct ones, so that DRY finds repetitions
    for token in prompt:
        theirs.accept(int(token))
    ours.accept(prompt)
    for i in range(n_tokens):
        kind = str(rng.choice(kinds))
        row = make_row(rng, n, kind)
        if rng.random() < 0.5:
            row[: min(n, 12)] += np.float32(6)
        before = row.copy()
        token, expected = ours.sample(row), theirs.sample(row)
        if expected is None:  # SamplerChain takes the limit instead, the most probable token
            assert params.dynatemp_range, params
            break
        assert token == expected, f"token {i}: {token} instead of {expected} ({n} {kind} logits, {params}, {breakers})"
        assert np.array_equal(row, before)
        ours.accept(token)
        theirs.accept(token)
    return ours.n_tied


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set that this CPU has."""
    assert use_simd(request.param) == request.param
    yield request.param
    use_simd(VARIANTS[0])


@pytest.mark.parametrize("usual", [True, False], ids=["usual", "any"])
@pytest.mark.parametrize("seed", range(8))
def test_parity_small_vocabulary(seed: int, usual: bool, variant: str) -> None:
    rng = np.random.default_rng([seed, usual, VARIANTS.index(variant)])
    for _ in range(140 if variant == VARIANTS[0] else 40):
        n = int(rng.choice([2, 3, 10, rng.integers(2, 60), rng.integers(60, 1500), rng.integers(1500, 6000)]))
        compare(rng, n, *make_params(rng, n, usual), n_tokens=90)


@pytest.mark.slow
@pytest.mark.parametrize("usual", [True, False], ids=["usual", "any"])
@pytest.mark.parametrize("n", [32003, 65536, 128000])
def test_parity_large_vocabulary(n: int, usual: bool, variant: str) -> None:
    rng = np.random.default_rng([n, usual, VARIANTS.index(variant)])
    for _ in range(40 if usual else 8):
        compare(rng, n, *make_params(rng, n, usual), n_tokens=24)


@pytest.mark.slow
def test_parity_of_draws_near_a_border() -> None:
    """Of a large flat row every tenth draw is nearer to the border of two tokens than the approximate sums can tell."""
    n = 400_000
    params = SamplingParams(seed=4, temperature=0.9)
    ours, theirs = SamplerChain(n, params), OracleChain(n, params)
    row = make_row(np.random.default_rng(4), n, "flat")
    for i in range(1200):
        assert ours.sample(row) == theirs.sample(row), i
    assert 20 < ours.n_tied < 600


CHAINS = {
    "LFM2.5": {"temperature": 0.1, "top_k": 50, "repeat_penalty": 1.05},
    "LFM2": {"temperature": 0.3, "min_p": 0.15, "repeat_penalty": 1.05},
    "LFM2.5-8B": {"temperature": 0.2, "top_k": 80, "repeat_penalty": 1.05},
    "Thinking": {"temperature": 0.1, "top_k": 50, "top_p": 0.1, "repeat_penalty": 1.05},
    "llama.cpp": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "greedy": {"temperature": 0.0},
    "greedy with penalty": {"temperature": 0.0, "repeat_penalty": 1.3, "top_k": 40},
    "temperature": {"temperature": 0.7},
    "neutral": {},
    "top_p": {"top_p": 0.9, "temperature": 0.9},
}


@pytest.mark.parametrize("name", CHAINS)
def test_parity_of_the_usual_chains(name: str, variant: str) -> None:
    """Streams that feed back what was picked, through one chain that is reset in between."""
    rng = np.random.default_rng(7)
    for n in (64, 4099, 65536):
        params = SamplingParams(seed=11, **CHAINS[name])
        ours, theirs = SamplerChain(n, params), OracleChain(n, params)
        rows = [make_row(rng, n, kind) for kind in KINDS for _ in range(3)]
        for _ in range(2):
            for row in rows:
                token = ours.sample(row)
                assert token == theirs.sample(row), (n, name)
                ours.accept(token)
                theirs.accept(token)
            ours.reset()
            theirs.reset()


@pytest.mark.skipif(not hasattr(library(), "_Z30llama_sampler_init_dry_testingffiiRKSt6vectorIS_IiSaIiEESaIS1_EE"),
                    reason="another C++ ABI: llama.cpp's test entry for DRY has another name")  # fmt: skip
def test_parity_dry() -> None:
    """Long repetitive histories over few tokens."""
    rng = np.random.default_rng(3)
    for _ in range(300):
        n = 20
        params = SamplingParams(
            seed=1,
            dry_multiplier=float(rng.choice([0.5, 2.0])),
            dry_base=float(rng.choice([1.0, 1.75, 3.0])),
            dry_allowed_length=int(rng.integers(4)),
            dry_penalty_last_n=int(rng.choice([4, 30, 64, -1])),
            temperature=0.0,
        )
        breakers = [[int(t) for t in rng.integers(n, size=rng.integers(1, 4))] for _ in range(rng.integers(1, 5))]
        ours, theirs = SamplerChain(n, params, dry_breakers=breakers), OracleChain(n, params, breakers)
        unit = rng.integers(n, size=rng.integers(1, 9))
        for token in np.concatenate([unit, unit, rng.integers(n, size=3), unit, unit[: len(unit) // 2 + 1]]):
            row = make_row(rng, n, "flat")
            assert ours.sample(row) == theirs.sample(row), (params, breakers)
            ours.accept(int(token))
            theirs.accept(int(token))


def test_dry_in_a_model(lfm2_tiny: Any) -> None:
    """The engine finds the tokens of the sequence breakers in the model's vocabulary."""
    prompt = "repeat: the cat sat on the mat. the cat sat on the mat. the cat sat on the"

    def answer(**sampling: Any) -> str:
        text: str = lfm2_tiny.generate(prompt, temperature=0.0, repeat_penalty=1.0, max_tokens=16, **sampling).text
        return text

    dry = {"dry_multiplier": 5.0, "dry_base": 3.0, "dry_penalty_last_n": -1}
    plain, penalised = answer(), answer(**dry)
    assert penalised != plain
    assert answer(**dry, dry_sequence_breakers=["cat sat", " and"]) not in (plain, penalised)
    every_token = [chr(c) for c in range(32, 127)]
    assert answer(**dry, dry_sequence_breakers=every_token) == plain


def test_window_counts_the_prompt_and_forgets() -> None:
    row = np.array([0.0, 1.0, 0.9], dtype=np.float32)
    chain = SamplerChain(3, temperature=0, presence_penalty=0.5, repeat_last_n=2)
    assert chain.sample(row) == 1
    chain.accept(1)
    assert chain.sample(row) == 2
    chain.accept([0, 0])  # 1 has left the window of two
    assert chain.sample(row) == 1
    chain.accept(1)
    chain.reset()
    assert chain.sample(row) == 1


@pytest.mark.parametrize("field", ["repeat_penalty", "frequency_penalty", "presence_penalty"])
def test_a_penalty_changes_the_output(field: str) -> None:
    row = np.array([2.0, 1.9], dtype=np.float32)
    chain = SamplerChain(2, temperature=0, **{field: 3.0})
    first = chain.sample(row)
    chain.accept(first)
    assert (first, chain.sample(row)) == (0, 1)


def flat(n: int = 1000) -> np.ndarray:
    return np.zeros(n, dtype=np.float32)


def draw(chain: SamplerChain, count: int = 20) -> list[int]:
    return [chain.sample(flat(chain.n_vocab)) for _ in range(count)]


def test_seed() -> None:
    assert draw(SamplerChain(1000, seed=0)) == draw(SamplerChain(1000, seed=0)) != draw(SamplerChain(1000, seed=1))
    chain = SamplerChain(1000, seed=5)
    first = draw(chain)
    chain.reset()
    assert draw(chain) == first
    for unset in ({}, {"seed": None}, {"seed": -1}):
        chain = SamplerChain(1000, **unset)
        first, seed = draw(chain), chain.seed
        assert draw(SamplerChain(1000, seed=seed)) == first
        chain.reset()
        assert chain.seed != seed and draw(chain) != first


def test_fresh_seeds_differ_between_processes(tmp_path: Path) -> None:
    code = "from lfmfast._sampler import SamplerChain; print(SamplerChain(10).seed)"
    command = [sys.executable, "-c", code]
    seeds = {subprocess.run(command, capture_output=True, check=True, cwd=tmp_path).stdout for _ in range(2)}
    assert len(seeds) == 2


def test_clone_is_independent_and_in_the_same_state() -> None:
    chain = SamplerChain(1000, repeat_penalty=2.0, xtc_probability=0.5, seed=3)
    chain.accept(range(70))
    draw(chain, 3)
    clones = [chain.clone(), copy.copy(chain), copy.deepcopy(chain)]
    expected = draw(chain)
    chain.accept(5)
    assert all(draw(clone) == expected for clone in clones)
    row = make_row(np.random.default_rng(0), 1000, "ties")
    a, b = clones[:2]
    for _ in range(100):
        token = a.sample(row)
        assert token == b.sample(row)
        a.accept(token)
        b.accept(token)


def test_distribution_is_the_softmax() -> None:
    row = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    chain = SamplerChain(3, seed=1)
    counts = Counter(chain.sample(row) for _ in range(20000))
    assert [counts[i] / 20000 for i in range(3)] == pytest.approx([0.5, 0.3, 0.2], abs=0.015)


@pytest.mark.parametrize("n", [1, 7, 5000, 65536])
@pytest.mark.parametrize("fill", [{"everywhere": -np.inf}, {"last": np.nan}, {"first": np.nan}, {"last": np.inf}])
@pytest.mark.parametrize("values", [{}, *CHAINS.values(), {"typical_p": 0.5}, {"mirostat": 2}], ids=str)
def test_rows_that_cannot_be_sampled(n: int, fill: dict[str, float], values: dict[str, Any]) -> None:
    row = np.linspace(0, 1, n, dtype=np.float32)
    (where, value), *_ = fill.items()
    row[{"everywhere": slice(None), "first": 0, "last": -1}[where]] = value
    chain = SamplerChain(n, SamplingParams(seed=1, **values))
    expected = draw(SamplerChain(n, SamplingParams(seed=1, **values)), 3)
    with pytest.raises(SamplingError, match=r"NaN|\+inf|-inf"):
        chain.sample(row)
    assert draw(chain, 3) == expected  # and the chain goes on as if nothing had been


def test_bias_that_forbids_everything() -> None:
    with pytest.raises(SamplingError, match="-inf"):
        SamplerChain(2, logit_bias={0: -math.inf, 1: -math.inf}).sample(flat(2))
    assert SamplerChain(2, logit_bias={0: -math.inf}).sample(flat(2)) == 1


@pytest.mark.parametrize(
    "bad",
    [
        [0.0] * 8,
        np.zeros(8),
        np.zeros(7, np.float32),
        np.zeros((8, 2), np.float32)[:, 0],
        np.zeros((1, 8), np.float32),
        None,
        "x" * 8,
        np.zeros(8, ">f4"),
    ],
)
def test_wrong_logits(bad: Any) -> None:
    with pytest.raises(ParameterError, match="logits must"):
        SamplerChain(8).sample(bad)


def test_read_only_and_other_buffers() -> None:
    row = flat(8)
    row[3] = 9
    row.flags.writeable = False
    assert SamplerChain(8, temperature=0).sample(row) == 3
    assert SamplerChain(8, temperature=0).sample(memoryview(row)) == 3


@pytest.mark.parametrize("token", [-1, 8, 2**40, 1.5, "1", None])
def test_wrong_tokens(token: Any) -> None:
    with pytest.raises(ParameterError):
        SamplerChain(8).accept(token)


@pytest.mark.parametrize(
    "call",
    [
        lambda: SamplerChain(0),
        lambda: SamplerChain(-1),
        lambda: SamplerChain(2**40),
        lambda: SamplerChain(True),
        lambda: SamplerChain(8, {"temperature": 1}),
        lambda: SamplerChain(8, logit_bias={8: 1.0}),
        lambda: SamplerChain(8, temprature=1),
        lambda: SamplerChain(8, dry_breakers=[[9]]),
        lambda: SamplerChain.__new__(SamplerChain).sample(flat(8)),
    ],
)
def test_wrong_arguments(call: Any) -> None:
    with pytest.raises(ParameterError):
        call()


def test_threads_on_one_chain() -> None:
    chain = SamplerChain(5000, repeat_penalty=1.1, top_k=40, seed=1)
    row = make_row(np.random.default_rng(1), 5000, "normal")
    out: list[int] = []

    def work() -> None:
        for _ in range(300):
            token = chain.sample(row)
            chain.accept(token)
            out.append(token)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(out) == 2400


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 5, 100, 4097, 65536])
def test_log_probs(kind: str, n: int, variant: str) -> None:
    rng = np.random.default_rng(n)
    row = make_row(rng, n, kind)
    finite = row[np.isfinite(row)].astype(np.float64)
    log_sum = finite.max() + np.log(np.exp(finite - finite.max()).sum())
    expected = row.astype(np.float64) - log_sum
    order = np.lexsort((np.arange(n), -row))
    for n_top in (0, 1, 5, 20, n + 3):
        token = int(rng.integers(n))
        logprob, top = log_probs(row, token, n_top)
        assert logprob == pytest.approx(expected[token], abs=2e-6, rel=1e-6)
        assert [t for t, _ in top] == order[:n_top].tolist()
        assert [x for _, x in top] == pytest.approx(expected[order[:n_top]], abs=2e-6, rel=1e-6)


def test_log_probs_are_those_of_llama_server() -> None:
    """It divides float32 exponentials by their float32 sum, added one after another."""
    row = make_row(np.random.default_rng(5), 65536, "normal")
    p = np.exp(row - row.max())
    p /= np.cumsum(p, dtype=np.float32)[-1]
    for token, logprob in log_probs(row, 0, 20)[1]:
        assert logprob == pytest.approx(math.log(p[token]), abs=2e-4)


def test_log_probs_refuses() -> None:
    for row in (np.full(4, -np.inf, np.float32), np.array([0, np.nan], np.float32), np.array([0, np.inf], np.float32)):
        with pytest.raises(SamplingError):
            log_probs(row, 0)
    for call in (lambda: log_probs(flat(4), 4), lambda: log_probs(flat(4), 0, -1), lambda: log_probs(3, 0)):
        with pytest.raises(ParameterError):
            call()


def test_use_simd() -> None:
    assert VARIANTS[-1] == "scalar" and use_simd() == VARIANTS[0]
    with pytest.raises(ParameterError, match="scalar"):
        use_simd("SSE9")
    assert use_simd() == VARIANTS[0]


def make_chains(count: int, n: int) -> list[SamplerChain]:
    return [SamplerChain(n, top_k=40, repeat_penalty=1.1, temperature=0.9, seed=i) for i in range(count)]


@pytest.mark.parametrize("n_threads", [None, 1, 2, 7])
def test_sample_batch_equals_one_by_one(n_threads: int | None) -> None:
    rng = np.random.default_rng(0)
    batch, single = make_chains(9, 5000), make_chains(9, 5000)
    for _ in range(20):
        rows = np.stack([make_row(rng, 5000, "normal") for _ in batch])
        tokens = SamplerChain.sample_batch(rows, batch, n_threads=n_threads)
        assert tokens == [chain.sample(row) for chain, row in zip(single, rows, strict=True)]
        for a, b, token in zip(batch, single, tokens, strict=True):
            a.accept(token)
            b.accept(token)


def test_sample_batch_refuses() -> None:
    chains = make_chains(3, 8)
    rows = np.zeros((3, 8), np.float32)
    assert SamplerChain.sample_batch(rows, []) == []
    for call in (
        lambda: SamplerChain.sample_batch(rows[:2], chains),
        lambda: SamplerChain.sample_batch(rows[0], chains),
        lambda: SamplerChain.sample_batch(rows.astype(np.float64), chains),
        lambda: SamplerChain.sample_batch(rows, [chains[0], chains[1], chains[0]]),
        lambda: SamplerChain.sample_batch(rows, [*chains[:2], SamplerChain(9)]),
        lambda: SamplerChain.sample_batch(rows, [*chains[:2], None]),
        lambda: SamplerChain.sample_batch(rows, chains, n_threads=0),
        lambda: SamplerChain.sample_batch(rows, chains, n_threads=True),
    ):
        with pytest.raises(ParameterError):
            call()
    rows[1, 3] = np.nan
    with pytest.raises(SamplingError, match=r"row 1: .*NaN"):
        SamplerChain.sample_batch(rows, chains)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_sample_batch_after_fork(tmp_path: Path) -> None:
    """The pool's threads don't exist in the child, which gets its own."""
    code = """
import os, numpy as np
from lfmfast._sampler import SamplerChain
rows = np.random.default_rng(0).normal(size=(8, 4000)).astype(np.float32)
def tokens():
    return SamplerChain.sample_batch(rows, [SamplerChain(4000, seed=i) for i in range(8)], n_threads=4)
expected = tokens()
pid = os.fork()
if pid == 0:
    os._exit(0 if tokens() == expected else 1)
assert os.waitpid(pid, 0)[1] == 0
assert tokens() == expected
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
