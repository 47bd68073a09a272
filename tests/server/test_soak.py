"""32 clients at once for a while, many of which go away in the middle: nothing is lost, mixed up or left behind.

LFMFAST_SOAK_S says for how many seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

N_CLIENTS = 32
PATIENCE_S = 200  # what has not come by then never comes, also on a machine that others keep busy
SECONDS = float(os.environ.get("LFMFAST_SOAK_S") or 60)
WORDS = [
    "apple", "river", "stone", "green", "cloud", "window", "table", "music", "light", "paper", "bridge", "garden", "winter",
    "summer", "yellow", "silver", "golden", "forest", "mountain", "ocean", "island", "desert", "candle", "mirror", "pencil",
    "basket", "button", "carpet", "castle", "circle", "copper",
]  # fmt: skip
N_MARKERS = 48


@dataclass(frozen=True)
class Marker:
    """A prompt that no other client has, and what the model writes to it alone: text, and token ids of both."""

    messages: list[dict[str, str]]
    prompt: list[int]
    text: str
    tokens: list[int]


def markers(live: Any) -> list[Marker]:
    """Ask one by one, before the others come. Only what the model is sure of: beside others sums are added up in another order,
    and of two tokens that are all but equally likely, the other one may win."""
    rng = random.Random(5)
    found: list[Marker] = []
    while len(found) < N_MARKERS:
        messages = [{"role": "user", "content": "Repeat: " + " ".join(rng.sample(WORDS, 5))}]
        text = live.post("/apply-template", {"messages": messages})[1]["prompt"]
        prompt = live.post("/tokenize", {"content": text, "add_special": True})[1]["tokens"]
        asked = {"prompt": prompt, "temperature": 0, "n_predict": 40, "return_tokens": True, "n_probs": 2}
        answer = live.post("/completion", asked)[1]
        likely = [[top["logprob"] for top in token["top_logprobs"]] for token in answer["completion_probabilities"]]
        if all(first > second + 1 for first, second in likely) and messages[0]["content"] == "Repeat: " + answer["content"]:
            found.append(Marker(messages, prompt, answer["content"], answer["tokens"]))
    assert len({tuple(m.tokens) for m in found}) == N_MARKERS  # the answers tell the prompts apart
    return found


class Gone(Exception):
    """This client meant to go away."""


class Client:
    """One connection per request, closed in whatever phase it is told."""

    def __init__(self, port: int, seed: int, known: list[Marker], counts: Counter[str]) -> None:
        self.port, self.rng, self.known, self.counts = port, random.Random(seed), known, counts

    async def run(self, deadline: float) -> None:
        kinds = (self.tokens, self.tokens, self.chat, self.chat_whole, self.messages, self.long_prompt)
        while time.monotonic() < deadline:
            kind = self.rng.choice(kinds)
            phase = self.rng.choice(("", "", "", "headers", "sent", "waiting", "first", "middle"))
            try:
                try:
                    await asyncio.wait_for(kind(self.rng.choice(self.known), phase), PATIENCE_S)
                except asyncio.TimeoutError:
                    raise AssertionError(f"{kind.__name__} {phase}: no end of the answer in {PATIENCE_S} s") from None
                self.counts[kind.__name__] += 1
            except Gone:
                self.counts[f"left: {phase}"] += 1

    async def events(self, path: str, body: dict[str, Any], phase: str) -> list[bytes]:
        """The lines of the answer's body, after a 200; chunks are taken apart."""
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode()
            if phase == "headers":
                writer.write(head + data[:self.rng.randrange(len(data))])
                await writer.drain()
                raise Gone
            writer.write(head + data)
            await writer.drain()
            if phase in ("sent", "waiting"):
                await asyncio.sleep(0 if phase == "sent" else self.rng.random() * 0.3)
                raise Gone
            status = await reader.readline()
            assert status.split()[1] == b"200", status + await reader.read(2000)
            while (await reader.readline()).strip():
                pass
            if phase == "first":
                await reader.readline()
                raise Gone
            if phase == "middle":
                await asyncio.sleep(self.rng.random() * 0.1)
                await reader.read(self.rng.randrange(1, 2000))
                raise Gone
            return [line for line in (await reader.read()).split(b"\n") if line.startswith((b"data: ", b"{"))]
        finally:
            if self.rng.random() < 0.3:
                writer.transport.abort()  # with what is unread: the server sees a reset
            writer.close()

    async def tokens(self, marker: Marker, phase: str) -> None:
        body = {"prompt": marker.prompt, "temperature": 0, "n_predict": 40, "stream": True}
        lines = await self.events("/completion", body, phase)
        events = [json.loads(line[6:]) for line in lines]
        assert events[-1]["stop"], events[-1]
        assert [t for e in events[:-1] for t in e["tokens"]] == marker.tokens
        assert "".join(e["content"] for e in events) == marker.text

    async def chat(self, marker: Marker, phase: str) -> None:
        body = {"messages": marker.messages, "temperature": 0, "max_tokens": 40, "stream": True}
        lines = await self.events("/v1/chat/completions", body, phase)
        assert lines[-1] == b"data: [DONE]"
        choices = [json.loads(line[6:])["choices"][0] for line in lines[:-1]]
        assert "".join(c["delta"].get("content") or "" for c in choices) == marker.text
        assert choices[-1]["finish_reason"] == "stop"

    async def chat_whole(self, marker: Marker, phase: str) -> None:
        body = {"messages": marker.messages, "temperature": 0, "max_tokens": 40, "n": 2}
        answer = json.loads((await self.events("/v1/chat/completions", body, phase))[0])
        assert [c["message"]["content"] for c in answer["choices"]] == [marker.text] * 2

    async def messages(self, marker: Marker, phase: str) -> None:
        body = {"messages": marker.messages, "temperature": 0, "max_tokens": 40, "stream": True}
        events = [json.loads(line[6:]) for line in await self.events("/v1/messages", body, phase)]
        assert "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta") == marker.text
        assert events[-1]["type"] == "message_stop"

    async def long_prompt(self, marker: Marker, phase: str) -> None:
        """Reading it takes a while, so that many leave while it is read."""
        prompt = [marker.prompt[0], *marker.prompt[1:] * 40][:900]
        lines = await self.events("/completion", {"prompt": prompt, "temperature": 0, "n_predict": 3, "stream": True}, phase)
        assert json.loads(lines[-1][6:])["tokens_evaluated"] == len(prompt)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 2 * PATIENCE_S)
def test_many_clients_of_whom_many_leave(serve, lfm2_tiny_path):
    flags = ("-np", "8", "--ctx-per-slot", "1024", "-t", "1", "-cram", "64", "--repeat-penalty", "1", "--metrics",
             "--log-disable")  # fmt: skip
    with serve(lfm2_tiny_path, *flags) as server:
        known, counts, process = markers(server), Counter[str](), psutil.Process(server.process.pid)

        async def crowd(seconds: float, seed: int) -> None:
            deadline = time.monotonic() + seconds
            clients = [Client(server.port, seed + i, known, counts) for i in range(N_CLIENTS)]
            await asyncio.gather(*(client.run(deadline) for client in clients))

        asyncio.run(crowd(SECONDS / 3, 1000))  # until caches and pools have the size that they keep
        settle(server)
        before, handles = process.memory_info().rss, process.num_fds() if hasattr(process, "num_fds") else 0
        asyncio.run(crowd(SECONDS * 2 / 3, 2000))
        settle(server)
        grown = process.memory_info().rss - before
        print(f"\n{dict(counts)}, memory grew by {grown / 2**20:.1f} MiB")
        assert all(counts[name] > 5 for name in ("tokens", "chat", "chat_whole", "messages", "long_prompt")), counts
        assert all(counts[f"left: {phase}"] > 5 for phase in ("headers", "sent", "waiting", "first", "middle")), counts
        assert grown < 24 << 20
        assert not handles or process.num_fds() <= handles + 2
        for marker in known:  # and each still gets its own answer
            body = {"prompt": marker.prompt, "temperature": 0, "n_predict": 40, "return_tokens": True}
            assert server.post("/completion", body)[1]["tokens"] == marker.tokens


def settle(server: Any) -> None:
    """All places are free, within a step or two of the model, whoever has left."""
    deadline = time.monotonic() + 10
    while any(slot["is_processing"] for slot in server.get("/slots")[1]) or "_processing 0" not in metrics(server):
        assert time.monotonic() < deadline, (server.get("/slots")[1], metrics(server))
        time.sleep(0.05)
    assert "requests_deferred 0" in metrics(server)


def metrics(server: Any) -> str:
    return server.request("GET", "/metrics")[2].decode()
