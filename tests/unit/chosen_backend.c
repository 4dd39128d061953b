/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/chosen_backend.h"

#include <stdlib.h>
#include <string.h>

const char *chosen_backend(void) {
    const char *name = getenv("DISTILLCACHE_TEST_BACKEND");
    return name != NULL && name[0] != '\0' ? name : "cpu";
}

uint32_t chosen_backend_ranks(void) {
    const char *ranks = getenv("DISTILLCACHE_TEST_RANKS");
    return ranks != NULL && ranks[0] != '\0' ? (uint32_t)strtoul(ranks, NULL, 10) : 1;
}

const char *chosen_backend_all_reduce(void) {
    return getenv("DISTILLCACHE_TEST_ALL_REDUCE");
}

uint32_t chosen_backend_devices(void) {
    const char *devices = getenv("DISTILLCACHE_TEST_DEVICES");
    return devices != NULL && devices[0] != '\0' ? (uint32_t)strtoul(devices, NULL, 10) : UINT32_MAX;
}

bool chosen_backend_is_cpu(void) {
    return strcmp(chosen_backend(), "cpu") == 0 && chosen_backend_ranks() == 1;
}

uint32_t chosen_backend_share(uint32_t on_the_cpu, uint32_t elsewhere) {
    return chosen_backend_is_cpu() ? on_the_cpu : elsewhere;
}

void *chosen_backend_read(struct backend *backend, const void *memory, size_t bytes) {
    void *copy = malloc(bytes + 1);
    backend->operations->download(backend, copy, memory, bytes);
    return copy;
}

void *chosen_backend_page(struct backend *backend, const struct kv_pool *pool, uint32_t page) {
    struct backend *on = backend_of_rank(backend, kv_pool_rank(pool, page));
    return chosen_backend_read(on, kv_pool_address(backend, pool, page), pool->page_bytes);
}
