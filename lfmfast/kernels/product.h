#pragma once

#include "kernels/kernels.h"
#include "kernels/unpack.h"

// The kernels, for one instruction set: `V` is its vector of 32-bit lanes (vec512.h, vec256.h, neon.h). Included once in a file.
// With V::octets, 8 consecutive values of a row lie together instead of 4: in two lines of `q`, and in `min`.
namespace lfmfast::kernels {
namespace {

// --- rows: quantised to 8 bits -------------------------------------------------------------------------------------------

inline uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

// Scale of n values to -127..127; 0 if all of them are (nearly) 0. Comparing as integers lets NaN win.
inline float scale_of(const float * x, int n) {
    uint32_t max = 0;
    for (int i = 0; i < n; ++i) {
        const uint32_t magnitude = bits_of(x[i]) & 0x7fffffff;
        max = magnitude > max ? magnitude : max;
    }
    float amax;
    __builtin_memcpy(&amax, &max, 4);
    return max < bits_of(1e-30f) ? 0.0f : amax / 127.0f;
}

// Rounds to nearest even: adding 1.5 * 2^23 leaves the integer in the low bits.
inline void quantize_scaled(const float * x, int n, float d, int8_t * q) {
    const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
    for (int i = 0; i < n; ++i) q[i] = static_cast<int8_t>(bits_of(x[i] * inverse + 12582912.0f) & 0xff);
}

inline int32_t sum_of(const int8_t * q, int n) {
    int32_t sum = 0;
    for (int i = 0; i < n; ++i) sum += q[i];
    return sum;
}

// `sum` holds what a kernel adds to its sums of products: with weights stored as w + offset, that is -offset * sum(q).
// For types with minima it holds the plain sums of 32, two 16-bit ones in each element; with V::byte_mins the low 7 bits of the
// eight sums, then what is above, as bytes.
template <class V> void quantize(weight_type type, const float * x, int n, act_block * out) {
    if (type == weight_type::q4_0 || type == weight_type::q8_0) {
        const int offset = type == weight_type::q4_0 ? 8 : V::q8_offset;
        for (int b = 0; b < n / 32; ++b) {
            out->d[b] = scale_of(x + b * 32, 32);
            quantize_scaled(x + b * 32, 32, out->d[b], out->q + b * 32);
            out->sum[b] = -offset * sum_of(out->q + b * 32, 32);
        }
        return;
    }
    out->d[0] = scale_of(x, block_k);
    quantize_scaled(x, block_k, out->d[0], out->q);
    if (type == weight_type::q6_k) {
        for (int b = 0; b < 16; ++b) out->sum[b] = -32 * sum_of(out->q + b * 16, 16);
    } else if constexpr (V::byte_mins) {
        int8_t bytes[16];
        for (int b = 0; b < 8; ++b) {
            const int32_t sum = sum_of(out->q + b * 32, 32);
            bytes[b]     = static_cast<int8_t>(sum & 127);
            bytes[8 + b] = static_cast<int8_t>((sum - (sum & 127)) / 128);
        }
        __builtin_memcpy(out->sum, bytes, sizeof(bytes));
    } else {
        for (int b = 0; b < 4; ++b) {
            const int32_t low = sum_of(out->q + b * 64, 32), high = sum_of(out->q + b * 64 + 32, 32);
            out->sum[b] = static_cast<int32_t>((static_cast<uint32_t>(high) << 16) | (static_cast<uint32_t>(low) & 0xffff));
        }
    }
}

// --- the product ---------------------------------------------------------------------------------------------------------

inline int32_t four(const int8_t * q) {
    int32_t x;
    __builtin_memcpy(&x, q, 4);
    return x;
}

// The sum of a K type's sub-blocks: of runs of `exact` of them, each an exact float. A sum of two is rounded where it is added;
// of more, once it is complete.
template <class V, int Runs> struct sums_of { using type = typename V::ints; };
template <class V> struct sums_of<V, 2> { using type = typename V::floats; };
template <class V, weight_type Type>
using run_sums = typename sums_of<V, 64 / type_traits<Type>::groups / type_traits<Type>::exact>::type;
template <class V> typename V::floats add_run(typename V::floats sum, typename V::floats x) { return V::add(sum, x); }
template <class V> typename V::ints   add_run(typename V::ints sum, typename V::floats x) { return V::add(sum, V::to_ints(x)); }
template <class V> typename V::floats rounded(typename V::floats sum) { return sum; }
template <class V> typename V::floats rounded(typename V::ints sum) { return V::to_floats(sum); }

// acc[t] += the products of one sub-block of weights with T rows, in V::wide vectors of lanes from `at`.
template <class V, weight_type Type, int T>
inline void sub_block(const weights & w, int b, int at, const act_block * a, typename V::floats (&acc)[T][V::wide]) {
    using traits = type_traits<Type>;
    using ints   = typename V::ints;
    using floats = typename V::floats;
    constexpr int wide = V::wide, lanes = V::lanes, groups = traits::groups;
    constexpr int run = V::template run<traits::bits>() < groups ? V::template run<traits::bits>() : groups;
    ints sum[T][wide];
    for (int t = 0; t < T; ++t) {
        for (int v = 0; v < wide; ++v) sum[t][v] = has_min(Type) ? V::zero() : V::splat(a[t].sum[b]);
    }
    for (int first = 0; first < groups; first += run) {
        ints part[T][wide];
        for (int t = 0; t < T; ++t) {
            for (int v = 0; v < wide; ++v) part[t][v] = V::start(sum[t][v]);
        }
        for (int g = b * groups + first; g < b * groups + first + run; ++g) {
            ints x[wide];
            for (int v = 0; v < wide; ++v) x[v] = V::load(w.q[g] + (at + v * lanes) * 4);
            for (int t = 0; t < T; ++t) {
                const ints y = V::splat(four(a[t].q + g * 4));
                for (int v = 0; v < wide; ++v) part[t][v] = V::template step<traits::bits>(part[t][v], x[v], y);
            }
        }
        for (int t = 0; t < T; ++t) {
            for (int v = 0; v < wide; ++v) sum[t][v] = V::finish(sum[t][v], part[t][v]);
        }
    }
    for (int v = 0; v < wide; ++v) {
        const floats scale = V::load(w.scale[b] + at + v * lanes);
        for (int t = 0; t < T; ++t) {
            const floats factor = traits::k_type ? scale : V::mul(scale, V::splat(a[t].d[b]));
            acc[t][v] = V::mul_add(V::to_floats(sum[t][v]), factor, acc[t][v]);
        }
    }
}

// x[t] -= the minima of the sub-blocks, in the lanes from `lane`.
template <class V, int T>
inline void subtract_minima(const weights & w, int lane, const act_block * a, typename V::floats (&x)[T]) {
    typename V::ints sum[T];
    for (int t = 0; t < T; ++t) sum[t] = V::zero();
    for (int i = 0; i < 4; ++i) {
        const auto min = V::load(w.min[i] + lane * 2);
        for (int t = 0; t < T; ++t) sum[t] = V::dot_pairs(sum[t], min, V::splat(a[t].sum[i]));
    }
    const auto scale = V::load(w.min_scale + lane);
    for (int t = 0; t < T; ++t) x[t] = V::mul_sub_from(V::to_floats(sum[t]), scale, x[t]);
}

// out[t] += the products of a block of weights with T rows, in V::wide vectors of lanes from `at`.
template <class V, weight_type Type, int T>
void tile(const weights & w, int n_sub, int at, const act_block * a, float (*out)[panel_rows]) {
    using floats = typename V::floats;
    constexpr bool k_type = type_traits<Type>::k_type;
    constexpr int  wide = V::wide, lanes = V::lanes;
    floats acc[T][wide];
    for (int t = 0; t < T; ++t) {
        for (int v = 0; v < wide; ++v) acc[t][v] = k_type ? V::zero_floats() : V::load(out[t] + at + v * lanes);
    }
    for (int b = 0; b < n_sub; ++b) sub_block<V, Type, T>(w, b, at, a, acc);
    for (int v = 0; v < wide; ++v) {
        const int lane = at + v * lanes;
        floats    x[T];
        for (int t = 0; t < T; ++t) x[t] = acc[t][v];
        if constexpr (has_min(Type)) subtract_minima<V, T>(w, lane, a, x);
        for (int t = 0; t < T; ++t) {
            if constexpr (k_type) x[t] = V::mul_add(x[t], V::splat(a[t].d[0]), V::load(out[t] + lane));
            V::store(out[t] + lane, x[t]);
        }
    }
}

// The same of a K type with V::exact: rounded once, after the sum of all sub-blocks.
template <class V, weight_type Type, int T>
void exact_tile(const weights & w, int n_sub, int at, const act_block * a, float (*out)[panel_rows]) {
    using floats = typename V::floats;
    constexpr int wide = V::wide, lanes = V::lanes, exact = type_traits<Type>::exact;
    run_sums<V, Type> sum[T][wide] = {};
    for (int b = 0; b < n_sub; b += exact) {
        floats acc[T][wide];
        for (int t = 0; t < T; ++t) {
            for (int v = 0; v < wide; ++v) acc[t][v] = V::zero_floats();
        }
        for (int i = 0; i < exact; ++i) sub_block<V, Type, T>(w, b + i, at, a, acc);
        for (int t = 0; t < T; ++t) {
            for (int v = 0; v < wide; ++v) sum[t][v] = add_run<V>(sum[t][v], acc[t][v]);
        }
    }
    for (int v = 0; v < wide; ++v) {
        const int    lane = at + v * lanes;
        const floats d    = V::load(w.d + lane);
        floats       x[T];
        for (int t = 0; t < T; ++t) x[t] = V::mul(rounded<V>(sum[t][v]), d);
        if constexpr (has_min(Type)) subtract_minima<V, T>(w, lane, a, x);
        for (int t = 0; t < T; ++t) V::store(out[t] + lane, V::mul_add(x[t], V::splat(a[t].d[0]), V::load(out[t] + lane)));
    }
}

// The products of all lanes; an instruction set may have its own (neon.h).
template <class V, weight_type Type, int T> struct tile_row {
    static void run(const weights & w, int n_sub, const act_block * a, float (*out)[panel_rows]) {
        for (int at = 0; at < panel_rows; at += V::wide * V::lanes) {
            if constexpr (V::exact && type_traits<Type>::k_type) exact_tile<V, Type, T>(w, n_sub, at, a, out);
            else tile<V, Type, T>(w, n_sub, at, a, out);
        }
    }
};

template <class V, weight_type Type, int T>
void tile_of(int size, const weights & w, int n_sub, const act_block * a, float (*out)[panel_rows]) {
    if (size == T) {
        tile_row<V, Type, T>::run(w, n_sub, a, out);
    } else if constexpr (T > 1) {
        tile_of<V, Type, T - 1>(size, w, n_sub, a, out);
    }
}

// Has the two lines of each result's later place brought to the L2 cache.
inline void prefetch(const char * const * places, int n) {
    for (int i = 0; i < n; ++i) {
        __builtin_prefetch(places[i], 1, 2);
        __builtin_prefetch(places[i] + 64, 1, 2);
    }
}

template <class V> int tiles_of(int n) { return (n + V::max_tile - 1) / V::max_tile; }

// As few tiles as there can be, of nearly the same size. Meanwhile, `bytes_ahead` of weights are brought to the L2 cache.
template <class V, weight_type Type>
void tiles(const weights & w, int n_sub, const act_block * a, int n, float (*out)[panel_rows], const char * const * places,
           const uint8_t * ahead, int bytes_ahead) {
    int left = tiles_of<V>(n);
    const int bytes = (bytes_ahead / left + 63) / 64 * 64;
    for (; left > 0; --left, ahead += bytes) {
        for (int at = 0; at < bytes; at += 64) __builtin_prefetch(ahead + at, 0, 2);
        const int even = (n + left - 1) / left, size = V::octets && even % 2 && even < n ? even + 1 : even;
        if (places) {
            prefetch(places, size);
            places += size;
        }
        tile_of<V, Type, V::max_tile>(size, w, n_sub, a, out);
        n -= size;
        a += size;
        out += size;
    }
}

template <class V, weight_type Type, bool Ahead>
void unpack(const uint8_t * words, const uint8_t * scales, int word_bytes, int n_sub, weights & out) {
    for (int at = 0; at < panel_rows; at += V::lanes) {
        const unpacker<V, weights, Ahead> u{words, scales, out, at, word_bytes};
        if constexpr (Type == weight_type::q4_0) u.q4_0(n_sub);
        if constexpr (Type == weight_type::q8_0) u.q8_0(n_sub);
        if constexpr (Type == weight_type::q4_k) u.q4_k();
        if constexpr (Type == weight_type::q5_k) u.q5_k();
        if constexpr (Type == weight_type::q6_k) u.q6_k();
    }
}

template <class V, weight_type Type>
void product_of(const uint8_t * panel, int64_t k, const act_block * acts, int64_t stride, int n, float (*out)[panel_rows],
                const char * const * places) {
    constexpr int word_bytes = block_words(Type) * panel_rows * 4;
    constexpr int scale_bytes = (type_traits<Type>::k_type ? 1 : 8) * panel_rows * 2;
    const uint8_t * words  = panel;
    const uint8_t * scales = panel + k * word_bytes / block_k;
    for (int i = 0; i < n; ++i) {
        for (int at = 0; at < panel_rows; at += V::lanes) V::store(out[i] + at, V::zero_floats());
    }
    weights w;
    for (int64_t at = 0; at < k; at += block_k, words += word_bytes, scales += scale_bytes, acts += stride) {
        const int n_sub = (k - at < block_k ? static_cast<int>(k - at) : block_k) / (4 * type_traits<Type>::groups);
        const auto places_now = k - at > block_k ? nullptr : places;
        if (tiles_of<V>(n) > 1) {  // spread over them: together, they would wait for each other
            unpack<V, Type, false>(words, scales, word_bytes, n_sub, w);
            tiles<V, Type>(w, n_sub, acts, n, out, places_now, words + blocks_ahead * word_bytes, word_bytes);
        } else {
            unpack<V, Type, true>(words, scales, word_bytes, n_sub, w);
            tiles<V, Type>(w, n_sub, acts, n, out, places_now, nullptr, 0);
        }
    }
}

template <class V>
void panel_product(weight_type type, const uint8_t * panel, int64_t k, const act_block * acts, int64_t stride, int n,
                   float (*out)[panel_rows], const char * const * places) {
    switch (type) {
        case weight_type::q4_0: return product_of<V, weight_type::q4_0>(panel, k, acts, stride, n, out, places);
        case weight_type::q8_0: return product_of<V, weight_type::q8_0>(panel, k, acts, stride, n, out, places);
        case weight_type::q4_k: return product_of<V, weight_type::q4_k>(panel, k, acts, stride, n, out, places);
        case weight_type::q5_k: return product_of<V, weight_type::q5_k>(panel, k, acts, stride, n, out, places);
        case weight_type::q6_k: return product_of<V, weight_type::q6_k>(panel, k, acts, stride, n, out, places);
    }
}

}  // namespace
}  // namespace lfmfast::kernels
