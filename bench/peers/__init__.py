"""llama.cpp's own programs, built once from the same source and with the same flags as lfmfast."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import modelgen
import oracle

# What CMakeLists.txt of lfmfast sets. LFMFAST_BENCH_CMAKE_ARGS adds to it, for a package that was built with more.
FLAGS = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DGGML_OPENMP=OFF")


def flags() -> list[str]:
    """CMake definitions of the peers' build."""
    return [*FLAGS, *os.environ.get("LFMFAST_BENCH_CMAKE_ARGS", "").split()]


def build() -> str:
    """llama.cpp's build number of that source."""
    found = re.search(r'^build\s*=\s*"(\d+)"', (oracle.ROOT / "extern" / "llama_cpp.toml").read_text("utf8"), re.M)
    assert found is not None
    return found[1]


def _pin() -> str:
    parts = [oracle.ROOT / "extern" / "llama_cpp.toml", oracle.ROOT / "cmake" / "no_amx.cmake"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in parts) + repr(flags()).encode()).hexdigest()[:10]


def _tool(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if not found:
        raise SystemExit(f"{name} is not installed: pip install 'lfmfast[bench]'")
    return found


def program(name: str) -> Path:
    """Path of "llama-bench", "llama-server" or "llama-batched-bench", building it if this is the first time (minutes)."""
    build = modelgen.bench_dir() / f"peers-{_pin()}"
    path = build / "bin" / (name + (".exe" if sys.platform == "win32" else ""))
    if path.exists():
        return path
    build.mkdir(parents=True, exist_ok=True)
    # Without SOURCE_DATE_EPOCH: with it ggml would build for plain x86-64.
    environment = {k: v for k, v in os.environ.items() if k != "SOURCE_DATE_EPOCH"}
    log = build / "build.log"
    print(f"building {name} (once; log: {log})", file=sys.stderr, flush=True)
    with log.open("ab") as out:
        for command in ([_tool("cmake"), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}", *flags(),
                         f"-Dllama_dir={oracle.llama_cpp_dir()}", "-S", str(Path(__file__).parent), "-B", str(build)],
                        [_tool("cmake"), "--build", str(build), "--target", name]):
            if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment).returncode:
                raise SystemExit(f"{name} could not be built; see {log}")
    return path
