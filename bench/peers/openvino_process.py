"""Runs in OpenVINO's own environment (openvino.py): exports a model, measures it, or writes its logits."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

N_PREFILLED, N_STEPS = 16, 24  # as in bench.kernels


def export(source: str, target: str) -> None:
    """From Hugging Face's format, weights of 4 bits."""
    import openvino
    import openvino_tokenizers
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    from transformers import PreTrainedTokenizerFast

    settings = OVWeightQuantizationConfig(bits=4, sym=True, group_size=128, ratio=1.0)
    OVModelForCausalLM.from_pretrained(source, export=True, compile=False, quantization_config=settings).save_pretrained(target)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{source}/tokenizer.json", eos_token="<|im_end|>")
    parts = openvino_tokenizers.convert_tokenizer(tokenizer, with_detokenizer=True)
    for name, part in zip(("tokenizer", "detokenizer"), parts, strict=True):
        openvino.save_model(part, f"{target}/openvino_{name}.xml")


# --- what is above makes the models: a change of it makes new ones ---


def properties(n_threads: int) -> dict[str, Any]:
    """The fastest ones of those that were tried: without them activations stay in F32, or are quantised in groups of 32."""
    return {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 128, "INFERENCE_NUM_THREADS": n_threads}


def measure(folder: str, n_threads: int, n_prompt: int, sequences: list[int]) -> dict[str, float]:
    """Tokens per second of a prompt and of steps of several sequences, by the pipeline that serves several."""
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = max(n_prompt, N_PREFILLED * max(sequences))
    scheduler.max_num_seqs = max(sequences)
    scheduler.num_kv_blocks = 4096
    scheduler.enable_prefix_caching = False
    begin = time.perf_counter()
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties(n_threads), {}, {})
    result = {"load": time.perf_counter() - begin}
    tokens = np.random.default_rng(0).integers(20, 1200, 4096)
    n_requests = 0

    def ask(prompt: Any, n_tokens: int) -> Any:
        nonlocal n_requests
        n_requests += 1
        config = openvino_genai.GenerationConfig(max_new_tokens=n_tokens, ignore_eos=True, do_sample=False)
        return pipeline.add_request(n_requests, openvino.Tensor(np.ascontiguousarray(prompt.reshape(1, -1))), config)

    def seconds() -> float:
        begin = time.perf_counter()
        pipeline.step()
        return time.perf_counter() - begin

    def finish(asked: list[Any]) -> None:
        while pipeline.has_non_finished_requests():
            pipeline.step()
        for request in asked:
            request.read_all()

    times = []
    for _ in range(4):
        asked = ask(tokens[:n_prompt], 1)
        times.append(seconds())
        if pipeline.has_non_finished_requests():
            raise RuntimeError(f"{n_prompt} tokens took more than one pass")
        asked.read_all()
    result[f"prefill {n_prompt}"] = n_prompt / min(times[1:])
    for n in sequences:
        several = [ask(tokens[N_PREFILLED * i:][:N_PREFILLED], N_STEPS + 2) for i in range(n)]
        seconds()
        result[f"decode {n}"] = n / statistics.median(seconds() for _ in range(N_STEPS))
        finish(several)
    return result


def logits(folder: str, tokens: list[int], target: str) -> None:
    """Of a prompt, all positions."""
    import numpy as np
    import openvino

    model = openvino.Core().compile_model(f"{folder}/openvino_model.xml", "CPU", properties(1))
    row = np.array([tokens])
    inputs = {"input_ids": row, "attention_mask": np.ones_like(row), "beam_idx": np.zeros(1, np.int32)}
    np.save(target, model.create_infer_request().infer(inputs)["logits"][0].astype(np.float32))


def main() -> None:
    """Command line: what to do, and its arguments."""
    what, folder, *rest = sys.argv[1:]
    if what == "export":
        export(folder, rest[0])
    elif what == "measure":
        print(json.dumps(measure(folder, **json.loads(rest[0]))))
    else:
        logits(folder, json.loads(rest[0]), rest[1])


if __name__ == "__main__":
    main()
