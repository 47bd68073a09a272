"""Models and prompts for tests that compare numbers exactly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from lfmfast import Model


def opened(path: Path, **options: Any) -> Model:
    """A model whose batches of several sequences give the numbers of each by itself."""
    return Model(path, **{"n_ctx": 512, "n_threads": 1, "n_gpu_layers": 0, "type_k": "f32", "type_v": "f32",
                          "flash_attn": False, **options})  # fmt: skip


def numbers(n: int, seed: int = 0) -> list[int]:
    """Token ids, the same ones for a seed."""
    rng = random.Random(seed)
    return [rng.randrange(20, 400) for _ in range(n)]
