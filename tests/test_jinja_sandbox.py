"""Hostile chat templates: no way out of the sandbox, and an end to everything that has none."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from lfmfast import jinja_limits
from lfmfast.errors import TemplateError
from lfmfast.jinja_sandbox import compile_template

MESSAGES = [{"role": "user", "content": "Hi"}]


def render(source: str) -> str:
    return compile_template(source).render({"messages": MESSAGES})


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ messages[0]['__class__']['__init__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ messages|groupby('__class__')|list }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__func__ }}{{ strftime_now.__code__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{0[0].__class__}'.format(messages) }}",
    "{{ '%s'.__mod__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(x=1) }}",
    "{{ messages[0].pop('role') }}",
    "{{ namespace.__init__ }}",
    "{% for x in [1] %}{{ loop._iterable }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m._environment }}",
    "{% include 'x' %}",
    "{% import 'x' as x %}",
    "{% extends 'x' %}",
    "{{ dict.mro() }}",
    "{{ 'x'.encode() }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_no_way_out(source):
    with pytest.raises(TemplateError):
        render(source)


# Doubles ns.x, sixty times.
DOUBLE = "{% set ns = namespace(x='12345678') %}" + (
    "{% for i in range(60) %}{% set ns.x = EXPRESSION %}{% endfor %}{{ ns.x|length }}"
)
BIG = "{% set x = 'a' * 4000000 %}"
ENDLESS = {
    "loops": "{% for a in range(90000) %}" * 3 + "{% endfor %}" * 3,
    "loops over filters": "{% for x in range(90000)|map('string') %}" * 2 + "{% endfor %}" * 2,
    "range": "{% for a in range(10**12) %}{% endfor %}",
    "text * number": "{{ 'a' * 10**10 }}",
    "number * text": "{{ 10**10 * 'a' }}",
    "list * number": "{{ ['a'] * 10**10 }}",
    "tuple * number": "{{ (1, 2) * 10**10 }}",
    "power": "{{ 10**(10**10) }}",
    "powers": "{{ 2**(2**(2**(2**(2**2)))) }}",
    "product": DOUBLE.replace("'12345678'", "12345678").replace("EXPRESSION", "ns.x * ns.x"),
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "tree": "{% macro f(n) %}{% if n < 50 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(0) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "call block": "{% macro f() %}{{ caller() }}{% endmacro %}{% macro g() %}"
    "{% call f() %}{{ g() }}{% endcall %}{% endmacro %}{{ g() }}",
    "concat": DOUBLE.replace("EXPRESSION", "ns.x ~ ns.x"),
    "add": DOUBLE.replace("EXPRESSION", "ns.x + ns.x"),
    "percent": DOUBLE.replace("EXPRESSION", "'%s%s' % (ns.x, ns.x)"),
    "format": DOUBLE.replace("EXPRESSION", "'{}{}'.format(ns.x, ns.x)"),
    "join": DOUBLE.replace("EXPRESSION", "[ns.x, ns.x]|join"),
    "method join": DOUBLE.replace("EXPRESSION", "''.join([ns.x, ns.x])"),
    "replace": DOUBLE.replace("EXPRESSION", "ns.x|replace('1', '11')|replace('2', '22')|replace('3', '33')"),
    "method replace": DOUBLE.replace("EXPRESSION", "ns.x.replace('', 'a')"),
    "block set": DOUBLE.replace("{% set ns.x = EXPRESSION %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "list of lists": DOUBLE.replace("EXPRESSION", "[ns.x, ns.x]"),
    "dict of dicts": DOUBLE.replace("EXPRESSION", "{'a': ns.x, 'b': ns.x}"),
    "dict()": DOUBLE.replace("EXPRESSION", "dict(a=ns.x, b=ns.x)"),
    "compare": DOUBLE.replace("EXPRESSION", "[ns.x, ns.x]").replace("|length", " == 1"),
    "wide number": "{{ '%1000000000d' % 1 }}",
    "wide star": "{{ '%*d' % (1000000000, 1) }}",
    "wide format": "{{ '{:1000000000}'.format(1) }}",
    "nested format": "{{ '{:{}}'.format(1, 1000000000) }}",
    "center": "{{ 'a'|center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "indent": "{{ 'a'|indent(10**9, true) }}",
    "json indent": "{{ [1]|tojson(indent=10**9) }}",
    "date": "{{ strftime_now('%1000000000Y') }}",
    "batch": "{{ [1]|batch(10**9, 0)|list }}",
    "slice": "{{ [1]|slice(10**9)|list }}",
    "round": "{{ 1.5|round(10**9, 'ceil') }}",
    "sum": "{{ range(10**5)|map('list')|sum(start=[]) }}",
    "lorem": "{{ lipsum(n=10**7) }}",
    "bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "split": BIG + "{{ x.split('a')|length }}",
    "letters": BIG + "{{ x|list|length }}",
    "text join": BIG + "{{ x.join(x)|length }}",
    "text replace": BIG + "{{ x|replace('a', x)|length }}",
    "lists": BIG + "{{ ([x] * 1000)|length }}",
    "copies": "{% set x = 'a' * 400000 %}{% set ns = namespace(l=[]) %}"
    "{% for i in range(90000) %}{% set ns.l = ns.l + [x[1:]] %}{% endfor %}",
    "slices": "{% macro f(n, x) %}{% if n < 60 %}{{ f(n + 1, x[1:]) }}{% endif %}{% endmacro %}{{ f(0, 'a' * 4000000) }}",
    "output": "{% set x = 'a' * 400000 %}{% for i in range(90000) %}{{ x }}{% endfor %}",
    "literal": "{% set x %}{% for i in range(90000) %}" + "a" * 9000 + "{% endfor %}{% endset %}",
    "messages": DOUBLE.replace("'12345678'", "messages").replace("EXPRESSION", "ns.x + ns.x"),
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_everything_ends(source, monkeypatch):
    monkeypatch.setattr(jinja_limits, "MAX_SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(TemplateError):
        render(source)
    assert time.monotonic() - start < 10  # the limit, and much room for a busy machine: without limits they take forever


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ ('a' * 5000000)|length }}", r"a value that is too large \(5000000 characters, limit 4194304\)"),
        (ENDLESS["recursion"], r"nests its macros too deeply \(limit 64\)"),
        (ENDLESS["loops"], r"too much work \(limit 67108864|takes too long \(limit 5 s"),
        ("{{ 'a'.ljust(5) }}", "calls 'ljust', which is not allowed"),
        ("{% include 'x' %}", "statement that isn't allowed: include"),
        ("{{ messages.__class__ }}", "attribute '__class__' of a 'list' is not allowed"),
    ],
)
def test_what_is_said(source, said):
    with pytest.raises(TemplateError, match=said):
        render(source)


def test_memory_is_bounded():
    """All of them together, where an address space of 2 GB is all there is."""
    resource = pytest.importorskip("resource")
    code = (
        "import sys, lfmfast.jinja_limits\n"
        "from test_jinja_sandbox import ENDLESS, render\nfrom lfmfast.errors import TemplateError\n"
        "lfmfast.jinja_limits.MAX_SECONDS = 0.5\n"
        "for name, source in ENDLESS.items():\n    try:\n        render(source)\n    except TemplateError as error:\n"
        "        assert 'MemoryError' not in str(error), name\n    else:\n        raise SystemExit(name)\nprint('ended')"
    )
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"],
        capture_output=True, text=True, timeout=300, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)),
    )  # fmt: skip
    assert (run.stdout, run.returncode) == ("ended\n", 0), run.stderr


def test_namespaces_are_not_printed_in_full():
    doubling = DOUBLE.replace("EXPRESSION", "namespace(a=ns.x, b=ns.x)").replace("ns.x|length", "[ns.x]")
    assert render(doubling) == "[<namespace>]"
    with pytest.raises(TemplateError, match="prints an object"):
        render("{{ namespace(a=1) }}")


@pytest.mark.parametrize("source", ["{{ " + "(" * 50000 + "1" + ")" * 50000 + " }}", "{% if x %}" * 5000, "{{ x", "a" * 200000,
                                    "{% for x in y %}" * 100 + "{% endfor %}" * 100])  # fmt: skip
def test_sources_that_cannot_be_compiled(source):
    with pytest.raises(TemplateError, match=r"compiled|too long"):
        render(source)


def test_rendering_goes_on_after_a_failure():
    for _ in range(3):
        with pytest.raises(TemplateError, match="boo"):
            render("{{ raise_exception('boo') }}")
        assert render("{{ messages[0].content }}") == "Hi"


def test_threads_have_budgets_of_their_own(monkeypatch):
    monkeypatch.setattr(jinja_limits, "MAX_WORK", 400_000)
    source = "{% for i in range(9000) %}{% endfor %}done"
    compile_template(source)
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.extend(render(source) for _ in range(5))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["done"] * 40


@pytest.mark.parametrize(("source", "text"), [
    ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}", "1/1True"),
    ("{% for x in [1, 2, 3] if x != 2 %}{{ x }}{{ loop.revindex }}{{ loop.nextitem }}{% endfor %}", "1233" + "1"),
    ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
    ("{% for a, b in {'x': 1}.items() %}{{ a }}{{ b }}{% endfor %}", "x1"),
    ("{% for x in range(9) %}{% if x == 2 %}{% continue %}{% elif x == 4 %}{% break %}{% endif %}{{ x }}{% endfor %}", "013"),
    ("{{ loop }}{{ undefined_name }}{{ none }}{{ 1.5 }}{{ [1, 'a'] }}", "None1.5[1, 'a']"),
    ("{{ {'é': '<b>'}|tojson }}{{ {'é': 1}|tojson(ensure_ascii=true) }}", '{"é": "<b>"}{"\\u00e9": 1}'),
    ("{{ [1]|tojson(indent=2) }}", "[\n  1\n]"),
    ("{{ '%s-%s' % ('a', 1) }}{{ '{}{}'.format(1, 'b') }}{{ 'a,b'.split(',')|join('+') }}", "a-11ba+b"),
    ("{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ messages|map(attribute='role')|first }}", "1user"),
    ("{{ 'a\nb'|indent(2) }}{{ 'x'|upper }}{{ ' x '|trim }}{{ 2**10 }}{{ 7 // 2 }}{{ 2**-1 }}", "a\n  bXx102430.5"),
    ("{% macro f(a, b='c') %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}"
     "{% call f(1) %}d{% endcall %}{{ f('x', b=2) }}", "1cdx2"),
    ("{% set x %}a{% generation %}b{% endgeneration %}{% endset %}{{ x }}", "ab"),
    ("{% set ns = namespace(n=0) %}{% for x in 'abc' %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "3"),
    ("{{ messages[0].get('x', 'y') }}{{ messages[-1]['role'] }}{{ 'abc'[::-1] }}{{ 'b' in 'abc' }}", "yusercbaTrue"),
    ("{{ [3, 1, 2]|sort|join }}{{ [1, 2]|sum }}{{ 2.345|round(1) }}{{ '5'|int + 1 }}", "12332.36"),
])  # fmt: skip
def test_what_templates_need_works(source, text):
    assert render(source) == text
