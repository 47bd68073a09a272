// The usual chains without a list of all candidates. The stages before the first truncation change a few logits only
// (logit_bias, penalties, DRY); the first truncation (top_k, top_p, min_p, greedy, or the draw itself) selects from the row
// by SIMD comparisons, which are exact; the rest runs on the survivors as in sampler_stages.cpp.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "engine/error.h"
#include "engine/sampler.h"
#include "engine/sampler_row.h"
#include "engine/sampler_stages.h"

namespace lfmfast {

namespace {

// Calls change(logit) for the logit of each token of `items`, ascending, and merges the results into `patches`.
template <typename Items, typename Token, typename Change>
void merge(const float * logits, std::vector<logit_patch> & patches, const Items & items, Token token, Change change) {
    thread_local std::vector<logit_patch> merged;
    merged.clear();
    auto it = patches.begin();
    for (const auto & item : items) {
        const int32_t t = token(item);
        while (it != patches.end() && it->token < t) merged.push_back(*it++);
        const bool  known = it != patches.end() && it->token == t;
        const float logit = change(known ? it->logit : logits[t], item);
        merged.push_back({t, logit});
        if (known) ++it;
    }
    merged.insert(merged.end(), it, patches.end());
    patches.swap(merged);
}

}  // namespace

sampler::plan sampler::make_plan() const {
    if (params_.mirostat != 0) return plan::reference;
    size_t i = 0;
    while (i < active_.size() && (active_[i] == sampler_stage::penalties || active_[i] == sampler_stage::dry)) ++i;
    const size_t left    = active_.size() - i;
    const bool   dynamic = params_.dynatemp_range > 0.0f;
    if (left == 0) return plan::draw;
    switch (active_[i]) {
        case sampler_stage::top_k: {
            const size_t n_blocks = (static_cast<size_t>(n_vocab_) + simd_block - 1) / simd_block;
            return params_.top_k <= 128 && static_cast<size_t>(params_.top_k) * 4 <= n_blocks ? plan::top_k : plan::reference;
        }
        case sampler_stage::top_p: return n_vocab_ > 4096 ? plan::top_p : plan::reference;
        case sampler_stage::min_p: return plan::min_p;
        case sampler_stage::temperature:
            if (left > 1 || dynamic) return plan::reference;
            if (params_.temp <= 0.0f) return plan::greedy;
            return params_.temp >= 1e-6f && params_.temp <= 1e6f ? plan::draw : plan::reference;
        default: return plan::reference;
    }
}

// What logit_bias, penalties and DRY make of the logits they touch, ascending by token. Returns the number of stages done.
size_t sampler::patches(const float * logits, std::vector<logit_patch> & out) {
    out.clear();
    for (const auto & bias : params_.logit_bias) {  // in the order given, as equal tokens add up in float
        const auto it = std::lower_bound(out.begin(), out.end(), bias.first,
                                         [](const logit_patch & p, int32_t t) { return p.token < t; });
        if (it != out.end() && it->token == bias.first) {
            it->logit += bias.second;
        } else {
            out.insert(it, {bias.first, logits[bias.first] + bias.second});
        }
    }
    size_t i = 0;
    for (; i < active_.size(); ++i) {
        if (active_[i] == sampler_stage::penalties) {
            merge(logits, out, counts_, [](const token_count & c) { return c.token; },
                  [this](float logit, const token_count & c) { return penalised(logit, c.count, params_); });
        } else if (active_[i] == sampler_stage::dry) {
            thread_local std::vector<std::pair<int32_t, float>> amounts;
            if (!dry_penalties(amounts)) continue;
            merge(logits, out, amounts, [](const std::pair<int32_t, float> & a) { return a.first; },
                  [](float logit, const std::pair<int32_t, float> & a) { return logit - a.second; });
        } else {
            break;
        }
    }
    return i;
}

int32_t sampler::sample_fused(const float * logits) {
    thread_local std::vector<logit_patch> changed;
    thread_local std::vector<candidate>   survivors;
    sampler_row & row = thread_row();
    row.read(logits, static_cast<size_t>(n_vocab_));
    const size_t done = patches(logits, changed);
    row.patch(changed);
    require_finite(row.max());

    candidates c{nullptr, 0};
    switch (plan_) {
        case plan::top_k:
            if (row.highest(static_cast<size_t>(params_.top_k), survivors)) ++n_tied_;
            c.sorted = true;
            break;
        case plan::top_p:
            if (!nucleus(row, survivors)) {
                ++n_tied_;
                return sample_reference(logits);
            }
            c.sorted = true;
            break;
        case plan::min_p: {
            row.collect(std::max(row.max(), -FLT_MAX) + logf(params_.min_p), survivors);
            if (survivors.empty() || survivors.size() < static_cast<size_t>(params_.min_keep)) return sample_reference(logits);
            break;
        }
        case plan::greedy: {
            // All others have probability 0, so only a draw of exactly 0 takes another: the first of the list.
            const double u = std::uniform_real_distribution<double>(0.0, 1.0)(rng_);
            return u == 0.0 ? 0 : row.argmax();
        }
        case plan::draw: return draw_from_row(logits, row);
        case plan::reference: return sample_reference(logits);
    }
    c.data = survivors.data();
    c.size = survivors.size();
    for (size_t i = done + 1; i < active_.size(); ++i) apply(active_[i], c);
    return c.data[stage_dist(c, rng_)].id;
}

// top_p over the whole vocabulary; false: it needs more tokens than are worth sorting here, or equal ones decide.
bool sampler::nucleus(const sampler_row & row, std::vector<candidate> & out) const {
    const float total = row.softmax_sum();
    // Cuts `out`, sorted, after the token at which the sum reaches top_p.
    const auto cut = [&] {
        float sum = 0.0f;
        for (size_t i = 0; i < out.size(); ++i) {
            sum += expf(out[i].logit - row.max()) / total;
            if (sum >= params_.top_p && i + 1 >= static_cast<size_t>(params_.min_keep)) {
                const bool decided = i + 1 == out.size() || out[i].logit != out[i + 1].logit;
                out.resize(i + 1);
                return decided;
            }
        }
        return false;
    };
    if (row.highest(std::min<size_t>(256, row.n_blocks() / 4), out)) return false;
    if (cut()) return true;
    row.collect(row.max() - 10.0f, out);
    if (out.size() > 8192) return false;
    std::sort(out.begin(), out.end(), [](const candidate & x, const candidate & y) { return x.logit > y.logit; });
    if (!cut()) return false;
    return std::adjacent_find(out.begin(), out.end(), [](const candidate & x, const candidate & y) {
               return x.logit == y.logit;
           }) == out.end();
}

// llama.cpp adds expf(logit / temp - max) over the vocabulary in double and takes the first token at which the running sum
// reaches a share of the total. Sums of approximate exponentials per block lead to the block; where the share is nearer to a
// token's border than all errors together, the sums are made as llama.cpp makes them.
int32_t sampler::draw_from_row(const float * logits, const sampler_row & row) {
    constexpr double error    = 5e-7;  // of the total: twice (1.5e-7 of exp_sums + 0.6e-7 of expf), rounded up
    const bool       tempered = !active_.empty() && active_.back() == sampler_stage::temperature;
    const float      temp     = tempered ? params_.temp : 1.0f;
    const float      max      = row.max() / temp;
    require_finite(max);
    thread_local std::vector<double> sums;
    const double       total = row.exp_sums(temp, sums);
    const std::mt19937 before(rng_);
    const double       target = total * std::uniform_real_distribution<double>(0.0, 1.0)(rng_);
    double             running = 0.0;
    size_t             b = 0;
    for (; b + 8 < sums.size(); b += 8) {
        const double next = running + (((sums[b] + sums[b + 1]) + (sums[b + 2] + sums[b + 3])) +
                                       ((sums[b + 4] + sums[b + 5]) + (sums[b + 6] + sums[b + 7])));
        if (next >= target) break;
        running = next;
    }
    while (b + 1 < sums.size() && running + sums[b] < target) running += sums[b++];
    float         space[simd_block];
    const float * x = row.block(b, space);
    const size_t  n = std::min(simd_block, static_cast<size_t>(n_vocab_) - b * simd_block);
    for (size_t i = 0; i < n; ++i) {
        const double below = running;
        running += expf(x[i] / temp - max);
        if (running < target) continue;
        if (target - below < error * total || running - target < error * total) break;
        return static_cast<int32_t>(b * simd_block + i);
    }
    ++n_tied_;
    rng_ = before;
    return sample_reference(logits);
}

}  // namespace lfmfast
