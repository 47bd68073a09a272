// An engine on the fake model, and what it must answer: the same tokens one after another, from nothing and alone.
#pragma once

#include "check.h"
#include "engine/engine.h"
#include "fake_decoder.h"

#include <cstdlib>
#include <map>
#include <optional>

namespace fake {

using lfmfast::finish_reason;
using lfmfast::request;
using world_ptr  = std::shared_ptr<world>;
using stream_ptr = std::shared_ptr<lfmfast::stream>;

inline lfmfast::engine_params params_of(const world & w, int64_t n_parallel = 1, int64_t n_parallel_max = 0) {
    lfmfast::engine_params p;
    p.n_parallel     = n_parallel;
    p.n_parallel_max = std::max(n_parallel, n_parallel_max);
    p.can_cut        = w.can_cut;
    return p;
}

inline std::unique_ptr<lfmfast::engine> make_engine(const world_ptr & w, const lfmfast::engine_params & params) {
    const auto make = [w](int64_t n_seq) -> std::unique_ptr<lfmfast::decoder> {
        if (w->make_fails) {
            throw error(error_code::out_of_memory, "no memory for another context");
        }
        return std::make_unique<decoder>(w, n_seq);
    };
    return std::make_unique<lfmfast::engine>(std::make_shared<vocabulary>(), make, params);
}

// `temp` 0: greedy. Any seed that is not the one for fresh entropy.
inline request ask(const tokens_t & prompt, int64_t max_tokens = -1, float temp = 0.0f, uint32_t seed = 1) {
    request r;
    r.prompt        = prompt;
    r.max_tokens    = max_tokens;
    r.sampling.temp = temp;
    r.sampling.seed = seed;
    return r;
}

inline tokens_t random_tokens(std::mt19937 & rng, size_t n) {
    tokens_t out;
    for (size_t i = 0; i < n; ++i) {
        out.push_back(7 + static_cast<int32_t>(rng() % (n_vocab - 7)));
    }
    return out;
}

inline tokens_t operator+(tokens_t a, const tokens_t & b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

inline tokens_t head(const tokens_t & t, size_t n) {
    return tokens_t(t.begin(), t.begin() + static_cast<std::ptrdiff_t>(std::min(n, t.size())));
}

// What a request gave.
struct outcome {
    tokens_t                  tokens;  // without the end token
    std::string               text;
    finish_reason             reason = finish_reason::none;
    std::string               stop;
    std::optional<error_code> failure;
    lfmfast::timings          times;
};

// A stream that does not end is the worst that can happen: the program ends then.
inline outcome collect(lfmfast::stream & s) {
    outcome       out;
    const int64_t limit = lfmfast::now_us() + 60'000'000;
    try {
        for (bool ended = false; !ended;) {
            std::vector<lfmfast::piece> pieces;
            ended = s.wait(1000, pieces);
            for (const auto & piece : pieces) {
                out.text += piece.text;
                for (const auto & t : piece.tokens) {
                    out.tokens.push_back(t.token);
                }
            }
            if (lfmfast::now_us() > limit) {
                std::fprintf(stderr, "a stream does not end\n");
                std::_Exit(1);
            }
        }
        out.reason = s.reason();
        out.stop   = s.stop_string();
        out.times  = s.times();
    } catch (const error & e) {
        out.reason  = finish_reason::failed;
        out.failure = e.code;
    }
    return out;
}

// What it must give. `n_poison`, `n_nan`: SIZE_MAX, or how many tokens of the answer are there when the first token is read
// that makes the pass fail, or that gives no logits.
struct expected {
    tokens_t      tokens;
    std::string   text;
    finish_reason reason   = finish_reason::none;
    size_t        n_poison = SIZE_MAX;
    size_t        n_nan    = SIZE_MAX;
};

inline expected reference(const request & r, const world & w) {
    static const vocabulary vocab;
    lfmfast::sampler_params sampling = r.sampling;
    sampling.logit_bias.emplace_back(suppressed_token, -std::numeric_limits<float>::infinity());
    lfmfast::sampler   sampler(sampling, n_vocab);
    expected           out;
    uint64_t           sum = 0;
    recurrent_state    state;
    int32_t            pos = 0;
    std::vector<float> logits(n_vocab);
    const auto read = [&](int32_t token) {
        if (token == poison_token && out.n_poison == SIZE_MAX) {
            out.n_poison = out.tokens.size();
        }
        step(token, pos++, sum, state, !w.can_cut);
    };
    const auto check_nan = [&](int32_t last) {
        if (last == nan_token && out.n_nan == SIZE_MAX) {
            out.n_nan = out.tokens.size();
        }
    };
    for (const int32_t token : r.prompt) {
        sampler.accept(token);
        read(token);
    }
    int64_t n = 0;
    while (out.reason == finish_reason::none) {
        if (r.max_tokens == 0) {
            out.reason = finish_reason::length;
            break;
        }
        check_nan(out.tokens.empty() ? r.prompt.back() : out.tokens.back());
        write_logits(sum, state, logits.data());
        const int32_t token = sampler.sample(logits.data());
        sampler.accept(token);
        ++n;
        if (token == eog_token) {
            out.reason = finish_reason::stop;
            break;
        }
        out.tokens.push_back(token);
        out.text += vocab.shown(token);
        size_t cut = std::string::npos;
        for (const auto & stop : r.stops) {
            cut = std::min(cut, out.text.find(stop));
        }
        if (cut != std::string::npos) {
            out.text.resize(cut);
            out.reason = finish_reason::stop;
        } else if (n == r.max_tokens || pos >= w.n_ctx) {
            out.reason = finish_reason::length;
        } else {
            read(token);
        }
    }
    return out;
}

inline std::string shown(const tokens_t & tokens) {
    std::string out;
    for (const int32_t t : tokens) {
        out += (out.empty() ? "" : " ") + std::to_string(t);
    }
    return out;
}

inline bool begins_with(const tokens_t & all, const tokens_t & beginning) {
    return beginning.size() <= all.size() && std::equal(beginning.begin(), beginning.end(), all.begin());
}

// The request ended by itself with the right answer.
inline void check_answer(const outcome & got, const expected & want, const char * file, int line) {
    check::equal(static_cast<int>(got.reason), static_cast<int>(want.reason), "finish reason", file, line);
    check::equal(shown(got.tokens), shown(want.tokens), "tokens", file, line);
    check::equal(got.text, want.text, "text", file, line);
}

inline void check_world(world & w, const char * file, int line) {
    for (const auto & what : w.take_violations()) {
        check::fail(file, line, "the decoder was misused: " + what);
    }
}

}  // namespace fake

#define CHECK_ANSWER(got, want) fake::check_answer(got, want, __FILE__, __LINE__)
#define CHECK_WORLD(w) fake::check_world(w, __FILE__, __LINE__)
