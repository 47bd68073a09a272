"""Prefix: a prompt's beginning that a model has read and keeps."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from lfmfast import prefix_file
from lfmfast._request import Asked
from lfmfast.errors import ClosedError, StateError, TemplateError

if TYPE_CHECKING:
    from lfmfast.model import Model
    from lfmfast.model_file import Message, Prompt

__all__ = ["Prefix"]


class Prefix:
    """The beginning of prompts, read. Made by :meth:`Model.warm` and :meth:`Model.load_prefix`.

    A pinned one stays until :meth:`release`, whatever else the model has to keep; as a context manager it is released at
    the end. Dropping the object does not release it.

    Examples
    --------
    >>> with model.warm([{"role": "system", "content": "You are a helpful assistant."}]) as prefix:
    ...     prefix.n_tokens
    12
    """

    def __init__(self, model: Model, tokens: Sequence[int], pinned: bool) -> None:
        self.model = model
        self.tokens = tuple(tokens)
        self._pinned = pinned
        self._releasing = threading.Lock()

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def pinned(self) -> bool:
        return self._pinned and not self.model.closed

    def release(self) -> None:
        """Let it go like everything else when there is no room. May be called twice."""
        with self._releasing:
            pinned, self._pinned = self._pinned, False
        if pinned:
            try:
                self.model.engine.unpin(self.tokens)
            except ClosedError:
                return

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, for :meth:`Model.load_prefix`; what is no longer kept is read again.

        Raises
        ------
        StateError
            It can't be copied out of the context, or `cache_bytes` is too small for it.
        OSError
            The file can't be written. One that was there is as it was.
        """
        prefix_file.write(path, saved(self.model, self.tokens))

    def __enter__(self) -> Prefix:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<lfmfast.Prefix of {self.n_tokens} tokens{', pinned' if self.pinned else ''}, of {self.model!r}>"


def read(model: Model, tokens: Sequence[int], pin: bool) -> Prefix:
    """Has the model read tokens."""
    with model._submit(Asked(tokens), max_tokens=0, pin=pin) as stream:
        if stream.result().finish_reason == "cancelled":
            raise ClosedError("the model was closed")
    return Prefix(model, tokens, pin)


def saved(model: Model, tokens: Sequence[int], chat: dict[str, Any] | None = None) -> prefix_file.Saved:
    """What a file shall hold."""
    with read(model, tokens, pin=True):  # so that all of it is there
        return prefix_file.Saved(model.engine.save(tokens), model._fingerprint, chat, model._exact_kernels)


def load(model: Model, path: str | os.PathLike[str], pin: bool) -> tuple[Prefix, prefix_file.Saved]:
    """Has the model take in what a file holds."""
    found = prefix_file.read(path, model._fingerprint)
    if model._exact_kernels not in ("", found.deterministic):
        how = f"with the kernels {found.deterministic}, not {model._exact_kernels}" if found.deterministic else "without"
        raise StateError(f"{os.fspath(path)!r} can't be used with deterministic=True: it was written {how}")
    model.engine.load(found.prefix, pin)
    return Prefix(model, found.prefix["tokens"], pin), found


def shared_beginning(model: Model, prompt: Prompt, tools: Sequence[Any] | None, options: dict[str, Any]) -> list[int]:
    """The ids that a prompt is read as; of messages those that the prompt of any continuation begins with."""
    ids, chunks = model._encode(prompt, tools=tools, add_generation_prompt=False, **options)
    if not chunks:
        return ids
    # The last text may go on in what follows, and templates change past turns: they drop the last thoughts for instance.
    messages = cast("Sequence[Message]", prompt)
    opened = messages[-1].get("role") in ("user", "tool")
    following = messages if opened else [*messages, {"role": "user", "content": "?"}]
    try:
        other, _ = model._encode(following, tools=tools, add_generation_prompt=opened, **options)
    except TemplateError:  # it wants other roles to come next
        return ids
    return ids[: next((i for i, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b), min(len(ids), len(other)))]
