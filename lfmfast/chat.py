"""Chat: a conversation with a model, of which only what is new is formatted, tokenised and read."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from lfmfast import prefix, prefix_file, run_tools
from lfmfast._replies import Chunk, opened_thought
from lfmfast._request import Asked
from lfmfast.errors import BusyError, ParameterError, StateError, TemplateError
from lfmfast.messages import assistant_message
from lfmfast.reply import read_reply
from lfmfast.stream import Answer, Stream
from lfmfast.types import Completion, Timings

if TYPE_CHECKING:
    from lfmfast._dispatch import Request
    from lfmfast.aio import AsyncStream
    from lfmfast.model import Message, Model
    from lfmfast.run_tools import Functions, OnCall, Said

__all__ = ["Chat"]

S = TypeVar("S")


class Chat:
    """A conversation. Make it with :meth:`Model.chat`.

    The history is kept as messages and as token ids: each turn formats, tokenises and reads only what is new. Where the
    model's template changes an earlier turn (LFM2.5 strips the thoughts of past turns), the conversation is read again
    from there on.

    Calls from several threads wait for each other. While a reply is being streamed, another call from the same thread
    raises BusyError.

    Parameters
    ----------
    model : Model
    system : str, optional
        System message.
    tools : list, optional
        Tools for the template.
    messages : iterable of messages
        History to begin with.
    **template_options
        Further variables for the template, such as ``keep_past_thinking=True``.

    Examples
    --------
    >>> chat = model.chat()
    >>> chat.send("My name is Ada.", temperature=0).text
    'Nice to meet you, Ada!'
    >>> chat.send("What is my name?", temperature=0).text
    'Your name is Ada.'
    """

    def __init__(
        self,
        model: Model,
        system: str | None = None,
        *,
        tools: Sequence[Any] | None = None,
        messages: Iterable[Message] = (),
        **template_options: Any,
    ) -> None:
        self.model = model
        self._tools = tools
        self._options = template_options
        self._messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._messages += [dict(copy.deepcopy(message)) for message in messages]
        self._blocks: list[list[Chunk]] = []  # of the first _n_known messages; block 0 is the head
        self._n_known = 0
        self._timings: Timings | None = None
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread; of a reply in an event loop, the loop's
        self._waiting: deque[Callable[[], bool]] = deque()  # event loops that want the lock
        self._request: Request | None = None  # the one that has it, if it is an event loop's

    # --- history ---

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A copy of the history, the system message included."""
        return copy.deepcopy(self._messages)

    @property
    def tools(self) -> Sequence[Any] | None:
        """The tools that the template shows. Others may be given at any time; the conversation is then read again."""
        return self._tools

    @tools.setter
    def tools(self, tools: Sequence[Any] | None) -> None:
        self._tools = tools
        self._n_known = 0

    @property
    def timings(self) -> Timings | None:
        """Of the last reply."""
        return self._timings

    @property
    def n_tokens(self) -> int:
        """Tokens of the history as it is read, without the next reply's opening."""
        with self._exclusive():
            self._advance(self._messages, add_generation_prompt=False)
            return len(self._ids())

    def add(self, *messages: Message) -> None:
        """Put messages at the end of the history, such as the results of tool calls; ``send(None)`` gets a reply to them."""
        with self._exclusive():
            self._messages = [*self._messages, *(self._said(message)[0] for message in messages)]

    def reset(self) -> None:
        """Forget everything but the system message."""
        with self._exclusive():
            self._set_messages(self._messages[: self._n_system])

    def fork(self) -> Chat:
        """An independent copy of the conversation, on the same model."""
        with self._exclusive():
            other = Chat(self.model, tools=self.tools, messages=self._messages, **self._options)
            other._blocks = list(self._blocks)
            other._n_known = self._n_known
            return other

    def trim(self, max_tokens: int | None = None, *, keep_turns: int | None = None) -> int:
        """Drop the oldest turns (a user message and all that follows it up to the next one); the system message stays.

        Parameters
        ----------
        max_tokens : int, optional
            Drop until the history has at most this many tokens; by default half of the context. The last turn stays.
        keep_turns : int, optional
            Keep this many turns instead.

        Returns
        -------
        int
            Messages dropped.
        """
        for name, value in (("max_tokens", max_tokens), ("keep_turns", keep_turns)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ParameterError(f"{name} must be an integer of at least 0, not {value!r}")
        if max_tokens is not None and keep_turns is not None:
            raise ParameterError("give max_tokens or keep_turns, not both")
        with self._exclusive():
            before = len(self._messages)
            head = self._messages[: self._n_system]
            starts = [i for i, m in enumerate(self._messages) if m["role"] == "user" and i >= len(head)]
            if keep_turns is not None:
                cut = len(self._messages) if keep_turns == 0 else starts[max(0, len(starts) - keep_turns)] if starts else before
                self._set_messages([*head, *self._messages[cut:]])
                return before - len(self._messages)
            limit = self.model.n_ctx // 2 if max_tokens is None else max_tokens
            self._advance(self._messages, add_generation_prompt=False)
            messages, tail = self._messages, starts[1:]
            while len(self._ids()) > limit and tail:
                self._set_messages([*head, *messages[tail.pop(0) :]])
                self._advance(self._messages, add_generation_prompt=False)
            return before - len(self._messages)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the conversation and all that the model keeps of it to a file, for :meth:`Model.load_chat`.

        Raises
        ------
        StateError
            It can't be copied out of the context, or the model's `cache_bytes` is too small for it.
        ParameterError
            Something in messages, tools or template options is no JSON.
        OSError
            The file can't be written. One that was there is as it was.
        """
        with self._exclusive():
            self._advance(self._messages, add_generation_prompt=False)
            chat = {"messages": self._messages, "tools": self.tools, "options": self._options,
                    "template": self._template_hash(), "blocks": self._blocks}  # fmt: skip
            try:
                json.dumps(chat)
            except (TypeError, ValueError) as error:
                raise ParameterError(f"the chat can't be saved: {error}") from None
            prefix_file.write(path, prefix.saved(self.model, self._ids(), chat))

    @classmethod
    def _loaded(cls, model: Model, path: str | os.PathLike[str]) -> Chat:
        found = prefix.load(model, path, False)[1].chat
        if found is None:
            raise StateError(f"{os.fspath(path)!r} has no conversation, only a prefix: it is for load_prefix()")
        try:
            chat = cls(model, tools=found["tools"], messages=found["messages"], **found["options"])
            blocks = [[Chunk(str(text), bool(special), tuple(map(int, ids))) for text, special, ids in block]
                      for block in found["blocks"]]  # fmt: skip
            same = found["template"] == chat._template_hash()
        except (TypeError, ValueError, KeyError) as error:
            raise StateError(f"the conversation in {os.fspath(path)!r} makes no sense: {error!r}") from None
        chat._blocks = blocks
        chat._n_known = len(chat._messages) if same else 0
        return chat

    def _template_hash(self) -> str:
        return hashlib.sha256((self.model.template.source or "").encode()).hexdigest()

    @property
    def _n_system(self) -> int:
        return 1 if self._messages and self._messages[0].get("role") == "system" else 0

    def _set_messages(self, messages: list[dict[str, Any]]) -> None:
        self._messages = messages
        self._n_known = 0  # the chunks stay: what is rendered the same keeps its ids

    # --- replies ---

    def stream(self, content: Said, *, prefill: str | None = None, **options: Any) -> Stream:
        """Say something and get the reply piece by piece.

        When the reply ends, message and reply are in the history. A reply that was left early or cut by `max_tokens` is
        kept as far as it came; if nothing came, or on an error, the history is as before.

        Parameters
        ----------
        content : str, list of content parts, message, or None
            A user message's content, or a whole message: ``{"role": "tool", "content": ...}``. None: the reply is to what the
            history ends with.
        prefill : str, optional
            The beginning of the reply, which the model goes on with. It is not part of the reply's text.
        **options
            As for :meth:`Model.stream`: `max_tokens`, `stop`, `sampling`, `logprobs`, `temperature`, ...
        """
        said = self._said(content)
        self._acquire()
        try:
            return self._reply([*self._messages, *said], prefill, options, self.model._submit)
        except BaseException:
            self._release()
            raise

    def send(self, content: Said, **options: Any) -> Completion:
        """Say something and get the whole reply; options as for :meth:`stream`."""
        with self.stream(content, **options) as stream:
            return stream.result()

    @overload
    def regenerate(self, *, stream: Literal[False] = False, **options: Any) -> Completion: ...
    @overload
    def regenerate(self, *, stream: Literal[True], **options: Any) -> Stream: ...
    def regenerate(self, *, stream: bool = False, **options: Any) -> Completion | Stream:
        """Replace the last reply with a new one. The old one stays if the new one fails."""
        self._acquire()
        try:
            reply = self._another_reply(options, self.model._submit)
        except BaseException:
            self._release()
            raise
        if stream:
            return reply
        with reply:
            return reply.result()

    def astream(self, content: Said, *, prefill: str | None = None, **options: Any) -> AsyncStream:
        """:meth:`stream` for an event loop: ``async for piece in chat.astream("Hello!"): ...``.

        It waits for its turn without holding up the loop. Asked for by the task that already has a reply of this chat
        open, it raises BusyError.
        """
        from lfmfast import aio

        return aio.say(self, content, prefill, options)

    async def asend(self, content: Said, **options: Any) -> Completion:
        """:meth:`send` for an event loop."""
        async with self.astream(content, **options) as stream:
            return await stream.result()

    def run_tools(self, content: Said, functions: Functions, *, max_rounds: int = 8,
                  on_call: OnCall | None = None, **options: Any) -> Completion:  # fmt: skip
        """Say something, call the Python functions that the model wants called, and get its last reply.

        All of it is in the history: the calls, and what they gave, text as it is and anything else as JSON. What goes wrong in
        a call is told to the model, an exception of the function too. What was not completed, because of Ctrl-C or an error,
        is answered by a message that says so. Nothing else should be said in this chat meanwhile.

        Parameters
        ----------
        content : str, list of content parts, message, or None
            As for :meth:`stream`.
        functions : list, or dict by name
            Functions with type hints, of which :func:`lfmfast.functions.tool_of` makes the chat's :attr:`tools`. Each gets
            values of the types that it asks for.
        max_rounds : int
            How many replies in a row may have calls. The calls of one are made in their order.
        on_call : callable, optional
            Gets each call (:class:`lfmfast.tool_calls.ToolCall`) before it is made. What it returns, if not None, is the
            result, and the function isn't called.
        **options
            As for :meth:`stream`. A `tool_choice` that asks for a call counts for the first reply only.

        Returns
        -------
        Completion
            The first reply without calls, or one that was cut.

        Raises
        ------
        ToolRoundsError
            The model still wants calls after `max_rounds`. It has that reply.
        ParameterError
            Of a function no tool can be made, or it is async.

        Examples
        --------
        >>> def add(a: float, b: float) -> float:
        ...     "Add two numbers."
        ...     return a + b
        >>> model.chat().run_tools("What is 3 plus 4?", [add], temperature=0).text
        '3 plus 4 is 7.'
        """
        return run_tools.run_tools(self, content, functions, max_rounds, on_call, options)

    async def arun_tools(self, content: Said, functions: Functions, *, max_rounds: int = 8,
                         on_call: OnCall | None = None, **options: Any) -> Completion:  # fmt: skip
        """:meth:`run_tools` for an event loop: the calls of a reply are made side by side, functions that are not async in
        threads. `on_call` may be async too."""
        return await run_tools.arun_tools(self, content, functions, max_rounds, on_call, options)

    @staticmethod
    def _said(content: Said) -> list[dict[str, Any]]:
        if content is None:
            return []
        return [copy.deepcopy(dict(content) if isinstance(content, Mapping) else {"role": "user", "content": content})]

    def _another_reply(self, options: dict[str, Any], submit: Callable[..., S]) -> S:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            raise TemplateError("there is no reply to regenerate: the last message is not the assistant's")
        self._n_known = 0
        return self._reply(self._messages[:-1], options.pop("prefill", None), options, submit)

    def _reply(self, messages: list[dict[str, Any]], prefill: str | None, options: dict[str, Any],
               submit: Callable[..., S]) -> S:  # fmt: skip
        blocks, n_known = list(self._blocks), self._n_known
        asked = messages if prefill is None else [*messages, {"role": "assistant", "content": prefill}]
        try:
            with_tools = options.get("tool_choice") != "none"
            if not with_tools and self.tools:
                self._n_known = 0  # another head
            opening = self._advance(asked, continue_final_message=prefill is not None, with_tools=with_tools)
            ids = self._ids()
        except BaseException:
            self._blocks, self._n_known = blocks, n_known
            raise

        def on_end(answer: Answer) -> None:
            try:
                if answer.finish_reason is None or (answer.finish_reason == "cancelled" and not answer.tokens):
                    self._blocks, self._n_known = blocks, n_known
                    return
                self._timings = answer.timings
                self._add_answer(answer.tokens)
                self._messages = [*messages, self._message(answer, opening, prefill or "")]
                if not with_tools and self.tools:
                    self._n_known = 0
                self._advance(self._messages, add_generation_prompt=False)
            finally:
                self._release()

        try:
            return submit(Asked(ids, on_end, self.tools, True), **options)
        except BaseException:
            self._blocks, self._n_known = blocks, n_known
            raise

    def _message(self, answer: Answer, opening: str, prefill: str) -> dict[str, Any]:
        """The reply as a message of the history. How it was written is remembered."""
        raw = opening + prefill + answer.raw
        if answer.reader is None:
            return {"role": "assistant", "content": raw}
        content, begun = read_reply(prefill, thoughts=answer.reader.thoughts, calls=False)
        message = assistant_message(content + answer.text, begun.reasoning + answer.reader.reasoning, answer.reader.calls)
        self.model._replies.remember_raw(message, raw)
        return message

    # --- rendering and tokens ---

    def _advance(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True,
                 continue_final_message: bool = False, with_tools: bool = True) -> str:  # fmt: skip
        """Make the blocks those of `messages`, keeping the ids of what is rendered as before.

        Returns what the template puts at the beginning of the reply itself (``<think>`` with some models).
        """
        template = self.model.template
        n_known = min(self._n_known, len(messages))
        extension = template.extend(self.model._as_written(messages), n_known, tools=self.tools if with_tools else None,
                                    continue_final_message=continue_final_message,
                                    add_generation_prompt=add_generation_prompt and not continue_final_message,
                                    **self._options)  # fmt: skip
        keep = extension.n_blocks_kept
        old = [chunk for block in self._blocks[keep:] for chunk in block]
        before = [chunk for block in self._blocks[max(0, keep - 2) : keep] for chunk in block]
        segments = [segment for block in extension.blocks for segment in block]
        chunks = iter(self.model._replies.encode(segments, before, known=old))
        fresh = [list(islice(chunks, len(block))) for block in extension.blocks]
        self._blocks = [*self._blocks[:keep], *fresh]
        # With a generation prompt or an open end the last block is not a finished message.
        self._n_known = len(messages) - (1 if continue_final_message else 0)
        if not add_generation_prompt or continue_final_message or not fresh:
            return ""
        return opened_thought(fresh[-1])

    def _add_answer(self, tokens: Sequence[int]) -> None:
        """Put generated tokens behind the opening of the reply, which is the last block."""
        replies = self.model._replies
        opening = self._blocks.pop() if self._blocks else []
        before = [chunk for block in self._blocks[-2:] for chunk in block]
        self._blocks.append(replies.answer(opening, tokens))
        n_whole = len(opening) - 1 if opening and not opening[-1].special else len(opening)
        replies.remember([*before, *self._blocks[-1]], len(before) + n_whole)

    def _ids(self) -> list[int]:
        return [token for block in self._blocks for chunk in block for token in chunk.ids]

    # --- one at a time ---

    def _acquire(self) -> None:
        if self._owner == threading.get_ident():
            raise BusyError("a reply of this chat is still being streamed; read it to its end or close() it first")
        self._lock.acquire()
        self._owner = threading.get_ident()

    def _acquire_now(self, when_free: Callable[[], bool]) -> bool:
        """Without waiting. False: `when_free` will be called, by some thread, when it is worth another try; False from it
        means that nobody tries any more."""
        self._waiting.append(when_free)  # first, so that no release between is missed
        if not self._lock.acquire(blocking=False):
            return False
        with suppress(ValueError):
            self._waiting.remove(when_free)
        self._owner = threading.get_ident()
        return True

    def _release(self) -> None:
        if self._owner is not None:
            self._owner = self._request = None
            self._lock.release()
            self._wake_next()

    def _wake_next(self) -> None:
        with suppress(IndexError):
            while not self._waiting.popleft()():
                pass

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        self._acquire()
        try:
            yield
        finally:
            self._release()

    def __repr__(self) -> str:
        return f"<lfmfast.Chat of {len(self._messages)} messages on {self.model!r}>"
