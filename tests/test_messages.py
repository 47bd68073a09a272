"""Messages that are made to fit a chat template, and those that are refused."""

from __future__ import annotations

import datetime
import json

import pytest
import template_oracle as oracle
from template_oracle import CALL, DATE, FILES, MORE_SPECIAL, SPECIAL, TOOL, assistant, template, user

from lfmfast.errors import ParameterError, TemplateError
from lfmfast.jinja_template import JinjaTemplate

# --- what is fixed, and what is refused ---


@pytest.mark.parametrize(("family", "written"), [
    ("lfm2", 'Yes<|tool_call_start|>[f(a="x\\"\'", n=1, b=True, l=["é", null])]<|tool_call_end|>'),
    ("lfm2.5-instruct", 'Yes<|tool_call_start|>[f(a="x\\"\'", n=1, b=True, l=["é", null])]<|tool_call_end|>'),
    ("lfm2.5-8b", "Yes<|tool_call_start|>[f(a='x\"'', n=1, b=True, l=['é', None])]<|tool_call_end|>"),
    ("lfm2.5-2.6b", "Yes<|tool_call_start|>[f(a='x\"\\'', n=1, b=True, l=[\"é\", null])]<|tool_call_end|>"),
    ("lfm2.5-vl", "<|tool_call_start|>[f(a=\"x\"'\", n=1, b=True, l=['é', None])]<|tool_call_end|>Yes"),
    ("lfm2-vl", 'Yes<|tool_call_start|>[f(a="x\\"\'", n=1, b=True, l=["é", null])]<|tool_call_end|>'),
])  # fmt: skip
def test_tool_calls_are_written(family, written):
    as_json = {"function": {"name": "f", "arguments": json.dumps(CALL["function"]["arguments"])}}
    bare = CALL["function"]
    jinja = JinjaTemplate(oracle.source(family), "<|startoftext|>", "<|im_end|>", frozenset(SPECIAL), DATE)
    for made in (template(family), jinja):
        for call in (CALL, as_json, bare) if made is not jinja else (CALL, as_json):
            found = made.render([user(), assistant(tool_calls=[call])], add_generation_prompt=False)
            assert found.text.endswith(f"<|im_start|>assistant\n{written}<|im_end|>\n")
            assert [s.text for s in found.segments if s.special][-3:-1] == ["<|tool_call_start|>", "<|tool_call_end|>"]


@pytest.mark.parametrize(("given_arguments", "written"), [
    ("", "f()"), (" ", "f()"), ("{}", "f()"), ("null", "f()"), (None, "f()"), ({}, "f()"),
    ('{"a": 1', 'f({"a": 1)'), ("[1]", "f([1])"),
    ('{"a": {"b": [1.5, "é"]}}', 'f(a={"b": [1.5, "é"]})'), ('{"a": "\\n"}', 'f(a="\\n")'), ({"a": float("inf")}, "f(a=inf)"),
])  # fmt: skip
def test_arguments(given_arguments, written):
    call = {"function": {"name": "f", "arguments": given_arguments}}
    text = template("lfm2").render([user(), assistant(None, tool_calls=[call])], add_generation_prompt=False).text
    assert text.endswith(f"assistant\n<|tool_call_start|>[{written}]<|tool_call_end|><|im_end|>\n")


def test_how_calls_are_enforced_is_not_told():
    function = TOOL["function"]
    wrapped = {**TOOL, "function": {**function, "strict": True}}
    for strict in (wrapped, {**function, "strict": True}, {**function, "strict": None}):
        plain = function if "name" in strict else TOOL
        for made in (template("lfm2"), JinjaTemplate(oracle.source("lfm2"), "<|startoftext|>", "", frozenset(SPECIAL), DATE)):
            assert made.render([user()], tools=[strict, "text"]).text == made.render([user()], tools=[plain, "text"]).text
            assert "strict" in made.render([user()], tools=[strict], fix_tool_calls=False).text
    assert "strict" in strict


@pytest.mark.parametrize("family", [*FILES, "jinja"])
def test_content_that_is_not_a_string(family):
    made = template(family) if family != "jinja" else JinjaTemplate(oracle.CHATML, "", "", frozenset(SPECIAL))
    joint = "\n" if family in ("lfm2", "lfm2.5-instruct", "jinja") else ""
    as_text = made.render([user(f"a{joint}{joint}b"), assistant(""), {"role": "tool", "content": ""}, user("ab")])
    as_parts = made.render(
        [
            user([{"type": "text", "text": text} for text in ("", "a", "", "b")]),
            assistant(None),
            {"role": "tool", "content": None},
            user(({"type": "text", "text": "ab"},)),
        ]
    )
    assert as_parts.segments == as_text.segments
    assert made.render([user("a"), {"role": "assistant"}]).text == made.render([user("a"), assistant("")]).text
    assert made.render([user("a"), assistant("b", tool_calls=None)]).text == made.render([user("a"), assistant("b")]).text
    assert made.render([user("a"), assistant("b", tool_calls=[])]).text == made.render([user("a"), assistant("b")]).text


@pytest.mark.parametrize("family", FILES)
def test_images(family):
    message = user([{"type": "text", "text": "<image>"}, {"type": "image"}, {"type": "text", "text": "b"}])
    if family in ("lfm2", "lfm2.5-instruct"):
        with pytest.raises(TemplateError, match=r"messages\[0\].content\[1\] has type 'image'"):
            template(family, MORE_SPECIAL).render([message])
    else:
        segments = template(family, MORE_SPECIAL).render([message]).segments
        assert segments[2:5] == [("user\n<image>", False), ("<image>", True), ("b", False)]


def test_developer_is_system():
    developer = {"role": "developer", "content": "S"}
    for made in (template("lfm2"), JinjaTemplate(oracle.CHATML, "", "", frozenset(SPECIAL))):
        assert made.render([developer, user()]).text == made.render([{**developer, "role": "system"}, user()]).text
    assert template("lfm2").extend([developer, user(), assistant(), user()], 3).n_blocks_kept == 3


@pytest.mark.parametrize(("messages", "said"), [
    ([], "messages is empty"), ("Hi", "must be a list of dicts, not str"), (user(), "must be a list of dicts, not dict"),
    ([user(), "Hi"], r"messages\[1\] must be a dict, not str"), ([{"content": "x"}], r"messages\[0\] needs a role"),
    ([{"role": 3, "content": "x"}], r"messages\[0\] needs a role .*, not 3"), ([{"role": "", "content": "x"}], "needs a role"),
    ([user(), {"role": "user"}], r"messages\[1\] has no content"), ([user(5)], r"messages\[0\].content must be .*, not int"),
    ([user({"type": "text"})], r"messages\[0\].content must be .*, not dict"), ([user(b"x")], "not bytes"),
    ([user([{"type": "video", "url": "x"}])], r"messages\[0\].content\[0\] has type 'video'"),
    ([user([{"type": "text", "text": 5}])], None), ([user([5])], None),
    ([user("a\ud800b")], r"messages\[0\].content isn't valid Unicode: character 1 is the lone surrogate U\+D800"),
    ([user(), assistant("x", tool_calls=[{"function": {"name": "f", "arguments": {"\udfff": 1}}}])], "lone surrogate"),
    ([user(), assistant("x", tool_calls=5)], None), ([user(), assistant("x", tool_calls=["f"])], None),
    ([user(), assistant("x", tool_calls=[{"function": {"name": 5}}])], None),
    ([user(), assistant("x", tool_calls=[{"function": {"name": "f", "arguments": {"a": object()}}}])], None),
])  # fmt: skip
def test_messages_that_are_refused(messages, said):
    for family in FILES:
        with pytest.raises(TemplateError, match=said):
            template(family).render(messages)
    if said:
        with pytest.raises(TemplateError, match=said):
            JinjaTemplate(oracle.CHATML, "", "", frozenset(SPECIAL)).render(messages)


@pytest.mark.parametrize(("tools", "said"), [
    ("f", "must be a list"), (TOOL, "must be a list"), ([5], r"tools\[0\] must be a dict, not int"),
    ([TOOL, {"name": object()}], r"tools\[1\]"), ([{"name": "\ud800"}], "lone surrogate"),
])  # fmt: skip
def test_tools_that_are_refused(tools, said):
    for made in (template("lfm2"), template("lfm2.5-vl"), JinjaTemplate(oracle.CHATML, "", "", frozenset(SPECIAL))):
        with pytest.raises(TemplateError, match=said):
            made.render([user()], tools=tools)


def test_template_variables():
    thoughts = [user(), assistant("<think>t</think>A"), user(), assistant("B")]
    for name in ("keep_past_thinking", "preserve_thinking"):  # either name
        assert "<think>t</think>A" in template("lfm2.5-instruct").render(thoughts, **{name: True}).text
        assert "<think>" not in template("lfm2.5-instruct").render(thoughts, **{name: False}).text
    with pytest.raises(TemplateError, match="no variable 'enable_thinking'; it knows keep_past_thinking"):
        template("lfm2.5-instruct").render([user()], enable_thinking=True)
    with pytest.raises(TemplateError, match="no variable 'x'; it knows none"):
        template("lfm2").render([user()], x=1)
    jinja = JinjaTemplate("{{ x }}{{ messages[0].content }}", "", "", frozenset(SPECIAL))
    assert jinja.render([user("a")], x="<|im_end|>").segments == [("<|im_end|>a", False)]
    with pytest.raises(TemplateError, match="'bos_token' is set by lfmfast"):
        jinja.render([user("a")], bos_token="x")


def test_continue_final_message():
    for made in (template("lfm2"), JinjaTemplate(oracle.CHATML, "", "", frozenset(SPECIAL))):
        text = made.render([user(), assistant("The answer is ")], continue_final_message=True).text
        assert text.endswith("<|im_start|>assistant\nThe answer is ")
        with pytest.raises(ParameterError, match="only one of them"):
            made.render([user(), assistant()], continue_final_message=True, add_generation_prompt=True)
        with pytest.raises(TemplateError, match="last message of the assistant, not of 'user'"):
            made.render([user()], continue_final_message=True)
    jinja = JinjaTemplate(
        oracle.CHATML.replace("+ message['content']", "+ message['content'] | trim"), "", "", frozenset(SPECIAL)
    )
    assert jinja.render([user(), assistant(" a ")], continue_final_message=True).text.endswith("assistant\na")
    silent = JinjaTemplate("{{ messages[0].content }}", "", "", frozenset(SPECIAL))
    with pytest.raises(TemplateError, match="doesn't render the final message"):
        silent.render([user(), assistant("a")], continue_final_message=True)


def test_jinja_tries_what_the_template_takes():
    """Arguments as JSON text or as a mapping, None as None or as an empty text."""
    wants_text = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '<' + c.function.arguments + '>' }}{% endfor %}{% endfor %}"
    )
    wants_mapping = wants_text.replace("c.function.arguments", "(c.function.arguments.items() | list | string)")
    message = assistant(None, tool_calls=[{"function": {"name": "f", "arguments": '{"a": 1}'}}])
    assert JinjaTemplate(wants_text, "", "", frozenset(SPECIAL)).render([message]).text == '<{"a": 1}>'
    assert JinjaTemplate(wants_mapping, "", "", frozenset(SPECIAL)).render([message]).text == "<[('a', 1)]>"
    knows_none = "{% if messages[0].content is none %}none{% else %}{{ messages[0].content }}{% endif %}"
    assert JinjaTemplate(knows_none, "", "", frozenset()).render([message]).text == "none"
    assert JinjaTemplate("[{{ messages[0].content }}]", "", "", frozenset(SPECIAL)).render([message]).text.startswith("[")
    assert "None" not in JinjaTemplate("[{{ messages[0].content }}]", "", "", frozenset()).render([message]).text


def test_the_date():
    text = template("lfm2.5-vl", date=datetime.date(2030, 1, 5)).render([user()], tools=[TOOL]).text
    assert "system\nToday's date: 2030-01-05\n\nList of tools: [{" in text
    today = template("lfm2.5-vl", date=None).render([user()], tools=[TOOL]).text
    assert any(f"Today's date: {datetime.date.today() - datetime.timedelta(days=n)}\n" in today for n in (0, 1))


def test_inputs_stay_as_they_were():
    messages = [user(), assistant(None, tool_calls=[CALL]), assistant("x")]
    before = json.dumps(messages)
    for made in (template("lfm2"), JinjaTemplate(oracle.CHATML, "", "", frozenset(SPECIAL))):
        made.render(messages, continue_final_message=True, tools=[TOOL])
        assert json.dumps(messages) == before
