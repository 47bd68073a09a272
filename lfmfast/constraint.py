"""What a reply must look like: a grammar that the engine holds the tokens to.

A `Constraint` is checked when it is made: what can't be enforced exactly is refused there, never ignored while tokens are
generated. The engine runs it on llguidance (`llg_new_constraint_any` of its C API takes `kind` and `text`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lfmfast.ecma_pattern import translated
from lfmfast.errors import ParameterError
from lfmfast.gbnf import gbnf_to_lark
from lfmfast.json_schema import normalized

__all__ = ["Constraint", "from_gbnf", "from_json_schema", "from_regex", "from_response_format"]

#: The longest text of a constraint, in bytes of UTF-8.
MAX_BYTES = 1 << 20

# How JSON is written. White space in plenty would let a model that has lost its way go on for ever; escapes of the form \uXXXX
# would let a key that has a schema of its own pass for another one.
_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
JSON_STYLE = {"whitespace_pattern": r"[\x20\t]{1,4}|\r?\n[\x20\t]{0,40}", **_ESCAPES}
# The same within a call, where Python's style is a space behind commas and colons.
COMPACT_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?", **_ESCAPES}

Kind = Literal["json_schema", "lark", "regex"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar for the reply, checked and ready for the engine.

    Parameters
    ----------
    kind : str
        How `text` is written: "json_schema", "lark" or "regex", in llguidance's dialects.
    text : str
        The schema, grammar or pattern.
    lazy : bool
        False: the whole reply matches. True: the reply is free until the control token that the grammar begins with.

    Raises
    ------
    ParameterError
        When it can't be compiled. The message has llguidance's reason.

    Examples
    --------
    >>> from_regex("yes|no")
    Constraint(kind='regex', text='yes|no', lazy=False)
    """

    kind: Kind
    text: str
    lazy: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("json_schema", "lark", "regex"):
            raise ParameterError(f"kind must be json_schema, lark or regex, not {self.kind!r}")
        check_text("the grammar", self.text)


def check_text(name: str, text: str) -> None:
    """Raise ParameterError for a text that can't go to the engine: too long, a NUL, a lone surrogate."""
    try:
        n_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise ParameterError(f"{name} has a lone surrogate at character {error.start}") from None
    if n_bytes > MAX_BYTES:
        raise ParameterError(f"{name} has {n_bytes:,} bytes; the limit is {MAX_BYTES:,}")
    if "\0" in text:
        raise ParameterError(f"{name} has a NUL at character {text.index(chr(0))}")


def compiled(name: str, kind: Kind, text: str, lazy: bool = False) -> Constraint:
    """The constraint, if llguidance compiles it; `name` is what messages call it."""
    check_text(name, text)
    from llguidance import LLMatcher  # some ten milliseconds that nobody pays who asks for no constraint

    if kind == "json_schema":
        grammar = LLMatcher.grammar_from_json_schema(text)
    else:
        grammar = LLMatcher.grammar_from_lark(text) if kind == "lark" else LLMatcher.grammar_from_regex(text)
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if failed or any(not text.startswith("no tokenizer") for text in messages):  # control tokens are looked up by the engine
        raise ParameterError(f"{name} can't be enforced: {messages[0].strip().splitlines()[0][:500]}")
    return Constraint(kind, text, lazy)


def from_json_schema(schema: Mapping[str, Any] | bool | None) -> Constraint:
    """JSON that is valid for a schema.

    Parameters
    ----------
    schema : mapping, bool or None
        JSON Schema, draft 4 to 2020-12; None is any JSON object. `lfmfast.json_schema` says what the reply may be narrower in.

    Raises
    ------
    ParameterError
        For a keyword that is malformed or can't be enforced, with its place, and for a schema that no JSON fits.

    Examples
    --------
    >>> from_json_schema({"type": "array", "uniqueItems": True})
    Traceback (most recent call last):
    lfmfast.errors.ParameterError: the JSON schema at #: uniqueItems can't be enforced
    """
    enforced = normalized({"type": "object"} if schema is None else schema)
    text = json.dumps({**enforced, "x-guidance": JSON_STYLE}, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return compiled("the JSON schema", "json_schema", text)


def from_gbnf(text: str, root: str = "root") -> Constraint:
    """What a grammar in llama.cpp's GBNF describes.

    Parameters
    ----------
    text : str
        The grammar. `<token>` and `<[id]>` are single tokens of the model, as in llama.cpp; `!<[id]>` is any other one.
    root : str
        The rule that the whole reply matches.

    Raises
    ------
    ParameterError
        With the line of what can't be read.
    """
    check_text("the grammar", text)
    return compiled("the grammar", "lark", gbnf_to_lark(text, root))


def from_regex(pattern: str) -> Constraint:
    """A whole reply that matches a regular expression.

    Parameters
    ----------
    pattern : str
        In the dialect of JSON Schema (ECMA-262), without look-around, back references and word boundaries.
    """
    check_text("the pattern", pattern)
    return compiled("the pattern", "regex", translated(pattern))


def from_response_format(response_format: Mapping[str, Any] | None) -> Constraint | None:
    """OpenAI's `response_format`: text (no constraint), json_object (with llama.cpp's `schema` too) or json_schema."""
    if response_format is None:
        return None
    if not isinstance(response_format, Mapping):
        raise ParameterError(f"response_format must be an object, not {type(response_format).__name__}")
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return from_json_schema(response_format.get("schema"))
    if kind == "json_schema":
        inner = response_format.get("json_schema", response_format)  # llama.cpp also takes the schema beside the type
        if not isinstance(inner, Mapping) or inner.get("schema") is None:
            raise ParameterError("response_format.json_schema must be an object with a schema in it")
        return from_json_schema(inner["schema"])
    raise ParameterError(f"response_format.type must be text, json_object or json_schema, not {kind!r}")
