#include "engine/context.h"

#include "engine/backend.h"
#include "engine/exact.h"

#include "llama.h"

#include <algorithm>
#include <map>

namespace lfmfast {

namespace {

// Types that llama.cpp's KV cache takes.
ggml_type cache_type(const char * name, const std::string & text) {
    constexpr ggml_type types[] = {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q5_1,
                                   GGML_TYPE_Q5_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_0, GGML_TYPE_IQ4_NL};
    std::string names;
    for (const ggml_type type : types) {
        if (text == ggml_type_name(type)) {
            return type;
        }
        names += (names.empty() ? "" : ", ") + std::string(ggml_type_name(type));
    }
    throw error(error_code::invalid_argument, std::string(name) + " must be one of " + names + ", not '" + text + "'");
}

template <typename F> F cpu_function(const char * name) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    return reinterpret_cast<F>(ggml_backend_reg_get_proc_address(reg, name));
}

}  // namespace

// --- context -----------------------------------------------------------------------------------------------------------

context::context(std::shared_ptr<lfmfast::model> model, const context_params & params) : model_(std::move(model)) {
    if (!model_->has_decoder()) {
        throw error(error_code::invalid_argument, "'" + model_->path() + "' is no text generation model (it has no plain decoder)");
    }
    const int64_t n_threads_batch = params.n_threads_batch == 0 ? params.n_threads : params.n_threads_batch;
    const int64_t max_sequences   = std::min(n_seq_limit, static_cast<int64_t>(llama_max_parallel_sequences()));
    if (params.n_ctx != 0) {
        check_range("n_ctx", params.n_ctx, 8, n_tokens_limit);
    }
    check_range("n_batch", params.n_batch, 1, n_tokens_limit);
    check_range("n_ubatch", params.n_ubatch, 1, n_tokens_limit);
    check_range("n_seq_max", params.n_seq_max, 1, max_sequences);
    check_range("n_outputs_max", params.n_outputs_max, 0, n_tokens_limit);
    check_range("n_rs_seq", params.n_rs_seq, 0, 64);
    check_range("n_threads", params.n_threads, 1, GGML_MAX_N_THREADS);
    check_range("n_threads_batch", n_threads_batch, 1, GGML_MAX_N_THREADS);
    if (params.deterministic && !model_->on_cpu()) {
        throw error(error_code::invalid_argument, "deterministic holds on the CPU only, and layers of this model are on a GPU: "
                    "load it with n_gpu_layers 0");
    }
    const int64_t n_ctx = params.n_ctx != 0 ? params.n_ctx : model_->n_ctx_train();
    if (!params.kv_unified && n_ctx / params.n_seq_max < 8) {
        throw error(error_code::invalid_argument, "n_ctx " + std::to_string(n_ctx) + " leaves less than 8 tokens for each of " +
                    std::to_string(params.n_seq_max) + " sequences", n_ctx, 8 * params.n_seq_max);
    }

    auto p            = llama_context_default_params();
    p.n_ctx           = static_cast<uint32_t>(n_ctx);
    p.n_batch         = static_cast<uint32_t>(std::min(params.n_batch, n_ctx));
    p.n_ubatch        = static_cast<uint32_t>(std::min({params.n_ubatch, params.n_batch, n_ctx}));
    p.n_seq_max       = static_cast<uint32_t>(params.n_seq_max);
    // llama.cpp makes room for one row per sequence at least, and asserts that this is within the limit. A small limit saves
    // a compute buffer of n_ubatch rows of logits: 128 MiB for a vocabulary of 65,536.
    n_outputs_max_    = std::max<int64_t>(params.n_outputs_max == 0 ? p.n_batch : params.n_outputs_max, params.n_seq_max);
    p.n_outputs_max   = static_cast<uint32_t>(n_outputs_max_);
    p.n_rs_seq        = static_cast<uint32_t>(params.n_rs_seq);
    p.n_threads       = static_cast<int32_t>(params.n_threads);
    p.n_threads_batch = static_cast<int32_t>(n_threads_batch);
    p.type_k          = cache_type("type_k", params.type_k);
    p.type_v          = cache_type("type_v", params.type_v);
    p.flash_attn_type = static_cast<llama_flash_attn_type>(std::clamp(params.flash_attn, -1, 1));
    p.kv_unified      = params.kv_unified;
    p.offload_kqv     = params.offload_kqv;
    p.no_perf         = true;
    p.abort_callback      = on_abort_check;
    p.abort_callback_data = this;
    log_clear_errors();
    {
        abort_guard guard(error_code::internal);
        ctx_ = llama_init_from_model(model_->get(), p);
    }
    if (ctx_ == nullptr) {
        const std::string reason = with_reason("can't create a context of " + std::to_string(n_ctx) + " tokens");
        const bool memory = reason.find("alloc") != std::string::npos;
        throw error(memory ? error_code::out_of_memory : error_code::invalid_argument, reason, n_ctx);
    }
    n_seq_max_     = params.n_seq_max;
    n_threads_max_ = std::max(params.n_threads, n_threads_batch);
    // Threads that live as long as the context; without a pool ggml starts new ones for every pass.
    auto tp = ggml_threadpool_params_default(static_cast<int>(n_threads_max_));
    pool_   = cpu_function<decltype(&ggml_threadpool_new)>("ggml_threadpool_new")(&tp);
    if (pool_ == nullptr) {
        llama_free(ctx_);
        throw error(error_code::out_of_memory, "can't start " + std::to_string(n_threads_max_) + " threads", n_threads_max_);
    }
    llama_attach_threadpool(ctx_, pool_, pool_);
    if (params.deterministic && !set_exact(pool_, true)) {
        release();
        throw error(error_code::invalid_argument, "deterministic needs lfmfast's CPU kernels, and they are not in use: there "
                    "are none for this CPU, or LFMFAST_KERNELS switched them off (build_info() says which are)");
    }
}

context::~context() {
    release();
}

void context::release() {
    llama_free(ctx_);
    set_exact(pool_, false);
    cpu_function<decltype(&ggml_threadpool_free)>("ggml_threadpool_free")(pool_);
}

bool context::on_abort_check(void * data) {
    const auto * self = static_cast<context *>(data);
    if (self->abort_.load(std::memory_order_relaxed)) {
        return true;
    }
    return (self->stop_ != nullptr && self->stop_->due()) || (self->stop_too_ != nullptr && self->stop_too_->due());
}

int64_t context::n_ctx() const { return llama_n_ctx(ctx_); }
int64_t context::n_ctx_seq() const { return llama_n_ctx_seq(ctx_); }
int64_t context::n_batch() const { return llama_n_batch(ctx_); }
int64_t context::n_ubatch() const { return llama_n_ubatch(ctx_); }

void context::check_seq(int64_t seq, const char * what) const {
    check_range(what, seq, 0, n_seq_max_ - 1);
}

void context::check_batch(const batch & batch) {
    check_range("number of tokens in the batch", static_cast<int64_t>(batch.size()), 1, n_batch());
    check_range("number of tokens in the batch that give logits", static_cast<int64_t>(batch.n_outputs()), 0, n_outputs_max_);
    std::map<int32_t, int64_t> next;  // of each sequence: the position that must come next; -1: any (empty sequence)
    for (size_t i = 0; i < batch.size(); ++i) {
        model_->check_token(batch.tokens()[i], "batch");
        for (const int32_t seq : batch.seq_ids()[i]) {
            check_seq(seq, "seq_id");
            auto it = next.find(seq);
            if (it == next.end()) {
                it = next.emplace(seq, llama_memory_seq_pos_max(llama_get_memory(ctx_), seq) + 1).first;
            }
            if (batch.positions()[i] != it->second) {
                throw error(error_code::invalid_argument, "sequence " + std::to_string(seq) + " goes on at position " +
                            std::to_string(it->second) + ", but token " + std::to_string(i) + " of the batch has position " +
                            std::to_string(batch.positions()[i]), batch.positions()[i], it->second);
            }
            ++it->second;
        }
    }
}

void context::decode(const batch & batch, const stop_request * stop, const stop_request * stop_too) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_batch(batch);
    std::vector<int32_t>   n_seq_ids;
    std::vector<int32_t *> seq_ids;
    for (const auto & ids : batch.seq_ids()) {
        n_seq_ids.push_back(static_cast<int32_t>(ids.size()));
        seq_ids.push_back(const_cast<int32_t *>(ids.data()));
    }
    llama_batch b{};
    b.n_tokens = static_cast<int32_t>(batch.size());
    b.token    = const_cast<int32_t *>(batch.tokens().data());
    b.pos      = const_cast<int32_t *>(batch.positions().data());
    b.n_seq_id = n_seq_ids.data();
    b.seq_id   = seq_ids.data();
    b.logits   = const_cast<int8_t *>(batch.outputs().data());
    n_outputs_ = 0;
    abort_.store(false);
    stop_     = stop;
    stop_too_ = stop_too;
    log_clear_errors();
    const int32_t rc = llama_decode(ctx_, b);
    stop_ = stop_too_ = nullptr;
    if (rc == 0) {
        llama_synchronize(ctx_);
        n_outputs_ = batch.n_outputs();
        return;
    }
    if (rc == 1) {
        throw error(error_code::context_full, "no room in the context for " + std::to_string(batch.size()) +
                    " more tokens; it holds " + std::to_string(n_ctx()), static_cast<int64_t>(batch.size()), n_ctx());
    }
    if (rc == 2) {
        throw error(error_code::cancelled, "decode was aborted; the sequences of its batch must be cleared or restored");
    }
    throw error(error_code::decode, with_reason("llama_decode returned " + std::to_string(rc)), rc);
}

const float * context::logits() {
    std::lock_guard<std::mutex> lock(mutex_);
    return n_outputs_ == 0 ? nullptr : llama_get_logits(ctx_);
}

bool context::seq_rm(int64_t seq, int64_t p0, int64_t p1) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_seq(seq, "seq_id");
    check_range("p0", p0, -1, INT32_MAX);
    check_range("p1", p1, -1, INT32_MAX);
    return llama_memory_seq_rm(llama_get_memory(ctx_), static_cast<int32_t>(seq), static_cast<int32_t>(p0), static_cast<int32_t>(p1));
}

void context::seq_cp(int64_t src, int64_t dst, int64_t p0, int64_t p1) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_seq(src, "source seq_id");
    check_seq(dst, "target seq_id");
    check_range("p0", p0, -1, INT32_MAX);
    check_range("p1", p1, -1, INT32_MAX);
    if (src == dst) {
        return;
    }
    auto *     mem     = llama_get_memory(ctx_);
    const auto pos_max = llama_memory_seq_pos_max(mem, static_cast<int32_t>(src));
    const bool whole   = p0 <= 0 && (p1 < 0 || p1 > pos_max);
    const bool streams = llama_n_ctx_seq(ctx_) != llama_n_ctx(ctx_);
    if (streams && !whole) {
        throw error(error_code::invalid_argument, "without kv_unified only whole sequences can be copied, not positions " +
                    std::to_string(p0) + " to " + std::to_string(p1) + " of " + std::to_string(pos_max + 1));
    }
    llama_memory_seq_cp(mem, static_cast<int32_t>(src), static_cast<int32_t>(dst), static_cast<int32_t>(whole ? -1 : p0),
                        static_cast<int32_t>(whole ? -1 : p1));
}

void context::seq_add(int64_t seq, int64_t p0, int64_t p1, int64_t shift) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_seq(seq, "seq_id");
    check_range("p0", p0, -1, INT32_MAX);
    check_range("p1", p1, -1, INT32_MAX);
    check_range("shift", shift, -n_tokens_limit, n_tokens_limit);
    if (!can_shift()) {
        throw error(error_code::invalid_argument, "this model's memory can't move positions");
    }
    llama_memory_seq_add(llama_get_memory(ctx_), static_cast<int32_t>(seq), static_cast<int32_t>(p0), static_cast<int32_t>(p1),
                         static_cast<int32_t>(shift));
}

bool context::can_shift() const {
    return llama_memory_can_shift(llama_get_memory(ctx_));
}

void context::seq_keep(int64_t seq) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_seq(seq, "seq_id");
    llama_memory_seq_keep(llama_get_memory(ctx_), static_cast<int32_t>(seq));
}

int64_t context::seq_pos_min(int64_t seq) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_seq(seq, "seq_id");
    return llama_memory_seq_pos_min(llama_get_memory(ctx_), static_cast<int32_t>(seq));
}

int64_t context::seq_pos_max(int64_t seq) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_seq(seq, "seq_id");
    return llama_memory_seq_pos_max(llama_get_memory(ctx_), static_cast<int32_t>(seq));
}

void context::clear(bool data) {
    std::lock_guard<std::mutex> lock(mutex_);
    llama_memory_clear(llama_get_memory(ctx_), data);
}

std::vector<uint8_t> context::state_seq_get(int64_t seq, bool partial) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_seq(seq, "seq_id");
    const uint32_t       flags = partial ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : LLAMA_STATE_SEQ_FLAGS_NONE;
    abort_guard          guard(error_code::state);
    std::vector<uint8_t> data(llama_state_seq_get_size_ext(ctx_, static_cast<int32_t>(seq), flags));
    const size_t n = llama_state_seq_get_data_ext(ctx_, data.data(), data.size(), static_cast<int32_t>(seq), flags);
    if (n != data.size()) {
        throw error(error_code::state, with_reason("can't read the state of sequence " + std::to_string(seq)), seq);
    }
    return data;
}

void context::state_seq_set(int64_t seq, const uint8_t * data, size_t size, bool partial) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_seq(seq, "seq_id");
    const uint32_t flags = partial ? LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY : LLAMA_STATE_SEQ_FLAGS_NONE;
    log_clear_errors();
    size_t      n = 0;
    std::string reason;
    try {
        abort_guard guard(error_code::state);
        n = llama_state_seq_set_data_ext(ctx_, data, size, static_cast<int32_t>(seq), flags);
    } catch (const std::exception & e) {
        reason = e.what();
    }
    if (n == size && size > 0) {
        return;
    }
    if (!llama_memory_seq_rm(llama_get_memory(ctx_), static_cast<int32_t>(seq), -1, -1)) {
        llama_memory_clear(llama_get_memory(ctx_), false);
    }
    throw error(error_code::state, with_reason("a state of " + std::to_string(size) + " bytes does not fit this model and context" +
                (reason.empty() ? "" : ": " + reason)) + "; sequence " + std::to_string(seq) + " is now empty",
                static_cast<int64_t>(size));
}

void context::set_n_threads(int64_t n_threads, int64_t n_threads_batch) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_range("n_threads", n_threads, 1, n_threads_max_);
    check_range("n_threads_batch", n_threads_batch, 1, n_threads_max_);
    llama_set_n_threads(ctx_, static_cast<int32_t>(n_threads), static_cast<int32_t>(n_threads_batch));
}

}  // namespace lfmfast
