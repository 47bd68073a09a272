"""What there is besides generating: health, the model's facts, tokens, templates, counters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lfmfast.errors import TemplateError
from lfmfast.model import Model
from lfmfast.params import SamplingParams
from lfmfast.server import metrics as prometheus
from lfmfast.server.body import json_response, read_object
from lfmfast.server.conversation import read_conversation
from lfmfast.server.errors import invalid, not_found, not_supported
from lfmfast.server.fields import Fields
from lfmfast.server.shapes import fingerprint, generation_settings
from lfmfast.server.state import ServerState, state_of

__all__ = ["ROUTES"]

#: Characters (or token ids) from which on tokenising is another thread's work: the event loop has others to serve.
LONG = 16384


async def health(request: Request) -> Response:
    """Whether the model is there; the gate says 503 if not."""
    return json_response({"status": "ok"})


async def models(request: Request) -> Response:
    """The one model there is, in OpenAI's form and in Ollama's."""
    state = state_of(request)
    name = state.model_name
    details = {"parent_model": "", "format": "gguf", "family": "", "families": [""], "parameter_size": "",
               "quantization_level": ""}  # fmt: skip
    short = {
        "name": name, "model": name, "modified_at": "", "size": "", "digest": "", "type": "model", "description": "",
        "tags": list(state.settings.tags), "capabilities": ["completion"], "parameters": "", "details": details,
    }  # fmt: skip
    return json_response({"models": [short], "object": "list", "data": [_entry(state)]})


async def model_by_name(request: Request) -> Response:
    """What OpenAI's ``models.retrieve`` gets."""
    state = state_of(request)
    if request.path_params["name"] not in (state.model_name, *state.settings.aliases):
        known = ", ".join(repr(name) for name in (state.settings.aliases or (state.model_name,)))
        raise not_found(f"there is no model {request.path_params['name']!r}; there is {known}")
    return json_response(_entry(state))


def _entry(state: ServerState) -> dict[str, Any]:
    model = state.model.model
    return {
        "id": state.model_name,
        "aliases": sorted(state.settings.aliases),
        "tags": sorted(state.settings.tags),
        "object": "model",
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "created": int(state.started_at),
        "owned_by": "lfmfast",
        "meta": {
            "vocab_type": VOCAB_TYPES.get(model.metadata.get("tokenizer.ggml.model", ""), 0),
            "n_vocab": model.n_vocab,
            "n_ctx": model.n_ctx,
            "n_ctx_train": model.native.n_ctx_train,
            "n_embd": model.native.n_embd,
            "n_params": model.n_params,
            "size": model.size,
            "ftype": _file_type(model),
        },
    }


def _file_type(model: Model) -> str:
    """The last part of "lfm2 1.2B Q4_K - Medium"."""
    return " ".join(model.description.split()[2:])


#: llama_vocab_type, by the names that files have for it.
VOCAB_TYPES = {"llama": 1, "gpt2": 2, "bert": 3, "t5": 4, "rwkv": 5, "plamo2": 6}


async def props(request: Request) -> Response:
    """GET /props: the server's settings, and what a request gets that names none. POST: there is nothing to change."""
    state = state_of(request)
    if request.method == "POST":
        return await _change_props(request, state)
    model, settings = state.model.model, state.settings
    return json_response({
        "default_generation_settings": {"params": default_settings(state), "n_ctx": state.n_ctx},
        "total_slots": len(state.slots),
        "model_alias": state.model_name,
        "model_ftype": _file_type(model),
        "model_path": model.path,
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": settings.slots,
        "endpoint_props": settings.props,
        "endpoint_metrics": settings.metrics,
        "ui": settings.page,
        "ui_settings": {},
        "chat_template": _template(model),
        "chat_template_caps": {},
        "bos_token": _token(model, model.native.bos_id),
        "eos_token": _token(model, model.native.eos_id),
        "build_info": fingerprint(),
        "is_sleeping": False,
        "cors_proxy_enabled": False,
    })  # fmt: skip


def default_settings(state: ServerState) -> dict[str, Any]:
    """How a request that says nothing is answered."""
    model = state.model.model
    params: SamplingParams = state.settings.sampling.resolved(model.default_sampling.params)
    return generation_settings(params, end_tokens=model.end_tokens, n_predict=state.settings.n_predict, stop=(), stream=True,
                               n_probs=0, timings_per_token=False,
                               reasoning_format=state.settings.reasoning_format)  # fmt: skip


def _template(model: Model) -> str:
    try:
        return model.template.source or ""
    except TemplateError:
        return ""


def _token(model: Model, token: int | None) -> str:
    return "" if token is None else model.detokenize([token], special=True)


async def _change_props(request: Request, state: ServerState) -> Response:
    if not state.settings.props:
        raise not_supported("this server does not let its properties be changed; start it with --props")
    await read_object(request)
    return json_response({"success": True})


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    state = state_of(request)
    if not state.settings.metrics:
        raise not_supported("this server has no metrics; start it with --metrics")
    text = prometheus.render(state, state.model.model.engine.stats())
    return Response(text, headers={"Process-Start-Time-Unix": str(int(state.started_at))}, media_type=prometheus.CONTENT_TYPE)


# --- texts and tokens ---


async def tokenize(request: Request) -> Response:
    """POST /tokenize: the ids of a text, or of a list of texts and ids."""
    model = state_of(request).model.model
    fields = Fields(await read_object(request))
    content = fields.get("content")
    add_special, parse_special = fields.boolean("add_special"), fields.boolean("parse_special", True)
    with_pieces = fields.boolean("with_pieces")
    parts = [] if content is None else content if isinstance(content, list) else [content]

    def work() -> Response:
        tokens: list[int] = []
        for i, part in enumerate(parts):
            if isinstance(part, str):
                tokens += model.tokenize(part, add_special=add_special and i == 0, parse_special=parse_special)
            else:
                tokens.append(_checked_token(model, "content", part))
        pieces = [{"id": token, "piece": _piece(model, token)} for token in tokens] if with_pieces else tokens
        return json_response({"tokens": pieces})

    size = sum(len(part) if isinstance(part, str) else 1 for part in parts)
    return await _done(work, size)


async def detokenize(request: Request) -> Response:
    """POST /detokenize: the text of ids, control tokens included."""
    model = state_of(request).model.model
    tokens = Fields(await read_object(request)).get("tokens")
    if tokens is None:
        tokens = []
    if not isinstance(tokens, list):
        raise invalid("'tokens' must be an array of token ids")

    def work() -> Response:  # token by token: what is between two of them is theirs, and not to be cleaned up
        text = b"".join([model.native.piece(_checked_token(model, "tokens", token)) for token in tokens])
        return json_response({"content": text.decode("utf-8", "replace")})

    return await _done(work, len(tokens))


async def apply_template(request: Request) -> Response:
    """POST /apply-template: what a chat request would be read as, as text; without the BOS that goes before every prompt."""
    state = state_of(request)
    model = state.model.model
    asked = read_conversation(await read_object(request), state)

    def work() -> Response:
        rendered = model.template.render(asked.messages, **asked.prompt_options())
        bos = _token(model, model.native.bos_id) if model.native.add_bos else ""
        return json_response({"prompt": rendered.text.removeprefix(bos)})

    return await _done(work, len(await request.body()))


async def _done(work: Callable[[], Response], size: int) -> Response:
    return await asyncio.to_thread(work) if size > LONG else work()


def _checked_token(model: Model, name: str, token: object) -> int:
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < model.n_vocab:
        known = isinstance(token, float) or (isinstance(token, int) and abs(token) < 2**64)
        shown = f"{token:.15g}" if known else "something else"
        raise invalid(f"a token id in '{name}' must be an integer from 0 to {model.n_vocab - 1}, not {shown}")
    return token


def _piece(model: Model, token: int) -> str | list[int]:
    data = model.native.piece(token)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)


ROUTES = [
    Route("/health", health),
    Route("/v1/health", health),
    Route("/models", models),
    Route("/v1/models", models),
    Route("/v1/models/{name:path}", model_by_name),
    Route("/props", props, methods=["GET", "POST"]),
    Route("/metrics", metrics),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/apply-template", apply_template, methods=["POST"]),
]
