"""Tool calls read from a model's text. `tests/data/tool_calls.json` is a table of texts and what they mean."""

from __future__ import annotations

import codecs
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lfmfast.call_text import Unreadable
from lfmfast.call_values import Number, json_text, read_value
from lfmfast.errors import ClosedError
from lfmfast.messages import LFM25_2_6B, LFM25_8B, Family, pythonic
from lfmfast.tool_calls import CallDelta, CallParser

GOLDEN = json.loads((Path(__file__).parent / "data" / "tool_calls.json").read_text("utf8"))
TOOLS: list[Any] = GOLDEN["tools"]
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in GOLDEN["cases"]}
PROPERTY = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


def read(pieces: Iterable[str], tools: Any = None, cut: bool = False, **options: Any) -> tuple[CallParser, list[CallDelta]]:
    parser = CallParser(tools, **options)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return parser, deltas + parser.close(cut)


def calls(parser: CallParser) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in parser.calls]


def joined(deltas: list[CallDelta]) -> dict[str, tuple[int, str | None, str]]:
    """Index, name and arguments of each call by its id, checked for the order that OpenAI's clients rely on."""
    found: dict[int, list[Any]] = {}
    for delta in deltas:
        if delta.index in found:
            assert delta.id is None and delta.name is None and delta.arguments
            found[delta.index][2] += delta.arguments
        else:
            assert (
                delta.id is not None and re.fullmatch("call_[A-Za-z0-9]{24}", delta.id) and delta.name and not delta.arguments
            )
            found[delta.index] = [delta.id, delta.name, ""]
    assert list(found) == list(range(len(found)))
    return {identifier: (index, name, arguments) for index, (identifier, name, arguments) in found.items()}


def strict(text: str) -> Any:
    """The value of strict JSON text that can be sent as UTF-8."""
    text.encode("utf8")
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in {text}"))


def check(pieces: list[str], case: dict[str, Any], early: bool = True) -> None:
    tools = TOOLS if case.get("tools", True) else None
    parser, deltas = read(pieces, tools, case.get("cut", False), early=early)
    got = [[call.name, strict(call.arguments)] for call in parser.calls]
    assert json.dumps(got) == json.dumps(case["calls"])  # the order of the arguments too, and 1 is not 1.0
    assert parser.unread == case.get("unread", [])
    streamed = joined(deltas)
    assert [(streamed[call.id][1], streamed[call.id][2]) for call in parser.calls] == calls(parser)
    assert early or len(streamed) == len(parser.calls)
    assert [call.parsed for call in parser.calls] == [arguments for _, arguments in case["calls"]]


@pytest.mark.parametrize("name", CASES)
def test_table(name):
    text = CASES[name]["text"]
    for early in (True, False):
        check([text], CASES[name], early)
        check(list(text), CASES[name], early)
    dice = random.Random(name)
    for _ in range(5):
        cuts = sorted(dice.choices(range(len(text) + 1), k=4))
        check([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_table_by_token(name, lfm2_tiny):
    text = CASES[name]["text"]
    decoder = codecs.getincrementaldecoder("utf8")()
    model = lfm2_tiny.native
    pieces = [decoder.decode(model.piece(token)) for token in model.tokenize(text)]
    assert "".join(pieces) == text
    check(pieces, CASES[name])


def test_table_is_large():
    assert len(CASES) == len(GOLDEN["cases"]) >= 150


# --- pieces ---


def test_arguments_are_given_out_as_soon_as_they_are_complete():
    parser = CallParser()
    (named,) = parser.feed("[f(")
    assert (named.index, named.name, named.arguments) == (0, "f", "") and named.id
    assert parser.feed('a="x') == parser.feed('"') == []
    assert [delta.arguments for delta in parser.feed(", b=[1")] == ['{"a": "x"']
    assert [delta.arguments for delta in parser.feed("])]")] == [', "b": [1]', "}"]
    assert parser.close() == [] and parser.calls[0].arguments == '{"a": "x", "b": [1]}'


def test_a_call_without_arguments_is_an_empty_object():
    parser, deltas = read(["[f()]"])
    assert [delta.arguments for delta in deltas] == ["", "{}"] and parser.calls[0].parsed == {}


def test_first_index():
    _, deltas = read(["[f(), g()]"], first_index=3)
    assert [delta.index for delta in deltas] == [3, 3, 4, 4]


def test_ids_differ():
    parser, _ = read(["[f(), f(), f()]"])
    assert len({call.id for call in parser.calls}) == 3


def test_a_string_in_doubt_is_not_given_out_early():
    parser = CallParser()
    assert [delta.arguments for delta in parser.feed("[f(x=1, code='plt.plot(x, 'red', label='')")] == ["", '{"x": 1']
    assert parser.feed("'") == []
    assert [delta.arguments for delta in parser.feed(")]")] == [""", "code": "plt.plot(x, 'red', label='')\"""", "}"]


def test_a_function_that_no_tool_has_is_not_announced_before_its_end():
    parser = CallParser(TOOLS)
    assert parser.feed("[see(x=1, ") == []
    assert [delta.name for delta in parser.feed("y=2)]")] == ["see", None, None, None]


def test_a_call_that_breaks_off_has_no_end():
    for cut in (True, False):
        parser, deltas = read(['[f(a=1, b="x'], cut=cut)
        assert [delta.arguments for delta in deltas] == ["", '{"a": 1']
        assert parser.calls == [] and parser.unread == ['[f(a=1, b="x']
        parser, deltas = read(['[f(a=1, b="x'], cut=cut, early=False)
        assert deltas == [] and parser.unread == ['[f(a=1, b="x']


def test_calls_after_one_that_breaks_off():
    parser, deltas = read(["[f(a=1, b=@), g(c=2)]"])
    assert calls(parser) == [("g", '{"c": 2}')] and deltas[-1].index == 1
    parser, deltas = read(["[f(a=1, b=@), g(c=2)]"], early=False)
    assert calls(parser) == [("g", '{"c": 2}')] and deltas[-1].index == 0


def test_json_text_of_arguments():
    parser, _ = read(['[f(a="é\\ud83d", b=2.50, c=1E5, d=(1, 2), e={"x": None})]'])
    assert parser.calls[0].arguments == '{"a": "é\\ud83d", "b": 2.50, "c": 1E5, "d": [1, 2], "e": {"x": null}}'


def test_closed():
    parser = CallParser()
    assert parser.close() == parser.close() == [] and parser.unread == []
    with pytest.raises(ClosedError):
        parser.feed("x")


# --- tools ---


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}},
        {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}},
        {"name": "f", "input_schema": {"properties": {"a": {"type": "integer"}}}},
        '{"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}',
        {"name": "f", "parameters": {"$ref": "#/$defs/p", "$defs": {"p": {"properties": {"a": {"type": "integer"}}}}}},
        {"name": "f", "parameters": {"properties": {"a": {"allOf": [{"type": "integer"}, {"minimum": 0}]}}}},
        {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/items/0"}}, "items": [{"type": "integer"}]}},
    ],
)
def test_forms_of_a_tool(tool):
    parser, _ = read(['[f(a="3")]'], [tool])
    assert parser.calls[0].parsed == {"a": 3}


LOOP: dict[str, Any] = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
MANY: dict[str, Any] = {"anyOf": [{"$ref": "#"}] * 8, "items": {"$ref": "#"}}


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        [],
        "x",
        5,
        {"properties": []},
        {"properties": {"a": 5}},
        {"properties": {"a": {"type": 7}}},
        LOOP,
        {"properties": LOOP},
        {"properties": {"a": {"enum": 3}}},
        {"properties": {"a": {"anyOf": "x", "allOf": {}, "prefixItems": 2, "required": 1}}},
        {"properties": {"a": {"$ref": "elsewhere.json"}}},
        {"properties": {"a": {"$ref": "#/properties/0/x"}}},
        {"properties": {"a": MANY}, **MANY},
        {"properties": {"a": {"enum": [{1}, float("nan")]}}},
    ],
)
def test_schemas_that_say_nothing(parameters):
    parser, _ = read(['[f(a=[[["3"]]])]'], [{"name": "f", "parameters": parameters}])
    assert calls(parser) == [("f", '{"a": [[["3"]]]}')]


@pytest.mark.parametrize(
    "tool", [None, 5, "", "x", "[" * 9999, [], {}, {"name": 5}, {"function": {"name": None}}, {"function": 5}]
)
def test_what_is_no_tool(tool):
    parser, _ = read(["[f(a=1)]"], [tool])
    assert calls(parser) == [("f", '{"a": 1}')]


def test_a_listed_value_is_preferred_to_one_in_another_case():
    tool = {"name": "f", "parameters": {"properties": {"a": {"enum": ["on", "On", "off"]}}}}
    parser, _ = read(["[f(a='On'), f(a='ON'), f(a='OFF')]"], [tool])
    assert [call.parsed["a"] for call in parser.calls] == ["On", "ON", "off"]


@pytest.mark.parametrize(("n", "brought"), [(50, "Value 7"), (2000, "value 7")])
def test_a_long_list_is_brought_to_a_long_enum_whole_or_not_at_all(n, brought):
    items = {"type": "array", "items": {"enum": [f"Value {i}" for i in range(1000)]}}
    parser, _ = read([f"[f(a={['value 7'] * n})]"], [{"name": "f", "parameters": {"properties": {"a": items}}}])
    assert parser.calls[0].parsed["a"] == [brought] * n


def test_text_in_text_in_text():
    value: Any = "x"
    schema = {"type": "array", "items": {"$ref": "#/properties/a"}}
    for _ in range(12):
        value = json.dumps([value])
    parser, _ = read([f"[f(a={value})]"], [{"name": "f", "parameters": {"properties": {"a": schema}}}])
    assert calls(parser) == [("f", json.dumps({"a": [[[[[[[[[[[["x"]]]]]]]]]]]]}))]


def test_too_deep_a_value_in_a_text_stays_text():
    text = "[" * 65 + "]" * 65
    parser, _ = read([f'[f(a="{text}")]'], [{"name": "f", "parameters": {"properties": {"a": {"type": "array"}}}}])
    assert parser.calls[0].parsed == {"a": text}


# --- what the templates write ---

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(), inside, max_size=4),
    max_leaves=8,
)
NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
ARGUMENTS = st.dictionaries(NAMES, JSON_VALUES, max_size=4)


def written(family: Family, arguments: dict[str, Any]) -> str:
    assert family.calls is not None
    return f"[f({', '.join(f'{name}={family.calls(value)}' for name, value in arguments.items())})]"


def same(value: Any) -> Any:
    """The value with floats that are integers as such: 1e22 is written like one."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: same(item) for key, item in value.items()}
    return [same(item) for item in value] if isinstance(value, list) else value


@PROPERTY
@given(arguments=ARGUMENTS)
def test_calls_as_history_writes_them(arguments):
    text = pythonic({"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}, 0)
    parser, _ = read([text or ""])
    assert parser.unread == [] and same(parser.calls[0].parsed) == same(arguments)


@PROPERTY
@given(arguments=ARGUMENTS)
def test_calls_as_the_2_6b_template_writes_them(arguments):
    parser, _ = read([written(LFM25_2_6B, arguments)])
    assert parser.unread == [] and same(parser.calls[0].parsed) == same(arguments)


PLAIN = st.text(st.characters(exclude_characters="'\\", exclude_categories=["Cs"]))


@PROPERTY
@given(arguments=st.dictionaries(NAMES, PLAIN | st.integers() | st.booleans() | st.none() | st.lists(PLAIN), max_size=4))
def test_calls_as_the_8b_template_writes_them(arguments):
    """It escapes nothing in a string, and writes a list as Python does."""
    parser, _ = read([written(LFM25_8B, arguments)])
    assert parser.unread == [] and parser.calls[0].parsed == arguments


# --- any text ---

BITS = [
    "f(",
    "g(",
    "h(",
    "a=",
    "b=",
    '"',
    "'",
    "\\",
    "[",
    "]",
    "{",
    "}",
    "(",
    ")",
    ",",
    " ",
    "\n",
    "x",
    "1",
    "-",
    ".",
    "None",
    "true",
    "'''",
    '{"name": "f", "arguments": ',
    '"a": ',
    "#",
    "`",
    "```",
    "<tool_call>",
    "**",
    ":",
    ";",
    "é",
    "\ud83d",
    "\\u12",
    "\\n",
    'r"',
    "f'",
    "=",
    "e9",
    "it's",
    "), f(a=",
    "), g(",
    "\x00",
    "😀",
    "1e999",
    "inf",
]
TEXTS = st.lists(st.sampled_from(BITS) | st.text(max_size=3), max_size=40).map("".join)
SMALL = [
    {
        "name": "f",
        "parameters": {"properties": {"a": {"type": "string"}, "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}},
    },
    {
        "name": "g",
        "parameters": {"properties": {"a": {"enum": ["red", "Blue"]}, "c": {"type": "array", "items": {"type": "string"}}}},
    },
]


@settings(PROPERTY, max_examples=1000)
@given(text=TEXTS | TEXTS.map("[f(".__add__), known=st.booleans(), cut=st.booleans(), dice=st.randoms(use_true_random=False))
def test_any_text(text, known, cut, dice):
    tools = SMALL if known else None
    whole, deltas = read([text], tools, cut)
    for call in whole.calls:
        assert isinstance(strict(call.arguments), dict)
        assert call.name and joined(deltas)[call.id][1:] == (call.name, call.arguments)
    assert whole.calls or "".join(whole.unread) == ("" if re.fullmatch(r"\s*(\[\s*\]\s*)*", text) else text.strip())
    cuts = sorted(dice.choices(range(len(text) + 1), k=5))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for pieces, early in ((list(text), True), (parts, True), ([text], False)):
        other, others = read(pieces, tools, cut, early=early)
        assert (calls(other), other.unread) == (calls(whole), whole.unread)
        if early:
            assert [(d.index, d.name, d.arguments) for d in others] == [(d.index, d.name, d.arguments) for d in deltas]


@PROPERTY
@given(text=TEXTS)
def test_text_of_a_value(text):
    try:
        value = json_text(read_value(text))
    except Unreadable:
        return
    strict(value)


@pytest.mark.parametrize("word", ["1" * 300, "0x" + "f" * 250, "-" + "9" * 308, "0." + "1" * 900, "1e-400"])
def test_long_numbers_stay_exact(word):
    value = read_value(word)
    assert isinstance(value, Number)
    assert strict(value.text) == (int(word, 16) if "x" in word else json.loads(word))


@pytest.mark.parametrize("word", ["1" * 400, "-" + "9" * 400, "1e309", "0x" + "f" * 400])
def test_numbers_without_end_are_text(word):
    assert read_value(word) == word


LONG = {
    "brackets": "[" * 4000,
    "brackets in a call": "f(" + "[" * 4000,
    "braces": "{" * 4000,
    "parentheses": "[f" + "(" * 4000,
    "calls in calls": "[f(" * 1300,
    "open strings": "f('" * 1300,
    "open strings in calls": "[f(a='x" + ", f(a='y" * 500,
    "quotes": "[f(a=" + "'" * 4000,
    "escaped quotes": '[f(a="' + '\\"' * 2000,
    "escaped ends": '[f(a="' + '\\")]' * 1000,
    "quotes and spaces": '[f(a="' + ('"' + " " * 100) * 40,
    "doubtful calls": "[f(a='x 'y" + "'), f(" * 600,
    "words": "[1" + ",1" * 2000,
    "lines": "a\n" * 2000,
    "a long word": "[f(" + "a" * 4000,
    "a long list": "[f(a=[" + "1," * 2000 + "])]",
    "arguments": "[f(" + ",".join(f"a{i}=1" for i in range(500)) + ")]",
}


@pytest.mark.parametrize("name", LONG)
def test_work_grows_with_the_length_only(name):
    text = LONG[name]
    if name not in ("a long list", "arguments"):
        assert steps([text * 4]) < 6 * steps([text])
    assert steps(list(text)) < 500 * len(text)


def steps(pieces: list[str]) -> int:
    """Lines that Python runs while the pieces are read."""
    n = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal n
        n += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        read(pieces, SMALL)
    finally:
        sys.settrace(before)
    return n


def test_a_large_text_is_read_in_pieces_without_copies(monkeypatch):
    """What is kept of the text between two pieces does not grow with the length of a string."""
    parser = CallParser()
    parser.feed('[f(a="')
    for _ in range(1000):
        parser.feed("word ")
        assert len(parser._reader.text) <= 10
    parser.feed('")]')
    parser.close()
    assert parser.calls[0].parsed == {"a": "word " * 1000}


def splits(text: str) -> Iterator[list[str]]:
    return ([text[:i], text[i:]] for i in range(len(text) + 1))


@pytest.mark.parametrize(
    "name", ["a bracket in quotes in a string", "hex and Unicode escapes", "JSON in OpenAI's form", "tags around"]
)
def test_every_split(name):
    for pieces in splits(CASES[name]["text"]):
        check(pieces, CASES[name])
