"""Wrong files, numbers and prompts: an exception that names value and limit, never a dead process.

What might kill the process runs in one of its own (child.py).
"""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path
from typing import Any

import child
import gguf
import modelgen
import numpy as np
import pytest

from lfmfast import ContextFullError, Model, ModelLoadError, ParameterError, TemplateError

SMALL: dict[str, Any] = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 32, "n_threads": 1, "n_gpu_layers": 0}

LOAD = """
    for path in sys.argv[1:]:
        def load():
            with lfmfast.Model(path, n_ctx=64, n_threads=1) as model:
                for _ in model.stream([1, 2, 3], max_tokens=2): pass
                return model.n_vocab
        attempt(path, load)
"""

ALIVE = {"ok", "ModelLoadError", "ParameterError", "DecodeError", "SamplingError", "ContextFullError"}

# --- files ---


def test_what_is_no_model(tmp_path):
    wrong = {"missing.gguf": "no such file", "folder.gguf": "directory", "empty.gguf": "empty", "garbage.gguf": "GGUF",
             "text.gguf": "GGUF", "three.gguf": "GGUF", "magic.gguf": "", "fifo.gguf": "regular file"}
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "garbage.gguf").write_bytes(np.random.default_rng(0).bytes(1024))
    (tmp_path / "text.gguf").write_text("Hello, this is not a model.\n" * 40)
    (tmp_path / "three.gguf").write_bytes(b"GGU")
    (tmp_path / "magic.gguf").write_bytes(b"GGUF")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "fifo.gguf")  # opening it for reading waits for ever
    else:
        del wrong["fifo.gguf"]
    seen = child.attempts(LOAD, *(tmp_path / name for name in wrong), timeout=60)
    for name, reason in wrong.items():
        kind, message = seen[str(tmp_path / name)]
        assert kind == "ModelLoadError"
        assert name in message
        assert reason in message


def test_truncated_files(tmp_path, tiny_f16_path):
    whole = tiny_f16_path.read_bytes()
    reader = gguf.GGUFReader(tiny_f16_path)
    data = reader.tensors[0].data_offset
    info = data - 40 * len(reader.tensors)  # among the descriptions of the tensors
    paths = []
    for size in (5, 8, 20, 24, 25, 100, 1000, info // 2, info, data - 1, data, data + 1, len(whole) // 2, len(whole) - 1):
        paths.append(tmp_path / f"{size}.gguf")
        paths[-1].write_bytes(whole[:size])
    for path, (kind, message) in child.attempts(LOAD, *paths).items():
        assert kind == "ModelLoadError", path
        assert Path(path).name in message
        assert len(message.removeprefix(f"can't load the model '{path}'")) > 5, "llama.cpp's reason is missing"


def test_wrong_models(tmp_path, tiny_f32_path, tiny_moe_path):
    """Well-formed GGUF files that are no usable model, each with the word that the message must have."""
    def changed(name: str, source: Path = tiny_f32_path, **how: Any) -> Path:
        return modelgen.copy_model(source, tmp_path / f"{name}.gguf", **how)

    def key(name: str, value: Any, source: Path = tiny_f32_path) -> Path:
        full = name if "." in name and not name.startswith(("attention", "rope", "shortconv")) else f"lfm2.{name}"
        return changed(f"{name}-{value}", source, metadata={full: value})

    refused = {
        changed("arch", arch="mamba99"): "mamba99",
        changed("no-norm", without=("blk.0.ffn_norm.weight",)): "blk.0.ffn_norm.weight",
        changed("no-embedding", without=("token_embd.weight",)): "token_embd.weight",
        changed("no-expert", tiny_moe_path, without=("blk.1.ffn_up_exps.weight",)): "blk.1.ffn_up_exps.weight",
        key("block_count", 6): "",
        key("block_count", 100000): "",
        key("embedding_length", 64): "",
        key("feed_forward_length", 128): "",
        key("attention.head_count", 3): "",
        key("attention.layer_norm_rms_epsilon", None): "layer_norm_rms_epsilon",
        key("shortconv.l_cache", None): "shortconv.l_cache",
        key("attention.head_count_kv", [0, 0, 2]): "head_count_kv",
        key("tokenizer.ggml.tokens", None): "",
        key("tokenizer.ggml.tokens", ["a", "b"]): "",
        key("tokenizer.ggml.model", "unknown"): "unknown",
    }
    seen = child.attempts(LOAD, *refused)
    for path, word in refused.items():
        kind, message = seen[str(path)]
        assert kind == "ModelLoadError", path.name
        assert word in message, path.name


def test_odd_metadata_never_kills_the_process(tmp_path, tiny_f32_path):
    values: dict[str, list[Any]] = {
        "lfm2.block_count": [0, 2**31], "lfm2.embedding_length": [0, 2**31], "lfm2.attention.head_count": [0, 2**31, 1000],
        "lfm2.attention.head_count_kv": [0, 3, [0, 0, 0, 0, 0], [2, 2, 2, 2, 2], [0, 0, 9, 0, 9]],
        "lfm2.shortconv.l_cache": [0, 1, 2, 4, 2**31], "lfm2.context_length": [0, 1, 2**31],
        "lfm2.rope.freq_base": [0.0, -1.0, float("nan")], "lfm2.attention.layer_norm_rms_epsilon": [-1.0, float("nan")],
        "lfm2.feed_forward_length": [0], "lfm2.vocab_size": [0, 5, 2**31],
        "tokenizer.ggml.bos_token_id": [1280, 2**31], "tokenizer.ggml.eos_token_id": [1280, 2**32 - 1],
        "tokenizer.ggml.token_type": [[1, 2, 3]], "tokenizer.ggml.merges": [["a"], ["no-space here twice"], None],
        "tokenizer.ggml.pre": ["unheard-of", None], "general.alignment": [0, 3, 2**31],
        "tokenizer.chat_template": ["{{", "", None], "general.file_type": [999],
    }
    paths = []
    for name, choices in values.items():
        for i, value in enumerate(choices):
            if name == "general.alignment":  # the writer would use it: change the bytes instead
                path = tmp_path / f"{name}-{i}.gguf"
                source = modelgen.copy_model(tiny_f32_path, path, metadata={name: 32})
                at = (data := source.read_bytes()).index(name.encode()) + len(name) + 4
                path.write_bytes(data[:at] + struct.pack("<I", value) + data[at + 4:])
            else:
                path = modelgen.copy_model(tiny_f32_path, tmp_path / f"{name}-{i}.gguf", metadata={name: value})
            paths.append(path)
    for path, (kind, message) in child.attempts(LOAD, *paths).items():
        assert kind in ALIVE, (path, message)


@pytest.mark.slow
def test_flipped_bits_never_kill_the_process(tmp_path, tiny_f16_path):
    """Random damage to the header: counts, lengths, types, offsets, shapes."""
    whole = bytearray(tiny_f16_path.read_bytes())
    reader = gguf.GGUFReader(tiny_f16_path)
    first = min(t.data_offset for t in reader.tensors)
    fields = [f.offset + 8 + len(name) for name, f in reader.fields.items() if f.offset]  # type and length of the values
    tensors = [t.field.offset + i for t in reader.tensors for i in (0, 20, 30, 34, 42, 50, 54)]
    rng = np.random.default_rng(3)
    paths = []
    for i in range(150):
        damaged = bytearray(whole)
        for _ in range(int(rng.integers(1, 4))):
            region = int(rng.integers(3))
            at = (4 + rng.integers(20), rng.choice(fields) + rng.integers(12), rng.choice(tensors) + rng.integers(8))[region]
            damaged[min(int(at), first - 1)] ^= 1 << int(rng.integers(8))
        paths.append(tmp_path / f"{i}.gguf")
        paths[-1].write_bytes(damaged)
    seen = child.attempts(LOAD, *paths)
    assert {kind for kind, _ in seen.values()} <= ALIVE
    assert sum(kind == "ModelLoadError" for kind, _ in seen.values()) > 50


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX permissions")
def test_unreadable_file(tmp_path, tiny_f16_path):
    path = tmp_path / "secret.gguf"
    path.write_bytes(tiny_f16_path.read_bytes())
    path.chmod(0)
    # root reads anything: become nobody, once everything is imported.
    kind, message = child.attempts("""
        import os
        import lfmfast.model
        if os.getuid() == 0:
            os.setgid(65534), os.setuid(65534)
        attempt("load", lambda: lfmfast.Model(sys.argv[1], n_threads=1))
    """, path)["load"]
    assert kind == "ModelLoadError"
    assert "secret.gguf" in message
    assert "ermission" in message


def test_paths_of_every_kind(tmp_path, tiny_f16_path):
    data = tiny_f16_path.read_bytes()
    names = ["with space.gguf", "ünïcödé-モデル-👋.gguf", "percent%20%s.gguf"]
    for name in names:
        (tmp_path / name).write_bytes(data)
        for path in (tmp_path / name, str(tmp_path / name), os.fsencode(tmp_path / name)):
            with Model(path, **SMALL) as model:
                assert model.path == str(tmp_path / name)
    if sys.platform == "linux":  # a name that is no UTF-8
        path = os.fsencode(tmp_path) + b"/\xff\xfe.gguf"
        Path(os.fsdecode(path)).write_bytes(data)
        with Model(path, **SMALL) as model:
            assert os.fsencode(model.path) == path
    with pytest.raises(ModelLoadError, match="NUL"):
        Model("a\0b.gguf")
    for wrong in (None, 7, ["a"]):
        with pytest.raises(TypeError):
            Model(wrong)


# --- numbers ---

FUZZ = """
    import warnings
    warnings.filterwarnings("ignore", "the CPU is used")  # layers for a GPU that is not there
    path = sys.argv[1]
    values = [0, 1, 2, 3, -1, -2, 31, 33, 2**16, 2**31 - 1, 2**31, 2**32 + 1, 2**63, 10**30, True, 1.5, "7", None]
    for name in ("n_ctx", "n_batch", "n_ubatch", "n_threads", "n_threads_batch", "n_gpu_layers"):
        for value in values:
            if name == "n_ctx" and value == 2**31 - 1:
                continue  # some machines grant that much memory
            def use():
                options = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 32, "n_threads": 1, name: value}
                with lfmfast.Model(path, **options) as model:
                    if "threads" in name and value and value > 3:
                        return 1  # more threads than cores wait for each other: correct, but too slow for a test
                    prompt = [1 + i % 200 for i in range(min(40, model.n_ctx))]
                    return model.generate(prompt, max_tokens=3, temperature=0).usage.completion_tokens
            attempt(f"{name}={value!r}", use)
"""


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny_f16_path", "tiny_dense_path"])
def test_constructor_numbers(model, request):
    seen = child.attempts(FUZZ, request.getfixturevalue(model))
    for attempt, (kind, value) in seen.items():
        name, number = attempt.split("=")
        if kind == "ok":
            assert value >= 1, attempt
        else:
            assert kind in ("ParameterError", "MemoryError"), (attempt, value)
            assert name in value and number.strip("'") in value, (attempt, value)  # names the argument and the value seen
    refused = {"n_ctx": ["-1", "2147483648", "'7'", "1.5", "True"], "n_batch": ["0", "-1", "2147483648"],
               "n_ubatch": ["0", "-1", "1.5"], "n_threads": ["0", "-1", str(10**30)], "n_gpu_layers": ["2147483648", "None"]}
    taken = {"n_ctx": ["0"], "n_batch": ["1", "33"], "n_ubatch": ["1", "33", "None"], "n_threads": ["3", "None"],
             "n_gpu_layers": ["-1"]}
    for kind, expected in (("ParameterError", refused), ("ok", taken)):
        for attempt in (f"{name}={value}" for name, values in expected.items() for value in values):
            assert seen[attempt][0] == kind, (attempt, seen[attempt])


def test_other_constructor_arguments(tiny_f16_path):
    script = """
        def use(**options):
            with lfmfast.Model(sys.argv[1], n_ctx=256, n_threads=1, **options) as model:
                return model.generate([1, 2, 3], max_tokens=3, temperature=0).usage.completion_tokens
        for options in sys.argv[2:]:
            attempt(options, lambda: use(**eval(options)))
    """
    refused = ("{'type_k': 'q3_x'}", "{'type_k': ''}", "{'type_k': 'i32'}", "{'type_v': 'q8_0', 'flash_attn': False}")
    taken = ("{'type_k': 'f32', 'type_v': 'f32'}", "{'flash_attn': False}", "{'flash_attn': True}", "{'use_mmap': False}",
             "{'repack': False}", "{'check_tensors': True}")
    either = ("{'type_k': 'q4_0'}", "{'type_k': 'q4_k'}", "{'chat_template': '{{'}")
    seen = child.attempts(script, tiny_f16_path, *refused, *taken, *either)
    for options in refused:
        assert seen[options][0] == "ParameterError", (options, seen[options])
    assert "q3_x" in seen["{'type_k': 'q3_x'}"][1]
    for options in taken:
        assert seen[options] == ("ok", 3), options
    assert {kind for kind, _ in seen.values()} <= {"ok", "ParameterError", "TemplateError"}


# --- prompts ---


@pytest.fixture(scope="module")
def small(tiny_f32_path):
    with Model(tiny_f32_path, **SMALL, type_k="f32", type_v="f32") as model:
        assert model.n_ctx == 256
        yield model


def prompt_of(n: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(n).integers(20, 1270, n)]


@pytest.mark.parametrize("n", [257, 258, 319, 320, 1000])
def test_prompts_that_do_not_fit(small, n):
    with pytest.raises(ContextFullError, match=rf"{n}\b.*\b256\b") as caught:
        small.generate(prompt_of(n), max_tokens=1)
    assert (caught.value.n_tokens, caught.value.n_ctx) == (n, 256)
    assert small.generate(prompt_of(10), max_tokens=1).usage.completion_tokens == 1


def test_prompts_that_are_none(small, tiny_dense):
    with pytest.raises((ParameterError, TemplateError), match="empty"):
        small.generate([], max_tokens=1)
    for wrong in ([1280], [-1], [2**31], [2**31 - 1], [2**40], [5, 1280]):
        with pytest.raises((ParameterError, OverflowError)) as caught:
            small.generate(wrong, max_tokens=1)
        if isinstance(caught.value, ParameterError):
            assert str(wrong[-1]) in str(caught.value)
    with pytest.raises(ParameterError):
        tiny_dense.generate("", max_tokens=1)  # no BOS: nothing to begin with
    assert small.generate("", max_tokens=1).usage.prompt_tokens == 1
    for wrong in (None, 7, b"bytes", [1, "two"], [1.5], object()):
        with pytest.raises((ParameterError, TypeError, ValueError)):
            small.generate(wrong, max_tokens=1)
    with pytest.raises(ParameterError, match="surrogate"):
        small.generate("a\ud800b", max_tokens=1)


def test_texts_with_nul_and_long_texts(small):
    assert small.detokenize(small.tokenize("a\0b")) == "a\0b"
    text = "word " * 20000
    assert small.detokenize(small.tokenize(text)) == text
    with pytest.raises(ContextFullError):
        small.generate(text)
