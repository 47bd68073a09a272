"""AsyncModel, AsyncChat, AsyncStream: the same for programs that run an asyncio event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast, overload

from lfmfast import _many
from lfmfast._dispatch import Request
from lfmfast._request import needs_grammar
from lfmfast.chat import Chat
from lfmfast.errors import CancelledError, ForkError, ParameterError, QueueFullError, TemplateError
from lfmfast.model import Message, Model, Progress, Prompts
from lfmfast.model_file import Prompt, check_int
from lfmfast.stream import StreamFacts
from lfmfast.types import Completion, Piece

if TYPE_CHECKING:
    from lfmfast._engine import Stream as NativeStream
    from lfmfast.run_tools import Functions, OnCall, Said

__all__ = ["AsyncChat", "AsyncModel", "AsyncStream"]

#: Characters (or token ids) of a prompt from which on it is rendered and tokenised in a thread: some milliseconds of work.
LONG_PROMPT = 16384


class AsyncStream(StreamFacts, AsyncIterator[Piece]):
    """The pieces of one answer, as they come, for ``async for``; one consumer, in the event loop that asked for it.

    The work has begun when you get the object. Leaving early cancels it: cancelling the task that reads, :meth:`aclose`, the
    end of ``async with``, dropping the stream, closing the event loop. A consumer that is slow holds nobody up: what it has
    not read waits, and comes as one piece when it is much.

    Examples
    --------
    >>> async def main():
    ...     messages = [{"role": "user", "content": "What is the capital of France?"}]
    ...     async with AsyncModel(model).stream(messages, temperature=0) as stream:
    ...         async for piece in stream:
    ...             print(piece.text, end="")
    >>> asyncio.run(main())
    The capital of France is Paris.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._answer = request.answer
        self._pid = os.getpid()
        self._closed = False

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Piece:
        self._check_pid()
        request = self._request
        while not request.unread:
            self._raise_error()
            if self._closed or request.over:
                raise StopAsyncIteration
            await self._news()
        return request.next_piece()

    def _check_pid(self) -> None:
        if os.getpid() != self._pid:
            raise ForkError(f"this stream belongs to process {self._pid} and can't be read in process {os.getpid()}")

    def _raise_error(self) -> None:
        error, self._request.error = self._request.error, None
        if error is not None:
            self._closed = True
            try:
                raise error
            finally:
                del error  # its traceback has this frame

    async def _news(self) -> None:
        try:
            await self._request.changed()
        except asyncio.CancelledError:
            self._closed = True
            self._request.drop()
            raise

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt; 0 before it is accepted."""
        return self._request.n_prompt

    @property
    def n_read(self) -> int:
        """Tokens of the prompt that are read by now, those that were kept included; -1: the request still waits."""
        return -1 if self._request.native is None else self._request.native.n_read

    @property
    def n_cached(self) -> int:
        """Tokens of the prompt that were kept; valid when :attr:`n_read` is not -1."""
        return 0 if self._request.native is None else self._request.native.n_cached

    @property
    def prompt_ms(self) -> float:
        """How long reading the prompt took; valid from the first piece on."""
        return 0.0 if self._request.native is None else self._request.native.prompt_us / 1e3

    async def pieces(self) -> list[Piece]:
        """Wait for the next piece, and take all that have come meanwhile; an empty list is the end."""
        self._check_pid()
        while not (pieces := self.take()) and not self._closed and not self._request.over:
            await self._news()
        return pieces

    @property
    def over(self) -> bool:
        """Whether nothing more comes, besides what :meth:`take` has to give."""
        return self._request.over

    def take(self) -> list[Piece]:
        """All pieces that have come, without waiting; maybe none. Raises what ended the stream."""
        unread = self._request.unread
        if not unread:
            self._raise_error()
            return []
        pieces = list(unread)
        unread.clear()
        return pieces

    def listen(self, listener: Callable[[], object] | None) -> None:
        """Call `listener` in the loop whenever there may be something to :meth:`take`: cheaper than a task that waits.

        It holds whatever it refers to until the stream has ended; None takes it away. What came before is not told of.
        """
        self._request.listener = listener

    async def result(self) -> Completion:
        """Read to the end and give the whole answer, pieces that were already read included."""
        self._check_pid()
        request = self._request
        while not request.over and not self._closed:
            await self._news()
        request.unread.clear()
        self._raise_error()
        return self._answer.completion()

    def cancel(self) -> None:
        """Ask the engine to stop, from any thread; the stream then ends with finish reason "cancelled"."""
        self._check_pid()
        self._request.stop()

    async def aclose(self) -> None:
        """Stop the work, wait until it has stopped (at most one step of the model), and drop the rest."""
        self._check_pid()
        self._closed = True
        self._request.drop()
        while not self._request.over:
            await self._request.changed()
        self._request.error = None

    async def accepted(self) -> None:
        """Wait until the engine has the request, and raise why it does not take it. ``async with`` does it.

        Most requests are accepted, or refused, when the stream is made: long prompts and chats that are busy take longer.
        """
        self._check_pid()
        while self._request.native is None and not self._request.over:
            await self._news()
        if self._request.native is None:
            self._raise_error()

    async def __aenter__(self) -> AsyncStream:
        await self.accepted()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        await self.aclose()

    def __del__(self) -> None:
        request = getattr(self, "_request", None)
        if request is not None and not request.over and self._pid == os.getpid():  # all are over when modules are torn down
            request.drop()


class AsyncModel:
    """A :class:`Model` for programs with an event loop. One model can serve several loops, and threads beside them.

    Parameters
    ----------
    model : Model
        An opened one; :meth:`load` and :meth:`from_pretrained` open one without holding up the loop.

    Examples
    --------
    >>> async def main():
    ...     async with await AsyncModel.load(demo_path) as model:
    ...         asked = [model.generate([{"role": "user", "content": text}], temperature=0)
    ...                  for text in ("What is the capital of France?", "Name a color.")]
    ...         for done in await asyncio.gather(*asked):
    ...             print(done.text)
    >>> asyncio.run(main())
    The capital of France is Paris.
    Blue.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    @classmethod
    async def load(cls, path: str | os.PathLike[str], **options: Any) -> AsyncModel:
        """Open a model file in a thread; parameters as for :class:`Model`. Cancelling it stops the loading."""
        return cls(await _in_thread(lambda progress: Model(path, **{**options, "progress": progress}), options.get("progress")))

    @classmethod
    async def from_pretrained(cls, name: str, **options: Any) -> AsyncModel:
        """Open a model of the Hugging Face Hub in a thread; parameters as for :meth:`Model.from_pretrained`."""
        return cls(await _in_thread(lambda progress: Model.from_pretrained(name, **{**options, "progress": progress}),
                                    options.get("progress")))  # fmt: skip

    def stream(self, prompt: Prompt, *, tools: Sequence[Any] | None = None, continue_final_message: bool = False,
               template_options: Mapping[str, Any] | None = None, **options: Any) -> AsyncStream:  # fmt: skip
        """Generate, piece by piece; parameters as for :meth:`Model.stream`.

        What :meth:`Model.stream` raises is raised here; where a thread has to make the request ready, as with a long prompt
        or a grammar, by what the stream is first awaited with: :meth:`AsyncStream.accepted`, ``async with``, ...
        """
        model = self.model

        def make(submit: Callable[..., NativeStream]) -> NativeStream:
            asked = model._asked(prompt, tools=tools, continue_final_message=continue_final_message,
                                 template_options=template_options, cache_prompt=options.get("cache_prompt", True),
                                 tool_choice=options.get("tool_choice"))  # fmt: skip
            return submit(asked, **options)

        long = _size(prompt) + _size(tools or ()) > LONG_PROMPT or needs_grammar(tools, options)
        return AsyncStream(Request(model, make, long=long))

    @overload
    async def generate(self, prompt: Prompt, *, n: Literal[1] = 1, progress: Progress | None = None,
                       return_errors: Literal[False] = False, **options: Any) -> Completion: ...  # fmt: skip
    @overload
    async def generate(self, prompt: Prompt, *, n: int, progress: Progress | None = None,
                       return_errors: Literal[False] = False, **options: Any) -> list[Completion]: ...  # fmt: skip
    @overload
    async def generate(self, prompt: Prompt, *, n: int, progress: Progress | None = None,
                       return_errors: Literal[True], **options: Any) -> list[Completion | Exception]: ...  # fmt: skip
    @overload
    async def generate(self, prompt: Prompts, *, progress: Progress | None = None,
                       return_errors: Literal[False] = False, **options: Any) -> list[Completion]: ...  # fmt: skip
    @overload
    async def generate(self, prompt: Prompts, *, progress: Progress | None = None,
                       return_errors: Literal[True], **options: Any) -> list[Completion | Exception]: ...  # fmt: skip
    async def generate(self, prompt: Any, *, n: int = 1, progress: Progress | None = None, return_errors: bool = False,
                       **options: Any) -> Any:  # fmt: skip
        """Generate a whole answer, several to one prompt, or one to each of many prompts; all as :meth:`Model.generate`.

        Cancelling it cancels all of its requests.
        """
        many = isinstance(prompt, (list, tuple)) and any(isinstance(item, (str, list, tuple)) for item in prompt)
        check_int("n", n, 1)
        if many and n > 1:
            raise ParameterError(f"n is for a single prompt, and these are {len(prompt)}: put each prompt in the list n times")
        if not many and n == 1 and progress is None and not return_errors:
            return await _whole(self.stream(prompt, **options))
        model, grammar = self.model, needs_grammar(options.get("tools"), options)
        made = functools.partial(_many.requests_of, model, prompt, n, many, options)
        order, requests = await asyncio.to_thread(made) if grammar else made()
        long = [grammar or _size(prompt[i] if many else prompt) > LONG_PROMPT for i in order]
        results: list[Completion | Exception | None] = [None] * len(order)
        n_done = 0
        async with contextlib.aclosing(_answers(model, zip(requests, long, strict=True))) as coming:
            async for i, result in coming:
                if isinstance(result, Exception) and not return_errors:
                    raise result
                results[order[i]] = result
                n_done += 1
                if progress is not None:
                    progress(n_done, len(order))
        return results if many or n > 1 else results[0]

    def chat(self, system: str | None = None, *, tools: Sequence[Any] | None = None, messages: Iterable[Message] = (),
             **template_options: Any) -> AsyncChat:  # fmt: skip
        """Begin a conversation; see :class:`Chat`."""
        return AsyncChat(Chat(self.model, system, tools=tools, messages=messages, **template_options))

    async def close(self) -> None:
        """Cancel what is running and free everything; streams end with finish reason "cancelled"."""
        await asyncio.to_thread(self.model.close)

    async def __aenter__(self) -> AsyncModel:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<lfmfast.AsyncModel of {self.model!r}>"


class AsyncChat:
    """A conversation of an :class:`AsyncModel`, one reply at a time: who asks meanwhile waits for the turn.

    The task that has a reply open gets BusyError if it asks for another.

    Parameters
    ----------
    chat : Chat
        The conversation itself, with its history; see there.

    Examples
    --------
    >>> async def main():
    ...     chat = AsyncModel(model).chat()
    ...     await chat.send("My name is Ada.", temperature=0)
    ...     print((await chat.send("What is my name?", temperature=0)).text)
    >>> asyncio.run(main())
    Your name is Ada.
    """

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A copy of the history, the system message included."""
        return self.chat.messages

    def stream(self, content: Said, *, prefill: str | None = None, **options: Any) -> AsyncStream:
        """Say something and get the reply piece by piece; as :meth:`Chat.stream`."""
        return say(self.chat, content, prefill, options)

    async def send(self, content: Said, **options: Any) -> Completion:
        """Say something and get the whole reply."""
        return await self.chat.asend(content, **options)

    async def run_tools(self, content: Said, functions: Functions, *, max_rounds: int = 8,
                        on_call: OnCall | None = None, **options: Any) -> Completion:  # fmt: skip
        """Say something, call the functions that the model wants called, and get its last reply; as :meth:`Chat.arun_tools`."""
        return await self.chat.arun_tools(content, functions, max_rounds=max_rounds, on_call=on_call, **options)

    @overload
    def regenerate(self, *, stream: Literal[False] = False, **options: Any) -> Awaitable[Completion]: ...
    @overload
    def regenerate(self, *, stream: Literal[True], **options: Any) -> AsyncStream: ...
    def regenerate(self, *, stream: bool = False, **options: Any) -> Awaitable[Completion] | AsyncStream:
        """Replace the last reply with a new one: ``await`` it, or with ``stream=True`` iterate over it."""
        chat = self.chat
        long = _size(chat._messages) > LONG_PROMPT or needs_grammar(chat.tools, options)
        reply = AsyncStream(Request(chat.model, lambda submit: chat._another_reply(options, submit), long=long, chat=chat))
        return reply if stream else _whole(reply)

    def __repr__(self) -> str:
        return f"<lfmfast.AsyncChat of {len(self.chat._messages)} messages on {self.chat.model!r}>"


def say(chat: Chat, content: Said, prefill: str | None, options: dict[str, Any]) -> AsyncStream:
    """What Chat.astream does."""
    said = chat._said(content)

    def make(submit: Callable[..., NativeStream]) -> NativeStream:
        return chat._reply([*chat._messages, *said], prefill, options, submit)

    long = _size([*said, *chat._messages[chat._n_known :]]) > LONG_PROMPT or needs_grammar(chat.tools, options)
    return AsyncStream(Request(chat.model, make, long=long, chat=chat))


async def _answers(
    model: Model, requests: Iterator[tuple[_many.Prepare, bool]]
) -> AsyncGenerator[tuple[int, Completion | Exception]]:
    """As :func:`lfmfast._many.answers`, in an event loop.

    Parameters
    ----------
    requests : iterator of (callable, bool)
        With each, whether it takes so long that it must not be done in the loop.
    """
    again = deque[tuple[int, _many.Prepare, bool]]()
    running: dict[asyncio.Task[Completion], tuple[int, _many.Prepare, bool]] = {}
    coming = ((i, *request) for i, request in enumerate(requests))
    try:
        while True:
            is_full = False
            while len(running) < model._n_ahead and not is_full:
                job = again.popleft() if again else next(coming, None)
                if job is None:
                    break
                try:
                    running[asyncio.ensure_future(_whole(_begun(model, *job[1:])))] = job
                except QueueFullError:  # by others' requests: again in a moment
                    again.appendleft(job)
                    is_full = True
                except Exception as error:
                    yield job[0], error
            if not running and not again:
                return
            if not running:
                await asyncio.sleep(0.01)
                continue
            done, _ = await asyncio.wait(running, timeout=0.05 if is_full else None, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                job, failure = running.pop(task), task.exception()
                if isinstance(failure, QueueFullError):
                    again.appendleft(job)
                else:
                    yield job[0], task.result() if failure is None else cast(Exception, failure)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _begun(model: Model, prepare: _many.Prepare, long: bool) -> AsyncStream:
    def make(submit: Callable[..., NativeStream]) -> NativeStream:
        asked, checked = prepare()
        return submit(asked, checked=checked)

    return AsyncStream(Request(model, make, long=long))


async def _whole(stream: AsyncStream) -> Completion:
    async with stream:
        return await stream.result()


def _size(prompt: object) -> int:
    """Characters, or token ids, that a prompt has about."""
    if isinstance(prompt, Mapping):
        return sum(_size(value) for value in prompt.values())
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return len(prompt) if isinstance(prompt, str) else 1
    return len(prompt) + (0 if prompt and isinstance(prompt[0], int) else sum(_size(item) for item in prompt))


async def _in_thread(load: Callable[[Callable[[float], None]], Model], progress: Callable[[float], None] | None) -> Model:
    """Load in a thread. A model that nobody waits for any more is not finished, or closed."""
    lock = threading.Lock()
    loaded: list[Model] = []
    abandoned = False

    def report(share: float) -> None:
        if abandoned:
            raise CancelledError("the loading was cancelled")
        if progress is not None:
            progress(share)

    def work() -> Model:
        model = load(report)
        with contextlib.suppress(TemplateError):  # it has none
            _ = model.template, model.end_tokens  # made at first use, which would be in the loop
        with lock:
            loaded.append(model)
            if abandoned:
                model.close()
        return model

    try:
        return await asyncio.to_thread(work)
    except asyncio.CancelledError:
        with lock:
            abandoned = True
            for model in loaded:
                model.close()
        raise
