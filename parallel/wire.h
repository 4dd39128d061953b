/* SPDX-License-Identifier: Apache-2.0
 *
 * Numbers, arrays and addresses as the bytes of a message, one function for both directions: the one who writes appends
 * what a variable holds, the one who reads puts what was sent into it. So a message is described once (messages.c), and
 * both ends agree on it. Numbers are little-endian, as the processors are that this program runs on; arrays begin at
 * multiples of 8 bytes.
 *
 * A reader trusts nothing: lengths are checked against the bytes that are left, and a device address is a number that
 * means nothing by itself. The reader looks it up in the table of its own allocations, with as many bytes as will be
 * used from there on. The first fault sets `failed`, and everything that is read after it is 0.
 */
#ifndef PARALLEL_WIRE_H
#define PARALLEL_WIRE_H

#include "engine/tensor.h"

/* Device memory that the other end knows by numbers. */
struct wire_range {
    uint64_t address; /* of its first byte, for the other end */
    size_t bytes;
    char *memory;
};

struct wire_table {
    struct wire_range *ranges; /* [count] ascending, without overlap */
    uint32_t count, capacity;
};

/* The memory of [address, address + bytes) when all of it is one allocation's, else NULL. */
void *wire_table_find(const struct wire_table *table, uint64_t address, size_t bytes);

struct wire {
    bool reading;
    bool failed;     /* reading: not such a message; writing: there is no memory */
    uint8_t *bytes;  /* 8-byte aligned; writing: owned, [capacity] */
    size_t at, size; /* reading: next and all of them; writing: `at` bytes were written */
    size_t capacity;
    const struct wire_table *table; /* reading */
    void *spaces;                   /* reading: what wire_space gave */
};

void wire_begin_writing(struct wire *wire); /* again with the same memory */
void wire_begin_reading(struct wire *wire, void *bytes, size_t size, const struct wire_table *table);
void wire_end_reading(struct wire *wire); /* frees spaces */
void wire_free(struct wire *wire);        /* of one who writes */
void wire_fail(struct wire *wire);
/* Reading: the message is none unless the condition holds. Returns whether all is well. */
bool wire_require(struct wire *wire, bool condition);
/* Everything was read. */
bool wire_is_done(const struct wire *wire);

void wire_raw(struct wire *wire, void *bytes, size_t size);
static inline void wire_u32(struct wire *wire, uint32_t *x) {
    wire_raw(wire, x, sizeof *x);
}
static inline void wire_u64(struct wire *wire, uint64_t *x) {
    wire_raw(wire, x, sizeof *x);
}
static inline void wire_i32(struct wire *wire, int32_t *x) {
    wire_raw(wire, x, sizeof *x);
}
static inline void wire_float(struct wire *wire, float *x) {
    wire_raw(wire, x, sizeof *x);
}
void wire_bool(struct wire *wire, bool *x);
void wire_text(struct wire *wire, char *text, size_t size); /* with its final zero at most `size` bytes */
/* A count of things of at least `bytes` bytes each. */
void wire_count(struct wire *wire, uint32_t *count, size_t bytes);

/* Sets a variable that is read, and leaves alone one that is written: others may look at it meanwhile. */
#define wire_set(wire, variable, value)                                                                                \
    do {                                                                                                               \
        __typeof__(variable) wire_value = (value);                                                                     \
        if ((wire)->reading)                                                                                           \
            (variable) = wire_value;                                                                                   \
    } while (0)

/* Reading: an array in the message. Writing: appended. */
const void *wire_array_of(struct wire *wire, const void *array, size_t count, size_t bytes);
#define wire_array(wire, array, count) wire_set(wire, array, wire_array_of(wire, array, count, sizeof *(array)))
/* The same, or NULL. */
#define wire_array_or_null(wire, array, count)                                                                         \
    wire_set(                                                                                                          \
        wire, array, wire_is_there(wire, (array) != NULL) ? wire_array_of(wire, array, count, sizeof *(array)) : NULL)
bool wire_is_there(struct wire *wire, bool there);

/* Structs that a reader fills: [count] of `bytes` each, zeroed, until wire_end_reading. A writer gets `own`, and must
 * not write to it. */
void *wire_space(struct wire *wire, const void *own, size_t count, size_t bytes);

/* Device memory of so many bytes, whose address is a multiple of `aligned`; NULL is refused, or allowed. */
void *wire_memory_of(struct wire *wire, const void *memory, size_t bytes, size_t aligned, bool null_allowed);
#define wire_memory(wire, memory, bytes)                                                                               \
    wire_set(wire, memory, wire_memory_of(wire, memory, bytes, __alignof__(*(memory)), false))
#define wire_memory_or_null(wire, memory, bytes)                                                                       \
    wire_set(wire, memory, wire_memory_of(wire, memory, bytes, __alignof__(*(memory)), true))

/* a b c d as bytes; SIZE_MAX when that is too much for anything. */
size_t wire_product(uint64_t a, uint64_t b, uint64_t c, uint64_t d);

#endif
