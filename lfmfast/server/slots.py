"""The slots: who is being answered, and their contents to files and back."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lfmfast.errors import StateError
from lfmfast.model import Model
from lfmfast.server.body import json_response, read_object
from lfmfast.server.errors import ApiError, invalid, not_supported, unavailable
from lfmfast.server.state import ServerState, Slot, Task, state_of

__all__ = ["ROUTES", "shown"]


async def slots(request: Request) -> Response:
    """GET /slots."""
    state = state_of(request)
    if not state.settings.slots:
        raise not_supported("this server does not show its slots; start it without --no-slots")
    asked = request.query_params.get("fail_on_no_slot", "")
    if asked not in ("", "0", "false") and all(slot.task is not None for slot in state.slots):
        raise unavailable("no slot available")
    return json_response([shown(state, slot) for slot in state.slots])


def shown(state: ServerState, slot: Slot) -> dict[str, Any]:
    """What /slots says of one."""
    facts: dict[str, Any] = {
        "id": slot.id, "n_ctx": state.n_ctx, "speculative": False, "is_processing": slot.task is not None,
    }  # fmt: skip
    task = slot.task or slot.last
    if task is None:
        return facts
    stream, running = task.stream, slot.task is not None
    n_decoded = len(stream.tokens)
    limit = task.params.get("n_predict", -1)
    # Of a generation that has ended only what it was: its counts would read as work that goes on.
    return facts | {
        "id_task": task.id,
        "n_prompt_tokens": stream.n_prompt if running else stream.n_prompt + n_decoded,
        "n_prompt_tokens_processed": max(stream.n_read - stream.n_cached, 0) if running else 0,
        "n_prompt_tokens_cache": stream.n_cached if running else 0,
        "params": task.params,
        "next_token": [{
            "has_next_token": running and stream.finish_reason is None,
            "has_new_line": running and "\n" in stream.text,
            "n_remain": limit - n_decoded if running and isinstance(limit, int) and limit >= 0 else -1,
            "n_decoded": n_decoded if running else 0,
        }],
    }  # fmt: skip


async def act(request: Request) -> Response:
    """POST /slots/N?action=save, restore or erase."""
    state = state_of(request)
    folder = state.settings.slot_save_path
    if folder is None:
        raise not_supported("this server does not save slots; start it with --slot-save-path")
    slot = _named(state, request.path_params["id_slot"])
    action = request.query_params.get("action", "")
    if action == "erase":
        return await _erase(state, slot)
    if action not in ("save", "restore"):
        raise invalid(f"action must be save, restore or erase, not {action!r}")
    path = _file(folder, (await read_object(request)).get("filename"))
    return await (_save(state, slot, path) if action == "save" else _restore(state, slot, path))


def _named(state: ServerState, text: str) -> Slot:
    found = next((slot for slot in state.slots if str(slot.id) == text), None)
    if found is None:
        raise invalid(f"there is no slot {text!r}: they are 0 to {len(state.slots) - 1}")
    return found


def _file(folder: Path, name: object) -> Path:
    """A file in the folder, and nowhere else."""
    if not isinstance(name, str) or not name:
        raise invalid("filename must be a string, not empty")
    bad = any(c in '/\\:*?"<>|' or not c.isprintable() for c in name) or name.startswith(".") or name.endswith((".", " "))
    if bad or len(name.encode()) > 255:
        raise invalid("filename must be a plain name, without a folder")
    return folder / name


async def _save(state: ServerState, slot: Slot, path: Path) -> Response:
    model, task, restored = state.model.model, slot.last, slot.restored
    began = time.perf_counter()
    if task is None and restored is None:
        raise invalid(f"slot {slot.id} has nothing to save")

    def work() -> int:
        tokens = _held(model, task) if task is not None else list(restored.tokens if restored is not None else ())
        model.save_prefix(path, tokens)
        return len(tokens)

    n_saved = await _with_file(work)
    return json_response({
        "id_slot": slot.id, "filename": path.name, "n_saved": n_saved, "n_written": path.stat().st_size,
        "timings": {"save_ms": _ms(began)},
    })  # fmt: skip


def _held(model: Model, task: Task) -> list[int]:
    """The tokens that the context had at the end."""
    prompt = model.encode(task.prompt, **task.prompt_options)
    answer = list(task.stream.tokens)
    # The last one was sampled and never read, if it is not the end token, which is none of these.
    return prompt + (answer[:-1] if task.stream.finish_reason == "length" else answer)


async def _restore(state: ServerState, slot: Slot, path: Path) -> Response:
    began = time.perf_counter()
    if not path.is_file():
        raise invalid(f"there is no saved {path.name!r}")
    prefix = await _with_file(lambda: state.model.model.load_prefix(path))
    if slot.task is None:
        slot.last, slot.restored = None, prefix
    return json_response({
        "id_slot": slot.id, "filename": path.name, "n_restored": prefix.n_tokens, "n_read": path.stat().st_size,
        "timings": {"restore_ms": _ms(began)},
    })  # fmt: skip


async def _erase(state: ServerState, slot: Slot) -> Response:
    task = slot.last
    usage = None if task is None else task.stream.usage
    n_erased = slot.restored.n_tokens if slot.restored is not None else 0 if usage is None else usage.total_tokens
    # What prompts share is kept once, so there is nothing that is a slot's alone: everything that is not in use goes.
    await asyncio.to_thread(state.model.model.engine.forget)
    slot.last = slot.restored = None
    return json_response({"id_slot": slot.id, "n_erased": n_erased})


async def _with_file(work: Any) -> Any:
    try:
        return await asyncio.to_thread(work)
    except StateError as error:
        raise invalid(str(error)) from error
    except OSError as error:
        raise ApiError(500, "server_error", f"the file can't be used: {error.strerror}") from error


def _ms(began: float) -> float:
    return (time.perf_counter() - began) * 1e3


ROUTES = [Route("/slots", slots), Route("/slots/{id_slot}", act, methods=["POST"])]
