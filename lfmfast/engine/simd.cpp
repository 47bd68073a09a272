#include "engine/simd.h"

#include <atomic>
#include <cmath>

namespace lfmfast {

namespace {

bool block_max(const float * x, size_t n_blocks, float * out) {
    bool ok = true;
    for (size_t b = 0; b < n_blocks; ++b, x += simd_block) {
        float lane[16];  // independent chains, which a compiler can keep in vector registers
        int   nan = 0;
        for (int i = 0; i < 16; ++i) lane[i] = x[i];
        for (size_t i = 16; i < simd_block; i += 16) {
            for (int j = 0; j < 16; ++j) lane[j] = lane[j] > x[i + j] ? lane[j] : x[i + j];
        }
        for (size_t i = 0; i < simd_block; ++i) nan |= x[i] != x[i];
        for (int i = 1; i < 16; ++i) lane[0] = lane[0] > lane[i] ? lane[0] : lane[i];
        out[b] = lane[0];
        ok     = ok && nan == 0;
    }
    return ok;
}

uint64_t at_least(const float * x, float floor) {
    uint64_t bits = 0;
    for (size_t i = 0; i < simd_block; ++i) bits |= static_cast<uint64_t>(x[i] >= floor) << i;
    return bits;
}

size_t count(const float * x, size_t n, float floor) {
    uint32_t c = 0;
    for (size_t i = 0; i < n; ++i) c += x[i] >= floor;
    return c;
}

void exp_sums(const float * x, size_t n_blocks, float temp, float max, double * out) {
    for (size_t b = 0; b < n_blocks; ++b, x += simd_block) {
        double sum = 0.0;
        for (size_t i = 0; i < simd_block; ++i) sum += expf(x[i] / temp - max);
        out[b] = sum;
    }
}

constexpr simd_kernels scalar = {"scalar", block_max, at_least, count, exp_sums};

const simd_kernels * best() {
    for (const simd_kernels * k : {simd_avx512, simd_avx2, simd_neon}) {
        if (k) return k;
    }
    return &scalar;
}

std::atomic<const simd_kernels *> & active() {
    static std::atomic<const simd_kernels *> kernels{best()};
    return kernels;
}

}  // namespace

const simd_kernels & simd() { return *active().load(std::memory_order_relaxed); }

std::vector<std::string> simd_available() {
    std::vector<std::string> names;
    for (const simd_kernels * k : {simd_avx512, simd_avx2, simd_neon}) {
        if (k) names.emplace_back(k->name);
    }
    names.emplace_back(scalar.name);
    return names;
}

bool simd_use(const std::string & name) {
    for (const simd_kernels * k : {simd_avx512, simd_avx2, simd_neon, &scalar}) {
        if (k && name == k->name) {
            active().store(k, std::memory_order_relaxed);
            return true;
        }
    }
    return false;
}

}  // namespace lfmfast
