"""Plugins: packages that bring ggml's library for a kind of GPU, such as lfmfast-cuda13.

A plugin has an entry point in the group ``lfmfast.backends``: a function without parameters that returns a dict of

- ``library``: path of the library, which has ggml's `ggml_backend_init`;
- ``lfmfast`` and ``llama_cpp``: the version and the build ("b11434") that it is made for;
- ``needs``, optional: names of libraries that the machine must have, and what their absence means
  (``{"libcuda.so.1": "there is no NVIDIA driver here"}``).

The name of the entry point is the name of lfmfast's extra that installs the plugin.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
import warnings
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import lfmfast
from lfmfast.errors import LfmfastError

__all__ = ["GROUP", "SWITCH", "Plugin", "load_plugins", "warn_of_cpu"]

GROUP = "lfmfast.backends"
SWITCH = "LFMFAST_PLUGINS"  # 0: no plugin is loaded

_logger = logging.getLogger("lfmfast")
_lock = threading.Lock()
_warned: set[str] = set()


@dataclass(frozen=True)
class Plugin:
    """An installed plugin, and what became of it."""

    name: str  #: of its package, with the version
    devices: tuple[str, ...] = ()  #: that it brought ("CUDA0")
    problem: str = ""  #: why it brought none


class _UnusableError(Exception):
    """Carries the reason."""


def load_plugins() -> tuple[Plugin, ...]:
    """Load what is installed, once in this process."""
    with _lock:  # a second caller waits until the devices are there
        return _loaded()


@functools.cache
def _loaded() -> tuple[Plugin, ...]:
    if os.environ.get(SWITCH) == "0":
        return ()
    plugins = tuple(_load(entry) for entry in metadata.entry_points(group=GROUP))
    for plugin in plugins:
        _logger.info("%s: %s", plugin.name, plugin.problem or f"found {', '.join(plugin.devices)}")
    return plugins


def _load(entry: metadata.EntryPoint) -> Plugin:
    name = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.name
    try:
        return Plugin(name, devices=_devices(entry))
    except _UnusableError as error:
        return Plugin(name, problem=str(error))
    except Exception as error:  # whatever another package's code raises
        return Plugin(name, problem=f"{type(error).__name__}: {error}")


def _devices(entry: metadata.EntryPoint) -> tuple[str, ...]:
    from lfmfast import _model  # which imports this module

    offer: dict[str, Any] = entry.load()()
    for part, ours in (("lfmfast", lfmfast.__version__), ("llama_cpp", dict(_model.native_build_info())["llama_cpp"])):
        if offer[part] != ours:
            raise _UnusableError(f"it is for {part.replace('_', '.')} {offer[part]}, and this is {ours}; "
                                 f"pip install 'lfmfast[{entry.name}]=={lfmfast.__version__}'")  # fmt: skip
    path = os.fspath(offer["library"])
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        meaning = next((text for name, text in offer.get("needs", {}).items() if name in str(error)), "can't be loaded")
        raise _UnusableError(f"{meaning} ({error})") from None
    if not hasattr(library, "ggml_backend_init"):
        raise _UnusableError(f"{path} is no backend of ggml: it has no ggml_backend_init")
    try:
        return tuple(_model.load_plugin(path))
    except LfmfastError as error:
        raise _UnusableError(str(error)) from None


def warn_of_cpu(n_gpu_layers: int) -> None:
    """Say why a model that was to be on a GPU is not, once for each reason."""
    reasons = [f"{plugin.name} can't be used: {plugin.problem}" for plugin in load_plugins() if plugin.problem]
    if not reasons and n_gpu_layers > 0:
        reasons = [f"n_gpu_layers is {n_gpu_layers}, but there is no GPU that this build or a plugin can use"]
    for reason in reasons:
        if reason not in _warned:
            _warned.add(reason)
            warnings.warn(f"the CPU is used. {reason}", RuntimeWarning, stacklevel=3)  # of who makes a Model
