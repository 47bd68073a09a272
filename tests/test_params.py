"""SamplingParams refuses what makes no sense, and a model's defaults come from the GGUF, then from Liquid's table."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest

from lfmfast.errors import LfmfastError, ParameterError
from lfmfast.params import NEUTRAL, SAMPLERS, SamplingParams
from lfmfast.presets import PRESETS, default_sampling, find_preset

NUMBERS = [name for name, value in NEUTRAL.as_dict().items() if isinstance(value, (int, float)) and not isinstance(value, bool)]
INTEGERS = [name for name in NUMBERS if isinstance(getattr(NEUTRAL, name), int)]


def test_nothing_is_set_at_first() -> None:
    assert SamplingParams().as_dict() == {}
    assert repr(SamplingParams()) == "SamplingParams()"
    assert set(NEUTRAL.as_dict()) == {f.name for f in fields(SamplingParams)}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -2, "1", True, False, [1], 1j, 1e30], ids=repr)
def test_bad_numbers(name: str, bad: Any) -> None:
    if bad == -2 and name in ("frequency_penalty", "presence_penalty"):
        assert SamplingParams(**{name: bad}).as_dict() == {name: -2.0}
        return
    with pytest.raises(ParameterError, match=name) as caught:
        SamplingParams(**{name: bad})
    text = str(caught.value)
    assert repr(bad) in text and " from " in text  # the value and the limit
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, LfmfastError)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("bad", [0.5, 40.0, np.float32(1)])
def test_integers_only(name: str, bad: Any) -> None:
    with pytest.raises(ParameterError, match="an integer"):
        SamplingParams(**{name: bad})


def test_limits_are_inside() -> None:
    for values in (
        {"temperature": 0, "top_k": -1, "top_p": 0, "min_p": 1, "seed": 2**32 - 2},
        {"repeat_last_n": -1, "seed": 0, "typical_p": 1, "mirostat": 2, "top_p": 1.0, "min_p": 0.0},
    ):
        SamplingParams(**values)
    for name, value in {"seed": 2**32 - 1, "mirostat": 3, "top_p": 1.0001, "repeat_penalty": 0, "top_k": -3}.items():
        with pytest.raises(ParameterError, match=name):
            SamplingParams(**{name: value})


def test_numpy_numbers() -> None:
    params = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), logit_bias={np.int32(4): np.float64(1.5)})
    assert params == SamplingParams(temperature=0.5, top_k=3, logit_bias={4: 1.5})
    assert [type(params.temperature), type(params.top_k)] == [float, int]


@pytest.mark.parametrize(
    ("name", "suggestion"), [("temprature", "temperature"), ("topk", "top_k"), ("repeat_penality", "repeat_penalty")]
)
def test_unknown_name(name: str, suggestion: str) -> None:
    for call in (SamplingParams, SamplingParams().merged):
        with pytest.raises(ParameterError, match=f"{name!r}; did you mean {suggestion!r}"):
            call(**{name: 1})
    with pytest.raises(ParameterError, match=r"'zzz'$"):
        SamplingParams(zzz=1)


def test_repetition_penalty_is_repeat_penalty() -> None:
    assert SamplingParams(repetition_penalty=1.1) == SamplingParams(repeat_penalty=1.1)
    assert SamplingParams(repeat_penalty=1.2).merged(repetition_penalty=1.1).repeat_penalty == 1.1
    with pytest.raises(ParameterError, match="the same"):
        SamplingParams(repetition_penalty=1.1, repeat_penalty=1.1)
    with pytest.raises(ParameterError, match="repetition_penalty"):
        SamplingParams(repetition_penalty=-1)


@pytest.mark.parametrize(
    "bad", [[(1, 2.0)], {1: "2"}, {"1": 2.0}, {1: math.nan}, {1: math.inf}, {-1: 1.0}, {1.5: 1.0}, {1: True}, 3]
)
def test_bad_logit_bias(bad: Any) -> None:
    with pytest.raises(ParameterError, match="logit_bias"):
        SamplingParams(logit_bias=bad)


def test_logit_bias_is_copied() -> None:
    bias = {1: -math.inf}
    params = SamplingParams(logit_bias=bias)
    bias[2] = 1.0
    assert params.logit_bias == {1: -math.inf}


def test_samplers() -> None:
    assert SamplingParams(samplers=["top-k", "temp", "typical_p"]).samplers == ("top_k", "temperature", "typ_p")
    assert SamplingParams(samplers=[]).samplers == ()
    for bad, text in (
        (["topk"], "did you mean 'top_k'"),
        (["top_k", "top_k"], "twice"),
        ("top_k", "list of strings"),
        ([1], "list of str"),
    ):
        with pytest.raises(ParameterError, match=text):
            SamplingParams(samplers=bad)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="dry_sequence_breakers"):
        SamplingParams(dry_sequence_breakers="\n")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="ignore_eos"):
        SamplingParams(ignore_eos=1)  # type: ignore[arg-type]


def test_frozen_copied_pickled() -> None:
    params = SamplingParams(temperature=0.5, logit_bias={1: 2.0}, samplers=SAMPLERS)
    with pytest.raises(FrozenInstanceError):
        params.temperature = 1.0  # type: ignore[misc]
    assert params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params))


def test_merged_and_resolved() -> None:
    low, high = SamplingParams(temperature=0.1, top_k=50), SamplingParams(top_k=0, seed=3)
    assert low.merged(high) == SamplingParams(temperature=0.1, top_k=0, seed=3)
    assert low.merged(high, temperature=0.7, top_p=None).temperature == 0.7
    full = high.resolved(low)
    assert set(full.as_dict()) == set(NEUTRAL.as_dict())
    assert (full.temperature, full.top_k, full.seed, full.min_p, full.repeat_last_n) == (0.1, 0, 3, 0.0, 64)


# --- presets ---


def metadata(name: str = "", architecture: str = "lfm2", **general: str) -> dict[str, str]:
    return {"general.architecture": architecture, "general.name": name, **{f"general.{k}": v for k, v in general.items()}}


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("LFM2.5-1.2B-Instruct", "LFM2.5-1.2B-Instruct"),
        ("LFM2.5 1.2B Instruct", "LFM2.5-1.2B-Instruct"),
        ("Lfm2.5 1.2B Thinking", "LFM2.5-1.2B-Thinking"),
        ("LFM2.5 1.2B JP", "LFM2.5-1.2B-JP"),
        ("LFM2.5 1.2B JP 202606", "LFM2.5-1.2B-JP"),
        ("LFM2.5 350M", "LFM2.5-350M"),
        ("LFM2.5-230M", "LFM2.5-230M"),
        ("LFM2.5 2.6B", "LFM2.5-2.6B"),
        ("LFM2.5 8B A1B", "LFM2.5-8B-A1B"),
        ("LFM2.5 700M", "LFM2.5"),
        ("LFM2.5 VL 450M", "LFM2.5-VL"),
        ("LFM2.5-VL-1.6B", "LFM2.5-VL"),
        ("LFM2.5-VL-3B", "LFM2.5-VL-3B"),
        ("LFM2 24B A2B", "LFM2-24B-A2B"),
        ("LFM2 350M", "LFM2"),
        ("LFM2-700M", "LFM2"),
        ("LFM2 1.2B", "LFM2"),
        ("LFM2 2.6B", "LFM2"),
        ("LFM2-8B-A1B", "LFM2"),
        ("LFM2-VL-1.6B", "LFM2-VL"),
        ("LFM2 VL 3B", "LFM2-VL"),
        ("LFM2-1.2B-Extract", "LFM2-Extract"),
        ("LFM2-350M-Extract", "LFM2-Extract"),
        ("LFM2 1.2B RAG", "LFM2-RAG"),
        ("LFM2-1.2B-Tool", "LFM2-Tool"),
        ("LFM2-350M-PII-Extract-JP", "LFM2-PII"),
        ("LFM2 2.6B Transcript", "LFM2-Transcript"),
        ("LFM2-350M-Math", "LFM2"),
    ],
)
def test_presets(name: str, preset: str) -> None:
    moe = "A1B" in name or "A2B" in name
    assert find_preset(metadata(name, "lfm2moe" if moe else "lfm2")) == preset
    assert preset in PRESETS


def test_preset_values() -> None:
    """Liquid's table: temperature, top_k, top_p, min_p, repeat_penalty; what it does not name is off."""
    table = {
        "LFM2.5-1.2B-Instruct": (0.1, 50, 1, 0, 1.05), "LFM2.5-1.2B-Thinking": (0.1, 50, 0.1, 0, 1.05),
        "LFM2.5-1.2B-JP": (0.3, 0, 1, 0.15, 1.05), "LFM2.5-350M": (0.1, 50, 1, 0, 1.05), "LFM2.5-230M": (0.1, 50, 1, 0, 1.05),
        "LFM2.5-2.6B": (0.2, 80, 1, 0, 1.05), "LFM2.5-8B-A1B": (0.2, 80, 1, 0, 1.05), "LFM2.5": (0.1, 50, 1, 0, 1.05),
        "LFM2.5-VL-3B": (0.2, 50, 1, 0, 1), "LFM2.5-VL": (0.1, 0, 1, 0.15, 1.05), "LFM2-24B-A2B": (0.1, 50, 1, 0, 1.05),
        "LFM2": (0.3, 0, 1, 0.15, 1.05), "LFM2-VL": (0.1, 0, 1, 0.15, 1.05), "LFM2-Extract": (0, 0, 1, 0, 1),
        "LFM2-RAG": (0, 0, 1, 0, 1), "LFM2-Tool": (0, 0, 1, 0, 1), "LFM2-PII": (0, 0, 1, 0, 1),
        "LFM2-Transcript": (0.3, 0, 1, 0, 1),
    }  # fmt: skip
    assert {
        name: (p.temperature, p.top_k, p.top_p, p.min_p, p.repeat_penalty) for name, p in PRESETS.items() if "LFM" in name
    } == table


def test_recognised_without_a_name() -> None:
    """By basename and size, by the model a fine-tune was made from, or by the template; never for other architectures."""
    assert find_preset(metadata(basename="LFM2.5", size_label="1.2B", finetune="Thinking")) == "LFM2.5-1.2B-Thinking"
    assert find_preset({**metadata("Ada"), "general.base_model.0.name": "LFM2.5 1.2B Base"}) == "LFM2.5-1.2B-Instruct"
    assert find_preset({**metadata("Ada"), "tokenizer.chat_template": "..<|tool_list_start|>.."}) == "LFM2"
    assert find_preset({**metadata("Ada", size_label="350M"), "tokenizer.chat_template": '"List of tools: ["'}) == "LFM2.5-350M"
    assert find_preset(metadata("Ada")) is None
    assert find_preset(metadata("LFM2.5 1.2B Instruct", "llama")) is None
    assert find_preset({}) is None


def test_default_sampling_precedence() -> None:
    given = {**metadata("LFM2.5 1.2B Instruct"), "general.sampling.temp": "0.700000", "general.sampling.top_p": "0.9",
             "general.sampling.penalty_last_n": "32", "general.sampling.sequence": "top_k;temperature"}  # fmt: skip
    result = default_sampling(given)
    assert result.params.as_dict().keys() == NEUTRAL.as_dict().keys() == result.source.keys()
    expected = {
        "temperature": (0.7, "GGUF general.sampling.temp"),
        "top_p": (0.9, "GGUF general.sampling.top_p"),
        "repeat_last_n": (32, "GGUF general.sampling.penalty_last_n"),
        "samplers": (("top_k", "temperature"), "GGUF general.sampling.sequence"),
        "top_k": (50, "preset LFM2.5-1.2B-Instruct"),
        "repeat_penalty": (1.05, "preset LFM2.5-1.2B-Instruct"),
        "min_p": (0.0, "preset LFM2.5-1.2B-Instruct"),
        "typical_p": (1.0, "neutral"),
    }
    assert {name: (getattr(result.params, name), result.source[name]) for name in expected} == expected
    assert SamplingParams(temperature=0.0).resolved(result.params).temperature == 0.0  # an explicit argument wins
    assert "temperature=0.7  # GGUF general.sampling.temp" in repr(result)


def test_default_sampling_of_other_models() -> None:
    result = default_sampling(metadata("SmolLM2", "llama"))
    assert result.params == NEUTRAL and set(result.source.values()) == {"neutral"} and result.preset is None
    assert "neutral" in repr(result)


@pytest.mark.parametrize(
    ("key", "text"), [("temp", "-1"), ("temp", "nan"), ("top_k", "many"), ("sequence", "top_k;top_q"), ("top_p", "")]
)
def test_unusable_gguf_values_are_logged_and_skipped(key: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lfmfast"):
        result = default_sampling({**metadata("LFM2 350M"), f"general.sampling.{key}": text})
    assert result == default_sampling(metadata("LFM2 350M"))
    assert f"general.sampling.{key}" in caplog.text
