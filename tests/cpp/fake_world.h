// A stand-in for a model, for tests of the engine without llama.cpp. It has what makes a hybrid model hard to
// serve: rows of attention memory that depend on all tokens before them, and a recurrent state that can't be cut. The next
// token depends on every row and on that state, so a wrong, missing or stale one gives another answer. Its context is
// fake_decoder.h; `world` is what the tests set and see of it.
#pragma once

#include "engine/decoder.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace fake {

using tokens_t = std::vector<int32_t>;

constexpr int32_t n_vocab          = 64;
constexpr int32_t eog_token        = 0;
constexpr int32_t start_token      = 1;  // begins a message
constexpr int32_t suppressed_token = 2;  // is never generated
constexpr int32_t poison_token     = 5;  // a pass with it fails, in a world with poison
constexpr int32_t nan_token        = 6;  // its logits are NaN, in a world with poison

inline uint64_t mix(uint64_t a, uint64_t b) {
    uint64_t x = (a ^ (b + 0x9e3779b97f4a7c15)) * 0xbf58476d1ce4e5b9;
    x          = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

// --- the model -----------------------------------------------------------------------------------------------------------

// A token in the attention memory. `pos` and `token` are what a real row only encodes.
struct row {
    uint64_t key   = 0;
    int32_t  pos   = 0;
    int32_t  token = 0;
    uint64_t value = 0;
    uint32_t check = 0;  // of the others but pos: a row put together from two tokens is noticed

    uint32_t right_check() const { return static_cast<uint32_t>(mix(mix(key, value), static_cast<uint64_t>(token))); }
    uint64_t weight() const { return mix(mix(key, value), mix(static_cast<uint64_t>(pos), check)); }
};

struct recurrent_state {
    int64_t  pos = -1;  // of the last token; -1: empty
    uint64_t a = 0, b = 0;
};

// What one token does. `sum`: the weights of all rows before it, and then also of its own.
inline row step(int32_t token, int32_t pos, uint64_t & sum, recurrent_state & state, bool has_state) {
    const uint64_t h = mix(mix(sum, mix(state.a, state.b)), mix(static_cast<uint64_t>(token), static_cast<uint64_t>(pos)));
    row r;
    r.key   = h;
    r.pos   = pos;
    r.token = token;
    r.value = mix(h, 77);
    r.check = r.right_check();
    sum += r.weight();
    if (has_state) {
        state = {pos, state.b, h};
    }
    return r;
}

inline void write_logits(uint64_t sum, const recurrent_state & state, float * out) {
    const uint64_t h = mix(sum, mix(state.a, state.b));
    for (int32_t v = 0; v < n_vocab; ++v) {
        out[v] = static_cast<float>(mix(h, static_cast<uint64_t>(v)) >> 40) * (8.0f / (1 << 24));
    }
    out[eog_token] += 0.3f;  // answers of about 20 tokens
}

class vocabulary : public lfmfast::vocabulary {
  public:
    vocabulary() {
        for (int32_t t = 0; t < fake::n_vocab; ++t) {
            const std::string plain(1, static_cast<char>('>' + t));
            shown_.push_back(t == eog_token ? "" : t == 3 ? "\xc3" : t == 4 ? "\xa9" : plain);
        }
    }
    int32_t n_vocab() const override { return fake::n_vocab; }
    bool    is_eog(int32_t token) const override { return token == eog_token; }
    const std::string & shown(int32_t token) const override { return shown_.at(static_cast<size_t>(token)); }
    int32_t  token_id(const std::string & text) const override { return text == "<|im_start|>" ? start_token : -1; }
    tokens_t suppressed_tokens() const override { return {suppressed_token}; }
    tokens_t tokenize(const std::string & text, bool, bool) const override {
        tokens_t out;
        for (const char c : text) {
            out.push_back(c - '>');
        }
        return out;
    }
    std::string detokenize(const tokens_t & tokens, bool) const override {
        std::string out;
        for (const int32_t t : tokens) {
            out += shown(t);
        }
        return out;
    }

  private:
    std::vector<std::string> shown_;
};

// --- what the tests set and see ------------------------------------------------------------------------------------------

struct call {
    std::vector<int32_t> seqs;      // ascending
    size_t               n_tokens;
    bool                 output;    // gives logits
    int32_t              first_pos, first_token;
};

// Shared by all decoders of an engine, and by its test.
struct world {
    // To be set before the engine is made.
    bool    can_cut = false, v_trans = false, poison = false, record = false;
    int64_t n_ctx = 256, n_ubatch = 64;
    std::mt19937 rng{1};  // of the engine's thread

    std::atomic<int64_t> pass_us{0}, token_us{0};  // how long a pass takes
    std::atomic<int>     decode_faults{0}, set_faults{0}, rm_faults{0}, get_faults{0};  // of 1,000
    std::atomic<bool>    make_fails{false};
    std::atomic<int64_t> n_calls{0}, n_tokens{0}, n_extra_ubatches{0}, n_failed{0}, n_set_failed{0};
    std::atomic<int64_t> n_alone{0};  // rows of logits to come before the sequences of the last failed pass are past it

    void violation(const std::string & what) {
        std::lock_guard<std::mutex> lock(mutex);
        violations.push_back(what);
    }
    std::vector<std::string> take_violations() {
        std::lock_guard<std::mutex> lock(mutex);
        return std::move(violations);
    }
    std::vector<call> take_calls() {
        std::lock_guard<std::mutex> lock(mutex);
        return std::move(calls);
    }
    bool draw(std::atomic<int> & per_mille) { return static_cast<int>(rng() % 1000) < per_mille.load(); }

    // A gate that passes wait at.
    void shut() {
        std::lock_guard<std::mutex> lock(mutex);
        is_shut = true;
    }
    void open() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            is_shut = false;
        }
        changed.notify_all();
    }
    void wait_for_pass_at_gate() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return n_at_gate > 0; });
    }
    // Lets the pass that waits begin and comes back when the next one waits.
    void let_one_pass() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return n_at_gate > 0; });
        const int64_t before = n_arrived;
        n_let = 1;
        changed.notify_all();
        changed.wait(lock, [&] { return n_arrived > before; });
    }
    // False: `stops` said so.
    template <typename stops_t> bool pass_gate(const stops_t & stops) {
        std::unique_lock<std::mutex> lock(mutex);
        ++n_arrived;
        if (!is_shut) {
            return true;
        }
        ++n_at_gate;
        changed.notify_all();
        bool stopped = false;
        while (is_shut && n_let == 0 && !(stopped = stops())) {
            changed.wait_for(lock, std::chrono::milliseconds(1));
        }
        n_let = 0;
        --n_at_gate;
        return !stopped;
    }

    std::mutex               mutex;
    std::condition_variable  changed;
    std::vector<std::string> violations;
    std::vector<call>        calls;
    bool                     is_shut = false;
    int64_t                  n_at_gate = 0, n_let = 0, n_arrived = 0;
};

}  // namespace fake
