"""Every exception that lfmfast raises. Each also inherits the builtin that a caller would expect."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lfmfast.types import Completion

__all__ = [
    "BusyError",
    "CancelledError",
    "ClosedError",
    "ContextFullError",
    "DeadlineError",
    "DecodeError",
    "ForkError",
    "HubError",
    "LfmfastError",
    "ModelLoadError",
    "ParameterError",
    "QueueFullError",
    "SamplingError",
    "StateError",
    "TemplateError",
    "ToolRoundsError",
]


class LfmfastError(Exception):
    """Base of all exceptions of lfmfast."""


class ParameterError(LfmfastError, ValueError):
    """An argument outside its limits. The message names the argument, the value seen and the limit."""


class ModelLoadError(LfmfastError, OSError):
    """A model file that can't be loaded. The message ends with llama.cpp's own reason."""


class ContextFullError(LfmfastError, ValueError):
    """A prompt that does not fit in the context.

    Attributes
    ----------
    n_tokens : int
        Tokens that were to be processed.
    n_ctx : int
        Tokens that the context can hold.
    """

    def __init__(self, message: str, n_tokens: int = 0, n_ctx: int = 0) -> None:
        super().__init__(message)
        self.n_tokens = n_tokens
        self.n_ctx = n_ctx

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.n_tokens, self.n_ctx)


class DecodeError(LfmfastError, RuntimeError):
    """llama.cpp failed to process a batch."""


class ClosedError(LfmfastError, ValueError):
    """The object was closed."""


class BusyError(LfmfastError, RuntimeError):
    """Another thread is using the object in a way that excludes this call."""


class ForkError(LfmfastError, RuntimeError):
    """The object was made before a fork() and belongs to the parent process."""


class StateError(LfmfastError, ValueError):
    """A saved sequence state that can't be restored here."""


class TemplateError(LfmfastError, ValueError):
    """Messages that the model's chat template can't render, or a template that can't be used."""


class SamplingError(LfmfastError, ArithmeticError):
    """A row of logits that can't be sampled: NaN, or no token above minus infinity."""


class CancelledError(LfmfastError, RuntimeError):
    """The work was cancelled before it gave a result."""


class QueueFullError(LfmfastError, RuntimeError):
    """As many requests wait already as the engine lets wait."""


class DeadlineError(LfmfastError, TimeoutError):
    """A request gave nothing within the time that it was given."""


class ConstraintError(LfmfastError, RuntimeError):
    """An answer that can't be held to its grammar or schema any further: that would take too much time or memory."""


class ToolRoundsError(LfmfastError, RuntimeError):
    """A model that still wants functions called after as many rounds as it was given.

    Attributes
    ----------
    completion : Completion
        Its last reply, with the calls that were not made.
    """

    def __init__(self, message: str, completion: Completion) -> None:
        super().__init__(message)
        self.completion = completion

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.args[0], self.completion)


class HubError(LfmfastError, OSError):
    """A model that can't be fetched from the Hub, or found in its local cache."""
