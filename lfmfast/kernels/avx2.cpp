// Compiled for AVX2: no header of the standard library whose inline functions another file could end up with.
#include "kernels/vec256.h"

#include "kernels/attention.h"
#include "kernels/product.h"

namespace lfmfast::kernels {

namespace {

// Products are summed in 16 bits for as long as they can't overflow: a step adds at most 2 * 127 * the largest weight.
struct vec : vec256 {
    static constexpr int q8_offset = 0;
    template <int Bits> static constexpr int run() { return Bits == 4 ? 8 : Bits == 5 ? 4 : Bits == 6 ? 2 : 1; }
    static ints start(ints) { return _mm256_setzero_si256(); }
    template <int Bits> static ints step(ints run, ints w, ints x) {
        if constexpr (Bits == 8) {  // signed weights: their sign goes to the other factor
            return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
        } else {
            return _mm256_add_epi16(run, _mm256_maddubs_epi16(w, x));
        }
    }
    static ints finish(ints sum, ints run) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(run, _mm256_set1_epi16(1)));
    }
};

}  // namespace

const kernel_set avx2 = {"avx2", quantize<vec>, panel_product<vec>, attend<vec>};

}  // namespace lfmfast::kernels
