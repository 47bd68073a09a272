"""A request's options, checked, and what the engine and the reader of the reply make of them."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lfmfast import constraint
from lfmfast._grammar import Grammar, GrammarVocabulary
from lfmfast.constraint import Constraint
from lfmfast.errors import ParameterError
from lfmfast.model_file import ModelFile, check_int
from lfmfast.params import SamplingParams
from lfmfast.reply import MARKERS, ReplyReader, TextDivider
from lfmfast.tool_grammar import answer_or_calls, tool_constraint

if TYPE_CHECKING:
    from lfmfast.stream import Answer

__all__ = ["Asked", "Options", "needs_grammar", "shown_tools"]

#: Compiled grammars that are kept per model.
GRAMMARS_MAX = 64
#: Fields of ``response_format`` and its like, of which a request may have one.
FORMATS = ("response_format", "json_schema", "grammar", "regex")


class Asked(NamedTuple):
    """A prompt as it is read, and what is to be done with the reply."""

    tokens: Sequence[int]
    on_end: Callable[[Answer], None] | None = None
    tools: Sequence[Any] | None = None
    is_chat: bool = False
    """Whether it was messages: then the reply is divided into thoughts, content and calls."""


def shown_tools(tools: Sequence[Any] | None, tool_choice: Any) -> Sequence[Any] | None:
    """The tools that the prompt shows: what a model doesn't know of it can't call."""
    return None if tool_choice == "none" else tools


class _Marks:
    """What a model's vocabulary says of markers and grammars; made once per model."""

    def __init__(self, model: ModelFile) -> None:
        self.ids = tuple(-1 if (token := model.token_id(text)) is None else token for text in MARKERS)
        self._native = model.native
        self._grammars: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    @functools.cached_property
    def _vocabulary(self) -> GrammarVocabulary:
        return GrammarVocabulary(self._native, MARKERS)

    def compiled(self, wanted: Constraint) -> Grammar:
        with self._lock:
            found = self._grammars.get(wanted)
            if found is None:
                found = Grammar(self._vocabulary, wanted.kind, wanted.text)
                self._grammars[wanted] = found
                if len(self._grammars) > GRAMMARS_MAX:
                    self._grammars.popitem(last=False)
            else:
                self._grammars.move_to_end(wanted)
            return found

    def is_in_thought(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside a thought of the reply that it opens."""
        opened, closed = self.ids[:2]
        if opened < 0:
            return False
        for token in reversed(prompt):
            if token == opened:
                return True
            if token == closed or (token not in self.ids and self._native.is_control(token)):
                return False
        return False


_marks: weakref.WeakKeyDictionary[ModelFile, _Marks] = weakref.WeakKeyDictionary()


def _marks_of(model: ModelFile) -> _Marks:
    known = _marks.get(model)
    return known if known is not None else _marks.setdefault(model, _Marks(model))


@dataclass(frozen=True, slots=True)
class Options:
    """The options of :meth:`lfmfast.Model.stream` that are not about the prompt, checked; for any number of prompts."""

    params: SamplingParams
    """Every field is set."""
    native: dict[str, Any]
    """Of `Engine.submit`."""
    tools: Sequence[Any] | None
    constraint: Constraint | None
    thoughts: bool
    calls: bool
    budget: int
    budget_message: str
    single_call: bool
    held_calls: bool
    """Calls are held to a grammar."""

    @classmethod
    def check(
        cls,
        model: ModelFile,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        parse_tool_calls: bool = True,
        reasoning_format: str = "auto",
        reasoning_budget: int | None = None,
        reasoning_budget_message: str = "",
        response_format: Mapping[str, Any] | None = None,
        json_schema: Mapping[str, Any] | bool | None = None,
        grammar: str | None = None,
        regex: str | None = None,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        sampling: SamplingParams | None = None,
        logprobs: int | None = None,
        cache_prompt: bool = True,
        cache_reuse: int = 0,
        priority: int = 0,
        t_max_prompt_ms: int | None = None,
        t_max_predict_ms: int | None = None,
        pin: bool = False,
        **sampling_overrides: Any,
    ) -> Options:
        """Raises ParameterError for what is out of its limits or can't be enforced."""
        limits = {"max_tokens": (max_tokens, -1), "logprobs": (logprobs, 0), "t_max_prompt_ms": (t_max_prompt_ms, 0),
                  "t_max_predict_ms": (t_max_predict_ms, 0), "cache_reuse": (cache_reuse, 0), "priority": (priority, -(2**31)),
                  "reasoning_budget": (reasoning_budget, -1)}  # fmt: skip
        for name, (value, low) in limits.items():
            if value is not None or name in ("cache_reuse", "priority"):
                check_int(name, value, low)
        if cache_reuse and model.deterministic:
            raise ParameterError(f"cache_reuse {cache_reuse}: it is inexact, and the model was opened with deterministic=True")
        stops = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, Iterable) else [stop]
        for text in stops:
            if not isinstance(text, str) or not text:
                raise ParameterError(f"stop must be a string or a list of strings, none of them empty, not {text!r}")
        if reasoning_format not in ("auto", "deepseek", "none"):
            raise ParameterError(f"reasoning_format must be 'auto', 'deepseek' or 'none', not {reasoning_format!r}")
        params = SamplingParams() if sampling is None else sampling
        params = params.merged(**sampling_overrides).resolved(model.default_sampling.params)
        native = {
            "suppress": [t for t in model.end_tokens if params.ignore_eos], "max_tokens": _or_none(max_tokens), "stop": stops,
            "n_logprobs": _or_none(logprobs), "cache_prompt": cache_prompt, "cache_reuse": cache_reuse, "priority": priority,
            "max_prompt_ms": _or_none(t_max_prompt_ms), "max_predict_ms": _or_none(t_max_predict_ms), "pin": pin,
        }  # fmt: skip
        offered = shown_tools(tools, tool_choice) or None
        of_format = _format(response_format, json_schema, grammar, regex)
        of_calls = _calls(model, offered, tool_choice, parallel_tool_calls)
        return cls(
            params, native, offered, _either(model, offered, of_format, of_calls), reasoning_format != "none",
            parse_tool_calls and offered is not None, _or_none(reasoning_budget), reasoning_budget_message,
            of_calls is not None and not parallel_tool_calls, of_calls is not None,
        )

    def begin(self, model: ModelFile, asked: Asked) -> tuple[dict[str, Any], ReplyReader | None, TextDivider | None]:
        """For one prompt: what `Engine.submit` takes beside the prompt and the parameters, and what reads the reply.

        The divider is there where the vocabulary lacks markers that are to be told apart.
        """
        if not asked.is_chat and self.constraint is None and self.budget < 0:
            return self.native, None, None
        marks = _marks_of(model)
        in_thought = marks.is_in_thought(asked.tokens)
        ids = (*marks.ids[:2], *(marks.ids[2:] if self.calls or (self.constraint and self.constraint.lazy) else (-1, -1)))
        native = {**self.native, "markers": ids, "in_thought": in_thought}
        if self.budget >= 0 and marks.ids[1] >= 0:  # a model without the tokens has no thoughts to limit
            native["thought_tokens"] = self.budget
            message = model.tokenize(self.budget_message) if self.budget_message else []
            native["thought_end"] = [*message, marks.ids[1]]
        if self.constraint is not None:
            native["grammar"] = marks.compiled(self.constraint)
            native["lazy"] = self.constraint.lazy
            native["single_call"] = self.single_call
        if not asked.is_chat or not (self.thoughts or self.calls):
            return native, None, None
        reader = ReplyReader(thoughts=self.thoughts, calls=self.calls, tools=self.tools, in_thought=in_thought,
                             early=self.held_calls)  # fmt: skip
        by_text = self.calls and marks.ids[2] < 0
        return native, reader, TextDivider(thoughts=False, calls=True) if by_text else None


def _or_none(value: int | None) -> int:
    return -1 if value is None else value


def _format(response_format: Any, json_schema: Any, grammar: Any, regex: Any) -> Constraint | None:
    given = [name for name, value in zip(FORMATS, (response_format, json_schema, grammar, regex), strict=True)
             if value is not None]  # fmt: skip
    if len(given) > 1:
        raise ParameterError(f"{given[0]} and {given[1]} can't be given together")
    if json_schema is not None:
        return constraint.from_json_schema(json_schema)
    if grammar is not None:
        return constraint.from_gbnf(grammar)
    return constraint.from_regex(regex) if regex is not None else constraint.from_response_format(response_format)


def _function(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    return function if isinstance(function, Mapping) else {}


def _calls(model: ModelFile, tools: Sequence[Any] | None, choice: Any, parallel: bool) -> Constraint | None:
    """The constraint that tools, tool_choice and parallel_tool_calls come to."""
    if not isinstance(parallel, bool):
        raise ParameterError(f"parallel_tool_calls must be True or False, not {parallel!r}")
    if isinstance(choice, Mapping):  # OpenAI's {"type": "function", "function": {"name": ...}}
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise ParameterError("tool_choice must be 'auto', 'none', 'required' or name a function")
    elif choice in (None, "auto", "none", "required"):
        name = None
    else:
        raise ParameterError(f"tool_choice must be 'auto', 'none', 'required' or name a function, not {choice!r}")
    if not tools:
        if name is not None or choice == "required":
            raise ParameterError(f"tool_choice {name or choice!r} needs tools")
        return None
    if name is not None and name not in [_function(tool).get("name") for tool in tools]:
        raise ParameterError(f"tool_choice: there is no tool {name!r}")
    if not _are_enforced(tools, choice, parallel):
        return None
    return tool_constraint(tools, name=name, parallel=parallel, lazy=name is None and choice != "required",
                           marked=_marks_calls(model))  # fmt: skip


def _marks_calls(model: ModelFile) -> bool:
    """Whether the model has tokens that stand around calls."""
    return all(model.token_id(text) is not None for text in MARKERS[2:])


def _are_enforced(tools: Sequence[Any], choice: Any, parallel: Any) -> bool:
    """Whether calls have to be made to fit: some must be made, at most one can be, or a tool is strict."""
    return choice not in (None, "auto", "none") or parallel is False or any(
        _function(tool).get("strict") is True for tool in tools)  # fmt: skip


def _either(model: ModelFile, tools: Sequence[Any] | None, of_format: Constraint | None,
            of_calls: Constraint | None) -> Constraint | None:  # fmt: skip
    """What the answer's format and the calls come to together: an answer of the format, or calls in its place."""
    if of_calls is not None:
        if of_format is not None and of_format.kind != "json_schema":
            raise ParameterError("tool calls can't be enforced together with grammar or regex: give response_format or "
                                 "json_schema, or neither a tool_choice, strict tools nor parallel_tool_calls=False")
        if not of_calls.lazy:  # there are no answers but calls
            return of_calls
        if of_format is None and not _marks_calls(model):
            raise ParameterError("strict tools and parallel_tool_calls=False can't be enforced: "
                                 "this model has no tokens around calls")
    if of_format is None or not tools or of_format.kind != "json_schema":
        return of_calls or of_format
    return answer_or_calls(of_format, of_calls, marked=_marks_calls(model))


def needs_grammar(tools: Sequence[Any] | None, options: Mapping[str, Any]) -> bool:
    """Whether the options of a request ask for a grammar. To make one takes time that an event loop does not have."""
    if any(options.get(name) is not None for name in FORMATS):
        return True
    choice = options.get("tool_choice")
    return bool(shown_tools(tools, choice)) and _are_enforced(tools or (), choice, options.get("parallel_tool_calls"))
