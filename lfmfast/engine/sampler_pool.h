// Samplers for use from several threads, and a batch of them on several threads. Pure: no llama.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/sampler.h"

namespace lfmfast {

// A sampler behind a lock: calls from several threads take turns.
class shared_sampler {
  public:
    shared_sampler(const sampler_params & params, int32_t n_vocab) : sampler_(params, n_vocab) {}

    int32_t sample(const float * logits) {
        std::lock_guard<std::mutex> lock(mutex_);
        return sampler_.sample(logits);
    }
    void accept(const std::vector<int32_t> & tokens) {
        std::lock_guard<std::mutex> lock(mutex_);
        for (const int32_t token : tokens) sampler_.accept(token);
    }
    void reset() {
        std::lock_guard<std::mutex> lock(mutex_);
        sampler_.reset();
    }
    std::unique_ptr<shared_sampler> clone() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return std::unique_ptr<shared_sampler>(new shared_sampler(sampler_));
    }
    int32_t  n_vocab() const { return sampler_.n_vocab(); }
    uint32_t seed() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return sampler_.seed();
    }
    uint64_t n_tied() const {
        std::lock_guard<std::mutex> lock(mutex_);
        return sampler_.n_tied();
    }

  private:
    explicit shared_sampler(const sampler & other) : sampler_(other) {}

    mutable std::mutex mutex_;
    sampler            sampler_;
};

// Calls work(0) to work(n - 1), each once, on up to n_threads threads of a pool that stays. `work` must not throw.
void run_parallel(size_t n, size_t n_threads, const std::function<void(size_t)> & work);

// One row's result: a token, or why there is none.
struct sampled {
    int32_t     token = -1;
    std::string error;
};

// Samples row i of `logits` (rows of n_vocab, one after another) with samplers[i], on up to n_threads threads of a pool that
// stays. A row's result depends on its own sampler only, so it is the same for any number of threads. Throws
// error_code::invalid_argument for a sampler that is listed twice (the order would decide) or has another n_vocab.
std::vector<sampled> sample_batch(const float * logits, int32_t n_vocab, const std::vector<shared_sampler *> & samplers,
                                  int n_threads);

}  // namespace lfmfast
