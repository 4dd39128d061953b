/* SPDX-License-Identifier: Apache-2.0
 *
 * The summary slots of one sequence (option summary): for each (layer, KV head) the slot that stands in attention for
 * the tokens that were evicted from it (kv_head_view.summary), kept as running means (struct summary_update).
 * Private to the sequence, in device memory, one allocation for all heads, made when the first token is about to go.
 * A head that lost nothing has no slot.
 */
#ifndef ENGINE_SUMMARY_H
#define ENGINE_SUMMARY_H

#include "engine/backend.h"
#include "engine/kv_cache.h"
#include "policy/policy.h"

struct summaries {
    struct backend *backend;
    uint32_t heads; /* layers * kv_heads */
    uint32_t kv_heads, head_dim;
    size_t bytes;  /* of memory, or saved */
    float *memory; /* device, on each rank: [its heads][SUMMARY_NUMBERS(head_dim)]; NULL while saved */
    bool any;      /* some head lost something */
    bool used[];   /* [heads] it lost something: its slot is valid */
};

size_t summaries_bytes(uint32_t heads, uint32_t head_dim);

/* heads: of all layers. NULL: no memory. */
struct summaries *summaries_create(struct backend *backend, uint32_t heads, uint32_t kv_heads, uint32_t head_dim);
struct summaries *summaries_fork(const struct summaries *from); /* NULL: no memory */
void summaries_free(struct summaries *summaries);               /* NULL allowed */

/* What attention reads of a head, or NULL. summaries may be NULL. */
const float *summaries_slot(const struct summaries *summaries, uint32_t head);

/* Adds what removals [heads] will take from a sequence whose slots are still there: each head's slots by ascending
 * position, empty ones left out. sums[head].sum: their statistics. identity: 0, 1, 2, ... for as many slots as any head
 * has. network: its offsets at `level` go to the slots (policy/network.h); may be NULL. `work`: room for
 * summaries_work() bytes, `slots` being those of all heads. */
size_t summaries_work(uint32_t heads, size_t slots);
void summaries_add(struct summaries *summaries, const struct kv_pool *pool, const struct kv_sequence *kv,
    const struct kv_removal *removals, const struct kv_statistics *sums, const uint32_t *identity,
    const struct policy_network *network, double level, void *work);

/* Copies everything to host memory [bytes] and gives the device's back; and the other way. ERROR_MEMORY: it stays out.
 */
void summaries_save(struct summaries *summaries, void *host);
int summaries_restore(struct summaries *summaries, const void *host, struct error *error);

#endif
