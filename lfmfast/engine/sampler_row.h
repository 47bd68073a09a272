// A row of logits as the penalties leave it, without a copy of it: the raw logits and the few that differ. It is cut into
// blocks of 64; the maximum of each block is all that most selections need to look at again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/sampler.h"
#include "engine/sampler_stages.h"
#include "engine/simd.h"

namespace lfmfast {

class sampler_row {
  public:
    // Reads the row once; the logits must outlive it. Throws error_code::sampling for NaN, +inf, or a row all of -inf.
    void read(const float * logits, size_t n);

    // Logits that replace those of the row, ascending by token.
    void patch(const std::vector<logit_patch> & patches);

    float  max() const { return max_; }
    size_t n_blocks() const { return n_blocks_; }
    float  at(size_t token) const;

    // The first token with the highest logit.
    int32_t argmax() const;

    // All tokens with a logit >= floor, ascending.
    void collect(float floor, std::vector<candidate> & out) const;

    // A floor that the k highest logits reach, and not many more do; -inf if there are too few above -inf.
    float floor_of_highest(size_t k) const;

    // The k highest, descending, as std::partial_sort over the whole row leaves them. Needs 4 k <= n_blocks. True: some of
    // them, or one of them and the next, are equal, so that the whole row's order mattered (slower).
    bool highest(size_t k, std::vector<candidate> & out) const;

    // Per block, the sum of exp(logit / temp - max / temp), see simd_kernels::exp_sums; the return value is their sum.
    double exp_sums(float temp, std::vector<double> & sums) const;

    // The float sum of expf(logit - max) in the order of the tokens, bit for bit as a loop over all of them makes it.
    float softmax_sum() const;

    // The tokens of a block; out has room for simd_block. Beyond the row's end the values are -inf.
    const float * block(size_t b, float * space) const;

  private:
    void  highest_among_equals(size_t k, std::vector<candidate> & out) const;
    float highest_maximum() const;
    bool  patched(size_t b) const { return patched_[b / 64] >> (b % 64) & 1; }

    const float *            logits_ = nullptr;
    size_t                   n_ = 0, n_blocks_ = 0;
    float                    max_ = 0.0f;
    std::vector<float>       block_max_;  // padded with -inf to a multiple of simd_block
    std::vector<logit_patch> patches_;
    std::vector<uint64_t>    patched_;    // a bit per block: it has patches
};

// One per thread, so that nothing is allocated per token.
sampler_row & thread_row();

}  // namespace lfmfast
