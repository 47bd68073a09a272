"""The sides of bench.compare: what each is, how it is started, and llama-server's settings to choose from."""

from __future__ import annotations

import http.client
import json
import queue
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import peers
from bench.engine_sides import SAMPLING, Ours, PeerError, Prompt, Request, Server
from bench.engine_sides import Side as EngineSide
from bench.peers import openvino, venvs

FOLDER = Path(__file__).parent / "peers"


class PipedRequest(Request):
    """An answer of a library in another process. An event is a token."""

    def __init__(self, side: Library, prompt: dict[str, Any], n_tokens: int, seed: int) -> None:
        super().__init__()
        self._events = side.send({**prompt, "max_tokens": n_tokens, "seed": seed, **SAMPLING})

    def _tell(self, event: dict[str, Any]) -> None:
        self.text += event["text"]

    def _pieces(self) -> Iterator[int]:
        while True:
            event = self._events.get()
            if event is None:
                raise PeerError("the process ended")
            if "done" in event:
                return
            self._tell(event)
            self.n_generated += 1
            yield 1

    def close(self) -> None:
        """There is no way to give up."""


class Library:
    """A Python package in a process of its own environment, behind lines of JSON (bench/peers/*_worker.py)."""

    def __init__(self, command: Sequence[str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (open as long as the process runs)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True)
        assert self._process.stdin and self._process.stdout
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._lock, self._count = threading.Lock(), 0
        self._queues: dict[int, queue.SimpleQueue[Any]] = {}
        first = self._stdout.readline()
        if not first:
            raise PeerError(f"it did not start\n{self.fault()}")
        self.about = str(json.loads(first)["ready"])
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        for line in self._stdout:
            event = json.loads(line)
            self._queues[event["id"]].put(event)
        for waiting in list(self._queues.values()):
            waiting.put(None)

    def send(self, request: dict[str, Any]) -> queue.SimpleQueue[Any]:
        """Ask; the events come in the queue, None where the process has ended."""
        with self._lock:
            self._count += 1
            events = self._queues[self._count] = queue.SimpleQueue()
            self._stdin.write(json.dumps({"id": self._count, **request}) + "\n")
            self._stdin.flush()
        return events

    def ask(self, prompt: Prompt, n_tokens: int, seed: int = 1) -> Request:
        return PipedRequest(self, {"messages": prompt}, n_tokens, seed)

    def facts(self) -> dict[str, Any]:
        return {}

    def fault(self) -> str:
        """The last it logged."""
        self._log.seek(0)
        return self._log.read()[-2000:]

    def close(self) -> None:
        self._stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class TokenRequest(PipedRequest):
    """An answer that is told in numbers of tokens; its text is as many words."""

    def _tell(self, event: dict[str, Any]) -> None:
        self.text += " word" * event["n"]


class TokenLibrary(Library):
    """A library that is given token ids: one for each word, and about as many as the template has around a message."""

    def ask(self, prompt: Prompt, n_tokens: int, seed: int = 1) -> Request:
        ids = [1]
        for message in prompt:
            assert isinstance(message, dict)
            ids += [6, 20, 21, *(22 + zlib.crc32(word.encode()) % 60000 for word in message["content"].split()), 7, 21]
        return TokenRequest(self, {"tokens": ids}, n_tokens, seed)


Side = EngineSide | Library


class Client:
    """One connection to a server, kept open; whole answers, which cost the machine less than streams."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)

    def answer(self, messages: Any, n_tokens: int, seed: int) -> int:
        """Tokens that came."""
        body = {"messages": messages, "max_tokens": n_tokens, "ignore_eos": True, "seed": seed, **SAMPLING}
        for attempt in range(2):
            try:
                self._connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
                response = self._connection.getresponse()
                break
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):  # closed between two requests
                self._connection.close()
                if attempt:
                    raise
        data = response.read()
        if response.status != 200:
            raise PeerError(f"status {response.status}: {data[:500].decode(errors='replace')}")
        return int(json.loads(data)["usage"]["completion_tokens"])


@dataclass(frozen=True)
class Setting:
    """How a side is started for one measurement."""

    model_file: str
    n_threads: int
    n_parallel: int
    n_ctx: int  # tokens of each
    shape: str = ""  # of a generated model
    options: Sequence[str] = ()


def _ours(s: Setting) -> Side:
    return Ours(s.model_file, s.n_threads, s.n_parallel, s.n_ctx)


def _server(program: Callable[[], Sequence[str]]) -> Callable[[Setting], Side]:
    def start(s: Setting) -> Side:
        return Server(s.model_file, s.n_threads, ["-np", str(s.n_parallel), *s.options], s.n_parallel * s.n_ctx, program())
    return start


def _llama_cpp_python(s: Setting) -> Side:
    return Library([str(venvs.interpreter(venvs.LLAMA_CPP_PYTHON)), str(FOLDER / "llama_cpp_python_worker.py"), s.model_file,
                    str(s.n_threads), str(s.n_ctx)])  # fmt: skip


def _xllamacpp() -> list[str]:
    return [str(venvs.interpreter(venvs.XLLAMACPP)), str(FOLDER / "xllamacpp_server.py")]


def _openvino(s: Setting) -> Side:
    return TokenLibrary(openvino.worker(s.shape, n_threads=s.n_threads, n_parallel=s.n_parallel))


def _lfmfast_about(shape: str) -> str:
    import lfmfast

    info = lfmfast.build_info()
    return (f"lfmfast {lfmfast.__version__}, llama.cpp {info['llama_cpp']}, {info['compiler']}, {info['cpu_flags']}, kernels "
            f"{info['kernels']}")


def _openvino_about(shape: str) -> str:
    if not shape or not openvino.has(shape):
        raise RuntimeError("OpenVINO runs a conversion of its own, and of generated LFM2 shapes without experts only")
    openvino.worker(shape, n_threads=1, n_parallel=1)
    return (f"{openvino.PACKAGES[1]}, the same shape and random weights in its own format: {openvino.SETTINGS}; it is given "
            "token ids, and writes no text")


def _llama_server_about(shape: str) -> str:
    peers.program("llama-server")
    return f"llama.cpp b{peers.build()}, the source that lfmfast is built from, {' '.join(peers.flags())}"


def _package_about(package: venvs.Package, text: str) -> Callable[[str], str]:
    def about(shape: str) -> str:
        venvs.interpreter(package)
        return f"{package.name} {package.version} ({text})"
    return about


@dataclass(frozen=True)
class Kind:
    """A side.

    Parameters
    ----------
    how : str
        "in Python" or "over HTTP": only sides of the same kind are compared, but for batches.
    about : callable
        Version and build, of the side that is to run a generated shape ("": a file that was given). It makes what is not there
        yet, and raises if that fails.
    parallel : bool
        It can answer several at once.
    """

    title: str
    how: str
    about: Callable[[str], str]
    start: Callable[[Setting], Side]
    parallel: bool = True


IN_PYTHON, OVER_HTTP = "in Python", "over HTTP"
KINDS = {
    "lfmfast": Kind("lfmfast", IN_PYTHON, _lfmfast_about, _ours),
    "llama-cpp-python": Kind(
        "llama-cpp-python", IN_PYTHON,
        _package_about(venvs.LLAMA_CPP_PYTHON, f"llama.cpp 0c1e57098, compiled here with {' '.join(peers.flags())}"),
        _llama_cpp_python, parallel=False),
    "openvino": Kind("OpenVINO GenAI", IN_PYTHON, _openvino_about, _openvino),
    "lfmfast-serve": Kind("lfmfast serve", OVER_HTTP, _lfmfast_about,
                          _server(lambda: [sys.executable, "-m", "lfmfast", "serve"])),
    "llama-server": Kind("llama-server", OVER_HTTP, _llama_server_about,
                         _server(lambda: [str(peers.program("llama-server"))])),
    "xllamacpp": Kind("xllamacpp", OVER_HTTP, _package_about(venvs.XLLAMACPP, "llama.cpp b11549, its wheel: AVX2, no AVX-512"),
                      _server(_xllamacpp)),
}  # fmt: skip
