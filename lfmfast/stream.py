"""Stream: the iterator that `stream()` gives."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from lfmfast.errors import ForkError
from lfmfast.types import Completion, FinishReason, Piece, Timings, TokenLogprob, Usage

if TYPE_CHECKING:
    from lfmfast._engine import Stream as NativeStream

__all__ = ["Stream"]


class Stream(Iterator[Piece]):
    """The pieces of one answer, as they come.

    The work has begun when you get the object. Leaving early (``break``, :meth:`close`, dropping it) cancels the work and
    waits until the model is free again. Ctrl-C does too and raises KeyboardInterrupt.
    """

    def __init__(self, native: NativeStream, on_end: Callable[[Stream], None] | None = None) -> None:
        self._native = native
        self._pid = os.getpid()
        self._on_end = on_end
        self._pieces: list[Piece] = []  # ready, in reverse order
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] | None = None
        self._end: Piece | None = None
        self._closed = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Piece:
        if os.getpid() != self._pid:  # also while pieces are left that came before the fork
            raise ForkError(f"this stream belongs to process {self._pid} and can't be read in process {os.getpid()}")
        while not self._pieces:
            if self._closed or self._end is not None:
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
            self._finish()
            raise
        done = self._native.done
        pieces = []
        for data, tokens, logprobs, _ in items:
            values = None
            if logprobs is not None:
                values = tuple(TokenLogprob(t, lp, top) for t, (lp, top) in zip(tokens, logprobs, strict=True))
                self._logprobs = [*(self._logprobs or ()), *values]
            text = self._decoder.decode(data)
            self._texts.append(text)
            self._tokens.extend(tokens)
            pieces.append(Piece(text, tokens, values))
        if done:
            self._end = self._last_piece(pieces.pop() if pieces else Piece(""))
            pieces.append(self._end)
            self._finish()
        pieces.reverse()
        self._pieces = pieces

    def _last_piece(self, piece: Piece) -> Piece:
        t = self._native.timings
        tail = self._decoder.decode(b"", final=True)
        if tail:
            self._texts.append(tail)
        usage = Usage(t["n_prompt"], t["n_predicted"], t["n_cached"])
        timings = Timings(t["n_prompt"], t["n_cached"], t["prompt_us"] / 1e3, t["n_predicted"], t["predict_us"] / 1e3,
                          t["wait_us"] / 1e3, t["decode_us"] / 1e3, t["sample_us"] / 1e3, t["text_us"] / 1e3,
                          t["emit_us"] / 1e3)
        reason: FinishReason = self._native.finish_reason  # type: ignore[assignment]
        return Piece(piece.text + tail, piece.tokens, piece.logprobs, reason, usage, timings)

    def _finish(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self)

    # --- what came so far ---

    @property
    def text(self) -> str:
        """The text received so far."""
        return "".join(self._texts)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens received so far, without the end token."""
        return tuple(self._tokens)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._native.stop_string if self._end is not None else None

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self._end is None else self._end.finish_reason

    @property
    def usage(self) -> Usage | None:
        return None if self._end is None else self._end.usage

    @property
    def timings(self) -> Timings | None:
        return None if self._end is None else self._end.timings

    def result(self) -> Completion:
        """Read to the end and give the whole answer, pieces that were already read included."""
        for _ in self:
            pass
        if self._end is None:
            raise RuntimeError("the stream was closed before its end")
        assert self._end.finish_reason and self._end.usage and self._end.timings
        return Completion(self.text, self.tokens, self._end.finish_reason, self._end.usage, self._end.timings,
                          None if self._logprobs is None else tuple(self._logprobs))

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
                    for data, tokens, _, _ in self._native.wait():
                        self._texts.append(self._decoder.decode(data))
                        self._tokens.extend(tokens)
                self._end = self._last_piece(Piece(""))
        finally:
            self._pieces.clear()
            self._finish()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            try:
                self.close()
            except Exception:  # in a forked child, or of a closed model: there is nothing left to stop
                self._finish()
