"""llama.cpp's own library through ctypes: the oracle of tests, and the quantiser of generated models.

Everything runs in a process of its own, so that a fault there, its log output and its global state never reach a test.
The library is the one inside the installed lfmfast; LFMFAST_ORACLE_LIB names another build of the pinned source.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

LIBRARY_NAMES = ("liblfmfast-llama.so", "liblfmfast-llama.dylib", "lfmfast-llama.dll")
ROOT = Path(__file__).resolve().parent.parent

# The values of llama_ftype in llama.h that are used here.
FTYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18,
          "IQ4_NL": 25, "BF16": 32}


class QuantizeParams(ctypes.Structure):
    """llama_model_quantize_params; `check_layout` compares it with llama.h."""

    _fields_ = (
        ("nthread", ctypes.c_int32),
        ("ftype", ctypes.c_int),
        ("output_tensor_type", ctypes.c_int),
        ("token_embedding_type", ctypes.c_int),
        ("allow_requantize", ctypes.c_bool),
        ("quantize_output_tensor", ctypes.c_bool),
        ("only_copy", ctypes.c_bool),
        ("pure", ctypes.c_bool),
        ("keep_split", ctypes.c_bool),
        ("dry_run", ctypes.c_bool),
        ("imatrix", ctypes.c_void_p),
        ("kv_overrides", ctypes.c_void_p),
        ("tt_overrides", ctypes.c_void_p),
        ("prune_layers", ctypes.c_void_p),
        ("max_buf_size", ctypes.c_size_t),
    )


def llama_cpp_dir() -> Path:
    """The llama.cpp source that lfmfast is built from."""
    return Path(os.environ.get("LFMFAST_LLAMA_CPP_DIR") or ROOT / "extern" / "llama.cpp")


def use_installed_package() -> None:
    """Take the repository off sys.path where its lfmfast/ is source without native modules, and would hide the installed
    package: `python -m` puts it there."""
    if not any((ROOT / "lfmfast").glob("_model.*.[sp][oy]*")):
        sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]


def check_layout(header: str) -> None:
    """Raise RuntimeError where `QuantizeParams` or `FTYPES` differ from the text of llama.h."""
    body = re.search(r"typedef struct llama_model_quantize_params \{(.*?)\} llama_model_quantize_params;", header, re.S)
    if body is None:
        raise RuntimeError("llama.h has no llama_model_quantize_params")
    kinds = {"int32_t": ctypes.c_int32, "bool": ctypes.c_bool, "size_t": ctypes.c_size_t}
    fields = []
    for line in re.findall(r"^\s*([^/\n;]+);", body[1], re.M):
        declared, name = line.rsplit(maxsplit=1)
        kind = ctypes.c_int if declared.startswith("enum") else ctypes.c_void_p if "*" in line else kinds.get(declared)
        fields.append((name.lstrip("*"), kind))
    if tuple(fields) != QuantizeParams._fields_:
        raise RuntimeError(f"llama_model_quantize_params is {fields} in llama.h")
    for name, value in FTYPES.items():
        found = re.search(rf"LLAMA_FTYPE_(?:ALL|MOSTLY)_{name}\s*=\s*(\d+)", header)
        if found is None or int(found[1]) != value:
            raise RuntimeError(f"{name} is not {value} in llama.h")


def library_path() -> Path:
    """The shared library to load."""
    named = os.environ.get("LFMFAST_ORACLE_LIB")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("lfmfast")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    for path in (folder / name for folder in folders for name in LIBRARY_NAMES):
        if path.exists():
            return path
    raise RuntimeError(f"no {LIBRARY_NAMES[0]} in {[str(f) for f in folders]}: install lfmfast, or set LFMFAST_ORACLE_LIB")


def load() -> ctypes.CDLL:
    """The library, with its backend initialised. Only for a process that does nothing else."""
    header = llama_cpp_dir() / "include" / "llama.h"
    if header.exists():
        check_layout(header.read_text("utf8"))
    path = library_path()
    # Its neighbours first, and visible to it: a build without RPATH finds them this way too.
    for part in ("ggml-base", "ggml-cpu", "ggml"):
        neighbour = path.with_name(path.name.replace("llama", part))
        if neighbour.exists():
            ctypes.CDLL(str(neighbour), mode=ctypes.RTLD_GLOBAL)
    lib = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    lib.llama_model_quantize_default_params.restype = QuantizeParams
    lib.llama_model_quantize.restype = ctypes.c_uint32
    lib.llama_model_quantize.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(QuantizeParams))
    lib.llama_backend_init()
    return lib


def quantize(source: Path, target: Path, ftype: str, n_threads: int = 0) -> None:
    """Quantise a GGUF with llama_model_quantize. `n_threads` 0: all cores."""
    if ftype not in FTYPES:
        raise ValueError(f"quantisation {ftype!r} is not one of {', '.join(FTYPES)}")
    call("quantize", str(source), str(target), ftype, str(n_threads))


def call(*arguments: str, timeout: float = 3600) -> str:
    """Run this file with `arguments` in a process of its own; returns what it printed."""
    done = subprocess.run([sys.executable, str(Path(__file__).resolve()), *arguments], stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, errors="replace", timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"oracle {arguments}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def main(argv: list[str] | None = None) -> int:
    """The process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("library", help="print the path of the library, after loading it")
    command = commands.add_parser("quantize")
    command.add_argument("source")
    command.add_argument("target")
    command.add_argument("ftype", choices=FTYPES)
    command.add_argument("n_threads", type=int)
    args = parser.parse_args(argv)
    lib = load()
    if args.command == "library":
        print(library_path())
        return 0
    params = lib.llama_model_quantize_default_params()
    params.nthread, params.ftype = args.n_threads, FTYPES[args.ftype]
    return int(lib.llama_model_quantize(os.fsencode(args.source), os.fsencode(args.target), ctypes.byref(params)))


if __name__ == "__main__":
    sys.exit(main())
