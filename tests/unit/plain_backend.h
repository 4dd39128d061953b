/* SPDX-License-Identifier: Apache-2.0
 *
 * A backend in plain memory that can do just what the KV cache asks of it: allocate, upload, download, copy, move,
 * clear and poison, for KV_F32, and write copies of page tables. Every other operation is absent (NULL). It counts what
 * it is asked for, and can pass it all on to another backend.
 */
#ifndef TESTS_PLAIN_BACKEND_H
#define TESTS_PLAIN_BACKEND_H

#include "engine/backend.h"

struct plain_backend {
    struct backend backend;
    struct backend *behind; /* carries everything out; NULL: plain memory */
    uint64_t pages_copied;
    uint64_t slots_moved;
    uint64_t table_numbers, table_calls; /* of write_tables */
    bool fail_allocate;
};

void plain_backend_open(struct plain_backend *plain);
/* In front of the backend that is chosen (chosen_backend.h), which plain_backend_close closes. */
void plain_backend_open_chosen(struct plain_backend *plain);
void plain_backend_close(struct plain_backend *plain);

/* A page as it is in host memory: plain_page is a copy, which the caller frees, and plain_page_write puts it back. */
float *plain_page(struct backend *plain, const struct kv_pool *pool, uint32_t page);
void plain_page_write(struct backend *plain, const struct kv_pool *pool, uint32_t page, const float *from);

/* Where a number of a page in host memory lies. */
float *plain_key(float *page, const struct kv_layout *layout, uint32_t place, uint32_t channel);
float *plain_value(float *page, const struct kv_layout *layout, uint32_t place, uint32_t channel);
int32_t *plain_position(float *page, const struct kv_layout *layout, uint32_t place);

/* The page is as poison_pages leaves it. */
bool plain_is_poisoned(struct backend *plain, const struct kv_pool *pool, uint32_t page);

#endif
