"""What bench.engine does to a side: inputs that both sides get alike, and measurements through `Side.ask`."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

from bench.engine_sides import N_PARALLEL, PeerError, Prompt, Request, Side
from bench.words import Words

N_TURNS = 6
N_REPLY = 48
N_DISTINCT = (150, 64)  # tokens of a prompt, tokens generated
N_RUNNING = N_PARALLEL - 1
LONG_PROMPT = 2000


def ids(words: Words, rng: Random, n: int) -> list[int]:
    """A prompt of n token ids."""
    return [words.bos, *rng.choices(words.ids, k=n - 1)]


def text(words: Words, rng: Random, n: int) -> str:
    """A text of n tokens."""
    return "".join(rng.choices(words.texts, k=n))


def ask_all(side: Side, prompts: Sequence[Prompt], n_tokens: int) -> list[Request]:
    """Read requests that begin together, each in a thread of its own."""
    gate = threading.Barrier(len(prompts))

    def one(i: int) -> Request:
        gate.wait()
        return side.ask(prompts[i], n_tokens, seed=i + 1).read()

    with ThreadPoolExecutor(len(prompts)) as pool:
        done = list(pool.map(one, range(len(prompts))))
    short = [r.n_generated for r in done if r.n_generated != n_tokens]
    if short:
        raise PeerError(f"{short} tokens were generated instead of {n_tokens}")
    return done


def wall(requests: Sequence[Request]) -> float:
    return max(r.end for r in requests) - min(r.begin for r in requests)


# --- a: one system prompt, eight questions ---


def shared_input(words: Words, rng: Random) -> list[Any]:
    system = {"role": "system", "content": text(words, rng, 1000)}
    return [[system, {"role": "user", "content": text(words, rng, 30)}] for _ in range(N_PARALLEL + 1)]


def shared(side: Side, conversations: list[Any]) -> dict[str, Any]:
    """The first conversation reads the system prompt; the others, together, are measured."""
    side.ask(conversations[0], 8).read()
    done = ask_all(side, conversations[1:], 8)
    return {"wall_s": wall(done), "processed": sum(r.n_processed for r in done), "prompt": sum(r.n_prompt for r in done)}


# --- b: eight distinct prompts ---


def distinct_input(words: Words, rng: Random) -> list[Any]:
    return [ids(words, rng, N_DISTINCT[0]) for _ in range(N_PARALLEL)]


def decode_rate(requests: Sequence[Request]) -> float:
    """Tokens per second of all streams from when the last one has its first token to when the first one ends.

    Each stream counts from its first to its last token within, so that it does not matter which of the tokens of one step
    came before the edge.
    """
    begin, end = max(r.arrivals[0] for r in requests), min(r.arrivals[-1] for r in requests)
    rate = 0.0
    for request in requests:
        inside = [t for t in request.arrivals if begin <= t <= end]
        if len(inside) < 8:
            return float("nan")  # the streams hardly ran side by side
        rate += (len(inside) - 1) / (inside[-1] - inside[0])
    return rate


def distinct(side: Side, prompts: list[Any]) -> dict[str, Any]:
    done = ask_all(side, prompts, N_DISTINCT[1])
    return {"rate": sum(r.n_generated for r in done) / wall(done), "decode_rate": decode_rate(done)}


# --- c: a chat whose history is sent as text ---


def chat_input(words: Words, rng: Random) -> list[Any]:
    return [text(words, rng, 40).strip() for _ in range(N_TURNS)]


def _chat(side: Side, questions: list[str], cut: bool) -> dict[str, Any]:
    messages: list[dict[str, str]] = []
    turns: dict[str, Any] = {"processed": [], "new": [], "ttft_ms": []}
    known = 0  # tokens of what was read and written before
    for question in questions:
        messages.append({"role": "user", "content": question})
        request = side.ask([*messages], N_REPLY).read()
        turns["processed"].append(request.n_processed)
        turns["new"].append(request.n_prompt - known)
        turns["ttft_ms"].append(1e3 * request.first)
        parts = request.text.split(" ")
        messages.append({"role": "assistant", "content": " ".join(parts[len(parts) // 2:]) if cut else request.text})
        known = request.n_prompt + (0 if cut else request.n_generated)
    return turns


def chat(side: Side, questions: list[Any]) -> dict[str, Any]:
    return _chat(side, questions, cut=False)


def chat_cut(side: Side, questions: list[Any]) -> dict[str, Any]:
    """Of each past reply the first half is taken out, as templates do with thoughts: `new` includes what is left of it."""
    return _chat(side, questions, cut=True)


# --- d: one stream ---


def single_input(words: Words, rng: Random) -> list[Any]:
    return ids(words, rng, 32)


def single(side: Side, prompt: list[Any]) -> dict[str, Any]:
    arrivals = side.ask(prompt, 128).read().arrivals
    return {"rate": (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])}


# --- e: a long prompt while others are running ---


def stall_input(words: Words, rng: Random) -> list[Any]:
    return [*(ids(words, rng, 200) for _ in range(N_RUNNING)), ids(words, rng, LONG_PROMPT)]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]


def stall(side: Side, prompts: list[Any]) -> dict[str, Any]:
    """Times between tokens of the running streams that overlap the time from the request to its first token."""
    stop = threading.Event()
    settled = threading.Semaphore(0)

    def run(i: int) -> Request:
        request = side.ask(prompts[i], 1500, seed=i + 1)
        try:
            for _ in request:
                if len(request.arrivals) == 16:
                    settled.release()
                if stop.is_set():
                    return request
            raise PeerError("a stream ended before the long prompt was read")
        finally:
            settled.release()
            request.close()

    with ThreadPoolExecutor(N_RUNNING) as pool:
        futures = [pool.submit(run, i) for i in range(N_RUNNING)]
        for _ in futures:
            settled.acquire()
        long = side.ask(prompts[-1], 2).read()
        stop.set()
        running = [future.result() for future in futures]
    begin, end = long.begin, long.arrivals[0]
    gaps = [1e3 * (b - a) for r in running for a, b in zip(r.arrivals, r.arrivals[1:], strict=False) if b > begin and a < end]
    before = [1e3 * (b - a) for r in running for a, b in zip(r.arrivals, r.arrivals[1:], strict=False) if b <= begin]
    return {"p99_ms": percentile(gaps, 0.99), "max_ms": max(gaps), "median_ms": statistics.median(gaps), "gaps": len(gaps),
            "before_ms": statistics.median(before), "ttft_ms": 1e3 * long.first}


SCENARIOS: dict[str, tuple[Callable[[Words, Random], list[Any]], Callable[[Side, list[Any]], dict[str, Any]]]] = {
    "shared": (shared_input, shared),
    "distinct": (distinct_input, distinct),
    "chat": (chat_input, chat),
    "chat-cut": (chat_input, chat_cut),
    "single": (single_input, single),
    "stall": (stall_input, stall),
}
