"""ServerState: what all endpoints share, and the generations that are running."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import HTTPConnection

from lfmfast.server.errors import ApiError, unavailable
from lfmfast.server.metrics import Times
from lfmfast.types import Timings, Usage

if TYPE_CHECKING:
    from lfmfast.aio import AsyncModel, AsyncStream
    from lfmfast.model_file import Prompt
    from lfmfast.prefix import Prefix
    from lfmfast.server.settings import Settings

__all__ = ["RequestRecord", "ServerState", "Slot", "Task", "current_record", "state_of"]


@dataclass
class RequestRecord:
    """What the access log says of a request: of all of its answers together, if there are several."""

    id: str
    began: float
    """time.perf_counter()"""
    status: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_tokens: int = 0
    first_token_ms: float | None = None
    tokens_per_second: float | None = None
    finish_reason: str | None = None


#: The request that is being answered: endpoints and their tasks see it, the middleware sets it.
current_record: ContextVar[RequestRecord | None] = ContextVar("current_record", default=None)


@dataclass
class Task:
    """A generation, from its acceptance to its end."""

    id: int
    slot: Slot | None
    """None: more run than there are slots, so this one waits."""
    stream: AsyncStream
    prompt: Prompt
    prompt_options: Mapping[str, Any]
    params: Mapping[str, Any]


@dataclass
class Slot:
    """A place for a generation as clients see it. The engine gives out its own; these only have the same number."""

    id: int
    task: Task | None = None
    last: Task | None = None
    """The last generation that ended here."""
    restored: Prefix | None = None
    """What was read from a file since."""


@dataclass
class ServerState:
    """What endpoints share.

    Parameters
    ----------
    settings : Settings
    loaded : AsyncModel, optional
        The model; :attr:`model` is what endpoints use.
    """

    settings: Settings
    loaded: AsyncModel | None = None
    failure: Exception | None = None
    """Why there is no model."""
    draining: bool = False
    slots: list[Slot] = field(default_factory=list)
    started_at: float = field(default_factory=time.time)
    n_tokens_max: int = 0
    """The most tokens that a generation had, prompt included."""
    running: dict[int, Task] = field(default_factory=dict)
    n_by_status: Counter[int] = field(default_factory=Counter)
    """Requests that have ended, by HTTP status; 499: the client went away, 0: the server did."""
    times: Times = field(default_factory=Times)
    _task_ids: Iterator[int] = field(default_factory=itertools.count)

    @property
    def model(self) -> AsyncModel:
        """The model.

        Raises
        ------
        ApiError
            503: it is being loaded, or the server is shutting down.
        """
        if self.loaded is None:
            if self.failure is not None:
                raise ApiError(500, "server_error", "the model could not be loaded")
            raise unavailable("Loading model")
        return self.loaded

    @property
    def model_name(self) -> str:
        """What answers carry as `model`."""
        if self.settings.aliases:
            return self.settings.aliases[0]
        return Path(self.model.model.path).name if self.loaded is not None else "model"

    @property
    def n_ctx(self) -> int:
        """Tokens that prompt and answer of one request can have together."""
        return self.model.model.n_ctx

    def new_id(self, prefix: str) -> str:
        """An id for a response: "chatcmpl-", "cmpl-", ..., and random letters."""
        return prefix + secrets.token_urlsafe(24)

    @contextlib.contextmanager
    def task(
        self, stream: AsyncStream, *, prompt: Prompt, prompt_options: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None, id_slot: int = -1
    ) -> Iterator[Task]:  # fmt: skip
        """While a generation is running: it has a slot, if there is a free one, and is counted and logged at its end.

        Parameters
        ----------
        stream : AsyncStream
        prompt : str, list of messages, or list of int
            As it was given to :meth:`AsyncModel.stream`; POST /slots/N?action=save makes its tokens of it.
        prompt_options : mapping, optional
            Options of :meth:`Model.encode` that make the same prompt of it.
        params : mapping, optional
            What /slots shows: the generation settings as they are sent.
        id_slot : int
            The slot that the client would like; it has no effect on what is reused.
        """
        free = [slot for slot in self.slots if slot.task is None]
        place = next((s for s in free if s.id == id_slot), free[0] if free else None)
        task = Task(next(self._task_ids), place, stream, prompt, prompt_options or {}, params or {})
        self.running[task.id] = task
        if place is not None:
            place.task = task
        try:
            yield task
        finally:
            del self.running[task.id]
            slot = task.slot  # it may have got one meanwhile
            if slot is not None:
                slot.task, slot.last, slot.restored = None, task, None
                self._seat_waiting(slot)
            self._count(stream.usage, stream.timings, stream.finish_reason)

    def stop_all(self) -> None:
        """End all generations where they are; what they have is sent."""
        for task in list(self.running.values()):
            task.stream.cancel()

    def count_request(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self.n_by_status[record.status] += 1

    def _seat_waiting(self, slot: Slot) -> None:
        waiting = next((task for task in self.running.values() if task.slot is None), None)
        if waiting is not None:
            waiting.slot, slot.task = slot, waiting

    def _count(self, usage: Usage | None, timings: Timings | None, finish_reason: str | None) -> None:
        record = current_record.get()
        if usage is None or timings is None:
            return
        self.n_tokens_max = max(self.n_tokens_max, usage.total_tokens)
        self.times.add(timings)
        if record is not None:
            record.prompt_tokens += usage.prompt_tokens
            record.cached_tokens += usage.cached_tokens
            record.predicted_tokens += usage.completion_tokens
            first = timings.time_to_first_token_ms
            record.first_token_ms = first if record.first_token_ms is None else min(first, record.first_token_ms)
            record.tokens_per_second = (record.tokens_per_second or 0.0) + timings.predicted_per_second
            record.finish_reason = finish_reason


def state_of(connection: HTTPConnection) -> ServerState:
    """The state of the server that a request came to."""
    state: ServerState = connection.app.state.server
    return state
