"""lfmfast.lowlevel: the C API's loop by hand, logits, sequence memory, states, abort, and refusals."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lfmfast.errors import CancelledError, ClosedError, ContextFullError, DecodeError, ParameterError, StateError
from lfmfast.lowlevel import Batch, Context, Model, SamplerChain

CLOSE = "<|im_end|>\n"


@pytest.fixture(scope="module")
def tiny(tiny_f32_path: Path) -> Iterator[Model]:
    model = Model.load(tiny_f32_path)
    yield model
    model.close()


@pytest.fixture(scope="module")
def trained(lfm2_tiny_f32_path: Path) -> Iterator[Model]:
    model = Model.load(lfm2_tiny_f32_path)
    yield model
    model.close()


@pytest.fixture
def context(tiny: Model) -> Iterator[Context]:
    with Context(tiny, n_ctx=512, n_batch=64, n_ubatch=32, n_seq_max=4, kv_unified=True, type_k="f32", type_v="f32",
                 flash_attn=False) as context:  # fmt: skip
        yield context


def ids(model: Model, n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(20, model.n_vocab - 4, n).tolist()


def read(context: Context, tokens: list[int], pos: int = 0, seq_id: int = 0) -> np.ndarray[Any, Any]:
    """Logits after the last token."""
    for start in range(0, len(tokens), context.n_batch):
        part = tokens[start : start + context.n_batch]
        batch = Batch(len(part))
        batch.extend(part, pos + start, seq_id)
        context.decode(batch)
    return context.logits[-1].copy()


# --- the loop of the C API ---


def test_chat_loop(trained: Model) -> None:
    """Format the suffix, tokenise, decode, sample to the end, feed the close tokens, clear."""
    with Context(trained, n_ctx=1024) as context:
        chain = SamplerChain(trained.n_vocab, temperature=0)
        batch = Batch(context.n_batch)
        position = 0

        def feed(tokens: list[int]) -> None:
            nonlocal position
            batch.clear()
            batch.extend(tokens, position)
            context.decode(batch)
            position += len(tokens)

        def turn(text: str) -> str:
            bos = "<|startoftext|>" if position == 0 else ""
            feed(trained.tokenize(f"{bos}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", parse_special=True))
            answer = []
            while not trained.is_eog(token := chain.sample(context.logits[-1])):
                chain.accept(token)
                answer.append(token)
                feed([token])
            feed(trained.tokenize(CLOSE, parse_special=True))
            return trained.detokenize(answer)

        assert turn("My name is Ada.") == "Nice to meet you, Ada!"
        assert turn("What is my name?") == "Your name is Ada."
        context.clear()
        position = 0
        assert turn("What is my name?") == "I do not know your name yet."


def test_logits_match_transformers(lfm2_tiny_path: Path, trained: Model, reference: dict[str, Any]) -> None:
    half = Model.load(lfm2_tiny_path)
    for model, kv, limit in ((trained, "f32", 1e-4), (half, "f16", 0.02)):
        # ggml's flash attention computes in F16 whatever the cache's type is.
        with Context(model, n_ctx=1024, type_k=kv, type_v=kv, flash_attn=kv == "f16") as context:
            for name, case in reference["cases"].items():
                context.clear()
                tokens = case["prompt_ids"] + case["answer_ids"][:-1]
                batch = Batch(len(tokens))
                batch.extend(tokens, 0, output="all")
                context.decode(batch)
                logits = context.logits
                assert logits.shape == (len(tokens), model.n_vocab)
                for step, top in enumerate(case["top5"]):
                    row = logits[len(case["prompt_ids"]) - 1 + step]
                    worst = max(abs(float(row[token]) - value) for token, value in top)
                    assert worst < limit + 5e-5, (name, step)  # the reference has four decimals
                del logits, row
    half.close()


# --- logits ---


def test_logits_are_the_wanted_rows(context: Context, tiny: Model) -> None:
    tokens = ids(tiny, 8)
    batch = Batch(8)
    batch.extend(tokens, 0, output="all")
    context.decode(batch)
    every = context.logits.copy()
    context.clear()
    batch.clear()
    for i, token in enumerate(tokens):
        batch.add(token, i, output=i in (2, 7))
    context.decode(batch)
    assert batch.n_outputs == 2
    np.testing.assert_allclose(context.logits, every[[2, 7]], atol=1e-5)


def test_logits_view_shares_memory_and_pins_the_context(context: Context, tiny: Model) -> None:
    read(context, ids(tiny, 4))
    logits = context.logits
    row = logits[0]
    assert np.shares_memory(logits, context.logits)
    assert not logits.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 0.0
    batch = Batch(1)
    batch.add(20, 4)
    del logits  # the row still shows the buffer
    before = row.copy()
    for refused in (lambda: context.decode(batch), context.close):
        with pytest.raises(BufferError, match=r"1 array"):
            refused()
    np.testing.assert_array_equal(row, before)
    del row
    context.decode(batch)


def test_logits_outlive_the_last_name_of_the_context(tiny: Model) -> None:
    context = Context(tiny, n_ctx=64)
    expected = read(context, ids(tiny, 4))
    row = context.logits[-1]
    del context
    gc.collect()
    np.testing.assert_array_equal(row, expected)


def test_no_logits(context: Context) -> None:
    with pytest.raises(DecodeError, match="no logits"):
        _ = context.logits
    batch = Batch(1)
    batch.add(20, 0, output=False)
    context.decode(batch)
    with pytest.raises(DecodeError, match="no logits"):
        _ = context.logits


# --- sequence memory of a hybrid model ---


def test_hybrid_sequence_cannot_be_cut(context: Context, tiny: Model) -> None:
    assert tiny.is_hybrid
    tokens = ids(tiny, 20)
    read(context, tokens)
    assert context.seq_rm(0, 10, -1) is False
    assert (context.seq_pos_min(0), context.seq_pos_max(0)) == (19, 19)
    assert context.seq_rm(0) is True
    assert context.seq_pos_max(0) == -1


def test_dense_sequence_can_be_cut(tiny_dense_path: Path) -> None:
    model = Model.load(tiny_dense_path)
    assert not model.is_hybrid
    tokens = ids(model, 20)
    with Context(model, n_ctx=128, type_k="f32", type_v="f32", flash_attn=False) as context:
        expected = read(context, tokens)
        assert context.seq_rm(0, 10, -1) is True
        assert context.seq_pos_max(0) == 9
        np.testing.assert_allclose(read(context, tokens[10:], pos=10), expected, atol=1e-4)
    model.close()


def test_fork_by_copy_equals_cold(context: Context, tiny: Model) -> None:
    prefix, one, two = ids(tiny, 40, 1), ids(tiny, 10, 2), ids(tiny, 12, 3)
    cold = [read(context, prefix + tail, seq_id=3) for tail in (one, two) if context.seq_rm(3)]
    read(context, prefix, seq_id=0)
    context.seq_cp(0, 1)
    np.testing.assert_allclose(read(context, one, 40, 0), cold[0], atol=1e-4)
    np.testing.assert_allclose(read(context, two, 40, 1), cold[1], atol=1e-4)
    context.seq_keep(1)
    assert (context.seq_pos_max(0), context.seq_pos_max(1)) == (-1, 51)


def test_partial_state_resumes_exactly(context: Context, tiny: Model) -> None:
    prefix, one, two = ids(tiny, 40, 1), ids(tiny, 10, 2), ids(tiny, 12, 3)
    expected = read(context, prefix + two)
    context.clear()
    read(context, prefix)
    state = context.state_seq_get(0, partial_only=True)
    whole = context.state_seq_get(0)
    assert len(state) < len(whole)
    read(context, one, 40)
    context.state_seq_set(0, state, partial_only=True)
    assert context.seq_rm(0, 40, -1) is True
    np.testing.assert_allclose(read(context, two, 40), expected, atol=1e-4)
    context.state_seq_set(2, whole)
    np.testing.assert_allclose(read(context, two, 40, seq_id=2), expected, atol=1e-4)


@pytest.mark.parametrize("damage", ["empty", "short", "garbage", "other model", "changed"])
@pytest.mark.parametrize("partial", [False, True])
def test_bad_state_is_refused(context: Context, tiny: Model, trained: Model, damage: str, partial: bool) -> None:
    read(context, ids(tiny, 20))
    state = context.state_seq_get(0, partial_only=partial)
    if damage == "other model":
        with Context(trained, n_ctx=128) as other:
            read(other, ids(trained, 20))
            bad = other.state_seq_get(0, partial_only=partial)
    else:
        noise = np.random.default_rng(0).integers(0, 256, len(state), dtype=np.uint8).tobytes()
        bad = {"empty": b"", "short": state[: len(state) // 2], "garbage": noise, "changed": b"\xff" * 8 + state[8:]}[damage]
    with pytest.raises(StateError, match=f"{len(bad)} bytes"):
        context.state_seq_set(0, bad, partial_only=partial)
    assert context.seq_pos_max(0) == -1
    read(context, ids(tiny, 5))  # still usable


# --- abort ---


def test_abort_from_another_thread(tiny_q4_path: Path) -> None:
    model = Model.load(tiny_q4_path)
    tokens = ids(model, 2048)
    with Context(model, n_ctx=2048, n_batch=2048, n_ubatch=512, n_threads=2) as context:
        batch = Batch(2048)
        batch.extend(tokens, 0)
        caught: list[BaseException] = []

        def work() -> None:
            try:
                context.decode(batch)
            except CancelledError as error:
                caught.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive() and not caught:
            context.abort()
            thread.join(0.005)
        assert caught, "2,048 tokens were decoded although abort() was called all the time"
        assert context.seq_rm(0)
        assert read(context, tokens[:8]).shape == (model.n_vocab,)
    model.close()


# --- refusals ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_ctx": 1}, "n_ctx must be between 8 and .* not 1"),
        ({"n_ctx": -1}, "n_ctx must be between 8 and .* not -1"),
        ({"n_ctx": 2**31}, "n_ctx must be between 8 and .* not 2147483648"),
        ({"n_batch": 0}, "n_batch must be between 1 and .* not 0"),
        ({"n_ubatch": 0}, "n_ubatch must be between 1 and .* not 0"),
        ({"n_seq_max": 0}, "n_seq_max must be between 1 and 256, not 0"),
        ({"n_seq_max": 257}, "n_seq_max must be between 1 and 256, not 257"),
        ({"n_ctx": 64, "n_seq_max": 16}, "n_ctx 64 leaves less than 8 tokens for each of 16 sequences"),
        ({"n_threads": 0}, "n_threads must be between 1 and 512, not 0"),
        ({"n_threads": 100_000}, "n_threads must be between 1 and 512, not 100000"),
        ({"type_k": "q2_k"}, "type_k must be one of .* not 'q2_k'"),
        ({"type_v": "q8_0", "flash_attn": False}, "flash_attn"),
    ],
)
def test_context_refuses(tiny: Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Context(tiny, **options)


def test_decode_refuses(context: Context, tiny: Model) -> None:
    n_vocab = tiny.n_vocab

    def batch_of(*items: tuple[int, int, Any]) -> Batch:
        batch = Batch(128, 4)
        for token, pos, seq in items:
            batch.add(token, pos, seq)
        return batch

    read(context, ids(tiny, 4))
    for batch, message in [
        (Batch(1), "number of tokens in the batch must be between 1 and 64, not 0"),
        (batch_of(*[(20, 4 + i, 0) for i in range(65)]), "between 1 and 64, not 65"),
        (batch_of((n_vocab, 4, 0)), f"token id {n_vocab} is out of range"),
        (batch_of((20, 4, 4)), "seq_id must be between 0 and 3, not 4"),
        (batch_of((20, 5, 0)), "sequence 0 goes on at position 4, but token 0 of the batch has position 5"),
        (batch_of((20, 4, 0), (20, 4, 0)), "sequence 0 goes on at position 5, but token 1"),
        (batch_of((20, 3, 0)), "sequence 0 goes on at position 4"),
    ]:
        with pytest.raises(ParameterError, match=message):
            context.decode(batch)
    assert context.seq_pos_max(0) == 3
    batch = batch_of((20, 4, 0))
    context.decode(batch)


def test_output_limit(tiny: Model) -> None:
    with Context(tiny, n_ctx=64, n_outputs_max=2) as context:
        batch = Batch(8)
        batch.extend([20] * 3, 0, output="all")
        with pytest.raises(ParameterError, match=r"give logits must be between 0 and 2, not 3"):
            context.decode(batch)
    with Context(tiny, n_ctx=64, n_batch=1, n_seq_max=4) as context:  # fewer tokens in a batch than sequences
        assert read(context, [20, 21], seq_id=3).shape == (tiny.n_vocab,)


def test_batch_refuses() -> None:
    with pytest.raises(ParameterError, match=r"n_tokens_max must be between 1 and .* not 0"):
        Batch(0)
    batch = Batch(2, 2)
    for arguments, message in [
        ((-1, 0, 0), "token must be between 0"),
        ((1, -1, 0), "pos must be between 0"),
        ((1, 0, -1), "seq_id must be between 0"),
        ((1, 0, [0, 1, 2]), "number of sequence ids of a token must be between 1 and 2, not 3"),
        ((1, 0, []), "must be between 1 and 2, not 0"),
        ((1, 0, [1, 1]), "seq_id 1 is named twice"),
    ]:
        with pytest.raises(ParameterError, match=message):
            batch.add(*arguments)
    batch.extend([1, 2], 0)
    with pytest.raises(ParameterError, match="the batch is full: it holds 2"):
        batch.add(3, 2)
    assert len(batch) == 2


def test_context_full(tiny: Model) -> None:
    with Context(tiny, n_ctx=256, n_batch=256) as context:
        tokens = ids(tiny, context.n_ctx)
        read(context, tokens)
        batch = Batch(1)
        batch.add(20, len(tokens))
        with pytest.raises(ContextFullError) as caught:
            context.decode(batch)
        assert (caught.value.n_tokens, caught.value.n_ctx) == (1, 256)
        assert context.seq_pos_max(0) == 255
        context.clear()
        read(context, tokens[:3])


def test_sequence_calls_refuse(context: Context, tiny: Model) -> None:
    for call in (context.seq_rm, context.seq_pos_min, context.seq_pos_max, context.seq_keep, context.state_seq_get):
        for seq in (-1, 4, 2**40):
            with pytest.raises(ParameterError, match=f"must be between 0 and 3, not {seq}"):
                call(seq)
    with pytest.raises(ParameterError, match="target seq_id must be between 0 and 3, not 9"):
        context.seq_cp(0, 9)
    with Context(tiny, n_ctx=256, n_seq_max=2) as streams:
        read(streams, ids(tiny, 10))
        with pytest.raises(ParameterError, match="without kv_unified only whole sequences"):
            streams.seq_cp(0, 1, 0, 5)
        streams.seq_cp(0, 1)
        assert streams.seq_pos_max(1) == 9


def test_closed(tiny_f32_path: Path) -> None:
    model = Model.load(tiny_f32_path)
    context = Context(model, n_ctx=64)
    tokens = ids(model, 4)
    model.close()
    model.close()
    assert model.closed
    with pytest.raises(ClosedError, match="model was closed"):
        model.tokenize("x")
    batch = Batch(4)
    batch.extend(tokens, 0)
    context.decode(batch)  # the context keeps what it needs of the model
    context.close()
    context.close()
    for call in (lambda: context.decode(batch), lambda: context.logits, lambda: context.n_ctx, context.abort):
        with pytest.raises(ClosedError, match="context was closed"):
            call()


# --- text ---


def test_tokenizer_matches_transformers(trained: Model, reference: dict[str, Any]) -> None:
    for item in reference["tokenizer"]:
        assert trained.tokenize(item["text"], parse_special=True) == item["ids"], item["text"]


def test_text_round_trip(trained: Model) -> None:
    for text in ["", "a\0b", "\0", "こんにちは 👋", "<|im_end|>", "x" * 20_000, "\u200d\ufeff"]:
        tokens = trained.tokenize(text)
        assert trained.detokenize(tokens) == text
        assert not any(trained.is_control(token) for token in tokens)


def test_text_refusals(trained: Model) -> None:
    with pytest.raises(ParameterError, match=r"lone surrogate \(U\+D83D\) at position 2"):
        trained.tokenize("ab\ud83d")
    with pytest.raises(ParameterError, match="text must be a str, not bytes"):
        trained.tokenize(b"ab")  # type: ignore[arg-type]
    for token in (-1, trained.n_vocab):
        with pytest.raises(ParameterError, match=f"token id {token} is out of range"):
            trained.detokenize([token])
        with pytest.raises(ParameterError, match=f"token id {token} is out of range"):
            trained.is_eog(token)
