#pragma once

#include <cstddef>
#include <cstdint>

// Matrix products of quantised weights with rows of float32, on packed weights. No llama.h, no ggml.
//
// Weights are packed in panels of 32 rows (pack.h). A product walks along K in blocks of 256: it unpacks a panel's block to
// bytes in the L1 cache, and multiplies it with a tile of rows, themselves quantised to 8 bits (act_block). The arithmetic of
// one (weight row, row) pair is the same whatever else is in the call.
namespace lfmfast::kernels {

constexpr int panel_rows = 32;
constexpr int block_k    = 256;

enum class weight_type { q4_0, q8_0, q4_k, q5_k, q6_k };

// 256 values of one row, quantised for one type of weights: value = d * q. Blocks past the end of a row are not read.
struct alignas(64) act_block {
    int8_t  q[block_k];
    float   d[8];     // a scale for each 32 values (q4_0, q8_0); for all 256 in d[0] (K types)
    int32_t sum[16];  // of q, as a kernel needs them (product.h)
    int32_t unused[8];
};
static_assert(sizeof(act_block) == 384);

// Attention of one row's query heads that share their keys and values. Strides in numbers, of one head or cell to the next.
struct attention {
    int              head_size;  // 64 or 128
    int              n_heads;
    int64_t          n_cells;
    const float *    q;
    int64_t          q_stride;
    const void *     k;  // float16
    int64_t          k_stride;
    const void *     v;
    int64_t          v_stride;
    const uint16_t * mask;  // float16, added to the scores; minus infinity: a cell that is not read. Null: none
    float            scale;
    float *          out;
    int64_t          out_stride;
};

// One instruction set.
struct kernel_set {
    const char * name;

    // Quantises `n` <= 256 values (a multiple of 32) of a row.
    void (*quantize)(weight_type type, const float * x, int n, act_block * out);

    // out[i][r] = sum over k of weight row r of the panel times row i, for `n` rows. Block b of row i is acts[b * stride + i].
    // Where out[i] will be copied to, places[i], is meanwhile brought to the cache; null if that is of no use.
    void (*panel_product)(weight_type type, const uint8_t * panel, int64_t k, const act_block * acts, int64_t stride, int n,
                          float (*out)[panel_rows], const char * const * places);

    // out = softmax(scale * q * k + mask) * v, each head by itself, cell after cell; zeros where no cell is read.
    void (*attend)(const attention & a);
};

// The sets that this library was built with and this CPU has, best first; null at the end.
const kernel_set * const * available();

// The set that LFMFAST_KERNELS names, the best one if it names none, or null: "0" or no set for this CPU.
const kernel_set * active();

extern const kernel_set amx;
extern const kernel_set avx512vnni;
extern const kernel_set avxvnni;
extern const kernel_set avx2;
extern const kernel_set i8mm;
extern const kernel_set dotprod;

}  // namespace lfmfast::kernels
