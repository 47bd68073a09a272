"""Chat templates that llama.cpp knows by a name, such as "chatml" or "llama3". llama.cpp renders them; it needs no Jinja."""

from __future__ import annotations

import datetime
from importlib import import_module
from typing import Any

from lfmfast.errors import TemplateError
from lfmfast.jinja_template import JinjaTemplate

__all__ = ["NamedTemplate", "template_names"]


def template_names() -> list[str]:
    """The names that there are."""
    names: list[str] = import_module("lfmfast._model").named_templates()
    return names


class NamedTemplate(JinjaTemplate):
    """One of them. Messages are prepared, and control tokens are found, as with Jinja.

    Raises
    ------
    TemplateError
        There is none of this name.
    """

    family = "named"
    _takes_parts = False

    def __init__(
        self,
        source: str,
        bos_token: str,
        eos_token: str,
        special_tokens: frozenset[str],
        date: datetime.date | None = None,
        add_bos: bool = False,
    ) -> None:
        names = template_names()
        if source not in names:
            shown = source if len(source) <= 40 else source[:40] + "..."
            raise TemplateError(f"{shown!r} is no Jinja template, and none of llama.cpp's: {', '.join(sorted(names))}")
        super().__init__(source, bos_token, eos_token, special_tokens, date, add_bos)

    def _stock(
        self,
        messages: Any,
        tools: Any,
        variables: dict[str, Any],
        prompt: bool = True,
        date: datetime.date | None = None,
        mark: str = "",
    ) -> str:
        for name in variables:
            raise TemplateError(f"the chat template {self.source!r} has no variable {name!r}; it knows none")
        if tools:
            raise TemplateError(f"the chat template {self.source!r} can't show tools to the model")
        pairs = [(message["role"], message["content"] or "") for message in messages]
        if any("\0" in text for pair in pairs for text in pair):
            raise TemplateError(f"the chat template {self.source!r} can't show the character U+0000")
        text: str = import_module("lfmfast._model").render_named_template(self.source, pairs, prompt)
        return text
