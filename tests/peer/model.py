"""A tiny dense model with random weights in the place of the one that llama-server's tests fetch.

Like that one it has a SentencePiece vocabulary of some 500 tokens, so that a prompt has about as many tokens and a context of
256 is full where the tests mean it to be. Only its letters and pieces of words get large logits: text is ASCII, and never ends
by itself.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import modelgen
import oracle

SPACE = "\u2581"
# Parts of common words, each made of two that stand before it or of single letters.
PIECES = ("_t he _a in re on er _the _w _s at en _i or _b is _f _o it an _h _m ou es ing _c _d ed _p _n ar as _l nd _an _to "
          "_and al le _g ha hi _be _y _you _of ro st ve _r om _u ur ir _e _in ll ow il lo ch ic et us ur ent _wh _th ation ly "
          "_is ion _st ut sh ay _it _he _she am ver ke _k _wa _was ld id ad un ri _re ea ee oo ot im ap op nt qu ul tr ra te "
          "ti ta ma la ne me si so ho no do ca co de di")
NORMAL, UNKNOWN, CONTROL, BYTE = (int(t) for t in (gguf.TokenType.NORMAL, gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL,
                                                   gguf.TokenType.BYTE))


def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Texts, scores and types: three specials, 256 bytes, printable ASCII, pieces."""
    letters = [SPACE if c == " " else c for c in map(chr, range(32, 127))] + ["\n"]
    pieces: list[str] = []
    for word in PIECES.split():
        piece = word.replace("_", SPACE)
        known = {*letters, *pieces}
        if piece not in known and any(piece[:i] in known and piece[i:] in known for i in range(1, len(piece))):
            pieces.append(piece)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, *letters]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(pieces) + len(letters))]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [-1000.0] * len(letters)
    return tokens, scores, types


def write(path: Path) -> Path:
    """Write the model."""
    tokens, scores, types = vocabulary()
    shape = dataclasses.replace(modelgen.SHAPES["tiny-dense"], n_embd=64, n_ff=128, n_ctx_train=8192, name="Tiny Peer")
    # What is no text gets small logits, as control tokens do.
    vocab = modelgen.Vocab(tokens, [NORMAL if t == NORMAL else modelgen.CONTROL for t in types], [])
    values: dict[str, Any] = {
        "general.name": shape.name, "general.file_type": oracle.FTYPES["F32"], "block_count": shape.n_layer,
        "context_length": shape.n_ctx_train, "embedding_length": shape.n_embd, "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head, "attention.head_count_kv": shape.n_head_kv,
        "rope.dimension_count": shape.n_embd // shape.n_head, "rope.freq_base": 1e4,
        "attention.layer_norm_rms_epsilon": 1e-5, "vocab_size": len(tokens), "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False, "tokenizer.chat_template": modelgen.CHATML,
    }
    writer = gguf.GGUFWriter(path, shape.arch)
    for key, value in values.items():
        modelgen._add(writer, key if key.startswith(("general.", "tokenizer.")) else f"{shape.arch}.{key}", value)
    for name, data in modelgen.weights(shape, vocab, modelgen.DTYPES["F32"], 7):
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
