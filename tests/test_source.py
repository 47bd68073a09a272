"""Rules about the source itself: layers, sizes, tools. They need the repository; the tools also the installed package."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "lfmfast"
ENGINE = PACKAGE / "engine"
SKIPPED = {"build", "dist", "llama.cpp", ".venv", ".git", "data", "wheelhouse"}

# The files that may include headers of llama.cpp. Everything else in engine/ is pure and tested without a model.
TOUCHES_LLAMA = {"backend.cpp", "build_info.cpp", "context.cpp", "exact.cpp", "gguf_header.cpp", "model.cpp", "plugin.cpp"}

# A module may import modules of a lower number, and of its own number. Plain modules (0) never import native ones.
PLAIN, NATIVE, LOWLEVEL, MODEL, CHAT, ASYNC, BATCH, SERVER, CLI = range(9)
LAYERS = {"lowlevel": LOWLEVEL, "stream": LOWLEVEL, "_build": LOWLEVEL, "_backends": LOWLEVEL, "deterministic": LOWLEVEL,
          "_many": MODEL, "_request": MODEL, "model_file": MODEL, "prefix": MODEL, "model": MODEL, "openai_shapes": MODEL,
          "chat": CHAT, "run_tools": CHAT, "aio": ASYNC, "_dispatch": ASYNC, "batch": BATCH, "ray": BATCH, "server": SERVER,
          "cli": CLI, "__main__": CLI}
# Model.chat() makes a Chat, Chat.astream() an AsyncStream: imported when called. A Chat knows the request that has its turn.
UPWARD = {("model", "chat"), ("chat", "aio"), ("chat", "_dispatch")}


def files(*suffixes: str) -> list[Path]:
    """Own files with one of the endings, no generated or fetched ones."""
    found = [p for p in ROOT.rglob("*") if p.suffix in suffixes and p.is_file()]
    return [p for p in found if not SKIPPED & set(p.relative_to(ROOT).parts)]


def native_modules() -> list[str]:
    return sorted(p.stem for p in PACKAGE.glob("*.pyx"))


def layer(module: str) -> int:
    """Layer of `lfmfast.<module>`."""
    top = module.split(".")[0]
    return NATIVE if top in native_modules() else LAYERS.get(top, PLAIN)


def imports(path: Path) -> set[str]:
    """Names below `lfmfast` that a Python file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf8"))):
        if isinstance(node, ast.Import):
            found |= {a.name.removeprefix("lfmfast.") for a in node.names if a.name.startswith("lfmfast.")}
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).with_suffix("").parts[:-node.level] if node.level else ()
            name = ".".join((*package, node.module or "")).strip(".")
            if name == "lfmfast":
                found |= {a.name for a in node.names}
            elif name.startswith("lfmfast."):
                found.add(name.removeprefix("lfmfast."))
    return found


def python_modules() -> list[Path]:
    return [p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py"]


def own_name(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def test_imports_point_down():
    wrong = [f"{path.relative_to(ROOT)} imports lfmfast.{name}" for path in python_modules() for name in sorted(imports(path))
             if layer(name) > layer(own_name(path)) and (own_name(path), name) not in UPWARD]
    assert not wrong


def test_plain_modules_and_the_server_import_nothing_native():
    wrong = [f"{path.relative_to(ROOT)} imports lfmfast.{name}" for path in python_modules() for name in sorted(imports(path))
             if layer(name) == NATIVE and layer(own_name(path)) in (PLAIN, SERVER, BATCH)]
    assert not wrong


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text("utf8"), re.M)


def test_only_some_engine_files_touch_llama_cpp():
    touching = {p.relative_to(ENGINE).as_posix() for p in ENGINE.rglob("*") if p.suffix in (".cpp", ".h")
                and any(re.match(r"(llama|gguf|ggml[a-z-]*)(-cpp)?\.h$", name.rsplit("/", 1)[-1]) for name in includes(p))}
    assert touching <= TOUCHES_LLAMA


def test_no_python_in_the_engine():
    folders = [d for d in (ENGINE, PACKAGE / "kernels") if d.exists()]
    assert ENGINE in folders
    wrong = [str(p) for d in folders for p in d.rglob("*") if p.suffix in (".cpp", ".h") and "Python.h" in includes(p)]
    assert not wrong


def test_files_are_short():
    limit = 500
    lengths = {p: len(p.read_text("utf8").splitlines()) for p in files(".py", ".pyi", ".pyx", ".pxd", ".cpp", ".h", ".cmake")}
    assert not {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > limit}


def test_every_native_module_has_a_stub():
    assert native_modules()
    assert not [name for name in native_modules() if name != "_error" and not (PACKAGE / f"{name}.pyi").exists()]


def committed_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [p for p in (ROOT / name for name in listed.stdout.split("\0") if name) if p.is_file()]


def test_no_machine_paths_and_no_registry_hosts():
    # Written in parts, so that this file does not contain what it looks for.
    machine = "|".join(("/" + name + "/") for name in ("tmp", "work", "root", "farm")) + "|" + r"\.\./" + "shared"
    hosts = r"\b(?:" + "|".join(rf"{name}\.org" for name in ("pypi", "pythonhosted", "anaconda", "conda-forge")) + ")"
    pattern = re.compile(f"(?<![\\w.}}])(?:{machine})|{hosts}")
    wrong = []
    for path in committed_files():
        try:
            lines = path.read_text("utf8").splitlines()
        except UnicodeDecodeError:
            continue
        where = path.relative_to(ROOT)
        wrong += [f"{where}:{n}: {line.strip()[:120]}" for n, line in enumerate(lines, 1) if pattern.search(line)]
    assert not wrong


def test_every_seq_rm_uses_its_result():
    # A recurrent state can't be cut: seq_rm says so only in its result.
    wrong = []
    for path in files(".cpp", ".h", ".pyx"):
        for n, line in enumerate(path.read_text("utf8").splitlines(), 1):
            if re.match(r"\s*(?:\(void\)\s*|static_cast<void>\()?(?:[\w\[\]]+(?:\(\))?(?:->|\.|::))*\w*seq_rm\s*\(", line):
                wrong.append(f"{path.relative_to(ROOT)}:{n}: {line.strip()}")
    for path in files(".py"):
        wrong += [f"{path.relative_to(ROOT)}:{node.lineno}" for node in ast.walk(ast.parse(path.read_text("utf8")))
                  if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
                  and getattr(node.value.func, "attr", None) == "seq_rm" and not expects_error(path, node.lineno)]
    assert not wrong


def expects_error(path: Path, line: int) -> bool:
    """Whether the line stands alone below `with pytest.raises`."""
    return "pytest.raises" in "".join(path.read_text("utf8").splitlines()[max(0, line - 2):line])


def test_nogil_blocks_hold_one_call():
    wrong = []
    for path in files(".pyx"):
        lines = path.read_text("utf8").splitlines()
        for n, line in enumerate(lines):
            if line.strip() == "with nogil:":
                indent = len(line) - len(line.lstrip())
                body = []
                for following in lines[n + 1:]:
                    depth = len(following) - len(following.lstrip())
                    if following.strip() and depth <= indent:
                        break
                    text = following.strip()  # letting a pointer go is no call of its own
                    if text and not text.startswith("#") and not text.endswith(".reset()") and depth == (body or [depth])[0]:
                        body.append(depth)
                if len(body) > 1:
                    wrong.append(f"{path.relative_to(ROOT)}:{n + 1}: {len(body)} statements")
    assert not wrong


def run(*arguments: str, cwd: Path = ROOT) -> None:
    # cython-lint looks for pycodestyle on PATH.
    environment = {**os.environ, "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace", timeout=500, env=environment)
    if done.returncode:
        pytest.fail(done.stdout[-8000:], pytrace=False)


def test_ruff():
    run("-m", "ruff", "check", "--no-cache", str(ROOT))


def test_cython_lint():
    lint = "import sys; from cython_lint.cython_lint import main; sys.exit(main())"
    run("-c", lint, *(str(p) for p in files(".pyx", ".pxd")))


@pytest.mark.slow
def test_mypy(tmp_path):
    run("-m", "mypy", "--cache-dir", str(tmp_path), "--config-file", str(ROOT / "pyproject.toml"))


@pytest.mark.slow
def test_stubs_match_the_native_modules(tmp_path):
    modules = [f"lfmfast.{name}" for name in native_modules() if name != "_error"]
    allowed = tmp_path / "allowed.txt"  # what Cython adds, and __cinit__, which has no signature at run time
    allowed.write_text(r"""
        lfmfast\..*\.__(reduce|setstate)_cython__
        lfmfast\._\w+\.__(test|pyx_capi|reduce_cython|setstate_cython)__
        lfmfast\._\w+\.\w+\.__init__
    """)
    run("-m", "mypy.stubtest", "--concise", "--ignore-disjoint-bases", "--ignore-unused-allowlist", "--allowlist", str(allowed),
        *modules, cwd=tmp_path)
