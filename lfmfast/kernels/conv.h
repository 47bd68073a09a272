#pragma once

struct ggml_compute_params;
struct ggml_tensor;

// The short convolutions of LFM2, as every thread of a pool calls them. ggml joins a convolution's state and its rows on one
// thread, and walks along both with the stride of a row at every step; here blocks of 16 x 16 are taken in turns.
namespace lfmfast::kernels {

// CONCAT of a state's columns and of rows that lie transposed (F32, along the first dimension).
bool can_concat(const ggml_tensor * dst);
void concat(const ggml_compute_params * params, ggml_tensor * dst);

// SSM_CONV.
bool can_ssm_conv(const ggml_tensor * dst);
void ssm_conv(const ggml_compute_params * params, ggml_tensor * dst);

}  // namespace lfmfast::kernels
