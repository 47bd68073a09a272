"""llama.cpp's grammar format GBNF, rewritten for llguidance.

The grammar is read as llama.cpp reads it (`llama_grammar_parser`), with the same errors. Every character of a terminal becomes
a lexeme of its own: llguidance takes the longest lexeme that matches and never goes back, so `[a-z]* "end"` with longer ones
would refuse "friend", which GBNF accepts.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from lfmfast.errors import ParameterError

__all__ = ["gbnf_to_lark"]

#: llama.cpp's limit for the numbers in {m,n}, and for their product where they nest.
MAX_REPETITIONS = 2000
MAX_DEPTH = 200
#: How many rules may lead one to the next before one is met again: llguidance recurses over them.
MAX_CHAIN = 200

_NAME = re.compile(r"[A-Za-z0-9-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_RANGE = re.compile(r"\{S(\d+)S(\}|,S(?:(\d+)S)?\})".replace("S", _SPACE_AND_LINES.pattern))
_TOKEN = re.compile(r"(!?)<(?:\[(\d{1,10})\]|([^<>\s]*))>")
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_ESCAPED = {"t": "\t", "r": "\r", "n": "\n", **{char: char for char in '\\"[]-'}}


def gbnf_to_lark(text: str, root: str = "root") -> str:
    """The grammar in llguidance's dialect of Lark.

    Raises
    ------
    ParameterError
        With the line of what llama.cpp would not read either, and for `!<token>`: only `!<[id]>` can be enforced.
    """
    return _Parser(text).lark(root)


@dataclass
class _Item:
    """A symbol of a sequence: its text in Lark."""

    text: str
    rules: int = 1
    """What it counts for in the limit of repetitions."""


@dataclass
class _Parser:
    text: str
    at: int = 0
    rules: dict[str, str] = field(default_factory=dict)
    used: dict[str, dict[str, int]] = field(default_factory=dict)
    """Of each rule those that it uses, and where first."""
    current: str = ""

    def lark(self, root: str) -> str:
        self._space(lines=True)
        while self.at < len(self.text):
            self._rule()
        for used in self.used.values():
            for name, at in used.items():
                if name not in self.rules:
                    raise self._error(f"there is no rule {name!r}", at)
        if root not in self.rules:
            raise ParameterError(f"the grammar has no rule {root!r}, where it is to begin")
        self._check_chains(root)
        rules = [f"{_rule_name(name)}: {body}\n" for name, body in self.rules.items()]
        return "".join([f"start: {_rule_name(root)}\n", *rules])

    def _check_chains(self, root: str) -> None:
        seen, path = {root}, [iter(self.used[root])]
        while path:
            name = next(path[-1], None)
            if name is None:
                path.pop()
            elif name not in seen:
                seen.add(name)
                path.append(iter(self.used[name]))
                if len(path) > MAX_CHAIN:
                    raise ParameterError(f"the grammar has more than {MAX_CHAIN} rules that lead one to the next, to {name!r}")

    def _error(self, message: str, at: int | None = None) -> ParameterError:
        at = self.at if at is None else at
        line = self.text.count("\n", 0, at) + 1
        return ParameterError(f"the grammar, line {line}, at {self.text[at:at + 20]!r}: {message}")

    def _space(self, lines: bool) -> None:
        found = (_SPACE_AND_LINES if lines else _SPACE).match(self.text, self.at)
        assert found is not None
        self.at = found.end()

    def _rule(self) -> None:
        found = _NAME.match(self.text, self.at)
        if not found:
            raise self._error("a rule begins with its name, of letters, digits and '-'")
        self.at = found.end()
        self._space(lines=False)
        if not self.text.startswith("::=", self.at):
            raise self._error("expected ::=")
        self.at += 3
        self._space(lines=True)
        self.current = found[0]
        self.used[self.current] = {}
        self.rules[found[0]] = self._alternatives(nested=False, depth=0).text
        if self.at < len(self.text) and self.text[self.at] not in "\r\n":
            raise self._error("expected the end of the line")
        self._space(lines=True)

    def _alternatives(self, nested: bool, depth: int) -> _Item:
        if depth > MAX_DEPTH:
            raise self._error(f"nested deeper than {MAX_DEPTH}")
        parts = [self._sequence(nested, depth)]
        while self.text.startswith("|", self.at):
            self.at += 1
            self._space(lines=True)
            parts.append(self._sequence(nested, depth))
        return _Item(" | ".join(part.text for part in parts), max(1, sum(part.rules for part in parts)))

    def _sequence(self, nested: bool, depth: int) -> _Item:
        items: list[_Item] = []
        n_rules = 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in "*+?{":
                if not items:
                    raise self._error("there is nothing to repeat before it")
                n_rules += self._repeat(items)
            elif char == '"':
                items.append(self._literal())
            elif char == "[":
                items.append(self._class())
            elif char in "<!":
                items.append(self._token())
            elif char == ".":
                items.append(_Item("/(?s:.)/"))
                self.at += 1
            elif char == "(":
                self.at += 1
                self._space(lines=True)
                inner = self._alternatives(nested=True, depth=depth + 1)
                if not self.text.startswith(")", self.at):
                    raise self._error("expected )")
                self.at += 1
                items.append(_Item(f"({inner.text})", inner.rules + 1))
                n_rules += inner.rules + 1
            elif found := _NAME.match(self.text, self.at):
                self.used[self.current].setdefault(found[0], self.at)
                items.append(_Item(_rule_name(found[0])))
                self.at = found.end()
            else:
                break
            self._space(lines=nested)
        return _Item(" ".join(item.text for item in items) or '""', n_rules)

    def _repeat(self, items: list[_Item]) -> int:
        """Apply the repetition here to the last item; returns how many rules it stands for."""
        item = items[-1]
        found = _RANGE.match(self.text, self.at)
        if found:
            low = int(found[1])
            high = low if found[2] == "}" else None if found[3] is None else int(found[3])
        elif self.text[self.at] == "{":
            raise self._error("expected {m}, {m,} or {m,n}")
        else:
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[self.text[self.at]]
        if high is not None and high > MAX_REPETITIONS:  # llama.cpp takes that for no limit
            high = None
        count = high or low or 1
        if max(low, item.rules * count) > MAX_REPETITIONS:
            raise self._error(f"repeated more often than {MAX_REPETITIONS} times")
        if high is not None and high < low:
            raise self._error(f"{{{low},{high}}} is never true")
        self.at = found.end() if found else self.at + 1
        items[-1] = _Item(f"({item.text}){{{low},{'' if high is None else high}}}", item.rules * count)
        return count

    def _char(self) -> int:
        """The code point of the character here, which may be an escape."""
        if self.at >= len(self.text):
            raise self._error("the text ends within a terminal")
        char = self.text[self.at]
        if char != "\\":
            self.at += 1
            return ord(char)
        kind = self.text[self.at + 1:self.at + 2]
        if kind in _ESCAPED:
            self.at += 2
            return ord(_ESCAPED[kind])
        if kind not in _HEX_DIGITS:
            raise self._error("there is no such escape")
        digits = self.text[self.at + 2:self.at + 2 + _HEX_DIGITS[kind]]
        if len(digits) < _HEX_DIGITS[kind] or not re.fullmatch("[0-9A-Fa-f]+", digits):
            raise self._error(f"\\{kind} takes {_HEX_DIGITS[kind]} hexadecimal digits")
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._error(f"U+{code:04X} is no character")
        self.at += 2 + len(digits)
        return code

    def _literal(self) -> _Item:
        self.at += 1
        codes: list[int] = []
        while not self.text.startswith('"', self.at):
            codes.append(self._char())
        self.at += 1
        return _Item(f"({' '.join(_quoted(chr(code)) for code in codes)})" if codes else '""')

    def _class(self) -> _Item:
        start = self.at
        self.at += 1
        negated = self.text.startswith("^", self.at)
        self.at += negated
        ranges: list[tuple[int, int]] = []
        while not self.text.startswith("]", self.at):
            low = high = self._char()
            if self.text.startswith("-", self.at) and self.text[self.at + 1:self.at + 2] != "]":
                self.at += 1
                high = self._char()
            ranges.append((low, high))
        self.at += 1
        if not ranges:
            raise self._error("a class with nothing in it", start)
        kept = [(low, high) for low, high in ranges if low <= high]
        if not kept:
            raise self._error("a class that no character is in", start)
        body = "".join(_code(low) if low == high else f"{_code(low)}-{_code(high)}" for low, high in kept)
        return _Item(f"/[{'^' if negated else ''}{body}]/")

    def _token(self) -> _Item:
        found = _TOKEN.match(self.text, self.at)
        if not found:
            raise self._error("expected <token> or <[id]>")
        negated, number, name = found.groups()
        if number is None and (negated or not name):
            raise self._error("the token has to be given by its number, as in !<[7]>" if negated else "a token without a name")
        self.at = found.end()
        return _Item(f"<{name}>" if number is None else f"<[{'^' if negated else ''}{number}]>")


def _rule_name(name: str) -> str:
    """A name for Lark, whose rules are in small letters."""
    return "r_" + re.sub("[A-Z]", lambda found: f"_{found[0].lower()}_", name)


def _quoted(char: str) -> str:
    return json.dumps(char, ensure_ascii=True) if ord(char) != 0x7F else '"\\u007f"'


def _code(code: int) -> str:
    return f"\\x{{{code:x}}}"
