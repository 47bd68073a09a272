"""What a reply must look like: a grammar that the engine holds the tokens to.

A `Constraint` is checked when it is made: what can't be enforced exactly is refused there, never ignored while tokens are
generated. The engine runs it on llguidance (`llg_new_constraint_any` of its C API takes `kind` and `text`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lfmfast.errors import ParameterError

__all__ = ["Constraint", "from_gbnf", "from_json_schema", "from_regex", "from_response_format"]

#: The longest text of a constraint, in bytes of UTF-8.
MAX_BYTES = 1 << 20

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


def _checked(name: str, constraint: Constraint) -> Constraint:
    """The constraint, if llguidance compiles it."""
    from llguidance import LLMatcher

    make = {"json_schema": LLMatcher.grammar_from_json_schema, "lark": LLMatcher.grammar_from_lark,
            "regex": LLMatcher.grammar_from_regex}[constraint.kind]  # fmt: skip
    failed, messages = LLMatcher.validate_grammar_with_warnings(make(constraint.text))
    if failed or messages:
        raise ParameterError(f"{name} can't be enforced: {messages[0].splitlines()[0]}")
    return constraint


def from_json_schema(schema: Mapping[str, Any] | bool | None) -> Constraint:
    """JSON that is valid for a schema. None: any JSON object."""
    if schema is None:
        schema = {"type": "object"}
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return _checked("the JSON schema", Constraint("json_schema", json.dumps(schema, ensure_ascii=False)))


def from_gbnf(text: str, root: str = "root") -> Constraint:
    """What a grammar in llama.cpp's GBNF describes."""
    check_text("the grammar", text)
    from llguidance.gbnf_to_lark import gbnf_to_lark

    return _checked("the grammar", Constraint("lark", gbnf_to_lark(text)))


def from_regex(pattern: str) -> Constraint:
    """A whole reply that matches a regular expression, without look-around and back references."""
    check_text("the pattern", pattern)
    return _checked("the pattern", Constraint("regex", pattern))


def from_response_format(response_format: Mapping[str, Any] | None) -> Constraint | None:
    """OpenAI's `response_format`: text (None), json_object (llama.cpp's `schema` in it too), json_schema."""
    if response_format is None:
        return None
    kind = response_format.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return from_json_schema(response_format.get("schema"))
    if kind == "json_schema":
        inner = response_format.get("json_schema")
        if not isinstance(inner, Mapping) or "schema" not in inner:
            raise ParameterError("response_format.json_schema must be an object with a schema in it")
        return from_json_schema(inner["schema"])
    raise ParameterError(f"response_format.type must be text, json_object or json_schema, not {kind!r}")
