"""`lfmfast serve`: the model over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lfmfast.cli import _options as opt

if TYPE_CHECKING:
    from lfmfast.aio import AsyncModel


def serve(
    model: opt.ModelFile = None,
    hf_repo: opt.HubRepo = None,
    token: opt.HubToken = None,
    offline: opt.Offline = False,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", help="Port; 0: any free one.")] = 8080,
    parallel: Annotated[int, typer.Option("-np", "--parallel", metavar="N", help="Requests side by side.")] = 4,
    ctx_size: Annotated[int, typer.Option("-c", "--ctx-size", metavar="N", help="Tokens of context.")] = 4096,
    jinja: Annotated[bool, typer.Option("--jinja", help="Accepted.")] = False,
    verbose: opt.Verbose = False,
) -> None:
    """Serve a model over HTTP."""
    from lfmfast.aio import AsyncModel
    from lfmfast.server import run
    from lfmfast.server.settings import Settings

    settings = Settings(host=tuple(host.split(",")), port=port)
    sockets = run.bind(settings)
    path: Path = opt.locate(None, model, hf_repo, offline=offline, token=token)

    async def load() -> AsyncModel:
        return await AsyncModel.load(path, n_ctx=ctx_size, n_parallel=parallel)

    print(f"listening on http://{settings.host[0]}:{sockets[0].getsockname()[1]}", file=sys.stderr, flush=True)
    code = run.serve(settings, load, sockets)
    if code:
        raise typer.Exit(code)
