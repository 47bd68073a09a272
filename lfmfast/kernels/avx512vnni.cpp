// Compiled for AVX-512 with VNNI: no header of the standard library whose inline functions another file could end up with.
#include "kernels/vec512.h"

#include "kernels/attention.h"
#include "kernels/product.h"

namespace lfmfast::kernels {

const kernel_set avx512vnni = {"avx512vnni", quantize<vec>, panel_product<vec>, attend<vec>};

}  // namespace lfmfast::kernels
