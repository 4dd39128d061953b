/* SPDX-License-Identifier: Apache-2.0 */
#include "parallel/wire.h"

#include <stdlib.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "messages hold numbers as they lie in memory");

/* Memory of structs that were read, a list. */
struct space {
    struct space *next;
    _Alignas(16) char memory[];
};

void *wire_table_find(const struct wire_table *table, uint64_t address, size_t bytes) {
    uint32_t low = 0, high = table->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (table->ranges[middle].address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == 0)
        return NULL;
    const struct wire_range *range = &table->ranges[low - 1];
    uint64_t offset = address - range->address;
    return offset <= range->bytes && bytes <= range->bytes - offset ? range->memory + offset : NULL;
}

void wire_begin_writing(struct wire *wire) {
    wire->reading = wire->failed = false;
    wire->at = wire->size = 0;
}

void wire_begin_reading(struct wire *wire, void *bytes, size_t size, const struct wire_table *table) {
    *wire = (struct wire){.reading = true, .bytes = bytes, .size = size, .table = table};
}

void wire_end_reading(struct wire *wire) {
    for (struct space *space = wire->spaces, *next; space != NULL; space = next) {
        next = space->next;
        free(space);
    }
    wire->spaces = NULL;
}

void wire_free(struct wire *wire) {
    free(wire->bytes);
    *wire = (struct wire){0};
}

void wire_fail(struct wire *wire) {
    wire->failed = true;
    wire->at = wire->reading ? wire->size : 0;
}

bool wire_require(struct wire *wire, bool condition) {
    if (wire->reading && !condition)
        wire_fail(wire);
    return !wire->failed;
}

bool wire_is_done(const struct wire *wire) {
    return !wire->failed && wire->at == wire->size;
}

/* Room for so many more bytes. */
static bool reserve(struct wire *wire, size_t bytes) {
    if (wire->failed || bytes > SIZE_MAX / 4) {
        wire_fail(wire);
        return false;
    }
    if (wire->capacity - wire->at >= bytes)
        return true;
    size_t capacity = 2 * wire->capacity > wire->at + bytes ? 2 * wire->capacity : wire->at + bytes + 4096;
    uint8_t *grown = realloc(wire->bytes, capacity);
    if (grown == NULL) {
        wire_fail(wire);
        return false;
    }
    wire->bytes = grown;
    wire->capacity = capacity;
    return true;
}

void wire_raw(struct wire *wire, void *bytes, size_t size) {
    if (wire->reading) {
        if (size == 0)
            return;
        if (wire->failed || size > wire->size - wire->at) {
            wire_fail(wire);
            memset(bytes, 0, size);
            return;
        }
        memcpy(bytes, wire->bytes + wire->at, size);
    } else if (!reserve(wire, size)) {
        return;
    } else if (size > 0) {
        memcpy(wire->bytes + wire->at, bytes, size);
    }
    wire->at += size;
}

void wire_bool(struct wire *wire, bool *x) {
    uint8_t byte = !wire->reading && *x;
    wire_raw(wire, &byte, sizeof byte);
    wire_require(wire, byte <= 1);
    if (wire->reading)
        *x = byte == 1;
}

bool wire_is_there(struct wire *wire, bool there) {
    wire_bool(wire, &there);
    return there && !wire->failed;
}

void wire_text(struct wire *wire, char *text, size_t size) {
    uint32_t length = wire->reading ? 0 : (uint32_t)strnlen(text, size - 1);
    wire_u32(wire, &length);
    if (!wire_require(wire, length < size)) {
        if (wire->reading)
            text[0] = '\0';
        return;
    }
    wire_raw(wire, text, length);
    if (wire->reading)
        text[length] = '\0';
}

void wire_count(struct wire *wire, uint32_t *count, size_t bytes) {
    wire_u32(wire, count);
    if (wire->reading && *count > (wire->size - wire->at) / bytes) {
        wire_fail(wire);
        *count = 0;
    }
}

static void align(struct wire *wire) {
    static const uint8_t zeros[8];
    wire_raw(wire, (uint8_t[8]){0}, (sizeof zeros - wire->at % sizeof zeros) % sizeof zeros);
}

const void *wire_array_of(struct wire *wire, const void *array, size_t count, size_t bytes) {
    align(wire);
    size_t size = wire_product(count, bytes, 1, 1);
    if (!wire->reading) {
        wire_raw(wire, (void *)array, size);
        return array;
    }
    if (wire->failed || size > wire->size - wire->at) {
        wire_fail(wire);
        return NULL;
    }
    const void *found = wire->bytes + wire->at;
    wire->at += size;
    return found;
}

void *wire_space(struct wire *wire, const void *own, size_t count, size_t bytes) {
    if (!wire->reading)
        return (void *)own;
    size_t size = wire_product(count, bytes, 1, 1);
    struct space *space = wire->failed || size > SIZE_MAX / 2 ? NULL : calloc(1, sizeof *space + size);
    if (space == NULL) {
        wire_fail(wire);
        return NULL;
    }
    space->next = wire->spaces;
    wire->spaces = space;
    return space->memory;
}

void *wire_memory_of(struct wire *wire, const void *memory, size_t bytes, size_t aligned, bool null_allowed) {
    uint64_t address = wire->reading ? 0 : (uint64_t)(uintptr_t)memory;
    wire_u64(wire, &address);
    if (!wire->reading)
        return (void *)memory;
    void *found = address == 0 ? NULL : wire_table_find(wire->table, address, bytes);
    if ((found == NULL && (address != 0 || !null_allowed)) || (uintptr_t)found % aligned != 0) {
        wire_fail(wire);
        return NULL;
    }
    return found;
}

size_t wire_product(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    uint64_t product;
    if (__builtin_mul_overflow(a, b, &product) || __builtin_mul_overflow(product, c, &product) ||
        __builtin_mul_overflow(product, d, &product))
        return SIZE_MAX;
    return product;
}
