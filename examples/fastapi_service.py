"""lfmfast in a FastAPI service: answers as server-sent events, with a deadline, a bounded queue, and cancelling.

    pip install lfmfast fastapi uvicorn
    MODEL=LiquidAI/LFM2-350M-GGUF uvicorn fastapi_service:app        # MODEL: a file, or a name on the Hugging Face Hub
    curl -N localhost:8000/chat -H 'content-type: application/json' -d '{"messages": [{"role": "user", "content": "Hello!"}]}'

Run one worker: all requests share one model, which answers them side by side.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from lfmfast import AsyncModel, AsyncStream, LfmfastError, QueueFullError

SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    name = os.environ.get("MODEL", "demo")
    options: dict[str, Any] = {
        "n_ctx": int(os.environ.get("N_CTX", "4096")),
        "n_parallel": int(os.environ.get("N_PARALLEL", "4")),
        "n_queue": int(os.environ.get("N_QUEUE", "16")),  # who comes when so many wait gets 503 at once
    }
    load = AsyncModel.load if Path(name).exists() else AsyncModel.from_pretrained
    async with await load(name, **options) as model:
        # All prompts begin with it: it is read now, and kept.
        await asyncio.to_thread(model.model.warm, [SYSTEM], pin=True)
        app.state.model = model
        yield


app = FastAPI(lifespan=lifespan)


class Message(BaseModel):
    role: Literal["user", "assistant"]
    content: str


class Question(BaseModel):
    messages: list[Message] = Field(min_length=1)
    max_tokens: int = Field(default=512, ge=1)
    temperature: float | None = Field(default=None, ge=0)
    deadline_ms: int = Field(default=10_000, ge=1, description="until the first token, waiting in the queue included")


@app.post("/chat")
async def chat(request: Request, question: Question) -> StreamingResponse:
    model: AsyncModel = request.app.state.model
    messages = [SYSTEM, *(message.model_dump() for message in question.messages)]
    options = {} if question.temperature is None else {"temperature": question.temperature}
    try:
        stream = model.stream(messages, max_tokens=question.max_tokens, t_max_prompt_ms=question.deadline_ms, **options)
        await stream.accepted()
    except QueueFullError as error:
        raise HTTPException(503, "too many requests are waiting", headers={"Retry-After": "1"}) from error
    except ValueError as error:  # too long, or messages that the template does not take
        raise HTTPException(422, str(error)) from error
    return StreamingResponse(events(request, stream), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def events(request: Request, stream: AsyncStream) -> AsyncIterator[str]:
    """The pieces as server-sent events. A deadline that passes comes as one too: the status is sent already."""
    watcher = asyncio.ensure_future(cancel_when_gone(request, stream))
    try:
        async with stream:
            async for piece in stream:
                if piece.text:
                    yield event({"text": piece.text})
        usage = stream.usage
        yield event({"finish_reason": stream.finish_reason, "completion_tokens": usage.completion_tokens if usage else 0})
    except LfmfastError as error:
        yield event({"error": type(error).__name__, "message": str(error)})
    finally:
        watcher.cancel()


async def cancel_when_gone(request: Request, stream: AsyncStream) -> None:
    """Cancels when the client leaves, also while its prompt is still being read and nothing could be sent."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stream.cancel()


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


@app.get("/health")
async def health(request: Request) -> dict[str, int]:
    stats = request.app.state.model.model.engine.stats()
    return {"n_running": stats["n_running"], "n_queued": stats["n_queued"]}
