/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside the matrix products of the CUDA backend: how weights lie on the device, how activations are prepared, which
 * kernel multiplies how many rows, and how exact each is. linear_weights.c packs, linear.c decides and launches,
 * linear_library.c calls cuBLASLt; kernels: linear_prepare.cu, linear_blocks.cuh (how they read weights:
 * linear_format.cuh), linear_floats.cu, linear_halves.cu.
 *
 * Weights. A pass reads as many bytes as the file has (columns and rows rounded up as said here).
 *   float formats  [rows][pitch], row-major, pitch = columns rounded up to LINEAR_PITCH with zeros
 *   block formats  strips of LINEAR_STRIP rows (the last one is padded with zeros), a strip is one stream for cp.async:
 *                  blocks of 32 columns (steps), of K formats eight of them behind the head of their 256 columns
 *                    head  f16 d[32 rows], and f16 m[32 rows] of Q2_K, Q4_K, Q5_K
 *                    step  low bits of the codes, then the bits above them, then the scales (struct linear_layout)
 *   Codes. A lane 4 g + t of a warp takes columns 4 t .. 4 t + 3 and 16 + 4 t .. of row g (PTX ISA, mma.m16n8k32:
 *   the two registers of the second operand), so that bits lie in the order [32 rows][4 lanes]:
 *     8 bits  both registers
 *     4 bits  a word, whose byte i has columns 4 t + i and 16 + 4 t + i; of formats with a table its half-words have
 *             the four nibbles of a register each, as __byte_perm chooses by
 *     2 bits  a half-word: columns 4 t, 16 + 4 t, 4 t + 1, 16 + 4 t + 1 in the first byte, the others in the second
 *     1 bit   a byte, whose nibbles have the four columns of a register each
 *     Q4_0's and Q8_0's codes are two's complement, those of the others as in engine/block.h.
 *   Scales.
 *     Q8_0, Q4_0, Q5_0, IQ4_NL  f16 d[32 rows]; Q4_1, Q5_1: and f16 m[32 rows] (added)
 *     MXFP4                     exponent of d, a byte a row
 *     Q4_K, Q5_K                6 bits of the scale and 6 of the minimum: a byte a row with their low nibbles, then a
 *                               byte two rows with what is above them
 *     Q3_K                      the same of the scales (+ 32) of its two parts of 16 columns
 *     Q2_K, Q6_K                a byte for each part: scale and minimum in nibbles; the scale
 *
 * Activations, prepared once a call:
 *   blocks   q [columns / 32][rows][32] int8, words of 4 columns in the order 0, 16, 4, 20, ..., so that both of a
 *            lane lie side by side; scales [columns / 32][rows rounded up to 2] of pairs: s as engine/backend.h defines
 *            it, and the sums of the first 16 q and the last 16, two int16
 *   halves   [rows][pitch] f16 or bf16, and a power of two a row: the row was divided by it so that f16 holds it (1
 *            unless some |x| is above LINEAR_HALF_MOST)
 *   padded   [rows][pitch] float32, for widths that are not a multiple of LINEAR_PITCH
 *
 * Which kernel, R rows, and what its result may differ by (u = 2^-24; |w||x| is the sum over columns of |w x|):
 *   block formats  any R: int8 mma, one a block of 32 (with parts of 16 two), whose integers are exact; then the same
 *                  fma in the same order as the CPU: equal bits for every R. Up to 64 rows a thread block streams one
 *                  strip past all rows; above, 4 strips and 128 rows, when there are enough of them for the device.
 *                  R >= limits.blocks_library: dequantised to f16, a bounded number of rows at a time, for cuBLASLt.
 *                  |error| <= (2^-10 + 2^-22 + (columns + 4) u) |w||x| of the true product, plus columns * max|w| *
 *                  2^-24 for values that f16 holds as subnormals only. An x that is not finite makes its row NaN.
 *   F32, exact     any R: fma in ascending order of columns: equal to the CPU's bits for every R.
 *   F16, BF16      R <= 8: weights to float32, x not rounded; columns in 4 parts by warp: (columns + 4) 2 u |w||x|.
 *                  R <= 63: mma.m16n8k16, x rounded: (2^-11 (BF16: 2^-8) + (columns + 4) 2 u) |w||x|, and for F16
 *                  2^-25 times the row's power of two for each x * w whose x is subnormal in f16.
 *                  Above: the same by cuBLASLt.
 *   Adding to `out` rounds once more. The order of sums never depends on a row's neighbours; cuBLASLt's may depend on
 * R. limits.deterministic: no cuBLASLt, and one kernel a format for all R, so that a row's bits never depend on R.
 */
#ifndef CUDA_LINEAR_H
#define CUDA_LINEAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    LINEAR_STRIP = 32,
    LINEAR_BLOCK = 32,
    LINEAR_PITCH = 16,
    LINEAR_PARTS = 3,          /* weights side by side in one output */
    LINEAR_HALF_MOST = 60000,  /* |x| that f16 activations keep as they are */
    LINEAR_STREAM_ROWS = 8,    /* float formats: rows up to which weights are streamed without rounding x */
    LINEAR_LIBRARY_ROWS = 64,  /* F16, BF16: rows from which cuBLASLt multiplies */
    LINEAR_ROWS_AT_ONCE = 1024 /* rows prepared together: bounds the scratch memory */
};

enum linear_format {
    LINEAR_F32,
    LINEAR_F16,
    LINEAR_BF16,
    LINEAR_Q8_0, /* from here on block formats */
    LINEAR_Q4_0,
    LINEAR_Q4_1,
    LINEAR_Q5_0,
    LINEAR_Q5_1,
    LINEAR_IQ4_NL,
    LINEAR_MXFP4,
    LINEAR_Q2_K, /* from here on blocks of 256 */
    LINEAR_Q3_K,
    LINEAR_Q4_K,
    LINEAR_Q5_K,
    LINEAR_Q6_K,
    LINEAR_FORMATS
};

static inline bool linear_is_float(enum linear_format format) {
    return format < LINEAR_Q8_0;
}

/* Of a block format: bits of a code, low ones and those above; bytes of a step's scales, and of a head. */
struct linear_layout {
    uint32_t low, high, scales, head;
};

#ifdef __cplusplus
constexpr
#else
static const
#endif
    struct linear_layout linear_layouts[LINEAR_FORMATS] = {
        {0, 0, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0}, /* F32, F16, BF16 */
        {8, 0, 64, 0},                            /* Q8_0 */
        {4, 0, 64, 0},                            /* Q4_0 */
        {4, 0, 128, 0},                           /* Q4_1 */
        {4, 1, 64, 0},                            /* Q5_0 */
        {4, 1, 128, 0},                           /* Q5_1 */
        {4, 0, 64, 0},                            /* IQ4_NL */
        {4, 0, 32, 0},                            /* MXFP4 */
        {2, 0, 64, 128},                          /* Q2_K */
        {2, 1, 48, 64},                           /* Q3_K */
        {4, 0, 48, 128},                          /* Q4_K */
        {4, 1, 48, 128},                          /* Q5_K */
        {4, 2, 64, 64},                           /* Q6_K */
};

enum { LINEAR_SUPER_STEPS = 8 }; /* behind a head */

/* Where the bits above the low ones and the scales of a step lie, and where it ends. */
#define LINEAR_HIGH_AT(layout) ((layout).low * (LINEAR_STRIP * LINEAR_BLOCK / 8))
#define LINEAR_SCALES_AT(layout) (((layout).low + (layout).high) * (LINEAR_STRIP * LINEAR_BLOCK / 8))
#define LINEAR_STEP_BYTES(layout) (LINEAR_SCALES_AT(layout) + (layout).scales)

struct backend_weight {
    enum linear_format format;
    uint32_t rows;
    uint32_t columns;
    uint32_t pitch;     /* numbers of a row: columns, rounded up in float formats */
    size_t strip_bytes; /* block formats */
    size_t bytes;
    char *data; /* device */
};

/* One weight of a call. Thread blocks along the rows of weights are numbered through all parts. */
struct linear_part {
    const char *data;
    uint32_t rows;
    uint32_t out_column;  /* where its results start in a row of out */
    uint32_t first_block; /* UINT32_MAX: not there */
};

/* What kernels get, by value: weights of one format and prepared activations. Device addresses. */
struct linear_call {
    struct linear_part parts[LINEAR_PARTS];
    uint32_t parts_count;
    uint32_t row_blocks; /* thread blocks along the rows of weights */
    uint32_t steps;      /* block formats: columns / 32 */
    size_t strip_bytes;
    uint32_t pitch; /* float formats: of weights and activations */
    uint32_t rows;  /* of activations */
    const int8_t *q;
    const float *scales; /* pairs: s, and the bits of two int16 */
    const float *x;      /* [rows][pitch] */
    const uint16_t *halves;
    const float *row_scales; /* [rows] of halves */
    float *out;
    uint32_t out_pitch;
    bool add;
    bool pairs; /* two neighbours of out may be written as one float2 where the first has an even column */
};

/* ---- preparing (linear_prepare.cu) ---- */

/* x [rows][columns] -> q, scales. columns: a multiple of 32. */
void launch_linear_round(
    const float *x, uint32_t rows, uint32_t columns, int8_t *q, float *scales, cudaStream_t stream);
/* x -> halves [rows][pitch], row_scales [rows]. spoil: rows with a number that is not finite become NaN throughout. */
void launch_linear_halve(const float *x, uint32_t rows, uint32_t columns, uint32_t pitch, bool bfloat, bool spoil,
    uint16_t *halves, float *row_scales, cudaStream_t stream);
/* x [rows][columns] -> out [rows][pitch], the rest zero. */
void launch_linear_pad(
    const float *x, uint32_t rows, uint32_t columns, uint32_t pitch, float *out, cudaStream_t stream);
/* out[r][0..columns) *= row_scales[r], or /= when inverse. Rows with scale 1 are not touched. */
void launch_linear_scale_rows(float *out, uint32_t rows, uint32_t columns, uint32_t out_pitch, const float *row_scales,
    bool inverse, cudaStream_t stream);
/* Strips [first, first + count) of a weight in a block format -> f16 out [count * 32][columns]. */
void launch_linear_dequantise(enum linear_format format, const char *data, size_t strip_bytes, uint32_t first,
    uint32_t count, uint32_t columns, uint16_t *out, cudaStream_t stream);
/* out [rows][columns] = rows of the weight by token id (device). Any format. */
void launch_linear_embed(
    const struct backend_weight *weight, const int32_t *tokens, uint32_t rows, float *out, cudaStream_t stream);

/* ---- multiplying ---- */

/* Each sets parts' first_block and row_blocks of its copy of the call. */
void launch_linear_blocks(const struct linear_call *call, enum linear_format format, uint32_t multiprocessors,
    cudaStream_t stream); /* linear_blocks.cu */
void launch_linear_blocks_k(const struct linear_call *call, enum linear_format format, uint32_t multiprocessors,
    cudaStream_t stream); /* linear_blocks_k.cu: formats with blocks of 256, for launch_linear_blocks */
void launch_linear_stream(const struct linear_call *call, enum linear_format format, cudaStream_t stream); /* R <= 8 */
void launch_linear_f32(const struct linear_call *call, cudaStream_t stream); /* both: linear_floats.cu */
void launch_linear_halves(const struct linear_call *call, bool bfloat, cudaStream_t stream); /* linear_halves.cu */

#ifdef __cplusplus
}
#endif

/* ---- host side ---- */

#ifndef __cplusplus

#include "cuda/cuda_backend.h"

struct linear_library; /* linear_library.c */

/* When which kernel multiplies; set when the state is made, changed by tests. */
struct linear_limits {
    uint32_t blocks_library;  /* rows from which block formats go through cuBLASLt; UINT32_MAX: never */
    size_t dequantised_bytes; /* weights in f16 that exist at once for that: at least one strip */
    bool deterministic;
};

/* The family's state, cuda_backend.linear. */
struct linear_state {
    struct linear_limits limits;
    struct cuda_scratch rounded, halves, padded, dequantised;
    struct linear_library *library;
};

/* Made on first use; NULL (and an error kept) when it cannot be made. */
struct linear_state *cuda_linear_state(struct cuda_backend *cuda);

/* out [rows][columns, row pitch out_pitch] (+)= halves [rows][pitch] times weights [columns][pitch] transposed, in
 * float32 sums. Both f16, or bf16. */
struct linear_product {
    const uint16_t *weights;
    const uint16_t *halves;
    bool bfloat;
    uint32_t columns;
    uint32_t pitch;
    uint32_t rows;
    float *out;
    uint32_t out_pitch;
    bool add;
};
void linear_library_multiply(
    struct cuda_backend *cuda, struct linear_library *library, const struct linear_product *product);
struct linear_library *linear_library_create(struct cuda_backend *cuda); /* NULL: no memory, or cuBLASLt failed */
void linear_library_free(struct linear_library *library);

#endif

#endif
