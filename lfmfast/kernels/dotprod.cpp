// Compiled for NEON with dotprod: no header of the standard library whose inline functions another file could end up with.
#include "kernels/neon.h"

#include "kernels/attention.h"
#include "kernels/product.h"

namespace lfmfast::kernels {

namespace {

struct vec : vec128 {
    static constexpr int  max_tile = 4;
    static constexpr bool octets   = false;
};

// An SDOT takes 4 consecutive values of 4 rows, and 4 values of a token out of a register that holds 16 of them. With 4 tokens
// and 8 rows, 32 SDOT need 12 loads, and all sums stay in registers.
template <weight_type Type, int T> struct tile_row<vec, Type, T> {
    using ints   = vec::ints;
    using floats = vec::floats;
    using traits = type_traits<Type>;
    static constexpr int wide = T == 1 ? 8 : T == 2 ? 4 : 2;

    template <int Lane> static void step(ints (&sum)[T][wide], const uint8_t * w, const int8x16_t (&x)[T]) {
        for (int v = 0; v < wide; ++v) {
            const int8x16_t four_rows = vec::bytes(vec::load(w + v * 16));
            for (int t = 0; t < T; ++t) sum[t][v] = vdotq_laneq_s32(sum[t][v], four_rows, x[t], Lane);
        }
    }

    static void sub_block(const weights & w, int b, int at, const act_block * a, floats (&acc)[T][wide]) {
        ints sum[T][wide];
        for (int t = 0; t < T; ++t) {
            for (int v = 0; v < wide; ++v) sum[t][v] = has_min(Type) ? vec::zero() : vec::splat(a[t].sum[b]);
        }
        for (int g = b * traits::groups; g < (b + 1) * traits::groups; g += 4) {
            int8x16_t x[T];
            for (int t = 0; t < T; ++t) x[t] = vld1q_s8(a[t].q + g * 4);
            step<0>(sum, w.q[g] + at * 4, x);
            step<1>(sum, w.q[g + 1] + at * 4, x);
            step<2>(sum, w.q[g + 2] + at * 4, x);
            step<3>(sum, w.q[g + 3] + at * 4, x);
        }
        for (int v = 0; v < wide; ++v) {
            const floats scale = vec::load(w.scale[b] + at + v * 4);
            for (int t = 0; t < T; ++t) {
                const floats factor = traits::k_type ? scale : vec::mul(scale, vec::splat(a[t].d[b]));
                acc[t][v] = vec::mul_add(vec::to_floats(sum[t][v]), factor, acc[t][v]);
            }
        }
    }

    // acc -= the minima, each times the sum of its sub-block: the low 7 bits of that, and what is above.
    static void subtract_minima(const weights & w, int at, const act_block * a, floats (&acc)[T][wide]) {
        int8x16_t sums[T];
        for (int t = 0; t < T; ++t) sums[t] = vec::bytes(vec::load(a[t].sum));
        for (int v = 0; v < wide; ++v) {
            const int       row   = at + v * 4;
            const int8x16_t first = vec::bytes(vec::load(w.min[0] + row * 2)), second = vec::bytes(vec::load(w.min[1] + row * 2));
            const floats    scale = vec::load(w.min_scale + row);
            for (int t = 0; t < T; ++t) {
                const ints low  = vdotq_laneq_s32(vdotq_laneq_s32(vec::zero(), first, sums[t], 0), second, sums[t], 1);
                const ints high = vdotq_laneq_s32(vdotq_laneq_s32(vec::zero(), first, sums[t], 2), second, sums[t], 3);
                const ints sum  = vaddq_s32(low, vec::shift_left<7>(high));
                acc[t][v] = vec::mul_sub_from(vec::to_floats(sum), scale, acc[t][v]);
            }
        }
    }

    static void run(const weights & w, int n_sub, const act_block * a, float (*out)[panel_rows]) {
        for (int at = 0; at < panel_rows; at += wide * 4) {
            floats acc[T][wide];
            for (int t = 0; t < T; ++t) {
                for (int v = 0; v < wide; ++v) acc[t][v] = traits::k_type ? vec::zero_floats() : vec::load(out[t] + at + v * 4);
            }
            for (int b = 0; b < n_sub; ++b) sub_block(w, b, at, a, acc);
            if constexpr (has_min(Type)) subtract_minima(w, at, a, acc);
            for (int t = 0; t < T; ++t) {
                for (int v = 0; v < wide; ++v) {
                    float * to = out[t] + at + v * 4;
                    vec::store(to, traits::k_type ? vec::mul_add(acc[t][v], vec::splat(a[t].d[0]), vec::load(to)) : acc[t][v]);
                }
            }
        }
    }
};

}  // namespace

const kernel_set dotprod = {"dotprod", quantize<vec>, panel_product<vec>, attend<vec>};

}  // namespace lfmfast::kernels
