"""`lfmfast chat`: one answer, or a conversation."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lfmfast import _demo
from lfmfast.cli import _options as opt
from lfmfast.constraint import from_gbnf, from_json_schema
from lfmfast.params import SamplingParams

if TYPE_CHECKING:
    from lfmfast import Piece, Stream

CONVERSATION = "Conversation"
NO_MODEL = 'which model? -m FILE, -hf REPO[:QUANT], or as in: lfmfast chat demo "PROMPT"'


def _model(*names: str, help: str, metavar: str = "N") -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=opt.MODEL, show_default=False)


def _talk(*names: str, help: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=CONVERSATION, show_default=False)


def _sampling(*names: str, help: str) -> Any:
    return typer.Option(*names, metavar="N", help=help, rich_help_panel=opt.SAMPLING, show_default=False)


def chat(
    first: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="demo, a file or a repository, if neither -m nor -hf is given.", show_default=False
        ),
    ] = None,
    second: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="Answer this and end; without it you get a conversation.", show_default=False),
    ] = None,
    model: opt.ModelFile = None,
    hf_repo: opt.HubRepo = None,
    hf_token: opt.HubToken = None,
    offline: opt.Offline = False,
    ctx_size: Annotated[
        int, _model("-c", "--ctx-size", help="Tokens of context (4096); 0: as many as the model was trained with.")
    ] = 4096,
    threads: Annotated[int | None, _model("-t", "--threads", help="CPU threads (one per core).")] = None,
    gpu_layers: Annotated[int | None, _model("-ngl", "--gpu-layers", "--n-gpu-layers", help="Layers on the GPU (all).")] = None,
    batch: Annotated[int | None, _model("-b", "--batch-size", help="Prompt tokens per call (2048).")] = None,
    ubatch: Annotated[int | None, _model("-ub", "--ubatch-size", help="Prompt tokens per pass.")] = None,
    type_k: Annotated[str | None, _model("-ctk", "--cache-type-k", help="Type of the K cache (f16).", metavar="TYPE")] = None,
    type_v: Annotated[str | None, _model("-ctv", "--cache-type-v", help="Type of the V cache (f16).", metavar="TYPE")] = None,
    prompt: Annotated[str | None, _talk("-p", "--prompt", help="The same as PROMPT.", metavar="TEXT")] = None,
    system: Annotated[str | None, _talk("-sys", "--system-prompt", help="System prompt.", metavar="TEXT")] = None,
    predict: Annotated[
        int, _talk("-n", "--predict", "--n-predict", help="At most so many tokens per answer; -1: no limit.", metavar="N")
    ] = -1,
    reverse: Annotated[
        list[str] | None, _talk("-r", "--reverse-prompt", help="Stop before this text; repeatable.", metavar="TEXT")
    ] = None,
    schema: Annotated[
        str | None, _talk("-j", "--json-schema", help="The answer is JSON of this schema; {}: any JSON.", metavar="JSON")
    ] = None,
    grammar: Annotated[str | None, _talk("--grammar", help="The answer follows this grammar.", metavar="GBNF")] = None,
    thought: Annotated[
        int, _talk("--reasoning-budget", help="Tokens that a thought can have; -1: any number.", metavar="N")
    ] = -1,
    stats: Annotated[bool, _talk("--stats", help="Report token counts and speeds on stderr.")] = False,
    temperature: Annotated[float | None, _sampling("--temp", "--temperature", help="Temperature; 0: greedy.")] = None,
    top_k: Annotated[int | None, _sampling("--top-k", help="Keep the N likeliest tokens; 0: off.")] = None,
    top_p: Annotated[float | None, _sampling("--top-p", help="Nucleus; 1: off.")] = None,
    min_p: Annotated[
        float | None, _sampling("--min-p", help="Least share of the likeliest token's probability; 0: off.")
    ] = None,
    repeat_penalty: Annotated[
        float | None, _sampling("--repeat-penalty", help="Divide repeated tokens' logits; 1: off.")
    ] = None,
    repeat_last_n: Annotated[
        int | None, _sampling("--repeat-last-n", help="Tokens the penalties look back; 0: off, -1: all.")
    ] = None,
    presence_penalty: Annotated[
        float | None, _sampling("--presence-penalty", help="Subtract once for a token seen; 0: off.")
    ] = None,
    frequency_penalty: Annotated[float | None, _sampling("--frequency-penalty", help="Subtract per time seen; 0: off.")] = None,
    seed: Annotated[int | None, _sampling("-s", "--seed", help="Makes answers repeatable; -1: a new one each time.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Never end an answer by itself.", rich_help_panel=opt.SAMPLING)
    ] = False,
    verbose: opt.Verbose = False,
) -> None:
    """Chat with a model, or get one answer.

    \b
    lfmfast chat demo                                   conversation, see /help
    lfmfast chat demo "What is the capital of France?"  one answer
    lfmfast chat -hf LiquidAI/LFM2.5-350M-GGUF:Q8_0     a model from the Hub
    lfmfast chat -m model.gguf --temp 0 -n 100 "Hi"     a file; greedy
    cat report.txt | lfmfast chat demo "Summarize:"     stdin is appended
    """
    name, prompt = _positionals(first, second, prompt, model is not None or hf_repo is not None)
    if not (name or model or hf_repo):
        raise opt.UsageError(NO_MODEL)
    piped = opt.read_stdin()
    text = "\n\n".join(part for part in (prompt, piped) if part)
    interactive = prompt is None and sys.stdin is not None and sys.stdin.isatty()
    if not interactive and not text.strip():
        raise opt.UsageError("the prompt is empty")
    sampling = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repeat_penalty": repeat_penalty,
        "repeat_last_n": repeat_last_n,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
        "ignore_eos": ignore_eos or None,
    }
    options: dict[str, Any] = {key: value for key, value in sampling.items() if value is not None}
    SamplingParams(**options)  # refuses bad values before a model is downloaded and loaded
    options |= {"max_tokens": None if predict < 0 else predict, "stop": reverse or (), "reasoning_budget": max(thought, -1)}
    options |= _constraint(schema, grammar)

    path = opt.locate(name, model, hf_repo, offline=offline, token=hf_token)
    if path == _demo.path():
        system, options = _demo.SYSTEM if system is None else system, {**_demo.SAMPLING, **options}
    loaded = opt.open_model(
        path,
        n_ctx=ctx_size,
        n_threads=threads,
        n_gpu_layers=gpu_layers,
        n_batch=batch,
        n_ubatch=ubatch,
        type_k=type_k,
        type_v=type_v,
    )
    with loaded:
        if interactive:
            from lfmfast.cli._repl import Repl

            Repl(loaded, system=system, options=options, stats=stats).run()
            return
        printer = Printer()
        try:
            end = printer.show(loaded.chat(system=system).stream(text, **options))
        finally:
            printer.finish()
        if end.finish_reason == "length":
            print(opt.style(why_cut(end, predict), "dim", sys.stderr), file=sys.stderr)
        if stats:
            print(opt.style(format_stats(end), "dim", sys.stderr), file=sys.stderr)


def _constraint(schema: str | None, grammar: str | None) -> dict[str, Any]:
    """What --json-schema and --grammar say; refused before a model is loaded."""
    if schema is not None and grammar is not None:
        raise opt.UsageError("--json-schema and --grammar can't be given together")
    if schema is not None:
        try:
            found = json.loads(schema)
        except ValueError as error:
            raise opt.UsageError(f"--json-schema is no JSON: {error}") from None
        from_json_schema(found)
        return {"json_schema": found}
    if grammar is not None:
        from_gbnf(grammar)
        return {"grammar": grammar}
    return {}


def _positionals(first: str | None, second: str | None, prompt: str | None, has_model: bool) -> tuple[str | None, str | None]:
    """Sort out [MODEL] [PROMPT]: with -m or -hf, and with -p, there is one positional less."""
    words = [word for word in (first, second) if word is not None]
    name = None if has_model or not words else words.pop(0)
    if prompt is not None and words:
        raise opt.UsageError(f"there are two prompts, -p {prompt!r} and {words[0]!r}")
    if len(words) > 1:
        raise opt.UsageError(f"there is a model already, so {words[0]!r} is the prompt; what is {words[1]!r}? (quote a prompt)")
    if name is not None and not opt.looks_like_model(name):
        raise opt.UsageError(f"{name!r} is no model; {NO_MODEL}")
    return name, words[0] if words else prompt


@dataclass
class Printer:
    """Write an answer to stdout as it comes; without control characters and behind its dim thoughts on a terminal."""

    text: str = ""
    thinks: bool = False

    def __post_init__(self) -> None:
        # An answer must not move the cursor or retitle the window.
        unsafe = [c for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"]
        self._table = dict.fromkeys(unsafe) if sys.stdout.isatty() else {}
        self._colour = opt.has_colour(sys.stdout)

    def show(self, stream: Stream) -> Piece:
        end = None
        with stream:
            for piece in stream:
                if piece.reasoning and self._table:
                    self._write(piece.reasoning, thinks=True)
                if piece.text:
                    self.text += piece.text
                    self._write(piece.text)
                end = piece
        assert end is not None and end.finish_reason is not None
        return end

    def _write(self, text: str, thinks: bool = False) -> None:
        if thinks != self.thinks:
            self.thinks = thinks
            colour = ("\033[2m" if thinks else "\033[0m") if self._colour else ""
            sys.stdout.write(colour + ("" if thinks else "\n\n"))
        sys.stdout.write(text.translate(self._table))
        sys.stdout.flush()

    def finish(self) -> None:
        if self.thinks:
            self._write("")
        if self.text and not self.text.endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()


def why_cut(end: Piece, predict: int) -> str:
    produced = end.usage.completion_tokens if end.usage else 0
    return f"[cut after {produced} tokens: {'-n' if produced == predict else 'the context is full (-c)'}]"


def format_stats(end: Piece) -> str:
    usage, timings = end.usage, end.timings
    if usage is None or timings is None:
        return ""
    new = usage.prompt_tokens - usage.cached_tokens
    return (
        f"prompt {usage.prompt_tokens} tokens ({usage.cached_tokens} cached), {new} at {timings.prompt_per_second:.1f} tok/s"
        f" · answer {usage.completion_tokens} tokens at {timings.predicted_per_second:.1f} tok/s"
        f" · first token after {timings.time_to_first_token_ms:.0f} ms"
    )
