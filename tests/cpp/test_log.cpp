// Log lines from many threads: whole lines, bounded, and each thread's own errors.
#include "check.h"
#include "engine/log.h"

#include <thread>

using namespace lfmfast;

namespace {

void lines_are_joined_and_filtered() {
    log_set_level(30);
    log_drain();
    log_message(30, false, "half ");
    log_message(30, true, "and half\n");
    log_message(20, false, "not wanted\n");
    log_message(40, false, "no newline");
    log_message(30, false, "\n");
    const auto lines = log_drain();
    CHECK_EQ(lines.size(), 2u);
    CHECK_EQ(lines.at(0).text, "half and half");
    CHECK_EQ(lines.at(0).level, 30);
    CHECK_EQ(lines.at(1).text, "no newline");
    CHECK_EQ(lines.at(1).level, 40);
    CHECK(log_drain().empty());
}

void errors_are_kept_for_exceptions() {
    log_set_level(50);
    log_clear_errors();
    log_message(40, false, "first\n");
    log_message(40, false, "second");
    std::thread([] {
        CHECK_EQ(log_last_errors(), "");  // another thread's
        log_message(40, false, "elsewhere\n");
    }).join();
    CHECK_EQ(log_last_errors(), "first; second");
    log_clear_errors();
    CHECK_EQ(log_last_errors(), "");
    for (int i = 0; i < 100; ++i) log_message(40, false, "x\n");
    CHECK(log_last_errors().size() < 100);
    CHECK(log_drain().empty());
    log_set_level(30);
}

void many_threads() {
    log_set_level(30);
    log_drain();
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
        threads.emplace_back([t] {
            const std::string text = std::to_string(t) + "-end\n";
            for (int i = 0; i < 500; ++i) {
                log_message(30, false, "line ");
                log_message(30, true, text.c_str());
            }
        });
    }
    size_t seen = 0;
    auto count = [&] {
        for (const auto & line : log_drain()) {
            ++seen;
            CHECK_EQ(line.text.size(), 10u);  // "line N-end"
        }
    };
    for (int i = 0; i < 50; ++i) count();
    for (auto & t : threads) t.join();
    count();
    CHECK_EQ(seen, 2000u);
    for (int i = 0; i < 100000; ++i) log_message(30, false, "flood\n");
    CHECK(log_drain().size() <= 10000);
}

}  // namespace

int main() {
    lines_are_joined_and_filtered();
    errors_are_kept_for_exceptions();
    many_threads();
    return check::failures != 0;
}
