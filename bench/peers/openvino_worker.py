"""OpenVINO GenAI's continuous batching behind lines of JSON. It runs in its own environment (openvino.py), so it imports
nothing else of this folder.

    {"id": 1, "tokens": [1, 2, 3], "max_tokens": 64, "seed": 1, "temperature": 0.1, ...}     a line on stdin
    {"id": 1, "n": 1} ...                                                                    a line on stdout per token
    {"id": 1, "done": true}
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from typing import Any

import numpy as np
import openvino
import openvino_genai


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def receive(requests: queue.SimpleQueue[Any]) -> None:
    """Requests from stdin; None at its end."""
    for line in sys.stdin:
        requests.put(json.loads(line))
    requests.put(None)


def main(folder: str, n_parallel: int, properties: str) -> None:
    """Answer until stdin ends."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs, scheduler.num_kv_blocks = 2048, n_parallel, 4096
    scheduler.enable_prefix_caching = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", json.loads(properties), {}, {})
    say(ready=openvino_genai.__version__)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=receive, args=(requests,), daemon=True).start()
    running: dict[int, Any] = {}
    while True:
        while not running or not requests.empty():
            request = requests.get()
            if request is None:
                return
            config = openvino_genai.GenerationConfig(
                max_new_tokens=request["max_tokens"], ignore_eos=True, do_sample=True, temperature=request["temperature"],
                top_k=request["top_k"], repetition_penalty=request["repeat_penalty"], rng_seed=request["seed"])
            tokens = openvino.Tensor(np.array([request["tokens"]], np.int64))
            running[request["id"]] = pipeline.add_request(request["id"], tokens, config)
        pipeline.step()
        for number, handle in list(running.items()):
            while handle.can_read():
                for output in handle.read().values():
                    for _ in output.generated_ids:
                        say(id=number, n=1)
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                del running[number]
                say(id=number, done=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
