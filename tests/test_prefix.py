"""Prefixes that are kept and saved: what is warmed, pins, files that another process goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import child
import pytest
from exact import numbers, opened

from lfmfast import Model, ParameterError, StateError, TemplateError

GREEDY: dict[str, Any] = {"temperature": 0, "repeat_penalty": 1.0}
ENDLESS: dict[str, Any] = {**GREEDY, "ignore_eos": True}
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
MODELS = ["tiny_f32_path", "tiny_moe_path", "tiny_dense_path"]


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(params=MODELS)
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


# --- warm ---


def test_prompts_go_on_from_what_was_warmed(path: Path) -> None:
    talk = [SYSTEM, *user("Hi"), {"role": "assistant", "content": "Hello"}]
    with opened(path) as model:
        cold = opened(path)
        for messages, following in (([SYSTEM], user("Hi")), ([SYSTEM, *user("Hi")], []), (talk, user("Bye"))):
            model.engine.forget()
            prefix = model.warm(messages)
            prompt = [*messages, *following]
            ids = model.encode(prompt)
            assert tuple(ids[: prefix.n_tokens]) == prefix.tokens
            assert prefix.n_tokens > len(model.tokenize("".join(m["content"] for m in messages)))
            done = model.generate(prompt, max_tokens=5, **ENDLESS)
            assert done.usage.cached_tokens == prefix.n_tokens
            assert done.tokens == cold.generate(ids, max_tokens=5, **ENDLESS).tokens
            prefix.release()
        cold.close()


def test_warm_of_text_tokens_and_tools(lfm2_tiny: Model) -> None:
    with lfm2_tiny.warm("Once upon") as prefix:
        assert prefix.tokens == tuple(lfm2_tiny.encode("Once upon"))
    assert lfm2_tiny.warm([20, 21], pin=False).tokens == (20, 21)
    tool = {"name": "look_up", "description": "Looks something up.", "parameters": {}}
    with lfm2_tiny.warm([SYSTEM], tools=[tool]) as prefix:
        ids = lfm2_tiny.encode([SYSTEM, *user("Hi")], tools=[tool])
        assert tuple(ids[: prefix.n_tokens]) == prefix.tokens
        assert "look_up" in lfm2_tiny.detokenize(prefix.tokens)
    with pytest.raises(TemplateError):
        lfm2_tiny.warm([])
    with pytest.raises(ParameterError):
        lfm2_tiny.warm(b"x")  # type: ignore[arg-type]


def test_thoughts_that_a_template_will_drop_are_not_warmed(tiny_moe: Model) -> None:
    messages = [*user("Hi"), {"role": "assistant", "content": "<think>Hmm.</think>Hello"}]
    with tiny_moe.warm(messages) as prefix:
        ids = tiny_moe.encode([*messages, *user("Bye")])
        assert tuple(ids[: prefix.n_tokens]) == prefix.tokens
        assert "Hmm" not in tiny_moe.detokenize(prefix.tokens)


def test_a_template_without_control_tokens(tiny_dense_path: Path) -> None:
    """The last text may be cut: what follows can change how its end is split."""
    source = ("{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
              "{% if add_generation_prompt %}assistant: {% endif %}")  # fmt: skip
    with opened(tiny_dense_path, chat_template=source) as model, model.warm(user("Hello there")) as prefix:
        ids = model.encode(user("Hello there"))
        assert tuple(ids[: prefix.n_tokens]) == prefix.tokens
        assert prefix.n_tokens > 3


# --- pins ---


def test_a_pinned_prefix_stays(path: Path) -> None:
    with opened(path, cache_bytes=300_000, n_parallel=2) as model:
        prompt = numbers(60)
        prefix = model.warm(prompt)
        assert repr(prefix).startswith("<lfmfast.Prefix of 60 tokens, pinned, of <lfmfast.Model ")
        for i in range(40):
            model.generate(numbers(90, i + 1), max_tokens=3, **ENDLESS)
        assert model.engine.stats()["n_evicted"] > 20
        done = model.generate([*prompt, 30, 31], max_tokens=3, **ENDLESS)
        assert done.usage.cached_tokens == 60
        assert done.tokens == model.generate([*prompt, 30, 31], max_tokens=3, cache_prompt=False, **ENDLESS).tokens
        model.engine.forget()
        assert model.generate([*prompt, 33], max_tokens=1).usage.cached_tokens == 60
        prefix.release()
        prefix.release()
        assert not prefix.pinned
        assert "pinned" not in repr(prefix)
        for i in range(40):
            model.generate(numbers(90, i + 1), max_tokens=3, **ENDLESS)
        assert model.generate([*prompt, 32], max_tokens=1).usage.cached_tokens == 0


def test_pins_are_counted(tiny_f32_path: Path) -> None:
    with opened(tiny_f32_path) as model:
        first, second = model.warm(numbers(30)), model.warm(numbers(30))
        first.release()
        first.release()  # does not take the other's pin
        model.engine.forget()
        assert model.generate([*numbers(30), 30], max_tokens=1).usage.cached_tokens == 30
        with second:
            pass
        model.engine.forget()
        assert model.generate([*numbers(30), 31], max_tokens=1).usage.cached_tokens == 0
    second.release()  # of a closed model


def test_what_is_not_pinned_goes(tiny_f32_path: Path) -> None:
    with opened(tiny_f32_path) as model:
        prefix = model.warm(numbers(30), pin=False)
        assert not prefix.pinned
        model.engine.forget()
        assert model.generate([*numbers(30), 30], max_tokens=1).usage.cached_tokens == 0
        prefix.release()


def test_no_room_for_a_pin(path: Path, tmp_path: Path) -> None:
    with opened(path, cache_bytes=1000) as model:
        with pytest.raises(StateError, match="1000 bytes"):
            model.warm(numbers(60))
        with pytest.raises(StateError, match="1000 bytes"):
            model.save_prefix(tmp_path / "x", numbers(60))
        assert not list(tmp_path.iterdir())
        assert model.generate(numbers(60), max_tokens=2, **ENDLESS).usage.completion_tokens == 2


# --- files ---

CHILD = """
import json, sys
from lfmfast import Model
path, file, prompt, chat_file = sys.argv[1:]
options = dict(temperature=0, repeat_penalty=1.0, ignore_eos=True)
with Model(path, n_ctx=512, n_threads=1, n_gpu_layers=0, type_k="f32", type_v="f32", flash_attn=False) as model:
    with model.load_prefix(file, pin=True) as prefix:
        done = model.generate(json.loads(prompt), max_tokens=20, **options)
        model.engine.forget()
        again = model.generate(json.loads(prompt), max_tokens=1)
    chat = model.load_chat(chat_file)
    n = chat.n_tokens
    more = chat.send("And then?", max_tokens=20, **options)
    print(json.dumps([prefix.n_tokens, done.usage.cached_tokens, list(done.tokens), again.usage.cached_tokens,
                      n, more.usage.cached_tokens, list(more.tokens), chat.messages]))
"""


def test_round_trip_in_another_process(path: Path, tmp_path: Path) -> None:
    file, chat_file = tmp_path / "p.bin", tmp_path / "c.bin"
    prompt = [*numbers(300), 30, 31]
    with opened(path) as model:
        model.save_prefix(file, numbers(300))
        expected = model.generate(prompt, max_tokens=20, **ENDLESS)
        chat = model.chat(SYSTEM["content"])
        chat.send("Tell me.", temperature=1, top_k=0, top_p=1, min_p=0, seed=4, max_tokens=60, ignore_eos=True)
        chat.save(chat_file)
        n_tokens = chat.n_tokens
        more = chat.send("And then?", max_tokens=20, **ENDLESS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.bin", "p.bin"]
    found = json.loads(child.run(CHILD, path, file, json.dumps(prompt), chat_file))
    assert found[:4] == [300, 300, list(expected.tokens), 300]
    assert found[4:7] == [n_tokens, n_tokens, list(more.tokens)]
    assert found[7] == chat.messages


def test_long_prefix_with_several_states(tiny_f32_path: Path, tmp_path: Path) -> None:
    """A hybrid model can go on from each of the states in a file, not only from the last."""
    file = tmp_path / "p"
    with opened(tiny_f32_path, n_ctx=2048, n_ubatch=64) as model:
        for n in (300, 700):
            model.warm(numbers(n))
        model.warm(numbers(1000)).save(file)
    with opened(tiny_f32_path, n_ctx=2048) as model, opened(tiny_f32_path, n_ctx=2048) as cold:
        model.load_prefix(file)
        for n in (1000, 700, 300):
            prompt = [*numbers(n), 30, 31]
            done = model.generate(prompt, max_tokens=5, **ENDLESS)
            assert done.usage.cached_tokens == n
            assert done.tokens == cold.generate(prompt, max_tokens=5, **ENDLESS).tokens


def test_saving_reads_again_what_is_gone(tiny_f32_path: Path, tmp_path: Path) -> None:
    with opened(tiny_f32_path) as model:
        prefix = model.warm(numbers(50), pin=False)
        model.engine.forget()
        prefix.save(tmp_path / "p")
        chat = model.chat()
        chat.send("Hi", max_tokens=5, **ENDLESS)
        model.engine.forget()
        chat.save(tmp_path / "c")
        model.engine.forget()
        assert model.load_prefix(tmp_path / "p").tokens == tuple(numbers(50))
        assert model.generate([*numbers(50), 30], max_tokens=1).usage.cached_tokens == 50
        n_tokens = chat.n_tokens
        assert model.load_chat(tmp_path / "c").send("Bye", max_tokens=1).usage.cached_tokens == n_tokens


def test_loading_while_all_places_are_busy(tiny_f32_path: Path, tmp_path: Path) -> None:
    with opened(tiny_f32_path, n_parallel=1) as model:
        model.save_prefix(tmp_path / "p", numbers(50))
        model.engine.forget()
        with model.stream("x", max_tokens=400, **ENDLESS) as stream:
            next(stream)
            assert model.load_prefix(tmp_path / "p").n_tokens == 50
            stream.close()
        assert model.generate([*numbers(50), 30], max_tokens=1).usage.cached_tokens == 50


def test_chat_keeps_its_options(tiny_moe: Model, tmp_path: Path) -> None:
    tool = {"name": "look_up", "description": "Looks something up.", "parameters": {"type": "object", "properties": {}}}
    chat = tiny_moe.chat("Be brief. ä🙂", tools=[tool], preserve_thinking=True)
    chat.send("Hi", max_tokens=5, **ENDLESS)
    chat.save(tmp_path / "c")
    again = tiny_moe.load_chat(tmp_path / "c")
    assert (again.messages, again.tools, again._options) == (chat.messages, [tool], {"preserve_thinking": True})
    assert again._ids() == chat._ids()
    assert again.fork().n_tokens == chat.n_tokens
    assert again.regenerate(max_tokens=5, **ENDLESS).text == chat.messages[-1]["content"]
    chat.send({"role": "user", "content": "x", "extra": object()}, max_tokens=2, **ENDLESS)
    with pytest.raises(ParameterError, match="object"):
        chat.save(tmp_path / "c")
    assert tiny_moe.load_chat(tmp_path / "c").messages == again.messages[:-1] + chat.messages[2:3]


def test_chat_with_another_template_is_rendered_anew(tiny_f32_path: Path, tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    with opened(tiny_f32_path) as model:
        chat = model.chat()
        chat.send("Hi", max_tokens=5, **ENDLESS)
        chat.save(tmp_path / "c")
    with opened(tiny_f32_path, chat_template=source) as model:
        chat = model.load_chat(tmp_path / "c")
        chat.n_tokens  # noqa: B018
        text = "".join(chunk.text for block in chat._blocks for chunk in block)
        assert text.startswith("<|startoftext|><|im_start|>user: Hi<|im_end|>")


def test_a_prefix_is_no_chat_but_a_chat_is_a_prefix(tiny_f32: Model, tmp_path: Path) -> None:
    tiny_f32.save_prefix(tmp_path / "p", [20, 21])
    with pytest.raises(StateError, match="no conversation"):
        tiny_f32.load_chat(tmp_path / "p")
    chat = tiny_f32.chat()
    chat.send("Hi", max_tokens=5, **ENDLESS)
    chat.save(tmp_path / "c")
    assert tiny_f32.load_prefix(tmp_path / "c").tokens == tuple(chat._ids())


def test_quantised_cache(tiny_q4_path: Path, tmp_path: Path) -> None:
    options = {"n_ctx": 512, "n_threads": 1, "n_gpu_layers": 0, "type_k": "q8_0", "type_v": "q8_0"}
    with Model(tiny_q4_path, **options) as model:
        model.save_prefix(tmp_path / "p", numbers(100))
        expected = model.generate([*numbers(100), 30], max_tokens=10, **ENDLESS)
    with Model(tiny_q4_path, **options) as model:
        model.load_prefix(tmp_path / "p")
        done = model.generate([*numbers(100), 30], max_tokens=10, **ENDLESS)
        assert (done.usage.cached_tokens, done.tokens) == (100, expected.tokens)
