#include "kernels/matmul.h"

#include "kernels/pack.h"

#include "ggml-cpu-impl.h"

#include <algorithm>
#include <cstring>

namespace lfmfast::kernels {

namespace {

constexpr int64_t max_task_rows = 132;  // 22 tiles; of K = 8192 quantised: 1.6 MB, in the L2 cache of a core
constexpr int64_t max_panels    = 16;   // of one chunk of work

// A run of quantised rows that meet the same weights.
struct task {
    int32_t matrix;  // expert
    int32_t first;
    int32_t n;
};

int64_t n_blocks(const ggml_tensor * weights) { return (weights->ne[0] + block_k - 1) / block_k; }

char * row_at(const ggml_tensor * t, int64_t row) {
    const int64_t i1 = row % t->ne[1], i2 = row / t->ne[1] % t->ne[2], i3 = row / (t->ne[1] * t->ne[2]);
    return static_cast<char *>(t->data) + i1 * t->nb[1] + i2 * t->nb[2] + i3 * t->nb[3];
}

// Work memory of a node: quantised rows, then what mul_mat_id knows of them.
struct work {
    act_block * acts;
    int32_t *   pairs;    // (token, expert used) of each row, sorted by expert
    task *      tasks;
    int32_t *   ends;     // of each expert's rows
    int32_t *   n_tasks;

    static size_t bytes(const ggml_tensor * dst) {
        const int64_t rows  = ggml_nrows(dst);
        size_t        total = sizeof(act_block) * (1 + rows * n_blocks(dst->src[0]));
        if (dst->op == GGML_OP_MUL_MAT_ID) {
            total += rows * (sizeof(int32_t) + sizeof(task)) + (dst->src[0]->ne[2] + 1) * sizeof(int32_t);
        }
        return total;
    }

    work(const ggml_compute_params * params, const ggml_tensor * dst) {
        GGML_ASSERT(params->wsize >= bytes(dst));
        const uintptr_t base = (reinterpret_cast<uintptr_t>(params->wdata) + 63) / 64 * 64;
        const int64_t   rows = ggml_nrows(dst);
        acts    = reinterpret_cast<act_block *>(base);
        pairs   = reinterpret_cast<int32_t *>(acts + rows * n_blocks(dst->src[0]));
        tasks   = reinterpret_cast<task *>(pairs + rows);
        ends    = reinterpret_cast<int32_t *>(tasks + rows);
        n_tasks = ends + dst->src[0]->ne[2];
    }
};

// One product of packed weights with rows, as one thread sees it.
class product {
public:
    product(const packed_weights & weights, const ggml_compute_params * params, ggml_tensor * dst)
        : weights(weights), params(params), dst(dst), k(dst->src[0]->ne[0]), m(dst->src[0]->ne[1]), n_rows(ggml_nrows(dst)),
          n_panels((m + panel_rows - 1) / panel_rows), panel_size(panel_bytes(weights.type, k)) {}

    // Quantises this thread's share of the rows.
    template <class RowOf> void quantize_rows(act_block * acts, RowOf row_of) const {
        const int64_t blocks = n_blocks(dst->src[0]), total = n_rows * blocks;
        const int64_t first = total * params->ith / params->nth, last = total * (params->ith + 1) / params->nth;
        int64_t row = first / blocks, block = first % blocks;
        for (int64_t i = first; i < last; ++row, block = 0) {
            const float * x = reinterpret_cast<const float *>(row_of(row));
            for (; block < blocks && i < last; ++block, ++i) {
                const int64_t at = block * block_k;
                weights.kernels->quantize(weights.type, x + at, static_cast<int>(std::min<int64_t>(block_k, k - at)),
                                          acts + block * n_rows + row);
            }
        }
        if (params->ith == 0) ggml_threadpool_chunk_set(params->threadpool, params->nth);
        ggml_barrier(params->threadpool);
    }

    // Takes chunks (some panels of a task) until none is left.
    template <class TaskAt, class DstRow>
    void run(const act_block * acts, int64_t n_tasks, TaskAt task_at, DstRow dst_row) const {
        const int64_t step     = std::clamp<int64_t>(n_panels * n_tasks / (params->nth * 8), 1, max_panels);
        const int64_t n_groups = (n_panels + step - 1) / step;
        char *        places[max_task_rows];
        for (int64_t c = params->ith; c < n_tasks * n_groups; c = ggml_threadpool_chunk_add(params->threadpool, 1)) {
            const task    t     = task_at(c / n_groups);
            const int64_t first = c % n_groups * step, last = std::min(first + step, n_panels);
            for (int32_t i = 0; i < t.n; ++i) places[i] = dst_row(t.first + i) + first * panel_rows * sizeof(float);
            for (int64_t p = first; p < last; ++p) run_panel(acts, t, p, places);
        }
    }

private:
    // Leaves the places of the next panel.
    void run_panel(const act_block * acts, const task & t, int64_t p, char ** places) const {
        alignas(64) float out[max_task_rows][panel_rows];
        const auto * panel = static_cast<const uint8_t *>(dst->src[0]->data) + (t.matrix * n_panels + p) * panel_size;
        weights.kernels->panel_product(weights.type, panel, k, acts + t.first, n_rows, t.n, out, places);
        const int64_t n = std::min<int64_t>(panel_rows, m - p * panel_rows);
        for (int32_t i = 0; i < t.n; ++i) {
            if (n == panel_rows) {
                memcpy(places[i], out[i], sizeof(out[i]));  // of a size that the compiler knows
            } else {
                memcpy(places[i], out[i], static_cast<size_t>(n) * sizeof(float));
            }
            places[i] += sizeof(out[i]);
        }
    }

    const packed_weights &      weights;
    const ggml_compute_params * params;
    ggml_tensor *               dst;
    int64_t                     k, m, n_rows, n_panels;
    size_t                      panel_size;
};

// Sorts (token, expert used) pairs by expert, and cuts each expert's run into tasks.
void plan_experts(const ggml_tensor * dst, const work & w) {
    const ggml_tensor * ids      = dst->src[2];
    const int64_t       n_expert = dst->src[0]->ne[2], n_used = ids->ne[0], n_pairs = n_used * ids->ne[1];
    const auto expert_of = [&](int64_t pair) {
        const char * at = static_cast<const char *>(ids->data) + pair / n_used * ids->nb[1] + pair % n_used * ids->nb[0];
        const int32_t expert = *reinterpret_cast<const int32_t *>(at);
        GGML_ASSERT(expert >= 0 && expert < n_expert);
        return expert;
    };
    std::fill_n(w.ends, n_expert, 0);
    for (int64_t pair = 0; pair < n_pairs; ++pair) ++w.ends[expert_of(pair)];
    int32_t n = 0, n_tasks = 0;
    for (int32_t expert = 0; expert < n_expert; ++expert) {
        const int32_t first = n;
        n += w.ends[expert];
        w.ends[expert] = first;  // grows back as the rows come in
        for (int32_t at = first; at < n; at += max_task_rows) {
            w.tasks[n_tasks++] = {expert, at, std::min<int32_t>(n - at, max_task_rows)};
        }
    }
    for (int64_t pair = 0; pair < n_pairs; ++pair) w.pairs[w.ends[expert_of(pair)]++] = static_cast<int32_t>(pair);
    *w.n_tasks = n_tasks;
}

}  // namespace

size_t work_bytes(const ggml_tensor * dst, int n_threads) {
    return dst->op == GGML_OP_GET_ROWS ? n_threads * dst->src[0]->nb[1] : work::bytes(dst);
}

void mul_mat(const packed_weights & weights, const ggml_compute_params * params, ggml_tensor * dst) {
    const work          w(params, dst);
    const product       p(weights, params, dst);
    const ggml_tensor * rows = dst->src[1];
    p.quantize_rows(w.acts, [&](int64_t row) { return row_at(rows, row); });
    const int64_t n_rows = ggml_nrows(dst), n_tasks = (n_rows + max_task_rows - 1) / max_task_rows;
    const int64_t each   = (n_rows + n_tasks - 1) / n_tasks;
    const auto    task_at = [&](int64_t i) {
        return task{0, static_cast<int32_t>(i * each), static_cast<int32_t>(std::min(each, n_rows - i * each))};
    };
    p.run(w.acts, (n_rows + each - 1) / each, task_at, [&](int64_t row) { return row_at(dst, row); });
}

void mul_mat_id(const packed_weights & weights, const ggml_compute_params * params, ggml_tensor * dst) {
    const work          w(params, dst);
    const product       p(weights, params, dst);
    const ggml_tensor * rows   = dst->src[1];
    const int64_t       n_used = dst->src[2]->ne[0];
    if (params->ith == 0) plan_experts(dst, w);
    ggml_barrier(params->threadpool);
    p.quantize_rows(w.acts, [&](int64_t row) {
        const int64_t pair = w.pairs[row];
        return static_cast<char *>(rows->data) + pair % n_used % rows->ne[1] * rows->nb[1] + pair / n_used * rows->nb[2];
    });
    p.run(w.acts, *w.n_tasks, [&](int64_t i) { return w.tasks[i]; }, [&](int64_t row) {
        const int64_t pair = w.pairs[row];
        return static_cast<char *>(dst->data) + pair % n_used * dst->nb[1] + pair / n_used * dst->nb[2];
    });
}

// The GGUF row again, dequantised by ggml: the same numbers as from weights that are not packed.
void get_rows(const packed_weights & weights, const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * matrix     = dst->src[0];
    const ggml_tensor * ids        = dst->src[1];
    const size_t        panel_size = panel_bytes(weights.type, matrix->ne[0]);
    GGML_ASSERT(params->wsize >= params->nth * matrix->nb[1]);
    auto * gguf_row = static_cast<uint8_t *>(params->wdata) + params->ith * matrix->nb[1];
    for (int64_t i = params->ith; i < ids->ne[0]; i += params->nth) {
        const int32_t row = *reinterpret_cast<const int32_t *>(static_cast<const char *>(ids->data) + i * ids->nb[0]);
        GGML_ASSERT(row >= 0 && row < matrix->ne[1]);
        const auto * panel = static_cast<const uint8_t *>(matrix->data) + row / panel_rows * panel_size;
        unpack_rows(weights.type, matrix->ne[0], panel, row % panel_rows, 1, gguf_row);
        auto * to = reinterpret_cast<float *>(static_cast<char *>(dst->data) + i * dst->nb[1]);
        ggml_get_type_traits(matrix->type)->to_float(gguf_row, to, matrix->ne[0]);
    }
}

}  // namespace lfmfast::kernels
