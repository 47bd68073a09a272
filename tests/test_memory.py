"""The memory estimate: the sizes of the released models, which llama.cpp prints when it loads them."""

from __future__ import annotations

import pytest

from lfmfast.errors import ParameterError
from lfmfast.memory import estimate

KiB = 1024


def lfm2(n_conv: int, n_attention: int, n_embd: int, heads: int, **more: object) -> dict[str, object]:
    kv = [8] * n_attention + [0] * n_conv
    shape = {"block_count": len(kv), "embedding_length": n_embd, "attention.head_count": heads, "shortconv.l_cache": 3}
    return {
        "general.architecture": "lfm2",
        "lfm2.attention.head_count_kv": kv,
        **{f"lfm2.{k}": v for k, v in (shape | more).items()},
    }


@pytest.mark.parametrize(
    ("shape", "conv", "kv"),
    [
        (lfm2(10, 6, 1024, 16), 80 * KiB, 12 * KiB),  # 350M
        (lfm2(10, 6, 1536, 24), 120 * KiB, 12 * KiB),  # 700M
        (lfm2(10, 6, 2048, 32), 160 * KiB, 12 * KiB),  # 1.2B
        (lfm2(22, 8, 2048, 32), 352 * KiB, 16 * KiB),  # 2.6B
        (lfm2(18, 6, 2048, 32), 288 * KiB, 12 * KiB),  # 8B-A1B
    ],
)
def test_sizes_of_the_family(shape: dict[str, object], conv: int, kv: int) -> None:
    memory = estimate(shape, 1000, n_ctx=4096)
    assert (memory.conv_per_sequence, memory.kv_per_token) == (conv, kv)
    assert memory.total == 1000 + conv + 4096 * kv


def test_context_sequences_and_types() -> None:
    shape = lfm2(10, 6, 1024, 16)
    memory = estimate(shape, 0, n_ctx=1000, n_seq_max=3, type_k="q8_0", type_v="f32")
    assert memory.n_ctx == 1024
    assert memory.conv_state == 3 * 80 * KiB
    assert memory.kv_cache == 1024 * 6 * 8 * 64 * 34 // 32 + 1024 * 6 * 8 * 64 * 4


def test_a_dense_model() -> None:
    metadata = {"general.architecture": "llama", "llama.block_count": 30, "llama.embedding_length": 576}
    metadata |= {"llama.attention.head_count": 9, "llama.attention.head_count_kv": 3}
    memory = estimate(metadata, 0, n_ctx=2048)
    assert memory.kv_cache == 45 * 1024 * KiB  # what llama.cpp prints for SmolLM2-135M
    assert (memory.n_attention, memory.n_conv, memory.conv_state) == (30, 0, 0)
    without_gqa = {k: v for k, v in metadata.items() if "kv" not in k}
    assert estimate(without_gqa, 0, n_ctx=2048).kv_cache == 3 * memory.kv_cache


def test_own_head_size() -> None:
    shape = lfm2(1, 1, 1024, 16, **{"attention.key_length": 128, "attention.value_length": 32})
    assert estimate(shape, 0, n_ctx=256).kv_per_token == 8 * (128 + 32) * 2


def test_refusals() -> None:
    with pytest.raises(ParameterError, match=r"no lfm2\.block_count"):
        estimate({"general.architecture": "lfm2"}, 0, n_ctx=256)
    with pytest.raises(ParameterError, match="3 values for 4 layers"):
        estimate(lfm2(1, 2, 64, 8, block_count=4), 0, n_ctx=256)
    with pytest.raises(ParameterError, match="'q3' is no type of a KV cache; there are f32, f16"):
        estimate(lfm2(1, 1, 64, 8), 0, n_ctx=256, type_k="q3")
