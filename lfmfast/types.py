"""What a generation gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lfmfast.tool_calls import CallDelta, ToolCall

__all__ = ["Completion", "FinishReason", "Piece", "Timings", "TokenLogprob", "Usage"]

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, the natural logarithm of its probability before any sampling parameter, and the likeliest tokens there."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `completion_tokens` counts the end token, if there was one."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Tokens of the prompt that were not processed, because the context still held them."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def _rate(n: int, ms: float) -> float:
    return n * 1000.0 / ms if ms > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Timings:
    """Times in milliseconds, as the engine measured them.

    `prompt_ms` goes from the start of the work to the logits of the prompt's last token; `predicted_ms` from there to
    the end. `decode_ms`, `sample_ms`, `text_ms` and `emit_ms` are parts of `predicted_ms`: the model's passes, sampling,
    detokenising with stop strings, and handing the pieces over.
    """

    prompt_tokens: int
    cached_tokens: int
    prompt_ms: float
    predicted_tokens: int
    predicted_ms: float
    queue_ms: float
    decode_ms: float
    sample_ms: float
    text_ms: float
    emit_ms: float

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens processed (not cached) per second."""
        return _rate(self.prompt_tokens - self.cached_tokens, self.prompt_ms)

    @property
    def predicted_per_second(self) -> float:
        """Tokens sampled per second; the first one comes from the prompt's logits."""
        return _rate(max(0, self.predicted_tokens - 1), self.predicted_ms)

    @property
    def time_to_first_token_ms(self) -> float:
        """From the request to the logits of the first token, waiting in the queue included."""
        return self.queue_ms + self.prompt_ms


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer. The last one has `finish_reason`, `usage` and `timings`; its text may be empty.

    To a conversation, `text` is what is meant for the reader, `reasoning` what the model thinks, and `tool_calls` are what came
    of calls. To another prompt everything is text.
    """

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    reasoning: str = ""
    tool_calls: tuple[CallDelta, ...] = ()

    @property
    def logprob(self) -> float | None:
        """Sum of the log probabilities of the piece's tokens, if they were asked for."""
        return None if self.logprobs is None else sum(item.logprob for item in self.logprobs)


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer.

    To a conversation, `text` is what is meant for the reader, without `reasoning` and `tool_calls`. `raw` is all of it, with
    the model's own markers. A call that could not be read is part of the text, and stands in `unread_calls` as it was written.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    unread_calls: tuple[str, ...] = ()
    raw: str = ""

    def __str__(self) -> str:
        return self.text
