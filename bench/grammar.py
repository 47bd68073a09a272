"""Grammars: the cost of a mask over 65,536 tokens, and which JSON schemas are enforced, against llama.cpp.

    python -m bench.grammar [--only masks|schemas|speed] [--rounds 10] [--schemas FILE]

Our side is `lfmfast.constraint` on llguidance, called through its Python API into one buffer; llama.cpp's is its own converter
and grammar sampler in native code (bench/grammar.cpp, linked with the libraries of bench/peers). One thread each, the same
vocabulary and the same tokens.

Schemas are judged by texts: valid ones, and ones made from the schema with a keyword left out that jsonschema finds invalid for
the whole schema. A schema counts as enforced if none of the latter passes; as refused if that is said before anything is
generated; else replies that are not valid pass.

Speed is what a constraint costs in tokens per second: the same model with and without the schema, in turns. Random weights want
a token that is not allowed at nearly every step, which is the dearest case: each is sampled twice.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import gguf
import grammar_walk
import modelgen
import numpy as np
import oracle
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from referencing.exceptions import Unresolvable

from bench import peers, report
from lfmfast.constraint import Constraint, from_json_schema
from lfmfast.errors import ParameterError

ROOT = Path(__file__).resolve().parent.parent

TYPICAL = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "format": "uuid"},
        "subject": {"type": "string", "maxLength": 140},
        "priority": {"enum": ["low", "normal", "high", "urgent"]},
        "opened": {"type": "string", "format": "date"},
        "hours": {"type": "number", "minimum": 0, "maximum": 1000},
        "assignee": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "comments": {"type": "array", "items": {"$ref": "#/$defs/comment"}},
    },
    "required": ["id", "subject", "priority", "opened", "hours", "assignee", "tags", "comments"],
    "additionalProperties": False,
    "$defs": {"comment": {
        "type": "object", "additionalProperties": False, "required": ["author", "text"],
        "properties": {"author": {"type": "string"}, "text": {"type": "string"}, "internal": {"type": "boolean"}}}},
}  # fmt: skip
REPLY = json.dumps({
    "id": "0f8fad5b-d9cb-469f-a165-70867728950e", "subject": "The printer on the second floor does not answer any more",
    "priority": "high", "opened": "2026-03-14", "hours": 2.5, "assignee": None, "tags": ["printer", "network", "second floor"],
    "comments": [
        {"author": "Ada", "text": "It was moved to another desk on Monday. Since then nobody can reach it.", "internal": False},
        {"author": "Grace", "text": "The cable is fine; the address changed.", "internal": True}]})  # fmt: skip
# As TYPICAL, as a list that never ends: random weights don't know when to stop.
SPEED_SCHEMA = {"type": "array", "minItems": 1000, "items": {"$ref": "#/$defs/ticket"}, "$defs": {
    **TYPICAL["$defs"], "ticket": {key: value for key, value in TYPICAL.items() if key != "$defs"}}}  # type: ignore[dict-item]
N_SPEED = 128
# Keywords that a near miss leaves out.
CONSTRAINTS = {
    "type", "enum", "const", "pattern", "format", "required", "additionalProperties", "minimum", "maximum", "multipleOf",
    "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems", "maxItems", "uniqueItems", "contains",
    "minProperties", "maxProperties", "propertyNames", "dependentRequired", "not", "if", "oneOf", "items",
    "unevaluatedProperties",
}  # fmt: skip


class Vocabulary:
    """A GGUF's tokens as bytes, in the shape that llguidance asks for."""

    bos_token_id = None

    def __init__(self, path: Path) -> None:
        fields = gguf.GGUFReader(path).fields
        texts = fields["tokenizer.ggml.tokens"].contents()
        types = fields["tokenizer.ggml.token_type"].contents()
        self.eos_token_id = int(fields["tokenizer.ggml.eos_token_id"].contents())
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        spelled = {chr(code): code for code in plain}
        spelled |= {chr(256 + n): code for n, code in enumerate(code for code in range(256) if code not in plain)}
        self.special_token_ids = [n for n, kind in enumerate(types) if kind == gguf.TokenType.CONTROL]
        self.tokens = [bytes(spelled[c] for c in text) if kind == gguf.TokenType.NORMAL and all(c in spelled for c in text)
                       else text.encode() for text, kind in zip(texts, types, strict=True)]  # fmt: skip
        special = set(self.special_token_ids)
        self._ids = {data: n for n, data in enumerate(self.tokens) if n not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes | str) -> list[int]:
        """The longest token each time: not the model's own division, but one that spells the text."""
        data = text if isinstance(text, bytes) else text.encode()
        out = []
        while data:
            n = next(n for n in range(min(self._longest, len(data)), 0, -1) if data[:n] in self._ids)
            out.append(self._ids[data[:n]])
            data = data[n:]
        return out


class Theirs:
    """bench/grammar.cpp in a process of its own."""

    def __init__(self, model: Path) -> None:
        libraries = peers.program("llama-server").parent
        source = oracle.llama_cpp_dir()
        self._program = modelgen.bench_dir() / "grammar"
        headers = [f"-I{source / folder}" for folder in ("include", "common", "ggml/include")]
        command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O2", "-DNDEBUG", *headers, str(ROOT / "bench" / "grammar.cpp"),
                   "-o", str(self._program), f"-L{libraries}", "-lllama-common", "-lllama", "-lggml", "-lggml-base",
                   f"-Wl,-rpath,{libraries}"]  # fmt: skip
        subprocess.run(command, check=True)
        self._model = str(model)
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen([self._program, self._model], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.DEVNULL, text=True)  # fmt: skip

    def ask(self, line: str) -> str:
        """The answer to a line; where the process ends over it, that."""
        assert self._process.stdin and self._process.stdout
        try:
            print(line, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._start()
            return "the process ended"
        return answer.strip()


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def our_masks(tokenizer: LLTokenizer, grammar: str, tokens: Sequence[int]) -> tuple[list[float], list[float]]:
    """Microseconds of each mask along the tokens, and of testing the token that comes."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    buffer = np.zeros((tokenizer.vocab_size + 31) // 32, np.uint32)
    masks, tests = [], []
    for token in tokens:
        begin = time.perf_counter()
        matcher.validate_tokens([token])
        between = time.perf_counter()
        matcher.unsafe_compute_mask_ptr(buffer.ctypes.data, buffer.nbytes)
        end = time.perf_counter()
        tests.append(1e6 * (between - begin))
        masks.append(1e6 * (end - between))
        if not matcher.consume_token(token):
            raise SystemExit(f"the reply does not fit: {matcher.get_error()}")
    return masks, tests


def measure(tokenizer: LLTokenizer, vocabulary: Vocabulary, theirs: Theirs, rounds: int) -> None:
    """The cost of a typical schema's masks."""
    tokens = vocabulary(REPLY)
    line = "M " + " ".join(map(str, tokens))
    masks, tests, native, ours_built, theirs_built = [], [], [], [], []
    for at in range(rounds + 1):
        begin = time.perf_counter()
        text = from_json_schema(TYPICAL).text
        checked = time.perf_counter()
        grammar = LLMatcher.grammar_from_json_schema(text)
        LLMatcher(tokenizer, grammar, log_level=0)
        built = time.perf_counter()
        mask, test = our_masks(tokenizer, grammar, tokens)
        answer = theirs.ask("S " + json.dumps(TYPICAL)).split()
        other = [float(word) for word in theirs.ask(line).split()]
        if at:  # the first round warms up
            masks += mask
            tests += test
            native += other
            ours_built.append((1e3 * (checked - begin), 1e3 * (built - checked)))
            theirs_built.append((float(answer[1]) / 1e3, float(answer[2]) / 1e3))
    print(f"\ntypical schema, a reply of {len(tokens)} tokens, {rounds} rounds; us, median and 99th percentile")
    for name, values in (("lfmfast: mask", masks), ("lfmfast: test of one token", tests), ("llama.cpp: mask", native)):
        middle, high = percentiles(values)
        print(f"  {name:28} {middle:10.1f} {high:10.1f}   mean {statistics.fmean(values):8.1f}")
    for name, pairs, parts in (("lfmfast", ours_built, "check, build"), ("llama.cpp", theirs_built, "convert, load")):
        print(f"  {name}: {parts} " + ", ".join(f"{statistics.median(part):.2f}" for part in zip(*pairs, strict=True)) + " ms")


def speed(model_file: Path, rounds: int) -> None:
    """Tokens per second with a schema and without, for one sequence and for eight."""
    from lfmfast import Model

    prompt = [{"role": "user", "content": "Open a ticket for the printer on the second floor."}]
    print(f"\ntokens per second, answers of {N_SPEED} tokens, {rounds} rounds in turns; median, minimum and maximum")
    for n in (1, 8):
        found: dict[str, list[float]] = {"free": [], "schema": []}
        with Model(model_file, n_ctx=1024, n_parallel=n) as model:
            for at in range(rounds + 1):
                for name in found:
                    # Every answer has its full length: free ones have no end, those with a schema end in a list without one.
                    options = {"json_schema": SPEED_SCHEMA} if name == "schema" else {"ignore_eos": True}
                    done = model.generate(prompt, n=n, max_tokens=N_SPEED, temperature=1.0, seed=at, **options)
                    answers = done if isinstance(done, list) else [done]
                    if at:  # the first round warms up
                        found[name].append(sum(answer.timings.predicted_per_second for answer in answers))
                    if any(len(answer.tokens) != N_SPEED for answer in answers):
                        raise SystemExit(f"an answer ended after {min(len(answer.tokens) for answer in answers)} tokens")
        for name, values in found.items():
            print(f"  {n} sequences, {name:8} {statistics.median(values):8.1f} {min(values):8.1f} {max(values):8.1f}")
        cost = 1 - statistics.median(b / a for a, b in zip(found["free"], found["schema"], strict=True))
        print(f"  {n} sequences: the schema costs {100 * cost:.1f} % (median of the rounds)")


def relaxed(schema: Any, rng: random.Random) -> Any:
    """The schema without one of its constraints."""
    schema = copy.deepcopy(schema)
    places: list[tuple[dict[str, Any], str]] = []
    todo: list[Any] = [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            places += [(node, key) for key in node if key in CONSTRAINTS]
            todo += node.values()
        elif isinstance(node, list):
            todo += node
    if places:
        node, key = rng.choice(places)
        del node[key]
    return schema


def texts(schema: Any, rng: random.Random) -> tuple[list[str], list[str]]:
    """Valid texts and near misses."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    judge = validator_for(schema, Draft202012Validator)
    validator = judge(exact, format_checker=judge.FORMAT_CHECKER)
    good: list[str] = []
    bad: list[str] = []
    for _ in range(60):
        try:
            text = grammar_walk.walk(from_json_schema(relaxed(schema, rng)), rng)
        except ParameterError:
            continue
        if text is None or len(good) + len(bad) >= 24:
            continue
        text = json.dumps(json.loads(text), ensure_ascii=False)
        try:
            (good if validator.is_valid(json.loads(text, parse_float=Decimal)) else bad).append(text)
        except Unresolvable:  # it refers to another document
            break
    return good, bad


def accepts(tokenizer: LLTokenizer, constraint: Constraint, tokens: Sequence[int]) -> bool:
    """Whether ours lets a text through."""
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(constraint.text), log_level=0)
    return matcher.try_consume_tokens(list(tokens)) == len(tokens) and matcher.is_accepting()


def coverage(tokenizer: LLTokenizer, vocabulary: Vocabulary, theirs: Theirs, entries: Sequence[dict[str, Any]]) -> None:
    """What becomes of each schema on either side."""
    verdicts: dict[str, Counter[str]] = {"lfmfast": Counter(), "llama.cpp": Counter()}
    n_texts = Counter[str]()
    passed: list[str] = []
    for entry in entries:
        good, bad = texts(entry["schema"], random.Random(entry["name"]))
        n_texts.update(valid=len(good), invalid=len(bad))
        try:
            constraint = from_json_schema(entry["schema"])
        except ParameterError:
            verdicts["lfmfast"]["refused"] += 1
        else:
            wrong = [text for text in bad if accepts(tokenizer, constraint, vocabulary(text))]
            verdicts["lfmfast"]["invalid replies pass" if wrong else "enforced"] += 1
            passed += wrong
        answer = theirs.ask("S " + json.dumps(entry["schema"]))
        if not answer.startswith("ok"):
            verdicts["llama.cpp"]["process ended" if answer == "the process ended" else "refused"] += 1
            continue
        answers = [theirs.ask("T " + " ".join(map(str, vocabulary(text)))) for text in bad]
        verdicts["llama.cpp"]["invalid replies pass" if "1" in answers else "enforced"] += 1
    print(f"\n{len(entries)} schemas, {n_texts['valid']} valid and {n_texts['invalid']} invalid texts")
    for name, counts in verdicts.items():
        print(f"  {name:10} " + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()))
    for text in passed[:5]:
        print(f"  passed by lfmfast: {text[:200]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="replies that are measured (default: 10)")
    parser.add_argument("--model", type=Path, help="a GGUF file (default: the random 350M model)")
    parser.add_argument("--only", choices=["masks", "schemas", "speed"], help="one of the parts")
    parser.add_argument("--schemas", type=Path, default=ROOT / "tests" / "data" / "schemas.json",
                        help="a JSON list of objects with name and schema (default: tests/data/schemas.json)")  # fmt: skip
    args = parser.parse_args()
    model = args.model or modelgen.bench_model("350M", "Q4_K_M")
    if args.only in (None, "speed"):
        print(report.machine())
        speed(model, args.rounds)
    if args.only == "speed":
        return
    vocabulary, theirs = Vocabulary(model), Theirs(model)
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary))
    print(report.machine())
    print(f"{report.file(model)}, {tokenizer.vocab_size:,} tokens")
    if args.only in (None, "masks"):
        measure(tokenizer, vocabulary, theirs, args.rounds)
    if args.only in (None, "schemas"):
        coverage(tokenizer, vocabulary, theirs, json.loads(args.schemas.read_text("utf8")))


if __name__ == "__main__":
    main()
