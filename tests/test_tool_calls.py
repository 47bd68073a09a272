"""Tool calls read from a model's text."""

from __future__ import annotations

from lfmfast.tool_calls import CallParser


def test_arguments_are_given_out_as_soon_as_they_are_complete():
    parser = CallParser()
    (named,) = parser.feed("[f(")
    assert (named.index, named.name, named.arguments) == (0, "f", "") and named.id.startswith("call_")
    assert parser.feed('a="x') == parser.feed('"') == []
    assert [delta.arguments for delta in parser.feed(", b=[1")] == ['{"a": "x"']
    assert [delta.arguments for delta in parser.feed("])]")] == [', "b": [1]', "}"]
    assert parser.close() == [] and parser.calls[0].arguments == '{"a": "x", "b": [1]}'
