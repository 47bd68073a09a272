"""From the body of a request to checked options: which fields there are, what they may be, and which are refused.

A field that is null counts as absent. One that can't be honoured is refused by its name. One that nobody knows is ignored, as
clients of OpenAI expect, and listed in the debug log. Accepted without effect are `id_slot`, `backend_sampling`, `n_keep`
and `n_discard`: they say how llama-server is to do its work, and answers don't depend on them here.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lfmfast.errors import ParameterError
from lfmfast.params import SamplingParams
from lfmfast.server.errors import invalid
from lfmfast.server.reader import CHARACTERS_MAX, INT_MAX, Fields, Harmless, show, wrong

if TYPE_CHECKING:
    from lfmfast.model import Model
    from lfmfast.server.settings import Settings

__all__ = ["Conversation", "Fields", "Generation", "parse_conversation", "parse_generation"]

#: More answers to one prompt than this are refused.
N_MAX = 128
#: Most alternatives per token that can be asked for.
TOP_MAX = 1024
#: Resolved sampling parameters that are kept per model.
KNOWN_MAX = 256
#: Seconds between two comments on a stream, at least: sending them is work that others wait for.
PING_MIN_S = 0.01
#: Largest logit bias.
BIAS_MAX = 1e6
#: `samplers` given as letters.
SAMPLER_LETTERS = {"e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p", "m": "min_p",
                   "x": "xtc", "t": "temperature"}  # fmt: skip

FLOATS = ("temperature", "top_p", "min_p", "repeat_penalty", "repetition_penalty", "frequency_penalty", "presence_penalty",
          "typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent",
          "dry_multiplier", "dry_base", "mirostat_tau", "mirostat_eta")  # fmt: skip
INTEGERS = ("top_k", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n", "mirostat", "min_keep")
#: Names of the most tokens that a thought can have; the first one that is there counts.
BUDGETS = ("reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens")
REASONING_FORMATS = ("auto", "deepseek", "none")
#: Other names of fields; the first one that is there counts.
MAX_TOKENS = ("n_predict", "max_completion_tokens", "max_tokens")

# Fields that are read elsewhere, or are the client's own book-keeping.
OTHERS = frozenset(("model", "prompt", "messages", "tools", "tool_choice", "user", "metadata", "store", "service_tier"))
NO_EFFECT = frozenset(("id_slot", "backend_sampling", "n_keep", "n_discard"))


def _is_empty(value: Any) -> bool:
    return value in ("", 0, False) or value == [] or value == {}


def _is_below_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0


def _is_one(value: Any) -> bool:
    return value == 1 and not isinstance(value, bool)


# What is not supported, by name, and the values that ask for nothing.
REFUSED: dict[str, Harmless] = {
    "grammar_lazy": _is_empty,
    "grammar_triggers": _is_empty,
    "preserved_tokens": _is_empty,
    "post_sampling_probs": _is_empty,
    "lora": _is_empty,
    "adaptive_target": _is_below_zero,
    "n_indent": _is_empty,
    "echo": _is_empty,
    "best_of": _is_one,
    "suffix": _is_empty,
    "functions": _is_empty,
    "function_call": lambda value: value in ("none", "auto"),
    "modalities": lambda value: value == ["text"],
    "audio": _is_empty,
    "web_search_options": lambda _: False,
    "reasoning_effort": lambda value: value == "none",
    "reasoning_control": _is_empty,
}


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A request, checked: how to generate, and what of it to show.

    Parameters
    ----------
    sampling : SamplingParams
        What the request sets over what the server's settings set.
    text_bias : tuple of (str, float)
        Of `logit_bias`, the entries whose token was given as text.
    n_predict : int
        -1: to the end of the answer.
    n_probs : int
        Log probabilities of this many likely tokens are shown; -1: none at all, not even those of the answer's tokens.
    n : int
        Answers to each prompt.
    constraint : mapping
        What the answer has to be: one of `response_format`, `json_schema` and `grammar`, as :meth:`lfmfast.Model.stream` takes
        them; or nothing.
    reasoning : mapping
        `reasoning_budget` and `reasoning_budget_message`, likewise.
    ping_s : float
        A stream with nothing to send for so long sends a comment; 0 and less: never.
    """

    sampling: SamplingParams
    text_bias: tuple[tuple[str, float], ...] = ()
    n_predict: int = -1
    stop: list[str] = field(default_factory=list)
    n_probs: int = -1
    n: int = 1
    cache_prompt: bool = True
    cache_reuse: int = 0
    t_max_prompt_ms: int | None = None
    t_max_predict_ms: int | None = None
    priority: int = 0
    stream: bool = False
    include_usage: bool = False
    timings_per_token: bool = False
    return_progress: bool = False
    return_tokens: bool = False
    response_fields: tuple[str, ...] = ()
    verbose: bool = False
    id_slot: int = -1
    ping_s: float = 30.0
    constraint: Mapping[str, Any] = field(default_factory=dict)
    reasoning: Mapping[str, Any] = field(default_factory=dict)

    def resolved(self, model: Model) -> SamplingParams:
        """The sampling parameters with every field set, and every token of `logit_bias` as its id."""
        params = self.sampling
        if self.text_bias:
            bias = dict(params.logit_bias or {})
            for text, value in self.text_bias:
                for token in model.tokenize(text):
                    bias[token] = value
            params = params.merged(logit_bias=bias)
        if params.logit_bias and any(token >= model.n_vocab for token in params.logit_bias):
            n = model.n_vocab
            params = params.merged(logit_bias={token: value for token, value in params.logit_bias.items() if token < n})
        return _resolved(params, model)

    def options(self, params: SamplingParams, i: int = 0) -> dict[str, Any]:
        """Options of :meth:`lfmfast.AsyncModel.stream` for answer `i` to a prompt.

        Parameters
        ----------
        params : SamplingParams
            From :meth:`resolved`.
        """
        seed = -1 if params.seed is None else params.seed
        if i and seed >= 0:  # as Model.generate(n=...)
            params = params.merged(seed=(seed + i) % (2**32 - 1))
        return {
            "sampling": params, "max_tokens": None if self.n_predict < 0 else self.n_predict, "stop": self.stop,
            "logprobs": None if self.n_probs < 0 else self.n_probs, "cache_prompt": self.cache_prompt,
            "cache_reuse": self.cache_reuse, "t_max_prompt_ms": self.t_max_prompt_ms,
            "t_max_predict_ms": self.t_max_predict_ms, "priority": self.priority, **self.constraint, **self.reasoning,
        }  # fmt: skip


# Most requests of a client have the same parameters, and checking them takes longer than the rest of the body.
_known: weakref.WeakKeyDictionary[Model, dict[SamplingParams, SamplingParams]] = weakref.WeakKeyDictionary()


def _resolved(params: SamplingParams, model: Model) -> SamplingParams:
    if params.logit_bias is not None:  # a dict, which has no hash
        return params.resolved(model.default_sampling.params)
    known = _known.setdefault(model, {})
    if (resolved := known.get(params)) is None:
        if len(known) >= KNOWN_MAX:
            known.clear()
        resolved = known[params] = params.resolved(model.default_sampling.params)
    return resolved


def parse_generation(body: Mapping[str, Any], settings: Settings, *, chat: bool) -> Generation:
    """What a body says about generating.

    Parameters
    ----------
    body : dict
        Of the chat or completion endpoints of OpenAI or llama-server.
    settings : Settings
        What counts where the body says nothing.
    chat : bool
        Whether `logprobs` is OpenAI's switch of the chat endpoint (with `top_logprobs`), or a number.

    Raises
    ------
    ApiError
        400: a value that is out of its limits, or asks for what there isn't; it names the field.
    """
    fields = Fields(body)
    fields.refuse(REFUSED)
    stream_options = Fields(fields.mapping("stream_options"))
    sampling, text_bias = _sampling(fields, settings)
    ping = fields.number("sse_ping_interval")
    if ping is not None and 0 < ping < PING_MIN_S:
        raise wrong("sse_ping_interval", f"0 or less (never), or at least {PING_MIN_S} (seconds)", ping)
    limit = fields.integer("t_max_predict_ms", -1, 2**53)
    constraint, reasoning = _constraint(fields), _reasoning(fields, settings)
    generation = Generation(
        sampling=sampling,
        text_bias=text_bias,
        n_predict=_n_predict(fields, settings),
        stop=[text for text in fields.strings("stop") if text],
        n_probs=_n_probs(fields, chat),
        n=_first(fields, ("n_cmpl", "n"), 1, N_MAX) or 1,
        cache_prompt=fields.boolean("cache_prompt", settings.cache_prompt),
        cache_reuse=_or(fields.integer("n_cache_reuse", 0), settings.cache_reuse),
        t_max_prompt_ms=fields.integer("t_max_prompt_ms", 0),
        t_max_predict_ms=None if limit is None or limit < 0 else min(limit, INT_MAX),
        priority=_or(fields.integer("priority", -(2**31)), 0),
        stream=fields.boolean("stream"),
        include_usage=stream_options.boolean("include_usage"),
        timings_per_token=fields.boolean("timings_per_token"),
        return_progress=fields.boolean("return_progress"),
        return_tokens=fields.boolean("return_tokens"),
        response_fields=tuple(fields.strings("response_fields")),
        verbose=fields.boolean("verbose", settings.verbose),
        id_slot=_or(fields.integer("id_slot", -1), -1),
        ping_s=settings.sse_ping_s if ping is None else ping,
        constraint=constraint,
        reasoning=reasoning,
    )
    fields.log_unknown(KNOWN)
    return generation


def _constraint(fields: Fields) -> dict[str, Any]:
    found: dict[str, Any] = {}
    schema = fields.get("json_schema")
    if schema is not None:
        if not isinstance(schema, (dict, bool)):
            raise wrong("json_schema", "an object", schema)
        found["json_schema"] = schema
    grammar = fields.get("grammar")
    if grammar is not None and not isinstance(grammar, str):
        raise wrong("grammar", "a string", grammar)
    if grammar:
        found["grammar"] = grammar
    form = fields.mapping("response_format")
    if fields.get("response_format") is not None and form.get("type") != "text":
        found["response_format"] = form
    if len(found) > 1:
        raise invalid(f"'{(names := list(found))[0]}' and '{names[1]}' can't be given together")
    return found


def _reasoning(fields: Fields, settings: Settings) -> dict[str, Any]:
    asked = _or(_first(fields, BUDGETS, -1), 0 if fields.get("reasoning_effort") == "none" else -1)
    budget = settings.reasoning_budget if asked < 0 else asked
    message = fields.get("reasoning_budget_message")
    if message is not None and not isinstance(message, str):
        raise wrong("reasoning_budget_message", "a string", message)
    found = {} if budget < 0 else {"reasoning_budget": budget}
    return {**found, "reasoning_budget_message": message} if message else found


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _first(fields: Fields, names: Sequence[str], low: int, high: int = INT_MAX) -> int | None:
    values = [fields.integer(name, low, high) for name in names]  # all are checked, whichever counts
    return next((value for value in values if value is not None), None)


def _n_predict(fields: Fields, settings: Settings) -> int:
    asked = _or(_first(fields, MAX_TOKENS, -1), -1)
    return settings.n_predict if asked < 0 else asked


def _n_probs(fields: Fields, chat: bool) -> int:
    n, top = fields.integer("n_probs", 0, TOP_MAX), fields.integer("top_logprobs", 0, TOP_MAX)
    if not chat and not isinstance(fields.get("logprobs"), bool):
        wanted, shown = False, fields.integer("logprobs", 0, TOP_MAX)  # 0: the answer's tokens, without alternatives
    else:
        wanted, shown = fields.boolean("logprobs"), None
    if n is not None:
        return n or -1
    if shown is not None:
        return shown
    if top is not None and not wanted:
        raise invalid("'top_logprobs' needs 'logprobs' to be true")
    if not wanted:
        return -1
    return 20 if top is None else top


def _sampling(fields: Fields, settings: Settings) -> tuple[SamplingParams, tuple[tuple[str, float], ...]]:
    values: dict[str, Any] = {}
    for name in FLOATS:
        if (number := fields.number(name)) is not None:
            values[name] = number
    for name in INTEGERS:
        if (whole := fields.integer(name, -(2**31))) is not None:
            values[name] = whole
    if "repeat_penalty" in values and values["repeat_penalty"] == values.get("repetition_penalty"):
        del values["repetition_penalty"]
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    if seed is not None:  # clients send what fits 64 bits; llama-server keeps 32 of them
        values["seed"] = -1 if seed % 2**32 == 2**32 - 1 else seed % 2**32
    if fields.get("ignore_eos") is not None:
        values["ignore_eos"] = fields.boolean("ignore_eos")
    if fields.get("samplers") is not None:
        values["samplers"] = _samplers(fields.get("samplers"))
    if fields.get("dry_sequence_breakers") is not None:
        values["dry_sequence_breakers"] = fields.strings("dry_sequence_breakers")
        if not values["dry_sequence_breakers"]:
            raise wrong("dry_sequence_breakers", "an array of strings that is not empty", [])
    by_id, by_text = _logit_bias(fields.get("logit_bias"))
    if by_id:
        values["logit_bias"] = by_id
    try:
        return settings.sampling.merged(SamplingParams(**values)), by_text
    except ParameterError as error:
        raise invalid(str(error)) from None


def _samplers(value: Any) -> list[str]:
    if isinstance(value, list):
        return value
    if not isinstance(value, str) or any(letter not in SAMPLER_LETTERS for letter in value):
        raise wrong("samplers", f"an array of names, or letters out of {''.join(SAMPLER_LETTERS)}", value)
    return [SAMPLER_LETTERS[letter] for letter in value]


def _logit_bias(value: Any) -> tuple[dict[int, float], tuple[tuple[str, float], ...]]:
    """`logit_bias` in all of its forms: pairs or an object, tokens as ids or texts, false for "never"."""
    if value is None:
        return {}, ()
    if not isinstance(value, (list, dict)):
        raise wrong("logit_bias", "an object, or an array of pairs", value)
    by_id: dict[int, float] = {}
    by_text: list[tuple[str, float]] = []
    for pair in value.items() if isinstance(value, dict) else value:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise wrong("logit_bias", "an object, or an array of pairs", pair)
        token, bias = pair
        if isinstance(value, dict) and token.isascii() and token.isdigit() and len(token) < 10:
            token = int(token)
        if bias is not False and (isinstance(bias, bool) or not isinstance(bias, (int, float)) or not abs(bias) <= BIAS_MAX):
            raise wrong(f"logit_bias of {show(token)}", f"a number from {-BIAS_MAX:.0f} to {BIAS_MAX:.0f}, or false", bias)
        number = -math.inf if bias is False else float(bias)
        if isinstance(token, str):
            by_text.append((token, number))
        elif isinstance(token, int) and not isinstance(token, bool) and 0 <= token <= INT_MAX:
            by_id[token] = number
        else:
            raise wrong("a token in logit_bias", "an id or a text", token)
    if sum(len(text) for text, _ in by_text) > CHARACTERS_MAX:
        raise invalid(f"'logit_bias' can have at most {CHARACTERS_MAX} characters of text")
    return by_id, tuple(by_text)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What is to be answered: the messages, and how they are rendered."""

    messages: list[Any]
    tools: list[Any] | None = None
    calling: Mapping[str, Any] = field(default_factory=dict)
    """`tool_choice`, `parallel_tool_calls` and `parse_tool_calls`, as :meth:`lfmfast.Model.stream` takes them."""
    reasoning_format: str = "auto"
    continue_final_message: bool = False
    template_options: dict[str, Any] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """Options of :meth:`lfmfast.AsyncModel.stream`."""
        return {"tools": self.tools, **self.calling, "reasoning_format": self.reasoning_format,
                "continue_final_message": self.continue_final_message,
                "template_options": self.template_options}  # fmt: skip

    def prompt_options(self) -> dict[str, Any]:
        """Options of :meth:`lfmfast.Model.encode`: what the prompt depends on."""
        tools = None if self.calling.get("tool_choice") == "none" else self.tools
        return {"tools": tools, "continue_final_message": self.continue_final_message, **self.template_options}

    def encode(self, model: Model) -> list[int]:
        """The token ids that the conversation is read as."""
        return model.encode(self.messages, **self.prompt_options())


def parse_conversation(body: Mapping[str, Any], settings: Settings) -> Conversation:
    """What a body of the chat endpoints says about the prompt.

    As in llama-server, a last message of the assistant is continued, unless `continue_final_message` is false.

    Raises
    ------
    ApiError
        400: there are no messages, or `tools`, `tool_choice`, ... are wrong or not supported.
    """
    fields = Fields(body)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("'messages' is required" if messages is None else "'messages' must be an array that is not empty")
    for i, message in enumerate(messages):  # numbers would be token ids
        if not isinstance(message, dict):
            raise wrong(f"messages[{i}]", "an object", message)
    tools = fields.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise wrong("tools", "an array", tools)
    calling = {name: fields.boolean(name, True) for name in ("parallel_tool_calls", "parse_tool_calls")}
    choice = fields.get("tool_choice")
    if choice not in (None, "auto", "none", "required") and not _names_function(choice):
        raise wrong("tool_choice", "'auto', 'none', 'required', or an object that names a function", choice)
    asked_format = fields.get("reasoning_format")
    reasoning_format = settings.reasoning_format if asked_format is None else asked_format
    if reasoning_format not in REASONING_FORMATS:
        raise wrong("reasoning_format", f"one of {', '.join(REASONING_FORMATS)}", reasoning_format)
    options = {**settings.chat_template_kwargs, **fields.mapping("chat_template_kwargs")}
    if reserved := RESERVED & options.keys():
        raise invalid(f"'chat_template_kwargs' can't set {sorted(reserved)[0]!r}")
    goes_on = _goes_on(fields, messages)
    if fields.get("add_generation_prompt") is not None:
        opened = fields.boolean("add_generation_prompt")
        if opened and goes_on and fields.get("continue_final_message"):
            raise invalid("'add_generation_prompt' and 'continue_final_message' can't both be true")
        goes_on = goes_on and not opened
        options["add_generation_prompt"] = opened
    return Conversation(messages=messages, tools=tools or None, calling={"tool_choice": choice, **calling},
                        reasoning_format=reasoning_format, continue_final_message=goes_on,
                        template_options=options)  # fmt: skip


def _names_function(choice: Any) -> bool:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _goes_on(fields: Fields, messages: list[Any]) -> bool:
    roles = [message.get("role") for message in messages[-2:]]
    by_wish = fields.boolean("continue_final_message", roles[-1] == "assistant")
    if by_wish and fields.get("continue_final_message") is None and roles == ["assistant", "assistant"]:
        raise invalid("there are two messages of the assistant at the end: which one is to be continued?")
    if by_wish and messages[-1].get("tool_calls"):
        raise invalid("a message with tool calls can't be continued")
    return by_wish


# After all that reads fields: the names that it reads.
RESERVED = frozenset(("tools", "messages", "add_generation_prompt", "continue_final_message", "remembered", "fix_tool_calls"))
KNOWN = OTHERS | NO_EFFECT | REFUSED.keys() | frozenset((
    *FLOATS, *INTEGERS, *MAX_TOKENS, "seed", "ignore_eos", "samplers", "dry_sequence_breakers", "logit_bias", "stop", "n_probs",
    "logprobs", "top_logprobs", "n", "n_cmpl", "cache_prompt", "n_cache_reuse", "t_max_prompt_ms", "t_max_predict_ms",
    "priority", "stream", "stream_options", "timings_per_token", "return_progress", "return_tokens", "response_fields",
    "verbose", "sse_ping_interval", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
    "parallel_tool_calls", "parse_tool_calls", "adaptive_decay", "grammar", "json_schema", "response_format",
    "reasoning_format", "reasoning_budget_message", *BUDGETS,
))  # fmt: skip
