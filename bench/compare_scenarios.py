"""What bench.compare does to a side: conversations that all sides get alike, and measurements."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from bench.compare_sides import Client, Library, Setting, Side
from bench.engine_scenarios import ask_all, text, wall
from bench.engine_sides import SAMPLING, PeerError, Request, Server
from bench.words import Words

N_WAITING = 2  # requests that a server has beside those in its slots, so that no slot waits for the client


@dataclass(frozen=True)
class Scenario:
    """Conversations, and how they are asked.

    Parameters
    ----------
    n_clients : int
        Side by side; also the slots of a server.
    n_rounds : int
        Questions of each client, one after another.
    n_system, n_prompt, n_tokens : int
        Tokens of the system prompt that all have, of a question, of an answer.
    seconds : float
        A batch: no further prompt is begun after that time.
    """

    title: str
    n_clients: int = 1
    n_rounds: int = 1
    n_system: int = 0
    n_prompt: int = 150
    n_tokens: int = 64
    n_lines: int = 0
    seconds: float = 0.0
    is_chat: bool = False

    @property
    def is_batch(self) -> bool:
        return self.n_lines > 0

    @property
    def n_ctx(self) -> int:
        """Context of each sequence, in tokens, with room for the template's own."""
        turns = self.n_rounds if self.is_chat else 1
        need = self.n_system + turns * (self.n_prompt + self.n_tokens + 16) + 64
        return max(512, -(-need // 256) * 256)

    def conversations(self, words: Words, repeat: int) -> list[list[Any]]:
        """For each client or line its questions, each as messages; new ones in each repeat."""
        rng = Random(f"{self.title} {repeat}")
        system = [{"role": "system", "content": text(words, rng, self.n_system).strip()}] if self.n_system else []
        return [[[*system, {"role": "user", "content": text(words, rng, self.n_prompt).strip()}] for _ in range(self.n_rounds)]
                for _ in range(self.n_lines or self.n_clients)]  # fmt: skip

    def quick(self) -> Scenario:
        """The same, shorter: to see that all works."""
        return replace(self, n_tokens=min(self.n_tokens, 12), n_prompt=min(self.n_prompt, 24), n_system=min(self.n_system, 120),
                       n_lines=min(self.n_lines, 24), seconds=min(self.seconds, 20))  # fmt: skip


SCENARIOS = {
    "single": Scenario("one stream", n_prompt=32, n_tokens=128),
    "8": Scenario("8 clients", 8),
    "32": Scenario("32 clients", 32, n_tokens=32),
    "shared": Scenario("8 clients, one system prompt of 500 tokens", 8, n_rounds=2, n_system=500, n_prompt=30, n_tokens=32),
    "chat": Scenario("a chat of six turns", n_rounds=6, n_prompt=40, n_tokens=48, is_chat=True),
    "batch": Scenario("a file of 500 prompts", 16, n_prompt=64, n_tokens=32, n_lines=500, seconds=240),
    "batch-shared": Scenario("500 prompts, one system prompt of 500 tokens", 16, n_system=500, n_prompt=64, n_tokens=32,
                             n_lines=500, seconds=120),
}  # fmt: skip


def _result(done: Sequence[Request], seconds: float) -> dict[str, Any]:
    first = [1e3 * request.first for request in done if request.arrivals]  # an answer can be all markers, and no text
    n_generated = sum(request.n_generated for request in done)
    return {"rate": n_generated / seconds, "n_generated": n_generated, "seconds": seconds,
            "ttft_ms": statistics.median(first) if first else None}  # fmt: skip


def clients(side: Side, asked: list[list[Any]], scenario: Scenario) -> dict[str, Any]:
    """All clients begin together, and each asks its questions one after another. With one client the rate is that after the
    first token."""
    if len(asked) == 1:
        done = side.ask(asked[0][0], scenario.n_tokens).read()
        result = _result([done], done.end - done.begin)
        if len(done.arrivals) > 1:
            result["rate"] = (done.n_generated - 1) / (done.arrivals[-1] - done.arrivals[0])
        return result
    if scenario.n_rounds == 1:
        requests = ask_all(side, [questions[0] for questions in asked], scenario.n_tokens)
        return _result(requests, wall(requests))

    def one(i: int) -> list[Request]:
        gate.wait()
        return [side.ask(question, scenario.n_tokens, seed=i + 1).read() for question in asked[i]]

    gate = threading.Barrier(len(asked))
    with ThreadPoolExecutor(len(asked)) as pool:
        requests = [request for answers in pool.map(one, range(len(asked))) for request in answers]
    return _result(requests, wall(requests))


def chat(side: Side, asked: list[list[Any]], scenario: Scenario) -> dict[str, Any]:
    """History is sent as text, with every turn again. The time to the first token is that of the middle turn."""
    messages: list[dict[str, str]] = []
    turns = []
    for question in asked[0]:
        turns.append(side.ask([*messages, question[-1]], scenario.n_tokens).read())
        messages += [question[-1], {"role": "assistant", "content": turns[-1].text}]
    return _result(turns, sum(turn.end - turn.begin for turn in turns))


def keep_full(answers: Sequence[Callable[[int], int]], n: int, seconds: float) -> dict[str, Any]:
    """Ask for line 0 to n - 1, as many at once as there are functions in `answers`; a function returns the tokens it got."""
    lock, lines, tokens = threading.Lock(), iter(range(n)), list[int]()
    begin = time.perf_counter()

    def work(answer: Callable[[int], int]) -> None:
        while time.perf_counter() - begin < seconds:
            with lock:
                line = next(lines, None)
            if line is None:
                return
            tokens.append(answer(line))

    with ThreadPoolExecutor(len(answers)) as pool:
        for future in [pool.submit(work, answer) for answer in answers]:
            future.result()
    passed = time.perf_counter() - begin
    return {"rate": sum(tokens) / passed, "n_generated": sum(tokens), "n_lines": len(tokens), "seconds": passed}


def batch(side: Side, asked: list[list[Any]], scenario: Scenario) -> dict[str, Any]:
    """A server's slots are kept full; a library that does one after another is given one after another."""
    if isinstance(side, Server):
        made = [Client(side.port) for _ in range(scenario.n_clients + N_WAITING)]

        def bind(client: Client) -> Callable[[int], int]:
            return lambda i: client.answer(asked[i][0], scenario.n_tokens, i + 1)

        return keep_full([bind(client) for client in made], len(asked), scenario.seconds)
    assert isinstance(side, Library)

    def ask(i: int) -> int:
        return side.ask(asked[i][0], scenario.n_tokens, i + 1).read().n_generated

    return keep_full([ask] * scenario.n_clients, len(asked), scenario.seconds)


def our_batch(setting: Setting, asked: list[list[Any]], scenario: Scenario) -> dict[str, Any]:
    """`lfmfast batch` as it is typed, from the start of the process to its end: the model's loading is in it."""
    flags = {"-m": setting.model_file, "-t": setting.n_threads, "-c": setting.n_ctx, "-n": scenario.n_tokens,
             "--temp": SAMPLING["temperature"], "--top-k": SAMPLING["top_k"], "--top-p": SAMPLING["top_p"],
             "--min-p": SAMPLING["min_p"], "--repeat-penalty": SAMPLING["repeat_penalty"], "--seed": 1}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        source.write_text("".join(json.dumps({"messages": questions[0]}) + "\n" for questions in asked))
        command = [sys.executable, "-m", "lfmfast", "batch", str(source), "-o", str(target), "--ignore-eos",
                   *(str(part) for pair in flags.items() for part in pair)]  # fmt: skip
        begin = time.perf_counter()
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=Path(__file__).parent)
        passed = time.perf_counter() - begin
        if done.returncode:
            raise PeerError(f"lfmfast batch ended with status {done.returncode}\n{done.stderr[-2000:]}")
        answers = [json.loads(line) for line in target.read_text().splitlines()]
    n_generated = sum(answer["completion_tokens"] for answer in answers)
    return {"rate": n_generated / passed, "n_generated": n_generated, "n_lines": len(answers), "seconds": passed,
            "n_prompt": sum(answer["prompt_tokens"] for answer in answers),
            "n_cached": sum(answer["cached_tokens"] for answer in answers)}  # fmt: skip


def warm_up(side: Side, n: int) -> None:
    """Touch weights and buffers, and the graph of a full batch."""
    for request in [side.ask([{"role": "user", "content": "hello"}], 4) for _ in range(n)]:
        request.read()


def measure(start: Callable[[Setting], Side] | None, setting: Setting, asked: list[list[Any]],
            scenario: Scenario) -> dict[str, Any]:  # fmt: skip
    """One measurement of one side, from its start to its end. `start` None: `lfmfast batch`."""
    if start is None:
        return our_batch(setting, asked, scenario)
    side = start(setting)
    try:
        warm_up(side, setting.n_parallel)
        run = batch if scenario.is_batch else chat if scenario.is_chat else clients
        return run(side, asked, scenario)
    except (PeerError, OSError, ValueError, IndexError) as error:
        raise PeerError(f"{error!r}\n{side.fault()}") from error
    finally:
        side.close()
