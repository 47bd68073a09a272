#pragma once

#include "kernels/kernels.h"

struct ggml_compute_params;
struct ggml_tensor;

// ggml's MUL_MAT, MUL_MAT_ID and GET_ROWS on packed weights, as every thread of a pool calls them.
namespace lfmfast::kernels {

// Whether ggml's CPU backend has them (buffer_type.cpp).
bool registered();

struct packed_weights {
    const kernel_set * kernels;
    weight_type        type;
};

// Bytes of work memory for a node.
size_t work_bytes(const ggml_tensor * dst, int n_threads);

void mul_mat(const packed_weights & weights, const ggml_compute_params * params, ggml_tensor * dst);
void mul_mat_id(const packed_weights & weights, const ggml_compute_params * params, ggml_tensor * dst);
void get_rows(const packed_weights & weights, const ggml_compute_params * params, ggml_tensor * dst);

}  // namespace lfmfast::kernels
