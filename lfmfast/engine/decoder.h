// What the engine needs of a model and of its context. `model` and `context` are the real ones; the C++ tests have a small
// one of their own, so that the engine can be tested under sanitizers without llama.cpp. Pure: no llama.h.
#pragma once

#include "engine/batch.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace lfmfast {

int64_t now_us();  // monotonic clock

class vocabulary {
  public:
    virtual ~vocabulary() = default;

    virtual int32_t             n_vocab() const = 0;
    virtual bool                is_eog(int32_t token) const = 0;  // throws invalid_argument when out of range
    virtual const std::string & shown(int32_t token) const = 0;   // the bytes that a generated token adds to the answer
    virtual int32_t             token_id(const std::string & text) const = 0;  // -1: none
    virtual std::vector<int32_t> suppressed_tokens() const = 0;   // that must never be generated
    virtual std::vector<int32_t> tokenize(const std::string & text, bool add_special, bool parse_special) const = 0;
    virtual std::string          detokenize(const std::vector<int32_t> & tokens, bool special) const = 0;
};

// Asks a running decode to stop, once `at` is set and `grace_us` have gone by since.
struct stop_request {
    std::atomic<int64_t> at{0};        // now_us() when the stop was asked for; 0: not asked for
    std::atomic<int64_t> grace_us{0};

    void ask() {
        int64_t none = 0;
        at.compare_exchange_strong(none, now_us());
    }
    bool asked() const { return at.load(std::memory_order_relaxed) != 0; }
    bool due() const {
        const int64_t since = at.load(std::memory_order_relaxed);
        return since != 0 && now_us() - since >= grace_us.load(std::memory_order_relaxed);
    }
};

class decoder {
  public:
    virtual ~decoder() = default;

    virtual int64_t n_ctx_seq() const = 0;  // tokens that one sequence can hold
    virtual int64_t n_ubatch() const = 0;   // tokens of one pass
    virtual int64_t n_seq_max() const = 0;

    // Processes the batch. Throws
    //   invalid_argument  a token, position or sequence out of range, or positions that do not continue their sequence
    //   context_full      no room in the memory; nothing was changed
    //   cancelled         a stop was asked for; the sequences of the batch are in an unknown state: clear or restore them
    //   decode            it failed; likewise
    // After any of them there are no logits. `stop`, `stop_too`: what may stop it; both may be null.
    virtual void          decode(const batch & batch, const stop_request * stop, const stop_request * stop_too) = 0;
    virtual const float * logits() = 0;  // row-major (n_outputs, n_vocab) of the last decode; nullptr when there are none

    // Sequence memory; -1 for p0 or p1 means from the start / to the end, ranges are [p0, p1).
    // False: the sequence can't be cut there (recurrent state) and nothing was changed.
    [[nodiscard]] virtual bool seq_rm(int64_t seq, int64_t p0, int64_t p1) = 0;
    virtual void    seq_add(int64_t seq, int64_t p0, int64_t p1, int64_t shift) = 0;  // moves positions (RoPE is shifted)
    virtual bool    can_shift() const = 0;
    virtual int64_t seq_pos_min(int64_t seq) = 0;  // -1: empty
    virtual void    clear(bool data) = 0;

    virtual void set_n_threads(int64_t n_threads, int64_t n_threads_batch) = 0;  // at most as many as it was made with

    // One sequence's state as bytes. `partial`: only what can't be cut (the recurrent state of a hybrid model).
    virtual std::vector<uint8_t> state_seq_get(int64_t seq, bool partial) = 0;
    // Throws state; then the sequence is empty, or unchanged if it was refused at once.
    virtual void state_seq_set(int64_t seq, const uint8_t * data, size_t size, bool partial) = 0;
};

// Makes a decoder for this many sequences. Throws out_of_memory.
using decoder_factory = std::function<std::unique_ptr<decoder>(int64_t n_seq)>;

}  // namespace lfmfast
