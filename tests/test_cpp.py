"""C++ unit tests of the pure files under ASan and UBSan, under TSan where threads matter, and on an emulated Arm CPU."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import needs
import pytest

HERE = Path(__file__).resolve().parent / "cpp"
TESTS = sorted(path.stem for path in HERE.glob("test_*.cpp"))
THREADED = [name for name in TESTS if "#include <thread>" in (HERE / f"{name}.cpp").read_text("utf8")]
COMPILER = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


def tool(name: str) -> str:
    """cmake or ninja: of the environment's packages, or of the system."""
    folder = Path(sys.executable).parent
    found = shutil.which(name, path=str(folder)) or shutil.which(name)
    assert found, f"{name} is not installed"
    return found


def run(*command: str, env: dict[str, str] | None = None, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace", timeout=timeout, env={**os.environ, **(env or {})})


def build(folder: Path, sanitize: str, targets: list[str], *options: str) -> Path:
    done = run(tool("cmake"), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DCMAKE_CXX_COMPILER={COMPILER}",
               f"-DLFMFAST_SANITIZE={sanitize}", *options, "-S", str(HERE), "-B", str(folder))
    assert done.returncode == 0, done.stdout
    done = run(tool("cmake"), "--build", str(folder), "--parallel", "2", "--target", *targets, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:]
    return folder


def check(program: Path) -> None:
    # verify_asan_link_order: the runtime must not mind what else the environment preloads.
    options = {"ASAN_OPTIONS": "verify_asan_link_order=0:detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1",
               "TSAN_OPTIONS": "halt_on_error=1"}
    done = run(str(program), env=options)
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    return build(tmp_path_factory.mktemp("cpp"), "address,undefined", TESTS)


@pytest.fixture(scope="module")
def thread_programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tsan")
    probe = folder / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    built = run(COMPILER, "-fsanitize=thread", "-o", str(folder / "probe"), str(probe))
    if built.returncode or run(str(folder / "probe")).returncode:
        pytest.skip("ThreadSanitizer does not run on this machine")
    return build(folder / "build", "thread", THREADED)


@pytest.fixture(scope="module")
def arm_programs(tmp_path_factory):
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux's user-mode emulation")
    options = {"SYSTEM_NAME": "Linux", "SYSTEM_PROCESSOR": "aarch64", "CXX_COMPILER": needs.program("aarch64-linux-gnu-g++"),
               "EXE_LINKER_FLAGS": "-static"}
    return build(tmp_path_factory.mktemp("arm"), "", TESTS, *(f"-DCMAKE_{key}={value}" for key, value in options.items()))


def run_on_arm(cpu: str, program: Path) -> str:
    done = run(needs.program("qemu-aarch64", "qemu-aarch64-static"), "-cpu", cpu, str(program))
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", TESTS)
def test_under_asan_and_ubsan(programs, name):
    check(programs / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", THREADED)
def test_under_tsan(thread_programs, name):
    check(thread_programs / name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TESTS if name != "test_kernels"])
def test_on_arm(arm_programs, name):
    run_on_arm("max", arm_programs / name)


@pytest.mark.slow
@pytest.mark.parametrize(("cpu", "sets"), [("max", ["i8mm", "dotprod"]), ("neoverse-n1", ["dotprod"]), ("cortex-a72", [])])
def test_kernels_of_arm_cpus(arm_programs, cpu, sets):
    tested = run_on_arm(cpu, arm_programs / "test_kernels")
    assert [line.removesuffix(": tested") for line in tested.splitlines() if line.endswith(": tested")] == sets
