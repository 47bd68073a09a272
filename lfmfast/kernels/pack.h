#pragma once

#include "kernels/kernels.h"

// Packed weights: 32 rows of one matrix, interleaved. A block of a GGUF row is some 32-bit words, and for some types a 16-bit
// scale. In a panel, word w of the 32 rows lies together in 128 bytes, and the scales follow behind all words. So packing only
// moves data, can be undone, and takes no more memory, up to padding: rows to a multiple of 32, a panel to one of 64 bytes.
namespace lfmfast::kernels {

struct block_layout {
    int n_values;     // of a block in the GGUF file
    int n_bytes;
    int n_words;
    int words_at;     // offsets in bytes
    int scale_at;     // of the 16-bit scale; -1: it is in the words
};

const block_layout & layout(weight_type type);

// Bytes of a panel of rows of `k` values, a multiple of the type's n_values.
size_t panel_bytes(weight_type type, int64_t k);

// Packs `n_rows` <= 32 consecutive GGUF rows; missing ones become zeros.
void pack_panel(weight_type type, int64_t k, const uint8_t * rows, int n_rows, uint8_t * panel);

// GGUF rows of a panel again: `n_rows` of them from `first`.
void unpack_rows(weight_type type, int64_t k, const uint8_t * panel, int first, int n_rows, uint8_t * rows);

}  // namespace lfmfast::kernels
