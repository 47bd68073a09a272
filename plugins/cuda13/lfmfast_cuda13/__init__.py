"""ggml's CUDA backend for lfmfast, which finds it through the entry point of this package."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

from lfmfast_cuda13._build import LLAMA_CPP

__all__ = ["backend"]


def backend() -> dict[str, Any]:
    """What lfmfast asks a plugin for: its library, what that is made for, and what it needs."""
    return {
        "library": Path(__file__).with_name("liblfmfast-ggml-cuda.so"),
        "lfmfast": metadata.version("lfmfast-cuda13"),
        "llama_cpp": LLAMA_CPP,
        "needs": {"libcuda.so.1": "there is no NVIDIA driver"},
    }
