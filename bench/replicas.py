"""Two replicas of `lfmfast serve` behind a load balancer: conversations that stay on one of them, against requests in turn.

    python -m bench.replicas                        # nginx, with examples/replicas/nginx.conf; see docs/replicas.md
    python -m bench.replicas --balancer haproxy --chats 9

Several clients have a conversation each, all at once, whose history is sent whole with each turn. Printed are, for each turn,
the share of the prompt that the replica did not read again, and the time to the first token.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import shutil
import statistics
import sys
import threading
import time
from typing import Any

import balancers
import modelgen

from bench import report
from bench.engine_sides import SAMPLING, Server
from bench.words import words_model


def turn(port: int, session: str, messages: list[dict[str, str]], n_tokens: int) -> tuple[str, float, dict[str, Any]]:
    """Ask; the answer, the seconds to its first token, and the usage."""
    body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": n_tokens,
            "ignore_eos": True, "seed": 1, **SAMPLING}  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    began, first, text, usage = time.perf_counter(), 0.0, "", {}
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(body),
                           {"Content-Type": "application/json", "X-Session-Id": session})  # fmt: skip
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {response.read(500).decode(errors='replace')}")
        for line in response:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            event = json.loads(data)
            usage = event.get("usage") or usage
            piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
            if piece:
                first = first or time.perf_counter() - began
                text += piece
    return text, first, usage


def chats(port: int, words: list[str], n_chats: int, n_turns: int, n_tokens: int) -> list[list[tuple[float, float, int]]]:
    """Of each turn, and in it of each conversation: share of the prompt that was cached, seconds to the first token, tokens."""
    seen: list[list[tuple[float, float, int]]] = [[] for _ in range(n_turns)]
    failures: list[Exception] = []

    def converse(i: int) -> None:
        chance = random.Random(i)
        messages = [{"role": "system", "content": "".join(chance.choices(words, k=200)).strip()}]
        try:
            for at in range(n_turns):
                messages.append({"role": "user", "content": "".join(chance.choices(words, k=50)).strip()})
                text, first, usage = turn(port, f"chat-{i}", messages, n_tokens)
                messages.append({"role": "assistant", "content": text})
                cached, n_prompt = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
                seen[at].append((cached / n_prompt, first, n_prompt))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=converse, args=(i,)) for i in range(n_chats)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--balancer", default="nginx", choices=balancers.FILES)
    parser.add_argument("--routing", default="sticky,in turn", help="of sticky and 'in turn' (default: both)")
    parser.add_argument("--shape", default="350M", choices=modelgen.SHAPES)
    parser.add_argument("--quant", default="Q4_K_M", choices=modelgen.oracle.FTYPES)
    parser.add_argument("--threads", type=int, default=max(1, report.cpu_count() // 2), help="of each replica")
    parser.add_argument("--chats", type=int, default=5, help="odd: of an even number each meets its replica in turn")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=24, help="of an answer")
    args = parser.parse_args()
    program = shutil.which(args.balancer) or sys.exit(f"{args.balancer} is not installed")
    model, words = words_model(modelgen.bench_model(args.shape, args.quant))
    print(f"{report.machine()}\n{report.file(model)}, two replicas of {args.threads} threads behind {args.balancer}, "
          f"{args.chats} chats at once: system prompts of 200 words, questions of 50, answers of {args.tokens}")  # fmt: skip
    ours = [sys.executable, "-m", "lfmfast", "serve"]
    for routing in args.routing.split(","):
        with contextlib.ExitStack() as stack:
            replicas = []
            for _ in range(2):
                replicas.append(Server(str(model), args.threads, ["-np", str(args.chats)], 4096 * args.chats, ours))
                stack.callback(replicas[-1].close)
            port = balancers.free_port()
            ports = {8080: port, 8081: replicas[0].port, 8082: replicas[1].port}
            text = balancers.configured(args.balancer, ports, routing == "sticky")
            stack.enter_context(balancers.running(args.balancer, program, text, port))
            began = time.perf_counter()
            seen = chats(port, words.texts, args.chats, args.turns, args.tokens)
            print(f"{routing}: {time.perf_counter() - began:.1f} s")
        for at, turns in enumerate(seen, 1):
            n = statistics.mean(n for _, _, n in turns)
            read = statistics.mean((1 - share) * n for share, _, n in turns)
            firsts = report.spread([1000 * first for _, first, _ in turns], 0)
            print(f"  turn {at}: of {n:4.0f} tokens {read:4.0f} read, {1 - read / n:4.0%} cached; first token: {firsts} ms")


if __name__ == "__main__":
    main()
