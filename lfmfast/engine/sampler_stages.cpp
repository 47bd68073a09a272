// Where float32 sums, comparisons or sorts look odd, they are llama.cpp's: another order of additions, or a stable sort, would
// pick other tokens now and then.
#include "engine/sampler_stages.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <numeric>

#include "engine/error.h"

namespace lfmfast {

namespace {

constexpr float minus_inf = -std::numeric_limits<float>::infinity();

bool higher(const candidate & a, const candidate & b) { return a.logit > b.logit; }

// The k highest of c, descending, into `out`. 128 buckets over [-10, 10]; only the buckets that hold the k highest are sorted.
void bucket_sort(const candidates & c, size_t k, std::vector<candidate> & out) {
    constexpr int   n_buckets = 128;
    constexpr float low = -10.0f, high = 10.0f;
    constexpr float scale  = n_buckets / (high - low);
    constexpr float offset = -low * scale;
    thread_local std::vector<uint8_t> bucket_of;
    size_t count[n_buckets] = {};
    bucket_of.resize(c.size);
    for (size_t i = 0; i < c.size; ++i) {
        const float x = std::max(0.0f, std::min(n_buckets - 1.0f, scale * c.data[i].logit + offset));
        bucket_of[i]  = static_cast<uint8_t>(x);
        ++count[bucket_of[i]];
    }
    int    last = n_buckets - 1;  // the lowest bucket that is needed
    size_t n    = count[last];
    while (n < k) n += count[--last];
    out.resize(n);
    size_t begin[n_buckets];
    size_t at = 0;
    for (int b = n_buckets - 1; b >= last; --b) {
        begin[b] = at;
        at += count[b];
    }
    for (size_t i = 0; i < c.size; ++i) {
        if (bucket_of[i] >= last) out[begin[bucket_of[i]]++] = c.data[i];
    }
    candidate * first = out.data();
    for (int b = n_buckets - 1; b > last; --b) {
        std::sort(first, first + count[b], higher);
        first += count[b];
    }
    std::partial_sort(first, out.data() + k, first + count[last], higher);
}

// Keeps the k highest, descending.
void keep_highest(candidates & c, size_t k) {
    if (k <= 128) {
        std::partial_sort(c.data, c.data + k, c.data + c.size, higher);
    } else {
        thread_local std::vector<candidate> sorted;
        bucket_sort(c, k, sorted);
        std::copy_n(sorted.data(), k, c.data);
    }
    c.size     = k;
    c.sorted   = true;
    c.by_token = false;
}

float max_logit(const candidates & c) {
    float max = c.data[0].logit;
    if (!c.sorted) {
        for (size_t i = 1; i < c.size; ++i) max = std::max(max, c.data[i].logit);
    }
    return max;
}

void softmax(candidates & c) {
    const float max = max_logit(c);
    float       sum = 0.0f;
    for (size_t i = 0; i < c.size; ++i) {
        c.data[i].p = expf(c.data[i].logit - max);
        sum += c.data[i].p;
    }
    for (size_t i = 0; i < c.size; ++i) c.data[i].p /= sum;
}

void softmax_sorted(candidates & c) {
    if (!c.sorted) keep_highest(c, c.size);
    softmax(c);
}

size_t draw_by_p(const candidates & c, std::mt19937 & rng) {
    thread_local std::vector<double> weights;
    weights.clear();
    for (size_t i = 0; i < c.size; ++i) weights.push_back(c.data[i].p);
    return static_cast<size_t>(std::discrete_distribution<int>(weights.begin(), weights.end())(rng));
}

}  // namespace

void require_finite(float max) {
    if (!std::isfinite(max)) {
        throw error(error_code::sampling, max < 0 ? "no token is left to sample: every logit is -inf"
                                                  : "the logits overflow: the temperature or a penalty is too extreme");
    }
}

float penalised(float logit, int32_t count, const sampler_params & params) {
    if (logit <= 0) {
        logit *= params.penalty_repeat;
    } else {
        logit /= params.penalty_repeat;
    }
    return logit - (float(count) * params.penalty_freq + float(count > 0) * params.penalty_present);
}

void stage_penalties(candidates & c, const std::vector<token_count> & counts, const sampler_params & params) {
    if (c.by_token) {
        for (const auto & t : counts) c.data[t.token].logit = penalised(c.data[t.token].logit, t.count, params);
    } else {
        for (size_t i = 0; i < c.size; ++i) {
            const auto it = std::lower_bound(counts.begin(), counts.end(), c.data[i].id,
                                             [](const token_count & t, int32_t id) { return t.token < id; });
            if (it == counts.end() || it->token != c.data[i].id) continue;
            c.data[i].logit = penalised(c.data[i].logit, it->count, params);
        }
    }
    c.sorted = false;
}

void stage_subtract(candidates & c, const std::vector<std::pair<int32_t, float>> & amounts) {
    if (c.by_token) {
        for (const auto & a : amounts) c.data[a.first].logit -= a.second;
    } else {
        for (size_t i = 0; i < c.size; ++i) {
            const auto it = std::lower_bound(amounts.begin(), amounts.end(), c.data[i].id,
                                             [](const std::pair<int32_t, float> & a, int32_t id) { return a.first < id; });
            if (it != amounts.end() && it->first == c.data[i].id) c.data[i].logit -= it->second;
        }
    }
    c.sorted = false;
}

void stage_top_n_sigma(candidates & c, float n) {
    if (c.size <= 1) return;
    float  max   = c.data[0].logit;
    float  sum   = 0;
    size_t count = 0;
    for (size_t i = 0; i < c.size; ++i) {
        if (c.data[i].logit == minus_inf) continue;
        max = std::max(max, c.data[i].logit);
        sum += c.data[i].logit;
        ++count;
    }
    const float mean = count > 0 ? sum / count : 0;
    float       acc  = 0;
    for (size_t i = 0; i < c.size; ++i) {
        if (c.data[i].logit != minus_inf) acc += std::pow(c.data[i].logit - mean, 2);  // the square in double, the sum in float
    }
    const float sigma = count > 0 ? std::sqrt(acc / count) : 0;
    const float floor = max - (n * sigma);
    for (size_t i = 0; i < c.size; ++i) {
        if (c.data[i].logit < floor) c.data[i].logit = minus_inf;
    }
}

void stage_top_k(candidates & c, int32_t k) {
    const size_t n = std::min(static_cast<size_t>(k), c.size);
    if (!c.sorted) keep_highest(c, n);
    c.size     = n;
    c.by_token = false;
}

void stage_typ_p(candidates & c, float p, size_t min_keep) {
    softmax_sorted(c);
    float entropy = 0.0f;
    for (size_t i = 0; i < c.size; ++i) entropy += -c.data[i].p * logf(c.data[i].p);
    // A p of 0 makes the entropy NaN and with it every score, so that nothing is sorted: llama.cpp's behaviour, kept.
    thread_local std::vector<float>     scores;
    thread_local std::vector<size_t>    order;
    thread_local std::vector<candidate> kept;
    scores.resize(c.size);
    for (size_t i = 0; i < c.size; ++i) scores[i] = fabsf(-logf(c.data[i].p) - entropy);
    order.resize(c.size);
    std::iota(order.begin(), order.end(), size_t(0));
    std::sort(order.begin(), order.end(), [](size_t a, size_t b) { return scores[a] < scores[b]; });
    float  sum = 0.0f;
    size_t n   = c.size;
    for (size_t i = 0; i < c.size; ++i) {
        sum += c.data[order[i]].p;
        if (sum > p && (min_keep == 0 || i >= min_keep - 1)) {
            n = i + 1;
            break;
        }
    }
    kept.clear();
    for (size_t i = 0; i < n; ++i) kept.push_back(c.data[order[i]]);
    std::copy(kept.begin(), kept.end(), c.data);
    c.size     = n;
    c.sorted   = false;
    c.by_token = false;
}

void stage_top_p(candidates & c, float p, size_t min_keep) {
    softmax(c);
    thread_local std::vector<candidate> head;
    size_t            k      = c.size;
    const candidate * sorted = c.data;
    if (!c.sorted && c.size > 1024) {  // sort a few first, all of them only if those don't do
        k = 256;
        bucket_sort(c, k, head);
        sorted = head.data();
    } else if (!c.sorted) {
        keep_highest(c, k);
    }
    float  sum = 0.0f;
    size_t n   = c.size;
    for (size_t i = 0; i < c.size; ++i) {
        sum += sorted[i].p;
        if (sum >= p && i + 1 >= min_keep) {
            n = i + 1;
            break;
        }
        if (i + 1 == k && k < c.size) {
            k = c.size;
            bucket_sort(c, k, head);
            sorted = head.data();
        }
    }
    if (!c.sorted) {
        std::copy_n(head.data(), n, c.data);
        c.sorted = true;
    }
    c.size     = n;
    c.by_token = false;
}

void stage_min_p(candidates & c, float p, size_t min_keep) {
    if (!c.sorted) {
        float max = -FLT_MAX;
        for (size_t i = 0; i < c.size; ++i) max = std::max(max, c.data[i].logit);
        const float  floor = max + logf(p);
        const size_t n     = std::count_if(c.data, c.data + c.size, [&](const candidate & x) { return x.logit >= floor; });
        if (n > 0 && n >= min_keep) {
            size_t at = 0;
            for (size_t i = 0; i < c.size; ++i) {
                if (c.data[i].logit >= floor) c.data[at++] = c.data[i];
            }
            c.size     = n;
            c.by_token = false;
            return;
        }
        keep_highest(c, c.size);
    }
    const float floor = c.data[0].logit + logf(p);
    size_t      n     = 1;
    while (n < c.size && !(c.data[n].logit < floor && n >= min_keep)) ++n;
    c.size     = n;
    c.by_token = false;
}

void stage_xtc(candidates & c, float probability, float threshold, size_t min_keep, std::mt19937 & rng) {
    if (c.size < 2) return;
    if (std::uniform_real_distribution<float>(0.0f, 1.0f)(rng) > probability) return;
    softmax_sorted(c);
    size_t last = 0;  // of those at or above the threshold
    while (last + 1 < c.size && c.data[last].p >= threshold && c.data[last + 1].p >= threshold) ++last;
    if (last > 0 && c.size - last >= min_keep) {
        c.data += last;
        c.size -= last;
    }
}

void stage_temperature(candidates & c, float temp) {
    // A dynamic temperature comes near 0 for a certain distribution. Where the logits would overflow, llama.cpp draws from NaN,
    // which gives the last candidate; the limit is the greedy pick.
    if (temp > 1e-30f || (temp > 0.0f && std::isfinite(max_logit(c) / temp))) {
        for (size_t i = 0; i < c.size; ++i) c.data[i].logit /= temp;
        return;
    }
    size_t best = 0;
    for (size_t i = 1; i < c.size; ++i) {
        if (c.data[i].logit > c.data[best].logit) best = i;
    }
    for (size_t i = 0; i < c.size; ++i) {
        if (i != best) c.data[i].logit = minus_inf;
    }
}

void stage_dynamic_temperature(candidates & c, float temp, float range, float exponent) {
    if (c.size <= 1) return;
    const float min         = std::max(0.0f, temp - range);
    const float max         = temp + range;
    const float max_entropy = -logf(1.0f / c.size);
    softmax_sorted(c);
    float entropy = 0.0f;
    for (size_t i = 0; i < c.size; ++i) {
        if (c.data[i].p > 0.0f) entropy -= c.data[i].p * logf(c.data[i].p);
    }
    stage_temperature(c, min + (max - min) * powf(entropy / max_entropy, exponent));
}

size_t stage_dist(candidates & c, std::mt19937 & rng) {
    const float max = max_logit(c);
    require_finite(max);
    std::uniform_real_distribution<double> uniform(0.0, 1.0);
    if (c.size == 1) {  // drawn and dropped, as llama.cpp does: the RNG moves by one per token in any case
        uniform(rng);
        return 0;
    }
    double sum = 0.0;
    for (size_t i = 0; i < c.size; ++i) {
        c.data[i].p = expf(c.data[i].logit - max);
        sum += c.data[i].p;
    }
    require_finite(static_cast<float>(sum));
    const double target  = sum * uniform(rng);
    double       running = 0.0;
    for (size_t i = 0; i < c.size; ++i) {
        running += c.data[i].p;
        if (running >= target) return i;
    }
    return c.size - 1;
}

size_t stage_mirostat(candidates & c, int32_t n_vocab, float tau, float eta, float & mu, std::mt19937 & rng) {
    constexpr size_t m = 100;  // how many of the most probable tokens estimate Zipf's exponent
    require_finite(max_logit(c));
    softmax_sorted(c);
    float sum_tb = 0.0f, sum_tt = 0.0f;
    for (size_t i = 0; i < m - 1 && i + 1 < c.size; ++i) {
        const float t = logf(float(i + 2) / float(i + 1));
        const float b = logf(c.data[i].p / c.data[i + 1].p);
        sum_tb += t * b;
        sum_tt += t * t;
    }
    const float s_hat   = sum_tb / sum_tt;
    const float epsilon = s_hat - 1;
    const float k = powf((epsilon * powf(2, mu)) / (1 - powf(n_vocab, -epsilon)), 1 / s_hat);
    // Outside of int's range (and for NaN) the conversion on x86 gives INT_MIN, hence one token.
    stage_top_k(c, k >= 1.0f && k < 2147483648.0f ? static_cast<int32_t>(k) : 1);
    softmax_sorted(c);
    const size_t picked = draw_by_p(c, rng);
    mu -= eta * (-log2f(c.data[picked].p) - tau);
    return picked;
}

size_t stage_mirostat_v2(candidates & c, float tau, float eta, float & mu, std::mt19937 & rng) {
    require_finite(max_logit(c));
    softmax_sorted(c);
    size_t n = 0;
    while (n < c.size && !(-log2f(c.data[n].p) > mu)) ++n;
    c.size = std::max<size_t>(n, 1);
    softmax_sorted(c);
    const size_t picked = draw_by_p(c, rng);
    mu -= eta * (-log2f(c.data[picked].p) - tau);
    return picked;
}

}  // namespace lfmfast
