#pragma once

#include "kernels/kernels.h"

// Attention of one row, for one instruction set: `V` is its vector of 32-bit lanes, as in product.h. Included once in a file.
namespace lfmfast::kernels {
namespace {

constexpr int cells_at_once = 64;

// e^x for x <= 0, to 3e-7 of it; about 0 from -87 on. Cody and Waite's reduction, and Taylor's polynomial.
template <class V> typename V::floats exp_of(typename V::floats x) {
    x = V::max(V::splat(-87.0f), x);  // in this order, NaN stays
    const auto n = V::to_ints(V::mul(x, V::splat(1.44269504f)));
    const auto k = V::to_floats(n);
    x = V::mul_sub_from(k, V::splat(0.693359375f), x);
    x = V::mul_sub_from(k, V::splat(-2.12194440e-4f), x);
    auto y = V::splat(1.0f / 720);
    y = V::mul_add(y, x, V::splat(1.0f / 120));
    y = V::mul_add(y, x, V::splat(1.0f / 24));
    y = V::mul_add(y, x, V::splat(1.0f / 6));
    y = V::mul_add(y, x, V::splat(0.5f));
    y = V::mul_add(y, x, V::splat(1.0f));
    y = V::mul_add(y, x, V::splat(1.0f));
    return V::from_bits(V::add(V::bits(y), V::template shift_left<23>(n)));
}

// The next cells that are not masked out, from `next` on; how many they are.
inline int visible(const attention & a, int64_t & next, int64_t (&cells)[cells_at_once]) {
    constexpr uint64_t four_hidden = 0xfc00fc00fc00fc00;
    int n = 0;
    while (next < a.n_cells && n < cells_at_once) {
        if (!a.mask) {
            cells[n++] = next++;
            continue;
        }
        uint64_t four;
        if (next + 4 <= a.n_cells && (__builtin_memcpy(&four, a.mask + next, 8), four == four_hidden)) {
            next += 4;
            continue;
        }
        if (a.mask[next] != 0xfc00) cells[n++] = next;
        ++next;
    }
    return n;
}

// The softmax goes along with the cells: what was added up is scaled when a larger score comes.
template <class V, int Size, int Heads> void attend_heads(const attention & a, const float * q, float * out) {
    using floats = typename V::floats;
    constexpr int n = Size / V::lanes;
    alignas(64) float score[Heads][cells_at_once], sum[Heads][Size] = {};
    float   top[Heads], total[Heads];
    int64_t cells[cells_at_once], next = 0;
    for (int h = 0; h < Heads; ++h) top[h] = -__builtin_inff(), total[h] = 0.0f;
    while (const int n_cells = visible(a, next, cells)) {
        for (int j = 0; j < n_cells; ++j) {
            const auto * k = static_cast<const uint16_t *>(a.k) + cells[j] * a.k_stride;
            floats product[Heads];
            for (int h = 0; h < Heads; ++h) product[h] = V::zero_floats();
            for (int i = 0; i < n; ++i) {
                const floats x = V::halves(k + i * V::lanes);
                for (int h = 0; h < Heads; ++h) {
                    product[h] = V::mul_add(x, V::load(q + h * a.q_stride + i * V::lanes), product[h]);
                }
            }
            for (int h = 0; h < Heads; ++h) score[h][j] = V::sum(product[h]) * a.scale;
            if (a.mask && a.mask[cells[j]] != 0) {
                float bias[V::lanes];
                uint16_t halves[V::lanes] = {a.mask[cells[j]]};
                V::store(bias, V::halves(halves));
                for (int h = 0; h < Heads; ++h) score[h][j] += bias[0];
            }
        }
        for (int h = 0; h < Heads; ++h) {
            float new_top = top[h];
            for (int j = 0; j < n_cells; ++j) new_top = score[h][j] > new_top ? score[h][j] : new_top;
            for (int j = n_cells; j % V::lanes; ++j) score[h][j] = -__builtin_inff();
            floats weights = V::zero_floats();
            for (int j = 0; j < n_cells; j += V::lanes) {
                const floats w = exp_of<V>(V::sub(V::load(score[h] + j), V::splat(new_top)));
                V::store(score[h] + j, w);
                weights = V::add(weights, w);
            }
            float factor[V::lanes];
            V::store(factor, exp_of<V>(V::splat(top[h] - new_top)));
            total[h] = total[h] * factor[0] + V::sum(weights);
            top[h]   = new_top;
            for (int i = 0; i < n; ++i) {
                V::store(sum[h] + i * V::lanes, V::mul(V::load(sum[h] + i * V::lanes), V::splat(factor[0])));
            }
        }
        floats s[Heads][n];
        for (int h = 0; h < Heads; ++h) {
            for (int i = 0; i < n; ++i) s[h][i] = V::load(sum[h] + i * V::lanes);
        }
        for (int j = 0; j < n_cells; ++j) {
            const auto * v = static_cast<const uint16_t *>(a.v) + cells[j] * a.v_stride;
            for (int i = 0; i < n; ++i) {
                const floats x = V::halves(v + i * V::lanes);
                for (int h = 0; h < Heads; ++h) s[h][i] = V::mul_add(x, V::splat(score[h][j]), s[h][i]);
            }
        }
        for (int h = 0; h < Heads; ++h) {
            for (int i = 0; i < n; ++i) V::store(sum[h] + i * V::lanes, s[h][i]);
        }
    }
    for (int h = 0; h < Heads; ++h) {
        const floats factor = V::splat(total[h] == 0.0f ? 0.0f : 1.0f / total[h]);
        for (int i = 0; i < n; ++i) {
            V::store(out + h * a.out_stride + i * V::lanes, V::mul(V::load(sum[h] + i * V::lanes), factor));
        }
    }
}

template <class V, int Size> void attend_size(const attention & a) {
    const float * q = a.q;
    float *       out = a.out;
    int           left = a.n_heads;
    for (; left >= 4; left -= 4, q += 4 * a.q_stride, out += 4 * a.out_stride) attend_heads<V, Size, 4>(a, q, out);
    switch (left) {
        case 3: return attend_heads<V, Size, 3>(a, q, out);
        case 2: return attend_heads<V, Size, 2>(a, q, out);
        case 1: return attend_heads<V, Size, 1>(a, q, out);
        default: return;
    }
}

template <class V> void attend(const attention & a) { a.head_size == 64 ? attend_size<V, 64>(a) : attend_size<V, 128>(a); }

}  // namespace
}  // namespace lfmfast::kernels
