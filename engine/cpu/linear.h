/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside the matrix products of the CPU backend: packed weights, prepared activations, and the kernels between them.
 * linear_weights.c packs, linear.c prepares activations and splits the work, linear_TIER.c holds the kernels.
 *
 * Weights are cut into strips of 32 rows (the last one is padded with zeros). All tiers read the same bytes:
 *   float formats  [column][32 rows]
 *   block formats  [block of 32 columns] {
 *                      words  [2 halves][groups][16 rows] of 4 bytes: 4 consecutive columns of one row
 *                      f16    d[32 rows]
 *                      f16    m[32 rows]                                              (Q4_1 only)
 *                  }
 *     Q8_0: 8 groups, group g holds columns 4g..4g+3, each byte the value + 128.
 *     Q4:   4 groups; the low nibbles are columns 4g..4g+3, the high nibbles 16 + 4g..16 + 4g+3.
 * So a vector of 16 lanes holds 16 rows, nothing is ever summed across lanes, a pass reads as many bytes as the file
 * has, front to back, and every vector is aligned to 64 bytes.
 *
 * Activations are prepared in panels of up to 8 rows (the last one holds the rest), [step][rows of the panel]:
 *   for block formats a step is a struct linear_block, for float formats it is one column's float.
 *
 * A kernel multiplies one strip with one panel. Its result for a row depends on that row alone and is the same, bit for
 * bit, in every tier (engine/backend.h, Determinism; tests/parity checks it):
 *   amax = max |x| of the block; scale = f16(amax / 127); q = rint(x * (127 / amax)), half to even, each operation in
 *   float32; when scale is 0 all q are 0; when amax is not finite all q are 0 and scale is NaN.
 */
#ifndef ENGINE_CPU_LINEAR_H
#define ENGINE_CPU_LINEAR_H

#include "engine/cpu/cpu.h"
#include "engine/cpu/memory.h"

enum { LINEAR_STRIP = 32, LINEAR_LANES = 16, LINEAR_BLOCK = 32, LINEAR_PANEL = 8 };

enum linear_format { LINEAR_F32, LINEAR_F16, LINEAR_BF16, LINEAR_Q8_0, LINEAR_Q4_0, LINEAR_Q4_1, LINEAR_FORMATS };

struct backend_weight {
    enum linear_format format;
    uint32_t rows;
    uint32_t columns;
    uint32_t steps;  /* blocks or columns of a row */
    uint32_t strips; /* of LINEAR_STRIP rows */
    size_t strip_bytes;
    char *data;            /* [strips][strip_bytes], 64-byte aligned */
    struct cpu_slab *slab; /* where data lies */
};

/* 32 activations of one row. Sums are of q; unsigned weights need them to take their offset back. */
struct linear_block {
    int8_t q[LINEAR_BLOCK];
    float scale;           /* of f16 precision */
    float scaled_sum;      /* scale * sum, exact */
    int32_t minus_8_sum;   /* -8 * sum, where a dot product with nibbles starts (Q4_0) */
    int32_t minus_128_sum; /* -128 * sum (Q8_0) */
};

/* One kernel call: out [rows][LINEAR_STRIP] = (or += when add) panel times strip. */
struct linear_tile {
    const void *strip;
    const void *panel;
    uint32_t rows;  /* of the panel, 1 to LINEAR_PANEL */
    uint32_t steps; /* as in the weight */
    float *out;
    size_t out_stride; /* floats between rows of out */
    bool add;
};

struct linear_kernels {
    /* x [rows][columns] -> panel [columns / 32][rows] */
    void (*round_panel)(const float *x, uint32_t rows, uint32_t columns, struct linear_block *panel);
    void (*multiply[LINEAR_FORMATS])(const struct linear_tile *tile);
};

extern const struct linear_kernels linear_kernels_scalar;
extern const struct linear_kernels linear_kernels_avx2;
extern const struct linear_kernels linear_kernels_avx512;

/* For the bodies that a tier writes once, for constant numbers of rows: inlined into each case, their loops unrolled so
 * that accumulators are registers. CPU_COMPACT leaves the loops: sanitizers check every copy of an access, and take
 * minutes to compile what is repeated here. */
#define LINEAR_INLINE static inline __attribute__((always_inline))
#ifdef CPU_COMPACT
#define LINEAR_UNROLL(count)
#else
#define LINEAR_UNROLL(count) _Pragma(LINEAR_STRING(GCC unroll count))
#define LINEAR_STRING(...) #__VA_ARGS__
#endif

bool linear_is_float(enum linear_format format);
/* Bytes of a strip's step: one block or column of 32 rows. */
size_t linear_step_bytes(enum linear_format format);

/* The family's state, cpu_backend.linear_scratch. */
struct linear_scratch {
    struct linear_block *blocks; /* prepared activations, for weights with blocks */
    size_t blocks_bytes;
    float *floats; /* and for float weights */
    size_t floats_bytes;
    struct cpu_slab *open; /* slab that takes the next weight */
};

/* The state, made on first use; NULL when there is no memory (linear.c). */
struct linear_scratch *linear_scratch_of(struct cpu_backend *cpu);
/* Makes room for the activations of at least one panel of a weight with that many columns. */
int linear_scratch_reserve(struct linear_scratch *scratch, const struct backend_weight *weight, struct error *error);

#endif
