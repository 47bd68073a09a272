"""The wheel of lfmfast-cuda13 that LFMFAST_CUDA_WHEEL names: what is in it, and what it does on this machine.

To compile one takes long and needs no GPU: see plugins/cuda13/README.md.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import child
import needs
import pytest

import lfmfast

WHEEL = Path(os.environ.get("LFMFAST_CUDA_WHEEL", ""))
LIBRARY = "lfmfast_cuda13/liblfmfast-ggml-cuda.so"

pytestmark = pytest.mark.skipif(not WHEEL.name, reason="LFMFAST_CUDA_WHEEL names no wheel")


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and NVIDIA's packages beside this lfmfast: its library is looked up by relative paths."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    with zipfile.ZipFile(WHEEL) as wheel:
        needed = _metadata(wheel).get_all("Requires-Dist") or []
    subprocess.run([*command, "--no-deps", str(WHEEL)], check=True, timeout=600)
    subprocess.run([*command, *(name for name in needed if not name.startswith("lfmfast"))], check=True, timeout=1200)
    (folder / "lfmfast").symlink_to(Path(lfmfast.__file__).parent)
    return folder


def _metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return message_from_bytes(wheel.read(name))


def test_it_holds_the_backend_and_nothing_of_others():
    with zipfile.ZipFile(WHEEL) as wheel:
        libraries = [name for name in wheel.namelist() if ".so" in name]
        metadata = _metadata(wheel)
        sizes = sum(item.compress_size for item in wheel.infolist())
    assert libraries == [LIBRARY]
    assert metadata["Version"] == lfmfast.__version__
    needed = metadata.get_all("Requires-Dist") or []
    assert f"lfmfast=={lfmfast.__version__}" in needed
    assert {re.split(r"[<>=!~]", name)[0] for name in needed} == {"lfmfast", "nvidia-cuda-runtime", "nvidia-cublas"}
    assert WHEEL.name.split("-")[2:4] == ["py3", "none"]
    assert sizes < 100 << 20  # what PyPI takes


def test_its_library_needs_what_the_packages_and_the_driver_have(installed: Path):
    command = [needs.program("readelf"), "-d", str(installed / LIBRARY)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", shown))
    assert {"liblfmfast-ggml-base.so", "libcudart.so.13", "libcublas.so.13", "libcuda.so.1"} <= needed
    system = ("libc.so.", "libm.so.", "libdl.so.", "librt.so.", "libpthread.so.", "libgcc_s.so.", "libstdc++.so.", "ld-linux")
    assert not [name for name in needed if not name.startswith((*system, "liblfmfast-", "libcu"))]
    (path,) = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.+)\]", shown)
    assert path == "$ORIGIN/../lfmfast:$ORIGIN/../nvidia/cu13/lib"


def test_it_computes_on_the_gpu_or_says_why_not(installed: Path, lfm2_tiny_path: Path):
    script = """
    import json, sys, warnings
    from lfmfast import Model, build_info
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Model(sys.argv[1], n_ctx=256, n_threads=1) as model:
            question = [{"role": "user", "content": "What is the capital of France?"}]
            text = model.generate(question, temperature=0, max_tokens=12).text
            on_cpu = model.native.on_cpu
    print(json.dumps([text, on_cpu, [str(w.message) for w in caught], build_info()["plugins"]]))
    """
    text, on_cpu, warnings, (plugin,) = json.loads(child.run(script, lfm2_tiny_path, PYTHONPATH=str(installed)))
    assert text == "The capital of France is Paris."
    name = f"lfmfast-cuda13 {lfmfast.__version__}"
    if has_driver():
        assert (on_cpu, warnings) == (False, [])
        assert plugin.startswith(f"{name}: CUDA0")
    else:
        assert on_cpu
        (warning,) = warnings
        assert warning.startswith(f"the CPU is used. {name} can't be used: there is no NVIDIA driver (libcuda.so.1: ")
