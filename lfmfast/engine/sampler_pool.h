// Samplers for use from several threads, and a batch of them on several threads. Pure: no llama.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
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

}  // namespace lfmfast
