"""What a reply is made of: thoughts, content and tool calls.

The engine divides a reply by the ids of the model's own markers (:class:`ReplyReader` takes its pieces); where there is only
text, or the model has no such tokens, it is divided by their texts (:class:`TextDivider`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lfmfast.tool_calls import CallDelta, CallParser, ToolCall

__all__ = ["CALL", "CONTENT", "MARKER", "THOUGHT", "Markers", "Part", "ReplyReader", "TextDivider", "read_reply"]

#: What a piece belongs to, in the order of lfmfast::channel (engine/guide.h).
CONTENT, THOUGHT, CALL, MARKER = range(4)


class Markers(NamedTuple):
    """The texts that divide a reply."""

    thought_open: str = "<think>"
    thought_close: str = "</think>"
    call_open: str = "<|tool_call_start|>"
    call_close: str = "<|tool_call_end|>"


MARKERS = Markers()


class Part(NamedTuple):
    """What a piece of a reply comes to."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()


class ReplyReader:
    """From the pieces of a reply to its content, thoughts and calls, as they come.

    Whitespace around thoughts and in front of what follows them is no part of either, nor is whitespace that stands alone
    beside calls. A call that can't be read becomes content, and is listed in `unread`.

    Parameters
    ----------
    thoughts : bool
        Thoughts are told apart; else they stay in the content, with their markers.
    calls : bool
        Calls are.
    tools : sequence, optional
        Tools whose schemas say what the arguments are.
    in_thought : bool
        The prompt ended inside a thought.
    early : bool
        A call's arguments are given one by one. Only a call that is held to a grammar is sure to become a whole one then; other
        calls come when they are read to their end.
    """

    def __init__(self, *, thoughts: bool = True, calls: bool = True, tools: Sequence[Any] | None = None,
                 in_thought: bool = False, early: bool = False) -> None:  # fmt: skip
        self.reasoning = ""
        self.calls: list[ToolCall] = []
        self.unread: list[str] = []
        self.thoughts = thoughts
        self._reads_calls = calls
        self._tools = tools
        self._early = early
        self._in_thought = in_thought
        self._parser: CallParser | None = None
        self._blank = ""  # whitespace that nothing visible has followed yet
        self._is_open = False  # there was something visible since the last marker
        self._has_content = False
        self._drops_blank = False  # whitespace after the last marker is no part of what follows
        self._is_divided = False

    def take(self, kind: int, text: str) -> Part:
        """The next piece; a marker is one by itself."""
        if kind == CONTENT:
            return Part(self._content(text))
        if kind == THOUGHT:
            return Part("", self._thought(text)) if self.thoughts else Part(self._content(text))
        if kind == CALL:
            return Part("", "", tuple(self._parser.feed(text))) if self._parser is not None else Part(self._content(text))
        if text in MARKERS[:2]:
            if not self.thoughts:
                return Part(self._content(text))
            self._in_thought = text == MARKERS.thought_open
            self._turn(drops_blank=True)
            return Part()
        if not self._reads_calls:
            return Part(self._content(text))
        self._turn(drops_blank=not self._has_content)
        if text == MARKERS.call_open:
            self._parser = CallParser(self._tools, len(self.calls), early=self._early)
            return Part()
        return self._end_call(cut=False)

    def end(self) -> Part:
        """What was held back, when nothing more comes."""
        if self._parser is not None:
            return self._end_call(cut=True)
        blank, self._blank = self._blank, ""
        return Part() if self._is_divided or self._in_thought else Part(blank)

    def _turn(self, drops_blank: bool) -> None:
        self._blank, self._is_open, self._drops_blank, self._is_divided = "", False, drops_blank, True

    def _content(self, text: str) -> str:
        if not self._is_open:
            visible = text.lstrip()
            self._blank += text[: len(text) - len(visible)]
            if not visible:
                return ""
            text = visible if self._drops_blank else self._blank + visible
            self._blank, self._is_open, self._has_content = "", True, True
        return text

    def _thought(self, text: str) -> str:
        if not self._is_open:
            text = text.lstrip()
            if not text:
                return ""
            self._blank, self._is_open = "\n" if self.reasoning else "", True  # a second thought is a line of its own
        self._blank += text
        visible = self._blank.rstrip()
        if not visible:
            return ""
        self._blank = self._blank[len(self._blank.rstrip()) :]
        self.reasoning += visible
        return visible

    def _end_call(self, cut: bool) -> Part:
        parser, self._parser = self._parser, None
        if parser is None:
            return Part()
        deltas = tuple(parser.close(cut))
        self.calls += parser.calls
        self.unread += parser.unread
        return Part("".join(self._content(text) for text in parser.unread), "", deltas)


class TextDivider:
    """Text that comes in pieces, divided by the texts of the markers.

    Parameters
    ----------
    thoughts, calls : bool
        Which markers count.
    in_thought : bool
        It begins inside a thought.
    """

    def __init__(self, *, thoughts: bool = True, calls: bool = True, in_thought: bool = False) -> None:
        self._thoughts = thoughts
        self._calls = calls
        self._kind = THOUGHT if in_thought else CONTENT
        self._held = ""
        self._is_blank = True

    def feed(self, text: str, *, last: bool = False) -> Iterator[tuple[int, str]]:
        """Kinds and texts; a tail that may become a marker is held back, unless it is the last text."""
        text, self._held = self._held + text, ""
        while text:
            wanted = self._wanted()
            at, marker = min(((i, m) for m in wanted if (i := text.find(m)) >= 0), default=(-1, ""))
            if at < 0:
                keep = 0 if last else max((n for m in wanted for n in range(1, len(m)) if text.endswith(m[:n])), default=0)
                text, self._held = text[: len(text) - keep], text[len(text) - keep :]
                if text:
                    yield self._kind, text
                    self._is_blank = self._is_blank and not text.strip()
                return
            if at:
                yield self._kind, text[:at]
                self._is_blank = self._is_blank and not text[:at].strip()
                if marker == MARKERS.thought_open and not self._is_blank:
                    yield self._kind, marker
                    text = text[at + len(marker) :]
                    continue
            yield MARKER, marker
            text = text[at + len(marker) :]
            self._kind = {MARKERS.thought_open: THOUGHT, MARKERS.call_open: CALL}.get(marker, CONTENT)
            self._is_blank = self._is_blank and marker != MARKERS.call_open

    def _wanted(self) -> list[str]:
        if self._kind == THOUGHT:
            return [MARKERS.thought_close]
        if self._kind == CALL:
            return [MARKERS.call_close]
        thought = [MARKERS.thought_open] if self._thoughts and self._is_blank else []
        return thought + ([MARKERS.call_open] if self._calls else [])


def read_reply(text: str, *, tools: Sequence[Any] | None = None, thoughts: bool = True, calls: bool = True,
               in_thought: bool = False) -> tuple[str, ReplyReader]:  # fmt: skip
    """The content of a whole reply, and the reader that has its thoughts and calls."""
    reader = ReplyReader(thoughts=thoughts, calls=calls, tools=tools, in_thought=in_thought)
    divider = TextDivider(thoughts=True, calls=calls, in_thought=in_thought)
    content = [reader.take(kind, piece).text for kind, piece in divider.feed(text, last=True)]
    return "".join(content) + reader.end().text, reader
