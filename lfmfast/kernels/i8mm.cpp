// Compiled for NEON with i8mm: no header of the standard library whose inline functions another file could end up with.
#include "kernels/neon.h"

#include "kernels/attention.h"
#include "kernels/product.h"

namespace lfmfast::kernels {

namespace {

struct vec : vec128 {
    static constexpr int  max_tile = 6;
    static constexpr bool octets   = true;
};

// A block of two tokens, a and b, as SMMLA takes it: 8 values of a then 8 of b, a number of a twice then one of b twice.
struct two_tokens {
    alignas(16) int8_t  q[32][16];
    alignas(16) int32_t sum[16][4];
    alignas(16) float   d[8][4];
    alignas(16) int8_t  sum_bytes[2][16];

    template <weight_type Type> void set(const act_block & a, const act_block & b, int n_sub) {
        using traits = type_traits<Type>;
        for (int i = 0; i < n_sub * traits::groups / 4; ++i) in_turn(a.q + i * 16, b.q + i * 16, q[i * 2]);
        if constexpr (has_min(Type)) in_turn(a.sum, b.sum, sum_bytes[0]);
        if constexpr (!has_min(Type) && Type != weight_type::q8_0) twice(a.sum, b.sum, n_sub, sum[0]);
        if constexpr (!traits::k_type) twice(a.d, b.d, n_sub, d[0]);
    }

private:
    static void in_turn(const void * a, const void * b, int8_t * to) {
        const vec::ints x = vec::load(a), y = vec::load(b);
        vec::store(to, vec::low_parts(x, y));
        vec::store(to + 16, vec::high_parts(x, y));
    }

    // n of 4 bytes each, rounded up to whole vectors
    template <class Number> static void twice(const Number * a, const Number * b, int n, Number * to) {
        for (int i = 0; i < n; i += 4) {
            const vec::ints x = vec::load(static_cast<const void *>(a + i)), y = vec::load(static_cast<const void *>(b + i));
            const vec::ints x_low = vec::zip_low(x, x), y_low = vec::zip_low(y, y);
            const vec::ints x_high = vec::zip_high(x, x), y_high = vec::zip_high(y, y);
            vec::store(static_cast<void *>(to + i * 4), vec::low_parts(x_low, y_low));
            vec::store(static_cast<void *>(to + i * 4 + 4), vec::high_parts(x_low, y_low));
            vec::store(static_cast<void *>(to + i * 4 + 8), vec::low_parts(x_high, y_high));
            vec::store(static_cast<void *>(to + i * 4 + 12), vec::high_parts(x_high, y_high));
        }
    }
};

// An SMMLA takes 8 values of two rows and of two tokens: twice the products of an SDOT. With 6 tokens and 8 rows, 12 of them need
// 7 loads, and all sums stay in registers. A vector holds the sums of token 0 with rows 0 and 1, then of token 1; the last of an
// odd number of tokens stands in for the one that is missing.
template <weight_type Type, int T> struct tile_row<vec, Type, T> {
    using ints   = vec::ints;
    using floats = vec::floats;
    using traits = type_traits<Type>;
    static constexpr int pairs = (T + 1) / 2, wide = pairs == 1 ? 8 : 4;

    static constexpr int second(int p) { return p * 2 + 1 < T ? p * 2 + 1 : T - 1; }

    static void step(ints (&sum)[pairs][wide], const uint8_t * q, const two_tokens * x, int octet) {
        int8x16_t tokens[pairs];
        for (int p = 0; p < pairs; ++p) tokens[p] = vld1q_s8(x[p].q[octet]);
        for (int v = 0; v < wide; ++v) {
            const int8x16_t rows = vec::bytes(vec::load(q + v * 16));
            for (int p = 0; p < pairs; ++p) sum[p][v] = vmmlaq_s32(sum[p][v], tokens[p], rows);
        }
    }

    static void sub_block(const weights & w, int b, int at, const two_tokens * x, floats (&acc)[pairs][wide]) {
        ints sum[pairs][wide];
        for (int p = 0; p < pairs; ++p) {
            for (int v = 0; v < wide; ++v) {
                sum[p][v] = has_min(Type) || Type == weight_type::q8_0 ? vec::zero() : vec::load(x[p].sum + b);
            }
        }
        for (int octet = b * traits::groups / 2; octet < (b + 1) * traits::groups / 2; octet += 2) {
            step(sum, w.q[octet * 2] + at * 8, x, octet);
            step(sum, w.q[octet * 2 + 2] + at * 8, x, octet + 1);
        }
        for (int v = 0; v < wide; ++v) {
            const floats scale = vec::load_two(w.scale[b] + at + v * 2);
            for (int p = 0; p < pairs; ++p) {
                const floats factor = traits::k_type ? scale : vec::mul(scale, vec::load(x[p].d[b]));
                acc[p][v] = vec::mul_add(vec::to_floats(sum[p][v]), factor, acc[p][v]);
            }
        }
    }

    // acc -= the minima, each times the sum of its sub-block: the low 7 bits of that, and what is above.
    static void subtract_minima(const weights & w, int at, const two_tokens * x, floats (&acc)[pairs][wide]) {
        for (int v = 0; v < wide; ++v) {
            const int       row    = at + v * 2;
            const int8x16_t minima = vec::bytes(vec::load(w.min[0] + row * 4));
            const floats    scale  = vec::load_two(w.min_scale + row);
            for (int p = 0; p < pairs; ++p) {
                const ints low  = vmmlaq_s32(vec::zero(), vld1q_s8(x[p].sum_bytes[0]), minima);
                const ints high = vmmlaq_s32(vec::zero(), vld1q_s8(x[p].sum_bytes[1]), minima);
                const ints sum  = vaddq_s32(low, vec::shift_left<7>(high));
                acc[p][v] = vec::mul_sub_from(vec::to_floats(sum), scale, acc[p][v]);
            }
        }
    }

    static void run(const weights & w, int n_sub, const act_block * a, float (*out)[panel_rows]) {
        two_tokens x[pairs];
        for (int p = 0; p < pairs; ++p) x[p].template set<Type>(a[p * 2], a[second(p)], n_sub);
        for (int at = 0; at < panel_rows; at += wide * 2) {
            floats acc[pairs][wide];
            for (int p = 0; p < pairs; ++p) {
                for (int v = 0; v < wide; v += 2) {
                    if constexpr (traits::k_type) {
                        acc[p][v] = acc[p][v + 1] = vec::zero_floats();
                    } else {
                        const floats first = vec::load(out[p * 2] + at + v * 2), other = vec::load(out[second(p)] + at + v * 2);
                        acc[p][v]     = vec::low_parts(first, other);
                        acc[p][v + 1] = vec::high_parts(first, other);
                    }
                }
            }
            for (int b = 0; b < n_sub; ++b) sub_block(w, b, at, x, acc);
            if constexpr (has_min(Type)) subtract_minima(w, at, x, acc);
            for (int t = 0; t < T; ++t) {
                for (int v = 0; v < wide; v += 2) {
                    float *      to    = out[t] + at + v * 2;
                    const floats first = acc[t / 2][v], other = acc[t / 2][v + 1];
                    const floats sum   = t % 2 ? vec::high_parts(first, other) : vec::low_parts(first, other);
                    vec::store(to, traits::k_type ? vec::mul_add(sum, vec::splat(a[t].d[0]), vec::load(to)) : sum);
                }
            }
        }
    }
};

}  // namespace

const kernel_set i8mm = {"i8mm", quantize<vec>, panel_product<vec>, attend<vec>};

}  // namespace lfmfast::kernels
