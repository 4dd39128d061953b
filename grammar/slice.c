/* SPDX-License-Identifier: Apache-2.0 */
#include "grammar/slice.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

struct slice_cache {
    pthread_mutex_t lock;
    struct slice *slices[SLICES_MAX];
    uint64_t uses;
};

struct slice_cache *slice_cache_create(void) {
    struct slice_cache *cache = calloc(1, sizeof *cache);
    if (cache != NULL && pthread_mutex_init(&cache->lock, NULL) != 0) {
        free(cache);
        return NULL;
    }
    return cache;
}

static void free_slice(struct slice *slice) {
    if (slice == NULL)
        return;
    free(slice->tokens);
    free(slice->below);
    free(slice);
}

void slice_cache_free(struct slice_cache *cache) {
    if (cache == NULL)
        return;
    for (int i = 0; i < SLICES_MAX; i++)
        free_slice(cache->slices[i]);
    pthread_mutex_destroy(&cache->lock);
    free(cache);
}

/* ---- making one ---- */

/* Marks each token by its own length; the lengths are joined afterwards. */
static void find_tokens(const struct grammar_vocabulary *vocabulary, struct slice *slice) {
    const struct trie *trie = &vocabulary->all;
    size_t words = vocabulary->words;
    for (uint32_t i = 0; i < trie->count;) {
        const struct trie_node *node = &trie->nodes[i];
        if (node->depth >= SLICE_LENGTHS || !byte_set_has(&slice->set, node->byte)) {
            i = node->skip;
            continue;
        }
        uint32_t *mask = slice->tokens + (node->depth + 1) * words;
        for (uint32_t k = 0; k < node->tokens; k++) {
            uint32_t token = (uint32_t)trie->tokens[node->first + k];
            mask[token / 32] |= 1u << token % 32;
        }
        i++;
    }
    for (size_t i = words; i < (SLICE_LENGTHS + 1) * words; i++)
        slice->tokens[i] |= slice->tokens[i - words];
}

/* From the last node to the first: what is below a node is known before it. children: [longest + 1] zeros; the most of
 * the children met so far, by the depth of their parent. */
static void find_below(const struct grammar_vocabulary *vocabulary, struct slice *slice, uint8_t *children) {
    const struct trie *trie = &vocabulary->all;
    for (uint32_t i = trie->count; i > 0; i--) {
        const struct trie_node *node = &trie->nodes[i - 1];
        uint8_t most = children[node->depth + 1];
        children[node->depth + 1] = 0;
        if (!byte_set_has(&slice->set, node->byte) || most >= SLICE_OTHERS - 1)
            most = SLICE_OTHERS;
        else
            most++;
        slice->below[i - 1] = most;
        if (most > children[node->depth])
            children[node->depth] = most;
    }
}

static struct slice *make_slice(const struct grammar_vocabulary *vocabulary, const struct byte_set *set) {
    struct slice *slice = calloc(1, sizeof *slice);
    uint8_t *children = calloc(vocabulary->longest + 2, 1);
    if (slice != NULL) {
        slice->set = *set;
        slice->tokens = calloc((SLICE_LENGTHS + 1) * (size_t)vocabulary->words, sizeof *slice->tokens);
        slice->below = malloc((size_t)vocabulary->all.count + 1);
    }
    if (slice == NULL || children == NULL || slice->tokens == NULL || slice->below == NULL) {
        free_slice(slice);
        slice = NULL;
    } else {
        find_tokens(vocabulary, slice);
        find_below(vocabulary, slice, children);
    }
    free(children);
    return slice;
}

/* ---- the cache ---- */

static struct slice *use_slice(struct slice_cache *cache, const struct byte_set *set) {
    for (int i = 0; i < SLICES_MAX; i++) {
        struct slice *slice = cache->slices[i];
        if (slice == NULL || memcmp(&slice->set, set, sizeof *set) != 0)
            continue;
        slice->users++;
        slice->last_use = ++cache->uses;
        return slice;
    }
    return NULL;
}

/* A free place, or that of the slice that was not used for longest; NULL: all are in use. */
static struct slice **find_room(struct slice_cache *cache) {
    struct slice **room = NULL;
    for (int i = 0; i < SLICES_MAX; i++) {
        struct slice **place = &cache->slices[i];
        if (*place == NULL)
            return place;
        if ((*place)->users == 0 && (room == NULL || (*place)->last_use < (*room)->last_use))
            room = place;
    }
    return room;
}

/* Another thread may have made the same meanwhile. */
const struct slice *slice_take(const struct grammar_vocabulary *vocabulary, const struct byte_set *set) {
    struct slice_cache *cache = vocabulary->slices;
    pthread_mutex_lock(&cache->lock);
    struct slice *slice = use_slice(cache, set);
    pthread_mutex_unlock(&cache->lock);
    if (slice != NULL)
        return slice;
    struct slice *made = make_slice(vocabulary, set);
    if (made == NULL)
        return NULL;
    pthread_mutex_lock(&cache->lock);
    slice = use_slice(cache, set);
    struct slice **room = slice == NULL ? find_room(cache) : NULL;
    if (room != NULL) {
        struct slice *dropped = *room;
        *room = slice = made;
        slice->users = 1;
        slice->last_use = ++cache->uses;
        made = dropped;
    }
    pthread_mutex_unlock(&cache->lock);
    free_slice(made);
    return slice;
}

void slice_give_back(const struct grammar_vocabulary *vocabulary, const struct slice *slice) {
    struct slice_cache *cache = vocabulary->slices;
    pthread_mutex_lock(&cache->lock);
    ((struct slice *)slice)->users--;
    pthread_mutex_unlock(&cache->lock);
}

void slices_prepare(const struct grammar_vocabulary *vocabulary, const struct expression_pool *pool) {
    uint32_t met[SLICES_AHEAD], count = 0;
    for (uint32_t i = 0; i < pool->count && count < SLICES_AHEAD; i++) {
        const struct expression *x = &pool->expressions[i];
        bool again = x->kind != KIND_REPEAT || x->b == EXPRESSION_NO_RUN;
        for (uint32_t k = 0; k < count && !again; k++)
            again = met[k] == x->b;
        if (again)
            continue;
        met[count++] = x->b;
        const struct slice *slice = slice_take(vocabulary, &pool->sets[x->b]);
        if (slice != NULL)
            slice_give_back(vocabulary, slice);
    }
}
