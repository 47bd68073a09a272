// A llama_context with its memory: what may be asked of it is checked before llama.cpp sees it, because ggml ends the
// process on many wrong arguments.
#pragma once

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
};

int64_t now_us();  // monotonic clock

// Tokens for one decode call, as llama_batch has them.
class batch {
  public:
    batch(int64_t n_tokens_max, int64_t n_seq_max);

    // Throws invalid_argument when the batch is full or a number is out of its limits.
    void add(int64_t token, int64_t pos, const std::vector<int64_t> & seq_ids, bool output);
    void clear();

    size_t size() const { return tokens_.size(); }
    size_t capacity() const { return capacity_; }
    size_t n_outputs() const;

  private:
    friend class context;
    size_t                            capacity_;
    size_t                            n_seq_max_;
    std::vector<int32_t>              tokens_;
    std::vector<int32_t>              positions_;
    std::vector<std::vector<int32_t>> seq_ids_;
    std::vector<int8_t>               outputs_;
};

// Every member may be called from any thread; calls on one context take turns. abort() does not wait.
class context {
  public:
    context(std::shared_ptr<lfmfast::model> model, const context_params & params);  // throws invalid_argument, out_of_memory
    ~context();
    context(const context &) = delete;
    context & operator=(const context &) = delete;

    const lfmfast::model & model() const { return *model_; }
    int64_t n_ctx() const;      // tokens of all sequences together, as llama.cpp rounded it
    int64_t n_ctx_seq() const;  // tokens that one sequence can hold
    int64_t n_batch() const;
    int64_t n_ubatch() const;
    int64_t n_seq_max() const { return n_seq_max_; }

    // Processes the batch (llama_decode). Throws
    //   invalid_argument  a token, position or sequence out of range, or positions that do not continue their sequence
    //   context_full      no room in the memory; nothing was changed
    //   cancelled         abort() was called; the sequences of the batch are in an unknown state: clear or restore them
    //   decode            llama.cpp failed; likewise
    // After any of them there are no logits.
    // `stop`: also abort once `stop->at` is set and `stop->grace_us` have gone by since.
    struct stop_request {
        std::atomic<int64_t> at{0};        // now_us() when the stop was asked for; 0: not asked for
        std::atomic<int64_t> grace_us{0};
    };
    void decode(const batch & batch, const stop_request * stop = nullptr);
    // Stops the decode that is running, if any, between two graph nodes (CPU).
    void abort() { abort_.store(true); }

    size_t        n_outputs() const { return n_outputs_; }  // rows of logits of the last decode
    const float * logits();                                 // row-major (n_outputs, n_vocab); nullptr when there are none

    // Sequence memory; -1 for p0 or p1 means from the start / to the end, ranges are [p0, p1).
    // False: the sequence can't be cut there (recurrent state) and nothing was changed.
    [[nodiscard]] bool seq_rm(int64_t seq, int64_t p0, int64_t p1);
    // A recurrent state is always copied as it is now, whatever p0 and p1 say.
    void    seq_cp(int64_t src, int64_t dst, int64_t p0, int64_t p1);
    void    seq_keep(int64_t seq);
    int64_t seq_pos_min(int64_t seq);  // -1: empty
    int64_t seq_pos_max(int64_t seq);
    void    clear(bool data);

    // One sequence's state as bytes. `partial`: only what can't be cut (the recurrent state of a hybrid model).
    std::vector<uint8_t> state_seq_get(int64_t seq, bool partial);
    // Throws state; then the sequence is empty, or unchanged if it was refused at once.
    void state_seq_set(int64_t seq, const uint8_t * data, size_t size, bool partial);

    void set_n_threads(int64_t n_threads, int64_t n_threads_batch);

  private:
    void check_seq(int64_t seq, const char * what) const;
    void check_batch(const batch & batch);
    static bool on_abort_check(void * data);

    std::shared_ptr<lfmfast::model> model_;
    llama_context *   ctx_  = nullptr;
    ggml_threadpool * pool_ = nullptr;
    int64_t           n_seq_max_;
    int64_t           n_outputs_max_;
    int64_t           n_threads_max_;
    size_t            n_outputs_ = 0;
    std::atomic<bool> abort_{false};
    const stop_request * stop_ = nullptr;
    std::mutex        mutex_;
};

inline std::shared_ptr<context> make_context(std::shared_ptr<model> m, const context_params & params) {
    return std::make_shared<context>(std::move(m), params);
}

}  // namespace lfmfast
