/* SPDX-License-Identifier: Apache-2.0
 *
 * Byte pair encoding: the table of merges and the merging itself.
 *
 * Of all neighbours in a piece that have a merge, those of the lowest rank are merged first, the leftmost of equals.
 * Source: Sennrich, Haddow, Birch 2016, "Neural machine translation of rare words with subword units".
 */
#ifndef ENGINE_BPE_H
#define ENGINE_BPE_H

#include <stddef.h>
#include <stdint.h>

struct bpe; /* opaque; may be shared by threads once its merges are added */

struct bpe *bpe_create(size_t merges); /* room for so many; NULL on failed allocation */
void bpe_free(struct bpe *bpe);

/* left and right become id. Of a pair added twice the first counts. No more than were announced; rank < 2^32 - 1. */
void bpe_add(struct bpe *bpe, int32_t left, int32_t right, int32_t id, uint32_t rank);

/* Memory for long pieces, kept from one piece to the next; zero-initialise. */
struct bpe_scratch {
    void *memory;
    size_t bytes;
};
void bpe_scratch_free(struct bpe_scratch *scratch);

/* Merges ids [*count] in place and shortens *count. O(n log n). 0 or ERROR_MEMORY; *count < 2^31. */
int bpe_merge(const struct bpe *bpe, struct bpe_scratch *scratch, int32_t *ids, size_t *count);

#endif
