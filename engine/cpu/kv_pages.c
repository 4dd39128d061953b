/* SPDX-License-Identifier: Apache-2.0
 *
 * Operations on pages that compute nothing: copies, moves, marks.
 */
#include "engine/cpu/attend.h"

#include <string.h>

void cpu_copy_pages(
    struct backend *backend, const struct kv_pool *pool, const uint32_t *from, const uint32_t *to, uint32_t count) {
    (void)backend;
    for (uint32_t i = 0; i < count; i++) {
        if (from[i] != to[i])
            memcpy(kv_pool_page(pool, to[i]), kv_pool_page(pool, from[i]), pool->page_bytes);
    }
}

/* Slot `from_place` of one page to `to_place` of another (or the same). */
static void slot_move(const struct kv_layout *layout, char *from, uint32_t from_place, char *to, uint32_t to_place) {
    size_t bytes = kv_number_bytes(layout->format), row = layout->head_dim * bytes;
    for (uint32_t channel = 0; channel < layout->head_dim; channel++) {
        size_t base = (size_t)channel * KV_PAGE_SLOTS;
        memcpy(to + (base + to_place) * bytes, from + (base + from_place) * bytes, bytes);
    }
    memmove(kv_page_values(layout, to) + to_place * row, kv_page_values(layout, from) + from_place * row, row);
    kv_page_positions(layout, to)[to_place] = kv_page_positions(layout, from)[from_place];
}

void cpu_move_slots(struct backend *backend, const struct kv_pool *pool, const uint32_t *pages, const uint32_t *from,
    const uint32_t *to, uint32_t count) {
    (void)backend;
    for (uint32_t i = 0; i < count; i++) {
        if (from[i] == to[i])
            continue;
        slot_move(&pool->layout, kv_pool_page(pool, pages[from[i] / KV_PAGE_SLOTS]), from[i] % KV_PAGE_SLOTS,
            kv_pool_page(pool, pages[to[i] / KV_PAGE_SLOTS]), to[i] % KV_PAGE_SLOTS);
    }
}

void cpu_clear_slots(
    struct backend *backend, const struct kv_pool *pool, const uint32_t *pages, uint32_t first, uint32_t end) {
    (void)backend;
    for (uint32_t slot = first; slot < end; slot++) {
        char *page = kv_pool_page(pool, pages[slot / KV_PAGE_SLOTS]);
        kv_page_positions(&pool->layout, page)[slot % KV_PAGE_SLOTS] = KV_NO_POSITION;
    }
}

/* All bits set is NaN in every format. */
void cpu_poison_pages(struct backend *backend, const struct kv_pool *pool, const uint32_t *pages, uint32_t count) {
    (void)backend;
    for (uint32_t i = 0; i < count; i++) {
        char *page = kv_pool_page(pool, pages[i]);
        memset(page, 0xff, pool->page_bytes);
        for (uint32_t place = 0; place < KV_PAGE_SLOTS; place++)
            kv_page_positions(&pool->layout, page)[place] = KV_NO_POSITION;
    }
}
