"""OpenAI's endpoints: chat completions, text completions, counting tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lfmfast.messages import assistant_message
from lfmfast.params import SamplingParams
from lfmfast.server import completion, shapes
from lfmfast.server.body import json_response, read_object
from lfmfast.server.conversation import read_conversation
from lfmfast.server.errors import invalid
from lfmfast.server.fields import Conversation, Generation, parse_generation
from lfmfast.server.sse import DONE, Answers, EventStream, Frame, Frames, Reading, event
from lfmfast.server.state import ServerState, state_of
from lfmfast.types import Completion, Piece, Usage

__all__ = ["ROUTES"]


class _Reply:
    """What all messages of one response share.

    Parameters
    ----------
    kind : str
        The value of `object`; of a stream's chunks it may be another.
    """

    def __init__(self, state: ServerState, generation: Generation, answers: Answers, kind: str) -> None:
        self.state = state
        self.model = state.model.model
        self.generation = generation
        self.answers = answers
        self.envelope: dict[str, Any] = {
            "created": int(time.time()),
            "id": state.new_id("chatcmpl-" if kind.startswith("chat") else "cmpl-"),
            "model": state.model_name,
            "system_fingerprint": shapes.fingerprint(),
            "object": kind,
        }

    def message(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"choices": choices, **self.envelope, **more}

    def usage(self) -> dict[str, Any]:
        return shapes.usage([s.usage or Usage(0, 0, 0) for s in self.answers.streams], self.generation.n)

    def partial_timings(self, i: int, meter: completion.Meter) -> dict[str, Any]:
        """`timings_per_token`, or nothing."""
        return {"timings": meter.timings(self.answers.streams[i])} if self.generation.timings_per_token else {}


# --- chat ---


async def chat_completions(request: Request) -> Response:
    """POST /v1/chat/completions."""
    body = await read_object(request)
    state = state_of(request)
    model = state.model
    generation = parse_generation(body, state.settings, chat=True)
    conversation = read_conversation(body, state)
    params = generation.resolved(model.model)
    settings = completion.settings_of(generation, params, model.model, conversation.reasoning_format)
    answers = Answers(request)
    async with answers.beginning():
        for i in range(generation.n):
            stream = model.stream(conversation.messages, **conversation.options(), **generation.options(params, i))
            answers.add(stream, state.task(stream, prompt=conversation.messages, prompt_options=conversation.prompt_options(),
                                           params=settings, id_slot=generation.id_slot))  # fmt: skip
    verbose = await _chat_verbose(state, generation, params, conversation) if generation.verbose else None
    if generation.stream:
        reply = _Reply(state, generation, answers, "chat.completion.chunk")
        return EventStream(answers, _chat_frames(reply, verbose), ping_s=generation.ping_s,
                           readings=generation.return_progress)
    reply = _Reply(state, generation, answers, "chat.completion")
    done = await answers.results()
    choices = [_chat_choice(reply, i, answer) for i, answer in enumerate(done)]
    more = {} if verbose is None else {"__verbose": verbose.final(answers.streams[0], done[0])}
    return json_response(reply.message(choices, usage=reply.usage(), timings=shapes.timings(done[0].timings), **more))


async def _chat_verbose(state: ServerState, generation: Generation, params: SamplingParams,
                        conversation: Conversation) -> completion.Final:  # fmt: skip
    tokens = await asyncio.to_thread(conversation.encode, state.model.model)
    return completion.Final(state, generation, params, 0, tokens, conversation.reasoning_format)


def _chat_choice(reply: _Reply, i: int, answer: Completion) -> dict[str, Any]:
    choice = {
        "finish_reason": shapes.finish_reason(answer.finish_reason),
        "index": i,
        "message": _message(answer),
    }
    if answer.logprobs is not None:
        content = shapes.token_logprobs(reply.model, answer.logprobs, reply.generation.n_probs)
        choice["logprobs"] = {"content": content}
    return choice


def _chat_frames(reply: _Reply, verbose: completion.Final | None) -> Frames:
    generation, streams = reply.generation, reply.answers.streams

    def chunk(i: int, delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> bytes:
        return event(reply.message([{"finish_reason": finish, "index": i, "delta": delta}], **more))

    texts, thoughts = ([Frame(lambda text, i=i, name=name: chunk(i, {name: text})) for i in range(len(streams))]  # type: ignore[misc]
                       for name in ("content", "reasoning_content"))  # fmt: skip
    meters = [completion.Meter() for _ in streams]
    is_plain = generation.n_probs < 0 and not generation.timings_per_token
    n_open = len(streams)
    role = {"role": "assistant", "content": None}
    frames = [chunk(i, role) for i in range(len(streams))]
    while n_open:
        batch = yield b"".join(frames)
        frames = []
        for i, item in batch:
            if isinstance(item, Reading):
                frames.append(event(reply.message([{"finish_reason": None, "index": i, "delta": role}],
                                                  **completion.reading_of(generation, item))))  # fmt: skip
                continue
            for piece in item:
                if is_plain and not piece.tool_calls:
                    if piece.reasoning:
                        frames.append(thoughts[i](piece.reasoning))
                    if piece.text:
                        frames.append(texts[i](piece.text))
                    continue
                meters[i].count(piece)
                frames.append(_chat_piece(reply, i, piece, meters[i]))
            if item[-1].finish_reason is not None:
                n_open -= 1
                frames.append(_chat_end(reply, i, item[-1], n_open == 0, verbose))
    return b"".join((*frames, DONE))


def _message(answer: Completion) -> dict[str, Any]:
    message = assistant_message(answer.text, answer.reasoning, answer.tool_calls)
    if answer.tool_calls and not answer.text:
        message["content"] = None
    if answer.unread_calls:
        message["unread_tool_calls"] = list(answer.unread_calls)  # what was written as calls, and stands in the content
    return message


def _deltas(piece: Piece) -> list[dict[str, Any]]:
    """What a piece adds to the message: a delta for each kind and for each call."""
    deltas: list[dict[str, Any]] = []
    if piece.reasoning:
        deltas.append({"reasoning_content": piece.reasoning})
    if piece.text:
        deltas.append({"content": piece.text})
    for call in piece.tool_calls:
        begun = {} if call.id is None else {"id": call.id, "type": "function"}
        function = {"arguments": call.arguments} if call.name is None else {"name": call.name, "arguments": call.arguments}
        deltas.append({"tool_calls": [{"index": call.index, **begun, "function": function}]})
    return deltas


def _chat_piece(reply: _Reply, i: int, piece: Piece, meter: completion.Meter) -> bytes:
    choices: list[dict[str, Any]] = [{"finish_reason": None, "index": i, "delta": delta} for delta in _deltas(piece)]
    if piece.logprobs:
        content = shapes.token_logprobs(reply.model, piece.logprobs, reply.generation.n_probs)
        choices = choices or [{"finish_reason": None, "index": i, "delta": {}}]
        choices[0]["logprobs"] = {"content": content}
    more = reply.partial_timings(i, meter)
    return b"".join([event(reply.message([choice], **more)) for choice in choices])


def _chat_end(reply: _Reply, i: int, last: Piece, is_all: bool, verbose: completion.Final | None) -> bytes:
    """The end of an answer, and of the whole if it is the last one: `timings` stand in what comes last."""
    assert last.timings is not None
    choice = {"finish_reason": shapes.finish_reason(last.finish_reason), "index": i, "delta": {}}
    more: dict[str, Any] = {"timings": shapes.timings(last.timings)}
    extra = {}
    if verbose is not None and i == 0:
        extra = {"__verbose": verbose.final(reply.answers.streams[0])}
    if not (is_all and reply.generation.include_usage):
        return event(reply.message([choice], **more, **extra))
    return event(reply.message([choice], **extra)) + event(reply.message([], usage=reply.usage(), **more))


async def input_tokens(request: Request) -> Response:
    """POST /v1/chat/completions/input_tokens: how many tokens the prompt of a chat completion has."""
    body = await read_object(request)
    state = state_of(request)
    model = state.model.model
    conversation = read_conversation(body, state)
    tokens = await asyncio.to_thread(conversation.encode, model)
    return json_response({"input_tokens": len(tokens), "object": "response.input_tokens"})


# --- text ---


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    body = await read_object(request)
    state = state_of(request)
    generation = parse_generation(body, state.settings, chat=False)
    if body.get("prompt") is None:
        raise invalid("'prompt' is required")
    job = await completion.begin(request, state, body["prompt"], generation)
    reply = _Reply(state, generation, job.answers, "text_completion")
    if generation.stream:
        return EventStream(job.answers, _text_frames(reply), ping_s=generation.ping_s, readings=generation.return_progress)
    done = await job.answers.results()
    choices = [_text_choice(reply, i, answer) for i, answer in enumerate(done)]
    more = {} if not generation.verbose else {"__verbose": job.finals[0].final(job.answers.streams[0], done[0])}
    return json_response(reply.message(choices, usage=reply.usage(), timings=shapes.timings(done[0].timings), **more))


def _text_choice(reply: _Reply, i: int, answer: Completion) -> dict[str, Any]:
    return {
        "text": answer.text,
        "index": i,
        "logprobs": _text_logprobs(reply, answer.logprobs, 0),
        "finish_reason": shapes.finish_reason(answer.finish_reason),
    }


def _text_logprobs(reply: _Reply, values: Iterable[Any] | None, offset: int) -> dict[str, Any] | None:
    return None if values is None else shapes.legacy_logprobs(reply.model, values, reply.generation.n_probs, offset)


def _text_frames(reply: _Reply) -> Frames:
    generation, streams = reply.generation, reply.answers.streams

    def chunk(i: int, text: str, finish: str | None = None, logprobs: Any = None, **more: Any) -> bytes:
        return event(reply.message([{"text": text, "index": i, "logprobs": logprobs, "finish_reason": finish}], **more))

    texts = [Frame(lambda text, i=i: chunk(i, text)) for i in range(len(streams))]  # type: ignore[misc]
    meters = [completion.Meter() for _ in streams]
    is_plain = generation.n_probs < 0 and not generation.timings_per_token
    n_open = len(streams)
    frames: list[bytes] = []
    while n_open:
        batch = yield b"".join(frames)
        frames = []
        for i, item in batch:
            if isinstance(item, Reading):
                frames.append(chunk(i, "", **completion.reading_of(generation, item)))
                continue
            for piece in item:
                if is_plain:
                    if piece.text:
                        frames.append(texts[i](piece.text))
                    continue
                offset = meters[i].n_chars
                meters[i].count(piece)
                if piece.text or piece.logprobs:
                    logprobs = _text_logprobs(reply, piece.logprobs, offset)
                    frames.append(chunk(i, piece.text, None, logprobs, **reply.partial_timings(i, meters[i])))
            last = item[-1]
            if last.finish_reason is not None and last.timings is not None:
                n_open -= 1
                more: dict[str, Any] = {"timings": shapes.timings(last.timings)}
                if n_open == 0 and not generation.include_usage:  # llama-server always says it here
                    more["usage"] = reply.usage()
                frames.append(chunk(i, "", shapes.finish_reason(last.finish_reason), **more))
                if n_open == 0 and generation.include_usage:
                    frames.append(event(reply.message([], usage=reply.usage())))
    return b"".join((*frames, DONE))


ROUTES = [
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/chat/completions/input_tokens", input_tokens, methods=["POST"]),
    Route("/chat/completions/input_tokens", input_tokens, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
]
