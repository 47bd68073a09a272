// Log lines of llama.cpp and ggml: kept in a bounded queue until Python fetches them (native code never calls Python),
// and the last error lines of each thread, for the messages of exceptions.
#pragma once

#include <string>
#include <vector>

namespace lfmfast {

struct log_line {
    int         level;  // Python's: 10 debug, 20 info, 30 warning, 40 error
    std::string text;
};

// Called by the model side for every message of llama.cpp. A message may be a part of a line (`is_continuation`).
void log_message(int level, bool is_continuation, const char * text) noexcept;

// Lines below this level are dropped (errors are always kept for exceptions).
void log_set_level(int level) noexcept;

// The lines since the last call, oldest first.
std::vector<log_line> log_drain();

// Forgets, or joins, the error lines that llama.cpp logged on this thread.
void        log_clear_errors() noexcept;
std::string log_last_errors();

}  // namespace lfmfast
