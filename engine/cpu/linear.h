/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside the matrix products of the CPU backend: packed weights, prepared activations, and the kernels between them.
 * linear_weights.c packs, linear.c prepares activations and splits the work, linear_TIER.c holds the kernels.
 *
 * Weights are cut into strips of 32 rows (the last one is padded with zeros). All tiers read the same bytes:
 *   float formats  [column][32 rows]
 *   block formats  [block of 32 columns] {
 *                      planes [2 halves]{
 *                          low  [groups][16 rows] of 4 bytes
 *                          high [words][16 rows] of 4 bytes                  (where codes have 3, 5 or 6 bits)
 *                      }
 *                      scales f16 d[32 rows], and f16 m[32 rows] where the format adds one; of MXFP4 bf16 d
 *                             of K formats int8 scale[parts][32 rows], and int8 minimum[parts][32 rows] where there are
 *                  }
 *                  before every eighth block, K formats: f16 d[32 rows], f16 m[32 rows] where there are minima
 *     Codes are those of engine/block.h, but for Q8_0's, each the value + 128. The 4 bytes of a word are columns of one
 *     row. low: of 8 bits, word g (of 8) holds columns 4g..4g+3; of 4 bits, the low nibbles of word g (of 4) are
 * columns 4g..4g+3, the high ones 16 + 4g..16 + 4g+3; of 2 bits, pair p of bits of word w (of 2) columns 16w + 4p..16w
 * + 4p+3. high: 1 bit a column, bit b of the word are columns 4b..4b+3; 2 bits as low of 2 bits. So a vector of 16
 * lanes holds 16 rows, nothing is ever summed across lanes, a pass reads as many bytes as the file has (of K formats
 * with an eighth of a bit more a value for scales), front to back, and every vector is aligned to 64 bytes, or 16 where
 * it is one of bytes.
 *
 * Activations are prepared in panels of up to 8 rows (the last one holds the rest), [step][rows of the panel]:
 *   for block formats a step is a struct linear_block, for float formats it is one column's float.
 *
 * A kernel multiplies one strip with one panel. Its result for a row depends on that row alone and is the same, bit for
 * bit, in every tier (engine/backend.h, Determinism; tests/parity checks it):
 *   amax = max |x| of the block; scale = f16(amax / 127); q = rint(x * (127 / amax)), half to even, each operation in
 *   float32; when scale is 0 all q are 0; when amax is not finite all q are 0 and scale is NaN.
 * and for block formats, block by block, and of K formats with parts of 16 columns part by part,
 *   sum = fma(dot, d * scale, sum), dot the exact sum of code * q, less `start` times that of q
 *   sum = fma(minimum, scale * sum of q, sum) where it has a minimum: m of Q4_1 and Q5_1, else -m * minimum of the
 * part, or -offset * d of formats whose codes have an offset that start does not take back (struct linear_traits) with
 * d times the part's scale for d, and m likewise; all these products are exact.
 */
#ifndef ENGINE_CPU_LINEAR_H
#define ENGINE_CPU_LINEAR_H

#include "engine/cpu/cpu.h"
#include "engine/cpu/memory.h"

enum { LINEAR_STRIP = 32, LINEAR_LANES = 16, LINEAR_BLOCK = 32, LINEAR_PANEL = 8, LINEAR_SUPER = 8 /* blocks */ };

enum linear_format {
    LINEAR_F32,
    LINEAR_F16,
    LINEAR_BF16,
    LINEAR_Q8_0,
    LINEAR_Q4_0,
    LINEAR_Q4_1,
    LINEAR_Q5_0,
    LINEAR_Q5_1,
    LINEAR_Q2_K,
    LINEAR_Q3_K,
    LINEAR_Q4_K,
    LINEAR_Q5_K,
    LINEAR_Q6_K,
    LINEAR_IQ4_NL,
    LINEAR_MXFP4,
    LINEAR_FORMATS
};

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

/* Of a block format; constant, so that what is written once for all of them compiles to each. */
struct linear_traits {
    uint8_t low_bits;  /* 8, 4 or 2: of a code, in the low plane */
    uint8_t high_bits; /* 0, 1 or 2: above those */
    uint8_t parts;     /* of a block of 32, with scales of their own: 1 or 2 */
    bool k;            /* scales are int8, of d of 256 columns */
    bool minima;       /* the format stores some */
    uint8_t start;     /* offset of codes, taken back where the dot product starts: 0, 8 or 128 */
    uint8_t offset;    /* offset of codes, taken back as a minimum */
    bool bfloat;       /* d is bf16 */
    uint8_t table[16]; /* of 4-bit codes: the level + 128; all zero: codes are levels */
};

LINEAR_INLINE struct linear_traits linear_traits_of(enum linear_format format) {
    switch (format) {
    case LINEAR_Q8_0:
        return (struct linear_traits){.low_bits = 8, .parts = 1, .start = 128};
    case LINEAR_Q4_0:
        return (struct linear_traits){.low_bits = 4, .parts = 1, .start = 8};
    case LINEAR_Q4_1:
        return (struct linear_traits){.low_bits = 4, .parts = 1, .minima = true};
    case LINEAR_Q5_0:
        return (struct linear_traits){.low_bits = 4, .high_bits = 1, .parts = 1, .offset = 16};
    case LINEAR_Q5_1:
        return (struct linear_traits){.low_bits = 4, .high_bits = 1, .parts = 1, .minima = true};
    case LINEAR_Q2_K:
        return (struct linear_traits){.low_bits = 2, .parts = 2, .k = true, .minima = true};
    case LINEAR_Q3_K:
        return (struct linear_traits){.low_bits = 2, .high_bits = 1, .parts = 2, .k = true, .offset = 4};
    case LINEAR_Q4_K:
        return (struct linear_traits){.low_bits = 4, .parts = 1, .k = true, .minima = true};
    case LINEAR_Q5_K:
        return (struct linear_traits){.low_bits = 4, .high_bits = 1, .parts = 1, .k = true, .minima = true};
    case LINEAR_Q6_K:
        return (struct linear_traits){.low_bits = 4, .high_bits = 2, .parts = 2, .k = true, .offset = 32};
    case LINEAR_IQ4_NL:
        return (struct linear_traits){.low_bits = 4,
            .parts = 1,
            .start = 128,
            .table = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241}};
    case LINEAR_MXFP4:
        return (struct linear_traits){.low_bits = 4,
            .parts = 1,
            .start = 128,
            .bfloat = true,
            .table = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116}};
    default: /* F32, F16, BF16 have no blocks */
        return (struct linear_traits){0};
    }
}

LINEAR_INLINE bool linear_has_table(const struct linear_traits *traits) {
    return traits->table[0] != 0;
}

/* Words of one row's 32 codes, in the planes. */
LINEAR_INLINE uint32_t linear_words(const struct linear_traits *traits) {
    return traits->low_bits + traits->high_bits;
}

/* The i-th group of 4 columns of a part, in the order in which kernels take them: both nibbles of a word one after the
 * other, where they belong to the same part. */
LINEAR_INLINE uint32_t linear_group(const struct linear_traits *traits, uint32_t part, uint32_t i) {
    if (traits->parts == 2)
        return part * 4 + i;
    return traits->low_bits == 4 ? i / 2 + i % 2 * 4 : i;
}

/* Bytes of a block of 32 rows without what precedes every eighth, and of that. */
LINEAR_INLINE size_t linear_block_bytes(const struct linear_traits *traits) {
    size_t scales = traits->k ? traits->parts : 2;
    return LINEAR_STRIP * ((size_t)linear_words(traits) * 4 + scales * (traits->minima ? 2 : 1));
}

LINEAR_INLINE size_t linear_super_bytes(const struct linear_traits *traits) {
    return traits->k ? LINEAR_STRIP * (traits->minima ? 4 : 2) : 0;
}

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
    int32_t minus_8_sum;   /* -8 * sum, where a dot product of codes with that offset starts */
    int32_t minus_128_sum; /* -128 * sum */
    float scaled_half[2];  /* scale * sum of 16, exact */
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

bool linear_is_float(enum linear_format format);
/* Bytes of a strip's `steps` blocks or columns. */
size_t linear_strip_bytes(enum linear_format format, uint32_t steps);
/* Where block `step` of a strip begins; NULL or, of K formats, *super: the d and m that precede it. */
const uint8_t *linear_find_block(enum linear_format format, const void *strip, uint32_t step, const uint16_t **super);

/* For reading single rows, of row `lane`: its codes (of formats with a table, the level + 128), scale and minimum. */
void linear_codes(enum linear_format format, const uint8_t *block, uint32_t lane, uint8_t codes[LINEAR_BLOCK]);
float linear_scale(
    enum linear_format format, const uint8_t *block, const uint16_t *super, uint32_t lane, uint32_t part);
/* As it is added: 0 where there is none. */
float linear_minimum(
    enum linear_format format, const uint8_t *block, const uint16_t *super, uint32_t lane, uint32_t part);

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
