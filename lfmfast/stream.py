"""Stream: the iterator that `stream()` gives."""

from __future__ import annotations

import codecs
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lfmfast.errors import ForkError
from lfmfast.reply import CONTENT, Part, ReplyReader, TextDivider
from lfmfast.tool_calls import ToolCall
from lfmfast.types import Completion, FinishReason, Piece, Timings, TokenLogprob, Usage

if TYPE_CHECKING:
    from lfmfast._engine import Stream as NativeStream

__all__ = ["Answer", "Stream", "StreamFacts"]


class Answer:
    """What came of an answer so far, and the way from the engine's items to pieces: the same for all kinds of streams.

    `on_end` is called once: with the last piece, or when it is known that none will come (`end` is None then).
    """

    def __init__(self, on_end: Callable[[Answer], None] | None = None) -> None:
        self.texts: list[str] = []
        self.raws: list[str] = self.texts  # with markers, thoughts and calls, once there is a reader
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.end: Piece | None = None
        self.stop_string: str | None = None
        self.on_end = on_end
        self._ending = threading.Lock()
        self.reader: ReplyReader | None = None  # None: everything is text
        self.divider: TextDivider | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._kind = CONTENT  # of the last piece

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def raw(self) -> str:
        return "".join(self.raws)

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.end is None else self.end.finish_reason

    @property
    def timings(self) -> Timings | None:
        return None if self.end is None else self.end.timings

    def take(self, native: NativeStream, items: Sequence[Any]) -> list[Piece]:
        """The pieces that `items` are, which `native` just gave; the last one too, if that was the end."""
        pieces = []
        for data, tokens, logprobs, kind, _ in items:
            values = None
            if logprobs is not None:
                values = tuple(TokenLogprob(t, lp, top) for t, (lp, top) in zip(tokens, logprobs, strict=True))
                self.logprobs = self.logprobs or []
                self.logprobs += values
            self.tokens.extend(tokens)
            if self.reader is None:
                text = self._decoder.decode(data)
                self.texts.append(text)
                pieces.append(Piece(text, tokens, values))
            else:
                ended = None if kind == self._kind else self._turn_to(kind)
                part = self._read(kind, self._decoder.decode(data))
                part = part if ended is None else _joined([ended, part])
                pieces.append(Piece(part.text, tokens, values, reasoning=part.reasoning, tool_calls=part.calls))
        if native.done:
            self.end = self._last_piece(native, pieces.pop() if pieces else Piece(""))
            pieces.append(self.end)
            self.finish()
        return pieces

    def read_with(self, reader: ReplyReader | None, divider: TextDivider | None) -> None:
        """Divide what comes into content, thoughts and calls."""
        self.reader, self.divider = reader, divider
        if reader is not None:
            self.raws = []

    def _turn_to(self, kind: int) -> Part:
        """The end of what came so far, which may be half a character."""
        before, self._kind = self._kind, kind
        return self._read(before, self._decoder.decode(b"", final=True))

    def _read(self, kind: int, text: str, *, last: bool = False) -> Part:
        reader = self.reader
        assert reader is not None
        self.raws.append(text)
        if self.divider is None or kind != CONTENT:
            parts = [reader.take(kind, text)] if text else []
        else:
            parts = [reader.take(kind, text) for kind, text in self.divider.feed(text, last=last)]
        parts += [reader.end()] if last else []
        part = parts[0] if len(parts) == 1 else _joined(parts)
        self.texts.append(part.text)
        return part

    def _last_piece(self, native: NativeStream, piece: Piece) -> Piece:
        t = native.timings
        if self.reader is not None:
            part = _joined([self._turn_to(CONTENT), self._read(CONTENT, "", last=True)])
            piece = Piece(piece.text + part.text, piece.tokens, piece.logprobs, reasoning=piece.reasoning + part.reasoning,
                          tool_calls=piece.tool_calls + part.calls)
        elif tail := self._decoder.decode(b"", final=True):
            self.texts.append(tail)
            piece = Piece(piece.text + tail, piece.tokens, piece.logprobs)
        usage = Usage(t["n_prompt"], t["n_predicted"], t["n_cached"])
        timings = Timings(t["n_prompt"], t["n_cached"], t["prompt_us"] / 1e3, t["n_predicted"], t["predict_us"] / 1e3,
                          t["wait_us"] / 1e3, t["decode_us"] / 1e3, t["sample_us"] / 1e3, t["text_us"] / 1e3,
                          t["emit_us"] / 1e3)
        reason: FinishReason = native.finish_reason  # type: ignore[assignment]
        self.stop_string = native.stop_string
        if reason == "stop" and self.reader is not None and self.reader.calls:
            reason = "tool_calls"
        return Piece(piece.text, piece.tokens, piece.logprobs, reason, usage, timings, piece.reasoning, piece.tool_calls)

    def end_unbegun(self) -> Piece:
        """The last piece of a request that was cancelled before the engine had it."""
        self.end = Piece("", (), None, "cancelled", Usage(0, 0, 0), Timings(0, 0, 0.0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
        return self.end

    def finish(self) -> None:
        with self._ending:
            on_end, self.on_end = self.on_end, None
        if on_end is not None:
            on_end(self)

    def completion(self) -> Completion:
        end = self.end
        if end is None:
            raise RuntimeError("the stream was closed before its end")
        assert end.finish_reason and end.usage and end.timings
        reader = self.reader or ReplyReader()
        return Completion(self.text, tuple(self.tokens), end.finish_reason, end.usage, end.timings,
                          None if self.logprobs is None else tuple(self.logprobs), reader.reasoning, tuple(reader.calls),
                          tuple(reader.unread), self.raw)


def _joined(parts: Sequence[Part]) -> Part:
    return Part("".join(part.text for part in parts), "".join(part.reasoning for part in parts),
                tuple(call for part in parts for call in part.calls))  # fmt: skip


class StreamFacts:
    """What a stream can tell of its answer so far."""

    _answer: Answer

    @property
    def text(self) -> str:
        """The text received so far, without thoughts and calls."""
        return self._answer.text

    @property
    def raw(self) -> str:
        """All that was received so far, with thoughts, calls and the markers around them."""
        return self._answer.raw

    @property
    def reasoning(self) -> str:
        """The thoughts received so far."""
        return "" if self._answer.reader is None else self._answer.reader.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls received so far, of those that are complete."""
        return () if self._answer.reader is None else tuple(self._answer.reader.calls)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens received so far, without the end token."""
        return tuple(self._answer.tokens)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._answer.stop_string

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._answer.finish_reason

    @property
    def usage(self) -> Usage | None:
        return None if self._answer.end is None else self._answer.end.usage

    @property
    def timings(self) -> Timings | None:
        return self._answer.timings


class Stream(StreamFacts, Iterator[Piece]):
    """The pieces of one answer, as they come.

    The work has begun when you get the object. Leaving early (``break``, :meth:`close`, dropping it) cancels the work and
    waits until the model is free again. Ctrl-C does too and raises KeyboardInterrupt.
    """

    def __init__(self, native: NativeStream, answer: Answer) -> None:
        self._native = native
        self._pid = os.getpid()
        self._answer = answer
        self._pieces: list[Piece] = []  # ready, in reverse order
        self._closed = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        if os.getpid() != self._pid:  # also while pieces are left that came before the fork
            raise ForkError(f"this stream belongs to process {self._pid} and can't be read in process {os.getpid()}")
        while not self._pieces:
            if self._closed or self._answer.end is not None:
                raise StopIteration
            self._receive()
        return self._pieces.pop()

    def _receive(self) -> None:
        try:
            items = self._native.wait()
        except KeyboardInterrupt:
            self.close()
            raise
        except BaseException:
            self._closed = True
            self._answer.finish()
            raise
        self._pieces = self._answer.take(self._native, items)
        self._pieces.reverse()

    def result(self) -> Completion:
        """Read to the end and give the whole answer, pieces that were already read included."""
        for _ in self:
            pass
        return self._answer.completion()

    def cancel(self) -> None:
        """Ask the engine to stop, from any thread; the stream then ends with finish reason "cancelled"."""
        self._native.cancel()

    def close(self) -> None:
        """Stop the work, wait until it has stopped (at most one step of the model), and drop the rest."""
        if self._closed:
            return
        self._closed = True
        try:
            if not self._native.done:
                self._native.cancel()
                while not self._native.done:
                    self._answer.take(self._native, self._native.wait())
        finally:
            self._pieces.clear()
            self._answer.finish()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            try:
                self.close()
            except Exception:  # in a forked child, or of a closed model: there is nothing left to stop
                self._answer.finish()
