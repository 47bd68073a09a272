// Loops over rows of logits for the instruction set at hand, chosen when the program runs. Pure: no llama.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lfmfast {

constexpr size_t simd_block = 64;  // logits per block

struct simd_kernels {
    const char * name;
    // The maximum of each block; false where a NaN is among them.
    bool (*block_max)(const float * x, size_t n_blocks, float * out);
    // Bit i of a block: x[i] >= floor.
    uint64_t (*at_least)(const float * x, float floor);
    // How many of n numbers are >= floor. n is a multiple of 16.
    size_t (*count)(const float * x, size_t n, float floor);
    // Per block, the sum of exp(x[i] / temp - max), within 1.5e-7 of the exact sum (relative; a term below exp(-87) counts
    // as at most that). The quotient is rounded like float division. Needs x[i] / temp <= max.
    void (*exp_sums)(const float * x, size_t n_blocks, float temp, float max, double * out);
};

const simd_kernels & simd();                      // those in use: the best ones of this CPU
std::vector<std::string> simd_available();        // names, best first; "scalar" is always there
bool simd_use(const std::string & name);          // for tests and benchmarks; false: this CPU does not have it

extern const simd_kernels * const simd_avx512;    // nullptr where not compiled in, or the CPU does not have it
extern const simd_kernels * const simd_avx2;
extern const simd_kernels * const simd_neon;

}  // namespace lfmfast
