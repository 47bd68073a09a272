"""Event loops for tests: each kind of them that news of requests come into in another way."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from lfmfast import Model

T = TypeVar("T")
Main = Callable[[], Coroutine[Any, Any, T]]
Run = Callable[[Main[T]], T]

HAS_UVLOOP = importlib.util.find_spec("uvloop") is not None
KINDS = [
    pytest.param("descriptor", marks=pytest.mark.skipif(sys.platform == "win32", reason="loops watch no descriptors there")),
    "thread",
    pytest.param("uvloop", marks=pytest.mark.skipif(not HAS_UVLOOP, reason="uvloop is not installed")),
]


def new_loop(kind: str) -> asyncio.AbstractEventLoop:
    if kind == "uvloop":
        import uvloop

        loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        return loop
    return asyncio.new_event_loop()


def run(kind: str, main: Main[T]) -> T:
    """Runs a coroutine function in a new loop and closes that as asyncio.run() does."""
    loop = new_loop(kind)
    try:
        return loop.run_until_complete(asyncio.wait_for(main(), 120))
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def is_idle(model: Model) -> bool:
    stats = model.engine.stats()
    return stats["n_running"] == 0 and stats["n_queued"] == 0
