"""Chat: a conversation with a model, of which only what is new is formatted, tokenised and read."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, overload

from lfmfast import templates
from lfmfast.errors import BusyError, ParameterError, TemplateError
from lfmfast.stream import Answer, Stream
from lfmfast.types import Completion, Timings

if TYPE_CHECKING:
    from lfmfast._dispatch import Request
    from lfmfast.aio import AsyncStream
    from lfmfast.model import Message, Model

__all__ = ["Chat"]

S = TypeVar("S")


class _Chunk(NamedTuple):
    # A segment of the rendered conversation with the token ids it was read or generated as. A generated answer may be
    # split into tokens otherwise than the tokenizer would: its own ids stay.
    text: str
    special: bool
    ids: tuple[int, ...]


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
        self.tools = tools
        self._options = template_options
        self._messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._messages += [dict(copy.deepcopy(message)) for message in messages]
        self._blocks: list[list[_Chunk]] = []  # of the first _n_known messages; block 0 is the head
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
    def timings(self) -> Timings | None:
        """Of the last reply."""
        return self._timings

    @property
    def n_tokens(self) -> int:
        """Tokens of the history as it is read, without the next reply's opening."""
        with self._exclusive():
            self._advance(self._messages, add_generation_prompt=False)
            return len(self._ids())

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

    @property
    def _n_system(self) -> int:
        return 1 if self._messages and self._messages[0].get("role") == "system" else 0

    def _set_messages(self, messages: list[dict[str, Any]]) -> None:
        self._messages = messages
        self._n_known = 0  # the chunks stay: what is rendered the same keeps its ids

    # --- replies ---

    def stream(self, content: str | Sequence[Any] | Message, *, prefill: str | None = None, **options: Any) -> Stream:
        """Say something and get the reply piece by piece.

        When the reply ends, message and reply are in the history. A reply that was left early or cut by `max_tokens` is
        kept as far as it came; if nothing came, or on an error, the history is as before.

        Parameters
        ----------
        content : str, list of content parts, or message
            A user message's content, or a whole message: ``{"role": "tool", "content": ...}``.
        prefill : str, optional
            The beginning of the reply, which the model goes on with. It is not part of the reply's text.
        **options
            As for :meth:`Model.stream`: `max_tokens`, `stop`, `sampling`, `logprobs`, `temperature`, ...
        """
        said = self._said(content)
        self._acquire()
        try:
            return self._reply([*self._messages, said], prefill, options, self.model._submit)
        except BaseException:
            self._release()
            raise

    def send(self, content: str | Sequence[Any] | Message, **options: Any) -> Completion:
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

    def astream(self, content: str | Sequence[Any] | Message, *, prefill: str | None = None, **options: Any) -> AsyncStream:
        """:meth:`stream` for an event loop: ``async for piece in chat.astream("Hello!"): ...``.

        It waits for its turn without holding up the loop. Asked for by the task that already has a reply of this chat
        open, it raises BusyError.
        """
        from lfmfast import aio

        return aio.say(self, content, prefill, options)

    async def asend(self, content: str | Sequence[Any] | Message, **options: Any) -> Completion:
        """:meth:`send` for an event loop."""
        async with self.astream(content, **options) as stream:
            return await stream.result()

    @staticmethod
    def _said(content: str | Sequence[Any] | Message) -> dict[str, Any]:
        return copy.deepcopy(dict(content) if isinstance(content, Mapping) else {"role": "user", "content": content})

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
            opening = self._advance(asked, continue_final_message=prefill is not None)
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
                self._blocks.append(self._answer_chunks(self._blocks.pop() if self._blocks else [], answer.tokens))
                text = (opening if prefill is None else prefill) + answer.text
                self._messages = [*messages, {"role": "assistant", "content": text}]
                self._advance(self._messages, add_generation_prompt=False)
            finally:
                self._release()

        try:
            return submit(ids, on_end=on_end, **options)
        except BaseException:
            self._blocks, self._n_known = blocks, n_known
            raise

    # --- rendering and tokens ---

    def _advance(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True,
                 continue_final_message: bool = False) -> str:  # fmt: skip
        """Make the blocks those of `messages`, keeping the ids of what is rendered as before.

        Returns what the template puts at the beginning of the reply itself (``<think>`` with some models).
        """
        template = self.model.template
        n_known = min(self._n_known, len(messages))
        extension = template.extend(messages, n_known, tools=self.tools, continue_final_message=continue_final_message,
                                    add_generation_prompt=add_generation_prompt and not continue_final_message,
                                    **self._options)  # fmt: skip
        keep = extension.n_blocks_kept
        old = [chunk for block in self._blocks[keep:] for chunk in block]
        fresh: list[list[_Chunk]] = []
        position, same = 0, True
        for block in extension.blocks:
            chunks = []
            for segment in block:
                same = same and position < len(old) and old[position][:2] == (segment.text, segment.special)
                ids = old[position].ids if same else tuple(templates.encode([segment], self.model.native))
                chunks.append(_Chunk(segment.text, segment.special, ids))
                position += 1
            fresh.append(chunks)
        self._blocks = [*self._blocks[:keep], *fresh]
        # With a generation prompt or an open end the last block is not a finished message.
        self._n_known = len(messages) - (1 if continue_final_message else 0)
        if not add_generation_prompt or continue_final_message or not fresh:
            return ""
        return "<think>" if "".join(chunk.text for chunk in fresh[-1]).endswith("<think>") else ""

    def _answer_chunks(self, opening: list[_Chunk], tokens: Sequence[int]) -> list[_Chunk]:
        """The opening of a reply, followed by the tokens that were generated."""
        native = self.model.native
        chunks = list(opening)
        run: list[int] = []

        def end_run() -> None:
            if run:
                text = native.detokenize(run, special=False)
                if chunks and not chunks[-1].special:
                    last = chunks.pop()
                    chunks.append(_Chunk(last.text + text, False, (*last.ids, *run)))
                else:
                    chunks.append(_Chunk(text, False, tuple(run)))
                run.clear()

        for token in tokens:
            if native.is_control(token):
                end_run()
                chunks.append(_Chunk(native.detokenize([token], special=True), True, (token,)))
            else:
                run.append(token)
        end_run()
        return chunks

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
