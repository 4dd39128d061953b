/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/chosen_backend.h"

#include <stdlib.h>
#include <string.h>

const char *chosen_backend(void) {
    const char *name = getenv("DISTILLCACHE_TEST_BACKEND");
    return name != NULL && name[0] != '\0' ? name : "cpu";
}

bool chosen_backend_is_cpu(void) {
    return strcmp(chosen_backend(), "cpu") == 0;
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
    return chosen_backend_read(backend, (const char *)pool->base + page * pool->page_bytes, pool->page_bytes);
}
