"""The text of tool calls while it arrives, and the strings in it.

Every reading method is a generator: it yields where it needs more text, and returns what it read. So a text gives the
same result whether it comes whole or one character at a time, and no character is read twice.

Strings may have either quote style, a prefix (``r``, ``u``, ``f`` without placeholders), triple quotes, and others of their
kind beside them. An escape that Python does not know stays as it is; so do an octal one of one or two digits, which in a
command is a back reference, and a backslash before a line's end.

A quote inside a string in the same quotes ends it only where the text goes on like the rest of a call; the first one also
before any comma or closing bracket. Where this leaves more than one reading, ``doubtful`` is set, and ``reading`` chooses:

0. quotes inside are paired, but a known name after one ends the string;
1. quotes inside are always paired, also the first, and strings side by side are one string with quotes inside;
2. the first quote that can end the string does, even after a backslash.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Generator
from typing import TypeVar

__all__ = [
    "CONSTANTS",
    "NAME",
    "PLAIN",
    "QUOTES",
    "WORD",
    "Incomplete",
    "Steps",
    "TextReader",
    "Unreadable",
    "end_of",
]

MAX_WORD = 1024  # characters of a name or number
MAX_LOOK = 256  # characters looked at after a quote

T = TypeVar("T")
Steps = Generator[None, None, T]

QUOTES = "'\""
CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
WORD = re.compile(r"""[^\s=:,;()\[\]{}'"#`]*""")
NAME = re.compile(r"[\w$./:-]*")
_SPACE = re.compile(r"[\s\ufeff]*")
_LINE = re.compile(r"[^\n]*")
PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in QUOTES}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\\": "\\"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_PREFIXES = {"r", "u", "f", "fr", "rf"}
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
# What may follow a string: as an argument or its name, an argument's value, in a list, a tuple, a dict or set, a dict's value.
_FOLLOW = {"argument": ",)=:", "call": ",)", "list": ",]", "tuple": ",)", "brace": ",}:", "dict": ",}"}


class Unreadable(Exception):
    """The text is no literal or call that could be read."""


class Incomplete(Unreadable):
    """The text ended inside a literal or call."""


class TextReader:
    """A text that arrives in pieces, and the strings in it.

    Attributes
    ----------
    text, at
        What is kept of the text, and the place in it up to which it was read.
    ended, cut
        No more text comes; it ended because there was no room for more.
    names, parameters
        Names of calls, and of arguments of the call that is read, which end a string in doubt; None: any name does.
    reading, doubtful
        How to read strings in doubt, and whether there was one; see the module.
    json
        Strings are JSON's, where an escaped slash is a slash.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = self.cut = False
        self.names: Collection[str] | None = None
        self.parameters: Collection[str] | None = None
        self.reading = 0
        self.doubtful = self.json = False
        self._passed = 0  # characters before text
        self._mark: int | None = None
        self._kept: list[str] = []  # between the mark and text

    # --- the text ---

    @property
    def position(self) -> int:
        """Characters read in all."""
        return self._passed + self.at

    def add(self, text: str) -> None:
        if self._mark is not None:
            self._kept.append(self.text[self._mark : self.at])
            self._mark = 0
        self._passed += self.at
        self.text = self.text[self.at :] + text
        self.at = 0

    def mark(self) -> None:
        """Keeps the text from here on."""
        self._mark = self.at
        self._kept.clear()

    def rewind(self) -> None:
        """Goes back to the mark."""
        mark = self._mark or 0
        if self._kept:
            before = "".join(self._kept)
            self._passed -= len(before)
            self.text = before + self.text
            self._kept.clear()
        self.at = mark

    def marked(self) -> str:
        """The text from the mark to here."""
        return "".join(self._kept) + self.text[self._mark or 0 : self.at]

    def char(self, ahead: int = 0) -> Steps[str]:
        """The character ``ahead`` places on, "" at the end of the text."""
        while len(self.text) <= self.at + ahead:
            if self.ended:
                return ""
            yield
        return self.text[self.at + ahead]

    def run(self, characters: re.Pattern[str]) -> Steps[str]:
        """Reads as many of the characters as there are, at most `MAX_WORD`."""
        n = 0
        while True:
            n += end_of(characters, self.text, self.at + n) - self.at - n
            if n > MAX_WORD:
                raise Unreadable(f"a word of more than {MAX_WORD} characters")
            if self.at + n < len(self.text) or self.ended:
                break
            yield
        self.at += n
        return self.text[self.at - n : self.at]

    def space(self, comments: bool = True) -> Steps[str]:
        """Skips white space and comments; the character after it, "" at the end of the text."""
        in_comment = False
        while True:
            self.at = end_of(_LINE if in_comment else _SPACE, self.text, self.at)
            if self.at == len(self.text):
                if self.ended:
                    return ""
                yield
            elif in_comment or (comments and self.text[self.at] == "#"):
                in_comment = not in_comment
            else:
                return self.text[self.at]

    # --- strings ---

    def strings(self, context: str, prefix: str = "") -> Steps[str]:
        """Reads one or more strings side by side."""
        parts: list[str] = []
        while True:
            parts.append((yield from self._string(context, prefix.lower())))
            n = 0
            while (yield from self.char(n)).isspace() and n < MAX_LOOK:
                n += 1
            prefix = ""
            while (c := (yield from self.char(n))) and c in "rRuUfFbB" and len(prefix) < 2:
                prefix += c
                n += 1
            beside = bool(c) and c in QUOTES
            self.doubtful |= beside
            if not beside or self.reading:
                return _PAIR.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), "".join(parts))
            self.at += n

    def _string(self, context: str, prefix: str) -> Steps[str]:
        if prefix and prefix not in _PREFIXES:
            raise Unreadable(f"a string with the prefix {prefix[:8]!r}")
        quote = self.text[self.at]
        triple = (yield from self.char(1)) == quote and (yield from self.char(2)) == quote
        self.at += 3 if triple else 1
        parts: list[str] = []
        inner = paired = 0  # quotes inside, and those of them that are no apostrophe
        escaped_end = False
        while True:
            start = self.at
            self.at = end_of(PLAIN[quote], self.text, start)
            if self.at > start:
                parts.append(self.text[start : self.at])
            if self.at == len(self.text):
                if self.ended:
                    raise Incomplete("a string without an end")
                yield
            elif self.text[self.at] == "\\":
                if (yield from self.char(1)) == quote and not triple:
                    ends = yield from self._ends(2, context, True)
                    self.doubtful |= ends
                    if ends and self.reading == 2:
                        parts.append("\\")
                        self.at += 2
                        break
                    escaped_end |= ends
                parts.append((yield from self._escape("r" in prefix)))
            elif triple:
                if (yield from self.char(1)) == quote and (yield from self.char(2)) == quote:
                    self.at += 3
                    break
                parts.append(quote)
                self.at += 1
            elif (yield from self._closes(quote, context, inner, paired)):
                self.at += 1
                break
            else:
                apostrophe = bool(parts) and parts[-1][-1:].isalnum() and (yield from self.char(1)).isalnum()
                if escaped_end and not apostrophe:
                    raise Unreadable("a quote inside a string, after one that could have ended it")
                self.doubtful = True
                inner += 1
                paired += not apostrophe
                parts.append(quote)
                self.at += 1
        value = "".join(parts)
        if "f" in prefix:
            if re.search(r"[{}]", value.replace("{{", "").replace("}}", "")):
                raise Unreadable("a string with placeholders")
            value = value.replace("{{", "{").replace("}}", "}")
        return value

    def _escape(self, raw: bool) -> Steps[str]:
        """Reads a backslash and what belongs to it."""
        c = yield from self.char(1)
        if not c:
            raise Incomplete("a string without an end")
        self.at += 2
        if raw:
            return "\\" + c
        if c in QUOTES or (c == "/" and self.json):
            return c
        if c in _ESCAPES:
            return _ESCAPES[c]
        if c in "01234567":
            return (yield from self._octal(c))
        if c == "N":
            return (yield from self._named())
        digits = ""
        while len(digits) < _HEX_DIGITS.get(c, 0) and (d := (yield from self.char())) and d in "0123456789abcdefABCDEF":
            digits += d
            self.at += 1
        if not digits or len(digits) < _HEX_DIGITS[c] or int(digits, 16) > 0x10FFFF:
            return "\\" + c + digits
        return chr(int(digits, 16))

    def _octal(self, digit: str) -> Steps[str]:
        digits = digit
        while len(digits) < 3 and (d := (yield from self.char())) and d in "01234567":
            digits += d
            self.at += 1
        decoded = digits == "0" or (len(digits) == 3 and digits[0] in "0123")
        return chr(int(digits, 8)) if decoded else "\\" + digits

    def _named(self) -> Steps[str]:
        n = 0
        while (c := (yield from self.char(n))) and n < 100 and (c in "{- " or c.isalnum()):
            n += 1
        name = self.text[self.at : self.at + n]
        if c == "}" and name.startswith("{"):
            try:
                found = unicodedata.lookup(name[1:])
            except KeyError:
                return "\\N"
            self.at += n + 1
            return found
        return "\\N"

    def look(self, n: int) -> Steps[tuple[str, int]]:
        """The next character that is no space, ``n`` places on or later, and its place. "" at the end of the text."""
        while (c := (yield from self.char(n))).isspace() and n < MAX_LOOK:
            n += 1
        return c, n

    def look_name(self, n: int) -> Steps[tuple[str, str, int]]:
        """The name that stands ``n`` places on, the character after it, and the place of that."""
        start = n
        while (c := (yield from self.char(n))) and NAME.fullmatch(c) and n < MAX_LOOK:
            n += 1
        name = self.text[self.at + start : self.at + n]
        c, n = yield from self.look(n)
        return name, c, n

    def _closes(self, quote: str, context: str, inner: int, paired: int) -> Steps[bool]:
        """Whether the quote here ends the string."""
        if inner:
            odd = paired % 2 == 1 and self.reading < 2
            if odd and (self.reading == 1 or context not in ("call", "argument")):
                return False
            return (yield from self._ends(1, context, not odd))
        c, n = yield from self.look(1)
        if not c or c.isspace():
            return True
        if c in _FOLLOW[context]:
            ends = yield from self._ends(1, context, True)
            self.doubtful |= not ends
            return ends or self.reading != 1
        while c and c in "rRuUfFbB" and n < MAX_LOOK:
            n += 1
            c = yield from self.char(n)
        beside = bool(c) and c in QUOTES and (n > 1 or c != quote)
        self.doubtful |= beside
        return beside and self.reading == 0

    def _ends(self, n: int, context: str, any_name: bool) -> Steps[bool]:
        """Whether the text ``n`` places on goes on like what stands around the string."""
        c, n = yield from self.look(n)
        if not c:
            return True
        if c not in _FOLLOW[context]:
            return False
        if c in "=:":
            return True
        after, n = yield from self.look(n + 1)
        if context in ("call", "argument") and c == ")":
            return (yield from self._ends_call(after, n, any_name))
        if context == "call" or (context == "argument" and not (after and after in QUOTES)):
            return (yield from self._ends_argument(after, n, any_name))
        if c != ",":
            return not after or after in ",)]}"
        if context == "dict":
            return not after or after in QUOTES + "}"
        if not after or after in QUOTES + "[({+-]})" or after.isdigit():
            return True
        return (yield from self.look_name(n))[0] in CONSTANTS

    def _ends_call(self, c: str, n: int, any_name: bool) -> Steps[bool]:
        """Whether a call ended before the character."""
        if c == ",":
            c, n = yield from self.look(n + 1)
        if not c or c in "];`":
            return True
        name, c, _ = yield from self.look_name(n)
        return bool(name) and c == "(" and (any_name or self.names is None or name in self.names)

    def _ends_argument(self, c: str, n: int, any_name: bool) -> Steps[bool]:
        """Whether an argument ended before the character, and another one or the call's end follows."""
        if not c or c in ")*#":
            return True
        quote = c if c in QUOTES else ""
        name, c, n = yield from self.look_name(n + len(quote))
        if quote and c == quote:
            c, n = yield from self.look(n + 1)
        if not name or not c or c not in "=:" or (yield from self.char(n + 1)) == "=":
            return False
        return any_name or self.parameters is None or name in self.parameters


def end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where a pattern that matches everywhere ends."""
    found = pattern.match(text, at)
    return found.end() if found else at
