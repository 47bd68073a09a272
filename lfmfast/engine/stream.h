// A request to the engine, and the stream of pieces that answers it. Pure: no llama.h.
#pragma once

#include "engine/decoder.h"
#include "engine/error.h"
#include "engine/guide.h"
#include "engine/mailbox.h"
#include "engine/sampler.h"
#include "engine/text_stream.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace lfmfast {

struct request {
    std::vector<int32_t>     prompt;
    sampler_params           sampling;
    int64_t                  max_tokens = -1;  // -1: to the end of the answer or of the context
    std::vector<std::string> stops;
    int64_t                  n_logprobs   = -1;    // -1: no log probabilities; n: of the token and of the n most likely
    bool                     cache_prompt = true;  // begin from what is kept of past prompts
    bool                     pin          = false; // keep the prompt, whatever else comes, until it is unpinned
    int64_t                  n_cache_reuse = 0;    // > 0: also reuse runs of at least this many tokens by moving them; inexact
    int32_t                  priority     = 0;     // higher ones leave the queue first
    int64_t                  max_prompt_ms  = -1;  // from submission to the first token; later: error deadline
    int64_t                  max_predict_ms = -1;  // from the first token on; later: finish_reason::length
    guide_params             guide;
    std::shared_ptr<mailbox> inbox;                // also told of news, under `inbox_id`
    uint64_t                 inbox_id = 0;
};

// Of a request whose first token was not there in time.
error past_deadline(int64_t limit_ms);

struct token_info {
    int32_t                    token   = 0;
    float                      logprob = 0.0f;
    std::vector<token_logprob> top;
};

// Some text and the tokens that made it, all of one channel. A marker is a piece of its own.
struct piece {
    std::string             text;
    channel                 kind = channel::content;
    std::vector<token_info> tokens;
    int64_t                 ready_us = 0;  // now_us() when it was handed over
};

enum class finish_reason : int { none = 0, stop, length, cancelled, failed };

// Times in microseconds; what bench/ prints comes from here.
struct timings {
    int64_t n_prompt    = 0;  // tokens of the prompt
    int64_t n_cached    = 0;  // of them not processed, because they were kept
    int64_t n_predicted = 0;  // tokens sampled, the end token included
    int64_t wait_us     = 0;  // in the queue
    int64_t prompt_us   = 0;  // from leaving the queue to the logits of the prompt's last token
    int64_t predict_us  = 0;  // from there to the end
    int64_t decode_us   = 0;  // of predict_us: in llama_decode, for whatever sequences
    int64_t sample_us   = 0;  // of predict_us: sampling and log probabilities of this sequence
    int64_t text_us     = 0;  // of predict_us: detokenising, stop strings
    int64_t emit_us     = 0;  // of predict_us: handing pieces over to the consumer's thread
    std::vector<int32_t> outside_us;  // of each token but the last: from its logits to the next pass
};

// What a request gives: pieces, then one end. One consumer.
class stream {
  public:
    stream(request r, int32_t n_vocab);  // throws invalid_argument

    // Moves the pieces that are ready to `out`, waiting for some for at most `timeout_ms`. True: it was the end, and the
    // members below are valid. Throws what made the request fail.
    bool wait(int timeout_ms, std::vector<piece> & out);
    // May be called from any thread, also after the end.
    void cancel() { stop_.ask(); }

    finish_reason       reason() const { return reason_; }
    const std::string & stop_string() const { return stop_string_; }  // the one that ended it; empty: the end token or none
    const timings &     times() const { return times_; }
    int64_t             n_read() const { return n_read_.load(std::memory_order_acquire); }  // of the prompt; -1: not begun

  private:
    friend class engine;

    enum class step { more, stop, length };

    // The engine's side, in this order for each token. pick() may run on another thread than the rest.
    void pick(const float * logits, const vocabulary & vocab);  // samples next_; what it throws is kept in pick_error_
    step take(const vocabulary & vocab);                        // puts next_ into the text; throws pick_error_
    void hand_over();                                           // what may be shown now
    void announce();                                            // wakes who waits for it; after that of the others of a pass
    void flush();                                               // all of it, before the end
    void give(int64_t now);                                     // closed_ and what is pending with text
    void turn_to(channel kind);                                 // begins another piece if that is of another channel
    void finish(finish_reason reason);
    void fail(const error & e);

    request             request_;
    sampler             sampler_;
    text_stream         text_;
    stop_request        stop_;
    std::atomic<int64_t> n_read_{-1};  // when it is not -1, times_.n_cached is valid
    int64_t             submitted_us_ = 0;
    int64_t             started_us_   = 0;  // left the queue
    int64_t             first_us_     = 0;  // logits of the prompt's last token; 0: not yet
    uint64_t            order_        = 0;

    const float *          next_logits_  = nullptr;
    int64_t                last_pick_us_ = 0;
    int32_t                last_token_   = -1;
    token_info             next_;
    std::unique_ptr<error> pick_error_;
    piece                  pending_;
    std::vector<piece>     closed_;    // pieces before it, of other channels
    guide                  guide_;
    std::vector<float>     filtered_;

    std::mutex              mutex_;
    std::condition_variable changed_;
    std::vector<piece>      ready_;
    finish_reason           reason_ = finish_reason::none;
    std::string             stop_string_;
    timings                 times_;
    std::unique_ptr<error>  error_;
};

}  // namespace lfmfast
