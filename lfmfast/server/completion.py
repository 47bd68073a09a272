"""llama-server's own /completion, and what a completion of a plain prompt is made of."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lfmfast.aio import LONG_PROMPT, AsyncStream
from lfmfast.model import Model
from lfmfast.params import SamplingParams
from lfmfast.server import shapes
from lfmfast.server.body import json_response, read_object
from lfmfast.server.errors import ApiError, invalid
from lfmfast.server.fields import Generation, parse_generation
from lfmfast.server.sse import Answers, EventStream, Frames, Reading, event
from lfmfast.server.state import ServerState, Task, state_of
from lfmfast.types import Completion, Piece, Timings

__all__ = ["ROUTES", "Final", "Job", "Meter", "begin", "parse_prompts", "reading_of", "settings_of"]

# A prompt: text, or token ids and texts one after the other.
Mixed = str | list[int | str]
#: Answers that one request can ask for.
ANSWERS_MAX = 1024


# --- prompts ---


def parse_prompts(prompt: Any) -> list[Mixed]:
    """The prompts in llama-server's `prompt`: a text, token ids, both mixed, ``{"prompt_string": ...}``, or a list of these."""
    if _is_one(prompt):
        return [_one(prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise _wrong_prompt()
    return [_one(item) for item in prompt]


def _is_one(prompt: Any) -> bool:
    if isinstance(prompt, list):
        return any(isinstance(item, int) for item in prompt)
    return isinstance(prompt, (str, dict))


def _one(prompt: Any) -> Mixed:
    if isinstance(prompt, dict):
        if prompt.get("multimodal_data"):
            raise invalid("'multimodal_data' is not supported: this model reads text only")
        prompt = prompt.get("prompt_string")
        if not isinstance(prompt, str):
            raise invalid("a prompt given as an object needs a text in 'prompt_string'")
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise _wrong_prompt()
    if not all(isinstance(item, (int, str)) and not isinstance(item, bool) for item in prompt):
        raise _wrong_prompt()
    return prompt


def _wrong_prompt() -> ApiError:
    return invalid("'prompt' must be a text, an array of token ids and texts, or an array of such prompts; none of them empty")


def _tokens(model: Model, prompt: Mixed) -> list[int]:
    if isinstance(prompt, str):
        return model.encode(prompt)
    out: list[int] = []
    for i, part in enumerate(prompt):
        if isinstance(part, int):
            out.append(part)
        else:  # BOS only where the prompt begins
            out += model.tokenize(part, parse_special=True) if i else model.encode(part)
    return out


# --- running ---


@dataclass(frozen=True)
class Job:
    """A request for completions that the engine has accepted; of each stream its prompt and its place."""

    answers: Answers
    finals: list[Final]
    tasks: list[Task]

    def id_slot(self, i: int) -> int:
        slot = self.tasks[i].slot
        return -1 if slot is None else slot.id


async def begin(request: Request, state: ServerState, prompt: Any, generation: Generation) -> Job:
    """Begin `generation.n` answers to each prompt.

    Parameters
    ----------
    prompt : str, list or dict
        From the body; see :func:`parse_prompts`.

    Raises
    ------
    ApiError, LfmfastError
        They can't be begun; none of them runs then.
    """
    model = state.model
    prompts = parse_prompts(prompt)
    if len(prompts) * generation.n > ANSWERS_MAX:
        n = generation.n
        raise invalid(f"these are {len(prompts)} prompts with {n} answers each; at most {ANSWERS_MAX} are given at a time")
    params = generation.resolved(model.model)
    answers = Answers(request)
    job = Job(answers, [], [])
    async with answers.beginning():
        if sum(map(len, prompts)) > LONG_PROMPT:
            encoded = await asyncio.to_thread(lambda: [_tokens(model.model, item) for item in prompts])
        else:
            encoded = [_tokens(model.model, item) for item in prompts]
        settings = settings_of(generation, params, model.model)
        for tokens in encoded:
            for i in range(generation.n):
                stream = model.stream(tokens, **generation.options(params, i))
                job.finals.append(Final(state, generation, params, len(job.finals), tokens))
                job.tasks.append(answers.add(stream, state.task(stream, prompt=tokens, params=settings,
                                                                id_slot=generation.id_slot)))  # fmt: skip
    return job


def settings_of(generation: Generation, params: SamplingParams, model: Model, reasoning_format: str = "none") -> dict[str, Any]:
    """`generation_settings`. Thoughts of a completion of a plain prompt are a part of its text: the format is "none"."""
    return shapes.generation_settings(params, end_tokens=model.end_tokens, n_predict=generation.n_predict,
                                      stop=generation.stop, stream=generation.stream, n_probs=max(generation.n_probs, 0),
                                      timings_per_token=generation.timings_per_token, reasoning_format=reasoning_format,
                                      constraint=generation.constraint)  # fmt: skip


def reading_of(generation: Generation, reading: Reading) -> dict[str, Any]:
    """`prompt_progress`, and with `timings_per_token` the `timings` of what was read by then."""
    more: dict[str, Any] = {"prompt_progress": shapes.progress(*reading)}
    if generation.timings_per_token:
        ms = reading.time_ms if reading.processed > reading.cached else 0.0
        more["timings"] = shapes.timings(Timings(reading.processed, reading.cached, ms, 0, 0, 0, 0, 0, 0, 0))
    return more


class Meter:
    """What a stream gave so far."""

    __slots__ = ("n_chars", "n_tokens", "since")

    def __init__(self) -> None:
        self.n_chars = self.n_tokens = 0
        self.since = 0.0

    def count(self, piece: Piece) -> None:
        if not self.n_tokens:
            self.since = time.perf_counter()
        self.n_chars += len(piece.text)
        self.n_tokens += len(piece.tokens)

    def timings(self, stream: AsyncStream) -> dict[str, float]:
        """llama-server's `timings` by now."""
        ms = (time.perf_counter() - self.since) * 1e3
        return shapes.timings(Timings(stream.n_prompt, stream.n_cached, stream.prompt_ms, self.n_tokens, ms, 0, 0, 0, 0, 0))


@dataclass(frozen=True)
class Final:
    """llama-server's account of a completion that has ended.

    Parameters
    ----------
    params : SamplingParams
        With every field set.
    index : int
        Of the stream among those of the request.
    tokens : list of int
        The prompt's.
    reasoning_format : str
        What became of thoughts.
    """

    state: ServerState
    generation: Generation
    params: SamplingParams
    index: int
    tokens: list[int]
    reasoning_format: str = "none"

    def final(self, stream: AsyncStream, done: Completion | None = None, id_slot: int = -1) -> dict[str, Any]:
        """The object; with the answer itself only where `done` gives it, as it was streamed otherwise."""
        usage, times, generation = stream.usage, stream.timings, self.generation
        assert usage is not None and times is not None
        model = self.state.model.model
        n_total = usage.prompt_tokens + usage.completion_tokens
        n_predict = generation.n_predict
        out = {
            "index": self.index,
            "content": "" if done is None else done.text,
            "tokens": list(done.tokens) if done is not None and generation.return_tokens else [],
            "id_slot": id_slot,
            "stop": True,
            "model": self.state.model_name,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": settings_of(generation, self.params, model, self.reasoning_format),
            "prompt": b"".join([model.native.piece(token) for token in self.tokens]).decode("utf-8", "replace"),
            "has_new_line": "\n" in stream.text,
            "truncated": stream.finish_reason == "length" and n_total >= model.n_ctx and usage.completion_tokens != n_predict,
            "stop_type": shapes.stop_type(stream.finish_reason, stream.stop_string),
            "stopping_word": stream.stop_string or "",
            "tokens_cached": max(n_total - 1, 0),
            "timings": shapes.timings(times),
        }
        if done is not None and done.logprobs is not None:
            out["completion_probabilities"] = shapes.token_logprobs(model, done.logprobs, generation.n_probs)
        return _chosen(out, generation.response_fields) if generation.response_fields else out


def _chosen(values: dict[str, Any], paths: tuple[str, ...]) -> dict[str, Any]:
    """`response_fields`: only these; "a/b" is the b in a."""
    out = {}
    for path in paths:
        value: Any = values
        for name in path.split("/"):
            if not isinstance(value, dict) or name not in value:
                break
            value = value[name]
        else:
            out[path] = value
    return out


# --- the endpoint ---


async def completion(request: Request) -> Response:
    """POST /completion."""
    body = await read_object(request)
    state = state_of(request)
    generation = parse_generation(body, state.settings, chat=False)
    if body.get("prompt") is None:
        raise invalid("'prompt' is required")
    job = await begin(request, state, body["prompt"], generation)
    if generation.stream:
        return EventStream(job.answers, _frames(state, generation, job), ping_s=generation.ping_s,
                           readings=generation.return_progress)
    done = await job.answers.results()
    out = [final.final(job.answers.streams[i], done[i], job.id_slot(i)) for i, final in enumerate(job.finals)]
    return json_response(out[0] if len(out) == 1 else out)


def _frames(state: ServerState, generation: Generation, job: Job) -> Frames:
    streams = job.answers.streams
    meters = [Meter() for _ in streams]
    n_open = len(streams)

    def part(i: int, text: str, tokens: tuple[int, ...], **more: Any) -> bytes:
        return event({"index": i, "content": text, "tokens": tokens, "stop": False, "id_slot": job.id_slot(i),
                      "tokens_predicted": meters[i].n_tokens, "tokens_evaluated": streams[i].n_prompt, **more})  # fmt: skip

    frames: list[bytes] = []
    while n_open:
        batch = yield b"".join(frames)
        frames = []
        for i, item in batch:
            if isinstance(item, Reading):
                frames.append(part(i, "", (), **reading_of(generation, item)))
                continue
            for piece in item:
                if piece.text or piece.tokens:
                    meters[i].count(piece)
                    more = _extras(state, generation, piece, meters[i], streams[i])
                    frames.append(part(i, piece.text, piece.tokens, **more))
            if item[-1].finish_reason is not None:
                n_open -= 1
                frames.append(event(job.finals[i].final(streams[i], None, job.id_slot(i))))
    return b"".join(frames)


def _extras(state: ServerState, generation: Generation, piece: Piece, meter: Meter, stream: AsyncStream) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if generation.timings_per_token:
        more["timings"] = meter.timings(stream)
    if piece.logprobs is not None:
        more["completion_probabilities"] = shapes.token_logprobs(state.model.model, piece.logprobs, generation.n_probs)
    return more


ROUTES = [
    Route("/completion", completion, methods=["POST"]),
    Route("/completions", completion, methods=["POST"]),
]
