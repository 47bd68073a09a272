// AVX2 and AVX-512 by target attributes on functions, so that no other code needs these instructions.
#include "engine/simd.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))

#ifndef __clang__  // the intrinsics' headers of GCC 12 warn about themselves (GCC bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cmath>

#define AVX2   __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx512dq,avx2,fma")))

namespace lfmfast {

namespace {

// exp(r) = 1 + r + r^2 (c2 + c3 r + ...) for |r| <= ln(2) / 2, with the least greatest relative error (3e-9 before rounding).
constexpr float log2_e = 1.44269504f, ln2_high = 0.693145752f, ln2_low = 1.42860677e-6f;
constexpr float c2 = 0.49999994f, c3 = 0.16666521f, c4 = 0.04166839f, c5 = 0.008368745f, c6 = 0.0013814538f;
constexpr float least = -87.0f;       // less counts as this, whose exp is 1.6e-38: a normal float, and nothing beside exp(0)
constexpr float round_up = 12582912;  // 1.5 * 2^23: adding and subtracting it rounds to an integer

// A row is not in the cache after a decode step, and the hardware's own prefetch stops at each page: a quarter of the time.
constexpr size_t ahead = 1024;

// --- AVX2 ---

AVX2 inline float max_of(__m256 v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m        = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

AVX2 bool avx2_block_max(const float * x, size_t n_blocks, float * out) {
    __m256 nan = _mm256_setzero_ps();
    for (size_t b = 0; b < n_blocks; ++b, x += simd_block) {
        __m256 v[8];
        for (int i = 0; i < 4; ++i) _mm_prefetch(reinterpret_cast<const char *>(x + 16 * i + ahead), _MM_HINT_T0);
        for (int i = 0; i < 8; ++i) v[i] = _mm256_loadu_ps(x + 8 * i);
        for (int i = 0; i < 8; i += 2) nan = _mm256_or_ps(nan, _mm256_cmp_ps(v[i], v[i + 1], _CMP_UNORD_Q));
        for (int i = 0; i < 4; ++i) v[i] = _mm256_max_ps(v[i], v[i + 4]);
        out[b] = max_of(_mm256_max_ps(_mm256_max_ps(v[0], v[1]), _mm256_max_ps(v[2], v[3])));
    }
    return _mm256_movemask_ps(nan) == 0;
}

AVX2 uint64_t avx2_at_least(const float * x, float floor) {
    const __m256 f    = _mm256_set1_ps(floor);
    uint64_t     bits = 0;
    for (int i = 0; i < 8; ++i) {
        const int m = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + 8 * i), f, _CMP_GE_OQ));
        bits |= static_cast<uint64_t>(m) << (8 * i);
    }
    return bits;
}

AVX2 size_t avx2_count(const float * x, size_t n, float floor) {
    const __m256 f = _mm256_set1_ps(floor);
    __m256i      c = _mm256_setzero_si256(), d = c;
    for (size_t i = 0; i < n; i += 16) {
        c = _mm256_sub_epi32(c, _mm256_castps_si256(_mm256_cmp_ps(_mm256_loadu_ps(x + i), f, _CMP_GE_OQ)));
        d = _mm256_sub_epi32(d, _mm256_castps_si256(_mm256_cmp_ps(_mm256_loadu_ps(x + i + 8), f, _CMP_GE_OQ)));
    }
    alignas(32) uint32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i *>(lanes), _mm256_add_epi32(c, d));
    size_t sum = 0;
    for (const uint32_t lane : lanes) sum += lane;
    return sum;
}

AVX2 inline __m256 avx2_exp(__m256 x) {
    const __m256 big = _mm256_set1_ps(round_up);
    x                = _mm256_max_ps(x, _mm256_set1_ps(least));  // NaN, from -inf / temp, becomes the bound as well
    const __m256 n   = _mm256_sub_ps(_mm256_fmadd_ps(x, _mm256_set1_ps(log2_e), big), big);
    __m256       r   = _mm256_fnmadd_ps(n, _mm256_set1_ps(ln2_high), x);
    r                = _mm256_fnmadd_ps(n, _mm256_set1_ps(ln2_low), r);
    __m256 p         = _mm256_fmadd_ps(_mm256_set1_ps(c6), r, _mm256_set1_ps(c5));
    p                = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c4));
    p                = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c3));
    p                = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c2));
    p                = _mm256_fmadd_ps(_mm256_mul_ps(r, r), p, r);
    p                = _mm256_add_ps(p, _mm256_set1_ps(1.0f));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23)));
}

// Division by a constant: two Newton steps give the correctly rounded quotient (Markstein), at half the cost of vdivps.
AVX2 void avx2_exp_sums(const float * x, size_t n_blocks, float temp, float max, double * out) {
    const __m256 t = _mm256_set1_ps(temp), inverse = _mm256_set1_ps(1.0f / temp), m = _mm256_set1_ps(max);
    for (size_t b = 0; b < n_blocks; ++b, x += simd_block) {
        __m256d sum = _mm256_setzero_pd(), sum2 = sum;
        for (size_t i = 0; i < simd_block; i += 16) {
            __m256 p = _mm256_setzero_ps();
            for (size_t j = i; j < i + 16; j += 8) {
                const __m256 v = _mm256_loadu_ps(x + j);
                __m256       q = v;
                if (temp != 1.0f) {
                    q = _mm256_mul_ps(v, inverse);
                    q = _mm256_fmadd_ps(_mm256_fnmadd_ps(q, t, v), inverse, q);
                    q = _mm256_fmadd_ps(_mm256_fnmadd_ps(q, t, v), inverse, q);
                }
                p = _mm256_add_ps(p, avx2_exp(_mm256_sub_ps(q, m)));
            }
            sum            = _mm256_add_pd(sum, _mm256_cvtps_pd(_mm256_castps256_ps128(p)));
            sum2           = _mm256_add_pd(sum2, _mm256_cvtps_pd(_mm256_extractf128_ps(p, 1)));
        }
        alignas(32) double lanes[4];
        _mm256_store_pd(lanes, _mm256_add_pd(sum, sum2));
        out[b] = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    }
}

// --- AVX-512 ---

AVX512 bool avx512_block_max(const float * x, size_t n_blocks, float * out) {
    __mmask16 nan = 0;
    for (size_t b = 0; b < n_blocks; ++b, x += simd_block) {
        __m512 v[4];
        for (int i = 0; i < 4; ++i) {
            _mm_prefetch(reinterpret_cast<const char *>(x + 16 * i + ahead), _MM_HINT_T0);
            v[i] = _mm512_loadu_ps(x + 16 * i);
        }
        nan |= _mm512_cmp_ps_mask(v[0], v[1], _CMP_UNORD_Q) | _mm512_cmp_ps_mask(v[2], v[3], _CMP_UNORD_Q);
        const __m512 m = _mm512_max_ps(_mm512_max_ps(v[0], v[1]), _mm512_max_ps(v[2], v[3]));
        out[b] = max_of(_mm256_max_ps(_mm512_castps512_ps256(m), _mm512_extractf32x8_ps(m, 1)));
    }
    return nan == 0;
}

AVX512 uint64_t avx512_at_least(const float * x, float floor) {
    const __m512 f    = _mm512_set1_ps(floor);
    uint64_t     bits = 0;
    for (int i = 0; i < 4; ++i) {
        bits |= static_cast<uint64_t>(_mm512_cmp_ps_mask(_mm512_loadu_ps(x + 16 * i), f, _CMP_GE_OQ)) << (16 * i);
    }
    return bits;
}

AVX512 size_t avx512_count(const float * x, size_t n, float floor) {
    const __m512  f   = _mm512_set1_ps(floor);
    const __m512i one = _mm512_set1_epi32(1);
    __m512i       c   = _mm512_setzero_si512();
    for (size_t i = 0; i < n; i += 16) {
        c = _mm512_mask_add_epi32(c, _mm512_cmp_ps_mask(_mm512_loadu_ps(x + i), f, _CMP_GE_OQ), c, one);
    }
    return static_cast<size_t>(_mm512_reduce_add_epi32(c));
}

AVX512 inline __m512 avx512_exp(__m512 x) {
    const __m512 big = _mm512_set1_ps(round_up);
    x                = _mm512_max_ps(x, _mm512_set1_ps(least));
    const __m512 n   = _mm512_sub_ps(_mm512_fmadd_ps(x, _mm512_set1_ps(log2_e), big), big);
    __m512       r   = _mm512_fnmadd_ps(n, _mm512_set1_ps(ln2_high), x);
    r                = _mm512_fnmadd_ps(n, _mm512_set1_ps(ln2_low), r);
    __m512 p         = _mm512_fmadd_ps(_mm512_set1_ps(c6), r, _mm512_set1_ps(c5));
    p                = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c4));
    p                = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c3));
    p                = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c2));
    p                = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, r);
    p                = _mm512_add_ps(p, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

AVX512 void avx512_exp_sums(const float * x, size_t n_blocks, float temp, float max, double * out) {
    const __m512 t = _mm512_set1_ps(temp), inverse = _mm512_set1_ps(1.0f / temp), m = _mm512_set1_ps(max);
    for (size_t b = 0; b < n_blocks; ++b, x += simd_block) {
        __m512d sum = _mm512_setzero_pd(), sum2 = sum;
        for (size_t i = 0; i < simd_block; i += 32) {
            __m512 p = _mm512_setzero_ps();
            for (size_t j = i; j < i + 32; j += 16) {  // two are added in float: conversions are the slowest part
                const __m512 v = _mm512_loadu_ps(x + j);
                __m512       q = v;
                if (temp != 1.0f) {
                    q = _mm512_mul_ps(v, inverse);
                    q = _mm512_fmadd_ps(_mm512_fnmadd_ps(q, t, v), inverse, q);
                    q = _mm512_fmadd_ps(_mm512_fnmadd_ps(q, t, v), inverse, q);
                }
                p = _mm512_add_ps(p, avx512_exp(_mm512_sub_ps(q, m)));
            }
            sum            = _mm512_add_pd(sum, _mm512_cvtps_pd(_mm512_castps512_ps256(p)));
            sum2           = _mm512_add_pd(sum2, _mm512_cvtps_pd(_mm512_extractf32x8_ps(p, 1)));
        }
        out[b] = _mm512_reduce_add_pd(_mm512_add_pd(sum, sum2));
    }
}

constexpr simd_kernels avx2   = {"AVX2", avx2_block_max, avx2_at_least, avx2_count, avx2_exp_sums};
constexpr simd_kernels avx512 = {"AVX-512", avx512_block_max, avx512_at_least, avx512_count, avx512_exp_sums};

bool has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool has_avx512() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && has_avx2();
}

}  // namespace

const simd_kernels * const simd_avx2   = has_avx2() ? &avx2 : nullptr;
const simd_kernels * const simd_avx512 = has_avx512() ? &avx512 : nullptr;

}  // namespace lfmfast

#else

namespace lfmfast {
const simd_kernels * const simd_avx2   = nullptr;
const simd_kernels * const simd_avx512 = nullptr;
}  // namespace lfmfast

#endif
