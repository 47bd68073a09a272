"""Replicas behind the load balancers whose configurations are shipped: each conversation stays on one while that is there."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import balancers
import needs
import pytest

SESSIONS = [f"session-{i}" for i in range(16)]
FLAGS = ("-np", "2", "--ctx-per-slot", "512", "-t", "1")
pytestmark = pytest.mark.slow


@contextlib.contextmanager
def two(balancer: str, serve: Callable[..., Any], model: Path) -> Iterator[tuple[int, contextlib.ExitStack]]:
    """The balancer's port, and what stops the first of the replicas, which call themselves a and b, when it is closed."""
    program, port = needs.program(balancer), balancers.free_port()
    with serve(model, "--alias", "b", *FLAGS) as second, contextlib.ExitStack() as first:
        ports = {8080: port, 8081: first.enter_context(serve(model, "--alias", "a", *FLAGS)).port, 8082: second.port}
        with balancers.running(balancer, program, balancers.configured(balancer, ports), port):
            yield port, first


def ask(port: int, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        sent = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, sent, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def replica_of(port: int, session: str) -> str:
    status, found = ask(port, "/v1/models", **{"X-Session-Id": session})
    assert status == 200
    return str(found["data"][0]["id"])


@pytest.mark.parametrize("balancer", balancers.FILES)
def test_the_files_are_valid(balancer: str) -> None:
    program, path = needs.program(balancer), balancers.FOLDER / balancers.FILES[balancer]
    command = [program, "-c", "-f", str(path)] if balancer == "haproxy" else [program, "-t", "-c", str(path), "-g",
                                                                              "error_log stderr;"]  # fmt: skip
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    said = done.stdout + done.stderr
    assert done.returncode == 0 or ("syntax is ok" in said and "Permission denied" in said), said  # nginx opens its folders too
    in_turn = balancers.configured(balancer, {}, sticky=False)
    assert in_turn != path.read_text("utf8")
    assert "hdr(X-Session-Id)\n" not in in_turn and "hash $session" not in in_turn


@pytest.mark.parametrize("balancer", balancers.FILES)
def test_conversations_stay_where_they_are(balancer: str, serve: Callable[..., Any], lfm2_tiny_path: Path) -> None:
    with two(balancer, serve, lfm2_tiny_path) as (port, _):
        homes = {session: replica_of(port, session) for session in SESSIONS}
        assert set(homes.values()) == {"a", "b"}
        for _ in range(3):
            assert {session: replica_of(port, session) for session in SESSIONS} == homes
        assert {ask(port, "/v1/models")[1]["data"][0]["id"] for _ in range(16)} == {"a", "b"}  # no session: anywhere
        messages = [{"role": "user", "content": "My name is Ada."}]
        for content in ("What is my name?", "What is the capital of France?"):
            session = {"X-Session-Id": SESSIONS[0]}
            status, first = ask(port, "/v1/chat/completions", {"messages": messages, "temperature": 0}, **session)
            assert status == 200
            messages += [first["choices"][0]["message"], {"role": "user", "content": content}]
            _, second = ask(port, "/v1/chat/completions", {"messages": messages, "temperature": 0}, **session)
            usage = second["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 2
        assert second["choices"][0]["message"]["content"] == "The capital of France is Paris."


def test_haproxy_reads_the_fields_of_openai(serve: Callable[..., Any], lfm2_tiny_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Hi " * 200}], "max_tokens": 1}
    with two("haproxy", serve, lfm2_tiny_path) as (port, _):
        for name in ("user", "prompt_cache_key"):
            homes = [{str(ask(port, "/v1/chat/completions", {**body, name: session})[1]["model"]) for _ in range(3)}
                     for session in SESSIONS]  # fmt: skip
            assert {*map(len, homes)} == {1}
            assert set.union(*homes) == {"a", "b"}


@pytest.mark.parametrize("balancer", balancers.FILES)
def test_a_replica_is_stopped(balancer: str, serve: Callable[..., Any], lfm2_tiny_path: Path) -> None:
    with two(balancer, serve, lfm2_tiny_path) as (port, first):
        homes = {session: replica_of(port, session) for session in SESSIONS}
        assert set(homes.values()) == {"a", "b"}
        first.close()
        assert {replica_of(port, session) for session in SESSIONS} == {"b"}
