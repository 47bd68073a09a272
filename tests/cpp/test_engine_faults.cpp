// The engine when things go wrong: passes that fail, states that can't be put back, no memory.
#include "fake_engine.h"

#include <thread>

using namespace fake;

namespace {

// A pass that fails: everybody of it tries again alone, and only who fails alone ends.
void test_failures() {
    std::mt19937 rng(9);
    for (const bool can_cut : {false, true}) {
        auto w     = std::make_shared<world>();
        w->can_cut = can_cut;
        w->poison  = true;
        auto e = make_engine(w, params_of(*w, 4));
        std::vector<request>    requests;
        std::vector<stream_ptr> streams;
        w->shut();
        for (uint32_t i = 0; i < 40; ++i) {
            requests.push_back(ask(random_tokens(rng, 10 + rng() % 60), -1, 1.5f, i));
            streams.push_back(e->submit(requests.back()));
        }
        w->open();
        int n_failed = 0;
        for (size_t i = 0; i < streams.size(); ++i) {
            const auto got  = collect(*streams[i]);
            const auto want = reference(requests[i], *w);
            const auto n_fail = std::min(want.n_nan, want.n_poison);
            if (n_fail == SIZE_MAX) {
                CHECK_ANSWER(got, want);
                continue;
            }
            ++n_failed;
            CHECK(got.failure == (want.n_nan < want.n_poison ? error_code::sampling : error_code::decode));
            CHECK_EQ(shown(got.tokens), shown(head(want.tokens, n_fail)));
        }
        CHECK(n_failed > 5 && n_failed < 35);
        CHECK_EQ(e->stats().n_running, 0);
        CHECK_WORLD(*w);
    }
}

// Whatever can't be put back is read again; nobody notices.
void test_states_refused() {
    std::mt19937 rng(10);
    for (const bool rm : {false, true}) {
        auto w = std::make_shared<world>();
        auto e = make_engine(w, params_of(*w, 2, 8));
        const auto prefix = random_tokens(rng, 80);
        std::vector<request> requests;
        for (int i = 0; i < 24; ++i) {
            requests.push_back(ask(head(prefix, 40 + rng() % 40) + random_tokens(rng, 1 + rng() % 20)));
        }
        for (int round = 0; round < 3; ++round) {
            (rm ? w->rm_faults : w->set_faults) = round == 1 ? 1000 : 400;
            std::vector<stream_ptr> streams;
            for (const auto & r : requests) {
                streams.push_back(e->submit(r));
            }
            for (size_t i = 0; i < streams.size(); ++i) {
                CHECK_ANSWER(collect(*streams[i]), reference(requests[i], *w));
            }
        }
        CHECK_WORLD(*w);
    }
}

// Without memory requests end with that error; none is lost, and later ones get their answers.
void test_no_memory() {
    std::mt19937 rng(13);
    for (int round = 0; round < 20; ++round) {
        auto w = std::make_shared<world>();
        auto e = make_engine(w, params_of(*w, 2, round % 2 ? 8 : 2));
        const auto prefix = random_tokens(rng, 60);
        w->get_faults = 100;
        int n_failed = 0;
        for (const bool again : {false, true}) {
            std::vector<request>    requests;
            std::vector<stream_ptr> streams;
            for (int i = 0; i < 10; ++i) {
                requests.push_back(ask(head(prefix, rng() % 60) + random_tokens(rng, 1 + rng() % 60)));
                streams.push_back(e->submit(requests.back()));
            }
            for (size_t i = 0; i < streams.size(); ++i) {
                const auto got = collect(*streams[i]);
                if (again || got.failure != error_code::out_of_memory) {
                    CHECK_ANSWER(got, reference(requests[i], *w));
                } else {
                    ++n_failed;
                }
            }
            w->get_faults = 0;
        }
        CHECK(round > 0 || n_failed > 0);
        CHECK_EQ(e->stats().n_running, 0);
        CHECK_WORLD(*w);
    }
}

}  // namespace

int main() {
    test_failures();
    test_states_refused();
    test_no_memory();
    return check::failures == 0 ? 0 : 1;
}
