"""`lfmfast batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

import hashlib
import itertools
import json
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lfmfast import _demo
from lfmfast.cli import _flags as flags
from lfmfast.cli import _options as opt

if TYPE_CHECKING:
    from lfmfast.batch.output import Output
    from lfmfast.batch.reader import Record, Source
    from lfmfast.batch.request import Form

INPUT, ANSWERS = "Input", "Answers"


def _option(panel: str, *names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, show_default=False)


def batch(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="JSON lines (also .gz and .zst), .parquet, or - for stdin.", show_default=False)
    ],
    output: Annotated[
        str,
        typer.Option("-o", "--output", metavar="OUT", help="JSON lines, .parquet, or - for stdout.", show_default=False),
    ],
    model: opt.ModelFile = None,
    hf_repo: opt.HubRepo = None,
    hf_token: opt.HubToken = None,
    offline: opt.Offline = False,
    ctx_size: flags.CtxSize = 4096,
    parallel: Annotated[
        int | None, _option(opt.MODEL, "-np", "--parallel", help="Answers side by side (up to 16).", metavar="N")
    ] = None,
    threads: flags.Threads = None,
    gpu_layers: flags.GpuLayers = None,
    batch_size: flags.BatchSize = None,
    ubatch: flags.UbatchSize = None,
    type_k: flags.TypeK = None,
    type_v: flags.TypeV = None,
    deterministic: flags.Deterministic = False,
    column: Annotated[
        str | None, _option(INPUT, "--prompt-column", help="Field or column that is the prompt.", metavar="NAME")
    ] = None,
    template: Annotated[
        str | None, _option(INPUT, "--template", help="The prompt, as in 'Translate: {text}'.", metavar="TEXT")
    ] = None,
    raw: Annotated[bool, _option(INPUT, "--raw", help="These are texts to go on with, no messages of a user.")] = False,
    system: Annotated[
        str | None, _option(INPUT, "-sys", "--system-prompt", help="For conversations that have none.", metavar="TEXT")
    ] = None,
    window: Annotated[
        int, _option(INPUT, "--window", help="Lines read ahead and ordered by how their prompts begin (256).", metavar="N")
    ] = 256,
    predict: Annotated[
        int,
        _option(ANSWERS, "-n", "--max-tokens", "--predict", "--n-predict", help="Most tokens; -1: no limit.", metavar="N"),
    ] = -1,
    answers: Annotated[int, _option(ANSWERS, "--n", help="Answers to each prompt (1).", metavar="N")] = 1,
    stop: Annotated[
        list[str] | None, _option(ANSWERS, "-r", "--reverse-prompt", help="Stop before this text; repeatable.", metavar="TEXT")
    ] = None,
    schema: Annotated[
        str | None,
        _option(ANSWERS, "-j", "--schema", "--json-schema", help="Answers are JSON of this schema.", metavar="FILE|JSON"),
    ] = None,
    grammar: Annotated[str | None, _option(ANSWERS, "--grammar", help="Answers follow this grammar.", metavar="GBNF")] = None,
    grammar_file: Annotated[
        Path | None, _option(ANSWERS, "--grammar-file", help="Likewise, out of a file.", metavar="FILE")
    ] = None,
    regex: Annotated[str | None, _option(ANSWERS, "--regex", help="Answers match this as a whole.", metavar="TEXT")] = None,
    thought: Annotated[
        int, _option(ANSWERS, "--reasoning-budget", help="Tokens that a thought can have; -1: any number.", metavar="N")
    ] = -1,
    form: Annotated[
        str | None,
        _option(ANSWERS, "--format", help="OpenAI's result lines, or flat ones (as the first line of IN).",
                metavar="openai|columns"),
    ] = None,
    unordered: Annotated[bool, _option(ANSWERS, "--unordered", help="Write answers as they come.")] = False,
    overwrite: Annotated[bool, _option(ANSWERS, "--overwrite", help="Begin anew if OUT is there.")] = False,
    temperature: flags.Temperature = None,
    top_k: flags.TopK = None,
    top_p: flags.TopP = None,
    min_p: flags.MinP = None,
    repeat_penalty: flags.RepeatPenalty = None,
    repeat_last_n: flags.RepeatLastN = None,
    presence_penalty: flags.PresencePenalty = None,
    frequency_penalty: flags.FrequencyPenalty = None,
    typical_p: flags.TypicalP = None,
    top_n_sigma: flags.TopNSigma = None,
    xtc_probability: flags.XtcProbability = None,
    xtc_threshold: flags.XtcThreshold = None,
    dynatemp_range: flags.DynatempRange = None,
    dynatemp_exponent: flags.DynatempExponent = None,
    dry_multiplier: flags.DryMultiplier = None,
    dry_base: flags.DryBase = None,
    dry_allowed_length: flags.DryAllowedLength = None,
    dry_penalty_last_n: flags.DryPenaltyLastN = None,
    dry_sequence_breakers: flags.DryBreakers = None,
    mirostat: flags.Mirostat = None,
    mirostat_eta: flags.MirostatEta = None,
    mirostat_tau: flags.MirostatTau = None,
    samplers: flags.Samplers = None,
    logit_bias: flags.LogitBias = None,
    seed: Annotated[
        int | None,
        _option(opt.SAMPLING, "-s", "--seed", help="Each line gets its own from it; -1: a new one each time.", metavar="N"),
    ] = None,
    ignore_eos: flags.IgnoreEos = False,
    verbose: opt.Verbose = False,
) -> None:
    """Answer a file of prompts.

    \b
    lfmfast batch in.jsonl -o out.jsonl -hf LiquidAI/LFM2.5-1.2B-Instruct-GGUF
    lfmfast batch reviews.parquet -o answers.parquet -m model.gguf --template 'Summarize: {review}' -n 100
    zcat in.jsonl.gz | lfmfast batch - -o - -m model.gguf --unordered > out.jsonl

    A line is one of OpenAI's batches (custom_id, method, url, body), or {"messages": ...} or {"prompt": ...} with options of
    Model.stream beside it. A batch that was stopped or killed goes on where it was when it is started again. A line that can't
    be answered gets its reason in place of the answer, and the exit code is 1 then.
    """
    options = flags.sampling_options(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        repeat_last_n=repeat_last_n,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        typical_p=typical_p,
        top_n_sigma=top_n_sigma,
        xtc_probability=xtc_probability,
        xtc_threshold=xtc_threshold,
        dynatemp_range=dynatemp_range,
        dynatemp_exponent=dynatemp_exponent,
        dry_multiplier=dry_multiplier,
        dry_base=dry_base,
        dry_allowed_length=dry_allowed_length,
        dry_penalty_last_n=dry_penalty_last_n,
        dry_sequence_breakers=dry_sequence_breakers,
        mirostat=mirostat,
        mirostat_eta=mirostat_eta,
        mirostat_tau=mirostat_tau,
        samplers=samplers,
        logit_bias=logit_bias,
        ignore_eos=ignore_eos or None,
    )
    flags.sampling_options(seed=seed)
    if predict >= 0:
        options["max_tokens"] = predict
    if stop:
        options["stop"] = stop
    if thought >= 0:
        options["reasoning_budget"] = thought
    options |= flags.constraint(schema, grammar, grammar_file, regex)
    seed = None if seed is None or seed < 0 else seed
    _check(column, template, raw, window, answers, form, parallel)
    with_table = output.lower().endswith(".parquet")
    if output.lower().endswith((".gz", ".zst", ".zstd")):
        raise opt.UsageError(f"-o {output}: a packed output could not be gone on with; pack it afterwards")
    if with_table and form == "openai":
        raise opt.UsageError("--format openai is for JSON lines; a table has columns")

    from lfmfast.batch import output as out
    from lfmfast.batch.reader import open_source
    from lfmfast.batch.request import Form, template_columns
    from lfmfast.batch.run import MAX_STALL_MS
    from lfmfast.batch.table import check_parquet, write_table

    wanted = template_columns(template) if template is not None else [column] if column is not None else None
    if with_table:
        check_parquet(Path(output))
    lines = f"{output}.jsonl" if with_table else output
    opened = open_source(source, wanted)
    try:
        first = next(opened.records, None)
        if first is not None:
            opened.records = itertools.chain([first], opened.records)
        path = opt.locate(None, model, hf_repo, offline=offline, token=hf_token)
        if path == _demo.path():
            options = {**_demo.SAMPLING, **options}
        is_flat = with_table or form == "columns" or (form is None and _is_flat(first))
        settings = {
            "input": opened.name, "first line": _digest(first), "model": str(path.resolve()), "-c": ctx_size,
            "options": options, "--n": answers, "--prompt-column": column, "--template": template, "--raw": raw, "-sys": system,
            "columns": is_flat, "--unordered": unordered,
        }  # fmt: skip
        if overwrite and lines != "-":
            for name in {output, lines}:
                out.remove(Path(name))
        settings["--seed"] = seed = _same(lines, settings, seed)
        if with_table and Path(output).exists() and out.begun_with(Path(lines)) is None:
            raise opt.UsageError(f"{output} is there already, and not of an unfinished batch: --overwrite, or another -o")
        made = Form(seed=seed, options=options, n=answers, column=column, template=template, system=system, raw=raw,
                    table=with_table)  # fmt: skip
        results = out.Output(lines, settings, ordered=not unordered)
        load = {
            "n_ctx": ctx_size, "n_parallel": parallel, "n_threads": threads, "n_gpu_layers": gpu_layers, "n_batch": batch_size,
            "n_ubatch": ubatch, "type_k": type_k, "type_v": type_v, "deterministic": deterministic,
            "max_stall_ms": MAX_STALL_MS,
        }  # fmt: skip
        n_failed = _run(opened, results, made, is_flat, window, path, load)
        if with_table:
            write_table(Path(lines), Path(output), several=answers > 1)
            out.remove(Path(lines))
        else:
            results.finish()
    finally:
        opened.close()
    if n_failed:
        raise typer.Exit(1)


def _run(source: Source, output: Output, form: Form, is_flat: bool, window: int, path: Path, load: dict[str, Any]) -> int:
    """How many lines failed."""
    from lfmfast.batch.progress import Progress, summary
    from lfmfast.batch.run import run

    try:
        if output.n_done:
            print(f"going on: {output.n_done:,} lines are done", file=sys.stderr)
        with opt.open_model(path, **load) as model:
            progress = Progress(source.total)
            try:
                counts = run(model, source.records, output, form, columns=is_flat, name=path.stem, window=window,
                             progress=progress)  # fmt: skip
            finally:
                progress.close()
    except KeyboardInterrupt:
        if output.can_go_on:
            print("stopped; the same command goes on from here", file=sys.stderr)
        raise
    finally:
        output.close()
    print(summary(counts, progress.seconds), file=sys.stderr)
    return counts.failed


def _check(column: str | None, template: str | None, raw: bool, window: int, answers: int, form: str | None,
           parallel: int | None) -> None:  # fmt: skip
    from lfmfast.batch.request import N_MAX
    from lfmfast.batch.result import FORMATS

    if column is not None and template is not None:
        raise opt.UsageError("--prompt-column and --template can't be given together")
    if raw and column is None and template is None:
        raise opt.UsageError('--raw needs --prompt-column or --template; {"prompt": ...} is a text to go on with anyway')
    for name, value, high in (("--window", window, 100_000), ("--n", answers, N_MAX), ("-np", parallel, 1024)):
        if value is not None and not 1 <= value <= high:
            raise opt.UsageError(f"{name} must be from 1 to {high}, not {value}")
    if form not in (None, *FORMATS):
        raise opt.UsageError(f"--format must be {' or '.join(FORMATS)}, not {form!r}")


def _is_flat(first: Record | None) -> bool:
    """Whether results are flat ones if nothing is said: unless the first line is one of OpenAI's."""
    from lfmfast.errors import ParameterError

    try:
        values = {} if first is None else first.read()
    except ParameterError:
        return False
    return "url" not in values and "body" not in values


def _digest(first: Record | None) -> str:
    """Tells one input from another."""
    return "" if first is None else hashlib.sha256(first.raw or repr(first.values).encode()).hexdigest()[:16]


def _same(lines: str, settings: dict[str, Any], seed: int | None) -> int:
    """The seed, which is the old one if a batch is gone on with; everything else has to be what it was."""
    from lfmfast.batch.output import begun_with

    begun = None if lines == "-" else begun_with(Path(lines))
    if begun is None:
        return secrets.randbelow(2**32 - 1) if seed is None else seed
    known: Any = begun.get("--seed")
    now = {**settings, "--seed": known if seed is None else seed}
    for name, value in json.loads(json.dumps(now)).items():
        if begun.get(name) != value:
            raise opt.UsageError(f"{lines} was begun otherwise: {name} was {begun.get(name)!r}, and is {value!r} now; "
                                 "give what was given then, --overwrite, or another -o")  # fmt: skip
    return int(known)
