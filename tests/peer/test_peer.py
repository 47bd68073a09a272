"""llama-server's own tests, on llama-server and then on ours. The first time llama-server is built, which takes minutes."""

from __future__ import annotations

import sys

import oracle
import pytest
from peer import model, plan, readme, rewrite, run

SOURCE = oracle.llama_cpp_dir() / "tools" / "server" / "tests"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not SOURCE.exists(), reason="an sdist has no tests of llama.cpp")
@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands for llama-server")
def test_the_suite_of_llama_server(tmp_path):
    results = run.compare(model.write(tmp_path / "tiny.gguf"), tmp_path)
    assert not [(r.name, r.why) for r in results if r.outcome == "failed"]
    assert readme.table(results) in readme.PATH.read_text("utf8"), "python -m peer.run --readme writes it anew"


@pytest.mark.skipif(not SOURCE.exists(), reason="an sdist has no tests of llama.cpp")
def test_its_tests_are_there_and_can_be_changed(tmp_path):
    where = run.suite(tmp_path)
    for name in plan.MODULES:
        text = (where / "unit" / f"{name}.py").read_text("utf8")
        compile(text, name, "exec")
        assert "_check('" in text and "\n    assert " not in text


def test_an_assertion_keeps_both_of_its_sides(tmp_path, monkeypatch):
    source = tmp_path / "test_x.py"
    source.write_text("def f(body):\n    assert body['n'] == 3 and body['text'], 'why'\n")
    seen = []
    monkeypatch.setattr(rewrite, "check", lambda site, left, name, right: seen.append((site, left(), name, right())))
    space: dict = {}
    exec(compile(rewrite.module(source), "x", "exec"), space)
    space["f"]({"n": 4, "text": ""})
    assert seen == [("test_x.py:2: body['n'] == 3", 4, "Eq", 3), ("test_x.py:2: body['text']", "", "", "")]


def test_every_reason_to_leave_a_test_out_has_a_test():
    text = readme.PATH.read_text("utf8")
    assert all(reason in text for reason in plan.LEFT_OUT.values())
