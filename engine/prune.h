/* SPDX-License-Identifier: Apache-2.0
 *
 * Work space of engine_prune, which belongs to the engine and grows as prunes need it.
 */
#ifndef ENGINE_PRUNE_H
#define ENGINE_PRUNE_H

#include "engine/backend.h"
#include "policy/select.h"

struct prune_space {
    char *memory; /* host, cut up anew by each call */
    size_t bytes;
    char *ahead; /* the same for prunes that are planned ahead, until the batch is computed */
    size_t ahead_bytes;
    const struct score_layer *late; /* in it: layers [late_count] to score behind the batch */
    uint32_t late_count;
    float *scores; /* device [scores_capacity] */
    size_t scores_capacity;
    uint32_t *identity; /* 0, 1, 2, ...: positions of a head that was never pruned */
    uint32_t identity_count;
    struct rope_params rope;
    struct select_scratch select;
};

struct engine;
void prune_space_free(struct engine *engine);

#endif
