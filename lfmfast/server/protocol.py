"""Limits on connections that uvicorn does not have: how long a request's headers may take, and how long they may be."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

__all__ = ["limited_protocol"]

#: Bytes of a request's line and headers.
MAX_HEADER_BYTES = 64 << 10


class _Limits(asyncio.Protocol):
    """Goes before one of uvicorn's protocol classes."""

    header_timeout_s: float
    cycle: Any  # uvicorn's; None before the first request
    loop: asyncio.AbstractEventLoop
    _timer: asyncio.TimerHandle | None = None
    _n_header_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._opened = transport
        self._begin_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_headers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:  # there is a request: its headers are complete
            self._end_headers()
            return
        self._n_header_bytes += len(data)
        if self._n_header_bytes > MAX_HEADER_BYTES:
            self._give_up()
        else:
            self._begin_headers()

    def _begin_headers(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.header_timeout_s, self._give_up)

    def _end_headers(self) -> None:
        self._n_header_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._end_headers()
        self._opened.close()


def limited_protocol(header_timeout_s: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, with the limits."""
    return type("LimitedProtocol", (_Limits, AutoHTTPProtocol), {"header_timeout_s": header_timeout_s})
