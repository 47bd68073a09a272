#include "engine/sampler.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <string>

#include "engine/error.h"
#include "engine/sampler_stages.h"

namespace lfmfast {

namespace {

constexpr uint32_t random_seed = 0xFFFFFFFF;
constexpr float    minus_inf   = -std::numeric_limits<float>::infinity();

uint32_t fresh_seed() {
    std::random_device device;
    // Where the device is a plain PRNG it gives the same numbers in every process.
    const uint64_t now = static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
    const uint32_t seed = device() ^ (device.entropy() == 0 ? static_cast<uint32_t>(now ^ (now >> 32)) : 0);
    return seed == random_seed ? 0 : seed;
}

[[noreturn]] void refuse(const std::string & name, const std::string & value, const std::string & limit) {
    throw error(error_code::invalid_argument, name + " must be " + limit + ", not " + value);
}

void require(bool ok, const char * name, double value, const char * limit) {
    if (!ok) {
        std::string text = std::to_string(value);
        text.erase(std::max(text.find_last_not_of('0'), text.find('.') + 1) + 1);
        refuse(name, text, limit);
    }
}

void validate(const sampler_params & p, int32_t n_vocab) {
    require(n_vocab > 0, "n_vocab", n_vocab, "positive");
    for (const auto & bias : p.logit_bias) {
        if (bias.first < 0 || bias.first >= n_vocab) {
            refuse("logit_bias", "for token " + std::to_string(bias.first),
                   "for tokens from 0 to " + std::to_string(n_vocab - 1));
        }
        require(bias.second < std::numeric_limits<float>::infinity(), "logit_bias", bias.second, "finite or -inf");
    }
    const auto amount = [](float x) { return std::isfinite(x) && std::fabs(x) <= 1e6f; };
    require(p.penalty_last_n >= -1, "penalty_last_n", p.penalty_last_n, "-1 or more");
    require(p.penalty_repeat >= 1e-6f && p.penalty_repeat <= 1e6f, "penalty_repeat", p.penalty_repeat, "from 1e-6 to 1e6");
    require(amount(p.penalty_freq), "penalty_freq", p.penalty_freq, "from -1e6 to 1e6");
    require(amount(p.penalty_present), "penalty_present", p.penalty_present, "from -1e6 to 1e6");
    require(!std::isnan(p.top_p), "top_p", p.top_p, "a number");
    require(!std::isnan(p.min_p) && p.min_p <= 1.0f, "min_p", p.min_p, "at most 1");
    require(std::isfinite(p.temp), "temp", p.temp, "finite");
    require(p.dry_multiplier >= 0.0f && p.dry_multiplier <= 1e6f, "dry_multiplier", p.dry_multiplier, "from 0 to 1e6");
    require(std::isfinite(p.dry_base), "dry_base", p.dry_base, "finite");
    require(p.dry_allowed_length >= 0, "dry_allowed_length", p.dry_allowed_length, "0 or more");
    require(p.dry_penalty_last_n >= -1, "dry_penalty_last_n", p.dry_penalty_last_n, "-1 or more");
    require(!std::isnan(p.top_n_sigma), "top_n_sigma", p.top_n_sigma, "a number");
    require(!std::isnan(p.typ_p), "typ_p", p.typ_p, "a number");
    require(!std::isnan(p.xtc_probability), "xtc_probability", p.xtc_probability, "a number");
    require(!std::isnan(p.xtc_threshold), "xtc_threshold", p.xtc_threshold, "a number");
    require(std::isfinite(p.dynatemp_range), "dynatemp_range", p.dynatemp_range, "finite");
    require(std::isfinite(p.dynatemp_exponent), "dynatemp_exponent", p.dynatemp_exponent, "finite");
    require(p.mirostat >= 0 && p.mirostat <= 2, "mirostat", p.mirostat, "0, 1 or 2");
    require(std::isfinite(p.mirostat_tau), "mirostat_tau", p.mirostat_tau, "finite");
    require(std::isfinite(p.mirostat_eta), "mirostat_eta", p.mirostat_eta, "finite");
    require(p.min_keep >= 0, "min_keep", p.min_keep, "0 or more");
    for (size_t i = 0; i < p.stages.size(); ++i) {
        if (std::count(p.stages.begin(), p.stages.end(), p.stages[i]) > 1) {
            throw error(error_code::invalid_argument, "a stage is listed twice in samplers");
        }
    }
}

[[noreturn]] void refuse_row(float worst) {
    throw error(error_code::sampling, std::isnan(worst) ? "the logits contain NaN"
                                      : worst > 0       ? "the logits contain +inf"
                                                        : "no token is left to sample: every logit is -inf");
}

}  // namespace

dry_breakers make_dry_breakers(const std::vector<std::vector<int32_t>> & sequences) {
    auto out = std::make_shared<std::vector<dry_breaker>>();
    for (const auto & s : sequences) {
        if (!s.empty()) out->push_back({s[0], std::vector<int32_t>(s.begin() + 1, s.end())});
    }
    std::stable_sort(out->begin(), out->end(), [](const dry_breaker & a, const dry_breaker & b) { return a.head < b.head; });
    return out;
}

bool token_history::push(int32_t token, int32_t & dropped) {
    if (ring_.size() < limit_) {
        ring_.push_back(token);
        return false;
    }
    if (limit_ == 0) return false;
    dropped      = ring_[next_];
    ring_[next_] = token;
    next_        = next_ + 1 == limit_ ? 0 : next_ + 1;
    return true;
}

void token_history::clear() {
    ring_.clear();
    next_ = 0;
}

int32_t token_history::back(size_t i) const {
    return ring_[(next_ + ring_.size() - 1 - i) % ring_.size()];
}

sampler::sampler(const sampler_params & params, int32_t n_vocab)
    : params_((validate(params, n_vocab), params)), n_vocab_(n_vocab),
      window_(penalties_on() ? params.penalty_last_n : 0), dry_history_(dry_on() ? params.dry_penalty_last_n : 0) {
    for (const auto stage : params_.stages) {
        if (enabled(stage)) active_.push_back(stage);
    }
    plan_ = make_plan();
    reset();
}

bool sampler::penalties_on() const {
    return params_.penalty_last_n != 0 &&
           (params_.penalty_repeat != 1.0f || params_.penalty_freq != 0.0f || params_.penalty_present != 0.0f);
}

bool sampler::dry_on() const {
    return params_.dry_multiplier != 0.0f && params_.dry_base >= 1.0f && params_.dry_penalty_last_n != 0;
}

bool sampler::enabled(sampler_stage stage) const {
    switch (stage) {
        case sampler_stage::penalties:   return penalties_on();
        case sampler_stage::dry:         return dry_on();
        case sampler_stage::top_n_sigma: return params_.top_n_sigma > 0.0f;
        case sampler_stage::top_k:       return params_.top_k > 0;
        case sampler_stage::typ_p:       return params_.typ_p < 1.0f;
        case sampler_stage::top_p:       return params_.top_p < 1.0f;
        case sampler_stage::min_p:       return params_.min_p > 0.0f;
        case sampler_stage::xtc:         return params_.xtc_probability > 0.0f && params_.xtc_threshold <= 0.5f;
        case sampler_stage::temperature: return params_.temp != 1.0f || params_.dynatemp_range > 0.0f;
    }
    return false;
}

void sampler::reset() {
    seed_ = params_.seed == random_seed ? fresh_seed() : params_.seed;
    rng_.seed(seed_);
    rng_xtc_.seed(seed_);
    mirostat_mu_ = 2.0f * params_.mirostat_tau;
    window_.clear();
    counts_.clear();
    dry_history_.clear();
}

void sampler::accept(int32_t token) {
    if (token < 0 || token >= n_vocab_) {
        throw error(error_code::invalid_argument,
                    "token must be from 0 to " + std::to_string(n_vocab_ - 1) + ", not " + std::to_string(token), token,
                    n_vocab_ - 1);
    }
    int32_t dropped = -1;
    if (dry_on()) dry_history_.push(token, dropped);
    if (!penalties_on()) return;
    const auto find = [this](int32_t t) {
        return std::lower_bound(counts_.begin(), counts_.end(), t,
                                [](const token_count & c, int32_t x) { return c.token < x; });
    };
    const bool full = window_.push(token, dropped);
    auto       it   = find(token);
    if (it != counts_.end() && it->token == token) {
        ++it->count;
    } else {
        counts_.insert(it, {token, 1});
    }
    if (full) {
        it = find(dropped);
        if (--it->count == 0) counts_.erase(it);
    }
}

// How much DRY takes off each token that would lengthen a repetition, ascending by token; false: DRY does nothing here.
bool sampler::dry_penalties(std::vector<std::pair<int32_t, float>> & out) {
    out.clear();
    const int n = static_cast<int>(dry_history_.size());
    if (n <= params_.dry_allowed_length) return false;
    thread_local std::vector<int32_t> recent;  // newest first
    thread_local std::vector<int>     z;       // z[k]: how many tokens from k on equal those from 0 on
    recent.resize(n);
    for (int i = 0; i < n; ++i) recent[i] = dry_history_.back(i);

    static const std::vector<dry_breaker> none;
    const auto & breakers = params_.dry_sequence_breakers ? *params_.dry_sequence_breakers : none;
    const auto   starting = [&](int32_t head) {
        return std::equal_range(breakers.begin(), breakers.end(), dry_breaker{head, {}},
                                [](const dry_breaker & a, const dry_breaker & b) { return a.head < b.head; });
    };
    // A repetition may not reach over the newest breaker.
    int limit = n;
    for (int i = 0; i < n; ++i) {
        int        longest = -1;
        const auto range   = starting(recent[i]);
        for (auto it = range.first; it != range.second; ++it) {
            const int length = static_cast<int>(it->tail.size());
            if (length <= longest || length > i) continue;
            if (std::equal(it->tail.begin(), it->tail.end(), recent.rbegin() + (n - i))) longest = length;
        }
        if (longest >= 0) {
            limit = i - longest;
            break;
        }
    }
    if (limit < params_.dry_allowed_length) return false;

    z.assign(n, 0);
    for (int k = 1, left = 0, right = 0; k < n; ++k) {  // Z-algorithm; [left, right) is the match that reaches furthest
        if (k < right) z[k] = std::min(right - k, z[k - left]);
        while (k + z[k] < n && recent[z[k]] == recent[k + z[k]]) ++z[k];
        if (k + z[k] > right) {
            left  = k;
            right = k + z[k];
        }
    }
    // The token that came after an earlier occurrence would go on with it.
    thread_local std::vector<std::pair<int32_t, int>> longest;
    longest.clear();
    for (int k = 1; k < n; ++k) {
        const int length = std::min(z[k], limit);
        if (length >= params_.dry_allowed_length) longest.emplace_back(recent[k - 1], length);
    }
    std::sort(longest.begin(), longest.end());
    int max_exponent = 0;  // keeps the power below float's maximum
    if (params_.dry_base > 1.000001f) max_exponent = static_cast<int>(88.7228391f / std::log(params_.dry_base));
    for (size_t i = 0; i < longest.size(); ++i) {
        if (i + 1 < longest.size() && longest[i + 1].first == longest[i].first) continue;
        const auto range = starting(longest[i].first);
        if (std::any_of(range.first, range.second, [](const dry_breaker & b) { return b.tail.empty(); })) continue;
        int exponent = longest[i].second - params_.dry_allowed_length;
        if (max_exponent > 0) exponent = std::min(exponent, max_exponent);
        const float penalty = params_.dry_multiplier * std::pow(params_.dry_base, exponent);
        out.emplace_back(longest[i].first, penalty);
    }
    return true;
}

void sampler::apply(sampler_stage stage, candidates & c) {
    const size_t min_keep = static_cast<size_t>(params_.min_keep);
    switch (stage) {
        case sampler_stage::penalties: return stage_penalties(c, counts_, params_);
        case sampler_stage::dry: {
            thread_local std::vector<std::pair<int32_t, float>> amounts;
            if (dry_penalties(amounts)) stage_subtract(c, amounts);
            return;
        }
        case sampler_stage::top_n_sigma: return stage_top_n_sigma(c, params_.top_n_sigma);
        case sampler_stage::top_k:       return stage_top_k(c, params_.top_k);
        case sampler_stage::typ_p:       return stage_typ_p(c, params_.typ_p, min_keep);
        case sampler_stage::top_p:       return stage_top_p(c, params_.top_p, min_keep);
        case sampler_stage::min_p:       return stage_min_p(c, params_.min_p, min_keep);
        case sampler_stage::xtc:
            return stage_xtc(c, params_.xtc_probability, params_.xtc_threshold, min_keep, rng_xtc_);
        case sampler_stage::temperature:
            if (params_.dynatemp_range > 0.0f) {
                return stage_dynamic_temperature(c, params_.temp, params_.dynatemp_range, params_.dynatemp_exponent);
            }
            return stage_temperature(c, params_.temp);
    }
}

int32_t sampler::sample(const float * logits) {
    return plan_ == plan::reference ? sample_reference(logits) : sample_fused(logits);
}

// llama.cpp's own way: a list of every token, through every stage.
int32_t sampler::sample_reference(const float * logits) {
    thread_local std::vector<candidate> buffer;
    buffer.resize(n_vocab_);
    float max = minus_inf;
    for (int32_t i = 0; i < n_vocab_; ++i) {
        if (std::isnan(logits[i])) refuse_row(logits[i]);
        max       = std::max(max, logits[i]);
        buffer[i] = {i, logits[i], 0.0f};
    }
    if (!std::isfinite(max)) refuse_row(max);
    for (const auto & bias : params_.logit_bias) buffer[bias.first].logit += bias.second;
    candidates c{buffer.data(), buffer.size(), false, true};
    if (params_.mirostat != 0) return sample_mirostat(c);
    for (const auto stage : active_) apply(stage, c);
    return c.data[stage_dist(c, rng_)].id;
}

int32_t sampler::sample_mirostat(candidates & c) {
    if (params_.temp != 1.0f) stage_temperature(c, params_.temp);
    const size_t i = params_.mirostat == 1
                         ? stage_mirostat(c, n_vocab_, params_.mirostat_tau, params_.mirostat_eta, mirostat_mu_, rng_)
                         : stage_mirostat_v2(c, params_.mirostat_tau, params_.mirostat_eta, mirostat_mu_, rng_);
    return c.data[i].id;
}

}  // namespace lfmfast
