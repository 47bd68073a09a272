"""A body, read field by field: each value is checked, and the error names its field."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from lfmfast.server.errors import ApiError, invalid

__all__ = ["CHARACTERS_MAX", "INT_MAX", "Fields", "Harmless", "show", "wrong"]

log = logging.getLogger("lfmfast.server")

INT_MAX = 2**31 - 1
#: Strings in a list, and characters of all of them: what they are for costs time at each token.
STRINGS_MAX, CHARACTERS_MAX = 256, 16384

#: Whether the value of a field that is not supported asks for nothing.
Harmless = Callable[[Any], bool]


class Fields:
    """A body that is read field by field.

    Parameters
    ----------
    body : dict
        From JSON.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def get(self, name: str) -> Any:
        """The value, or None."""
        return self._body.get(name)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise wrong(name, "true or false", value)
        return value

    def integer(self, name: str, low: int, high: int = INT_MAX) -> int | None:
        """A whole number; one with a decimal point counts if nothing is behind it."""
        value = self._body.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise wrong(name, f"an integer from {low} to {high}", value)
        return value

    def number(self, name: str) -> float | None:
        value = self._body.get(name)
        if value is None:
            return None
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise wrong(name, "a number", value)
        try:
            return float(value)
        except OverflowError:
            raise wrong(name, "a number", value) from None

    def strings(self, name: str) -> list[str]:
        """A list of strings; one string is a list of one."""
        value = self._body.get(name)
        if value is None:
            return []
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
            raise wrong(name, "a string or an array of strings", value)
        return _few(name, values)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self._body.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise wrong(name, "an object", value)
        return value

    def refuse(self, names: Mapping[str, Harmless]) -> None:
        """Refuse fields that can't be honoured, by name."""
        for name in names.keys() & self._body.keys():
            value = self._body[name]
            if value is not None and not names[name](value):
                raise invalid(f"'{name}' is not supported yet{'' if name == 'json_schema' else f' (seen: {show(value)})'}")

    def log_unknown(self, known: frozenset[str]) -> None:
        unknown = self._body.keys() - known
        if unknown and log.isEnabledFor(logging.DEBUG):
            log.debug("fields that have no meaning here: %s", ", ".join(sorted(show(name) for name in unknown)))


def show(value: object) -> str:
    """A value for a message: not too long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "a huge number"
    return f"{text[:60]}..." if len(text) > 63 else text


def _few(name: str, values: list[str]) -> list[str]:
    if len(values) > STRINGS_MAX or sum(map(len, values)) > CHARACTERS_MAX:
        raise invalid(f"'{name}' can have at most {STRINGS_MAX} strings and {CHARACTERS_MAX} characters")
    return values


def wrong(name: str, want: str, value: object) -> ApiError:
    """400: the field is not what it has to be."""
    return invalid(f"'{name}' must be {want}, not {show(value)}")
