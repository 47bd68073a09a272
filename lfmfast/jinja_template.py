"""Chat templates that run as Jinja, and the check whether one is a format that C++ knows."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from lfmfast.errors import TemplateError
from lfmfast.jinja_sandbox import CompiledTemplate, compile_template
from lfmfast.messages import check_message, check_tools, join_texts, parse_arguments, pythonic
from lfmfast.templates import (
    PROBE_DATE,
    Block,
    ChatTemplate,
    Extension,
    NativeTemplate,
    Segment,
    check_request,
    refuse_surrogates,
    strings,
)

__all__ = ["JinjaTemplate"]

# What the assistant itself may have written as control tokens.
_OWN = ("<|tool_call_start|>", "<|tool_call_end|>", "<think>", "</think>")
# transformers' trick to find the end of the final message; LFM2.5 templates know this text, its space included.
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "
_RESERVED = frozenset(("messages", "tools", "documents", "bos_token", "eos_token", "add_generation_prompt"))


class JinjaTemplate(ChatTemplate):
    """Any template, rendered by Jinja in a sandbox."""

    family = "jinja"

    def __init__(
        self,
        source: str,
        bos_token: str,
        eos_token: str,
        special_tokens: frozenset[str],
        date: datetime.date | None = None,
        add_bos: bool = False,
    ) -> None:
        self.source: str = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._date = date
        self._bos = Segment(bos_token, True) if add_bos and bos_token in special_tokens else None
        self._special = special_tokens
        self._guard = _Guard(special_tokens)
        self._reply_guard = _Guard(special_tokens.difference(_OWN))
        # What the stock template can't do, for fix_tool_calls.
        self._drops_calls = "tool_calls" not in source and "<|tool_call_start|>" in special_tokens
        self._knows_none = re.search(r"\bis\s+(not\s+)?none\b", source) is not None
        self._knows_developer = "developer" in source

    @cached_property
    def _compiled(self) -> CompiledTemplate:
        return compile_template(self.source)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template understands content that is a list of text parts."""
        try:
            text = self._stock([{"role": "user", "content": [{"type": "text", "text": "probe"}]}], [], {})
        except TemplateError:
            return False
        return "probe" in text and not re.search("['\"]text['\"]", text)

    def _stock(
        self,
        messages: Any,
        tools: Any,
        variables: dict[str, Any],
        prompt: bool = True,
        date: datetime.date | None = None,
        mark: str = "",
    ) -> str:
        known = {"messages": messages, "tools": tools or None, "documents": None, "add_generation_prompt": prompt}
        return self._compiled.render(variables | self._tokens | known, now=date or self._date, mark=mark)

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
        tools = check_tools(tools, fix)
        for name in variables.keys() & _RESERVED:
            raise TemplateError(f"the template variable {name!r} is set by lfmfast")
        mark = self._choose_mark({"messages": messages, "tools": tools, **variables})
        break_up = self._guard.with_mark(mark)
        tools = break_up(tools, "tools")
        variables = break_up(variables, "template_kwargs")
        # Some templates want the arguments of a call as a mapping, others as JSON text, and few check what they got.
        for parse in (True, False) if fix else (False,):
            prepared = [self._prepare(message, i, fix, parse, mark) for i, message in enumerate(messages)]
            if open_end:
                _tag(prepared[-1], len(prepared) - 1)
            try:
                text = self._stock(prepared, tools, variables, prompt, mark=mark)
                break
            except TemplateError:
                if not parse or prepared == [self._prepare(message, i, fix, False, mark) for i, message in enumerate(messages)]:
                    raise
        if open_end:
            text = _cut(text)
        return Extension(0, [self._split(text, mark)])

    def _choose_mark(self, data: Any) -> str:
        """A character that occurs nowhere: a Yi syllable, since it has to come through tojson, repr() and trim unharmed."""
        texts = [self.source, *self._special]
        for _, text in strings(data):
            try:
                text.encode()
            except UnicodeEncodeError:
                refuse_surrogates(data)
            texts.append(text)
        used = set().union(*texts)
        for code in range(0xA000, 0xA48D):
            if chr(code) not in used and not any(f"\\u{code:04x}" in text for text in texts):
                return chr(code)
        raise TemplateError("the messages use every character that lfmfast could mark text with")

    def _prepare(self, message: Any, index: int, fix: bool, parse: bool, mark: str) -> dict[str, Any]:
        """A copy of a message in which only the assistant's own markers are whole."""
        where = f"messages[{index}]"
        role = check_message(message, index, fix and not self._knows_developer)
        break_up, break_reply = self._guard.with_mark(mark), self._reply_guard.with_mark(mark)
        calls = message.get("tool_calls") if fix and role == "assistant" else None
        # Parsed before it is broken up: JSON has escapes.
        parsed = {"tool_calls": [_with_mapping(call) for call in calls]} if parse and isinstance(calls, (list, tuple)) else {}
        copy: dict[str, Any] = break_up({**message, "role": role, **parsed}, where)
        content = message.get("content")
        if not (content is None or isinstance(content, (str, list, tuple))):
            raise TemplateError(f"{where}.content must be a string, None or a list of parts, not {type(content).__name__}")
        if role == "assistant":
            for key in ("content", "thinking", "reasoning", "reasoning_content"):
                if key in message:
                    copy[key] = break_reply(message[key], f"{where}.{key}")
        if not fix:
            return copy
        if content is None and not (calls and self._knows_none):
            if "content" not in message and role != "assistant":
                raise TemplateError(f"{where} has no content")
            copy["content"] = ""
        elif isinstance(content, (list, tuple)) and not self._takes_parts:
            copy["content"] = _join(copy["content"], where)
        if "tool_calls" in copy and not calls:
            del copy["tool_calls"]
        elif calls and self._drops_calls:
            text = f"<|tool_call_start|>{break_up(pythonic(message, index), where)}<|tool_call_end|>"
            old = copy["content"] or ""
            copy["content"] = [*old, {"type": "text", "text": text}] if isinstance(old, list) else old + text
        return copy

    def _split(self, text: str, mark: str) -> Block:
        segments = []
        end = 0
        for match in self._guard.find(text):
            segments += [Segment(text[end : match.start()].replace(mark, ""), False), Segment(match[0], True)]
            end = match.end()
        segments.append(Segment(text[end:].replace(mark, ""), False))
        segments = [segment for segment in segments if segment.text]
        if self._bos:
            n_bos = next((i for i, segment in enumerate(segments) if segment != self._bos), len(segments))
            segments[:n_bos] = [self._bos]
        return tuple(segments)

    def speaks(self, native: NativeTemplate) -> bool:
        """Whether the template is the format of `native`, so that C++ can take its place.

        The source isn't compared with known ones, as those differ in white space, tabs or a trailing newline from file to file.
        Instead both render some conversations that together reach every branch of the known templates. And since a
        template can do more than that, it must not mention anything that the known ones don't: a role, a key of a message,
        a variable.
        """
        try:
            mentioned = " ".join(self._compiled.words | self._compiled.variables).lower()
            if not _KNOWN.issuperset(re.findall(r"[a-z_]+", mentioned)):
                return False
        except TemplateError:
            return False
        return all(_result(native, probe) == stock for probe, stock in zip(_PROBES, self._probe_results, strict=True))

    @cached_property
    def _probe_results(self) -> list[str | None]:
        results: list[str | None] = []
        for probe in _PROBES:
            switches = {} if probe.keep is None else {"keep_past_thinking": probe.keep, "preserve_thinking": probe.keep}
            try:
                results.append(self._stock(probe.messages, probe.tools, switches, probe.prompt, PROBE_DATE))
            except TemplateError:
                results.append(None)
        return results


class _Guard:
    """Breaks up what looks like a control token in data, with a character that is taken out of the text afterwards."""

    def __init__(self, special_tokens: frozenset[str]) -> None:
        special_tokens = frozenset(text for text in special_tokens if len(text) > 1)  # one character can't be broken up
        self._starts = frozenset(text[:i] for text in special_tokens for i in range(1, len(text)))
        self._ends = frozenset(text[i:] for text in special_tokens for i in range(1, len(text)))
        self._longest = max(map(len, special_tokens), default=1)
        self._first = frozenset(text[0] for text in special_tokens)  # every start has one of these, every end one of those
        self._last = frozenset(text[-1] for text in special_tokens)
        # Longest first: a token may be the start of another.
        texts = sorted(special_tokens, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self.find = self._any.finditer

    def with_mark(self, mark: str) -> Any:
        def break_text(text: str) -> str:
            text = str.__str__(text)  # a subclass of str could have methods of its own
            while self._any.search(text):  # again, as tokens may overlap
                text = self._any.sub(lambda match: match[0][:1] + mark + match[0][1:], text)
            # Nor may a token come about where this text meets another.
            if not self._last.isdisjoint(text[: self._longest]) and any(
                text[:i] in self._ends for i in range(1, self._longest)
            ):
                text = mark + text
            if not self._first.isdisjoint(text[-self._longest :]) and any(
                text[-i:] in self._starts for i in range(1, self._longest)
            ):
                text += mark
            return text

        def break_up(value: Any, where: str) -> Any:
            if isinstance(value, str):
                return break_text(value)
            if isinstance(value, Mapping):
                return {break_up(key, where): break_up(item, f"{where}.{key}") for key, item in value.items()}
            if isinstance(value, (list, tuple)):
                return [break_up(item, f"{where}[{i}]") for i, item in enumerate(value)]
            if value is None or isinstance(value, (bool, int, float)):
                return value
            raise TemplateError(f"{where} must be data as in JSON, not {type(value).__name__}")

        return break_up


def _join(parts: list[Any], where: str) -> str:
    texts = []
    for i, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise TemplateError(f"{where}.content[{i}] has type {kind!r}: this model takes parts of type 'text'")
        texts.append(text)
    return join_texts(texts)


def _with_mapping(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    function = {**function, "arguments": parse_arguments(function.get("arguments"))}
    return {**call, "function": function} if "function" in call else function


def _tag(message: dict[str, Any], index: int) -> None:
    content = message.get("content")
    if isinstance(content, list):
        for part in reversed(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                part["text"] += _CONTINUE
                return
    if not isinstance(content, str):
        raise TemplateError(f"continue_final_message needs text in messages[{index}].content")
    message["content"] = content + _CONTINUE


def _cut(text: str) -> str:
    at = text.rfind(_CONTINUE.strip())
    if at < 0:
        raise TemplateError("continue_final_message: the chat template doesn't render the final message")
    # Without the space the template trimmed the message, and transformers takes the spaces before it away too.
    return text[:at] if text.startswith(_CONTINUE, at) else text[:at].rstrip()


# --- the check whether a template is a known format ---------------------------------------------------------------------
class _Probe(NamedTuple):
    messages: list[dict[str, Any]]
    tools: list[Any] = []  # noqa: RUF012 (never changed)
    keep: bool | None = None  # the switch for past thoughts; None: not given
    prompt: bool = True


def _result(native: NativeTemplate, probe: _Probe) -> str | None:
    switch = {} if probe.keep is None else native.switch(probe.keep)
    try:
        return native.render(
            probe.messages, tools=probe.tools, add_generation_prompt=probe.prompt, fix_tool_calls=False, **switch
        ).text
    except TemplateError:
        return None


def _probes() -> list[_Probe]:
    def call(name: str, arguments: Any) -> dict[str, Any]:
        return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}

    system: dict[str, Any] = {"role": "system", "content": " S\n"}
    empty: dict[str, Any] = {"role": "system", "content": ""}
    user: dict[str, Any] = {"role": "user", "content": " a <|im_end|></think> b "}
    thoughts: dict[str, Any] = {"role": "assistant", "content": "<think>x</think> y </think>\n b \n"}
    calls = [call("f", {"s": "'\"\n\r\\", "b": True, "n": None, "x": 1.5, "l": ["a", None], "d": {"é": [True]}}), call("g", {})]
    acting: dict[str, Any] = {"role": "assistant", "content": " c ", "thinking": "t", "tool_calls": calls}
    result: dict[str, Any] = {"role": "tool", "content": ' {"a": 1} ', "tool_call_id": "1", "name": "f"}
    keys = ("thinking", "reasoning", "reasoning_content")
    reasoning: list[dict[str, Any]] = [{"role": "assistant", "content": "d", key: " r "} for key in keys]
    parts: Any = [{"type": "text", "text": " p "}, {"type": "image"}, {"type": "text", "text": "q</think>"}]
    tool = {"type": "function", "function": {"name": "f", "description": "é <b>", "parameters": {"type": "object"}}}
    history = [user, thoughts, user, acting, result, thoughts, user, acting, result, *reasoning]
    probes = [
        _Probe([system, *history], [tool, "raw"]),
        _Probe([system, *history], keep=True),
        _Probe(history, [tool], keep=False, prompt=False),
        _Probe([*history, user]),
        _Probe([thoughts, thoughts], prompt=False),
        _Probe([empty, system, {"role": "critic", "content": "é"}, {"role": "tool", "content": ""}]),
        _Probe([empty, user], [tool, tool]),
        _Probe([user, {"role": "user", "content": parts}, {"role": "assistant", "content": parts}, user]),
        _Probe([{"role": "system", "content": parts}, user]),
    ]
    odd: list[dict[str, Any]] = [
        *({"role": role, "content": None} for role in ("system", "user", "assistant")),
        *({"role": role} for role in ("system", "user", "assistant")),
        {"role": "user", "content": [{"type": "audio"}]},
        {"role": "user", "content": ["text"]},
        *({"role": "assistant", "content": "e", "tool_calls": value} for value in (None, [], [{"name": "f", "arguments": {}}])),
        *({"role": "assistant", "content": "e", "tool_calls": [call("f", value)]} for value in ("", "{}", '{"a": 1}', None)),
        *({"role": "assistant", "content": "e", key: value} for key in keys for value in ("", "t")),
    ]
    return probes + [_Probe([message, user]) for message in odd] + [_Probe([user, message]) for message in odd]


_PROBES = _probes()
# Every word in the literals and names of the known templates.
_WORDS = (
    "_cfm_tag _has_cfm _ns _trunc_len a add_generation_prompt applying arg_name arg_strings arg_value args_ns "
    "arguments assistant be before bos_token call chat content continue_final_message continue_final_message_tag d "
    "date default defined encoded endswith format_arg_value func func_args func_name function get got im_end im_start "
    "image index item items iterable join json keep_past_thinking keep_thinking last last_assistant_index "
    "last_user_index length list loads loop m mapping message messages must n name namespace ns null of parse "
    "parse_content preserve_thinking r raise_exception reasoning reasoning_content render_tool_calls replace result "
    "role s split strftime_now string system system_prompt template text the think thinking today tojson tool "
    "tool_call tool_call_end tool_call_start tool_calls tool_calls_ns tool_list_end tool_list_start tool_response_end "
    "tool_response_start tools trim type user with y"
)
_KNOWN = frozenset(_WORDS.split())
