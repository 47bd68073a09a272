// The engine called by many threads, closed while requests run, and the mailbox of one consumer of many streams.
#include "fake_engine.h"

#include <set>
#include <thread>

#ifndef _WIN32
#include <unistd.h>
#endif

using namespace fake;

namespace {

// A request that does not end by itself before the context is full.
request endless(std::mt19937 & rng, size_t n_prompt) {
    auto r = ask(random_tokens(rng, n_prompt));
    r.sampling.logit_bias = {{eog_token, -100.0f}};
    return r;
}

void test_many_threads() {
    auto w = std::make_shared<world>();
    auto p = params_of(*w, 2, 6);
    p.cache_bytes       = 60'000;
    p.checkpoint_tokens = 16;
    p.n_threads         = 2;
    auto e = make_engine(w, p);
    std::mt19937 rng(1);
    const auto   prefix = random_tokens(rng, 80);
    std::atomic<int> n_left{4}, n_wrong{0};
    const auto ask_some = [&](uint32_t seed) {
        std::mt19937 mine(seed);
        for (int i = 0; i < 40; ++i) {
            const auto r = ask(head(prefix, mine() % 80) + random_tokens(mine, 1 + mine() % 20), 12, i % 2 ? 1.0f : 0.0f, seed);
            const auto s = e->submit(r);
            const bool cancels = mine() % 4 == 0;
            std::thread canceller;
            if (cancels) {
                canceller = std::thread([&] { s->cancel(); });
            }
            const auto got  = collect(*s);
            const auto want = reference(r, *w);
            const bool good = got.reason == finish_reason::cancelled ? cancels && begins_with(want.tokens, got.tokens)
                                                                     : got.tokens == want.tokens && got.text == want.text;
            n_wrong += good ? 0 : 1;
            if (cancels) {
                canceller.join();
            }
        }
        --n_left;
    };
    const auto command = [&](uint32_t seed) {
        std::mt19937 mine(seed);
        while (n_left > 0) {
            try {
                const auto saved = e->save(head(prefix, 60));
                e->load(saved, mine() % 2 == 0);
                e->unpin(saved.tokens);
            } catch (const error & failure) {
                n_wrong += failure.code == error_code::state ? 0 : 1;
            }
            if (mine() % 4 == 0) {
                e->forget();
            }
            n_wrong += e->stats().n_running <= 6 ? 0 : 1;
            std::this_thread::sleep_for(std::chrono::microseconds(mine() % 500));
        }
    };
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < 4; ++i) {
        threads.emplace_back(ask_some, i);
    }
    threads.emplace_back(command, 10);
    threads.emplace_back(command, 11);
    for (auto & t : threads) {
        t.join();
    }
    CHECK_EQ(n_wrong.load(), 0);
    CHECK_EQ(e->stats().n_running, 0);
    CHECK_WORLD(*w);
}

// Closed at any moment: every stream ends, as cancelled unless it was done, and nobody waits for ever.
void test_close() {
    std::mt19937 rng(2);
    for (int round = 0; round < 40; ++round) {
        auto w = std::make_shared<world>();
        w->pass_us = round % 3 == 0 ? 300 : 0;
        auto e = make_engine(w, params_of(*w, 2, round % 2 ? 4 : 2));
        std::vector<request>    requests;
        std::vector<stream_ptr> streams;
        for (int i = 0; i < 8; ++i) {
            requests.push_back(endless(rng, 1 + rng() % 150));
            streams.push_back(e->submit(requests.back()));
        }
        const bool by_destructor = round % 5 == 4;
        if (round % 4 == 0 && !by_destructor) {
            w->shut();
        }
        std::atomic<bool> closed{false};
        std::vector<std::thread> threads;
        threads.emplace_back([&] {
            while (!closed) {
                try {
                    e->forget();
                    (void) e->stats();
                } catch (const error & failure) {
                    CHECK(failure.code == error_code::closed);
                    break;
                }
            }
        });
        std::this_thread::sleep_for(std::chrono::microseconds(rng() % 3000));
        if (by_destructor) {  // with no other thread around
            closed = true;
            threads[0].join();
            threads.clear();
            e.reset();
        } else {
            threads.emplace_back([&] { e->close(); });
            e->close();
            closed = true;
        }
        for (auto & t : threads) {
            t.join();
        }
        for (size_t i = 0; i < streams.size(); ++i) {
            const auto got = collect(*streams[i]);
            CHECK(got.reason == finish_reason::cancelled || got.reason == finish_reason::length);
            CHECK(begins_with(reference(requests[i], *w).tokens, got.tokens));
            streams[i]->cancel();
        }
        if (e) {
            CHECK_THROWS(closed, e->submit(ask({9})));
            CHECK_THROWS(closed, e->forget());
            e->close();
        }
        CHECK_WORLD(*w);
    }
}

// Streams outlive their engine.
void test_pieces_after_close() {
    std::mt19937 rng(3);
    auto w = std::make_shared<world>();
    auto e = make_engine(w, params_of(*w, 1));
    const auto r = ask(random_tokens(rng, 20));
    auto s = e->submit(r);
    while (e->stats().n_requests == 0 || e->stats().n_running > 0) {
        std::this_thread::yield();
    }
    e.reset();
    CHECK_ANSWER(collect(*s), reference(r, *w));
}

void test_mailbox() {
    int ends[2] = {-1, -1};
#ifndef _WIN32
    CHECK_EQ(pipe(ends), 0);
#endif
    const auto n_bytes = [&] {
        uint64_t bytes[64];
        return ends[0] < 0 ? 8 : static_cast<int>(read(ends[0], bytes, sizeof(bytes)));
    };
    lfmfast::mailbox      box(ends[1]);
    std::vector<uint64_t> ids = {99};
    CHECK(box.wait(0, ids));
    CHECK(ids.empty());
    for (const uint64_t id : {3, 1, 3, 2, 1}) {
        box.post(id);
    }
    CHECK_EQ(n_bytes(), 8);  // one for all of them
    CHECK(box.wait(0, ids));
    CHECK(ids == (std::vector<uint64_t>{3, 1, 2}));
    box.put(4);
    box.put(5);
    box.ring();
    box.ring();
    CHECK_EQ(n_bytes(), 8);
    CHECK(box.wait(0, ids));
    CHECK(ids == (std::vector<uint64_t>{4, 5}));
    box.ring();  // for nothing
    box.post(7);
    CHECK_EQ(n_bytes(), 8);
    box.close();
    box.post(8);
    CHECK(box.wait(0, ids));  // what was there before
    CHECK(ids == std::vector<uint64_t>{7});
    CHECK(!box.wait(0, ids));

    // Of many streams: who looks only where the mailbox points gets all of them to their ends.
    std::mt19937 rng(4);
    auto w = std::make_shared<world>();
    auto e = make_engine(w, params_of(*w, 4));
    auto inbox = std::make_shared<lfmfast::mailbox>(ends[1]);
    std::vector<request>    requests;
    std::vector<stream_ptr> streams;
    std::vector<std::string> texts(20);
    std::set<uint64_t>       open;
    for (uint64_t i = 0; i < 20; ++i) {
        requests.push_back(ask(random_tokens(rng, 5 + rng() % 40), 15));
        requests.back().inbox    = inbox;
        requests.back().inbox_id = i;
        streams.push_back(e->submit(requests.back()));
        open.insert(i);
    }
    int n_waits = 0, n_written = 0;
    const int64_t limit = lfmfast::now_us() + 60'000'000;
    while (!open.empty() && lfmfast::now_us() < limit) {
        n_written += n_bytes();  // blocks until there is news
        CHECK(inbox->wait(0, ids));
        ++n_waits;
        CHECK(std::set<uint64_t>(ids.begin(), ids.end()).size() == ids.size());
        for (const uint64_t id : ids) {
            std::vector<lfmfast::piece> pieces;
            const bool ended = streams[id]->wait(0, pieces);
            for (const auto & piece : pieces) {
                texts[id] += piece.text;
            }
            if (ended) {
                open.erase(id);
            }
        }
    }
    CHECK(open.empty());
    CHECK(n_written <= 8 * (n_waits + 1));
    const auto stats = e->stats();  // one for all streams of a pass, and one for each end
    CHECK(n_written <= 8 * (stats.n_steps + stats.n_prompt_passes + 20));
    for (size_t i = 0; i < texts.size(); ++i) {
        CHECK_EQ(texts[i], reference(requests[i], *w).text);
    }
    inbox->close();
    e->close();
    CHECK_WORLD(*w);
#ifndef _WIN32
    close(ends[0]);
    close(ends[1]);
#endif
}

}  // namespace

int main() {
    test_many_threads();
    test_close();
    test_pieces_after_close();
    test_mailbox();
    return check::failures == 0 ? 0 : 1;
}
