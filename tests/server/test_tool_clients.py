"""Agent loops through the clients of OpenAI and Anthropic, with their own readers of streams and their types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest
from inprocess import Live

SYSTEM = "You are a helpful assistant."
THINKING = f"{SYSTEM} Think step by step."
PARIS, BOTH = "What is the weather in Paris?", "What is the weather in Paris and Rome?"
SUNNY, ANSWER = '{"temperature": 21, "sky": "sunny"}', "It is 21 degrees and sunny in Paris."
THOUGHT = "I call the weather tool."
CALL = ("get_weather", {"city": "Paris"})


class City(pydantic.BaseModel):
    """What an answer has to be."""

    city: Literal["Paris", "Rome"]
    n: int = pydantic.Field(ge=0, le=9)


@pytest.fixture(scope="module")
def server(lfm2_tiny_path: Path) -> Iterator[Live]:
    with Live(lfm2_tiny_path, n_ctx=2048) as live:
        yield live


@pytest.fixture(autouse=True)
def _fresh(server: Live):
    server.model.engine.forget()  # counts of what is cached are those of the test


@pytest.fixture(scope="module")
def functions(lfm2_tiny_path: Path) -> list[dict[str, Any]]:
    tools = json.loads(lfm2_tiny_path.with_name("cases.json").read_text("utf8"))["tools"]
    return [tool["function"] for tool in tools]


@pytest.fixture(scope="module")
def tools(functions: list[dict[str, Any]]) -> list[Any]:
    return [{"type": "function", "function": function} for function in functions]


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key="none", base_url=f"http://127.0.0.1:{server.port}/v1", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: Live) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(api_key="none", base_url=f"http://127.0.0.1:{server.port}", max_retries=0) as client:
        yield client


# --- chat completions ---


def beginning(system: str, question: str) -> list[Any]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def read(calls: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls or ()]


def test_a_loop_of_openai(client: openai.OpenAI, tools: list[Any]):
    messages = beginning(SYSTEM, PARIS)
    first = client.chat.completions.create(model="x", messages=messages, tools=tools, temperature=0)
    [choice] = first.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None and read(choice.message.tool_calls) == [CALL]
    messages += [choice.message, {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": SUNNY}]
    second = client.chat.completions.create(model="x", messages=messages, tools=tools, temperature=0)
    assert second.choices[0].message.content == ANSWER and second.choices[0].finish_reason == "stop"
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens - 1


def test_a_stream_of_openai(client: openai.OpenAI, tools: list[Any]):
    """The client checks that deltas fit together, and tells of arguments when they are complete."""
    with client.chat.completions.stream(model="x", messages=beginning(THINKING, BOTH), tools=tools, temperature=0) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        [choice] = stream.get_final_completion().choices
    assert [(event.index, event.name, json.loads(event.arguments)) for event in done] == [
        (0, "get_weather", {"city": "Paris"}), (1, "get_weather", {"city": "Rome"})]  # fmt: skip
    assert choice.finish_reason == "tool_calls" and len({call.id for call in choice.message.tool_calls}) == 2
    assert choice.message.reasoning_content == THOUGHT and choice.message.content is None


def test_openai_asynchronously(server: Live, tools: list[Any]):
    async def main() -> list[str | None]:
        async with openai.AsyncOpenAI(api_key="none", base_url=f"http://127.0.0.1:{server.port}/v1") as client:

            async def loop(system: str, question: str, result: str) -> str | None:
                messages = beginning(system, question)
                async with client.chat.completions.stream(model="x", messages=messages, tools=tools, temperature=0) as stream:
                    message = (await stream.get_final_completion()).choices[0].message
                messages += [message.model_dump(exclude_none=True),
                             {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": result}]  # fmt: skip
                done = await client.chat.completions.create(model="x", messages=messages, tools=tools, temperature=0)
                return done.choices[0].message.content

            return await asyncio.gather(loop(SYSTEM, PARIS, SUNNY), loop(THINKING, PARIS, SUNNY),
                                        loop(SYSTEM, "What is 3 plus 4?", "7"))  # fmt: skip

    assert asyncio.run(main()) == [ANSWER, ANSWER, "3 plus 4 is 7."]


def test_pydantic_models_of_openai(client: openai.OpenAI):
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    done = client.chat.completions.parse(model="x", messages=messages, temperature=0, max_tokens=100, response_format=City)
    assert isinstance(done.choices[0].message.parsed, City)

    class GetWeather(pydantic.BaseModel):
        """Get the weather in a city."""

        city: Literal["Rome", "Oslo"]

    called = client.chat.completions.parse(model="x", messages=beginning(SYSTEM, PARIS), temperature=0, max_tokens=100,
                                           tools=[openai.pydantic_function_tool(GetWeather, name="get_weather")])  # fmt: skip
    [call] = called.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="x", messages=messages, temperature=0, max_tokens=2, response_format=City)


# --- responses ---


@pytest.fixture(scope="module")
def flat(functions: list[dict[str, Any]]) -> list[Any]:
    return [{"type": "function", "strict": False, **function} for function in functions]


def items_of(response: Any) -> list[tuple[Any, ...]]:
    """What each item of an output says."""
    said: dict[str, Any] = {
        "reasoning": lambda item: (item.content[0].type, item.content[0].text),
        "message": lambda item: (item.content[0].text,),
        "function_call": lambda item: (item.name, json.loads(item.arguments)),
    }  # fmt: skip
    assert all(item.status == "completed" for item in response.output)
    return [(item.type, *said[item.type](item)) for item in response.output]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("system", [SYSTEM, THINKING])
def test_a_loop_of_responses(client: openai.OpenAI, flat: list[Any], stream: bool, system: str):
    def respond(items: list[Any]) -> Any:
        asked: dict[str, Any] = {"model": "x", "instructions": system, "input": items, "tools": flat, "temperature": 0}
        if not stream:
            return client.responses.create(**asked)
        with client.responses.stream(**asked) as events:
            seen = list(events)
            final = events.get_final_response()
        check_events(seen, final)
        return final

    thoughts: list[Any] = [("reasoning", "reasoning_text", THOUGHT)] if system is THINKING else []
    items: list[Any] = [{"role": "user", "content": PARIS}]
    first = respond(items)
    assert items_of(first) == [*thoughts, ("function_call", *CALL)] and first.status == "completed"
    n_thought = first.usage.output_tokens_details.reasoning_tokens
    assert (n_thought > 5) == (system is THINKING) and n_thought < first.usage.output_tokens
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items.append({"type": "function_call_output", "call_id": first.output[-1].call_id, "output": SUNNY})
    second = respond(items)
    assert second.output_text == ANSWER
    assert second.usage.input_tokens_details.cached_tokens == first.usage.total_tokens - 1  # thought and call as they were


def check_events(seen: list[Any], final: Any) -> None:
    """Every item is told of in order: added, its text in pieces, done; and the last response has them all."""
    kinds = [event.type for event in seen]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    texts = {"reasoning": "response.reasoning_text", "message": "response.output_text",
             "function_call": "response.function_call_arguments"}  # fmt: skip
    for index, item in enumerate(final.output):
        mine = [event for event in seen if getattr(event, "output_index", None) == index]
        text = texts[item.type]
        deltas = "".join(event.delta for event in mine if event.type == f"{text}.delta")
        [done] = [event for event in mine if event.type == f"{text}.done"]
        assert deltas == (done.arguments if item.type == "function_call" else done.text)
        assert mine[0].type == "response.output_item.added" and mine[0].item.status == "in_progress"
        assert mine[-1].type == "response.output_item.done" and mine[-1].item.id == item.id
        assert {event.item_id for event in mine[1:-1]} == {item.id}
    done = SimpleNamespace(output=[event.item for event in seen if event.type == "response.output_item.done"])
    assert items_of(done) == items_of(final)


def test_what_responses_can_be_told_of_calls(client: openai.OpenAI, flat: list[Any]):
    def calls(text: str, **more: Any) -> tuple[Any, list[str]]:
        done = client.responses.create(model="x", input=text, instructions=SYSTEM, temperature=0, max_output_tokens=60,
                                       **{"tools": flat, **more})  # fmt: skip
        return done, [item.name for item in done.output if item.type == "function_call"]

    assert calls(BOTH)[1] == calls(BOTH, parallel_tool_calls=True)[1] == ["get_weather"] * 2
    done, names = calls(BOTH, parallel_tool_calls=False)
    assert names == ["get_weather"] and done.parallel_tool_calls is False
    done, names = calls("Hello!", tool_choice={"type": "function", "name": "add"})
    assert set(names) == {"add"} and done.tool_choice.name == "add"
    assert calls("Hello!", tool_choice="required")[1] and not calls(PARIS, tool_choice="none")[1]
    strict = [{**flat[0], "strict": True, "parameters": {"type": "object", "properties": {"city": {"enum": ["Oslo"]}},
                                                         "required": ["city"]}}]  # fmt: skip
    assert json.loads(calls(PARIS, tools=strict)[0].output[0].arguments) == {"city": "Oslo"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_in_a_response(client: openai.OpenAI, flat: list[Any], stream: bool):
    for n in range(2, 18):
        asked: dict[str, Any] = {"model": "x", "input": BOTH, "tools": flat, "temperature": 0, "max_output_tokens": n}
        if stream:
            with client.responses.stream(**asked) as events:
                done = list(events)[-1].response
        else:
            done = client.responses.create(**asked)
        assert done.status == "incomplete" and done.incomplete_details.reason == "max_output_tokens"
        assert [item.status for item in done.output] in ([], ["incomplete"], ["completed", "incomplete"],
                                                         ["completed", "completed", "incomplete"])  # fmt: skip


def test_pydantic_models_of_responses(client: openai.OpenAI):
    asked: dict[str, Any] = {"model": "x", "input": "What is the capital of France?", "temperature": 0}
    done = client.responses.parse(**asked, text_format=City)
    assert isinstance(done.output_parsed, City) and done.text.format.type == "json_schema"
    with client.responses.stream(**asked, text_format=City) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == done.output_parsed
    thought = client.responses.create(**{**asked, "input": PARIS}, instructions=THINKING, reasoning={"effort": "none"})
    assert [item.type for item in thought.output] == ["message"]


# --- messages ---


@pytest.fixture(scope="module")
def claude_tools(functions: list[dict[str, Any]]) -> list[Any]:
    return [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in functions]


GREEDY = {"temperature": 0}


def asking(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("system", [SYSTEM, THINKING])
def test_a_loop_of_messages(claude: anthropic.Anthropic, claude_tools: list[Any], stream: bool, system: str):
    def answer(messages: list[Any]) -> Any:
        asked: dict[str, Any] = {"model": "x", "max_tokens": 100, "system": system, "messages": messages, "tools": claude_tools,
                                 "extra_body": GREEDY}  # fmt: skip
        if not stream:
            return claude.messages.create(**asked)
        with claude.messages.stream(**asked) as events:
            stops = [event for event in events if event.type == "content_block_stop"]
            final = events.get_final_message()
        assert [event.index for event in stops] == list(range(len(final.content)))
        assert [event.content_block for event in stops] == final.content
        return final

    messages = asking(PARIS)
    first = answer(messages)
    thoughts = [block for block in first.content if block.type == "thinking"]
    assert [(block.thinking, block.signature) for block in thoughts] == ([(THOUGHT, "")] if system is THINKING else [])
    [call] = first.content[len(thoughts) :]
    assert (call.type, call.name, call.input) == ("tool_use", *CALL) and first.stop_reason == "tool_use"
    messages += [{"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
                 {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": SUNNY}]}]  # fmt: skip
    second = answer(messages)
    assert second.content[-1].text == ANSWER and second.stop_reason == "end_turn"
    read_first = first.usage.input_tokens + first.usage.cache_read_input_tokens + first.usage.output_tokens - 1
    assert second.usage.cache_read_input_tokens == read_first  # thought and call as they were


def test_what_messages_can_be_told_of_calls(claude: anthropic.Anthropic, claude_tools: list[Any]):
    def calls(text: str, **choice: Any) -> list[tuple[str, Any]]:
        done = claude.messages.create(model="x", max_tokens=60, messages=asking(text), tools=claude_tools, tool_choice=choice,
                                      extra_body=GREEDY)  # fmt: skip
        return [(block.name, block.input) for block in done.content if block.type == "tool_use"]

    assert calls(BOTH, type="auto") == [CALL, ("get_weather", {"city": "Rome"})]
    assert [name for name, _ in calls(BOTH, type="auto", disable_parallel_tool_use=True)] == ["get_weather"]
    assert [name for name, _ in calls(BOTH, type="any", disable_parallel_tool_use=True)] == ["get_weather"]
    assert calls("Hello!", type="any") and {name for name, _ in calls("Hello!", type="tool", name="add")} == {"add"}
    assert calls(PARIS, type="none") == []
    with pytest.raises(anthropic.BadRequestError, match="no tool 'subtract'"):
        calls(PARIS, type="tool", name="subtract")


@pytest.mark.parametrize(("thinking", "thought"), [
    (None, THOUGHT), ({"type": "enabled", "budget_tokens": 1024}, THOUGHT), ({"type": "adaptive"}, THOUGHT),
    ({"type": "enabled", "budget_tokens": 3}, "I call the"), ({"type": "disabled"}, None),
])  # fmt: skip
def test_thinking_of_messages(claude: anthropic.Anthropic, claude_tools: list[Any], thinking: Any, thought: str | None):
    asked: dict[str, Any] = {"model": "x", "max_tokens": 100, "system": THINKING, "messages": asking(PARIS),
                             "tools": claude_tools, "extra_body": GREEDY}  # fmt: skip
    if thinking is not None:
        asked["thinking"] = thinking
    with claude.messages.stream(**asked) as stream:
        deltas = "".join(event.thinking for event in stream if event.type == "thinking")
        final = stream.get_final_message()
    assert [b.thinking for b in final.content if b.type == "thinking"] == ([] if thought is None else [thought])
    assert deltas == (thought or "") and final.content[-1].input == CALL[1]


def test_pydantic_models_of_messages(claude: anthropic.Anthropic):
    done = claude.messages.parse(model="x", max_tokens=100, messages=asking("What is the capital of France?"),
                                 output_format=City, extra_body=GREEDY)  # fmt: skip
    assert isinstance(done.parsed_output, City)
