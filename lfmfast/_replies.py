"""Replies as the tokens that they were generated as, also where a client sends them back as text.

A generated text may be split into tokens otherwise than the tokenizer would split it. Read anew from its text, such a
reply has other ids, and the conversation would have to be read again from there on.
"""

from __future__ import annotations

import json
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from lfmfast import templates
from lfmfast.errors import ClosedError
from lfmfast.messages import assistant_message, parse_arguments
from lfmfast.reply import MARKERS, ReplyReader

__all__ = ["Chunk", "ReplyMemory", "opened_thought"]

K = TypeVar("K", bound=tuple[str, ...])
V = TypeVar("V")
#: Segments that a key looks back to: with them it has the role, which is in the text itself or before a control token.
N_BEFORE = 2


class Chunk(NamedTuple):
    """A segment of a rendered conversation with the token ids that it was read or generated as."""

    text: str
    special: bool
    ids: tuple[int, ...]


class Vocabulary(templates.Vocabulary, Protocol):
    """What is needed of a model: `lfmfast._model.Model` has it."""

    def detokenize(self, tokens: Iterable[int], *, special: bool = False) -> str: ...
    def is_control(self, token: int) -> bool: ...


class Reply(Protocol):
    """A stream that has ended."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def text(self) -> str: ...
    @property
    def raw(self) -> str: ...
    @property
    def reader(self) -> ReplyReader | None: ...


def opened_thought(prompt: Sequence[Chunk]) -> str:
    """What the template put at the beginning of the reply itself: ``<think>`` with some models."""
    return MARKERS.thought_open if "".join(chunk.text for chunk in prompt[-N_BEFORE:]).endswith(MARKERS.thought_open) else ""


def _parts(message: Mapping[str, Any]) -> tuple[str, str, str]:
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    texts = [[call["name"], parse_arguments(call.get("arguments"))] for call in calls]
    content = message.get("content") or ""
    if not isinstance(content, str):
        raise TypeError("content in parts is no reply of a model")
    return content, message.get("reasoning_content") or "", json.dumps(texts)


class ReplyMemory:
    """Remembers the ids of replies whose text the tokenizer splits otherwise; the oldest are forgotten over the limits.

    Parameters
    ----------
    vocabulary : Vocabulary
    max_entries, max_bytes : int
        Limits. Bytes are those of texts and ids.
    """

    def __init__(self, vocabulary: Vocabulary, max_entries: int = 4096, max_bytes: int = 4 << 20) -> None:
        self._vocabulary = vocabulary
        self._ids: _Bounded[tuple[str, str], array[int]] = _Bounded(max_entries, max_bytes)
        self._raws: _Bounded[tuple[str, str, str], str] = _Bounded(max_entries, max_bytes)

    def __len__(self) -> int:
        return len(self._ids)

    def encode(self, segments: Iterable[templates.Segment], before: Sequence[Chunk] = (), *, remembered: bool = True,
               known: Sequence[Chunk] = ()) -> list[Chunk]:  # fmt: skip
        """Segments with their ids.

        Parameters
        ----------
        segments : iterable of Segment
        before : sequence of Chunk
            What comes before them.
        remembered : bool
            Use what is remembered.
        known : sequence of Chunk
            What they were before: ids stay up to the first segment that is another one.
        """
        chunks = list(before[-N_BEFORE:])
        n_before, same = len(chunks), True
        for i, segment in enumerate(segments):
            same = same and i < len(known) and known[i][:2] == segment
            if same:
                chunks.append(known[i])
                continue
            found = None if segment.special or not remembered else self._find(chunks, segment.text)
            ids = templates.encode([segment], self._vocabulary) if found is None else found
            chunks.append(Chunk(*segment, tuple(ids)))
        return chunks[n_before:]

    def answer(self, opening: Sequence[Chunk], tokens: Iterable[int]) -> list[Chunk]:
        """The opening of a reply, followed by the tokens that were generated."""
        chunks = list(opening)
        run: list[int] = []

        def end_run() -> None:
            if run:
                last = chunks.pop() if chunks and not chunks[-1].special else Chunk("", False, ())
                # Not the run by itself: SentencePiece vocabularies drop the space in front of a text.
                text = self._vocabulary.detokenize([*last.ids, *run])[len(self._vocabulary.detokenize(last.ids)) :]
                chunks.append(Chunk(last.text + text, False, (*last.ids, *run)))
                run.clear()

        for token in tokens:
            if self._vocabulary.is_control(token):
                end_run()
                chunks.append(Chunk(self._vocabulary.detokenize([token], special=True), True, (token,)))
            else:
                run.append(token)
        end_run()
        return chunks

    def remember(self, chunks: Sequence[Chunk], first: int) -> None:
        """Remember a reply: its chunks from the number `first` on; those before tell where it stands."""
        for i in range(first, len(chunks)):
            text, special, ids = chunks[i]
            if not special:
                key = self._key(chunks[:i], text)
                self._ids.put(key, None if self._vocabulary.tokenize(text, parse_special=False) == [*ids] else array("i", ids))

    def remember_raw(self, message: Mapping[str, Any], raw: str) -> None:
        """Remember how a reply was written that `message` is the parts of."""
        if message.get("reasoning_content") or message.get("tool_calls"):
            content, reasoning, calls = _parts(message)
            self._raws.put((content, reasoning, calls), raw)
            # Clients drop thoughts more often than not.
            self._raws.put((content, "", calls), raw.rpartition(MARKERS.thought_close)[2].strip())

    def as_written(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Messages, with replies of the model that come back in parts as the model wrote them."""
        if not self._raws:
            return messages
        return [self._whole(message) if isinstance(message, Mapping) else message for message in messages]

    def _whole(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        if message.get("role") != "assistant" or not (message.get("tool_calls") or message.get("reasoning_content")):
            return message
        try:
            parts = _parts(message)
        except (TypeError, ValueError, KeyError, AttributeError):  # the template says what is wrong with it
            return message
        raw = self._raws.get(parts)
        return message if raw is None else {"role": "assistant", "content": raw}

    def watcher(self, prompt: Sequence[Chunk]) -> Callable[[Reply], None]:
        """What remembers the reply to a prompt when its stream ends. Only the end of `prompt` is kept until then."""
        tail = list(prompt[-N_BEFORE - 1 :])

        def on_end(reply: Reply) -> None:
            if reply.tokens:
                reader = reply.reader
                if reader is not None and (reader.reasoning or reader.calls):
                    message = assistant_message(reply.text, reader.reasoning, reader.calls)
                    self.remember_raw(message, opened_thought(tail) + reply.raw)
                try:
                    self.remember(self.answer(tail, reply.tokens), len(tail) - (not tail[-1].special) if tail else 0)
                except ClosedError:  # the model was closed while it answered
                    return

        return on_end

    @staticmethod
    def _key(before: Sequence[Chunk], text: str) -> tuple[str, str]:
        return "".join([chunk.text for chunk in before[-N_BEFORE:]]), text

    def _find(self, before: Sequence[Chunk], text: str) -> array[int] | None:
        return self._ids.get(self._key(before, text)) if self._ids else None


class _Bounded(Generic[K, V]):
    """A dict that forgets the entries that were not used for longest. Safe to use from several threads."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self.n_bytes = 0
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> V | None:
        with self._lock:
            value = self._entries.get(key)
            if value is not None:
                self._entries.move_to_end(key)
            return value

    def put(self, key: K, value: V | None) -> None:
        """None takes the entry out."""
        with self._lock:
            old = self._entries.pop(key, None)
            if old is not None:
                self.n_bytes -= self._size(key, old)
            # One that takes much of the room would push the others out.
            if value is None or self._size(key, value) > self._max_bytes // 4:
                return
            self._entries[key] = value
            self.n_bytes += self._size(key, value)
            while len(self._entries) > self._max_entries or self.n_bytes > self._max_bytes:
                self.n_bytes -= self._size(*self._entries.popitem(last=False))

    @staticmethod
    def _size(key: K, value: V) -> int:
        return sum(map(sys.getsizeof, key)) + sys.getsizeof(value)
