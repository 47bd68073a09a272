// A llama_context with its memory: what may be asked of it is checked before llama.cpp sees it, because ggml ends the
// process on many wrong arguments.
#pragma once

#include "engine/decoder.h"
#include "engine/model.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct llama_context;
struct ggml_threadpool;

namespace lfmfast {

struct context_params {
    int64_t     n_ctx           = 4096;  // tokens; 0: the model's training length
    int64_t     n_batch         = 2048;  // tokens that one decode call may hold
    int64_t     n_ubatch        = 512;   // tokens that one pass through the graph holds
    int64_t     n_seq_max       = 1;
    int64_t     n_outputs_max   = 0;     // tokens of one decode call that may give logits; 0: n_batch
    int64_t     n_rs_seq        = 0;     // rollback snapshots of recurrent state
    int64_t     n_threads       = 1;     // of single-token passes
    int64_t     n_threads_batch = 0;     // of other passes; 0: n_threads
    std::string type_k          = "f16";
    std::string type_v          = "f16";
    int         flash_attn      = -1;    // -1 auto, 0 off, 1 on
    bool        kv_unified      = false;
    bool        offload_kqv     = true;
    bool        deterministic   = false; // a sequence's logits depend on nothing else; CPU only (exact.h)
};

// Every member may be called from any thread; calls on one context take turns. abort() does not wait.
class context : public decoder {
  public:
    context(std::shared_ptr<lfmfast::model> model, const context_params & params);  // throws invalid_argument, out_of_memory
    ~context() override;
    context(const context &) = delete;
    context & operator=(const context &) = delete;

    const lfmfast::model & model() const { return *model_; }
    int64_t n_ctx() const;      // tokens of all sequences together, as llama.cpp rounded it
    int64_t n_ctx_seq() const override;  // tokens that one sequence can hold
    int64_t n_batch() const;
    int64_t n_ubatch() const override;
    int64_t n_seq_max() const override { return n_seq_max_; }

    // llama_decode; see decoder. Also: context_full and cancelled are llama.cpp's 1 and 2, all else is an error "decode".
    void decode(const batch & batch, const stop_request * stop = nullptr, const stop_request * stop_too = nullptr) override;
    // Stops the decode that is running, if any, between two graph nodes (CPU).
    void abort() { abort_.store(true); }

    size_t        n_outputs() const { return n_outputs_; }  // rows of logits of the last decode
    const float * logits() override;                                 // row-major (n_outputs, n_vocab); nullptr when there are none

    // Sequence memory; see decoder.
    [[nodiscard]] bool seq_rm(int64_t seq, int64_t p0, int64_t p1) override;
    void    seq_add(int64_t seq, int64_t p0, int64_t p1, int64_t shift) override;  // throws invalid_argument if it can't shift
    bool    can_shift() const override;
    // A recurrent state is always copied as it is now, whatever p0 and p1 say.
    void    seq_cp(int64_t src, int64_t dst, int64_t p0, int64_t p1);
    void    seq_keep(int64_t seq);
    int64_t seq_pos_min(int64_t seq) override;  // -1: empty
    int64_t seq_pos_max(int64_t seq);
    void    clear(bool data) override;

    std::vector<uint8_t> state_seq_get(int64_t seq, bool partial) override;
    void state_seq_set(int64_t seq, const uint8_t * data, size_t size, bool partial) override;

    void set_n_threads(int64_t n_threads, int64_t n_threads_batch) override;

  private:
    void check_seq(int64_t seq, const char * what) const;
    void check_batch(const batch & batch);
    static bool on_abort_check(void * data);
    void release();

    std::shared_ptr<lfmfast::model> model_;
    llama_context *   ctx_  = nullptr;
    ggml_threadpool * pool_ = nullptr;
    int64_t           n_seq_max_;
    int64_t           n_outputs_max_;
    int64_t           n_threads_max_;
    size_t            n_outputs_ = 0;
    std::atomic<bool> abort_{false};
    const stop_request * stop_     = nullptr;
    const stop_request * stop_too_ = nullptr;
    std::mutex        mutex_;
};

inline std::shared_ptr<context> make_context(std::shared_ptr<model> m, const context_params & params) {
    return std::make_shared<context>(std::move(m), params);
}

}  // namespace lfmfast
