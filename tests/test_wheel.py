"""The portable wheel on machines that did not build it: without a compiler, with another Debian, with old processors.

LFMFAST_WHEEL names a wheel that is there already; otherwise one is built, with LFMFAST_PORTABLE.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import needs
import oracle
import pytest

ROOT = Path(__file__).resolve().parent.parent
QUESTION, ANSWER = "Count from 1 to 12.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12"
MIB = 1 << 20
DEBIAN = {(3, 11): "bookworm", (3, 13): "trixie"}  # releases by the version of their Python, which is what a wheel is for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),  # with a cold compiler cache
    pytest.mark.skipif(sys.platform != "linux", reason="looks at ELF files, with Linux's tools"),
]
only_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="about x86-64")

FACTS = """
import json, lfmfast
try:
    print(json.dumps(lfmfast.build_info()))
except lfmfast.LfmfastError as error:
    print(json.dumps({"error": str(error)}))
"""


def run(*command: object, env: dict[str, str] | None = None, cwd: Path | None = None, timeout: float = 600) -> str:
    """What the command printed; it must end with status 0."""
    done = subprocess.run([*map(str, command)], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                          env=env, cwd=cwd, timeout=timeout)
    assert done.returncode == 0, f"{command}: status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@dataclass(frozen=True)
class Installed:
    """lfmfast somewhere: how its Python is called."""

    command: tuple[str, ...]
    model: str
    env: dict[str, str]
    cwd: Path

    def lfmfast(self, *arguments: str) -> str:
        return run(*self.command, "-m", "lfmfast", *arguments, env=self.env, cwd=self.cwd)

    def answer(self) -> str:
        return self.lfmfast("chat", "-m", self.model, "-t", "1", "--temp", "0", QUESTION).strip()

    def facts(self, **env: str) -> dict:
        return json.loads(run(*self.command, "-c", FACTS, env={**self.env, **env}, cwd=self.cwd))

    def on_cpu(self, name: str) -> Installed:
        """The same on an emulated processor."""
        return Installed((needs.program("qemu-x86_64"), "-cpu", name, *self.command), self.model, self.env, self.cwd)

    def check(self) -> dict:
        """That it works. What build_info() says."""
        assert self.answer() == ANSWER
        facts = self.facts()
        version = self.lfmfast("--version")
        assert version.startswith(f"lfmfast {facts['version']}\n") and facts["cpu_variant"] in version
        assert Path(self.model).name in self.lfmfast("info", self.model)
        return facts


@pytest.fixture(scope="session")
def build_dir(tmp_path_factory) -> Path:
    """Where the wheel was built: its libraries before their symbols were stripped."""
    if os.environ.get("LFMFAST_WHEEL"):
        pytest.skip("LFMFAST_WHEEL has no symbols")
    return tmp_path_factory.mktemp("portable")


@pytest.fixture(scope="session")
def wheel(request, tmp_path_factory) -> Path:
    ready = os.environ.get("LFMFAST_WHEEL")
    if ready:
        return Path(ready).resolve(strict=True)
    target = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", target, ROOT, "-Ccmake.define.LFMFAST_PORTABLE=ON",
        f"-Cbuild-dir={request.getfixturevalue('build_dir')}", timeout=3600)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def files(wheel, tmp_path_factory) -> Path:
    """The package as it lies in the wheel."""
    folder = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder / "lfmfast"


@pytest.fixture(scope="session")
def model(tmp_path_factory, lfm2_tiny_path) -> str:
    """The trained model with 8 bits a weight, so that our matrix products run."""
    path = tmp_path_factory.mktemp("model") / "lfm2-tiny-q8_0.gguf"
    oracle.quantize(lfm2_tiny_path, path, "Q8_0", 1)
    return str(path)


@pytest.fixture(scope="session")
def installed(wheel, model, tmp_path_factory) -> Installed:
    """In a fresh environment, where programs are only Python's."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", folder / "venv")
    run(folder / "venv/bin/python", "-m", "pip", "install", "--quiet", wheel)
    env = {"PATH": str(folder / "venv/bin"), "HOME": str(folder), "LANG": "C.UTF-8", "COLUMNS": "200"}
    return Installed((str(folder / "venv/bin/python"),), model, env, folder)


@pytest.fixture(scope="session")
def debian(wheel, model, tmp_path_factory) -> Iterator[Installed]:
    """In another Debian: Python, and what a minimal system has, but nothing of ours and no compiler."""
    release = DEBIAN.get(sys.version_info[:2])
    if release is None:
        pytest.skip(f"no release of Debian has Python {platform.python_version()}")
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if as_root and (not shutil.which("sudo") or subprocess.run([*as_root, "true"], capture_output=True).returncode):
        pytest.skip("debootstrap and chroot need root")
    folder = tmp_path_factory.mktemp("debian")
    root = folder / "root"
    # The two Pythons are of one version: what pip takes for this one fits that.
    run(sys.executable, "-m", "pip", "install", "--quiet", "--target", folder / "lfmfast", wheel)
    try:
        run(*as_root, needs.program("debootstrap"), "--variant=minbase", "--include=python3", release, root, timeout=1800)
        run(*as_root, "cp", "-r", folder / "lfmfast", model, root / "opt")
        env = ["PATH=/usr/sbin:/usr/bin", "PYTHONPATH=/opt/lfmfast", "LANG=C.UTF-8", "COLUMNS=200"]
        command = (*as_root, "chroot", str(root), "/usr/bin/env", "-i", *env, "/usr/bin/python3")
        yield Installed(command, f"/opt/{Path(model).name}", dict(os.environ), root)
    finally:
        run(*as_root, "rm", "-rf", "--one-file-system", root)


def libraries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.so") if "CMakeFiles" not in path.parts)


def variants(folder: Path) -> dict[str, Path]:
    """Libraries of ggml's CPU backend by their processors."""
    found = {path.stem.removeprefix("liblfmfast-ggml-cpu-"): path for path in folder.glob("liblfmfast-ggml-cpu-*.so")}
    assert len(found) > 1
    return found


# --- what is in it -------------------------------------------------------------------------------------------------------


def test_size(wheel):
    assert wheel.stat().st_size < 40 * MIB


def test_only_what_runs_is_in_it(files):
    assert sorted({path.suffix for path in files.rglob("*.*") if path.is_file()}) == [
        ".css", ".html", ".js", ".py", ".pyi", ".so", ".typed"]  # fmt: skip


def test_libraries_find_each_other_and_nothing_else(files):
    """By relative paths and by names that no other package's library has; the rest is of every Linux."""
    ours = {path.name for path in libraries(files)}
    system = re.compile(r"(libc|libm|libdl|libpthread|librt|libstdc\+\+|libgcc_s)\.so\.\d+|ld-linux.*")
    for path in libraries(files):
        entries = re.findall(r"\((\w+)\).*\[(.*)\]", run(needs.program("readelf"), "-dW", path))
        for tag, value in entries:
            if tag in ("RPATH", "RUNPATH"):
                assert value == "$ORIGIN", path.name
            if tag == "SONAME":
                assert value == path.name
            if tag == "NEEDED":
                assert value in ours or system.fullmatch(value), f"{path.name} needs {value}"
        assert not [name for name in ours & {v for t, v in entries if t == "NEEDED"} if not name.startswith("liblfmfast-")]


def test_auditwheel(wheel, tmp_path):
    """The wheel becomes one for older systems by its name alone: no library has to be put in, none is of musl."""
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel, env=env)
    tag = re.search(rf'"(manylinux_2_\d+_{platform.machine()})"', shown)
    assert tag, shown
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", tag[1], "-w", tmp_path, wheel, env=env)
    (repaired,) = tmp_path.glob("*.whl")
    assert tag[1] in repaired.name
    names, repaired_names = (sorted(zipfile.ZipFile(path).namelist()) for path in (wheel, repaired))
    for listed in (names, repaired_names):
        listed[:] = [name for name in listed if ".dist-info" not in name and not name.endswith("/")]
    assert repaired_names == names


# --- instructions --------------------------------------------------------------------------------------------------------

# Mnemonics of instructions that came with AVX or later: v..., AVX-512's masks, BMI.
AVX = re.compile(r"\t(v(?!er[rw]\b)\w+|k(mov|and|or|xor|not|test|shift|unpck|add|xnor)\w*|"
                 r"andn|bextr|bls(i|r|msk)|bzhi|mulx|p(dep|ext)|rorx|s[ah][lr]x)\b")
# Functions that are called where the processor has what they need: the sampler's, and our matrix products.
CHOSEN = re.compile(r"lfmfast::\(anonymous namespace\)::(avx2_|avx512_|max_of)|"
                    r"lfmfast::kernels::\(anonymous namespace\)::\w+<lfmfast::kernels::\(anonymous namespace\)::(exact_)?vec|"
                    r"lfmfast::kernels::\(anonymous namespace\)::(tiled_product|product_in_tiles|panel_product)\b")
# What runs before a variant is known to suit the processor.
EARLY = re.compile(r"_GLOBAL__sub_I|cpuid_x86|ggml_backend_score|lfmfast_cpu_score|ggml_cpu_has_|"
                   r"lfmfast::kernels::(active|available)")


def functions_with_avx(path: Path) -> dict[str, str]:
    """Functions of a library that have such instructions, and the first one."""
    found: dict[str, str] = {}
    name = ""
    command = [needs.program("objdump"), "-dC", "--no-show-raw-insn", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith(" "):
                if name not in found and AVX.search(line):
                    found[name] = line.strip()
            elif line.endswith(">:\n"):
                name = line.split("<", 1)[1][:-3]
    assert process.returncode == 0
    return found


@only_x86
def test_old_processors_meet_no_new_instruction(wheel, build_dir):
    found = {path.name.split(".")[0]: functions_with_avx(path) for path in libraries(build_dir)}
    plain = {name: found.pop(name) for name in sorted(found) if not re.search(r"ggml-cpu-(?!x64|sse42)", name)}
    assert {"liblfmfast-ggml-cpu-x64", "liblfmfast-ggml-base", "liblfmfast-llama", "liblfmfast-engine", "_model"} <= set(plain)
    assert {name: f for name, functions in plain.items() for f in functions.items() if not CHOSEN.search(f[0])} == {}
    dispatching = {"liblfmfast-engine", "liblfmfast-ggml-cpu-x64", "liblfmfast-ggml-cpu-sse42"}
    assert {name for name, functions in plain.items() if functions} == dispatching
    assert {name: f for name, functions in found.items() for f in functions.items() if EARLY.search(f[0])} == {}
    assert min(map(len, found.values())) > 10, "objdump finds nothing where there must be much"


# --- where it runs -------------------------------------------------------------------------------------------------------


def test_without_a_compiler(installed):
    assert not any(shutil.which(name, path=installed.env["PATH"]) for name in ("cc", "c++", "gcc", "g++", "clang", "ld"))
    facts = installed.check()
    assert facts["cpu_variant"] != "built in"
    if "AVX2" in facts["cpu_features_found"]:
        assert "-mavx2" in facts["cpu_flags"].split() and "AVX2" in facts["cpu_features_compiled"]
        assert facts["kernels"].startswith(("avx", "amx")) and "q8_0" in facts["kernel_types"]


def test_another_debian(debian):
    assert not list(debian.cwd.glob("usr/bin/*g++*")) and not list(debian.cwd.glob("usr/lib/*/libgomp*"))
    assert debian.check()["cpu_variant"] != "built in"


@only_x86
@pytest.mark.parametrize(("cpu", "has", "variant", "kernels"), [
    ("Nehalem", "SSE4_2", "sse42", "none"),
    ("IvyBridge", "AVX", "ivybridge", "none"),
    ("Haswell", "AVX2", "haswell", "avx2"),
    ("Skylake-Server", "AVX2", "haswell", "avx2"),  # of which qemu has no AVX-512
])  # fmt: skip
def test_old_processors(installed, cpu, has, variant, kernels):
    old = installed.on_cpu(cpu)
    facts = old.facts()
    if has not in facts["cpu_features_found"]:
        pytest.skip(f"this qemu's {cpu} has no {has}")
    assert (facts["cpu_variant"], facts["kernels"]) == (variant, kernels)
    assert old.answer() == ANSWER


def test_every_variant(installed, files, tmp_path):
    """Alone, each gives the answer, with our matrix products, or says that it is not for this processor."""
    shutil.copytree(files, tmp_path / "lfmfast")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    for path in variants(tmp_path / "lfmfast").values():
        path.rename(hidden / path.name)
    alone = Installed(installed.command, installed.model, {**installed.env, "PYTHONPATH": str(tmp_path)}, tmp_path)
    assert "there is none" in alone.facts()["error"]
    kernels, flags = installed.facts()["kernels"], set()
    for name, path in variants(hidden).items():
        place = path.rename(tmp_path / "lfmfast" / path.name)
        facts = alone.facts()
        if "error" in facts:
            assert f"\n  {name}: not for this CPU" in facts["error"]
        else:
            assert (facts["cpu_variant"], facts["kernels"]) == (name, kernels)
            assert alone.facts(LFMFAST_KERNELS="0")["kernels"] == "none"
            assert alone.answer() == ANSWER
            flags.add(facts["cpu_flags"])
        place.rename(path)
    assert len(flags) > 1
    broken = tmp_path / "lfmfast" / next(iter(variants(hidden).values())).name
    broken.write_bytes(b"no library")
    assert str(broken) in alone.facts()["error"]
