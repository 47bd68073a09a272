#include "engine/stream.h"

namespace lfmfast {

error past_deadline(int64_t limit_ms) {
    return error(error_code::deadline, "no token within the " + std::to_string(limit_ms) + " ms that max_prompt_ms allows",
                 limit_ms, limit_ms);
}

stream::stream(request r, int32_t n_vocab)
    : request_(std::move(r)), sampler_(request_.sampling, n_vocab), text_(request_.stops), guide_(request_.guide) {
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
    if (timeout_ms > 0) {
        changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                          [this] { return !ready_.empty() || reason_ != finish_reason::none; });
    }
    out = std::move(ready_);
    ready_.clear();
    if (reason_ == finish_reason::failed && out.empty()) {
        throw error(*error_);
    }
    return reason_ != finish_reason::none && reason_ != finish_reason::failed;
}

void stream::pick(const float * logits, const vocabulary & vocab) {
    const int64_t start = now_us();
    try {
        const int32_t forced = guide_.forced();
        next_.token          = forced >= 0 ? forced : sampler_.sample(logits);
        if (forced < 0 && !guide_.is_free() && !guide_.allows(next_.token, vocab)) {
            filtered_.assign(logits, logits + vocab.n_vocab());
            guide_.apply(filtered_.data(), vocab);
            next_.token = sampler_.sample(filtered_.data());
        }
        if (request_.n_logprobs >= 0) {
            next_.logprob = log_probs(logits, vocab.n_vocab(), next_.token, static_cast<size_t>(request_.n_logprobs), next_.top);
        }
        sampler_.accept(next_.token);
        guide_.accept(next_.token, vocab);
    } catch (...) {
        pick_error_ = std::make_unique<error>(caught_error());
    }
    last_token_   = next_.token;
    last_pick_us_ = now_us() - start;
    times_.sample_us += last_pick_us_;
}

stream::step stream::take(const vocabulary & vocab) {
    if (pick_error_) {
        throw error(*pick_error_);
    }
    const int64_t start = now_us();
    ++times_.n_predicted;
    const int32_t token = next_.token;
    if (vocab.is_eog(token)) {
        return step::stop;
    }
    turn_to(guide_.last());
    pending_.tokens.push_back(std::move(next_));
    next_ = {};
    pending_.text += text_.push(vocab.shown(token));
    times_.text_us += now_us() - start;
    if (text_.stopped()) {
        stop_string_ = text_.stop();
        return step::stop;
    }
    if (guide_.is_over()) {
        return step::stop;
    }
    return request_.max_tokens >= 0 && times_.n_predicted >= request_.max_tokens ? step::length : step::more;
}

void stream::turn_to(channel kind) {
    // A marker is never joined with what is around it, not even with another marker.
    if (kind == pending_.kind && kind != channel::marker) {
        return;
    }
    pending_.text += text_.flush();
    if (!pending_.text.empty() || !pending_.tokens.empty()) {
        closed_.push_back(std::move(pending_));
    }
    pending_      = {};
    pending_.kind = kind;
}

void stream::hand_over() {
    if (pending_.text.empty() && closed_.empty()) {
        return;  // tokens whose text is held back wait for it
    }
    const int64_t start = now_us();
    give(start);
    if (request_.inbox) {
        request_.inbox->put(request_.inbox_id);
    }
    times_.emit_us += now_us() - start;
}

void stream::announce() {
    const int64_t start = now_us();
    changed_.notify_one();
    if (request_.inbox) {
        request_.inbox->ring();
    }
    times_.emit_us += now_us() - start;
}

void stream::give(int64_t now) {
    const channel kind = pending_.kind;
    if (!pending_.text.empty()) {
        closed_.push_back(std::move(pending_));
        pending_      = {};
        pending_.kind = kind;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto & piece : closed_) {
        piece.ready_us = now;
        ready_.push_back(std::move(piece));
    }
    closed_.clear();
}

void stream::flush() {
    turn_to(channel::marker);  // whatever it is, nothing is joined with it any more
    give(now_us());
}

void stream::finish(finish_reason reason) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        reason_ = reason;
    }
    changed_.notify_one();
    if (request_.inbox) {
        request_.inbox->post(request_.inbox_id);
    }
}

void stream::fail(const error & e) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        error_ = std::make_unique<error>(e);
    }
    finish(finish_reason::failed);
}

}  // namespace lfmfast
