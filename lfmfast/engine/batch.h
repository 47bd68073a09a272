// Tokens for one decode call, as llama_batch has them. Pure: no llama.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lfmfast {

constexpr int64_t n_seq_limit    = 256;               // LLAMA_MAX_SEQ; context.cpp checks that it is
constexpr int64_t n_tokens_limit = int64_t(1) << 24;  // far above any model; keeps sizes from overflowing 32 bits

void check_range(const char * name, int64_t value, int64_t low, int64_t high);  // throws invalid_argument

class batch {
  public:
    batch(int64_t n_tokens_max, int64_t n_seq_max);

    // Throws invalid_argument when the batch is full or a number is out of its limits.
    void add(int64_t token, int64_t pos, const std::vector<int64_t> & seq_ids, bool output);
    void clear();

    size_t size() const { return tokens_.size(); }
    size_t capacity() const { return capacity_; }
    size_t n_outputs() const;

    const std::vector<int32_t> &              tokens() const { return tokens_; }
    const std::vector<int32_t> &              positions() const { return positions_; }
    const std::vector<std::vector<int32_t>> & seq_ids() const { return seq_ids_; }
    const std::vector<int8_t> &               outputs() const { return outputs_; }

  private:
    size_t                            capacity_;
    size_t                            n_seq_max_;
    std::vector<int32_t>              tokens_;
    std::vector<int32_t>              positions_;
    std::vector<std::vector<int32_t>> seq_ids_;
    std::vector<int8_t>               outputs_;
};

}  // namespace lfmfast
