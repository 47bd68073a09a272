"""Bodies of answers, and events of streams."""

from __future__ import annotations

from typing import Any

from lfmfast.params import NEUTRAL
from lfmfast.server import shapes
from lfmfast.server.errors import TYPES
from lfmfast.server.openapi.schema import (
    ANY,
    BOOLEAN,
    NULL,
    STRING,
    Schema,
    array,
    const,
    either,
    integer,
    like,
    number,
    obj,
    optional,
    ref,
    said,
)
from lfmfast.types import Timings, Usage

__all__ = ["ANSWERS"]

_INT, _NUMBER = integer(), number()
_COUNT = integer(0)
_TEXTS = array(STRING)
_BYTES = array(integer(0, 255))
_TIMES = Timings(1, 0, 1.0, 2, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)

_ERROR = obj(
    {"code": said("The HTTP status.", _INT), "message": said("For people: it names the field and its limits.", STRING),
     "type": {"enum": sorted({*TYPES.values(), "exceed_context_size_error"})}},
    {"n_prompt_tokens": said("Of exceed_context_size_error.", _COUNT),
     "n_ctx": said("Of exceed_context_size_error.", _COUNT)},
)  # fmt: skip

# --- log probabilities ---

_TOKEN = {"id": _COUNT, "token": STRING, "bytes": _BYTES, "logprob": _NUMBER}
_TOKEN_LOGPROB = obj({**_TOKEN, "top_logprobs": array(obj(_TOKEN))})
_LOGPROBS = array(ref("TokenLogprob"))
_LEGACY = obj({"content": _LOGPROBS, "tokens": _TEXTS, "token_logprobs": array(_NUMBER), "text_offset": array(_COUNT),
               "top_logprobs": array({"type": "object", "additionalProperties": _NUMBER})})  # fmt: skip

# --- OpenAI's chat and text completions ---

_TEXT_FINISH = const("stop", "length")
_FINISH = const("stop", "length", "tool_calls")
_MORE = {"usage": ref("Usage"), "timings": ref("Timings"), "__verbose": ref("Completion")}
_PROGRESS = {"prompt_progress": ref("PromptProgress")}


def _envelope(kind: str, prefix: str, choice: Schema) -> dict[str, Schema]:
    return {"id": {"type": "string", "pattern": f"^{prefix}"}, "object": const(kind), "created": _COUNT, "model": STRING,
            "system_fingerprint": STRING, "choices": array(choice)}  # fmt: skip


def _whole(envelope: dict[str, Schema]) -> Schema:
    more = dict(_MORE)
    return obj({**envelope, "usage": more.pop("usage"), "timings": more.pop("timings")}, more)


_ARGUMENTS = said("A JSON object as text; in a stream, pieces of it.", STRING)
_CALL = obj({"id": STRING, "type": const("function"), "function": obj({"name": STRING, "arguments": _ARGUMENTS})})
_CALL_DELTA = obj({"index": _COUNT, "function": obj({"arguments": _ARGUMENTS}, {"name": STRING})},
                  {"id": STRING, "type": const("function")})  # fmt: skip
_CHAT_MESSAGE = obj({"role": const("assistant"), "content": optional(STRING)}, {
    "reasoning_content": said("Thoughts.", STRING), "tool_calls": array(_CALL),
    "unread_tool_calls": said("What was written as calls and can't be read; it stands in the content, too.", _TEXTS),
})  # fmt: skip
_CHAT_LOGPROBS = {"logprobs": obj({"content": _LOGPROBS})}
_CHAT = _whole(_envelope("chat.completion", "chatcmpl-", obj(
    {"finish_reason": _FINISH, "index": _COUNT, "message": _CHAT_MESSAGE}, _CHAT_LOGPROBS)))  # fmt: skip
_CHAT_CHUNK = obj(_envelope("chat.completion.chunk", "chatcmpl-", obj({
    "finish_reason": optional(_FINISH), "index": _COUNT,
    "delta": obj({}, {"role": const("assistant"), "content": optional(STRING), "reasoning_content": STRING,
                      "tool_calls": array(_CALL_DELTA)}),
}, _CHAT_LOGPROBS)), {**_MORE, **_PROGRESS})  # fmt: skip


def _text_choice(finish: Schema) -> Schema:
    return obj({"text": STRING, "index": _COUNT, "logprobs": optional(ref("TextLogprobs")), "finish_reason": finish})


_TEXT = _whole(_envelope("text_completion", "cmpl-", _text_choice(_TEXT_FINISH)))
_TEXT_CHUNK = obj(_envelope("text_completion", "cmpl-", _text_choice(optional(_TEXT_FINISH))), {**_MORE, **_PROGRESS})

# --- llama-server's completions ---

_SETTINGS = like(shapes.generation_settings(NEUTRAL, end_tokens=(), n_predict=-1, stop=[""], stream=False, n_probs=0,
                                            timings_per_token=False))  # fmt: skip
_SETTINGS["properties"] |= {name: said("As the request had it.", ANY) for name in ("json_schema", "response_format")}
_PROBABILITIES = {"completion_probabilities": _LOGPROBS}
_COMPLETION = {
    "index": _COUNT, "content": STRING, "tokens": array(_COUNT), "id_slot": integer(-1), "stop": const(True), "model": STRING,
    "tokens_predicted": _COUNT, "tokens_evaluated": _COUNT, "generation_settings": ref("GenerationSettings"),
    "prompt": STRING, "has_new_line": BOOLEAN, "truncated": BOOLEAN, "stop_type": const("eos", "word", "limit", "none"),
    "stopping_word": STRING, "tokens_cached": _COUNT, "timings": ref("Timings"),
}  # fmt: skip
_CHOSEN = {**obj({}, {**_COMPLETION, **_PROBABILITIES}), "patternProperties": {"/": ANY}}
_COMPLETION_CHUNK = obj(
    {"index": _COUNT, "content": STRING, "tokens": array(_COUNT), "stop": const(False), "id_slot": integer(-1),
     "tokens_predicted": _COUNT, "tokens_evaluated": _COUNT},
    {"timings": ref("Timings"), **_PROBABILITIES, **_PROGRESS},
)  # fmt: skip

# --- Anthropic's messages ---

_CLAUDE_STOP = {"stop_reason": const("end_turn", "max_tokens", "stop_sequence", "tool_use", None),
                "stop_sequence": optional(STRING)}  # fmt: skip
_CLAUDE_BLOCK = either(
    obj({"type": const("text"), "text": STRING}),
    obj({"type": const("thinking"), "thinking": STRING, "signature": const("")}),
    obj({"type": const("tool_use"), "id": STRING, "name": STRING, "input": {"type": "object"}}),
)
_CLAUDE_DELTA = either(*(obj({"type": const(kind), member: STRING}) for kind, member in (
    ("text_delta", "text"), ("thinking_delta", "thinking"), ("signature_delta", "signature"),
    ("input_json_delta", "partial_json"))))  # fmt: skip
_CLAUDE_MESSAGE = obj({
    "id": {"type": "string", "pattern": "^msg_"}, "type": const("message"), "role": const("assistant"), "model": STRING,
    "content": array(_CLAUDE_BLOCK), **_CLAUDE_STOP,
    "usage": obj({"cache_read_input_tokens": _COUNT, "input_tokens": _COUNT, "output_tokens": _COUNT}),
})  # fmt: skip


def _events(**kinds: dict[str, Schema]) -> Schema:
    return either(*(obj({"type": const(kind), **members}) for kind, members in kinds.items()))


_CLAUDE_EVENT = _events(
    message_start={"message": ref("AnthropicMessageAnswer")},
    content_block_start={"index": _COUNT, "content_block": _CLAUDE_BLOCK},
    content_block_delta={"index": _COUNT, "delta": _CLAUDE_DELTA},
    content_block_stop={"index": _COUNT},
    message_delta={"delta": obj(_CLAUDE_STOP), "usage": obj({"output_tokens": _COUNT})},
    message_stop={},
)

# --- OpenAI's responses ---

_THOUGHT = obj({"type": const("reasoning_text"), "text": STRING})
_PART = obj({"type": const("output_text"), "annotations": array(ANY), "logprobs": array(ANY), "text": STRING})
_STATUS = const("in_progress", "completed", "incomplete")


def _item(kind: str, prefix: str, members: dict[str, Schema]) -> Schema:
    return obj({"id": {"type": "string", "pattern": f"^{prefix}"}, "type": const(kind), "status": _STATUS, **members})


_ITEM = either(
    _item("message", "msg_", {"role": const("assistant"), "content": array(_PART)}),
    _item("reasoning", "rs_", {"summary": array(ANY, None, 0), "content": array(_THOUGHT), "encrypted_content": const("")}),
    _item("function_call", "fc_", {"call_id": STRING, "name": STRING, "arguments": _ARGUMENTS}),
)
_RESPONSE = obj({
    "id": {"type": "string", "pattern": "^resp_"}, "object": const("response"), "created_at": _COUNT, "status": _STATUS,
    "model": STRING, "output": array(_ITEM), "error": NULL, "incomplete_details": optional(obj({"reason": STRING})),
    "instructions": optional(STRING), "max_output_tokens": optional(_COUNT), "metadata": ANY, "parallel_tool_calls": BOOLEAN,
    "previous_response_id": NULL, "store": const(False), "temperature": _NUMBER, "text": ANY,
    "tool_choice": ANY, "tools": array(ANY), "top_p": _NUMBER, "truncation": const("disabled"),
}, {
    "completed_at": _COUNT,
    "usage": obj({"input_tokens": _COUNT, "output_tokens": _COUNT, "total_tokens": _COUNT,
                  "input_tokens_details": obj({"cached_tokens": _COUNT}),
                  "output_tokens_details": obj({"reasoning_tokens": _COUNT})}),
})  # fmt: skip


def _response_events() -> list[Schema]:
    item: dict[str, Schema] = {"item_id": STRING, "output_index": _COUNT}
    at: dict[str, Schema] = {**item, "content_index": _COUNT}
    times: dict[str, Schema] = {"timings": ref("Timings")}
    part = either(_PART, _THOUGHT)
    whole: dict[str, Schema] = {"response": ref("Response")}
    kinds: list[tuple[str, dict[str, Schema], dict[str, Schema]]] = [
        ("response.created", whole, {}),
        ("response.in_progress", whole, _PROGRESS),
        ("response.output_item.added", {"output_index": _COUNT, "item": _ITEM}, {}),
        ("response.content_part.added", {**at, "part": part}, {}),
        ("response.reasoning_text.delta", {**at, "delta": STRING}, times),
        ("response.reasoning_text.done", {**at, "text": STRING}, {}),
        ("response.output_text.delta", {**at, "logprobs": array(ANY), "delta": STRING}, times),
        ("response.output_text.done", {**at, "logprobs": array(ANY), "text": STRING}, {}),
        ("response.function_call_arguments.delta", {**item, "delta": STRING}, times),
        ("response.function_call_arguments.done", {**item, "arguments": _ARGUMENTS}, {}),
        ("response.content_part.done", {**at, "part": part}, {}),
        ("response.output_item.done", {"output_index": _COUNT, "item": _ITEM}, {}),
        ("response.completed", {**whole, **times}, {}),
    ]
    return [obj({"type": const(kind), "sequence_number": _COUNT, **members}, more) for kind, members, more in kinds]


_RESPONSE_ERROR = obj({"type": const("error"), "code": STRING, "message": STRING, "param": NULL, "error": _ERROR})

# --- what there is besides ---

_MODEL = obj({
    "id": STRING, "aliases": _TEXTS, "tags": _TEXTS, "object": const("model"), "created": _COUNT, "owned_by": STRING,
    "architecture": obj({"input_modalities": _TEXTS, "output_modalities": _TEXTS}),
    "meta": obj({**dict.fromkeys(("vocab_type", "n_vocab", "n_ctx", "n_ctx_train", "n_embd", "n_params", "size"), _COUNT),
                 "ftype": STRING}),
})  # fmt: skip
_OLLAMA: dict[str, Any] = {
    **dict.fromkeys(("name", "model", "modified_at", "size", "digest", "type", "description", "parameters"), STRING),
    "tags": _TEXTS, "capabilities": _TEXTS,
    "details": obj({**dict.fromkeys(("parent_model", "format", "family", "parameter_size", "quantization_level"), STRING),
                    "families": _TEXTS}),
}  # fmt: skip
_PROPS = obj({
    "default_generation_settings": obj({"params": ref("GenerationSettings"), "n_ctx": _COUNT}),
    **dict.fromkeys(("model_alias", "model_ftype", "model_path", "chat_template", "bos_token", "eos_token", "build_info"),
                    STRING),
    **dict.fromkeys(("endpoint_slots", "endpoint_props", "endpoint_metrics", "ui", "is_sleeping", "cors_proxy_enabled"),
                    BOOLEAN),
    "total_slots": _COUNT, "ui_settings": {"type": "object"}, "chat_template_caps": {"type": "object"},
    "modalities": obj({"vision": BOOLEAN, "video": BOOLEAN, "audio": BOOLEAN}),
})  # fmt: skip
_SLOT = obj(
    {"id": _COUNT, "n_ctx": _COUNT, "speculative": BOOLEAN, "is_processing": BOOLEAN},
    {"id_task": _COUNT, "n_prompt_tokens": _COUNT, "n_prompt_tokens_processed": _COUNT, "n_prompt_tokens_cache": _COUNT,
     "params": ref("GenerationSettings"),
     "next_token": array(obj({"has_next_token": BOOLEAN, "has_new_line": BOOLEAN, "n_remain": integer(-1),
                              "n_decoded": _COUNT}))},
)  # fmt: skip
_SLOT_FILE = {"id_slot": _COUNT, "filename": STRING}
_SLOT_ACTION = either(
    obj({**_SLOT_FILE, "n_saved": _COUNT, "n_written": _COUNT, "timings": obj({"save_ms": _NUMBER})}),
    obj({**_SLOT_FILE, "n_restored": _COUNT, "n_read": _COUNT, "timings": obj({"restore_ms": _NUMBER})}),
    obj({"id_slot": _COUNT, "n_erased": _COUNT}),
)
_PIECE = obj({"id": _COUNT, "piece": said("A text, or the bytes of one that is no UTF-8 by itself.", either(STRING, _BYTES))})

#: Schemas by name: answers, events, and what they are made of.
ANSWERS: dict[str, Schema] = {
    "Error": obj({"error": _ERROR}),
    "AnthropicError": obj({"error": _ERROR}, {"type": const("error")}),
    "Usage": like(shapes.usage(Usage(0, 0, 0))),
    "Timings": like(shapes.timings(_TIMES)),
    "PromptProgress": like(shapes.progress(0, 0, 0, 0.0)),
    "TokenLogprob": _TOKEN_LOGPROB,
    "TextLogprobs": _LEGACY,
    "GenerationSettings": _SETTINGS,
    "ChatCompletion": _CHAT,
    "ChatCompletionChunk": _CHAT_CHUNK,
    "TextCompletion": _TEXT,
    "TextCompletionChunk": _TEXT_CHUNK,
    "Completion": obj(_COMPLETION, _PROBABILITIES),
    "ChosenFields": said("With response_fields: those that were named.", _CHOSEN),
    "CompletionAnswer": either(*(either(s, array(s)) for s in (ref("Completion"), ref("ChosenFields")))),
    "CompletionEvent": either(_COMPLETION_CHUNK, ref("Completion"), ref("ChosenFields")),
    "AnthropicMessageAnswer": _CLAUDE_MESSAGE,
    "AnthropicEvent": _CLAUDE_EVENT,
    "Response": _RESPONSE,
    "ResponseEvent": either(*_response_events(), _RESPONSE_ERROR),
    "InputTokens": obj({"input_tokens": _COUNT, "object": const("response.input_tokens")}),
    "AnthropicTokens": obj({"input_tokens": _COUNT}),
    "Description": {"type": "object"},
    "Health": obj({"status": const("ok")}),
    "Model": _MODEL,
    "Models": obj({"object": const("list"), "data": array(ref("Model")), "models": array(obj(_OLLAMA))}),
    "Props": _PROPS,
    "PropsChanged": obj({"success": const(True)}),
    "Tokens": obj({"tokens": either(array(_COUNT), array(_PIECE))}),
    "Text": obj({"content": STRING}),
    "Prompt": obj({"prompt": STRING}),
    "Slots": array(_SLOT),
    "SlotAction": _SLOT_ACTION,
}
