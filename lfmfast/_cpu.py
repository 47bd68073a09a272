"""How many threads and how much memory to use when nobody says."""

from __future__ import annotations

import math
import os
import pathlib

__all__ = ["cpu_count", "default_cache_bytes", "default_threads", "memory_bytes", "threads_of"]


def default_threads() -> int:
    """Physical cores that this process may use, within its container's CPU quota.

    Two threads on one core's two hardware threads make a matrix product slower, not faster.
    """
    return max(1, min(_n_cores(), _quota(), 512))


def threads_of(cpus: float) -> int:
    """Threads for a share of this machine: of so many CPUs as the system counts them, the physical cores.

    >>> threads_of(0.5)
    1
    """
    return max(1, min(int(cpus * _n_cores() / cpu_count()), default_threads()))


def cpu_count() -> int:
    """CPUs that this process may use, as the system counts them."""
    return len(_cpus())


def _cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _n_cores() -> int:
    return len({_core(cpu) for cpu in _cpus()})


def _core(cpu: int) -> object:
    try:
        return (pathlib.Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")).read_text("ascii")
    except (OSError, ValueError):
        return cpu


def _quota() -> int:
    """CPUs that the cgroup grants, rounded up."""
    try:  # version 2
        limit, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
    except (OSError, ValueError):
        try:  # version 1
            root = pathlib.Path("/sys/fs/cgroup/cpu")
            limit, period = ((root / name).read_text("ascii").strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        except (OSError, ValueError):
            return 1 << 16
    return max(1, math.ceil(int(limit) / int(period))) if limit.isdigit() and int(period) > 0 else 1 << 16


def default_cache_bytes() -> int:
    """An eighth of the memory that this process may use, at most 8 GiB."""
    return min(memory_bytes() // 8, 8 << 30)


def memory_bytes() -> int:
    """Memory that this process may use; 8 GiB where that can't be told."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 8 << 30
    return min(total, _memory_limit())


def _memory_limit() -> int:
    """Bytes that the cgroup grants."""
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(pathlib.Path(name).read_bytes())
        except (OSError, ValueError):  # "max": none
            continue
    return 1 << 62
