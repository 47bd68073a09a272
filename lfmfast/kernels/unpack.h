#pragma once

#include "kernels/kernels.h"

// What a packed block of weights becomes in the L1 cache, and how; `V` as in product.h.
namespace lfmfast::kernels {
namespace {

// The minima of a block of 256 along K of one panel (q4_k, q5_k).
struct minima {
    alignas(64) int16_t min[4][panel_rows * 2];  // of two consecutive sub-blocks of each row; or see put_mins
    alignas(64) float   min_scale[panel_rows];

    // Those of eight sub-blocks, the bytes of two words: as pairs of 16 bits, or as bytes.
    template <class V> void put_mins(int at, typename V::ints first, typename V::ints second, typename V::floats scale) {
        using ints = typename V::ints;
        V::store(min_scale + at, scale);
        if constexpr (V::octets) {
            V::store(min[0] + at * 4, V::zip_low(first, second));
            V::store(min[0] + at * 4 + 2 * V::lanes, V::zip_high(first, second));
        } else if constexpr (V::byte_mins) {
            V::store(min[0] + at * 2, first);
            V::store(min[1] + at * 2, second);
        } else {
            const ints low = V::splat(0xff), high = V::splat(0xff0000);
            const auto pair = [&](ints x) {  // bytes 0 and 1
                return V::bit_or(V::bit_and(x, low), V::bit_and(V::template shift_left<8>(x), high));
            };
            V::store(min[0] + at * 2, pair(first));
            V::store(min[1] + at * 2, pair(V::template shift_right<16>(first)));
            V::store(min[2] + at * 2, pair(second));
            V::store(min[3] + at * 2, pair(V::template shift_right<16>(second)));
        }
    }
};

// A block of 256 along K of one panel, unpacked.
struct weights : minima {
    alignas(64) uint8_t q[64][panel_rows * 4];  // 4 consecutive values of each row
    alignas(64) float   scale[16][panel_rows];  // of each 32 values, or 16 (q6_k)
    alignas(64) float   d[panel_rows];          // with V::exact, a factor of all scales of a K type

    template <class V> void put(int group, int at, typename V::ints x) {
        if constexpr (V::octets) {
            V::store(q[group & ~1] + at * 8 + group % 2 * 4 * V::lanes, x);
        } else {
            V::store(q[group] + at * 4, x);
        }
    }

    // Bytes 0 to 3 of a word, as the scales of four sub-blocks.
    template <class V> void put_scales(int b, int at, typename V::ints bytes, typename V::floats factor) {
        const auto mask = V::splat(0xff);
        V::store(d + at, factor);
        put_scale<V>(b, at, V::bit_and(bytes, mask), factor);
        put_scale<V>(b + 1, at, V::bit_and(V::template shift_right<8>(bytes), mask), factor);
        put_scale<V>(b + 2, at, V::bit_and(V::template shift_right<16>(bytes), mask), factor);
        put_scale<V>(b + 3, at, V::template shift_right<24>(bytes), factor);
    }

    // The same of signed bytes.
    template <class V> void put_signed_scales(int b, int at, typename V::ints bytes, typename V::floats factor) {
        V::store(d + at, factor);
        put_scale<V>(b, at, signed_byte<V, 0>(bytes), factor);
        put_scale<V>(b + 1, at, signed_byte<V, 1>(bytes), factor);
        put_scale<V>(b + 2, at, signed_byte<V, 2>(bytes), factor);
        put_scale<V>(b + 3, at, signed_byte<V, 3>(bytes), factor);
    }

    template <class V, int B> static typename V::ints signed_byte(typename V::ints x) {
        return V::template shift_right_signed<24>(V::template shift_left<24 - 8 * B>(x));
    }

private:
    template <class V> void put_scale(int b, int at, typename V::ints x, typename V::floats factor) {
        V::store(scale[b] + at, V::exact ? V::to_floats(x) : V::mul(factor, V::to_floats(x)));
    }
};

// Bits of an unpacked value, and groups of four values that share a scale. K types have one scale of a row's 256 values, and
// their sub-blocks have whole numbers for scales. `exact`: sub-blocks whose sum, each times its scale, stays within 2^24 (127
// times the largest value and scale, by their number), so that floats hold it exactly.
template <int Bits, int Groups, int Exact> struct traits_of {
    static constexpr int  bits = Bits, groups = Groups, exact = Exact;
    static constexpr bool k_type = Exact != 0;
};
template <weight_type> struct type_traits;
template <> struct type_traits<weight_type::q4_0> : traits_of<4, 8, 0> {};
template <> struct type_traits<weight_type::q8_0> : traits_of<8, 8, 0> {};
template <> struct type_traits<weight_type::q4_k> : traits_of<4, 8, 4> {};
template <> struct type_traits<weight_type::q5_k> : traits_of<5, 8, 2> {};
template <> struct type_traits<weight_type::q6_k> : traits_of<6, 4, 2> {};
static_assert(4 * 32 * 127 * 15 * 63 <= 1 << 24 && 2 * 32 * 127 * 31 * 63 <= 1 << 24 && 2 * 16 * 127 * 32 * 128 <= 1 << 24);

// Words of 256 values of a row: of one block of a K type, of eight of the others.
constexpr int block_words(weight_type type) {
    return type == weight_type::q4_0   ? 8 * 4
           : type == weight_type::q8_0 ? 8 * 8
           : type == weight_type::q4_k ? 36
           : type == weight_type::q5_k ? 44
                                       : 52;
}

constexpr bool has_min(weight_type type) { return type == weight_type::q4_k || type == weight_type::q5_k; }

constexpr int blocks_ahead = 2;  // of the one that is multiplied: while that goes on, nothing reads memory

// The lanes of a panel that a vector holds: `at` counts its rows. What it unpacks to is what Unpacked makes of it (amx.cpp has
// its own).
template <class V, class Unpacked, bool Ahead> struct unpacker {
    using ints   = typename V::ints;
    using floats = typename V::floats;

    const uint8_t * words;   // of the block, of all rows each
    const uint8_t * scales;  // 16-bit ones, the same
    Unpacked &      out;
    int             at;
    int             block_bytes;

    // With Ahead, has the same word of a later block brought to the L2 cache.
    ints word(int i) const {
        const uint8_t * p = words + i * panel_rows * 4 + at * 4;
        if (Ahead && at * 4 % 64 == 0) __builtin_prefetch(p + blocks_ahead * block_bytes, 0, 2);
        return V::load(p);
    }
    // The word of packed values, to be put in one group of the same parity or more.
    ints values(int i) const {
        if constexpr (V::octets) {  // both words of an even and an odd i, of the first rows or of the others
            return i % 2 ? V::zip_high(word(i - 1), word(i)) : V::zip_low(word(i), word(i + 1));
        } else {
            return word(i);
        }
    }
    void put(int group, ints x) const { out.template put<V>(group, at, x); }
    void put_scale(int b, floats x) const { V::store(out.scale[b] + at, x); }

    void q4_0(int n_sub) const {
        const ints mask = V::splat(0x0f0f0f0f);
        for (int b = 0; b < n_sub; ++b) {
            for (int i = 0; i < 4; ++i) {
                const ints x = values(b * 4 + i);
                put(b * 8 + i, V::bit_and(x, mask));
                put(b * 8 + 4 + i, V::bit_and(V::template shift_right<4>(x), mask));
            }
            put_scale(b, V::halves(scales + b * panel_rows * 2 + at * 2));
        }
    }

    void q8_0(int n_sub) const {
        const ints flip = V::splat(V::q8_offset == 0 ? 0 : static_cast<int32_t>(0x80808080));
        for (int b = 0; b < n_sub; ++b) {
            for (int i = 0; i < 8; ++i) put(b * 8 + i, V::bit_xor(values(b * 8 + i), flip));
            put_scale(b, V::halves(scales + b * panel_rows * 2 + at * 2));
        }
    }

    // q4_k, q5_k: word 0 holds d and dmin, words 1 to 3 hold eight scales and eight minima of 6 bits.
    void six_bit_scales() const {
        const ints low4 = V::splat(0x0f0f0f0f), high2 = V::splat(0x30303030), low6 = V::splat(0x3f3f3f3f);
        const ints a = word(1), b = word(2), c = word(3);
        const floats d = V::low_halves(word(0));
        out.template put_scales<V>(0, at, V::bit_and(a, low6), d);
        out.template put_scales<V>(4, at, V::bit_or(V::bit_and(c, low4), V::bit_and(V::template shift_right<2>(a), high2)), d);
        const ints second = V::bit_or(V::bit_and(V::template shift_right<4>(c), low4),
                                      V::bit_and(V::template shift_right<2>(b), high2));
        out.template put_mins<V>(at, V::bit_and(b, low6), second, V::low_halves(V::template shift_right<16>(word(0))));
    }

    void q4_k() const {
        six_bit_scales();
        for (int j = 0; j < 4; ++j) q4_k_quarter(j);
    }

    void q4_k_quarter(int j) const {
        const ints mask = V::splat(0x0f0f0f0f);
        for (int i = 0; i < 8; ++i) {
            const ints x = values(4 + j * 8 + i);
            put(j * 16 + i, V::bit_and(x, mask));
            put(j * 16 + 8 + i, V::bit_and(V::template shift_right<4>(x), mask));
        }
    }

    template <int J> void q5_k_quarter() const {
        const ints low4 = V::splat(0x0f0f0f0f), bit0 = V::splat(0x01010101);
        for (int i = 0; i < 8; ++i) {
            const ints x = values(12 + J * 8 + i), fifth = values(4 + i);
            const ints even = V::bit_and(V::template shift_right<2 * J>(fifth), bit0);
            const ints odd  = V::bit_and(V::template shift_right<2 * J + 1>(fifth), bit0);
            put(J * 16 + i, V::bit_or(V::bit_and(x, low4), V::template shift_left<4>(even)));
            put(J * 16 + 8 + i, V::bit_or(V::bit_and(V::template shift_right<4>(x), low4), V::template shift_left<4>(odd)));
        }
    }

    void q5_k() const {
        six_bit_scales();
        q5_k_quarter<0>();
        q5_k_quarter<1>();
        q5_k_quarter<2>();
        q5_k_quarter<3>();
    }

    void q6_k() const {
        q6_k_scales();
        q6_k_half<0>();
        q6_k_half<1>();
    }

    void q6_k_scales() const {
        const floats d = V::halves(scales + at * 2);
        for (int i = 0; i < 4; ++i) out.template put_signed_scales<V>(i * 4, at, word(48 + i), d);
    }

    template <int Half> void q6_k_half() const {
        const ints low4 = V::splat(0x0f0f0f0f), high2 = V::splat(0x30303030);
        for (int i = 0; i < 8; ++i) {
            const ints a = values(Half * 16 + i), b = values(Half * 16 + 8 + i), high = values(32 + Half * 8 + i);
            const int  group = Half * 32 + i;
            put(group, V::bit_or(V::bit_and(a, low4), V::bit_and(V::template shift_left<4>(high), high2)));
            put(group + 8, V::bit_or(V::bit_and(b, low4), V::bit_and(V::template shift_left<2>(high), high2)));
            put(group + 16, V::bit_or(V::bit_and(V::template shift_right<4>(a), low4), V::bit_and(high, high2)));
            put(group + 24, V::bit_or(V::bit_and(V::template shift_right<4>(b), low4),
                                      V::bit_and(V::template shift_right<2>(high), high2)));
        }
    }
};

}  // namespace
}  // namespace lfmfast::kernels
