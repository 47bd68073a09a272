"""Run the server: sockets, signals, the end."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from lfmfast.server.app import Load, create_app
from lfmfast.server.settings import Settings

__all__ = ["bind", "serve"]

log = logging.getLogger("lfmfast.server")


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
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            port = sockets[0].getsockname()[1] if sockets and not settings.port else settings.port
            listener = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(2048)
    except BaseException:
        for listener in sockets:
            listener.close()
        raise
    return sockets


def serve(settings: Settings, load: Load, sockets: list[socket.socket], *, loaded: Callable[[], None] = lambda: None) -> int:
    """Serve until a signal comes, and give the exit code.

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
        if error is None:
            loaded()
        else:
            failures.append(error)
            server.should_exit = True

    app = create_app(settings, load, ended=ended)
    config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False, ws="none", lifespan="on",
                            timeout_keep_alive=int(settings.idle_timeout_s), timeout_graceful_shutdown=int(settings.drain_s),
                            backlog=2048)  # fmt: skip
    server = _Server(config)
    server.run(sockets)
    if failures:
        raise failures[0]
    return 1 if server.forced else 0


class _Server(uvicorn.Server):
    """The first signal ends it in order, the second at once. Neither kills the process: its exit code is ours."""

    forced = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        known = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in known}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.forced = self.force_exit = True
        self.should_exit = True
