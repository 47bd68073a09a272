"""What a release consists of: one version in all parts, workflows that GitHub understands, a complete source distribution."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import lfmfast

ROOT = Path(__file__).resolve().parent.parent


def toml(path: Path) -> dict[str, Any]:
    if sys.version_info < (3, 11):
        pytest.skip("needs tomllib")
    import tomllib

    return tomllib.loads(path.read_text("utf8"))


# --- the version ---


def test_one_place_has_the_version():
    written = re.findall(r'^__version__ = "([^"]+)"', (ROOT / "lfmfast" / "__init__.py").read_text("utf8"), re.M)
    assert written == [lfmfast.__version__]
    assert metadata.version("lfmfast") == lfmfast.__version__


@pytest.mark.parametrize("project", [path.parent.relative_to(ROOT).as_posix() for path in
                                     (ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml")))])  # fmt: skip
def test_packages_are_built_with_it(project: str):
    config = toml(ROOT / project / "pyproject.toml")
    assert "version" not in config["project"] and "version" in config["project"]["dynamic"]
    sources = [item for item in config["tool"]["dynamic-metadata"] if item.get("field") == "version"]
    assert [(ROOT / project / item["input"]).resolve() for item in sources] == [ROOT / "lfmfast" / "__init__.py"]


def test_the_changelog_begins_with_it():
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf8"), re.M)
    assert first is not None and first[1] == lfmfast.__version__
