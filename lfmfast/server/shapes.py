"""The parts that answers of several endpoints share: usage, timings, log probabilities, settings, fingerprints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lfmfast.openai_shapes import fingerprint, finish_reason, legacy_logprobs, reply_message, token_logprobs, usage
from lfmfast.params import SamplingParams
from lfmfast.types import FinishReason, Timings

__all__ = [
    "fingerprint",
    "finish_reason",
    "generation_settings",
    "legacy_logprobs",
    "progress",
    "reply_message",
    "stop_type",
    "timings",
    "token_logprobs",
    "usage",
]

# llama-server's seed for "a new one each time".
RANDOM_SEED = 2**32 - 1


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


def stop_type(reason: FinishReason | None, stop_string: str | None) -> str:
    """llama-server's word for it."""
    if reason in ("stop", "tool_calls"):
        return "eos" if stop_string is None else "word"
    return "limit" if reason == "length" else "none"


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
