"""llama.cpp's model, context, batch and sampler chain, as close to the C API as is safe.

Everything blocking runs without the GIL, logits are a view of llama.cpp's own buffer, and what would make ggml end the
process raises an exception. A greedy chat turn by hand::

    model = Model.load("model.gguf")
    context = Context(model, n_ctx=2048)
    chain = SamplerChain(model.n_vocab, temperature=0)
    batch = Batch(context.n_batch)
    tokens = model.tokenize("<|startoftext|><|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n", parse_special=True)
    position = 0
    while True:
        batch.clear()
        batch.extend(tokens, position)
        context.decode(batch)
        position += len(tokens)
        token = chain.sample(context.logits[-1])
        chain.accept(token)
        if model.is_eog(token):
            break
        print(model.detokenize([token]), end="", flush=True)
        tokens = [token]
"""

from __future__ import annotations

from lfmfast._context import Batch, Context
from lfmfast._model import Model, read_gguf
from lfmfast._sampler import SamplerChain, log_probs

__all__ = ["Batch", "Context", "Model", "SamplerChain", "log_probs", "read_gguf"]
