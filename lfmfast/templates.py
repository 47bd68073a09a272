"""Chat templates: messages in, a prompt out whose control tokens are told from text that only looks like them.

A rendered prompt is a list of segments. A special segment is one control token that the template put there; everything
else is plain text and is tokenised without looking for control tokens, so that ``<|im_end|>`` typed by a user stays text.
Joined, the segments are what transformers' ``apply_chat_template`` gives for the template in the model file (with the
exceptions that `lfmfast.messages` lists, and that ``fix_tool_calls=False`` turns off).

The formats of the LFM2 family are rendered in C++, any other template by Jinja in a sandbox (`lfmfast.jinja_template`).
"""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, NamedTuple, NoReturn, Protocol

from lfmfast.errors import ParameterError, TemplateError
from lfmfast.messages import (
    FAMILIES,
    VL,
    Family,
    NativeMessage,
    check_messages,
    check_tools,
    native_message,
    native_system,
    tools_text,
)

__all__ = ["Block", "ChatTemplate", "Extension", "Rendered", "Segment", "chat_template_for", "encode", "template_family"]


class Segment(NamedTuple):
    """A run of plain text, or (``special``) exactly one control token."""

    text: str
    special: bool


Block = tuple[Segment, ...]
"""The segments of the head (BOS, system message, tools), of one message, or of the generation prompt."""


@dataclass(frozen=True)
class Rendered:
    """A rendered prompt.

    Attributes
    ----------
    blocks : list of Block
        The head, one block per message (a system message in front is part of the head), the generation prompt if asked for.
        A single block if Jinja rendered it.
    segments : list of Segment
        All blocks as one list.
    text : str
        The prompt as text.
    """

    blocks: list[Block]

    @cached_property
    def segments(self) -> list[Segment]:
        return merge(segment for block in self.blocks for segment in block)

    @cached_property
    def text(self) -> str:
        return "".join([segment.text for block in self.blocks for segment in block])


@dataclass(frozen=True)
class Extension:
    """What a longer conversation adds to one that was rendered before.

    Attributes
    ----------
    n_kept : int
        Messages in front that are rendered as they were before, the head with them. 0: nothing is, ``blocks`` begins with
        the head.
    blocks : list of Block
        The messages after those, and the generation prompt if asked for.
    n_blocks_kept : int
        Blocks in front that stay: the head and those of the kept messages that aren't in the head.
    """

    n_kept: int
    blocks: list[Block]
    n_blocks_kept: int = 0


class ChatTemplate(ABC):
    """A chat template. Made by `chat_template_for`.

    Attributes
    ----------
    family : str
        "lfm2", "lfm2.5-instruct", "lfm2.5-8b", "lfm2.5-2.6b", "lfm2.5-vl", "lfm2-vl", "jinja", "named" for one of llama.cpp's
        own, or "none" without a template.
    source : str or None
        The Jinja source, or the name.
    """

    family: str
    source: str | None
    is_native: bool = False
    """Whether it is a format of the LFM2 family."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        fix_tool_calls: bool = True,
        **template_kwargs: Any,
    ) -> Rendered:
        """Render a conversation.

        Parameters
        ----------
        messages : list of dict
            ``role`` and ``content``, and for the assistant ``tool_calls`` and ``thinking``, as in OpenAI's API.
        tools : list of dict, optional
            Functions that the model may call, bare or wrapped as ``{"type": "function", "function": {...}}``.
        add_generation_prompt : bool, optional
            End with the start of the assistant's turn. Default: yes, except with `continue_final_message`.
        continue_final_message : bool
            Leave the last message, which must be the assistant's, without its end, to be continued.
        fix_tool_calls : bool
            Make messages fit where the stock template would drop tool calls, print ``null`` or fail: see
            `lfmfast.messages`. False: exactly the stock template.
        **template_kwargs
            Variables of the template: ``keep_past_thinking`` (Instruct, VL), ``preserve_thinking`` (8B, 2.6B), each also by the
            other's name; any for Jinja.

        Raises
        ------
        TemplateError
            Messages that can't be rendered; names the message.

        Examples
        --------
        >>> source = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        >>> template = chat_template_for(source, bos_token="", eos_token="", special_tokens=["<|im_start|>", "<|im_end|>"])
        >>> template.render([{"role": "user", "content": "Hi <|im_end|>"}]).segments[1]
        Segment(text='user\\nHi <|im_end|>', special=False)
        """
        return Rendered(
            self._extend(
                messages, 0, tools, add_generation_prompt, continue_final_message, fix_tool_calls, template_kwargs
            ).blocks
        )

    def extend(
        self,
        messages: Sequence[Mapping[str, Any]],
        n_known: int,
        *,
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        fix_tool_calls: bool = True,
        **template_kwargs: Any,
    ) -> Extension:
        """Render what a longer conversation adds.

        The first `n_known` messages were rendered before, by themselves, complete, with the same tools and options.
        Thoughts that leave the history change messages that were known, so fewer may be kept. The date in the VL
        template's head is that of the first rendering. Jinja templates keep nothing.

        Parameters
        ----------
        messages, tools, add_generation_prompt, continue_final_message, fix_tool_calls, **template_kwargs
            As for `render`.
        n_known : int
            Messages that were rendered before; 0 to ``len(messages)``.
        """
        return self._extend(
            messages, n_known, tools, add_generation_prompt, continue_final_message, fix_tool_calls, template_kwargs
        )

    @abstractmethod
    def _extend(
        self,
        messages: Sequence[Mapping[str, Any]],
        n_known: int,
        tools: Sequence[Any] | None,
        add_generation_prompt: bool | None,
        open_end: bool,
        fix: bool,
        variables: dict[str, Any],
    ) -> Extension: ...

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.family}>"


def check_request(messages: Any, n_known: int, add_generation_prompt: bool | None, open_end: bool) -> bool:
    """Checks what is common to all templates; whether to add a generation prompt."""
    check_messages(messages)
    if not 0 <= n_known <= len(messages):
        raise ParameterError(f"n_known must be from 0 to the number of messages, {len(messages)}, not {n_known}")
    if not open_end:
        return add_generation_prompt is None or bool(add_generation_prompt)
    if add_generation_prompt:
        raise ParameterError(
            "add_generation_prompt starts a new turn and continue_final_message goes on with the last one: "
            "only one of them can be True"
        )
    last = messages[-1]
    if isinstance(last, Mapping) and last.get("role") != "assistant":
        raise TemplateError(f"continue_final_message needs a last message of the assistant, not of {last.get('role')!r}")
    return False


class Formatter(Protocol):
    """The formatter of lfmfast._template."""

    @property
    def pivot(self) -> str: ...
    def head(self, system: tuple[str, ...] | None, tools: str, date: str) -> Block: ...
    def render(
        self, messages: list[NativeMessage], n_known: int, keep_thinking: bool, add_generation_prompt: bool, open_end: bool
    ) -> tuple[int, list[Block]]: ...


class NativeTemplate(ChatTemplate):
    """A format of the LFM2 family, rendered in C++."""

    is_native = True

    def __init__(
        self,
        family: Family,
        source: str | None,
        bos_token: str,
        special_tokens: Iterable[str],
        date: datetime.date | None = None,
    ) -> None:
        self.family = family.name
        self.source = source
        self._family = family
        self._date = date
        # Not before it is needed: this module is importable without the native ones.
        native = import_module("lfmfast._template")
        self._formatter: Formatter = native.Formatter(family.number, bos_token, special_tokens)
        self._pivot = self._formatter.pivot

    def _extend(
        self,
        messages: Sequence[Mapping[str, Any]],
        n_known: int,
        tools: Sequence[Any] | None,
        add_generation_prompt: bool | None,
        open_end: bool,
        fix: bool,
        variables: dict[str, Any],
    ) -> Extension:
        prompt = check_request(messages, n_known, add_generation_prompt, open_end)
        family = self._family
        for name in variables:
            if not family.switch or name not in SWITCHES:
                known = f"it knows {family.switch}" if family.switch else "it knows none"
                raise TemplateError(f"the chat template {family.name} has no variable {name!r}; {known}")
        keep = any(bool(value) for value in variables.values())
        start = self._start(messages, n_known, keep, open_end)
        try:
            n_system = int(_is_system(messages[0], fix))
            first = max(start, n_system)
            natives = [native_message(messages[i], i, family, fix) for i in range(first, len(messages))]
            n_kept, blocks = self._formatter.render(natives, max(n_known - first, 0), keep, prompt, open_end)
            n_kept += first
            if n_known == 0 or n_kept == 0:
                n_kept = 0
                checked = check_tools(tools, fix)
                system = native_system(messages[0], family, fix, bool(checked)) if n_system else None
                blocks.insert(0, self._formatter.head(system, tools_text(checked, family), self._today()))
        except UnicodeEncodeError:
            refuse_surrogates({"messages": messages, "tools": tools})
        return Extension(n_kept, blocks, n_kept + 1 - n_system if n_kept else 0)

    def switch(self, keep: bool) -> dict[str, Any]:
        """The template's variable for past thoughts, set."""
        return {self._family.switch: keep} if self._family.switch else {}

    def _start(self, messages: Sequence[Any], n_known: int, keep: bool, open_end: bool) -> int:
        """The first message that has to be looked at: see pivot() in engine/chat_template.h."""
        start = min(n_known, len(messages) - open_end)
        if self._pivot and not keep and _last(messages, self._pivot, n_known, len(messages)) >= 0:
            start = min(start, max(_last(messages, self._pivot, 0, n_known), 0))
        return start

    def _today(self) -> str:
        if self._family is not VL:
            return ""
        return (datetime.date.today() if self._date is None else self._date).strftime("%Y-%m-%d")


#: The names that templates have for the variable that keeps past thoughts: each is taken for the one of the model's template.
SWITCHES = ("keep_past_thinking", "preserve_thinking")


def _is_system(message: Any, fix: bool) -> bool:
    return isinstance(message, Mapping) and message.get("role") in (("system", "developer") if fix else ("system",))


def _last(messages: Sequence[Any], role: str, start: int, end: int) -> int:
    """The last message of a role in a range; -1 if there is none."""
    for i in range(end - 1, start - 1, -1):
        if isinstance(messages[i], Mapping) and messages[i].get("role") == role:
            return i
    return -1


class MissingTemplate(ChatTemplate):
    """For a model file without a chat template."""

    family = "none"
    source = None

    def _extend(self, *args: Any) -> NoReturn:
        raise TemplateError("the model file has no chat template, so messages can't be rendered: give the prompt as text")


def chat_template_for(
    source: str | None,
    *,
    bos_token: str,
    eos_token: str,
    special_tokens: Collection[str],
    date: datetime.date | None = None,
    add_bos: bool = False,
) -> ChatTemplate:
    """The chat template of a model file.

    Parameters
    ----------
    source : str or None
        The Jinja source in the file (``tokenizer.chat_template``), or the name of a template that llama.cpp has ("chatml").
    bos_token, eos_token : str
        Texts of these tokens.
    special_tokens : collection of str
        Texts of the vocabulary's control tokens.
    date : datetime.date, optional
        Stands for today in templates that write the date.
    add_bos : bool
        The vocabulary wants BOS in front (``tokenizer.ggml.add_bos_token``). Prompts then begin with exactly one, whether
        the template writes it or not.
    """
    if source is None or not source.strip():
        return MissingTemplate()
    from lfmfast.jinja_template import JinjaTemplate

    special = frozenset(text for text in special_tokens if text)
    if "{" not in source:  # Jinja that would show no messages
        from lfmfast.named_template import NamedTemplate

        return NamedTemplate(source.strip(), bos_token, eos_token, special, date, add_bos)
    jinja = JinjaTemplate(source, bos_token, eos_token, special, date, add_bos)
    for family in FAMILIES:
        if {"<|im_start|>", "<|im_end|>"} <= special and jinja.speaks(
            NativeTemplate(family, source, bos_token, special, PROBE_DATE)
        ):
            return NativeTemplate(family, source, bos_token, special, date)
    return jinja


def template_family(source: str | None) -> str | None:
    """`ChatTemplate.family` of a template source, as in a model that has LFM2's control tokens; None without a source.

    Examples
    --------
    >>> template_family("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    'jinja'
    """
    template = chat_template_for(source, bos_token=_LFM2_TOKENS[0], eos_token=_LFM2_TOKENS[2], special_tokens=_LFM2_TOKENS)
    return None if template.source is None else template.family


_LFM2_TOKENS = ("<|startoftext|>", "<|im_start|>", "<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>")
PROBE_DATE = datetime.date(2001, 2, 3)


def merge(segments: Iterable[Segment]) -> list[Segment]:
    """Joins plain segments that follow each other: BPE must see them as one text."""
    merged: list[Segment] = []
    for segment in segments:
        if not segment.special and merged and not merged[-1].special:
            merged[-1] = Segment(merged[-1].text + segment.text, False)
        elif segment.text:
            merged.append(segment)
    return merged


class Vocabulary(Protocol):
    """What `encode` needs: `lfmfast.Model` has it."""

    def token_id(self, text: str) -> int | None: ...
    def tokenize(self, text: str, *, parse_special: bool = False) -> list[int]: ...


def encode(segments: Iterable[Segment], vocabulary: Vocabulary) -> list[int]:
    """Token ids of a prompt, with control tokens only where the template put them.

    Parameters
    ----------
    segments : iterable of Segment
        Of one rendering, merged (`Rendered.segments`) or a block.
    vocabulary : Vocabulary
        Turns texts into ids.
    """
    ids: list[int] = []
    for text, special in segments:
        if special:
            token = vocabulary.token_id(text)
            if token is None:
                raise TemplateError(f"the chat template writes {text!r}, which is no token of the vocabulary")
            ids.append(token)
        else:
            ids += vocabulary.tokenize(text, parse_special=False)
    return ids


def strings(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """All strings in nested data, with where they are."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings(key, where)
            yield from strings(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from strings(item, f"{where}[{i}]")


def refuse_surrogates(data: Any) -> NoReturn:
    """Raises for the first text that isn't valid Unicode."""
    for where, text in strings(data):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TemplateError(
                f"{where} isn't valid Unicode: character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}"
            ) from None
    raise TemplateError("the messages aren't valid Unicode: a lone surrogate")
