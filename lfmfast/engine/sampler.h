// Picks the next token from a row of logits, token for token like llama.cpp's chain with the same parameters and seed.
// Pure: no llama.h. The order of the stages, their float arithmetic and the RNG draws are llama.cpp's (src/llama-sampler.cpp,
// common/sampling.cpp); what is ours is that the usual chains look at each logit once and at nothing else of the vocabulary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace lfmfast {

enum class sampler_stage : uint8_t { penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature };

// The token sequences that end a repetition for DRY: `tail` follows `head`. A tail may be empty.
struct dry_breaker {
    int32_t              head;
    std::vector<int32_t> tail;
};
using dry_breakers = std::shared_ptr<const std::vector<dry_breaker>>;  // ascending by head, see make_dry_breakers

// Every default is neutral: the stage is off.
struct sampler_params {
    std::vector<std::pair<int32_t, float>> logit_bias;
    int32_t penalty_last_n  = 64;  // 0: off; -1: every token accepted since the last reset
    float   penalty_repeat  = 1.0f;
    float   penalty_freq    = 0.0f;
    float   penalty_present = 0.0f;
    int32_t top_k = 0;
    float   top_p = 1.0f;
    float   min_p = 0.0f;
    float   temp  = 1.0f;  // <= 0: greedy
    uint32_t seed = 0xFFFFFFFF;  // 0xFFFFFFFF: fresh entropy at construction and at each reset (LLAMA_DEFAULT_SEED)

    float   dry_multiplier     = 0.0f;
    float   dry_base           = 1.75f;
    int32_t dry_allowed_length = 2;
    int32_t dry_penalty_last_n = 64;  // as penalty_last_n
    dry_breakers dry_sequence_breakers;
    std::vector<std::string> dry_breaker_texts;  // for who has a vocabulary to find dry_sequence_breakers; unused here
    float   top_n_sigma       = -1.0f;
    float   typ_p             = 1.0f;
    float   xtc_probability   = 0.0f;
    float   xtc_threshold     = 0.1f;
    float   dynatemp_range    = 0.0f;
    float   dynatemp_exponent = 1.0f;
    int32_t mirostat          = 0;  // 1 or 2: temperature, then mirostat, and no other stage
    float   mirostat_tau      = 5.0f;
    float   mirostat_eta      = 0.1f;
    int32_t min_keep          = 0;
    std::vector<sampler_stage> stages = {
        sampler_stage::penalties, sampler_stage::dry,   sampler_stage::top_n_sigma,
        sampler_stage::top_k,     sampler_stage::typ_p, sampler_stage::top_p,
        sampler_stage::min_p,     sampler_stage::xtc,   sampler_stage::temperature};
};

// Sequences of tokens to breakers; empty sequences are dropped.
dry_breakers make_dry_breakers(const std::vector<std::vector<int32_t>> & sequences);

// The last `limit` tokens accepted; limit < 0: all of them.
class token_history {
  public:
    explicit token_history(int32_t limit = 0) : limit_(limit < 0 ? SIZE_MAX : static_cast<size_t>(limit)) {}
    bool    push(int32_t token, int32_t & dropped);  // true: `dropped` is the token that fell out
    void    clear();
    size_t  size() const { return ring_.size(); }
    int32_t back(size_t i) const;  // i tokens before the newest

  private:
    size_t               limit_;
    size_t               next_ = 0;  // where the next token goes, once the ring is full
    std::vector<int32_t> ring_;
};

struct candidate;
struct candidates;
class sampler_row;
struct token_count { int32_t token; int32_t count; };
struct logit_patch { int32_t token; float logit; };

class sampler {
  public:
    // Throws error_code::invalid_argument.
    sampler(const sampler_params & params, int32_t n_vocab);

    // The next token for a row of n_vocab logits, which is not written to. Does not accept it. Throws error_code::sampling
    // where a logit is NaN or +inf or no token is left above -inf; the RNG is as before then, unless XTC drew.
    int32_t sample(const float * logits);

    // Puts a token of the prompt or of the output into the penalties' and DRY's windows.
    void accept(int32_t token);

    // Empty windows, RNG seeded anew.
    void reset();

    uint32_t               seed() const { return seed_; }  // the seed really used
    int32_t                n_vocab() const { return n_vocab_; }
    const sampler_params & params() const { return params_; }
    // How many rows of the usual chains needed a slower way to be exact: equal logits where their order matters, or a draw too
    // near to the border of two tokens.
    uint64_t               n_tied() const { return n_tied_; }

  private:
    enum class plan : uint8_t { reference, top_k, top_p, min_p, greedy, draw };  // what selects from the row

    plan    make_plan() const;
    size_t  patches(const float * logits, std::vector<logit_patch> & out);
    int32_t sample_fused(const float * logits);
    int32_t draw_from_row(const float * logits, const sampler_row & row);
    bool    nucleus(const sampler_row & row, std::vector<candidate> & out) const;
    bool    penalties_on() const;
    bool    dry_on() const;
    bool    enabled(sampler_stage stage) const;
    bool    dry_penalties(std::vector<std::pair<int32_t, float>> & out);
    void    apply(sampler_stage stage, candidates & c);
    int32_t sample_reference(const float * logits);
    int32_t sample_mirostat(candidates & c);

    sampler_params             params_;
    int32_t                    n_vocab_;
    uint32_t                   seed_ = 0;
    std::mt19937               rng_;
    std::mt19937               rng_xtc_;
    float                      mirostat_mu_ = 0.0f;
    uint64_t                   n_tied_      = 0;
    token_history              window_;
    token_history              dry_history_;
    std::vector<token_count>   counts_;  // of the window's distinct tokens, ascending
    std::vector<sampler_stage> active_;  // the stages that do something, in order
    plan                       plan_ = plan::reference;
};

struct token_logprob {
    int32_t token;
    float   logprob;
};

// Natural log-softmax of the raw row: of `token`, and the n_top highest (descending, equal ones by lower id) into `top`.
// Throws error_code::sampling for a row that is NaN, +inf or -inf throughout; error_code::invalid_argument for a bad token.
float log_probs(const float * logits, int32_t n_vocab, int32_t token, size_t n_top, std::vector<token_logprob> & top);

}  // namespace lfmfast
