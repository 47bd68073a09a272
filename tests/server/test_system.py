"""Endpoints besides generating, in this process: health, models, props, tokens, templates, slots, metrics."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import lfmfast
from lfmfast import AsyncModel, SamplingParams
from lfmfast.server import metrics as prometheus
from lfmfast.server.app import create_app
from lfmfast.server.settings import Settings
from lfmfast.server.slots import shown

FRANCE = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


def opened(path: Path, settings: Settings, **options: Any) -> Iterator[TestClient]:
    async def load() -> AsyncModel:
        return await AsyncModel.load(path, **{"n_ctx": 512, "n_threads": 1, "n_gpu_layers": 0, "n_parallel": 2, **options})

    loaded = threading.Event()
    with TestClient(create_app(settings, load, ended=lambda error: loaded.set())) as client:
        assert loaded.wait(60)
        yield client


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def client(lfm2_tiny_path: Path, folder: Path) -> Iterator[TestClient]:
    settings = Settings(slot_save_path=folder, metrics=True, tags=("b", "a"), n_predict=64,
                        sampling=SamplingParams(seed=7, temperature=0.5))  # fmt: skip
    yield from opened(lfm2_tiny_path, settings)


@pytest.fixture(scope="module")
def bare(lfm2_tiny_path: Path) -> Iterator[TestClient]:
    """With as little as there can be."""
    yield from opened(lfm2_tiny_path, Settings(aliases=("one", "two"), slots=False, page=False), n_parallel=1)


def ask(client: TestClient, question: str = "What is the capital of France?") -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json={**FRANCE, "messages": [{"role": "user", "content": question}]})
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def error(answer: Any, status: int, kind: str) -> str:
    assert answer.status_code == status
    found = answer.json()["error"]
    assert (found["code"], found["type"]) == (status, kind)
    return str(found["message"])


# --- what there is ---


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
def test_health(client: TestClient, path: str) -> None:
    assert client.get(path).json() == {"status": "ok"}


def test_models(client: TestClient, bare: TestClient) -> None:
    found = client.get("/v1/models").json()
    assert [m["id"] for m in found["data"]] == ["lfm2-tiny-f16.gguf"] and found["object"] == "list"
    meta = found["data"][0]["meta"]
    assert (meta["n_vocab"], meta["n_ctx"], meta["n_ctx_train"], meta["n_embd"]) == (1280, 512, 4096, 192)
    assert found["data"][0]["tags"] == ["a", "b"] and meta["ftype"] == "F16"
    assert found["models"][0]["name"] == "lfm2-tiny-f16.gguf"
    assert bare.get("/models").json()["data"][0]["aliases"] == ["one", "two"]


def test_a_model_by_name(bare: TestClient) -> None:
    assert bare.get("/v1/models/two").json()["id"] == "one"
    assert "'one', 'two'" in error(bare.get("/v1/models/three"), 404, "not_found_error")


def test_props(client: TestClient) -> None:
    props = client.get("/props").json()
    assert props["build_info"].endswith(f"-lfmfast-{lfmfast.__version__}")
    defaults = props["default_generation_settings"]
    assert defaults["n_ctx"] == 512 and props["total_slots"] == 2
    params = defaults["params"]
    assert (params["seed"], params["temperature"], params["top_k"], params["n_predict"]) == (7, 0.5, 50, 64)
    assert props["chat_template"].startswith("{{- bos_token -}}")
    assert (props["bos_token"], props["eos_token"]) == ("<|startoftext|>", "<|im_end|>")
    assert props["endpoint_metrics"] and props["endpoint_slots"] and not props["endpoint_props"]
    error(client.post("/props", json={}), 501, "not_supported_error")


def test_what_is_switched_off(bare: TestClient) -> None:
    assert "--no-slots" in error(bare.get("/slots"), 501, "not_supported_error")
    assert "--metrics" in error(bare.get("/metrics"), 501, "not_supported_error")
    assert "--slot-save-path" in error(bare.post("/slots/0?action=save", json={"filename": "a"}), 501, "not_supported_error")
    error(bare.get("/"), 404, "not_found_error")


def test_unknown_paths_and_methods(client: TestClient) -> None:
    assert "/v1/nothing" in error(client.get("/v1/nothing"), 404, "not_found_error")
    answer = client.get("/tokenize")
    assert "GET" in error(answer, 405, "invalid_request_error")
    assert answer.headers["allow"] == "POST"


def test_every_answer_has_an_id_of_its_own(client: TestClient) -> None:
    ids = {client.get(path).headers["x-request-id"] for path in ("/health", "/health", "/nothing")}
    assert len(ids) == 3 and all(i.startswith("req-") for i in ids)


# --- tokens and templates ---


def test_tokenize_and_detokenize(client: TestClient, lfm2_tiny: Any) -> None:
    text = "What is the capital of France ? 媽 🤗"
    tokens = client.post("/tokenize", json={"content": text}).json()["tokens"]
    assert tokens == lfm2_tiny.tokenize(text)
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"content": text}
    assert client.post("/tokenize", json={}).json() == {"tokens": []}
    assert client.post("/detokenize", json={}).json() == {"content": ""}


def test_tokenize_long_text_in_a_thread(client: TestClient, lfm2_tiny: Any) -> None:
    text = "a long text " * 2000
    assert client.post("/tokenize", json={"content": text}).json()["tokens"] == lfm2_tiny.tokenize(text)


def test_control_tokens_are_read_unless_they_are_not_to_be(client: TestClient) -> None:
    assert client.post("/tokenize", json={"content": "<|im_end|>"}).json()["tokens"] == [7]
    plain = client.post("/tokenize", json={"content": "<|im_end|>", "parse_special": False}).json()["tokens"]
    assert len(plain) > 1 and 7 not in plain
    assert client.post("/tokenize", json={"content": "a", "add_special": True}).json()["tokens"][0] == 1
    assert client.post("/detokenize", json={"tokens": [7]}).json() == {"content": "<|im_end|>"}


def test_pieces_are_text_or_bytes(client: TestClient) -> None:
    found = client.post("/tokenize", json={"content": "h🤗", "with_pieces": True}).json()["tokens"]
    assert found[0] == {"id": found[0]["id"], "piece": "h"}
    rest = [p["piece"] for p in found[1:]]
    assert all(isinstance(p, list) for p in rest)  # no token has the whole character
    assert bytes(b for p in rest for b in p).decode() == "🤗"


def test_mixed_content(client: TestClient, lfm2_tiny: Any) -> None:
    found = client.post("/tokenize", json={"content": [7, "hi", 6], "add_special": True}).json()["tokens"]
    assert found == [7, *lfm2_tiny.tokenize("hi"), 6]


@pytest.mark.parametrize("path, body", [
    ("/tokenize", {"content": [True]}), ("/tokenize", {"content": [1280]}), ("/tokenize", {"content": {"a": 1}}),
    ("/tokenize", {"content": [1.5]}), ("/tokenize", {"content": "a", "add_special": 1}), ("/detokenize", {"tokens": [-1]}),
    ("/detokenize", {"tokens": "abc"}), ("/detokenize", {"tokens": [10**30]}), ("/detokenize", {"tokens": [None]}),
    ("/apply-template", {}), ("/apply-template", {"messages": [{"role": "user"}]}),
    ("/apply-template", {"messages": [{"role": "user", "content": {"a": 1}}]}),
])  # fmt: skip
def test_wrong_values_are_refused(client: TestClient, path: str, body: dict[str, Any]) -> None:
    assert error(client.post(path, json=body), 400, "invalid_request_error")


def test_apply_template(client: TestClient) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    system = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    prompt = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
    assert prompt == system + "<|im_start|>assistant\n"  # BOS is put before it again
    asked = {"temperature": 0, "max_tokens": 8}
    answer = client.post("/v1/chat/completions", json={"messages": messages, **asked}).json()["choices"][0]
    assert client.post("/completion", json={"prompt": prompt, **asked}).json()["content"] == answer["message"]["content"]
    closed = client.post("/apply-template", json={"messages": messages, "add_generation_prompt": False})
    assert closed.json()["prompt"] == system
    begun = [*messages, {"role": "assistant", "content": "Hello"}]
    assert client.post("/apply-template", json={"messages": begun}).json()["prompt"].endswith("assistant\nHello")


# --- slots ---


def test_slots_before_and_after_an_answer(lfm2_tiny_path: Path) -> None:
    for client in opened(lfm2_tiny_path, Settings()):
        assert client.get("/slots").json() == [
            {"id": i, "n_ctx": 512, "speculative": False, "is_processing": False} for i in range(2)
        ]
        ask(client)
        slot, other = client.get("/slots").json()
        assert "params" not in other and slot["params"]["temperature"] == 0
        assert (slot["is_processing"], slot["n_prompt_tokens"]) == (False, 16 + 10)  # what it holds
        assert slot["next_token"][0] == {"has_next_token": False, "has_new_line": False, "n_remain": -1, "n_decoded": 0}


def test_a_slot_while_it_generates(client: TestClient, lfm2_tiny: Any) -> None:
    state = client.app.state.server  # type: ignore[attr-defined]
    prompt = lfm2_tiny.encode("Once upon a")

    async def during() -> dict[str, Any]:
        async with state.model.stream(prompt, max_tokens=300, ignore_eos=True) as stream:
            with state.task(stream, prompt=prompt, params={"n_predict": 300}, id_slot=1):
                while len(stream.tokens) < 5:
                    await stream.pieces()
                seen = shown(state, state.slots[1])
                assert seen["next_token"][0]["n_decoded"] == len(stream.tokens)
                return seen

    seen = client.portal.call(during)  # type: ignore[union-attr]
    assert seen["is_processing"] and seen["n_prompt_tokens"] == len(prompt)
    assert seen["n_prompt_tokens_processed"] + seen["n_prompt_tokens_cache"] == len(prompt)
    token = seen["next_token"][0]
    assert token["has_next_token"] and token["n_remain"] == 300 - token["n_decoded"]


def test_generations_have_slots_and_who_finds_none_gets_the_next_free_one(client: TestClient) -> None:
    state = client.app.state.server  # type: ignore[attr-defined]

    async def during() -> None:
        streams = [state.model.stream("Once upon a", max_tokens=2) for _ in range(3)]
        places = [contextlib.ExitStack() for _ in streams]
        tasks = [place.enter_context(state.task(stream, prompt="Once upon a", id_slot=1))
                 for place, stream in zip(places, streams, strict=True)]  # fmt: skip
        assert [task.slot and task.slot.id for task in tasks] == [1, 0, None]  # the one that it would like, if it is free
        assert "requests_processing 2" in metrics(state) and "requests_deferred 1" in metrics(state)
        assert [(await stream.result()).finish_reason for stream in streams] == ["length"] * 3
        places[1].close()
        assert tasks[2].slot is state.slots[0] and state.slots[0].task is tasks[2]
        places[2].close()
        places[0].close()

    client.portal.call(during)  # type: ignore[union-attr]
    assert not state.running and not any(slot.task for slot in state.slots)


def metrics(state: Any) -> str:
    return prometheus.render(state, state.model.model.engine.stats()).decode()


def test_no_free_slot(client: TestClient) -> None:
    state = client.app.state.server  # type: ignore[attr-defined]
    assert client.get("/slots?fail_on_no_slot=1").status_code == 200
    before = [slot.task for slot in state.slots]
    for slot in state.slots:
        slot.task = slot.last or object()
    try:
        error(client.get("/slots?fail_on_no_slot=1"), 503, "unavailable_error")
    finally:
        for slot, task in zip(state.slots, before, strict=True):
            slot.task = task


@pytest.mark.parametrize("stream", [False, True])
def test_one_request_too_many(lfm2_tiny_path: Path, stream: bool) -> None:
    for client in opened(lfm2_tiny_path, Settings(), n_parallel=1, n_queue=1):
        state = client.app.state.server  # type: ignore[attr-defined]

        async def begin(state: Any = state) -> list[Any]:
            first = state.model.stream("Once upon a", ignore_eos=True)
            await first.pieces()  # it has the place, and does not wait any more
            return [first, state.model.stream("Once upon a", ignore_eos=True)]

        running = client.portal.call(begin)  # type: ignore[union-attr]
        answer = client.post("/v1/chat/completions", json={**FRANCE, "stream": stream})
        error(answer, 503, "unavailable_error")
        assert int(answer.headers["retry-after"]) > 0
        for item in running:
            client.portal.call(item.aclose)  # type: ignore[union-attr]
        assert ask(client)["choices"][0]["finish_reason"] == "stop"


def test_save_restore_and_erase(client: TestClient, folder: Path) -> None:
    client.post("/slots/0?action=erase")
    first = ask(client, "Name a color.")
    slot = next(s for s in client.get("/slots").json() if "params" in s)["id"]
    saved = client.post(f"/slots/{slot}?action=save", json={"filename": "color.bin"}).json()
    usage = first["usage"]
    assert saved["n_saved"] == usage["total_tokens"] - 1  # all but the end token
    assert (saved["id_slot"], saved["filename"]) == (slot, "color.bin")
    assert saved["n_written"] == (folder / "color.bin").stat().st_size

    erased = client.post(f"/slots/{slot}?action=erase").json()
    assert erased == {"id_slot": slot, "n_erased": usage["total_tokens"]}
    assert ask(client, "Name a color.")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    client.post("/slots/0?action=erase")
    restored = client.post("/slots/1?action=restore", json={"filename": "color.bin"}).json()
    assert (restored["id_slot"], restored["n_restored"], restored["n_read"]) == (1, saved["n_saved"], saved["n_written"])
    # A conversation goes on where its state is; before that a model with a recurrent state has to read again.
    messages = [{"role": "user", "content": "Name a color."}, first["choices"][0]["message"],
                {"role": "user", "content": "What is the capital of France?"}]  # fmt: skip
    further = client.post("/v1/chat/completions", json={**FRANCE, "messages": messages}).json()
    assert further["usage"]["prompt_tokens_details"]["cached_tokens"] == saved["n_saved"]


def test_what_was_restored_can_be_saved_again(client: TestClient, folder: Path) -> None:
    ask(client)
    client.post("/slots/0?action=save", json={"filename": "one.bin"})
    restored = client.post("/slots/1?action=restore", json={"filename": "one.bin"}).json()
    saved = client.post("/slots/1?action=save", json={"filename": "two.bin"}).json()
    assert saved["n_saved"] == restored["n_restored"] > 0
    assert client.post("/slots/1?action=erase").json()["n_erased"] == saved["n_saved"]


def test_a_slot_of_a_plain_prompt_that_was_cut(client: TestClient, lfm2_tiny: Any) -> None:
    answer = client.post("/completion", json={"prompt": "Once upon a", "n_predict": 5, "ignore_eos": True}).json()
    saved = client.post(f"/slots/{answer['id_slot']}?action=save", json={"filename": "cut.bin"}).json()
    assert saved["n_saved"] == len(lfm2_tiny.encode("Once upon a")) + 4  # the last one was never read


@pytest.mark.parametrize(
    "name", ["", "..", "../x", "/etc/passwd", "a/b", "a\\b", ".hidden", "a\0b", "a\nb", "x" * 300, "a:b", None, 5]
)
def test_file_names_stay_in_the_folder(client: TestClient, folder: Path, name: Any) -> None:
    before = sorted(folder.parent.rglob("*"))
    for action in ("save", "restore"):
        answer = client.post(f"/slots/0?action={action}", json={"filename": name})
        assert "filename" in error(answer, 400, "invalid_request_error")
    assert sorted(folder.parent.rglob("*")) == before


def test_slot_actions_that_make_no_sense(client: TestClient, folder: Path) -> None:
    for path in ("/slots/9?action=save", "/slots/x?action=save", "/slots/-1?action=erase", "/slots/0?action=no", "/slots/0"):
        error(client.post(path, json={"filename": "a.bin"}), 400, "invalid_request_error")
    answer = client.post("/slots/0?action=restore", json={"filename": "none.bin"})
    assert "no saved" in error(answer, 400, "invalid_request_error")
    (folder / "bad.bin").write_bytes(b"nothing of the kind" * 10)
    error(client.post("/slots/0?action=restore", json={"filename": "bad.bin"}), 400, "invalid_request_error")
    client.post("/slots/0?action=erase")
    assert "nothing to save" in error(client.post("/slots/0?action=save", json={"filename": "a"}), 400, "invalid_request_error")


# --- metrics ---


def parsed(text: str) -> tuple[dict[str, str], dict[str, float]]:
    kinds = dict(line.split(" ", 3)[2:] for line in text.splitlines() if line.startswith("# TYPE "))
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return kinds, {name: float(value) for name, value in values.items()}


def test_metrics_count_what_was_done(lfm2_tiny_path: Path) -> None:
    for client in opened(lfm2_tiny_path, Settings(metrics=True)):
        answers = [ask(client), ask(client), ask(client, "Name a color.")]
        client.get("/nothing")
        answer = client.get("/metrics")
        kinds, values = parsed(answer.text)
        usages = [a["usage"] for a in answers]
        cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
        assert cached > 0
        assert values["llamacpp:prompt_tokens_cached_total"] == cached
        assert values["llamacpp:prompt_tokens_total"] == sum(u["prompt_tokens"] for u in usages) - cached
        assert values["llamacpp:tokens_predicted_total"] == sum(u["completion_tokens"] for u in usages)
        assert values["llamacpp:n_tokens_max"] == max(u["total_tokens"] for u in usages)
        assert values["llamacpp:n_decode_total"] > 0 and values["llamacpp:requests_processing"] == 0
        assert values['lfmfast:http_requests_total{status="404"}'] == 1
        assert values["lfmfast:time_to_first_token_seconds_count"] == 3
        assert int(answer.headers["process-start-time-unix"]) > 0
        for name, kind in kinds.items():
            assert f"# HELP {name} " in answer.text
            if kind != "histogram":
                assert any(key.partition("{")[0] == name for key in values)


def test_metrics_before_anything_was_done(client: TestClient, bare: TestClient) -> None:
    state = bare.app.state.server  # type: ignore[attr-defined]
    _, values = parsed(metrics(state))
    assert values["llamacpp:predicted_tokens_seconds"] == values["llamacpp:n_busy_slots_per_decode"] == 0
