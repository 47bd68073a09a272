#pragma once

#include <immintrin.h>

#include <cstdint>

namespace lfmfast::kernels {
namespace {

// 16 lanes of AVX-512 with VNNI.
struct vec {
    using ints   = __m512i;
    using floats = __m512;
    static constexpr int lanes    = 16;
    static constexpr int max_tile = 6;
    static constexpr int wide     = 2;
    static constexpr bool octets = false, byte_mins = false;  // where the values and minima of a row lie (neon.h)
    static constexpr bool exact = false;                      // whether a K type's sub-blocks are added up exactly (amx.cpp)

    static ints load(const void * p) { return _mm512_loadu_si512(p); }
    static void store(void * p, ints x) { _mm512_storeu_si512(p, x); }
    static ints splat(int32_t x) { return _mm512_set1_epi32(x); }
    static ints zero() { return _mm512_setzero_si512(); }
    static ints bit_and(ints a, ints b) { return _mm512_and_si512(a, b); }
    static ints bit_or(ints a, ints b) { return _mm512_or_si512(a, b); }
    static ints bit_xor(ints a, ints b) { return _mm512_xor_si512(a, b); }
    template <int N> static ints shift_right(ints x) { return _mm512_srli_epi32(x, N); }
    template <int N> static ints shift_left(ints x) { return _mm512_slli_epi32(x, N); }
    template <int N> static ints shift_right_signed(ints x) { return _mm512_srai_epi32(x, N); }

    static floats load(const float * p) { return _mm512_loadu_ps(p); }
    static void   store(float * p, floats x) { _mm512_storeu_ps(p, x); }
    static floats splat(float x) { return _mm512_set1_ps(x); }
    static floats zero_floats() { return _mm512_setzero_ps(); }
    static floats to_floats(ints x) { return _mm512_cvtepi32_ps(x); }
    static ints   to_ints(floats x) { return _mm512_cvtps_epi32(x); }
    static ints   add(ints a, ints b) { return _mm512_add_epi32(a, b); }
    static floats add(floats a, floats b) { return _mm512_add_ps(a, b); }
    static floats sub(floats a, floats b) { return _mm512_sub_ps(a, b); }
    static floats max(floats a, floats b) { return _mm512_max_ps(a, b); }
    static float  sum(floats x) { return _mm512_reduce_add_ps(x); }
    static ints   bits(floats x) { return _mm512_castps_si512(x); }
    static floats from_bits(ints x) { return _mm512_castsi512_ps(x); }
    static floats mul(floats a, floats b) { return _mm512_mul_ps(a, b); }
    static floats mul_add(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
    static floats mul_sub_from(floats a, floats b, floats c) { return _mm512_fnmadd_ps(a, b, c); }
    static floats halves(const void * p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i *>(p))); }
    static floats low_halves(ints x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)); }

    // c + the sum of two products of 16 bits, in each lane
    static ints dot_pairs(ints c, ints a, ints b) { return _mm512_dpwssd_epi32(c, a, b); }

    // Sums of products of unsigned weights and signed values, four in each lane. A run of them starts at a sum.
    static constexpr int q8_offset = 128;  // of the weights of q8_0, which makes them unsigned
    template <int Bits> static constexpr int run() { return 8; }
    static ints start(ints sum) { return sum; }
    template <int Bits> static ints step(ints run, ints w, ints x) { return _mm512_dpbusd_epi32(run, w, x); }
    static ints finish(ints, ints run) { return run; }
};

}  // namespace
}  // namespace lfmfast::kernels
