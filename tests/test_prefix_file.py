"""Files of prefixes and chats: what is refused, and that writing one is all or nothing."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import child
import pytest
from exact import numbers, opened

from lfmfast import Model, StateError, prefix_file
from lfmfast.prefix_file import Fingerprint, Saved

ENDLESS: dict[str, Any] = {"temperature": 0, "repeat_penalty": 1.0, "ignore_eos": True}


@pytest.fixture(params=["tiny_f32_path", "tiny_moe_path", "tiny_dense_path"])
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


# --- refused ---


@pytest.fixture
def saved(tiny_f32: Model, tmp_path: Path) -> Iterator[Path]:
    """A chat's file: it has every kind of section."""
    chat = tiny_f32.chat()
    chat.send("Hi", max_tokens=5, **ENDLESS)
    chat.save(tmp_path / "c.lfmfast")
    yield tmp_path / "c.lfmfast"


def test_any_flipped_bit_is_noticed(tiny_f32: Model, saved: Path) -> None:
    data = saved.read_bytes()
    rng = random.Random(7)
    places = [*range(200), *(rng.randrange(len(data)) for _ in range(300))]
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << rng.randrange(8)
        saved.write_bytes(damaged)
        with pytest.raises(StateError, match="can't be used"):
            tiny_f32.load_chat(saved)
    saved.write_bytes(data)
    assert tiny_f32.load_chat(saved).n_tokens


def test_any_truncation_is_noticed(tiny_f32: Model, saved: Path) -> None:
    data = saved.read_bytes()
    for n in [*range(0, 1200, 7), *range(1200, len(data), len(data) // 40), len(data) - 1]:
        saved.write_bytes(data[:n])
        with pytest.raises(StateError, match="can't be used"):
            tiny_f32.load_prefix(saved)
    saved.write_bytes(data + b"x")
    with pytest.raises(StateError, match=f"{len(data) + 1} bytes instead of {len(data)}"):
        tiny_f32.load_prefix(saved)


def test_every_refusal_has_its_reason(tiny_f32: Model, saved: Path, tmp_path: Path) -> None:
    data = saved.read_bytes()
    for damaged, why in (
        (b"GGUF" + data[4:], "no file of lfmfast"),
        (b"", "no file of lfmfast"),
        (data[:10], "cut off"),
        (data[:8] + b"\x02" + data[9:], "version 2"),
        (data[:100], "cut off"),
        (data[:-1], "bytes instead of"),
        (data[:-1] + b"?", "contents is wrong"),
    ):
        saved.write_bytes(damaged)
        with pytest.raises(StateError, match=why) as caught:
            tiny_f32.load_prefix(saved)
        assert str(saved) in str(caught.value)
    with pytest.raises(FileNotFoundError):
        tiny_f32.load_prefix(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        tiny_f32.load_prefix(tmp_path)


def test_another_model_is_refused(path: Path, models_dir: Path, tmp_path: Path) -> None:
    other_path = models_dir / f"other-{path.name}"
    if not other_path.exists():  # the same shapes and the same size of file, one weight differs
        data = bytearray(path.read_bytes())
        data[-64 * 1024] ^= 1
        other_path.write_bytes(data)
    renamed = tmp_path / "renamed.gguf"
    shutil.copy(path, renamed)
    with opened(path) as model:
        model.save_prefix(tmp_path / "p", numbers(30))
    with opened(other_path) as other, pytest.raises(StateError, match=rf"{path.name}.*{other_path.name}"):
        other.load_prefix(tmp_path / "p")
    with opened(renamed) as same:
        assert same.load_prefix(tmp_path / "p").n_tokens == 30


def test_other_contexts_are_refused(path: Path, tmp_path: Path) -> None:
    with opened(path) as model:
        model.save_prefix(tmp_path / "p", numbers(300))
    for options, why in (({"type_k": "f16"}, "KV cache"), ({"n_ctx": 256}, "300 tokens, the context holds 256"),
                         ({"cache_bytes": 50_000}, "50000"), ({"flash_attn": True}, "flash attention")):  # fmt: skip
        with opened(path, **options) as model:
            with pytest.raises(StateError, match=why):
                model.load_prefix(tmp_path / "p")
            assert model.generate(numbers(30), max_tokens=2, **ENDLESS).usage.completion_tokens == 2
    with opened(path, n_ctx=1024, n_parallel=3) as model:
        assert model.load_prefix(tmp_path / "p").n_tokens == 300


def test_made_up_contents_are_refused(tiny_f32: Model, tmp_path: Path) -> None:
    """Files with right checksums whose contents can't be: nothing of them reaches llama.cpp."""
    tiny_f32.warm(numbers(40))
    good = tiny_f32.engine.save(numbers(40))
    point, checkpoint = good["points"][-1]
    wrong: list[dict[str, Any]] = [
        {"tokens": []}, {"tokens": [-1] * 40}, {"tokens": [10**6] * 40}, {"tokens": numbers(39)}, {"rows": b""},
        {"rows": good["rows"][:-1]}, {"layout": b""}, {"layout": good["layout"][:-1]}, {"layout": good["layout"] * 2},
        {"logits": good["logits"][:-4]}, {"points": [(41, checkpoint)]}, {"points": [(0, checkpoint)]},
        {"points": [(point, b"")]}, {"points": [(point, checkpoint[:-1])]}, {"points": [(point, checkpoint[:100])]},
        {"points": [(point, bytes(len(checkpoint)))]},
    ]  # fmt: skip
    for change in wrong:
        prefix_file.write(tmp_path / "p", Saved({**good, **change}, tiny_f32._fingerprint))
        with pytest.raises(StateError):
            tiny_f32.load_prefix(tmp_path / "p")
    for chat in ({}, {"messages": 1}, {"messages": [], "tools": None, "options": {"model": 1}, "blocks": [], "template": ""},
                 {"messages": [], "tools": None, "options": {}, "blocks": [[["x"]]], "template": ""}):  # fmt: skip
        prefix_file.write(tmp_path / "p", Saved(good, tiny_f32._fingerprint, chat))
        with pytest.raises(StateError):
            tiny_f32.load_chat(tmp_path / "p")
    assert tiny_f32.generate(numbers(30), max_tokens=2, **ENDLESS).usage.completion_tokens == 2


def test_fingerprint(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    data = bytearray(random.Random(1).randbytes(3 << 20))
    file.write_bytes(data)
    first = Fingerprint.of(file)
    assert (first.name, first.size) == ("a.gguf", 3 << 20)
    for place in (0, (1 << 20) - 1, (3 << 20) - 1):
        changed = bytearray(data)
        changed[place] ^= 1
        file.write_bytes(changed)
        assert Fingerprint.of(file).sha256 != first.sha256
    file.write_bytes(data + b"\0")
    assert Fingerprint.of(file).sha256 != first.sha256
    parts = [tmp_path / f"s-0000{i}-of-00002.gguf" for i in (1, 2)]
    for part in parts:
        part.write_bytes(data)
    split = Fingerprint.of(parts[0])
    assert split.size == 6 << 20
    parts[1].write_bytes(changed)
    assert Fingerprint.of(parts[0]).sha256 != split.sha256


# --- writing ---


def test_a_failed_save_leaves_the_old_file(tiny_f32: Model, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = saved.read_bytes()

    def broken(fd: int) -> None:
        raise OSError("no disk")

    for unnamed in (True, False):
        if not unnamed:
            monkeypatch.delattr(os, "O_TMPFILE", raising=False)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", broken)
            with pytest.raises(OSError, match="no disk"):
                tiny_f32.save_prefix(saved, numbers(40))
        assert saved.read_bytes() == old
        assert [p.name for p in saved.parent.iterdir()] == [saved.name]
        tiny_f32.save_prefix(saved.with_name("new"), numbers(40))
        assert tiny_f32.load_prefix(saved.with_name("new")).n_tokens == 40
        saved.with_name("new").unlink()
    with pytest.raises(FileNotFoundError):
        tiny_f32.save_prefix(saved.parent / "none" / "p", [20])


def test_a_link_is_followed(tiny_f32: Model, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    try:
        link.symlink_to(tmp_path / "folder" / "p")
    except OSError:
        pytest.skip("no symbolic links here")
    tiny_f32.save_prefix(link, [20, 21])
    assert link.is_symlink()
    assert tiny_f32.load_prefix(tmp_path / "folder" / "p").n_tokens == 2


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on the size of files there")
def test_disk_full(tiny_f32_path: Path, tmp_path: Path) -> None:
    out = child.run("""
        import resource, sys
        from pathlib import Path
        from lfmfast import Model
        path, file = sys.argv[1:]
        with Model(path, n_ctx=512, n_threads=1) as model:
            model.save_prefix(file, [20, 21, 22])
            old = Path(file).read_bytes()
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
            try: model.save_prefix(file, list(range(20, 400)))
            except OSError as error: print(type(error).__name__)
            print(Path(file).read_bytes() == old, len(list(Path(file).parent.iterdir())))
            print(model.load_prefix(file).n_tokens)
    """, tiny_f32_path, tmp_path / "p")
    assert out.split() == ["OSError", "True", "1", "3"]


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9")
def test_killed_while_saving(tiny_f32_path: Path, tmp_path: Path) -> None:
    """Whenever it happens, one of the two files is there, whole."""
    file = tmp_path / "p"
    script = """
import sys
from lfmfast import Model
path, file = sys.argv[1:]
model = Model(path, n_ctx=1024, n_threads=1, n_gpu_layers=0)
prefixes = [model.warm([20 + i % 300 for i in range(n)]) for n in (700, 900)]
prefixes[0].save(file)
print("ready", flush=True)
while True:
    for prefix in prefixes:
        prefix.save(file)
"""
    rng, seen = random.Random(3), set()
    with Model(tiny_f32_path, n_ctx=1024, n_threads=1, n_gpu_layers=0) as model:
        for _ in range(12):
            process = subprocess.Popen([sys.executable, "-c", script, tiny_f32_path, file], cwd=Path(__file__).parent,
                                       stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)  # fmt: skip
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(rng.uniform(0, 0.05))
            process.send_signal(signal.SIGKILL)
            process.wait()
            process.stdout.close()
            seen.add(model.load_prefix(file).n_tokens)
    assert seen <= {700, 900}
    unnamed = hasattr(os, "O_TMPFILE") and prefix_file._write_unnamed(tmp_path / "try", [b""])
    left = [p for p in tmp_path.iterdir() if p.name not in ("p", "try")]
    assert len(left) <= (1 if unnamed else 12)
