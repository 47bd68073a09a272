// Passes that do not depend on what else is computed: see kernels/exact.h.
#pragma once

struct ggml_threadpool;

namespace lfmfast {

// For the passes that run on a pool. False: the CPU backend in use has no such thing, as our kernels are not in use.
bool set_exact(ggml_threadpool * pool, bool on);

}  // namespace lfmfast
