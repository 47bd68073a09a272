#pragma once

struct ggml_tensor;

namespace ggml::cpu {
class tensor_traits;
}

// Passes whose results do not depend on how many rows they have, nor on the number of threads.
//
// Our own products hold that by themselves. For all others ggml has fast ways that it takes from some number of rows on, whose
// sums run in another order; its reference way (use_ref) sums each element by itself. It can be asked for by whoever owns a
// backend, which is llama.cpp here, so it is asked for at each node.
namespace lfmfast::kernels {

// What asks for it, at a node that is not ours; null where no context wants it or nothing depends on it.
ggml::cpu::tensor_traits * exact_traits(const ggml_tensor * op);

}  // namespace lfmfast::kernels
