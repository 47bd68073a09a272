"""The description at /openapi.json: nothing that is served is missing in it, and its limits are those that are enforced."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from lfmfast.aio import AsyncModel
from lfmfast.server import anthropic, completion, fields, openai, responses, slots, system
from lfmfast.server.app import create_app, routes
from lfmfast.server.errors import ApiError
from lfmfast.server.openapi import describe
from lfmfast.server.openapi.requests import BODIES
from lfmfast.server.settings import Settings

DESCRIPTION = describe(routes(Settings()))
#: Which bodies each module reads.
BODIES_OF: dict[Any, tuple[str, ...]] = {
    fields: ("ChatRequest", "CompletionRequest"), openai: ("ChatRequest", "CompletionRequest"),
    completion: ("CompletionRequest",), anthropic: ("AnthropicRequest",), responses: ("ResponseRequest",),
    system: ("TokenizeRequest", "DetokenizeRequest", "ChatPrompt", "PropsRequest"), slots: ("SlotFile",),
}  # fmt: skip
READERS = ("get", "boolean", "integer", "number", "strings", "mapping")
BODY_NAMES = ("body", "fields")


async def never() -> AsyncModel:
    raise RuntimeError("there is no model")


def properties(name: str) -> dict[str, Any]:
    found: dict[str, Any] = BODIES[name].get("properties", {})
    return found


def test_every_route_is_described():
    served = {(route.path.replace(":path}", "}"), method.lower())
              for route in routes(Settings()) for method in route.methods - {"HEAD"}}  # fmt: skip
    described = {(path, method) for path, methods in DESCRIPTION["paths"].items() for method in methods}
    assert described == served and ("/openapi.json", "get") in described
    names = [operation["operationId"] for methods in DESCRIPTION["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))


def test_every_reference_leads_somewhere_and_every_schema_is_used():
    def references(value: Any) -> Iterator[str]:
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from references(item)
        if isinstance(value, dict) and isinstance(value.get("$ref"), str):
            yield value["$ref"].removeprefix("#/components/schemas/")

    assert set(references(DESCRIPTION)) == set(DESCRIPTION["components"]["schemas"])


def names_read(module: Any) -> set[str]:
    """Names of the fields that a module reads of a body: constants in ``body.get(name)``, ``fields.integer(name)``, ..."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READERS and node.args:
            source, name = node.func.value, node.args[0]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            source, name = node.value, node.slice
        else:
            continue
        is_body = isinstance(source, ast.Name) and source.id in BODY_NAMES
        is_fields = isinstance(source, ast.Call) and isinstance(source.func, ast.Name) and source.func.id == "Fields"
        is_read = isinstance(source, ast.Await) and "read_object" in ast.dump(source)
        if (is_body or is_fields or is_read) and isinstance(name, ast.Constant) and isinstance(name.value, str):
            found.add(name.value)
    return found


@pytest.mark.parametrize("module", BODIES_OF, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_field_that_is_read_is_described(module: Any):
    read = names_read(module)
    described = {name for body in BODIES_OF[module] for name in properties(body)}
    assert read <= described
    if module not in (openai, completion):
        assert len(read) >= 1


def test_the_fields_of_generations_are_those_that_are_known():
    chat, text = properties("ChatRequest"), properties("CompletionRequest")
    assert chat.keys() | text.keys() == fields.KNOWN
    assert {*fields.REFUSED, *fields.FLOATS, *fields.INTEGERS, *fields.MAX_TOKENS} <= chat.keys() & text.keys()
    for module, body in ((anthropic, "AnthropicRequest"), (responses, "ResponseRequest")):
        assert module.TRANSLATED | set(module.REFUSED) <= properties(body).keys()
        assert properties(body).keys() <= fields.KNOWN | module.TRANSLATED | set(module.REFUSED)


def limits(chat: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, schema in properties("ChatRequest" if chat else "CompletionRequest").items():
        for one in (schema, *schema.get("anyOf", ())):
            if one.keys() & {"minimum", "maximum"}:
                yield name, one


@pytest.mark.parametrize("chat", [True, False])
def test_described_limits_are_those_that_are_enforced(chat: bool):
    needs: dict[str, dict[str, Any]] = {"top_logprobs": {"logprobs": True}}
    n = 0
    for name, schema in limits(chat):
        step = 1 if "integer" in schema["type"] else 1e-3
        for edge, beyond in (("minimum", -step), ("maximum", step)):
            if edge not in schema:
                continue
            body = {**needs.get(name, {}), name: schema[edge]}
            fields.parse_generation(body, Settings(), chat=chat)
            with pytest.raises(ApiError) as caught:
                fields.parse_generation({**body, name: schema[edge] + beyond}, Settings(), chat=chat)
            assert caught.value.status == 400 and name in caught.value.message
            n += 1
    assert n > 60


@pytest.mark.parametrize("chat", [True, False])
def test_fields_of_another_type_are_refused(chat: bool):
    kinds: dict[str, Any] = {"boolean": True, "integer": 1, "number": 1.5, "string": "x", "array": ["x"], "object": {"x": "x"}}
    for name, schema in properties("ChatRequest" if chat else "CompletionRequest").items():
        if name in fields.REFUSED or name in fields.KNOWN - names_read(fields) - {*fields.FLOATS, *fields.INTEGERS}:
            continue
        described = {kind for one in (schema, *schema.get("anyOf", ())) for kind in kinds_of(one)}
        described |= {"number", "integer"} & described and {"integer"}
        for kind in kinds.keys() - described if described else ():
            with pytest.raises(ApiError) as caught:
                fields.parse_generation({name: kinds[kind]}, Settings(), chat=chat)
                fields.parse_conversation({"messages": [{"role": "user", "content": "x"}], name: kinds[kind]}, Settings())
            assert name in caught.value.message, (name, kind)


def kinds_of(schema: dict[str, Any]) -> list[str]:
    kind = schema.get("type", [])
    if "enum" in schema:
        return ["string" for value in schema["enum"] if isinstance(value, str)]
    return [kind] if isinstance(kind, str) else list(kind)


def test_it_is_public_and_needs_no_model():
    with TestClient(create_app(Settings(api_keys=("secret",)), never, ended=lambda error: None)) as client:
        answer = client.get("/openapi.json")
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
        found = answer.json()
        assert client.get("/v1/models").status_code == 401
    assert "secret" not in answer.text
    operations = {path: operation for path, methods in found["paths"].items() for operation in methods.values()}
    public = {path for path, operation in operations.items() if "security" not in operation}
    assert public == {"/", "/index.html", "/openapi.json", "/health", "/v1/health"}
    assert all(("401" in operation["responses"]) == (path not in public) for path, operation in operations.items())
    assert "security" not in str(DESCRIPTION["paths"])
