"""JSON schemas, patterns and response formats: what is enforced is enforced exactly, the rest is refused by name."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from decimal import Decimal
from pathlib import Path

import pytest
from grammar_walk import accepts, matcher, walk
from jsonschema import Draft202012Validator
from jsonschema_specifications import REGISTRY
from schemas import random_schema

from lfmfast import constraint, json_schema
from lfmfast.constraint import Constraint, from_json_schema, from_regex, from_response_format
from lfmfast.errors import ParameterError

# A schema, texts that fit, texts that don't. jsonschema says the same of each.
ENFORCED = [(entry["schema"], entry["good"], entry["bad"])
            for entry in json.loads((Path(__file__).parent / "data" / "schema_texts.json").read_text("utf8"))]


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED, ids=[json.dumps(schema)[:60] for schema, *_ in ENFORCED])
def test_keywords_are_enforced(schema, good, bad):
    made = from_json_schema(schema)
    judged = "$schema" not in json.dumps(schema) and len(json.dumps(schema)) < 2000
    validator = Draft202012Validator(schema) if judged else None
    for text in good:
        assert accepts(made, text), text
        assert validator is None or validator.is_valid(json.loads(text)), text
    for text in bad:
        assert not accepts(made, text), text
    rng = random.Random(json.dumps(schema))
    for _ in range(8):
        if (text := walk(made, rng)) is not None and validator:
            validator.validate(json.loads(text))


REFUSED = [
    ({"contains": {"type": "integer"}}, "contains"),
    ({"not": {"type": "null"}}, "not"),
    ({"if": {"type": "integer"}, "then": {"minimum": 2}}, "if"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, "minProperties|maxProperties|Properties"),
    ({"allOf": [{}], "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "unevaluatedItems": False}, "unevaluatedItems"),
    ({"properties": {"a": {}}, "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({"propertyNames": {"format": "email"}}, "propertyNames"),
    ({"format": "iri"}, "format: 'iri'"),
    ({"format": "phone"}, "format: 'phone'"),
    ({"contentEncoding": "base32"}, "contentEncoding"),
    ({"contentMediaType": "application/json"}, "contentMediaType"),
    ({"contentSchema": {}}, "contentSchema"),
    ({"$dynamicRef": "#a"}, r"\$dynamicRef"),
    ({"$recursiveRef": "#"}, r"\$recursiveRef"),
    ({"$ref": "https://example.com/other.json"}, r"\$ref.*other.json"),
    ({"$ref": "other.json#/a"}, r"\$ref.*other.json"),
    ({"$ref": "#/$defs/none"}, r"\$ref.*none"),
    ({"$ref": "#none"}, r"\$ref.*anchor"),
    ({"$ref": 3}, r"\$ref"),
    ({"$ref": "#"}, "leads to itself"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "leads to itself"),
    ({"properties": {"a": {"$id": "other", "type": "null"}}}, r"properties/a.*\$id"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf.*parts 0 and 1"),
    ({"oneOf": [{}, {"type": "number"}]}, "oneOf"),
    ({"type": "integer", "multipleOf": 0}, "multipleOf"),
    ({"allOf": [{"multipleOf": 99999}, {"multipleOf": 100000}]}, "multipleOf"),
    ({"minLength": -1}, "minLength"),
    ({"maxItems": 10**9}, "maxItems.*100,000"),
    ({"maxLength": "3"}, "maxLength"),
    ({"minimum": float("inf")}, "minimum"),
    ({"minimum": "1"}, "minimum"),
    ({"const": 2**63}, r"const.*2\*\*53"),
    ({"enum": [1, 10**400]}, "enum"),
    ({"const": float("nan")}, "const"),
    ({"const": {1, 2}}, "const.*set"),
    ({"const": "a\x01"}, r"const.*U\+0001"),
    ({"enum": ["\x7f"]}, r"enum.*U\+007F"),
    ({"properties": {"\x00": {}}}, r"properties.*U\+0000"),
    ({"enum": []}, "enum"),
    ({"anyOf": []}, "anyOf"),
    ({"type": "text"}, "type.*text"),
    ({"type": []}, "type"),
    ({"required": True}, "required"),
    ({"required": ["a", 1]}, "required"),
    ({"properties": []}, "properties"),
    ({"items": 3}, "items.*a schema is"),
    ({"pattern": "(?=a)"}, "pattern.*look-around"),
    ({"pattern": r"(a)\1"}, "pattern.*back reference"),
    ({"pattern": r"\bx\b"}, "pattern.*word boundary"),
    ({"pattern": "["}, "pattern"),
    ({"pattern": 5}, "pattern"),
    ({"patternProperties": {"(?!a)": {}}}, "patternProperties.*look-around"),
    ({"minLenght": 3}, "minLenght.*minLength"),
    ({"aditionalProperties": False}, "additionalProperties"),
    (False, "anyOf|[Uu]nsatisfiable"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
    ({"type": "string", "const": 1}, "[Uu]nsatisfiable"),
    ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "finite"),
    ({"anyOf": [{"$ref": "#"}]}, "finite"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "required"),
    ([1], "a schema is"),
    ("{}", "a schema is"),
    ({3: 4}, "keyword"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=[repr(schema)[:60] for schema, _ in REFUSED])
def test_what_cannot_be_enforced_is_refused_by_name(schema, message):
    with pytest.raises(ParameterError, match=message):
        from_json_schema(schema)


def test_every_keyword_of_the_drafts_is_known():
    """Each keyword that a metaschema names is enforced, refused or an annotation: none passes as an unknown word."""
    known = json_schema._HANDLED | json_schema._REFUSED | json_schema._ANNOTATIONS
    drafts = [REGISTRY.contents(uri) for uri in REGISTRY]
    words = {word for draft in drafts for word in draft.get("properties", {})}
    assert len(words) > 60
    assert words <= known


def test_an_anchor_in_data_is_none():
    data = {"enum": [{"$anchor": "x", "type": "null"}]}
    made = from_json_schema({"$ref": "#x", "$defs": {"a": data, "b": {"$anchor": "x", "type": "integer"}}})
    assert accepts(made, "1") and not accepts(made, "null")
    with pytest.raises(ParameterError, match="more than one anchor"):
        from_json_schema({"$ref": "#x", "$defs": {"a": {"$anchor": "x"}, "b": {"$anchor": "x"}}})


def test_the_callers_own_options_for_llguidance_do_not_count():
    """`x-guidance` could switch enforcement off."""
    with pytest.raises(ParameterError, match="uniqueItems"):
        from_json_schema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}})
    made = from_json_schema({"type": "array", "items": {"type": "integer"}, "x-guidance": {"item_separator": ";"}})
    assert accepts(made, "[1, 2]") and not accepts(made, "[1;2]")


def test_no_schema_is_any_object():
    made = from_json_schema(None)
    assert accepts(made, '{"a": [1, null]}') and accepts(made, "{}") and not accepts(made, "[]")


def test_white_space_has_its_limit():
    made = from_json_schema(None)
    assert accepts(made, '{\n    "a": 1,\n    "b": {\n        "c": 2\n    }\n}')
    assert not accepts(made, "{" + " " * 100 + "}") and not accepts(made, "{\n\n\n\n}") and not accepts(made, " {}")


def test_random_schemas():
    """Whatever a made-up schema allows is valid for it, with numbers taken as they are written."""
    n_walks = n_refused = 0
    for seed in range(150):
        rng = random.Random(seed)
        schema = random_schema(rng)
        try:
            made = from_json_schema(schema)
        except ParameterError:
            n_refused += 1
            continue
        validator = Draft202012Validator(json.loads(json.dumps(schema), parse_float=Decimal),
                                         format_checker=Draft202012Validator.FORMAT_CHECKER)  # fmt: skip
        for _ in range(3):
            text = walk(made, rng)
            if text is not None:
                n_walks += 1
                error = next(iter(validator.iter_errors(json.loads(text, parse_float=Decimal))), None)
                assert error is None, f"seed {seed}: {schema}\n{text}\n{error.message}"
    assert n_walks > 200 and n_refused < 75


HOSTILE = {
    "references in a chain": {
        "$ref": "#/$defs/0",
        "$defs": {str(n): {"properties": {"n": {"$ref": f"#/$defs/{n + 1}"}}} for n in range(5000)} | {"5000": {}}},
    "a product of choices": {
        "allOf": [{"anyOf": [{"properties": {f"{c}{n}": {}}, "type": "object"} for c in "ab"]} for n in range(20)]},
    "a huge enum": {"enum": ["x" * 1000 + str(n) for n in range(2000)]},
    "many properties": {"properties": {str(n): {} for n in range(20_000)}},
    "itself in allOf": {"allOf": [{"$ref": "#"}, {"type": "object"}]},
    "trees": {
        "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "$defs": {c: {"type": "object", "properties": {"c": {"$ref": f"#/$defs/{c}"}}} for c in "ab"}},
    "a surrogate": {"const": "\ud800"},
    "a surrogate in a name": {"properties": {"\udc00": {}}},
    "a huge number": {"type": "integer", "minimum": 10**300},
    "a tiny number": {"type": "number", "minimum": 5e-324},
    "a nested pattern": {"pattern": "(" * 2000 + "a" + ")" * 2000},
    "nested repetitions": {"pattern": "(((a{1000}){1000}){1000}){1000}"},
    "patterns that meet": {"allOf": [{"pattern": f"a.{{{n}}}b"} for n in range(1, 30)], "type": "string"},
    "patterns that meet further down": {"allOf": [{"$ref": "#/$defs/a"}] * 6, "$defs": {
        "a": {"properties": {"p": {"allOf": [{"pattern": f"a.{{{n}}}b"} for n in range(5)]}}}}},
    "a wide oneOf": {"oneOf": [{"const": str(n)} for n in range(2000)]},
    "a large pattern": {"pattern": "^(?:" + "|".join(f"[a-z]{{1,{n}}}x" for n in range(600)) + ")$"},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_are_errors(name):
    with pytest.raises(ParameterError):
        from_json_schema(HOSTILE[name])


def test_deep_schemas_are_errors():
    deep: object = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(ParameterError, match="nested deeper"):
        from_json_schema(deep)
    value: object = 1
    for _ in range(5000):
        value = [value]
    with pytest.raises(ParameterError, match="nested deeper"):
        from_json_schema({"const": value})


def test_the_deepest_schema_that_is_taken_compiles_on_a_small_stack():
    """llguidance recurses over references: the limit leaves it far from the end of a thread's stack."""
    chain = {str(n): {"type": "object", "properties": {"n": {"$ref": f"#/$defs/{n + 1}"}}} for n in range(47)}
    schema = {"$ref": "#/$defs/0", "$defs": {**chain, "47": {"type": "null"}}}
    done: list[Constraint] = []
    previous = threading.stack_size(1 << 20)
    try:
        thread = threading.Thread(target=lambda: done.append(from_json_schema(schema)))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(previous)
    assert done and accepts(done[0], '{"n": {"n": {}}}')


REGEXES = [
    ("yes|no", ["yes", "no"], ["yesno", ""]),
    (r"^\d{3}-\d{4}$", ["555-1234"], ["5551234", "x555-1234"]),
    (r"\w+@\w+\.(?:com|org)", ["a@b.com"], ["a@b.net", "é@b.com"]),
    (r"[a&&b]+", ["a&b"], ["c"]),
    (r"[[:alpha:]+", ["a:["], ["b"]),
    (r"[^\d\s]+", ["ab"], ["1", "a b"]),
    (r"\/\.\[\]\{\}\-", ["/.[]{}-"], ["/"]),
    (r"\<a\>", ["<a>"], ["a"]),
    (r"a{2,3}", ["aa", "aaa"], ["a", "aaaa"]),
    (r"a{,3}", ["a{,3}"], ["aa"]),
    (r"\x41\u00e9\u{1F600}\uD83D\uDE00", ["Aé😀😀"], ["A"]),
    (r"(?<name>a)(?P<other>b)(c)", ["abc"], ["ab"]),
    (r".", ["a", "é"], ["\n", "\u2028", "ab"]),
    (r"\p{Lu}+", ["ÄB"], ["ä"]),
    (r"a*?b+?", ["aab", "b"], ["a"]),
    (r"\cJ\0?", ["\n"], ["j"]),
    (r"[\w-]+[a\-z]", ["x-", "x_a"], ["x"]),
    (r'"#/', ['"#/'], ["#"]),
]  # fmt: skip


@pytest.mark.parametrize(("pattern", "good", "bad"), REGEXES, ids=[pattern for pattern, *_ in REGEXES])
def test_patterns(pattern, good, bad):
    made = from_regex(pattern)
    assert all(accepts(made, text) for text in good)
    assert not any(accepts(made, text) for text in bad)


@pytest.mark.parametrize(("pattern", "message"), [
    ("a(?!b)", "look-around can't be enforced at character 1"), ("(?<=a)b", "look-around"), ("(?i)a", "group"),
    (r"\1", "back reference"), (r"\k<a>", "back reference"), (r"a\b", "word boundary"), (r"\Aa", "no escape"),
    (r"\Z", "no escape"), ("[]", "empty character class"), ("[a", "without its end"), ("[z-a]", "range"), ("a\\", "backslash"),
    (r"\x4", "hexadecimal"),
    (r"\ud800", r"U\+D800"), ("(", "pattern"), ("*", "pattern"), ("a$b", "pattern"), ("a\0", "NUL"), ("\ud800", "surrogate"),
    ("a" * 2_000_000, "limit"),
])  # fmt: skip
def test_patterns_that_are_refused(pattern, message):
    with pytest.raises(ParameterError, match=message):
        from_regex(pattern)


def test_response_formats():
    assert from_response_format(None) is None and from_response_format({"type": "text"}) is None
    assert from_response_format({"type": "json_object"}) == from_json_schema(None)
    schema = {"type": "integer"}
    assert from_response_format({"type": "json_object", "schema": schema}) == from_json_schema(schema)
    strict = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    assert from_response_format(strict) == from_json_schema(schema)
    nameless = {"type": "json_schema", "json_schema": {"name": "n"}}
    for wrong in ({"type": "xml"}, {}, {"type": "json_schema"}, nameless, "text", [1]):
        with pytest.raises(ParameterError, match="response_format"):
            from_response_format(wrong)


def test_a_constraint_is_checked():
    assert from_regex("a") == Constraint("regex", "a") and hash(from_regex("a")) == hash(Constraint("regex", "a"))
    with pytest.raises(ParameterError, match="kind"):
        Constraint("ebnf", "a")
    with pytest.raises(ParameterError, match="limit"):
        Constraint("regex", "a" * (constraint.MAX_BYTES + 1))
    assert matcher(from_json_schema({"const": 1})).compute_ff_bytes() == b"1"


def test_importing_it_does_not_import_llguidance():
    code = "import sys, lfmfast.constraint, lfmfast.tool_grammar; print('llguidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(sys.prefix), check=True)
    assert done.stdout.strip() == "False"
