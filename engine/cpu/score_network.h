/* SPDX-License-Identifier: Apache-2.0
 *
 * The DistillCache network on the CPU: its kernels (network_body.h, compiled per tier), and what score_network.c and
 * score_numbers.c share. Slots are worked on in chunks; an input of a chunk is a row of NETWORK_CHUNK floats.
 */
#ifndef ENGINE_CPU_SCORE_NETWORK_H
#define ENGINE_CPU_SCORE_NETWORK_H

#include "engine/backend.h"
#include "policy/network.h"

enum {
    NETWORK_CHUNK = 128, /* slots, a multiple of 16 */
    NETWORK_ROWS = 8,    /* hidden units whose weights lie side by side */
};

/* Some slots of a head, and what their inputs are made of. Arrays go on to a multiple of 16 slots; those that no input
 * needs are NULL. */
struct network_chunk {
    const struct network_shape *shape;
    const enum network_input *list; /* [list_count] network_inputs_list */
    uint32_t list_count;
    uint32_t seen, budget;
    float budget_input; /* INPUT_BUDGET, the same for all slots */
    uint32_t count;
    const int32_t *positions;      /* 0 where there is no slot */
    const uint32_t *sum, *squared; /* the first of two planes */
    const uint16_t *entropy;
    const uint16_t *rows; /* content_rows from the chunk's first slot on */
    size_t stride;        /* from one row, or plane, to the next */
};

/* The content network of one head. Weights [hidden / 8, rounded up][F][8]: those of 8 units side by side; b1 and w2 end
 * with zeros for units that there are not. */
struct network_weights {
    uint32_t inputs, hidden; /* F, H rounded up to NETWORK_ROWS */
    const float *w1, *b1, *w2, *skip;
};

struct network_kernels {
    /* The first slot from `slot` on, a multiple of 16, at which a page begins with a slot without numbers (norm 0, and
     * a position, or any when positions is NULL); slots or more: none. */
    uint32_t (*next_unknown)(const uint16_t *norms, const int32_t *positions, uint32_t slots, uint32_t slot);
    /* Rotations undone in place: keys [2 * pairs][16], of which lane i was turned by low[i] after high[i]; turns are
     * cosines [pairs, rounded up to 16], then as many sines. space: room for [(2 * rounded + 2 * pairs) * 16]. */
    void (*unturn)(float *keys, const float *const low[KV_PAGE_SLOTS], const float *const high[KV_PAGE_SLOTS],
        uint32_t pairs, float *space);
    /* Sixteen numbers plus `offset` as f16, at most 65504 and never +0. */
    void (*narrow)(const float *numbers, float offset, uint16_t out[KV_PAGE_SLOTS]);
    /* Inputs before normalisation: out [F][NETWORK_CHUNK]. */
    void (*inputs)(const struct network_chunk *chunk, float *out);
    /* (x - offset) * factor, clamped to +-limit, of one row. */
    void (*normalise)(float *x, uint32_t count, float offset, float factor, float limit);
    /* Scores of normalised inputs x [F][NETWORK_CHUNK]: out [count, rounded up to 16]. */
    void (*content)(const struct network_weights *weights, const float *x, uint32_t count, float *out);
    /* h [hidden][16] = max(0, LayerNorm(h + bias) gain + offset) per lane. */
    void (*layer_norm)(float *h, uint32_t hidden, const float *bias, const float *gain, const float *offset);
    /* STAGE_LOG_SOFTMAX */
    void (*log_softmax)(float *scores, uint32_t count);
};

struct score_call;
struct score_layer;

/* score_network.c: floats of score_scratch.blocks that the stage needs. */
bool score_network_weighs(const struct network_shape *shape); /* it needs W_o */
size_t score_network_floats(const struct network_shape *shape, uint32_t dim);

/* score_numbers.c: floats of score_scratch.blocks; and the numbers of all slots of a call's layers that have none yet.
 * ERROR_MEMORY. */
size_t score_numbers_floats(uint32_t dim);
int score_numbers_fill(const struct score_call *call, struct error *error);

#endif
