#include "engine/simd.h"

#if defined(__aarch64__)

#include <arm_neon.h>

namespace lfmfast {

namespace {

constexpr float log2_e = 1.44269504f, ln2_high = 0.693145752f, ln2_low = 1.42860677e-6f;  // as in simd_x86.cpp
constexpr float c2 = 0.49999994f, c3 = 0.16666521f, c4 = 0.04166839f, c5 = 0.008368745f, c6 = 0.0013814538f;
constexpr float least = -87.0f;

bool neon_block_max(const float * x, size_t n_blocks, float * out) {
    uint32x4_t ordered = vdupq_n_u32(~0u);
    for (size_t b = 0; b < n_blocks; ++b, x += simd_block) {
        float32x4_t m = vld1q_f32(x);  // vmaxq passes NaN on
        for (size_t i = 4; i < simd_block; i += 4) m = vmaxq_f32(m, vld1q_f32(x + i));
        ordered = vandq_u32(ordered, vceqq_f32(m, m));
        out[b]  = vmaxvq_f32(m);
    }
    return vminvq_u32(ordered) != 0;
}

uint64_t neon_at_least(const float * x, float floor) {
    const float32x4_t f      = vdupq_n_f32(floor);
    const uint32x4_t  weight = {1, 2, 4, 8};
    uint64_t          bits   = 0;
    for (size_t i = 0; i < simd_block; i += 4) {
        bits |= static_cast<uint64_t>(vaddvq_u32(vandq_u32(vcgeq_f32(vld1q_f32(x + i), f), weight))) << i;
    }
    return bits;
}

size_t neon_count(const float * x, size_t n, float floor) {
    const float32x4_t f = vdupq_n_f32(floor);
    uint32x4_t        c = vdupq_n_u32(0), d = c;
    for (size_t i = 0; i < n; i += 8) {
        c = vsubq_u32(c, vcgeq_f32(vld1q_f32(x + i), f));
        d = vsubq_u32(d, vcgeq_f32(vld1q_f32(x + i + 4), f));
    }
    return vaddvq_u32(vaddq_u32(c, d));
}

inline float32x4_t neon_exp(float32x4_t x) {
    x                   = vmaxnmq_f32(x, vdupq_n_f32(least));  // of NaN and the bound: the bound
    const float32x4_t n = vrndnq_f32(vmulq_n_f32(x, log2_e));
    float32x4_t       r = vfmsq_n_f32(x, n, ln2_high);
    r                   = vfmsq_n_f32(r, n, ln2_low);
    float32x4_t p       = vfmaq_n_f32(vdupq_n_f32(c5), r, c6);
    p                   = vfmaq_f32(vdupq_n_f32(c4), p, r);
    p                   = vfmaq_f32(vdupq_n_f32(c3), p, r);
    p                   = vfmaq_f32(vdupq_n_f32(c2), p, r);
    p                   = vfmaq_f32(r, vmulq_f32(r, r), p);
    p                   = vaddq_f32(p, vdupq_n_f32(1.0f));
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), vshlq_n_s32(vcvtq_s32_f32(n), 23)));
}

void neon_exp_sums(const float * x, size_t n_blocks, float temp, float max, double * out) {
    const float32x4_t t = vdupq_n_f32(temp), m = vdupq_n_f32(max);
    for (size_t b = 0; b < n_blocks; ++b, x += simd_block) {
        float64x2_t sum = vdupq_n_f64(0.0), sum2 = sum;
        for (size_t i = 0; i < simd_block; i += 4) {
            const float32x4_t p = neon_exp(vsubq_f32(vdivq_f32(vld1q_f32(x + i), t), m));
            sum                 = vaddq_f64(sum, vcvt_f64_f32(vget_low_f32(p)));
            sum2                = vaddq_f64(sum2, vcvt_high_f64_f32(p));
        }
        out[b] = vaddvq_f64(vaddq_f64(sum, sum2));
    }
}

constexpr simd_kernels neon = {"NEON", neon_block_max, neon_at_least, neon_count, neon_exp_sums};

}  // namespace

const simd_kernels * const simd_neon = &neon;

}  // namespace lfmfast

#else

namespace lfmfast {
const simd_kernels * const simd_neon = nullptr;
}  // namespace lfmfast

#endif
