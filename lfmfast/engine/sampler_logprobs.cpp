#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "engine/error.h"
#include "engine/sampler.h"
#include "engine/sampler_row.h"

namespace lfmfast {

namespace {

// The n highest of the row, descending, equal ones by ascending token.
void highest_by_token(const sampler_row & row, size_t n, std::vector<candidate> & out) {
    constexpr float minus_inf = -std::numeric_limits<float>::infinity();
    row.collect(n * 4 <= row.n_blocks() ? row.floor_of_highest(n) : minus_inf, out);
    std::partial_sort(out.begin(), out.begin() + n, out.end(), [](const candidate & a, const candidate & b) {
        return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
    });
    out.resize(n);
}

}  // namespace

float log_probs(const float * logits, int32_t n_vocab, int32_t token, size_t n_top, std::vector<token_logprob> & top) {
    if (token < 0 || token >= n_vocab) {
        throw error(error_code::invalid_argument,
                    "token must be from 0 to " + std::to_string(n_vocab - 1) + ", not " + std::to_string(token), token,
                    n_vocab - 1);
    }
    thread_local std::vector<double>    sums;
    thread_local std::vector<candidate> highest;
    sampler_row & row = thread_row();
    row.read(logits, static_cast<size_t>(n_vocab));
    const double log_sum = std::log(row.exp_sums(1.0f, sums)) + row.max();
    top.clear();
    if (n_top > 0) {
        highest_by_token(row, std::min(n_top, static_cast<size_t>(n_vocab)), highest);
        for (const auto & c : highest) top.push_back({c.id, static_cast<float>(c.logit - log_sum)});
    }
    return static_cast<float>(logits[token] - log_sum);
}

}  // namespace lfmfast
