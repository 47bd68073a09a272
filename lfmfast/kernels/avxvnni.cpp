// Compiled for AVX2 with AVX-VNNI: no header of the standard library whose inline functions another file could end up with.
#include "kernels/vec256.h"

#include "kernels/attention.h"
#include "kernels/product.h"

namespace lfmfast::kernels {

namespace {

struct vec : vec256 {
    static constexpr int q8_offset = 128;
    template <int Bits> static constexpr int run() { return 8; }
    static ints start(ints sum) { return sum; }
    template <int Bits> static ints step(ints run, ints w, ints x) { return _mm256_dpbusd_avx_epi32(run, w, x); }
    static ints finish(ints, ints run) { return run; }
};

}  // namespace

const kernel_set avxvnni = {"avxvnni", quantize<vec>, panel_product<vec>, attend<vec>};

}  // namespace lfmfast::kernels
