"""How much memory a model needs, from its GGUF metadata alone.

The formulas are llama.cpp's: the KV cache of the attention layers (`llama_kv_cache`) and one short-convolution state per
sequence (`llama_memory_recurrent`: the last ``shortconv.l_cache - 1`` columns of each convolution layer in F32).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lfmfast.errors import ParameterError

__all__ = ["CACHE_TYPES", "MemoryEstimate", "estimate"]

#: Bytes per element of the types a KV cache can have.
CACHE_TYPES: Mapping[str, float] = {
    "f32": 4,
    "f16": 2,
    "bf16": 2,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a model takes; llama.cpp's compute buffers come on top.

    Attributes
    ----------
    weights, kv_cache, conv_state : int
        All tensors; the cache for `n_ctx` tokens; the convolution states of `n_seq_max` sequences.
    kv_per_token, conv_per_sequence : int
        What one more token, and one more sequence, takes.
    n_ctx, n_seq_max : int
        The context that was asked for, rounded up to 256 tokens as llama.cpp does, and the sequences that share it.
    n_attention, n_conv : int
        Layers of each kind.
    """

    weights: int
    kv_cache: int
    conv_state: int
    kv_per_token: int
    conv_per_sequence: int
    n_ctx: int
    n_seq_max: int
    n_attention: int
    n_conv: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.conv_state


def estimate(
    metadata: Mapping[str, Any],
    weights: int,
    *,
    n_ctx: int,
    n_seq_max: int = 1,
    type_k: str = "f16",
    type_v: str = "f16",
) -> MemoryEstimate:
    """Estimate the memory of a model with this GGUF metadata.

    Parameters
    ----------
    metadata : mapping
        Keys and values of the GGUF; per-layer values as sequences.
    weights : int
        Bytes of all tensors.
    n_ctx, n_seq_max : int
        Tokens that the context holds in all, and sequences in it.
    type_k, type_v : str
        Types of the KV cache, one of `CACHE_TYPES`.

    Raises
    ------
    ParameterError
        For metadata without the shape of a model, or a type that no cache has.

    Examples
    --------
    >>> shape = {"block_count": 16, "embedding_length": 2048, "attention.head_count": 32, "shortconv.l_cache": 3}
    >>> shape["attention.head_count_kv"] = [8 if i in (2, 5, 8, 10, 12, 14) else 0 for i in range(16)]
    >>> lfm2_1_2b = {"general.architecture": "lfm2"} | {f"lfm2.{k}": v for k, v in shape.items()}
    >>> memory = estimate(lfm2_1_2b, 0, n_ctx=4096)
    >>> memory.kv_per_token, memory.conv_per_sequence
    (12288, 163840)
    """
    for kind in (type_k, type_v):
        if kind not in CACHE_TYPES:
            raise ParameterError(f"{kind!r} is no type of a KV cache; there are {', '.join(CACHE_TYPES)}")
    shape = _Shape(metadata)
    n_layer, n_embd = shape.number("block_count"), shape.number("embedding_length")
    heads = shape.per_layer("attention.head_count", n_layer)
    kv_heads = shape.per_layer("attention.head_count_kv", n_layer, heads)
    default_dim = n_embd // max(heads) if max(heads) else 0
    k_dim, v_dim = shape.number("attention.key_length", default_dim), shape.number("attention.value_length", default_dim)
    attention = [n for n in kv_heads if n]
    n_conv = len(kv_heads) - len(attention)
    per_token = sum(attention) * (k_dim * CACHE_TYPES[type_k] + v_dim * CACHE_TYPES[type_v])
    per_sequence = n_conv * n_embd * max(shape.number("shortconv.l_cache", 0) - 1, 0) * 4
    cells = -(-n_ctx // 256) * 256
    return MemoryEstimate(
        weights=weights,
        kv_cache=round(per_token * cells),
        conv_state=per_sequence * n_seq_max,
        kv_per_token=round(per_token),
        conv_per_sequence=per_sequence,
        n_ctx=cells,
        n_seq_max=n_seq_max,
        n_attention=len(attention),
        n_conv=n_conv,
    )


class _Shape:
    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self._arch = metadata.get("general.architecture")

    def _value(self, key: str, default: Any) -> Any:
        value = self._metadata.get(f"{self._arch}.{key}", default)
        if value is None:
            raise ParameterError(f"the metadata has no {self._arch}.{key}: this is not a language model's GGUF")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        return int(self._value(key, default))

    def per_layer(self, key: str, n_layer: int, default: Sequence[int] | None = None) -> list[int]:
        value = self._value(key, default)
        values = [int(v) for v in value] if isinstance(value, Sequence) else [int(value)] * n_layer
        if len(values) != n_layer:
            raise ParameterError(f"{self._arch}.{key} has {len(values)} values for {n_layer} layers")
        return values
