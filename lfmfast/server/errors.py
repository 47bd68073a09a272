"""ApiError: what a client is told, in OpenAI's shape with llama-server's types."""

from __future__ import annotations

import logging
from typing import Any

from lfmfast.errors import (
    BusyError,
    CancelledError,
    ClosedError,
    ContextFullError,
    DeadlineError,
    LfmfastError,
    ParameterError,
    QueueFullError,
    TemplateError,
)

__all__ = ["ApiError", "invalid", "not_found", "not_supported", "to_api_error", "unavailable"]

log = logging.getLogger("lfmfast.server")

#: The type that goes with a status, if nothing else is said.
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """An answer that is an error.

    Parameters
    ----------
    status : int
        HTTP's.
    type : str
        llama-server's name of the kind of error.
    message : str
    headers : dict, optional
        Further headers of the response.
    **extra
        Further members of the error object.
    """

    def __init__(
        self, status: int, type: str, message: str, *, headers: dict[str, str] | None = None, **extra: Any
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.message = message
        self.headers = headers or {}
        self.extra = extra

    def body(self) -> dict[str, Any]:
        """What is sent: ``{"error": {...}}``."""
        return {"error": {"code": self.status, "message": self.message, "type": self.type, **self.extra}}


def invalid(message: str) -> ApiError:
    """400: the request can't be taken as it is. The message names the field."""
    return ApiError(400, "invalid_request_error", message)


def not_found(message: str) -> ApiError:
    return ApiError(404, "not_found_error", message)


def not_supported(message: str) -> ApiError:
    """501: there is no such thing here, or it is switched off."""
    return ApiError(501, "not_supported_error", message)


def unavailable(message: str, retry_after_s: int = 1) -> ApiError:
    """503: not now."""
    return ApiError(503, "unavailable_error", message, headers={"Retry-After": str(retry_after_s)})


def to_api_error(error: Exception) -> ApiError:
    """The answer to an exception. One that nobody expected is logged with its traceback, and tells the client nothing more."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextFullError):
        message = f"the request exceeds the available context size: {error}"
        return ApiError(
            400, "exceed_context_size_error", message, n_prompt_tokens=error.n_tokens, n_ctx=error.n_ctx
        )
    if isinstance(error, (QueueFullError, BusyError)):
        return unavailable(str(error))
    if isinstance(error, DeadlineError):
        return ApiError(408, "timeout_error", str(error))
    if isinstance(error, (ClosedError, CancelledError)):
        return unavailable("the server is shutting down")
    if isinstance(error, (ParameterError, TemplateError)):
        return invalid(str(error))
    if isinstance(error, LfmfastError):
        log.error("%s: %s", type(error).__name__, error)
        return ApiError(500, "server_error", str(error))
    log.error("a request failed", exc_info=error)
    return ApiError(500, "server_error", "internal error; the server's log has more")
