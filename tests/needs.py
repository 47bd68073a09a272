"""Programs and modules that tests need: without one its tests are skipped on a developer's machine, and fail in CI."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import sysconfig

import pytest


def is_ci() -> bool:
    return os.environ.get("CI", "") not in ("", "0", "false")


def program(*names: str) -> str:
    """Path of the first of these programs that is there."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None and is_ci():
        pytest.fail(f"{names[0]} is not installed, and in CI it has to be", pytrace=False)
    return found or pytest.skip(f"{names[0]} is not installed")


def module(name: str) -> None:
    """Skip what needs a module that is not there; in CI on Linux `.ci/run` has to have installed it."""
    try:
        importlib.import_module(name)
    except ImportError:
        has_gil = not sysconfig.get_config_var("Py_GIL_DISABLED")  # of what `.ci/run` installs some has no free-threaded wheels
        if is_ci() and sys.platform == "linux" and has_gil:
            pytest.fail(f"{name} is not installed, and in CI it has to be", pytrace=False)
        pytest.skip(f"{name} is not installed")
