/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/parity/parity_missing.h"

#include <stdio.h>

/* One function for all calls would not know which operation was called. */
#define EACH_OPERATION(X)                                                                                              \
    X(weight_create)                                                                                                   \
    X(weight_free)                                                                                                     \
    X(weight_bytes)                                                                                                    \
    X(embed)                                                                                                           \
    X(rms_norm)                                                                                                        \
    X(rms_norm_add)                                                                                                    \
    X(head_norms)                                                                                                      \
    X(add_bias)                                                                                                        \
    X(scale)                                                                                                           \
    X(soft_cap)                                                                                                        \
    X(gelu_mul)                                                                                                        \
    X(linear)                                                                                                          \
    X(rope_and_append)                                                                                                 \
    X(attend)                                                                                                          \
    X(query_moments)                                                                                                   \
    X(score)                                                                                                           \
    X(summarise)                                                                                                       \
    X(slot_norms)                                                                                                      \
    X(window_preference)                                                                                               \
    X(rotate_slots)                                                                                                    \
    X(unrotate_slots)                                                                                                  \
    X(silu_mul)                                                                                                        \
    X(gather_rows)                                                                                                     \
    X(sample)                                                                                                          \
    X(kl)                                                                                                              \
    X(copy_pages)                                                                                                      \
    X(move_slots)                                                                                                      \
    X(clear_slots)                                                                                                     \
    X(move_statistics)                                                                                                 \
    X(poison_pages)

static jmp_buf *back;
static const char *called;

#define MISSING(name)                                                                                                  \
    static void missing_##name(void) {                                                                                 \
        called = #name;                                                                                                \
        longjmp(*back, 1);                                                                                             \
    }
EACH_OPERATION(MISSING)

/* The stand-ins take no arguments: whoever calls one never comes back. */
#define FILL(name)                                                                                                     \
    if (filled.name == NULL) {                                                                                         \
        filled.name = (__typeof__(filled.name))missing_##name;                                                         \
        count++;                                                                                                       \
    }

const struct backend_operations *parity_fill_missing(const struct backend_operations *operations, jmp_buf *skip) {
    static struct backend_operations filled;
    uint32_t count = 0;
    filled = *operations;
    back = skip;
    EACH_OPERATION(FILL)
    if (count > 0)
        printf("%s lacks %u operations: cases that call them are skipped\n", operations->name, count);
    return &filled;
}

const char *parity_missing_name(void) {
    return called;
}
