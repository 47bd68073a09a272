#pragma once

#include <immintrin.h>

#include <cstdint>

namespace lfmfast::kernels {
namespace {

// 8 lanes of AVX2 with FMA and F16C: what AVX-VNNI and plain AVX2 share.
struct vec256 {
    using ints   = __m256i;
    using floats = __m256;
    static constexpr int lanes    = 8;
    static constexpr int max_tile = 2;
    static constexpr int wide     = 2;
    static constexpr bool octets = false, byte_mins = false;  // where the values and minima of a row lie (neon.h)
    static constexpr bool exact = false;                      // whether a K type's sub-blocks are added up exactly (amx.cpp)

    static ints load(const void * p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
    static void store(void * p, ints x) { _mm256_storeu_si256(static_cast<__m256i *>(p), x); }
    static ints splat(int32_t x) { return _mm256_set1_epi32(x); }
    static ints zero() { return _mm256_setzero_si256(); }
    static ints bit_and(ints a, ints b) { return _mm256_and_si256(a, b); }
    static ints bit_or(ints a, ints b) { return _mm256_or_si256(a, b); }
    static ints bit_xor(ints a, ints b) { return _mm256_xor_si256(a, b); }
    template <int N> static ints shift_right(ints x) { return _mm256_srli_epi32(x, N); }
    template <int N> static ints shift_left(ints x) { return _mm256_slli_epi32(x, N); }
    template <int N> static ints shift_right_signed(ints x) { return _mm256_srai_epi32(x, N); }

    static floats load(const float * p) { return _mm256_loadu_ps(p); }
    static void   store(float * p, floats x) { _mm256_storeu_ps(p, x); }
    static floats splat(float x) { return _mm256_set1_ps(x); }
    static floats zero_floats() { return _mm256_setzero_ps(); }
    static floats to_floats(ints x) { return _mm256_cvtepi32_ps(x); }
    static ints   to_ints(floats x) { return _mm256_cvtps_epi32(x); }
    static ints   add(ints a, ints b) { return _mm256_add_epi32(a, b); }
    static floats add(floats a, floats b) { return _mm256_add_ps(a, b); }
    static floats sub(floats a, floats b) { return _mm256_sub_ps(a, b); }
    static floats max(floats a, floats b) { return _mm256_max_ps(a, b); }
    static float  sum(floats x) {
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        const __m128 two  = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
    static ints   bits(floats x) { return _mm256_castps_si256(x); }
    static floats from_bits(ints x) { return _mm256_castsi256_ps(x); }
    static floats mul(floats a, floats b) { return _mm256_mul_ps(a, b); }
    static floats mul_add(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
    static floats mul_sub_from(floats a, floats b, floats c) { return _mm256_fnmadd_ps(a, b, c); }
    static floats halves(const void * p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i *>(p))); }
    static floats low_halves(ints x) {
        const ints    low    = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
        const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
        return _mm256_cvtph_ps(packed);
    }

    static ints dot_pairs(ints c, ints a, ints b) { return _mm256_add_epi32(c, _mm256_madd_epi16(a, b)); }
};

}  // namespace
}  // namespace lfmfast::kernels
