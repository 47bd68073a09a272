// Whole nodes of a graph, as ggml calls them from several threads, of random shapes, strides and values: within their buffers
// (the sanitizers see to that), every number of a row exactly that of the row alone, and nothing written anywhere else.
// LFMFAST_FUZZ_SECONDS says how long (the default is for CI), LFMFAST_FUZZ_SEED with what.
#include "check.h"
#include "kernels/matmul.h"
#include "kernels/pack.h"

#include "ggml-cpu-impl.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

using namespace lfmfast::kernels;

// --- what matmul.cpp needs of ggml -------------------------------------------------------------------------------------------

struct ggml_threadpool {
    explicit ggml_threadpool(int n) : n_threads(n) {}

    const int               n_threads;
    std::atomic<int>        chunk{0};
    std::mutex              mutex;
    std::condition_variable passed;
    int                     n_waiting = 0, round = 0;
};

extern "C" {

void ggml_threadpool_chunk_set(ggml_threadpool * pool, int value) { pool->chunk.store(value); }

int ggml_threadpool_chunk_add(ggml_threadpool * pool, int value) { return pool->chunk.fetch_add(value); }

void ggml_barrier(ggml_threadpool * pool) {
    std::unique_lock<std::mutex> lock(pool->mutex);
    const int round = pool->round;
    if (++pool->n_waiting == pool->n_threads) {
        pool->n_waiting = 0;
        ++pool->round;
        pool->passed.notify_all();
    } else {
        pool->passed.wait(lock, [&] { return pool->round != round; });
    }
}

int64_t ggml_nrows(const ggml_tensor * t) { return t->ne[1] * t->ne[2] * t->ne[3]; }

void ggml_abort(const char * file, int line, const char * format, ...) {
    va_list values;
    va_start(values, format);
    std::fprintf(stderr, "%s:%d: ", file, line);
    std::vfprintf(stderr, format, values);
    va_end(values);
    std::abort();
}

// In place of values: the bytes of the row, again and again.
static size_t row_bytes;
static void   bytes_as_values(const void * row, float * values, int64_t k) {
    for (int64_t i = 0; i < k; ++i) values[i] = static_cast<const uint8_t *>(row)[static_cast<size_t>(i) % row_bytes];
}

const ggml_type_traits * ggml_get_type_traits(ggml_type) {
    static const ggml_type_traits traits = {"", 0, 0, 0, true, bytes_as_values, nullptr};
    return &traits;
}

}  // extern "C"

namespace {

// --- random nodes ------------------------------------------------------------------------------------------------------------

constexpr weight_type types[]      = {weight_type::q4_0, weight_type::q8_0, weight_type::q4_k, weight_type::q5_k,
                                      weight_type::q6_k};
constexpr ggml_type   ggml_types[] = {GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K};

std::mt19937 rng;

int64_t below(int64_t n) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(n)); }
bool    once_in(int n) { return rng() % static_cast<unsigned>(n) == 0; }

// From 1, seldom large.
int64_t some(int64_t most) { return 1 + below(1 + below(1 + below(most))); }

float odd_value() {
    constexpr float values[] = {0.0f, -0.0f, 1e-45f, -1e-40f, 1.2e-38f, 3e38f, -3.4e38f,
                                std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                                std::numeric_limits<float>::quiet_NaN()};
    return values[rng() % (sizeof(values) / sizeof(values[0]))];
}

// Packed matrices, and the GGUF rows that they were packed from.
struct packed {
    weight_type          type;
    int64_t              k, m, n_matrices;
    size_t               row_size, panel_size;
    std::vector<uint8_t> rows;
    std::unique_ptr<uint8_t[]> panels;  // exactly as large as it has to be

    packed(weight_type type, int64_t k, int64_t m, int64_t n_matrices) : type(type), k(k), m(m), n_matrices(n_matrices) {
        const block_layout & block = layout(type);
        row_size   = static_cast<size_t>(k / block.n_values * block.n_bytes);
        panel_size = panel_bytes(type, k);
        rows.resize(row_size * static_cast<size_t>(m * n_matrices));
        for (auto & b : rows) b = static_cast<uint8_t>(rng());
        const bool any_scales = once_in(4);  // with infinities, denormals and what is no number
        const auto tame = [&](uint8_t * half) { half[1] = static_cast<uint8_t>((half[1] & 0x83) | 0x20); };
        for (size_t at = 0; at < rows.size() && !any_scales; at += static_cast<size_t>(block.n_bytes)) {
            tame(&rows[at + static_cast<size_t>(std::max(block.scale_at, 0))]);
            if (block.scale_at < 0) tame(&rows[at + 2]);
        }
        panels.reset(new uint8_t[panel_size * static_cast<size_t>(n_panels() * n_matrices)]);
        for (int64_t matrix = 0; matrix < n_matrices; ++matrix) {
            for (int64_t p = 0; p < n_panels(); ++p) {
                const int n = static_cast<int>(std::min<int64_t>(panel_rows, m - p * panel_rows));
                pack_panel(type, k, &rows[row_size * static_cast<size_t>(matrix * m + p * panel_rows)], n, panel(matrix, p));
            }
        }
    }

    int64_t   n_panels() const { return (m + panel_rows - 1) / panel_rows; }
    uint8_t * panel(int64_t matrix, int64_t p) const {
        return &panels[panel_size * static_cast<size_t>(matrix * n_panels() + p)];
    }

    ggml_tensor tensor() const {
        ggml_tensor t = {};
        t.type = ggml_types[static_cast<int>(type)];
        const int64_t ne[] = {k, m, n_matrices, 1};
        std::copy(ne, ne + 4, t.ne);
        t.nb[0] = static_cast<size_t>(layout(type).n_bytes);
        t.nb[1] = row_size;
        t.nb[2] = t.nb[1] * static_cast<size_t>(m);
        t.nb[3] = t.nb[2] * static_cast<size_t>(n_matrices);
        t.data  = panels.get();
        return t;
    }

    // What a row alone gives.
    std::vector<float> product(const kernel_set & set, int64_t matrix, const float * x) const {
        const int64_t          n_blocks = (k + block_k - 1) / block_k;
        std::vector<act_block> acts(static_cast<size_t>(n_blocks));
        for (int64_t b = 0; b < n_blocks; ++b) {
            set.quantize(type, x + b * block_k, static_cast<int>(std::min<int64_t>(block_k, k - b * block_k)), &acts[b]);
        }
        std::vector<float> out;
        for (int64_t p = 0; p < n_panels(); ++p) {
            float values[1][panel_rows];
            set.panel_product(type, panel(matrix, p), k, acts.data(), 1, 1, values, nullptr);
            out.insert(out.end(), values[0], values[0] + std::min<int64_t>(panel_rows, m - p * panel_rows));
        }
        return out;
    }
};

// A tensor of 32-bit values with gaps between its rows, in a buffer without room behind it.
template <class T> struct strided {
    ggml_tensor          tensor = {};
    std::unique_ptr<T[]> data;
    int64_t              size;

    strided(ggml_type type, int64_t n0, int64_t n1, int64_t n2, int64_t n3, T fill) {
        const int64_t ne[] = {n0, n1, n2, n3};
        int64_t       step = 1;
        size               = 1;
        for (int i = 0; i < 4; ++i) {
            tensor.ne[i] = ne[i];
            tensor.nb[i] = static_cast<size_t>(step) * sizeof(T);
            size += (ne[i] - 1) * step;
            step = step * ne[i] + (once_in(3) ? below(9) : 0);
        }
        tensor.type = type;
        data.reset(new T[static_cast<size_t>(size)]);
        std::fill_n(data.get(), size, fill);
        tensor.data = data.get();
    }

    T * at(int64_t i1, int64_t i2 = 0, int64_t i3 = 0) {
        return reinterpret_cast<T *>(reinterpret_cast<char *>(data.get()) + static_cast<size_t>(i1) * tensor.nb[1] +
                                     static_cast<size_t>(i2) * tensor.nb[2] + static_cast<size_t>(i3) * tensor.nb[3]);
    }
};

using floats = strided<float>;
using ints   = strided<int32_t>;

void fill_row(float * x, int64_t k) {
    std::normal_distribution<float> normal;
    const float scale = once_in(6) ? 1e-42f : once_in(6) ? 1e30f : 1.0f;
    for (int64_t i = 0; i < k; ++i) x[i] = normal(rng) * scale;
    if (once_in(4)) x[below(k)] = odd_value();
    if (once_in(20)) std::fill_n(x, k, odd_value());
}

template <class Node> void run(int n_threads, size_t work_size, Node node) {
    ggml_threadpool         pool(n_threads);
    std::unique_ptr<char[]> work(new char[work_size]);
    std::vector<std::thread> threads;
    const auto of = [&](int i) { return ggml_compute_params{i, n_threads, work_size, work.get(), &pool, false}; };
    for (int i = 1; i < n_threads; ++i) {
        threads.emplace_back([&, i] {
            const auto params = of(i);
            node(&params);
        });
    }
    const auto params = of(0);
    node(&params);
    for (auto & thread : threads) thread.join();
}

bool same(const float * a, const float * b, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        if (std::memcmp(a + i, b + i, sizeof(float)) != 0 && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
    }
    return true;
}

std::string name(const kernel_set & set, const char * what, const packed & w, int64_t n_rows, int n_threads) {
    std::ostringstream out;
    out << set.name << " " << what << " type " << static_cast<int>(w.type) << " k " << w.k << " m " << w.m << " x "
        << w.n_matrices << ", " << n_rows << " rows, " << n_threads << " threads";
    return out.str();
}

packed random_weights(int64_t n_matrices) {
    const auto    type = types[rng() % 5];
    const int64_t unit = layout(type).n_values, most = once_in(12) ? 12288 : n_matrices > 1 ? 768 : 2048;
    const int64_t k    = std::max<int64_t>(once_in(2) ? unit : 256, some(most / unit) * unit);
    return packed(type, k, some(k > 4096 ? 70 : 300), n_matrices);
}

void fuzz_mul_mat(const kernel_set & set) {
    const packed  w       = random_weights(1);
    const int64_t n1      = once_in(10) ? 100 + below(501) : some(40), n2 = once_in(4) ? some(3) : 1, n3 = once_in(6) ? 2 : 1;
    const int     n_threads = static_cast<int>(1 + below(5));
    if (w.k * w.m * n1 * n2 * n3 > (int64_t(1) << 26)) return;  // too long under a sanitizer
    floats x(GGML_TYPE_F32, w.k, n1, n2, n3, 0.0f), y(GGML_TYPE_F32, w.m, n1, n2, n3, 7.5f);
    ggml_tensor weights = w.tensor();
    y.tensor.op     = GGML_OP_MUL_MAT;
    y.tensor.src[0] = &weights;
    y.tensor.src[1] = &x.tensor;
    const std::vector<float> before(y.data.get(), y.data.get() + y.size);
    const auto each = [&](auto what) {
        for (int64_t i3 = 0; i3 < n3; ++i3) {
            for (int64_t i2 = 0; i2 < n2; ++i2) {
                for (int64_t i1 = 0; i1 < n1; ++i1) what(x.at(i1, i2, i3), y.at(i1, i2, i3));
            }
        }
    };
    each([&](float * row, float *) { fill_row(row, w.k); });
    const packed_weights how{&set, w.type};
    run(n_threads, work_bytes(&y.tensor, n_threads),
        [&](const ggml_compute_params * params) { mul_mat(how, params, &y.tensor); });
    bool exact = true;
    each([&](float * row, float * out) {
        exact = exact && same(out, w.product(set, 0, row).data(), w.m);
        std::fill_n(out, w.m, 7.5f);
    });
    if (!exact) check::fail(__FILE__, __LINE__, name(set, "mul_mat", w, n1 * n2 * n3, n_threads) + ": not as each row alone");
    if (!same(before.data(), y.data.get(), y.size)) {
        check::fail(__FILE__, __LINE__, name(set, "mul_mat", w, n1 * n2 * n3, n_threads) + ": wrote between its rows");
    }
}

void fuzz_mul_mat_id(const kernel_set & set) {
    const int64_t n_expert = some(12), n_used = some(std::min<int64_t>(n_expert, 4)), n_tokens = once_in(10) ? 300 : some(30);
    const packed  w         = random_weights(n_expert);
    const int     n_threads = static_cast<int>(1 + below(5));
    if (w.k * w.m * n_tokens * n_used > (int64_t(1) << 26)) return;
    const int64_t n_x = once_in(2) ? 1 : n_used;  // the same row for all experts of a token, or one each
    floats x(GGML_TYPE_F32, w.k, n_x, n_tokens, 1, 0.0f), y(GGML_TYPE_F32, w.m, n_used, n_tokens, 1, 7.5f);
    ints   ids(GGML_TYPE_I32, n_used, n_tokens, 1, 1, -1);
    const bool unbalanced = once_in(2);
    for (int64_t t = 0; t < n_tokens; ++t) {
        for (int64_t i = 0; i < n_x; ++i) fill_row(x.at(i, t), w.k);
        for (int64_t i = 0; i < n_used; ++i) ids.at(t)[i] = static_cast<int32_t>(unbalanced ? 0 : below(n_expert));
    }
    ggml_tensor weights = w.tensor();
    y.tensor.op     = GGML_OP_MUL_MAT_ID;
    y.tensor.src[0] = &weights;
    y.tensor.src[1] = &x.tensor;
    y.tensor.src[2] = &ids.tensor;
    const packed_weights how{&set, w.type};
    run(n_threads, work_bytes(&y.tensor, n_threads),
        [&](const ggml_compute_params * params) { mul_mat_id(how, params, &y.tensor); });
    bool exact = true;
    for (int64_t t = 0; t < n_tokens; ++t) {
        for (int64_t i = 0; i < n_used; ++i) {
            exact = exact && same(y.at(i, t), w.product(set, ids.at(t)[i], x.at(i % n_x, t)).data(), w.m);
        }
    }
    if (!exact) check::fail(__FILE__, __LINE__, name(set, "mul_mat_id", w, n_tokens * n_used, n_threads) + ": not as alone");
}

void fuzz_get_rows(const kernel_set & set) {
    const packed  w         = random_weights(1);
    const int64_t n         = some(30);
    const int     n_threads = static_cast<int>(1 + below(5));
    ints          ids(GGML_TYPE_I32, n, 1, 1, 1, 0);
    floats        y(GGML_TYPE_F32, w.k, n, 1, 1, 7.5f);
    for (int64_t i = 0; i < n; ++i) ids.data[i] = static_cast<int32_t>(below(w.m));
    ggml_tensor weights = w.tensor();
    y.tensor.op     = GGML_OP_GET_ROWS;
    y.tensor.src[0] = &weights;
    y.tensor.src[1] = &ids.tensor;
    row_bytes = w.row_size;
    const packed_weights how{&set, w.type};
    run(n_threads, work_bytes(&y.tensor, n_threads),
        [&](const ggml_compute_params * params) { get_rows(how, params, &y.tensor); });
    std::vector<float> row(static_cast<size_t>(w.k));
    for (int64_t i = 0; i < n; ++i) {
        bytes_as_values(&w.rows[static_cast<size_t>(ids.data[i]) * w.row_size], row.data(), w.k);
        if (!same(row.data(), y.at(i), w.k)) check::fail(__FILE__, __LINE__, name(set, "get_rows", w, n, n_threads));
    }
}

// A weight row's scales that are no numbers stay in its products.
void fuzz_bad_weight_row(const kernel_set & set) {
    const auto type = types[rng() % 5];
    packed     w(type, 512, panel_rows, 1);
    std::vector<float> x(512, 0.0f);
    for (auto & v : x) v = static_cast<float>(below(200) - 100) / 50;
    const auto           before = w.product(set, 0, x.data());
    const int64_t        bad    = below(panel_rows);
    const block_layout & block  = layout(type);
    const size_t         at     = w.row_size * static_cast<size_t>(bad) + static_cast<size_t>(std::max(block.scale_at, 0));
    w.rows[at] = w.rows[at + 1] = 0x7f;  // an F16 that is no number
    pack_panel(type, w.k, w.rows.data(), panel_rows, w.panel(0, 0));
    const auto after = w.product(set, 0, x.data());
    for (int64_t r = 0; r < panel_rows; ++r) {
        if (r == bad ? std::isfinite(after[static_cast<size_t>(r)])
                     : !same(&before[static_cast<size_t>(r)], &after[static_cast<size_t>(r)], 1)) {
            check::fail(__FILE__, __LINE__, name(set, "bad row", w, r, 1));
        }
    }
}

double number(const char * variable, double otherwise) {
    const char * text = std::getenv(variable);
    return text && *text ? std::atof(text) : otherwise;
}

}  // namespace

int main() {
    const double seconds = number("LFMFAST_FUZZ_SECONDS", 5), seed = number("LFMFAST_FUZZ_SEED", 1);
    const auto   now     = [] {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    };
    int n_sets = 0;
    while (available()[n_sets]) ++n_sets;
    for (int s = 0; s < n_sets; ++s) {
        const kernel_set & set = *available()[s];
        const double       end = now() + seconds / n_sets;
        int                n   = 0;
        for (; n < 20 || now() < end; ++n) {
            rng.seed(static_cast<unsigned>(seed) + static_cast<unsigned>(n) * 7919u);  // a failure's number finds it again
            const int failed = check::failures;
            fuzz_mul_mat(set);
            fuzz_mul_mat_id(set);
            fuzz_get_rows(set);
            fuzz_bad_weight_row(set);
            if (check::failures != failed) {
                std::fprintf(stderr, "in round %d of seed %.0f\n", n, seed);
                return 1;
            }
        }
        std::printf("%s: %d rounds\n", set.name, n);
    }
    return check::failures != 0;
}
