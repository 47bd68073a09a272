#include "engine/sampler_row.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "engine/error.h"

namespace lfmfast {

namespace {

constexpr float minus_inf = -std::numeric_limits<float>::infinity();

inline int lowest_bit(uint64_t bits) {
#if defined(__GNUC__) || defined(__clang__)
    return __builtin_ctzll(bits);
#else
    int i = 0;
    while (!(bits >> i & 1)) ++i;
    return i;
#endif
}

bool higher(const candidate & a, const candidate & b) { return a.logit > b.logit; }

// Sorts descending; true: some of the k highest, or one of them and the next, are equal. A few dozen in an order never seen
// before cost std::sort a branch miss per comparison or two; counting for each how many are higher has no branches.
bool sort_highest(std::vector<candidate> & c, size_t k) {
    constexpr size_t most = 192;
    const size_t     n    = c.size();
    if (n <= most) {
        float     x[most];
        uint32_t  rank[most];
        candidate sorted[most];
        uint32_t  sum = 0;
        for (size_t i = 0; i < n; ++i) x[i] = c[i].logit;
        for (size_t i = 0; i < n; ++i) {
            uint32_t above = 0;
            for (size_t j = 0; j < n; ++j) above += x[j] > x[i];
            rank[i] = above;
            sum += above;
        }
        if (sum == n * (n - 1) / 2) {  // any two equal ones make it less
            for (size_t i = 0; i < n; ++i) sorted[rank[i]] = c[i];
            std::copy_n(sorted, n, c.begin());
            return false;
        }
    }
    std::sort(c.begin(), c.end(), higher);
    for (size_t i = 0; i < k && i + 1 < n; ++i) {
        if (c[i].logit == c[i + 1].logit) return true;
    }
    return false;
}

}  // namespace

sampler_row & thread_row() {
    thread_local sampler_row row;
    return row;
}

float sampler_row::highest_maximum() const {
    const size_t n = block_max_.size() / simd_block;
    float        some[simd_block];
    float        max = minus_inf;
    for (size_t i = 0; i < n; i += simd_block) {
        const size_t m = std::min(simd_block, n - i);
        simd().block_max(&block_max_[i * simd_block], m, some);
        max = std::max(max, *std::max_element(some, some + m));
    }
    return max;
}

void sampler_row::read(const float * logits, size_t n) {
    logits_   = logits;
    n_        = n;
    n_blocks_ = (n + simd_block - 1) / simd_block;
    patches_.clear();
    patched_.assign((n_blocks_ + 63) / 64, 0);
    const size_t padded = (n_blocks_ + simd_block - 1) / simd_block * simd_block;
    block_max_.resize(padded);
    std::fill(block_max_.begin() + n_blocks_, block_max_.end(), minus_inf);
    const simd_kernels & k  = simd();
    bool                 ok = k.block_max(logits, n / simd_block, block_max_.data());
    if (n % simd_block) {
        float space[simd_block];
        ok = k.block_max(block(n_blocks_ - 1, space), 1, &block_max_[n_blocks_ - 1]) && ok;
    }
    if (!ok) throw error(error_code::sampling, "the logits contain NaN");
    max_ = highest_maximum();
    if (max_ == minus_inf) throw error(error_code::sampling, "no token is left to sample: every logit is -inf");
    if (max_ > std::numeric_limits<float>::max()) throw error(error_code::sampling, "the logits contain +inf");
}

void sampler_row::patch(const std::vector<logit_patch> & patches) {
    if (patches.empty()) return;
    patches_ = patches;
    for (const auto & p : patches_) patched_[p.token / simd_block / 64] |= uint64_t(1) << (p.token / simd_block % 64);
    float space[simd_block];
    for (size_t i = 0; i < patches_.size();) {
        const size_t b     = patches_[i].token / simd_block;
        const float  old   = block_max_[b];
        float        max   = minus_inf;
        bool         lower = false;  // the highest logit of the block may have gone down
        for (; i < patches_.size() && patches_[i].token / simd_block == b; ++i) {
            max = std::max(max, patches_[i].logit);
            lower |= logits_[patches_[i].token] == old;
        }
        if (lower && !(max >= old)) {
            simd().block_max(block(b, space), 1, &block_max_[b]);
        } else {
            block_max_[b] = std::max(max, old);
        }
    }
    max_ = highest_maximum();
}

const float * sampler_row::block(size_t b, float * space) const {
    const float * x     = logits_ + b * simd_block;
    const bool    whole = (b + 1) * simd_block <= n_;
    if (whole && !patched(b)) return x;
    const size_t n = whole ? simd_block : n_ - b * simd_block;
    std::copy_n(x, n, space);
    std::fill(space + n, space + simd_block, minus_inf);
    if (patched(b)) {
        const int32_t first = static_cast<int32_t>(b * simd_block);
        auto          it    = std::lower_bound(patches_.begin(), patches_.end(), first,
                                               [](const logit_patch & p, int32_t token) { return p.token < token; });
        for (; it != patches_.end() && it->token - first < static_cast<int32_t>(simd_block); ++it) {
            space[it->token - first] = it->logit;
        }
    }
    return space;
}

float sampler_row::at(size_t token) const {
    float space[simd_block];
    return block(token / simd_block, space)[token % simd_block];
}

int32_t sampler_row::argmax() const {
    size_t b = 0;
    while (block_max_[b] != max_) ++b;
    float space[simd_block];
    return static_cast<int32_t>(b * simd_block) + lowest_bit(simd().at_least(block(b, space), max_));
}

void sampler_row::collect(float floor, std::vector<candidate> & out) const {
    const simd_kernels & k = simd();
    float                space[simd_block];
    out.clear();
    for (size_t group = 0; group < n_blocks_; group += simd_block) {
        for (uint64_t blocks = k.at_least(&block_max_[group], floor); blocks; blocks &= blocks - 1) {
            const size_t b = group + lowest_bit(blocks);
            if (b >= n_blocks_) return;  // padding, with a floor of -inf
            const float * x    = block(b, space);
            const size_t  left = n_ - b * simd_block;
            uint64_t      bits = k.at_least(x, floor);
            if (left < simd_block) bits &= (uint64_t(1) << left) - 1;
            for (; bits; bits &= bits - 1) {
                const int i = lowest_bit(bits);
                out.push_back({static_cast<int32_t>(b * simd_block) + i, x[i], 0.0f});
            }
        }
    }
}

float sampler_row::floor_of_highest(size_t k) const {
    const auto count = [&](float floor) { return simd().count(block_max_.data(), block_max_.size(), floor); };
    // k blocks with a maximum at or above a floor hold at least k such logits.
    float high = max_, low = max_ - 1.0f;
    for (float step = 2.0f; count(low) < k; step *= 2.0f) {
        if (step > 1e6f) return minus_inf;
        high = low;
        low  = max_ - step;
    }
    for (int i = 0; i < 16; ++i) {
        const float middle = low + (high - low) * 0.5f;
        if (!(low < middle && middle < high)) break;
        const size_t n = count(middle);
        if (n < k) {
            high = middle;
        } else {
            low = middle;
            if (n <= k + k / 8 + 2) break;
        }
    }
    return low;
}

bool sampler_row::highest(size_t k, std::vector<candidate> & out) const {
    const float floor = floor_of_highest(k);
    if (floor != minus_inf) {
        collect(floor, out);
        if (!sort_highest(out, k)) {
            out.resize(k);
            return false;
        }
    }
    highest_among_equals(k, out);
    return true;
}

// std::partial_sort keeps a heap of k that starts with the first k elements; each later one above the heap's lowest takes its
// place. Which of two equal ones stays, and in what order, depends on all that ever entered, but on nothing else: the same sort
// over just those gives the same result.
void sampler_row::highest_among_equals(size_t k, std::vector<candidate> & out) const {
    thread_local std::vector<float> heap;  // the k highest so far, lowest first
    float        space[simd_block];
    out.clear();
    heap.clear();
    for (size_t b = 0; b < n_blocks_; ++b) {
        if (heap.size() == k && !(block_max_[b] > heap.front())) continue;
        const float * x = block(b, space);
        const size_t  n = std::min(simd_block, n_ - b * simd_block);
        for (size_t i = 0; i < n; ++i) {
            if (heap.size() == k) {
                if (!(x[i] > heap.front())) continue;
                std::pop_heap(heap.begin(), heap.end(), std::greater<float>());
                heap.back() = x[i];
            } else {
                heap.push_back(x[i]);
            }
            std::push_heap(heap.begin(), heap.end(), std::greater<float>());
            out.push_back({static_cast<int32_t>(b * simd_block + i), x[i], 0.0f});
        }
    }
    std::partial_sort(out.begin(), out.begin() + k, out.end(), higher);
    out.resize(k);
}

double sampler_row::exp_sums(float temp, std::vector<double> & sums) const {
    // What is 32 below the maximum adds less than 1.3e-14 per token.
    const float          max = max_ / temp, floor = (max - 32.0f) * temp;
    const simd_kernels & k   = simd();
    float                space[simd_block];
    sums.assign(n_blocks_, 0.0);
    for (size_t b = 0; b < n_blocks_;) {
        if (block_max_[b] < floor) {
            ++b;
        } else if (patched(b) || (b + 1) * simd_block > n_) {
            k.exp_sums(block(b, space), 1, temp, max, &sums[b]);
            ++b;
        } else {
            const size_t first = b;
            while (b < n_blocks_ && !(block_max_[b] < floor) && !patched(b) && (b + 1) * simd_block <= n_) ++b;
            k.exp_sums(logits_ + first * simd_block, b - first, temp, max, &sums[first]);
        }
    }
    double total[4] = {};
    size_t b        = 0;
    for (; b + 4 <= n_blocks_; b += 4) {
        for (size_t i = 0; i < 4; ++i) total[i] += sums[b + i];
    }
    for (; b < n_blocks_; ++b) total[0] += sums[b];
    return (total[0] + total[1]) + (total[2] + total[3]);
}

float sampler_row::softmax_sum() const {
    float space[simd_block];
    float sum = 0.0f;
    for (size_t b = 0; b < n_blocks_; ++b) {
        // What is below half of the sum's last digit is rounded away.
        if (expf(block_max_[b] - max_) < sum * 0x1p-25f) continue;
        const float * x = block(b, space);
        for (size_t i = 0; i < simd_block; ++i) sum += expf(x[i] - max_);
    }
    return sum;
}

}  // namespace lfmfast
