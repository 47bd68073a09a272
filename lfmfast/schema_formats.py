"""What stands for each `format` that is enforced: keywords that llguidance enforces. Other formats are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["FORMATS"]

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # not 0000
_MONTH_AND_DAY = ("(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
                  "|02-(?:0[1-9]|1[0-9]|2[0-8]))")
_DATE = f"(?:{_YEAR}-{_MONTH_AND_DAY}|{_LEAP_YEAR}-02-29)"
_HOURS = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_BASE64 = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_TIME = rf"{_HOURS}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:[Zz]|[+-]{_HOURS})"  # no leap seconds

#: `format` -> the keywords that stand for it. Dates and times are RFC 3339's, with the days that a month has.
FORMATS: Mapping[str, Mapping[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}$"},
    "date-time": {"pattern": f"^{_DATE}[Tt]{_TIME}$"},
    **{name: {"format": name} for name in ("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")},
    "base64": {"pattern": _BASE64},
    # OpenAPI's
    "byte": {"pattern": _BASE64},
    "int32": {"minimum": -(2**31), "maximum": 2**31 - 1},
    "int64": {"minimum": -(2**53), "maximum": 2**53},  # those that a double holds
    "float": {},
    "double": {},
    "password": {},
}
