"""OpenVINO GenAI on a model of the same shape and weights as ours, in an environment and a process of its own.

The model is exported once by optimum-intel, with weights of 4 bits (symmetric, groups of 128; embedding and output of 8 bits)
and runs as it measured best on a CPU: activations quantised in groups of 128, the rest in F32. The environment (1.6 GB with
torch for CPUs, which only the export needs) and the models are kept in the bench cache folder.

Further arguments for pip, such as an index with torch for CPUs, come from LFMFAST_BENCH_PIP_ARGS.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import modelgen
import numpy as np

from bench.peers.openvino_process import properties

PACKAGES = ("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", "transformers==5.4.0",
            "torch==2.13.0")
SETTINGS = "int4 sym g128 (embedding and output int8), activations in groups of 128, f32"
PROCESS = Path(__file__).with_name("openvino_process.py")
# Hugging Face's names of what GGUF calls so.
LAYER_NAMES = {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
               "attn_v": "self_attn.v_proj", "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
               "attn_k_norm": "self_attn.k_layernorm", "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj",
               "shortconv.out_proj": "conv.out_proj", "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3",
               "ffn_down": "feed_forward.w2"}


def has(shape: str) -> bool:
    """Whether it can run a shape: only those without experts are exported."""
    return modelgen.SHAPES[shape].arch == "lfm2"


def measure(shape: str, *, n_threads: int, n_prompt: int, sequences: list[int]) -> dict[str, float]:
    """What `bench.kernels.worker` measures."""
    settings = {"n_threads": n_threads, "n_prompt": n_prompt, "sequences": sequences}
    result: dict[str, float] = json.loads(_run("measure", str(_model(shape)), json.dumps(settings)).splitlines()[-1])
    return result


def logits(shape: str, tokens: list[int], target: Path) -> None:
    """Write the logits of a prompt, (tokens, vocabulary) in F32, as an .npy file."""
    _run("logits", str(_model(shape)), json.dumps(tokens), str(target))


def worker(shape: str, *, n_threads: int, n_parallel: int) -> list[str]:
    """The command of openvino_worker.py, which answers requests; what it needs is made now."""
    return [str(_python()), "-I", str(PROCESS.with_name("openvino_worker.py")), str(_model(shape)), str(n_parallel),
            json.dumps(properties(n_threads))]  # fmt: skip


def _folder() -> Path:
    pin = hashlib.sha256(repr(PACKAGES).encode() + PROCESS.read_bytes().split(b"\n# ---", 1)[0]).hexdigest()[:10]
    return modelgen.bench_dir() / f"openvino-{pin}"


def _python() -> Path:
    """The environment's interpreter, making it at the first call (minutes)."""
    folder = _folder() / "venv"
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    done = folder / "complete"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = folder.parent / "install.log"
        print(f"installing {', '.join(PACKAGES)} (once; log: {log})", file=sys.stderr, flush=True)
        pip = [str(python), "-m", "pip"]
        with log.open("wb") as out:
            for command in ([sys.executable, "-m", "venv", str(folder)],
                            [*pip, "install", *os.environ.get("LFMFAST_BENCH_PIP_ARGS", "").split(), *PACKAGES],
                            # Comes along and is of no use here; importing it fails where its build is not that of torch.
                            [*pip, "uninstall", "-y", "torchvision"]):  # fmt: skip
                if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out).returncode:
                    raise SystemExit(f"OpenVINO could not be installed; see {log}")
        done.touch()
    return python


def _run(*arguments: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([str(_python()), "-I", str(PROCESS), *arguments], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, errors="replace", env=environment)
    if done.returncode:
        raise SystemExit(f"OpenVINO failed with status {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def _model(shape: str) -> Path:
    """The folder of an exported model, made at the first call (a minute or some)."""
    target = _folder() / f"lfm2-{shape}-int4-v{modelgen.VERSION}"
    if not target.exists():
        _python()
        print(f"exporting {shape} to OpenVINO (once)", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            source, made = Path(folder) / "source", Path(folder) / "made"
            _write_source(modelgen.SHAPES[shape], source)
            _run("export", str(source), str(made))
            made.replace(target)
    return target


def _hf_name(name: str) -> str:
    if not name.startswith("blk."):
        return {"token_embd.weight": "model.embed_tokens.weight", "token_embd_norm.weight": "model.embedding_norm.weight"}[name]
    _, layer, part = name.split(".", 2)
    return f"model.layers.{layer}.{LAYER_NAMES[part.removesuffix('.weight')]}.weight"


def _write_source(shape: modelgen.Shape, folder: Path) -> None:
    """A model as transformers reads it, with the weights of `modelgen.write_model`."""
    s, vocab = shape, modelgen.vocabulary(shape.vocab)
    folder.mkdir()
    header: dict[str, Any] = {}
    end = 0
    for name, dims, kind in modelgen.tensor_list(s, len(vocab.tokens)):
        dtype = "F16" if kind in ("matrix", "embedding") else "F32"
        start, end = end, end + int(np.prod(dims)) * modelgen.DTYPES[dtype].itemsize
        header[_hf_name(name)] = {"dtype": dtype, "shape": [dims[0], 1, dims[1]] if kind == "conv" else list(dims),
                                  "data_offsets": [start, end]}  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, x in modelgen.weights(s, vocab, modelgen.DTYPES["F16"], 0):
            file.write(np.ascontiguousarray(x).data)
    layers = ["full_attention" if i in s.attention else "conv" for i in range(s.n_layer)]
    config = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "hidden_size": s.n_embd, "intermediate_size": s.n_ff,
              "block_auto_adjust_ff_dim": False, "num_hidden_layers": s.n_layer, "layer_types": layers, "conv_L_cache": 3,
              "num_attention_heads": s.n_head, "num_key_value_heads": s.n_head_kv, "vocab_size": len(vocab.tokens),
              "rope_theta": s.rope_base, "norm_eps": 1e-5, "conv_bias": False, "tie_word_embeddings": True,
              "tie_embedding": True, "max_position_embeddings": s.n_ctx_train, "bos_token_id": 1, "eos_token_id": 7,
              "pad_token_id": 0, "dtype": "float32"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(modelgen.FIXTURE / "tokenizer.json", folder)  # GenAI wants one; it is never asked
