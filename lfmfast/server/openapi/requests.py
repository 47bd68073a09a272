"""Bodies of requests. Limits, and what is refused, are taken from what reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lfmfast.params import RANGES, SAMPLERS
from lfmfast.server import anthropic, fields, responses
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
    number,
    obj,
    optional,
    ref,
    said,
)
from lfmfast.server.reader import CHARACTERS_MAX, INT_MAX, STRINGS_MAX, Harmless

__all__ = ["BODIES"]

# Values that may ask for nothing, each with a schema for its like.
_NOTHING: tuple[tuple[Any, Schema], ...] = (
    ("", const("")), (0, const(0)), (False, const(False)), ([], {"type": "array", "maxItems": 0}),
    ({}, {"type": "object", "maxProperties": 0}), (-1.5, {"type": "number", "exclusiveMaximum": 0}), (1, const(1)),
    ("none", const("none")), (["text"], {"const": ["text"]}),
)  # fmt: skip


def _refused(harmless: Harmless) -> Schema:
    """A field that can't be honoured: null, and what asks for nothing."""
    return said("Not supported: anything else is refused.", either(NULL, *(s for value, s in _NOTHING if harmless(value))))


def _strings(about: str, low: int | None = None) -> Schema:
    limits = f"At most {STRINGS_MAX} strings, and {CHARACTERS_MAX} characters in all."
    return said(f"{about} {limits}", either(STRING, array(STRING, low, STRINGS_MAX)))


def _ignored(about: str = "Has no effect.") -> Schema:
    return said(about, ANY)


def _flag(about: str) -> Schema:
    return said(about, BOOLEAN)


def _all_optional(properties: Mapping[str, Schema], but: Iterable[str] = ()) -> dict[str, Schema]:
    return {name: schema if name in but or not schema.keys() - {"description"} else optional(schema)
            for name, schema in properties.items()}  # fmt: skip


def _body(properties: Mapping[str, Schema], required: Iterable[str] = (), about: str = "") -> Schema:
    needed = list(required)
    schema = obj({}, _all_optional(properties, needed))
    if needed:
        schema["required"] = needed
    return said(about, schema) if about else schema


# --- generating ---


def _sampling() -> dict[str, Schema]:
    found = {}
    for name in (*fields.FLOATS, *fields.INTEGERS):
        limits = RANGES["repeat_penalty" if name == "repetition_penalty" else name]
        low, high, about = limits.low, limits.high, limits.note.strip(" ()")
        schema = integer(int(low), int(high)) if limits.kind is int else number(low, high)
        found[name] = said(f"{about[:1].upper()}{about[1:]}.", schema) if about else schema
    found["repetition_penalty"] = said("Another name of repeat_penalty.", found["repetition_penalty"])
    return found


_BIAS = said("Added to the token's logit; false: never this token.",
             either(number(-fields.BIAS_MAX, fields.BIAS_MAX), const(False)))  # fmt: skip
_SAMPLING = {
    **_sampling(),
    "seed": said("Its lowest 32 bits count; if all are set, it is a new seed each time.", integer(-(2**63), 2**64 - 1)),
    "ignore_eos": _flag("Forbid the tokens that end an answer."),
    "samplers": said("The stages to run, in order, as names or as letters. None of them twice.",
                     either(array({"enum": [*SAMPLERS, "typical_p", "typical", "temp"]}),
                            {"type": "string", "pattern": f"^[{''.join(fields.SAMPLER_LETTERS)}]*$"})),
    "dry_sequence_breakers": _strings("What DRY does not look across.", 1),
    "logit_bias": said("Of tokens, given by ids or by texts.", either(
        {"type": "object", "additionalProperties": _BIAS},
        array({"type": "array", "prefixItems": [either(integer(0, INT_MAX), STRING), _BIAS], "minItems": 2, "maxItems": 2}))),
}  # fmt: skip
_SCHEMA: Schema = said("A JSON schema. A keyword that can't be enforced is refused.", either({"type": "object"}, BOOLEAN))
_MAX_TOKENS = said(f"Tokens of an answer at most; -1: to its end. The first of {', '.join(fields.MAX_TOKENS)} counts.",
                   integer(-1, INT_MAX))  # fmt: skip
_BUDGET = said(f"Tokens of a thought at most; -1: as the server was told. The first of {', '.join(fields.BUDGETS)} counts.",
               integer(-1, INT_MAX))  # fmt: skip
_GENERATION = {
    **_SAMPLING,
    **dict.fromkeys(fields.MAX_TOKENS, _MAX_TOKENS),
    "stop": _strings("Where an answer ends; these texts are not part of it."),
    "n": said("Answers to each prompt.", integer(1, fields.N_MAX)),
    "n_cmpl": said("Another name of n, which it goes before.", integer(1, fields.N_MAX)),
    "n_probs": said("Log probabilities of so many likely tokens; 0: none.", integer(0, fields.TOP_MAX)),
    "top_logprobs": said("Likely tokens besides the answer's own; needs logprobs to be true.", integer(0, fields.TOP_MAX)),
    "cache_prompt": _flag("Whether what was read before is used."),
    "n_cache_reuse": said("Move runs of at least so many tokens that were read elsewhere; 0: none.", integer(0, INT_MAX)),
    "t_max_prompt_ms": said("If no token came by then, the answer is an error, 408.", integer(0, INT_MAX)),
    "t_max_predict_ms": said("An answer ends after so long; -1: no limit.", integer(-1, 2**53)),
    "priority": said("Requests of a higher one go first.", integer(-(2**31), INT_MAX)),
    "stream": _flag("Send the answer piece by piece, as server-sent events."),
    "stream_options": obj({}, {"include_usage": optional(_flag("Send usage at the end."))}),
    "timings_per_token": _flag("Send timings with each piece."),
    "return_progress": _flag("Send how far the prompt is read."),
    "return_tokens": _flag("Send token ids, too."),
    "response_fields": _strings("Only these fields of the answer of /completion; a/b is the b in a."),
    "verbose": _flag("Send the prompt and all settings, too."),
    "sse_ping_interval": said("A stream with nothing to send for so many seconds sends a comment; 0 and less: never.",
                              either(number(None, 0), number(fields.PING_MIN_S))),
    "id_slot": said("Accepted without effect on what is reused; -1: any.", integer(-1, INT_MAX)),
    "grammar": said("What the answer has to be, as llama.cpp's GBNF.", STRING),
    "json_schema": _SCHEMA,
    "response_format": said("The answer is text, a JSON object, or JSON for a schema. Only one of the three can be given.",
                            either(obj({"type": const("text")}),
                                   obj({"type": const("json_object")}, {"schema": optional(_SCHEMA)}),
                                   obj({"type": const("json_schema"), "json_schema": obj({"schema": _SCHEMA})}))),
    **dict.fromkeys(fields.BUDGETS, _BUDGET),
    "reasoning_budget_message": said("What a thought that is cut off there ends with.", STRING),
    **{name: _refused(harmless) for name, harmless in fields.REFUSED.items()},
    **{name: _ignored() for name in sorted(fields.NO_EFFECT - {"id_slot"} | {"adaptive_decay"})},
    **{name: _ignored() for name in ("user", "metadata", "store", "service_tier")},
    "model": _ignored("Any: there is one model."),
}  # fmt: skip

# --- chats ---

_TEXT_PART = obj({"type": const("text"), "text": STRING})
_STRICT = said("True: calls are made to fit the schema; one that can't be enforced is refused.", optional(BOOLEAN))
_FUNCTION = obj({"name": STRING}, {"description": STRING, "parameters": said("A JSON schema.", {"type": "object"}),
                                   "strict": _STRICT})  # fmt: skip
_CONVERSATION = {
    "messages": array(ref("ChatMessage"), 1),
    "tools": said("Functions that the model is told of.", array(either(STRING, ref("ChatTool")))),
    "tool_choice": said("Whether functions are called: as the model likes, never, always, or this one.", either(
        const("auto", "none", "required", None), obj({"type": const("function"), "function": obj({"name": STRING})}))),
    "parallel_tool_calls": _flag("False: at most one call in an answer."),
    "parse_tool_calls": _flag("False: calls stay in the text."),
    "reasoning_format": said("Whether thoughts are given apart (auto and deepseek) or in the text (none).",
                             const(*fields.REASONING_FORMATS, None)),
    "chat_template_kwargs": said("Variables for the chat template.",
                                 {"type": "object", "propertyNames": {"not": const(*sorted(fields.RESERVED))}}),
    "add_generation_prompt": _flag("Whether the prompt ends with the beginning of an answer."),
    "continue_final_message": _flag("Whether a last message of the assistant is continued; by default it is."),
}
_CHAT_LOGPROBS = _flag("Send log probabilities.")
_TEXT_LOGPROBS = said("Likely tokens to send log probabilities of.", either(BOOLEAN, integer(0, fields.TOP_MAX)))
_CHAT = {**_CONVERSATION, **_GENERATION, "logprobs": _CHAT_LOGPROBS}

_ROLE = {"type": "string", "minLength": 1, "examples": ["system", "user", "tool"]}
_CONTENT = {"content": said("Text, or parts of it.", either(STRING, array(either(STRING, _TEXT_PART)), NULL))}
_CALLS = {"tool_calls": said("Of the assistant; with them a message can't be continued.", ANY), "reasoning_content": ANY}
_MESSAGE = either(obj({"role": _ROLE, **_CONTENT}, {"tool_call_id": ANY}),
                  obj({"role": const("assistant")}, {**_CONTENT, **_CALLS}))  # fmt: skip

# --- plain prompts ---

_TOKEN = integer(0, INT_MAX)
_ONE_PROMPT = either(STRING, ref("PromptObject"), array(either(_TOKEN, STRING), 1))
_PROMPT = said("A text, token ids, both mixed, or several of these.", either(_ONE_PROMPT, array(_ONE_PROMPT, 1)))
_COMPLETION = {"prompt": _PROMPT, **_GENERATION, "logprobs": _TEXT_LOGPROBS}

# --- endpoints that give one answer, without log probabilities ---

_ONE_ANSWER = {"n": const(1), "n_cmpl": const(1), "n_probs": const(0), "logprobs": const(False), "top_logprobs": NULL}

# --- Anthropic's messages ---

_CLAUDE_TEXT = obj({"type": const("text"), "text": STRING})
_CLAUDE_TEXTS = either(STRING, array(_CLAUDE_TEXT))
_REDACTED = obj({"type": const("redacted_thinking")})
_CLAUDE_BLOCKS = {
    "user": (_CLAUDE_TEXT, _REDACTED,
             obj({"type": const("tool_result")}, {"tool_use_id": ANY, "content": optional(_CLAUDE_TEXTS)})),
    "assistant": (_CLAUDE_TEXT, _REDACTED, obj({"type": const("thinking"), "thinking": STRING}),
                  obj({"type": const("tool_use"), "name": STRING}, {"id": ANY, "input": optional({"type": "object"})})),
    "system": (_CLAUDE_TEXT, _REDACTED),
}  # fmt: skip
_CLAUDE_MESSAGE = either(*(obj({"role": const(role), "content": either(STRING, array(either(*blocks)))})
                           for role, blocks in _CLAUDE_BLOCKS.items()))  # fmt: skip
_CLAUDE_TOOL = obj({"name": STRING}, {"type": const("custom", None), "description": ANY, "strict": _STRICT,
                                      "input_schema": optional({"type": "object"})})  # fmt: skip


_JSON_FORMAT = obj({"type": const("json_schema"), "schema": _SCHEMA})


def _empty(value: Any) -> bool:
    return not value


_CLAUDE_PROMPT = {
    **{name: schema for name, schema in _CONVERSATION.items() if name not in ("messages", "tools", "tool_choice")},
    "messages": array(ref("AnthropicMessage")),
    "system": _CLAUDE_TEXTS,
    "tools": array(_CLAUDE_TOOL),
    "tool_choice": either(*(obj(choice, {"disable_parallel_tool_use": optional(_flag("At most one call in an answer."))})
                            for choice in ({"type": const(*anthropic.CHOICES)}, {"type": const("tool"), "name": STRING}))),
    "stop_sequences": _strings("Where an answer ends; these texts are not part of it."),
    "thinking": said("Whether it thinks is the model's own matter; disabled: what it thinks is cut off at once.", obj(
        {"type": const("enabled", "disabled", "adaptive")},
        {"budget_tokens": said("Tokens of a thought at most.", optional(integer(0, INT_MAX)))})),
    "output_config": obj({}, {"format": optional(_JSON_FORMAT)}),
    "output_format": said("The same as the format of output_config, which goes before it.", _JSON_FORMAT),
    **{name: _refused(_empty) for name in anthropic.REFUSED},
    **{name: _ignored() for name in ("metadata", "service_tier", "betas", "anthropic_version", "cache_control")},
}
_CLAUDE = {
    **{name: schema for name, schema in _GENERATION.items() if name != "stop"},
    **_ONE_ANSWER,
    **_CLAUDE_PROMPT,
    "max_tokens": said(f"{anthropic.MAX_TOKENS} if there is none.", _MAX_TOKENS),
}

# --- OpenAI's responses ---

_PART = either(obj({"type": const("input_text", "output_text", "text"), "text": STRING}),
               obj({"type": const("refusal"), "refusal": STRING}))  # fmt: skip
_PARTS = either(STRING, array(_PART))
_ITEM = either(
    obj({"role": const("user", "assistant", "system", "developer"), "content": _PARTS}, {"type": const("message")}),
    obj({"type": const("function_call"), "name": STRING, "arguments": STRING, "call_id": STRING}),
    obj({"type": const("function_call_output"), "output": _PARTS, "call_id": STRING}),
    obj({"type": const("reasoning")}, {"content": optional(array(obj({"text": STRING})))}),
)
_RESPONSE_TOOL = obj({"type": const("function"), "name": STRING},
                     {"description": ANY, "parameters": optional({"type": "object"}), "strict": _STRICT})  # fmt: skip
_RESPONSE_PROMPT = {
    **{name: schema for name, schema in _CONVERSATION.items() if name not in ("messages", "tools", "tool_choice")},
    "tool_choice": either(const("auto", "none", "required", None), obj({"type": const("function"), "name": STRING})),
    "input": either(STRING, array(ref("ResponseItem"), 1)),
    "instructions": STRING,
    "tools": array(_RESPONSE_TOOL),
    "max_output_tokens": said("Tokens of an answer at most.", integer(0, INT_MAX)),
    "text": obj({}, {"format": optional(either(obj({"type": const("text", "json_object")}), _JSON_FORMAT)),
                     "verbosity": const("medium", None)}),
    "reasoning": obj({}, {"effort": said("None: what the model thinks is cut off at once.", const("none", None))}),
    "truncation": const("disabled", None),
    "include": array({"not": const("message.output_text.logprobs")}),
    **{name: _refused(_empty) for name in responses.REFUSED},
    **{name: _ignored() for name in ("store", "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
                                     "client_metadata", "max_tool_calls")},
}  # fmt: skip
_RESPONSE = {
    **{name: schema for name, schema in _GENERATION.items() if name != "max_tokens"},
    **_ONE_ANSWER,
    **_RESPONSE_PROMPT,
}

_TOKENIZE = {
    "content": said("A text, or texts and token ids one after the other.",
                    either(STRING, integer(0), array(either(STRING, integer(0))))),
    "add_special": _flag("Begin as a prompt does."),
    "parse_special": _flag("Whether names of control tokens are these; by default they are."),
    "with_pieces": _flag("Send the text of each token, too."),
}  # fmt: skip

_PROMPT_ONLY = "Fields that say how to answer have no effect."

#: Schemas by name: bodies, and what they are made of.
BODIES: dict[str, Schema] = {
    "ChatMessage": _MESSAGE,
    "ChatTool": either(obj({"type": const("function"), "function": _FUNCTION}), {"type": "object"}),
    "PromptObject": obj({"prompt_string": STRING}, {"multimodal_data": _refused(_empty)}),
    "AnthropicMessage": _CLAUDE_MESSAGE,
    "ResponseItem": _ITEM,
    "ChatRequest": _body(_CHAT, ["messages"]),
    "ChatPrompt": _body(_CONVERSATION, ["messages"], _PROMPT_ONLY),
    "CompletionRequest": _body(_COMPLETION, ["prompt"]),
    "AnthropicRequest": _body(_CLAUDE, ["messages"]),
    "AnthropicPrompt": _body(_CLAUDE_PROMPT, ["messages"], _PROMPT_ONLY),
    "ResponsePrompt": _body(_RESPONSE_PROMPT, ["input"], _PROMPT_ONLY),
    "ResponseRequest": _body(_RESPONSE, ["input"]),
    "TokenizeRequest": _body(_TOKENIZE),
    "DetokenizeRequest": _body({"tokens": array(integer(0))}),
    "SlotFile": said("Not read to erase.", _body({"filename": said(
        "A plain name, without a folder.", {"type": "string", "minLength": 1, "maxLength": 255})}, ["filename"])),
    "PropsRequest": said("Nothing can be changed.", {"type": "object"}),
}  # fmt: skip
