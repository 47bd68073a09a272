#include "engine/engine.h"

#include <algorithm>
#include <limits>
#include <optional>

namespace lfmfast {

namespace {

// Requests behind others that wait for a prefix being read are looked at up to this depth.
constexpr size_t n_look_ahead = 64;

}  // namespace

// --- the caller's side -------------------------------------------------------------------------------------------------

engine::engine(std::shared_ptr<const vocabulary> vocab, decoder_factory make_decoder, const engine_params & params)
    : vocab_(std::move(vocab)), make_decoder_(std::move(make_decoder)), params_(params),
      tree_(static_cast<size_t>(std::max<int64_t>(0, params.cache_bytes))) {
    check_range("n_parallel", params.n_parallel, 1, n_seq_limit);
    check_range("n_parallel_max", params.n_parallel_max, params.n_parallel, n_seq_limit);
    check_range("n_queue", params.n_queue_max, 1, n_tokens_limit);
    check_range("growth_bytes", params.growth_bytes, 0, INT64_MAX);
    check_range("cache_bytes", params.cache_bytes, 0, INT64_MAX);
    check_range("max_stall_ms", params.max_stall_ms, 1, 3'600'000);
    check_range("checkpoint_tokens", params.checkpoint_tokens, 1, n_tokens_limit);
    start_token_ = vocab_->token_id("<|im_start|>");
    decoder_     = make_decoder_(params.n_parallel);
    n_ctx_       = decoder_->n_ctx_seq();
    n_stream_    = kv_n_stream(decoder_->state_seq_get(0, false));
    scheduler_   = std::make_unique<scheduler>(static_cast<size_t>(decoder_->n_ubatch()), params.max_stall_ms * 1000);
    batch_       = std::make_unique<batch>(std::max(decoder_->n_ubatch(), params.n_parallel_max), 1);
    slots_.resize(static_cast<size_t>(params.n_parallel));
    for (size_t i = 0; i < slots_.size(); ++i) {
        slots_[i].id = static_cast<int32_t>(i);
    }
    counts_.n_ubatch = decoder_->n_ubatch();
    publish();
    thread_ = std::thread([this] { run(); });
}

engine::~engine() {
    close();
}

std::shared_ptr<stream> engine::submit(request r) {
    if (r.prompt.empty()) {
        throw error(error_code::invalid_argument, "the prompt is empty: it gives no token to start from");
    }
    for (const int32_t token : r.prompt) {
        check_range("a token of the prompt", token, 0, vocab_->n_vocab() - 1);
    }
    const auto n_prompt = static_cast<int64_t>(r.prompt.size());
    if (n_prompt > n_ctx_) {
        throw error(error_code::context_full, "the prompt has " + std::to_string(n_prompt) + " tokens, but the context holds " +
                    std::to_string(n_ctx_), n_prompt, n_ctx_);
    }
    fit_to_vocabulary(r.sampling);
    auto s = std::make_shared<stream>(std::move(r), vocab_->n_vocab());
    for (const int32_t token : s->request_.prompt) {  // penalties see the prompt, as in llama-server
        s->sampler_.accept(token);
    }
    s->submitted_us_ = now_us();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (closing_) {
            throw error(error_code::closed, "the model was closed");
        }
        if (static_cast<int64_t>(queue_.size()) >= params_.n_queue_max) {
            throw error(error_code::queue_full, "the queue is full: " + std::to_string(queue_.size()) + " requests wait",
                        static_cast<int64_t>(queue_.size()), params_.n_queue_max);
        }
        s->order_ = ++n_submitted_;
        const auto at = std::upper_bound(queue_.begin(), queue_.end(), s, [](const auto & a, const auto & b) {
            return a->request_.priority > b->request_.priority;
        });
        queue_.insert(at, s);
    }
    work_.notify_one();
    return s;
}

void engine::fit_to_vocabulary(sampler_params & params) {
    for (const int32_t token : vocab_->suppressed_tokens()) {
        params.logit_bias.emplace_back(token, -std::numeric_limits<float>::infinity());
    }
    if (params.dry_multiplier > 0.0f && !params.dry_sequence_breakers) {
        params.dry_sequence_breakers = breakers_.find(
            params.dry_breaker_texts, vocab_->n_vocab(), [this](int32_t token) { return vocab_->detokenize({token}, true); },
            [this](const std::string & text) { return vocab_->tokenize(text, false, false); });
    }
}

void engine::close() {
    stop_all_.ask();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
    }
    work_.notify_one();
    static std::mutex           joining;  // two threads may close at once
    std::lock_guard<std::mutex> lock(joining);
    if (thread_.joinable()) {
        thread_.join();
        decoder_.reset();
    }
}

// --- the loop ----------------------------------------------------------------------------------------------------------

void engine::run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (wait_for_work(lock)) {
        while (!jobs_.empty()) {
            job * next = jobs_.front();
            jobs_.pop_front();
            lock.unlock();
            next->run();
            lock.lock();
            next->done = true;
            job_done_.notify_all();
        }
        lock.unlock();
        try {
            drop_ended();
            admit();
            pass();
        } catch (...) {  // a fault of ours or no memory: nothing that runs can be trusted any more
            const error failure = caught_error();
            for (auto & slot : slots_) {
                if (slot.s) {
                    slot.keep = false;
                    end(slot, finish_reason::failed, &failure);
                }
            }
        }
        publish();
        lock.lock();
    }
    lock.unlock();
    end_all();
    lock.lock();
    ended_ = true;
    job_done_.notify_all();
}

bool engine::wait_for_work(std::unique_lock<std::mutex> & lock) {
    work_.wait(lock, [this] { return closing_ || !jobs_.empty() || !queue_.empty() || !running().empty(); });
    return !closing_;
}

void engine::end_all() {
    for (auto & slot : slots_) {
        if (slot.s) {
            slot.s->flush();
            slot.s->finish(finish_reason::cancelled);
            slot.s.reset();
        }
    }
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto & s : queue_) {
        s->finish(finish_reason::cancelled);
    }
    queue_.clear();
    jobs_.clear();
}

std::vector<int32_t> engine::running() const {
    std::vector<int32_t> ids;
    for (const auto & slot : slots_) {
        if (slot.s) {
            ids.push_back(slot.id);
        }
    }
    return ids;
}

// Requests that were cancelled or whose time is over, in the queue and in the slots.
void engine::drop_ended() {
    std::vector<std::shared_ptr<stream>> cancelled, late;
    {
        const int64_t               now = now_us();
        std::lock_guard<std::mutex> lock(mutex_);
        for (auto it = queue_.begin(); it != queue_.end();) {
            const stream & s     = **it;
            const bool     ended = s.stop_.asked();
            const int64_t  limit = s.request_.max_prompt_ms;
            if (ended || (limit >= 0 && now - s.submitted_us_ >= limit * 1000)) {
                (ended ? cancelled : late).push_back(*it);
                it = queue_.erase(it);
            } else {
                ++it;
            }
        }
    }
    for (auto & s : cancelled) {
        s->finish(finish_reason::cancelled);
    }
    for (auto & s : late) {
        s->fail(past_deadline(s->request_.max_prompt_ms));
    }
    for (auto & slot : slots_) {
        if (!slot.s) {
            continue;
        }
        const int64_t limit = slot.s->request_.max_prompt_ms;
        if (slot.s->stop_.asked()) {
            end(slot, finish_reason::cancelled);
        } else if (slot.s->first_us_ == 0 && limit >= 0 && now_us() - slot.s->submitted_us_ >= limit * 1000) {
            const error e = past_deadline(limit);
            end(slot, finish_reason::failed, &e);
        }
    }
}

void engine::admit() {
    while (admit_one()) {
    }
    close_gaps();
}

// Starts the first request of the queue that can be; false: none.
bool engine::admit_one() {
    std::vector<std::shared_ptr<stream>> waiting;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        waiting.assign(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(std::min(queue_.size(), n_look_ahead)));
    }
    if (waiting.empty()) {
        return false;
    }
    if (running().size() == slots_.size()) {
        grow();
    }
    const auto places = free_places(running(), static_cast<int32_t>(slots_.size()));
    if (places.empty()) {
        return false;
    }
    for (auto & s : waiting) {
        resume_point from;
        if (s->request_.cache_prompt) {
            from = find(s->request_.prompt, s->request_.n_cache_reuse > 0);
            if (must_wait(s->request_, from)) {
                continue;
            }
        }
        // The place whose sequence goes on, or at least shares what is used; else the one that was used least recently.
        slot * best = nullptr;
        for (const int32_t id : places) {
            slot &     here     = slots_[static_cast<size_t>(id)];
            const auto holds    = [&](const slot & at) {
                return from.n > 0 && at.keep && from.common[static_cast<size_t>(at.id)] >= from.n;
            };
            const auto rank = [&](const slot & at) -> size_t {
                const auto n_min = static_cast<size_t>(s->request_.n_cache_reuse);
                const size_t more = n_min > 0 && at.keep ? find_runs(at, s->request_.prompt, n_min).n : 0;
                return more > from.n ? 3 + more : holds(at) ? (at.n_held == from.n ? 3 : 2) : (at.n_held == 0 ? 1 : 0);
            };
            if (best == nullptr || rank(here) > rank(*best) || (rank(here) == rank(*best) && here.last_used < best->last_used)) {
                best = &here;
            }
        }
        {
            std::lock_guard<std::mutex> lock(mutex_);
            queue_.erase(std::find(queue_.begin(), queue_.end(), s));
        }
        try {
            start(*best, s, from);
        } catch (...) {  // no memory, or a fault of ours: its end, not that of the others
            const error failure = caught_error();
            best->keep = false;
            best->s    = s;
            end(*best, finish_reason::failed, &failure);
        }
        return true;
    }
    return false;
}

void engine::end(slot & slot, finish_reason reason, const error * failure) {
    auto s = std::move(slot.s);
    slot.s.reset();
    slot.alone = false;
    const prefix_point to_pin = std::move(slot.to_pin);
    slot.to_pin = {};
    slot.want.resize(slot.n_held);
    slot.last_used = ++clock_;
    stream &             out = *s;
    std::optional<error> fault;  // of what is done here
    if (slot.keep) {
        try {
            checkpoint(slot);
            if (out.request_.pin && slot.n_held >= slot.n_prompt && reason != finish_reason::failed) {
                const bool saved = save(slot);
                tree_.put_point(slot.want.data(), slot.n_prompt, to_pin.checkpoint, to_pin.logits);
                if (!saved || !tree_.pin(slot.want.data(), slot.n_prompt)) {
                    throw error(error_code::state, "the prompt was read, but it can't be pinned: its " +
                                std::to_string(slot.n_prompt) + " tokens do not fit in the cache of " +
                                std::to_string(params_.cache_bytes) + " bytes", static_cast<int64_t>(slot.n_prompt));
                }
            }
        } catch (...) {
            fault     = caught_error();
            failure   = &*fault;
            slot.keep = false;
        }
    }
    if (!slot.keep) {
        try {
            clear(slot);
        } catch (...) {  // also called where nothing catches any more: the stream gets its end in any case
            fault   = caught_error();
            failure = &*fault;
        }
    }
    if (out.first_us_ != 0) {
        out.times_.predict_us = now_us() - out.first_us_;
    }
    counts_.n_predicted += out.times_.n_predicted;
    publish();  // before the consumer hears of it
    out.flush();
    if (failure != nullptr) {
        out.fail(*failure);
    } else {
        out.finish(reason);
    }
}

void engine::publish() {
    counts_.n_slots     = static_cast<int64_t>(slots_.size());
    counts_.n_running   = static_cast<int64_t>(running().size());
    counts_.cache_bytes = static_cast<int64_t>(tree_.bytes());
    counts_.cache_nodes = static_cast<int64_t>(tree_.n_nodes());
    counts_.n_evicted   = static_cast<int64_t>(tree_.n_evicted());
    std::lock_guard<std::mutex> lock(mutex_);
    stats_ = counts_;
}

}  // namespace lfmfast
