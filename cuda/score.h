/* SPDX-License-Identifier: Apache-2.0
 *
 * Scoring of slots on the device (backend.h, score): what kernels see of a call, and their launchers.
 *
 * A unit is one (sequence, layer, KV head). All units of a call whose layers have the same stages are worked on by one
 * launch a stage, or by one launch for a run of stages that look at a slot alone (struct cuda_score_chain). Units of a
 * layer are neighbours, K of them, and layers lie in ascending order, so that what sequences read of the same layer's
 * matrices stays in the cache. Lengths are read on the device; grids come from upper bounds, and blocks beyond a head's
 * slots leave. A head's score depends on its own slots (and, where a stage says so, on its layer's) in a fixed order.
 * Sums of integers, orders and choices are exact; the rest is within the tolerances that tests/parity has for every
 * backend (parity_score.c, parity_network.c): 1e-6 to 1e-5 of a head's mean score, 2e-4 of a network's.
 *
 *   score.c           checks, staging, scratch, the order of launches
 *   score_matrix.c    what is kept of output matrices and networks on the device
 *   score_slots.cu    stages on a slot alone, means of a layer, the slot that goes, shares
 *   score_keys.cu     key norm, key difference, norm of values
 *   score_pool.cu     pooling along positions
 *   score_best.cu     the best of a head (radix selection, select_device.h)
 *   score_numbers.cu  what the network keeps of a slot; slot_norms
 *   score_network.cu  the DistillCache network; score_paper.cu the paper's
 *   score_matrix.cu   W_o dequantised, products of pairs of its heads, factors
 *   score_output.cu   norms of outputs, laprox; score_drop.cu restkv's error
 *   score_expect.cu   expected attention
 *   score_list.h      pages that have slots for which something is to be computed
 *   network_device.h  inputs of networks
 *   score_product.h   matrix times the keys or values of a tile of slots
 */
#ifndef CUDA_SCORE_H
#define CUDA_SCORE_H

#include "cuda/views.h"
#include "policy/network.h"

#include <cuda_runtime_api.h>

enum {
    SCORE_DIM_MAX = 256,             /* head_dim */
    SCORE_SLOTS_CHUNK = 512,         /* slots a block of a stage on slots alone */
    SCORE_KEYS_CHUNK = 256,          /* slots a block of a stage on keys or values */
    SCORE_TILE = 64,                 /* slots a block of a stage with matrices */
    SCORE_HELD = 8192,               /* slots of a head that a block keeps in registers */
    SCORE_ROWS = 64,                 /* rows of a matrix are padded to a multiple */
    SCORE_POSITIONS_SHARED = 131072, /* positions whose bits fit in shared memory; others use scratch */
};

/* One (sequence, layer, KV head) at a prune. All pointers are device addresses. */
struct __attribute__((aligned(16))) cuda_score_unit {
    struct cuda_head_view view;
    struct kv_statistics statistics;
    float *scores;               /* [slots]; NULL: the stages need none (launch_score_chain_worst) */
    uint32_t *worst;             /* [1] or NULL: nobody asks */
    uint32_t sinks, recent_from; /* at most KV_NO_POSITION */
    uint32_t number, head;       /* kv_layout_head_number; and among the layer's heads of this device */
    uint32_t seen, budget;
    uint32_t rows, first_row; /* queries that the window holds, and the ring row of the oldest */
    uint64_t seed;
    struct query_moments moments; /* of the layer */
    uint16_t freeze;              /* paper's network: statistics.standard is set by this prune if it is not yet */
    uint16_t dense_halves;        /* dense is f16: W_o's own numbers */
    uint32_t width;               /* D, rows of W_o */
    /* Of the layer's W_o (score_matrix.c), where a stage needs it. Matrices are turned: [columns][rows], rows padded to
     * a multiple of SCORE_ROWS with zeros, so that rows of a column are read 16 bytes at a time. */
    const float *factors; /* [H][d][rows d] F_h, lower triangular, F_h^T F_h = W_h W_h^T */
    const float *grams;   /* [H][H][d][rows d] at h, g, h < g: W_h W_g^T */
    const void *dense;    /* [H * d][rows D] W_o itself, float or f16 */
    /* Scratch, where a stage needs it. */
    float *sorted;        /* [slots] scores in order of position */
    double *sums;         /* [slots + 1] sums of those before */
    uint64_t *row_sums;   /* [window] sums of positions of a query's best slots */
    uint32_t *bits;       /* [2 * ceil(seen / 32)] which positions are there, and how many before */
    float *anchor;        /* [chunks + 1][d] */
    uint32_t *pages_list; /* [1 + pages] how many pages have slots without numbers, and which */
    float *standard;      /* [STATISTIC_STANDARD_NUMBERS] that this prune goes by */
    float *space;         /* floats of a stage with matrices */
    float *norms;         /* slot_norms: [2][slots] value norms, output norms; else NULL */
};

/* Stages on a slot alone, in order. */
struct cuda_score_chain {
    uint32_t count;
    struct score_stage stages[SCORE_STAGES_MAX];
};

/* What all launchers take. */
struct cuda_score_call {
    struct kv_pool pool;
    const struct cuda_score_unit *units; /* [count] */
    uint32_t count;
    uint32_t group;          /* G */
    uint32_t slots_most;     /* of a unit */
    uint32_t positions_most; /* seen, of a unit */
};

#ifdef __cplusplus
extern "C" {
#endif

/* ---- score_slots.cu ---- */

/* chain: device. The first stage may give scores of its own or change those that are there. Empty slots get NaN. */
void launch_score_chain(const struct cuda_score_call *call, const struct cuda_score_chain *chain, cudaStream_t stream);
/* Of each layer: kv_heads units with the same slots. */
void launch_score_layer_mean(const struct cuda_score_call *call, cudaStream_t stream);
/* *worst: the slot that selection drops first; UINT32_MAX: all are empty. */
void launch_score_worst(const struct cuda_score_call *call, cudaStream_t stream);
/* Both at once, of a chain that is all there is: scores are not written, those of units that ask for no slot not
 * computed. */
void launch_score_chain_worst(
    const struct cuda_score_call *call, const struct cuda_score_chain *chain, cudaStream_t stream);
void launch_score_log_softmax(const struct cuda_score_call *call, cudaStream_t stream);

/* ---- score_keys.cu ---- */
void launch_score_key_norm(const struct cuda_score_call *call, cudaStream_t stream);
void launch_score_key_difference(const struct cuda_score_call *call, cudaStream_t stream);
void launch_score_times_value_norm(const struct cuda_score_call *call, cudaStream_t stream);
/* Floats of unit.anchor. */
size_t score_anchor_floats(uint32_t slots, uint32_t dim);

/* ---- score_pool.cu ---- */
/* Of at most `reach` positions away. Scratch: sorted where slots_most > SCORE_HELD, bits where positions_most >
 * SCORE_POSITIONS_SHARED. */
void launch_score_pool_max(const struct cuda_score_call *call, uint32_t reach, cudaStream_t stream);
/* The same scratch, sums where sorted is needed, and row_sums. window_most: of the units. */
void launch_score_pool_adaptive(const struct cuda_score_call *call, uint32_t window_most, cudaStream_t stream);

/* ---- score_numbers.cu, score_network.cu, score_paper.cu ---- */

/* A network's arrays, as score_matrix.c keeps them on the device. heads: layers * K; hidden8: hidden rounded up to 8,
 * with weights of 0. */
struct cuda_score_network {
    uint32_t features, content, hidden, inputs; /* inputs: F */
    uint32_t list_count, standardised;
    uint32_t needs;              /* mask of enum statistic: network_needs */
    uint32_t list[INPUT_KINDS];  /* enum network_input, after content */
    bool keeps, weighs;          /* numbers of slots are kept; output norms are among them */
    const float *content_rows;   /* [heads][d][16] C turned, zeros beyond content */
    const float *content_offset; /* [heads][16] */
    const float *mean, *scale;   /* [heads][F] */
    const float *w1;             /* content: [hidden8 / 8][F][8]; paper: [F][rows hidden] */
    const float *b1;             /* [heads][hidden8] */
    const float *w2;             /* content: [hidden8]; paper: [hidden][rows hidden] */
    const float *skip;           /* content: [heads][F]; paper: [F] */
    const float *mlp;            /* paper: b1, g1, o1, b2, g2, o2, w3 [hidden] each, then b3 */
    uint64_t padding;            /* to a multiple of 16 bytes */
};

/* Numbers of slots that have none yet: those of all units; rope: device frequencies. tiles_most is that of slots_most:
 * pages without work are left out on the device. Scratch: pages_list. */
void launch_score_numbers(const struct cuda_score_call *call, const struct cuda_score_network *network,
    uint32_t rope_dim, const float *inverse_freq, cudaStream_t stream);
/* Norms of all slots of the units: unit.norms; weighs: output norms too. */
void launch_score_norms(const struct cuda_score_call *call, bool weighs, cudaStream_t stream);
/* device_network: the same on the device. */
void launch_score_network(const struct cuda_score_call *call, const struct cuda_score_network *network,
    const struct cuda_score_network *device_network, cudaStream_t stream);
/* Scratch: standard. */
void launch_score_paper(
    const struct cuda_score_call *call, const struct cuda_score_network *network, cudaStream_t stream);

/* ---- score_output.cu, score_drop.cu, score_expect.cu ---- */

/* statistics.output_norm of slots that have none. Scratch: pages_list. */
void launch_score_output_norms(const struct cuda_score_call *call, cudaStream_t stream);
/* whole: over all heads of a layer. width_most: of D. Scratch: space of a layer's first unit, [width / 64] doubles. */
void launch_score_laprox(const struct cuda_score_call *call, bool whole, uint32_t width_most, cudaStream_t stream);
/* Scratch: space, score_drop_floats. */
void launch_score_drop_error(
    const struct cuda_score_call *call, uint32_t window_most, float smoothing, cudaStream_t stream);
size_t score_drop_floats(uint32_t window, uint32_t group, uint32_t dim);
/* Scratch: space, score_expect_floats. n: positions to come. */
void launch_score_expected_attention(const struct cuda_score_call *call, uint32_t rope_dim, const float *inverse_freq,
    uint32_t n, float epsilon, cudaStream_t stream);
size_t score_expect_floats(uint32_t slots, uint32_t group, uint32_t dim);

/* ---- score_matrix.cu ---- */

/* A matrix on the device, of F32, F16 or BF16; data 16-byte aligned. */
struct cuda_score_tensor {
    uint32_t type; /* enum tensor_type */
    uint32_t rows, columns;
    size_t row_bytes;
    const void *data;
};

/* dense [columns][rows, padded]; halves: the same as f16, of a matrix of TENSOR_F16. */
void launch_score_turn_halves(const struct cuda_score_tensor *tensor, uint16_t *halves, cudaStream_t stream);
void launch_score_turn(const struct cuda_score_tensor *tensor, float *dense, cudaStream_t stream);
/* squares [count][d][d] of pairs [count][2] (device) of heads; rows: D. At most 65535 pairs. */
void launch_score_pairs(const float *dense, uint32_t rows, uint32_t dim, const uint32_t *pairs, uint32_t count,
    double *squares, cudaStream_t stream);
/* factors [count][d][d, padded], zero before, of squares, which are overwritten. */
void launch_score_factor(double *squares, uint32_t count, uint32_t dim, float *factors, cudaStream_t stream);
void launch_score_gram(const double *squares, uint32_t dim, const uint32_t *pairs, uint32_t count, uint32_t heads,
    float *grams, cudaStream_t stream);

/* ---- score_best.cu ---- */
void launch_score_protect_best(const struct cuda_score_call *call, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
