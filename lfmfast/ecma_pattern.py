"""Regular expressions in the dialect of JSON Schema (ECMA-262), rewritten for llguidance (Rust's `regex`).

The two share most of their syntax and differ silently in the rest: Rust reads `[a&&b]` as an intersection, `[[:alpha:]]` as a
POSIX class, `\\d` and `\\w` as Unicode classes, `\\<` as the start of a word, `.` as anything but a line feed. Look-around,
back references and word boundaries, which llguidance can't do, are refused with their place in the pattern.
"""

from __future__ import annotations

import re

from lfmfast.errors import ParameterError

__all__ = ["translated"]

#: How often a part of a pattern may be repeated, nested repetitions multiplied.
MAX_REPEATS = 100_000

# ECMA's white space and line ends. U+FEFF is left out of \s, as Python's `re` does not count it.
_SPACE = r"\t\n\x0B\x0C\r \xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000"
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": _SPACE}
_NEGATED = {"D": "0-9", "W": "0-9A-Za-z_", "S": _SPACE + r"\uFEFF\x85\x1C-\x1F"}
_DOT = r"[^\n\r\u2028\u2029]"
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_QUANTIFIER = re.compile(r"\{\d+(?:,\d*)?\}")
_GROUP = re.compile(r"\(\?(?::|P?<[A-Za-z_]\w*>)")  # names change nothing here
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_]+(?:=[A-Za-z_]+)?\}")


def translated(pattern: str, name: str = "the pattern") -> str:
    """The same pattern for llguidance.

    Raises
    ------
    ParameterError
        For what can't be enforced. The message has `name`, the construct and its place.
    """
    return _Translator(pattern, name).run()


def _literal(char: str) -> str:
    """One character that stands for itself, inside a class and outside."""
    return char if char.isalnum() or char == "_" or ord(char) > 0x7F else f"\\x{ord(char):02X}"


class _Translator:
    def __init__(self, pattern: str, name: str) -> None:
        self._text, self._name, self._at = pattern, name, 0
        self._repeats = [1]  # of each open group: how often something in it is repeated, at most
        self._last = 1  # the same of the last atom

    def _refuse(self, what: str, at: int | None = None) -> ParameterError:
        return ParameterError(f"{self._name} {self._text[:60]!r}: {what} at character {self._at if at is None else at}")

    def run(self) -> str:
        out: list[str] = []
        while self._at < len(self._text):
            char = self._text[self._at]
            if char not in "){*+?":
                self._last = 1
            if char == "\\":
                out.append(self._escape(in_class=False)[0])
            elif char == "[":
                out.append(self._class())
            elif char == "(":
                out.append(self._group())
            elif char == ".":
                out.append(_DOT)
                self._at += 1
            elif char == "{" and (found := _QUANTIFIER.match(self._text, self._at)):
                out.append(self._quantifier(found[0]))
                self._at = found.end()
            elif char == ")":
                if len(self._repeats) > 1:
                    self._last = self._repeats.pop()
                    self._repeats[-1] = max(self._repeats[-1], self._last)
                out.append(char)
                self._at += 1
            elif char in "{}]":
                out.append("\\" + char)
                self._at += 1
            else:
                out.append(char if char in "^$*+?|)" else _literal(char))
                self._at += 1
        return "".join(out)

    def _quantifier(self, text: str) -> str:
        """`{m,n}` as it is; where it nests, the numbers multiply."""
        self._last *= max(1, *(int(number) for number in re.findall(r"\d{1,9}", text)))
        if self._last > MAX_REPEATS:
            raise self._refuse(f"a repetition of more than {MAX_REPEATS:,} times")
        self._repeats[-1] = max(self._repeats[-1], self._last)
        return text

    def _group(self) -> str:
        self._repeats.append(1)
        if not self._text.startswith("(?", self._at):
            self._at += 1
            return "("
        found = _GROUP.match(self._text, self._at)
        if not found:
            around = re.match(r"\(\?<?[=!]", self._text[self._at:])
            raise self._refuse("look-around can't be enforced" if around else "a group of this kind can't be enforced")
        self._at = found.end()
        return "(?:"

    def _class(self) -> str:
        start = self._at
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        items: list[str] = []
        while not self._text.startswith("]", self._at):
            low, low_char = self._class_atom(start)
            if self._text.startswith("-", self._at) and self._text[self._at + 1:self._at + 2] not in ("", "]") and low_char:
                self._at += 1
                high, high_char = self._class_atom(start)
                if not high_char:  # a class after the hyphen: three items
                    items += [low, _literal("-"), high]
                elif high_char < low_char:
                    raise self._refuse(f"the range {low_char!r} to {high_char!r} is empty")
                else:
                    items.append(f"{low}-{high}")
            else:
                items.append(low)
        if not items:
            raise self._refuse("an empty character class can't be enforced", start)
        self._at += 1
        return f"[{'^' if negated else ''}{''.join(items)}]"

    def _class_atom(self, start: int) -> tuple[str, str | None]:
        """The next item, and its character if it is a single one."""
        if self._at >= len(self._text):
            raise self._refuse("a character class without its end", start)
        char = self._text[self._at]
        if char == "\\":
            return self._escape(in_class=True)
        self._at += 1
        return _literal(char), char

    def _escape(self, in_class: bool) -> tuple[str, str | None]:
        start = self._at
        char = self._text[start + 1:start + 2]
        self._at += 2
        if not char:
            raise self._refuse("a backslash without a character", start)
        if char in _CLASSES:
            return (_CLASSES[char] if in_class else f"[{_CLASSES[char]}]"), None
        if char in _NEGATED:
            return f"[^{_NEGATED[char]}]", None
        if char in "pP" and (found := _PROPERTY.match(self._text, start + 1)):
            self._at = found.end()
            return "\\" + found[0], None
        if char in _CONTROLS and not (char == "0" and self._text[self._at:self._at + 1].isdigit()):
            return _literal(_CONTROLS[char]), _CONTROLS[char]
        if char == "b" and in_class:
            return _literal("\b"), "\b"
        if char in "bB":
            raise self._refuse("a word boundary can't be enforced", start)
        if char == "c" and (letter := self._text[self._at:self._at + 1]).isascii() and letter.isalpha():
            self._at += 1
            return _literal(chr(ord(letter) & 31)), chr(ord(letter) & 31)
        if char in "xu":
            code = self._hexadecimal(char, start)
            return _literal(code), code
        if char.isdigit() or char == "k":
            raise self._refuse("a back reference can't be enforced", start)
        if char.isascii() and char.isalpha():
            raise self._refuse(f"there is no escape \\{char}", start)
        return _literal(char), char

    def _hexadecimal(self, kind: str, start: int) -> str:
        r"""The character of \xHH, \uHHHH, \u{H...} or a pair of surrogates."""
        forms = r"x([0-9A-Fa-f]{2})" if kind == "x" else r"u(?:([0-9A-Fa-f]{4})|\{([0-9A-Fa-f]{1,6})\})"
        found = re.compile(forms).match(self._text, start + 1)
        if not found:
            raise self._refuse(f"\\{kind} without its hexadecimal digits", start)
        self._at = found.end()
        code = int(next(group for group in found.groups() if group), 16)
        low = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})").match(self._text, self._at)
        if 0xD800 <= code < 0xDC00 and low:
            self._at = low.end()
            code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._refuse(f"U+{code:04X} is no character", start)
        return chr(code)
