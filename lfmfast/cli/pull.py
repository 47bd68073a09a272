"""`lfmfast pull`: download a model."""

from __future__ import annotations

from typing import Annotated

import typer

from lfmfast.cli import _options as opt


def pull(
    model: Annotated[str, typer.Argument(metavar="REPO[:QUANT]|demo", help="Repository, with a quantisation or file name.")],
    token: opt.HubToken = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="REV", help="Branch, tag or commit.", show_default=False)
    ] = None,
    verbose: opt.Verbose = False,
) -> None:
    """Download a model into the Hub cache and print where it is. An interrupted download resumes.

    Without a quantisation: Q4_K_M, else Q8_0, else the first model there is.

    \b
    lfmfast pull LiquidAI/LFM2.5-1.2B-Instruct-GGUF
    lfmfast pull LiquidAI/LFM2.5-1.2B-Instruct-GGUF:q8_0
    llama-server -m "$(lfmfast pull LiquidAI/LFM2.5-350M-GGUF)"
    """
    from lfmfast import hub

    try:
        print(hub.resolve(model, token=token, revision=revision))
    except KeyboardInterrupt:
        opt.complain("stopped; the same command resumes the download")
        raise
