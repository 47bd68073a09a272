"""The examples in docstrings and in the README run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lfmfast
from lfmfast import Model

README = Path(__file__).parent.parent / "README.md"
FOUND = [module.name for module in pkgutil.walk_packages(lfmfast.__path__, "lfmfast.")]
MODULES = sorted(name for name in FOUND if not re.search("__main__|liblfmfast", name))


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str, lfm2_tiny: Model, lfm2_tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(name)
    extra: dict[str, Any] = {"demo_path": lfm2_tiny_path, "lfmfast": lfmfast}
    if name != "lfmfast.model":  # its example opens its own
        extra["model"] = lfm2_tiny
    opened: list[Model] = []
    monkeypatch.setattr(Model, "__init__", remember(Model.__init__, opened))
    result = doctest.testmod(module, extraglobs=extra, optionflags=doctest.ELLIPSIS, verbose=False)
    for model in opened:
        model.close()
    assert result.failed == 0


def remember(init: Any, opened: list[Model]) -> Any:
    def wrapped(self: Model, *args: Any, **options: Any) -> None:
        init(self, *args, **{"n_threads": 1, **options})
        opened.append(self)

    return wrapped


def test_the_examples_are_found() -> None:
    import lfmfast.chat
    import lfmfast.model

    found = [case for module in (lfmfast.chat, lfmfast.model) for case in doctest.DocTestFinder().find(module) if case.examples]
    assert len(found) >= 2


def python_blocks() -> Iterator[str]:
    return (match[1] for match in re.finditer(r"```python\n(.*?)```", README.read_text("utf8"), re.DOTALL))


def test_readme(lfm2_tiny_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The README's Python, with the small model in place of the one that it downloads."""
    opened = []

    def open_tiny(name: str, **options: Any) -> Model:
        opened.append(Model(lfm2_tiny_path, n_threads=1, **options))
        return opened[-1]

    monkeypatch.setattr(Model, "from_pretrained", open_tiny)
    blocks = list(python_blocks())
    assert len(blocks) >= 3
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
    shown = capsys.readouterr().out
    assert "Machine learning is a way for computers to learn patterns from data." in shown
    assert "Your name is Ada." in shown
    for model in opened:
        model.close()
