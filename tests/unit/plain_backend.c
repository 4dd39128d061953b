/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/plain_backend.h"
#include "tests/unit/chosen_backend.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The backend behind this one, or NULL. */
static struct backend *behind(struct backend *backend) {
    return ((struct plain_backend *)backend)->behind;
}

static void *plain_allocate(struct backend *backend, size_t bytes) {
    if (((struct plain_backend *)backend)->fail_allocate)
        return NULL;
    if (behind(backend) != NULL)
        return behind(backend)->operations->allocate(behind(backend), bytes);
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (memory != NULL)
        memset(memory, 0, bytes);
    return memory;
}

static void plain_release(struct backend *backend, void *memory) {
    if (behind(backend) != NULL)
        behind(backend)->operations->release(behind(backend), memory);
    else
        free(memory);
}

static void plain_upload(struct backend *backend, void *to, const void *from, size_t bytes) {
    if (behind(backend) != NULL)
        behind(backend)->operations->upload(behind(backend), to, from, bytes);
    else
        memcpy(to, from, bytes);
}

static void plain_download(struct backend *backend, void *to, const void *from, size_t bytes) {
    if (behind(backend) != NULL)
        behind(backend)->operations->download(behind(backend), to, from, bytes);
    else
        memcpy(to, from, bytes);
}

static float *page_start(const struct kv_pool *pool, uint32_t page) {
    return (float *)((char *)pool->base + page * pool->page_bytes);
}

float *plain_key(float *page, const struct kv_layout *layout, uint32_t place, uint32_t channel) {
    (void)layout;
    return page + channel * KV_PAGE_SLOTS + place;
}

float *plain_value(float *page, const struct kv_layout *layout, uint32_t place, uint32_t channel) {
    return page + layout->head_dim * KV_PAGE_SLOTS + place * layout->head_dim + channel;
}

int32_t *plain_position(float *page, const struct kv_layout *layout, uint32_t place) {
    return (int32_t *)(page + 2 * layout->head_dim * KV_PAGE_SLOTS) + place;
}

float *plain_page(struct backend *plain, const struct kv_pool *pool, uint32_t page) {
    float *copy = malloc(pool->page_bytes);
    plain_download(plain, copy, page_start(pool, page), pool->page_bytes);
    return copy;
}

void plain_page_write(struct backend *plain, const struct kv_pool *pool, uint32_t page, const float *from) {
    plain_upload(plain, page_start(pool, page), from, pool->page_bytes);
}

static void plain_copy_pages(
    struct backend *backend, const struct kv_pool *pool, const uint32_t *from, const uint32_t *to, uint32_t count) {
    ((struct plain_backend *)backend)->pages_copied += count;
    if (behind(backend) != NULL) {
        behind(backend)->operations->copy_pages(behind(backend), pool, from, to, count);
        return;
    }
    for (uint32_t i = 0; i < count; i++)
        memcpy(page_start(pool, to[i]), page_start(pool, from[i]), pool->page_bytes);
}

static void move_slot(const struct kv_pool *pool, float *from_page, uint32_t from, float *to_page, uint32_t to) {
    const struct kv_layout *layout = &pool->layout;
    for (uint32_t c = 0; c < layout->head_dim; c++) {
        *plain_key(to_page, layout, to, c) = *plain_key(from_page, layout, from, c);
        *plain_value(to_page, layout, to, c) = *plain_value(from_page, layout, from, c);
    }
    *plain_position(to_page, layout, to) = *plain_position(from_page, layout, from);
}

static void plain_move_slots(struct backend *backend, const struct kv_pool *pool, const uint32_t *pages,
    const uint32_t *from, const uint32_t *to, uint32_t count) {
    ((struct plain_backend *)backend)->slots_moved += count;
    if (behind(backend) != NULL) {
        behind(backend)->operations->move_slots(behind(backend), pool, pages, from, to, count);
        return;
    }
    for (uint32_t i = 0; i < count; i++)
        move_slot(pool, page_start(pool, pages[from[i] / KV_PAGE_SLOTS]), from[i] % KV_PAGE_SLOTS,
            page_start(pool, pages[to[i] / KV_PAGE_SLOTS]), to[i] % KV_PAGE_SLOTS);
}

static void plain_clear_slots(
    struct backend *backend, const struct kv_pool *pool, const uint32_t *pages, uint32_t first, uint32_t end) {
    if (behind(backend) != NULL) {
        behind(backend)->operations->clear_slots(behind(backend), pool, pages, first, end);
        return;
    }
    for (uint32_t slot = first; slot < end; slot++)
        *plain_position(page_start(pool, pages[slot / KV_PAGE_SLOTS]), &pool->layout, slot % KV_PAGE_SLOTS) =
            KV_NO_POSITION;
}

static void plain_poison_pages(
    struct backend *backend, const struct kv_pool *pool, const uint32_t *pages, uint32_t count) {
    if (behind(backend) != NULL) {
        behind(backend)->operations->poison_pages(behind(backend), pool, pages, count);
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        float *page = page_start(pool, pages[i]);
        for (uint32_t place = 0; place < KV_PAGE_SLOTS; place++) {
            for (uint32_t c = 0; c < pool->layout.head_dim; c++)
                *plain_key(page, &pool->layout, place, c) = *plain_value(page, &pool->layout, place, c) = NAN;
            *plain_position(page, &pool->layout, place) = KV_NO_POSITION;
        }
    }
}

static void plain_write_tables(struct backend *backend, const struct kv_table_write *writes, uint32_t count) {
    struct plain_backend *plain = (struct plain_backend *)backend;
    bool passes = behind(backend) != NULL && behind(backend)->operations->write_tables != NULL;
    for (uint32_t i = 0; i < count; i++) {
        if (!passes)
            memcpy(writes[i].to, writes[i].from, writes[i].count * sizeof *writes[i].to);
        plain->table_numbers += writes[i].count;
    }
    if (passes)
        behind(backend)->operations->write_tables(behind(backend), writes, count);
    plain->table_calls++;
}

static bool page_is_poisoned(float *page, const struct kv_layout *layout) {
    for (uint32_t place = 0; place < KV_PAGE_SLOTS; place++) {
        for (uint32_t c = 0; c < layout->head_dim; c++)
            if (!isnan(*plain_key(page, layout, place, c)) || !isnan(*plain_value(page, layout, place, c)))
                return false;
        if (*plain_position(page, layout, place) != KV_NO_POSITION)
            return false;
    }
    return true;
}

bool plain_is_poisoned(struct backend *plain, const struct kv_pool *pool, uint32_t page) {
    float *copy = plain_page(plain, pool, page);
    bool poisoned = page_is_poisoned(copy, &pool->layout);
    free(copy);
    return poisoned;
}

void plain_backend_open(struct plain_backend *plain) {
    static const struct backend_operations operations = {
        .name = "plain",
        .allocate = plain_allocate,
        .release = plain_release,
        .upload = plain_upload,
        .download = plain_download,
        .copy_pages = plain_copy_pages,
        .move_slots = plain_move_slots,
        .clear_slots = plain_clear_slots,
        .write_tables = plain_write_tables,
        .poison_pages = plain_poison_pages,
    };
    *plain = (struct plain_backend){.backend.operations = &operations};
}

void plain_backend_open_chosen(struct plain_backend *plain) {
    struct backend_options options = {.name = chosen_backend()};
    struct error error;
    plain_backend_open(plain);
    if (chosen_backend_is_cpu())
        return;
    plain->behind = backend_open(&options, &error);
    if (plain->behind == NULL) {
        fprintf(stderr, "%s\n", error.message);
        exit(1);
    }
}

void plain_backend_close(struct plain_backend *plain) {
    if (plain->behind != NULL)
        plain->behind->operations->close(plain->behind);
}
