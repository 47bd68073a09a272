"""The prompt of a conversation is llama-server's."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from template_oracle import FILES, template, user

from lfmfast.server.conversation import read_conversation
from lfmfast.server.settings import Settings
from lfmfast.templates import ChatTemplate, chat_template_for


def prompt(template: ChatTemplate, *messages: dict[str, Any], **body: Any) -> str:
    """Of a body with these messages, for a model with this template."""
    state: Any = SimpleNamespace(settings=Settings(), model=SimpleNamespace(model=SimpleNamespace(template=template)))
    asked = read_conversation({"messages": list(messages), **body}, state)
    return template.render(asked.messages, **asked.template_options).text


def jinja(source: str) -> ChatTemplate:
    return chat_template_for(source, bos_token="", eos_token="", special_tokens=[])


@pytest.mark.parametrize("family", FILES)
def test_texts_of_a_message_are_joined_as_llama_server_joins_them(family):
    parts = [{"type": "text", "text": text} for text in ("", "a", "", "b")]
    joint = "" if family.endswith("-vl") else "\n\n"  # found with llama-server's /apply-template
    assert f"user\na{joint}b<|im_end|>" in prompt(template(family), user(parts))


@pytest.mark.parametrize("family", FILES)
def test_a_begun_message_in_parts(family):
    begun = {"role": "assistant", "content": [{"type": "text", "text": text} for text in ("", "a", "b")]}
    state: Any = SimpleNamespace(settings=Settings(), model=SimpleNamespace(model=SimpleNamespace(template=template(family))))
    assert read_conversation({"messages": [user("x"), begun]}, state).messages[-1]["content"] == "a\n\nb"


def test_parts_that_are_no_texts_reach_the_template():
    for family in FILES:
        if family not in ("lfm2", "lfm2.5-instruct"):
            parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
            assert "user\na<image>b<|im_end|>" in prompt(template(family), user(parts))


def test_templates_of_other_families_know_the_date():
    today = datetime.date.today()
    dated = jinja("{% for m in messages %}{{ m.content }}{% endfor %} {{ date_string }}, {{ datetime }}")
    assert prompt(dated, user("a")) == f"a {today:%d %b %Y}, {today:%b %d %Y}"
    assert prompt(dated, user("a"), chat_template_kwargs={"date_string": "now"}) == f"a now, {today:%b %d %Y}"


def test_templates_of_other_families_think_unless_they_are_told_not_to():
    asking = jinja("{% for m in messages %}{{ m.content }}{% endfor %}{% if not enable_thinking %}</think>{% endif %}")
    assert prompt(asking, user("a")) == "a"
    assert prompt(asking, user("a"), chat_template_kwargs={"enable_thinking": False}) == "a</think>"
