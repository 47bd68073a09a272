"""`lfmfast tokenize`: text to token ids."""

from __future__ import annotations

import contextlib
import json
from typing import Annotated

import typer

from lfmfast.cli import _options as opt


def tokenize(
    text: Annotated[str | None, typer.Argument(metavar="TEXT", help="Text; stdin if absent.", show_default=False)] = None,
    model: opt.ModelFile = None,
    hf_repo: opt.HubRepo = None,
    ids: Annotated[bool, typer.Option("--ids", help="Print only the ids, as a list.")] = False,
    no_bos: Annotated[bool, typer.Option("--no-bos", help="Add no beginning-of-sequence token.")] = False,
    special: Annotated[bool, typer.Option("--special", help="Read <|im_end|> and the like as control tokens.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print ids and texts as JSON.")] = False,
    token: opt.HubToken = None,
    offline: opt.Offline = False,
    verbose: opt.Verbose = False,
) -> None:
    """Show the tokens of a text.

    \b
    lfmfast tokenize -m model.gguf "Hello world"
    lfmfast tokenize -m model.gguf --ids --no-bos < file.txt
    """
    path = opt.locate(None, model, hf_repo, offline=offline, token=token)
    if text is None:
        text = opt.read_stdin()
    from lfmfast._model import Model

    with contextlib.closing(Model.load(path, vocab_only=True)) as vocabulary:
        tokens = vocabulary.tokenize(text, add_special=not no_bos, parse_special=special)
        pieces = [vocabulary.detokenize_bytes([t], special=True).decode("utf-8", "backslashreplace") for t in tokens]
    if as_json:
        print(json.dumps([{"id": t, "text": p} for t, p in zip(tokens, pieces, strict=True)], ensure_ascii=False))
    elif ids:
        print(list(tokens))
    else:
        for t, p in zip(tokens, pieces, strict=True):
            print(f"{t:6d} -> {p!r}")
