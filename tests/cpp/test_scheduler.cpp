// What the scheduler gives in known situations, and what must hold in all of them.
#include "check.h"
#include "engine/scheduler.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>

using namespace lfmfast;
using ids_t   = std::vector<int32_t>;
using sizes_t = std::vector<size_t>;

namespace {

sequence_view generating(int32_t id, uint64_t order = 0) { return {id, 1, SIZE_MAX, order, false}; }
sequence_view reading(int32_t id, size_t n, uint64_t order, size_t n_to_cut = SIZE_MAX) {
    return {id, n, n_to_cut, order, false};
}

template <typename T> std::string shown(const std::vector<T> & values) {
    std::string out;
    for (const auto & v : values) {
        out += (out.empty() ? "" : " ") + std::to_string(v);
    }
    return out;
}

std::string shown(const std::vector<pass_item> & pass) {
    std::string out;
    for (const auto & item : pass) {
        out += (out.empty() ? "" : " ") + std::to_string(item.id) + ":" + std::to_string(item.n_tokens);
    }
    return out;
}

void test_next() {
    scheduler s(64, 250'000);
    CHECK_EQ(shown(s.next({})), "");
    CHECK_EQ(shown(s.next({generating(0), generating(1)})), "0:1 1:1");
    // Prompts: one at a time, the first that came, up to n_ubatch or its next cut.
    CHECK_EQ(shown(s.next({reading(0, 100, 2), reading(1, 100, 1)})), "1:64");
    CHECK_EQ(shown(s.next({reading(0, 100, 2), reading(1, 100, 1, 10)})), "1:10");
    CHECK_EQ(shown(s.next({reading(0, 2, 1)})), "0:2");
    // With others that generate, prompts and steps take turns.
    scheduler turns(64, 250'000);
    const std::vector<sequence_view> mixed = {generating(3, 1), reading(4, 200, 2)};
    CHECK_EQ(shown(turns.next(mixed)), "4:64");
    CHECK_EQ(shown(turns.next(mixed)), "3:1");
    CHECK_EQ(shown(turns.next(mixed)), "4:64");
    CHECK_EQ(shown(turns.next({generating(3, 1), generating(4, 2)})), "3:1 4:1");
    // A prompt between two that generate goes along with their steps, so that ids stay next to each other.
    scheduler between(64, 250'000);
    const std::vector<sequence_view> gap = {generating(0), reading(1, 50, 3), generating(2)};
    CHECK_EQ(shown(between.next(gap)), "1:50");
    CHECK_EQ(shown(between.next(gap)), "0:1 1:1 2:1");
    // As does one with little left to read, whose neighbour reads more.
    scheduler little(64, 250'000);
    const std::vector<sequence_view> end = {generating(0), reading(1, 50, 3), reading(2, 2, 4)};
    CHECK_EQ(shown(little.next(end)), "1:50");
    CHECK_EQ(shown(little.next(end)), "0:1 1:1 2:1");
    // After a failed pass: alone, before all else.
    sequence_view alone = reading(5, 70, 9);
    alone.alone         = true;
    CHECK_EQ(shown(turns.next({generating(3), reading(4, 5, 1), alone})), "5:64");
    alone.n_to_cut = 3;
    CHECK_EQ(shown(turns.next({generating(3), reading(4, 5, 1), alone})), "5:3");
}

void test_chunk_limit() {
    scheduler s(512, 250'000);
    CHECK_EQ(s.chunk_limit(false), 512u);
    CHECK_EQ(s.chunk_limit(true), 64u);  // nothing is known
    s.measured({{0, 64}}, 64 * 1000);    // 1 ms a token
    CHECK_EQ(s.chunk_limit(true), 250u);
    CHECK_EQ(s.chunk_limit(false), 512u);
    s.measured({{0, 1}}, 1'000'000);     // a step says nothing about prompts
    s.measured({{0, 1}, {1, 1}}, 1'000'000);
    s.measured({{0, 4}}, 1'000'000);
    CHECK_EQ(s.chunk_limit(true), 250u);
    for (int i = 0; i < 30; ++i) {
        s.measured({{0, 100}}, 100 * 100'000);
    }
    CHECK_EQ(s.chunk_limit(true), 16u);  // less would cost nearly as much
    for (int i = 0; i < 60; ++i) {
        s.measured({{0, 512}}, 512);
    }
    CHECK_EQ(s.chunk_limit(true), 512u);
    CHECK_EQ(scheduler(8, 1).chunk_limit(true), 8u);
}

// Sequences of all kinds, until all of them have generated something: what every pass must be.
void test_next_random() {
    std::mt19937 rng(5);
    for (int round = 0; round < 300; ++round) {
        const size_t n_ubatch = 16 + rng() % 100;
        scheduler    s(n_ubatch, 1 + static_cast<int64_t>(rng() % 300'000));
        struct one { size_t n_pending, n_left; uint64_t order; bool alone; std::set<size_t> cuts; };
        std::map<int32_t, one> all;
        const auto n = static_cast<int32_t>(1 + rng() % 12);
        for (int32_t id = 0; id < n; ++id) {
            one o{1 + rng() % (rng() % 3 ? 300 : 3), 1 + rng() % 20, rng() % 1000 * 16 + static_cast<uint64_t>(id), false, {}};
            o.alone = rng() % 40 == 0;
            for (size_t k = rng() % 4; k > 0; --k) {
                o.cuts.insert(1 + rng() % o.n_pending);
            }
            all[id] = o;
        }
        int n_prompts_in_a_row = 0;
        for (int pass = 0; !all.empty(); ++pass) {
            if (pass > 5000) {
                CHECK(!"it comes to an end");
                break;
            }
            std::vector<sequence_view> views;
            const sequence_view *      first = nullptr;
            bool generates = false, any_alone = false;
            for (const auto & [id, o] : all) {
                size_t to_cut = SIZE_MAX;
                for (const size_t at : o.cuts) {  // counted from the end
                    if (at < o.n_pending) {
                        to_cut = o.n_pending - at;
                    }
                }
                views.push_back({id, o.n_pending, to_cut, o.order, o.alone});
                generates = generates || (o.n_pending == 1 && !o.alone);
                any_alone = any_alone || o.alone;
            }
            for (const auto & v : views) {  // two tokens go along with the steps of others
                const bool reads = any_alone || v.n_pending > (generates ? 2 : 1);
                if (v.alone == any_alone && reads && (!first || v.order < first->order)) {
                    first = &v;
                }
            }
            const auto items = s.next(views);
            CHECK(!items.empty());
            size_t n_tokens = 0;
            for (size_t i = 0; i < items.size(); ++i) {
                const auto v = std::find_if(views.begin(), views.end(), [&](const auto & x) { return x.id == items[i].id; });
                CHECK(v != views.end());
                CHECK(items[i].n_tokens >= 1 && items[i].n_tokens <= std::min(v->n_pending, v->n_to_cut));
                CHECK(items.size() == 1 || items[i].n_tokens == 1);
                CHECK(i == 0 || items[i].id == items[i - 1].id + 1 || all.count(items[i - 1].id + 1) == 0);
                n_tokens += items[i].n_tokens;
            }
            CHECK(n_tokens <= n_ubatch || items.size() > 1);
            const bool prompt = std::none_of(items.begin(), items.end(),
                                             [&](const auto & x) { return all[x.id].n_pending == 1; });
            if (any_alone) {
                CHECK(items.size() == 1 && items[0].id == first->id);
            } else if (prompt) {
                CHECK_EQ(items[0].id, first->id);  // first come, first served
                CHECK(items[0].n_tokens <= s.chunk_limit(generates) * 3 / 2);
            } else {
                for (const auto & v : views) {  // nobody who generates is left out
                    const bool there = std::any_of(items.begin(), items.end(), [&](const auto & x) { return x.id == v.id; });
                    CHECK(v.n_pending > 1 || there);
                }
            }
            n_prompts_in_a_row = prompt && generates && !any_alone ? n_prompts_in_a_row + 1 : 0;
            CHECK(n_prompts_in_a_row <= 1);
            s.measured(items, static_cast<int64_t>(n_tokens * (rng() % 2000)));
            for (const auto & item : items) {
                one & o = all[item.id];
                o.n_pending -= item.n_tokens;
                if (o.n_pending == 0) {
                    o.alone     = false;
                    o.n_pending = 1;
                    if (--o.n_left == 0) {
                        all.erase(item.id);
                    }
                }
            }
        }
    }
}

void test_free_places() {
    CHECK_EQ(shown(free_places({}, 3)), "0 1 2");
    CHECK_EQ(shown(free_places({1}, 4)), "0 2");
    CHECK_EQ(shown(free_places({0, 1}, 2)), "");
    CHECK_EQ(shown(free_places({0, 1}, 4)), "2");
    CHECK_EQ(shown(free_places({2, 3}, 4)), "1");
    CHECK_EQ(shown(free_places({0, 2, 5}, 8)), "1 3 4");
}

// The moves that are needed, one after another; the number of tokens moved.
size_t close_all(std::map<int32_t, size_t> running, int & n_moves) {
    size_t n_moved = 0;
    for (n_moves = 0; n_moves < 1000; ++n_moves) {
        std::vector<sequence_size> sizes;
        for (const auto & [id, n] : running) {
            sizes.push_back({id, n});
        }
        const auto move = closing_move(sizes);
        if (!move) {
            const int32_t span = running.empty() ? 0 : running.rbegin()->first - running.begin()->first + 1;
            CHECK_EQ(span, static_cast<int32_t>(running.size()));
            break;
        }
        CHECK(running.count(move->from) == 1);
        CHECK(running.count(move->to) == 0);
        CHECK(move->to > running.begin()->first && move->to < running.rbegin()->first);
        n_moved += running[move->from];
        running[move->to] = running[move->from];
        running.erase(move->from);
    }
    return n_moved;
}

void test_closing_move() {
    CHECK(!closing_move({}));
    CHECK(!closing_move({{3, 1}}));
    CHECK(!closing_move({{3, 1}, {4, 1}, {5, 1}}));
    int n_moves = 0;
    CHECK_EQ(close_all({{0, 10}, {5, 20}}, n_moves), 10u);  // the shorter one, at once to where it belongs
    CHECK_EQ(n_moves, 1);
    CHECK_EQ(close_all({{0, 20}, {5, 10}}, n_moves), 10u);
    CHECK_EQ(n_moves, 1);
    CHECK_EQ(close_all({{0, 5}, {1, 50}, {3, 50}, {4, 9}}, n_moves), 5u);
    CHECK_EQ(n_moves, 1);
    std::mt19937 rng(3);
    for (int round = 0; round < 2000; ++round) {
        std::map<int32_t, size_t> running;
        for (size_t n = 1 + rng() % 8; running.size() < n;) {
            running[static_cast<int32_t>(rng() % 16)] = 1 + rng() % 100;
        }
        const size_t n_free = static_cast<size_t>(running.rbegin()->first - running.begin()->first) + 1 - running.size();
        close_all(running, n_moves);
        CHECK(static_cast<size_t>(n_moves) <= n_free);
    }
}

size_t n_passes(size_t n_held, size_t n_prompt, size_t n_ubatch, const sizes_t & cuts) {
    size_t n = 0;
    for (size_t at = n_held, k = 0; at < n_prompt; ++n) {
        while (k < cuts.size() && cuts[k] <= at) {
            ++k;
        }
        at = std::min({n_prompt, at + n_ubatch, k < cuts.size() ? cuts[k] : SIZE_MAX});
    }
    return n;
}

void test_choose_cuts() {
    CHECK_EQ(shown(choose_cuts(0, 100, 512, {0}, {})), "");
    CHECK_EQ(shown(choose_cuts(0, 100, 512, {0}, {50})), "50");
    CHECK_EQ(shown(choose_cuts(0, 100, 512, {0}, {10})), "");      // too little before it
    CHECK_EQ(shown(choose_cuts(0, 100, 512, {0}, {100, 200})), "");
    CHECK_EQ(shown(choose_cuts(0, 300, 512, {0, 200, 290}, {})), "200");  // before the last question
    CHECK_EQ(shown(choose_cuts(150, 300, 512, {200, 290}, {})), "");
    CHECK_EQ(shown(choose_cuts(0, 1000, 512, {0, 500, 900, 990}, {})), "500 900");
    std::mt19937 rng(4);
    for (int round = 0; round < 3000; ++round) {
        const size_t n_held = rng() % 200, n_prompt = n_held + 1 + rng() % 1500, n_ubatch = 1 + rng() % 600;
        sizes_t starts, branches;
        for (size_t at = n_held; at < n_prompt; ++at) {
            if (rng() % 60 == 0) {
                starts.push_back(at);
            }
        }
        for (size_t k = rng() % 4; k > 0; --k) {
            branches.push_back(rng() % 2000);
        }
        const auto cuts = choose_cuts(n_held, n_prompt, n_ubatch, starts, branches);
        sizes_t    asked_for;
        for (size_t i = 0; i < cuts.size(); ++i) {
            CHECK(cuts[i] > n_held && cuts[i] < n_prompt);
            CHECK(i == 0 || cuts[i] > cuts[i - 1]);
            const bool branch = std::count(branches.begin(), branches.end(), cuts[i]) > 0;
            const bool start  = std::count(starts.begin(), starts.end(), cuts[i]) > 0;
            CHECK(branch || start);
            if (branch || (starts.size() >= 2 && cuts[i] == starts[starts.size() - 2])) {
                asked_for.push_back(cuts[i]);
            }
        }
        for (const size_t at : branches) {
            CHECK(at < n_held + 32 || at >= n_prompt || std::binary_search(cuts.begin(), cuts.end(), at));
        }
        // The others are free.
        CHECK_EQ(n_passes(n_held, n_prompt, n_ubatch, cuts), n_passes(n_held, n_prompt, n_ubatch, asked_for));
    }
}

}  // namespace

int main() {
    test_next();
    test_chunk_limit();
    test_next_random();
    test_free_places();
    test_closing_move();
    test_choose_cuts();
    return check::failures == 0 ? 0 : 1;
}
