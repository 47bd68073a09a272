"""What the context keeps of past prompts, and that it makes no difference to the answers."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest

from lfmfast import Model

GREEDY: dict[str, Any] = {"temperature": 0, "repeat_penalty": 1.0}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def open_exact(path: Path, **options: Any) -> Model:
    return Model(path, n_ctx=512, type_k="f32", type_v="f32", flash_attn=False, n_threads=1, **options)


@pytest.mark.parametrize("name", ["tiny_f32_path", "tiny_moe_path", "tiny_dense_path", "lfm2_tiny_f32_path"])
def test_cached_equals_cold(request: pytest.FixtureRequest, name: str) -> None:
    """Random prompts that share beginnings: all log probabilities are those of a run from nothing."""
    path: Path = request.getfixturevalue(name)
    rng = random.Random(name)
    with open_exact(path, n_batch=48, n_ubatch=32) as model, open_exact(path) as cold:
        n_vocab = model.n_vocab
        prompts = [[rng.randrange(20, n_vocab - 4) for _ in range(40)]]
        n_cached = 0
        for _ in range(30):
            old = rng.choice(prompts)
            fresh = [rng.randrange(20, n_vocab - 4) for _ in range(rng.choice([0, 0, 1, 5, 60]))]
            prompt = old[: rng.randint(1, len(old))] + fresh
            options: dict[str, Any] = {"max_tokens": rng.choice([1, 4]), "logprobs": n_vocab, "ignore_eos": True, **GREEDY}
            ours = model.generate(prompt, **options)
            reference = cold.generate(prompt, **{**options, "cache_prompt": False})
            assert reference.usage.cached_tokens == 0
            n_cached += ours.usage.cached_tokens
            assert ours.tokens == reference.tokens
            for a, b in zip(ours.logprobs or (), reference.logprobs or (), strict=True):
                mine, theirs = dict(a.top), dict(b.top)
                assert max(abs(mine[token] - theirs[token]) for token in theirs) < 1e-4
            prompts.append((prompt + list(ours.tokens))[:300])
        assert n_cached > 20


def test_identical_prompt_is_not_read_again(lfm2_tiny: Model, tiny_dense: Model) -> None:
    for model in (lfm2_tiny, tiny_dense):
        first = model.generate(user("Hello!"), max_tokens=4, **GREEDY)
        again = model.generate(user("Hello!"), max_tokens=4, **GREEDY)
        assert again.tokens == first.tokens
        assert again.usage.cached_tokens == again.usage.prompt_tokens
        cold = model.generate(user("Hello!"), max_tokens=4, cache_prompt=False, **GREEDY)
        assert (cold.usage.cached_tokens, cold.tokens) == (0, first.tokens)


def test_hybrid_resumes_where_a_prompt_or_answer_ended(lfm2_tiny: Model) -> None:
    lfm2_tiny.engine.forget()
    prompt = lfm2_tiny.encode(user("Count from 1 to 5."))
    first = lfm2_tiny.generate(prompt, cache_prompt=False, **GREEDY)
    grown = prompt + list(first.tokens) + [7]
    assert lfm2_tiny.generate(grown, max_tokens=1, **GREEDY).usage.cached_tokens == len(grown) - 1
    assert lfm2_tiny.generate([*prompt, 30, 31], max_tokens=1).usage.cached_tokens == len(prompt)
    assert lfm2_tiny.generate(prompt[:-3], max_tokens=1).usage.cached_tokens == 0  # no snapshot there


def test_dense_resumes_anywhere(tiny_dense: Model) -> None:
    prompt = list(range(20, 80))
    tiny_dense.generate(prompt, max_tokens=1, cache_prompt=False)
    assert tiny_dense.generate(prompt[:37], max_tokens=1).usage.cached_tokens == 36
    tiny_dense.generate(prompt, max_tokens=1)
    assert tiny_dense.generate([*prompt[:25], 19, 18], max_tokens=1).usage.cached_tokens == 25


def test_cancelled_prefill_leaves_no_trace(tiny_q4_path: Path) -> None:
    """After an aborted pass the recurrent state is unknown; what follows must be as if it had never begun."""
    with Model(tiny_q4_path, n_ctx=4096, n_threads=1) as model:
        rng = random.Random(1)
        base = [rng.randrange(20, model.n_vocab - 4) for _ in range(64)]
        long = base + [rng.randrange(20, model.n_vocab - 4) for _ in range(3000)]
        options: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, **GREEDY}
        cold = model.generate([*base, 30], cache_prompt=False, **options)
        cancelled = 0
        for delay in (0.0, 0.005, 0.01, 0.02, 0.05):
            model.generate(base, max_tokens=1, cache_prompt=False)
            stream = model.stream(long, max_tokens=1)
            threading.Timer(delay, stream.cancel).start()
            cancelled += stream.result().finish_reason == "cancelled"
            after = model.generate([*base, 30], **options)
            assert after.tokens == cold.tokens
            assert after.usage.cached_tokens in (0, 64, 65)
        assert cancelled


def test_quantised_differences_are_those_between_ubatch_sizes(tiny_q4_path: Path) -> None:
    """Side by side and resumed from what is kept, a request differs from one alone no more than other passes make it differ."""
    rng = random.Random(3)
    options: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, **GREEDY}  # long enough to overlap

    def rows(model: Model, prompts: list[list[int]], **more: Any) -> list[dict[int, float]]:
        streams = [model.stream(prompt, logprobs=model.n_vocab, **options, **more) for prompt in prompts]
        return [dict((stream.result().logprobs or ())[0].top) for stream in streams]

    def distance(a: list[dict[int, float]], b: list[dict[int, float]]) -> float:
        return max(sum((x[t] - y[t]) ** 2 for t in x) ** 0.5 for x, y in zip(a, b, strict=True))

    with Model(tiny_q4_path, n_ctx=512, n_threads=1, n_ubatch=128, n_parallel=4) as model:
        base = [rng.randrange(20, model.n_vocab - 4) for _ in range(90)]
        prompts = [base[:70] + [rng.randrange(20, model.n_vocab - 4) for _ in range(20)] for _ in range(4)]
        alone = [rows(model, [prompt], cache_prompt=False)[0] for prompt in prompts]
        noise = 0.0
        for n_ubatch in (7, 32, 64):
            with Model(tiny_q4_path, n_ctx=512, n_threads=1, n_ubatch=n_ubatch) as other:
                noise = max(noise, distance(alone, [rows(other, [prompt], cache_prompt=False)[0] for prompt in prompts]))
        model.engine.forget()
        together = rows(model, prompts)  # one of them reads the common beginning
        again = rows(model, [[*prompt, 30] for prompt in prompts])
        cold = [rows(model, [[*prompt, 30]], cache_prompt=False)[0] for prompt in prompts]
        assert model.engine.stats()["n_loaded"] > 0
    assert distance(alone, together) <= 1.5 * noise + 1e-4
    assert distance(cold, again) <= 1.5 * noise + 1e-4
