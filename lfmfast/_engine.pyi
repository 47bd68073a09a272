from collections.abc import Sequence
from typing import Any

from lfmfast._grammar import Grammar
from lfmfast._model import Model
from lfmfast.params import SamplingParams

_Item = tuple[bytes, tuple[int, ...], tuple[tuple[float, tuple[tuple[int, float], ...]], ...] | None, int, int]

class Stream:
    done: bool
    def wait(self) -> list[_Item]: ...
    def poll(self) -> list[_Item]: ...
    def cancel(self) -> None: ...
    @property
    def n_read(self) -> int: ...
    @property
    def n_cached(self) -> int: ...
    @property
    def prompt_us(self) -> int: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def stop_string(self) -> str | None: ...
    @property
    def timings(self) -> dict[str, int]: ...
    @property
    def outside_us(self) -> list[int]: ...

class Mailbox:
    def __init__(self, fd: int = -1) -> None: ...
    def wait(self, timeout_ms: int) -> list[int] | None: ...
    def close(self) -> None: ...

class Engine:
    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int,
        n_batch: int,
        n_ubatch: int,
        n_threads: int,
        n_threads_batch: int,
        type_k: str,
        type_v: str,
        flash_attn: bool | None,
        offload_kqv: bool,
        n_parallel: int,
        n_parallel_max: int,
        n_queue: int,
        cache_bytes: int,
        max_stall_ms: int,
        deterministic: bool = False,
        growth_bytes: int = ...,
        checkpoint_tokens: int = 256,
        _faults_every: int = 0,
        _faults_seed: int = 0,
    ) -> None: ...
    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        suppress: Sequence[int] = (),
        max_tokens: int = -1,
        stop: Sequence[str] = (),
        n_logprobs: int = -1,
        cache_prompt: bool = True,
        pin: bool = False,
        cache_reuse: int = 0,
        priority: int = 0,
        max_prompt_ms: int = -1,
        max_predict_ms: int = -1,
        markers: Sequence[int] | None = None,
        in_thought: bool = False,
        thought_tokens: int = -1,
        thought_end: Sequence[int] = (),
        grammar: Grammar | None = None,
        lazy: bool = False,
        single_call: bool = False,
        mailbox: Mailbox | None = None,
        mailbox_id: int = 0,
    ) -> Stream: ...
    def forget(self) -> None: ...
    def unpin(self, prompt: Sequence[int]) -> bool: ...
    def save(self, tokens: Sequence[int]) -> dict[str, Any]: ...
    def load(self, saved: dict[str, Any], pin: bool = False) -> None: ...
    def stats(self) -> dict[str, int]: ...
    @property
    def n_ctx(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
