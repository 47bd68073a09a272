"""Which format a template is: by what its source does, so that a near miss is not taken for a known one."""

from __future__ import annotations

import pytest
import template_oracle as oracle
from template_oracle import CALL, DATE, FILES, SPECIAL, TOOL, assistant, user

from lfmfast.errors import TemplateError
from lfmfast.templates import chat_template_for, template_family


@pytest.mark.parametrize("family", FILES)
def test_family_survives_harmless_edits(family):
    source = oracle.source(family)
    for edited in (
        source,
        source + "\n",
        source.replace("    {%-", "\t{%-"),
        source.replace("{%-", "{%-  "),
        "{# note #}" + source,
    ):
        assert template_family(edited) == family


MUTATIONS = {
    "lfm2": [
        ("+ content +", "+ content | trim +"),
        ('"tool"', '"user"'),
        ('("\\n" if', '("\\n\\n" if'),
        ('", "', '","'),
        ("[1:]", "[2:]"),
        ("| tojson", "| string"),
        ("bos_token", "eos_token"),
    ],
    "lfm2.5-instruct": [
        ("[-1]", "[0]"),
        (" | trim", ""),
        ("!= ns.last", "== ns.last"),
        ("not keep_past", "keep_past"),
        ("default(false)", "default(true)"),
        ('<|im_end|>\\n" -}}\n{%- endfor', '<|im_end|>" -}}\n{%- endfor'),
        ('== "assistant" and', '== "assistant" and enable_thinking and'),
        ('"system"', '"developer"'),
    ],
    "lfm2.5-8b": [
        ("> ns.last", "!= ns.last"),
        ("'\" + arg", '" + arg'),
        ('", "', '","'),
        ("<image>", "<img>"),
        ("arg_value is mapping", "arg_value is iterable"),
        ("message.thinking is defined", "message.thinking"),
    ],
    "lfm2.5-2.6b": [
        ("\\\\'", "'"),
        ("\\r", "\\t"),
        ('<think>" -}}\n{%- endif', '" -}}\n{%- endif'),
        ("or message.reasoning_content", ""),
        ("is mapping or arg_value is iterable", "is mapping"),
        ('"null"', '"none"'),
        ("or loop", "and loop"),
    ],
    "lfm2.5-vl": [
        ("%Y-%m-%d", "%d %B %Y"),
        ("\\n\\nList", "\\nList"),
        ("'\"'", '"\'"'),
        ("== ns.last", "!= ns.last"),
        ("is defined and (keep", "is defined and not (keep"),
    ],
    "lfm2-vl": [
        ("'<image>'", "'<image>\\n'"),
        ("message['role'] +", "message['role'] | upper +"),
        ("<|im_end|>", "<|im_end|> "),
    ],
}


@pytest.mark.parametrize(("family", "old", "new"), [(f, old, new) for f, pairs in MUTATIONS.items() for old, new in pairs])
def test_a_near_miss_is_jinja(family, old, new):
    source = oracle.source(family)
    assert old in source
    edited = source.replace(old, new)
    made = chat_template_for(edited, bos_token="<|startoftext|>", eos_token="<|im_end|>", special_tokens=SPECIAL, date=DATE)
    assert made.family == "jinja"
    assert made.source == edited
    assert made.render([user()]).text == oracle.render(edited, [user()])


def test_other_templates():
    assert template_family(oracle.CHATML) == "jinja"
    assert template_family("{{ broken") == "jinja"
    assert template_family(None) is None
    assert template_family(" ") is None
    with pytest.raises(TemplateError, match="compiled"):
        chat_template_for("{{ broken", bos_token="", eos_token="", special_tokens=[]).render([user()])
    with pytest.raises(TemplateError, match="no chat template"):
        chat_template_for(None, bos_token="", eos_token="", special_tokens=SPECIAL).render([user()])
    without = chat_template_for(oracle.source("lfm2"), bos_token="", eos_token="", special_tokens=["<|im_end|>"])
    assert without.family == "jinja"


@pytest.mark.parametrize("path", sorted(oracle.LLAMA_CPP.glob("*.jinja")), ids=lambda path: path.stem)
def test_templates_of_other_models(path):
    """What the sandbox allows is enough for templates that are in use."""
    source = path.read_text("utf8")
    tools = [TOOL]
    made = chat_template_for(source, bos_token="<|startoftext|>", eos_token="<|im_end|>", special_tokens=SPECIAL, date=DATE)
    system = {"role": "system", "content": "S"}
    calling = [
        user(),
        assistant("", tool_calls=[{**CALL, "id": "abcdefghi"}]),
        {"role": "tool", "name": "f", "tool_call_id": "abcdefghi", "content": "r"},
        user(),
    ]
    for messages, given_tools in (
        ([system, user()], None),
        ([user(), assistant(reasoning_content="R"), user()], None),
        ([system, user()], tools),
        (calling, tools),
    ):
        wanted = oracle.render(source, messages, tools=given_tools)
        if "|safe" in source and wanted and "&#34;" in wanted:
            continue  # transformers lets Jinja escape as HTML what is added to `safe` text; here `safe` changes nothing
        if wanted is not None:
            assert made.render(messages, tools=given_tools, fix_tool_calls=False).text == wanted
