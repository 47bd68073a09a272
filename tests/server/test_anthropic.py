"""Anthropic's endpoints: what their bodies become, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inprocess import Live, until

from lfmfast.server.anthropic import to_chat
from lfmfast.server.errors import ApiError

FRANCE = {"model": "any", "max_tokens": 64, "temperature": 0,
          "messages": [{"role": "user", "content": "What is the capital of France?"}]}  # fmt: skip
CAPITAL = "The capital of France is Paris."
CALL = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}


@pytest.fixture(scope="module")
def server(lfm2_tiny_path: Path) -> Iterator[Live]:
    with Live(lfm2_tiny_path) as live:
        yield live


def events(server: Live, body: Any) -> list[tuple[str, dict[str, Any]]]:
    """Names and objects of the events of a stream."""
    found = []
    with server.client.stream("POST", "/v1/messages", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        name = None
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                assert data["type"] == name
                found.append((name, data))
            else:
                assert line in ("", ":")
    return found


def tools(server: Live) -> list[dict[str, Any]]:
    cases = json.loads((Path(server.model.path).parent / "cases.json").read_text("utf8"))
    functions = [tool.get("function", tool) for tool in cases["tools"]]
    return [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in functions]


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def test_a_message(server):
    answer = server.post("/v1/messages", {**FRANCE, "system": "You are a helpful assistant."})
    assert answer.pop("id").startswith("msg_")
    usage = answer.pop("usage")
    assert answer == {"type": "message", "role": "assistant", "content": [text(CAPITAL)], "model": "tiny",
                      "stop_reason": "end_turn", "stop_sequence": None}  # fmt: skip
    count = server.post("/v1/messages/count_tokens", {**FRANCE, "system": "You are a helpful assistant."})
    assert list(count) == ["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count["input_tokens"]
    again = server.post("/v1/messages", {**FRANCE, "system": "You are a helpful assistant."})["usage"]
    assert again["cache_read_input_tokens"] > 0 and again["output_tokens"] == usage["output_tokens"]
    assert again["input_tokens"] + again["cache_read_input_tokens"] == count["input_tokens"]


def test_the_events_of_a_stream(server):
    seen = events(server, FRANCE)
    names = [name for name, _ in seen]
    n = names.count("content_block_delta")
    assert n > 1
    assert names == ["message_start", "content_block_start", *["content_block_delta"] * n, "content_block_stop",
                     "message_delta", "message_stop"]  # fmt: skip
    message = seen[0][1]["message"]
    assert message["id"].startswith("msg_") and message["usage"].pop("input_tokens") >= 0
    assert message["usage"].keys() == {"cache_read_input_tokens", "output_tokens"} and message["usage"]["output_tokens"] == 0
    assert {**message, "id": "", "usage": None} == {
        "id": "", "type": "message", "role": "assistant", "content": [], "model": "tiny", "stop_reason": None,
        "stop_sequence": None, "usage": None}  # fmt: skip
    assert seen[1][1] == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    deltas = [data for _, data in seen[2 : 2 + n]]
    assert "".join(data["delta"]["text"] for data in deltas) == CAPITAL
    assert all(data["index"] == 0 and data["delta"].keys() == {"type", "text"} and data["delta"]["text"] for data in deltas)
    assert seen[-3][1] == {"type": "content_block_stop", "index": 0}
    whole = server.post("/v1/messages", FRANCE)
    assert seen[-2][1] == {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None},
                           "usage": {"output_tokens": whole["usage"]["output_tokens"]}}  # fmt: skip
    assert seen[-1][1] == {"type": "message_stop"}


@pytest.mark.parametrize(("more", "reason", "word", "begin"), [
    ({"max_tokens": 3}, "max_tokens", None, "The capital of"),
    ({"stop_sequences": ["never", " France"]}, "stop_sequence", " France", "The capital of"),
    ({"stop_sequences": ["The"]}, "stop_sequence", "The", ""),
])  # fmt: skip
def test_how_an_answer_ends(server, more, reason, word, begin):
    answer = server.post("/v1/messages", {**FRANCE, **more})
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, word)
    assert answer["content"] == ([text(begin)] if begin else [])
    seen = events(server, {**FRANCE, **more})
    assert seen[-2][1]["delta"] == {"stop_reason": reason, "stop_sequence": word}
    starts = [data["index"] for name, data in seen if name == "content_block_start"]
    assert starts == [data["index"] for name, data in seen if name == "content_block_stop"] == ([0] if begin else [])


def test_tools_and_their_results(server):
    asked = {"max_tokens": 64, "temperature": 0, "tools": tools(server), "tool_choice": {"type": "auto"},
             "system": [text("You are a helpful "), text("assistant.")]}  # fmt: skip
    question = user(text("What is the weather in Paris?"))
    first = server.post("/v1/messages", {**asked, "messages": [question]})
    [call] = first["content"]
    assert (first["stop_reason"], first["stop_sequence"]) == ("tool_use", None)
    assert {**call, "id": "toolu_1"} == CALL and call["id"]
    weather = [text('{"temperature": 21, '), text('"sky": "sunny"}')]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": weather}
    messages = [question, {"role": "assistant", "content": [call]}, user(result)]
    answer = server.post("/v1/messages", {**asked, "messages": messages})
    assert answer["content"] == [text("It is 21 degrees and sunny in Paris.")]
    none = server.post("/v1/messages", {**asked, "messages": [question], "tool_choice": {"type": "none"}})
    assert none["content"] == [text("I cannot check the weather.")]


def test_without_messages_the_model_begins(server):
    answer = server.post("/v1/messages", {"messages": [], "max_tokens": 3, "temperature": 0})
    assert answer["usage"]["input_tokens"] == len(server.model.encode("<|im_start|>assistant\n"))
    assert answer["content"]


def test_a_begun_answer_is_continued(server):
    messages = [*FRANCE["messages"], {"role": "assistant", "content": "The capital of"}]
    assert server.post("/v1/messages", {**FRANCE, "messages": messages})["content"] == [text(" France is Paris.")]


def test_what_becomes_of_messages():
    chat = to_chat({
        "system": "Be brief.", "max_tokens": 5, "stop_sequences": ["x"], "top_k": 3, "metadata": {"user_id": "1"},
        "thinking": {"type": "enabled", "budget_tokens": 1000}, "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, text("b"), CALL,
                                              {"type": "redacted_thinking", "data": "?"}]},
            user({"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "content": "no"},
                 {"type": "tool_result", "tool_use_id": "toolu_2"}, text("c"), {**text("d"), "cache_control": {"type": "x"}}),
        ]})  # fmt: skip
    function = {"name": "get_weather", "arguments": {"city": "Paris"}}
    assert chat == {
        "max_tokens": 5, "top_k": 3, "stop": ["x"], "reasoning_budget": 1000, "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "thinking": "hm", "reasoning_content": "hm",
             "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "no"},
            {"role": "tool", "tool_call_id": "toolu_2", "content": ""},
            {"role": "user", "content": [text("c"), text("d")]},
        ]}  # fmt: skip


def test_a_stamp_that_changes_with_each_request_does_not_undo_the_cache():
    systems = [f"x-anthropic-billing-header: cc_version=2.1; cch={stamp};You are a tool." for stamp in ("a514f", "0")]
    first, second = (to_chat({"system": s, "messages": [user(text("x"))]})["messages"][0] for s in systems)
    assert first == second and first["content"].endswith("You are a tool.")
    kept = "The header cch=abc; stays."
    assert to_chat({"system": kept, "messages": [user(text("x"))]})["messages"][0]["content"] == kept


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}


@pytest.mark.parametrize(("more", "named"), [
    ({"messages": [user(IMAGE, text("What is it?"))]}, "image input is not supported"),
    ({"messages": [user({"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]})]}, "image input is not supported"),
    ({"messages": [user({"type": "document", "source": {}})]}, "messages[0].content[0]"),
    ({"messages": [user(CALL)]}, "tool_use"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [user({"type": "text"})]}, "messages[0].content[0].text"),
    ({"messages": [user({"type": 5})]}, "messages[0].content[0]"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [1]}, "messages"),
    ({"messages": None}, "'messages' is required"),
    ({"system": 5}, "system"),
    ({"system": [IMAGE]}, "image input is not supported"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "strict": {}}]}, "tools[0].strict"),
    ({"tool_choice": {"type": "any"}}, "tool_choice 'required' needs tools"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool", "name": "f"}, "tools": [{"name": "g"}]}, "no tool 'f'"),
    ({"tool_choice": {"type": "some"}}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "disable_parallel_tool_use"),
    ({"tools": [{"name": "f", "strict": True, "input_schema": {"type": "object", "properties": {
        "a": {"type": "array", "uniqueItems": True}}}}]}, "uniqueItems"),
    ({"thinking": True}, "thinking"),
    ({"thinking": {"type": "much"}}, "thinking"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "budget_tokens"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"output_config": {"effort": "low"}}, "effort"),
    ({"output_format": {"type": "json_schema"}}, "output_config.format.schema"),
    ({"output_format": {"type": "json_schema", "schema": {"not": {"type": "string"}}}}, "not"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"stop_sequences": 5}, "stop_sequences"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"n": 2}, "'n'"),
    ({"logprobs": True}, "logprobs"),
])  # fmt: skip
def test_what_is_refused_and_why(server, more, named):
    answer = server.client.post("/v1/messages", json={**FRANCE, **more, "stream": True})
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert named in body["error"]["message"]


def test_a_conversation_that_is_too_long(server):
    long = {**FRANCE, "messages": [user(text("word " * 3000))]}
    for stream in (False, True):
        answer = server.client.post("/v1/messages", json={**long, "stream": stream})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["n_ctx"]) == (400, "exceed_context_size_error", server.model.n_ctx)
    assert server.post("/v1/messages/count_tokens", long)["input_tokens"] == error["n_prompt_tokens"]


def test_a_client_that_goes_away(server):
    body = {**FRANCE, "max_tokens": 100_000, "ignore_eos": True, "stream": True}
    server.leave_after("/v1/messages", body, 2000)
    until(lambda: not server.stats()["n_running"] and not server.state.running)


def test_errors_of_a_stream_are_events(server, monkeypatch):
    from lfmfast.server import anthropic

    def broken(*_: Any) -> list[bytes]:
        raise ApiError(503, "unavailable_error", "the server is shutting down")

    monkeypatch.setattr(anthropic, "_end", broken)
    name, data = events(server, FRANCE)[-1]
    assert (name, data["type"], data["error"]["message"]) == ("error", "error", "the server is shutting down")
