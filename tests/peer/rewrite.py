"""llama-server's tests, changed so that what depends on their model is taken from llama-server itself.

Every `assert` becomes a call of `check`, which is told both sides of it. In the first run, on llama-server, an assertion that
does not hold is one about the text, the tokens or the size of the model the tests were written for: the value found is noted,
and the test goes on. In the second run, on lfmfast, an assertion with a note must find the same value or hold after all, and
every other one must hold as written. So our server is compared with llama-server, not with numbers.
"""

from __future__ import annotations

import ast
import json
import operator
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "Eq": operator.eq, "NotEq": operator.ne, "Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge,
    "In": lambda a, b: a in b, "NotIn": lambda a, b: a not in b, "Is": operator.is_, "IsNot": operator.is_not,
}
GREEDY = 0.8  # the temperature of the tests; two programs sample alike only without chance


class _Asserts(ast.NodeTransformer):
    """Replaces the assertions of a module."""

    def __init__(self, module: str) -> None:
        self.module = module

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        return [self._check(part, node) for part in self._conjuncts(node.test)]

    def _conjuncts(self, test: ast.expr) -> list[ast.expr]:
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            return [leaf for value in test.values for leaf in self._conjuncts(value)]
        return [test]

    def _check(self, test: ast.expr, where: ast.AST) -> ast.stmt:
        left, name, right = test, "", None
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            left, name, right = test.left, type(test.ops[0]).__name__, test.comparators[0]
        elif isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "match_regex":
            left, name, right = test.args[1], "match", test.args[0]
        sides = [ast.parse("lambda: 0", mode="eval").body for _ in range(2)]
        for thunk, value in zip(sides, (left, right or left), strict=True):
            assert isinstance(thunk, ast.Lambda)
            thunk.body = value
        site = ast.Constant(f"{self.module}:{test.lineno}: {ast.unparse(test)}")
        call = ast.Call(ast.Name("_check", ast.Load()), [site, sides[0], ast.Constant(name), sides[1]], [])
        return ast.copy_location(ast.Expr(call), where)

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        self.generic_visit(node)
        if node.arg == "temperature" and isinstance(node.value, ast.Constant) and node.value.value == GREEDY:
            node.value.value = 0.0
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.Dict:
        self.generic_visit(node)
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "temperature" and isinstance(value, ast.Constant):
                value.value = 0.0 if value.value == GREEDY else value.value
        return node


def module(source: Path) -> str:
    """The changed text of a test module."""
    tree = ast.parse(source.read_text("utf8"))
    tree.body.insert(0, ast.parse("from peer.rewrite import check as _check").body[0])
    return ast.unparse(ast.fix_missing_locations(_Asserts(source.name).visit(tree)))


def subject(site: str) -> str:
    """What an assertion is about, in a word: the last name on its left side."""
    text = site.split(": ", 1)[1]
    if text.startswith("match_regex"):
        return "text"
    return re.findall(r"\w+", re.split(r" (?:==|!=|<=?|>=?|in|is|not) ", text)[0])[-1]


class Notes:
    """What llama-server answered where an assertion does not hold: by test, assertion and how often it was reached before."""

    def __init__(self) -> None:
        self.reached: Counter[str] = Counter()
        self.path = Path(os.environ["PEER_NOTES"])
        self.writing = os.environ["PEER_RUN"] == "llama-server"
        self.values: dict[str, Any] = json.loads(self.path.read_text("utf8")) if self.path.exists() else {}

    def key(self, site: str) -> str:
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" ", 1)[0]
        place = f"{test}\t{site}"
        self.reached[place] += 1
        return f"{place}\t{self.reached[place]}"

    def save(self) -> None:
        if self.writing:
            self.path.write_text(json.dumps(self.values, indent=1), "utf8")


_notes: Notes | None = None


def notes() -> Notes:
    """Of this process."""
    global _notes
    if _notes is None:
        _notes = Notes()
    return _notes


def _holds(left: Any, name: str, right: Any) -> bool:
    if name == "match":
        from utils import match_regex  # of llama-server's tests

        return bool(match_regex(right, left))
    return bool(OPERATORS[name](left, right)) if name else bool(left)


def check(site: str, left: Callable[[], Any], name: str, right: Callable[[], Any]) -> None:
    """One assertion: `left() name right()`, or just `left()`."""
    found = left()
    wanted = right() if name else True
    noted = notes()
    key = noted.key(site)
    if noted.writing:
        if not _holds(found, name, wanted):
            noted.values[key] = _plain(found)
        return
    better = BETTER.get(site.split(": ", 1)[1].split(" == ")[0])
    if better and name == "Eq":
        known = noted.values.get(key, wanted)
        assert better(found, known), f"{site}\n  lfmfast: {found!r}\n  llama-server: {known!r}"
        return
    if key in noted.values:
        same = _plain(found) == noted.values[key]
        assert same or _holds(found, name, wanted), f"{site}\n  lfmfast: {found!r}\n  llama-server: {noted.values[key]!r}"
        return
    assert _holds(found, name, wanted), f"{site}\n  lfmfast: {found!r}\n  wanted: {wanted!r}"


def _plain(value: Any) -> Any:
    """As JSON has it."""
    return json.loads(json.dumps(value, default=str))


# Our cache may find more of a prompt than llama-server's, never less: then less is read, in fewer batches.
BETTER: dict[str, Callable[[Any, Any], bool]] = {
    "res.body['usage']['prompt_tokens_details']['cached_tokens']": operator.ge,
    "res.body['timings']['prompt_n']": operator.le,
    "total_batch_count": operator.le,
}
