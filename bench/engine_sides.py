"""The two sides of bench.engine behind one interface: `ask` begins a request, iterating over it gives tokens as they arrive."""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import modelgen

from bench import peers, report

N_PARALLEL = 8
N_CTX = 2048  # tokens per sequence
SAMPLING = {"temperature": 0.1, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.05}  # LFM2.5's, written out
SERVERS = {"np8": ["-np", str(N_PARALLEL)], "np8-kvu": ["-np", str(N_PARALLEL), "-kvu"]}

Prompt = list[int] | list[dict[str, str]]  # token ids, or messages


def arguments(description: str | None, argv: list[str] | None, letters: Collection[str],
              names: Collection[str]) -> argparse.Namespace:  # fmt: skip
    """Command line of a benchmark with scenarios (`letters`) and sides (`names`)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(letters), help="scenarios (default: all)")
    parser.add_argument("--sides", default=",".join(names), help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--shape", default="350M", choices=modelgen.SHAPES)
    parser.add_argument("--quant", default="Q4_K_M", choices=modelgen.oracle.FTYPES)
    parser.add_argument("--model", type=Path, help="a GGUF instead of a generated one")
    parser.add_argument("--threads", type=int, default=report.cpu_count())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--server-args", default="", help="further arguments for llama-server, in one string")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--scenario", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.sides, args.only = args.sides.split(","), sorted(set(args.only.split(",")))
    for given, known in ((args.only, letters), (args.sides, names)):
        if unknown := set(given) - set(known):
            parser.error(f"{sorted(unknown)}: choose from {list(known)}")
    return args


class PeerError(RuntimeError):
    """A side did not answer as it should."""


class Request:
    """One answer. Iterating gives the number of tokens that each piece brought; the other fields are filled by then."""

    n_prompt = 0  # tokens of the prompt
    n_processed = 0  # of them, those that no cache had
    n_generated = 0
    text = ""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.arrivals: list[float] = []  # of each token
        self.end = 0.0

    def _pieces(self) -> Iterator[int]:
        raise NotImplementedError

    def close(self) -> None:
        """Give up before the end."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        for n in self._pieces():
            self.arrivals += [time.perf_counter()] * n
            yield n
        self.end = time.perf_counter()

    def read(self) -> Request:
        """Read to the end."""
        for _ in self:
            pass
        return self

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0] - self.begin


class OurRequest(Request):
    """A stream of lfmfast."""

    def __init__(self, model: Any, prompt: Prompt, n_tokens: int, seed: int) -> None:
        super().__init__()
        self._stream = model.stream(prompt, max_tokens=n_tokens, seed=seed, ignore_eos=True, **SAMPLING)

    def _pieces(self) -> Iterator[int]:
        for piece in self._stream:
            self.text += piece.text
            if piece.usage is not None:
                self.n_prompt, self.n_generated = piece.usage.prompt_tokens, piece.usage.completion_tokens
                self.n_processed = self.n_prompt - piece.usage.cached_tokens
            yield len(piece.tokens)

    def close(self) -> None:
        self._stream.close()


class Ours:
    """lfmfast in this process."""

    def __init__(self, model_file: str, n_threads: int, n_parallel: int = N_PARALLEL, n_ctx: int = N_CTX) -> None:
        from lfmfast import Model

        self.model = Model(model_file, n_ctx=n_ctx, n_threads=n_threads, n_parallel=n_parallel)

    def ask(self, prompt: Prompt, n_tokens: int, seed: int = 1) -> Request:
        return OurRequest(self.model, prompt, n_tokens, seed)

    def facts(self) -> dict[str, Any]:
        """The engine's counters, for the raw numbers."""
        return dict(self.model.engine.stats())

    def fault(self) -> str:
        return "lfmfast"

    def close(self) -> None:
        self.model.close()


class ServerRequest(Request):
    """A streamed answer over HTTP. Every event of /completion is one token; a chat's are one or none."""

    def __init__(self, port: int, prompt: Prompt, n_tokens: int, seed: int) -> None:
        super().__init__()
        self._response: http.client.HTTPResponse | None = None
        chat = isinstance(prompt[0], dict)
        body: dict[str, Any] = {"stream": True, "cache_prompt": True, "ignore_eos": True, "seed": seed, **SAMPLING}
        body |= {"messages": prompt, "max_tokens": n_tokens} if chat else {"prompt": prompt, "n_predict": n_tokens}
        self._chat = chat
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        self._connection.request("POST", "/v1/chat/completions" if chat else "/completion", json.dumps(body),
                                 {"Content-Type": "application/json"})

    def _pieces(self) -> Iterator[int]:
        self._response = response = self._connection.getresponse()
        if response.status != 200:
            raise PeerError(f"status {response.status}: {response.read(500).decode(errors='replace')}")
        while line := response.readline():
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data in (b"", b"[DONE]"):
                continue
            event = json.loads(data)
            if "error" in event:
                raise PeerError(str(event["error"]))
            timings = event.get("timings")
            if timings:
                self.n_processed, self.n_generated = timings["prompt_n"], timings["predicted_n"]
                self.n_prompt = self.n_processed + timings["cache_n"]
            if self._chat:
                text = event["choices"][0]["delta"].get("content") if event["choices"] else None
            else:
                text = event["content"]
            self.text += text or ""
            if text or event.get("tokens"):
                yield 1
        self.close()

    def close(self) -> None:
        if self._response is not None:  # it keeps the socket open
            self._response.close()
        self._connection.close()


class Server:
    """llama-server, or another program with its flags, in a process of its own."""

    def __init__(self, model_file: str, n_threads: int, options: Sequence[str], n_ctx: int = N_PARALLEL * N_CTX,
                 program: Sequence[str] = ()) -> None:  # fmt: skip
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._program = program or [str(peers.program("llama-server"))]
        command = [*self._program, "-m", model_file, "-t", str(n_threads), "-c", str(n_ctx), "--no-webui", "--host",
                   "127.0.0.1", "--port", str(self.port), *options]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (open as long as the server runs)
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
                                         cwd=Path(__file__).parent)  # where `-m lfmfast` finds the installed package
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + 300
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise PeerError(f"the server did not start\n{self.fault()}")
            time.sleep(0.05)

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def ask(self, prompt: Prompt, n_tokens: int, seed: int = 1) -> Request:
        return ServerRequest(self.port, prompt, n_tokens, seed)

    def facts(self) -> dict[str, Any]:
        return {}

    def fault(self) -> str:
        """How it is, and the last it logged."""
        time.sleep(0.5)  # a connection breaks before the process has ended
        status = self._process.poll()
        self._log.seek(0)
        ended = "running" if status is None else f"ended with status {status}"
        return f"{' '.join(self._program)}, {ended}:\n{self._log.read()[-2000:]}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


Side = Ours | Server


def start(name: str, model_file: str, n_threads: int, server_options: Sequence[str]) -> Side:
    """A side by name."""
    if name == "ours":
        return Ours(model_file, n_threads)
    return Server(model_file, n_threads, [*SERVERS[name], *server_options])


def warm_up(side: Side) -> None:
    """Touch weights, buffers, and the graph of a full batch."""
    for request in [side.ask([1000 + i] * 32, 4) for i in range(N_PARALLEL)]:
        request.read()


def batched_bench(model_file: Path, n_threads: int, n_prompt: int, n_tokens: int) -> float:
    """llama-batched-bench's decoded tokens per second of all sequences together. It samples nothing."""
    command = [peers.program("llama-batched-bench"), "-m", model_file, "-t", n_threads, "-c", N_PARALLEL * N_CTX, "-npp",
               n_prompt, "-ntg", n_tokens, "-npl", N_PARALLEL, "--output-format", "jsonl"]
    done = subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"llama-batched-bench failed with status {done.returncode}:\n{done.stderr[-2000:]}")
    return float(json.loads(lines[-1])["speed_tg"])
