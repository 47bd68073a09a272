#include "engine/guide.h"

#include "engine/error.h"
#include "engine/text_stream.h"

#include <limits>

namespace lfmfast {

namespace {

bool is_blank(const std::string & text) { return text.find_first_not_of(" \t\r\n") == std::string::npos; }

}  // namespace

guide::guide(guide_params params) : params_(std::move(params)) {
    const reply_format & format = params_.format;
    if (params_.thought_tokens < -1) {
        throw error(error_code::invalid_argument, "thought_tokens must be at least -1 (-1: no limit), not " +
                    std::to_string(params_.thought_tokens), params_.thought_tokens, -1);
    }
    if (params_.thought_tokens >= 0 && format.thought_close < 0) {
        throw error(error_code::invalid_argument, "thoughts can't be limited: the model has no token that ends one");
    }
    if (params_.lazy && params_.constraint && format.call_open < 0) {
        throw error(error_code::invalid_argument, "calls can't be constrained: the model has no token that begins one");
    }
    if (params_.thought_end.empty()) {
        params_.thought_end.push_back(format.thought_close);
    }
    now_ = format.in_thought ? channel::thought : channel::content;
}

bool guide::is_constrained() const {
    return params_.constraint && (params_.lazy ? now_ == channel::call : now_ != channel::thought);
}

bool guide::is_over() const {
    if (params_.single_call && called_) {
        return true;
    }
    return params_.constraint && !params_.lazy && begun_ && now_ != channel::thought && params_.constraint->is_over();
}

int32_t guide::forced() const {
    const bool spent = params_.thought_tokens >= 0 && n_thought_ >= params_.thought_tokens && tail_.empty();
    return now_ == channel::thought && (spent || n_ending_ > 0) ? params_.thought_end[n_ending_] : -1;
}

bool guide::allows(int32_t token, const vocabulary & vocab) {
    if (now_ == channel::thought) {  // there is to be an answer after it
        return !params_.constraint || params_.lazy || !vocab.is_eog(token);
    }
    if (!is_constrained()) {
        return true;
    }
    // A model may think before it answers; but only where it would have, not because little else is allowed.
    if (token >= 0 && token == params_.format.thought_open && !begun_ && !visible_ && !params_.lazy) {
        return true;
    }
    return params_.constraint->allows(token);
}

void guide::apply(float * logits, const vocabulary & vocab) {
    if (now_ != channel::thought) {
        params_.constraint->apply(logits, vocab.n_vocab());
        return;
    }
    for (int32_t token = 0; token < vocab.n_vocab(); ++token) {
        if (vocab.is_eog(token)) {
            logits[token] = -std::numeric_limits<float>::infinity();
        }
    }
}

void guide::accept(int32_t token, const vocabulary & vocab) {
    const channel before = now_;
    last_ = advance(token, vocab);
    if (!params_.constraint || before == channel::thought || now_ == channel::thought) {
        return;
    }
    if (params_.lazy) {
        if (before == channel::content && now_ != channel::call) {
            return;
        }
        if (before == channel::content) {
            params_.constraint->restart();
        }
    }
    begun_ = true;
    params_.constraint->accept(token);
}

channel guide::advance(int32_t token, const vocabulary & vocab) {
    const reply_format & format = params_.format;
    switch (now_) {
        case channel::thought:
            if (token == format.thought_close) {
                now_ = channel::content;
                return channel::marker;
            }
            if (token == format.thought_open && blank_thought_) {
                return channel::marker;  // the model opens what the prompt has opened
            }
            blank_thought_ = blank_thought_ && is_blank(vocab.shown(token));
            if (params_.thought_tokens >= 0) {
                n_ending_ += forced() >= 0 ? 1 : 0;
                ++n_thought_;
                tail_ += vocab.shown(token);
                tail_.erase(0, tail_.size() - incomplete_utf8_tail(tail_));
            }
            return channel::thought;
        case channel::call:
            if (token == format.call_close) {
                now_    = channel::content;
                called_ = true;
                return channel::marker;
            }
            return channel::call;
        default:
            break;
    }
    if (token >= 0 && token == format.thought_open && !visible_ && !begun_) {
        now_           = channel::thought;
        blank_thought_ = true;
        n_thought_     = 0;
        n_ending_      = 0;
        tail_.clear();
        return channel::marker;
    }
    if (token >= 0 && token == format.thought_close && !visible_ && !begun_) {
        return channel::marker;  // of a thought that nobody opened
    }
    if (token >= 0 && token == format.call_open) {
        now_     = channel::call;
        visible_ = true;
        return channel::marker;
    }
    visible_ = visible_ || !is_blank(vocab.shown(token));
    return channel::content;
}

}  // namespace lfmfast
