"""Many requests at once: enough of them submitted to keep the engine busy, their answers as they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from lfmfast._engine import Mailbox
from lfmfast._request import Asked, Options
from lfmfast.errors import QueueFullError
from lfmfast.stream import Answer
from lfmfast.types import Completion

if TYPE_CHECKING:
    from lfmfast._engine import Stream as NativeStream
    from lfmfast.model import Model

__all__ = ["OF_PROMPT", "Prepare", "answers", "collect", "of_requests", "requests_of", "sort_key"]

#: Gives a request, when it is about to be submitted.
Prepare = Callable[[], tuple[Asked, Options]]
Answers = Generator[tuple[int, Completion | Exception], None, None]

#: Options that are about the prompt.
OF_PROMPT = ("continue_final_message", "template_options")


def answers(model: Model, requests: Iterable[Prepare | None], limit: int) -> Answers:
    """Numbers of requests and their answers, or the exceptions in their place, as they come.

    Leaving it early cancels what is running, and so does an exception of `requests` itself.

    Parameters
    ----------
    requests : iterable of callable
        Taken one by one, as there is room. What one raises when it is called is its answer. None: there is none until an
        answer has come.
    limit : int
        Requests that are submitted and not answered at a time.
    """
    running: dict[int, tuple[NativeStream, Answer]] = {}
    coming = iter(requests)
    job: tuple[Asked, Options] | None = None
    n_begun, is_last = 0, False
    mailbox = Mailbox()
    try:
        while running or not is_last:
            while not is_last and len(running) < limit:
                answer, failure = Answer(), None
                try:
                    if job is None:
                        if (prepare := next(coming)) is None:
                            break
                        job = _prepared(prepare)
                    running[n_begun] = _begin(model, job, answer, mailbox, n_begun), answer
                except StopIteration:
                    is_last = True
                    break
                except QueueFullError:  # by others' requests: again in a moment
                    break
                except _Failed as failed:
                    failure = failed.error
                job = None
                n_begun += 1
                if failure is not None:
                    yield n_begun - 1, failure
            for i in () if is_last and not running else mailbox.wait(50 if running else 10) or ():
                if i in running and (result := _news(*running[i])) is not None:
                    del running[i]
                    yield i, result
    finally:
        for native, _ in running.values():
            native.cancel()
        for native, answer in running.values():
            with suppress(Exception):  # its own failure, which nobody waits for any more
                while not native.done:
                    answer.take(native, native.wait())
            answer.finish()
        mailbox.close()


class _Failed(Exception):
    """Carries what is a request's own failure."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _prepared(prepare: Prepare) -> tuple[Asked, Options]:
    try:
        return prepare()
    except Exception as error:
        raise _Failed(error) from None


def _begin(model: Model, job: tuple[Asked, Options], answer: Answer, mailbox: Mailbox, i: int) -> NativeStream:
    asked, options = job
    try:
        return model._begin(asked, answer, options, mailbox, i)
    except QueueFullError:
        raise
    except Exception as error:
        raise _Failed(error) from None


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


def sort_key(prompt: Any, tools: Any = None) -> str:
    """Prompts with keys that begin alike begin alike: asked one after the other, they find what they share just read."""
    if isinstance(prompt, str) and not tools:
        return prompt
    try:
        return json.dumps([tools, prompt], sort_keys=True, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):  # it will be refused
        return ""


def collect(coming: Answers, order: Sequence[int], progress: Callable[[int, int], object] | None = None,
            return_errors: bool = False) -> list[Completion | Exception]:  # fmt: skip
    """All answers, each at its place; whatever ends it early ends the requests.

    Parameters
    ----------
    order : sequence of int
        The place of each request's answer.
    progress : callable, optional
        Called with the number of answers that are there, and of all, after each.
    return_errors : bool
        An exception takes the place of its request's answer; else the first one ends everything.
    """
    results: list[Completion | Exception | None] = [None] * len(order)
    with closing(coming):
        for n_done, (i, result) in enumerate(coming, 1):
            if isinstance(result, Exception) and not return_errors:
                raise result
            results[order[i]] = result
            if progress is not None:
                progress(n_done, len(order))
    return cast("list[Completion | Exception]", results)


def requests_of(model: Model, prompt: Any, n: int, many: bool,
                options: Mapping[str, Any]) -> tuple[list[int], Iterator[Prepare]]:  # fmt: skip
    """What a call of `generate` asks for, in the order in which it is submitted, and the place of each answer.

    Parameters
    ----------
    prompt, n
        `n` answers to one prompt, or, if there are `many`, one to each of them.
    """
    if not many:
        return [*range(n)], of_prompt(model, prompt, n, options)
    order = sorted(range(len(prompt)), key=[sort_key(one) for one in prompt].__getitem__)
    return order, of_prompts(model, [prompt[i] for i in order], options)


def of_prompts(model: Model, prompts: Iterable[Any], options: Mapping[str, Any]) -> Iterator[Prepare]:
    """One request for each prompt, with the same options; these are checked here."""
    given = dict(options)
    asking = {name: given.pop(name) for name in OF_PROMPT if name in given}
    checked = model._options(**given)
    asking |= _shown(given, checked)
    return (lambda prompt=prompt: (model._asked(prompt, **asking), checked) for prompt in prompts)  # type: ignore[misc]


def of_prompt(model: Model, prompt: Any, n: int, options: Mapping[str, Any]) -> Iterator[Prepare]:
    """`n` requests with one prompt; a seed counts up."""
    requests = list(of_prompts(model, [prompt], options))
    first: list[tuple[Asked, Options]] = []

    def prepare(i: int) -> tuple[Asked, Options]:
        if not first:
            first.append(requests[0]())
        asked, checked = first[0]
        return asked, _seeded(checked, i)

    return (lambda i=i: prepare(i) for i in range(n))  # type: ignore[misc]


def of_requests(model: Model, requests: Iterable[tuple[Any, Mapping[str, Any]] | None]) -> Iterator[Prepare | None]:
    """One request for each prompt with options of its own. Options that come again are not checked again."""
    last: tuple[str, Options] | None = None

    def prepare(prompt: Any, options: Mapping[str, Any]) -> tuple[Asked, Options]:
        nonlocal last
        known, given = last, dict(options)
        asking, seed = {name: given.pop(name) for name in OF_PROMPT if name in given}, given.pop("seed", None)
        key = repr(given)
        if known is None or known[0] != key:
            known = last = key, model._options(**given)
        checked = known[1]
        if seed is not None:
            checked = replace(checked, params=checked.params.merged(seed=seed))
        return model._asked(prompt, **asking, **_shown(given, checked)), checked

    return (None if item is None else lambda item=item: prepare(*item) for item in requests)  # type: ignore[misc]


def _shown(options: Mapping[str, Any], checked: Options) -> dict[str, Any]:
    """What the prompt takes of the options of the answer."""
    return {"tools": options.get("tools"), "tool_choice": options.get("tool_choice"),
            "cache_prompt": checked.native["cache_prompt"]}  # fmt: skip


def _seeded(options: Options, i: int) -> Options:
    seed = options.params.seed
    if not i or seed is None or seed < 0:
        return options
    return replace(options, params=options.params.merged(seed=(seed + i) % (2**32 - 1)))
