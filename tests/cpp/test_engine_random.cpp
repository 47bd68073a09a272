// The engine under everything at once: requests of all kinds, cancels, pins, prefixes saved and loaded, growth, a cache of any
// size, passes that fail. Whatever else happens, a request gives the tokens that it gives alone and from nothing.
#include "fake_engine.h"

#include <thread>

using namespace fake;

namespace {

constexpr int64_t large_cache = int64_t(1) << 30;

struct pending {
    request    r;
    stream_ptr s;
    bool       cancelled = false;
};

struct scenario {
    explicit scenario(uint32_t seed) : rng(seed), w(std::make_shared<world>()) {
        const auto any = [&](std::initializer_list<int64_t> values) { return values.begin()[rng() % values.size()]; };
        w->can_cut  = rng() % 4 == 0;
        w->v_trans  = rng() % 4 == 0;
        w->poison   = rng() % 4 == 0;
        w->n_ctx    = any({40, 200, 300});
        w->n_ubatch = any({1, 4, 16, 64, 512});
        w->pass_us  = any({0, 0, 0, 100});
        w->rng.seed(seed);
        faulty = rng() % 2 == 0;
        if (faulty) {
            w->decode_faults = static_cast<int>(any({0, 20, 200}));
            w->set_faults    = static_cast<int>(any({0, 20, 200}));
            w->rm_faults     = static_cast<int>(any({0, 20, 200}));
            w->make_fails    = false;
        }
        params                   = params_of(*w, any({1, 2, 4}), any({1, 4, 8}));
        params.cache_bytes       = any({0, 4000, 40'000, large_cache, large_cache});
        params.checkpoint_tokens = any({1, 7, 32, 256});
        params.max_stall_ms      = any({1, 250});
        params.n_queue_max       = any({3, 1000});
        params.n_threads         = any({1, 2});
        e = make_engine(w, params);
        if (faulty && rng() % 4 == 0) {
            w->make_fails = true;
        }
    }

    tokens_t tokens(size_t n_max) {
        tokens_t out;
        for (size_t n = 1 + rng() % n_max; out.size() < n;) {
            const auto kind = rng() % 100;
            out.push_back(kind < 4 ? start_token : kind < 5 && w->poison ? poison_token : 7 + static_cast<int32_t>(rng() % 57));
        }
        return out;
    }

    tokens_t prompt() {
        tokens_t out;
        const auto kind = rng() % 10;
        if (!pool.empty() && kind > 0) {
            out = pool[rng() % pool.size()];
            if (kind == 1) {
                return out;  // the very same
            }
            if (kind < 6) {
                out.resize(1 + rng() % out.size());
            }
        }
        const size_t n_max = rng() % 2 ? 8 : 120;
        out = head(out + tokens(n_max), static_cast<size_t>(w->n_ctx));
        pool.push_back(out);
        return out;
    }

    void submit() {
        pending p;
        p.r = ask(prompt(), rng() % 3 ? static_cast<int64_t>(rng() % 30) : -1, rng() % 2 ? 1.0f : 0.0f, rng() % 5);
        p.r.priority     = static_cast<int32_t>(rng() % 3);
        p.r.cache_prompt = rng() % 10 != 0;
        p.r.pin          = rng() % 12 == 0;
        if (rng() % 5 == 0) {
            p.r.stops = {"ab", "x", "FG"};
        }
        if (rng() % 5 == 0) {
            p.r.sampling.penalty_repeat = 1.3f;
        }
        p.r.n_cache_reuse  = rng() % 12 == 0 ? 1 + static_cast<int64_t>(rng() % 20) : 0;
        p.r.max_prompt_ms  = rng() % 20 == 0 ? static_cast<int64_t>(rng() % 3) : -1;
        p.r.max_predict_ms = rng() % 20 == 0 ? static_cast<int64_t>(rng() % 3) : -1;
        try {
            p.s = e->submit(p.r);
            running.push_back(std::move(p));
        } catch (const error & failure) {
            CHECK(failure.code == error_code::queue_full);
            CHECK(params.n_queue_max < 100);
        }
    }

    void finish_one() {
        if (running.empty()) {
            return;
        }
        const size_t i = rng() % running.size();
        const auto   p = std::move(running[i]);
        running.erase(running.begin() + static_cast<std::ptrdiff_t>(i));
        check(p, collect(*p.s));
    }

    void check(const pending & p, const outcome & got) {
        const auto   want   = reference(p.r, *w);
        const size_t n_fail = w->poison ? std::min(want.n_nan, want.n_poison) : SIZE_MAX;
        ++n_done;
        if (p.r.n_cache_reuse > 0) {  // inexact: of interest is what it does to the others
            CHECK(w->poison || p.r.pin || !got.failure || got.failure == error_code::deadline);
            return;
        }
        if (got.failure == error_code::deadline) {
            CHECK(p.r.max_prompt_ms >= 0);
            CHECK(got.tokens.empty());
        } else if (got.reason == finish_reason::length && p.r.max_predict_ms >= 0) {
            CHECK(!got.tokens.empty() || p.r.max_tokens == 0);
            CHECK(begins_with(want.tokens, got.tokens));
        } else if (got.reason == finish_reason::cancelled) {
            CHECK(p.cancelled);
            CHECK(begins_with(want.tokens, got.tokens));
        } else if (p.r.pin && got.failure == error_code::state) {
            CHECK(params.cache_bytes < large_cache);
            const bool early = p.cancelled || p.r.max_predict_ms >= 0;
            CHECK(early ? begins_with(want.tokens, got.tokens) : got.tokens == want.tokens);
        } else if (n_fail != SIZE_MAX) {
            CHECK(got.failure == (n_fail == want.n_poison ? error_code::decode : error_code::sampling));
            CHECK_EQ(shown(got.tokens), shown(head(want.tokens, n_fail)));
        } else {
            CHECK_ANSWER(got, want);
            CHECK(got.times.n_cached <= got.times.n_prompt);
            const auto full = p.r.prompt + got.tokens;
            if (full.size() < static_cast<size_t>(w->n_ctx)) {
                pool.push_back(full);  // the next turn
            }
            if (p.r.pin) {
                pinned.push_back(p.r.prompt);
            }
        }
    }

    void cancel_one() {
        if (!running.empty()) {
            auto & p    = running[rng() % running.size()];
            p.cancelled = true;
            p.s->cancel();
        }
    }

    void save_or_load() {
        try {
            if (saved.empty() || rng() % 2) {
                const auto & of = pool[rng() % pool.size()];
                const auto   s  = e->save(of);
                CHECK(!s.tokens.empty() && begins_with(of, s.tokens));
                CHECK_EQ(s.rows.size(), 28 * s.tokens.size());
                saved.push_back(s);
                return;
            }
            auto s = saved[rng() % saved.size()];
            const auto damage = rng() % 8;
            if (damage == 0) {
                s.rows.pop_back();
            } else if (damage == 1) {
                s.tokens.push_back(9);
            } else if (damage == 2) {
                s.layout[rng() % s.layout.size()] ^= 1;
            } else if (damage == 3 && !s.points.empty()) {
                s.points[rng() % s.points.size()].checkpoint.push_back(0);
            } else if (damage == 4) {
                s.tokens[0] = n_vocab;
            }
            e->load(s, false);
            CHECK(damage == 3 || damage > 4);  // a state is tried in a free place, if there is one
        } catch (const error & failure) {
            CHECK(failure.code == error_code::state);
        }
    }

    void unpin_one() {
        if (pinned.empty()) {
            return;
        }
        const size_t i = rng() % pinned.size();
        const bool was = e->unpin(pinned[i]);
        CHECK(was || params.cache_bytes < large_cache);
        pinned.erase(pinned.begin() + static_cast<std::ptrdiff_t>(i));
    }

    void run(int n_ops) {
        for (int op = 0; op < n_ops && check::failures == 0; ++op) {
            const auto kind = rng() % 100;
            if (kind < 50) {
                submit();
            } else if (kind < 75 || running.size() > 25) {
                finish_one();
            } else if (kind < 85) {
                cancel_one();
            } else if (kind < 90 && !pool.empty()) {
                save_or_load();
            } else if (kind < 92) {
                e->forget();
            } else if (kind < 94) {
                unpin_one();
            } else if (kind < 96) {
                const auto s = e->stats();
                CHECK(s.n_running <= s.n_slots && s.n_slots <= std::max(params.n_parallel, params.n_parallel_max));
                CHECK(s.n_cached <= s.n_prompt);
            } else {
                std::this_thread::sleep_for(std::chrono::microseconds(rng() % 1000));
            }
        }
        while (!running.empty()) {
            finish_one();
        }
        const auto s = e->stats();
        CHECK_EQ(s.n_running, 0);
        CHECK_EQ(s.n_queued, 0);
        if (w->n_set_failed == 0) {
            CHECK_EQ(w->n_extra_ubatches.load(), 0);
        }
        if (params.cache_bytes == large_cache && w->n_set_failed == 0) {
            check_kept();
        }
        CHECK_WORLD(*w);
    }

    // Pinned prompts need nothing read again, whatever was forgotten.
    void check_kept() {
        w->make_fails    = false;
        w->decode_faults = w->set_faults = w->rm_faults = 0;
        e->forget();
        const int64_t n = w->n_tokens;
        for (const auto & prompt : pinned) {
            const auto got = collect(*e->submit(ask(prompt, 0)));
            CHECK_EQ(got.times.n_cached, got.times.n_prompt);
        }
        CHECK_EQ(w->n_tokens.load(), n);
        if (!saved.empty() && check::failures == 0) {  // in an engine of its own
            auto         other = make_engine(w, params);
            const auto & s     = saved.back();
            other->load(s, true);
            pending p;
            p.r = ask(s.tokens, 5);
            const auto got = collect(*other->submit(p.r));
            check(p, got);
            CHECK(s.logits.empty() || got.failure || got.times.n_cached == got.times.n_prompt);
        }
    }

    std::mt19937                             rng;
    world_ptr                                w;
    lfmfast::engine_params                   params;
    std::unique_ptr<lfmfast::engine>         e;
    bool                                     faulty = false;
    int                                      n_done = 0;
    std::vector<tokens_t>                    pool, pinned;
    std::vector<pending>                     running;
    std::vector<lfmfast::saved_prefix>       saved;
};

}  // namespace

// The seeds of the scenarios: those given, or all.
int main(int argc, char ** argv) {
    const uint32_t first = argc > 1 ? static_cast<uint32_t>(std::atoi(argv[1])) : 1;
    const uint32_t end   = argc > 2 ? static_cast<uint32_t>(std::atoi(argv[2])) : argc > 1 ? first + 1 : 80;
    int            n     = 0;
    for (uint32_t seed = first; seed < end && check::failures == 0; ++seed) {
        scenario s(seed);
        s.run(120);
        n += s.n_done;
        if (check::failures > 0) {
            std::fprintf(stderr, "... with seed %u\n", seed);
        }
    }
    std::printf("%d requests\n", n);
    return check::failures == 0 ? 0 : 1;
}
