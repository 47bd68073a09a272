"""The price list of `lfmfast.jinja_sandbox`: what a chat template pays for before it is done.

One budget per rendering (and thread), in characters. Sizes are those of trees: a list that holds the same list twice counts it
twice, since printing or comparing it goes through it twice. As no value is above MAX_VALUE, no single operation is long.
"""

from __future__ import annotations

import datetime
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.runtime import LoopContext, Macro
from jinja2.utils import Namespace

from lfmfast.errors import TemplateError

MAX_SOURCE = 1 << 17  # characters of a template: it takes about half a second to compile
MAX_VALUE = 1 << 22  # characters of a string; a container counts as what it holds, again for each time it holds it
MAX_WORK = 1 << 26  # characters and steps of a whole rendering
MAX_SECONDS = 5.0  # of computing: a busy machine makes no template a bad one
MAX_DEPTH = 64  # macros within macros
ITEM = 16  # an element of a container, or a step of a loop, in characters
MAX_BITS = 4096  # of an integer


class Budget(threading.local):
    """What the rendering that runs in this thread may still spend."""

    work = 0
    deadline = 0.0
    depth = 0
    sizes: dict[int, tuple[Any, int]]  # by id; the object too, so that its id stays its own
    now: datetime.date | None = None
    mark = ""

    def start(self, now: datetime.date | None, mark: str) -> None:
        self.work, self.deadline, self.depth = MAX_WORK, time.thread_time() + MAX_SECONDS, 0
        self.sizes, self.now, self.mark = {}, now, mark

    def stop(self) -> None:
        self.work, self.sizes = 0, {}


budget = Budget()


def pay(amount: int) -> None:
    budget.work -= amount
    if budget.work < 0:
        raise TemplateError(f"the chat template does too much work (limit {MAX_WORK} characters and steps)")
    if time.thread_time() > budget.deadline:
        raise TemplateError(f"the chat template takes too long (limit {MAX_SECONDS:g} s)")


def pay_for_value(size: int) -> None:
    if size > MAX_VALUE:
        raise TemplateError(f"the chat template makes a value that is too large ({size} characters, limit {MAX_VALUE})")
    pay(size)


def size_of(value: Any) -> int:
    """Size of the tree under ``value``: what printing, comparing or copying it could cost."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return 1 + value.bit_length() // 3
    if isinstance(value, range):
        return len(value) * ITEM
    if not isinstance(value, (list, tuple, Mapping, type({}.keys()), type({}.values()), type({}.items()))):
        return 8
    known = budget.sizes.get(id(value))
    if known is not None:
        return known[1]
    total = ITEM
    parts: Iterable[Any] = value.items() if isinstance(value, Mapping) else value
    for part in parts:
        total += ITEM + size_of(part)
        if total > MAX_VALUE:
            break
    budget.sizes[id(value)] = value, total
    return total


def made(value: Any) -> Any:
    """Pays for a value that is a part of others, and so was bounded before it was made."""
    if isinstance(value, Iterator):
        value = list(steps(value))
    if isinstance(value, str):
        pay_for_value(len(value))
    elif isinstance(value, (list, tuple, dict)):
        pay_for_value(len(value) * ITEM)
    return value


def whole(value: Any) -> Any:
    """Pays for a new container with everything under it."""
    pay_for_value(size_of(value))
    return value


def steps(values: Any) -> Iterator[Any]:
    for value in values:
        pay(ITEM)
        yield value


def text_of(value: Any) -> str:
    """``str(value)`` for what a template may print."""
    if isinstance(value, str):
        return value
    if isinstance(value, (Namespace, Macro, LoopContext)) or (callable(value) and not isinstance(value, jinja2.Undefined)):
        raise SecurityError(f"the chat template prints an object of type {type(value).__name__!r}")
    pay_for_value(4 * size_of(value))  # repr() may escape
    return str(value)


def emit(value: Any) -> str:
    text = text_of(value)
    pay(len(text) + 1)
    return text


def emit_literal(size: int) -> str:
    pay(size + 1)
    return ""


def concat(*values: Any) -> str:
    texts = [text_of(value) for value in values]
    pay_for_value(sum(map(len, texts)))
    return "".join(texts)


def check_binop(operator: str, left: Any, right: Any) -> None:
    numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
    if numbers:
        if isinstance(left, float) or isinstance(right, float):
            return
        bits, more = left.bit_length(), right.bit_length()
        if (bits * max(right, 0) if operator == "**" else bits + more) > MAX_BITS:
            raise TemplateError(f"the chat template makes an integer of more than {MAX_BITS} bits")
    elif operator == "*":
        count, value = (left, right) if isinstance(left, int) else (right, left)
        if isinstance(count, int):
            pay_for_value(size_of(value) * max(count, 0))
    elif operator == "%" and isinstance(left, str):
        if re.search(r"%[^%a-zA-Z]*[\d*]", left):
            raise SecurityError("the chat template formats text with a width")
        pay_for_value(len(left) + 4 * left.count("%") * size_of(right))
    else:
        pay_for_value(size_of(left) + size_of(right))


def check_replace(text: str, old: str, new: str) -> None:
    pay_for_value(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def check_join(glue: str, values: Any) -> None:
    pay_for_value(size_of(values) + len(glue) * len(values))


def check_method(owner: Any, name: str, args: tuple[Any, ...]) -> None:
    if name == "replace" and len(args) >= 2:
        check_replace(owner, *args[:2])
    elif name == "join" and args:
        check_join(owner, args[0])
    elif name in ("split", "rsplit", "splitlines"):
        glue = args[0] if args and isinstance(args[0], str) and args[0] else None
        pay_for_value(len(owner) + ITEM * (owner.count(glue) if glue else len(owner) // 2))


def check_format(template: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if re.search(r"\{[^{}]*[:!.\[]", template):
        raise SecurityError("the chat template formats text with more than plain {} fields")
    pay_for_value(len(template) + 4 * template.count("{") * size_of([args, kwargs]))
