"""Streams of events: frames, pings, errors, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inprocess import Live, until

from lfmfast import ContextFullError, ParameterError
from lfmfast.server.settings import Settings
from lfmfast.server.sse import PING, Answers, EventStream, Frame, Frames, event, named_event
from lfmfast.types import Piece

ENDLESS = {"ignore_eos": True, "max_tokens": 100_000, "temperature": 0}
LONG = [5 + i % 900 for i in range(6000)]
UBATCH = 32


@pytest.fixture(scope="module")
def server(lfm2_tiny_path: Path) -> Iterator[Live]:
    """Two slots, and prompts that are read in small steps."""
    with Live(lfm2_tiny_path, n_parallel=2, n_ctx=8192, n_ubatch=UBATCH) as live:
        yield live


def is_idle(server: Live) -> bool:
    stats = server.stats()
    return not stats["n_running"] and not stats["n_queued"] and not server.state.running


# --- frames ---


def test_frames():
    assert event({"a": "ü\n"}) == 'data: {"a":"ü\\n"}\n\n'.encode()
    assert named_event("ping", {}) == b"event: ping\ndata: {}\n\n"
    frame = Frame(lambda text: event({"before": 1, "text": text, "after": {"x": None}}))
    for text in ("", "Hi", 'a "quote"\\', "line\nline\r\u2028", "\0", "ü€😀", "</script>"):
        assert frame(text) == event({"before": 1, "text": text, "after": {"x": None}})
        assert frame(text).count(b"\n") == 2


# --- the response, alone ---


class FakeRequest:
    """A client that stays until it is told to go."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}


class Script(Answers):
    """Answers whose news are written down: seconds to wait, bytes to send, exceptions to raise."""

    def __init__(self, *news: float | bytes | Exception) -> None:
        super().__init__(FakeRequest())  # type: ignore[arg-type]
        self._script = news
        self._come: list[bytes | Exception] = []

    def follow(self, listener: Any, readings: bool = False) -> None:
        self._playing = asyncio.ensure_future(self._play(listener))

    async def aclose(self) -> None:
        self._playing.cancel()
        await super().aclose()

    async def _play(self, listener: Any) -> None:
        for item in self._script:
            if isinstance(item, float):
                await asyncio.sleep(item)
            else:
                self._come.append(item)
                listener()

    def take(self) -> Any:
        come, self._come = self._come, []
        for item in come:
            if isinstance(item, Exception):
                raise item
        return come


def frames_of(opening: bytes = b"", last: bytes = b"") -> Frames:
    """Each batch of a script as it is; "end" is the end."""
    data = opening
    while True:
        batch: Any = yield data
        data = b"".join(batch)
        if data == b"end":
            return last


def play(*news: float | bytes | Exception, ping_s: float = 0, frames: Frames | None = None, send: Any = None) -> list[bytes]:
    """What a client reads."""
    sent: list[dict[str, Any]] = []

    async def keep(message: Any) -> None:
        if send is not None:
            await send(message)
        sent.append(message)

    async def main() -> None:
        response = EventStream(Script(*news), frames or frames_of(), ping_s=ping_s)
        await response({}, None, keep)  # type: ignore[arg-type]
        n_sent = len(sent)
        await asyncio.sleep(0.03 if ping_s else 0)
        assert len(asyncio.all_tasks()) == 1 and len(sent) == n_sent  # nobody watches or pings any more

    asyncio.run(main())
    assert sent[0]["type"] == "http.response.start" and sent[0]["status"] == 200
    assert [message["more_body"] for message in sent[1:]] == [True] * (len(sent) - 2) + [False]
    return [message["body"] for message in sent[1:]]


def test_each_frame_is_one_write():
    assert play(b"one", 0.0, b"two", b"end") == [b"one", b"two", b""]
    assert play(b"end", frames=frames_of(b"opening")) == [b"opening", b""]


def test_the_last_frame_goes_out_with_the_end():
    closed = []

    def frames() -> Frames:
        try:
            return (yield from frames_of(last=b"two"))
        finally:
            closed.append(True)

    assert play(b"one", b"end", b"three", frames=frames(), ping_s=0.001) == [b"one", b"two"] and closed


def test_an_error_in_the_middle_is_the_last_frame():
    first, error = play(b"one", ContextFullError("it is full", 5, 4), b"two")
    assert first == b"one" and json.loads(error.removeprefix(b"data: ")) == {
        "error": {"code": 400, "type": "exceed_context_size_error", "n_prompt_tokens": 5, "n_ctx": 4,
                  "message": "the request exceeds the available context size: it is full"}}  # fmt: skip


def test_an_error_of_the_server_tells_nothing(caplog):
    def frames() -> Frames:
        yield b"one"
        raise ZeroDivisionError("a secret")

    first, error = play(b"two", frames=frames())
    assert first == b"one" and b'"server_error"' in error and b"secret" not in error and "a secret" in caplog.text


def test_silence_is_filled_with_comments():
    for ping_s in (0, -1):
        assert play(0.3, b"late", b"end", ping_s=ping_s) == [b"late", b""]
    *pings, late, end = play(0.3, b"late", b"end", ping_s=0.02)
    assert late == b"late" and not end and len(pings) > 1 and set(pings) == {PING}


def test_no_comments_while_there_are_frames():
    assert play(*[0.01, b"x"] * 20, b"end", ping_s=5) == [b"x"] * 20 + [b""]


def test_a_client_that_takes_nothing_for_a_while_gets_the_rest_at_once():
    async def send(message: Any) -> None:
        if message.get("body") == b"b":
            await asyncio.sleep(0.1)

    news = [b"a", b"b", 0.01, b"c", 0.01, b"d", 0.2, b"e", b"end"]
    assert play(*news, send=send) == [b"a", b"b", b"cd", b"e", b""]
    seen = play(*news, send=send, ping_s=0.02)
    assert seen.count(PING) > 1 and [data for data in seen if data != PING] == [b"a", b"b", b"cd", b"e", b""]
    assert seen[:3] == [b"a", b"b", b"cd"]  # and no comments that it would have to take first
    assert play(b"b", b"end", send=send) == [b"b", b""]


def test_a_client_that_can_not_be_written_to():
    async def send(message: Any) -> None:
        if message.get("body") == b"now":
            raise ConnectionResetError("gone")
        if message.get("body") == b"later":
            await asyncio.sleep(0.01)
            raise ConnectionResetError("gone")

    for data in (b"now", b"later"):
        assert b'"server_error"' in play(data, 0.05, b"end", send=send)[-1]


# --- streams of a model ---


def test_all_or_none_begins(server: Live):
    async def main() -> None:
        model, answers = server.state.model, Answers(FakeRequest())  # type: ignore[arg-type]
        with pytest.raises(ParameterError):
            async with answers.beginning():
                stream = model.stream([1, 2, 3], **ENDLESS)
                answers.add(stream, contextlib.nullcontext())
                model.stream([10**9])
        assert stream.finish_reason == "cancelled"  # it has stopped, not only been asked to

    asyncio.run(main())
    assert is_idle(server)


def test_what_is_ready_comes_together(server: Live):
    async def main() -> None:
        model, answers = server.state.model, Answers(FakeRequest())  # type: ignore[arg-type]
        async with answers.beginning():
            for i in range(2):
                answers.add(model.stream([1, 2, 3 + i], **{**ENDLESS, "max_tokens": 20}), contextlib.nullcontext())
        tokens: list[list[int]] = [[], []]
        news, n_batches = asyncio.Event(), 0
        answers.follow(news.set)
        while not all(stream.over for stream in answers.streams):
            await news.wait()
            news.clear()
            n_batches += 1
            for i, pieces in answers.take():
                tokens[i] += [token for piece in pieces for token in piece.tokens]  # type: ignore[union-attr]
            await asyncio.sleep(0.02)  # a slow client
        for i, pieces in answers.take():
            tokens[i] += [token for piece in pieces for token in piece.tokens]  # type: ignore[union-attr]
        assert [len(t) for t in tokens] == [20, 20] and n_batches < 40
        assert tokens == [list(stream.tokens) for stream in answers.streams]
        await answers.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("n", [1, 2])
def test_an_error_behind_the_last_token_is_told(n: int):
    class Failed:
        """A stream whose last token and whose error came at a time."""

        over, finish_reason = True, "cancelled"

        def __init__(self) -> None:
            self.pieces = [Piece("x", (1,))]

        def listen(self, listener: Any) -> None:
            pass

        def take(self) -> list[Piece]:
            if not self.pieces:
                raise ContextFullError("it is full", 5, 4)
            pieces, self.pieces = self.pieces, []
            return pieces

        def cancel(self) -> None:
            pass

        async def aclose(self) -> None:
            pass

    def frames() -> Frames:
        batch = yield b""
        while True:
            batch = yield b"".join(piece.text.encode() for _, pieces in batch for piece in pieces)  # type: ignore[union-attr]

    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body"))

    async def main() -> None:
        answers = Answers(FakeRequest())  # type: ignore[arg-type]
        for _ in range(n):
            answers.add(Failed(), contextlib.nullcontext())  # type: ignore[arg-type]
        await EventStream(answers, frames(), ping_s=0)({}, None, send)  # type: ignore[arg-type]

    asyncio.run(asyncio.wait_for(main(), 10))
    assert sent[1] == b"x" * n and b"it is full" in sent[2] and len(sent) == 3


# --- clients that go away ---


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/completion", "/v1/completions"])
def test_gone_while_the_answer_is_written(server: Live, path: str):
    prompt = {"messages": [{"role": "user", "content": "Tell me a story."}], "prompt": "Once upon a"}
    seen = server.leave_after(path, {**prompt, **ENDLESS, "stream": True}, 3000)
    assert seen.startswith(b"HTTP/1.1 200 OK\r\n") and seen.count(b"data: ") > 2
    before = server.stats()["n_predicted"]
    until(lambda: is_idle(server))
    assert server.stats()["n_predicted"] - before < 4000  # there was room for twice as many


@pytest.mark.parametrize("n", [1, 2])
def test_gone_while_the_prompt_is_read(server: Live, n: int):
    server.model.engine.forget()
    before = server.stats()
    body = {"prompt": LONG, "cache_prompt": False, "n": n, "stream": True, **ENDLESS}
    seen = server.leave_after("/v1/completions", body, 20)  # the head comes at once
    assert seen.startswith(b"HTTP/1.1 200 OK\r\n") and b"data: " not in seen
    until(lambda: is_idle(server))
    after = server.stats()
    assert after["n_predicted"] == before["n_predicted"]
    assert after["n_prompt_passes"] - before["n_prompt_passes"] < len(LONG) // UBATCH


def test_gone_while_a_long_text_becomes_tokens(server: Live):
    body = {"messages": [{"role": "user", "content": "hello " * 3000}], "stream": True, **ENDLESS}
    before = server.stats()["n_predicted"]
    server.leave_after("/v1/chat/completions", body, 0)
    until(lambda: server.state.n_by_status[499] or server.state.n_by_status[200])
    until(lambda: is_idle(server))
    assert server.stats()["n_predicted"] - before < 4000


def test_gone_without_a_stream(server: Live):
    n_gone = server.state.n_by_status[499]
    for prompt in (LONG, [1, 2, 3]):
        server.leave_after("/completion", {"prompt": prompt, "cache_prompt": False, **ENDLESS}, 0)
        until(lambda: server.state.running or server.stats()["n_requests"])
        until(lambda: is_idle(server))
    until(lambda: server.state.n_by_status[499] == n_gone + 2)
    assert not server.state.n_by_status[500]


def test_gone_while_it_waits_for_its_turn(server: Live):
    with contextlib.ExitStack() as stack:
        for _ in range(2):  # both slots are taken
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            data = json.dumps({"prompt": [1, 2, 3], "stream": True, **ENDLESS}).encode()
            head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
            client.sendall(head.encode() + data)
        until(lambda: server.stats()["n_running"] == 2)
        n_requests = server.stats()["n_requests"]
        seen = server.leave_after("/completion", {"prompt": [7, 8, 9], "stream": True, **ENDLESS}, 20)
        assert seen.startswith(b"HTTP/1.1 200 OK\r\n")
        until(lambda: not server.stats()["n_queued"] and len(server.state.running) == 2)
        assert server.stats()["n_running"] == 2 and server.stats()["n_requests"] == n_requests  # it never began
    until(lambda: is_idle(server))


def test_a_client_that_does_not_read_holds_up_nobody(server: Live):
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        data = json.dumps({"prompt": [1, 2, 3], "stream": True, "n_probs": 50, **ENDLESS, "max_tokens": 200}).encode()
        client.sendall(f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        until(lambda: server.stats()["n_running"])
        answer = server.post("/completion", {"prompt": "Once upon a", "n_predict": 5})
        assert answer["tokens_predicted"] == 5
        until(lambda: not server.stats()["n_running"])  # the engine is done with it
        client.settimeout(30)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        read = b""
        while chunk := client.recv(1 << 20):
            read += chunk
            if b'"stop":true' in read:
                break
        assert read.count(b'"stop":false') == 200  # and nothing was lost
    until(lambda: is_idle(server))


def test_comments_while_the_prompt_is_read(lfm2_tiny_path: Path):
    with Live(lfm2_tiny_path, Settings(sse_ping_s=0.01), n_ctx=8192, n_ubatch=UBATCH) as server:
        lines = []
        with server.client.stream("POST", "/v1/completions", json={"prompt": LONG[:1500], "max_tokens": 1,
                                                                   "stream": True}) as answer:  # fmt: skip
            lines = list(answer.iter_lines())
        assert lines[0] == ":" and lines[-2] == "data: [DONE]"
        with server.client.stream("POST", "/v1/completions", json={"prompt": LONG[1:1000], "max_tokens": 1, "stream": True,
                                                                   "sse_ping_interval": -1}) as answer:  # fmt: skip
            assert not [line for line in answer.iter_lines() if line.startswith(":")]


def test_a_server_that_ends_says_so(lfm2_tiny_path: Path):
    with Live(lfm2_tiny_path, n_ctx=8192) as server:
        frames = server.frames("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], **ENDLESS})
        seen = [next(frames), next(frames)]
        server.model.close()
        seen += list(frames)
        assert json.loads(seen[-1])["error"]["type"] == "unavailable_error" and "[DONE]" not in seen
