from collections.abc import Sequence

from lfmfast._model import Model
from lfmfast.params import SamplingParams

class Stream:
    done: bool
    def wait(
        self,
    ) -> list[tuple[bytes, tuple[int, ...], tuple[tuple[float, tuple[tuple[int, float], ...]], ...] | None, int]]: ...
    def cancel(self) -> None: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def stop_string(self) -> str | None: ...
    @property
    def timings(self) -> dict[str, int]: ...
    @property
    def outside_us(self) -> list[int]: ...

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
    ) -> Stream: ...
    def forget(self) -> None: ...
    @property
    def n_ctx(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
