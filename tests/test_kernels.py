"""ggml's repacked kernels, where this machine has them, against its plain ones."""

import child
import modelgen
import oracle
import pytest

SCRIPT = """
    import sys
    import numpy as np
    from lfmfast.lowlevel import Batch, Context, Model
    tokens = [1 + (37 * i) % 1200 for i in range(80)]
    rows = []
    for repack in (False, True):
        model = Model.load(sys.argv[1], repack=repack)
        context = Context(model, n_ctx=256, n_threads=2)
        batch = Batch(64)
        for part, position in ((tokens[:64], 0), (tokens[64:69], 64), (tokens[69:70], 69)):  # a prefill, a few, a single token
            batch.clear()
            batch.extend(part, position, output="all")
            context.decode(batch)
            rows.append(context.logits.copy())
        context.close()
        context = Context(model, n_ctx=1024, n_seq_max=4, n_threads=2)  # several sequences in one pass
        for n_each, position in ((16, 0), (1, 16)):
            batch.clear()
            for seq in range(4):
                batch.extend(tokens[20 * seq + position:][:n_each], position, seq_id=seq, output="all")
            context.decode(batch)
            rows.append(context.logits.copy())
    plain, packed = np.concatenate(rows[:5]), np.concatenate(rows[5:])
    error = np.sqrt(((plain - packed) ** 2).mean(axis=1) / (plain ** 2).mean(axis=1))
    print(float(error.max()))
"""


@pytest.mark.parametrize("quantize", ["F16", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"])
def test_repacked_weights_give_the_same_logits(tmp_path, quantize):
    full = modelgen.write_model(tmp_path / "full.gguf", "tiny-wide")
    model = full
    if quantize != "F16":
        model = tmp_path / "q.gguf"
        oracle.quantize(full, model, quantize, 1)
    # In a process of its own: a wrong kernel can end it (cmake/no_amx.cmake).
    error = float(child.run(SCRIPT, model))
    assert error < 0.1  # rounding of the activations differs; a wrong kernel gives about 1.4
