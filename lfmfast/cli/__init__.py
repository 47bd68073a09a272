"""The `lfmfast` command.

Exit codes: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C. Only a model's text, or what was asked for, goes to stdout.
The sub-commands import models and servers when they run, so that `--help` is quick.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from lfmfast import __version__
from lfmfast.cli import _options
from lfmfast.cli.batch import batch
from lfmfast.cli.chat import chat
from lfmfast.cli.info import info
from lfmfast.cli.pull import pull
from lfmfast.cli.serve import serve
from lfmfast.cli.tokenize import tokenize
from lfmfast.errors import ParameterError

__all__ = ["app", "main"]

app = typer.Typer(
    name="lfmfast",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for command in (batch, chat, info, pull, serve, tokenize):
    app.command()(command)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"lfmfast {__version__}")
        for name, fact in _build_facts():
            typer.echo(f"  {name:<22}  {fact}")
        raise typer.Exit()


def _build_facts() -> Iterator[tuple[str, str]]:
    """`lfmfast.build_info()` for a bug report; what went wrong, if the native modules can't be loaded."""
    try:
        from lfmfast import build_info

        facts = build_info()
    except Exception as error:
        yield "native modules", f"{type(error).__name__}: {error}"
        return
    del facts["version"]
    for name, value in facts.items():
        separator = ", " if name in ("devices", "plugins") else " "
        yield name, separator.join(value) if isinstance(value, list) else value


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Version and build.")] = False,
) -> None:
    """Run Liquid AI's LFM2 models (GGUF) on this machine.

    \b
    lfmfast chat demo "What is the capital of France?"
    lfmfast chat -hf LiquidAI/LFM2.5-1.2B-Instruct-GGUF
    lfmfast COMMAND --help
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    _options.verbose = False
    _prepare_streams()
    command: Any = typer.main.get_command(app)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_where: _options.complain(f"warning: {message}")
            with command.make_context("lfmfast", args) as context:
                command.invoke(context)
        sys.stdout.flush()
        return 0
    except typer.Exit as exit_:
        return exit_.exit_code
    except typer.Abort:
        return 130
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head -1` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        usage = _usage_message(error, args)
        if usage is None and _options.verbose:
            traceback.print_exc()
        _options.complain(usage or _options.describe(error))
        return 1 if usage is None else 2


def _prepare_streams() -> None:
    if sys.stdout is None:  # closed by the caller: >&-
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")


def _usage_message(error: Exception, args: list[str]) -> str | None:
    """The message of usage errors, with the closest option or command; None for other exceptions.

    By names, because some versions of typer use click and others a copy of it.
    """
    if isinstance(error, (_options.UsageError, ParameterError)):
        return str(error)
    if not any(c.__name__ == "ClickException" for c in type(error).__mro__):
        return None
    context: Any = getattr(error, "ctx", None)
    text = error.format_message()  # type: ignore[attr-defined]
    where = context.command_path if context else "lfmfast"
    given: str | None = None
    kind, known = "option", list[str]()
    if context is not None:
        known = [name for p in context.command.get_params(context) for name in getattr(p, "opts", ()) if name.startswith("-")]
    if text.startswith("No such option"):
        given = error.option_name  # type: ignore[attr-defined]
    elif text.startswith("No such command"):
        given, kind, known = text.split("'")[1], "command", list(context.command.list_commands(context))
    elif text.startswith("Invalid value"):  # click read -ngx as -n gx
        given = next((a for a in args if re.fullmatch(r"-[A-Za-z]{2,}(=.*)?", a) and a.partition("=")[0] not in known), None)
    if given is None:
        if text.startswith("Got unexpected extra"):
            text += "; quote a prompt of several words"
        return f"{text[:1].lower()}{text[1:]} (see `{where} --help`)"
    close = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"there is no {kind} {given}{hint} (see `{where} --help`)"
