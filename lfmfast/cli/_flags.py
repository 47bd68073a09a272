"""Flags of several sub-commands: how a model is opened, and how it picks tokens. The names are llama.cpp's."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from lfmfast.cli import _options as opt
from lfmfast.constraint import from_gbnf, from_json_schema, from_regex
from lfmfast.params import SamplingParams


def _model(*names: str, help: str, metavar: str = "N") -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=opt.MODEL, show_default=False)


def _sampling(*names: str, help: str) -> Any:
    return typer.Option(*names, metavar="N", help=help, rich_help_panel=opt.SAMPLING, show_default=False)


CtxSize = Annotated[
    int, _model("-c", "--ctx-size", help="Tokens of context (4096); 0: as many as the model was trained with.")
]
Threads = Annotated[int | None, _model("-t", "--threads", help="CPU threads (one per core).")]
GpuLayers = Annotated[int | None, _model("-ngl", "--gpu-layers", "--n-gpu-layers", help="Layers on the GPU (all).")]
BatchSize = Annotated[int | None, _model("-b", "--batch-size", help="Prompt tokens per call (2048).")]
UbatchSize = Annotated[int | None, _model("-ub", "--ubatch-size", help="Prompt tokens per pass.")]
TypeK = Annotated[str | None, _model("-ctk", "--cache-type-k", help="Type of the K cache (f16).", metavar="TYPE")]
TypeV = Annotated[str | None, _model("-ctv", "--cache-type-v", help="Type of the V cache (f16).", metavar="TYPE")]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Answers depend on their request and seed alone, bit for bit (CPU).",
        rich_help_panel=opt.MODEL,
        show_default=False,
    ),
]

Temperature = Annotated[float | None, _sampling("--temp", "--temperature", help="Temperature; 0: greedy.")]
TopK = Annotated[int | None, _sampling("--top-k", help="Keep the N likeliest tokens; 0: off.")]
TopP = Annotated[float | None, _sampling("--top-p", help="Nucleus; 1: off.")]
MinP = Annotated[float | None, _sampling("--min-p", help="Least share of the likeliest token's probability; 0: off.")]
RepeatPenalty = Annotated[float | None, _sampling("--repeat-penalty", help="Divide repeated tokens' logits; 1: off.")]
RepeatLastN = Annotated[
    int | None, _sampling("--repeat-last-n", help="Tokens the penalties look back; 0: off, -1: all.")
]
PresencePenalty = Annotated[float | None, _sampling("--presence-penalty", help="Subtract once for a token seen; 0: off.")]
FrequencyPenalty = Annotated[float | None, _sampling("--frequency-penalty", help="Subtract per time seen; 0: off.")]
TypicalP = Annotated[float | None, _sampling("--typical", "--typical-p", help="Locally typical sampling; 1: off.")]
TopNSigma = Annotated[float | None, _sampling("--top-nsigma", "--top-n-sigma", help="Deviations from the best logit; -1: off.")]
XtcProbability = Annotated[float | None, _sampling("--xtc-probability", help="Chance that top choices are excluded; 0: off.")]
XtcThreshold = Annotated[float | None, _sampling("--xtc-threshold", help="Least probability of such a choice; over 0.5: off.")]
DynatempRange = Annotated[float | None, _sampling("--dynatemp-range", help="Temperature goes this far up and down; 0: off.")]
DynatempExponent = Annotated[float | None, _sampling("--dynatemp-exp", help="How it follows the entropy.")]
DryMultiplier = Annotated[float | None, _sampling("--dry-multiplier", help="Penalty of repeated passages; 0: off.")]
DryBase = Annotated[float | None, _sampling("--dry-base", help="Its growth with their length.")]
DryAllowedLength = Annotated[int | None, _sampling("--dry-allowed-length", help="Tokens that may repeat without it.")]
DryPenaltyLastN = Annotated[int | None, _sampling("--dry-penalty-last-n", help="Tokens it looks back; 0: off, -1: all.")]
Mirostat = Annotated[int | None, _sampling("--mirostat", help="0: off, 1 and 2: its versions.")]
MirostatEta = Annotated[float | None, _sampling("--mirostat-lr", help="Its learning rate.")]
MirostatTau = Annotated[float | None, _sampling("--mirostat-ent", help="Its target entropy.")]
Seed = Annotated[int | None, _sampling("-s", "--seed", help="Makes answers repeatable; -1: a new one each time.")]
Samplers = Annotated[
    str | None,
    typer.Option("--samplers", metavar="A;B", help="Stages and their order.", rich_help_panel=opt.SAMPLING, show_default=False),
]
DryBreakers = Annotated[
    list[str] | None,
    typer.Option("--dry-sequence-breaker", metavar="TEXT", help="Ends a passage; repeatable, none: no breakers.",
                 rich_help_panel=opt.SAMPLING, show_default=False),
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option("-l", "--logit-bias", metavar="TOKEN(+/-)BIAS", help="As in 15043-1 or 15043-inf; repeatable.",
                 rich_help_panel=opt.SAMPLING, show_default=False),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Never end an answer by itself.", rich_help_panel=opt.SAMPLING)]


def sampling_options(**values: Any) -> dict[str, Any]:
    """Those that were given, checked before a model is downloaded and loaded."""
    given = {name: value for name, value in values.items() if value is not None}
    if "samplers" in given:
        given["samplers"] = given["samplers"].split(";")
    if given.get("dry_sequence_breakers") == ["none"]:
        given["dry_sequence_breakers"] = []
    if "logit_bias" in given:
        given["logit_bias"] = dict(_bias(text) for text in given["logit_bias"])
    SamplingParams(**given)
    return given


def _bias(text: str) -> tuple[int, float]:
    try:
        token, sign, bias = re.split("([+-])", text, maxsplit=1)
        return int(token), float(sign + bias)
    except ValueError:
        raise opt.UsageError(f"--logit-bias must be a token id, a sign and a number, as in 15043+1, not {text!r}") from None


def constraint(schema: str | None, grammar: str | None, grammar_file: Path | None, regex: str | None) -> dict[str, Any]:
    """What the answer has to be, for :meth:`Model.stream`; refused before a model is loaded."""
    given = {"--schema": schema, "--grammar": grammar, "--grammar-file": grammar_file, "--regex": regex}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise opt.UsageError(f"{names[0]} and {names[1]} can't be given together")
    if schema is not None:
        return {"json_schema": _schema(schema)}
    if grammar_file is not None:
        grammar = grammar_file.read_text("utf8")
    if grammar is not None:
        from_gbnf(grammar)
        return {"grammar": grammar}
    if regex is not None:
        from_regex(regex)
        return {"regex": regex}
    return {}


def _schema(text: str) -> Any:
    """JSON, or the name of a file of it; refused before a model is loaded."""
    is_json = text.lstrip()[:1] in ("{", "") or text.strip() in ("true", "false")
    try:
        found = json.loads(text if is_json else Path(text).read_text("utf8"))
    except ValueError as error:
        raise opt.UsageError(f"--schema{'' if is_json else f' {text}'} is no JSON: {error}") from None
    from_json_schema(found)
    return found
