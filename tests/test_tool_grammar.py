"""Grammars for tool calls: what they accept, and that everything they accept is read back as a valid call."""

from __future__ import annotations

import itertools
import json
import random
import re
from decimal import Decimal

import pytest
from grammar_walk import accepts, walk
from jsonschema import Draft202012Validator
from schemas import random_schema

from lfmfast.errors import ParameterError
from lfmfast.tool_calls import CallParser
from lfmfast.tool_grammar import tool_constraint

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"


def tool(name, properties=None, required=(), **more):
    parameters = {"type": "object", "properties": properties or {}, "required": list(required), **more}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


NEXT = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
NODE = {"type": "object", "properties": {"v": {"type": "integer"}, "next": NEXT}, "required": ["v"]}
TAGS = {"type": "array", "items": {"type": "string"}}
WEATHER = tool("get_weather", {
    "city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 14}, "hourly": {"type": "boolean"},
    "unit": {"enum": ["C", "F", "it's", 'a "b"', 1, None, True]}}, ["city"])  # fmt: skip
SEARCH = tool("db.search", {
    "filter": {"type": "object", "properties": {"tags": TAGS, "deep": {"type": "boolean"}}},
    "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]}, "tree": {"$ref": "#/$defs/node"}, "any": {},
    "code": {"type": "string", "pattern": "^[A-Z]{2}$"}, "short": {"type": "string", "minLength": 1, "maxLength": 3}},
    **{"$defs": {"node": NODE}})  # fmt: skip
TOOLS = [WEATHER, SEARCH, tool("now"), {"name": "bare"}, {"type": "function", "function": {"name": "empty", "parameters": {}}}]

ACCEPTED = [
    '[get_weather(city="Paris")]',
    "[get_weather(city='Paris')]",
    r"""[get_weather(city='it\'s "x"\n', days=3)]""",
    r'[get_weather(city="it\'s")]'.replace("\\", ""),
    '[get_weather(days=14, city="é😀", hourly=True)]',
    '[get_weather(hourly=false,unit="C",city="",days=1)]',
    "[get_weather(city='x', unit='it\\'s')]",
    "[get_weather(city='x', unit='a \"b\"')]",
    r'[get_weather(city="x", unit="a \"b\"")]',
    '[get_weather(city="x", unit=1)]',
    '[get_weather(city="x", unit=None)]',
    '[get_weather(city="x", unit=null)]',
    '[get_weather(city="x", unit=True)]',
    '[get_weather(city="a)]<x>, b=(")]',
    "[now()]",
    "[bare(), empty(), now()]",
    "[now(),now()]",
    "[db.search()]",
    '[db.search(filter={"tags": ["a", "b"], "deep": true})]',
    '[db.search(filter={"tags":[],"deep":false}, limit=-2.5e3)]',
    "[db.search(limit=None, any=None)]",
    '[db.search(tree={"v": 1, "next": {"v": 2, "next": null}})]',
    "[db.search(any='x'), db.search(any=[1, {\"a\": null}]), db.search(any=True)]",
    '[db.search(code="AB", short=\'é\')]',
    '[get_weather(city="x"), db.search(limit=1)]',
]
REFUSED = [
    "[]", "get_weather(city='x')", "[get_weather()]", "[get_weather(days=3)]", '[get_weather(city="x", city="y")]',
    '[get_weather(city="x",)]', '[get_weather(city="x" days=3)]', '[get_weather(city="x", days=15)]',
    '[get_weather(city="x", days=0)]',
    '[get_weather(city="x", days=2.5)]', '[get_weather(city="x", unit="K")]', '[get_weather(city="x", unit=2)]',
    '[get_weather(city="x", unit=False)]', '[get_weather(city=x)]', "[get_weather(city='x\"]", '[get_weather(city=None)]',
    '[get_weather(city="x", other=1)]', '[get_weather(city="x\n")]', "[unknown()]", "[now(x=1)]", "[now()] ", " [now()]",
    "[now() , now()]",
    "[now(), ]", "[db.search(code='AB')]", '[db.search(code="ABC")]', "[db.search(short='')]", "[db.search(short='abcd')]",
    "[db.search(tree={})]", '[db.search(filter=[1])]', "[db.search(limit=True)]", '[db.search(limit="1")]', "[db_search()]",
    '[{"name": "now", "arguments": {}}]',
]  # fmt: skip


@pytest.mark.parametrize("text", ACCEPTED)
def test_accepted_calls_are_read_back(text):
    assert accepts(tool_constraint(TOOLS), f"{OPEN}{text}{CLOSE}")
    parser = CallParser(TOOLS)
    parser.feed(text)
    parser.close()
    assert parser.calls and not parser.unread


@pytest.mark.parametrize("text", REFUSED)
def test_refused_calls(text):
    assert not accepts(tool_constraint(TOOLS), f"{OPEN}{text}{CLOSE}")


def test_the_tokens_around_it():
    constraint = tool_constraint(TOOLS)
    assert constraint.kind == "lark" and not constraint.lazy and tool_constraint(TOOLS, lazy=True).lazy
    for text in ("[now()]", f"{OPEN}[now()]", f"[now()]{CLOSE}", f"x{OPEN}[now()]{CLOSE}", f"{OPEN}[now()]{CLOSE}x"):
        assert not accepts(constraint, text)
    plain = tool_constraint(TOOLS, open="<call>", close="</call>", marked=False)
    assert accepts(plain, "<call>[now()]</call>") and not accepts(plain, f"{OPEN}[now()]{CLOSE}")
    assert accepts(tool_constraint(TOOLS, open="", close=""), "[now()]")


def test_one_call_only_and_one_tool_only():
    one = tool_constraint(TOOLS, parallel=False)
    assert accepts(one, f"{OPEN}[now()]{CLOSE}") and not accepts(one, f"{OPEN}[now(), now()]{CLOSE}")
    named = tool_constraint(TOOLS, name="bare")
    assert accepts(named, f"{OPEN}[bare(), bare()]{CLOSE}") and not accepts(named, f"{OPEN}[now()]{CLOSE}")


def test_every_order_and_choice_of_arguments():
    names = ["a", "b", "c", "d"]
    constraint = tool_constraint([tool("f", {name: {"type": "integer"} for name in names}, ["b", "d"])])
    for size in range(6):
        for given in itertools.product(names, repeat=size):
            text = f"{OPEN}[f({', '.join(f'{name}=1' for name in given)})]{CLOSE}"
            expected = len(set(given)) == size and {"b", "d"} <= set(given)
            assert accepts(constraint, text) == expected, text


@pytest.mark.parametrize("n", [20, 63, 64, 65, 200])
def test_many_arguments(n):
    names = [f"argument_{at}" for at in range(n)]
    constraint = tool_constraint([tool("f", {name: {"type": "boolean"} for name in names}, names[::3])])

    def call(given):
        return f"{OPEN}[f({', '.join(f'{name}=True' for name in given)})]{CLOSE}"

    in_order = names[::3] + [name for name in names if name not in names[::3]]  # beyond 64: only so, the optional ones behind
    assert accepts(constraint, call(in_order)) and accepts(constraint, call(names[::3]))
    assert accepts(constraint, call([*names[::3], names[-2]])) or names[-2] in names[::3]
    assert not accepts(constraint, call(in_order[1:])) and not accepts(constraint, call([*in_order, names[0]]))
    if n <= 64:
        rng = random.Random(n)
        for _ in range(20):
            given = rng.sample(names, n)
            assert accepts(constraint, call(given)) and not accepts(constraint, call([*given, names[0]]))


def test_names():
    properties = {name: {"type": "integer"} for name in ("from", "class", "user-name", "a.b", "größe", "$x/y:1")}
    constraint = tool_constraint([tool("a-b.c_D1", properties)])
    text = "[a-b.c_D1(from=1, class=2, user-name=3, a.b=4, größe=5, $x/y:1=6)]"
    assert accepts(constraint, f"{OPEN}{text}{CLOSE}")
    for name in ("a b", "a=b", 'a"', "a)", "", "1a", "a,b", "a\n"):
        with pytest.raises(ParameterError, match=r"tool 'f'.*argument name"):
            tool_constraint([tool("f", {name: {}})])
    for name in ("", "a b", "f(", "1f", 'f"', 3, None):
        with pytest.raises(ParameterError, match=r"tools\[1\].*name"):
            tool_constraint([tool("f"), tool(name)])


@pytest.mark.parametrize(("tools", "message"), [
    ([], "tools"), ("f", "tools"), ({}, "tools"), ([3], r"tools\[0\]"), ([{"type": "function", "function": 3}], r"tools\[0\]"),
    ([tool("f", {"a": {"not": {}}})], "tool 'f'.*properties/a.*not"), ([tool("f", {"a": {"type": "txt"}})], "tool 'f'.*type"),
    ([{"name": "f", "parameters": {"type": "string"}}], "tool 'f'.*object"), ([{"name": "f", "parameters": 3}], "tool 'f'"),
    ([tool("f", {"a": {}}, anyOf=[{"required": ["a"]}])], "tool 'f'.*anyOf"),
    ([tool("f", {"a": False}, ["a"])], "tool 'f'.*'a'"),
    ([tool("f", {"a": {"minLength": 3, "maxLength": 2}})], "tool 'f'.*properties/a.*minLength"),
    ([tool("f")] * 1000, "512"), ([tool("f", {f"a{n}": {} for n in range(5000)})], "tool 'f': 5,000 arguments.*200"),
    ([tool("f", {"a": {"type": "integer", "minimum": 3, "maximum": 2}})], "tool 'f': the argument 'a'.*minimum"),
])  # fmt: skip
def test_tools_that_are_refused(tools, message):
    with pytest.raises(ParameterError, match=message):
        tool_constraint(tools)


def test_an_unknown_name():
    with pytest.raises(ParameterError, match=r"no tool 'x' \(known: get_weather, db.search"):
        tool_constraint(TOOLS, name="x")


def test_parameters_behind_a_reference_and_required_ones_without_a_schema():
    arguments = {"type": "object", "properties": {"n": {"$ref": "#/$defs/node"}}}
    parameters = {"$ref": "#/$defs/args", "$defs": {"args": arguments, "node": NODE}}
    constraint = tool_constraint([{"name": "f", "parameters": parameters}])
    assert accepts(constraint, f'{OPEN}[f(n={{"v": 1, "next": {{"v": 2}}}})]{CLOSE}')
    constraint = tool_constraint([tool("f", {}, ["x"], additionalProperties={"type": "integer"})])
    assert accepts(constraint, f"{OPEN}[f(x=1)]{CLOSE}") and not accepts(constraint, f"{OPEN}[f()]{CLOSE}")


def test_data_that_looks_like_a_reference():
    odd = {"enum": [{"$ref": "#/$defs/none"}, {"$ref": 3}]}
    constraint = tool_constraint([tool("f", {"a": odd})])
    assert accepts(constraint, f'{OPEN}[f(a={{"$ref": "#/$defs/none"}})]{CLOSE}')


def test_random_calls_are_read_back_and_valid():
    """What a grammar allows, the parser reads, and the arguments fit the tool's schema."""
    n_calls = 0
    for seed in range(120):
        rng = random.Random(seed)
        properties = {name: random_schema(rng) for name in rng.sample(["a", "b", "c", "d"], rng.randint(1, 4))}
        shared = {"n": properties[next(iter(properties))].pop("$defs")["n"]}
        for schema in properties.values():
            schema.pop("$defs", None)
        tools = [tool("f", properties, rng.sample(list(properties), rng.randint(0, len(properties))), **{"$defs": shared})]
        try:
            constraint = tool_constraint(tools)
        except ParameterError:
            continue
        parameters = json.loads(json.dumps(tools[0]["function"]["parameters"]), parse_float=Decimal)
        for _ in range(3):
            text = walk(constraint, rng)
            if text is None or re.search(r"[eE]\+?\d{3}", text):  # 1e999 is JSON and no double: the parser keeps it as a text
                continue
            parser = CallParser(tools)
            parser.feed(text.removeprefix(OPEN).removesuffix(CLOSE))
            parser.close()
            assert not parser.unread, f"seed {seed}: {text}"
            for call in parser.calls:
                n_calls += 1
                given = json.loads(call.arguments, parse_float=Decimal)
                error = next(iter(Draft202012Validator(parameters).iter_errors(given)), None)
                assert error is None, f"seed {seed}: {text}\n{call.arguments}\n{error.message}"
    assert n_calls > 100
