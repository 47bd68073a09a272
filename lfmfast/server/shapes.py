"""The parts that answers of several endpoints share: usage, timings, log probabilities, settings, fingerprints."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lfmfast.params import SamplingParams
from lfmfast.types import FinishReason, Timings, TokenLogprob, Usage

if TYPE_CHECKING:
    from lfmfast.model import Model

__all__ = [
    "fingerprint",
    "finish_reason",
    "generation_settings",
    "legacy_logprobs",
    "progress",
    "stop_type",
    "timings",
    "token_logprobs",
    "usage",
]

# What stands for a probability of zero: JSON has no infinities. llama-server's value, the lowest float32.
LOWEST = -3.4028234663852886e38
# llama-server's seed for "a new one each time".
RANDOM_SEED = 2**32 - 1


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


def timings(times: Timings) -> dict[str, float]:
    """llama-server's `timings`. The first token comes out of the prompt's last step, so rates count the steps after it."""
    n_prompt, n_steps = times.prompt_tokens - times.cached_tokens, max(times.predicted_tokens - 1, 0)
    return {
        "cache_n": times.cached_tokens,
        "prompt_n": n_prompt,
        "prompt_ms": times.prompt_ms,
        "prompt_per_token_ms": times.prompt_ms / n_prompt if n_prompt else 0.0,
        "prompt_per_second": times.prompt_per_second,
        "predicted_n": times.predicted_tokens,
        "predicted_ms": times.predicted_ms,
        "predicted_per_token_ms": times.predicted_ms / n_steps if n_steps else 0.0,
        "predicted_per_second": times.predicted_per_second if n_steps else 0.0,
    }


def progress(total: int, cached: int, processed: int, time_ms: float) -> dict[str, int]:
    """llama-server's `prompt_progress`."""
    return {"total": total, "cache": cached, "processed": processed, "time_ms": int(time_ms)}


def finish_reason(reason: FinishReason | None) -> str:
    """OpenAI's word for how an answer ended. What was cancelled was cut short."""
    return reason if reason in ("stop", "tool_calls") else "length"


def stop_type(reason: FinishReason | None, stop_string: str | None) -> str:
    """llama-server's word for it."""
    if reason in ("stop", "tool_calls"):
        return "eos" if stop_string is None else "word"
    return "limit" if reason == "length" else "none"


# --- log probabilities ---


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


# --- settings ---


def generation_settings(params: SamplingParams, *, end_tokens: Sequence[int], n_predict: int, stop: Sequence[str],
                        stream: bool, n_probs: int, timings_per_token: bool, reasoning_format: str = "none",
                        constraint: Mapping[str, Any] | None = None) -> dict[str, Any]:  # fmt: skip
    """llama-server's description of how a text was, or would be, generated.

    Parameters
    ----------
    params : SamplingParams
        With every field set.
    end_tokens : sequence of int
        Tokens that end an answer; with `ignore_eos` they have a bias that forbids them.
    constraint : mapping, optional
        `grammar`, `json_schema` or `response_format`, as the request had it; the latter two are shown under their own names.
    """
    values = params.as_dict()
    bias, seed = values.pop("logit_bias", {}), values.pop("seed", -1)
    if params.ignore_eos:
        bias = {**bias, **dict.fromkeys(end_tokens, -math.inf)}
    values["samplers"] = list(values.get("samplers", ()))
    values["dry_sequence_breakers"] = list(values.get("dry_sequence_breakers", ()))
    return {
        "seed": RANDOM_SEED if seed < 0 else seed,
        **values,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.9,
        "stop": list(stop),
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": 0,
        "n_discard": 0,
        "stream": stream,
        "logit_bias": [{"bias": None if value == -math.inf else value, "token": token} for token, value in bias.items()],
        "n_probs": n_probs,
        "grammar": "",
        **(constraint or {}),
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": [],
        "chat_format": "Content-only",
        "reasoning_format": reasoning_format,
        "reasoning_in_content": False,
        "generation_prompt": "",
        "speculative.types": "none",
        "timings_per_token": timings_per_token,
        "post_sampling_probs": False,
        "backend_sampling": False,
        "lora": [],
    }
