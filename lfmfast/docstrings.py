"""What a docstring says of a function and of its parameters, in numpydoc, Google or Sphinx style."""

from __future__ import annotations

import inspect
import re
from typing import NamedTuple

__all__ = ["Docstring", "parse"]

_PARAMETERS = {"parameters", "other parameters", "attributes", "args", "arguments", "params", "keyword args",
               "keyword arguments"}  # fmt: skip
_GOOGLE = re.compile(
    r"(Args|Arguments|Parameters|Params|Keyword Args|Keyword Arguments|Other Parameters|Attributes|Returns?|Yields?|Raises|"
    r"Warns|Examples?|Notes?|Warnings?|See Also|References|Todo):",
    re.IGNORECASE,
)
_SPHINX = re.compile(r":(\w+)(?:\s+([^:]*))?:(?:\s+(.*))?$")
_SPHINX_PARAMETERS = {"param", "parameter", "arg", "argument", "key", "keyword", "ivar", "cvar", "var"}
_NUMPYDOC_ENTRY = re.compile(r"(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?$")
_GOOGLE_ENTRY = re.compile(r"(\*{0,2}\w+)\s*(?:\(.*?\))?\s*:(?:\s+|$)(.*)")


class Docstring(NamedTuple):
    """`text` is what stands before the first section, `parameters` what is said of each, as one line."""

    text: str
    parameters: dict[str, str]


def parse(doc: str | None) -> Docstring:
    """Read a docstring. What is in no known form is part of the text, or left out: nothing is an error.

    Examples
    --------
    >>> parse("Add two numbers.\\n\\nArgs:\\n    a (int): The first one.\\n    b: The other,\\n        if any.")
    Docstring(text='Add two numbers.', parameters={'a': 'The first one.', 'b': 'The other, if any.'})
    """
    lines = inspect.cleandoc(doc or "").splitlines()
    found: dict[str, list[str]] = {}
    first = len(lines)
    i = 0
    while i < len(lines):
        after, entries = _section(lines, i)
        if after > i:
            first = min(first, i)
            found.update(entries)
        i = max(after, i + 1)
    joined = {name: " ".join(" ".join(said).split()) for name, said in found.items()}
    return Docstring("\n".join(lines[:first]).strip(), {name: said for name, said in joined.items() if said})


def _section(lines: list[str], i: int) -> tuple[int, dict[str, list[str]]]:
    """Where the section or field that begins in line `i` ends (there: none begins), and the parameters in it."""
    line, below = lines[i].rstrip(), lines[i + 1 : i + 2]
    if _is_underlined(lines, i):
        end = next((k for k in range(i + 2, len(lines)) if _is_underlined(lines, k)), len(lines))
        return _entries(lines, i + 2, end, line, _NUMPYDOC_ENTRY)
    if _GOOGLE.fullmatch(line) and below and below[0][:1] == " ":
        return _entries(lines, i + 1, _indented(lines, i + 1), line[:-1], _GOOGLE_ENTRY)
    if field := _SPHINX.match(line):
        end = _indented(lines, i + 1)
        name = (field[2] or "").split()[-1:]  # the type may stand before it
        is_parameter = field[1] in _SPHINX_PARAMETERS and name
        return end, {name[0].lstrip("*"): [field[3] or "", *lines[i + 1 : end]]} if is_parameter else {}
    return i, {}


def _is_underlined(lines: list[str], i: int) -> bool:
    return bool(lines[i].strip() and i + 1 < len(lines) and re.fullmatch(r"-{3,}\s*", lines[i + 1]))


def _indented(lines: list[str], i: int) -> int:
    """The first line from `i` on that is not indented, and not empty."""
    while i < len(lines) and (not lines[i].strip() or lines[i].startswith(" ")):
        i += 1
    return i


def _entries(lines: list[str], begin: int, end: int, title: str, entry: re.Pattern[str]) -> tuple[int, dict[str, list[str]]]:
    """The parameters in a section: an entry begins in each line of the section's own indentation."""
    if title.lower() not in _PARAMETERS:
        return end, {}
    found: dict[str, list[str]] = {}
    said: list[str] = []
    indents = [len(line) - len(line.lstrip()) for line in lines[begin:end] if line.strip()]
    for line in lines[begin:end]:
        if line.strip() and len(line) - len(line.lstrip()) == min(indents):
            match = entry.match(line.strip())
            said = [match[2]] if match and entry is _GOOGLE_ENTRY else []
            for name in match[1].split(",") if match else ():
                found[name.strip().lstrip("*")] = said
        else:
            said.append(line.strip())
    return end, found
