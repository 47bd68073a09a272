#include "engine/batch.h"

#include "engine/decoder.h"
#include "engine/error.h"

#include <algorithm>
#include <chrono>

namespace lfmfast {

void check_range(const char * name, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high) {
        throw error(error_code::invalid_argument, std::string(name) + " must be between " + std::to_string(low) + " and " +
                    std::to_string(high) + ", not " + std::to_string(value), value, value < low ? low : high);
    }
}

int64_t now_us() {
    return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

batch::batch(int64_t n_tokens_max, int64_t n_seq_max) {
    check_range("n_tokens_max", n_tokens_max, 1, n_tokens_limit);
    check_range("n_seq_max", n_seq_max, 1, n_seq_limit);
    capacity_  = static_cast<size_t>(n_tokens_max);
    n_seq_max_ = static_cast<size_t>(n_seq_max);
}

void batch::add(int64_t token, int64_t pos, const std::vector<int64_t> & seq_ids, bool output) {
    if (tokens_.size() == capacity_) {
        throw error(error_code::invalid_argument, "the batch is full: it holds " + std::to_string(capacity_) + " tokens",
                    static_cast<int64_t>(capacity_) + 1, static_cast<int64_t>(capacity_));
    }
    check_range("token", token, 0, INT32_MAX);
    check_range("pos", pos, 0, INT32_MAX - 1);
    check_range("number of sequence ids of a token", static_cast<int64_t>(seq_ids.size()), 1, static_cast<int64_t>(n_seq_max_));
    std::vector<int32_t> ids;
    for (const int64_t seq : seq_ids) {
        check_range("seq_id", seq, 0, n_seq_limit - 1);
        if (std::find(ids.begin(), ids.end(), static_cast<int32_t>(seq)) != ids.end()) {
            throw error(error_code::invalid_argument, "seq_id " + std::to_string(seq) + " is named twice for one token", seq);
        }
        ids.push_back(static_cast<int32_t>(seq));
    }
    tokens_.push_back(static_cast<int32_t>(token));
    positions_.push_back(static_cast<int32_t>(pos));
    seq_ids_.push_back(std::move(ids));
    outputs_.push_back(output ? 1 : 0);
}

void batch::clear() {
    tokens_.clear();
    positions_.clear();
    seq_ids_.clear();
    outputs_.clear();
}

size_t batch::n_outputs() const {
    return static_cast<size_t>(std::count(outputs_.begin(), outputs_.end(), 1));
}

}  // namespace lfmfast
