"""What ``Model(deterministic=True)`` holds, and what it needs.

A request's tokens and logprobs are then the same bit for bit, whatever runs beside it, whatever is kept of past prompts,
however its prompt is cut into passes, and with any number of threads. What they do depend on is the request itself with its
``seed``, the model file, the options of :class:`lfmfast.Model` that change numbers (`type_k`, `type_v`, `flash_attn`,
`repack`), the version of lfmfast, and the CPU kernels in use (``build_info()["kernels"]``): another kind of CPU rounds
otherwise. A limit in milliseconds can end an answer sooner.

Our kernels sum in one order for every number of rows. For attention, and for weights that are not quantised, ggml has faster
ways for many rows, whose sums run in another order; they are not used then. That costs a sixth of the speed at which a prompt
of 1,500 tokens is read (350M shape, Q4_K_M, two threads), less of a shorter one's, and less than a tenth of that of a step.

It does not hold, and is refused, with layers on a GPU, without our kernels, with weights of types that they lack (with
``repack=False`` all types are served, slowly), for requests with ``cache_reuse``, and for prefixes from files that were written
without it. Replies of past conversations that come back as text are split into tokens anew, as if they had not been seen.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from lfmfast._build import build_info
from lfmfast._model import read_gguf
from lfmfast.errors import ParameterError

__all__ = ["check_weights"]

_PLAIN = ("f32", "f16", "bf16")


def check_weights(path: str | os.PathLike[str], *, repack: bool) -> str:
    """Check that every matrix of a model is multiplied in a way that holds.

    Parameters
    ----------
    path : str or os.PathLike
        The GGUF file; of a split model, its first part.
    repack : bool
        Weights are put into the layouts of kernels.

    Returns
    -------
    str
        The name of the kernels in use, ``"none"`` where there are none.

    Raises
    ------
    ParameterError
        A type is in the hands of llama.cpp's repacked kernels.
    """
    info = build_info()
    held = {*_PLAIN, *info["kernel_types"]}
    first = Path(path)
    parts, split = [first], re.fullmatch(r"(.*)-00001-of-(\d{5})(\.gguf)", first.name)
    if split:
        parts = [first.with_name(f"{split[1]}-{i:05}-of-{split[2]}{split[3]}") for i in range(1, int(split[2]) + 1)]
    for part in parts if repack else []:
        for name, kind, *_ in read_gguf(part, max_elements=0)["tensors"]:
            if kind not in held:
                raise ParameterError(f"deterministic=True can't be held with weights of type {kind} ({name}): the types that "
                                     f"can be are {', '.join(sorted(held))}, or all of them with repack=False")  # fmt: skip
    return str(info["kernels"])
