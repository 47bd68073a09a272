"""Words that are one token each, and a model that writes nothing else.

The text of a real model splits into the tokens it was generated as, with few exceptions. That of a random one seldom does, and
history that is sent back as text would then never be found in a prompt cache, whosever it is. So benchmarks that send it back
use a copy of the model in which the embedding rows of all tokens but plain English-looking words are scaled down: as these
rows also make the logits, such tokens are not sampled. Shapes, types and times stay the same.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

VERSION = 1  # of the copy and of the list: part of their names
SCALE = 0.05

# Bytes of a block, and where in it half-precision factors of the whole block are.
BLOCKS = {
    gguf.GGMLQuantizationType.Q4_0: (18, (0,)),
    gguf.GGMLQuantizationType.Q8_0: (34, (0,)),
    gguf.GGMLQuantizationType.Q4_K: (144, (0, 2)),
    gguf.GGMLQuantizationType.Q5_K: (176, (0, 2)),
    gguf.GGMLQuantizationType.Q6_K: (210, (208,)),
}


@dataclass(frozen=True)
class Words:
    """Token ids of words, their texts (each begins with a space), and the token that a prompt begins with."""

    ids: list[int]
    texts: list[str]
    bos: int


def word_list(model_file: Path) -> Words:
    """The words in the vocabulary of a GGUF: ASCII letters after a space, a token of their own also when tokenised."""
    from lfmfast import Model

    tokens = gguf.GGUFReader(model_file).fields["tokenizer.ggml.tokens"].contents()
    found = [(i, " " + text[1:]) for i, text in enumerate(tokens) if re.fullmatch("\u0120[A-Za-z]{2,}", text)]
    with Model(model_file, n_ctx=512) as model:
        found = [(i, text) for i, text in found if model.tokenize(text) == [i]]
        bos = model.native.bos_id
    return Words([i for i, _ in found], [text for _, text in found], 0 if bos is None else bos)


def _keep_words(model_file: Path, words: Words) -> None:
    tensor = next(t for t in gguf.GGUFReader(model_file).tensors if t.name == "token_embd.weight")
    if tensor.tensor_type not in BLOCKS:
        raise SystemExit(f"can't scale rows of type {tensor.tensor_type.name}")
    block, offsets = BLOCKS[tensor.tensor_type]
    n_rows = int(tensor.shape[1])
    data = np.memmap(model_file, np.uint8, "r+", int(tensor.data_offset), (n_rows, tensor.n_bytes // n_rows // block, block))
    others = np.setdiff1d(np.arange(n_rows), words.ids)
    for offset in offsets:
        factor = np.ascontiguousarray(data[others, :, offset:offset + 2]).view(np.float16)
        data[others, :, offset:offset + 2] = (factor * np.float16(SCALE)).view(np.uint8)
    data.flush()


def words_model(model_file: Path) -> tuple[Path, Words]:
    """The copy of a generated model that writes words only, and the words. Made at the first call, next to the model."""
    path = model_file.with_name(f"{model_file.stem}-words{VERSION}.gguf")
    listed = path.with_suffix(".json")
    if not listed.exists():
        words = word_list(model_file)
        unfinished = path.with_suffix(".part")
        shutil.copyfile(model_file, unfinished)
        _keep_words(unfinished, words)
        unfinished.replace(path)
        listed.write_text(json.dumps(vars(words)))
    return path, Words(**json.loads(listed.read_text()))
