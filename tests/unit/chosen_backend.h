/* SPDX-License-Identifier: Apache-2.0
 *
 * Which backend the tests of the engine use: the CPU's, or the one that DISTILLCACHE_TEST_BACKEND names ("cuda" in a
 * build with -Dcuda=emulated), and as how many ranks (DISTILLCACHE_TEST_RANKS; parallel/parallel.h), which add up as
 * DISTILLCACHE_TEST_ALL_REDUCE says. Read here and nowhere else.
 */
#ifndef TESTS_UNIT_CHOSEN_BACKEND_H
#define TESTS_UNIT_CHOSEN_BACKEND_H

#include "engine/backend.h"

/* For struct backend_options.name. */
const char *chosen_backend(void);
uint32_t chosen_backend_ranks(void); /* 1 as a rule */
const char *chosen_backend_all_reduce(void);
/* Devices that there are: DISTILLCACHE_TEST_DEVICES, or as many as anybody wants. */
uint32_t chosen_backend_devices(void);
/* The CPU, as one rank. */
bool chosen_backend_is_cpu(void);

/* What a test needs of a number: all of it on the CPU, some of it on several ranks or an emulated device, which
 * takes a hundred times as long. */
uint32_t chosen_backend_share(uint32_t on_the_cpu, uint32_t elsewhere);

/* A copy of a page of the pool, for tests that look into it; the caller frees it. */
void *chosen_backend_page(struct backend *backend, const struct kv_pool *pool, uint32_t page);
/* The same of other memory of the backend. */
void *chosen_backend_read(struct backend *backend, const void *memory, size_t bytes);

#endif
