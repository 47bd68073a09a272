"""Matrix products of packed weights, ours and ggml's repacked ones, in whole models."""

import functools
import json
import sys
from pathlib import Path

import child
import modelgen
import numpy as np
import oracle
import pytest

# Logits of passes of several shapes: the error of packed weights and of ggml's plain ones, against the same weights in F32.
ERRORS = """
    import json, sys
    import numpy as np
    from lfmfast.lowlevel import Batch, Context, Model
    tokens = [1 + (37 * i) % 1200 for i in range(80)]
    def logits(path, repack):
        model, rows = Model.load(path, repack=repack), []
        batch = Batch(64)
        with Context(model, n_ctx=256, n_threads=1) as context:
            for part, position in ((tokens[:64], 0), (tokens[64:69], 64), (tokens[69:70], 69)):  # a prefill, a few, one token
                batch.clear()
                batch.extend(part, position, output="all")
                context.decode(batch)
                rows.append(context.logits.copy())
        with Context(model, n_ctx=1024, n_seq_max=4, n_threads=1) as context:  # several sequences in one pass
            for n_each, position in ((16, 0), (1, 16)):
                batch.clear()
                for seq in range(4):
                    batch.extend(tokens[20 * seq + position:][:n_each], position, seq_id=seq, output="all")
                context.decode(batch)
                rows.append(context.logits.copy())
        return np.concatenate(rows).astype(np.float64)
    exact, plain, packed = logits(sys.argv[2], False), logits(sys.argv[1], False), logits(sys.argv[1], True)
    def error(a, b):
        return np.sqrt(((a - b) ** 2).mean(axis=1) / (b ** 2).mean(axis=1))
    apart = error(packed, plain)
    print(json.dumps({"worst": apart.max(), "typical": np.median(apart), "plain": np.median(error(plain, exact)),
                      "packed": np.median(error(packed, exact))}))
"""

# The same sequences alone and together, with one thread and two: the largest difference of a logit.
EXACT = """
    import sys
    import numpy as np
    from lfmfast.lowlevel import Batch, Context, Model
    model = Model.load(sys.argv[1])
    n_seq, tokens = 7, [1 + (37 * i) % 1200 for i in range(200)]
    def logits(groups, n_threads):
        out = {}
        with Context(model, n_ctx=128 * n_seq, n_seq_max=n_seq, n_threads=n_threads, flash_attn=False, type_k="f32",
                     type_v="f32") as context:
            for n_each, position in ((19, 0), (1, 19), (1, 20)):
                for group in groups:
                    batch = Batch(n_each * len(group), n_seq)
                    for seq in group:
                        batch.extend(tokens[20 * seq + position:][:n_each], position, seq_id=seq)
                    context.decode(batch)
                    out |= {(seq, position): row for seq, row in zip(group, context.logits.copy())}
        return np.stack([out[key] for key in sorted(out)])
    alone = [[seq] for seq in range(n_seq)]
    first = logits(alone, 1)
    together = [[[0, 1, 2, 3, 4, 5, 6]], [[0, 1], [2, 3, 4, 5, 6]]]
    others = [logits(alone, 2), *(logits(groups, 1) for groups in together)]
    print(max(float(np.abs(first - other).max()) for other in others))
"""


# A text's predictions with the weights in F32, with ggml's plain products and with packed weights.
PREDICTIONS = """
    import json, pathlib, sys
    import numpy as np
    from lfmfast.lowlevel import Batch, Context, Model
    text = pathlib.Path(sys.argv[3]).read_text("utf8")
    def predictions(path, repack):
        model, rows, losses = Model.load(path, repack=repack), [], []
        tokens = model.tokenize(text)[:1024]
        for part in (tokens[start:start + 256] for start in range(0, 1024, 256)):
            with Context(model, n_ctx=256, n_threads=2) as context:
                batch = Batch(256)
                batch.extend(part, 0, output="all")
                context.decode(batch)
                logits = context.logits[:-1].astype(np.float64)
                rows.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
                losses.append(-rows[-1][np.arange(255), part[1:]])
        return np.concatenate(rows), np.concatenate(losses)
    exact, _ = predictions(sys.argv[2], False)
    (plain, plain_loss), (packed, packed_loss) = predictions(sys.argv[1], False), predictions(sys.argv[1], True)
    def divergence(rows):
        return (np.exp(exact) * (exact - rows)).sum(axis=1).mean()
    difference = packed_loss - plain_loss
    print(json.dumps({"plain": divergence(plain), "packed": divergence(packed), "perplexity": np.exp(difference.mean()) - 1,
                      "noise": difference.std() / len(difference) ** 0.5}))
"""

# Logits of full weights, of passes of one token and many, of one sequence and several: attention and convolutions are left.
LOGITS = """
    import sys
    import numpy as np
    from lfmfast.lowlevel import Batch, Context, Model
    model, rows, tokens = Model.load(sys.argv[1]), [], [1 + (37 * i) % 1200 for i in range(400)]
    flash, kv = sys.argv[4] == "flash", sys.argv[5]
    with Context(model, n_ctx=2048, n_seq_max=5, n_threads=int(sys.argv[3]), flash_attn=flash, type_k=kv, type_v=kv) as context:
        passes = (1, 75, 0), (1, 1, 75), (1, 3, 76), (1, 16, 79), (1, 17, 95), (5, 1, 112), (5, 18, 113)
        for n_seqs, n_each, position in passes:
            batch = Batch(n_each * n_seqs, n_seqs)
            for seq in range(n_seqs):
                if position == 112 and seq:
                    context.seq_cp(0, seq)
                batch.extend(tokens[seq + position:][:n_each], position, seq_id=seq, output="all")
            context.decode(batch)
            rows.append(context.logits.copy())
    np.save(sys.argv[2], np.concatenate(rows))
"""


@functools.cache
def active(kernels: str) -> str:
    """The kernels of a process with this in LFMFAST_KERNELS."""
    return child.run("import lfmfast; print(lfmfast.build_info()['kernels'])", LFMFAST_KERNELS=kernels).strip()


@pytest.fixture(params=["0", "avx2", "avx512vnni", "1"])
def kernels(request):
    """Sets of kernels: ggml's own, ours for most machines, the best one here (tests/cpp/test_kernels.cpp has all of them)."""
    if request.param != "0" and active(request.param) in ("none", "avx2" if request.param == "1" else "none"):
        pytest.skip("not on this machine")
    return request.param


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Paths of a quantised model and of the same weights in F32."""
    folder = tmp_path_factory.mktemp("kernels")

    @functools.cache
    def pair(shape, quantize):
        full = modelgen.write_model(folder / f"{shape}.gguf", shape)
        quantized = folder / f"{shape}-{quantize}.gguf"
        oracle.quantize(full, quantized, quantize, 1)
        return quantized, modelgen.copy_model(quantized, folder / f"{shape}-{quantize}-f32.gguf", f32=True)

    return pair


CASES = [("tiny-wide", q) for q in ("F16", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")]
CASES += [("tiny-moe", "Q4_0"), ("tiny-moe", "Q8_0")]


@pytest.mark.parametrize(("shape", "quantize"), CASES)
def test_packed_weights_are_as_good_as_plain_ones(models, kernels, shape, quantize):
    # In a process of its own: a wrong kernel can end it (cmake/no_amx.cmake).
    errors = json.loads(child.run(ERRORS, *models(shape, quantize), LFMFAST_KERNELS=kernels))
    # Rounding of the activations differs, and sends some tokens of a MoE to another expert; a wrong kernel gives about 1.4.
    assert errors["typical" if shape == "tiny-moe" else "worst"] < 0.1
    assert errors["packed"] < 1.1 * errors["plain"] + 1e-6


@pytest.mark.parametrize(("shape", "quantize"), CASES[1:])
def test_a_sequence_has_the_same_logits_in_every_pass(models, kernels, shape, quantize):
    if kernels == "0":
        pytest.skip("not ggml's")
    difference = float(child.run(EXACT, models(shape, quantize)[0], LFMFAST_KERNELS=kernels))
    # A MoE's router is F32 and ggml's, whose sums depend on the number of rows.
    assert difference < 1e-4 if shape == "tiny-moe" else difference == 0


def logits_of(model, folder, kernels, *, n_threads=2, attention="flash", kv="f16"):
    """Of sequences that are read and go on in passes of several shapes."""
    child.run(LOGITS, model, folder / "logits.npy", str(n_threads), attention, kv, LFMFAST_KERNELS=kernels)
    return np.load(folder / "logits.npy")


def test_attention_is_as_good_as_ggmls(models, tmp_path):
    if active("") == "none":
        pytest.skip("not on this machine")
    full = models("tiny-wide", "F16")[1]
    exact = logits_of(full, tmp_path, "0", attention="plain", kv="f32")
    ggml, ours, ours_alone = (logits_of(full, tmp_path, kernels, n_threads=n) for kernels, n in (("0", 2), ("1", 2), ("1", 1)))
    assert np.array_equal(ours, ours_alone)
    assert 0 < np.abs(ours - exact).mean() < 1.02 * np.abs(ggml - exact).mean()


def test_convolutions_are_as_ggmls(models, tmp_path):
    if active("") == "none":
        pytest.skip("not on this machine")
    full, logits = models("tiny-wide", "F16")[1], []
    for kernels, n_threads in (("0", 1), ("1", 1), ("1", 3)):
        logits.append(logits_of(full, tmp_path, kernels, n_threads=n_threads, attention="plain"))
    ggml, ours, ours_threaded = logits
    assert np.abs(ours - ggml).max() < 1e-4 * np.abs(ggml).max()
    assert np.array_equal(ours, ours_threaded)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_packed_weights_are_in_memory_once(models):
    script = """
        import sys
        from lfmfast.lowlevel import Model
        model, of_file, kilobytes = Model.load(sys.argv[1]), False, 0
        for line in open("/proc/self/smaps"):
            name, value = line.split()[0], line.split()[1]
            if "-" in name:
                of_file = line.rstrip().endswith(sys.argv[1])
            elif of_file and name == "Rss:":
                kilobytes += int(value)
        print(kilobytes * 1024)
    """
    path = models("tiny-wide", "Q4_K_M")[0]
    size, ours, ggmls = path.stat().st_size, *(int(child.run(script, path, LFMFAST_KERNELS=kernels)) for kernels in ("1", "0"))
    assert ours < ggmls / 2 < size if active("") != "none" else ours > 0


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["Q4_0", "Q4_K_M", "Q8_0"])
def test_predictions_of_a_real_model(tmp_path, smollm2_path, quantize):
    full = modelgen.copy_model(smollm2_path, tmp_path / "full.gguf", f32=True, metadata={"general.file_type": 0})
    oracle.quantize(full, tmp_path / "q.gguf", quantize, 1)
    exact = modelgen.copy_model(tmp_path / "q.gguf", tmp_path / "exact.gguf", f32=True)
    text = Path(__file__).parents[1] / "extern/llama.cpp/include/llama.h"  # the same for everyone: its hash is pinned
    found = json.loads(child.run(PREDICTIONS, tmp_path / "q.gguf", exact, text))
    # Kullback-Leibler divergence to the same weights in F32 (at most 6 % apart in five types). The perplexity itself, of 1,020
    # predictions, moves by 0.3 % with the rounding of the activations alone, ggml's or ours, so its measure here is that noise.
    assert found["packed"] < 1.2 * found["plain"]
    assert abs(found["perplexity"]) < 4 * found["noise"] < 0.02


def test_info_says_what_the_kernels_multiply(models):
    script = """
        import json, pathlib, sys
        from lfmfast.cli.info import collect
        print(json.dumps([collect(pathlib.Path(path), 512)["kernels"] for path in sys.argv[1:]]))
    """
    for kernels in (active(""), "0"):
        quantized, full = json.loads(child.run(script, *models("tiny-wide", "Q4_K_M"), LFMFAST_KERNELS=kernels))
        assert full["types"] == [] and full["share"] == 0
        if kernels in ("0", "none"):
            assert quantized == {"name": "none", "types": [], "share": 0}
        else:
            assert quantized["name"] == kernels and set(quantized["types"]) == {"q4_K", "q6_K"} and quantized["share"] > 0.98


def test_kernels_can_be_switched_off_and_named():
    assert active("0") == active("no such set") == "none"
    assert active("") == active("1") in ("none", "avx2", "avxvnni", "avx512vnni", "amx", "dotprod", "i8mm")
