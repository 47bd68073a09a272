"""What there is besides generating: health, the model's facts."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lfmfast.server.body import json_response
from lfmfast.server.state import state_of

__all__ = ["ROUTES"]


async def health(request: Request) -> Response:
    """Whether the model is there."""
    _ = state_of(request).model
    return json_response({"status": "ok"})


async def models(request: Request) -> Response:
    """The one model there is, in OpenAI's form and in Ollama's."""
    state = state_of(request)
    model = state.model.model
    name = state.model_name
    details = {"parent_model": "", "format": "gguf", "family": "", "families": [""], "parameter_size": "",
               "quantization_level": ""}  # fmt: skip
    meta = {
        "vocab_type": 2,
        "n_vocab": model.n_vocab,
        "n_ctx": model.n_ctx,
        "n_ctx_train": model.native.n_ctx_train,
        "n_embd": model.native.n_embd,
        "n_params": model.n_params,
        "size": model.size,
        "ftype": model.description,
    }
    short = {
        "name": name, "model": name, "modified_at": "", "size": "", "digest": "", "type": "model", "description": "",
        "tags": [], "capabilities": ["completion"], "parameters": "", "details": details,
    }  # fmt: skip
    entry = {
        "id": name, "aliases": list(state.settings.aliases), "tags": [], "object": "model",
        "architecture": model.metadata.get("general.architecture", ""), "created": int(time.time()),
        "owned_by": "lfmfast", "meta": meta,
    }  # fmt: skip
    return json_response({"models": [short], "object": "list", "data": [entry]})


ROUTES = [
    Route("/health", health),
    Route("/v1/health", health),
    Route("/models", models),
    Route("/v1/models", models),
]
