/* SPDX-License-Identifier: Apache-2.0
 *
 * What scoring keeps on the device from call to call: scratch, what was computed from output matrices, and networks.
 * Freed with the backend.
 *
 * Bytes kept of the output matrices, H query heads of d channels (padded to 64), per layer that was scored so: the
 * network with output norms and restkv H d^2 * 4; laprox_head and laprox H^2 d^2 * 4 more; these two and criticalkv
 * also W_o, H d D * 4, half as much where the file has it in f16. SmolLM2-135M (H 9, d 64, D 576, 30 layers): 4.4, 40
 * and 40 MB.
 */
#ifndef CUDA_SCORE_STATE_H
#define CUDA_SCORE_STATE_H

#include "cuda/cuda_backend.h"
#include "cuda/score.h"

enum { SCORE_NETWORKS = 4 /* that are kept */ };

/* Of one layer's W_o; device memory, NULL: not needed yet (score.h has the layouts). */
struct score_matrix {
    const void *data; /* of the tensor that it was computed from */
    float *factors, *grams;
    void *dense;       /* float, or f16 where that is what the tensor has */
    bool dense_halves; /* the latter */
    bool all_grams;    /* of all pairs, not only those of a group */
};

/* A network on the device. */
struct score_kept_network {
    uint64_t digest; /* of its shape and arrays */
    float *memory;   /* NULL: no network */
    struct cuda_score_network network;
};

struct score_state {
    uint32_t heads, dim, layers; /* that the matrices are of */
    struct score_matrix *matrices;
    struct score_kept_network networks[SCORE_NETWORKS];
    uint32_t networks_next;
    struct cuda_scratch scratch; /* of a call */
    struct cuda_scratch tensor, dense, squares;
};

/* What is to be computed of a layer's W_o. */
enum score_matrix_part { SCORE_FACTORS = 1, SCORE_GROUP_GRAMS = 2, SCORE_ALL_GRAMS = 4, SCORE_DENSE = 8 };

/* The backend's state, created on first use; NULL when there is no memory. */
struct score_state *cuda_score_state(struct cuda_backend *cuda);

/* Computes the parts (mask) that the matrix of a layer lacks: NULL and ERROR_MEMORY when there is no memory. heads: H.
 */
const struct score_matrix *cuda_score_matrix(struct cuda_backend *cuda, const struct kv_layout *layout, uint32_t layer,
    const struct tensor *output, uint32_t heads, uint32_t parts, struct error *error);

/* The network's arrays on the device. NULL and ERROR_MEMORY. Valid until the next calls for other networks. */
const struct cuda_score_network *cuda_score_network_of(
    struct cuda_backend *cuda, const struct policy_network *network, struct error *error);

#endif
