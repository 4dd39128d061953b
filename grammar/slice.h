/* SPDX-License-Identifier: Apache-2.0
 *
 * Which tokens, and ends of tokens, consist of the bytes of a set alone, as patterns want to know: of [a-z]{2,8} those
 * of up to eight letters may follow at once, and branches of the vocabulary's trie that hold no others need not be
 * walked.
 *
 * A slice is made when a mask first needs it, in some tenths of a millisecond, and kept with the vocabulary for all
 * requests; of more than SLICES_MAX those go that were not used for longest. Safe on several threads.
 */
#ifndef GRAMMAR_SLICE_H
#define GRAMMAR_SLICE_H

#include "grammar/expression.h"
#include "grammar/vocabulary.h"

enum {
    SLICES_MAX = 32,
    SLICES_AHEAD = 8,
    SLICE_LENGTHS = 16,
    SLICE_OTHERS = 255,
};

struct slice {
    struct byte_set set;
    uint32_t *tokens; /* [SLICE_LENGTHS + 1][words]: those of at most so many bytes, all of the set */
    uint8_t *below;   /* [all.count] a token that goes through a node has at most so many bytes from the node's own on,
                         all of the set; SLICE_OTHERS: not so */
    uint32_t users;   /* of the cache, as the next */
    uint64_t last_use;
};

struct slice_cache;                               /* opaque */
struct slice_cache *slice_cache_create(void);     /* NULL: no memory */
void slice_cache_free(struct slice_cache *cache); /* NULL allowed */

/* NULL: no memory for it, or all are in use. To be given back. */
const struct slice *slice_take(const struct grammar_vocabulary *vocabulary, const struct byte_set *set);
void slice_give_back(const struct grammar_vocabulary *vocabulary, const struct slice *slice);

/* Makes the first SLICES_AHEAD slices that a grammar will want: on the thread that compiles it, so that the one that
 * makes masks need not. */
void slices_prepare(const struct grammar_vocabulary *vocabulary, const struct expression_pool *pool);

#endif
