// The engine on a fake model: what it promises, one by one. test_engine_random.cpp has the rest.
#include "fake_engine.h"

#include <thread>

using namespace fake;

namespace {

world_ptr make_world() {
    auto w    = std::make_shared<world>();
    w->record = true;
    return w;
}

std::vector<outcome> collect_all(const std::vector<stream_ptr> & streams) {
    std::vector<outcome> out;
    for (const auto & s : streams) {
        out.push_back(collect(*s));
    }
    return out;
}

int64_t n_decoded(const outcome & o) { return o.times.n_predicted == 0 ? 0 : o.times.n_predicted - 1; }

// A prompt whose greedy answer has at least this many tokens; ends with `last` if it is not empty.
tokens_t prompt_with_answer(std::mt19937 & rng, const world & w, size_t n_prompt, size_t n_answer) {
    for (;;) {
        auto prompt = random_tokens(rng, n_prompt);
        if (reference(ask(prompt), w).tokens.size() >= n_answer) {
            return prompt;
        }
    }
}

void test_answers() {
    std::mt19937 rng(1);
    for (int round = 0; round < 4; ++round) {
        auto w     = make_world();
        w->can_cut = round % 2 == 1;
        w->v_trans = round / 2 == 1;
        auto e = make_engine(w, params_of(*w, 3));
        for (const float temp : {0.0f, 0.9f}) {
            std::vector<request> requests;
            std::vector<stream_ptr> streams;
            for (uint32_t i = 0; i < 12; ++i) {
                const int64_t max_tokens = i % 4 == 0 ? static_cast<int64_t>(i) : -1;
                requests.push_back(ask(random_tokens(rng, 1 + rng() % 150), max_tokens, temp, i));
                requests.back().sampling.penalty_repeat = 1.2f;  // sees the prompt too
                if (i % 3 == 0) {
                    requests.back().stops = {"a", "zz", "x"};
                }
                streams.push_back(e->submit(requests.back()));
            }
            const auto got = collect_all(streams);
            for (size_t i = 0; i < got.size(); ++i) {
                CHECK_ANSWER(got[i], reference(requests[i], *w));
                CHECK_EQ(got[i].times.n_prompt, static_cast<int64_t>(requests[i].prompt.size()));
            }
        }
        const auto stats = e->stats();
        CHECK_EQ(stats.n_running, 0);
        CHECK_EQ(stats.n_queued, 0);
        CHECK_EQ(stats.n_requests, 24);
        CHECK_EQ(w->n_extra_ubatches.load(), 0);
        CHECK_WORLD(*w);
    }
}

void test_limits() {
    auto w = make_world();
    w->n_ctx = 40;
    auto p = params_of(*w, 1);
    auto e = make_engine(w, p);
    CHECK_THROWS(invalid_argument, e->submit(ask({})));
    CHECK_THROWS(invalid_argument, e->submit(ask({-1})));
    CHECK_THROWS(invalid_argument, e->submit(ask({n_vocab})));
    CHECK_THROWS(invalid_argument, e->submit(ask({7}, -2)));
    CHECK_THROWS(context_full, e->submit(ask(tokens_t(41, 7))));
    std::mt19937 rng(1);
    const auto full = prompt_with_answer(rng, *w, 40, 1);
    auto got = collect(*e->submit(ask(full)));
    CHECK_ANSWER(got, reference(ask(full), *w));
    CHECK_EQ(got.tokens.size(), 1u);
    CHECK(got.reason == finish_reason::length);
    for (const auto & bad : {std::pair<int64_t, int64_t>{0, 1}, {2, 1}, {1, 100'000}}) {
        p.n_parallel     = bad.first;
        p.n_parallel_max = bad.second;
        CHECK_THROWS(invalid_argument, make_engine(w, p));
    }
    w->make_fails = true;
    CHECK_THROWS(out_of_memory, make_engine(w, params_of(*w, 1)));
    CHECK_WORLD(*w);
}

// The same prompt, also at the same time: read once.
void test_identical_prompts() {
    std::mt19937 rng(2);
    for (const bool can_cut : {false, true}) {
        auto w     = make_world();
        w->can_cut = can_cut;
        auto e = make_engine(w, params_of(*w, 8));
        const auto prompt = prompt_with_answer(rng, *w, 100, 5);
        std::vector<stream_ptr> streams;
        std::vector<request>    requests;
        w->shut();
        for (uint32_t i = 0; i < 8; ++i) {
            requests.push_back(ask(prompt, -1, i == 0 ? 0.0f : 1.0f, i));
            streams.push_back(e->submit(requests.back()));
        }
        w->open();
        int64_t n = 100;
        const auto got = collect_all(streams);
        for (size_t i = 0; i < got.size(); ++i) {
            CHECK_ANSWER(got[i], reference(requests[i], *w));
            CHECK_EQ(got[i].times.n_cached, i == 0 ? 0 : 100);
            n += n_decoded(got[i]);
        }
        CHECK_EQ(w->n_tokens.load(), n);
        collect(*e->submit(ask(prompt, 0)));  // and later
        CHECK_EQ(w->n_tokens.load(), n);
        auto fresh         = ask(prompt, 0);
        fresh.cache_prompt = false;
        collect(*e->submit(fresh));
        CHECK_EQ(w->n_tokens.load(), n + 100);
        CHECK_WORLD(*w);
    }
}

// Different prompts that begin alike, at the same time: the beginning is read once.
void test_shared_prefix() {
    std::mt19937 rng(3);
    for (const bool can_cut : {false, true}) {
        auto w     = make_world();
        w->can_cut = can_cut;
        auto p = params_of(*w, 4, 8);
        p.checkpoint_tokens = 64;
        auto e = make_engine(w, p);
        const auto prefix = random_tokens(rng, 100);
        std::vector<stream_ptr> streams;
        w->shut();
        streams.push_back(e->submit(ask(prefix + random_tokens(rng, 20), 0)));
        w->wait_for_pass_at_gate();
        for (int i = 1; i < 8; ++i) {
            streams.push_back(e->submit(ask(prefix + random_tokens(rng, 20), 0)));
        }
        w->open();
        const auto got = collect_all(streams);
        CHECK_EQ(w->n_tokens.load(), 100 + 8 * 20);
        // Later, too, although nothing was kept on purpose at that place before.
        collect(*e->submit(ask(head(prefix, 98) + random_tokens(rng, 30), 0)));
        const int64_t n = w->n_tokens;
        CHECK_EQ(n, 260 + 30 + (can_cut ? 0 : 98 - 64));  // a pass ended at 64
        collect(*e->submit(ask(head(prefix, 98) + random_tokens(rng, 30), 0)));
        CHECK_EQ(w->n_tokens - n, 30);
        CHECK_WORLD(*w);
    }
}

// A conversation reads only what is new, and its own answer not at all.
void test_conversation() {
    std::mt19937 rng(4);
    auto w = make_world();
    w->n_ctx = 2000;
    auto e = make_engine(w, params_of(*w, 2));
    tokens_t chats[3];
    for (int turn = 0; turn < 5; ++turn) {
        for (auto & chat : chats) {  // three in two places
            const size_t before = chat.size();
            chat = chat + tokens_t{start_token} + random_tokens(rng, 30);
            const auto got = collect(*e->submit(ask(chat)));
            CHECK_ANSWER(got, reference(ask(chat), *w));
            chat = chat + got.tokens;
            // An answer's last token is in the memory only if another came after it: the end token did.
            CHECK_EQ(got.times.n_cached, static_cast<int64_t>(before));
        }
    }
    CHECK(e->stats().n_loaded > 0);
    CHECK_EQ(w->n_extra_ubatches.load(), 0);
    CHECK_WORLD(*w);
}

// A second answer to a question, and a shorter past, lose nothing of the first one.
void test_fork() {
    std::mt19937 rng(5);
    for (const bool can_cut : {false, true}) {
        auto w     = make_world();
        w->can_cut = can_cut;
        auto e = make_engine(w, params_of(*w, 1));
        const auto prompt = prompt_with_answer(rng, *w, 80, 10);
        const auto answer = collect(*e->submit(ask(prompt)));
        const auto full   = prompt + answer.tokens;
        CHECK_EQ(collect(*e->submit(ask(prompt, 3, 1.0f))).times.n_cached, 80);
        collect(*e->submit(ask(head(prompt, 60) + random_tokens(rng, 30))));
        const auto next = ask(full + random_tokens(rng, 10));
        const auto got  = collect(*e->submit(next));
        CHECK_ANSWER(got, reference(next, *w));
        CHECK_EQ(got.times.n_cached, static_cast<int64_t>(full.size()));
        CHECK_WORLD(*w);
    }
}

// Runs of tokens that were moved: inexact, so nobody else gets any of it.
void test_reuse() {
    std::mt19937 rng(14);
    for (const bool can_cut : {false, true}) {
        auto w     = make_world();
        w->can_cut = can_cut;
        w->v_trans = can_cut;
        w->n_ubatch = 20;
        auto p = params_of(*w, 2);
        p.checkpoint_tokens = 20;
        auto e = make_engine(w, p);
        int64_t n_moved = 0;
        for (int round = 0; round < 30; ++round) {
            const auto a = random_tokens(rng, 40), b = random_tokens(rng, 20), c = random_tokens(rng, 40);
            collect(*e->submit(ask(a + b + c, 0)));
            auto r = ask(a + c + random_tokens(rng, 10), 5);
            r.n_cache_reuse = 16;
            w->rm_faults    = round % 3 == 0 ? 500 : 0;
            const auto got = collect(*e->submit(r));
            CHECK(!got.failure);
            w->rm_faults = 0;
            if (round % 2) {  // both places are needed
                const auto one = e->submit(ask(random_tokens(rng, 5), 2)), two = e->submit(ask(random_tokens(rng, 5), 2));
                collect(*one);
                collect(*two);
            }
            n_moved += got.times.n_cached == 80;
            const auto more = a + c + tokens_t(r.prompt.end() - 10, r.prompt.end());
            for (const auto & prompt : {more, more + random_tokens(rng, 10), more + got.tokens + random_tokens(rng, 10)}) {
                CHECK_ANSWER(collect(*e->submit(ask(prompt))), reference(ask(prompt), *w));
            }
        }
        CHECK(n_moved > 0);
        CHECK_WORLD(*w);
    }
}

// Streams of their own in an order of their own.
void test_priority_and_queue() {
    auto w = make_world();
    auto p = params_of(*w, 1);
    p.n_queue_max = 4;
    auto e = make_engine(w, p);
    w->shut();
    std::vector<stream_ptr> streams = {e->submit(ask({10}, 1))};
    w->wait_for_pass_at_gate();
    const int32_t priorities[] = {0, 5, 0, 5};
    for (int32_t i = 0; i < 4; ++i) {
        auto r     = ask({11 + i}, 1);
        r.priority = priorities[i];
        streams.push_back(e->submit(r));
    }
    CHECK_EQ(e->stats().n_queued, 4);
    CHECK_THROWS(queue_full, e->submit(ask({20}, 1)));
    w->open();
    collect_all(streams);
    std::string order;
    for (const auto & c : w->take_calls()) {
        order += c.first_pos == 0 ? std::to_string(c.first_token) + " " : "";
    }
    CHECK_EQ(order, "10 12 14 11 13 ");
    collect(*e->submit(ask({20}, 1)));  // there is room again
    CHECK_WORLD(*w);
}

void test_cancel() {
    std::mt19937 rng(6);
    auto w = make_world();
    auto e = make_engine(w, params_of(*w, 2));
    const auto prompt = prompt_with_answer(rng, *w, 200, 10);
    // While its prompt is read, and while it waits.
    w->shut();
    auto reading = e->submit(ask(prompt));
    auto other   = e->submit(ask(random_tokens(rng, 30), 3));
    auto waiting = e->submit(ask(random_tokens(rng, 30)));
    w->wait_for_pass_at_gate();
    reading->cancel();
    waiting->cancel();
    auto got = collect(*reading);
    CHECK(got.reason == finish_reason::cancelled && got.tokens.empty());
    w->open();
    got = collect(*waiting);
    CHECK(got.reason == finish_reason::cancelled && got.tokens.empty());
    CHECK(collect(*other).reason != finish_reason::cancelled);
    // The rest of what was read of it serves the next one, and the answer is right.
    CHECK_ANSWER(collect(*e->submit(ask(prompt))), reference(ask(prompt), *w));
    // While it generates: the step of both is not stopped, and the other one goes on.
    const auto long_a = prompt_with_answer(rng, *w, 20, 15), long_b = prompt_with_answer(rng, *w, 20, 15);
    w->shut();
    auto a = e->submit(ask(long_a)), b = e->submit(ask(long_b));
    for (int i = 0; i < 6; ++i) {
        w->let_one_pass();
    }
    const int64_t n_failed = w->n_failed;
    a->cancel();
    w->open();
    got = collect(*a);
    CHECK(got.reason == finish_reason::cancelled);
    CHECK(!got.tokens.empty() && begins_with(reference(ask(long_a), *w).tokens, got.tokens));
    CHECK_ANSWER(collect(*b), reference(ask(long_b), *w));
    CHECK_EQ(w->n_failed.load(), n_failed);
    a->cancel();  // after the end: nothing happens
    // What the cancelled one had is kept.
    const auto next = collect(*e->submit(ask(long_a + got.tokens)));
    CHECK(next.times.n_cached >= static_cast<int64_t>(20 + got.tokens.size() - 1));
    CHECK_ANSWER(next, reference(ask(long_a + got.tokens), *w));
    CHECK_WORLD(*w);
}

void test_deadlines() {
    std::mt19937 rng(7);
    auto w = make_world();
    auto e = make_engine(w, params_of(*w, 1));
    w->shut();
    auto r          = ask(prompt_with_answer(rng, *w, 200, 3));
    r.max_prompt_ms = 20;
    auto reading    = e->submit(r);
    w->wait_for_pass_at_gate();
    auto waiting    = e->submit(r);
    std::this_thread::sleep_for(std::chrono::milliseconds(25));
    w->open();
    CHECK(collect(*reading).failure == error_code::deadline);
    CHECK(collect(*waiting).failure == error_code::deadline);
    r.max_prompt_ms  = 60'000;
    r.max_predict_ms = 0;
    const auto got   = collect(*e->submit(r));
    CHECK(got.reason == finish_reason::length);
    CHECK_EQ(got.tokens.size(), 1u);
    CHECK_WORLD(*w);
}

// Chunks of a prompt while others generate: no longer than max_stall_ms allows, and in turns with the steps.
void test_stall() {
    std::mt19937 rng(8);
    auto w = make_world();
    w->token_us = 50;
    w->n_ubatch = 128;
    w->n_ctx    = 2000;
    auto p = params_of(*w, 2);
    p.max_stall_ms = 2;  // 40 tokens
    auto e = make_engine(w, p);
    collect(*e->submit(ask(random_tokens(rng, 128), 0)));  // measured
    request endless = ask(random_tokens(rng, 5));
    endless.sampling.logit_bias = {{eog_token, -100.0f}};
    auto a = e->submit(endless);
    std::vector<lfmfast::piece> pieces;
    a->wait(10'000, pieces);
    w->take_calls();
    const auto got = collect(*e->submit(ask(random_tokens(rng, 400), 0)));
    a->cancel();
    collect(*a);
    size_t n_read = 0, n_chunks = 0;
    bool   prompt_last = false;
    for (const auto & c : w->take_calls()) {
        const bool prompt = c.n_tokens > 2;
        CHECK(c.n_tokens <= 60);  // the last chunk may be half as long again
        CHECK(!(prompt && prompt_last));
        prompt_last = prompt;
        n_read += prompt ? c.n_tokens : 0;
        n_chunks += prompt ? 1 : 0;
    }
    CHECK(n_read > 390);
    CHECK(n_chunks >= 10);
    CHECK_WORLD(*w);
}

class even_only : public lfmfast::token_filter {
  public:
    bool allows(int32_t token) override { return token % 2 == 0; }
    void apply(float * logits, int32_t n) override {
        for (int32_t t = 1; t < n; t += 2) {
            logits[t] = -std::numeric_limits<float>::infinity();
        }
    }
    void restart() override { n_ = 0; }
    bool is_over() const override { return false; }
    void accept(int32_t token) override {
        if (++n_ > 3 && breaks) {
            throw error(error_code::invalid_argument, "token " + std::to_string(token) + " breaks it");
        }
    }
    bool breaks = false;

  private:
    int n_ = 0;
};

void test_filter() {
    std::mt19937 rng(11);
    auto w = make_world();
    auto e = make_engine(w, params_of(*w, 2));
    auto r = ask(prompt_with_answer(rng, *w, 20, 6), 10);
    const auto plain = e->submit(r);
    auto filter = std::make_shared<even_only>();
    r.guide.constraint = filter;
    const auto filtered = collect(*e->submit(r));
    CHECK(!filtered.tokens.empty() || filtered.reason == finish_reason::stop);
    CHECK(std::all_of(filtered.tokens.begin(), filtered.tokens.end(), [](int32_t t) { return t % 2 == 0; }));
    filter         = std::make_shared<even_only>();
    filter->breaks = true;
    r.guide.constraint = filter;
    r.sampling.logit_bias = {{eog_token, -100.0f}};
    CHECK(collect(*e->submit(r)).failure == error_code::invalid_argument);
    r.guide.constraint.reset();
    r.sampling.logit_bias.clear();
    CHECK_ANSWER(collect(*plain), reference(r, *w));
    CHECK_WORLD(*w);
}

// More places when requests wait; when there is no memory for them, it goes on with those it has.
void test_growth() {
    std::mt19937 rng(12);
    for (const bool fails : {false, true}) {
        auto w = make_world();
        auto e = make_engine(w, params_of(*w, 1, 8));
        w->make_fails = fails;
        const auto chat = prompt_with_answer(rng, *w, 60, 5);
        const auto answer = collect(*e->submit(ask(chat)));
        std::vector<request>    requests;
        std::vector<stream_ptr> streams;
        w->shut();
        for (int i = 0; i < 12; ++i) {
            requests.push_back(ask(prompt_with_answer(rng, *w, 20 + rng() % 50, 8)));
            streams.push_back(e->submit(requests.back()));
            if (i < 5) {
                w->let_one_pass();
            }
        }
        w->open();
        for (size_t i = 0; i < streams.size(); ++i) {
            CHECK_ANSWER(collect(*streams[i]), reference(requests[i], *w));
        }
        CHECK_EQ(e->stats().n_slots, fails ? 1 : 8);
        const auto more = ask(chat + answer.tokens + random_tokens(rng, 5));
        const auto got  = collect(*e->submit(more));  // what an idle place held moved too
        CHECK_ANSWER(got, reference(more, *w));
        CHECK_EQ(got.times.n_cached, static_cast<int64_t>(chat.size() + answer.tokens.size()));
        CHECK_EQ(w->n_extra_ubatches.load(), 0);
        CHECK_WORLD(*w);
    }
}

}  // namespace

int main() {
    test_answers();
    test_limits();
    test_identical_prompts();
    test_shared_prefix();
    test_conversation();
    test_fork();
    test_reuse();
    test_priority_and_queue();
    test_cancel();
    test_deadlines();
    test_stall();
    test_filter();
    test_growth();
    return check::failures == 0 ? 0 : 1;
}
