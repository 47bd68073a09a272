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
from lfmfast.server.turn import (
    Turn,
    add_text,
    begin_turn,
    count_input,
    function_choice,
    get_text,
    items_of,
    json_format,
    refuse,
    refuse_part,
    shown,
    strictness,
)
from lfmfast.types import Completion, FinishReason, Piece, Usage

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
    options = _options(body)
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
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        chat["tool_choice"] = function_choice(get_text(choice, "name", "tool_choice"))
    if (n := Fields(body).integer("max_output_tokens", 0)) is not None:
        chat["max_tokens"] = n
    return chat | options


def _options(body: Mapping[str, Any]) -> dict[str, Any]:
    """What `text` and `reasoning` come to, after a look at fields whose usual values ask for nothing."""
    fields = Fields(body)
    text, reasoning = fields.mapping("text"), fields.mapping("reasoning")
    found: dict[str, Any] = {}
    form = text.get("format")
    if form is not None and (not isinstance(form, dict) or form.get("type") not in ("text", "json_object", "json_schema")):
        raise invalid("'text.format' must be an object with the type text, json_object or json_schema")
    if form is not None:
        found["response_format"] = json_format(form, "text.format") if form.get("type") == "json_schema" else form
    if text.get("verbosity") not in (None, "medium"):
        raise invalid("'text.verbosity' is not supported")
    effort = reasoning.get("effort")
    if effort not in (None, "none"):
        raise invalid("'reasoning.effort' can only be 'none'; 'reasoning_budget' says how many tokens a thought can have")
    if effort is not None:
        found["reasoning_effort"] = effort
    if body.get("truncation") not in (None, "disabled"):
        raise invalid("'truncation' can only be 'disabled'")
    include = body.get("include")
    if include is not None and not isinstance(include, list):
        raise invalid("'include' must be an array")
    if "message.output_text.logprobs" in (include or ()):
        raise invalid("'include' of 'message.output_text.logprobs' is not supported yet")
    return found


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
    return {"type": "function", "function": function | strictness(tool, where)}


# --- answers ---

#: Kinds of the items of an output: how their ids begin, and the event for a piece of their text.
KINDS = {
    "reasoning": ("rs_", "response.reasoning_text"),
    "message": ("msg_", "response.output_text"),
    "function_call": ("fc_", "response.function_call_arguments"),
}  # fmt: skip


class _Item:
    """An item of the output: thoughts, a message, or a call of a function, whose arguments are its text.

    Parameters
    ----------
    kind : str
    index : int
        In the output.
    id : str
    call : dict
        `call_id` and `name` of a call.
    """

    def __init__(self, kind: str, index: int, id: str, call: Mapping[str, Any]) -> None:
        self.kind = kind
        self.index = index
        self.event = KINDS[kind][1]
        self.texts: list[str] = []
        self._head = {"id": id, "type": kind}
        self._call = call
        self.where: dict[str, Any] = {"item_id": id, "output_index": index}
        if kind != "function_call":
            self.where["content_index"] = 0
        self.more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        # All of a delta's event but its text, which stands at the end, and its number.
        name = f"{self.event}.delta"
        self.delta = named_event(name, {"type": name, **self.where, **self.more})[:-3]

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self) -> dict[str, Any]:
        """The part of its content that there is."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "annotations": [], "logprobs": [], "text": self.text}

    def shown(self, status: str) -> dict[str, Any]:
        head = {**self._head, "status": status}
        if self.kind == "function_call":
            return {**head, **self._call, "arguments": self.text}
        content = [self.part()] if self.texts else []
        if self.kind == "message":
            return {**head, "role": "assistant", "content": content}
        return {**head, "summary": [], "content": content, "encrypted_content": ""}


class _Reply:
    """What an answer and the events of its stream have in common."""

    def __init__(self, turn: Turn, body: Mapping[str, Any]) -> None:
        self.turn = turn
        self.id = turn.state.new_id("resp_")
        self.created = int(time.time())
        self.items: list[_Item] = []
        params = turn.params
        n_predict = turn.generation.n_predict
        parallel = body.get("parallel_tool_calls")
        # What clients of OpenAI read back; llama-server leaves it out.
        self.echo: dict[str, Any] = {
            "error": None, "incomplete_details": None, "instructions": body.get("instructions"),
            "max_output_tokens": None if n_predict < 0 else n_predict, "metadata": body.get("metadata") or {},
            "parallel_tool_calls": True if parallel is None else parallel, "previous_response_id": None, "store": False,
            "temperature": params.temperature, "text": body.get("text") or {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto", "tools": body.get("tools") or [], "top_p": params.top_p,
            "truncation": "disabled",
        }  # fmt: skip

    def response(self, status: str, **more: Any) -> dict[str, Any]:
        return {"id": self.id, "object": "response", "created_at": self.created, "status": status,
                "model": self.turn.state.model_name, "output": [], **self.echo, **more}  # fmt: skip

    def add(self, kind: str, text: str = "", **call: Any) -> _Item:
        """One more item of the output."""
        item = _Item(kind, len(self.items), self.turn.state.new_id(KINDS[kind][0]), call)
        if text:
            item.texts.append(text)
        self.items.append(item)
        return item

    def add_all(self, done: Completion) -> None:
        """All items of an answer."""
        for kind, text in (("reasoning", done.reasoning), ("message", done.text)):
            if text:
                self.add(kind, text)
        for call in done.tool_calls:
            self.add("function_call", call.arguments, call_id=call.id, name=call.name)

    def whole(self, reason: FinishReason | None, usage: Usage) -> dict[str, Any]:
        """The response at its end. One that was cut off says so, and its last item too, though llama-server does not."""
        is_cut = reason not in ("stop", "tool_calls")
        status = "incomplete" if is_cut else "completed"
        more: dict[str, Any] = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
        counts = {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens_details": {"reasoning_tokens": self.turn.n_thought()},
        }
        output = [item.shown("completed") for item in self.items[:-1]] + [item.shown(status) for item in self.items[-1:]]
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
    reply.add_all(done)
    return json_response(reply.whole(done.finish_reason, done.usage))


def _error_frame(error: ApiError) -> bytes:
    return named_event("error", {"type": "error", "code": error.type, "message": error.message, "param": None, **error.body()})


class _Events:
    """The events of a stream, numbered."""

    def __init__(self, reply: _Reply) -> None:
        self._reply = reply
        self._item: _Item | None = None  # which is open
        self._n = 0

    def __call__(self, kind: str, **data: Any) -> bytes:
        return self._numbered(named_event(kind, {"type": kind, **data}))

    def _numbered(self, frame: bytes) -> bytes:
        frame = b'%b,"sequence_number":%d}\n\n' % (frame[:-3], self._n)
        self._n += 1
        return frame

    def of(self, piece: Piece, timings: dict[str, float] | None) -> list[bytes]:
        """What a piece of the answer comes to."""
        times = b"" if timings is None else b',"timings":' + json_bytes(timings)
        frames: list[bytes] = []
        for kind, text in (("reasoning", piece.reasoning), ("message", piece.text)):
            if text:
                if self._item is None or self._item.kind != kind:
                    frames += self._begin(kind)
                frames.append(self._delta(text, times))
        for call in piece.tool_calls:
            if call.id is not None:
                frames += self._begin("function_call", call_id=call.id, name=call.name)
            if call.arguments:
                frames.append(self._delta(call.arguments, times))
        return frames

    def _begin(self, kind: str, **call: Any) -> list[bytes]:
        frames = self.end("completed")
        item = self._item = self._reply.add(kind, **call)
        frames.append(self("response.output_item.added", output_index=item.index, item=item.shown("in_progress")))
        if kind != "function_call":
            frames.append(self("response.content_part.added", **item.where, part=item.part()))
        return frames

    def _delta(self, text: str, times: bytes) -> bytes:
        assert self._item is not None
        self._item.texts.append(text)
        return self._numbered(b'%b,"delta":%b%b}\n\n' % (self._item.delta, json_bytes(text), times))

    def end(self, status: str) -> list[bytes]:
        """The ends of what was begun: a text, its part, and the item around."""
        item, self._item = self._item, None
        if item is None:
            return []
        frames = []
        if item.kind == "function_call":
            frames.append(self(f"{item.event}.done", **item.where, arguments=item.text))
        else:
            frames.append(self(f"{item.event}.done", **item.where, text=item.text, **item.more))
            frames.append(self("response.content_part.done", **item.where, part=item.part()))
        return [*frames, self("response.output_item.done", output_index=item.index, item=item.shown(status))]


def _frames(reply: _Reply) -> Frames:
    turn, event = reply.turn, _Events(reply)
    generation, stream = turn.generation, turn.stream
    meter = completion.Meter()
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
                frames += event.of(piece, meter.timings(stream) if generation.timings_per_token else None)
                if piece.usage is not None and piece.timings is not None:
                    whole = reply.whole(piece.finish_reason, piece.usage)
                    frames += event.end(whole["status"])
                    frames.append(event("response.completed", response=whole, timings=shapes.timings(piece.timings)))
                    return b"".join(frames)


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
