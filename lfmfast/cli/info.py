"""`lfmfast info`: what is in a GGUF file."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from lfmfast._progress import format_bytes
from lfmfast.cli import _options as opt
from lfmfast.errors import TemplateError

LONG = 256  # elements of an array that is worth showing
CONTROL = 3  # LLAMA_TOKEN_TYPE_CONTROL


def info(
    name: Annotated[
        str | None, typer.Argument(metavar="FILE|REPO|demo", help="File or repository.", show_default=False)
    ] = None,
    model: opt.ModelFile = None,
    hf_repo: opt.HubRepo = None,
    ctx_size: Annotated[
        int, typer.Option("-c", "--ctx-size", metavar="N", help="Context for the memory estimate; 0: the trained one.", min=0)
    ] = 4096,
    parallel: Annotated[
        int, typer.Option("-np", "--parallel", metavar="N", help="Sequences for the memory estimate.", min=1)
    ] = 1,
    type_k: Annotated[str, typer.Option("-ctk", "--cache-type-k", metavar="TYPE", help="Type of the K cache.")] = "f16",
    type_v: Annotated[str, typer.Option("-ctv", "--cache-type-v", metavar="TYPE", help="Type of the V cache.")] = "f16",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    token: opt.HubToken = None,
    offline: opt.Offline = False,
    verbose: opt.Verbose = False,
) -> None:
    """Show a model's metadata, chat format, default sampling and memory, without loading it.

    \b
    lfmfast info model.gguf -c 32768
    lfmfast info LiquidAI/LFM2.5-1.2B-Instruct-GGUF:Q8_0 --json
    """
    path = opt.locate(name, model, hf_repo, offline=offline, token=token)
    facts = collect(path, ctx_size, n_seq_max=parallel, type_k=type_k, type_v=type_v)
    if as_json:
        print(json.dumps(facts, ensure_ascii=False, indent=2))
    else:
        show(facts)


def collect(path: Path, n_ctx: int, **memory_options: Any) -> dict[str, Any]:
    from lfmfast import build_info, memory
    from lfmfast._model import read_gguf
    from lfmfast.presets import default_sampling

    headers = [read_gguf(part, max_elements=1 << 24) for part in _parts(path)]
    metadata: dict[str, Any] = headers[0]["metadata"]
    template = _template_family(metadata)
    tensors = [t for header in headers for t in header["tensors"]]
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    n_params = 0
    for _, kind, shape, n_bytes in tensors:
        sizes[kind] += n_bytes
        counts[kind] += 1
        elements = 1
        for n in shape:
            elements *= n
        n_params += elements
    defaults = default_sampling(
        {k: v if isinstance(v, str) else str(v) for k, v in metadata.items() if not isinstance(v, list)}
    )
    build = build_info()
    kernel_types = [kind for kind in sizes if kind in build["kernel_types"]]
    trained = metadata.get(f"{metadata.get('general.architecture')}.context_length", 0)
    estimate = memory.estimate(metadata, sum(sizes.values()), n_ctx=n_ctx or trained, **memory_options)
    return {
        "path": str(path),
        "file_bytes": sum(p.stat().st_size for p in _parts(path)),
        "n_params": n_params,
        "tensors": {kind: {"count": counts[kind], "bytes": n} for kind, n in sizes.most_common()},
        "kernels": {
            "name": build["kernels"],
            "types": kernel_types,
            "share": sum(sizes[kind] for kind in kernel_types) / max(1, sum(sizes.values())),
        },
        "devices": build["devices"],
        "plugins": build["plugins"],
        "template": template,
        "sampling": {
            key: {"value": value, "source": source}
            for key, source in defaults.source.items()
            if source != "neutral" and (value := getattr(defaults.params, key)) is not None
        },
        "memory": {key: getattr(estimate, key) for key in (*estimate.__dataclass_fields__, "total")},
        "metadata": {k: f"{len(v)} values" if isinstance(v, list) and len(v) > LONG else v for k, v in metadata.items()},
    }


def _template_family(metadata: Mapping[str, Any]) -> str:
    from lfmfast.templates import chat_template_for

    texts = metadata.get("tokenizer.ggml.tokens") or []
    kinds = metadata.get("tokenizer.ggml.token_type") or []

    def text(name: str) -> str:
        token = metadata.get(f"tokenizer.ggml.{name}_token_id", -1)
        return texts[token] if 0 <= token < len(texts) else ""

    control = [t for t, kind in zip(texts, kinds, strict=False) if kind == CONTROL]
    source = metadata.get("tokenizer.chat_template")
    try:
        return chat_template_for(source, bos_token=text("bos"), eos_token=text("eos"), special_tokens=control).family
    except TemplateError:  # neither Jinja nor a name
        return "unknown"


def _parts(path: Path) -> list[Path]:
    """All shards of a split model."""
    stem, found, count = path.name.rpartition("-of-")
    if not found or not stem[-5:].isdigit() or not count[:5].isdigit():
        return [path]
    return [path.with_name(f"{stem[:-5]}{i:05d}-of-{count}") for i in range(1, int(count[:5]) + 1)]


def show(facts: Mapping[str, Any]) -> None:
    metadata, memory = facts["metadata"], facts["memory"]
    arch = metadata.get("general.architecture", "?")
    rows = [
        ("file", f"{facts['path']} ({format_bytes(facts['file_bytes'])})"),
        ("architecture", f"{arch}: {_layers(memory)}, width {metadata.get(f'{arch}.embedding_length', '?')}"),
        ("parameters", _count(facts["n_params"])),
        ("tensors", ", ".join(f"{v['count']} {k} ({format_bytes(v['bytes'])})" for k, v in facts["tensors"].items())),
        ("CPU kernels", _kernels(facts["kernels"])),
        ("devices", ", ".join(facts["devices"])),
        *(("plugin", plugin) for plugin in facts["plugins"]),
        ("trained context", f"{metadata.get(f'{arch}.context_length', '?')} tokens"),
        ("chat format", facts["template"]),
    ]
    _section(str(metadata.get("general.name", Path(facts["path"]).name)), rows)
    sampling = [
        (
            key,
            f"{item['value']:g}  ({item['source']})"
            if isinstance(item["value"], float)
            else f"{item['value']}  ({item['source']})",
        )
        for key, item in facts["sampling"].items()
    ]
    _section("Default sampling", sampling or [("neutral", "nothing is known about this model")])
    per_sequence = f", {memory['n_seq_max']} sequences" if memory["n_seq_max"] > 1 else ""
    needs = [
        ("weights", format_bytes(memory["weights"])),
        ("KV cache", f"{format_bytes(memory['kv_cache'])}  ({format_bytes(memory['kv_per_token'])} per token)"),
    ]
    if memory["n_conv"]:
        needs.append(
            ("conv state", f"{format_bytes(memory['conv_state'])}  ({format_bytes(memory['conv_per_sequence'])} per sequence)")
        )
    needs.append(("total", f"{format_bytes(memory['total'])}, and llama.cpp's compute buffers"))
    _section(f"Memory for {memory['n_ctx']} tokens of context{per_sequence}", needs)
    _section("Metadata", [(key, _abridged(value)) for key, value in metadata.items()])


def _kernels(kernels: Mapping[str, Any]) -> str:
    if not kernels["types"]:
        return "llama.cpp's"
    return f"{kernels['name']} for {kernels['share']:.0%} of the weights ({', '.join(kernels['types'])}), else llama.cpp's"


def _layers(memory: Mapping[str, Any]) -> str:
    conv = f"{memory['n_conv']} convolution and " if memory["n_conv"] else ""
    return f"{conv}{memory['n_attention']} attention layers"


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} billion" if n >= 1e9 else f"{n / 1e6:.1f} million" if n >= 1e5 else str(n)


def _abridged(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 200 else f"{text[:200]}… ({len(str(value))} characters)"


def _section(title: str, rows: list[tuple[str, str]]) -> None:
    width = max(len(key) for key, _ in rows)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(opt.style(title, "bold", sys.stdout))
    for key, value in rows:
        line = f"  {key:<{width}}  {value}"
        print(line if columns is None or len(line) <= columns else line[: columns - 1] + "…")
    if title != "Metadata":
        print()
