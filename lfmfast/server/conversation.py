"""The conversation that a body asks about, such that whoever comes from llama-server gets the same prompt."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lfmfast.messages import join_texts
from lfmfast.server.fields import Conversation, parse_conversation
from lfmfast.server.state import ServerState

__all__ = ["read_conversation"]

# Templates that join the parts of a message themselves, with nothing between. llama-server does not see that they do, and
# gives them texts joined by line breaks, as it gives them to templates that can't.
JOINED = frozenset(("lfm2.5-8b", "lfm2.5-2.6b"))
#: What llama-server puts between the parts of a message that the model goes on with.
BEGUN = "\n\n"


def read_conversation(body: Mapping[str, Any], state: ServerState) -> Conversation:
    """What a body of the chat endpoints says about the prompt.

    Raises
    ------
    ApiError
        400, with the name of what is wrong or can't be done.
    TemplateError
        The model has no chat template.
    """
    asked = parse_conversation(body, state.settings)
    if asked.continue_final_message:
        asked = replace(asked, messages=[*asked.messages[:-1], _joined(asked.messages[-1], BEGUN)])
    family = state.model.model.template.family
    if family in JOINED:
        return replace(asked, messages=[_joined(message, "\n") for message in asked.messages])
    if family == "jinja":  # variables of llama-server that some templates want; the formats of the LFM2 family have none
        today = datetime.date.today()
        variables = {"date_string": today.strftime("%d %b %Y"), "datetime": today.strftime("%b %d %Y"), "enable_thinking": True}
        return replace(asked, template_options={**variables, **asked.template_options})
    return asked


def _joined(message: dict[str, Any], joint: str) -> dict[str, Any]:
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        return message  # the template will say what is wrong
    return {**message, "content": join_texts([str(text) for text in texts], joint)}
