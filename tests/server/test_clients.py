"""Programs as people write them, each in a process of its own, against a live server: send, stream, several turns."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import child
import needs
import pytest

CAPITAL, STORY = "The capital of France is Paris.", "Once upon a time a small boat"


def script(text: str, url: str) -> dict[str, object]:
    """Runs a script that prints one JSON object per line: what it printed, in one dict. No proxy is asked for localhost."""
    printed = child.run(text, url, NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")
    return {key: value for line in printed.splitlines() for key, value in json.loads(line).items()}


def test_openai(live):
    seen = script("""
        import asyncio, json, sys
        from openai import AsyncOpenAI, BadRequestError, OpenAI

        def say(**values):
            print(json.dumps(values), flush=True)

        def ask(text):
            return {"role": "user", "content": text}

        with OpenAI(base_url=sys.argv[1] + "/v1", api_key="not-needed") as client:
            say(model=client.models.list().data[0].id)
            france = [ask("What is the capital of France?")]
            whole = client.chat.completions.create(model="any", messages=france, temperature=0)
            say(text=whole.choices[0].message.content, reason=whole.choices[0].finish_reason,
                role=whole.choices[0].message.role, usage=whole.usage.model_dump(exclude_none=True), object=whole.object)

            stream = client.chat.completions.create(model="any", messages=france, temperature=0, stream=True,
                                                    stream_options={"include_usage": True})
            chunks = list(stream)
            say(streamed="".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
                reasons=[c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason],
                ids=len({c.id for c in chunks}), last=[len(chunks[-1].choices), chunks[-1].usage.completion_tokens])

            history = []
            for text in ("My name is Ada.", "What is my name?"):
                history.append(ask(text))
                reply = client.chat.completions.create(model="any", messages=history, temperature=0)
                history.append(reply.choices[0].message)
            say(turns=[history[1].content, history[3].content], cached=reply.usage.prompt_tokens_details.cached_tokens)

            two = client.chat.completions.create(model="any", messages=[ask("Name a color.")], n=2, seed=7, max_tokens=4,
                                                 logprobs=True, top_logprobs=2)
            say(n=[c.index for c in two.choices], texts=[c.message.content for c in two.choices],
                tokens=["".join(t.token for t in c.logprobs.content) for c in two.choices],
                tops=[len(t.top_logprobs) for c in two.choices for t in c.logprobs.content])

            text = client.completions.create(model="any", prompt="Once upon", max_tokens=5, temperature=0)
            say(completion=text.choices[0].finish_reason, n_completion=text.usage.completion_tokens)

            answer = client.responses.create(model="any", input="What is the capital of France?", temperature=0)
            say(response=answer.output_text, status=answer.status)
            events = list(client.responses.create(model="any", input="What is the capital of France?", temperature=0,
                                                  stream=True))
            say(response_stream="".join(e.delta for e in events if e.type == "response.output_text.delta"),
                response_end=events[-1].type)
            try:
                client.chat.completions.create(model="any", messages=france, temperature=-1)
            except BadRequestError as error:
                say(error=str(error.body["message"]))

            left = client.chat.completions.create(model="any", messages=[ask("Tell me a story.")], temperature=0, stream=True)
            next(iter(left))
            left.close()

        async def main():
            async with AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="not-needed") as client:
                async def one(text):
                    parts = []
                    async for chunk in await client.chat.completions.create(model="any", messages=[ask(text)], temperature=0,
                                                                            stream=True):
                        parts.append(chunk.choices[0].delta.content or "")
                    return "".join(parts)
                texts = await asyncio.gather(one("What is the capital of France?"), one("Tell me a story."),
                                             one("What is machine learning?"))
                say(asynchronous=texts)

        asyncio.run(main())
    """, live.url)
    assert seen["model"] == "lfm2-tiny-f16.gguf"
    assert (seen["text"], seen["reason"], seen["role"], seen["object"]) == (CAPITAL, "stop", "assistant", "chat.completion")
    usage = seen["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert (seen["streamed"], seen["reasons"], seen["ids"]) == (CAPITAL, ["stop"], 1)
    assert seen["last"] == [0, usage["completion_tokens"]]
    assert seen["turns"] == ["Nice to meet you, Ada!", "Your name is Ada."] and seen["cached"] > 0
    assert seen["n"] == [0, 1] and seen["tokens"] == seen["texts"] and set(seen["tops"]) == {2}
    assert (seen["completion"], seen["n_completion"]) == ("length", 5)
    assert (seen["response"], seen["status"]) == (CAPITAL, "completed")
    assert (seen["response_stream"], seen["response_end"]) == (CAPITAL, "response.completed")
    assert "temperature" in seen["error"]
    assert seen["asynchronous"][0] == CAPITAL and seen["asynchronous"][1].startswith(STORY)


def test_anthropic(live):
    seen = script("""
        import json, sys
        from anthropic import Anthropic

        def say(**values):
            print(json.dumps(values), flush=True)

        greedy = {"temperature": 0}  # newer versions of the package have no argument for it
        ask = {"role": "user", "content": "What is the capital of France?"}
        with Anthropic(base_url=sys.argv[1], api_key="not-needed") as client:
            whole = client.messages.create(model="any", max_tokens=64, messages=[ask], extra_body=greedy,
                                           system="You are a helpful assistant.")
            say(text=whole.content[0].text, reason=whole.stop_reason, n=whole.usage.output_tokens, kind=whole.type)
            with client.messages.stream(model="any", max_tokens=64, messages=[ask], extra_body=greedy) as stream:
                say(streamed="".join(stream.text_stream), end=stream.get_final_message().stop_reason)
            say(count=client.messages.count_tokens(model="any", messages=[ask]).input_tokens)
            short = client.messages.create(model="any", max_tokens=3, messages=[ask], extra_body=greedy)
            say(short=short.stop_reason, n_short=short.usage.output_tokens)
    """, live.url)
    assert (seen["text"], seen["reason"], seen["kind"]) == (CAPITAL, "end_turn", "message")
    assert (seen["streamed"], seen["end"]) == (CAPITAL, "end_turn")
    assert seen["count"] > 8
    assert (seen["short"], seen["n_short"]) == ("max_tokens", 3)


def test_langchain(live):
    seen = script("""
        import json, sys
        from langchain_openai import ChatOpenAI

        model = ChatOpenAI(model="any", base_url=sys.argv[1] + "/v1", api_key="not-needed", temperature=0)
        first = model.invoke([("human", "What is the capital of France?")])
        print(json.dumps({"text": first.content, "n": first.usage_metadata["output_tokens"]}))
        print(json.dumps({"streamed": "".join(c.content for c in model.stream("What is the capital of France?"))}))
    """, live.url)
    assert (seen["text"], seen["streamed"]) == (CAPITAL, CAPITAL) and seen["n"] > 0


def test_langchain_with_tools(live):
    seen = script("""
        import json, sys
        from typing import Literal
        from langchain_core.messages import HumanMessage, SystemMessage
        from langchain_core.tools import tool
        from langchain_openai import ChatOpenAI
        from pydantic import BaseModel, Field

        @tool
        def get_weather(city: str) -> str:
            "Get the weather in a city."
            return json.dumps({"temperature": 21, "sky": "sunny"})

        @tool
        def add(a: float, b: float) -> float:
            "Add two numbers."
            return a + b

        class City(BaseModel):
            "A city."
            city: Literal["Paris", "Rome"]
            n: int = Field(ge=0, le=9)

        def say(**values):
            print(json.dumps(values), flush=True)

        model = ChatOpenAI(model="any", base_url=sys.argv[1] + "/v1", api_key="not-needed", temperature=0, max_tokens=100)
        tools = {t.name: t for t in (get_weather, add)}
        both = [HumanMessage("What is the weather in Paris and Rome?")]

        def loop(agent, text, stream):
            messages = [SystemMessage("You are a helpful assistant."), HumanMessage(text)]
            for _ in range(4):
                if stream:
                    reply = None
                    for chunk in agent.stream(messages):
                        reply = chunk if reply is None else reply + chunk
                else:
                    reply = agent.invoke(messages)
                messages.append(reply)
                if not reply.tool_calls:
                    return [reply.content, [m.tool_calls[0]["args"] for m in messages if getattr(m, "tool_calls", None)]]
                messages += [tools[call["name"]].invoke(call) for call in reply.tool_calls]

        agent = model.bind_tools(list(tools.values()))
        say(loop=[loop(agent, "What is the weather in Paris?", stream) for stream in (False, True)])
        say(sum=loop(agent, "What is 3 plus 4?", False))
        for name, more in (("unset", {}), ("true", {"parallel_tool_calls": True}), ("false", {"parallel_tool_calls": False})):
            found = model.bind_tools(list(tools.values()), **more).invoke(both).tool_calls
            say(**{name: [call["args"]["city"] for call in found]})
        forced = model.bind_tools(list(tools.values()), tool_choice="add", strict=True).invoke([HumanMessage("Hello!")])
        say(forced=[call["name"] for call in forced.tool_calls], required=[
            bool(model.bind_tools(list(tools.values()), tool_choice=choice).invoke([HumanMessage("Hello!")]).tool_calls)
            for choice in ("any", "required", "auto")])
        for method in ("json_schema", "function_calling"):
            found = model.with_structured_output(City, method=method).invoke("What is the capital of France?")
            say(**{method: type(found).__name__})
    """, live.url)
    weather = ["It is 21 degrees and sunny in Paris.", [{"city": "Paris"}]]
    assert seen["loop"] == [weather, weather] and seen["sum"] == ["3 plus 4 is 7.", [{"a": 3, "b": 4}]]
    assert seen["unset"] == seen["true"] == ["Paris", "Rome"] and len(seen["false"]) == 1
    assert set(seen["forced"]) == {"add"} and seen["required"] == [True, True, False]
    assert (seen["json_schema"], seen["function_calling"]) == ("City", "City")


def curl(*arguments: str) -> str:
    """What curl printed."""
    command = [needs.program("curl"), "-sS", "--noproxy", "*", "--max-time", "60", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_curl(live):
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    arguments = (live.url + "/v1/chat/completions", "-H", "Content-Type: application/json", "-d")
    assert json.loads(curl(*arguments, json.dumps(body)))["choices"][0]["message"]["content"] == CAPITAL
    events = curl("-N", *arguments, json.dumps({**body, "stream": True})).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks) == CAPITAL
    # A body without a content type, as `curl -d` sends it.
    assert json.loads(curl(live.url + "/completion", "-d", '{"prompt": "Once", "n_predict": 3}'))["tokens_predicted"] == 3
    assert json.loads(curl(live.url + "/health")) == {"status": "ok"}
    assert "<html" in curl(live.url + "/")


NODE = """
const url = process.argv[2], say = (o) => console.log(JSON.stringify(o));
async function send(messages, more = {}) {
  const response = await fetch(`${url}/v1/chat/completions`, {
    method: "POST", headers: {"Content-Type": "application/json", "Authorization": "Bearer not-needed"},
    body: JSON.stringify({model: "any", messages, temperature: 0, ...more})});
  if (!response.ok) throw new Error(`status ${response.status}`);
  return response;
}
const question = [{role: "user", content: "What is the capital of France?"}];
say({text: (await (await send(question)).json()).choices[0].message.content});

let rest = "", streamed = "", done = false;
const decoder = new TextDecoder();
for await (const bytes of (await send(question, {stream: true})).body) {
  rest += decoder.decode(bytes, {stream: true});
  const lines = rest.split("\\n");
  rest = lines.pop();
  for (const line of lines.filter((l) => l.startsWith("data: "))) {
    if (line === "data: [DONE]") { done = true; continue; }
    streamed += JSON.parse(line.slice(6)).choices[0]?.delta?.content ?? "";
  }
}
say({streamed, done});

const messages = [];
for (const content of ["My name is Ada.", "What is my name?"]) {
  messages.push({role: "user", content});
  messages.push((await (await send(messages)).json()).choices[0].message);
}
say({turns: [messages[1].content, messages[3].content]});

const leaving = new AbortController();
const left = await fetch(`${url}/completion`, {method: "POST", signal: leaving.signal,
  body: JSON.stringify({prompt: "Once", n_predict: 1000, ignore_eos: true, stream: true})});
await left.body.getReader().read();
leaving.abort();
"""

NPM_OPENAI = """
import OpenAI from "openai";
const client = new OpenAI({baseURL: process.argv[2] + "/v1", apiKey: "not-needed"});
const messages = [{role: "user", content: "What is the capital of France?"}];
const whole = await client.chat.completions.create({model: "any", messages, temperature: 0});
let streamed = "";
for await (const chunk of await client.chat.completions.create({model: "any", messages, temperature: 0, stream: true})) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
console.log(JSON.stringify({text: whole.choices[0].message.content, streamed}));
"""


def node(text: str, url: str, folder: Path) -> dict[str, object]:
    """Runs a JavaScript module; what it printed, as `script` does."""
    program = folder / "program.mjs"
    program.write_text(text, "utf8")
    command = [needs.program("node"), str(program), url]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {key: value for line in done.stdout.splitlines() for key, value in json.loads(line).items()}


def test_node_fetch(live, tmp_path):
    seen = node(NODE, live.url, tmp_path)
    assert (seen["text"], seen["streamed"], seen["done"]) == (CAPITAL, CAPITAL, True)
    assert seen["turns"] == ["Nice to meet you, Ada!", "Your name is Ada."]


@pytest.mark.slow
def test_openai_of_npm(live, tmp_path):
    command = [needs.program("npm"), "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), "openai"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    seen = node(NPM_OPENAI, live.url, tmp_path)
    assert (seen["text"], seen["streamed"]) == (CAPITAL, CAPITAL)


def test_a_key_that_the_clients_send(serve, lfm2_tiny_path):
    with serve(lfm2_tiny_path, "-t", "1", "--api-key", "right,also-right", "-c", "512") as server:
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}
        for headers, status in (({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": "Bearer right"}, 200),
                                ({"X-Api-Key": "also-right"}, 200), ({"X-Api-Key": "righ"}, 401)):  # fmt: skip
            seen, answer = server.post("/v1/chat/completions", body, headers)
            assert seen == status
            assert status == 200 or answer["error"]["type"] == "authentication_error"
        assert server.get("/health")[0] == 200
        assert "right" not in server.log()
