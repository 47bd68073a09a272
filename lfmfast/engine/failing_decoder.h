// For tests: a decoder that fails now and then, as llama.cpp can: it breaks a pass off in the middle of the graph, or refuses
// to cut a sequence. Pure: no llama.h.
#pragma once

#include "engine/decoder.h"

#include <memory>
#include <random>

namespace lfmfast {

class failing_decoder : public decoder {
  public:
    // Every n-th call or so fails; which ones, `seed` decides.
    failing_decoder(std::unique_ptr<decoder> inner, uint32_t seed, uint32_t n) : inner_(std::move(inner)), rng_(seed), n_(n) {}

    int64_t n_ctx_seq() const override { return inner_->n_ctx_seq(); }
    int64_t n_ubatch() const override { return inner_->n_ubatch(); }
    int64_t n_seq_max() const override { return inner_->n_seq_max(); }
    const float * logits() override { return failed_ ? nullptr : inner_->logits(); }
    void    seq_add(int64_t seq, int64_t p0, int64_t p1, int64_t shift) override { inner_->seq_add(seq, p0, p1, shift); }
    bool    can_shift() const override { return inner_->can_shift(); }
    int64_t seq_pos_min(int64_t seq) override { return inner_->seq_pos_min(seq); }
    void    clear(bool data) override { inner_->clear(data); }
    void    set_n_threads(int64_t n, int64_t n_batch) override { inner_->set_n_threads(n, n_batch); }
    std::vector<uint8_t> state_seq_get(int64_t seq, bool partial) override { return inner_->state_seq_get(seq, partial); }

    void decode(const batch & batch, const stop_request * stop, const stop_request * stop_too) override;
    [[nodiscard]] bool seq_rm(int64_t seq, int64_t p0, int64_t p1) override;
    void state_seq_set(int64_t seq, const uint8_t * data, size_t size, bool partial) override;

  private:
    bool fails() { return rng_() % n_ == 0; }

    std::unique_ptr<decoder> inner_;
    std::mt19937             rng_;
    uint32_t                 n_;
    bool                     failed_ = false;
};

}  // namespace lfmfast
