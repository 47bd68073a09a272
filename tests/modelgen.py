"""Random-weight GGUF models of any LFM2, LFM2-MoE or dense shape, made with `gguf` and NumPy only.

    python tests/modelgen.py 350M model.gguf --quantize Q4_K_M
    python tests/modelgen.py tiny tiny.gguf --dtype F32

Tiny shapes are for tests and take the tokenizer of the trained fixture in tests/data/lfm2-tiny. Real shapes (350M, 700M,
1.2B, 8B-A1B) are for bench/: same tensors, special token ids and vocabulary size as Liquid AI's files, so that they cost
the same to run. Their ordinary tokens are the first merges of a vocabulary that comes with llama.cpp's source.
No weight, and no sentence a model writes, means anything. Control tokens get small logits, so greedy text never ends by itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import oracle

VERSION = 1  # of what is generated: part of the name of a cached bench model
FIXTURE = Path(__file__).resolve().parent / "data" / "lfm2-tiny"
SPECIALS = ("<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|fim_pre|>", "<|fim_mid|>", "<|fim_suf|>", "<|im_start|>",
            "<|im_end|>", "<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>",
            "<|tool_response_start|>", "<|tool_response_end|>")
CHATML = ("{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16)}
NORMAL, CONTROL, USER_DEFINED = (int(t) for t in (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED))


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a model looks like. Layers in `attention` have attention, the others a short convolution (arch "llama": none)."""

    arch: str
    n_embd: int
    n_layer: int
    attention: tuple[int, ...]
    n_head: int
    n_head_kv: int
    n_ff: int
    vocab: str
    template: str
    name: str
    basename: str
    size_label: str
    finetune: str = ""
    n_ctx_train: int = 128000
    rope_base: float = 1e6
    n_expert: int = 0
    n_expert_used: int = 0
    n_ff_exp: int = 0
    n_dense: int = 0  # leading layers without experts


_FIVE: dict[str, Any] = {"n_layer": 5, "attention": (2, 4), "n_head": 4, "n_head_kv": 2, "n_ff": 256, "vocab": "tiny",
                         "template": "LFM2.5-Instruct.jinja", "basename": "LFM2.5", "size_label": "1M", "n_ctx_train": 4096}
_SIXTEEN: dict[str, Any] = {"n_layer": 16, "attention": (2, 5, 8, 10, 12, 14), "n_head_kv": 8, "vocab": "A"}
SHAPES = {
    "tiny": Shape("lfm2", 128, name="LFM2.5 Tiny Random", **_FIVE),
    "tiny-wide": Shape("lfm2", 256, name="LFM2.5 Tiny Wide Random", **_FIVE),  # rows of 256: can be quantised to K types
    "tiny-moe": Shape("lfm2moe", 128, name="LFM2.5 Tiny Random A1M", n_expert=4, n_expert_used=2, n_ff_exp=64, n_dense=1,
                      **{**_FIVE, "vocab": "tiny-last", "template": "LFM2.5-8B-A1B.jinja"}),
    "tiny-dense": Shape("llama", 128, name="Tiny Random Dense",
                        **{**_FIVE, "vocab": "tiny-dense", "template": CHATML, "basename": "Tiny"}),
    "350M": Shape("lfm2", 1024, n_head=16, n_ff=4608, template="LFM2.5-Instruct.jinja", name="LFM2.5 350M", basename="LFM2.5",
                  size_label="350M", **_SIXTEEN),
    "700M": Shape("lfm2", 1536, n_head=24, n_ff=6912, template="LFM2-8B-A1B.jinja", name="LFM2 700M", basename="LFM2",
                  size_label="700M", **_SIXTEEN),
    "1.2B": Shape("lfm2", 2048, n_head=32, n_ff=8192, template="LFM2.5-Instruct.jinja", name="LFM2.5 1.2B Instruct",
                  basename="LFM2.5", size_label="1.2B", finetune="Instruct", **_SIXTEEN),
    "8B-A1B": Shape("lfm2moe", 2048, n_layer=24, attention=(2, 6, 10, 14, 18, 21), n_head=32, n_head_kv=8, n_ff=7168, vocab="A",
                    template="LFM2-8B-A1B.jinja", name="LFM2 8B A1B", basename="LFM2", size_label="8B-A1B", n_expert=32,
                    n_expert_used=4, n_ff_exp=1792, n_dense=2),
}
SHAPES["8B-A1B-short"] = dataclasses.replace(SHAPES["8B-A1B"], n_layer=6, attention=(2, 5), name="LFM2 8B A1B Short",
                                             size_label="2B")  # of a size that is quickly written and loaded


@dataclasses.dataclass(frozen=True)
class Vocab:
    """Token texts in id order, their GGUF types, the merges, and how llama.cpp is to read them."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    pre: str = "lfm2"
    add_bos: bool = True

    def id(self, token: str) -> int:
        return self.tokens.index(token)


@functools.cache
def vocabulary(kind: str) -> Vocab:
    """"tiny": 1,280 tokens, specials first; "tiny-last": specials last; "tiny-dense": no BOS; "A": the layout of 65,536."""
    if kind == "A":
        return _vocabulary_a()
    spec = json.loads((FIXTURE / "tokenizer.json").read_text("utf8"))
    ids = {**spec["model"]["vocab"], **{t["content"]: t["id"] for t in spec["added_tokens"]}}
    tokens = sorted(ids, key=ids.__getitem__)
    if kind == "tiny-last":
        tokens = tokens[len(SPECIALS):-2] + tokens[:len(SPECIALS)] + tokens[-2:]
    types = [CONTROL if t in SPECIALS else USER_DEFINED if t in ("<think>", "</think>") else NORMAL for t in tokens]
    merges = [" ".join(m) for m in spec["model"]["merges"]]
    if kind == "tiny-dense":
        return Vocab(tokens, types, merges, pre="gpt-2", add_bos=False)
    return Vocab(tokens, types, merges)


def _vocabulary_a() -> Vocab:
    """Specials 0-13, reserved and image tokens to 499, 256 bytes, merges to 64399, <think>, </think>, reserved to the end."""
    named = dict(enumerate(SPECIALS)) | {396: "<image>", 497: "<|img_thumbnail|>", 498: "<|image_start|>", 499: "<|image_end|>"}
    named |= {397 + 10 * r + c: f"<|img_row_{r + 1}_col_{c + 1}|>" for r in range(10) for c in range(10)}
    named |= {64400: "<think>", 64401: "</think>"}
    fields = gguf.GGUFReader(oracle.llama_cpp_dir() / "models" / "ggml-vocab-qwen2.gguf").fields
    n_merges = 64400 - 500 - 256
    # 256 single bytes, then the result of each merge in the order of the merges.
    ordinary = fields["tokenizer.ggml.tokens"].contents(slice(0, 256 + n_merges))
    merges = fields["tokenizer.ggml.merges"].contents(slice(0, n_merges))
    if ordinary[256:] != [m.replace(" ", "") for m in merges]:
        raise RuntimeError("ggml-vocab-qwen2.gguf does not list its tokens in the order of its merges")
    tokens = [named.get(i) or (ordinary[i - 500] if 500 <= i < 64400 else f"<|reserved_{i - 10}|>") for i in range(65536)]
    types = [CONTROL if i < len(SPECIALS) else USER_DEFINED if i in (64400, 64401) else NORMAL for i in range(65536)]
    return Vocab(tokens, types, merges)


def template_text(name: str) -> str:
    """A chat template: the fixture's copy, one of llama.cpp's source, or `name` itself where it is one."""
    if not name.endswith(".jinja"):
        return name
    own = FIXTURE / name
    return (own if own.exists() else oracle.llama_cpp_dir() / "models" / "templates" / name).read_text("utf8")


def tensor_list(shape: Shape, n_vocab: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Every tensor as (name, NumPy shape, kind): "matrix", "embedding", "norm", "conv", "router" or "bias"."""
    s, kv = shape, shape.n_head_kv * (shape.n_embd // shape.n_head)
    yield "token_embd.weight", (n_vocab, s.n_embd), "embedding"
    yield ("output_norm" if s.arch == "llama" else "token_embd_norm") + ".weight", (s.n_embd,), "norm"
    for i in range(s.n_layer):
        def named(part: str, layer: int = i) -> str:
            return f"blk.{layer}.{part}.weight"
        yield named("attn_norm"), (s.n_embd,), "norm"
        yield named("ffn_norm"), (s.n_embd,), "norm"
        if s.arch == "llama" or i in s.attention:
            yield named("attn_q"), (s.n_embd, s.n_embd), "matrix"
            yield named("attn_k"), (kv, s.n_embd), "matrix"
            yield named("attn_v"), (kv, s.n_embd), "matrix"
            yield named("attn_output"), (s.n_embd, s.n_embd), "matrix"
            if s.arch != "llama":
                yield named("attn_q_norm"), (s.n_embd // s.n_head,), "norm"
                yield named("attn_k_norm"), (s.n_embd // s.n_head,), "norm"
        else:
            yield named("shortconv.conv"), (s.n_embd, 3), "conv"
            yield named("shortconv.in_proj"), (3 * s.n_embd, s.n_embd), "matrix"
            yield named("shortconv.out_proj"), (s.n_embd, s.n_embd), "matrix"
        if s.n_expert and i >= s.n_dense:
            yield named("ffn_gate_inp"), (s.n_expert, s.n_embd), "router"
            yield f"blk.{i}.exp_probs_b.bias", (s.n_expert,), "bias"
            yield named("ffn_gate_exps"), (s.n_expert, s.n_ff_exp, s.n_embd), "matrix"
            yield named("ffn_up_exps"), (s.n_expert, s.n_ff_exp, s.n_embd), "matrix"
            yield named("ffn_down_exps"), (s.n_expert, s.n_embd, s.n_ff_exp), "matrix"
        else:
            yield named("ffn_gate"), (s.n_ff, s.n_embd), "matrix"
            yield named("ffn_up"), (s.n_ff, s.n_embd), "matrix"
            yield named("ffn_down"), (s.n_embd, s.n_ff), "matrix"


class Noise:
    """Standard normal numbers. Large tensors repeat one block: its odd length keeps any two rows of a matrix different."""

    BLOCK = (1 << 22) - 3

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.block: np.ndarray[Any, Any] | None = None

    def draw(self, shape: tuple[int, ...], scale: float, dtype: np.dtype[Any], mean: float = 0.0) -> np.ndarray[Any, Any]:
        size = int(np.prod(shape))
        if size <= self.BLOCK:
            return (mean + self.rng.standard_normal(size, np.float32) * np.float32(scale)).astype(dtype).reshape(shape)
        if self.block is None:
            self.block = self.rng.standard_normal(self.BLOCK, np.float32)
        block = np.roll(self.block, int(self.rng.integers(self.BLOCK)))
        return np.resize((mean + block * np.float32(scale)).astype(dtype), shape)


def weights(shape: Shape, vocab: Vocab, dtype: np.dtype[Any], seed: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The tensors one by one. Matrices keep the size of what they multiply; logits come out with a deviation of about 3."""
    noise = Noise(seed)
    single = DTYPES["F32"]
    for name, dims, kind in tensor_list(shape, len(vocab.tokens)):
        if kind == "norm":
            yield name, noise.draw(dims, 0.1, single, mean=1.0)
        elif kind in ("conv", "router", "bias"):
            yield name, noise.draw(dims, {"conv": 0.6, "router": dims[-1] ** -0.5, "bias": 0.1}[kind], single)
        elif kind == "embedding":
            x = noise.draw(dims, 3 * dims[-1] ** -0.5, dtype)
            x[[i for i, t in enumerate(vocab.types) if t == CONTROL]] *= 0.1
            yield name, x
        else:
            yield name, noise.draw(dims, dims[-1] ** -0.5, dtype)


def _add(w: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        w.add_bool(name, value)
    elif isinstance(value, int):
        w.add_uint32(name, value)
    elif isinstance(value, float):
        w.add_float32(name, value)
    elif isinstance(value, str):
        w.add_string(name, value)
    else:
        w.add_array(name, value)


def write_metadata(w: gguf.GGUFWriter, shape: Shape, vocab: Vocab, dtype: str, metadata: dict[str, Any]) -> None:
    """The keys that a converted model carries. `metadata` adds to them or replaces them (None: leaves the key out)."""
    s = shape
    kv_heads: int | list[int] = [s.n_head_kv if i in s.attention else 0 for i in range(s.n_layer)]
    values: dict[str, Any] = {
        "general.type": "model", "general.name": s.name, "general.finetune": s.finetune or None, "general.basename": s.basename,
        "general.size_label": s.size_label, "general.description": "random weights, for tests and benchmarks",
        "general.file_type": oracle.FTYPES[dtype], "general.quantization_version": gguf.GGML_QUANT_VERSION,
        "general.tags": ["liquid", "lfm2", "edge", "text-generation"], "general.languages": ["en"],
        "block_count": s.n_layer, "context_length": s.n_ctx_train, "embedding_length": s.n_embd, "feed_forward_length": s.n_ff,
        "attention.head_count": s.n_head, "attention.head_count_kv": s.n_head_kv if s.arch == "llama" else kv_heads,
        "rope.freq_base": s.rope_base, "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": len(vocab.tokens),
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": vocab.pre, "tokenizer.ggml.tokens": vocab.tokens,
        "tokenizer.ggml.token_type": vocab.types, "tokenizer.ggml.merges": vocab.merges,
        "tokenizer.ggml.bos_token_id": vocab.id("<|startoftext|>"), "tokenizer.ggml.eos_token_id": vocab.id("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": vocab.id("<|pad|>"), "tokenizer.ggml.add_bos_token": vocab.add_bos,
        "tokenizer.ggml.add_eos_token": False, "tokenizer.chat_template": template_text(s.template),
    }
    if s.arch == "llama":
        values["rope.dimension_count"] = s.n_embd // s.n_head
    else:
        values["shortconv.l_cache"] = 3
    if s.n_expert:
        values |= {"expert_count": s.n_expert, "expert_used_count": s.n_expert_used, "expert_feed_forward_length": s.n_ff_exp,
                   "leading_dense_block_count": s.n_dense, "expert_gating_func": int(gguf.ExpertGatingFuncType.SIGMOID),
                   "expert_weights_norm": True}
    for key, value in (values | metadata).items():
        if value is not None:
            _add(w, key if key.startswith(("general.", "tokenizer.")) else f"{s.arch}.{key}", value)


def write_model(path: str | os.PathLike[str], shape: str | Shape, *, dtype: str = "F16", seed: int = 0,
                metadata: dict[str, Any] | None = None, without: tuple[str, ...] = (), quantize: str | None = None,
                **changes: Any) -> Path:
    """Write a model.

    `shape` is a name in SHAPES or a Shape, with `changes` to its fields. `without` names tensors to leave out, for files
    that must be refused. `metadata` keys without "general." or "tokenizer." get the architecture's prefix. With
    `quantize`, the file is written and then quantised by llama.cpp.
    """
    path = Path(path)
    shape = dataclasses.replace(SHAPES[shape] if isinstance(shape, str) else shape, **changes)
    if quantize:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=path.name) as folder:
            full = write_model(Path(folder) / "full.gguf", shape, dtype=dtype, seed=seed, metadata=metadata, without=without)
            oracle.quantize(full, path, quantize)
        return path
    vocab = vocabulary(shape.vocab)
    writer = gguf.GGUFWriter(path, shape.arch)
    write_metadata(writer, shape, vocab, dtype, metadata or {})
    for name, dims, kind in tensor_list(shape, len(vocab.tokens)):
        if name not in without:
            stored = DTYPES[dtype] if kind in ("matrix", "embedding") else DTYPES["F32"]
            writer.add_tensor_info(name, dims, stored, int(np.prod(dims)) * stored.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, x in weights(shape, vocab, DTYPES[dtype], seed):
        if name not in without:
            writer.write_tensor_data(x)  # one tensor in memory at a time
    writer.close()
    return path


def copy_model(source: str | os.PathLike[str], target: str | os.PathLike[str], *, f32: bool = False, arch: str | None = None,
               metadata: dict[str, Any] | None = None, without: tuple[str, ...] = ()) -> Path:
    """Copy a model, changed: all tensors dequantised to F32, another architecture name, keys added or replaced (None: left
    out), tensors left out. Keys are full names."""
    target, reader = Path(target), gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, arch or reader.fields["general.architecture"].contents())
    changed = metadata or {}
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture" and name not in changed:
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for name, value in changed.items():
        if value is not None:
            _add(writer, name, value)
    for tensor in reader.tensors:
        if tensor.name not in without:
            data = np.asarray(tensor.data)
            kind = None if f32 else tensor.tensor_type
            writer.add_tensor(tensor.name, gguf.dequantize(data, tensor.tensor_type) if f32 else data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def n_params(shape: str | Shape) -> int:
    """Parameters of a shape; the output matrix is the embedding and counts once."""
    shape = SHAPES[shape] if isinstance(shape, str) else shape
    return sum(int(np.prod(dims)) for _, dims, _ in tensor_list(shape, len(vocabulary(shape.vocab).tokens)))


def bench_dir() -> Path:
    """Where bench models and peers are kept: LFMFAST_BENCH_DIR, or lfmfast/bench in the user's cache folder."""
    named = os.environ.get("LFMFAST_BENCH_DIR")
    if named:
        return Path(named).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "lfmfast" / "bench"


def bench_model(shape: str, quantize: str = "Q4_K_M") -> Path:
    """A cached model of a real shape, generated at the first call."""
    path = bench_dir() / f"lfm2-{shape}-{quantize}-v{VERSION}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # two at once: both write, the last one stays
            write_model(Path(folder) / path.name, shape, quantize=quantize).replace(path)
    return path


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("output", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="F16", help="type of the matrices before quantisation")
    parser.add_argument("--quantize", choices=oracle.FTYPES, help="quantise with llama.cpp")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    path = write_model(args.output, args.shape, dtype=args.dtype, seed=args.seed, quantize=args.quantize)
    print(f"{path}: {n_params(args.shape):,} parameters, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
