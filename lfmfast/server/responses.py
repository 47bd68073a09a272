"""OpenAI's Responses: translated into chat completions, and their answers back. Text in, text out; nothing is stored."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lfmfast.server import completion, shapes
from lfmfast.server.body import json_bytes, json_response, read_object
from lfmfast.server.errors import ApiError, invalid
from lfmfast.server.fields import Fields
from lfmfast.server.sse import EventStream, Frames, Reading, named_event
from lfmfast.server.state import state_of
from lfmfast.server.turn import Turn, add_text, begin_turn, count_input, get_text, items_of, refuse, refuse_part, shown
from lfmfast.types import FinishReason, Usage

__all__ = ["ROUTES", "to_chat"]

# Fields that become others, and those that say nothing about the answer of a server that stores nothing.
TRANSLATED = frozenset((
    "input", "instructions", "tools", "max_output_tokens", "reasoning", "text", "include", "top_logprobs", "store", "metadata",
    "truncation", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "client_metadata", "max_tool_calls",
    "previous_response_id", "conversation", "background", "prompt", "moderation", "context_management",
))  # fmt: skip
# What there is no place for here, by name.
REFUSED = ("previous_response_id", "conversation", "background", "prompt", "moderation", "context_management", "top_logprobs")


# --- requests ---


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat completion that asks the same.

    Raises
    ------
    ApiError
        400, with the name of what is wrong or can't be done.
    """
    refuse(body, REFUSED)
    _check_options(body)
    chat = {name: value for name, value in body.items() if name not in TRANSLATED}
    asked = body.get("input")
    if asked is None:
        raise invalid("'input' is required")
    found: list[dict[str, Any]] = []
    if body.get("instructions") is not None:
        found.append({"role": "system", "content": get_text(body, "instructions", "body")})
    if isinstance(asked, str):
        found.append({"role": "user", "content": asked})
    else:
        for i, item in enumerate(items_of(asked, "input")):
            _add(found, item, f"input[{i}]")
        if not asked:
            raise invalid("'input' must not be empty")
    chat["messages"] = found
    if body.get("tools") is not None:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(items_of(body["tools"], "tools"))]
    if (n := Fields(body).integer("max_output_tokens", 0)) is not None:
        chat["max_tokens"] = n
    return chat


def _check_options(body: Mapping[str, Any]) -> None:
    """Fields whose usual values ask for nothing."""
    options = {name: Fields(body).mapping(name) for name in ("text", "reasoning")}
    text_format = options["text"].get("format")
    if text_format is not None and not (isinstance(text_format, dict) and text_format.get("type") == "text"):
        raise invalid("'text.format' other than text is not supported yet")
    if options["text"].get("verbosity") not in (None, "medium"):
        raise invalid("'text.verbosity' is not supported")
    if options["reasoning"].get("effort") is not None:
        raise invalid("'reasoning.effort' is not supported yet")
    if body.get("truncation") not in (None, "disabled"):
        raise invalid("'truncation' can only be 'disabled'")
    include = body.get("include")
    if include is not None and not isinstance(include, list):
        raise invalid("'include' must be an array")
    if "message.output_text.logprobs" in (include or ()):
        raise invalid("'include' of 'message.output_text.logprobs' is not supported yet")


def _add(found: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Put an item of the input to the messages. What the assistant said and called in a row is one message."""

    def of_assistant() -> dict[str, Any]:
        if not found or found[-1]["role"] != "assistant":
            return _new(found, "assistant")
        return found[-1]

    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise invalid(f"'{where}.role' must be 'user', 'assistant', 'system' or 'developer'")
        message = of_assistant() if role == "assistant" else _new(found, role)
        for text in _texts(item.get("content"), f"{where}.content"):
            add_text(message, text)
    elif kind == "function_call":
        function = {"name": get_text(item, "name", where), "arguments": get_text(item, "arguments", where)}
        call = {"id": get_text(item, "call_id", where), "type": "function", "function": function}
        of_assistant().setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        message = _new(found, "tool")
        message["tool_call_id"] = get_text(item, "call_id", where)
        for text in _texts(item.get("output"), f"{where}.output"):
            add_text(message, text)
    elif kind == "reasoning":
        parts = [] if item.get("content") is None else items_of(item["content"], f"{where}.content")
        thoughts = "".join(get_text(part, "text", f"{where}.content[{i}]") for i, part in enumerate(parts))
        if thoughts:
            of_assistant().update(thinking=thoughts, reasoning_content=thoughts)  # the names that templates know
    else:
        raise refuse_part(kind, where)


def _new(found: list[dict[str, Any]], role: str) -> dict[str, Any]:
    found.append({"role": role, "content": ""})
    return found[-1]


def _texts(content: Any, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    texts = []
    for i, part in enumerate(items_of(content, where)):
        kind = part.get("type")
        if kind not in ("input_text", "output_text", "text", "refusal"):
            raise refuse_part(kind, f"{where}[{i}]")
        texts.append(get_text(part, "refusal" if kind == "refusal" else "text", f"{where}[{i}]"))
    return texts


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise invalid(f"'{where}' is of type {shown(tool.get('type'))}: only functions are supported")
    parameters = tool.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"'{where}.parameters' must be an object")
    function = {"name": get_text(tool, "name", where), "description": tool.get("description") or "",
                "parameters": parameters or {}}  # fmt: skip
    return {"type": "function", "function": function}


# --- answers ---


class _Reply:
    """What an answer and the events of its stream have in common."""

    def __init__(self, turn: Turn, body: Mapping[str, Any]) -> None:
        self.turn = turn
        self.id = turn.state.new_id("resp_")
        self.item_id = turn.state.new_id("msg_")
        self.created = int(time.time())
        params = turn.params
        n_predict = turn.generation.n_predict
        # What clients of OpenAI read back; llama-server leaves it out.
        self.echo: dict[str, Any] = {
            "error": None, "incomplete_details": None, "instructions": body.get("instructions"),
            "max_output_tokens": None if n_predict < 0 else n_predict, "metadata": body.get("metadata") or {},
            "parallel_tool_calls": True, "previous_response_id": None, "store": False, "temperature": params.temperature,
            "text": {"format": {"type": "text"}}, "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [], "top_p": params.top_p, "truncation": "disabled",
        }  # fmt: skip

    def response(self, status: str, **more: Any) -> dict[str, Any]:
        return {"id": self.id, "object": "response", "created_at": self.created, "status": status,
                "model": self.turn.state.model_name, "output": [], **self.echo, **more}  # fmt: skip

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}

    def item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def whole(self, text: str, reason: FinishReason | None, usage: Usage) -> dict[str, Any]:
        """The response at its end. One that was cut off says so, though llama-server calls it completed."""
        status = "completed" if reason == "stop" else "incomplete"
        more: dict[str, Any] = {} if reason == "stop" else {"incomplete_details": {"reason": "max_output_tokens"}}
        counts = {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        output = [self.item(status, [self.part(text)])] if text else []
        return self.response(status, completed_at=int(time.time()), output=output, usage=counts, **more)


async def responses(request: Request) -> Response:
    """POST /v1/responses."""
    body = await read_object(request)
    turn = await begin_turn(request, state_of(request), to_chat(body))
    reply = _Reply(turn, body)
    if turn.generation.stream:
        return EventStream(turn.answers, _frames(reply), ping_s=turn.generation.ping_s,
                           readings=turn.generation.return_progress, error_frame=_error_frame)
    [done] = await turn.answers.results()
    return json_response(reply.whole(done.text, done.finish_reason, done.usage))


def _error_frame(error: ApiError) -> bytes:
    return named_event("error", {"type": "error", "code": error.type, "message": error.message, "param": None, **error.body()})


class _Events:
    """Makes numbered events."""

    def __init__(self) -> None:
        self._n = 0

    def __call__(self, kind: str, **data: Any) -> bytes:
        return self.numbered(named_event(kind, {"type": kind, **data}))

    def numbered(self, frame: bytes) -> bytes:
        frame = b'%b,"sequence_number":%d}\n\n' % (frame[:-3], self._n)
        self._n += 1
        return frame


def _frames(reply: _Reply) -> Frames:
    turn, event = reply.turn, _Events()
    generation, stream = turn.generation, turn.stream
    meter = completion.Meter()
    where = {"item_id": reply.item_id, "output_index": 0, "content_index": 0}
    # All of a delta's event but its text, which stands at the end, and its number.
    head = named_event("response.output_text.delta", {"type": "response.output_text.delta", **where, "logprobs": []})[:-3]
    texts: list[str] = []
    started = reply.response("in_progress")
    frames = [event("response.created", response=started), event("response.in_progress", response=started)]
    while True:
        batch = yield b"".join(frames)
        frames = []
        for _, pieces in batch:
            if isinstance(pieces, Reading):
                frames.append(event("response.in_progress", response=started, prompt_progress=shapes.progress(*pieces)))
                continue
            for piece in pieces:
                meter.count(piece)
                if piece.text:
                    if not texts:
                        item, part = reply.item("in_progress", []), reply.part("")
                        frames.append(event("response.output_item.added", output_index=0, item=item))
                        frames.append(event("response.content_part.added", **where, part=part))
                    texts.append(piece.text)
                    times = b""
                    if generation.timings_per_token:
                        times = b',"timings":' + json_bytes(meter.timings(stream))
                    frames.append(event.numbered(b'%b,"delta":%b%b}\n\n' % (head, json_bytes(piece.text), times)))
                if piece.usage is not None and piece.timings is not None:
                    whole = reply.whole("".join(texts), piece.finish_reason, piece.usage)
                    frames += _end(event, where, whole)
                    frames.append(event("response.completed", response=whole, timings=shapes.timings(piece.timings)))
                    return b"".join(frames)


def _end(event: _Events, where: Mapping[str, Any], whole: Mapping[str, Any]) -> list[bytes]:
    """The ends of what was begun: the text, its part, and the message around."""
    if not whole["output"]:
        return []
    [item] = whole["output"]
    [part] = item["content"]
    return [
        event("response.output_text.done", **where, text=part["text"], logprobs=[]),
        event("response.content_part.done", **where, part=part),
        event("response.output_item.done", output_index=0, item=item),
    ]


async def input_tokens(request: Request) -> Response:
    """POST /v1/responses/input_tokens."""
    body = await read_object(request)
    n = await count_input(state_of(request), to_chat(body))
    return json_response({"input_tokens": n, "object": "response.input_tokens"})


ROUTES = [
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/responses", responses, methods=["POST"]),
    Route("/v1/responses/input_tokens", input_tokens, methods=["POST"]),
    Route("/responses/input_tokens", input_tokens, methods=["POST"]),
]
