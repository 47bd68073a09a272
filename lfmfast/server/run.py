"""Run the server: sockets, signals, the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from lfmfast import __version__
from lfmfast.server.app import Load, create_app
from lfmfast.server.protocol import limited_protocol
from lfmfast.server.settings import Settings
from lfmfast.server.state import ServerState

__all__ = ["bind", "serve"]

#: Seconds that are left after `drain_s` for answers that were stopped to be sent, and for the model to be freed.
GRACE_S = 3
FORCED = 1


def bind(settings: Settings) -> list[socket.socket]:
    """Listening sockets, one per address.

    Raises
    ------
    OSError
        An address is in use, or not this machine's.
    """
    sockets: list[socket.socket] = []
    try:
        for host in settings.host:
            # With port 0 all addresses get the same one, that of the first.
            port = sockets[0].getsockname()[1] if sockets and not settings.port else settings.port
            try:
                family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
                listener = socket.socket(family, socket.SOCK_STREAM)
                sockets.append(listener)
                if os.name == "posix":  # elsewhere it would let two servers have one port
                    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind(address)
                listener.listen(2048)
            except OSError as error:
                raise OSError(f"can't listen at {host} port {port}: {error.strerror or error}") from error
    except BaseException:
        for listener in sockets:
            listener.close()
        raise
    return sockets


def serve(
    settings: Settings, load: Load, sockets: list[socket.socket], *, loaded: Callable[[ServerState], None] | None = None
) -> int:
    """Serve until a signal comes, and give the exit code.

    At the first SIGTERM or Ctrl-C no more requests are taken, and answers have `drain_s` seconds to come to their end; the
    second one ends the process at once.

    Parameters
    ----------
    settings, load
        As for :func:`lfmfast.server.app.create_app`.
    sockets : list of socket
        From :func:`bind`.
    loaded : callable
        Called when the model is there.
    """
    server: _Server
    failures: list[Exception] = []

    def ended(error: Exception | None) -> None:
        if error is not None:
            failures.append(error)
            server.stop()
        elif loaded is not None:
            loaded(state)

    app = create_app(settings, load, ended=ended)
    state: ServerState = app.state.server
    config = uvicorn.Config(
        app, http=limited_protocol(settings.header_timeout_s), ws="none", lifespan="on", log_config=None, access_log=False,
        server_header=False, headers=[("Server", f"lfmfast/{__version__}")], proxy_headers=False,
        timeout_keep_alive=round(settings.idle_timeout_s), backlog=2048,
        timeout_graceful_shutdown=round(settings.drain_s) + GRACE_S,
    )  # fmt: skip
    server = _Server(config, state)
    server.run(sockets)
    if failures:
        raise failures[0]
    return 0


class _Server(uvicorn.Server):
    """The first signal ends it in order, the second at once. Its exit code says how it ended, not which signal came."""

    def __init__(self, config: uvicorn.Config, state: ServerState) -> None:
        super().__init__(config)
        self._state = state
        self._wake: Callable[[], object] | None = None

    def stop(self) -> None:
        """End it in order; from a signal handler or the loop."""
        self.should_exit = True
        if self._wake is not None:
            self._wake()

    async def main_loop(self) -> None:
        if sys.platform == "win32":  # there, waiting holds signals up
            await super().main_loop()
            return
        # uvicorn's looks ten times a second whether it should end, and between two tokens each look costs as much as a token.
        loop, ending = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(ending.set)
        while not await self.on_tick(0):  # the date that responses carry
            timer = loop.call_later(1, ending.set)
            await ending.wait()
            timer.cancel()
            ending.clear()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        known = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in known}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(FORCED)
        self._state.draining = True
        self.stop()
        # A download, or a connection to nowhere, can't be interrupted.
        left = self._state.settings.drain_s + 2 * GRACE_S if self._state.loaded is not None else GRACE_S
        watchdog = threading.Timer(left, os._exit, (0,))
        watchdog.daemon = True
        watchdog.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stop = asyncio.get_running_loop().call_later(self._state.settings.drain_s, self._state.stop_all)
        try:
            await super().shutdown(sockets)
        finally:
            stop.cancel()
