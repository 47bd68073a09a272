"""From a record to requests of the model: OpenAI's batch lines, plain lines, columns of a table."""

from __future__ import annotations

import hashlib
import inspect
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lfmfast._many import sort_key
from lfmfast._request import FORMATS
from lfmfast.batch.reader import Record
from lfmfast.errors import ParameterError
from lfmfast.model import Model
from lfmfast.model_file import check_int
from lfmfast.params import SamplingParams

__all__ = ["N_MAX", "Form", "Request", "template_columns"]

#: Answers to one prompt, and to one line.
N_MAX, ANSWERS_MAX = 128, 1024
SEEDS = 2**32 - 1

_STREAM = {name for name, value in inspect.signature(Model.stream).parameters.items() if value.kind is value.KEYWORD_ONLY}
#: What a line can say to :meth:`Model.stream`.
OPTIONS = frozenset((_STREAM - {"sampling"}) | {"reasoning_format", "reasoning_budget_message", "parse_tool_calls"}
                    | {item.name for item in fields(SamplingParams)} | {"repetition_penalty"})  # fmt: skip
ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "text"}
#: What is not checked further down: options, their type, and its name.
KINDS = (("tools", list, "an array"), ("template_options", dict, "an object"), ("cache_prompt", bool, "true or false"),
         ("parse_tool_calls", bool, "true or false"), ("continue_final_message", bool, "true or false"))  # fmt: skip
RESERVED = frozenset(("messages", "tools", "remembered", "continue_final_message"))
#: Fields of a body that are the client's own, or say nothing about the answer.
IGNORED = frozenset(("model", "user", "metadata", "store", "service_tier", "stream_options", "prompt_cache_key",
                     "safety_identifier"))  # fmt: skip
#: Fields of a body that can't be honoured, and the values that ask for nothing.
REFUSED: dict[str, Callable[[Any], bool]] = {
    "stream": lambda value: value is False,
    "echo": lambda value: value is False,
    "suffix": lambda value: value == "",
    "best_of": lambda value: value == 1,
    "functions": lambda value: value == [],
    "function_call": lambda value: value in ("none", "auto"),
    "modalities": lambda value: value == ["text"],
    "reasoning_effort": lambda value: value == "none",
}


@dataclass(slots=True)
class Request:
    """A line, read.

    Parameters
    ----------
    kind : str
        "chat" and "text" are OpenAI's endpoints, "plain" is a line of any other form.
    prompts : list
        Each has `n` answers; the seed of answer i to any of them is `seed` + i.
    error : Exception, optional
        Why there is nothing to ask; it is answered with that.
    weight : int
        Bytes that it takes, more or less.
    """

    number: int
    size: int
    kind: str = "plain"
    custom_id: str | None = None
    model: str | None = None
    prompts: list[Any] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    seed: int = 0
    key: str = ""
    error: Exception | None = None

    @property
    def weight(self) -> int:
        return 200 + len(self.key)


@dataclass(frozen=True, kw_only=True)
class Form:
    """How records are read.

    Parameters
    ----------
    seed : int
        Each line gets one of its own from it, and from its number.
    options : mapping
        Of :meth:`Model.stream`, for lines that don't say otherwise.
    n : int
        Answers to each prompt, likewise.
    column : str, optional
        The field or column that is the prompt: a text, or messages.
    template : str, optional
        The prompt, with names of fields or columns in braces.
    system : str, optional
        The system prompt of conversations that don't begin with one.
    raw : bool
        The text of `column` or `template` is to be gone on with; otherwise it is a user's message.
    table : bool
        Results go into a table, whose lines have all one answer, or all lists of them.
    """

    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    n: int = 1
    column: str | None = None
    template: str | None = None
    system: str | None = None
    raw: bool = False
    table: bool = False

    def read(self, record: Record) -> Request:
        """The request in a record; of one that is wrong, its error."""
        request = Request(record.number, record.size, seed=self.seed_of(record.number))
        try:
            self._fill(request, record.read(), is_row=record.values is not None)
        except (ParameterError, RecursionError) as error:
            request.error = error
        return request

    def seed_of(self, name: object) -> int:
        """The seed of the record with this number, or whatever else tells it from others."""
        digest = hashlib.blake2b(f"{self.seed}:{name}".encode(errors="surrogatepass"), digest_size=8).digest()
        return int.from_bytes(digest, "big") % SEEDS

    def _fill(self, request: Request, values: dict[str, Any], is_row: bool) -> None:
        custom_id = values.get("custom_id")
        if custom_id is not None and not isinstance(custom_id, str):
            raise ParameterError(f"custom_id must be a string, not {_show(custom_id)}")
        request.custom_id = custom_id
        if self.column is not None or self.template is not None:
            request.prompts, request.n, options = [self._of_columns(values)], self.n, dict[str, Any]()
        elif "url" in values or "body" in values:
            options = self._of_body(request, values)
        else:
            options = self._of_line(request, values, is_row)
        if self.table and self.n == 1 and len(request.prompts) * request.n > 1:
            raise ParameterError("a table has one answer for each line, or with --n lists of them")
        seed = options.pop("seed", None)
        if seed is not None:
            check_int("seed", seed, -(2**63), 2**64 - 1)
        if seed is not None and seed != -1:
            request.seed = seed % SEEDS
        request.options = self._merged(options)
        request.prompts = [self._with_system(prompt) for prompt in request.prompts]
        request.key = sort_key(request.prompts[0] if len(request.prompts) == 1 else request.prompts, options.get("tools"))

    def _merged(self, options: dict[str, Any]) -> dict[str, Any]:
        """What the line says over what is said for all of them."""
        given = dict(self.options)
        if any(name in options for name in FORMATS):
            for name in FORMATS:
                given.pop(name, None)
        if "repetition_penalty" in options:
            given.pop("repeat_penalty", None)
        bias = options.get("logit_bias")
        if isinstance(bias, dict):  # JSON has no keys that are numbers
            options["logit_bias"] = {int(key) if key.isascii() and key.isdigit() else key: value for key, value in bias.items()}
        for name, kind, what in KINDS:
            if not isinstance(options.get(name, kind()), kind):
                raise ParameterError(f"{name} must be {what}, not {_show(options[name])}")
        if reserved := RESERVED & options.get("template_options", {}).keys():
            raise ParameterError(f"template_options can't set {min(reserved)}")
        return given | options

    def _with_system(self, prompt: Any) -> Any:
        if self.system is None or not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], dict):
            return prompt
        return prompt if prompt[0].get("role") == "system" else [{"role": "system", "content": self.system}, *prompt]

    # --- forms of records ---

    def _of_columns(self, values: Mapping[str, Any]) -> Any:
        if self.template is not None:
            return self._asked(_filled(self.template, values))
        assert self.column is not None
        return self._asked(_column(values, self.column))

    def _asked(self, value: Any) -> Any:
        if isinstance(value, str):
            return value if self.raw else [{"role": "user", "content": value}]
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value) and not self.raw:
            return _without_nulls(value)
        raise ParameterError(f"the prompt must be a text{'' if self.raw else ' or messages'}, not {_show(value)}")

    def _of_line(self, request: Request, values: dict[str, Any], is_row: bool) -> dict[str, Any]:
        given = {name: value for name, value in values.items() if value is not None and name != "custom_id"}
        if ("messages" in given) == ("prompt" in given):
            raise ParameterError("there must be one of messages and prompt" + (
                " (--prompt-column and --template take other names)" if "messages" not in given else ", not both"))
        messages, prompt = given.pop("messages", None), given.pop("prompt", None)
        if messages is not None:
            request.prompts = [_without_nulls(messages) if is_row else _messages(messages)]
        elif isinstance(prompt, str) or _is_ids(prompt):
            request.prompts = [prompt]
        else:
            raise ParameterError(f"prompt must be a text or token ids, not {_show(prompt)}")
        request.n = self.n
        if is_row:
            return {}
        for name, instead in (("n", "--n is for all lines"), ("pin", "a batch keeps nothing"), ("sampling", "name its fields")):
            if name in given:
                raise ParameterError(f"{name} can't be given here: {instead}")
        return given

    def _of_body(self, request: Request, values: dict[str, Any]) -> dict[str, Any]:
        url, method, body = values.get("url"), values.get("method", "POST"), values.get("body")
        kind = ENDPOINTS.get(url) if isinstance(url, str) else None
        request.kind = kind or "chat"
        if kind is None:
            raise ParameterError(f"url must be {' or '.join(ENDPOINTS)}, not {_show(url)}")
        if method != "POST":
            raise ParameterError(f"method must be POST, not {_show(method)}")
        if request.custom_id is None:
            raise ParameterError("custom_id is missing")
        if not isinstance(body, dict):
            raise ParameterError(f"body must be an object, not {_show(body)}")
        given = {name: value for name, value in body.items() if value is not None}
        for name, harmless in REFUSED.items():
            if name in given and not harmless(given.pop(name)):
                raise ParameterError(f"{name} is not supported here (seen: {_show(body[name])})")
        request.model = given["model"] if isinstance(given.get("model"), str) else None
        for name in IGNORED:
            given.pop(name, None)
        request.n = given.pop("n", self.n)
        check_int("n", request.n, 1, N_MAX)
        if kind == "chat":
            request.prompts = [_messages(given.pop("messages", None))]
        else:
            request.prompts = _prompts(given.pop("prompt", None))
        if len(request.prompts) * request.n > ANSWERS_MAX:
            raise ParameterError(f"these are {len(request.prompts)} prompts with {request.n} answers each; "
                                 f"a line can have at most {ANSWERS_MAX}")
        return _options(given, kind)


def _options(given: dict[str, Any], kind: str) -> dict[str, Any]:
    """Options of :meth:`Model.stream` from the fields of a body."""
    for name, known in (("max_completion_tokens", "max_tokens"), ("chat_template_kwargs", "template_options")):
        if name in given:
            given[known] = given.pop(name)
    top, wanted = given.pop("top_logprobs", None), given.pop("logprobs", None)
    if kind == "chat" or isinstance(wanted, bool):
        if wanted not in (None, True, False):
            raise ParameterError(f"logprobs must be true or false, not {_show(wanted)}")
        if top is not None and not wanted:
            raise ParameterError("top_logprobs needs logprobs to be true")
        wanted = (top or 0) if wanted else None
    if wanted is not None:
        check_int("top_logprobs" if top is not None else "logprobs", wanted, 0, 1024)
        given["logprobs"] = wanted
    for name in given:
        if name not in OPTIONS:
            raise ParameterError(f"{name} is not supported here")
    return given


def _messages(value: Any) -> list[Any]:
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise ParameterError("messages are missing" if value is None else
                             f"messages must be an array of objects that is not empty, not {_show(value)}")  # fmt: skip
    return value


def _without_nulls(value: Any) -> list[Any]:
    """Messages of a table, where each has all the fields that any of them has."""
    return [{name: part for name, part in item.items() if part is not None} for item in _messages(value)]


def _is_ids(value: Any) -> bool:
    return (isinstance(value, list) and bool(value)
            and all(isinstance(item, int) and not isinstance(item, bool) for item in value))  # fmt: skip


def _prompts(value: Any) -> list[Any]:
    prompts = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(prompts, list) or not prompts or not all(isinstance(item, str) or _is_ids(item) for item in prompts):
        raise ParameterError("prompt is missing" if value is None else
                             f"prompt must be a text, token ids, or an array of such, not {_show(value)}")  # fmt: skip
    return prompts


def template_columns(template: str) -> list[str]:
    """The names in a template.

    Raises
    ------
    ParameterError
        There are none, or it is malformed.
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ParameterError(f"the template is malformed: {error}") from None
    names = [name for _, name, _, _ in parts if name is not None]
    for _, name, spec, conversion in parts:
        if name is not None and (not name or spec or conversion or set(name) & set(".[]")):
            raise ParameterError(f"the template can have names of columns in braces, not {{{name}...}}; "
                                 "a brace itself is written twice")
    if not names:
        raise ParameterError("the template has no column in it, as in 'Summarize: {text}'")
    return list(dict.fromkeys(names))


def _filled(template: str, values: Mapping[str, Any]) -> str:
    out = []
    for text, name, _, _ in string.Formatter().parse(template):
        out.append(text)
        if name is not None:
            out.append(str(_column(values, name)))
    return "".join(out)


def _column(values: Mapping[str, Any], name: str) -> Any:
    value = values.get(name)
    if value is None:
        raise ParameterError(f"{name!r} is {'null' if name in values else 'missing'}")
    return value


def _show(value: object) -> str:
    text = repr(value)
    return f"{text[:60]}..." if len(text) > 63 else text
