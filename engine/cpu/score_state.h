/* SPDX-License-Identifier: Apache-2.0
 *
 * What scoring keeps from call to call: scratch memory of every thread, grown as needed, and what was computed from
 * output matrices. Freed with the backend.
 *
 * Bytes kept of the output matrices, for H query heads of d channels, per layer that was scored so: H d^2 * 4 by
 * restkv; laprox_head adds H (G - 1) / 2 d^2 * 4, laprox H (H - 1) / 2 d^2 * 4. SmolLM2-135M (H 9, d 64, 30
 * layers): 4.4, 8.8 and 22 MB; a model of 8B (H 32, d 128, 32 layers): 67, 168 and 1,107 MB.
 */
#ifndef ENGINE_CPU_SCORE_STATE_H
#define ENGINE_CPU_SCORE_STATE_H

#include "engine/cpu/score.h"
#include "engine/score_check.h"

/* What is kept of one layer's output matrix W_o. W_h [d, D] is the part that query head h is multiplied by. */
struct score_matrix {
    const void *data; /* of the tensor that it was computed from */
    /* [H][d][d] F_h, lower triangular, F_h^T F_h = W_h W_h^T: the length of x W_h is that of F_h x. NULL: not needed
     * yet. */
    float *factors;
    /* At [h * H + g], h < g: [d][d] W_h W_g^T, element (i, j) of channels i of h and j of g. NULL: not needed yet. */
    float **grams;
};

struct score_state {
    uint32_t threads;
    struct score_scratch *scratch; /* [threads] */
    void *memory;                  /* of all scratch */
    size_t memory_bytes;
    uint32_t heads, dim, layers;       /* that the matrices are of */
    struct score_matrix *matrices;     /* [layers] */
    struct rope_turns *turns;          /* score_rotate.c */
    struct number_turns *number_turns; /* score_numbers.c */
};

/* One call of score. */
struct score_call {
    struct cpu_backend *cpu;
    struct score_state *state;
    const struct kv_pool *pool;
    const struct score_layer *layers;
    uint32_t count;
    uint32_t heads; /* H */
};

/* Slots rounded up to whole pages. */
static inline size_t score_round(uint32_t slots) {
    return ((size_t)slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS * KV_PAGE_SLOTS;
}

/* The backend's state, created on first use; NULL when there is no memory. */
struct score_state *score_state_get(struct cpu_backend *cpu);
/* Scratch for the layers of a call. ERROR_MEMORY. */
int score_scratch_prepare(const struct score_call *call, struct error *error);

/* score.c: for attention, which scores heads of layers whose scratch is prepared. What stages read
 * beside statistics and pages is fetched for some slots; the worst slot of one head is found by the calling thread. */
void score_expect(const struct score_layer *layer, uint32_t head, uint32_t first_slot, uint32_t slots);
void score_head_alone(const struct score_call *call, const struct score_layer *layer, uint32_t head, uint32_t thread);

/* score_matrix.c: F_h of the layer's output matrix, in state->matrices[layer]. ERROR_MEMORY. */
int score_factors_prepare(const struct score_call *call, const struct score_layer *layer, struct error *error);
/* What the stages of a call need of output matrices, and the output norms of slots that have none yet.
 * ERROR_MEMORY. */
int score_matrices_prepare(const struct score_call *call, struct error *error);
void score_matrices_free(struct score_state *state);

/* score_rotate.c */
void score_turns_free(struct rope_turns *turns);

#endif
