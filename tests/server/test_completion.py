"""llama-server's /completion: prompts in all forms, shapes of answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inprocess import Live

from lfmfast.server.completion import parse_prompts
from lfmfast.server.errors import ApiError

ONCE = "Once upon a"
GREEDY = {"temperature": 0, "repeat_penalty": 1}


@pytest.fixture(scope="module")
def server(lfm2_tiny_path: Path) -> Iterator[Live]:
    with Live(lfm2_tiny_path) as live:
        yield live


def test_forms_of_prompts():
    assert parse_prompts("a") == ["a"] and parse_prompts([1, 2]) == [[1, 2]] and parse_prompts([1, "a", 2]) == [[1, "a", 2]]
    assert parse_prompts(["a", "b"]) == ["a", "b"] and parse_prompts([[1, 2], "a", ["a", 1]]) == [[1, 2], "a", ["a", 1]]
    assert parse_prompts({"prompt_string": "a"}) == ["a"] and parse_prompts([{"prompt_string": "a"}, [1]]) == ["a", [1]]
    for wrong in (None, [], [[]], {}, 1, [1.5], ["a", None], [True], [1, True], [1, None], [1, [2]], {"prompt_string": None},
                  {"prompt_string": "a", "multimodal_data": "x"}, ["a", 1.0]):  # fmt: skip
        with pytest.raises(ApiError):
            parse_prompts(wrong)


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_an_answer(server: Live, path: str):
    server.model.engine.forget()
    answer = server.post(path, {"prompt": ONCE, "n_predict": 6, "return_tokens": True, "stop": ["zzz"], "seed": 5, **GREEDY})
    n_prompt = len(server.model.encode(ONCE))
    assert answer.keys() == {
        "index", "content", "tokens", "id_slot", "stop", "model", "tokens_predicted", "tokens_evaluated", "generation_settings",
        "prompt", "has_new_line", "truncated", "stop_type", "stopping_word", "tokens_cached", "timings"}  # fmt: skip
    assert answer["content"] == server.model.detokenize(answer["tokens"]) and len(answer["tokens"]) == 6
    assert (answer["tokens_predicted"], answer["tokens_evaluated"], answer["tokens_cached"]) == (6, n_prompt, n_prompt + 5)
    assert (answer["stop"], answer["stop_type"], answer["truncated"], answer["index"]) == (True, "limit", False, 0)
    assert answer["prompt"] == "<|startoftext|>" + ONCE and 0 <= answer["id_slot"] < 4 and answer["model"] == "tiny"
    assert answer["timings"]["prompt_n"] == n_prompt and answer["timings"]["predicted_n"] == 6
    settings = answer["generation_settings"]
    assert (settings["n_predict"], settings["max_tokens"], settings["seed"], settings["stop"]) == (6, 6, 5, ["zzz"])
    assert settings["temperature"] == 0 and settings["samplers"][0] == "penalties" and "adaptive_target" in settings
    again = server.post(path, {"prompt": ONCE, "n_predict": 6, **GREEDY})
    assert again["tokens"] == [] and again["content"] == answer["content"]
    assert again["timings"]["prompt_n"] + again["timings"]["cache_n"] == n_prompt and again["timings"]["cache_n"] > 0
    fresh = server.post(path, {"prompt": ONCE, "n_predict": 6, "cache_prompt": False, **GREEDY})
    assert fresh["timings"]["cache_n"] == 0 and fresh["content"] == answer["content"]


def test_a_stream(server: Live):
    body = {"prompt": ONCE, "n_predict": 6, **GREEDY}
    *parts, last = server.chunks("/completion", body, done=False)
    whole = server.post("/completion", body | {"return_tokens": True})
    assert [part["stop"] for part in parts] == [False] * len(parts) and last["stop"]
    assert "".join(part["content"] for part in parts) == whole["content"] and last["content"] == "" and last["tokens"] == []
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert [part["tokens_predicted"] for part in parts] == [1, 2, 3, 4, 5, 6]
    assert {part["tokens_evaluated"] for part in parts} == {whole["tokens_evaluated"]}
    assert last["tokens_predicted"] == 6 and last["stop_type"] == "limit" and last["generation_settings"]["stream"]
    assert parts[0].keys() == {"index", "content", "tokens", "stop", "id_slot", "tokens_predicted", "tokens_evaluated"}


@pytest.mark.parametrize(("more", "stop_type", "word"), [
    ({"n_predict": 2}, "limit", ""), ({"stop": [" is", "Paris"]}, "word", " is"), ({}, "eos", ""),
])  # fmt: skip
def test_how_it_ended(server: Live, more: dict[str, Any], stop_type: str, word: str):
    prompt = "<|startoftext|><|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    answer = server.post("/completion", {"prompt": prompt, **more, **GREEDY})
    assert (answer["stop_type"], answer["stopping_word"], answer["truncated"]) == (stop_type, word, False)
    assert answer["prompt"] == prompt  # there is one BOS, not two
    assert "is" not in answer["content"] or stop_type != "word"
    *_, last = server.chunks("/completion", {"prompt": prompt, **more, **GREEDY}, done=False)
    assert (last["stop_type"], last["stopping_word"]) == (stop_type, word)


def test_lines(server: Live):
    haiku = [{"role": "user", "content": "Write a haiku about the ocean."}]
    answer = server.post("/completion", {"prompt": server.model.encode(haiku), **GREEDY})
    assert answer["has_new_line"] and "\n" in answer["content"]
    assert not server.post("/completion", {"prompt": server.model.encode(haiku), "n_predict": 2, **GREEDY})["has_new_line"]


def test_nothing_to_predict_fills_the_cache(server: Live):
    server.model.engine.forget()
    prompt = "one two three four"
    empty = server.post("/completion", {"prompt": prompt, "n_predict": 0})
    assert (empty["content"], empty["tokens_predicted"], empty["stop_type"]) == ("", 0, "limit")
    assert empty["timings"]["predicted_per_second"] == 0
    assert server.post("/completion", {"prompt": prompt, "n_predict": 1})["timings"]["cache_n"] > 0


def test_running_out_of_context(server: Live):
    answer = server.post("/completion", {"prompt": ONCE, "ignore_eos": True, **GREEDY})
    assert answer["truncated"] and answer["stop_type"] == "limit"
    assert answer["tokens_evaluated"] + answer["tokens_predicted"] == server.model.n_ctx + 1
    never = answer["generation_settings"]["logit_bias"]
    assert never == [{"bias": None, "token": token} for token in server.model.end_tokens] and never


def test_several_prompts(server: Live):
    prompts = [ONCE, server.model.encode(ONCE), {"prompt_string": ONCE}, [*server.model.encode("Once"), " upon a"]]
    answers = server.post("/completion", {"prompt": prompts, "n_predict": 5, **GREEDY})
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert len({answer["content"] for answer in answers}) == 1 and len({answer["tokens_evaluated"] for answer in answers}) == 1
    twice = server.post("/completion", {"prompt": ONCE, "n": 2, "n_predict": 5, **GREEDY})
    assert [answer["content"] for answer in twice] == [answers[0]["content"]] * 2
    chunks = server.chunks("/completion", {"prompt": prompts[:2], "n_predict": 5, **GREEDY}, done=False)
    for i in range(2):
        mine = [chunk for chunk in chunks if chunk["index"] == i]
        assert "".join(chunk["content"] for chunk in mine) == answers[0]["content"]
        assert [chunk["stop"] for chunk in mine] == [False] * (len(mine) - 1) + [True]


def test_control_tokens_in_mixed_prompts(server: Live):
    bos = server.model.encode("")[0]
    start = server.model.tokenize("<|im_start|>", parse_special=True)
    assert len(start) == 1
    answer = server.post("/completion", {"prompt": [bos, "<|im_start|>user\nHi", 7], "n_predict": 1})
    assert answer["prompt"] == "<|startoftext|><|im_start|>user\nHi<|im_end|>"
    assert server.post("/completion", {"prompt": ["<|im_start|>x", 7], "n_predict": 1})["prompt"].startswith("<|startoftext|>")
    assert server.post("/completion", {"prompt": [start[0], "x"], "n_predict": 1})["prompt"] == "<|im_start|>x"


def test_a_long_prompt_is_the_same(server: Live):
    text = "a " * 9000  # so long that it is made into tokens elsewhere
    error = server.post("/completion", {"prompt": text}, 400)["error"]
    assert error["type"] == "exceed_context_size_error" and error["n_prompt_tokens"] == len(server.model.encode(text))


def test_chosen_fields(server: Live):
    paths = ["content", "generation_settings/n_predict", "prompt", "timings/prompt_n", "missing", "prompt/x", "timings/x/y"]
    answer = server.post("/completion", {"prompt": ONCE, "n_predict": 2, "response_fields": paths})
    assert answer.keys() == {"content", "generation_settings/n_predict", "prompt", "timings/prompt_n"}
    assert answer["generation_settings/n_predict"] == 2
    assert "timings" in server.post("/completion", {"prompt": ONCE, "n_predict": 2, "response_fields": []})


def test_log_probabilities(server: Live):
    body = {"prompt": ONCE, "n_predict": 5, "n_probs": 10, **GREEDY}
    seen = server.post("/completion", body)["completion_probabilities"]
    assert len(seen) == 5
    for item in seen:
        assert item.keys() == {"id", "token", "bytes", "logprob", "top_logprobs"} and len(item["top_logprobs"]) == 10
        assert bytes(item["bytes"]).decode() == item["token"] and item["top_logprobs"][0]["id"] == item["id"]
        assert sum(2.718281828 ** top["logprob"] for top in item["top_logprobs"]) <= 1.001
    *parts, last = server.chunks("/completion", body, done=False)
    assert [p["id"] for part in parts for p in part["completion_probabilities"]] == [item["id"] for item in seen]
    assert "completion_probabilities" not in last


def test_timings_and_progress_in_a_stream(server: Live):
    server.model.engine.forget()
    body = {"prompt": "one two three " * 30, "n_predict": 4, "timings_per_token": True, "return_progress": True, **GREEDY}
    *parts, last = server.chunks("/completion", body, done=False)
    progress = [part["prompt_progress"] for part in parts if "prompt_progress" in part]
    assert progress[0]["processed"] == progress[0]["cache"] == 0 and progress[-1]["processed"] == progress[-1]["total"]
    reading, writing = parts[: len(progress)], parts[len(progress) :]
    assert [part["timings"]["prompt_n"] for part in reading] == [item["processed"] for item in progress]
    assert [part["timings"]["predicted_n"] for part in writing] == [1, 2, 3, 4]
    assert {part["timings"]["prompt_n"] for part in writing} == {last["timings"]["prompt_n"]}


def test_the_slot_is_a_wish(server: Live):
    assert server.post("/completion", {"prompt": ONCE, "n_predict": 1, "id_slot": 2})["id_slot"] == 2
    answers = server.post("/completion", {"prompt": [ONCE] * 6, "n_predict": 4, "id_slot": 0})  # six on four
    assert len(answers) == 6 and {answer["tokens_predicted"] for answer in answers} == {4}


def test_banned_texts(server: Live):
    plain = server.post("/completion", {"prompt": ONCE, "n_predict": 1, "return_tokens": True, **GREEDY})
    text = plain["content"]
    banned = server.post("/completion", {"prompt": ONCE, "n_predict": 1, "logit_bias": [[text, False]], **GREEDY})
    assert banned["content"] != text
    token = plain["tokens"][0]
    banned = server.post("/completion", {"prompt": ONCE, "n_predict": 1, "logit_bias": {str(token): False}, **GREEDY})
    assert banned["content"] != text
    wanted = server.post("/completion", {"prompt": ONCE, "n_predict": 3, "return_tokens": True, "logit_bias": [[42, 1000]]})
    assert wanted["tokens"] == [42] * 3


def test_what_is_refused(server: Live):
    for prompt in (None, [], {}, 5, [None]):
        assert "prompt" in server.refusal("/completion", {"prompt": prompt})
    assert "at most 1024" in server.refusal("/completion", {"prompt": [""] * 513, "n": 2})
    assert "text only" in server.refusal("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": "x"}})
    assert "token id" in server.refusal("/completion", {"prompt": [10**6]})
    assert "the grammar, line 1" in server.refusal("/completion", {"prompt": ONCE, "grammar": "root ::= x"})
    assert "'lora'" in server.refusal("/completion", {"prompt": ONCE, "lora": [{"id": 0, "scale": 1}], "stream": True})
