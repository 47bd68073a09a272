#include "kernels/conv.h"

#include "ggml-cpu-impl.h"

#include <algorithm>
#include <cstring>

namespace lfmfast::kernels {

namespace {

constexpr int64_t block = 16;  // floats: a line of the cache

const float * floats(const ggml_tensor * t, int64_t i0, int64_t i1, int64_t i2) {
    return reinterpret_cast<const float *>(static_cast<const char *>(t->data) + i0 * t->nb[0] + i1 * t->nb[1] + i2 * t->nb[2]);
}

float * floats(ggml_tensor * t, int64_t i0, int64_t i1, int64_t i2) {
    return const_cast<float *>(floats(static_cast<const ggml_tensor *>(t), i0, i1, i2));
}

// to[j][i] = from[i][j] for i < n, j < m; `from_step` and `to_step` floats from one i or j to the next.
void transpose(const float * from, int64_t from_step, float * to, int64_t to_step, int64_t n, int64_t m) {
    if (n == block && m == block) {
        for (int64_t j = 0; j < block; ++j) {
            for (int64_t i = 0; i < block; ++i) to[j * to_step + i] = from[i * from_step + j];
        }
    } else {
        for (int64_t j = 0; j < m; ++j) {
            for (int64_t i = 0; i < n; ++i) to[j * to_step + i] = from[i * from_step + j];
        }
    }
}

// Calls step(channel, how many, sequence) for this thread's share of the blocks of channels.
template <class Step> void each_block(const ggml_compute_params * params, int64_t n_channels, int64_t n_seqs, Step step) {
    const int64_t n_blocks = (n_channels + block - 1) / block, total = n_blocks * n_seqs;
    const int64_t last = total * (params->ith + 1) / params->nth;
    for (int64_t i = total * params->ith / params->nth; i < last; ++i) {
        const int64_t channel = i % n_blocks * block;
        step(channel, std::min(block, n_channels - channel), i / n_blocks);
    }
}

bool is_floats(const ggml_tensor * t) { return t->type == GGML_TYPE_F32 && t->ne[3] == 1; }

}  // namespace

bool can_concat(const ggml_tensor * dst) {
    const ggml_tensor *state = dst->src[0], *rows = dst->src[1];
    return ggml_get_op_params_i32(dst, 0) == 0 && is_floats(dst) && is_floats(state) && is_floats(rows) &&
           dst->nb[0] == sizeof(float) && state->nb[0] == sizeof(float) && rows->nb[1] == sizeof(float);
}

void concat(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor *state = dst->src[0], *rows = dst->src[1];
    const int64_t n_state = state->ne[0], n_rows = rows->ne[0];
    const int64_t from_step = static_cast<int64_t>(rows->nb[0] / sizeof(float)), to_step = dst->nb[1] / sizeof(float);
    each_block(params, dst->ne[1], dst->ne[2], [&](int64_t channel, int64_t n, int64_t seq) {
        for (int64_t c = channel; c < channel + n; ++c) {
            memcpy(floats(dst, 0, c, seq), floats(state, 0, c, seq), static_cast<size_t>(n_state) * sizeof(float));
        }
        for (int64_t t = 0; t < n_rows; t += block) {
            transpose(floats(rows, t, channel, seq), from_step, floats(dst, n_state + t, channel, seq), to_step,
                      std::min(block, n_rows - t), n);
        }
    });
}

bool can_ssm_conv(const ggml_tensor * dst) {
    const ggml_tensor *rows = dst->src[0], *kernel = dst->src[1];
    return is_floats(dst) && is_floats(rows) && is_floats(kernel) && dst->nb[0] == sizeof(float) &&
           rows->nb[0] == sizeof(float) && kernel->nb[0] == sizeof(float);
}

void ssm_conv(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor *rows = dst->src[0], *kernel = dst->src[1];
    const int64_t width = kernel->ne[0], n_tokens = dst->ne[1], to_step = dst->nb[1] / sizeof(float);
    each_block(params, dst->ne[0], dst->ne[2], [&](int64_t channel, int64_t n, int64_t seq) {
        float sums[block][block];  // of each channel
        for (int64_t t = 0; t < n_tokens; t += block) {
            const int64_t m = std::min(block, n_tokens - t);
            for (int64_t c = 0; c < n; ++c) {
                const float * x = floats(rows, t, channel + c, seq);
                const float * w = floats(kernel, 0, channel + c, 0);
                for (int64_t i = 0; i < m; ++i) sums[c][i] = x[i] * w[0];
                for (int64_t j = 1; j < width; ++j) {
                    for (int64_t i = 0; i < m; ++i) sums[c][i] += x[i + j] * w[j];
                }
            }
            transpose(sums[0], block, floats(dst, channel, t, seq), to_step, n, m);
        }
    });
}

}  // namespace lfmfast::kernels
