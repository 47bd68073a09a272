"""Many requests at once: enough of them submitted to keep the engine busy, their answers in order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from lfmfast._engine import Mailbox
from lfmfast.errors import QueueFullError
from lfmfast.stream import Answer
from lfmfast.types import Completion

if TYPE_CHECKING:
    from lfmfast._engine import Stream as NativeStream

__all__ = ["run"]

Begun = tuple["NativeStream", Answer]
Submit = Callable[[Mailbox, int], Begun]


def run(
    n: int,
    prepare: Callable[[int], Submit],
    limit: int,
    *,
    progress: Callable[[int, int], object] | None = None,
    return_errors: bool = False,
) -> list[Completion | Exception]:
    """The answers to requests 0 to n - 1. Whatever ends it early cancels all of them.

    Parameters
    ----------
    prepare : callable
        Called with a request's number when it is about to be submitted; gives what submits it to a mailbox under that
        number, which is called again after QueueFullError.
    limit : int
        Requests that are submitted and not answered at a time.
    progress : callable, optional
        Called with the number of requests that are done, and `n`, after each.
    return_errors : bool
        An exception takes the place of its request's answer; else the first one ends everything.
    """
    results: list[Completion | Exception | None] = [None] * n
    running: dict[int, Begun] = {}
    n_begun = n_done = 0
    submit: Submit | None = None
    mailbox = Mailbox()

    def done(i: int, result: Completion | Exception) -> None:
        nonlocal n_done
        running.pop(i, None)
        if isinstance(result, Exception) and not return_errors:
            raise result
        results[i] = result
        n_done += 1
        if progress is not None:
            progress(n_done, n)

    try:
        while n_done < n:
            while n_begun < n and len(running) < limit:
                failure = None
                try:
                    submit = submit or prepare(n_begun)
                    running[n_begun] = submit(mailbox, n_begun)
                except QueueFullError:  # by others' requests: again in a moment
                    break
                except Exception as error:
                    failure = error
                submit = None
                n_begun += 1
                if failure is not None:
                    done(n_begun - 1, failure)
            for i in () if n_done == n else mailbox.wait(50 if running else 10) or ():
                if i in running and (result := _news(*running[i])) is not None:
                    done(i, result)
    finally:
        for native, _ in running.values():
            native.cancel()
        for native, answer in running.values():
            with suppress(Exception):  # its own failure, which nobody waits for any more
                while not native.done:
                    answer.take(native, native.wait())
            answer.finish()
        mailbox.close()
    return cast("list[Completion | Exception]", results)


def _news(native: NativeStream, answer: Answer) -> Completion | Exception | None:
    """Takes what is there; the completion if that was the end of it."""
    try:
        # Until it is empty: an error comes after the last piece, and the news of both may be one.
        while not native.done and ((items := native.poll()) or native.done):
            answer.take(native, items)
        return None if answer.end is None else answer.completion()
    except Exception as error:
        answer.finish()
        return error
