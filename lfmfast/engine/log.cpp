#include "engine/log.h"

#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>

namespace lfmfast {

namespace {

constexpr size_t max_lines  = 4096;
constexpr size_t max_errors = 8;
constexpr int    debug_level = 10, warning_level = 30, error_level = 40;

std::atomic<int>       min_level{30};
std::mutex             mutex;
std::deque<log_line> & lines() {  // never destroyed: a backend may log while the process exits
    static auto * queue = new std::deque<log_line>;
    return *queue;
}

struct thread_log {
    log_line                pending{20, ""};
    std::deque<std::string> errors;
};
thread_local thread_log local;

void finish_line() {
    log_line line = std::move(local.pending);
    local.pending = {line.level, ""};
    while (!line.text.empty() && (line.text.back() == '\n' || line.text.back() == '\r')) {
        line.text.pop_back();
    }
    if (line.text.empty()) {
        return;
    }
    if (line.level >= error_level) {
        if (local.errors.size() == max_errors) {
            local.errors.pop_front();
        }
        local.errors.push_back(line.text);
    }
    if (line.level >= min_level.load(std::memory_order_relaxed)) {
        std::lock_guard<std::mutex> lock(mutex);
        if (lines().size() == max_lines) {
            lines().pop_front();
        }
        lines().push_back(std::move(line));
    }
}

}  // namespace

void log_message(int level, bool is_continuation, const char * text) noexcept {
    // Said of every LFM2 without flash attention; the layers that differ have no attention at all.
    if (level == warning_level && std::strstr(text, "V embeddings have different sizes across layers") != nullptr) {
        level = debug_level;
    }
    try {
        if (!is_continuation) {
            finish_line();
            local.pending.level = level;
        }
        local.pending.text += text;
        if (!local.pending.text.empty() && local.pending.text.back() == '\n') {
            finish_line();
        }
    } catch (...) {  // no memory for a log line: lose the line
    }
}

void log_set_level(int level) noexcept {
    min_level.store(level, std::memory_order_relaxed);
}

std::vector<log_line> log_drain() {
    std::lock_guard<std::mutex> lock(mutex);
    std::vector<log_line> out(std::make_move_iterator(lines().begin()), std::make_move_iterator(lines().end()));
    lines().clear();
    return out;
}

void log_clear_errors() noexcept {
    local.errors.clear();
}

std::string log_last_errors() {
    finish_line();
    std::string joined;
    for (const auto & line : local.errors) {
        joined += (joined.empty() ? "" : "; ") + line;
    }
    return joined;
}

}  // namespace lfmfast
