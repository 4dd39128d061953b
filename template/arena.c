/* SPDX-License-Identifier: Apache-2.0 */
#include "template/arena.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK_BYTES = 16384, ALIGNMENT = 16 };

struct arena_chunk {
    struct arena_chunk *next;
    size_t used, bytes;
    _Alignas(ALIGNMENT) unsigned char data[];
};

static _Noreturn void arena_no_memory(struct arena *arena) {
    arena->code = error_set(arena->error, ERROR_MEMORY,
        "line %u: the template needs more memory than it may have (%zu)", arena->line, arena->bytes_max);
    longjmp(arena->failed, 1);
}

static struct arena_chunk *arena_add_chunk(struct arena *arena, size_t bytes) {
    size_t room = bytes > CHUNK_BYTES ? bytes : CHUNK_BYTES;
    if (bytes > arena->bytes_max || arena->bytes > arena->bytes_max - bytes)
        arena_no_memory(arena);
    struct arena_chunk *chunk = calloc(1, sizeof *chunk + room);
    if (chunk == NULL)
        arena_no_memory(arena);
    chunk->bytes = room;
    chunk->next = arena->chunks;
    arena->chunks = chunk;
    arena->bytes += room;
    return chunk;
}

void *arena_take(struct arena *arena, size_t bytes) {
    if (bytes > SIZE_MAX / 2)
        arena_no_memory(arena);
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    struct arena_chunk *chunk = arena->chunks;
    if (chunk == NULL || chunk->bytes - chunk->used < bytes)
        chunk = arena_add_chunk(arena, bytes);
    void *memory = chunk->data + chunk->used;
    chunk->used += bytes;
    return memory;
}

void *arena_grow(struct arena *arena, void *elements, size_t *capacity, size_t wanted, size_t element_bytes) {
    if (wanted <= *capacity)
        return elements;
    size_t room = *capacity < 4 ? 4 : *capacity * 2;
    if (room < wanted)
        room = wanted;
    if (room > SIZE_MAX / 4 / element_bytes)
        arena_no_memory(arena);
    void *grown = arena_take(arena, room * element_bytes);
    if (*capacity > 0)
        memcpy(grown, elements, *capacity * element_bytes);
    *capacity = room;
    return grown;
}

void arena_release(struct arena *arena) {
    for (struct arena_chunk *chunk = arena->chunks, *next; chunk != NULL; chunk = next) {
        next = chunk->next;
        free(chunk);
    }
    arena->chunks = NULL;
    arena->bytes = 0;
}

void arena_fail(struct arena *arena, const char *format, ...) {
    char message[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    arena->code = error_set(arena->error, ERROR_FORMAT, "line %u: %s", arena->line, message);
    longjmp(arena->failed, 1);
}
