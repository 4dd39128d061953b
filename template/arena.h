/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of one parsed template, or of one rendering: taken piece by piece, released together. What goes wrong leaves
 * by longjmp to whoever made the arena, which releases it: nothing else is held while a template is parsed or
 * evaluated, so nothing leaks, and no function in between has to hand errors on.
 */
#ifndef TEMPLATE_ARENA_H
#define TEMPLATE_ARENA_H

#include "engine/error.h"

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>

struct arena_chunk;

struct arena {
    jmp_buf failed;      /* set by the maker before anything is taken */
    struct error *error; /* filled before the jump; NULL allowed */
    int code;            /* the error's */
    uint32_t line;       /* of the template's source, for messages; 0: none */
    size_t bytes, bytes_max;
    struct arena_chunk *chunks;
};

/* Zeroed memory, aligned for any type. Fails with ERROR_MEMORY beyond bytes_max. */
void *arena_take(struct arena *arena, size_t bytes);
/* Room for `wanted` elements where *capacity are; the old ones are copied. Returns the elements. */
void *arena_grow(struct arena *arena, void *elements, size_t *capacity, size_t wanted, size_t element_bytes);
void arena_release(struct arena *arena);

/* "line N: ..." as ERROR_FORMAT. */
_Noreturn void arena_fail(struct arena *arena, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
