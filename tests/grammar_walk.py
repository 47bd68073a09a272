"""Constraints without a model: llguidance's matcher over single bytes and a few control tokens."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from lfmfast.constraint import Constraint

CONTROLS = ("<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>", "<|im_end|>")
END = 256 + CONTROLS.index("<|im_end|>")
_PARTS = re.compile("|".join(map(re.escape, CONTROLS)) + "|.", re.DOTALL)


class _Bytes:
    """A vocabulary of the 256 bytes and the control tokens, in the shape that llguidance asks for."""

    eos_token_id = END
    bos_token_id = None
    tokens = tuple(bytes([byte]) for byte in range(256)) + tuple(name.encode() for name in CONTROLS)
    special_token_ids = tuple(range(256, 256 + len(CONTROLS)))

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@functools.cache
def _tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


@functools.lru_cache(512)
def _compiled(constraint: Constraint) -> LLMatcher:
    make = {"json_schema": LLMatcher.grammar_from_json_schema, "lark": LLMatcher.grammar_from_lark,
            "regex": LLMatcher.grammar_from_regex}[constraint.kind]  # fmt: skip
    return LLMatcher(_tokenizer(), make(constraint.text), log_level=0)


def matcher(constraint: Constraint) -> LLMatcher:
    """One at its beginning."""
    made = _compiled(constraint).deep_copy()
    assert not made.is_error(), made.get_error()
    return made


def tokens(text: str) -> list[int]:
    """The bytes of a text; names of control tokens in it are those tokens."""
    out: list[int] = []
    for part in _PARTS.findall(text):
        out += [256 + CONTROLS.index(part)] if part in CONTROLS else part.encode()
    return out


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether the whole text fits and may end there."""
    state, ids = matcher(constraint), tokens(text)
    return state.try_consume_tokens(ids) == len(ids) and state.is_accepting()


def allowed(state: LLMatcher) -> list[int]:
    """The tokens that may come now."""
    mask = state.compute_bitmask()
    assert not state.is_error(), state.get_error()
    return [token for token in range(256 + len(CONTROLS)) if mask[token >> 3] >> (token & 7) & 1]


def walk(constraint: Constraint, rng: random.Random, limit: int = 600) -> str | None:
    """A random text of the grammar, inclined to come to an end; None where it got longer than `limit` bytes."""
    state, out = matcher(constraint), bytearray()
    while len(out) < limit:
        if state.is_accepting() and (state.is_stopped() or rng.random() < 0.3):
            return out.decode()
        choices = [token for token in allowed(state) if token != END]
        if not choices and state.is_accepting():
            return out.decode()
        assert choices, f"no way on after {bytes(out)!r}"
        token = rng.choice(_likely(choices, rng))
        assert state.consume_token(token), state.get_error()
        out += bytes([token]) if token < 256 else CONTROLS[token - 256].encode()
    return None


def _likely(choices: Sequence[int], rng: random.Random) -> Sequence[int]:
    """Some of the choices: often what closes something, seldom other than ASCII."""
    draw = rng.random()
    closing = [token for token in choices if token < 256 and token in b"\"'}]),:"]
    if closing and draw < 0.35:
        return closing
    plain = [token for token in choices if 0x20 < token < 0x7F]
    return plain if plain and draw < 0.93 else choices
