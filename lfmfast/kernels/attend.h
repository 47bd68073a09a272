#pragma once

struct ggml_compute_params;
struct ggml_tensor;

// FLASH_ATTN_EXT of few rows, as every thread of a pool calls it. ggml takes one query head after another, looks at each cell of
// the cache for each, and sums in 16 bits; sequences that generate together see few of each other's cells.
namespace lfmfast::kernels {

struct kernel_set;

bool can_attend(const ggml_tensor * dst);

// Returns whether it did: with more threads than there are groups of heads, ggml's way is faster.
bool attend(const kernel_set & kernels, const ggml_compute_params * params, ggml_tensor * dst);

}  // namespace lfmfast::kernels
