"""Plugins: how they are found, what a GPU that one brings is used for, and what is said when it can't be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import child
import needs
import pytest

import lfmfast

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path(lfmfast.__file__).parent
GGML = ROOT / "extern/llama.cpp/ggml"
PARIS = "The capital of France is Paris."

# What is printed: a dict of the warnings, the facts about the build, and what `ask` found.
SCRIPT = """
import ctypes, json, sys, warnings
from lfmfast import Model, build_info

def computed(library):
    return ctypes.CDLL(library).toy_gpu_computed()

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    found = ask(*sys.argv[1:])
info = build_info()
print(json.dumps({"warnings": [str(w.message) for w in caught], "devices": info["devices"], "plugins": info["plugins"],
                  "found": found}))
"""


def ask(script: str, *arguments: object, **environment: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(child.run(textwrap.dedent(script) + SCRIPT, *arguments, **environment))
    return result


# One answer, by what Model() decides itself.
ANSWER = """
def ask(path, *options):
    with Model(path, n_ctx=256, n_threads=1, **dict(option for option in map(eval, options))) as model:
        return model.generate(FRANCE, temperature=0, max_tokens=12).text
"""


def compile_library(path: Path, *sources: str | Path, defines: tuple[str, ...] = (), links: tuple[str, ...] = ()) -> Path:
    compiler = os.environ.get("CXX") or needs.program("c++", "g++", "clang++")
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{GGML / 'include'}", f"-I{GGML / 'src'}", "-o", str(path),
               *(f"-D{name}" for name in defines), *map(str, sources), f"-L{PACKAGE}", *links]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return path


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="builds libraries as Linux has them")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of a GPU that is none; see toy_gpu.cpp."""
    folder = tmp_path_factory.mktemp("toy")
    return compile_library(folder / "libtoy.so", Path(__file__).parent / "cpp/toy_gpu.cpp",
                           links=("-llfmfast-ggml-base", "-llfmfast-ggml"))  # fmt: skip


Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Makes a folder with an installed plugin; returns it, for PYTHONPATH."""

    def write(offer: dict[str, Any] | str, name: str = "toy-plugin") -> str:
        module = name.replace("-", "_")
        source = offer if isinstance(offer, str) else f"def backend():\n    return {offer!r}\n"
        (tmp_path / f"{module}.py").write_text(source, "utf8")
        metadata = tmp_path / f"{module}-3.2.1.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.2.1\n", "utf8")
        (metadata / "entry_points.txt").write_text(f"[lfmfast.backends]\ntoy = {module}:backend\n", "utf8")
        return str(tmp_path)

    return write


@pytest.fixture(scope="module")
def build() -> dict[str, Any]:
    return lfmfast.build_info()


@pytest.fixture
def offer(build: dict[str, Any], toy: Path) -> dict[str, Any]:
    """What the toy's plugin says of itself."""
    return {"library": str(toy), "lfmfast": lfmfast.__version__, "llama_cpp": build["llama_cpp"]}


# --- a plugin that works ---


def test_a_gpu_of_a_plugin_is_found_and_computes(install: Install, offer: dict[str, Any], lfm2_tiny_path: Path):
    script = """
    def ask(path, library):
        with Model(path, n_ctx=256, n_threads=1) as model:
            text = model.generate(FRANCE, temperature=0, max_tokens=12).text
            return text, model.native.on_cpu, computed(library)
    """
    seen = ask(script, lfm2_tiny_path, offer["library"], PYTHONPATH=install(offer))
    text, on_cpu, computed = seen["found"]
    assert (text, on_cpu, seen["warnings"]) == (PARIS, False, [])
    assert computed > 100
    assert "Toy0: a toy GPU (from toy-plugin 3.2.1)" in seen["devices"]
    assert any(device.startswith("CPU: ") for device in seen["devices"])
    assert seen["plugins"] == ["toy-plugin 3.2.1: Toy0"]


def test_layers_on_the_gpu_are_as_many_as_asked_for(install: Install, offer: dict[str, Any], tiny_f32_path: Path):
    """None means none: also long prompts, which llama.cpp would send to a GPU by itself, are the CPU's then."""
    script = """
    def ask(path, library):
        counts = []
        for n in (0, 2, -1):
            before = computed(library) if counts else 0
            with Model(path, n_ctx=256, n_threads=1, n_gpu_layers=n) as model:
                model.generate(list(range(100, 200)), temperature=0, max_tokens=4)
                counts.append((computed(library) - before, model.native.on_cpu))
        return counts
    """
    seen = ask(script, tiny_f32_path, offer["library"], PYTHONPATH=install(offer))
    (none, on_cpu), (two, half), (every, whole) = seen["found"]
    assert (none, on_cpu, half, whole) == (0, True, False, False)
    assert 0 < two < every


def test_prefixes_come_back_from_host_memory(install: Install, offer: dict[str, Any], lfm2_tiny_path: Path, tmp_path: Path):
    """Forked, regenerated and saved conversations, on a GPU, are what they are when read anew."""
    script = """
    def ask(path, saved):
        with Model(path, n_ctx=512, n_threads=1, n_parallel=2) as model:
            def cold(messages):
                return model.generate(messages, temperature=0, max_tokens=12, cache_prompt=False).text

            def turn(chat, text):
                answer = chat.send(text, temperature=0, max_tokens=12)
                return answer.text, cold(chat.messages[:-1]), chat.timings.cached_tokens > 0

            chat = model.chat("You are a helpful assistant.")
            turns = [turn(chat, "What is the capital of France?")[:2]]
            fork = chat.fork()
            turns += [turn(chat, "Name a color."), turn(fork, "What is the capital of Italy?"), turn(chat, "Thanks.")]
            regenerated = chat.regenerate(temperature=0, max_tokens=12).text
            last = turns[-1][0]
            chat.save(saved)
            texts = [chat.send("Name a color.", temperature=0, max_tokens=12).text]
        for n in (-1, 0):  # a conversation goes on wherever it is loaded
            with Model(path, n_ctx=512, n_threads=1, n_gpu_layers=n, flash_attn=True) as model:
                texts.append(model.load_chat(saved).send("Name a color.", temperature=0, max_tokens=12).text)
        return turns, regenerated == last, texts
    """
    seen = ask(script, lfm2_tiny_path, tmp_path / "chat", PYTHONPATH=install(offer))
    turns, same, texts = seen["found"]
    assert all(warm == cold for warm, cold, *_ in turns)
    assert all(turn[2] for turn in turns[1:])
    assert same
    assert len(set(texts)) == 1


def test_plugins_can_be_switched_off(install: Install, offer: dict[str, Any], lfm2_tiny_path: Path):
    seen = ask(ANSWER, lfm2_tiny_path, PYTHONPATH=install(offer), LFMFAST_PLUGINS="0")
    assert (seen["found"], seen["warnings"], seen["plugins"]) == (PARIS, [], [])
    assert not any("Toy0" in device for device in seen["devices"])


# --- plugins that don't ---


def absent(folder: Path) -> Path:
    """A library that needs one which is gone."""
    (folder / "other.cpp").write_text("void other() {}\n", "utf8")
    (folder / "needs.cpp").write_text('void other();\nextern "C" void * ggml_backend_init() { other(); return 0; }\n', "utf8")
    gone = compile_library(folder / "libother.so", folder / "other.cpp", links=("-Wl,-soname,liblfmfast-absent.so.1",))
    found = compile_library(folder / "libneeds.so", folder / "needs.cpp", gone)
    gone.unlink()
    return found


def nothing(folder: Path) -> Path:
    (folder / "nothing.cpp").write_text("int nothing;\n", "utf8")
    return compile_library(folder / "libnothing.so", folder / "nothing.cpp")


def no_device(folder: Path) -> Path:
    return compile_library(folder / "libtoy.so", Path(__file__).parent / "cpp/toy_gpu.cpp", defines=("TOY_NO_DEVICE",),
                           links=("-llfmfast-ggml-base", "-llfmfast-ggml"))  # fmt: skip


BROKEN: dict[str, tuple[Any, str]] = {
    "another version": ({"lfmfast": "0.0.9"}, f"it is for lfmfast 0.0.9, and this is {lfmfast.__version__}; "
                                              f"pip install 'lfmfast[toy]=={lfmfast.__version__}'"),
    "another llama.cpp": ({"llama_cpp": "b1"}, "it is for llama.cpp b1, and this is b"),
    "no library": ({"library": "/nowhere/libtoy.so"}, "can't be loaded (/nowhere/libtoy.so: "),
    "no driver": ({"library": absent, "needs": {"liblfmfast-absent.so.1": "there is no toy driver"}},
                  "there is no toy driver (liblfmfast-absent.so.1: "),
    "a library is missing": ({"library": absent}, "can't be loaded (liblfmfast-absent.so.1: "),
    "no backend": ({"library": nothing}, "is no backend of ggml: it has no ggml_backend_init"),
    "no device": ({"library": no_device}, "it finds no device: toy: the driver is too old"),
    "an error in it": ("def backend():\n    return 1 / 0\n", "ZeroDivisionError: division by zero"),
    "no function": ("", "AttributeError: "),
    "nothing said": ("def backend():\n    return {}\n", "KeyError: 'lfmfast'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_one_line_says_why_a_plugin_is_not_used(kind: str, install: Install, offer: dict[str, Any], lfm2_tiny_path: Path,
                                                tmp_path: Path):  # fmt: skip
    change, reason = BROKEN[kind]
    if isinstance(change, dict):
        change = {**offer, **{key: str(value(tmp_path)) if callable(value) else value for key, value in change.items()}}
    twice = ANSWER.replace("def ask", "def once") + "\ndef ask(path):\n    return [once(path), once(path)]\n"
    seen = ask(twice, lfm2_tiny_path, PYTHONPATH=install(change))
    assert seen["found"] == [PARIS, PARIS]
    (warning,) = seen["warnings"]
    assert warning.startswith("the CPU is used. toy-plugin 3.2.1 can't be used: ") and reason in warning
    assert "\n" not in warning
    (plugin,) = seen["plugins"]
    assert plugin == warning.removeprefix("the CPU is used. ").replace(" can't be used:", ":")


def test_a_broken_plugin_does_not_hide_another(install: Install, offer: dict[str, Any], lfm2_tiny_path: Path):
    install({**offer, "lfmfast": "0.0.9"}, "broken-plugin")
    seen = ask(ANSWER, lfm2_tiny_path, PYTHONPATH=install(offer))
    assert (seen["found"], seen["warnings"]) == (PARIS, [])  # there is a GPU: nothing to warn of
    assert sorted(plugin.partition(":")[0] for plugin in seen["plugins"]) == ["broken-plugin 3.2.1", "toy-plugin 3.2.1"]


@pytest.mark.parametrize("n", [0, -1, 7])
def test_a_gpu_that_is_asked_for_by_number_is_missed(n: int, lfm2_tiny_path: Path):
    seen = ask(ANSWER, lfm2_tiny_path, ("n_gpu_layers", n), LFMFAST_PLUGINS="0")
    assert seen["found"] == PARIS
    if any(not device.startswith("CPU") for device in seen["devices"]):
        pytest.skip("this build has a GPU")
    expected = ["the CPU is used. n_gpu_layers is 7, but there is no GPU that this build or a plugin can use"]
    assert seen["warnings"] == (expected if n > 0 else [])


def test_who_wants_the_cpu_is_not_told_about_gpus(install: Install, offer: dict[str, Any], lfm2_tiny_path: Path):
    seen = ask(ANSWER, lfm2_tiny_path, ("n_gpu_layers", 0), PYTHONPATH=install({**offer, "lfmfast": "0.0.9"}))
    assert (seen["found"], seen["warnings"]) == (PARIS, [])


def test_the_command_line_says_it_in_one_line(install: Install, offer: dict[str, Any], lfm2_tiny_path: Path, tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": install({**offer, "lfmfast": "0.0.9"}), "NO_COLOR": "1"}

    def run(*command: object) -> tuple[str, str]:
        done = subprocess.run([sys.executable, "-m", "lfmfast", *map(str, command)], stdin=subprocess.DEVNULL, timeout=120,
                              capture_output=True, text=True, env=environment, cwd=tmp_path)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), done.stderr.strip()

    answer, said = run("chat", "-m", lfm2_tiny_path, "-t", 1, "--temp", 0, "-n", 12, "What is the capital of France?")
    assert answer == PARIS
    assert said.startswith("lfmfast: warning: the CPU is used. toy-plugin 3.2.1 can't be used: it is for lfmfast 0.0.9")
    assert len(said.splitlines()) == 1
    shown, said = run("info", lfm2_tiny_path)
    assert "toy-plugin 3.2.1: it is for lfmfast 0.0.9" in shown and said == ""
    shown, said = run("--version")
    assert "toy-plugin 3.2.1: it is for lfmfast 0.0.9" in shown and said == ""


# --- the packages ---


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")))
def test_the_extra_installs_the_plugin_of_this_version(folder: str):
    if sys.version_info < (3, 11):
        pytest.skip("needs tomllib")
    import tomllib

    plugin = tomllib.loads((ROOT / "plugins" / folder / "pyproject.toml").read_text("utf8"))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]["optional-dependencies"]
    assert list(plugin["project"]["entry-points"]["lfmfast.backends"]) == [folder]
    assert extras[folder] == [plugin["project"]["name"]]
    (needed,) = [item["result"] for item in plugin["tool"]["dynamic-metadata"] if item["field"] == "dependencies"]
    assert "lfmfast=={project[version]}" in needed
