"""Model(deterministic=True): a request's tokens and logprobs are its own, to the bit."""

import random
import threading

import child
import modelgen
import oracle
import pytest

import lfmfast
from lfmfast import Model, ParameterError
from lfmfast.errors import StateError

CPU = {"n_ctx": 1024, "n_gpu_layers": 0, "deterministic": True}
pytestmark = pytest.mark.skipif(lfmfast.build_info()["kernels"] == "none", reason="there are no kernels for this CPU")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Weights of our kernels; with a router and experts, whose products are partly ggml's; none of them ours."""
    folder = tmp_path_factory.mktemp("deterministic")
    return {"Q4_K_M": modelgen.write_model(folder / "q4.gguf", "tiny-wide", quantize="Q4_K_M"),
            "MoE": modelgen.write_model(folder / "moe.gguf", "tiny-moe", quantize="Q8_0"),
            "F16": modelgen.write_model(folder / "f16.gguf", "tiny")}  # fmt: skip


def requests(n: int) -> list[tuple[list[int], dict[str, object]]]:
    """Prompts of 20 to 600 tokens, of which most share a beginning with others, and one is another's beginning."""
    rng = random.Random(7)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(20, 1200) for _ in range(n)]

    shared = [tokens(20), tokens(257), tokens(500)]
    prompts = [rng.choice(shared)[:rng.choice([19, 64, 255, 500])] + tokens(rng.choice([1, 2, 3, 40])) for _ in range(n - 1)]
    prompts.append(prompts[0][:-1])
    return [(prompt, {"max_tokens": rng.randrange(4, 20), "seed": i, "temperature": rng.choice([0, 1.5]), "top_k": 0,
                      "logprobs": 3, "ignore_eos": True}) for i, prompt in enumerate(prompts)]  # fmt: skip


def said(done):
    return done.tokens, done.logprobs


def together(model, asked, seed):
    """All at once, in random order, among others that are cancelled."""
    rng = random.Random(seed)
    order = list(range(len(asked)))
    rng.shuffle(order)
    streams, others = {}, []
    for i in order:
        prompt, options = asked[i]
        if rng.random() < 0.3:
            others.append(model.stream(prompt + [rng.randrange(20, 1200) for _ in range(rng.randrange(60))], max_tokens=50))
        streams[i] = model.stream(prompt, **options)
    canceller = threading.Thread(target=lambda: [stream.close() for stream in others])
    canceller.start()
    results = {i: said(stream.result()) for i, stream in streams.items()}
    canceller.join()
    return [results[i] for i in range(len(asked))]


@pytest.mark.parametrize("kind", ["Q4_K_M", "MoE", "F16"])
def test_a_request_gives_the_same_whatever_else_is_computed(paths, kind):
    asked = requests(32)
    with Model(paths[kind], n_threads=1, n_parallel=1, **CPU) as model:
        alone = [said(model.generate(prompt, cache_prompt=False, **options)) for prompt, options in asked]
    for n_threads, options in ((2, {"n_parallel": 8}), (1, {"n_ubatch": 48}), (2, {"max_stall_ms": 1, "cache_bytes": 1 << 18})):
        with Model(paths[kind], n_threads=n_threads, **options, **CPU) as model:
            for seed in range(2):  # the second time most prompts are cached
                assert together(model, asked, seed) == alone


@pytest.mark.parametrize(("flash_attn", "type_k"), [(True, "f16"), (True, "q8_0"), (False, "f32"), (False, "q8_0")])
def test_every_kind_of_attention_holds_it(paths, flash_attn, type_k):
    options = {"flash_attn": flash_attn, "type_k": type_k, "type_v": type_k if flash_attn else "f16", **CPU}
    asked = requests(10)
    with Model(paths["Q4_K_M"], n_threads=1, n_parallel=1, **options) as model:
        alone = [said(model.generate(prompt, cache_prompt=False, **more)) for prompt, more in asked]
    with Model(paths["Q4_K_M"], n_threads=2, n_parallel=4, **options) as model:
        assert together(model, asked, 1) == alone
        assert together(model, asked, 2) == alone


def test_an_answer_can_be_the_beginning_of_a_prompt(paths):
    prompt, options = requests(4)[0]
    with Model(paths["Q4_K_M"], n_threads=2, **CPU) as model:
        answer = model.generate(prompt, **{**options, "max_tokens": 60})
        again = [*prompt, *answer.tokens, 77]
        kept, read = (model.generate(again, cache_prompt=cached, **options) for cached in (True, False))
        assert kept.usage.cached_tokens > len(prompt) + 50
        assert said(kept) == said(read)


def test_replies_that_come_back_are_read_as_any_text(lfm2_tiny_path):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    with Model(lfm2_tiny_path, n_threads=1, **CPU) as model:
        answer = model.generate(messages, seed=3, temperature=3, max_tokens=20)
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And of Spain?"}]
        after, _ = model._encode(messages, remembered=False)
        assert model._asked(messages).tokens == after


@pytest.mark.slow
def test_it_is_not_so_by_itself(paths):
    asked = requests(32)
    options = {**CPU, "deterministic": False}
    with Model(paths["F16"], n_threads=1, n_parallel=1, **options) as model:
        alone = [said(model.generate(prompt, cache_prompt=False, **more)) for prompt, more in asked]
    with Model(paths["F16"], n_threads=2, n_parallel=8, **options) as model:
        assert together(model, asked, 0) != alone


def test_what_can_not_be_held_is_refused(paths, tmp_path):
    iq4 = tmp_path / "iq4.gguf"
    oracle.quantize(modelgen.write_model(tmp_path / "f16.gguf", "tiny-wide"), iq4, "IQ4_NL", 1)
    with pytest.raises(ParameterError, match=r"type iq4_nl \(.*repack=False"):
        Model(iq4, n_threads=1, **CPU)
    with Model(iq4, n_threads=1, repack=False, **CPU) as model:
        assert model.generate([50, 51, 52], max_tokens=2).tokens
    with Model(paths["F16"], n_threads=1, **CPU) as model:
        with pytest.raises(ParameterError, match="cache_reuse 64: it is inexact"):
            model.stream([50, 51], cache_reuse=64)
        prefix = tmp_path / "prefix.lfm"
        model.save_prefix(prefix, list(range(50, 90)))
        assert model.load_prefix(prefix).n_tokens == 40
    with Model(paths["F16"], n_threads=1, **{**CPU, "deterministic": False}) as model:
        assert model.load_prefix(prefix).n_tokens == 40
        model.save_prefix(prefix, list(range(50, 90)))
    with Model(paths["F16"], n_threads=1, **CPU) as model, pytest.raises(StateError, match="it was written without"):
        model.load_prefix(prefix)


def test_contexts_that_come_and_go_do_not_disturb_others(paths):
    """All threads of a pass compute a node in the same way, or they wait for each other at different places."""
    script = """
        import sys, threading
        import numpy as np
        from lfmfast.lowlevel import Batch, Context, Model
        model, stop = Model.load(sys.argv[1]), threading.Event()
        def decode():
            rows = []
            with Context(model, n_ctx=1024, n_seq_max=4, n_threads=2) as context:
                for step in range(250):
                    batch = Batch(4, 4)
                    for seq in range(4):
                        batch.add(20 + step + seq, step, seq, output=True)
                    context.decode(batch)
                    rows.append(context.logits.copy())
            return np.concatenate(rows)
        def come_and_go():
            while not stop.is_set():
                Context(model, n_ctx=64, n_threads=1, deterministic=True).close()
        alone, thread = decode(), threading.Thread(target=come_and_go)
        thread.start()
        same = np.array_equal(decode(), alone)
        stop.set()
        thread.join()
        print(same)
    """
    assert child.run(script, paths["Q4_K_M"]).strip() == "True"


def test_without_our_kernels_it_is_refused(paths):
    script = """
        import sys, lfmfast
        try:
            lfmfast.Model(sys.argv[1], n_ctx=64, n_gpu_layers=0, n_threads=1, deterministic=True)
        except lfmfast.ParameterError as error:
            print(error)
    """
    refused = child.run(script, paths["F16"], LFMFAST_KERNELS="0")
    assert "deterministic needs lfmfast's CPU kernels" in refused and "LFMFAST_KERNELS" in refused
