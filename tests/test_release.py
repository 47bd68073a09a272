"""What a release consists of: one version in all parts, workflows that GitHub understands, a complete source distribution."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
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


# --- what GitHub reads ---

GITHUB = ROOT / ".github"
SCHEMAS = {**dict.fromkeys(GITHUB.glob("workflows/*.yml"), "github-workflows"),
           **dict.fromkeys(GITHUB.glob("ISSUE_TEMPLATE/*.yml"), "github-issue-forms"),
           GITHUB / "ISSUE_TEMPLATE" / "config.yml": "github-issue-config"}  # fmt: skip
in_checkout = pytest.mark.skipif(not GITHUB.exists(), reason="a source distribution has no .github")


def read_yaml(path: Path) -> Any:
    import yaml

    return yaml.safe_load(path.read_text("utf8"))


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *map(str, command)], cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", timeout=550)
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@in_checkout
@pytest.mark.parametrize("path", sorted(SCHEMAS), ids=lambda path: path.name)
def test_github_understands(path: Path):
    run("-m", "check_jsonschema", "--builtin-schema", f"vendor.{SCHEMAS[path]}", path, cwd=ROOT)


@in_checkout
def test_only_publishing_may_prove_who_it_is():
    may = []
    for path in GITHUB.glob("workflows/*.yml"):
        workflow = read_yaml(path)
        assert workflow["permissions"] == {"contents": "read"}, path
        may += [(path.name, name) for name, job in workflow["jobs"].items() if job.get("permissions")]
    assert may == [("wheels.yml", "publish")]
    publish = read_yaml(GITHUB / "workflows" / "wheels.yml")["jobs"]["publish"]
    assert publish["environment"] and "tag" in publish["if"] and "push" in publish["if"]
    assert {name for name in read_yaml(GITHUB / "workflows" / "wheels.yml")["jobs"] if name != "publish"} == {*publish["needs"]}


@in_checkout
@pytest.mark.parametrize("path", sorted(path for path, kind in SCHEMAS.items() if kind == "github-issue-forms"),
                         ids=lambda path: path.name)  # fmt: skip
def test_issues_ask_for_the_version(path: Path):
    labels = [field["attributes"]["label"] for field in read_yaml(path)["body"]]
    assert "lfmfast --version" in labels


# --- packages ---


def test_smoke(tmp_path: Path):
    assert run(ROOT / "tests" / "smoke.py", cwd=tmp_path).endswith("works\n")


@pytest.mark.slow
@in_checkout
def test_the_source_distribution_is_complete(tmp_path: Path):
    """That a build from it needs no network is what .ci/sdist shows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    run("-m", "build", "--sdist", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    (archive,) = tmp_path.iterdir()
    root = f"lfmfast-{lfmfast.__version__}"
    assert archive.name == f"{root}.tar.gz"
    with tarfile.open(archive) as tar:
        there = {name.removeprefix(f"{root}/") for name in tar.getnames()}
    wanted = {name for name in listed.stdout.split("\0") if name and not name.startswith(".") and (ROOT / name).exists()}
    assert wanted - there == set()
    assert {"PKG-INFO", "extern/llama.cpp/CMakeLists.txt", "extern/llama.cpp/include/llama.h"} <= there
    assert not [name for name in there if name.startswith(("build/", "dist/", "extern/.")) or name.endswith((".so", ".pyc"))]
