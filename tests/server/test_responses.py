"""OpenAI's Responses: what their bodies become, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from inprocess import Live, until

from lfmfast.server.errors import ApiError
from lfmfast.server.responses import to_chat

FRANCE = {"input": "What is the capital of France?", "temperature": 0}
CAPITAL = "The capital of France is Paris."
CALL = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": '{"city": "Paris"}'}


@pytest.fixture(scope="module")
def server(lfm2_tiny_path: Path) -> Iterator[Live]:
    with Live(lfm2_tiny_path) as live:
        yield live


def events(server: Live, body: Any) -> list[dict[str, Any]]:
    """The objects in the events of a stream, which are numbered and named as what they are."""
    found = []
    with server.client.stream("POST", "/v1/responses", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for frame in "".join(answer.iter_text()).split("\n\n"):
            if not frame or frame == ":":
                continue
            name, data = frame.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    assert [data.get("sequence_number", i) for i, data in enumerate(found)] == list(range(len(found)))
    return found


def said(role: str, *parts: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": list(parts)}


def text(value: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": value}


def test_a_response(server):
    answer = server.post("/v1/responses", {**FRANCE, "instructions": "You are a helpful assistant.", "metadata": {"a": "b"}})
    assert answer["id"].startswith("resp_") and answer["object"] == "response" and answer["model"] == "tiny"
    assert answer["created_at"] <= answer["completed_at"]
    assert (answer["status"], answer["error"], answer["incomplete_details"]) == ("completed", None, None)
    assert (answer["metadata"], answer["temperature"]) == ({"a": "b"}, 0)
    [item] = answer["output"]
    assert item.pop("id").startswith("msg_")
    assert item == {"type": "message", "role": "assistant", "status": "completed", "content": [
        {"type": "output_text", "annotations": [], "logprobs": [], "text": CAPITAL}]}  # fmt: skip
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    count = server.post("/v1/responses/input_tokens", {**FRANCE, "instructions": "You are a helpful assistant."})
    assert count == {"input_tokens": usage["input_tokens"], "object": "response.input_tokens"}
    again = server.post("/responses", {**FRANCE, "instructions": "You are a helpful assistant."})
    assert again["usage"]["input_tokens_details"]["cached_tokens"] > 0


def test_the_events_of_a_stream(server):
    seen = events(server, FRANCE)
    names = [data["type"].removeprefix("response.") for data in seen]
    n = names.count("output_text.delta")
    assert n > 1
    assert names == ["created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * n,
                     "output_text.done", "content_part.done", "output_item.done", "completed"]  # fmt: skip
    whole = seen[-1]["response"]
    assert {data["response"]["id"] for data in seen if "response" in data} == {whole["id"]}
    assert seen[0]["response"]["status"] == "in_progress" and seen[0]["response"]["output"] == []
    [item] = whole["output"]
    assert seen[2]["item"] == {**item, "status": "in_progress", "content": []}
    assert seen[3]["part"] == {**item["content"][0], "text": ""}
    assert "".join(data["delta"] for data in seen[4 : 4 + n]) == CAPITAL == item["content"][0]["text"]
    assert seen[-4]["text"] == CAPITAL and seen[-3]["part"] == item["content"][0] and seen[-2]["item"] == item
    assert {data["item_id"] for data in seen if "item_id" in data} == {item["id"]}
    assert {data["content_index"] for data in seen[3:-2]} == {data["output_index"] for data in seen[2:-1]} == {0}
    assert seen[-1]["timings"]["predicted_n"] == whole["usage"]["output_tokens"]
    assert all("timings" not in data and "prompt_progress" not in data for data in seen[:-1])


def test_progress_and_timings_on_request(server):
    seen = events(server, {"input": "This is a test. " * 20, "timings_per_token": True, "return_progress": True,
                           "max_output_tokens": 4, "cache_prompt": False})  # fmt: skip
    progress = [data["prompt_progress"] for data in seen if "prompt_progress" in data]
    assert progress and all(data["type"] == "response.in_progress" for data in seen if "prompt_progress" in data)
    assert progress[-1]["processed"] == progress[-1]["total"] == seen[-1]["response"]["usage"]["input_tokens"]
    deltas = [data for data in seen if data["type"] == "response.output_text.delta"]
    assert deltas and all(data["timings"]["predicted_n"] > 0 for data in deltas)


def test_an_answer_that_is_cut_off_says_so(server):
    asked = {**FRANCE, "max_output_tokens": 3}
    for whole in (server.post("/v1/responses", asked), events(server, asked)[-1]["response"]):
        assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert whole["output"][0]["status"] == "incomplete" and whole["usage"]["output_tokens"] == 3
        assert whole["max_output_tokens"] == 3


def test_an_answer_without_text_has_no_message(server):
    asked = {**FRANCE, "stop": ["The"]}
    assert server.post("/v1/responses", asked)["output"] == []
    names = ["response.created", "response.in_progress", "response.completed"]
    assert [data["type"] for data in events(server, asked)] == names


def test_functions_and_their_outputs(server):
    cases = json.loads((Path(server.model.path).parent / "cases.json").read_text("utf8"))
    functions = [{"type": "function", "strict": False, **tool.get("function", tool)} for tool in cases["tools"]]
    asked = {"temperature": 0, "tools": functions, "tool_choice": "auto", "instructions": "You are a helpful assistant."}
    question = said("user", text("What is the weather "), text("in Paris?"))
    weather = [text('{"temperature": 21, '), text('"sky": "sunny"}')]
    output = {"type": "function_call_output", "call_id": "call_1", "output": weather}
    answer = server.post("/v1/responses", {**asked, "input": [question, CALL, output]})
    assert answer["output"][0]["content"][0]["text"] == "It is 21 degrees and sunny in Paris."
    assert answer["tools"] == functions


def test_what_becomes_of_items():
    chat = to_chat({
        "model": "m", "instructions": "Be brief.", "max_output_tokens": 7, "store": True,
        "include": ["reasoning.encrypted_content"], "reasoning": {"effort": None, "summary": "auto"},
        "text": {"format": {"type": "text"}}, "truncation": "disabled", "input": [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [text("a"), text("b")]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            said("assistant", text("c", "output_text"), {"type": "refusal", "refusal": "no"}),
            CALL,
            {**CALL, "call_id": "call_2"},
            {"type": "function_call_output", "call_id": "call_1", "output": "sunny"},
            {"type": "reasoning", "summary": []},
        ]})  # fmt: skip
    call = {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    assert chat == {"model": "m", "max_tokens": 7, "response_format": {"type": "text"}, "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "no"}],
         "thinking": "hm", "reasoning_content": "hm",
         "tool_calls": [{"id": "call_1", **call}, {"id": "call_2", **call}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]}  # fmt: skip


@pytest.mark.parametrize(("more", "named"), [
    ({"input": None}, "'input' is required"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": ["x"]}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}, "image input is not supported"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "audio input is not supported"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
    ({"input": [{"type": ["x"]}]}, "input[0]"),
    ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments"),
    ({"instructions": 5}, "instructions"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"text": {"format": {}}}, "text.format"),
    ({"tools": [{"type": "function", "name": "f", "strict": "yes"}]}, "tools[0].strict"),
    ({"text": {"format": {"type": "json_schema", "schema": {"uniqueItems": True}}}}, "uniqueItems"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": "json_object"}}, "text.format"),
    ({"text": "x"}, "text"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    *(({name: wrong}, name) for name in ("include", "text", "reasoning") for wrong in ("", 0, False)),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"max_output_tokens": "many"}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"n": 2}, "'n'"),
])  # fmt: skip
def test_what_is_refused_and_why(server, more, named):
    assert named in server.refusal("/v1/responses", {**FRANCE, **more, "stream": True})


def test_a_client_that_goes_away(server):
    server.leave_after("/v1/responses", {**FRANCE, "ignore_eos": True, "stream": True}, 4000)
    until(lambda: not server.stats()["n_running"] and not server.state.running)


def test_errors_of_a_stream_are_events(server, monkeypatch):
    from lfmfast.server import responses

    def broken(*_: Any) -> dict[str, Any]:
        raise ApiError(503, "unavailable_error", "the server is shutting down")

    monkeypatch.setattr(responses._Reply, "whole", broken)
    last = events(server, FRANCE)[-1]
    assert (last["type"], last["code"], last["message"]) == ("error", "unavailable_error", "the server is shutting down")
    assert last["error"]["code"] == 503


def test_openais_own_reader_of_streams(server):
    with openai.OpenAI(api_key="none", base_url=f"http://127.0.0.1:{server.port}/v1") as client:
        with client.responses.stream(model="any", **FRANCE) as stream:
            seen = [event.type for event in stream]
            final = stream.get_final_response()
        assert final.output_text == CAPITAL and seen[-1] == "response.completed"
        again = client.responses.create(model="any", temperature=0, input=[
            {"role": "user", "content": "My name is Ada."}, {"role": "assistant", "content": "Nice to meet you, Ada!"},
            {"role": "user", "content": "What is my name?"}])  # fmt: skip
        assert again.output_text == "Your name is Ada."
        with pytest.raises(openai.BadRequestError) as error:
            client.responses.create(model="any", input="x", previous_response_id="resp_1")
        assert error.value.body["message"] == "'previous_response_id' is not supported"
