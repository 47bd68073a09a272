"""A batch: records in, results out, the engine kept full, never more in memory than a window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from lfmfast.batch.output import Output
from lfmfast.batch.reader import Record
from lfmfast.batch.request import SEEDS, Form, Request
from lfmfast.batch.result import columns_of, encode, openai_of
from lfmfast.errors import CancelledError, ClosedError, ForkError
from lfmfast.model import Model
from lfmfast.types import Completion

__all__ = ["MAX_STALL_MS", "Answering", "Counts", "run"]

#: Bytes of requests that are read ahead, more or less.
WINDOW_BYTES = 64 << 20
#: Windows that may lie between the first line that is not written and the last one that is read.
AHEAD = 4
#: Of :class:`Model`. Reading prompts in whole passes holds nobody up: who waits for a file waits for all of its answers.
MAX_STALL_MS = 60_000


@dataclass
class Counts:
    """What came of a batch by now. Tokens are those of this run.

    Parameters
    ----------
    before : int
        Lines that an earlier run did.
    size : int
        How much of the input the lines that are done are, in the unit of `Source.total`.
    size_before : int
        Of it, what an earlier run did.
    """

    lines: int = 0
    failed: int = 0
    before: int = 0
    size: int = 0
    size_before: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


def run(
    model: Model,
    records: Iterator[Record],
    output: Output,
    form: Form,
    *,
    columns: bool,
    name: str,
    window: int = 256,
    n_ahead: int | None = None,
    progress: Callable[[Counts], object] = lambda counts: None,
) -> Counts:
    """Answer every record that `output` does not have yet. Whatever ends it early leaves `output` as far as it came.

    Parameters
    ----------
    columns : bool
        Results are flat objects; otherwise OpenAI's result lines.
    name : str
        The model's, for these.
    window : int
        Lines that are read ahead, and ordered by how their prompts begin.
    n_ahead : int, optional
        As for :meth:`Model.generate_each`.
    progress : callable
        Called after each line.
    """
    batch = _Batch(model, records, output, form, columns, name, window, progress)
    batch.answering.run(batch.requests(), n_ahead)
    return batch.counts


class Answering:
    """Answers requests with a model, however many prompts and answers each of them has.

    Parameters
    ----------
    finish : callable
        Called with each request, as they are done, and its answers; of one that failed, there are none, and its `error` is set.
    """

    def __init__(self, model: Model, finish: Callable[[Request, list[Completion]], object]) -> None:
        self._model, self._finish = model, finish
        self._owners: dict[int, tuple[Request, int]] = {}  # of answers that are to come: the request, and the place in it
        self._answers: dict[int, list[Completion | Exception | None]] = {}  # of requests that are begun, by their numbers
        self._n_begun = 0

    @property
    def is_busy(self) -> bool:
        """Whether answers are to come."""
        return bool(self._owners)

    def run(self, requests: Iterable[Request | None], n_ahead: int | None = None) -> None:
        """Answer all of them. None in place of a request, and `n_ahead`: as for :meth:`Model.generate_each`."""
        with closing(self._model.generate_each(self._prompts(requests), n_ahead=n_ahead)) as coming:
            for i, answer in coming:
                self._take(i, answer)

    def _prompts(self, requests: Iterable[Request | None]) -> Iterator[tuple[Any, dict[str, Any]] | None]:
        for request in requests:
            if request is None:
                yield None
                continue
            if request.error is not None:
                self._finish(request, [])
                continue
            n = len(request.prompts) * request.n
            self._answers[request.number] = [None] * n
            for i in range(n):
                self._owners[self._n_begun] = request, i
                self._n_begun += 1
                prompt, seed = request.prompts[i // request.n], (request.seed + i % request.n) % SEEDS
                yield prompt, {**request.options, "seed": seed}

    def _take(self, i: int, answer: Completion | Exception) -> None:
        if isinstance(answer, (ClosedError, CancelledError, ForkError, MemoryError)):  # not the request's fault
            raise answer
        if isinstance(answer, Completion) and answer.finish_reason == "cancelled":
            raise CancelledError("the model was closed")
        request, place = self._owners.pop(i)
        answers = self._answers[request.number]
        answers[place] = answer
        if all(item is not None for item in answers):
            del self._answers[request.number]
            request.error = next((item for item in answers if isinstance(item, Exception)), None)
            whole = [item for item in answers if isinstance(item, Completion)]
            self._finish(request, whole if request.error is None else [])


class _Batch:
    def __init__(self, model: Model, records: Iterator[Record], output: Output, form: Form, columns: bool, name: str,
                 window: int, progress: Callable[[Counts], object]) -> None:  # fmt: skip
        self._model, self._records, self._output, self._form = model, records, output, form
        self._columns, self._name, self._window, self._progress = columns, name, window, progress
        self.counts = Counts(failed=output.n_failed, before=output.n_done)
        self.answering = Answering(model, self._finish)

    def requests(self) -> Iterator[Request | None]:
        """Window by window, prompts that begin alike one after the other."""
        for block in self._blocks():
            while self._output.n_waiting > AHEAD * self._window + len(block) and self.answering.is_busy:
                yield None  # a line takes so long that too much waits behind it
            yield from sorted(block, key=lambda request: request.key)

    def _blocks(self) -> Iterator[list[Request]]:
        block: list[Request] = []
        weight = 0
        for record in self._records:
            if record.is_blank or not self._output.expect(record.number):
                self.counts.size += record.size
                self.counts.size_before += record.size
                continue
            block.append(self._form.read(record))
            weight += block[-1].weight
            if len(block) == self._window or weight >= WINDOW_BYTES:
                yield block
                block, weight = [], 0
        yield block

    def _finish(self, request: Request, answers: list[Completion]) -> None:
        if self._columns:
            line = columns_of(request, answers, self._model, self._form.n > 1)
        else:
            line = openai_of(request, answers, self._model, self._name)
        self._output.write(request.number, encode(line))
        for usage in (answer.usage for answer in answers):
            self.counts.prompt_tokens += usage.prompt_tokens
            self.counts.cached_tokens += usage.cached_tokens
            self.counts.completion_tokens += usage.completion_tokens
        self.counts.lines += 1
        self.counts.failed += request.error is not None
        self.counts.size += request.size
        self._progress(self.counts)
