/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/plain_backend.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void *plain_allocate(struct backend *backend, size_t bytes) {
    if (((struct plain_backend *)backend)->fail_allocate)
        return NULL;
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (memory != NULL)
        memset(memory, 0, bytes);
    return memory;
}

static void plain_release(struct backend *backend, void *memory) {
    (void)backend;
    free(memory);
}

static void plain_copy(struct backend *backend, void *to, const void *from, size_t bytes) {
    (void)backend;
    memcpy(to, from, bytes);
}

static float *page_start(const struct kv_pool *pool, uint32_t page) {
    return (float *)((char *)pool->base + page * pool->page_bytes);
}

float *plain_key(const struct kv_pool *pool, uint32_t page, uint32_t place, uint32_t channel) {
    return page_start(pool, page) + channel * KV_PAGE_SLOTS + place;
}

float *plain_value(const struct kv_pool *pool, uint32_t page, uint32_t place, uint32_t channel) {
    uint32_t head_dim = pool->layout.head_dim;
    return page_start(pool, page) + head_dim * KV_PAGE_SLOTS + place * head_dim + channel;
}

int32_t *plain_position(const struct kv_pool *pool, uint32_t page, uint32_t place) {
    return (int32_t *)(page_start(pool, page) + 2 * pool->layout.head_dim * KV_PAGE_SLOTS) + place;
}

static void plain_copy_pages(
    struct backend *backend, const struct kv_pool *pool, const uint32_t *from, const uint32_t *to, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        memcpy(page_start(pool, to[i]), page_start(pool, from[i]), pool->page_bytes);
    ((struct plain_backend *)backend)->pages_copied += count;
}

static void plain_move_slots(struct backend *backend, const struct kv_pool *pool, const uint32_t *pages,
    const uint32_t *from, const uint32_t *to, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        uint32_t from_page = pages[from[i] / KV_PAGE_SLOTS], from_place = from[i] % KV_PAGE_SLOTS;
        uint32_t to_page = pages[to[i] / KV_PAGE_SLOTS], to_place = to[i] % KV_PAGE_SLOTS;
        for (uint32_t c = 0; c < pool->layout.head_dim; c++) {
            *plain_key(pool, to_page, to_place, c) = *plain_key(pool, from_page, from_place, c);
            *plain_value(pool, to_page, to_place, c) = *plain_value(pool, from_page, from_place, c);
        }
        *plain_position(pool, to_page, to_place) = *plain_position(pool, from_page, from_place);
    }
    ((struct plain_backend *)backend)->slots_moved += count;
}

static void plain_clear_slots(
    struct backend *backend, const struct kv_pool *pool, const uint32_t *pages, uint32_t first, uint32_t end) {
    (void)backend;
    for (uint32_t slot = first; slot < end; slot++)
        *plain_position(pool, pages[slot / KV_PAGE_SLOTS], slot % KV_PAGE_SLOTS) = KV_NO_POSITION;
}

static void plain_poison_pages(
    struct backend *backend, const struct kv_pool *pool, const uint32_t *pages, uint32_t count) {
    (void)backend;
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t place = 0; place < KV_PAGE_SLOTS; place++) {
            for (uint32_t c = 0; c < pool->layout.head_dim; c++)
                *plain_key(pool, pages[i], place, c) = *plain_value(pool, pages[i], place, c) = NAN;
            *plain_position(pool, pages[i], place) = KV_NO_POSITION;
        }
}

bool plain_is_poisoned(const struct kv_pool *pool, uint32_t page) {
    for (uint32_t place = 0; place < KV_PAGE_SLOTS; place++) {
        for (uint32_t c = 0; c < pool->layout.head_dim; c++)
            if (!isnan(*plain_key(pool, page, place, c)) || !isnan(*plain_value(pool, page, place, c)))
                return false;
        if (*plain_position(pool, page, place) != KV_NO_POSITION)
            return false;
    }
    return true;
}

void plain_backend_open(struct plain_backend *plain) {
    static const struct backend_operations operations = {
        .name = "plain",
        .allocate = plain_allocate,
        .release = plain_release,
        .upload = plain_copy,
        .download = plain_copy,
        .copy_pages = plain_copy_pages,
        .move_slots = plain_move_slots,
        .clear_slots = plain_clear_slots,
        .poison_pages = plain_poison_pages,
    };
    *plain = (struct plain_backend){.backend.operations = &operations};
}
