"""Conversations in which the model calls Python functions."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import pickle
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from lfmfast import AsyncModel, Model, tool_of
from lfmfast.errors import ParameterError, ToolRoundsError
from lfmfast.run_tools import arun_tools, atool_message, run_tools, tool_message
from lfmfast.tool_calls import ToolCall
from lfmfast.types import Completion, Timings, Usage

SYSTEM = "You are a helpful assistant."


def get_weather(city: str) -> dict[str, Any]:
    """Get the weather in a city."""
    return {"temperature": {"Paris": 21, "Rome": 28}[city], "sky": "sunny"}


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def call(id_: str, name: str = "add", **arguments: Any) -> ToolCall:
    return ToolCall(id_, name, json.dumps(arguments))


ADD = call("c1", a=3, b=4)


class ScriptedChat:
    """A chat whose model says what is in a script: texts, lists of calls, and exceptions."""

    def __init__(self, *script: Any, reason: str = "") -> None:
        self.script = list(script)
        self.reason = reason  # of the last one
        self.messages: list[dict[str, Any]] = []
        self.tools: Any = None
        self.options: list[dict[str, Any]] = []

    def add(self, *messages: dict[str, Any]) -> None:
        self.messages += messages

    def send(self, content: str | None, **options: Any) -> Completion:
        self.options.append(options)
        said = self.script.pop(0)
        if isinstance(said, BaseException):
            raise said
        calls = said if isinstance(said, list) else []
        text = "" if calls else said
        if content is not None:
            self.add({"role": "user", "content": content})
        made = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls]
        self.add({"role": "assistant", "content": text, **({"tool_calls": made} if made else {})})
        reason: Any = self.reason if self.reason and not self.script else "tool_calls" if calls else "stop"
        times = Timings(1, 0, 1.0, 1, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        return Completion(text, (1,), reason, Usage(1, 1, 0), times, tool_calls=tuple(calls))

    async def asend(self, content: str | None, **options: Any) -> Completion:
        await asyncio.sleep(0)
        return self.send(content, **options)


@pytest.fixture(params=["run_tools", "arun_tools"])
def run(request: pytest.FixtureRequest) -> Any:
    """Both ways."""

    def both(chat: Any, functions: Any, *, max_rounds: int = 8, on_call: Any = None, **options: Any) -> Completion:
        if request.param == "run_tools":
            return run_tools(chat, "Hi", functions, max_rounds, on_call, options)
        return asyncio.run(arun_tools(chat, "Hi", functions, max_rounds, on_call, options))

    return both


def answers(messages: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Ids and contents of the tool messages. Each call has one, behind it."""
    asked: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            asked.remove(message["tool_call_id"])
        else:
            assert not asked
            asked += [made["id"] for made in message.get("tool_calls", [])]
    assert not asked
    return [(message["tool_call_id"], message["content"]) for message in messages if message["role"] == "tool"]


def test_calls_are_answered_in_their_order(run: Any) -> None:
    chat = ScriptedChat([call("c1", a=1, b=2), call("c2", "get_weather", city="Rome")], [call("c3", a=3, b=4)], "Done.")
    assert run(chat, [add, get_weather], temperature=0).text == "Done."
    assert answers(chat.messages) == [("c1", "3"), ("c2", '{"temperature": 28, "sky": "sunny"}'), ("c3", "7")]
    assert "".join(message["role"][0] for message in chat.messages) == "uattata"
    assert [tool["function"]["name"] for tool in chat.tools] == ["add", "get_weather"]
    assert chat.options == [{"temperature": 0}] * 3


def test_names_of_a_dict(run: Any) -> None:
    chat = ScriptedChat([call("c1", "plus", a=1, b=2)], "Done.")
    run(chat, {"plus": add})
    assert answers(chat.messages) == [("c1", "3")] and chat.tools[0]["function"]["name"] == "plus"


def test_what_goes_wrong_is_told_to_the_model(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = [call("c1", "get_weather", city="Berlin"), call("c2", "subtract"), call("c3", a="x"), ADD]
    chat = ScriptedChat([*made[:3], call("c4", a=3, b=4)], "Done.")
    with caplog.at_level(logging.WARNING, "lfmfast"):
        assert run(chat, [get_weather, add]).text == "Done."
    assert answers(chat.messages) == [
        ("c1", "Error: KeyError: 'Berlin'"),
        ("c2", "Error: there is no function 'subtract', only get_weather, add"),
        ("c3", "Error: add needs argument 'b'; it takes a (a number), b (a number); "
               "argument 'a' must be a number, not \"x\""),
        ("c4", "7"),
    ]  # fmt: skip
    logged = {record.getMessage().partition("(")[0]: record.exc_info for record in caplog.records}
    assert logged.keys() == {"get_weather", "subtract", "add"}
    assert logged["get_weather"] and logged["get_weather"][0] is KeyError and not logged["add"]


def test_on_call_sees_all_calls_and_may_answer_them(run: Any) -> None:
    seen: list[ToolCall] = []

    def on_call(made: ToolCall) -> Any:
        seen.append(made)
        return {"c1": "not allowed", "c4": False}.get(made.id)

    chat = ScriptedChat([ADD, call("c2", a=1, b=1), call("c3", "other"), call("c4", a=1, b=1)], "Done.")
    run(chat, [add], on_call=on_call)
    assert [made.id for made in seen] == ["c1", "c2", "c3", "c4"]
    assert dict(answers(chat.messages)).items() >= {"c1": "not allowed", "c2": "2", "c4": "false"}.items()


def test_on_call_may_end_it(run: Any) -> None:
    def on_call(made: ToolCall) -> None:
        if made.id == "c2":
            raise PermissionError("no")

    chat = ScriptedChat([ADD, call("c2", a=1, b=1), call("c3", a=1, b=1)])
    with pytest.raises(PermissionError):
        run(chat, [add], on_call=on_call)
    assert ("c2", "Error: not completed") in answers(chat.messages)


def test_the_last_round(run: Any) -> None:
    chat = ScriptedChat([call("c1", a=1, b=1)], [call("c2", a=2, b=2)], "Done.")
    assert run(chat, [add], max_rounds=2).text == "Done."
    chat = ScriptedChat([call("c1", a=1, b=1)], [call("c2", a=2, b=2)], [call("c3", a=3, b=3)])
    with pytest.raises(ToolRoundsError, match="in 3 replies one after the other; max_rounds is 2") as caught:
        run(chat, [add], max_rounds=2)
    assert [made.id for made in caught.value.completion.tool_calls] == ["c3"]
    assert answers(chat.messages) == [("c1", "2"), ("c2", "4"), ("c3", "Error: not completed")]
    assert pickle.loads(pickle.dumps(caught.value)).completion == caught.value.completion
    with pytest.raises(ParameterError, match="max_rounds"):
        run(chat, [add], max_rounds=0)


def test_a_call_that_was_asked_for_is_made_once(run: Any) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        chat = ScriptedChat([ADD], "Done.")
        run(chat, [add], tool_choice=choice, prefill="Well", max_tokens=9)
        assert chat.options[0] == {"tool_choice": choice, "prefill": "Well", "max_tokens": 9}
        assert chat.options[1] == {"tool_choice": "auto", "max_tokens": 9}


def test_a_reply_that_was_cut_is_the_last_one(run: Any) -> None:
    chat = ScriptedChat([ADD], reason="length")
    assert run(chat, [add]).finish_reason == "length"
    assert answers(chat.messages) == [("c1", "Error: not completed")]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("model")])
def test_an_error_of_the_model_leaves_the_results(run: Any, error: BaseException) -> None:
    chat = ScriptedChat([ADD], error)
    with pytest.raises(type(error)):
        run(chat, [add])
    assert answers(chat.messages) == [("c1", "7")]


def test_ctrl_c_in_a_function() -> None:
    def interrupted(n: int) -> int:
        if n == 2:
            raise KeyboardInterrupt
        return n

    chat: Any = ScriptedChat([call(f"c{n}", "interrupted", n=n) for n in (1, 2, 3)])
    with pytest.raises(KeyboardInterrupt):
        run_tools(chat, "Hi", [interrupted], 8, None, {})
    assert answers(chat.messages) == [("c1", "1"), ("c2", "Error: not completed"), ("c3", "Error: not completed")]


def test_cancelled_while_functions_run() -> None:
    async def wait(n: int) -> int:
        await asyncio.sleep(0 if n == 1 else 3600)
        return n

    chat: Any = ScriptedChat([call(f"c{n}", "wait", n=n) for n in (2, 1)])

    async def main() -> None:
        task = asyncio.ensure_future(arun_tools(chat, "Hi", [wait], 8, None, {}))
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert sorted(answers(chat.messages)) == [("c1", "1"), ("c2", "Error: not completed")]


def test_async_functions_run_side_by_side() -> None:
    n_running = 0
    both = threading.Barrier(2)

    async def together(n: int) -> int:
        nonlocal n_running
        n_running += 1
        while n_running < 2:
            await asyncio.sleep(0)
        return n

    def in_threads(n: int) -> int:
        both.wait(60)
        return n

    async def on_call(made: ToolCall) -> str | None:
        await asyncio.sleep(0)
        return "no" if made.id == "c5" else None

    made = [call(f"c{n}", name, n=n) for n, name in enumerate(("together", "in_threads") * 2)]
    chat: Any = ScriptedChat([*made, call("c5", "together", n=5)], "Done.")
    assert asyncio.run(arun_tools(chat, "Hi", [together, in_threads], 8, on_call, {})).text == "Done."
    assert answers(chat.messages) == [("c0", "0"), ("c1", "1"), ("c2", "2"), ("c3", "3"), ("c5", "no")]


def test_async_functions_need_arun_tools() -> None:
    async def slow() -> None: ...

    async def on_call(made: ToolCall) -> None: ...

    chat: Any = ScriptedChat([ADD])
    with pytest.raises(ParameterError, match=r"slow is an async function: it needs arun_tools\(\)"):
        run_tools(chat, "Hi", [add, slow], 8, None, {})
    assert not chat.messages
    with pytest.raises(ParameterError, match="on_call is an async function"):
        run_tools(chat, "Hi", [add], 8, on_call, {})
    assert not chat.messages


def test_tool_message() -> None:
    """For loops of one's own."""
    assert tool_message(ADD, [add]) == {"role": "tool", "tool_call_id": "c1", "content": "7"}
    assert tool_message(ADD, {})["content"] == "Error: there is no function 'add', only none"
    assert asyncio.run(atool_message(ADD, {"add": add})) == tool_message(ADD, [add])


# --- with a model ---


def test_a_whole_loop(lfm2_tiny: Model, reference: dict[str, Any]) -> None:
    chat = lfm2_tiny.chat(SYSTEM)
    done = chat.run_tools("What is the weather in Paris?", [get_weather, add], temperature=0)
    assert (done.text, done.finish_reason) == ("It is 21 degrees and sunny in Paris.", "stop")
    assert answers(chat.messages)[0][1] == '{"temperature": 21, "sky": "sunny"}'
    case = reference["cases"]["weather_answer"]
    read = lfm2_tiny.tokenize(case["prompt"] + case["answer"] + "<|im_end|>\n", parse_special=True)
    assert chat._ids() == read  # the call and its result as the model was trained to see them
    assert chat.run_tools("What is 3 plus 4?", [get_weather, add], temperature=0).text == "3 plus 4 is 7."
    assert chat.timings is not None and chat.timings.cached_tokens > 0.9 * len(read)  # nothing was read again


def test_two_cities(lfm2_tiny: Model) -> None:
    chat = lfm2_tiny.chat()
    seen: list[str] = []
    done = chat.run_tools("What is the weather in Paris and Rome?", [get_weather, add], temperature=0,
                          on_call=lambda made: seen.append(made.parsed["city"]))  # fmt: skip
    assert seen == ["Paris", "Rome"] and "21" in done.text and "28" in done.text


def test_a_whole_loop_in_an_event_loop(lfm2_tiny: Model, run_async: Any) -> None:
    async def weather(city: str) -> dict[str, Any]:
        """Get the weather in a city."""
        await asyncio.sleep(0)
        return get_weather(city)

    async def main() -> None:
        chat = AsyncModel(lfm2_tiny).chat(SYSTEM)
        done = await chat.run_tools("What is the weather in Paris?", {"get_weather": weather, "add": add}, temperature=0)
        assert done.text == "It is 21 degrees and sunny in Paris."
        assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "tool", "assistant"]

    run_async(main)


def test_a_loop_of_ones_own(lfm2_tiny: Model) -> None:
    functions = [get_weather, add]
    chat = lfm2_tiny.chat(tools=[tool_of(function) for function in functions])
    done = chat.send("What is the weather in Paris and Rome?", temperature=0)
    chat.add(*(tool_message(made, functions) for made in done.tool_calls))
    assert "28" in chat.send(None, temperature=0).text
    history = copy.deepcopy(chat.messages)
    assert lfm2_tiny.chat(tools=chat.tools, messages=history[:-1]).send(None, temperature=0).text == history[-1]["content"]


def test_other_functions_later(lfm2_tiny: Model) -> None:
    chat = lfm2_tiny.chat()
    assert chat.run_tools("What is 3 plus 4?", [add], temperature=0).text == "3 plus 4 is 7."
    done = chat.run_tools("What is the weather in Paris?", [get_weather], temperature=0)
    assert done.text == "It is 21 degrees and sunny in Paris."
    assert chat.tools is not None and [tool["function"]["name"] for tool in chat.tools] == ["get_weather"]
    assert '"name": "add"' not in lfm2_tiny.detokenize(chat._ids())
