"""What each endpoint is for, takes and gives, by the function that answers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lfmfast.server import anthropic, completion, openai, page, responses, slots, system
from lfmfast.server.metrics import CONTENT_TYPE
from lfmfast.server.openapi.schema import STRING, Schema, const, integer

__all__ = ["OPERATIONS", "STATUSES", "Operation"]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A method of an endpoint.

    Parameters
    ----------
    summary : str
    answer : str
        Name of the schema of what comes with 200; or the media type of a text.
    body : str, optional
        Name of the schema of the request's body; None: there is none.
    event : str, optional
        Name of the schema of a stream's events, if the body asks for one.
    ends_with_done : bool
        Whether "[DONE]" comes after the last event.
    error : str
        Name of the schema of an error.
    errors : tuple of int
        Statuses besides those that every endpoint has.
    parameters : tuple of dict
        In the path and the query.
    """

    summary: str
    answer: str
    body: str | None = None
    body_required: bool = True
    event: str | None = None
    ends_with_done: bool = False
    error: str = "Error"
    errors: tuple[int, ...] = ()
    parameters: tuple[Schema, ...] = ()


def _parameter(place: str, name: str, about: str, schema: Schema, required: bool = True) -> Schema:
    return {"name": name, "in": place, "required": required, "description": about, "schema": schema}


def _generating(summary: str, body: str, answer: str, event: str, error: str = "Error", done: bool = False) -> Operation:
    return Operation(summary=summary, body=body, answer=answer, event=event, ends_with_done=done, error=error, errors=(500,))


_MODEL = _parameter("path", "name", "Name or alias of the model.", STRING)
_SLOT = _parameter("path", "id_slot", "Number of the slot.", integer(0))
_ACTION = _parameter("query", "action", "What to do; save and restore need a filename in the body.",
                     const("save", "restore", "erase"))  # fmt: skip
_FREE = _parameter("query", "fail_on_no_slot", "Neither empty, 0 nor false: 503 if all slots are in use.", STRING, False)

Methods = dict[str, Operation]
#: By the endpoint and the method.
OPERATIONS: dict[Callable[..., Any], Methods] = {
    openai.chat_completions: {
        "POST": _generating("Answer a conversation", "ChatRequest", "ChatCompletion", "ChatCompletionChunk", done=True)},
    openai.input_tokens: {
        "POST": Operation(summary="Count the tokens of a conversation", body="ChatPrompt", answer="InputTokens")},
    openai.completions: {
        "POST": _generating("Continue a text", "CompletionRequest", "TextCompletion", "TextCompletionChunk", done=True)},
    completion.completion: {
        "POST": _generating("Continue a text, in llama-server's form", "CompletionRequest", "CompletionAnswer",
                            "CompletionEvent")},
    responses.responses: {
        "POST": _generating("Answer in the form of OpenAI's Responses", "ResponseRequest", "Response", "ResponseEvent")},
    responses.input_tokens: {
        "POST": Operation(summary="Count the tokens of a request for a response", body="ResponsePrompt",
                          answer="InputTokens")},
    anthropic.messages: {
        "POST": _generating("Answer in the form of Anthropic's Messages", "AnthropicRequest", "AnthropicMessageAnswer",
                            "AnthropicEvent", "AnthropicError")},
    anthropic.count_tokens: {
        "POST": Operation(summary="Count the tokens of a request for a message", body="AnthropicPrompt",
                          answer="AnthropicTokens", error="AnthropicError")},
    system.health: {"GET": Operation(summary="Whether the model is there", answer="Health")},
    system.models: {"GET": Operation(summary="The model that there is", answer="Models")},
    system.model_by_name: {
        "GET": Operation(summary="The model by its name", answer="Model", errors=(404,), parameters=(_MODEL,))},
    system.props: {
        "GET": Operation(summary="Facts about the server and the model", answer="Props"),
        "POST": Operation(summary="Change nothing; 501 unless it was started with --props", body="PropsRequest",
                          answer="PropsChanged", errors=(501,)),
    },
    system.metrics: {
        "GET": Operation(summary="Counters for Prometheus; 501 unless it was started with --metrics", answer=CONTENT_TYPE,
                         errors=(501,))},
    system.tokenize: {"POST": Operation(summary="Token ids of a text", body="TokenizeRequest", answer="Tokens")},
    system.detokenize: {"POST": Operation(summary="The text of token ids", body="DetokenizeRequest", answer="Text")},
    system.apply_template: {
        "POST": Operation(summary="What a conversation is read as", body="ChatPrompt", answer="Prompt")},
    slots.slots: {
        "GET": Operation(summary="Who is being answered", answer="Slots", errors=(501,), parameters=(_FREE,))},
    slots.act: {
        "POST": Operation(summary="Save, restore or erase what was read; 501 unless it was started with --slot-save-path",
                          body="SlotFile", body_required=False, answer="SlotAction", errors=(500, 501),
                          parameters=(_SLOT, _ACTION))},
    page.chat_page: {"GET": Operation(summary="The chat page", answer="text/html", errors=(304,))},
}  # fmt: skip

#: Of every endpoint's statuses, what they mean.
STATUSES = {
    304: "The browser has it.",
    400: "The body or a parameter can't be taken as it is; the message names it.",
    401: "The API key is missing or wrong.",
    404: "There is no such thing.",
    408: "It took too long: the body to come, or the first token, as t_max_prompt_ms says.",
    413: "The body is too large.",
    500: "The server's fault.",
    501: "Switched off.",
    503: "Not now: the model is being loaded, the queue is full, or the server is shutting down. Retry-After says when.",
}
