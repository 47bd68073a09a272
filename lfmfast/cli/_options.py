"""What the sub-commands share: options, finding and opening the model, reading stdin, colours."""

from __future__ import annotations

import logging
import os
import re
import select
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from lfmfast.errors import LfmfastError

if TYPE_CHECKING:
    from lfmfast import Model

MODEL, SAMPLING = "Model", "Sampling (unset: what the model recommends)"

verbose = False


class UsageError(Exception):
    """The command line does not make sense; exit code 2."""


def complain(message: str) -> None:
    print(f"{style('lfmfast:', 'red', sys.stderr)} {message}", file=sys.stderr)


def describe(error: Exception) -> str:
    """Return the error in one line for a user."""
    if isinstance(error, LfmfastError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return f"{type(error).__name__}: {error} (please report it; -v shows where it happened)"


def _set_verbose(value: bool) -> None:
    global verbose
    if value:
        verbose = True
        logging.basicConfig(stream=sys.stderr, format="%(name)s: %(message)s")
        logging.getLogger("lfmfast").setLevel(logging.DEBUG)


# click takes -hf and -ngl as they are: an option that starts with one dash and is longer than a letter is looked up first.
ModelFile = Annotated[
    Path | None, typer.Option("-m", "--model", metavar="FILE", help="GGUF file.", rich_help_panel=MODEL, show_default=False)
]
HubRepo = Annotated[
    str | None,
    typer.Option(
        "-hf",
        "-hfr",
        "--hf-repo",
        metavar="REPO[:QUANT]",
        help="Model on the Hugging Face Hub.",
        rich_help_panel=MODEL,
        show_default=False,
    ),
]
HubToken = Annotated[
    str | None,
    typer.Option(
        "-hft",
        "--hf-token",
        metavar="TOKEN",
        help="Hub access token; HF_TOKEN otherwise.",
        rich_help_panel=MODEL,
        show_default=False,
    ),
]
Offline = Annotated[bool, typer.Option("--offline", help="Use only what is in the cache; no request.", rich_help_panel=MODEL)]
Verbose = Annotated[
    bool,
    typer.Option("-v", "--verbose", callback=_set_verbose, is_eager=True, help="Show logs, and tracebacks of errors."),
]


def looks_like_model(name: str) -> bool:
    return name == "demo" or _is_file(name) or _REPO.fullmatch(name) is not None


_REPO = re.compile(r"[\w.-]+/[\w.-]+(:[\w./-]+)?", re.ASCII)


def _is_file(name: str) -> bool:
    hub_file = ":" in name and _REPO.fullmatch(name)
    return Path(name).is_file() or (name.lower().endswith(".gguf") and not hub_file)


def locate(
    name: str | None, file: Path | None = None, repo: str | None = None, *, offline: bool = False, token: str | None = None
) -> Path:
    """Return the file that a command means by its positional MODEL, -m or -hf; download it if need be."""
    given = [text for text in (name, file and f"-m {file}", repo and f"-hf {repo}") if text]
    if len(given) > 1:
        raise UsageError(f"give one model, not {' and '.join(given)}")
    if not given:
        raise UsageError("which model? -m FILE, -hf REPO[:QUANT], or demo")
    if file is not None:
        return file
    if name is not None and _is_file(name):
        return Path(name)
    from lfmfast import hub

    return hub.resolve(repo or name or "", offline=True if offline else None, token=token)


def open_model(path: Path, **options: Any) -> Model:
    """Load the model, showing how far it is if that takes long enough to be seen."""
    from lfmfast import Model

    began, shown = time.monotonic(), False
    live = sys.stderr.isatty()

    def progress(share: float) -> None:
        nonlocal shown
        if live and time.monotonic() - began > 0.3:
            shown = True
            print(f"\rloading {path.name} {share:4.0%}", end="", file=sys.stderr, flush=True)

    try:
        return Model(path, progress=progress, **{k: v for k, v in options.items() if v is not None})
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def read_stdin() -> str:
    """Return what was piped in, "" for a terminal or a closed stdin."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return ""
    if os.name == "posix" and not select.select([sys.stdin], [], [], 2)[0]:  # a pipe that nobody closes, as under ssh
        print(
            style("waiting for the end of stdin (< /dev/null if there is nothing to read)", "dim", sys.stderr), file=sys.stderr
        )
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8 text (byte 0x{data[error.start]:02x} at {error.start})") from None


def has_colour(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def style(text: str, name: str, stream: TextIO) -> str:
    codes = {"red": "31", "green": "32", "dim": "2", "bold": "1"}
    return f"\033[{codes[name]}m{text}\033[0m" if has_colour(stream) else text
