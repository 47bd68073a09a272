#include "engine/engine.h"

#include <algorithm>
#include <limits>

namespace lfmfast {

namespace {

// A single-token pass is let finish after a cancel unless it takes longer than this: then the sequence stays whole.
constexpr int64_t token_grace_us = 200'000;

}  // namespace

// --- stream ------------------------------------------------------------------------------------------------------------

stream::stream(request r, int32_t n_vocab)
    : request_(std::move(r)), sampler_(request_.sampling, n_vocab), text_(request_.stops) {
    if (request_.max_tokens < -1) {
        throw error(error_code::invalid_argument, "max_tokens must be at least -1 (-1: no limit), not " +
                    std::to_string(request_.max_tokens), request_.max_tokens, -1);
    }
    if (request_.n_logprobs > n_vocab) {
        throw error(error_code::invalid_argument, "logprobs must be at most the vocabulary's " + std::to_string(n_vocab) +
                    " tokens, not " + std::to_string(request_.n_logprobs), request_.n_logprobs, n_vocab);
    }
}

bool stream::wait(int timeout_ms, std::vector<piece> & out) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                      [this] { return !ready_.empty() || reason_ != finish_reason::none; });
    out = std::move(ready_);
    ready_.clear();
    if (reason_ == finish_reason::failed && out.empty()) {
        throw error(*error_);
    }
    return reason_ != finish_reason::none && reason_ != finish_reason::failed;
}

void stream::cancel() {
    int64_t none = 0;
    stop_.at.compare_exchange_strong(none, now_us());
}

void stream::emit(piece p) {
    p.ready_us = now_us();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ready_.push_back(std::move(p));
    }
    changed_.notify_one();
}

void stream::finish(finish_reason reason) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        reason_ = reason;
    }
    changed_.notify_one();
}

void stream::fail(const error & e) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        error_ = std::make_unique<error>(e);
    }
    finish(finish_reason::failed);
}

// --- engine: the caller's side -----------------------------------------------------------------------------------------

engine::engine(std::shared_ptr<lfmfast::model> model, const context_params & params)
    : model_(std::move(model)), context_(std::make_unique<context>(model_, params)) {
    n_ctx_   = context_->n_ctx_seq();
    can_cut_ = !model_->is_hybrid() && !model_->is_recurrent();
    batch_   = std::make_unique<batch>(context_->n_batch(), 1);
    thread_  = std::thread([this] { run(); });
}

engine::~engine() {
    close();
}

std::shared_ptr<stream> engine::submit(request r) {
    if (r.prompt.empty()) {
        throw error(error_code::invalid_argument, "the prompt is empty: it gives no token to start from");
    }
    for (const int32_t token : r.prompt) {
        model_->check_token(token, "prompt");
    }
    const auto n_prompt = static_cast<int64_t>(r.prompt.size());
    if (n_prompt > n_ctx_) {
        throw error(error_code::context_full, "the prompt has " + std::to_string(n_prompt) + " tokens, but the context holds " +
                    std::to_string(n_ctx_), n_prompt, n_ctx_);
    }
    fit_to_vocabulary(r.sampling);
    auto s = std::make_shared<stream>(std::move(r), model_->n_vocab());
    s->submitted_us_ = now_us();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (closing_) {
            throw error(error_code::closed, "the model was closed");
        }
        queue_.push_back(s);
    }
    work_.notify_one();
    return s;
}

void engine::fit_to_vocabulary(sampler_params & params) {
    for (const int32_t token : model_->suppressed_tokens()) {
        params.logit_bias.emplace_back(token, -std::numeric_limits<float>::infinity());
    }
    if (params.dry_multiplier > 0.0f && !params.dry_sequence_breakers) {
        params.dry_sequence_breakers = breakers_.find(
            params.dry_breaker_texts, model_->n_vocab(), [this](int32_t token) { return model_->detokenize({token}, true); },
            [this](const std::string & text) { return model_->tokenize(text, false, false); });
    }
}

void engine::forget() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        forget_ = true;
    }
    work_.notify_one();
}

void engine::close() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
        if (current_) {
            current_->cancel();
        }
    }
    work_.notify_one();
    static std::mutex           joining;  // two threads may close at once
    std::lock_guard<std::mutex> lock(joining);
    if (thread_.joinable()) {
        thread_.join();
        context_.reset();
    }
}

// --- engine: the loop --------------------------------------------------------------------------------------------------

void engine::run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
        work_.wait(lock, [this] { return closing_ || forget_ || !queue_.empty(); });
        if (closing_) {
            break;
        }
        if (forget_) {
            forget_ = false;
            drop_everything();
            continue;
        }
        current_ = queue_.front();
        queue_.pop_front();
        lock.unlock();
        answer(*current_);
        lock.lock();
        current_.reset();
    }
    for (auto & s : queue_) {
        s->finish(finish_reason::cancelled);
    }
    queue_.clear();
}

void engine::answer(stream & s) {
    try {
        const auto &  prompt = s.request_.prompt;
        const int64_t start  = now_us();
        s.times_.wait_us     = start - s.submitted_us_;
        s.times_.n_prompt    = static_cast<int64_t>(prompt.size());
        if (s.stop_.at.load() != 0) {
            s.finish(finish_reason::cancelled);
            return;
        }
        for (const int32_t token : prompt) {  // penalties see the prompt, as in llama-server
            s.sampler_.accept(token);
        }
        std::vector<float> kept;
        const size_t       n_cached = resume(prompt, s.request_.cache_prompt, kept);
        const float *      logits   = kept.data();
        if (n_cached < prompt.size()) {
            read(prompt.data() + n_cached, prompt.size() - n_cached, s, 0);
            logits = context_->logits();
            keep_snapshot(logits);
        }
        s.times_.n_cached  = static_cast<int64_t>(n_cached);
        s.times_.prompt_us = now_us() - start;
        const finish_reason reason = s.request_.max_tokens == 0 ? finish_reason::length : predict(s, logits);
        s.times_.predict_us = now_us() - start - s.times_.prompt_us;
        keep_snapshot(nullptr);
        s.finish(reason);
    } catch (const error & e) {
        if (e.code == error_code::cancelled) {
            recover();
            s.finish(finish_reason::cancelled);
        } else {
            drop_everything();
            s.fail(e);
        }
    } catch (...) {
        const error_info info = current_error();
        drop_everything();
        s.fail(error(static_cast<error_code>(info.code), info.message));
    }
}

finish_reason engine::predict(stream & s, const float * logits) {
    const int64_t limit  = s.request_.max_tokens;
    const bool    logprobs = s.request_.n_logprobs >= 0;
    finish_reason reason = finish_reason::none;
    piece         next;
    int64_t       t0 = now_us();
    for (;;) {
        token_info info;
        info.token = s.sampler_.sample(logits);
        if (logprobs) {
            info.logprob = log_probs(logits, model_->n_vocab(), info.token, static_cast<size_t>(s.request_.n_logprobs), info.top);
        }
        s.sampler_.accept(info.token);
        const int32_t token = info.token;
        ++s.times_.n_predicted;
        const int64_t t1 = now_us();
        s.times_.sample_us += t1 - t0;
        if (model_->is_eog(token)) {
            reason = finish_reason::stop;
            break;
        }
        next.tokens.push_back(std::move(info));
        next.text += s.text_.push(model_->shown(token));
        if (s.text_.stopped()) {
            s.stop_string_ = s.text_.stop();
            reason = finish_reason::stop;
            break;
        }
        const bool full = static_cast<int64_t>(tokens_.size()) >= n_ctx_;
        if (full || (limit >= 0 && s.times_.n_predicted >= limit)) {
            reason = finish_reason::length;
            break;
        }
        const int64_t t2 = now_us();
        s.times_.text_us += t2 - t1;
        if (!next.text.empty()) {
            s.emit(std::move(next));
            next = {};
        }
        if (s.stop_.at.load(std::memory_order_relaxed) != 0) {
            reason = finish_reason::cancelled;
            break;
        }
        const int64_t t3 = now_us();
        s.times_.emit_us += t3 - t2;
        s.times_.outside_us.push_back(static_cast<int32_t>(t3 - t0));
        read(&token, 1, s, token_grace_us);
        logits = context_->logits();
        t0 = now_us();
        s.times_.decode_us += t0 - t3;
    }
    next.text += s.text_.flush();
    if (!next.text.empty() || !next.tokens.empty()) {
        s.emit(std::move(next));
    }
    return reason;
}

void engine::read(const int32_t * tokens, size_t n, stream & s, int64_t grace_us) {
    s.stop_.grace_us.store(grace_us);
    const auto n_batch = static_cast<size_t>(context_->n_batch());
    for (size_t done = 0; done < n;) {
        if (grace_us == 0 && s.stop_.at.load() != 0) {
            throw error(error_code::cancelled, "cancelled while reading the prompt");
        }
        const size_t chunk = std::min(n_batch, n - done);
        batch_->clear();
        for (size_t i = 0; i < chunk; ++i) {
            batch_->add(tokens[done + i], static_cast<int64_t>(tokens_.size() + i), {0}, done + i + 1 == n);
        }
        context_->decode(*batch_, &s.stop_);
        tokens_.insert(tokens_.end(), tokens + done, tokens + done + chunk);
        done += chunk;
    }
}

// --- engine: what the context keeps ------------------------------------------------------------------------------------

size_t engine::resume(const std::vector<int32_t> & prompt, bool use_cache, std::vector<float> & logits) {
    if (!use_cache) {
        drop_everything();
        return 0;
    }
    const auto   differs = std::mismatch(prompt.begin(), prompt.end(), tokens_.begin(), tokens_.end()).first;
    const size_t same    = static_cast<size_t>(differs - prompt.begin());
    if (same == prompt.size()) {
        for (const auto & s : snapshots_) {
            if (s.n_tokens == same && !s.logits.empty()) {
                logits = s.logits;
                if (tokens_.size() == same || restore(s)) {
                    return same;
                }
                logits.clear();
                break;
            }
        }
    }
    const size_t usable = std::min(same, prompt.size() - 1);  // the last token must be read to get its logits
    if (usable == tokens_.size() || (can_cut_ && cut(usable))) {
        return usable;
    }
    const snapshot * best = nullptr;
    for (const auto & s : snapshots_) {
        if (s.n_tokens <= usable && (best == nullptr || s.n_tokens > best->n_tokens)) {
            best = &s;
        }
    }
    if (best == nullptr || !restore(snapshot(*best))) {
        drop_everything();
    }
    return tokens_.size();
}

bool engine::restore(const snapshot & s) {
    const size_t n = s.n_tokens;
    try {
        if (!can_cut_) {
            context_->state_seq_set(0, s.state.data(), s.state.size(), true);
        }
    } catch (const error &) {
        drop_everything();
        return false;
    }
    if (!cut(n)) {
        drop_everything();
        return false;
    }
    return true;
}

bool engine::cut(size_t n_tokens) {
    // A sliding window may have dropped the first positions: then nothing can be continued from the middle.
    if (n_tokens > 0 && can_cut_ && context_->seq_pos_min(0) != 0) {
        return false;
    }
    if (!context_->seq_rm(0, static_cast<int64_t>(n_tokens), -1)) {
        return false;
    }
    tokens_.resize(std::min(tokens_.size(), n_tokens));
    snapshots_.erase(std::remove_if(snapshots_.begin(), snapshots_.end(), [&](const snapshot & s) { return s.n_tokens > n_tokens; }),
                     snapshots_.end());
    return true;
}

void engine::keep_snapshot(const float * logits) {
    snapshot s;
    s.n_tokens = tokens_.size();
    for (const auto & old : snapshots_) {
        if (old.n_tokens == s.n_tokens && (logits == nullptr || !old.logits.empty())) {
            return;
        }
    }
    if (!can_cut_) {
        s.state = context_->state_seq_get(0, true);
    }
    if (logits != nullptr) {
        s.logits.assign(logits, logits + model_->n_vocab());
    }
    if (snapshots_.size() == max_snapshots) {
        snapshots_.pop_front();
    }
    snapshots_.push_back(std::move(s));
}

void engine::recover() {
    if (snapshots_.empty() || !restore(snapshot(snapshots_.back()))) {
        drop_everything();
    }
}

void engine::drop_everything() {
    tokens_.clear();
    snapshots_.clear();
    if (!context_->seq_rm(0, -1, -1)) {
        context_->clear(false);
    }
}

}  // namespace lfmfast
