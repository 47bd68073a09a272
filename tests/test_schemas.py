"""Two hundred schemas and random weights at temperature 1.5: what comes is JSON of the schema, or the schema is refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import pytest
from grammar_walk import matcher, tokens
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from lfmfast import Model, ParameterError
from lfmfast.constraint import from_json_schema

SCHEMAS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "schemas.json").read_text("utf8"))
MAX_TOKENS = 600


def closing_tokens(model: Model) -> dict[int, float]:
    """A bias for what ends strings and brackets: random weights would seldom come to an end."""
    texts = ['"', '",', '"}', "}", "]", "},", ',"']
    ids = [model.tokenize(text, add_special=False) for text in texts]
    return {found[0]: 4.0 for found in ids if len(found) == 1}


def exact(text: str) -> Decimal | float:
    """A number as it is written, if its exponent is not beyond all bounds."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)


def test_there_are_enough():
    assert len(SCHEMAS) >= 200 and len({entry["name"] for entry in SCHEMAS}) == len(SCHEMAS)


def test_what_cannot_be_enforced_is_refused(tiny_f32: Model):
    for entry in SCHEMAS:
        if entry.get("refused"):
            with pytest.raises(ParameterError):
                tiny_f32.generate("x", json_schema=entry["schema"], max_tokens=1)


@pytest.mark.slow
def test_answers_are_valid(tiny_f32: Model):
    bias = closing_tokens(tiny_f32)

    def answer(at: int) -> Any:
        return tiny_f32.generate([{"role": "user", "content": "Go."}], json_schema=SCHEMAS[at]["schema"], temperature=1.5,
                                 seed=at, max_tokens=MAX_TOKENS, logit_bias=bias)  # fmt: skip

    wanted = [at for at, entry in enumerate(SCHEMAS) if not entry.get("refused")]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(answer, wanted))
    n_finished = 0
    for at, done in zip(wanted, answers, strict=True):
        entry = SCHEMAS[at]
        if done.finish_reason == "length":  # cut off: so far it is the beginning of what the schema allows
            begun = tokens(done.text.rstrip("\ufffd"))
            assert matcher(from_json_schema(entry["schema"])).try_consume_tokens(begun) == len(begun), entry["name"]
            continue
        n_finished += 1
        judge = validator_for(entry["schema"], Draft202012Validator)
        validator = judge(json.loads(json.dumps(entry["schema"]), parse_float=exact), format_checker=judge.FORMAT_CHECKER)
        error = next(iter(validator.iter_errors(json.loads(done.text, parse_float=exact))), None)
        assert error is None, f"{entry['name']}: {done.text}\n{error.message}"
    assert n_finished > len(wanted) // 2
