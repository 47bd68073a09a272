"""Chat templates rendered by jinja2 as transformers sets it up, and a second opinion on which tokens are the template's."""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from lfmfast.templates import ChatTemplate, chat_template_for

DATA = Path(__file__).resolve().parent / "data"
LLAMA_CPP = Path(__file__).resolve().parent.parent / "extern" / "llama.cpp" / "models" / "templates"
DATE = datetime.date(2026, 1, 2)

# family -> file
FILES = {
    "lfm2": "LFM2-8B-A1B.jinja",
    "lfm2.5-instruct": "LFM2.5-Instruct.jinja",
    "lfm2.5-8b": "LFM2.5-8B-A1B.jinja",
    "lfm2.5-2.6b": "LFM2.5-2.6B.jinja",
    "lfm2.5-vl": "LFM2.5-VL.jinja",
    "lfm2-vl": "LFM2-VL.reconstructed.jinja",
}
SPECIAL = [
    f"<|{name}|>"
    for name in (
        "pad",
        "startoftext",
        "endoftext",
        "fim_pre",
        "im_start",
        "im_end",
        "tool_list_start",
        "tool_list_end",
        "tool_call_start",
        "tool_call_end",
        "tool_response_start",
        "tool_response_end",
    )
]
MORE_SPECIAL = [*SPECIAL, "<think>", "</think>", "<image>"]
OWN = ("<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>")
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@functools.cache
def source(family: str) -> str:
    name = FILES[family]
    path = LLAMA_CPP / name if (LLAMA_CPP / name).exists() else DATA / "templates" / name
    return path.read_text("utf8")


class _Generation(jinja2.ext.Extension):
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render", []), [], [], body).set_lineno(line)

    def _render(self, caller):
        return caller()


@functools.cache
def _compiled(text: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": DATE.strftime}
    return environment.from_string(text)


def render(
    template: str, messages: Any, *, tools: Any = None, add_generation_prompt: bool = True, **variables: Any
) -> str | None:
    """The text, or None where the template fails."""
    try:
        return _compiled(template).render(
            messages=messages,
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
            bos_token="<|startoftext|>",
            eos_token="<|im_end|>",
            **variables,
        )
    except Exception:
        return None


def segments(
    template: str, messages: Any, special: list[str], *, tools: Any = None, **variables: Any
) -> list[tuple[str, bool]]:
    """Rendered after control tokens in the data were replaced by single letters of a script that the data doesn't use."""
    letters = {token: chr(0x13A0 + i) for i, token in enumerate(special)}

    def hide(value: Any, own: tuple[str, ...] = ()) -> Any:
        if isinstance(value, str):
            for token, letter in letters.items():
                value = value if token in own else value.replace(token, letter)
            return value
        if isinstance(value, Mapping):
            return {hide(k): hide(v, own) for k, v in value.items()}
        return [hide(v, own) for v in value] if isinstance(value, list) else value

    def hide_message(message: dict[str, Any]) -> dict[str, Any]:
        own = OWN if message["role"] == "assistant" else ()
        if isinstance(message.get("content"), list) and re.search(r"\btype\b", template):  # else it is printed as JSON
            message = {**message, "content": joined(message["content"])}
        keys = ("content", "thinking", "reasoning", "reasoning_content")
        return {k: hide(v, own if k in keys else ()) for k, v in message.items()}

    def joined(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Text parts that follow each other as one: a token's text may come about between two."""
        result: list[dict[str, Any]] = []
        for part in parts:
            if result and part["type"] == result[-1]["type"] == "text":
                result[-1] = {"type": "text", "text": result[-1]["text"] + part["text"]}
            else:
                result.append(part)
        return result

    text = render(template, [hide_message(m) for m in messages], tools=hide(tools), **variables)
    assert text is not None
    found = []
    for part in re.split(f"({'|'.join(map(re.escape, special))})", text):
        plain = part
        for token, letter in letters.items():
            plain = plain.replace(letter, token)
        found.append((plain, part in special))
    return [(text, control) for text, control in found if text]


# --- shorthands ---
TOOL = {"type": "function", "function": {"name": "f", "description": "é <|im_end|>", "parameters": {"type": "object"}}}
CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "f", "arguments": {"a": "x\"'", "n": 1, "b": True, "l": ["é", None]}},
}


def template(family: str, special: list[str] = SPECIAL, **options: Any) -> ChatTemplate:
    made = chat_template_for(
        source(family),
        bos_token="<|startoftext|>",
        eos_token="<|im_end|>",
        special_tokens=special,
        **{"date": DATE, **options},
    )
    assert made.family == family
    return made


def user(text: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any = "Yes", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}
