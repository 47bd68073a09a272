"""The model generator and the quantiser that tests and benchmarks stand on."""

import gguf
import modelgen
import numpy as np
import oracle
import pytest


@pytest.mark.parametrize(("shape", "count"), [("350M", 354_483_968), ("700M", 742_489_344), ("1.2B", 1_170_340_608)])
def test_real_shapes_have_the_published_parameter_counts(shape, count):
    assert modelgen.n_params(shape) == count


def test_vocabulary_a_has_the_ids_of_the_real_one():
    vocab = modelgen.vocabulary("A")
    assert len(vocab.tokens) == len(set(vocab.tokens)) == len(vocab.types) == 65536
    ids = {"<|pad|>": 0, "<|startoftext|>": 1, "<|endoftext|>": 2, "<|im_start|>": 6, "<|im_end|>": 7, "<|reserved_4|>": 14,
           "<|tool_call_start|>": 10, "<image>": 396, "<|img_row_10_col_10|>": 496, "<|image_end|>": 499, "<think>": 64400,
           "</think>": 64401}
    assert {t: vocab.id(t) for t in ids} == ids
    # A byte-level BPE: every merge joins two tokens to a third one.
    known = set(vocab.tokens)
    assert all(len(m.split(" ")) == 2 and {*m.split(" "), m.replace(" ", "")} <= known for m in vocab.merges)


def test_quantised_model_is_close_to_its_source(tmp_path):
    full = modelgen.write_model(tmp_path / "full.gguf", "tiny-wide", dtype="F32")
    oracle.quantize(full, tmp_path / "q8.gguf", "Q8_0")
    before, after = ({t.name: t for t in gguf.GGUFReader(tmp_path / f).tensors} for f in ("full.gguf", "q8.gguf"))
    assert before.keys() == after.keys()
    tensor = after["blk.0.ffn_up.weight"]
    assert tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0
    error = np.abs(gguf.dequantize(tensor.data, tensor.tensor_type) - before[tensor.name].data).max()
    assert 0 < error < np.abs(before[tensor.name].data).max() / 127


def test_a_changed_llama_h_is_noticed():
    header = (oracle.llama_cpp_dir() / "include" / "llama.h").read_text("utf8")
    oracle.check_layout(header)
    for old, new in (("bool dry_run; ", ""), ("int32_t nthread; ", "int64_t nthread; "),
                     ("MOSTLY_Q8_0          = 7", "MOSTLY_Q8_0          = 8")):
        assert old in header
        with pytest.raises(RuntimeError, match=r"llama\.h"):
            oracle.check_layout(header.replace(old, new, 1))


def test_the_oracle_reports_llama_cpps_failure(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF nonsense")
    with pytest.raises(RuntimeError, match="exit status"):
        oracle.quantize(tmp_path / "bad.gguf", tmp_path / "out.gguf", "Q8_0")


def test_copy_keeps_values_and_changes_what_it_is_told(tmp_path):
    source = modelgen.FIXTURE / "lfm2-tiny-f16.gguf"
    copied = gguf.GGUFReader(modelgen.copy_model(source, tmp_path / "m.gguf", f32=True, metadata={"general.name": "Other"},
                                                 without=("blk.0.ffn_norm.weight",)))
    original = gguf.GGUFReader(source)
    assert copied.fields["general.name"].contents() == "Other"
    same = [k for k in original.fields if k != "general.name" and not k.startswith("GGUF.")]
    assert {k: copied.fields[k].contents() for k in same} == {k: original.fields[k].contents() for k in same}
    tensors = {t.name: t.data for t in original.tensors}
    assert [t.name for t in copied.tensors] == [n for n in tensors if n != "blk.0.ffn_norm.weight"]
    assert all(t.data.dtype == np.float32 and (t.data == tensors[t.name]).all() for t in copied.tensors)
