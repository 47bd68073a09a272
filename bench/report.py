"""What every benchmark prints: machine, build, files, and spreads instead of single numbers."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path


def cpu_name() -> str:
    """Model name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    """One line about the machine."""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{cpu_name()}, {cpu_count()} CPUs, {system}{load}"


def file(path: Path) -> str:
    """Name and size of a model file."""
    return f"{path.name} ({path.stat().st_size / 1e6:,.0f} MB)"


def spread(values: Sequence[float], digits: int = 1) -> str:
    """min / median / max."""
    return " / ".join(f"{v:.{digits}f}" for v in (min(values), statistics.median(values), max(values)))
