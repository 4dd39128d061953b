/* SPDX-License-Identifier: Apache-2.0
 *
 * Atomics of kernels: real ones, since blocks run on several OS threads.
 */
#include "internal.h"
#include "check.h"

#include <string.h>

static uint64_t integer_apply(enum emulator_atomic_kind kind, bool is_signed, uint64_t old, uint64_t value) {
    bool less = is_signed ? (int32_t)old < (int32_t)value : old < value;
    switch (kind) {
    case EMULATOR_ADD:
        return old + value;
    case EMULATOR_MAX:
        return less ? value : old;
    case EMULATOR_MIN:
        return less ? old : value;
    case EMULATOR_AND:
        return old & value;
    case EMULATOR_OR:
        return old | value;
    case EMULATOR_XOR:
        return old ^ value;
    case EMULATOR_INCREMENT:
        return old >= value ? 0 : old + 1;
    default:
        return value;
    }
}

static uint32_t float_add(uint32_t old, uint32_t value) {
    float a, b;
    memcpy(&a, &old, 4);
    memcpy(&b, &value, 4);
    a += b;
    memcpy(&old, &a, 4);
    return old;
}

static uint64_t apply_4(
    enum emulator_atomic_kind kind, uint32_t *at, enum emulator_number_kind number, uint32_t value, uint32_t expected) {
    uint32_t old = __atomic_load_n(at, __ATOMIC_RELAXED), wanted;
    do {
        if (kind == EMULATOR_COMPARE && old != expected)
            break;
        wanted = number == EMULATOR_FLOAT && kind == EMULATOR_ADD
                     ? float_add(old, value)
                     : (uint32_t)integer_apply(kind, number == EMULATOR_INT, old, value);
    } while (!__atomic_compare_exchange_n(at, &old, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}

static uint64_t apply_8(enum emulator_atomic_kind kind, uint64_t *at, uint64_t value, uint64_t expected) {
    uint64_t old = __atomic_load_n(at, __ATOMIC_RELAXED), wanted;
    do {
        if (kind == EMULATOR_COMPARE && old != expected)
            break;
        wanted = integer_apply(kind, false, old, value);
    } while (!__atomic_compare_exchange_n(at, &old, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}

extern "C" uint64_t emulator_atomic(
    enum emulator_atomic_kind kind, void *at, enum emulator_number_kind number, uint64_t value, uint64_t expected) {
    size_t bytes = number == EMULATOR_UNSIGNED_LONG_LONG ? 8 : 4;
    if (thread_checked)
        check_access(thread_checked, at, bytes, ACCESS_ATOMIC, true, __builtin_return_address(0));
    if (bytes == 8)
        return apply_8(kind, (uint64_t *)at, value, expected);
    return apply_4(kind, (uint32_t *)at, number, (uint32_t)value, (uint32_t)expected);
}
