"""From answers to lines of the output."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from lfmfast import openai_shapes as shapes
from lfmfast.batch.request import SEEDS, Request
from lfmfast.errors import ContextFullError, ParameterError, TemplateError
from lfmfast.model import Model
from lfmfast.types import Completion

__all__ = ["FORMATS", "columns_of", "encode", "number_of", "openai_of"]

#: `openai`: OpenAI's batch result lines; `columns`: one flat object for each line.
FORMATS = ("openai", "columns")
_ID = "batch_req_"


def openai_of(request: Request, answers: Sequence[Completion], model: Model, name: str) -> dict[str, Any]:
    """The result line that OpenAI's batches have. `name` is the model's, if the line has none."""
    line = {"id": f"{_ID}{request.number}", "custom_id": request.custom_id, "response": None, "error": None}
    if request.error is not None:
        return {**line, "error": _error(request)}
    is_chat = request.kind == "chat" or (request.kind == "plain" and not _is_text(request.prompts[0]))
    choice = _chat_choice if is_chat else _text_choice
    n_top = request.options.get("logprobs") or 0
    request_id = uuid.uuid4().hex
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": request.model or name,
        "system_fingerprint": shapes.fingerprint(),
        "choices": [{"index": i, **choice(answer, model, n_top)} for i, answer in enumerate(answers)],
        "usage": shapes.usage([answer.usage for answer in answers], request.n),
        "seed": request.seed,
    }
    return {**line, "response": {"status_code": 200, "request_id": f"req_{request_id}", "body": body}}


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) or not isinstance(prompt[0], dict)


def _chat_choice(answer: Completion, model: Model, n_top: int) -> dict[str, Any]:
    logprobs = None if answer.logprobs is None else {"content": shapes.token_logprobs(model, answer.logprobs, n_top)}
    return {"message": shapes.reply_message(answer), "finish_reason": shapes.finish_reason(answer.finish_reason),
            "logprobs": logprobs}  # fmt: skip


def _text_choice(answer: Completion, model: Model, n_top: int) -> dict[str, Any]:
    logprobs = None if answer.logprobs is None else shapes.legacy_logprobs(model, answer.logprobs, n_top)
    return {"text": answer.text, "finish_reason": shapes.finish_reason(answer.finish_reason), "logprobs": logprobs}


def columns_of(request: Request, answers: Sequence[Completion], model: Model, several: bool) -> dict[str, Any]:
    """One flat object. With `several`, or where a line has several answers, what each has is a list."""
    n_top = request.options.get("logprobs") or 0

    def column(values: list[Any]) -> Any:
        return None if not values else values if several or len(values) > 1 else values[0]

    messages = [shapes.reply_message(answer) for answer in answers]
    counts = shapes.usage([answer.usage for answer in answers], request.n) if answers else None
    return {
        "line": request.number,
        "custom_id": request.custom_id,
        "text": column([answer.text for answer in answers]),
        "reasoning": column([answer.reasoning for answer in answers]),
        "tool_calls": column([message.get("tool_calls", []) for message in messages]),
        "finish_reason": column([shapes.finish_reason(answer.finish_reason) for answer in answers]),
        "logprobs": column([None if answer.logprobs is None else shapes.token_logprobs(model, answer.logprobs, n_top)
                            for answer in answers]),
        "seed": column([(request.seed + i) % SEEDS for i in range(request.n)] * len(request.prompts)) if answers else None,
        "prompt_tokens": counts and counts["prompt_tokens"],
        "completion_tokens": counts and counts["completion_tokens"],
        "cached_tokens": counts and counts["prompt_tokens_details"]["cached_tokens"],
        "error": None if request.error is None else _error(request)["message"],
    }  # fmt: skip


def _error(request: Request) -> dict[str, Any]:
    error = request.error
    if isinstance(error, ContextFullError):
        code = "context_length_exceeded"
    else:
        code = "invalid_request" if isinstance(error, (ParameterError, TemplateError)) else "server_error"
    return {"code": code, "message": f"line {request.number}: {error or type(error).__name__}", "line": request.number}


def encode(line: dict[str, Any]) -> bytes:
    """As it is written, with the newline."""
    try:
        return json.dumps(line, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, out of a line's own text
        return json.dumps(line).encode() + b"\n"


def number_of(line: bytes) -> tuple[int, bool]:
    """The number of the line that a result is of, and whether it failed. Raises ValueError if it is no such result."""
    value = json.loads(line)
    if not isinstance(value, dict) or "error" not in value:
        raise ValueError("no result")
    name = value.get("id")
    number = int(name.removeprefix(_ID)) if isinstance(name, str) and name.startswith(_ID) else value.get("line")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError("no number")
    return number, value["error"] is not None
