"""Tool calls, thoughts and constrained answers over HTTP, with a model that was trained to call two functions."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from inprocess import Live

from lfmfast import _request

CHAT = "/v1/chat/completions"
GREEDY = {"temperature": 0, "repeat_penalty": 1}
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
THINKING = {"role": "system", "content": "You are a helpful assistant. Think step by step."}
SUNNY = '{"temperature": 21, "sky": "sunny"}'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


PARIS, BOTH = user("What is the weather in Paris?"), user("What is the weather in Paris and Rome?")


@pytest.fixture(scope="module")
def server(lfm2_tiny_path: Path) -> Iterator[Live]:
    with Live(lfm2_tiny_path, n_ctx=2048) as live:
        yield live


@pytest.fixture(scope="module")
def tools(lfm2_tiny_path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(lfm2_tiny_path.with_name("cases.json").read_text("utf8"))["tools"]
    return found


def ask(server: Live, messages: list[Any], **more: Any) -> dict[str, Any]:
    """The whole answer."""
    answer: dict[str, Any] = server.post(CHAT, {"messages": messages, **GREEDY, **more})
    return answer


def choice_of(server: Live, messages: list[Any], **more: Any) -> dict[str, Any]:
    choice: dict[str, Any] = ask(server, messages, **more)["choices"][0]
    return choice


def message_of(server: Live, messages: list[Any], **more: Any) -> dict[str, Any]:
    message: dict[str, Any] = choice_of(server, messages, **more)["message"]
    return message


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and arguments of calls, after a look at their form."""
    calls = message.get("tool_calls", [])
    for call in calls:
        assert call.keys() == {"id", "type", "function"} and call["type"] == "function"
        assert call["id"].startswith("call_") and call["function"].keys() == {"name", "arguments"}
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The choice that the chunks of a stream come to, put together as clients do."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    assert choices[0]["delta"] == message and all(c["finish_reason"] is None for c in choices[:-1])
    for choice in choices[1:]:
        for name in ("content", "reasoning_content"):
            if name in choice["delta"]:
                message[name] = (message.get(name) or "") + choice["delta"][name]
        for delta in choice["delta"].get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if delta["index"] == len(calls):  # its beginning
                assert delta.keys() == {"index", "id", "type", "function"} and delta["function"]["name"]
                calls.append({name: value for name, value in delta.items() if name != "index"})
            else:
                assert delta["index"] == len(calls) - 1 and delta.keys() == {"index", "function"}
                assert list(delta["function"]) == ["arguments"]
                calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    return {"finish_reason": choices[-1]["finish_reason"], "index": index, "message": message}


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    calls = choice["message"].get("tool_calls")
    return choice if calls is None else {**choice, "message": {**choice["message"], "tool_calls": [
        {**call, "id": ""} for call in calls]}}  # fmt: skip


# --- loops ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("system", "question", "call", "result", "text"), [
    (SYSTEM, PARIS, '[get_weather(city="Paris")]', SUNNY, "It is 21 degrees and sunny in Paris."),
    (THINKING, PARIS, '[get_weather(city="Paris")]', SUNNY, "It is 21 degrees and sunny in Paris."),
    (SYSTEM, user("What is 3 plus 4?"), "[add(a=3, b=4)]", "7", "3 plus 4 is 7."),
])  # fmt: skip
def test_a_whole_loop(server: Live, tools: list[Any], stream: bool, system: Any, question: Any, call: str, result: str,
                      text: str):  # fmt: skip
    server.model.engine.forget()

    def turn(history: list[Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
        """Message, usage and prompt."""
        body = {"messages": history, "tools": tools, "verbose": True, **GREEDY}
        if not stream:
            answer = server.post(CHAT, body)
            return answer["choices"][0]["message"], answer["usage"], answer["__verbose"]["prompt"]
        chunks = server.chunks(CHAT, {**body, "stream_options": {"include_usage": True}})
        [prompt] = [chunk["__verbose"]["prompt"] for chunk in chunks if "__verbose" in chunk]
        return joined(chunks)["message"], chunks[-1]["usage"], prompt

    history = [system, question]
    called, first, first_prompt = turn(history)
    assert len(calls_of(called)) == 1 and called["content"] is None
    history += [called, {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": result}]
    answer, second, prompt = turn(history)
    assert answer["content"] == text and "tool_calls" not in answer
    # The model answers right even when its call was lost, so look: it stands in the prompt as it was written, token by token.
    thought = f"<think>{called['reasoning_content']}</think>" if system is THINKING else ""
    wrote = f"{thought}<|tool_call_start|>{call}<|tool_call_end|>"
    assert prompt == f"{first_prompt}{wrote}<|im_end|>\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"
    ids = [server.post("/tokenize", {"content": shown, "parse_special": True, "add_special": False})["tokens"]
           for shown in (first_prompt, prompt, wrote)]  # fmt: skip
    assert ids[1][: len(ids[0]) + len(ids[2])] == ids[0] + ids[2]
    assert (len(ids[0]), len(ids[1])) == (first["prompt_tokens"], second["prompt_tokens"])
    # Nothing is read twice: of the first answer all but the end token, which is sampled and not read.
    assert first["completion_tokens"] == len(ids[2]) + 1
    assert second["prompt_tokens_details"]["cached_tokens"] == len(ids[0]) + len(ids[2])
    third, usage, _ = turn([*history, answer, user("Thank you.")])
    assert third["content"] == "You are welcome!"
    if system is SYSTEM:  # what was thought before the last answer is stripped, so that more is to be read
        assert usage["prompt_tokens_details"]["cached_tokens"] == second["total_tokens"] - 1


@pytest.mark.parametrize("parallel", [None, True, False])
def test_two_cities(server: Live, tools: list[Any], parallel: bool | None):
    choice = choice_of(server, [BOTH], tools=tools, parallel_tool_calls=parallel)
    calls = calls_of(choice["message"])
    assert choice["finish_reason"] == "tool_calls"
    if parallel is False:
        assert len(calls) == 1 and calls[0][0] == "get_weather" and calls[0][1]["city"].startswith("Paris")
        return
    assert calls == [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]
    rain = '{"temperature": 9, "sky": "rainy"}'
    results = [{"role": "tool", "tool_call_id": call["id"], "content": content}
               for call, content in zip(choice["message"]["tool_calls"], (SUNNY, rain), strict=True)]  # fmt: skip
    text = message_of(server, [BOTH, choice["message"], *results], tools=tools)["content"]
    assert "21" in text and "9" in text and "Paris" in text and "Rome" in text


@pytest.mark.parametrize("more", [
    {}, {"tool_choice": "required"}, {"logprobs": True}, {"timings_per_token": True}, {"max_tokens": 9}, {"max_tokens": 12},
    {"n": 2}, {"reasoning_format": "none"}, {"parse_tool_calls": False}, {"reasoning_budget": 2},
])  # fmt: skip
@pytest.mark.parametrize("system", [SYSTEM, THINKING])
def test_a_stream_gives_what_a_whole_answer_gives(server: Live, tools: list[Any], system: Any, more: dict[str, Any]):
    body = {"messages": [system, BOTH], "tools": tools, **GREEDY, **more}
    choices = server.post(CHAT, body)["choices"]
    chunks = server.chunks(CHAT, body)
    for choice in choices:
        streamed = joined(chunks, choice["index"])
        for message in (choice["message"], streamed["message"]):
            message.pop("unread_tool_calls", None)
            message["content"] = message["content"] or ""
        choice.pop("logprobs", None)
        assert without_ids(streamed) == without_ids(choice)
    ids = [call["id"] for choice in choices for call in choice["message"].get("tool_calls", ())]
    assert len(set(ids)) == len(ids)


def test_several_answers_with_calls(server: Live, tools: list[Any]):
    choices = ask(server, [SYSTEM, PARIS], tools=tools, n=2)["choices"]
    assert [calls_of(choice["message"]) for choice in choices] == [[("get_weather", {"city": "Paris"})]] * 2


# --- which calls ---


@pytest.mark.parametrize("question", [PARIS, user("Hello!")])
def test_choices(server: Live, tools: list[Any], question: Any):
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}},
                   {"type": "function", "function": {"name": "add"}}):  # fmt: skip
        answer = choice_of(server, [SYSTEM, question], tools=tools, tool_choice=choice)
        (name, arguments), *_ = calls_of(answer["message"])
        assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
        assert choice == "required" or name == choice["function"]["name"]
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        jsonschema.validate(arguments, schemas[name])
    assert calls_of(message_of(server, [SYSTEM, question], tools=tools, tool_choice="none")) == []
    assert bool(calls_of(message_of(server, [SYSTEM, question], tools=tools, tool_choice="auto"))) == (question is PARIS)


def test_choices_that_can_not_be_made(server: Live, tools: list[Any]):
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        assert "needs tools" in server.refusal(CHAT, {"messages": [PARIS], "tool_choice": choice})
    other = {"type": "function", "function": {"name": "subtract"}}
    assert "'subtract'" in server.refusal(CHAT, {"messages": [PARIS], "tools": tools, "tool_choice": other})
    assert "tool_choice" in server.refusal(CHAT, {"messages": [PARIS], "tools": tools, "tool_choice": {"type": "function"}})


def test_strict_calls_fit_their_schema(server: Live, tools: list[Any]):
    def tool(strict: bool, city: dict[str, Any]) -> dict[str, Any]:
        function = tools[0]["function"]
        return {"type": "function", "function": {**function, "strict": strict, "parameters": {
            **function["parameters"], "properties": {"city": city}}}}  # fmt: skip

    cities = {"type": "string", "enum": ["Rome", "Oslo"]}
    [(_, loose)] = calls_of(message_of(server, [SYSTEM, PARIS], tools=[tool(False, cities)]))
    [(_, strict)] = calls_of(message_of(server, [SYSTEM, PARIS], tools=[tool(True, cities)]))
    assert loose["city"] not in cities["enum"] and strict["city"] in cities["enum"]
    # Whether calls are enforced makes no other prompt.
    prompts = [server.post("/apply-template", {"messages": [PARIS], "tools": [tool(on, cities)]}) for on in (False, True)]
    assert prompts[0] == prompts[1] and "enum" in prompts[0]["prompt"]
    unique = {"type": "array", "uniqueItems": True}
    assert "uniqueItems" in server.refusal(CHAT, {"messages": [PARIS], "tools": [tool(True, unique)]})
    assert calls_of(message_of(server, [SYSTEM, PARIS], tools=[tool(False, unique)]))


@pytest.mark.parametrize(("arguments", "written"), [
    ('{"city": "Paris"}', 'get_weather(city="Paris")'), ({"city": "Paris"}, 'get_weather(city="Paris")'),
    ("", "get_weather()"), ({}, "get_weather()"), (None, "get_weather()"), ("null", "get_weather()"),
    ('{"city": "Par', 'get_weather({"city": "Par)'),
])  # fmt: skip
def test_arguments_of_past_calls(server: Live, tools: list[Any], arguments: Any, written: str):
    called = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}]}  # fmt: skip
    history = [SYSTEM, PARIS, called, {"role": "tool", "tool_call_id": "call_1", "content": SUNNY}]
    prompt = server.post("/apply-template", {"messages": history, "tools": tools})["prompt"]
    assert f"<|im_start|>assistant\n<|tool_call_start|>[{written}]<|tool_call_end|><|im_end|>\n" in prompt
    assert "21 degrees" in message_of(server, history, tools=tools)["content"]


# --- how answers with calls end ---


def test_a_call_that_is_cut(server: Live, tools: list[Any]):
    wrote = '[get_weather(city="Paris"), get_weather(city="Rome")]'
    for n in range(1, ask(server, [BOTH], tools=tools)["usage"]["completion_tokens"]):
        choice = choice_of(server, [BOTH], tools=tools, max_tokens=n)
        message = choice["message"]
        assert choice["finish_reason"] == "length"
        assert calls_of(message) in ([], [("get_weather", {"city": "Paris"})],
                                     [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})])  # fmt: skip
        assert all(text in wrote for text in message.get("unread_tool_calls", ()))
        assert "".join(message.get("unread_tool_calls", ())) == (message["content"] or "")
    assert len(calls_of(message)) == 2


def test_stop_strings_count_in_calls_too(server: Live, tools: list[Any]):
    choice = choice_of(server, [SYSTEM, PARIS], tools=tools, stop=["Paris"])
    assert choice["finish_reason"] == "stop" and choice["message"]["unread_tool_calls"] == ['[get_weather(city="']
    choice = choice_of(server, [SYSTEM, PARIS], tools=tools, stop=["Rome", "\n"])
    assert choice["finish_reason"] == "tool_calls" and calls_of(choice["message"]) == [("get_weather", {"city": "Paris"})]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_calls(server: Live, tools: list[Any], stream: bool):
    body = {"messages": [SYSTEM, PARIS], "tools": tools, "logprobs": True, "top_logprobs": 2, **GREEDY}
    if stream:
        chunks = server.chunks(CHAT, body)
        content = [item for chunk in chunks for c in chunk["choices"] if c.get("logprobs") for item in c["logprobs"]["content"]]
    else:
        content = server.post(CHAT, body)["choices"][0]["logprobs"]["content"]
    assert "".join(item["token"] for item in content) == '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>'
    assert all(item["top_logprobs"][0]["id"] == item["id"] for item in content)


def test_calls_that_are_not_to_be_read(server: Live, tools: list[Any]):
    choice = choice_of(server, [SYSTEM, PARIS], tools=tools, parse_tool_calls=False)
    wrote = '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>'
    assert choice == {"finish_reason": "stop", "index": 0, "message": {"role": "assistant", "content": wrote}}


# --- answers of a form ---

CITY = {"type": "object", "required": ["city", "n"], "additionalProperties": False, "properties": {
    "city": {"enum": ["Paris", "Rome"]}, "n": {"type": "integer", "minimum": 0, "maximum": 9}}}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}},
    {"response_format": {"type": "json_object", "schema": CITY}},
    {"json_schema": CITY},
])  # fmt: skip
def test_json_for_a_schema(server: Live, form: dict[str, Any], seed: int):
    body = {"messages": [user("What is the capital of France?")], **form, "temperature": 1.5, "seed": seed, "max_tokens": 300}
    choice = server.post(CHAT, body)["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), CITY)
    assert joined(server.chunks(CHAT, body)) == choice


def test_any_json_object(server: Live):
    # With a bias for what ends strings and objects: few would come to an end at this temperature.
    body = {"messages": [PARIS], "response_format": {"type": "json_object"}, "logit_bias": [['"', 8.0], ["}", 8.0]], **GREEDY}
    seen = [server.post(CHAT, {**body, "seed": seed, "temperature": 1.5, "max_tokens": 400})["choices"][0] for seed in range(6)]
    whole = [choice["message"]["content"] for choice in seen if choice["finish_reason"] == "stop"]
    assert whole and all(isinstance(json.loads(text), dict) for text in whole)
    assert all(choice["message"]["content"].lstrip()[0] == "{" for choice in seen)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/completion"])
@pytest.mark.parametrize(("form", "named"), [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}}, "uniqueItems"),
    ({"json_schema": {"properties": {"a": {"not": {"type": "string"}}}}}, "not"),
    ({"json_schema": {"type": "text"}}, "text"),
    ({"response_format": {"type": "json_schema"}}, "json_schema"),
    ({"response_format": {"type": "xml"}}, "xml"),
    ({"grammar": "root ::= missing"}, "missing"),
    ({"grammar": "root ::= 'a'"}, "line 1"),
])  # fmt: skip
def test_a_form_that_can_not_be_enforced_is_refused(server: Live, path: str, form: dict[str, Any], named: str):
    for stream in (False, True):
        assert named in server.refusal(path, {"messages": [PARIS], "prompt": "x", "stream": stream, **form})


def test_a_grammar(server: Live):
    body = {"grammar": 'root ::= "yes" | "no" | [x-z]{3}', "temperature": 2}
    for seed in range(4):
        text = server.post(CHAT, {"messages": [PARIS], "seed": seed, **body})["choices"][0]["message"]["content"]
        assert text in ("yes", "no") or (len(text) == 3 and set(text) <= set("xyz"))
        assert text == server.post(CHAT, {"messages": [PARIS], "seed": seed, **body})["choices"][0]["message"]["content"]
    texts = [choice["text"] for choice in server.post("/v1/completions", {"prompt": "Well,", "n": 3, **body})["choices"]]
    assert all(text in ("yes", "no") or set(text) <= set("xyz") for text in texts)
    whole = server.post("/completion", {"prompt": "Well,", **body})
    assert whole["stop_type"] == "eos" and whole["generation_settings"]["grammar"] == body["grammar"]


def test_calls_or_an_answer_of_a_form(server: Live, tools: list[Any]):
    """As agents ask: functions, and a form for the answer in the end."""
    form = {"tools": tools, "response_format": {"type": "json_schema", "json_schema": {"schema": CITY}}, "max_tokens": 60}
    called = choice_of(server, [SYSTEM, PARIS], **form)
    assert called["finish_reason"] == "tool_calls" and calls_of(called["message"]) == [("get_weather", {"city": "Paris"})]
    result = {"role": "tool", "tool_call_id": called["message"]["tool_calls"][0]["id"], "content": SUNNY}
    # This model would call again: it was not trained to write JSON.
    no_call = {"logit_bias": [[server.model.token_id("<|tool_call_start|>"), False]]}
    told = choice_of(server, [SYSTEM, PARIS, called["message"], result], **form, **no_call)
    assert told["finish_reason"] == "stop"
    jsonschema.validate(json.loads(told["message"]["content"]), CITY)
    thought = choice_of(server, [THINKING, BOTH], **form)["message"]
    assert thought["reasoning_content"] and [call[1]["city"] for call in calls_of(thought)] == ["Paris", "Rome"]
    assert calls_of(message_of(server, [user("Hello!")], **form, tool_choice="required"))
    assert len(calls_of(message_of(server, [BOTH], **form, parallel_tool_calls=False))) == 1
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]
    kinds = set()
    for seed in range(12):
        body = {"messages": [SYSTEM, PARIS], **form, "tools": strict, "temperature": 2, "seed": seed, "max_tokens": 200}
        choice = server.post(CHAT, body)["choices"][0]
        kinds.add(choice["finish_reason"])
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), CITY)
    assert "tool_calls" in kinds
    assert "grammar or regex" in server.refusal(CHAT, {"messages": [PARIS], "tools": strict, "grammar": 'root ::= "a"'})
    assert choice_of(server, [PARIS], tools=tools, grammar='root ::= "a"')["message"]["content"] == "a"


def test_a_grammar_holds_nobody_up(server: Live, tools: list[Any], monkeypatch: pytest.MonkeyPatch):
    """It is made in another thread than that which serves everybody."""
    threads = []

    def compiled(*arguments: Any, make: Any = _request.Grammar) -> Any:
        threads.append(threading.get_ident())
        return make(*arguments)

    monkeypatch.setattr(_request, "Grammar", compiled)
    for i, form in enumerate(({"grammar": 'root ::= "%s"'}, {"json_schema": {"const": "%s"}}, {"tool_choice": "required"},
                              {"parallel_tool_calls": False})):  # fmt: skip
        text = json.dumps({"tools": tools if i > 1 else None, **form}).replace("%s", "never seen")
        text = text.replace("get_weather", f"get_weather_{i}")
        ask(server, [PARIS], max_tokens=1, **json.loads(text))
        assert len(threads) == i + 1
    assert server._thread.ident not in threads


def test_settings_show_what_was_asked(server: Live):
    form = {"type": "json_schema", "json_schema": {"schema": CITY}}
    shown, plain = (ask(server, [PARIS], verbose=True, **more)["__verbose"]["generation_settings"]
                    for more in ({"response_format": form, "reasoning_format": "none"}, {}))  # fmt: skip
    assert (shown["response_format"], shown["grammar"], shown["reasoning_format"]) == (form, "", "none")
    assert (plain.get("response_format"), plain["reasoning_format"]) == (None, "auto")
    assert server.client.get("/props").json()["default_generation_settings"]["params"]["reasoning_format"] == "auto"


# --- thoughts ---

CAPITAL, THOUGHT = "The capital of France is Paris.", "I need the capital of France."
FRANCE = [THINKING, user("What is the capital of France?")]


@pytest.mark.parametrize(("more", "content", "thought"), [
    ({}, CAPITAL, THOUGHT),
    ({"reasoning_format": "auto"}, CAPITAL, THOUGHT),
    ({"reasoning_format": "deepseek"}, CAPITAL, THOUGHT),
    ({"reasoning_format": "none"}, f"<think>{THOUGHT}</think>{CAPITAL}", None),
    ({"reasoning_budget": 3}, CAPITAL, "I need the"),
    ({"thinking_budget_tokens": 3, "reasoning_budget_message": " Enough."}, CAPITAL, "I need the Enough."),
    ({"reasoning_budget_tokens": 0}, CAPITAL, None),
    ({"reasoning_effort": "none"}, CAPITAL, None),
    ({"max_tokens": 4}, "", "I need the"),
])  # fmt: skip
def test_thoughts(server: Live, more: dict[str, Any], content: str, thought: str | None):
    body = {"messages": FRANCE, **GREEDY, **more}
    choice = server.post(CHAT, body)["choices"][0]
    thoughts = {} if thought is None else {"reasoning_content": thought}
    assert choice["message"] == {"role": "assistant", "content": content, **thoughts}
    streamed = joined(server.chunks(CHAT, body))
    assert (streamed["message"]["content"] or "", streamed["message"].get("reasoning_content")) == (content, thought)
    assert streamed["finish_reason"] == choice["finish_reason"] == ("length" if "max_tokens" in more else "stop")


def test_a_form_counts_after_the_thoughts(server: Live):
    message = message_of(server, FRANCE, grammar='root ::= "Rome" | "Oslo"')
    assert message["content"] in ("Rome", "Oslo") and message["reasoning_content"] == THOUGHT


def test_past_thoughts(server: Live):
    answers = [{"role": "assistant", "content": CAPITAL, "reasoning_content": THOUGHT},
               {"role": "assistant", "content": "You are welcome!", "reasoning_content": "I am polite."}]  # fmt: skip
    past = [*FRANCE, answers[0], user("Thank you."), answers[1], user("Hello!")]

    def prompt(**variables: Any) -> str:
        text: str = server.post("/apply-template", {"messages": past, "chat_template_kwargs": variables})["prompt"]
        return text

    first, last = f"<think>{THOUGHT}</think>{CAPITAL}", "<think>I am polite.</think>You are welcome!"
    assert first not in prompt() and CAPITAL in prompt() and last in prompt()  # the template keeps those of the last answer
    assert first in prompt(keep_past_thinking=True) and last in prompt(keep_past_thinking=True)
    inside = [{"role": m["role"], "content": f"<think>{m['reasoning_content']}</think>{m['content']}"}
              if "reasoning_content" in m else m for m in past]  # fmt: skip
    for variables in ({}, {"keep_past_thinking": True}):  # the same for clients that send them in the content
        asked = {"messages": inside, "chat_template_kwargs": variables}
        assert server.post("/apply-template", asked)["prompt"] == prompt(**variables)


def test_what_is_read_again_when_thoughts_are_stripped(server: Live):
    server.model.engine.forget()
    history = list(FRANCE)
    usages = []
    for text in ("Thank you.", "Hello!", "How are you?"):
        answer = ask(server, history)
        usages.append(answer["usage"])
        history += [answer["choices"][0]["message"], user(text)]
    first, second, third = (usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert first == 0 and second == usages[0]["total_tokens"] - 1  # the last answer keeps its thoughts
    assert third == usages[0]["prompt_tokens"]  # the first one has lost them: what came before it is not read again
    server.model.engine.forget()
    keeps = {"chat_template_kwargs": {"keep_past_thinking": True}}
    usages = [ask(server, history[:end], **keeps)["usage"] for end in (2, 4, 6)]
    for before, usage in itertools.pairwise(usages):
        assert usage["prompt_tokens_details"]["cached_tokens"] == before["total_tokens"] - 1
