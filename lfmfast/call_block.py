"""What stands between the calls of a text: brackets, separators, code fences, tags, and text that is no call."""

from __future__ import annotations

import re

from lfmfast.call_text import PLAIN, QUOTES, Steps, end_of
from lfmfast.call_values import CLOSERS, Reader

__all__ = ["BlockReader"]

_SKIP = re.compile(r"[^()\[\]{}\"',;\n]*")
_LINE = re.compile(r"[^\n\[{]*")
_TAG = re.compile(r"</?\|?(?:tool|function)_calls?(?:_start|_end)?\|?>")
_MAX_TAG = 24
_MAX_LANGUAGE = 24  # characters of the name behind a code fence


class BlockReader(Reader):
    """The calls' surroundings in a text that arrives in pieces.

    Attributes
    ----------
    depth
        Brackets that are open around the next call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0

    def between(self, first: bool) -> Steps[str]:
        """Skips brackets around calls, separators, code fences and tags; the character after them."""
        while True:
            c = self.text[self.at : self.at + 1]
            if not c or c.isspace() or c in "#\ufeff":
                c = yield from self.space(self.depth > 0)
            if c == "[" and (first or self.depth or (yield from self._opens())):
                self.depth += 1
            elif c == "]":
                self.depth = max(0, self.depth - 1)
            elif c == "`":
                n = yield from self._fence()
                self.at += n
            elif c == "<" and (n := (yield from self._tag())):
                self.at += n - 1
            elif not c or c not in ",;":
                return c
            self.at += 1

    def _fence(self) -> Steps[int]:
        """Length of the rest of a code fence, with the name of its language, behind its first character."""
        if (yield from self.char(1)) != "`" or (yield from self.char(2)) != "`":
            return 0
        n = 3
        while (c := (yield from self.char(n))).isalpha() and n < _MAX_LANGUAGE:
            n += 1
        return n - 1 if not c or c.isspace() else 2

    def _tag(self) -> Steps[int]:
        """Length of the tag that stands here, 0 if none does."""
        n = 1
        while (c := (yield from self.char(n))) and c != ">" and n < _MAX_TAG:
            n += 1
        at = self.at
        return n + 1 if _TAG.fullmatch(self.text, at, at + n + 1) else 0

    def _opens(self) -> Steps[bool]:
        """Whether the bracket or brace here opens a list of calls, or a call."""
        opener = self.text[self.at]
        c, n = yield from self.look(1)
        if not c or c in QUOTES or opener == "{":
            return bool(c) and c in QUOTES and opener == "{"
        name, after, _ = yield from self.look_name(n)
        return c == "{" or (bool(name) and after == "(")

    def rest(self) -> Steps[bool]:
        """Passes over all that comes."""
        while True:
            self.at = len(self.text)
            if self.ended:
                return False
            yield

    def pass_line(self) -> Steps[None]:
        """Passes over a line outside of brackets, up to a call in it."""
        while True:
            self.at += 1
            while (at := end_of(_LINE, self.text, self.at)) == len(self.text):
                self.at = at
                if self.ended:
                    return
                yield
            self.at = at
            if self.text[at] == "\n" or (yield from self._opens()):
                return

    def skip(self) -> Steps[bool]:
        """Passes over an item with all brackets and strings in it; False if one has no end, or another bracket's."""
        closers: list[str] = []
        quote = ""
        while True:
            pattern = PLAIN[quote] if quote else _SKIP
            self.at = end_of(pattern, self.text, self.at)
            if self.at == len(self.text):
                if self.ended:
                    return not (closers or quote)
                yield
                continue
            c = self.text[self.at]
            if quote:
                if c == "\\":
                    escaped = yield from self.char(1)
                    self.at += bool(escaped)
                else:
                    quote = ""
            elif c in QUOTES:
                quote = c
            elif c in CLOSERS:
                closers.append(CLOSERS[c])
            elif c in ")]}" and closers:
                if c != closers.pop():
                    return False
                if not closers and not self.depth:
                    self.at += 1
                    return True
            elif not closers and (c in ",;]" or (c == "\n" and not self.depth)):
                return True
            self.at += 1
