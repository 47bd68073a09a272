"""Settings: everything that `lfmfast serve` was told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lfmfast.params import SamplingParams

__all__ = ["ReasoningFormat", "Settings"]

ReasoningFormat = Literal["auto", "deepseek", "none"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a server is to do; the model itself is opened by who starts it.

    Parameters
    ----------
    host : tuple of str
        Addresses to listen at.
    port : int
        0: any free one.
    api_keys : tuple of str
        One of them has to come with each request, if there are any. They are never shown.
    aliases : tuple of str
        Names of the model for clients, the first one being what answers carry; none: the file's name.
    tags : tuple of str
        What GET /v1/models says of the model; they mean nothing here.
    sampling : SamplingParams
        Of requests that say nothing; what it does not set is the model's own.
    n_predict : int
        Tokens of an answer if the request does not say; -1: to its end.
    cache_prompt, cache_reuse
        As for :meth:`lfmfast.Model.stream`, of requests that say nothing.
    chat_template_kwargs : mapping
        Variables for the chat template, of requests that say nothing.
    reasoning_format : str
        What becomes of thoughts in an answer: "auto" and "deepseek" give them apart, "none" leaves them in the content.
    reasoning_budget : int
        Tokens of a thought, of requests that say nothing; -1: any number.
    slot_save_path : Path, optional
        Folder of POST /slots/N?action=save and restore; None: there is no such thing.
    metrics, slots, props, page : bool
        Whether GET /metrics, GET /slots, POST /props and the chat page are there.
    cors_origins : str
        "*", "localhost", or one origin.
    max_body_bytes, max_nesting : int
        Of a request's body.
    header_timeout_s, body_timeout_s, idle_timeout_s : float
        How long a client may take to send a request's headers, may pause in its body, and may keep a connection unused.
    drain_s : float
        How long answers may go on after SIGTERM.
    sse_ping_s : float
        A stream that had nothing to send for so long sends a comment; 0 and less: never.
    log_json, access_log : bool
        Whether the access log is written, and as JSON.
    verbose : bool
        Answers of requests that say nothing have `__verbose`: the prompt as the model saw it, and the settings.
    """

    host: tuple[str, ...] = ("127.0.0.1",)
    port: int = 8080
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n_predict: int = -1
    cache_prompt: bool = True
    cache_reuse: int = 0
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_format: ReasoningFormat = "auto"
    reasoning_budget: int = -1
    slot_save_path: Path | None = None
    metrics: bool = False
    slots: bool = True
    props: bool = False
    page: bool = True
    cors_origins: str = "*"
    max_body_bytes: int = 8 << 20
    max_nesting: int = 128
    header_timeout_s: float = 30.0
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
    drain_s: float = 30.0
    sse_ping_s: float = 30.0
    log_json: bool = False
    access_log: bool = True
    verbose: bool = False
