// The engine: a thread that owns a context of several sequences, answers requests side by side, and keeps what it read so
// that nothing is read twice. Pure: it sees the model through decoder.h.
//
// The context has a memory stream for each sequence (not kv_unified): a step then attends to each sequence's own tokens
// only, which measured 1.1 to 1.25 times faster at 8 to 32 sequences. Prefixes are shared through host memory: a sequence
// whose place is needed is written to the prefix tree (rows of attention memory, 12 KiB a token for LFM2), and a request
// that begins like it gets them copied into its own place, together with the recurrent state at that point. That is some
// milliseconds for 1,000 tokens instead of seconds. A request that goes on where an idle sequence stands copies nothing.
#pragma once

#include "engine/decoder.h"
#include "engine/error.h"
#include "engine/prefix_tree.h"
#include "engine/sampler_breakers.h"
#include "engine/scheduler.h"
#include "engine/stream.h"
#include "engine/thread_governor.h"

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace lfmfast {

struct engine_params {
    int64_t n_parallel        = 1;     // sequences to begin with
    int64_t n_parallel_max    = 1;     // more are made when requests wait, up to this many
    int64_t growth_bytes      = INT64_MAX;  // of attention memory that this may lead to
    int64_t n_queue_max       = 1024;  // requests that may wait
    int64_t cache_bytes       = int64_t(1) << 30;  // host memory for prefixes that no sequence holds
    int64_t max_stall_ms      = 250;   // how long reading a prompt may hold up the others at a time
    int64_t checkpoint_tokens = 256;   // keep the recurrent state at least this often
    int64_t n_threads         = 1;     // for steps and for sampling
    int64_t n_threads_batch   = 1;     // for prompts
    int64_t faults_every      = 0;     // for tests: see failing_decoder; 0: none
    int64_t faults_seed       = 0;
    bool    can_cut           = false; // the model has no recurrent state: sequences can be cut anywhere
};

struct engine_stats {
    int64_t n_slots = 0, n_running = 0, n_queued = 0, n_requests = 0;
    int64_t n_prompt = 0, n_cached = 0, n_predicted = 0;       // tokens; n_prompt includes the cached ones
    int64_t n_prompt_passes = 0, n_steps = 0, n_failed_passes = 0;
    int64_t prompt_us = 0, step_us = 0, sample_us = 0;         // in passes of either kind; sampling
    int64_t n_saved = 0, n_loaded = 0, n_moved = 0, n_unsaved = 0, copy_us = 0;  // sequences to and from host memory
    int64_t cache_bytes = 0, cache_nodes = 0, n_evicted = 0, n_ubatch = 0;
    int64_t n_halved_passes = 0;  // with half of the threads, because others use the cores
};

// A prefix outside of the engine, for a file.
struct saved_prefix {
    struct point {
        size_t               n_tokens = 0;
        std::vector<uint8_t> checkpoint;
    };
    std::vector<int32_t> tokens;
    std::vector<uint8_t> layout;  // layout_to_bytes
    std::vector<uint8_t> rows;    // (n_tokens, row size)
    std::vector<point>   points;
    std::vector<float>   logits;  // of the last token, or empty
};

class engine {
  public:
    engine(std::shared_ptr<const vocabulary> vocab, decoder_factory make_decoder, const engine_params & params);
    ~engine();  // cancels all requests and waits for the thread
    engine(const engine &) = delete;
    engine & operator=(const engine &) = delete;

    // Throws invalid_argument, context_full (the prompt does not fit), queue_full and closed at once; later faults come from
    // stream::wait().
    std::shared_ptr<stream> submit(request r);
    void close();  // cancels all requests, waits for the thread and frees the context; may be called twice

    // These run between two passes; they throw closed.
    void         forget();                                   // drops all that is kept of past prompts but pinned ones
    bool         unpin(const std::vector<int32_t> & prompt);
    saved_prefix save(const std::vector<int32_t> & tokens);  // of the longest beginning that is kept; throws state: nothing is
    void         load(const saved_prefix & saved, bool pin);  // throws state: it does not fit this model or context

    engine_stats stats() const;
    int64_t      n_ctx() const { return n_ctx_; }

  private:
    // One sequence of the context: what it holds, and the request that it answers.
    struct slot {
        int32_t                 id = 0;
        std::vector<int32_t>    want;        // prompt and sampled tokens
        size_t                  n_held = 0;  // of them, in the context
        size_t                  n_prompt = 0;
        std::shared_ptr<stream> s;           // null: idle
        bool                    keep  = true;   // what it holds can be trusted
        bool                    exact = true;   // and is as if read from the beginning; false: runs were moved
        bool                    alone = false;  // retries a pass that failed
        size_t                  n_checked = 0;  // where the last checkpoint was taken
        std::vector<size_t>     cuts;
        uint64_t                last_used = 0;
        int64_t                 logits_us = 0;  // when its last logits came
        prefix_point            to_pin;         // at the prompt's end; the tree may have to forget it before the answer's end
    };
    // From where a prompt can go on.
    struct resume_point {
        size_t       n = 0;
        prefix_match match;
        prefix_point point;                // what is kept at n
        std::vector<size_t> common;        // of each slot: tokens that it shares with the prompt
    };

    // Runs of tokens to move; see engine_reuse.cpp.
    struct reuse_plan {
        struct run {
            size_t from, at, n;  // in the sequence, in the prompt, tokens
        };
        size_t           n = 0;  // tokens of the prompt that it gives
        std::vector<run> runs;
        bytes_ptr        checkpoint;  // the recurrent state at the end, unless it is the sequence's own
    };

    // Asked of the loop by a thread that waits for it. `done` is under mutex_; then the loop does not touch it any more.
    struct job {
        std::function<void()> run;
        bool                  done = false;
    };

    // engine.cpp: the loop
    void   run();
    bool   wait_for_work(std::unique_lock<std::mutex> & lock);
    void   drop_ended();
    void   admit();
    bool   admit_one();
    void   end(slot & slot, finish_reason reason, const error * failure = nullptr);
    void   end_all();
    void   publish();
    std::vector<int32_t> running() const;
    void   on_loop(const std::function<void()> & what);
    void   fit_to_vocabulary(sampler_params & params);

    // engine_pass.cpp: one pass
    void   pass();
    void   read(const std::vector<pass_item> & items, int64_t start, int64_t end);
    void   govern(const std::vector<pass_item> & items, int64_t us);
    void   sample(const std::vector<slot *> & out);
    void   failed_pass(const std::vector<pass_item> & items, const error & e);

    // engine_memory.cpp: what the context and the tree hold
    resume_point find(const std::vector<int32_t> & prompt, bool inexact = false);
    bool   must_wait(const request & r, const resume_point & from);
    void   start(slot & slot, std::shared_ptr<stream> s, const resume_point & from);
    bool   trim(slot & slot, size_t n, const prefix_point & point);  // to its first n tokens
    bool   fill(slot & slot, const std::vector<int32_t> & tokens, const resume_point & from);
    bool   reuse(slot & slot, const request & r, size_t n_exact, size_t & n);
    reuse_plan find_runs(const slot & slot, const std::vector<int32_t> & prompt, size_t n_min);
    bool   move_runs(slot & slot, const reuse_plan & plan);
    void   rebuild(slot & slot);   // after a failed pass
    void   checkpoint(slot & slot, const float * logits = nullptr);
    bool   save(slot & slot);      // to the tree; false: it could not be
    void   clear(slot & slot);
    bool   move(slot & from, slot & to);  // false: it stays where it is
    void   close_gaps();
    void   grow();
    void   learn_layout();
    void   set_layout(const kv_layout & layout);

    std::shared_ptr<const vocabulary> vocab_;
    decoder_factory                   make_decoder_;
    engine_params                     params_;
    std::unique_ptr<decoder>          decoder_;
    int64_t                           n_ctx_;
    uint32_t                          n_stream_ = 1;
    kv_layout                         layout_;
    bool                              layout_known_ = false;
    int32_t                           start_token_;  // begins a message; -1: unknown
    std::unique_ptr<scheduler>        scheduler_;
    std::unique_ptr<batch>            batch_;
    thread_governor                   governor_;
    bool                              halved_ = false;  // computes with half of the threads
    std::vector<slot>                 slots_;
    prefix_tree                       tree_;
    breaker_cache                     breakers_;
    stop_request                      stop_all_;
    int64_t                           last_sample_us_ = 0;
    uint64_t                          clock_ = 0;
    engine_stats                      counts_;  // of the loop; published as stats_

    mutable std::mutex                   mutex_;
    std::condition_variable              work_;
    std::condition_variable              job_done_;
    std::deque<std::shared_ptr<stream>>  queue_;     // by priority, then first come, first served
    std::deque<job *>                    jobs_;
    std::vector<std::shared_ptr<stream>> active_;    // running; for close()
    engine_stats                         stats_;
    uint64_t                             n_submitted_ = 0;
    bool                                 closing_ = false;
    bool                                 ended_   = false;
    std::thread                          thread_;
};

}  // namespace lfmfast
