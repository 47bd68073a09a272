"""Models for the tests. All are opened on the CPU, so that a run means the same on every machine; tiny ones with one thread."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import loops
import modelgen
import oracle
import pytest

oracle.use_installed_package()

# A shell lets its background jobs ignore Ctrl-C, and so would every process that a test starts.
for name in ("SIGINT", "SIGQUIT", "SIGHUP", "SIGTERM"):
    number = getattr(signal, name, None)
    if number is not None and signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)

if TYPE_CHECKING:
    from lfmfast import Model

FIXTURE = modelgen.FIXTURE
OPEN: dict[str, Any] = {"n_ctx": 2048, "n_threads": 1, "n_gpu_layers": 0}


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the generated models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def lfm2_tiny_path() -> Path:
    """The trained LFM2 model, F16; tests/data/lfm2-tiny/README.md lists what it can do."""
    return FIXTURE / "lfm2-tiny-f16.gguf"


@pytest.fixture(scope="session")
def lfm2_tiny_f32_path(models_dir: Path, lfm2_tiny_path: Path) -> Path:
    """The same weights as F32."""
    return modelgen.copy_model(lfm2_tiny_path, models_dir / "lfm2-tiny-f32.gguf", f32=True, metadata={"general.file_type": 0})


@pytest.fixture(scope="session")
def reference() -> dict[str, Any]:
    """What transformers makes of the trained model: `cases` (prompt, ids, greedy answer, logits), `tools`, `tokenizer`."""
    loaded: dict[str, Any] = json.loads((FIXTURE / "reference.json").read_text("utf8"))
    return loaded


@pytest.fixture(scope="session")
def tiny_f32_path(models_dir: Path) -> Path:
    """Random LFM2, 5 layers, F32."""
    return modelgen.write_model(models_dir / "tiny-f32.gguf", "tiny", dtype="F32")


@pytest.fixture(scope="session")
def tiny_f16_path(models_dir: Path) -> Path:
    """The same shape, F16."""
    return modelgen.write_model(models_dir / "tiny-f16.gguf", "tiny")


@pytest.fixture(scope="session")
def tiny_q4_path(models_dir: Path) -> Path:
    """Random LFM2, 256 wide, Q4_K_M: goes through ggml's repacked kernels where the machine has them."""
    return modelgen.write_model(models_dir / "tiny-q4_k_m.gguf", "tiny-wide", quantize="Q4_K_M")


@pytest.fixture(scope="session")
def tiny_moe_path(models_dir: Path) -> Path:
    """Random LFM2-MoE, F32, special tokens at the end of the vocabulary, template of LFM2.5-8B-A1B."""
    return modelgen.write_model(models_dir / "tiny-moe.gguf", "tiny-moe", dtype="F32")


@pytest.fixture(scope="session")
def tiny_dense_path(models_dir: Path) -> Path:
    """Random llama, F32, no BOS, ChatML template: not of the LFM2 family and not hybrid."""
    return modelgen.write_model(models_dir / "tiny-dense.gguf", "tiny-dense", dtype="F32")


@pytest.fixture(scope="session")
def slow_model_path(models_dir: Path) -> Path:
    """Random LFM2 of 130 million parameters: work that takes long enough to be watched."""
    return modelgen.write_model(models_dir / "slow.gguf", "tiny", n_embd=1024, n_ff=8192, name="Slow")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, a real model: what `demo` falls back to, from the same cache."""
    from lfmfast import _demo

    path = _demo.path()
    return path if path.exists() else _demo.fetch(progress=False)


@pytest.fixture(scope="session")
def lfm2_tiny(lfm2_tiny_path: Path) -> Iterator[Model]:
    """The trained model, opened once."""
    yield from _opened(lfm2_tiny_path)


@pytest.fixture(scope="session")
def tiny_f32(tiny_f32_path: Path) -> Iterator[Model]:
    """Random LFM2, opened once, KV cache in F32."""
    yield from _opened(tiny_f32_path, type_k="f32", type_v="f32")


@pytest.fixture(scope="session")
def tiny_moe(tiny_moe_path: Path) -> Iterator[Model]:
    """Random LFM2-MoE, opened once."""
    yield from _opened(tiny_moe_path)


@pytest.fixture(scope="session")
def tiny_dense(tiny_dense_path: Path) -> Iterator[Model]:
    """Random llama, opened once."""
    yield from _opened(tiny_dense_path)


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[Model]:
    """SmolLM2, opened once."""
    yield from _opened(smollm2_path, n_threads=2)


@pytest.fixture(params=loops.KINDS)
def loop_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How news of requests come into an event loop; for loops.new_loop()."""
    monkeypatch.setattr("lfmfast._dispatch._no_descriptors", request.param == "thread")
    return str(request.param)


@pytest.fixture
def run_async(loop_kind: str) -> loops.Run[Any]:
    """Runs a coroutine function in a loop of each kind."""
    return lambda main: loops.run(loop_kind, main)


def _opened(path: Path, **options: Any) -> Iterator[Model]:
    from lfmfast import Model

    with Model(path, **{**OPEN, **options}) as model:
        yield model
