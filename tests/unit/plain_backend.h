/* SPDX-License-Identifier: Apache-2.0
 *
 * A backend in plain memory that can do just what the KV cache asks of it: allocate, upload, download, copy, move,
 * clear and poison, for KV_F32. Every other operation is absent (NULL).
 */
#ifndef TESTS_PLAIN_BACKEND_H
#define TESTS_PLAIN_BACKEND_H

#include "engine/backend.h"

struct plain_backend {
    struct backend backend;
    uint64_t pages_copied;
    uint64_t slots_moved;
    bool fail_allocate;
};

void plain_backend_open(struct plain_backend *plain);

/* Where a number of a page lies. */
float *plain_key(const struct kv_pool *pool, uint32_t page, uint32_t place, uint32_t channel);
float *plain_value(const struct kv_pool *pool, uint32_t page, uint32_t place, uint32_t channel);
int32_t *plain_position(const struct kv_pool *pool, uint32_t page, uint32_t place);

/* The page is as poison_pages leaves it. */
bool plain_is_poisoned(const struct kv_pool *pool, uint32_t page);

#endif
