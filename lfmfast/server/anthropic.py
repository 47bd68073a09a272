"""Anthropic's Messages: translated into chat completions, and their answers back."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from lfmfast.server.body import json_response, read_object
from lfmfast.server.errors import ApiError, invalid, to_api_error
from lfmfast.server.fields import Fields
from lfmfast.server.sse import PING, EventStream, Frame, Frames, Reading, named_event
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
from lfmfast.types import Completion, Piece, Usage

__all__ = ["ROUTES", "to_chat"]

#: `max_tokens` where a body has none; Anthropic asks for it, llama-server does not.
MAX_TOKENS = 4096
# Fields that become others, and those that say nothing about the answer.
TRANSLATED = frozenset((
    "system", "messages", "tools", "tool_choice", "stop_sequences", "thinking", "metadata", "service_tier", "betas",
    "anthropic_version", "cache_control", "output_config", "output_format",
))  # fmt: skip
REFUSED = ("container", "mcp_servers", "context_management", "inference_geo")
#: Types of `tool_choice` that name no tool, and what OpenAI calls them.
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# A stamp that Claude Code puts before its system prompt. It changes with each request, so that nothing would be cached.
STAMP = re.compile(r"^(x-anthropic-billing-header:[^\n]{0,500}?\bcch=)[0-9a-f]+(?=;)")


# --- requests ---


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat completion that asks the same.

    Raises
    ------
    ApiError
        400, with the name of what is wrong or can't be done.
    """
    refuse(body, REFUSED)
    chat = {name: value for name, value in body.items() if name not in TRANSLATED and name not in REFUSED}
    if body.get("messages") is None:
        raise invalid("'messages' is required")
    messages = _system(body.get("system"))
    for i, message in enumerate(items_of(body["messages"], "messages")):
        messages += _messages(message, f"messages[{i}]")
    chat["messages"] = messages or [{"role": "system", "content": ""}]  # llama-server lets the model say what it likes
    if body.get("tools") is not None:
        chat["tools"] = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(items_of(body["tools"], "tools"))]
    chat |= _calling(body.get("tool_choice")) | _budget(body.get("thinking")) | _response_format(body)
    chat["stop"] = Fields(body).strings("stop_sequences")
    if chat.get("max_tokens") is None:
        chat["max_tokens"] = MAX_TOKENS
    return chat


def _system(system: Any) -> list[dict[str, Any]]:
    if system is None:
        return []
    texts = [system]
    if not isinstance(system, str):
        texts = []
        for i, block in enumerate(items_of(system, "system")):
            if block.get("type") != "text":
                raise refuse_part(block.get("type"), f"system[{i}]")
            texts.append(get_text(block, "text", f"system[{i}]"))
    return [{"role": "system", "content": "".join(STAMP.sub(r"\g<1>0", text) for text in texts)}]


def _messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """One message becomes several if it has results of tools: these are messages of their own, in the order of the blocks."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise invalid(f"'{where}.role' must be 'user' or 'assistant'")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    found: list[dict[str, Any]] = []

    def own() -> dict[str, Any]:
        if not found or found[-1]["role"] != role:
            found.append({"role": role, "content": ""})
        return found[-1]

    for i, block in enumerate(items_of(content, f"{where}.content")):
        at, kind = f"{where}.content[{i}]", block.get("type")
        if kind == "text":
            add_text(own(), get_text(block, "text", at))
        elif kind == "thinking" and role == "assistant":
            thoughts = own().get("thinking", "") + get_text(block, "thinking", at)
            own().update(thinking=thoughts, reasoning_content=thoughts)  # the names that templates know
        elif kind == "redacted_thinking":
            continue  # nobody but its author can read it
        elif kind == "tool_use" and role == "assistant":
            own().setdefault("tool_calls", []).append(_tool_call(block, at))
        elif kind == "tool_result" and role == "user":
            found.append(_tool_result(block, at))
        else:
            raise refuse_part(kind, at)
    return found or [{"role": role, "content": ""}]


def _tool_call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input")
    if arguments is not None and not isinstance(arguments, dict):
        raise invalid(f"'{where}.input' must be an object")
    function = {"name": get_text(block, "name", where), "arguments": arguments or {}}
    return {"id": block.get("id") or "", "type": "function", "function": function}


def _tool_result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content")
    if content is not None and not isinstance(content, str):
        parts = []
        for i, part in enumerate(items_of(content, f"{where}.content")):
            if part.get("type") != "text":
                raise refuse_part(part.get("type"), f"{where}.content[{i}]")
            parts.append(get_text(part, "text", f"{where}.content[{i}]"))
        content = "".join(parts)
    return {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": content or ""}


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise invalid(f"'{where}' is of type {shown(tool['type'])}: tools that run at Anthropic are not supported")
    schema = tool.get("input_schema")
    if schema is not None and not isinstance(schema, dict):
        raise invalid(f"'{where}.input_schema' must be an object")
    function = {"name": get_text(tool, "name", where), "description": tool.get("description") or "", "parameters": schema or {}}
    return {"type": "function", "function": function | strictness(tool, where)}


def _calling(choice: Any) -> dict[str, Any]:
    """`tool_choice` and `parallel_tool_calls`, as far as they are said."""
    if choice is None:
        return {}
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "tool":
        found: dict[str, Any] = {"tool_choice": function_choice(get_text(choice, "name", "tool_choice"))}
    elif isinstance(kind, str) and kind in CHOICES:
        found = {"tool_choice": CHOICES[kind]}
    else:
        raise invalid(f"'tool_choice' must be an object with the type auto, any, tool or none, not {shown(kind)}")
    more = Fields(choice)
    if more.boolean("disable_parallel_tool_use"):
        found["parallel_tool_calls"] = False
    return found


def _budget(thinking: Any) -> dict[str, Any]:
    """`reasoning_budget`, if `thinking` comes to one. Whether a model thinks at all is its own matter."""
    kind = thinking.get("type") if isinstance(thinking, dict) else None
    if thinking is None or kind == "adaptive":
        return {}
    if kind not in ("enabled", "disabled"):
        raise invalid("'thinking' must be an object with the type 'enabled', 'disabled' or 'adaptive'")
    more = Fields(thinking)
    budget = more.integer("budget_tokens", 0) if kind == "enabled" else 0
    return {} if budget is None else {"reasoning_budget": budget}


def _response_format(body: Mapping[str, Any]) -> dict[str, Any]:
    """`response_format`, if the body wants an answer for a schema."""
    config = Fields(body).mapping("output_config")
    refuse(config, config.keys() - {"format"})
    wanted = config.get("format")
    wanted = body.get("output_format") if wanted is None else wanted
    if wanted is None:
        return {}
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise invalid("'output_config.format' must be an object with the type 'json_schema'")
    return {"response_format": json_format(wanted, "output_config.format")}


# --- answers ---


def _error_body(error: ApiError) -> dict[str, Any]:
    """Anthropic's shape, which has room for what the other endpoints say."""
    return {"type": "error", **error.body()}


def _with_errors(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    @wraps(endpoint)
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            raise
        except Exception as error:
            known = to_api_error(error)
            if known.status == 499:  # nobody reads it
                raise
            return json_response(_error_body(known), known.status, known.headers)

    return answer


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "cache_read_input_tokens": usage.cached_tokens,
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _stop(turn: Turn) -> dict[str, str | None]:
    reason, word = turn.stream.finish_reason, turn.stream.stop_string
    if reason == "stop" and word is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": word}
    return {"stop_reason": {"stop": "end_turn", "tool_calls": "tool_use"}.get(str(reason), "max_tokens"), "stop_sequence": None}


def _message(turn: Turn, content: list[dict[str, Any]], stop: Mapping[str, str | None], usage: Usage) -> dict[str, Any]:
    return {
        "id": turn.state.new_id("msg_"), "type": "message", "role": "assistant", "content": content,
        "model": turn.state.model_name, **stop, "usage": _usage(usage),
    }  # fmt: skip


@_with_errors
async def messages(request: Request) -> Response:
    """POST /v1/messages."""
    body = await read_object(request)
    turn = await begin_turn(request, state_of(request), to_chat(body))
    if turn.generation.stream:
        return EventStream(turn.answers, _frames(turn), ping_s=turn.generation.ping_s,
                           error_frame=lambda error: named_event("error", _error_body(error)))  # fmt: skip
    [done] = await turn.answers.results()
    return json_response(_message(turn, _content(done), _stop(turn), done.usage))


def _content(done: Completion) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if done.reasoning:
        blocks.append({"type": "thinking", "thinking": done.reasoning, "signature": ""})
    if done.text:
        blocks.append({"type": "text", "text": done.text})
    for call in done.tool_calls:  # the arguments are JSON already
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": msgspec.Raw(call.arguments.encode())})
    return blocks


def _frames(turn: Turn) -> Frames:
    blocks = _Blocks()
    batch = yield PING  # how much is cached, and so the first event, is only known when the engine has begun
    usage = Usage(turn.stream.n_prompt, 0, max(turn.stream.n_cached, 0))
    message = _message(turn, [], {"stop_reason": None, "stop_sequence": None}, usage)
    frames = [named_event("message_start", {"type": "message_start", "message": message})]
    while True:
        for _, pieces in batch:
            if isinstance(pieces, Reading):
                continue
            for piece in pieces:
                frames += blocks.take(piece)
                if piece.usage is not None:
                    return b"".join((*frames, *blocks.close(), *_end(turn, piece.usage)))
        batch = yield b"".join(frames)
        frames = []


class _Blocks:
    """The content blocks of a stream, which come one after the other, and their events."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""  # of the block that is open
        self._delta: Frame

    def take(self, piece: Piece) -> list[bytes]:
        """What a piece of the answer adds."""
        frames = []
        if piece.reasoning:
            if self._kind != "thinking":
                frames += self._open({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking")
            frames.append(self._delta(piece.reasoning))
        if piece.text:
            if self._kind != "text":
                frames += self._open({"type": "text", "text": ""}, "text_delta", "text")
            frames.append(self._delta(piece.text))
        for call in piece.tool_calls:
            if call.id is not None:
                block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                frames += self._open(block, "input_json_delta", "partial_json")
            if call.arguments:
                frames.append(self._delta(call.arguments))
        return frames

    def _open(self, block: Mapping[str, Any], delta: str, member: str) -> list[bytes]:
        frames = self.close()
        self._index += 1
        self._kind = block["type"]
        self._delta = Frame(lambda text: self._event("content_block_delta", delta={"type": delta, member: text}))
        return [*frames, self._event("content_block_start", content_block=block)]

    def close(self) -> list[bytes]:
        """The end of the block that is open, if one is."""
        frames = []
        if self._kind == "thinking":  # clients wait for a signature; nobody here could check one
            frames.append(self._event("content_block_delta", delta={"type": "signature_delta", "signature": ""}))
        if self._kind:
            frames.append(self._event("content_block_stop"))
        self._kind = ""
        return frames

    def _event(self, kind: str, **data: Any) -> bytes:
        return named_event(kind, {"type": kind, "index": self._index, **data})


def _end(turn: Turn, usage: Usage) -> list[bytes]:
    last = {"type": "message_delta", "delta": _stop(turn), "usage": {"output_tokens": usage.completion_tokens}}
    return [named_event("message_delta", last), named_event("message_stop", {"type": "message_stop"})]


@_with_errors
async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    body = await read_object(request)
    return json_response({"input_tokens": await count_input(state_of(request), to_chat(body))})


ROUTES = [
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
