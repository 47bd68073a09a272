"""Thoughts and calls on the chat page, in a real browser."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_thoughts_are_folded_away(seen, backend):
    page = seen.ready()
    backend.answer, backend.pieces = "<think>\nIt is a greeting.\n</think>\n\nHello.", 4
    seen.ask()
    seen.ended()
    assert seen.answer.inner_text() == "Hello."
    assert not page.is_visible("text=It is a greeting.")
    page.click("summary")
    assert page.is_visible("text=It is a greeting.")


def test_thoughts_come_apart_and_go_back(seen, backend):
    page = seen.ready()
    backend.thoughts, backend.pieces, backend.hold_after = "It is a **greeting**.", 4, 3
    seen.ask()
    summary = page.locator(".thoughts summary")
    summary.wait_for()
    assert summary.inner_text() == "Thinking" and page.inner_text("#said") == "Thinking."
    assert page.locator("details.thoughts").get_attribute("open") is None and page.is_hidden("p.wait")
    page.keyboard.press("Escape")
    seen.ended()
    backend.hold_after = None
    page.click("text=Regenerate")
    seen.ended()
    assert summary.inner_text() == "Thoughts" and seen.answer.inner_text() == "Hello." and page.inner_text("#said") == "Hello."
    summary.focus()
    page.keyboard.press("Enter")
    assert page.inner_text(".thoughts .markdown") == "It is a greeting."
    page.keyboard.press("Space")
    assert page.is_hidden(".thoughts .markdown")
    seen.ask("and now?")
    seen.ended()
    assert backend.bodies[-1]["messages"][1] == {"role": "assistant", "content": "Hello.",
                                                 "reasoning_content": "It is a **greeting**."}  # fmt: skip
    assert "reasoning_content" not in backend.bodies[-1]["messages"][0]
    page.reload()
    seen.ready()
    assert page.locator(".thoughts summary").all_inner_texts() == ["Thoughts"] * 2


def test_thoughts_that_are_cut_off(seen, backend):
    page = seen.ready()
    backend.thoughts, backend.answer, backend.finish_reason = "It is a greeting.", "", "length"
    seen.ask()
    seen.ended()
    assert "Cut off at the token limit" in page.inner_text(".facts")
    assert page.inner_text(".thoughts summary") == "Thoughts" and page.is_hidden("p.wait")


def test_calls_are_shown_as_code(seen, backend):
    page = seen.ready()
    backend.answer, backend.finish_reason = "Let me see.", "tool_calls"
    backend.calls = [("get_weather", '{"city": "Paris"}'), ("run", '{"code": "```\\n<b>x</b>"}')]
    seen.ask()
    seen.ended()
    assert page.locator(".code pre").all_inner_texts() == ['get_weather({"city": "Paris"})', 'run({"code": "```\\n<b>x</b>"})']
    assert seen.answer.inner_text().startswith("Let me see.") and seen.errors == []
