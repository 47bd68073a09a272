"""What lfmfast was built from and with, and what it finds on this machine."""

from __future__ import annotations

import platform
import sys
import sysconfig
from typing import Any

import lfmfast
from lfmfast import _backends
from lfmfast._model import native_build_info


def build_info() -> dict[str, Any]:
    """Facts for a bug report.

    Returns
    -------
    dict
        ``version`` of lfmfast; ``llama_cpp`` build; ``compiler``; ``build_type``; ``cpu_variant``: which of a portable
        build's CPU backends was chosen for this machine (``"haswell"``), else ``"built in"``; ``cpu_flags`` that it
        was compiled with; ``cpu_features_compiled`` and ``cpu_features_found`` (lists of names); ``kernels``:
        the instruction set of lfmfast's own matrix products and attention on the CPU, ``"none"`` where they are switched off
        (``LFMFAST_KERNELS=0``) or there are none for this CPU; ``kernel_types`` of weights that they multiply (others
        go to ggml's); ``devices``, those of a plugin with its name; ``plugins`` that are installed, each with its devices or
        the reason why it is not used (none is with ``LFMFAST_PLUGINS=0``); ``python`` and ``platform`` that it runs on.

    Examples
    --------
    >>> build_info()["version"] == lfmfast.__version__
    True
    """
    info: dict[str, Any] = {"version": lfmfast.__version__}
    plugins = _backends.load_plugins()
    origin = {device: plugin.name for plugin in plugins for device in plugin.devices}
    devices = []
    for name, value in native_build_info():
        if name == "device":
            plugin = origin.get(value.partition(":")[0])
            devices.append(f"{value} (from {plugin})" if plugin else value)
        elif name.startswith(("cpu_features", "kernel_types")):
            info[name] = value.split()
        else:
            info[name] = value
    info["devices"] = devices
    info["plugins"] = [f"{plugin.name}: {plugin.problem or ', '.join(plugin.devices)}" for plugin in plugins]
    info["python"] = f"{platform.python_implementation()} {platform.python_version()}{_gil()}"
    info["platform"] = platform.platform()
    return info


def _gil() -> str:
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        return ""
    enabled = getattr(sys, "_is_gil_enabled")()  # noqa: B009  (type stubs of older versions lack it)
    return f" free-threaded, GIL {'on' if enabled else 'off'}"
