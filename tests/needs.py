"""Programs that tests run: without one its tests are skipped on a developer's machine, and fail in CI."""

from __future__ import annotations

import os
import shutil

import pytest


def program(*names: str) -> str:
    """Path of the first of these programs that is there."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None and os.environ.get("CI", "") not in ("", "0", "false"):
        pytest.fail(f"{names[0]} is not installed, and in CI it has to be", pytrace=False)
    return found or pytest.skip(f"{names[0]} is not installed")
