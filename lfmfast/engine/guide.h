// What decides, beside the sampler, which tokens a reply may have: a budget for its thoughts and a constraint (a grammar) on
// its answer. It also tells what each token belongs to. Both go by the ids of the model's own markers. Pure: no llama.h.
#pragma once

#include "engine/decoder.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace lfmfast {

// Which tokens may come next. Used by one thread at a time; what it throws ends its own request.
class token_filter {
  public:
    virtual ~token_filter() = default;

    virtual bool allows(int32_t token) = 0;
    // Sets the logits of all tokens that may not come next to -inf. Called when a sampled token is not allowed: sampling
    // first and filtering only then is llama.cpp's rule (common_sampler_sample).
    virtual void apply(float * logits, int32_t n_vocab) = 0;
    virtual void accept(int32_t token) = 0;
    virtual void restart() = 0;         // back to where nothing was accepted
    virtual bool is_over() const = 0;   // nothing may come next but the end
};

enum class channel : uint8_t { content = 0, thought, call, marker };

// The ids of the tokens that a reply is divided by; -1: the model has none, or it counts as text like any other.
struct reply_format {
    int32_t thought_open  = -1;
    int32_t thought_close = -1;
    int32_t call_open     = -1;
    int32_t call_close    = -1;
    bool    in_thought    = false;  // the prompt ends inside a thought
};

struct guide_params {
    reply_format                  format;
    int64_t                       thought_tokens = -1;  // a thought is ended after this many tokens; -1: never
    std::vector<int32_t>          thought_end;          // how it is ended then, thought_close being the last; empty: with it alone
    std::shared_ptr<token_filter> constraint;           // of the answer; thoughts are free
    bool                          lazy = false;         // the constraint is that of a call, and counts from call_open on
    bool                          single_call = false;  // nothing may follow the first call
};

class guide {
  public:
    guide() = default;
    explicit guide(guide_params params);  // throws invalid_argument

    // Whether every token is allowed, whatever comes.
    bool is_free() const { return params_.thought_tokens < 0 && !params_.constraint; }
    // The one token that has to come next, whatever the logits say; -1: none.
    int32_t forced() const;
    bool allows(int32_t token, const vocabulary & vocab);
    void apply(float * logits, const vocabulary & vocab);
    void accept(int32_t token, const vocabulary & vocab);

    channel last() const { return last_; }  // what the token that was accepted last belongs to
    bool    is_over() const;                // nothing may follow: the constraint is fulfilled, or there was the only call

  private:
    bool    is_constrained() const;
    channel advance(int32_t token, const vocabulary & vocab);

    guide_params params_;
    channel      now_     = channel::content;
    channel      last_    = channel::content;
    bool         visible_ = false;  // there was content that is more than whitespace
    bool         blank_thought_ = true;  // the thought is no more than whitespace so far
    bool         begun_   = false;  // the constraint has accepted a token
    bool         called_  = false;  // a call was closed
    int64_t      n_thought_ = 0;
    size_t       n_ending_  = 0;    // tokens of thought_end that were given
    std::string  tail_;             // bytes of the thought that may be the beginning of a character
};

}  // namespace lfmfast
