"""How many slots `lfmfast serve` has, and how much context each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lfmfast.cli._options import UsageError

__all__ = ["Slots", "plan"]

DEFAULT_SLOTS = 4
#: Tokens of a slot if nothing is said, and the model was trained with as many.
DEFAULT_CTX = 8192


class Slots(NamedTuple):
    """The plan: `n` slots of `n_ctx` tokens each, and why it is so, for the user."""

    n: int
    n_ctx: int
    why: str


def plan(
    ctx_size: int | None, ctx_per_slot: int | None, parallel: int, unified: bool, n_ctx_train: Callable[[], int]
) -> Slots:
    """Divide what there is.

    Parameters
    ----------
    ctx_size : int, optional
        Of all slots together: -c. 0: what the model was trained with.
    ctx_per_slot : int, optional
        Of each, in place of `ctx_size`.
    parallel : int
        Negative: a usual number of slots, each of which can use all of `ctx_size`, as llama-server's do.
    unified : bool
        Each slot can use all of `ctx_size`, however many there are.
    n_ctx_train : callable
        Looks up how much the model was trained with.
    """
    if parallel == 0:
        raise UsageError("-np 0: there must be at least one slot")
    if ctx_size is not None and ctx_per_slot is not None:
        raise UsageError("give -c, the context of all slots together, or --ctx-per-slot, not both")
    n = parallel if parallel > 0 else DEFAULT_SLOTS
    if ctx_per_slot is not None:
        each = ctx_per_slot or n_ctx_train()
        return Slots(n, each, "--ctx-per-slot")
    if ctx_size is None:
        trained = n_ctx_train()
        each = min(DEFAULT_CTX, trained) if trained > 0 else DEFAULT_CTX
        return Slots(n, each, f"without -c; the model was trained with {trained}")
    total = ctx_size or n_ctx_train()
    given = f"-c {ctx_size}" if ctx_size else f"-c 0, the {total} of the model's training,"
    if parallel < 0 or unified or n == 1:
        return Slots(n, total, given if n == 1 else f"{given} is what each can use")
    if total // n < 1:
        raise UsageError(f"-c {total} is too little for {n} slots")
    return Slots(n, total // n, f"{given} is shared by {n} slots; --ctx-per-slot {total} would give each as much")
