"""Server-sent events, and the answers that they carry: frames as bytes, pings, and an end when the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lfmfast.aio import AsyncStream
from lfmfast.server.body import json_bytes
from lfmfast.server.errors import ApiError, to_api_error, unavailable
from lfmfast.types import Completion, Piece

__all__ = [
    "DIRECT_SEND", "DONE", "PING", "Answers", "Batch", "EventStream", "Frame", "Frames", "Reading", "event", "named_event",
]  # fmt: skip

T = TypeVar("T")

PING = b":\n\n"
DONE = b"data: [DONE]\n\n"
#: Where a scope has the server's own `send`: no layer above has to see what comes after the first message of a stream.
DIRECT_SEND = "lfmfast.send"
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


#: What has come of several streams, with their numbers.
Batch = Sequence[tuple[int, list[Piece] | Reading]]
#: Is sent batches and yields the frames to write for each (first those that come before all of them); returns the last ones.
Frames = Generator[bytes, Batch, bytes]


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
        self._loop = asyncio.get_running_loop()
        self._receive = request.receive
        self._contexts = contextlib.ExitStack()
        self._ready: dict[int, list[Reading]] = {}  # streams with news
        self._looks: dict[int, _Look] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tell: Callable[[], object] = list
        self._is_told = False
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
        if self._timer is not None:
            self._timer.cancel()
        try:
            for stream in self.streams:
                stream.listen(None)
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

    def follow(self, listener: Callable[[], object], readings: bool = False) -> None:
        """Call `listener` in the loop when there is something to :meth:`take`: once for all that is ready at a time.

        Parameters
        ----------
        readings : bool
            Tell too how far prompts are read: the first says what was kept, the last that all is read.
        """
        self._tell = listener
        is_one = len(self.streams) == 1 and not readings
        for i, stream in enumerate(self.streams):
            stream.listen(listener if is_one else partial(self._news, i))
            self._ready[i] = []
        if readings:
            self._looks = {i: _Look(stream, self._loop) for i, stream in enumerate(self.streams)}
            self._look()
        listener()

    def _news(self, i: int) -> None:
        self._ready.setdefault(i, [])
        if not self._is_told:  # others may have news of the same pass
            self._is_told = True
            self._loop.call_soon(self._tell)

    def _look(self) -> None:
        for i, look in self._looks.items():
            if readings := look():
                self._news(i)
                self._ready[i] += readings
        self._timer = self._loop.call_later(LOOK_S, self._look) if self._looks else None

    def take(self) -> Batch:
        """All that is ready. Raises what ended a stream, or that it was cancelled."""
        self._is_told = False
        if len(self.streams) == 1 and not self._looks and not self._ready.get(0):  # the usual case, in short
            pieces = self._pieces(0)
            return ((0, pieces),) if pieces else ()
        batch: list[tuple[int, list[Piece] | Reading]] = []
        ready, self._ready = self._ready, {}
        for i, readings in ready.items():
            pieces = self._pieces(i)
            if pieces and (look := self._looks.pop(i, None)) is not None:
                readings += look()
            batch += [(i, reading) for reading in readings]
            if pieces:
                batch.append((i, pieces))
        return batch

    def _pieces(self, i: int) -> list[Piece]:
        stream = self.streams[i]
        pieces = stream.take()
        if pieces and stream.over:
            reason = pieces[-1].finish_reason
            self._check(reason)
            if reason is None:  # what ended it is to be told next
                self._news(i)
        return pieces


class _Look:
    """Looks how far the prompt of a stream is read."""

    def __init__(self, stream: AsyncStream, loop: asyncio.AbstractEventLoop) -> None:
        self._stream = stream
        self._loop = loop
        self._began = loop.time()
        self._seen = -1

    def __call__(self) -> list[Reading]:
        """What is new since the last look."""
        n, n_cached = self._stream.n_read, self._stream.n_cached
        marks = [n_cached] if n >= 0 and self._seen < 0 else []
        if n > max(self._seen, n_cached):
            marks.append(n)
        if not marks:
            return []
        self._seen = marks[-1]
        time_ms = (self._loop.time() - self._began) * 1e3
        return [Reading(self._stream.n_prompt, n_cached, mark, time_ms) for mark in marks]


def _client_gone() -> ApiError:
    return ApiError(499, "client_closed_request", "the client went away")


class EventStream(Response):
    """A response of frames. They are made and written where the news come in: no task is woken for a token.

    Parameters
    ----------
    answers : Answers
        Ended with the response.
    frames : Frames
        What it yields is written at once; what it raises becomes the last frame.
    ping_s : float
        If nothing was written for so long, a comment is; 0 and less: never.
    readings : bool
        Send `frames` too how far prompts are read.
    error_frame : callable
        The last frame for an error.
    headers : mapping, optional
        Further headers.
    """

    def __init__(self, answers: Answers, frames: Frames, *, ping_s: float, readings: bool = False,
                 error_frame: Callable[[ApiError], bytes] = lambda error: event(error.body()),
                 headers: Mapping[str, str] | None = None) -> None:  # fmt: skip
        self.status_code = 200
        self.background = None
        self.raw_headers = [*_HEADERS, *((k.lower().encode(), v.encode("latin-1")) for k, v in (headers or {}).items())]
        self._answers = answers
        self._frames = frames
        self._ping_s = ping_s
        self._readings = readings
        self._error_frame = error_frame

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answers, last = self._answers, b""
        self._over: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()  # the last frames
        self._writer = writer = _Writer(scope.get(DIRECT_SEND, send), self._ping_s, self._go_on)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                writer.start()
                if opening := next(self._frames):
                    writer.write(opening)
                answers.follow(self._go_on, self._readings)
                last = await self._over
            except Exception as error:
                if not answers.gone:
                    last = self._error_frame(to_api_error(error))
            await writer.end()
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            writer.abort()
            self._frames.close()
            await answers.aclose()

    def _go_on(self) -> None:
        """Write what is ready; what comes while the client takes nothing is ready when it does again."""
        writer = self._writer
        if writer.waiting is not None or self._over.done():
            return
        try:
            if writer.error is not None:
                raise writer.error
            if (batch := self._answers.take()) and (data := self._frames.send(batch)):
                writer.write(data)
        except StopIteration as end:
            self._over.set_result(end.value)
        except Exception as error:
            self._over.set_exception(error)


class _Writer:
    """Writes to a client, in order: at once as long as the connection takes it, and a comment where there is nothing to say.

    Parameters
    ----------
    ping_s : float
        Silence after which proxies and clients might give up.
    free : callable
        Called when the connection takes data again.
    """

    def __init__(self, send: Send, ping_s: float, free: Callable[[], object]) -> None:
        self._send = send
        self._ping_s = ping_s
        self._free = free
        self._loop = asyncio.get_running_loop()
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.waiting: asyncio.Task[None] | None = None  # while the connection takes nothing
        self.error: Exception | None = None  # of a write that had to wait

    def start(self) -> None:
        """Begin to look for silence."""
        self._last = self._loop.time()
        if self._ping_s > 0:
            self._timer = self._loop.call_later(self._ping_s, self._look)

    def write(self, data: bytes) -> None:
        """Write; not while something is `waiting`."""
        self._last = self._loop.time()
        steps = self._send({"type": "http.response.body", "body": data, "more_body": True}).__await__()
        try:
            awaited = next(steps)  # which there is only where the connection takes no more: else it is done
        except StopIteration:
            return
        self.waiting = self._loop.create_task(self._wait(steps, awaited))

    async def _wait(self, steps: Generator[Any, Any, Any], awaited: Any) -> None:
        try:
            await _rest(steps, awaited)
        except Exception as error:
            self.error = error
        finally:
            self.waiting = None
        self._free()

    def _look(self) -> None:
        now = self._loop.time()
        if now - self._last >= self._ping_s:
            if self.waiting is not None:
                self._last = now
            else:
                with contextlib.suppress(OSError, RuntimeError):  # the client is gone: who writes next will see
                    self.write(PING)
        self._timer = self._loop.call_at(self._last + self._ping_s, self._look)

    async def end(self) -> None:
        """Wait until all is written; no comments from now on."""
        self._stop()
        if self.waiting is not None:
            await self.waiting

    def abort(self) -> None:
        """Write no more."""
        self._stop()
        if self.waiting is not None:
            self.waiting.cancel()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@types.coroutine
def _rest(steps: Generator[Any, Any, Any], awaited: Any) -> Generator[Any, Any, None]:
    """Go on with an awaitable that has been begun: `awaited` is what it waits for."""
    try:
        yield awaited
    except BaseException:
        steps.close()
        raise
    yield from steps
