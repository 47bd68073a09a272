"""Requests that schemathesis makes up from the description, well and badly formed: no faults, and answers as described.

What it checks: no status of 500 and more, none that is not described, bodies and events as described, and that what is not as
described is refused. What is as described may still be refused: not all that a body needs can be said in a schema.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis

from lfmfast.server.app import routes
from lfmfast.server.openapi import describe
from lfmfast.server.settings import Settings

# Each endpoint once, by its first path.
ALIASES = {"/chat/completions", "/chat/completions/input_tokens", "/completions", "/responses", "/responses/input_tokens",
           "/models", "/v1/health", "/index.html"}  # fmt: skip
#: Fields that say what answers look like.
KEPT = {"stream", "stream_options", "stop", "verbose", "timings_per_token", "return_progress", "t_max_prompt_ms"}
#: Answers to a prompt: more of them is more of the same.
FEW = 3


def closed(description: dict[str, Any]) -> dict[str, Any]:
    """The description, with answers that have no other members than those it names. (Clients are to expect more.)"""
    description = copy.deepcopy(description)
    schemas = description["components"]["schemas"]

    def close(schema: Any) -> None:
        if isinstance(schema, list):
            for item in schema:
                close(item)
        elif isinstance(schema, dict):
            for name, value in schema.items():
                if name == "properties":
                    close(list(value.values()))
                elif name != "const":
                    close(value)
            if "properties" in schema:
                schema.setdefault("additionalProperties", False)
            if isinstance(reference := schema.get("$ref"), str) and reference not in seen:
                seen.add(reference)
                close(schemas[reference.rpartition("/")[2]])

    seen: set[str] = set()
    for path in description["paths"].values():
        for operation in path.values():
            close(operation["responses"])
    return description


def shortened(description: dict[str, Any]) -> dict[str, Any]:
    """The description without aliases, and with the fields of all generations in two of the endpoints."""
    paths, schemas = description["paths"], description["components"]["schemas"]
    for path in ALIASES:
        del paths[path]
    content = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    content["schema"] = copy.deepcopy(schemas["CompletionRequest"])
    for body in (content["schema"], schemas["AnthropicRequest"], schemas["ResponseRequest"]):
        fields = body["properties"]
        for name, field in schemas["ChatRequest"]["properties"].items():
            if fields.get(name) == field and name not in KEPT:
                del fields[name]
    return description


def schema_of_tests() -> Any:
    description = shortened(closed(describe(routes(Settings()))))
    config = schemathesis.Config()
    project = config.projects.default
    project.generation.update(deterministic=True, max_examples=25, database="none")
    project.checks.positive_data_acceptance.enabled = False
    return schemathesis.openapi.from_dict(description, config=config)


schema = schema_of_tests()


@pytest.fixture(scope="module")
def server(serve, lfm2_tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("slots")
    with serve(lfm2_tiny_path, "-np", "4", "--ctx-per-slot", "128", "-t", "1", "-n", "8", "--metrics", "--props",
               "--slot-save-path", str(folder)) as live:  # fmt: skip
        yield live


def bound(body: Any) -> None:
    """Bound what a request that is in order asks for."""
    if not isinstance(body, dict):
        return
    for name in ("n", "n_cmpl"):
        if type(body.get(name)) is int and 0 < body[name] <= 128:
            body[name] = min(body[name], FEW)
    if type(body.get("t_max_prompt_ms")) is int and 0 <= body["t_max_prompt_ms"] < 60_000:  # nothing might come
        body["t_max_prompt_ms"] = 60_000


@schema.parametrize()
def test_made_up_requests(case, server):
    bound(case.body)
    response = case.call(base_url=server.url, timeout=60)
    case.validate_response(response)
    assert b'"code":500' not in response.content  # in a stream, too
    assert server.process.poll() is None
