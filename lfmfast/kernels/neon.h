#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace lfmfast::kernels {
namespace {

// 4 lanes of NEON with dotprod. Weights are small enough to be signed bytes, which is what its products are of.
struct vec128 {
    using ints   = int32x4_t;
    using floats = float32x4_t;
    static constexpr int  lanes     = 4;
    static constexpr int  q8_offset = 0;
    static constexpr bool byte_mins = true, exact = false;

    static ints load(const void * p) { return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t *>(p))); }
    static void store(void * p, ints x) { vst1q_u8(static_cast<uint8_t *>(p), vreinterpretq_u8_s32(x)); }
    static ints splat(int32_t x) { return vdupq_n_s32(x); }
    static ints zero() { return vdupq_n_s32(0); }
    static ints bit_and(ints a, ints b) { return vandq_s32(a, b); }
    static ints bit_or(ints a, ints b) { return vorrq_s32(a, b); }
    static ints bit_xor(ints a, ints b) { return veorq_s32(a, b); }
    static ints zip_low(ints a, ints b) { return vzip1q_s32(a, b); }
    static ints zip_high(ints a, ints b) { return vzip2q_s32(a, b); }
    template <int N> static ints shift_left(ints x) { return vshlq_n_s32(x, N); }
    template <int N> static ints shift_right_signed(ints x) { return vshrq_n_s32(x, N); }
    template <int N> static ints shift_right(ints x) {
        if constexpr (N == 0) return x;  // not an instruction
        else return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x), N));
    }

    static floats load(const float * p) { return vld1q_f32(p); }
    static void   store(float * p, floats x) { vst1q_f32(p, x); }
    static floats splat(float x) { return vdupq_n_f32(x); }
    static floats zero_floats() { return vdupq_n_f32(0); }
    static floats to_floats(ints x) { return vcvtq_f32_s32(x); }
    static ints   to_ints(floats x) { return vcvtnq_s32_f32(x); }
    static ints   add(ints a, ints b) { return vaddq_s32(a, b); }
    static floats add(floats a, floats b) { return vaddq_f32(a, b); }
    static floats sub(floats a, floats b) { return vsubq_f32(a, b); }
    static floats max(floats a, floats b) { return vmaxq_f32(a, b); }
    static float  sum(floats x) { return vaddvq_f32(x); }
    static ints   bits(floats x) { return vreinterpretq_s32_f32(x); }
    static floats from_bits(ints x) { return vreinterpretq_f32_s32(x); }
    static floats mul(floats a, floats b) { return vmulq_f32(a, b); }
    static floats mul_add(floats a, floats b, floats c) { return vfmaq_f32(c, a, b); }
    static floats mul_sub_from(floats a, floats b, floats c) { return vfmsq_f32(c, a, b); }
    static floats halves(const void * p) {
        return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(static_cast<const uint8_t *>(p))));
    }
    static floats low_halves(ints x) { return vcvt_f32_f16(vreinterpret_f16_s16(vmovn_s32(x))); }

    static int8x16_t bytes(ints x) { return vreinterpretq_s8_s32(x); }

    // The low, or the high, halves of two vectors.
    static ints   low_parts(ints a, ints b) { return vreinterpretq_s32_s64(vzip1q_s64(longs(a), longs(b))); }
    static ints   high_parts(ints a, ints b) { return vreinterpretq_s32_s64(vzip2q_s64(longs(a), longs(b))); }
    static floats low_parts(floats a, floats b) { return vreinterpretq_f32_f64(vzip1q_f64(doubles(a), doubles(b))); }
    static floats high_parts(floats a, floats b) { return vreinterpretq_f32_f64(vzip2q_f64(doubles(a), doubles(b))); }

    // p[0], p[1], p[0], p[1]
    static floats load_two(const float * p) {
        const float32x2_t two = vld1_f32(p);
        return vcombine_f32(two, two);
    }

private:
    static int64x2_t   longs(ints x) { return vreinterpretq_s64_s32(x); }
    static float64x2_t doubles(floats x) { return vreinterpretq_f64_f32(x); }
};

}  // namespace
}  // namespace lfmfast::kernels
