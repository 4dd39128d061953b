/* SPDX-License-Identifier: Apache-2.0
 *
 * What scoring keeps from call to call: scratch memory of every thread, grown as needed.
 */
#ifndef ENGINE_CPU_SCORE_STATE_H
#define ENGINE_CPU_SCORE_STATE_H

#include "engine/cpu/score.h"

struct score_state {
    uint32_t threads;
    struct score_scratch *scratch; /* [threads] */
    void *memory;                  /* of all scratch */
    size_t memory_bytes;
    struct rope_turns *turns; /* score_rotate.c */
};

/* Slots rounded up to whole pages. */
static inline size_t score_round(uint32_t slots) {
    return ((size_t)slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS * KV_PAGE_SLOTS;
}

/* The backend's state, created on first use; NULL when there is no memory. */
struct score_state *score_state_get(struct cpu_backend *cpu);

/* The same with scratch for these layers; NULL (ERROR_MEMORY is set) when there is no memory. */
struct score_state *score_state_prepare(struct cpu_backend *cpu, const struct kv_pool *pool,
    const struct score_layer *layers, uint32_t count, uint32_t heads, struct error *error);

/* score_rotate.c */
void score_turns_free(struct rope_turns *turns);

#endif
