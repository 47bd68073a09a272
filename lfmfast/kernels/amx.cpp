// Compiled for AVX-512 with VNNI, with AMX in assembly: no header of the standard library whose inline functions another file
// could end up with. Intrinsics for AMX are not used: GCC before 12.4 and 13.3 drops parts of what they read and write.
//
// AMX adds up 64 values of K for 16 rows and 16 weight rows at once, in whole numbers. A scale for each 32 values would need
// the sums after half of that, and scaling them takes longer than adding them up. But the scales of a K type are whole numbers
// within a block of 256: multiplied into the weights, scale * value = low + 2^n * high, they make two planes of bytes whose
// sums are exact over the block, and are scaled once.
#include "kernels/vec512.h"

#include "kernels/attention.h"
#include "kernels/product.h"

namespace lfmfast::kernels {

namespace {

constexpr int tile_rows = 16;
constexpr int min_rows  = 6;   // with fewer, two planes take longer to unpack than AMX saves

// For fewer rows: the same numbers.
struct exact_vec : vec {
    static constexpr bool exact = true;
};

struct factors : minima {
    alignas(64) float d[panel_rows];
};

// scale * value of a block of 256 along K of one panel.
template <weight_type Type> struct planes {
    static constexpr bool is_signed = Type == weight_type::q6_k;  // then `high` is, and `low` never
    static constexpr int  log_high  = is_signed ? 8 : 3;
    static constexpr int  groups    = type_traits<Type>::groups;

    alignas(64) uint8_t low[64][panel_rows * 4];  // 4 consecutive values of each row
    alignas(64) uint8_t high[64][panel_rows * 4];
    alignas(64) uint8_t scale[3][16][panel_rows * 4];  // of each sub-block, for `put`
    factors of_block[2];                               // of this block and of the one before
    int     now = 0;

    // Unsigned: 5 bits of a value times 3 of the scale are a byte, so a product of 16 bits is that of two bytes.
    // Signed: 6 bits, less 32, times 8 are 14 bits.
    template <class V> void put(int group, int at, __m512i x) {
        const int     b     = group / groups;
        const __m512i first = vec::load(scale[0][b] + at * 4), second = vec::load(scale[1][b] + at * 4);
        if constexpr (is_signed) {
            const __m512i offset = vec::load(scale[2][b] + at * 4);
            const __m512i even = _mm512_sub_epi16(_mm512_maddubs_epi16(x, first), offset);
            const __m512i odd  = _mm512_sub_epi16(_mm512_maddubs_epi16(x, second), offset);
            vec::store(low[group] + at * 4, _mm512_mask_blend_epi8(odd_bytes, even, _mm512_slli_epi16(odd, 8)));
            vec::store(high[group] + at * 4, _mm512_mask_blend_epi8(odd_bytes, _mm512_srli_epi16(even, 8), odd));
        } else {
            vec::store(low[group] + at * 4, _mm512_mullo_epi16(x, first));
            vec::store(high[group] + at * 4, _mm512_mullo_epi16(x, second));
        }
    }

    template <class V> void put_scales(int b, int at, __m512i bytes, __m512 d) {
        const __m512i three_bits = _mm512_set1_epi8(7);
        const __m512i low3 = vec::bit_and(bytes, three_bits), high3 = vec::bit_and(vec::shift_right<3>(bytes), three_bits);
        vec::store(of_block[now].d + at, d);
        for (int i = 0; i < 4; ++i) {
            vec::store(scale[0][b + i] + at * 4, byte_of_words(low3, i));
            vec::store(scale[1][b + i] + at * 4, byte_of_words(high3, i));
        }
    }

    template <class V> void put_signed_scales(int b, int at, __m512i bytes, __m512 d) {
        vec::store(of_block[now].d + at, d);
        for (int i = 0; i < 4; ++i) {
            const __m512i even = byte_of_words(bytes, i);
            vec::store(scale[0][b + i] + at * 4, even);
            vec::store(scale[1][b + i] + at * 4, _mm512_slli_epi16(even, 8));
            vec::store(scale[2][b + i] + at * 4, _mm512_maddubs_epi16(_mm512_set1_epi8(32), even));
        }
    }

    template <class V> void put_mins(int at, __m512i first, __m512i second, __m512 min_scale) {
        of_block[now].template put_mins<vec>(at, first, second, min_scale);
    }

private:
    static constexpr uint64_t odd_bytes = 0xaaaaaaaaaaaaaaaa;

    // Byte i of each 32 bits, as the low byte of both their halves.
    static __m512i byte_of_words(__m512i x, int i) {
        const __m128i at = _mm_add_epi8(_mm_setr_epi8(0, -128, 0, -128, 4, -128, 4, -128, 8, -128, 8, -128, 12, -128, 12, -128),
                                        _mm_set1_epi16(static_cast<short>(i)));
        return _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(at));
    }
};

struct alignas(64) tile_config {
    uint8_t  palette = 1, start_row = 0, unused[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t  n_rows[16]    = {};
};

// Tiles 0 to 3: sums of the low, the high plane in 16 lanes, then in the other 16. 4: quantised rows. 5 to 7: weights.
void begin(int rows) {
    tile_config c;
    for (int i = 0; i < 8; ++i) c.row_bytes[i] = 64, c.n_rows[i] = static_cast<uint8_t>(i < 5 ? rows : tile_rows);
    __asm__ volatile("ldtilecfg %0" : : "m"(c));
}

void end() { __asm__ volatile("tilerelease"); }

void clear_sums() { __asm__ volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3" : : :); }

// Adds the products of 64 values of K.
#define LFMFAST_ADD_PRODUCTS(with_high)                                                                 \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm4\n\t"                                                  \
                     "tileloadd (%2,%4,1), %%tmm5\n\t"                                                  \
                     "tdpbsud %%tmm5, %%tmm4, %%tmm0\n\t"                                               \
                     "tileloadd (%3,%4,1), %%tmm6\n\t" with_high " %%tmm6, %%tmm4, %%tmm1\n\t"          \
                     "tileloadd 64(%2,%4,1), %%tmm7\n\t"                                                \
                     "tdpbsud %%tmm7, %%tmm4, %%tmm2\n\t"                                               \
                     "tileloadd 64(%3,%4,1), %%tmm5\n\t" with_high " %%tmm5, %%tmm4, %%tmm3"            \
                     :                                                                                  \
                     : "r"(q), "r"(int64_t{sizeof(act_block)}), "r"(low), "r"(high), "r"(int64_t{128})  \
                     : "memory")
template <bool Signed> void add_products(const int8_t * q, const uint8_t * low, const uint8_t * high) {
    if constexpr (Signed) {
        LFMFAST_ADD_PRODUCTS("tdpbssd");
    } else {
        LFMFAST_ADD_PRODUCTS("tdpbsud");
    }
}
#undef LFMFAST_ADD_PRODUCTS

using tile_sums = int32_t[4][tile_rows][vec::lanes];

void store_sums(tile_sums & sums) {
    __asm__ volatile(
        "tilestored %%tmm0, (%0,%1,1)\n\t"
        "tilestored %%tmm1, 1024(%0,%1,1)\n\t"
        "tilestored %%tmm2, 2048(%0,%1,1)\n\t"
        "tilestored %%tmm3, 3072(%0,%1,1)"
        :
        : "r"(sums), "r"(int64_t{64})
        : "memory");
}

// The products of a panel with rows, `rows` at a time. While AMX works on one tile, the next weights are unpacked and the sums
// of the tile before are scaled.
template <weight_type Type> class tiled_product {
public:
    tiled_product(int n, int rows, float (*out)[panel_rows])
        : n_tiles((n + rows - 1) / rows), n(n), rows(rows), out(out) {
        for (int i = 0; i < n; ++i) {
            for (int at = 0; at < panel_rows; at += vec::lanes) vec::store(out[i] + at, vec::zero_floats());
        }
    }

    void block(const uint8_t * words, const uint8_t * scales, const act_block * acts, const char * const * places) {
        w.now ^= 1;
        // all rows are in a tile; the last one begins among those of the one before it
        for (int i = 0; i < n_tiles; ++i) {
            const int at = i * rows < n - rows ? i * rows : n - rows;
            if (places) prefetch(places + at, rows);
            clear_sums();
            if (i == 0) {
                unpack<0>(words, scales);  // one quarter ahead of AMX, whose loads wait for stores
                unpack<1>(words, scales);
                add(0, words, 0, acts[at].q);
                unpack<2>(words, scales);
                add(1, words, 0, acts[at].q);
                unpack<3>(words, scales);
                add(2, words, 0, acts[at].q);
                add(3, words, 0, acts[at].q);
            } else {
                for (int quarter = 0; quarter < 4; ++quarter) add(quarter, words, i, acts[at].q);
            }
            this_one ^= 1;
            store_sums(sums[this_one]);
            before = {&w.of_block[w.now], acts + at, out + at, i * rows - at, rows};
        }
    }

    void finish() {
        for (int quarter = 0; quarter < 4; ++quarter) scale_quarter(quarter);
    }

    static constexpr int word_bytes = block_words(Type) * panel_rows * 4;

private:
    // A tile whose sums are stored: rows `first` to `last` are to be scaled.
    struct tile_done {
        const factors *   f;
        const act_block * a;
        float (*out)[panel_rows];
        int first, last;
    };

    template <int Quarter> void unpack(const uint8_t * words, const uint8_t * scales) {
        for (int lane = 0; lane < panel_rows; lane += vec::lanes) {
            const unpacker<vec, planes<Type>, false> u{words, scales, w, lane, word_bytes};
            if constexpr (Type == weight_type::q6_k) {
                if constexpr (Quarter == 0) u.q6_k_scales();
                if constexpr (Quarter % 2 == 0) u.template q6_k_half<Quarter / 2>();
            } else {
                if constexpr (Quarter == 0) u.six_bit_scales();
                if constexpr (Type == weight_type::q4_k) u.q4_k_quarter(Quarter);
                if constexpr (Type == weight_type::q5_k) u.template q5_k_quarter<Quarter>();
            }
        }
    }

    void add(int quarter, const uint8_t * words, int i, const int8_t * q) {
        add_products<planes<Type>::is_signed>(q + quarter * 64, w.low[quarter * 16], w.high[quarter * 16]);
        const int bytes = (word_bytes / (n_tiles * 4) + 63) / 64 * 64;  // of a later block, to the L2 cache
        const uint8_t * ahead = words + blocks_ahead * word_bytes + (i * 4 + quarter) * bytes;
        for (int at = 0; at < bytes; at += 64) __builtin_prefetch(ahead + at, 0, 2);
        scale_quarter(quarter);
    }

    void scale_quarter(int quarter) {
        const int first = quarter * 4 > before.first ? quarter * 4 : before.first;
        const int last  = quarter * 4 + 4 < before.last ? quarter * 4 + 4 : before.last;
        if (first < last) scale(first, last);
    }

    void scale(int first, int last) {
        const factors & f = *before.f;
        vec::floats d[2], min_scale[2];
        vec::ints   min[4][2];
        for (int v = 0; v < 2; ++v) {
            d[v] = vec::load(f.d + v * vec::lanes);
            if constexpr (!has_min(Type)) continue;
            min_scale[v] = vec::load(f.min_scale + v * vec::lanes);
            for (int i = 0; i < 4; ++i) min[i][v] = vec::load(f.min[i] + v * vec::lanes * 2);
        }
        for (int t = first; t < last; ++t) {
            vec::floats x[2];
            for (int v = 0; v < 2; ++v) {
                const vec::ints low  = vec::load(static_cast<const void *>(sums[this_one][v * 2][t]));
                const vec::ints high = vec::load(static_cast<const void *>(sums[this_one][v * 2 + 1][t]));
                x[v] = vec::mul(vec::to_floats(vec::add(low, vec::shift_left<planes<Type>::log_high>(high))), d[v]);
            }
            if constexpr (has_min(Type)) {
                vec::ints s[2] = {vec::zero(), vec::zero()};
                for (int i = 0; i < 4; ++i) {
                    const vec::ints sum = vec::splat(before.a[t].sum[i]);
                    for (int v = 0; v < 2; ++v) s[v] = vec::dot_pairs(s[v], min[i][v], sum);
                }
                for (int v = 0; v < 2; ++v) x[v] = vec::mul_sub_from(vec::to_floats(s[v]), min_scale[v], x[v]);
            }
            const vec::floats factor = vec::splat(before.a[t].d[0]);
            for (int v = 0; v < 2; ++v) {
                float * to = before.out[t] + v * vec::lanes;
                vec::store(to, vec::mul_add(x[v], factor, vec::load(to)));
            }
        }
    }

    planes<Type>          w;
    alignas(64) tile_sums sums[2];
    tile_done             before   = {};
    int                   this_one = 0;  // of the sums
    int                   n_tiles, n, rows;
    float (*out)[panel_rows];
};

template <weight_type Type>
void product_in_tiles(const uint8_t * panel, int64_t k, const act_block * acts, int64_t stride, int n, float (*out)[panel_rows],
                      const char * const * places) {
    const int n_tiles = (n + tile_rows - 1) / tile_rows, rows = (n + n_tiles - 1) / n_tiles;
    begin(rows);
    tiled_product<Type> product(n, rows, out);
    const uint8_t * words  = panel;
    const uint8_t * scales = panel + k * product.word_bytes / block_k;
    for (int64_t at = 0; at < k; at += block_k, words += product.word_bytes, scales += panel_rows * 2, acts += stride) {
        product.block(words, scales, acts, k - at > block_k ? nullptr : places);
    }
    product.finish();
    end();
}

void panel_product(weight_type type, const uint8_t * panel, int64_t k, const act_block * acts, int64_t stride, int n,
                   float (*out)[panel_rows], const char * const * places) {
    if (n < min_rows) return panel_product<exact_vec>(type, panel, k, acts, stride, n, out, places);
    switch (type) {
        case weight_type::q4_k: return product_in_tiles<weight_type::q4_k>(panel, k, acts, stride, n, out, places);
        case weight_type::q5_k: return product_in_tiles<weight_type::q5_k>(panel, k, acts, stride, n, out, places);
        case weight_type::q6_k: return product_in_tiles<weight_type::q6_k>(panel, k, acts, stride, n, out, places);
        default: return panel_product<exact_vec>(type, panel, k, acts, stride, n, out, places);
    }
}

}  // namespace

const kernel_set amx = {"amx", quantize<vec>, panel_product, attend<vec>};

}  // namespace lfmfast::kernels
