"""The command line: what it accepts, and what it does with a real model, through pipes and on a terminal."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lfmfast import _demo, cli, hub
from lfmfast.cli import _options

MODEL = Path(__file__).parent / "data/lfm2-tiny/lfm2-tiny-f16.gguf"
LFMFAST = [sys.executable, "-m", "lfmfast"]
CHAT = [*LFMFAST, "chat", "-m", str(MODEL), "-t", "1", "--temp", "0"]
PARIS = "The capital of France is Paris."


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LFMFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)  # `python -m lfmfast` in the repository would take the source folder
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def run(command: list[str], stdin: str | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=120, **given, **options)


# --- parsing ------------------------------------------------------------------------------------------------------


class Opened(Exception):
    """Carries what `chat` would have opened."""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Run `chat` up to the point where it would load the model."""
    seen: dict[str, Any] = {}

    def locate(name: Any = None, file: Any = None, repo: Any = None, **options: Any) -> Path:
        seen.update(name=name, file=file and str(file), repo=repo, **options)
        return Path("model.gguf")

    class Chat:
        def stream(self, text: str, **options: Any) -> Any:
            seen.update(text=text, **options)
            raise Opened

    class Model:
        def __enter__(self) -> Model:
            return self

        def __exit__(self, *args: object) -> None:
            pass

        def chat(self, system: str | None) -> Chat:
            seen.update(system=system)
            return Chat()

    def open_model(path: Path, **options: Any) -> Model:
        seen.update({key: value for key, value in options.items() if value is not None})
        return Model()

    monkeypatch.setattr(_options, "locate", locate)
    monkeypatch.setattr(_options, "open_model", open_model)
    monkeypatch.setattr(_options, "read_stdin", lambda: "")
    yield seen


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("chat demo Hi", {"name": "demo", "text": "Hi", "file": None, "repo": None}),
        ("chat owner/repo:q8_0 Hi", {"name": "owner/repo:q8_0", "text": "Hi"}),
        ("chat x.gguf Hi", {"name": "x.gguf", "text": "Hi"}),
        ("chat -m x.gguf Hi", {"name": None, "file": "x.gguf", "text": "Hi"}),
        ("chat Hi --model x.gguf", {"name": None, "file": "x.gguf", "text": "Hi"}),
        ("chat -m x.gguf demo", {"file": "x.gguf", "text": "demo"}),
        ("chat -m x.gguf -p Hi", {"text": "Hi"}),
        ("chat demo -p Hi", {"name": "demo", "text": "Hi"}),
        ("chat -hf a/b Hi", {"name": None, "repo": "a/b", "text": "Hi"}),
        ("chat -hf=a/b:Q4_0 Hi", {"repo": "a/b:Q4_0"}),
        ("chat -hfr a/b Hi", {"repo": "a/b"}),
        ("chat --hf-repo=a/b Hi", {"repo": "a/b"}),
        ("chat -hf a/b -hft hf_x Hi --offline", {"token": "hf_x", "offline": True}),
        ("chat demo Hi", {"n_ctx": 4096, "max_tokens": None, "stop": (), "system": None}),
        ("chat demo -c 512 -t 3 -ngl 7 Hi", {"n_ctx": 512, "n_threads": 3, "n_gpu_layers": 7}),
        ("chat demo -b 64 -ub 32 Hi", {"n_batch": 64, "n_ubatch": 32}),
        ("chat demo -ngl=0 Hi", {"n_gpu_layers": 0}),
        ("chat demo --n-gpu-layers -1 Hi", {"n_gpu_layers": -1}),
        ("chat demo --gpu-layers 2 -ctk q8_0 -ctv f32 Hi", {"n_gpu_layers": 2, "type_k": "q8_0", "type_v": "f32"}),
        ("chat demo -n 5 Hi", {"max_tokens": 5}),
        ("chat demo -n5 Hi", {"max_tokens": 5}),
        ("chat demo --predict -1 Hi", {"max_tokens": None}),
        ("chat demo --n-predict 0 Hi", {"max_tokens": 0}),
        ("chat demo -r A -r B Hi", {"stop": ["A", "B"]}),
        ("chat demo -sys Be Hi", {"system": "Be"}),
        ("chat demo --system-prompt Be Hi", {"system": "Be"}),
        ("chat demo --temp 0.5 --top-k 3 Hi", {"temperature": 0.5, "top_k": 3}),
        ("chat demo --top-p 0.9 --min-p 0.1 Hi", {"top_p": 0.9, "min_p": 0.1}),
        ("chat demo --repeat-penalty 1.1 --repeat-last-n -1 Hi", {"repeat_penalty": 1.1, "repeat_last_n": -1}),
        ("chat demo --presence-penalty 1 -s 42 Hi", {"presence_penalty": 1, "seed": 42}),
        ("chat demo --frequency-penalty 2 Hi", {"frequency_penalty": 2}),
        ("chat demo --seed -1 --ignore-eos Hi", {"seed": -1, "ignore_eos": True}),
        ("chat demo -- -hf", {"text": "-hf", "repo": None}),
    ],
)  # fmt: skip
def test_chat_options(opened: dict[str, Any], line: str, expected: dict[str, Any]) -> None:
    cli.main(line.split())
    assert {key: opened.get(key, "absent") for key in expected} == expected


def test_unset_sampling_is_left_to_the_model(opened: dict[str, Any]) -> None:
    cli.main(["chat", "demo", "Hi"])
    assert not {"temperature", "top_k", "seed", "ignore_eos"} & set(opened)


def test_the_fallback_model_of_demo_gets_what_it_needs(opened: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_options, "locate", lambda *args, **options: _demo.path())
    cli.main(["chat", "demo", "Hi"])
    assert (opened["temperature"], opened["system"]) == (0.0, _demo.SYSTEM)
    cli.main(["chat", "demo", "-sys", "", "--temp", "0.7", "Hi"])
    assert (opened["temperature"], opened["system"]) == (0.7, "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("chat", r"which model\? .*-hf REPO"),
        ("chat Hello", r"'Hello' is no model; which model\?"),
        ("chat -m x.gguf", "the prompt is empty"),
        ("chat -m x.gguf -hf a/b Hi", "give one model, not -m x.gguf and -hf a/b"),
        ("chat -m x.gguf a b", "quote a prompt"),
        ("chat demo a b", "quote a prompt"),
        ("chat demo -p a b", "two prompts"),
        ("chat demo --tempp 1 Hi", "there is no option --tempp; did you mean --temp?"),
        ("chat demo --repeat_penalty 1 Hi", "did you mean --repeat-penalty?"),
        ("chat demo -ngx 3 Hi", "there is no option -ngx; did you mean -ngl?"),
        ("chat demo --top-p 3 Hi", "top_p must be a number from 0 to 1"),
        ("chat demo -c many Hi", "invalid value for '-c'"),
        ("chat demo -m", "requires an argument"),
        ("chta demo", "there is no command chta; did you mean chat?"),
        ("--foo", "there is no option --foo"),
        ("info", r"which model\?"),
        ("pull", "missing argument"),
        ("tokenize", r"which model\?"),
    ],
)
def test_wrong_usage(line: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_options, "read_stdin", lambda: "")
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(message, err)
    assert err.startswith("lfmfast: ") and err.count("\n") == 1


@pytest.mark.parametrize("line", ["", "--help", "-h", "chat --help", "info -h", "pull --help", "tokenize --help"])
def test_help_has_examples(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(line.split()) == 0
    out, err = capsys.readouterr()
    command = (line.split() or [""])[0].replace("--help", "").replace("-h", "")
    assert re.search(rf"^ *lfmfast {command or 'chat'} .*\S", out, re.MULTILINE)
    assert err == ""


def test_help_lists_llama_cpps_names(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["chat", "--help"])
    words = set(re.findall(r"-[\w-]+", capsys.readouterr().out))
    assert {
        "-m",
        "-hf",
        "-c",
        "-t",
        "-ngl",
        "-n",
        "-s",
        "-r",
        "-sys",
        "-b",
        "-ub",
        "--temp",
        "--top-k",
        "--repeat-penalty",
    } <= words


def test_help_loads_nothing_native() -> None:
    code = "import sys; from lfmfast.cli import main; main(['chat', '--help']); print(*sys.modules, file=sys.stderr)"
    done = run([sys.executable, "-c", code])
    loaded = set(done.stderr.split())
    assert done.returncode == 0 and "lfmfast.cli.chat" in loaded
    assert not {
        m for m in loaded if m.startswith(("lfmfast._m", "lfmfast._e", "numpy", "huggingface_hub", "prompt_toolkit", "jinja2"))
    }


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import lfmfast

    assert cli.main(["--version"]) == 0
    first, *facts = capsys.readouterr().out.splitlines()
    assert first == f"lfmfast {lfmfast.__version__}"
    said = dict(line.split(maxsplit=1) if len(line.split()) > 1 else (line.strip(), "") for line in facts)
    info = lfmfast.build_info()
    assert list(said) == [name for name in info if name != "version"]
    assert said["llama_cpp"] == info["llama_cpp"] and said["compiler"] == info["compiler"]
    assert said["python"].startswith(f"{platform.python_implementation()} {platform.python_version()}")
    assert all(device in said["devices"] for device in info["devices"])


def test_version_where_the_native_modules_can_not_be_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import lfmfast

    def broken() -> None:
        raise ImportError("libstdc++.so.6: version `GLIBCXX_3.4.32' not found")

    monkeypatch.setattr(lfmfast, "build_info", broken, raising=False)
    assert cli.main(["--version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"lfmfast {lfmfast.__version__}" and "GLIBCXX_3.4.32" in second


def test_pull_prints_the_path_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(hub, "resolve", lambda name, **options: asked.append((name, options)) or Path("/models/x.gguf"))
    assert cli.main(["pull", "a/b:q8_0", "--revision", "v1"]) == 0
    assert capsys.readouterr() == (f"{Path('/models/x.gguf')}\n", "")
    assert asked == [("a/b:q8_0", {"token": None, "revision": "v1"})]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("demo", "hub"),
        ("owner/repo", "hub"),
        ("owner/repo:Q4_0", "hub"),
        ("owner/repo:sub/file.gguf", "hub"),
        ("folder/file.gguf", "file"),
        ("/a/b c/модель.gguf", "file"),
        ("x.GGUF", "file"),
        ("hello there", "neither"),
        ("a/b/c", "neither"),
    ],
)
def test_what_a_name_is(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _options.looks_like_model(name) == (kind != "neither")
    if kind != "neither":
        monkeypatch.setattr(hub, "resolve", lambda *args, **options: Path("from the hub"))
        assert _options.locate(name) == (Path(name) if kind == "file" else Path("from the hub"))


# --- with the model, through pipes --------------------------------------------------------------------------------


def test_one_answer() -> None:
    done = run([*CHAT, "What is the capital of France?"])
    assert (done.stdout, done.stderr, done.returncode) == (PARIS + "\n", "", 0)


def test_utf8_answer_in_a_plain_locale() -> None:
    done = run([*CHAT, "Say hello in Japanese."], env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"})
    assert done.stdout == "こんにちは 👋\n"


def test_prompt_from_stdin() -> None:
    assert run(CHAT, stdin="What is the capital of France?").stdout == PARIS + "\n"
    assert run([*CHAT, "Repeat: river"], stdin="lamp").returncode == 0


def test_system_prompt() -> None:
    done = run([*CHAT, "-sys", "You are a helpful assistant. The user's name is Ada.", "What is my name?"])
    assert done.stdout == "Your name is Ada.\n"


def test_stats_and_cut_go_to_stderr() -> None:
    done = run([*CHAT, "--stats", "-n", "3", "What is the capital of France?"])
    assert done.stdout == "The capital of\n"
    assert "[cut after 3 tokens: -n]" in done.stderr
    assert re.search(r"prompt \d+ tokens \(0 cached\).*answer 3 tokens at [\d.]+ tok/s", done.stderr)
    assert "\033" not in done.stderr


def test_stop_text() -> None:
    assert run([*CHAT, "-r", " Paris", "What is the capital of France?"]).stdout == "The capital of France is\n"


def test_full_context_is_told() -> None:
    done = run([*CHAT, "-c", "256", "--ignore-eos", "Tell me a story."])
    assert done.returncode == 0
    assert "the context is full (-c)" in done.stderr
    done = run([*CHAT, "-c", "256", "word " * 1000])
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "256" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX pipes")
def test_broken_pipe_is_quiet() -> None:
    process = subprocess.Popen(
        [*CHAT, "--ignore-eos", "Tell me a story."], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(4) == b"Once"
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_ctrl_c_ends_one_answer() -> None:
    process = subprocess.Popen(
        [*CHAT, "-c", "32768", "--ignore-eos", "Tell me a story."],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.read(4) == b"Once"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")


BAD_FILES = {"missing": None, "empty": b"", "text": b"not a model", "damaged": b"GGUF\x03\0\0\0" + b"\xff" * 64}


@pytest.mark.parametrize("command", ["chat", "info", "tokenize"])
@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files(command: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "модель 日本.gguf"
    if (content := BAD_FILES[kind]) is not None:
        path.write_bytes(content)
    done = run([*LFMFAST, command, "-m", str(path), *([] if command == "info" else ["Hi"])])
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("lfmfast: ") and done.stderr.count("\n") == 1
    assert path.name in done.stderr


def test_verbose_adds_a_traceback_and_logs() -> None:
    done = run([*LFMFAST, "chat", "-v", "-m", "/nonexistent.gguf", "Hi"])
    assert "Traceback" in done.stderr and done.returncode == 1
    done = run([*CHAT, "-v", "What is the capital of France?"])
    assert done.stdout == PARIS + "\n"
    assert "lfmfast: " in done.stderr


def test_offline_and_not_cached() -> None:
    done = run([*LFMFAST, "chat", "-hf", "owner/repo", "Hi"])
    assert done.returncode == 1
    assert "not in the cache" in done.stderr and done.stderr.count("\n") == 1


def test_tokenize() -> None:
    reference = json.loads((MODEL.parent / "reference.json").read_text(encoding="utf-8"))["tokenizer"]
    text, ids = next((t, i) for t, i in (e.values() if isinstance(e, dict) else e for e in reference) if "é" in t or "日" in t)
    base = [*LFMFAST, "tokenize", "-m", str(MODEL)]
    done = run([*base, "--ids", "--no-bos", "--special", text])
    assert json.loads(done.stdout) == ids
    items = json.loads(run([*base, "--json"], stdin=text).stdout)
    assert items[0] == {"id": 1, "text": "<|startoftext|>"}
    done = run([*base, "<|im_end|>"])
    assert "<|im_end|>" not in done.stdout
    assert "     7 -> '<|im_end|>'\n" in run([*base, "--special", "<|im_end|>"]).stdout


def test_info_as_json() -> None:
    facts = json.loads(run([*LFMFAST, "info", str(MODEL), "--json", "-c", "1000"]).stdout)
    assert facts["n_params"] == 2_684_160
    assert facts["metadata"]["general.name"] == "LFM2.5-Tiny-Test"
    assert facts["memory"]["kv_cache"] == 1024 * 3 * 2 * (32 + 32) * 2
    assert facts["memory"]["conv_state"] == 4 * 192 * 2 * 4
    assert facts["memory"]["weights"] == sum(t["bytes"] for t in facts["tensors"].values())
    assert facts["sampling"]["repeat_penalty"] == {"value": 1.05, "source": "preset LFM2.5"}
    assert facts["file_bytes"] == MODEL.stat().st_size


def test_info_as_text() -> None:
    done = run([*LFMFAST, "info", "-m", str(MODEL)])
    assert done.returncode == 0 and done.stderr == ""
    for text in (
        "4 convolution and 3 attention layers",
        "2.7 million",
        "temperature",
        "4096 tokens of context",
        "general.name",
    ):
        assert text in done.stdout


def test_info_of_the_trained_context() -> None:
    facts = json.loads(run([*LFMFAST, "info", str(MODEL), "--json", "-c", "0"]).stdout)
    assert facts["memory"]["n_ctx"] == 4096


def test_values_out_of_limits() -> None:
    for flags in (["-c", "1"], ["-t", "0"], ["-ctk", "q3"]):
        done = run([*CHAT, *flags, "Hi"])
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX shell")
def test_closed_and_full_streams() -> None:
    command = " ".join(f"'{word}'" for word in [*CHAT, "What is the capital of France?"])
    for redirection, code, out in ((">&-", 0, ""), ("<&-", 0, PARIS + "\n"), ("2>&-", 0, PARIS + "\n")):
        done = run(["sh", "-c", f"{command} {redirection}"])
        assert (done.returncode, done.stdout, done.stderr) == (code, out, "")
    if Path("/dev/full").exists():
        done = run(["sh", "-c", f"{command} > /dev/full"])
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_info_does_not_load_weights(tmp_path: Path) -> None:
    data = MODEL.read_bytes()
    broken = tmp_path / "weights-are-noise.gguf"
    broken.write_bytes(data[: len(data) // 4] + b"\xff" * (len(data) - len(data) // 4))
    assert run([*LFMFAST, "info", str(broken)]).returncode == 0
