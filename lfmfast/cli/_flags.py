"""Flags of several sub-commands: how a model is opened, and how it picks tokens. The names are llama.cpp's."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lfmfast.cli import _options as opt
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
Seed = Annotated[int | None, _sampling("-s", "--seed", help="Makes answers repeatable; -1: a new one each time.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Never end an answer by itself.", rich_help_panel=opt.SAMPLING)]


def sampling_options(**values: Any) -> dict[str, Any]:
    """Those that were given, checked before a model is downloaded and loaded."""
    given = {name: value for name, value in values.items() if value is not None}
    SamplingParams(**given)
    return given
