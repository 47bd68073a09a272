"""Anthropic's Messages: translated into chat completions, and their answers back."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import wraps
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from lfmfast.server.body import json_response, read_object
from lfmfast.server.errors import ApiError, invalid, to_api_error
from lfmfast.server.fields import Fields
from lfmfast.server.sse import PING, EventStream, Frame, Frames, Reading, named_event
from lfmfast.server.state import state_of
from lfmfast.server.turn import Turn, add_text, begin_turn, count_input, get_text, items_of, refuse, refuse_part, shown
from lfmfast.types import Usage

__all__ = ["ROUTES", "to_chat"]

#: `max_tokens` where a body has none; Anthropic asks for it, llama-server does not.
MAX_TOKENS = 4096
# Fields that become others, and those that say nothing about the answer.
TRANSLATED = frozenset((
    "system", "messages", "tools", "tool_choice", "stop_sequences", "thinking", "metadata", "service_tier", "betas",
    "anthropic_version", "cache_control",
))  # fmt: skip
REFUSED = ("container", "mcp_servers", "output_format", "output_config", "context_management", "inference_geo")
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
    chat["tool_choice"] = _tool_choice(body.get("tool_choice"))
    chat["stop"] = Fields(body).strings("stop_sequences")
    if chat.get("max_tokens") is None:
        chat["max_tokens"] = MAX_TOKENS
    _check_thinking(body.get("thinking"))
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
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> str | None:
    if choice is None:
        return None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind not in ("auto", "none"):
        raise invalid(f"'tool_choice' of type {shown(kind)} is not supported yet: it can be 'auto' or 'none'")
    if choice.get("disable_parallel_tool_use"):
        raise invalid("'tool_choice.disable_parallel_tool_use' is not supported yet")
    return str(kind)


def _check_thinking(thinking: Any) -> None:
    """`thinking` says that the model may think, which is the model's own matter here; its budget is an aim, not a limit."""
    if thinking is not None and (
        not isinstance(thinking, dict) or thinking.get("type") not in ("enabled", "disabled", "adaptive")
    ):
        raise invalid("'thinking' must be an object with the type 'enabled', 'disabled' or 'adaptive'")


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
    word = turn.stream.stop_string
    reason = "max_tokens" if turn.stream.finish_reason != "stop" else "end_turn" if word is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": word}


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
    content = [{"type": "text", "text": done.text}] if done.text else []
    return json_response(_message(turn, content, _stop(turn), done.usage))


def _frames(turn: Turn) -> Frames:
    delta = Frame(lambda text: named_event("content_block_delta", {
        "type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}))  # fmt: skip
    opened = False
    batch = yield PING  # how much is cached, and so the first event, is only known when the engine has begun
    usage = Usage(turn.stream.n_prompt, 0, max(turn.stream.n_cached, 0))
    message = _message(turn, [], {"stop_reason": None, "stop_sequence": None}, usage)
    frames = [named_event("message_start", {"type": "message_start", "message": message})]
    while True:
        for _, pieces in batch:
            if isinstance(pieces, Reading):
                continue
            for piece in pieces:
                if piece.text and not opened:
                    opened = True
                    start = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
                    frames.append(named_event("content_block_start", start))
                if piece.text:
                    frames.append(delta(piece.text))
                if piece.usage is not None:
                    return b"".join((*frames, *_end(turn, opened, piece.usage)))
        batch = yield b"".join(frames)
        frames = []


def _end(turn: Turn, opened: bool, usage: Usage) -> list[bytes]:
    frames = []
    if opened:
        frames.append(named_event("content_block_stop", {"type": "content_block_stop", "index": 0}))
    last = {"type": "message_delta", "delta": _stop(turn), "usage": {"output_tokens": usage.completion_tokens}}
    return [*frames, named_event("message_delta", last), named_event("message_stop", {"type": "message_stop"})]


@_with_errors
async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    body = await read_object(request)
    return json_response({"input_tokens": await count_input(state_of(request), to_chat(body))})


ROUTES = [
    Route("/v1/messages", messages, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]
