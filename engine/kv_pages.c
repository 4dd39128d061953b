/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/kv_pages.h"

#include <stdlib.h>
#include <string.h>

static void push_free(struct kv_pages *pages, uint32_t page) {
    uint32_t rank = kv_pool_rank(&pages->pool, page);
    pages->free_list[rank * pages->pool.rank_pages + pages->free_count[rank]++] = page;
    if (pages->poison_free)
        pages->backend->operations->poison_pages(pages->backend, &pages->pool, &page, 1);
}

static int allocate_all(struct kv_pages *pages, bool prefix_sharing) {
    pages->states = calloc(pages->total, sizeof *pages->states);
    pages->free_list = calloc(pages->total, sizeof *pages->free_list);
    if (pages->states == NULL || pages->free_list == NULL)
        return ERROR_MEMORY;
    if (prefix_sharing) {
        pages->index = prefix_index_create(pages->total / pages->heads, pages->heads);
        pages->attachments = calloc(pages->total / pages->heads, sizeof(struct kv_attachment *));
        if (pages->index == NULL || pages->attachments == NULL)
            return ERROR_MEMORY;
    }
    pages->pool.base = pages->backend->operations->allocate(
        pages->backend, (size_t)(pages->total / pages->ranks) * pages->pool.page_bytes);
    return pages->pool.base == NULL ? ERROR_MEMORY : 0;
}

int kv_pages_create(struct kv_pages *pages, struct backend *backend, const struct kv_layout *layout, size_t bytes,
    bool prefix_sharing, bool poison_free, struct error *error) {
    *pages = (struct kv_pages){.backend = backend, .poison_free = poison_free};
    uint64_t heads = (uint64_t)layout->layers * layout->kv_heads;
    pages->ranks = backend_ranks(backend);
    if (heads == 0 || heads > UINT32_MAX / 2 || layout->head_dim == 0 || layout->kv_heads % pages->ranks != 0)
        return error_set(error, ERROR_INVALID, "a KV cache of %u layers, %u KV heads and %u channels is not possible",
            layout->layers, layout->kv_heads, layout->head_dim);
    size_t page_bytes = kv_page_bytes(layout);
    size_t total = bytes / page_bytes;
    if (total < heads)
        return error_set(error, ERROR_INVALID, "KV memory of %zu bytes is too small: one page for each head takes %zu",
            bytes, (size_t)heads * page_bytes);
    if (total > UINT32_MAX / 2)
        total = UINT32_MAX / 2;
    total -= total % pages->ranks;
    pages->total = (uint32_t)total;
    pages->heads = (uint32_t)heads;
    pages->pool = (struct kv_pool){.page_bytes = page_bytes, .layout = *layout};
    if (pages->ranks > 1)
        pages->pool.rank_pages = pages->total / pages->ranks;
    if (allocate_all(pages, prefix_sharing) != 0) {
        kv_pages_free(pages);
        return error_set(
            error, ERROR_MEMORY, "no memory for a KV cache of %zu pages, %zu bytes", total, total * page_bytes);
    }
    for (uint32_t i = 0; i < pages->total; i++) {
        pages->states[i].block = PREFIX_NO_BLOCK;
        push_free(pages, pages->total - 1 - i); /* page 0 is taken first */
    }
    return 0;
}

void kv_pages_free(struct kv_pages *pages) {
    while (pages->oldest != NULL)
        kv_pages_release_attachments(pages, pages->oldest->block);
    free(pages->attachments);
    if (pages->pool.base != NULL)
        pages->backend->operations->release(pages->backend, pages->pool.base);
    prefix_index_free(pages->index);
    free(pages->states);
    free(pages->free_list);
    *pages = (struct kv_pages){0};
}

uint32_t kv_pages_take(struct kv_pages *pages, uint32_t rank) {
    while (pages->free_count[rank] == 0)
        kv_pages_unpublish(pages, prefix_index_oldest(pages->index));
    uint32_t page = pages->free_list[rank * pages->pool.rank_pages + --pages->free_count[rank]];
    pages->states[page].references = 1;
    kv_pages_fit_attachments(pages);
    return page;
}

void kv_pages_hold(struct kv_pages *pages, uint32_t page) {
    struct kv_page_state *state = &pages->states[page];
    if (state->references++ > 0) {
        pages->shared_count += state->references == 2;
        return;
    }
    pages->idle_count[kv_pool_rank(&pages->pool, page)]--;
    prefix_index_page_held(pages->index, state->block);
    kv_pages_fit_attachments(pages);
}

void kv_pages_drop(struct kv_pages *pages, uint32_t page) {
    struct kv_page_state *state = &pages->states[page];
    if (--state->references > 0) {
        pages->shared_count -= state->references == 1;
        return;
    }
    if (state->block == PREFIX_NO_BLOCK) {
        push_free(pages, page);
        return;
    }
    pages->idle_count[kv_pool_rank(&pages->pool, page)]++;
    prefix_index_page_unheld(pages->index, state->block);
}

uint32_t kv_pages_publish(
    struct kv_pages *pages, uint32_t parent, const int32_t tokens[KV_PAGE_SLOTS], const uint32_t *block_pages) {
    for (uint32_t i = 0; i < pages->heads; i++)
        if (pages->states[block_pages[i]].block != PREFIX_NO_BLOCK)
            return PREFIX_NO_BLOCK;
    uint32_t block = prefix_index_add(pages->index, parent, tokens, block_pages);
    for (uint32_t i = 0; i < pages->heads; i++)
        pages->states[block_pages[i]].block = block;
    return block;
}

static void unpublish_leaf(struct kv_pages *pages, uint32_t block) {
    const uint32_t *block_pages = prefix_index_pages(pages->index, block);
    kv_pages_release_attachments(pages, block);
    prefix_index_remove(pages->index, block);
    for (uint32_t i = 0; i < pages->heads; i++) {
        struct kv_page_state *state = &pages->states[block_pages[i]];
        state->block = PREFIX_NO_BLOCK;
        if (state->references == 0) {
            pages->idle_count[kv_pool_rank(&pages->pool, block_pages[i])]--;
            push_free(pages, block_pages[i]);
        }
    }
}

/* Without its parent a block can never be found again, so that the whole subtree goes, leaves first. */
void kv_pages_unpublish(struct kv_pages *pages, uint32_t block) {
    const struct prefix_block *blocks = pages->index->blocks;
    uint32_t at = block;
    while (true) {
        while (blocks[at].first_child != PREFIX_NO_BLOCK)
            at = blocks[at].first_child;
        uint32_t parent = blocks[at].parent;
        unpublish_leaf(pages, at);
        if (at == block)
            return;
        at = parent;
    }
}
