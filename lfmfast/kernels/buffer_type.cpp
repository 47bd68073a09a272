// Puts the kernels into ggml's CPU backend, as a type of buffer for weights: a model's loader offers it every weight that a
// supported operation reads, before ggml's own repacking. Nothing of ggml is changed.
#include "kernels/attend.h"
#include "kernels/conv.h"
#include "kernels/exact.h"
#include "kernels/matmul.h"
#include "kernels/pack.h"

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "traits.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#ifdef LFMFAST_BACKEND_DL
extern "C" {
GGML_BACKEND_API int ggml_backend_score(void);
GGML_BACKEND_API int lfmfast_cpu_score(void);
}

// How well this variant of the CPU backend suits the machine; 0: not at all. ggml asks the CPU only, and the operating system
// must save the wide registers, too.
int lfmfast_cpu_score() {
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (ggml_cpu_has_avx() && !__builtin_cpu_supports("avx")) return 0;
    if (ggml_cpu_has_avx512() && !__builtin_cpu_supports("avx512f")) return 0;
#endif
    return ggml_backend_score();
}
#endif

namespace lfmfast::kernels {

namespace {

ggml_backend_buffer_type_t buffer_type();

// Of a tensor in our buffers: its type's operations.
class traits : public ggml::cpu::tensor_traits {
public:
    explicit traits(weight_type type) : weights{active(), type} {}

    bool work_size(int n_threads, const ggml_tensor * op, size_t & size) override {
        size = work_bytes(op, n_threads);
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        switch (op->op) {
            case GGML_OP_MUL_MAT: mul_mat(weights, params, op); return true;
            case GGML_OP_MUL_MAT_ID: mul_mat_id(weights, params, op); return true;
            case GGML_OP_GET_ROWS: get_rows(weights, params, op); return true;
            default: return false;
        }
    }

    const packed_weights weights;
};

// Of every convolution, wherever its tensors lie: their order and their sums are the same as ggml's.
class conv_traits : public ggml::cpu::tensor_traits {
public:
    bool work_size(int, const ggml_tensor *, size_t & size) override {
        size = 0;
        return true;
    }

    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        op->op == GGML_OP_CONCAT ? concat(params, op) : ssm_conv(params, op);
        return true;
    }

    static conv_traits * of(const ggml_tensor * op) {
        static conv_traits shared;
        const bool known = op->op == GGML_OP_CONCAT ? can_concat(op) : op->op == GGML_OP_SSM_CONV && can_ssm_conv(op);
        return known ? &shared : nullptr;
    }
};

// Of every attention that is ours in one way and ggml's in another.
class attention_traits : public ggml::cpu::tensor_traits {
public:
    bool work_size(int, const ggml_tensor *, size_t &) override { return false; }  // as much as ggml's needs

    // Asked at the node, of its own pool: all threads of a pass must go the same way, whatever contexts come and go meanwhile.
    bool compute_forward(ggml_compute_params * params, ggml_tensor * op) override {
        if (auto * exact = exact_traits(op)) exact->compute_forward(params, op);
        return !params->use_ref && attend(*kernels, params, op);
    }

    static attention_traits * of(const ggml_tensor * op) {
        static attention_traits shared;
        return op->op == GGML_OP_FLASH_ATTN_EXT && can_attend(op) ? &shared : nullptr;
    }

private:
    const kernel_set * kernels = active();
};

traits * traits_of(const ggml_tensor * tensor) {
    static traits q4_0(weight_type::q4_0), q8_0(weight_type::q8_0), q4_k(weight_type::q4_k), q5_k(weight_type::q5_k),
        q6_k(weight_type::q6_k);
    if (tensor->view_src || tensor->ne[3] != 1 || !ggml_is_contiguous(tensor)) return nullptr;
    switch (tensor->type) {
        case GGML_TYPE_Q4_0: return &q4_0;
        case GGML_TYPE_Q8_0: return &q8_0;
        case GGML_TYPE_Q4_K: return &q4_k;
        case GGML_TYPE_Q5_K: return &q5_k;
        case GGML_TYPE_Q6_K: return &q6_k;
        default: return nullptr;
    }
}

class extra_buffer_type : public ggml::cpu::extra_buffer_type {
public:
    bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) override {
        if (!is_ours(op) || !traits_of(op->src[0]) || op->type != GGML_TYPE_F32) return false;
        const ggml_tensor * other = op->src[1];
        if (other->buffer && !ggml_backend_buft_is_host(other->buffer->buft)) return false;
        if (op->op == GGML_OP_MUL_MAT_ID) return is_rows(other);
        if (op->src[0]->ne[2] != 1) return false;
        // The embedding, too: it is the output matrix as well, and packed once serves both.
        return op->op == GGML_OP_MUL_MAT ? is_rows(other) : op->op == GGML_OP_GET_ROWS && ggml_is_vector(other);
    }

    ggml::cpu::tensor_traits * get_tensor_traits(const ggml_tensor * op) override {
        const bool known = op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID || op->op == GGML_OP_GET_ROWS;
        if (known && is_ours(op)) return static_cast<ggml::cpu::tensor_traits *>(op->src[0]->extra);
        if (auto * conv = conv_traits::of(op)) return conv;
        if (auto * attention = attention_traits::of(op)) return attention;
        return exact_traits(op);
    }

private:
    static bool is_ours(const ggml_tensor * op) {
        return op->src[0] && op->src[0]->buffer && op->src[0]->buffer->buft == buffer_type();
    }

    static bool is_rows(const ggml_tensor * t) { return t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float); }
};

int64_t n_panels(const ggml_tensor * tensor) { return (tensor->ne[1] + panel_rows - 1) / panel_rows * tensor->ne[2]; }

// Calls step(type, panel, offset of its first row, number of rows) for the panels of a tensor from `first` to `last`.
template <class Step> void each_panel(const ggml_tensor * tensor, int64_t first, int64_t last, Step step) {
    const weight_type type       = traits_of(tensor)->weights.type;
    const size_t      panel_size = panel_bytes(type, tensor->ne[0]);
    const int64_t     of_matrix  = n_panels(tensor) / tensor->ne[2];
    for (int64_t i = first; i < last; ++i) {
        const int64_t matrix = i / of_matrix, row = i % of_matrix * panel_rows, left = tensor->ne[1] - row;
        const int     n_rows = static_cast<int>(left < panel_rows ? left : panel_rows);
        step(type, static_cast<uint8_t *>(tensor->data) + i * panel_size, (matrix * tensor->ne[1] + row) * tensor->nb[1], n_rows);
    }
}

// The same for all panels, on as many threads as are worth it; one of them is the caller.
template <class Step> void each_panel_on_threads(const ggml_tensor * tensor, Step step) {
    constexpr size_t  bytes_each = 1 << 20;
    const int64_t     n          = n_panels(tensor);
    const size_t      most       = std::min<size_t>({ggml_nbytes(tensor) / bytes_each, std::thread::hardware_concurrency(), 16});
    const int64_t     n_threads  = std::clamp<int64_t>(static_cast<int64_t>(most), 1, n);
    const auto        share      = [&](int64_t i) { each_panel(tensor, n * i / n_threads, n * (i + 1) / n_threads, step); };
    std::vector<std::thread> threads;
    int64_t                  next = 1;
    try {
        for (; next < n_threads; ++next) threads.emplace_back(share, next);
    } catch (const std::exception &) {  // no more threads
    }
    share(0);
    for (; next < n_threads; ++next) share(next);
    for (auto & thread : threads) thread.join();
}

// Takes the pages of a model's file that were read out of this process; they stay in the system's cache. Nothing else is touched:
// a mapping that can't be written holds what its file holds.
void release_file_pages(const void * data, size_t size) {
#ifdef __linux__
    const auto begin = reinterpret_cast<uintptr_t>(data), end = begin + size;
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        unsigned long first, last, inode;
        char          may[5];
        if (sscanf(line.c_str(), "%lx-%lx %4s %*s %*s %lu", &first, &last, may, &inode) != 4) continue;
        if (begin < first || end > last) continue;
        const auto      page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
        const uintptr_t at   = (begin + page - 1) / page * page, to = end / page * page;
        if (!strcmp(may, "r--s") && inode != 0 && at < to) madvise(reinterpret_cast<void *>(at), to - at, MADV_DONTNEED);
        return;
    }
#else
    (void) data, (void) size;
#endif
}

ggml_status init_tensor(ggml_backend_buffer_t, ggml_tensor * tensor) {
    tensor->extra = static_cast<ggml::cpu::tensor_traits *>(traits_of(tensor));
    return GGML_STATUS_SUCCESS;
}

void set_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    GGML_ASSERT(offset == 0 && size == ggml_nbytes(tensor));
    each_panel_on_threads(tensor, [&](weight_type type, uint8_t * panel, size_t at, int n_rows) {
        pack_panel(type, tensor->ne[0], static_cast<const uint8_t *>(data) + at, n_rows, panel);
    });
    release_file_pages(data, size);
}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    std::vector<uint8_t> rows(ggml_nbytes(tensor));
    each_panel(tensor, 0, n_panels(tensor), [&](weight_type type, const uint8_t * panel, size_t at, int n_rows) {
        unpack_rows(type, tensor->ne[0], panel, 0, n_rows, rows.data() + at);
    });
    memcpy(data, rows.data() + offset, size);
}

const char * get_name(ggml_backend_buffer_type_t) {
    static const std::string name = std::string("LFMFAST_") + active()->name;
    return name.c_str();
}

// Weights stream through the CPU: with pages of 4 KiB, one core read 9.2 GB/s where it reads 11.4 with huge ones.
void use_huge_pages(void * base, size_t size) {
#ifdef __linux__
    constexpr uintptr_t page  = 1 << 21;
    const uintptr_t     first = (reinterpret_cast<uintptr_t>(base) + page - 1) / page * page;
    const uintptr_t     last  = (reinterpret_cast<uintptr_t>(base) + size) / page * page;
    if (first < last) madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE);
#else
    (void) base, (void) size;
#endif
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), size);
    if (!buffer) return nullptr;
    use_huge_pages(ggml_backend_buffer_get_base(buffer), size);
    buffer->buft              = buft;
    buffer->iface.init_tensor = init_tensor;
    buffer->iface.set_tensor  = set_tensor;
    buffer->iface.get_tensor  = get_tensor;
    buffer->iface.cpy_tensor  = nullptr;
    return buffer;
}

size_t get_alignment(ggml_backend_buffer_type_t) { return 64; }

size_t get_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    const traits * t = traits_of(tensor);
    if (!t) return ggml_nbytes(tensor);
    return static_cast<size_t>(n_panels(tensor)) * panel_bytes(t->weights.type, tensor->ne[0]);
}

ggml_backend_buffer_type_t buffer_type() {
    static ggml_backend_buffer_type type = [] {
        ggml_backend_buffer_type t = {};
        t.iface.get_name       = get_name;
        t.iface.alloc_buffer   = alloc_buffer;
        t.iface.get_alignment  = get_alignment;
        t.iface.get_alloc_size = get_alloc_size;
        t.device               = ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0);
        t.context              = static_cast<ggml::cpu::extra_buffer_type *>(new extra_buffer_type());
        return t;
    }();
    return &type;
}

// Whether the CPU can run the rest of this library: variants of the backend that it can't are loaded, too, to rate them.
bool usable() {
#ifdef LFMFAST_BACKEND_DL
    return lfmfast_cpu_score() != 0;
#else
    return true;
#endif
}

// When the library is loaded: the backend copies the list at its first use.
const bool in_use = [] {
    if (!active() || !usable()) return false;
    auto & types = ggml_backend_cpu_get_extra_buffer_types();
    types.insert(types.begin(), buffer_type());
    return true;
}();

}  // namespace

bool registered() { return in_use; }

}  // namespace lfmfast::kernels
