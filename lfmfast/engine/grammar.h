// A grammar as a token filter: llguidance's matcher, called without Python. Its library is a Python extension that also exports
// a C interface; the addresses come from who imported it (_grammar.pyx), so that nothing is linked. Pure: no llama.h.
#pragma once

#include "engine/decoder.h"
#include "engine/guide.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace lfmfast {

// Of LlgTokenizerInitV2, which begins with its own size and so may grow.
struct llg_tokenizer_init {
    size_t           struct_size;
    uint32_t         vocab_size;
    uint32_t         tok_eos;
    const uint32_t * token_lens;
    const uint8_t *  token_bytes;
    const char *     tokenizer_json;
    bool             tokenize_assumes_string;
    size_t (*tokenize_fn)(const void *, const uint8_t *, size_t, uint32_t *, size_t);
    bool             use_approximate_greedy_tokenize_fn;
    const void *     tokenize_user_data;
    const char * const * slices;
    const uint32_t * tok_eos_extra;
    uint32_t         tok_eos_extra_count;
};

// LlgConstraintInit, of which only the first fields are ours to know; llguidance fills it in.
struct llg_matcher_init {
    const void * tokenizer;
    uint32_t     log_buffer_level;
    uint32_t     log_stderr_level;
    char         rest[496];
};

// llguidance's functions of these names, without their prefix.
struct llg_api {
    void * (*new_tokenizer_v2)(const llg_tokenizer_init *, char * message, size_t message_size);
    void (*free_tokenizer)(void * tokenizer);
    void (*constraint_init_set_defaults)(llg_matcher_init *, const void * tokenizer);
    void * (*new_matcher)(const llg_matcher_init *, const char * kind, const char * text);
    void * (*clone_matcher)(const void * matcher);
    void (*free_matcher)(void * matcher);
    const char * (*matcher_get_error)(void * matcher);
    int32_t (*matcher_validate_tokens)(void * matcher, const uint32_t * tokens, size_t n_tokens);
    int32_t (*matcher_compute_mask_into)(void * matcher, uint32_t * mask, size_t n_bytes);
    size_t (*matcher_get_mask_byte_size)(const void * matcher);
    int32_t (*matcher_consume_token)(void * matcher, uint32_t token);
    int32_t (*matcher_reset)(void * matcher);
    bool (*matcher_is_stopped)(const void * matcher);
};

// A vocabulary as llguidance wants it: made once per model, used by all of its grammars, from several threads.
class grammar_vocabulary {
  public:
    // `control`: the tokens that no text becomes. Throws internal.
    grammar_vocabulary(const llg_api & api, const std::vector<std::string> & bytes, const std::vector<bool> & control,
                       const std::vector<int32_t> & ends);
    ~grammar_vocabulary() { api_.free_tokenizer(tokenizer_); }
    grammar_vocabulary(const grammar_vocabulary &) = delete;
    grammar_vocabulary & operator=(const grammar_vocabulary &) = delete;

    const llg_api & api() const { return api_; }
    const void *    tokenizer() const { return tokenizer_; }

  private:
    llg_api api_;
    void *  tokenizer_;
};

// Whoever has a compiled grammar gives each request a copy.
class grammar : public token_filter {
  public:
    // `kind`: "json_schema", "lark", "regex", as llguidance's llg_new_matcher takes it. Compiles; throws invalid_argument with
    // llguidance's reason.
    grammar(std::shared_ptr<const grammar_vocabulary> vocab, const std::string & kind, const std::string & text);
    grammar(const grammar & other);
    ~grammar() override { vocab_->api().free_matcher(matcher_); }
    grammar & operator=(const grammar &) = delete;

    // Throw constraint: llguidance gave up (its limits on work and memory), or a token that is not allowed was accepted.
    bool allows(int32_t token) override;
    void apply(float * logits, int32_t n_vocab) override;
    void accept(int32_t token) override;
    void restart() override;
    bool is_over() const override { return vocab_->api().matcher_is_stopped(matcher_); }

  private:
    [[noreturn]] void fail() const;

    std::shared_ptr<const grammar_vocabulary> vocab_;
    void *                                    matcher_;
    std::vector<uint32_t>                     mask_;
};

// As the constructors, for Cython, which can't make a shared_ptr of a class that throws.
inline std::shared_ptr<const grammar_vocabulary> make_grammar_vocabulary(const llg_api & api, const std::vector<std::string> & bytes,
                                                                         const std::vector<bool> & control,
                                                                         const std::vector<int32_t> & ends) {
    return std::make_shared<const grammar_vocabulary>(api, bytes, control, ends);
}
inline std::shared_ptr<grammar> make_grammar(const std::shared_ptr<const grammar_vocabulary> & vocab, const std::string & kind,
                                             const std::string & text) {
    return std::make_shared<grammar>(vocab, kind, text);
}
inline std::shared_ptr<token_filter> copy_grammar(const std::shared_ptr<grammar> & g) { return std::make_shared<grammar>(*g); }

}  // namespace lfmfast
