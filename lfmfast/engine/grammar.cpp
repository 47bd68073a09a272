#include "engine/grammar.h"

#include "engine/error.h"

#include <limits>

namespace lfmfast {

grammar_vocabulary::grammar_vocabulary(const llg_api & api, const std::vector<std::string> & bytes,
                                       const std::vector<bool> & control, const std::vector<int32_t> & ends)
    : api_(api) {
    std::vector<uint32_t> lengths;
    std::string           all;
    lengths.reserve(bytes.size());
    for (size_t i = 0; i < bytes.size(); ++i) {
        const bool marked = control[i] && !bytes[i].empty();
        if (marked) {
            all += '\xFF';  // how llguidance tells a control token from its spelled-out name
        }
        all += bytes[i];
        lengths.push_back(static_cast<uint32_t>(bytes[i].size() + (marked ? 1 : 0)));
    }
    if (ends.empty()) {
        throw error(error_code::invalid_argument, "the vocabulary has no end token: a constrained answer could never end");
    }
    const std::vector<uint32_t> more(ends.begin() + 1, ends.end());
    llg_tokenizer_init          init{};
    init.struct_size   = sizeof(init);
    init.vocab_size    = static_cast<uint32_t>(bytes.size());
    init.tok_eos       = static_cast<uint32_t>(ends[0]);
    init.token_lens    = lengths.data();
    init.token_bytes   = reinterpret_cast<const uint8_t *>(all.data());
    init.use_approximate_greedy_tokenize_fn = true;  // only forced tokens would need a real one, and they aren't asked for
    init.tok_eos_extra       = more.data();
    init.tok_eos_extra_count = static_cast<uint32_t>(more.size());
    char message[1024] = {};
    tokenizer_ = api_.new_tokenizer_v2(&init, message, sizeof(message));
    if (tokenizer_ == nullptr) {
        throw error(error_code::internal, std::string("llguidance does not take the vocabulary: ") + message);
    }
}

grammar::grammar(std::shared_ptr<const grammar_vocabulary> vocab, const std::string & kind, const std::string & text)
    : vocab_(std::move(vocab)) {
    const llg_api &  api = vocab_->api();
    llg_matcher_init init{};
    api.constraint_init_set_defaults(&init, vocab_->tokenizer());
    init.log_stderr_level = 0;
    matcher_ = api.new_matcher(&init, kind.c_str(), text.c_str());
    if (const char * reason = api.matcher_get_error(matcher_)) {
        const error e(error_code::invalid_argument, reason);
        api.free_matcher(matcher_);
        throw e;
    }
    mask_.resize(api.matcher_get_mask_byte_size(matcher_) / sizeof(uint32_t));
}

grammar::grammar(const grammar & other)
    : token_filter(other), vocab_(other.vocab_), matcher_(vocab_->api().clone_matcher(other.matcher_)), mask_(other.mask_) {}

void grammar::fail() const {
    const char * reason = vocab_->api().matcher_get_error(matcher_);
    throw error(error_code::constraint, std::string("the answer can't be constrained any further: ") +
                (reason == nullptr ? "unknown reason" : reason));
}

bool grammar::allows(int32_t token) {
    const auto    id = static_cast<uint32_t>(token);
    const int32_t n  = vocab_->api().matcher_validate_tokens(matcher_, &id, 1);
    if (n < 0) {
        fail();
    }
    return n == 1;
}

void grammar::apply(float * logits, int32_t n_vocab) {
    if (vocab_->api().matcher_compute_mask_into(matcher_, mask_.data(), mask_.size() * sizeof(uint32_t)) != 0) {
        fail();
    }
    for (int32_t token = 0; token < n_vocab; ++token) {
        if ((mask_[static_cast<size_t>(token) / 32] >> (token % 32) & 1u) == 0) {
            logits[token] = -std::numeric_limits<float>::infinity();
        }
    }
}

void grammar::accept(int32_t token) {
    if (vocab_->api().matcher_consume_token(matcher_, static_cast<uint32_t>(token)) != 0) {
        fail();
    }
}

void grammar::restart() {
    if (vocab_->api().matcher_reset(matcher_) != 0) {
        fail();
    }
}

}  // namespace lfmfast
