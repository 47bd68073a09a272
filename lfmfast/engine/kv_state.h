// The attention memory of one sequence, out of and into the bytes of llama_state_seq_get_data, so that a range of tokens can
// be kept and put together again. Pure: no llama.h. The layout is that of llama_kv_cache::state_write of the pinned source;
// every field is checked, and a state that does not look like it is refused, never guessed at.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lfmfast {

// One tensor of the cache: the keys or the values of a layer.
struct kv_part {
    int32_t  type     = 0;  // ggml_type
    uint64_t row_size = 0;  // bytes of one token
    uint32_t el_size  = 0;  // bytes of an element if the values are transposed, else 0
    uint32_t n_embd   = 0;  // elements of a token if the values are transposed, else 0

    bool operator==(const kv_part & o) const {
        return type == o.type && row_size == o.row_size && el_size == o.el_size && n_embd == o.n_embd;
    }
};

// What is the same for all sequences of a context but n_stream, which is also the number of sequences unless kv_unified.
struct kv_layout {
    uint32_t             n_layer = 0;
    uint32_t             n_rot_k = 0;
    uint32_t             n_rot_v = 0;
    bool                 v_trans = false;  // values transposed (no flash attention)
    std::vector<kv_part> keys;
    std::vector<kv_part> values;

    size_t row_size() const;  // bytes of one token: its keys of all layers, then its values of all layers
    bool   operator==(const kv_layout & o) const;
    bool   operator!=(const kv_layout & o) const { return !(*this == o); }
};

struct kv_state {
    kv_layout            layout;
    std::vector<uint8_t> rows;       // row-major (n_tokens, layout.row_size()), by position from 0
    std::vector<uint8_t> recurrent;  // what follows in the state: the recurrent part of a hybrid model, else empty
    size_t               n_tokens = 0;
};

// Takes the bytes of a whole state (flags NONE) apart. `n_tokens`: how many the sequence must hold, at positions 0 to
// n_tokens - 1, in any order of cells. Only rows from `first_token` on are copied (rows then has n_tokens - first_token).
// Throws error_code::state for anything else: another number of tokens, other positions, sizes that do not add up, no
// attention cache (0 tokens included).
kv_state parse_kv_state(const std::vector<uint8_t> & state, size_t n_tokens, size_t first_token = 0);

// The number of streams, from the state of any sequence of a context, also an empty one. Throws error_code::state.
uint32_t kv_n_stream(const std::vector<uint8_t> & state);

// Some rows, one after another in memory: (n_tokens, row_size).
struct kv_rows {
    const uint8_t * data     = nullptr;
    size_t          n_tokens = 0;
};

// The bytes of a whole state for a context with n_stream streams: tokens at positions 0 .. sum of n_tokens - 1.
// `partial`: a state with only the recurrent part (flags PARTIAL_ONLY), or empty for a model that has none.
// Throws error_code::state when partial is no such state, or there are no tokens.
std::vector<uint8_t> compose_kv_state(const kv_layout & layout, uint32_t n_stream, const std::vector<kv_rows> & rows,
                                      const std::vector<uint8_t> & partial);

// A PARTIAL_ONLY state of the recurrent part that parse_kv_state gave.
std::vector<uint8_t> partial_state(const std::vector<uint8_t> & recurrent);

// For files: the layout as bytes and back. Throws error_code::state for bytes that are none.
std::vector<uint8_t> layout_to_bytes(const kv_layout & layout);
kv_layout            layout_from_bytes(const std::vector<uint8_t> & bytes);

}  // namespace lfmfast
