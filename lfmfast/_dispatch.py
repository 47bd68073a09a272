"""How news of requests get from the engine's thread into an asyncio event loop.

Nothing here waits in the loop, and no thread waits for a request: the engine writes to one descriptor per loop when something
happened, and the loop then fetches all there is, for all of its requests.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from lfmfast._engine import Mailbox
from lfmfast.errors import BusyError, ClosedError, ForkError
from lfmfast.stream import Answer
from lfmfast.types import Piece

if TYPE_CHECKING:
    from lfmfast._engine import Stream as NativeStream
    from lfmfast._request import Asked
    from lfmfast.chat import Chat
    from lfmfast.model import Model

__all__ = ["Dispatcher", "Request"]

#: Pieces that a consumer may leave unread before it is given them as one.
MANY_UNREAD = 64
#: For tests: deliver as on loops that can't watch a descriptor.
_no_descriptors = False


class Dispatcher:
    """Brings the news of all streams of one event loop to it: one wake-up for all that happened since the last one.

    The loop holds its dispatcher (or the dispatcher's thread does); that holds its requests until the engine has ended them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.requests: dict[int, Request] = {}
        self.closed = False
        self._closing = threading.Lock()  # who takes it closes; it is never given back
        self.pid = os.getpid()
        self._ids = itertools.count()
        self._loop = weakref.ref(loop)
        self._fds: tuple[int, int] | None = None  # to read and to write; one and the same if it is an eventfd
        self._thread: threading.Thread | None = None
        if not _no_descriptors:
            self._watch(loop)
        self.mailbox = Mailbox(-1 if self._fds is None else self._fds[1])
        if self._fds is None:
            self._thread = threading.Thread(target=self._pump, name="lfmfast-news", daemon=True)
            self._thread.start()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if sys.platform == "win32":  # loops there watch sockets, or nothing
            return
        if sys.platform == "linux":
            fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._fds = (fd, fd)
        else:
            self._fds = os.pipe()
            for fd in self._fds:
                os.set_blocking(fd, False)
        # The loop alone holds the token. That it is gone tells that the loop was closed, of which nothing else does.
        token = _Token()
        self._token: weakref.ref[_Token] | None = weakref.ref(token, lambda _: self.close())
        try:
            loop.add_reader(self._fds[0], self._readable, token)
        except NotImplementedError:
            self._token = None
            self._close_fds()

    def _readable(self, _token: object) -> None:
        if self._fds is not None:
            try:  # noqa: SIM105  (contextlib takes longer than all the rest)
                os.read(self._fds[0], 256)
            except BlockingIOError:
                pass
        self._deliver(self.mailbox.wait(0) or ())

    def _pump(self) -> None:
        while (ids := self.mailbox.wait(500)) is not None:
            loop = self._loop()
            if loop is None or loop.is_closed():
                break
            if ids:
                try:
                    loop.call_soon_threadsafe(self._deliver, ids)
                except RuntimeError:  # closed meanwhile
                    break
            del loop  # or it would live as long as this thread
        self.close()

    def _deliver(self, ids: Iterable[int]) -> None:
        for i in ids:
            request = self.requests.get(i)
            if request is not None:
                request.receive()

    def add(self, request: Request) -> int:
        i = next(self._ids)
        self.requests[i] = request
        return i

    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop, unless it is gone or closed."""
        loop = self._loop()
        return None if loop is None or loop.is_closed() else loop

    def close(self) -> None:
        """Cancel what is left and free everything; called when the loop is closed and at the end of the process."""
        if self.closed or self.pid != os.getpid() or not self._closing.acquire(blocking=False):
            return
        self.closed = True
        self.mailbox.close()
        loop = self.loop()
        if loop is not None and self._fds is not None:
            loop.remove_reader(self._fds[0])
        self._close_fds()
        for request in list(self.requests.values()):
            request.stop()
            request.end(ClosedError("the event loop was closed"))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)

    def _close_fds(self) -> None:
        for fd in set(self._fds or ()):
            os.close(fd)
        self._fds = None

    def __del__(self) -> None:
        if hasattr(self, "mailbox"):
            self.close()


class _Token:
    __slots__ = ("__weakref__",)


_dispatchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[Dispatcher]] = weakref.WeakKeyDictionary()


def _dispatcher() -> Dispatcher:
    """The running loop's."""
    loop = asyncio.get_running_loop()
    known = _dispatchers.get(loop)
    mine = None if known is None else known()
    if mine is None or mine.closed or mine.pid != os.getpid():
        mine = Dispatcher(loop)
        _dispatchers[loop] = weakref.ref(mine)
    return mine


@atexit.register
def _close_all() -> None:
    # A pump must not come back from its wait into an interpreter that is being torn down.
    for known in list(_dispatchers.values()):
        dispatcher = known()
        if dispatcher is not None:
            dispatcher.close()


class Request:
    """A request of an event loop: what its AsyncStream shows, and what outlives it until the engine has stopped.

    Parameters
    ----------
    model : Model
    make : callable
        Gives the native stream; called with what to call in place of `Model._submit`, and perhaps in another thread.
    long : bool
        Whether that takes so long that it must not be done in the loop.
    chat : Chat, optional
        Whose turn it takes.
    """

    def __init__(self, model: Model, make: Callable[[Callable[..., NativeStream]], NativeStream], *, long: bool,
                 chat: Chat | None = None) -> None:  # fmt: skip
        self.answer = Answer()
        self.unread: deque[Piece] = deque()
        self.native: NativeStream | None = None
        self.n_prompt = 0
        self.error: Exception | None = None
        self.over = False  # nothing more comes
        self.stopping = False
        self.wanted = True  # there is somebody to read pieces
        self.listener: Callable[[], object] | None = None  # called in the loop at news, besides who waits in `changed`
        self._model = model
        self._make = make
        self._long = long
        self._chat = chat
        self._has_turn = False  # and no `answer.on_end` yet to give it back
        self._is_begun = False
        self._lock = threading.Lock()  # of `over` and the next
        self._in_thread = False
        self._waiters: list[asyncio.Future[None]] = []
        self._dispatcher = _dispatcher()
        task = asyncio.current_task()
        self._task = None if task is None else weakref.ref(task)  # equal refs: the same task
        self._id = self._dispatcher.add(self)
        try:
            self._begin()
        except BaseException:
            self.end()
            raise

    def _begin(self) -> None:
        chat = self._chat
        if chat is not None:
            other = chat._request
            if chat._owner == threading.get_ident() and (other is None or (other._task == self._task and not other.stopping)):
                raise BusyError("a reply of this chat is still being streamed; read it to its end or aclose() it first")
            if not chat._acquire_now(self._turn_is_free):
                return
            chat._request = self
            self._has_turn = True
        self._is_begun = True
        if self._long:
            self._in_thread = True
            asyncio.get_running_loop().run_in_executor(None, self._make_in_thread).add_done_callback(self._made)
        else:
            self._run(self._make(self._submit))

    def _turn_is_free(self) -> bool:
        loop = self._dispatcher.loop()
        if self.over or loop is None:
            return False
        try:
            loop.call_soon_threadsafe(self._begin_later)
        except RuntimeError:
            return False
        return True

    def _begin_later(self) -> None:
        if self.over or self._is_begun:
            if not self._has_turn and self._chat is not None and not self._is_begun:
                self._chat._wake_next()  # the turn that was offered here
            return
        try:
            self._begin()
        except Exception as error:
            self.end(error)

    def _make_in_thread(self) -> NativeStream:
        try:
            return self._make(self._submit)
        finally:
            with self._lock:
                self._in_thread, over = False, self.over
            if over:  # the loop was closed meanwhile
                self._finish()

    def _made(self, future: asyncio.Future[NativeStream]) -> None:
        try:
            native = future.result()
        except Exception as error:
            self.end(error)
        except asyncio.CancelledError:
            self.end(ClosedError("the event loop is being closed"))
        else:
            if not self.over:  # else it is dropped, which cancels it
                self._run(native)

    def _submit(self, asked: Asked, **options: Any) -> NativeStream:
        self.n_prompt = len(asked.tokens)
        native = self._model._native_stream(asked, self.answer, mailbox=self._dispatcher.mailbox, mailbox_id=self._id,
                                            **options)  # fmt: skip
        self._has_turn = False
        return native

    def _run(self, native: NativeStream) -> None:
        self.native = native
        if self.stopping:
            native.cancel()
        self._wake()
        self.receive()

    def receive(self) -> None:
        """Take what the engine has."""
        native = self.native
        if native is None or self.over:
            return
        try:
            # Until it is empty: the error of a request comes after its last piece, and the news of both may be one.
            while not native.done and ((items := native.poll()) or native.done):
                pieces = self.answer.take(native, items)
                if self.wanted:
                    self.unread += pieces
        except Exception as error:
            self.end(error)
            return
        if native.done:
            self.end()
            return
        if self._waiters:
            self._wake()
        if self.listener is not None:
            self.listener()

    def end(self, error: Exception | None = None) -> None:
        with self._lock:
            if self.over:
                return
            self.over, self.error, in_thread = True, error, self._in_thread
        self._dispatcher.requests.pop(self._id, None)
        self._wake()
        if self.listener is not None and self._dispatcher.loop() is not None:
            self.listener()
        if not in_thread:
            self._finish()

    def _finish(self) -> None:
        if self._has_turn and self._chat is not None:
            self._has_turn = False
            self._chat._release()
        self.answer.finish()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        if self._dispatcher.loop() is not None:
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def changed(self) -> None:
        """Wait for news."""
        if os.getpid() != self._dispatcher.pid:
            raise ForkError(f"this stream belongs to process {self._dispatcher.pid} and can't be read in process {os.getpid()}")
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def stop(self) -> None:
        """Ask the engine to stop; from any thread."""
        self.stopping = True
        if self.native is not None:
            self.native.cancel()
        elif not self._is_begun:  # it waits for its turn
            end = self.answer.end_unbegun()
            if self.wanted:
                self.unread.append(end)
            self.end()

    def drop(self) -> None:
        """Stop, and read no more."""
        self.wanted = False
        self.unread.clear()
        self.stop()

    def next_piece(self) -> Piece:
        if len(self.unread) <= MANY_UNREAD:
            return self.unread.popleft()
        pieces = list(self.unread)
        self.unread.clear()
        last = pieces[-1]
        logprobs = None if last.logprobs is None else tuple(itertools.chain.from_iterable(p.logprobs or () for p in pieces))
        return Piece("".join(p.text for p in pieces), tuple(itertools.chain.from_iterable(p.tokens for p in pieces)), logprobs,
                     last.finish_reason, last.usage, last.timings, "".join(p.reasoning for p in pieces),
                     tuple(itertools.chain.from_iterable(p.tool_calls for p in pieces)))  # fmt: skip
