"""Server-sent events, and the answers that they carry: frames as bytes, pings, and an end when the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lfmfast.aio import AsyncStream
from lfmfast.server.body import json_bytes
from lfmfast.server.errors import ApiError, to_api_error, unavailable
from lfmfast.types import Completion, Piece

__all__ = ["DONE", "PING", "Answers", "Batch", "EventStream", "Frame", "Last", "Reading", "event", "named_event"]

T = TypeVar("T")

PING = b":\n\n"
DONE = b"data: [DONE]\n\n"
#: Seconds between two looks at how far a prompt is read, for clients that want to know.
LOOK_S = 0.005

_HEADERS = ((b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
# What no text of a client can put into a frame that is made with it: two halves are found by it.
_HOLE = "\0text\0"
_HOLE_JSON = json_bytes(_HOLE)


def event(data: Any) -> bytes:
    """A frame without a name, as OpenAI's."""
    return b"data: " + json_bytes(data) + b"\n\n"


def named_event(name: str, data: Any) -> bytes:
    """A frame with a name, as Anthropic's."""
    return b"event: " + name.encode() + b"\ndata: " + json_bytes(data) + b"\n\n"


class Last(bytes):
    """Frames behind which nothing comes: the end of the response goes out with them, in one write."""

    __slots__ = ()


class Frame:
    """A frame in which only one text changes: all else is made once.

    Parameters
    ----------
    make : callable
        Gives the frame's bytes for a text.

    Examples
    --------
    >>> frame = Frame(lambda text: event({"delta": text, "index": 0}))
    >>> frame('Hi "you"')
    b'data: {"delta":"Hi \\\\"you\\\\"","index":0}\\n\\n'
    """

    __slots__ = ("_head", "_tail")

    def __init__(self, make: Callable[[str], bytes]) -> None:
        self._head, _, self._tail = make(_HOLE).partition(_HOLE_JSON)

    def __call__(self, text: str) -> bytes:
        return self._head + json_bytes(text) + self._tail


class Reading(NamedTuple):
    """How far a prompt is read."""

    total: int
    cached: int
    processed: int
    time_ms: float


Batch = Sequence[tuple[int, list[Piece] | Reading]]


class Answers:
    """The streams that answer one request: begun, cancelled and ended together.

    From the beginning an eye is kept on the client. When it goes away, the engine is told to stop at once, whatever the
    streams are doing: waiting in the queue, reading their prompts, or generating.

    Parameters
    ----------
    request : Request
        Its body has to be read already: what comes next from the client is its end.

    Examples
    --------
    >>> async def endpoint(request):  # doctest: +SKIP
    ...     answers = Answers(request)
    ...     async with answers.beginning():
    ...         stream = model.stream("Once upon a")
    ...         answers.add(stream, state.task(stream, prompt="Once upon a"))
    ...     return EventStream(answers, frames(answers), ping_s=30)
    """

    def __init__(self, request: Request) -> None:
        self.streams: list[AsyncStream] = []
        self.gone = False
        self._receive = request.receive
        self._contexts = contextlib.ExitStack()
        self._watch = asyncio.create_task(self._watching())

    async def _watching(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        for stream in self.streams:
            stream.cancel()

    def add(self, stream: AsyncStream, context: contextlib.AbstractContextManager[T]) -> T:
        """Take a stream over. `context` (:meth:`ServerState.task`) is entered now, and left when all are ended."""
        self.streams.append(stream)
        if self.gone:
            stream.cancel()
        return self._contexts.enter_context(context)

    @contextlib.asynccontextmanager
    async def beginning(self) -> AsyncIterator[None]:
        """Add streams inside; at its end all are accepted by the engine, or none is left and the reason is raised."""
        try:
            yield
            for stream in self.streams:
                await stream.accepted()
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Stop what still runs, and wait until it has stopped."""
        self._watch.cancel()
        try:
            for stream in self.streams:
                stream.cancel()
            for stream in self.streams:
                await stream.aclose()
        finally:
            self._contexts.close()

    def _check(self, reason: str | None) -> None:
        if reason == "cancelled":
            # No cancel() of ours is in the way of who reads: it was the client, or the model is being closed.
            raise _client_gone() if self.gone else unavailable("the server is shutting down")

    async def results(self) -> list[Completion]:
        """Whole answers, in the order of their streams; closes them.

        Raises
        ------
        ApiError
            499: there is nobody to give them to; 503: the server is shutting down.
        """
        try:
            streams = self.streams
            done = [await streams[0].result()] if len(streams) == 1 else await asyncio.gather(*(s.result() for s in streams))
            for completion in done:
                self._check(completion.finish_reason)
            return done
        finally:
            await self.aclose()

    async def batches(self, readings: bool = False) -> AsyncGenerator[Batch]:
        """What there is to send, as it comes: all that is ready at a time, with the numbers of the streams.

        Parameters
        ----------
        readings : bool
            Tell too how far prompts are read: the first says what was kept, the last that all is read.
        """
        if len(self.streams) == 1 and not readings:
            stream = self.streams[0]
            while pieces := await stream.pieces():
                self._check(pieces[-1].finish_reason)
                yield ((0, pieces),)
            return
        ready: list[tuple[int, list[Piece] | Reading]] = []
        news = asyncio.Event()

        def put(i: int, item: list[Piece] | Reading) -> None:
            ready.append((i, item))
            news.set()

        async def read(i: int, stream: AsyncStream) -> None:
            first = asyncio.ensure_future(stream.pieces())
            try:
                if readings:
                    await self._follow(stream, first, lambda reading: put(i, reading))
                pieces = await first
                while pieces:
                    self._check(pieces[-1].finish_reason)
                    put(i, pieces)
                    pieces = await stream.pieces()
            finally:
                first.cancel()
                news.set()

        tasks = [asyncio.create_task(read(i, stream)) for i, stream in enumerate(self.streams)]
        try:
            while True:
                await news.wait()
                news.clear()
                over = all(task.done() for task in tasks)
                if ready:
                    batch, ready = ready, []
                    yield batch
                for task in tasks:
                    if task.done():
                        task.result()
                if over:
                    return
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, stream: AsyncStream, first: asyncio.Future[list[Piece]], put: Callable[[Reading], object]) -> None:
        loop = asyncio.get_running_loop()
        began, seen, total = loop.time(), -1, stream.n_prompt

        def look() -> None:
            nonlocal seen
            n = stream.n_read
            if n < 0:
                return
            if seen < 0:
                put(Reading(total, stream.n_cached, stream.n_cached, (loop.time() - began) * 1e3))
                seen = stream.n_cached
            if n > seen:
                put(Reading(total, stream.n_cached, n, (loop.time() - began) * 1e3))
                seen = n

        while not first.done():
            look()
            await asyncio.wait((first,), timeout=LOOK_S)
        if not first.cancelled() and first.exception() is None:
            look()


def _client_gone() -> ApiError:
    return ApiError(499, "client_closed_request", "the client went away")


class EventStream(Response):
    """A response of frames.

    Parameters
    ----------
    answers : Answers
        Ended with the response.
    frames : async generator of bytes
        Each is written at once; what it raises becomes the last frame. It may end with a :class:`Last`.
    ping_s : float
        If nothing was written for so long, a comment is; 0 and less: never.
    error_frame : callable
        The last frame for an error.
    headers : mapping, optional
        Further headers.
    """

    def __init__(self, answers: Answers, frames: AsyncGenerator[bytes], *, ping_s: float,
                 error_frame: Callable[[ApiError], bytes] = lambda error: event(error.body()),
                 headers: Mapping[str, str] | None = None) -> None:  # fmt: skip
        self.status_code = 200
        self.background = None
        self.raw_headers = [*_HEADERS, *((k.lower().encode(), v.encode("latin-1")) for k, v in (headers or {}).items())]
        self._answers = answers
        self._frames = frames
        self._ping_s = ping_s
        self._error_frame = error_frame

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers, pings = self._answers, _Pings(self._ping_s, send)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            pings.start()
            try:
                async for data in self._frames:
                    if isinstance(data, Last):
                        await pings.stop()
                        await send({"type": "http.response.body", "body": data, "more_body": False})
                        return
                    pings.wrote()
                    await send(_body(data))
                    if answers.gone:
                        return
            except Exception as error:
                if not answers.gone:
                    await send(_body(self._error_frame(to_api_error(error))))
            await pings.stop()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await pings.stop()
            await self._frames.aclose()
            await answers.aclose()


def _body(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


class _Pings:
    """Comments on a stream that has nothing to say: proxies and clients give up on silence."""

    def __init__(self, every_s: float, send: Send) -> None:
        self._every_s = every_s
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._last = self._loop.time()
        if self._every_s > 0:
            self._timer = self._loop.call_later(self._every_s, self._look)

    def wrote(self) -> None:
        self._last = self._loop.time()

    def _look(self) -> None:
        now = self._loop.time()
        if now - self._last >= self._every_s and (self._task is None or self._task.done()):
            self._last = now
            self._task = self._loop.create_task(self._ping())
        self._timer = self._loop.call_at(self._last + self._every_s, self._look)

    async def _ping(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):  # the client is gone: who writes next will see
            await self._send(_body(PING))

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            await self._task
            self._task = None
