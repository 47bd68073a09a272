// The stages of llama.cpp's chain over an explicit list of candidates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "engine/sampler.h"

namespace lfmfast {

struct candidate {
    int32_t id;
    float   logit;
    float   p;
};

struct candidates {
    candidate * data;
    size_t      size;
    bool        sorted   = false;  // descending by logit
    bool        by_token = false;  // data[i].id == i
};

// Throws error_code::sampling if the highest logit is -inf, +inf or NaN.
void require_finite(float max);

// A logit after the penalties for a token that occurs `count` times in the window.
float penalised(float logit, int32_t count, const sampler_params & params);

void stage_penalties(candidates & c, const std::vector<token_count> & counts, const sampler_params & params);
void stage_subtract(candidates & c, const std::vector<std::pair<int32_t, float>> & amounts);  // ascending by token
void stage_top_n_sigma(candidates & c, float n);
void stage_top_k(candidates & c, int32_t k);
void stage_typ_p(candidates & c, float p, size_t min_keep);
void stage_top_p(candidates & c, float p, size_t min_keep);
void stage_min_p(candidates & c, float p, size_t min_keep);
void stage_xtc(candidates & c, float probability, float threshold, size_t min_keep, std::mt19937 & rng);
void stage_temperature(candidates & c, float temp);
void stage_dynamic_temperature(candidates & c, float temp, float range, float exponent);

// The final pick: an index into c. Throws error_code::sampling before it draws.
size_t stage_dist(candidates & c, std::mt19937 & rng);
size_t stage_mirostat(candidates & c, int32_t n_vocab, float tau, float eta, float & mu, std::mt19937 & rng);
size_t stage_mirostat_v2(candidates & c, float tau, float eta, float & mu, std::mt19937 & rng);

}  // namespace lfmfast
