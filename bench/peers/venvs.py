"""Python packages that are compared with: each in a virtual environment of its own, pinned, made at the first call.

Never in one process with lfmfast or with each other: they bring their own builds of libllama.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import modelgen

from bench import peers


@dataclass(frozen=True)
class Package:
    """A pinned package. `source`: it is compiled here, with the flags of the other peers."""

    name: str
    version: str
    source: bool = False

    @property
    def folder(self) -> Path:
        """Its virtual environment; another pin, interpreter or other flags give another one."""
        made_of = repr((sys.version_info[:2], peers.flags() if self.source else ()))
        return modelgen.bench_dir() / f"{self.name}-{self.version}-{hashlib.sha256(made_of.encode()).hexdigest()[:8]}"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


LLAMA_CPP_PYTHON = Package("llama-cpp-python", "0.3.36", source=True)
XLLAMACPP = Package("xllamacpp", "2026.10.11549")


def interpreter(package: Package) -> Path:
    """The interpreter of the package's environment, made if there is none yet (llama-cpp-python: minutes).

    Raises
    ------
    RuntimeError
        It can't be installed; says where pip's output is.
    """
    done = package.folder / "versions.json"
    if done.exists():
        return package.python
    log = package.folder / "install.log"
    print(f"installing {package.name} {package.version} (once; log: {log})", file=sys.stderr, flush=True)
    venv.create(package.folder, with_pip=True, clear=True)
    # Without SOURCE_DATE_EPOCH: with it ggml would build for plain x86-64.
    environment = {k: v for k, v in os.environ.items() if k not in ("SOURCE_DATE_EPOCH", "PYTHONPATH")}
    environment["CMAKE_ARGS"] = " ".join([*peers.flags(), "-DLLAVA_BUILD=OFF",
                                          f"-DCMAKE_PROJECT_llama_cpp_INCLUDE={Path(__file__).with_name('llama_cpp_python.cmake')}"])
    command = [str(package.python), "-m", "pip", "install", f"{package.name}=={package.version}"]
    command += ["--no-binary" if package.source else "--only-binary", package.name]
    with log.open("wb") as out:
        if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment).returncode:
            raise RuntimeError(f"{package.name} {package.version} could not be installed; see {log}")
    listed = subprocess.run([str(package.python), "-m", "pip", "list", "--format=json"], stdin=subprocess.DEVNULL,
                            capture_output=True, text=True, check=True)  # fmt: skip
    done.write_text(json.dumps({item["name"]: item["version"] for item in json.loads(listed.stdout)}, indent=1))
    return package.python
