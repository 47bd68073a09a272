"""`lfmfast serve`: a model over HTTP, with llama-server's flags."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lfmfast import __version__
from lfmfast._progress import format_bytes
from lfmfast.cli import _options as opt
from lfmfast.cli._slots import Slots, plan
from lfmfast.params import SamplingParams

if TYPE_CHECKING:
    from lfmfast.aio import AsyncModel
    from lfmfast.server.state import ServerState

HTTP, ENDPOINTS, ACCEPTED = "HTTP", "Endpoints", "Accepted for llama-server's sake, without effect"


def _option(panel: str, *names: str, help: str = "", env: str | None = None, metavar: str | None = None) -> Any:
    variable = f"LLAMA_ARG_{env}" if env is not None and env != "LLAMA_API_KEY" else env
    return typer.Option(*names, help=help, envvar=variable, metavar=metavar, rich_help_panel=panel, show_default=False,
                        show_envvar=False)  # fmt: skip


def _model(*names: str, help: str, env: str | None = None, metavar: str | None = "N") -> Any:
    return _option(opt.MODEL, *names, help=help, env=env, metavar=metavar)


def _sampling(*names: str, help: str, env: str | None = None) -> Any:
    return _option("Defaults of requests (unset: what the model recommends)", *names, help=help, env=env, metavar="N")


def _http(*names: str, help: str, env: str | None = None, metavar: str | None = None) -> Any:
    return _option(HTTP, *names, help=help, env=env, metavar=metavar)


def _endpoint(*names: str, help: str, env: str | None = None, metavar: str | None = None) -> Any:
    return _option(ENDPOINTS, *names, help=help, env=env, metavar=metavar)


def _accepted(*names: str, env: str | None = None, metavar: str | None = None) -> Any:
    return _option(ACCEPTED, *names, env=env, metavar=metavar)


Flag = bool
Int = int | None
Float = float | None
Text = str | None


def serve(
    name: Annotated[
        Text, typer.Argument(metavar="FILE|REPO|demo", help="The model, if neither -m nor -hf is given.", show_default=False)
    ] = None,
    model: Annotated[Path | None, _model("-m", "--model", help="GGUF file.", env="MODEL", metavar="FILE")] = None,
    hf_repo: Annotated[
        Text, _model("-hf", "-hfr", "--hf-repo", help="On the Hugging Face Hub.", env="HF_REPO", metavar="REPO[:QUANT]")
    ] = None,
    hf_file: Annotated[Text, _model("-hff", "--hf-file", help="File of that.", env="HF_FILE", metavar="FILE")] = None,
    hf_token: Annotated[Text, _model("-hft", "--hf-token", help="Hub token; HF_TOKEN otherwise.", metavar="TOKEN")] = None,
    offline: Annotated[
        Flag, _model("--offline", help="Use only what is in the cache; no request.", env="OFFLINE", metavar=None)
    ] = False,
    ctx_size: Annotated[
        Int, _model("-c", "--ctx-size", help="Tokens of context of all slots together; 0: the trained one.", env="CTX_SIZE")
    ] = None,
    ctx_per_slot: Annotated[Int, _model("--ctx-per-slot", help="In place of -c: of each slot.")] = None,
    parallel: Annotated[
        int, _model("-np", "--parallel", help="Slots: requests side by side; -1: 4, each with all of -c.", env="N_PARALLEL")
    ] = -1,
    kv_unified: Annotated[
        Flag, _model("-kvu/-no-kvu", "--kv-unified/--no-kv-unified", help="Each slot can use all of -c.", env="KV_UNIFIED",
                     metavar=None)
    ] = False,
    queue: Annotated[int, _model("--queue", help="Requests that may wait (1024); more get 503.")] = 1024,
    threads: Annotated[Int, _model("-t", "--threads", help="CPU threads (one per core).", env="THREADS")] = None,
    threads_batch: Annotated[Int, _model("-tb", "--threads-batch", help="For prompts (as -t).")] = None,
    gpu_layers: Annotated[
        Text, _model("-ngl", "--gpu-layers", "--n-gpu-layers", help="Layers on the GPU (all).", env="N_GPU_LAYERS")
    ] = None,
    batch: Annotated[Int, _model("-b", "--batch-size", help="Prompt tokens at once.", env="BATCH")] = None,
    ubatch: Annotated[Int, _model("-ub", "--ubatch-size", help="The same: the lesser counts.", env="UBATCH")] = None,
    type_k: Annotated[
        Text, _model("-ctk", "--cache-type-k", help="Type of the K cache (f16).", env="CACHE_TYPE_K", metavar="TYPE")
    ] = None,
    type_v: Annotated[
        Text, _model("-ctv", "--cache-type-v", help="Type of the V cache (f16).", env="CACHE_TYPE_V", metavar="TYPE")
    ] = None,
    flash_attn: Annotated[
        Text, _model("-fa", "--flash-attn", help="Flash attention (auto).", env="FLASH_ATTN", metavar="on|off|auto")
    ] = None,
    cache_ram: Annotated[
        Int, _model("-cram", "--cache-ram", help="MiB for past prompts (an eighth of the machine's); -1: no limit, 0: none.",
                    env="CACHE_RAM")
    ] = None,
    mmap: Annotated[Flag, _model("--mmap/--no-mmap", help="Map the file, or read it.", env="MMAP", metavar=None)] = True,
    deterministic: Annotated[
        Flag, _model("--deterministic", help="Answers depend on their request and seed alone, bit for bit (CPU).", metavar=None)
    ] = False,
    mlock: Annotated[Flag, _model("--mlock", help="Keep it in memory.", env="MLOCK", metavar=None)] = False,
    repack: Annotated[Flag, _model("--repack/--no-repack", help="Faster weights.", env="REPACK", metavar=None)] = True,
    chat_template: Annotated[
        Text, _model("--chat-template", help="Jinja source, or a name.", env="CHAT_TEMPLATE", metavar="JINJA")
    ] = None,
    chat_template_file: Annotated[
        Path | None, _model("--chat-template-file", help="The same, out of a file.", env="CHAT_TEMPLATE_FILE", metavar="FILE")
    ] = None,
    host: Annotated[
        str, _http("--host", help="Where to listen (127.0.0.1); several with commas.", env="HOST", metavar="ADDRESS")
    ] = "127.0.0.1",
    port: Annotated[int, _http("--port", help="Port (8080); 0: any free one.", env="PORT", metavar="N")] = 8080,
    api_key: Annotated[
        list[str] | None, _http("--api-key", help="Key to ask for; several with commas.", env="LLAMA_API_KEY", metavar="KEY")
    ] = None,
    api_key_file: Annotated[
        Path | None, _http("--api-key-file", help="Keys, one per line.", env="API_KEY_FILE", metavar="FILE")
    ] = None,
    cors_origins: Annotated[
        str, _http("--cors-origins", help="Pages that may ask: *, localhost, origins.", env="CORS_ORIGINS", metavar="LIST")
    ] = "*",
    timeout: Annotated[
        int, _http("-to", "--timeout", help="Seconds a client may take to send its request (60).", env="TIMEOUT", metavar="N")
    ] = 60,
    drain: Annotated[
        int, _http("--drain-timeout", help="Seconds that answers have after SIGTERM (30).", metavar="N")
    ] = 30,
    max_body: Annotated[int, _http("--max-body", help="MiB of a request (8).", metavar="N")] = 8,
    sse_ping: Annotated[
        int, _http("--sse-ping-interval", help="Seconds until a silent stream sends a comment (30); -1: never.",
                   env="SSE_PING_INTERVAL", metavar="N")
    ] = 30,
    alias: Annotated[
        Text, _endpoint("-a", "--alias", help="Names of the model; answers have the first one.", env="ALIAS", metavar="LIST")
    ] = None,
    tags: Annotated[Text, _endpoint("--tags", help="Shown by /v1/models.", env="TAGS", metavar="LIST")] = None,
    metrics: Annotated[Flag, _endpoint("--metrics", help="GET /metrics for Prometheus.", env="ENDPOINT_METRICS")] = False,
    slots: Annotated[Flag, _endpoint("--slots/--no-slots", help="GET /slots.", env="ENDPOINT_SLOTS")] = True,
    slot_save_path: Annotated[
        Path | None, _endpoint("--slot-save-path", help="Folder of POST /slots/N?action=save.", metavar="FOLDER")
    ] = None,
    props: Annotated[Flag, _endpoint("--props", help="POST /props.", env="ENDPOINT_PROPS")] = False,
    page: Annotated[Flag, _endpoint("--ui/--no-ui", "--webui/--no-webui", help="The chat page at /.", env="UI")] = True,
    log_jsonl: Annotated[Flag, _endpoint("--log-jsonl", help="Log as JSON.", env="LOG_JSONL")] = False,
    log_disable: Annotated[Flag, _endpoint("--log-disable", help="No line for each request.")] = False,
    predict: Annotated[
        int, _sampling("-n", "--predict", "--n-predict", help="Most tokens of an answer; -1: no limit.", env="N_PREDICT")
    ] = -1,
    temperature: Annotated[Float, _sampling("--temp", "--temperature", help="0: greedy.", env="TEMPERATURE")] = None,
    top_k: Annotated[Int, _sampling("--top-k", help="Keep the N likeliest tokens; 0: off.", env="TOP_K")] = None,
    top_p: Annotated[Float, _sampling("--top-p", help="Nucleus; 1: off.", env="TOP_P")] = None,
    min_p: Annotated[Float, _sampling("--min-p", help="Least share of the likeliest's; 0: off.", env="MIN_P")] = None,
    repeat_penalty: Annotated[Float, _sampling("--repeat-penalty", help="1: off.", env="REPEAT_PENALTY")] = None,
    repeat_last_n: Annotated[Int, _sampling("--repeat-last-n", help="Its window; 0: off, -1: all.")] = None,
    presence_penalty: Annotated[Float, _sampling("--presence-penalty", help="0: off.", env="PRESENCE_PENALTY")] = None,
    frequency_penalty: Annotated[Float, _sampling("--frequency-penalty", help="0: off.", env="FREQUENCY_PENALTY")] = None,
    seed: Annotated[Int, _sampling("-s", "--seed", help="-1: a new one each time.")] = None,
    ignore_eos: Annotated[Flag, _option("Defaults of requests (unset: what the model recommends)", "--ignore-eos")] = False,
    cache_prompt: Annotated[Flag, _model("--cache-prompt/--no-cache-prompt", help="Begin from past prompts.",
                                         env="CACHE_PROMPT", metavar=None)] = True,
    cache_reuse: Annotated[
        int, _model("--cache-reuse", help="Move at least N equal tokens behind a removed part; 0: never.", env="CACHE_REUSE")
    ] = 0,
    template_kwargs: Annotated[
        Text, _model("--chat-template-kwargs", help="Its variables, as JSON.", env="CHAT_TEMPLATE_KWARGS", metavar="JSON")
    ] = None,
    reasoning_format: Annotated[
        str, _model("--reasoning-format", help="Thoughts apart (auto, deepseek) or in the text (none).", env="THINK",
                    metavar="FORMAT")
    ] = "auto",
    reasoning_budget: Annotated[
        int, _model("--reasoning-budget", help="Tokens that a thought can have; -1: any number.", env="THINK_BUDGET")
    ] = -1,
    reasoning: Annotated[
        str, _model("-rea", "--reasoning", help="The template's enable_thinking.", env="REASONING", metavar="on|off|auto")
    ] = "auto",
    context_shift: Annotated[Flag, _accepted("--context-shift/--no-context-shift", env="CONTEXT_SHIFT")] = False,
    jinja: Annotated[Flag, _accepted("--jinja/--no-jinja", env="JINJA")] = True,
    cont_batching: Annotated[Flag, _accepted("-cb/-nocb", "--cont-batching/--no-cont-batching", env="CONT_BATCHING")] = True,
    similarity: Annotated[float, _accepted("-sps", "--slot-prompt-similarity", metavar="N")] = 0.1,
    idle_slots: Annotated[Flag, _accepted("--cache-idle-slots/--no-cache-idle-slots", env="CACHE_IDLE_SLOTS")] = True,
    warmup: Annotated[Flag, _accepted("--warmup/--no-warmup", env="WARMUP")] = True,
    swa_full: Annotated[Flag, _accepted("--swa-full", env="SWA_FULL")] = False,
    threads_http: Annotated[Int, _accepted("--threads-http", env="THREADS_HTTP", metavar="N")] = None,
    verbose: opt.Verbose = False,
) -> None:
    """Serve a model over HTTP: the endpoints of OpenAI, llama-server and Anthropic, and a chat page.

    \b
    lfmfast serve -hf LiquidAI/LFM2.5-1.2B-Instruct-GGUF:Q4_K_M -c 4096 --port 8080
    lfmfast serve -m model.gguf -np 8 --ctx-per-slot 8192 --api-key "$KEY" --host 0.0.0.0

    Options of llama-server can also be given by its LLAMA_ARG_... variables. Ctrl-C, or SIGTERM, lets the running answers
    come to their end; the second one ends it at once.
    """
    try:
        from lfmfast.server import log, run
        from lfmfast.server.settings import Settings
    except ImportError as error:
        raise opt.UsageError(f"the server needs {error.name}: pip install 'lfmfast[server]'") from error
    if deterministic and cache_reuse > 0:
        raise opt.UsageError(f"--cache-reuse {cache_reuse}: it is inexact, and can't be had with --deterministic")
    if context_shift:
        raise opt.UsageError("--context-shift: there is none; an answer ends where the context is full")
    if reasoning_format not in ("auto", "deepseek", "none"):
        raise opt.UsageError(f"--reasoning-format {reasoning_format}: it can be auto, deepseek or none")
    template_options = _object(template_kwargs)
    if (thinks := _switch("--reasoning", reasoning)) is not None:
        template_options["enable_thinking"] = thinks
    if slot_save_path is not None and not slot_save_path.is_dir():
        raise opt.UsageError(f"--slot-save-path {slot_save_path}: there is no such folder")
    values: dict[str, Any] = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "repeat_penalty": repeat_penalty,
        "repeat_last_n": repeat_last_n, "presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty,
        "seed": seed, "ignore_eos": ignore_eos or None,
    }  # fmt: skip
    settings = Settings(
        host=_list(host), port=port, api_keys=_keys(api_key or [], api_key_file),
        aliases=tuple(sorted(_list(alias))) or _list(hf_repo), tags=_list(tags),
        sampling=SamplingParams(**{k: v for k, v in values.items() if v is not None}),
        n_predict=max(predict, -1), cache_prompt=cache_prompt, cache_reuse=cache_reuse,
        chat_template_kwargs=template_options, reasoning_format=reasoning_format,  # type: ignore[arg-type]
        reasoning_budget=max(reasoning_budget, -1),
        slot_save_path=slot_save_path, metrics=metrics, slots=slots, props=props, page=page, cors_origins=cors_origins,
        max_body_bytes=max_body << 20, header_timeout_s=min(timeout, 30), body_timeout_s=timeout, drain_s=drain,
        sse_ping_s=sse_ping, log_json=log_jsonl, access_log=not log_disable, verbose=opt.verbose,
    )  # fmt: skip
    options: dict[str, Any] = {
        "n_queue": queue, "n_threads": threads if threads and threads > 0 else None, "n_threads_batch": threads_batch,
        "n_gpu_layers": _layers(gpu_layers), "n_batch": batch, "n_ubatch": ubatch, "type_k": type_k, "type_v": type_v,
        "flash_attn": _switch("--flash-attn", flash_attn), "cache_bytes": _cache_bytes(cache_ram), "use_mmap": mmap,
        "use_mlock": mlock, "repack": repack, "deterministic": deterministic or None,
        "chat_template": _template(chat_template, chat_template_file),
    }  # fmt: skip
    plan(ctx_size, ctx_per_slot, parallel, kv_unified, lambda: 1 << 20)  # says what is wrong before anything is downloaded
    if name is None and model is None and hf_repo is None:
        raise opt.UsageError("which model? -m FILE, -hf REPO[:QUANT], or demo")
    if hf_file is not None and hf_repo is not None:
        hf_repo = f"{hf_repo.partition(':')[0]}:{hf_file}"
    decided: list[Slots] = []

    async def load() -> AsyncModel:
        import asyncio

        from lfmfast.aio import AsyncModel

        path = await asyncio.to_thread(opt.locate, name, model, hf_repo, offline=offline, token=hf_token)
        decided.append(plan(ctx_size, ctx_per_slot, parallel, kv_unified, lambda: _trained(path)))
        given = {key: value for key, value in options.items() if value is not None}
        loaded = await AsyncModel.load(path, n_ctx=decided[0].n_ctx, n_parallel=decided[0].n, **given)
        try:
            if template_options:  # now rather than at each request
                loaded.model.template.render([{"role": "user", "content": "?"}], **template_options)
        except BaseException:
            await loaded.close()
            raise
        return loaded

    sockets = run.bind(settings)
    urls = [f"[{address}]" if ":" in address else address for address in settings.host]
    urls = [f"http://{url}:{listener.getsockname()[1]}" for url, listener in zip(urls, sockets, strict=True)]
    if not settings.api_keys and not all(_is_loopback(address) for address in settings.host):
        opt.complain(f"warning: anybody who can reach {', '.join(settings.host)} can use this server; --api-key asks for a key")
    _say(f"listening on {' '.join(urls)}; loading the model")
    with log.logging_to_stderr(as_json=log_jsonl, verbose=opt.verbose):
        code = run.serve(settings, load, sockets, loaded=lambda state: _introduce(state, decided[0], _usable(urls[0])))
    if code:
        raise typer.Exit(code)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _introduce(state: ServerState, slots: Slots, address: str) -> None:
    model = state.model.model
    known, given = model.default_sampling, state.settings.sampling.as_dict()
    defaults = {key: value for key, value in known.params.as_dict().items() if known.source.get(key) != "neutral"} | given
    each = "the slot has" if slots.n == 1 else f"each of the {slots.n} slots has"
    _say(f"lfmfast {__version__}: {state.model_name}, {model.description}, {format_bytes(model.size)}")
    _say(f"{each} {model.n_ctx} tokens of context, for a prompt and its answer together ({slots.why})")
    _say("sampling by default: " + (", ".join(f"{key} {value}" for key, value in defaults.items()) or "neutral"))
    page = f"chat at {address}, " if state.settings.page else ""
    _say(f"ready: {page}OpenAI's API at {address}/v1")


def _usable(url: str) -> str:
    """For somebody at this machine: nobody can go to "all addresses"."""
    return url.replace("//0.0.0.0:", "//localhost:").replace("//[::]:", "//localhost:")


def _list(text: str | None) -> tuple[str, ...]:
    return tuple(part for part in (part.strip() for part in (text or "").split(",")) if part)


def _keys(given: list[str], file: Path | None) -> tuple[str, ...]:
    keys = [key for text in given for key in _list(text)]
    if given and not keys:
        raise opt.UsageError("--api-key is empty")
    if file is not None:
        lines = [line.strip() for line in file.read_text("utf8").splitlines()]
        from_file = [line for line in lines if line and not line.startswith("#")]
        if not from_file:  # not to be open to everybody by a mistake
            raise opt.UsageError(f"--api-key-file {file}: there is no key in it")
        keys += from_file
    return tuple(dict.fromkeys(keys))


def _object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise opt.UsageError(f"--chat-template-kwargs is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise opt.UsageError("--chat-template-kwargs must be a JSON object")
    return value


def _layers(text: str | None) -> int | None:
    if text in (None, "auto", "all"):
        return None
    try:
        return int(text or "")
    except ValueError:
        raise opt.UsageError(f"-ngl {text}: a number, auto or all") from None


def _switch(flag: str, text: str | None) -> bool | None:
    known = {"on": True, "1": True, "true": True, "enabled": True, "off": False, "0": False, "false": False, "disabled": False}
    if text is None or text in ("auto", "-1"):
        return None
    if text not in known:
        raise opt.UsageError(f"{flag} {text}: on, off or auto")
    return known[text]


def _cache_bytes(mib: int | None) -> int | None:
    return mib if mib is None else 1 << 50 if mib < 0 else mib << 20


def _template(source: str | None, file: Path | None) -> str | None:
    from lfmfast.named_template import template_names

    if source is not None and "{" not in source and source not in (names := template_names()):
        known = ", ".join(sorted(names))
        raise opt.UsageError(f"--chat-template {source}: no Jinja source, and none of llama.cpp's templates, which are {known}")
    return file.read_text("utf8") if file is not None else source


def _trained(path: Path) -> int:
    from lfmfast._model import read_gguf

    metadata = read_gguf(path)["metadata"]
    return int(metadata.get(f"{metadata.get('general.architecture')}.context_length", 0))


def _is_loopback(host: str) -> bool:
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
