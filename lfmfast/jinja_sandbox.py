"""Chat templates from model files, run in a sandbox that also bounds their time and memory.

A GGUF file is data from a stranger and its template is a program. Jinja's ImmutableSandboxedEnvironment keeps that
program away from Python's internals, but not from ``{% for %}`` loops without end or ``"a" * 10**10``: single operations
of C code, which hold the interpreter and which no thread or signal handler can stop. So nothing is stopped here;
whatever could grow is priced before it runs. Every loop step, call, filter and operator goes through one of the
functions of `lfmfast.jinja_limits`, which pays for the work that it is about to cause out of one budget per rendering, and
a value above MAX_VALUE is never made. What isn't known to be harmless (a method, a filter, a statement) can't be used at all.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import escape

from lfmfast import jinja_limits as limits
from lfmfast.errors import TemplateError

__all__ = ["CompiledTemplate", "compile_template", "tojson"]

_STR_METHODS = (
    "split rsplit splitlines strip lstrip rstrip startswith endswith upper lower title capitalize swapcase casefold replace "
    "find rfind index rindex count join removeprefix removesuffix partition rpartition isdigit isalpha isalnum isspace "
    "islower isupper isnumeric isdecimal istitle isidentifier"
)
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_STR_METHODS.split()),
    dict: frozenset(("get", "items", "keys", "values", "copy")),
    list: frozenset(("index", "count", "copy")),
    tuple: frozenset(("index", "count")),
}
_FILTERS = (
    "abs attr batch capitalize count d default dictsort e escape first float groupby indent int items join last length list "
    "lower map max min reject rejectattr replace reverse round select selectattr slice sort string sum title trim unique "
    "upper urlencode wordcount"
)


def tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """JSON as transformers' ``tojson`` filter writes it: keys in their order, no HTML escapes, text outside ASCII as it is."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# --- filters that could make much from little ---------------------------------------------------------------------------
def _filter_tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    indent_size = indent if isinstance(indent, int) else len(indent or "")
    if indent_size > 16:
        raise TemplateError(f"the chat template indents JSON by {indent_size} (limit 16)")
    limits.pay_for_value(limits.size_of(value) * (1 + 4 * indent_size))
    text = tojson(value, ensure_ascii, indent, separators, sort_keys)
    if ensure_ascii and limits.budget.mark:  # the mark of the caller has to stay one character
        text = text.replace(json.dumps(limits.budget.mark)[1:-1], limits.budget.mark)
    return text


def _filter_replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = limits.text_of(value), limits.text_of(old), limits.text_of(new)
    limits.check_replace(text, old, new)
    return text.replace(old, new, -1 if count is None else count)


def _filter_indent(value: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    text = limits.text_of(value)
    size = width if isinstance(width, int) else len(width)
    limits.pay_for_value(len(text) + (text.count("\n") + 1) * max(size, 0))
    result = FILTERS["indent"](text, width, first, blank)
    assert isinstance(result, str)  # the text was one
    return result


def _filter_round(value: Any, precision: int = 0, method: str = "common") -> Any:
    if abs(precision) > 100:
        raise TemplateError(f"the chat template rounds to {precision} digits (limit 100)")
    return FILTERS["round"](value, precision, method)


def _filter_sum(values: Any, attribute: Any = None, start: Any = 0) -> Any:
    if not isinstance(start, (int, float)):
        raise SecurityError("the chat template sums what isn't numbers")  # sum() of lists is quadratic
    return start + sum(value if attribute is None else value[attribute] for value in limits.steps(values))


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    from_environment = hasattr(function, "jinja_pass_arg")

    def call(*args: Any, **kwargs: Any) -> Any:
        own = args[1:] if from_environment else args
        if not own:
            raise TemplateError(f"the filter {name!r} needs a value")
        value = own[0]
        limits.pay(limits.ITEM)
        if name == "join":
            glue = own[1] if len(own) > 1 else kwargs.get("d", "")
            value = list(limits.steps(value))
            limits.check_join(limits.text_of(glue), value)
            args = (*args[: len(args) - len(own)], value, *own[1:])
        elif name in ("batch", "slice"):
            if not isinstance(own[1], int) or not 0 < own[1] <= 10000:
                raise TemplateError(f"the filter {name!r} is used with {own[1]!r} (limits 1 and 10000)")
        elif not isinstance(value, jinja2.Undefined):
            limits.pay(limits.size_of(value))
        return limits.made(function(*args, **kwargs))

    if from_environment:
        call.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return call


class _Namespace(Namespace):
    def __repr__(self) -> str:  # Jinja's shows what is inside, again for each time that it is there
        return "<namespace>"


# --- globals ------------------------------------------------------------------------------------------------------------
def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(limits.text_of(message))


def _strftime_now(format: str) -> str:
    if len(format) > 256 or re.search(r"%[^%a-zA-Z]*\d", format):
        raise SecurityError("the chat template formats a date with a width")
    now = limits.budget.now
    return (datetime.datetime.now() if now is None else now).strftime(format)


def _range(*args: int) -> range:
    values = range(*args)
    limits.pay_for_value(len(values) * limits.ITEM)
    return values


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return limits.whole(dict(*args, **kwargs))  # type: ignore[no-any-return]


class _Generation(Extension):
    """``{% generation %}``: marks the assistant's text for training; here a scope like any other."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Priced(NodeTransformer):
    """Puts the functions above around everything in a template that can grow."""

    _FORBIDDEN = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block, nodes.EvalContextModifier)

    def _call(self, name: str, args: list[nodes.Expr], node: nodes.Node) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)
        call.set_lineno(node.lineno)
        return call

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        if isinstance(node, self._FORBIDDEN):
            raise TemplateError(f"the chat template uses a statement that isn't allowed: {type(node).__name__.lower()}")
        return super().visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._call("lfmfast_steps", [cast(nodes.Expr, node.iter)], node)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        size = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        node.nodes = [
            child if isinstance(child, nodes.TemplateData) else self._call("lfmfast_emit", [child], node)
            for child in node.nodes
        ]
        node.nodes.insert(0, self._call("lfmfast_emit_literal", [nodes.Const(size)], node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("lfmfast_concat", node.nodes, node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._call("lfmfast_made", [node], node) if isinstance(node.arg, nodes.Slice) else node

    def _visit_literal(self, node: nodes.Literal) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else self._call("lfmfast_whole", [node], node)

    visit_List = visit_Tuple = visit_Dict = _visit_literal


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))
    lfmfast_steps = staticmethod(limits.steps)
    lfmfast_emit = staticmethod(limits.emit)
    lfmfast_emit_literal = staticmethod(limits.emit_literal)
    lfmfast_concat = staticmethod(limits.concat)
    lfmfast_made = staticmethod(limits.made)
    lfmfast_whole = staticmethod(limits.whole)

    def __init__(self) -> None:
        # trim_blocks and lstrip_blocks as transformers sets them. Not optimized: nothing may run before it is priced.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[_Generation, loopcontrols])
        self._own = frozenset((limits.steps, limits.emit, limits.emit_literal, limits.concat, limits.made, limits.whole))
        self.globals = {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "range": _range,
            "dict": _dict,
            "namespace": _Namespace,
        }
        plain = {name: FILTERS[name] for name in _FILTERS.split()} | {
            "tojson": _filter_tojson,
            "replace": _filter_replace,
            "indent": _filter_indent,
            "round": _filter_round,
            "sum": _filter_sum,
            "string": limits.text_of,
            "safe": limits.text_of,
            "e": lambda value: str(escape(limits.text_of(value))),
            "escape": lambda value: str(escape(limits.text_of(value))),
        }
        self.filters = {name: _guarded(name, function) for name, function in plain.items()}

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__!r} is not allowed")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        limits.check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if type(function) is not Macro and getattr(function, "__hash__", None) and function in self._own:
            return function(*args)
        limits.pay(limits.ITEM)
        if isinstance(function, Macro):
            if limits.budget.depth >= limits.MAX_DEPTH:
                raise TemplateError(f"the chat template nests its macros too deeply (limit {limits.MAX_DEPTH})")
            limits.budget.depth += 1
            try:
                return limits.made(super().call(context, function, *args, **kwargs))
            finally:
                limits.budget.depth -= 1
        kwargs.pop("_loop_vars", None)  # of Jinja's own making, for functions that take the context
        kwargs.pop("_block_vars", None)
        if function is _Namespace:
            limits.whole(dict(*args, **kwargs))
            return _Namespace(*args, **kwargs)
        if any(function is allowed for allowed in self.globals.values()):
            return limits.made(function(*args, **kwargs))
        name = getattr(function, "__name__", type(function).__name__)
        owner = getattr(function, "__self__", None)
        if isinstance(function, BuiltinMethodType) and name in _METHODS.get(type(owner), ()):
            limits.pay(limits.size_of(owner) + limits.size_of(list(args)))
            limits.check_method(owner, name, args)
            return limits.made(function(*args, **kwargs))
        if isinstance(function, MethodType) and isinstance(owner, LoopContext) and name in ("cycle", "changed"):
            return function(*args)
        text = getattr(getattr(function, "__wrapped__", None), "__self__", None)
        if isinstance(text, str) and name == "format":  # the sandbox's own replacement of str.format
            limits.check_format(text, args, kwargs)
            return limits.made(function(*args, **kwargs))
        if isinstance(function, jinja2.Undefined):
            return function()  # raises, and says what is undefined
        raise SecurityError(f"the chat template calls {name!r}, which is not allowed")


_environment: _Environment | None = None


def _get_environment() -> _Environment:
    global _environment
    if _environment is None:
        _environment = _Environment()
    return _environment


class CompiledTemplate:
    """A chat template, compiled. ``words`` and ``variables`` say what it talks about."""

    def __init__(self, source: str) -> None:
        if len(source) > limits.MAX_SOURCE:
            raise TemplateError(f"the chat template is too long ({len(source)} characters, limit {limits.MAX_SOURCE})")
        environment = _get_environment()
        try:
            tree = environment.parse(source)
            self.variables = frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
            self.words = frozenset(_words(tree))
            code = environment.compile(_Priced().visit(tree))
            self._template = environment.template_class.from_code(environment, code, environment.make_globals(None))
        except TemplateError:
            raise
        except Exception as error:
            raise TemplateError(f"the chat template can't be compiled: {type(error).__name__}: {error}") from error

    def render(self, variables: Mapping[str, Any], *, now: datetime.date | None = None, mark: str = "") -> str:
        """Renders under the limits. Any failure is a `TemplateError`."""
        limits.budget.start(now, mark)
        try:
            return self._template.render(variables)
        except TemplateError:
            raise
        except Exception as error:
            raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error
        finally:
            limits.budget.stop()


def _words(tree: nodes.Template) -> Iterator[str]:
    for node in tree.find_all((nodes.Const, nodes.TemplateData, nodes.Getattr, nodes.Filter, nodes.Test)):
        if isinstance(node, nodes.Const):
            if isinstance(node.value, str):
                yield node.value
        elif isinstance(node, nodes.TemplateData):
            if node.data.strip():
                yield node.data
        elif isinstance(node, nodes.Getattr):
            yield node.attr
        else:
            yield node.name  # type: ignore[attr-defined]


_compiled: dict[str, CompiledTemplate] = {}


def compile_template(source: str) -> CompiledTemplate:
    """A `CompiledTemplate`; a source that comes again is seldom compiled again."""
    result = _compiled.get(source)
    if result is None:
        result = CompiledTemplate(source)
        if len(_compiled) >= 64:
            _compiled.clear()
        _compiled[source] = result
    return result
