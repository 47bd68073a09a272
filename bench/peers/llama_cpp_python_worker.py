"""llama-cpp-python behind lines of JSON. It runs in its own environment, so it imports nothing else of this folder.

    {"id": 1, "messages": [...], "max_tokens": 64, "seed": 1, "temperature": 0.1, ...}     a line on stdin
    {"id": 1, "text": " word"} ...                                                         a line on stdout per token
    {"id": 1, "done": true}

One request after another: the package has no other way.
"""

from __future__ import annotations

import json
import sys

import llama_cpp


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


def main(model_file: str, n_threads: int, n_ctx: int) -> None:
    """Answer until stdin ends."""
    model = llama_cpp.Llama(model_file, n_ctx=n_ctx, n_threads=n_threads, n_threads_batch=n_threads, verbose=False)
    say(ready=llama_cpp.llama_print_system_info().decode())
    for line in sys.stdin:
        request = json.loads(line)
        number = request.pop("id")
        for chunk in model.create_chat_completion(stream=True, **request):
            text = chunk["choices"][0]["delta"].get("content")
            if text:
                say(id=number, text=text)
        say(id=number, done=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
