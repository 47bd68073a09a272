"""The sampling settings that Liquid AI recommends for each checkpoint, and what a GGUF itself says.

A checkpoint is recognised by the GGUF's own metadata, never by its file name.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lfmfast.errors import ParameterError
from lfmfast.params import NEUTRAL, SamplingParams

__all__ = ["PRESETS", "DefaultSampling", "default_sampling", "find_preset"]

_log = logging.getLogger("lfmfast")


def _row(
    temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, repeat_penalty: float = 1.0
) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repeat_penalty=repeat_penalty)


#: Liquid's documentation (docs.liquid.ai). A stage that a row does not name is off: llama.cpp's own defaults (top_k 40, top_p
#: 0.95, min_p 0.05) are never meant. Where its pages differ, the one on llama.cpp decides: for 1.2B-Instruct the model card
#: alone adds top_p 0.1, for 1.2B-Thinking the model page says temperature 0.05 without top_p. VL-3B has a page of its own,
#: which is more exact than the row for all vision models.
PRESETS: Mapping[str, SamplingParams] = {
    "LFM2.5-1.2B-Instruct": _row(0.1, top_k=50, repeat_penalty=1.05),
    "LFM2.5-1.2B-Thinking": _row(0.1, top_k=50, top_p=0.1, repeat_penalty=1.05),
    "LFM2.5-1.2B-JP": _row(0.3, min_p=0.15, repeat_penalty=1.05),
    "LFM2.5-350M": _row(0.1, top_k=50, repeat_penalty=1.05),
    "LFM2.5-230M": _row(0.1, top_k=50, repeat_penalty=1.05),
    "LFM2.5-2.6B": _row(0.2, top_k=80, repeat_penalty=1.05),
    "LFM2.5-8B-A1B": _row(0.2, top_k=80, repeat_penalty=1.05),
    "LFM2.5": _row(0.1, top_k=50, repeat_penalty=1.05),  # a size that the table does not have
    "LFM2.5-VL-3B": _row(0.2, top_k=50),
    "LFM2.5-VL": _row(0.1, min_p=0.15, repeat_penalty=1.05),
    "LFM2-24B-A2B": _row(0.1, top_k=50, repeat_penalty=1.05),
    "LFM2": _row(0.3, min_p=0.15, repeat_penalty=1.05),
    "LFM2-VL": _row(0.1, min_p=0.15, repeat_penalty=1.05),
    "LFM2-Extract": _row(0.0),
    "LFM2-RAG": _row(0.0),
    "LFM2-Tool": _row(0.0),
    "LFM2-PII": _row(0.0),
    "LFM2-Transcript": _row(0.3),
    "SmolLM2-Instruct": _row(0.2, top_p=0.9),  # the model card; what `demo` falls back to
}

# GGUF key -> field, in the order of llama.cpp's llama-arch.cpp.
_GGUF_KEYS = {
    "sequence": "samplers",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "temp": "temperature",
    "penalty_last_n": "repeat_last_n",
    "penalty_repeat": "repeat_penalty",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}
_INTEGERS = {"top_k", "repeat_last_n", "mirostat"}


@dataclass(frozen=True, repr=False)
class DefaultSampling:
    """The sampling a model uses where a request says nothing.

    Attributes
    ----------
    params : SamplingParams
        Every field set.
    source : mapping of str to str
        Where each field comes from: "GGUF general.sampling.temp", "preset LFM2.5-1.2B-Instruct" or "neutral".
    preset : str or None
        The row of the table that was found.
    """

    params: SamplingParams
    source: Mapping[str, str]
    preset: str | None

    def __repr__(self) -> str:
        lines = [
            f"  {name}={getattr(self.params, name)!r}  # {source}"
            for name, source in self.source.items()
            if source != "neutral"
        ]
        return "\n".join(["DefaultSampling(", *(lines or ["  # neutral: no recommendation is known for this model"]), ")"])


def find_preset(metadata: Mapping[str, str]) -> str | None:
    """The name of the row of `PRESETS` for a model with this GGUF metadata, or None.

    Examples
    --------
    >>> find_preset({"general.architecture": "lfm2", "general.name": "LFM2.5 1.2B Instruct"})
    'LFM2.5-1.2B-Instruct'
    """
    if metadata.get("general.basename", "").lower() == "smollm2":
        return "SmolLM2-Instruct"
    if metadata.get("general.architecture") not in ("lfm2", "lfm2moe"):
        return None
    own = ("name", "basename", "size_label", "finetune", "version")
    words = _words(metadata, own)
    version = _version(words)
    if version is None:  # renamed fine-tunes name what they are made from
        words |= _words(metadata, ("base_model.0.name", "base_model.0.repo_url"))
        version = _version(words)
    if version is None:  # a GGUF without any name: the two generations' templates differ in how they list tools
        template = metadata.get("tokenizer.chat_template", "")
        if "<|tool_list_start|>" in template:
            version = "LFM2"
        elif "List of tools: " in template:
            version = "LFM2.5"
        else:
            return None
    return _pick(version, words)


def _words(metadata: Mapping[str, str], keys: tuple[str, ...]) -> set[str]:
    text = " ".join(metadata.get(f"general.{key}", "") for key in keys).lower()
    return set(re.findall(r"[a-z0-9.]+", text))


def _version(words: set[str]) -> str | None:
    if "lfm2.5" in words or {"lfm", "2.5"} <= words or ("lfm2" in words and "v2.5" in words):
        return "LFM2.5"
    return "LFM2" if "lfm2" in words or {"lfm", "2"} <= words else None


def _pick(version: str, words: set[str]) -> str:
    if "vl" in words:
        return "LFM2.5-VL-3B" if version == "LFM2.5" and "3b" in words else f"{version}-VL"
    if version == "LFM2":
        if "24b" in words:
            return "LFM2-24B-A2B"
        for nano in ("pii", "extract", "rag", "tool", "transcript"):
            if nano in words:
                return f"LFM2-{nano.upper() if nano in ('pii', 'rag') else nano.capitalize()}"
        return "LFM2"
    if "8b" in words:
        return "LFM2.5-8B-A1B"
    for size in ("350m", "230m", "2.6b"):
        if size in words:
            return f"LFM2.5-{size.upper()}"
    if "1.2b" in words:
        kind = "JP" if "jp" in words else "Thinking" if "thinking" in words else "Instruct"
        return f"LFM2.5-1.2B-{kind}"
    return "LFM2.5"


def _from_gguf(metadata: Mapping[str, str]) -> dict[str, tuple[SamplingParams, str]]:
    """What the GGUF itself recommends, per field; a value that can't be used is logged and skipped."""
    found = {}
    for suffix, field in _GGUF_KEYS.items():
        key = f"general.sampling.{suffix}"
        text = metadata.get(key)
        if text is None:
            continue
        try:
            value: Any = text.split(";") if field == "samplers" else int(text) if field in _INTEGERS else float(text)
            found[field] = (SamplingParams(**{field: value}), f"GGUF {key}")
        except (ParameterError, ValueError) as problem:
            _log.warning("%s = %r in the GGUF is ignored: %s", key, text, problem)
    return found


def default_sampling(metadata: Mapping[str, str]) -> DefaultSampling:
    """The defaults for a model with this GGUF metadata: its own `general.sampling.*`, else the preset, else neutral.

    Examples
    --------
    >>> default_sampling({"general.architecture": "lfm2", "general.name": "LFM2 350M", "general.sampling.temp": "0.5"})
    DefaultSampling(
      temperature=0.5  # GGUF general.sampling.temp
      top_k=0  # preset LFM2
      top_p=1.0  # preset LFM2
      min_p=0.15  # preset LFM2
      repeat_penalty=1.05  # preset LFM2
    )
    """
    preset = find_preset(metadata)
    row = PRESETS[preset] if preset else SamplingParams()
    params = NEUTRAL.merged(row)
    source = {f.name: "neutral" for f in fields(SamplingParams)}
    source |= dict.fromkeys(row.as_dict(), f"preset {preset}")
    for field, (value, where) in _from_gguf(metadata).items():
        params = params.merged(value)
        source[field] = where
    return DefaultSampling(params, source, preset)
