"""Run Liquid AI's LFM2 and LFM2.5 models (GGUF) from Python, fast."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

logging.getLogger("lfmfast").addHandler(logging.NullHandler())  # quiet unless the application configures logging

if TYPE_CHECKING:
    from lfmfast._build import build_info
    from lfmfast._engine import Engine
    from lfmfast.aio import AsyncChat, AsyncModel, AsyncStream
    from lfmfast.chat import Chat
    from lfmfast.errors import (
        BusyError,
        CancelledError,
        ClosedError,
        ContextFullError,
        DeadlineError,
        DecodeError,
        ForkError,
        HubError,
        LfmfastError,
        ModelLoadError,
        ParameterError,
        QueueFullError,
        SamplingError,
        StateError,
        TemplateError,
    )
    from lfmfast.model import Model
    from lfmfast.params import SamplingParams
    from lfmfast.prefix import Prefix
    from lfmfast.stream import Stream
    from lfmfast.types import Completion, Piece, Timings, TokenLogprob, Usage

# Where each public name lives. Imported at first use, so that `lfmfast --help` does not load the native engine.
_HOMES = {
    "lfmfast._build": ("build_info",),
    "lfmfast._engine": ("Engine",),
    "lfmfast.aio": ("AsyncChat", "AsyncModel", "AsyncStream"),
    "lfmfast.chat": ("Chat",),
    "lfmfast.errors": (
        "BusyError", "CancelledError", "ClosedError", "ContextFullError", "DeadlineError", "DecodeError", "ForkError",
        "HubError", "LfmfastError", "ModelLoadError", "ParameterError", "QueueFullError", "SamplingError", "StateError",
        "TemplateError",
    ),
    "lfmfast.model": ("Model",),
    "lfmfast.params": ("SamplingParams",),
    "lfmfast.prefix": ("Prefix",),
    "lfmfast.stream": ("Stream",),
    "lfmfast.types": ("Completion", "Piece", "Timings", "TokenLogprob", "Usage"),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AsyncChat",
    "AsyncModel",
    "AsyncStream",
    "BusyError",
    "CancelledError",
    "Chat",
    "ClosedError",
    "Completion",
    "ContextFullError",
    "DeadlineError",
    "DecodeError",
    "Engine",
    "ForkError",
    "HubError",
    "LfmfastError",
    "Model",
    "ModelLoadError",
    "ParameterError",
    "Piece",
    "Prefix",
    "QueueFullError",
    "SamplingError",
    "SamplingParams",
    "StateError",
    "Stream",
    "TemplateError",
    "Timings",
    "TokenLogprob",
    "Usage",
    "__version__",
    "build_info",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lfmfast' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_HOME[name]), name)
    except ImportError as error:
        if importlib.util.find_spec("lfmfast._model") is None:
            raise ImportError(
                f"lfmfast's native modules are not built here ({__path__[0]}). If this is the source folder, run "
                "`pip install .` in it and import lfmfast from another folder, or use `pip install -e .`."
            ) from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
