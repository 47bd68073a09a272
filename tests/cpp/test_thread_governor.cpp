#include "engine/thread_governor.h"

#include "check.h"

using lfmfast::thread_governor;

namespace {

// A machine: a step takes `quiet` with all threads and twice that with half of them; when it is busy, waiting for threads that
// do not run makes it 40 times as long with all of them.
struct machine {
    thread_governor governor;
    int64_t         quiet = 20'000;
    bool            busy  = false;
    int64_t         total = 0;
    int             n_halved = 0;

    void steps(int n) {
        for (int i = 0; i < n; ++i) {
            const bool    halved = governor.halved();
            const int64_t us     = halved ? 2 * quiet : busy ? 40 * quiet : quiet;
            governor.measured(1, 1, us);
            total += us;
            n_halved += halved ? 1 : 0;
        }
    }
};

void test_quiet_machine_keeps_all_threads() {
    machine m;
    m.steps(1000);
    CHECK_EQ(m.n_halved, 0);
}

void test_busy_machine_gets_half() {
    machine m;
    m.steps(10);
    m.busy  = true;
    m.total = 0;
    m.steps(1000);
    CHECK(m.n_halved > 950);                   // a probe now and then
    CHECK(m.total < 1000 * 40 * m.quiet / 9);  // nine times less than it would have been
    m.busy = false;
    m.steps(70);
    m.n_halved = 0;
    m.steps(1000);
    CHECK_EQ(m.n_halved, 0);
}

// Steps that became slower for another reason (a long context) are not made slower still.
void test_slower_work_is_found_to_be_usual() {
    machine m;
    m.steps(10);
    m.quiet *= 6;
    m.steps(1000);
    CHECK(m.n_halved <= 4);
    m.quiet *= 6;
    m.steps(1000);
    CHECK(m.n_halved <= 8);
}

// A machine that is busy but gives all threads more than half of them would get.
void test_a_little_busy_keeps_all_threads() {
    thread_governor g;
    for (int i = 0; i < 500; ++i) {
        g.measured(1, 1, g.halved() ? 90'000 : i < 100 ? 20'000 : 55'000);
        CHECK(!g.halved());
    }
}

void test_one_slow_pass_changes_nothing() {
    thread_governor g;
    for (int i = 0; i < 200; ++i) {
        g.measured(1, 1, i % 10 == 9 ? 500'000 : 20'000);
        CHECK(!g.halved());
    }
}

void test_kinds_are_not_mixed() {
    thread_governor g;
    for (int i = 0; i < 200; ++i) {
        g.measured(1, 1, 20'000);
        g.measured(8, 1, 200'000);
        g.measured(1, 128, 1'000'000);
        CHECK(!g.halved());
    }
}

}  // namespace

int main() {
    test_quiet_machine_keeps_all_threads();
    test_busy_machine_gets_half();
    test_slower_work_is_found_to_be_usual();
    test_a_little_busy_keeps_all_threads();
    test_one_slow_pass_changes_nothing();
    test_kinds_are_not_mixed();
    return check::failures;
}
