"""`lfmfast serve`: what its flags mean, and a process's life from the first answer to the last signal."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lfmfast import __version__, cli
from lfmfast.aio import AsyncModel
from lfmfast.cli import _options
from lfmfast.cli._slots import Slots, plan
from lfmfast.params import SamplingParams
from lfmfast.server import run
from lfmfast.server.settings import Settings

# --- how much context each slot gets ---


@pytest.mark.parametrize("ctx, each, parallel, unified, n, n_ctx", [
    (4096, None, -1, False, 4, 4096),  # as Liquid's guide has it: one conversation may use all of it
    (4096, None, 1, False, 1, 4096),
    (4096, None, 4, False, 4, 1024),
    (4096, None, 4, True, 4, 4096),
    (None, 2048, 8, False, 8, 2048),
    (None, 0, 2, False, 2, 128_000),
    (0, None, -1, False, 4, 128_000),
    (0, None, 4, False, 4, 32_000),
    (None, None, -1, False, 4, 8192),
    (None, None, 16, False, 16, 8192),
])  # fmt: skip
def test_slots(ctx: int | None, each: int | None, parallel: int, unified: bool, n: int, n_ctx: int) -> None:
    assert plan(ctx, each, parallel, unified, lambda: 128_000)[:2] == (n, n_ctx)


def test_the_plan_says_why() -> None:
    shared = plan(4096, None, 4, False, lambda: 0).why
    assert "-c 4096 is shared by 4 slots" in shared and "--ctx-per-slot 4096" in shared
    assert "each can use" in plan(4096, None, -1, False, lambda: 0).why
    assert plan(None, None, -1, False, lambda: 2048) == Slots(4, 2048, "without -c; the model was trained with 2048")


@pytest.mark.parametrize("ctx, each, parallel", [(4096, 4096, 2), (4096, None, 0), (3, None, 4)])
def test_plans_that_make_no_sense(ctx: int | None, each: int | None, parallel: int) -> None:
    with pytest.raises(_options.UsageError):
        plan(ctx, each, parallel, False, lambda: 0)


# --- flags ---


class Opened(Exception):
    """In place of a model."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, lfm2_tiny_path: Path) -> Any:
    """Runs the command up to the point where it would serve; gives the settings and what the model is opened with."""
    for name in list(os.environ):
        if name.startswith("LLAMA_"):
            monkeypatch.delenv(name)
    seen: dict[str, Any] = {}

    async def load(path: Any, **options: Any) -> AsyncModel:
        seen["options"] = {"path": str(path), **options}
        raise Opened

    def serve(settings: Settings, load: Any, sockets: Any, **rest: Any) -> int:
        seen["settings"] = settings
        with pytest.raises(Opened):
            asyncio.run(load())
        return 0

    def bind(settings: Settings) -> list[Any]:
        return [SimpleNamespace(getsockname=lambda: ("", 1234)) for _ in settings.host]

    monkeypatch.setattr(AsyncModel, "load", staticmethod(load))
    monkeypatch.setattr(run, "serve", serve)
    monkeypatch.setattr(run, "bind", bind)

    def main(*flags: str, model: bool = True) -> tuple[Settings, dict[str, Any]]:
        assert cli.main(["serve", *(["-m", str(lfm2_tiny_path)] if model else []), *flags]) == 0
        return seen["settings"], seen["options"]

    return main


def test_without_flags(opened: Any, lfm2_tiny_path: Path) -> None:
    settings, options = opened()
    assert settings == Settings()
    assert options == {"path": str(lfm2_tiny_path), "n_ctx": 4096, "n_parallel": 4, "n_queue": 1024, "use_mmap": True,
                       "use_mlock": False, "repack": True}  # fmt: skip


def test_flags_of_the_guide(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("lfmfast.hub.resolve", lambda name, **options: seen.append(name) or Path("model.gguf"))
    settings, options = opened("-hf", "LiquidAI/LFM2.5-1.2B-Instruct-GGUF:Q4_K_M", "-c", "4096", "--port", "8081", "--jinja",
                               model=False)  # fmt: skip
    assert seen == ["LiquidAI/LFM2.5-1.2B-Instruct-GGUF:Q4_K_M"]
    assert (settings.host, settings.port) == (("127.0.0.1",), 8081)
    assert settings.aliases == ("LiquidAI/LFM2.5-1.2B-Instruct-GGUF:Q4_K_M",)
    assert (options["path"], options["n_ctx"], options["n_parallel"]) == ("model.gguf", 4096, 4)
    opened("--hf-repo", "ggml-org/models:Q8_0", "--hf-file", "tiny/stories.gguf", "-c", "512", model=False)
    assert seen[1] == "ggml-org/models:tiny/stories.gguf"


def test_model_flags(opened: Any) -> None:
    _, options = opened("-c", "2048", "-np", "2", "-t", "3", "-tb", "5", "-b", "64", "-ub", "32", "-ngl", "7", "-ctk", "q8_0",
                        "-ctv", "f32", "-fa", "on", "--cache-ram", "16", "--no-mmap", "--mlock", "--no-repack",
                        "--queue", "9", "--chat-template", "{{ messages }}", "--deterministic")  # fmt: skip
    del options["path"]
    assert options == {
        "n_ctx": 1024, "n_parallel": 2, "n_threads": 3, "n_threads_batch": 5, "n_batch": 64, "n_ubatch": 32, "n_gpu_layers": 7,
        "type_k": "q8_0", "type_v": "f32", "flash_attn": True, "cache_bytes": 16 << 20, "use_mmap": False, "use_mlock": True,
        "repack": False, "n_queue": 9, "chat_template": "{{ messages }}", "deterministic": True,
    }  # fmt: skip


def test_other_ways_to_say_it(opened: Any, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ bos_token }}")
    _, options = opened("-t", "-1", "-ngl", "all", "-fa", "off", "-cram", "-1", "--chat-template-file", str(template))
    assert "n_threads" not in options and "n_gpu_layers" not in options
    assert options["flash_attn"] is False and options["cache_bytes"] >= 1 << 40
    assert options["chat_template"] == "{{ bos_token }}"
    assert "flash_attn" not in opened("--flash-attn", "auto")[1]


def test_server_flags(opened: Any, tmp_path: Path) -> None:
    settings, _ = opened(
        "--host", "127.0.0.1,::1", "-a", "two,one", "--tags", "x, y", "--metrics", "--no-slots", "--props", "--no-ui",
        "--slot-save-path", str(tmp_path), "--cors-origins", "localhost", "--timeout", "5", "--drain-timeout", "3",
        "--max-body", "1", "--sse-ping-interval", "-1", "--log-jsonl", "--log-disable", "-n", "99", "--temp", "0.3",
        "--top-k", "5", "--min-p", "0.1", "--repeat-penalty", "1.1", "-s", "42", "--cache-reuse", "64", "--no-cache-prompt",
        "--chat-template-kwargs", '{"keep_past_thinking": true}', "--reasoning-format", "none", "--api-key", "a,b",
        "--reasoning-budget", "100",
    )  # fmt: skip
    assert settings == Settings(
        host=("127.0.0.1", "::1"), aliases=("one", "two"), tags=("x", "y"), metrics=True, slots=False, props=True, page=False,
        slot_save_path=tmp_path, cors_origins="localhost", header_timeout_s=5, body_timeout_s=5, drain_s=3,
        max_body_bytes=1 << 20, sse_ping_s=-1, log_json=True, access_log=False, n_predict=99,
        sampling=SamplingParams(temperature=0.3, top_k=5, min_p=0.1, repeat_penalty=1.1, seed=42), cache_reuse=64,
        cache_prompt=False, chat_template_kwargs={"keep_past_thinking": True}, reasoning_format="none", api_keys=("a", "b"),
        reasoning_budget=100,
    )  # fmt: skip


def test_thinking_is_the_templates(opened: Any) -> None:
    assert opened("--reasoning", "off")[0].chat_template_kwargs == {"enable_thinking": False}
    assert opened("--reasoning", "on", "--chat-template-kwargs", '{"a": 1}')[0].chat_template_kwargs == {
        "a": 1, "enable_thinking": True,
    }  # fmt: skip


def test_flags_without_effect_are_taken(opened: Any) -> None:
    opened("--cont-batching", "-sps", "0.5", "--no-cache-idle-slots", "--no-warmup", "--threads-http", "8",
           "--no-context-shift", "--swa-full", "--no-jinja", "-kvu", "--slots", "--webui", "--reasoning", "auto")  # fmt: skip


def test_environment(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"LLAMA_ARG_CTX_SIZE": "512", "LLAMA_ARG_N_PARALLEL": "2", "LLAMA_ARG_PORT": "99", "LLAMA_ARG_HOST": "0.0.0.0",
              "LLAMA_API_KEY": "from-env", "LLAMA_ARG_ENDPOINT_METRICS": "1", "LLAMA_ARG_ENDPOINT_SLOTS": "0",
              "LLAMA_ARG_N_GPU_LAYERS": "0", "LLAMA_ARG_ALIAS": "x", "LLAMA_ARG_JINJA": "1"}  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    settings, options = opened("--port", "100")  # what is typed counts more
    assert (settings.port, settings.host, settings.api_keys, settings.aliases) == (100, ("0.0.0.0",), ("from-env",), ("x",))
    assert settings.metrics and not settings.slots
    assert (options["n_ctx"], options["n_parallel"], options["n_gpu_layers"]) == (256, 2, 0)


def test_keys_of_a_file(opened: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    file.write_text("# mine\n one \n\ntwo\none\n")
    assert opened("--api-key-file", str(file), "--api-key", "three")[0].api_keys == ("three", "one", "two")
    file.write_text("# none\n")
    assert cli.main(["serve", "-m", "x.gguf", "--api-key-file", str(file)]) == 2
    assert cli.main(["serve", "-m", "x.gguf", "--api-key-file", str(tmp_path / "missing")]) == 1
    assert cli.main(["serve", "-m", "x.gguf", "--api-key", ""]) == 2


@pytest.mark.parametrize("flags, host, warned", [
    ((), "0.0.0.0", True), ((), "127.0.0.1", False), ((), "localhost", False), ((), "::", True), ((), "127.0.0.1,::1", False),
    (("--api-key", "k"), "0.0.0.0", False), ((), "127.0.0.1,192.0.2.1", True),
])  # fmt: skip
def test_a_public_address_without_a_key(
    opened: Any, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], host: str, warned: bool
) -> None:
    opened("--host", host, *flags)
    said = capsys.readouterr().err
    assert ("anybody who can reach" in said) is warned
    assert "listening on http://" in said


@pytest.mark.parametrize("flags, said", [
    (["--paralel", "2"], "there is no option --paralel; did you mean --parallel?"),
    (["--ctx-sise", "2"], "there is no option --ctx-sise; did you mean --ctx-size?"),
    (["--lora", "x"], "there is no option --lora"),
    (["-ngx", "2"], "there is no option -ngx; did you mean -ngl?"),
    (["--port", "x"], "--port"),
    (["--context-shift"], "--context-shift"),
    (["--deterministic", "--cache-reuse", "64"], "--cache-reuse 64: it is inexact"),
    (["--reasoning-format", "deepseek-legacy"], "auto, deepseek or none"),
    (["--reasoning", "maybe"], "on, off or auto"),
    (["--chat-template", "lama3"], "none of llama.cpp's templates, which are bailing,"),
    (["--chat-template-kwargs", "{"], "not JSON"),
    (["--chat-template-kwargs", "[]"], "JSON object"),
    (["-ngl", "many"], "-ngl many"),
    (["-fa", "maybe"], "on, off or auto"),
    (["--temp", "-1"], "temperature"),
    (["-np", "0"], "-np 0"),
    (["-c", "10", "--ctx-per-slot", "10"], "not both"),
    (["--slot-save-path", "no/such/folder"], "no such folder"),
])  # fmt: skip
def test_wrong_usage(capsys: pytest.CaptureFixture[str], flags: list[str], said: str) -> None:
    assert cli.main(["serve", "-m", "model.gguf", *flags]) == 2
    assert said in capsys.readouterr().err


def test_which_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve"]) == 2
    assert "which model?" in capsys.readouterr().err


# --- a process ---


class Process:
    """`lfmfast serve`, started; its stderr is read along."""

    def __init__(self, *flags: str, **environment: str) -> None:
        command = [sys.executable, "-m", "lfmfast", "serve", "--port", "0", "-ngl", "0", "-t", "1", *flags]
        # In this folder, so that `-m lfmfast` finds the installed package.
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                        text=True, encoding="utf-8", cwd=Path(__file__).parent,
                                        env={**os.environ, **environment})  # fmt: skip
        self.lines: list[str] = []
        self._open: list[Any] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    def said(self, pattern: str) -> re.Match[str]:
        """Wait for a line."""
        for _ in range(6000):
            if found := re.search(pattern, "\n".join(self.lines)):
                return found
            assert self._reader.is_alive(), self.lines
            time.sleep(0.01)
        raise AssertionError(f"it did not say {pattern!r}: {self.lines}")

    @property
    def port(self) -> int:
        return int(self.said(r"listening on http://\S+:(\d+)")[1])

    def ask(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        self._open += [connection, answer]
        return answer

    def status(self, path: str = "/health") -> int:
        return self.ask("GET", path).status

    def end(self) -> int:
        """Wait for the end, and give the exit code."""
        code = self.process.wait(60)
        self._reader.join(10)
        return code

    def close(self) -> None:
        for item in self._open:
            item.close()
        self.process.kill()
        self.end()
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def started(*flags: object, **environment: str) -> Iterator[Process]:
    process = Process(*map(str, flags), **environment)
    try:
        yield process
    finally:
        process.close()


LONG = {"prompt": "Once upon a", "ignore_eos": True, "n_predict": 3000, "temperature": 0, "stream": True}


def test_from_start_to_end(lfm2_tiny_path: Path) -> None:
    with started("-m", lfm2_tiny_path, "-np", "2", "-c", "1024", "--api-key", "sk-secret") as process:
        process.said("ready: chat at http://127.0.0.1")
        assert process.status() == 200 and process.status("/props") == 401
        process.said(r"GET /props 401")
        assert process.ask("GET", "/health").headers["Server"] == f"lfmfast/{__version__}"
        process.process.terminate()
        assert process.end() == 0
        log = "\n".join(process.lines)
        assert "each of the 2 slots has 512 tokens" in log and "-c 1024 is shared by 2 slots" in log
        assert "temperature 0.1" in log and "sk-secret" not in log and "Traceback" not in log


def test_a_line_for_each_request(lfm2_tiny_path: Path) -> None:
    with started("-m", lfm2_tiny_path, "--log-jsonl") as process:
        process.said("ready")
        answer = process.ask("POST", "/completion", {"prompt": "Once upon a", "n_predict": 4, "ignore_eos": True})
        timings = json.loads(answer.read())["timings"]
        line = json.loads(process.said(r'{.*"path": "/completion".*}')[0])
        assert line["id"] == answer.headers["x-request-id"] and line["status"] == 200 and line["finish_reason"] == "length"
        assert line["prompt_tokens"] - line["cached_tokens"] == timings["prompt_n"] and line["predicted_tokens"] == 4
        assert line["first_token_ms"] > 0 and line["ms"] >= line["first_token_ms"]
        process.process.terminate()
        assert process.end() == 0


def test_nobody_reads_the_log(lfm2_tiny_path: Path) -> None:
    reading, writing = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "lfmfast", "serve", "-m", str(lfm2_tiny_path), "--port", str(port), "-ngl", "0", "-t", "1"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=writing,
                          cwd=Path(__file__).parent) as process:  # fmt: skip
        os.close(writing)
        try:
            said = b""
            while b"ready" not in said:
                said += os.read(reading, 4096)
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            for _ in range(50):  # 2 KiB each: more than a pipe takes
                connection.request("GET", "/" + "x" * 2000)
                assert connection.getresponse().read()
            connection.close()
            process.terminate()
            assert process.wait(20) == 0
        finally:
            process.kill()
            os.close(reading)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_answers_come_to_their_end(lfm2_tiny_path: Path, number: int) -> None:
    with started("-m", lfm2_tiny_path) as process:
        process.said("ready")
        answer = process.ask("POST", "/completion", {**LONG, "n_predict": 800})
        assert answer.readline().startswith(b"data: ")
        process.process.send_signal(number)
        last = json.loads(answer.read().split(b"data: ")[-1])
        assert (last["stop_type"], last["tokens_predicted"]) == ("limit", 800)
        assert process.end() == 0
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", process.port))


def test_answers_that_take_too_long_are_ended_properly(lfm2_tiny_path: Path) -> None:
    with started("-m", lfm2_tiny_path, "--drain-timeout", "0") as process:
        process.said("ready")
        answer = process.ask("POST", "/v1/completions", LONG)
        assert answer.readline().startswith(b"data: ")
        process.process.terminate()
        last = json.loads(answer.read().split(b"data: ")[-1])  # the client is told, and the chunked body has its end
        assert last["error"]["type"] == "unavailable_error" and "shutting down" in last["error"]["message"]
        assert process.end() == 0
        process.said("200 .* cancelled")


def test_the_second_signal_forces(slow_model_path: Path) -> None:
    with started("-m", slow_model_path, "-c", "4096") as process:
        process.said("ready")
        answer = process.ask("POST", "/completion", LONG)
        assert answer.readline().startswith(b"data: ")
        process.process.terminate()
        time.sleep(0.3)
        assert process.process.poll() is None
        process.process.terminate()
        assert process.end() == 1


def test_while_a_model_is_being_fetched(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hub:  # which never answers
        environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HUB_CACHE": str(tmp_path),
                       "HF_HUB_OFFLINE": "0"}  # fmt: skip
        with started("-hf", "owner/repo:Q4_0", **environment) as process:
            answer = process.ask("GET", "/health")
            assert answer.status == 503
            assert json.loads(answer.read())["error"] == {"code": 503, "message": "Loading model", "type": "unavailable_error"}
            assert process.ask("POST", "/v1/chat/completions", {}).status == 503
            assert process.status("/") == 200
            process.process.terminate()
            assert process.end() == 0, process.lines


def test_a_model_that_can_not_be_loaded(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"no model at all" * 100)
    with started("-m", file, "-c", "512") as process:
        assert process.end() == 1
        assert re.search(r"lfmfast: .*model\.gguf", process.lines[-1])
        assert "Traceback" not in "\n".join(process.lines)


def test_a_variable_that_the_template_does_not_know(lfm2_tiny_path: Path) -> None:
    with started("-m", lfm2_tiny_path, "--reasoning", "on") as process:
        assert process.end() == 1
        assert "enable_thinking" in process.lines[-1]


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with started("-m", "model.gguf", "--port", port) as process:
            assert process.end() == 1
            assert f"can't listen at 127.0.0.1 port {port}" in process.lines[-1]


def test_several_addresses(lfm2_tiny_path: Path) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("there is no IPv6")
    with started("-m", lfm2_tiny_path, "--host", "127.0.0.1,::1") as process:
        process.said("ready")
        for host in ("127.0.0.1", "::1"):
            connection = http.client.HTTPConnection(host, process.port, timeout=30)
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
            connection.close()
