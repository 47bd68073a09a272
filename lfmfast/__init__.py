"""Run Liquid AI's LFM2 and LFM2.5 models (GGUF) from Python, fast."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"  # the only place that has it: packages and plugins are built with this one

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
        ConstraintError,
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
        ToolRoundsError,
    )
    from lfmfast.functions import tool_of
    from lfmfast.model import Model
    from lfmfast.params import SamplingParams
    from lfmfast.prefix import Prefix
    from lfmfast.run_tools import tool_message
    from lfmfast.stream import Stream
    from lfmfast.tool_calls import CallDelta, ToolCall
    from lfmfast.types import Completion, Piece, Timings, TokenLogprob, Usage

# Where each public name lives. Imported at first use, so that `lfmfast --help` does not load the native engine.
_HOMES = {
    "lfmfast._build": ("build_info",),
    "lfmfast._engine": ("Engine",),
    "lfmfast.aio": ("AsyncChat", "AsyncModel", "AsyncStream"),
    "lfmfast.chat": ("Chat",),
    "lfmfast.errors": (
        "BusyError", "CancelledError", "ClosedError", "ConstraintError", "ContextFullError", "DeadlineError", "DecodeError",
        "ForkError", "HubError", "LfmfastError", "ModelLoadError", "ParameterError", "QueueFullError", "SamplingError",
        "StateError", "TemplateError", "ToolRoundsError",
    ),
    "lfmfast.functions": ("tool_of",),
    "lfmfast.model": ("Model",),
    "lfmfast.params": ("SamplingParams",),
    "lfmfast.prefix": ("Prefix",),
    "lfmfast.run_tools": ("tool_message",),
    "lfmfast.stream": ("Stream",),
    "lfmfast.tool_calls": ("CallDelta", "ToolCall"),
    "lfmfast.types": ("Completion", "Piece", "Timings", "TokenLogprob", "Usage"),
}  # fmt: skip
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AsyncChat",
    "AsyncModel",
    "AsyncStream",
    "BusyError",
    "CallDelta",
    "CancelledError",
    "Chat",
    "ClosedError",
    "Completion",
    "ConstraintError",
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
    "ToolCall",
    "ToolRoundsError",
    "Usage",
    "__version__",
    "build_info",
    "tool_message",
    "tool_of",
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
