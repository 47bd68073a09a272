"""The sampling parameters of a request: one frozen object, checked once, where None means "not set"."""

from __future__ import annotations

import difflib
import functools
import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, fields
from typing import Any, NamedTuple

from lfmfast.errors import ParameterError

__all__ = ["NEUTRAL", "RANGES", "SAMPLERS", "SamplingParams"]

# The stages of the chain in their default order, by llama.cpp's names.
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
_SAMPLER_ALIASES = {"typical_p": "typ_p", "typical": "typ_p", "temp": "temperature"}


class Range(NamedTuple):
    """What a number may be."""

    kind: type  # int or float
    low: float
    high: float
    note: str = ""

    @property
    def text(self) -> str:
        kind = "an integer" if self.kind is int else "a number"
        return f"{kind} from {self.low:g} to {self.high:.10g}{self.note}"


#: Limits of the fields that are numbers.
RANGES = {
    "temperature": Range(float, 0.0, 1e6, " (0 is greedy)"),
    "top_k": Range(int, -1, 2**31 - 1, " (0 or -1 is off)"),
    "top_p": Range(float, 0.0, 1.0, " (1 is off)"),
    "min_p": Range(float, 0.0, 1.0, " (0 is off)"),
    "repeat_penalty": Range(float, 1e-6, 1e6, " (1 is off)"),
    "repeat_last_n": Range(int, -1, 2**31 - 1, " (0 is off, -1 the whole context)"),
    "frequency_penalty": Range(float, -1e6, 1e6, " (0 is off)"),
    "presence_penalty": Range(float, -1e6, 1e6, " (0 is off)"),
    "seed": Range(int, -1, 2**32 - 2, " (-1 or None is a new one each time)"),
    "typical_p": Range(float, 0.0, 1.0, " (1 is off)"),
    "top_n_sigma": Range(float, -1.0, 1e6, " (0 or less is off)"),
    "xtc_probability": Range(float, 0.0, 1.0, " (0 is off)"),
    "xtc_threshold": Range(float, 0.0, 1.0, " (more than 0.5 is off)"),
    "dynatemp_range": Range(float, 0.0, 1e6, " (0 is off)"),
    "dynatemp_exponent": Range(float, 0.0, 1e6),
    "dry_multiplier": Range(float, 0.0, 1e6, " (0 is off)"),
    "dry_base": Range(float, 0.0, 1e6, " (less than 1 is off)"),
    "dry_allowed_length": Range(int, 0, 2**31 - 1),
    "dry_penalty_last_n": Range(int, -1, 2**31 - 1, " (0 is off, -1 the whole context)"),
    "mirostat": Range(int, 0, 2, " (0 is off)"),
    "mirostat_tau": Range(float, 0.0, 1e6),
    "mirostat_eta": Range(float, 0.0, 1e6),
    "min_keep": Range(int, 0, 2**31 - 1),
}


def _show(value: object) -> str:
    text = repr(value)
    return f"{text[:60]}..." if len(text) > 63 else text


def _number(name: str, value: object, limits: Range) -> float | int:
    kind = numbers.Integral if limits.kind is int else numbers.Real
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ParameterError(f"{name} must be {limits.text}, not {_show(value)} ({type(value).__name__})")
    number: Any = value  # mypy knows no comparisons of numbers.Real
    if not limits.low <= number <= limits.high:  # true for NaN too
        raise ParameterError(f"{name} must be {limits.text}, not {_show(value)}")
    return int(number) if limits.kind is int else float(number)


def _logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ParameterError(f"logit_bias must map token ids to numbers, not be {_show(value)} ({type(value).__name__})")
    out = {}
    for token, bias in value.items():
        token = _number("a token id in logit_bias", token, Range(int, 0, 2**31 - 1))
        if not (isinstance(bias, numbers.Real) and bias == -math.inf):
            bias = _number(f"logit_bias of token {token}", bias, Range(float, -1e6, 1e6, ", or -inf"))
        out[int(token)] = float(bias)
    return out


def _strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ParameterError(f"{name} must be a list of strings, not {_show(value)} ({type(value).__name__})")
    out = tuple(value)
    for item in out:
        if not isinstance(item, str):
            raise ParameterError(f"{name} must be a list of strings; it contains {_show(item)} ({type(item).__name__})")
    return out


def _closest(name: str, known: Iterable[str]) -> str:
    match = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {match[0]!r}?" if match else ""


def _samplers(value: object) -> tuple[str, ...]:
    out = []
    for item in _strings("samplers", value):
        name = item.strip().lower().replace("-", "_")
        name = _SAMPLER_ALIASES.get(name, name)
        if name not in SAMPLERS:
            raise ParameterError(f"samplers: there is no {item!r}{_closest(name, SAMPLERS)} (known: {', '.join(SAMPLERS)})")
        if name in out:
            raise ParameterError(f"samplers: {item!r} is listed twice")
        out.append(name)
    return tuple(out)


def _breakers(value: object) -> tuple[str, ...]:
    return tuple(item for item in _strings("dry_sequence_breakers", value) if item)


@dataclass(frozen=True, kw_only=True, repr=False)
class SamplingParams:
    """How the next token is picked. Fields left at None are not set: the model's own defaults apply.

    The names are llama-server's. `repetition_penalty` is taken as another name of `repeat_penalty`. The stages and their
    arithmetic are llama.cpp's, so the same logits, parameters and seed give the same tokens.

    Parameters
    ----------
    temperature : float
        Divides the logits; 0 always takes the most probable token, 1 is neutral.
    top_k : int
        Keep the k most probable tokens; 0 and -1 switch it off.
    top_p, min_p, typical_p : float
        Nucleus, minimal relative and locally typical probability; 1, 0 and 1 switch them off.
    repeat_penalty, frequency_penalty, presence_penalty : float
        Penalties for tokens among the last `repeat_last_n` ones, the prompt's included; 1, 0 and 0 switch them off.
    repeat_last_n : int
        The penalties' window; 0 switches them off, -1 is the whole context.
    logit_bias : mapping of int to float
        Added to the logits of single tokens; -inf forbids one.
    seed : int
        0 to 4294967294 for a repeatable stream; -1 and None for a new one each time.
    dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers
        DRY repetition penalty; a multiplier of 0 switches it off.
    top_n_sigma, xtc_probability, xtc_threshold, dynatemp_range, dynatemp_exponent : float
        Top-n-sigma, XTC and dynamic temperature.
    mirostat : int
        1 or 2 replaces every stage but logit_bias and temperature by Mirostat with `mirostat_tau` and `mirostat_eta`.
    min_keep : int
        The truncating stages keep at least this many tokens.
    ignore_eos : bool
        Forbids the end-of-generation tokens.
    samplers : sequence of str
        The stages to run, in order, if not the default (`lfmfast.params.SAMPLERS`).

    Raises
    ------
    ParameterError
        For a value outside its limits, a wrong type or an unknown name.

    Examples
    --------
    >>> SamplingParams(temperature=0.3, repetition_penalty=1.05)
    SamplingParams(temperature=0.3, repeat_penalty=1.05)
    >>> SamplingParams(temperature=0.3, top_k=50).merged(SamplingParams(top_k=0))
    SamplingParams(temperature=0.3, top_k=0)
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: tuple[str, ...] | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    min_keep: int | None = None
    ignore_eos: bool | None = None
    samplers: tuple[str, ...] | None = None
    repetition_penalty: InitVar[float | None] = None

    def __post_init__(self, repetition_penalty: float | None) -> None:
        if repetition_penalty is not None:
            if self.repeat_penalty is not None:
                raise ParameterError("repeat_penalty and repetition_penalty are the same; give one")
            object.__setattr__(
                self, "repeat_penalty", _number("repetition_penalty", repetition_penalty, RANGES["repeat_penalty"])
            )
        for name, limits in RANGES.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _number(name, value, limits))
        for name, check in (("logit_bias", _logit_bias), ("samplers", _samplers), ("dry_sequence_breakers", _breakers)):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check(value))
        if self.ignore_eos is not None and not isinstance(self.ignore_eos, bool):
            raise ParameterError(f"ignore_eos must be True or False, not {_show(self.ignore_eos)}")

    def __repr__(self) -> str:
        return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in self.as_dict().items())})"

    def as_dict(self) -> dict[str, Any]:
        """The fields that are set."""
        return {name: value for name in _FIELDS if (value := getattr(self, name)) is not None}

    def merged(self, over: SamplingParams | None = None, /, **overrides: Any) -> SamplingParams:
        """These parameters, with the fields that `over` and then `overrides` set replaced by theirs."""
        if over is None and not overrides:
            return self
        values = self.as_dict()
        if over is not None:
            values |= over.as_dict()
        if overrides:
            values |= SamplingParams(**overrides).as_dict()
        merged = object.__new__(SamplingParams)  # each value was checked where it came from
        for name in _FIELDS:
            object.__setattr__(merged, name, values.get(name))
        return merged

    def resolved(self, defaults: SamplingParams | None = None) -> SamplingParams:
        """These parameters with every field set: what is missing comes from `defaults`, then from `NEUTRAL`."""
        if all(getattr(self, name) is not None for name in _FIELDS):  # another check of them would be wasted
            return self
        base = NEUTRAL if defaults is None else NEUTRAL.merged(defaults)
        return base.merged(self)


_FIELDS = tuple(f.name for f in fields(SamplingParams))
_NAMES = (*_FIELDS, "repetition_penalty")
_checked_init = SamplingParams.__init__


@functools.wraps(_checked_init)
def _init(self: SamplingParams, **values: Any) -> None:
    for name in values:
        if name not in _NAMES:
            raise ParameterError(f"there is no sampling parameter {name!r}{_closest(name, _NAMES)}")
    _checked_init(self, **values)


SamplingParams.__init__ = _init  # type: ignore[method-assign]

#: Every stage off: the model's own distribution.
NEUTRAL = SamplingParams(
    temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0, repeat_last_n=64, frequency_penalty=0.0,
    presence_penalty=0.0, logit_bias={}, seed=-1, typical_p=1.0, top_n_sigma=-1.0, xtc_probability=0.0, xtc_threshold=0.1,
    dynatemp_range=0.0, dynatemp_exponent=1.0, dry_multiplier=0.0, dry_base=1.75, dry_allowed_length=2, dry_penalty_last_n=64,
    dry_sequence_breakers=("\n", ":", '"', "*"), mirostat=0, mirostat_tau=5.0, mirostat_eta=0.1, min_keep=0, ignore_eos=False,
    samplers=SAMPLERS,
)  # fmt: skip
