#include "kernels/pack.h"

#include <cstring>

namespace lfmfast::kernels {

namespace {

// One panel and the GGUF rows it is made of, block by block.
struct panel_view {
    const block_layout & block;
    int64_t              n_blocks;

    panel_view(weight_type type, int64_t k) : block(layout(type)), n_blocks(k / block.n_values) {}

    size_t row_bytes() const { return static_cast<size_t>(n_blocks) * block.n_bytes; }
    size_t word_offset(int64_t b) const { return static_cast<size_t>(b) * block.n_words * panel_rows * 4; }
    size_t scale_offset(int64_t b) const { return word_offset(n_blocks) + static_cast<size_t>(b) * panel_rows * 2; }
};

}  // namespace

const block_layout & layout(weight_type type) {
    static constexpr block_layout layouts[] = {
        {32, 18, 4, 2, 0},         // q4_0: scale, 16 bytes of two values
        {32, 34, 8, 2, 0},         // q8_0: scale, 32 bytes
        {256, 144, 36, 0, -1},     // q4_k: two scales, 12 bytes of sub-scales and minima, 128 bytes of two values
        {256, 176, 44, 0, -1},     // q5_k: the same, with 32 bytes of fifth bits before the values
        {256, 210, 52, 0, 208},    // q6_k: 128 bytes of low bits, 64 of high bits, 16 sub-scales, scale
    };
    return layouts[static_cast<int>(type)];
}

size_t panel_bytes(weight_type type, int64_t k) {
    const panel_view view(type, k);
    const size_t     used = view.block.scale_at < 0 ? view.word_offset(view.n_blocks) : view.scale_offset(view.n_blocks);
    return (used + 63) / 64 * 64;
}

void pack_panel(weight_type type, int64_t k, const uint8_t * rows, int n_rows, uint8_t * panel) {
    const panel_view view(type, k);
    if (n_rows < panel_rows) memset(panel, 0, panel_bytes(type, k));
    for (int64_t b = 0; b < view.n_blocks; ++b) {
        const uint8_t * from = rows + b * view.block.n_bytes;
        uint8_t *       to   = panel + view.word_offset(b);
        for (int w = 0; w < view.block.n_words; ++w) {
            for (int r = 0; r < n_rows; ++r) {
                memcpy(to + (w * panel_rows + r) * 4, from + r * view.row_bytes() + view.block.words_at + w * 4, 4);
            }
        }
        if (view.block.scale_at < 0) continue;
        for (int r = 0; r < n_rows; ++r) {
            memcpy(panel + view.scale_offset(b) + r * 2, from + r * view.row_bytes() + view.block.scale_at, 2);
        }
    }
}

void unpack_rows(weight_type type, int64_t k, const uint8_t * panel, int first, int n_rows, uint8_t * rows) {
    const panel_view view(type, k);
    for (int64_t b = 0; b < view.n_blocks; ++b) {
        uint8_t *       to   = rows + b * view.block.n_bytes;
        const uint8_t * from = panel + view.word_offset(b);
        for (int r = 0; r < n_rows; ++r) {
            uint8_t * block = to + r * view.row_bytes();
            for (int w = 0; w < view.block.n_words; ++w) {
                memcpy(block + view.block.words_at + w * 4, from + (w * panel_rows + first + r) * 4, 4);
            }
            if (view.block.scale_at < 0) continue;
            memcpy(block + view.block.scale_at, panel + view.scale_offset(b) + (first + r) * 2, 2);
        }
    }
}

}  // namespace lfmfast::kernels
