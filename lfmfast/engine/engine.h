// The engine: a thread that owns a context and answers requests, one after another, as streams of text.
#pragma once

#include "engine/context.h"
#include "engine/error.h"
#include "engine/sampler.h"
#include "engine/sampler_breakers.h"
#include "engine/text_stream.h"

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace lfmfast {

struct request {
    std::vector<int32_t>     prompt;
    sampler_params           sampling;
    int64_t                  max_tokens = -1;  // -1: to the end of the answer or of the context
    std::vector<std::string> stops;
    int64_t                  n_logprobs   = -1;    // -1: no log probabilities; n: of the token and of the n most likely
    bool                     cache_prompt = true;  // begin from what the context already holds
};

struct token_info {
    int32_t                    token   = 0;
    float                      logprob = 0.0f;
    std::vector<token_logprob> top;
};

// Some text and the tokens that made it.
struct piece {
    std::string             text;
    std::vector<token_info> tokens;
    int64_t                 ready_us = 0;  // now_us() when it was handed over
};

enum class finish_reason : int { none = 0, stop, length, cancelled, failed };

// Times in microseconds; what bench/ prints comes from here.
struct timings {
    int64_t n_prompt    = 0;  // tokens of the prompt
    int64_t n_cached    = 0;  // of them not processed, because the context held them
    int64_t n_predicted = 0;  // tokens sampled, the end token included
    int64_t wait_us     = 0;  // in the queue
    int64_t prompt_us   = 0;  // from the start to the logits of the prompt's last token
    int64_t predict_us  = 0;  // from there to the end
    int64_t decode_us   = 0;  // of predict_us: in llama_decode
    int64_t sample_us   = 0;  // of predict_us: sampling and log probabilities
    int64_t text_us     = 0;  // of predict_us: detokenising, stop strings
    int64_t emit_us     = 0;  // of predict_us: handing pieces over to the consumer's thread
    std::vector<int32_t> outside_us;  // of each token but the last: all of it that was not llama_decode
};

// What a request gives: pieces, then one end. One consumer.
class stream {
  public:
    stream(request r, int32_t n_vocab);  // throws invalid_argument

    // Moves the pieces that are ready to `out`, waiting for some for at most `timeout_ms`. True: it was the end, and the
    // members below are valid. Throws what made the request fail.
    bool wait(int timeout_ms, std::vector<piece> & out);
    // May be called from any thread, also after the end.
    void cancel();

    finish_reason       reason() const { return reason_; }
    const std::string & stop_string() const { return stop_string_; }  // the one that ended it; empty: the end token or none
    const timings &     times() const { return times_; }

  private:
    friend class engine;
    void emit(piece p);
    void finish(finish_reason reason);
    void fail(const error & e);

    request                 request_;
    sampler                 sampler_;
    text_stream             text_;
    context::stop_request   stop_;
    int64_t                 submitted_us_ = 0;
    std::mutex              mutex_;
    std::condition_variable changed_;
    std::vector<piece>      ready_;
    finish_reason           reason_ = finish_reason::none;
    std::string             stop_string_;
    timings                 times_;
    std::unique_ptr<error>  error_;
};

class engine {
  public:
    engine(std::shared_ptr<model> model, const context_params & params);
    ~engine();  // cancels all requests and waits for the thread
    engine(const engine &) = delete;
    engine & operator=(const engine &) = delete;

    // Throws invalid_argument, context_full (the prompt does not fit) and closed at once; later faults come from wait().
    std::shared_ptr<stream> submit(request r);
    void    close();         // cancels all requests, waits for the thread and frees the context; may be called twice
    void    forget();        // drops everything that was kept of past prompts
    int64_t n_ctx() const { return n_ctx_; }

  private:
    // The state of the sequence where a prompt or an answer ended, so that another continuation can start there although
    // a recurrent state can't be cut back.
    struct snapshot {
        size_t               n_tokens = 0;
        std::vector<uint8_t> state;   // empty for a model whose memory can be cut anywhere
        std::vector<float>   logits;  // of the last token; empty after an answer
    };

    void   run();
    void   answer(stream & s);
    // Makes the sequence hold a prefix of `prompt` and returns its length. All of it only when its logits were kept.
    size_t resume(const std::vector<int32_t> & prompt, bool use_cache, std::vector<float> & logits);
    bool   restore(const snapshot & s);
    bool   cut(size_t n_tokens);
    // Decodes `n` more tokens; the last one gives logits. A cancel stops it after `grace_us`.
    void   read(const int32_t * tokens, size_t n, stream & s, int64_t grace_us);
    void   keep_snapshot(const float * logits);
    void   recover();          // after an aborted decode: back to the last snapshot
    void   drop_everything();
    finish_reason predict(stream & s, const float * logits);

    void   fit_to_vocabulary(sampler_params & params);  // DRY's breakers as tokens, and tokens that the model must never give

    static constexpr size_t max_snapshots = 16;

    std::shared_ptr<lfmfast::model> model_;
    std::unique_ptr<context>        context_;
    int64_t                         n_ctx_;
    bool                            can_cut_;  // no recurrent state
    std::vector<int32_t>            tokens_;   // what sequence 0 holds
    std::deque<snapshot>            snapshots_;
    std::unique_ptr<batch>          batch_;
    breaker_cache                   breakers_;

    std::mutex                           mutex_;
    std::condition_variable              work_;
    std::deque<std::shared_ptr<stream>>  queue_;
    std::shared_ptr<stream>              current_;
    bool                                 closing_ = false;
    bool                                 forget_  = false;
    std::thread                          thread_;
};

inline std::shared_ptr<engine> make_engine(std::shared_ptr<model> m, const context_params & params) {
    return std::make_shared<engine>(std::move(m), params);
}

}  // namespace lfmfast
