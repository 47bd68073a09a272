from collections.abc import Iterable

from typing_extensions import Self, disjoint_base

from lfmfast.templates import Block

@disjoint_base
class Formatter:
    """The C++ formatter of one family (0 lfm2, 1 instruct, 2 8b, 3 2.6b, 4 vl, 5 lfm2-vl)."""

    def __new__(cls, family: int, bos: str, special: Iterable[str]) -> Self: ...
    @property
    def pivot(self) -> str: ...
    def head(self, system: tuple[str, ...] | None, tools: str, date: str) -> Block: ...
    def render(
        self,
        messages: list[tuple[str, tuple[str, ...] | None, str | None, str | None]],
        n_known: int,
        keep_thinking: bool,
        add_generation_prompt: bool,
        open_end: bool,
    ) -> tuple[int, list[Block]]: ...
