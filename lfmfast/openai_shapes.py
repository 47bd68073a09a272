"""The parts of OpenAI's answers: usage, log probabilities, messages."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lfmfast.messages import assistant_message
from lfmfast.types import Completion, FinishReason, TokenLogprob, Usage

if TYPE_CHECKING:
    from lfmfast.model import Model

__all__ = ["fingerprint", "finish_reason", "legacy_logprobs", "reply_message", "token_logprobs", "usage"]

# What stands for a probability of zero: JSON has no infinities. llama-server's value, the lowest float32.
LOWEST = -3.4028234663852886e38


@functools.cache
def fingerprint() -> str:
    """`system_fingerprint`: the build of llama.cpp, and which lfmfast stands on it."""
    import lfmfast

    build = str(lfmfast.build_info().get("llama_cpp", "unknown"))
    return f"{build if build.startswith('b') else 'b' + build}-lfmfast-{lfmfast.__version__}"


def usage(counts: Usage | Sequence[Usage], n: int = 1) -> dict[str, Any]:
    """OpenAI's `usage`. Of several answers the sums, where a prompt that has `n` answers in a row counts once."""
    items = (counts,) if isinstance(counts, Usage) else counts
    prompt, completion = sum(u.prompt_tokens for u in items[::n]), sum(u.completion_tokens for u in items)
    return {
        "completion_tokens": completion,
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in items[::n])},
    }


def finish_reason(reason: FinishReason | None) -> str:
    """OpenAI's word for how an answer ended. What was cancelled was cut short."""
    return reason if reason in ("stop", "tool_calls") else "length"


def reply_message(answer: Completion) -> dict[str, Any]:
    """The message of a chat completion's choice."""
    message = assistant_message(answer.text, answer.reasoning, answer.tool_calls)
    if answer.tool_calls and not answer.text:
        message["content"] = None
    if answer.unread_calls:
        message["unread_tool_calls"] = list(answer.unread_calls)  # what was written as calls, and stands in the content
    return message


def _token(model: Model, token: int, logprob: float) -> dict[str, Any]:
    data = _token_bytes(model, token)
    # llama-server's rule: bytes that begin a character which the next token ends are shown as bytes only.
    return {"id": token, "token": data.decode("utf-8", "ignore"), "bytes": list(data), "logprob": max(logprob, LOWEST)}


def _token_bytes(model: Model, token: int) -> bytes:
    return model.native.piece(token)


def token_logprobs(model: Model, values: Iterable[TokenLogprob], n_top: int) -> list[dict[str, Any]]:
    """One object per token, in OpenAI's form with llama-server's `id`."""
    return [
        {**_token(model, v.token, v.logprob), "top_logprobs": [_token(model, t, lp) for t, lp in v.top[:n_top]]} for v in values
    ]


def legacy_logprobs(model: Model, values: Iterable[TokenLogprob], n_top: int, offset: int = 0) -> dict[str, Any]:
    """`logprobs` of /v1/completions: llama-server's `content`, and beside it the four lists of OpenAI's own format.

    Parameters
    ----------
    offset : int
        Characters of the answer before the first of these tokens.
    """
    content = token_logprobs(model, values, n_top)
    offsets = []
    for item in content:
        offsets.append(offset)
        offset += len(item["token"])
    return {
        "content": content,
        "tokens": [item["token"] for item in content],
        "token_logprobs": [item["logprob"] for item in content],
        "top_logprobs": [{top["token"]: top["logprob"] for top in item["top_logprobs"]} for item in content],
        "text_offset": offsets,
    }
