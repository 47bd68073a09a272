#include "kernels/exact.h"

#include "kernels/matmul.h"

#include "ggml-cpu-impl.h"
#include "traits.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

// Passes on `pool` are exact from now on, or no more. 0: they can't be, because our kernels are not in use.
extern "C" {
GGML_BACKEND_API int lfmfast_set_exact(ggml_threadpool * pool, int on);
}

namespace lfmfast::kernels {

namespace {

// The pools of the contexts that want it: a node knows its pool, and nothing else of its context.
class exact_pools {
public:
    void set(ggml_threadpool * pool, bool on) {
        std::lock_guard<std::mutex> lock(mutex_);
        pools_.erase(std::remove(pools_.begin(), pools_.end(), pool), pools_.end());
        if (on) pools_.push_back(pool);
        n_.store(pools_.size(), std::memory_order_release);
    }

    bool any() const { return n_.load(std::memory_order_acquire) != 0; }

    bool has(ggml_threadpool * pool) {
        std::lock_guard<std::mutex> lock(mutex_);
        return std::find(pools_.begin(), pools_.end(), pool) != pools_.end();
    }

private:
    std::mutex                     mutex_;
    std::vector<ggml_threadpool *> pools_;
    std::atomic<size_t>            n_{0};
};

exact_pools pools;

class traits : public ggml::cpu::tensor_traits {
    bool work_size(int, const ggml_tensor *, size_t &) override { return false; }

    // ggml goes on with the node, and with the rest of the graph, in the reference way.
    bool compute_forward(ggml_compute_params * params, ggml_tensor *) override {
        if (!params->use_ref && pools.has(params->threadpool)) params->use_ref = true;
        return false;
    }
};

}  // namespace

ggml::cpu::tensor_traits * exact_traits(const ggml_tensor * op) {
    static traits exact;
    const bool    depends = op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID || op->op == GGML_OP_FLASH_ATTN_EXT;
    return depends && pools.any() ? &exact : nullptr;
}

}  // namespace lfmfast::kernels

int lfmfast_set_exact(ggml_threadpool * pool, int on) {
    if (!lfmfast::kernels::registered()) return 0;
    lfmfast::kernels::pools.set(pool, on != 0);
    return 1;
}
