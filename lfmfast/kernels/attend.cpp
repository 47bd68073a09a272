#include "kernels/attend.h"

#include "kernels/kernels.h"

#include "ggml-cpu-impl.h"
#include "ggml.h"

#include <cstring>

namespace lfmfast::kernels {

namespace {

constexpr int64_t max_rows = 63;  // from 64 on ggml multiplies tiles of rows and cells

struct parameters {
    float scale, max_bias, logit_softcap;
};

parameters parameters_of(const ggml_tensor * dst) {
    parameters p;
    memcpy(&p, dst->op_params, sizeof(p));
    return p;
}

bool are_rows(const ggml_tensor * t, ggml_type type) {
    return t->type == type && t->nb[0] == ggml_type_size(type) && t->nb[1] % t->nb[0] == 0 && t->nb[2] % t->nb[0] == 0;
}

}  // namespace

bool can_attend(const ggml_tensor * dst) {
    const ggml_tensor * q = dst->src[0], * k = dst->src[1], * v = dst->src[2], * mask = dst->src[3], * sinks = dst->src[4];
    if (sinks || q->ne[1] > max_rows || (q->ne[0] != 64 && q->ne[0] != 128) || v->ne[0] != q->ne[0]) return false;
    if (!are_rows(q, GGML_TYPE_F32) || !are_rows(k, GGML_TYPE_F16) || !are_rows(v, GGML_TYPE_F16)) return false;
    if (k->ne[2] != v->ne[2] || q->ne[2] % k->ne[2] != 0 || k->ne[3] != q->ne[3] || v->ne[3] != q->ne[3]) return false;
    if (mask && (mask->type != GGML_TYPE_F16 || mask->ne[2] != 1 || mask->nb[0] != sizeof(uint16_t))) return false;
    const parameters p = parameters_of(dst);
    return p.max_bias == 0.0f && p.logit_softcap == 0.0f;
}

bool attend(const kernel_set & kernels, const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * q = dst->src[0], * k = dst->src[1], * v = dst->src[2], * mask = dst->src[3];
    const int64_t n_groups = k->ne[2], n_units = q->ne[1] * n_groups * q->ne[3];
    if (n_units < params->nth) return false;
    attention a = {};
    a.head_size  = static_cast<int>(q->ne[0]);
    a.n_heads    = static_cast<int>(q->ne[2] / n_groups);
    a.n_cells    = k->ne[1];
    a.q_stride   = static_cast<int64_t>(q->nb[2] / sizeof(float));
    a.k_stride   = static_cast<int64_t>(k->nb[1] / sizeof(uint16_t));
    a.v_stride   = static_cast<int64_t>(v->nb[1] / sizeof(uint16_t));
    a.out_stride = static_cast<int64_t>(dst->nb[1] / sizeof(float));
    a.scale      = parameters_of(dst).scale;
    for (int64_t unit = params->ith; unit < n_units; unit += params->nth) {  // in turns: rows see different numbers of cells
        const int64_t group = unit % n_groups, row = unit / n_groups % q->ne[1], stream = unit / n_groups / q->ne[1];
        const int64_t head  = group * a.n_heads;
        const auto    at    = [](const ggml_tensor * t, int64_t i1, int64_t i2, int64_t i3) {
            return static_cast<char *>(t->data) + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
        };
        a.q    = reinterpret_cast<const float *>(at(q, row, head, stream));
        a.k    = at(k, 0, group, stream);
        a.v    = at(v, 0, group, stream);
        a.mask = mask ? reinterpret_cast<const uint16_t *>(at(mask, row, 0, stream % mask->ne[3])) : nullptr;
        a.out  = reinterpret_cast<float *>(static_cast<char *>(dst->data) +
                                           ((stream * q->ne[1] + row) * q->ne[2] + head) * static_cast<int64_t>(dst->nb[1]));
        kernels.attend(a);
    }
    return true;
}

}  // namespace lfmfast::kernels
