/* SPDX-License-Identifier: Apache-2.0
 *
 * Floats as integers of the same order.
 */
#ifndef POLICY_ORDER_H
#define POLICY_ORDER_H

#include <stdint.h>
#include <string.h>

/* Ascending with the value; -0 equals 0, NaN equals -infinity. No branch: loops over it become vector code. */
static inline int32_t order_of_float(float value) {
    int32_t bits;
    value += 0.0f; /* -0 becomes 0 */
    memcpy(&bits, &value, sizeof bits);
    int32_t magnitude = bits & 0x7fffffff;
    int32_t ordered = bits ^ ((bits >> 31) & 0x7fffffff);
    int32_t lowest = (int32_t)0xff800000 ^ 0x7fffffff; /* of -infinity */
    int32_t no_number = -(magnitude > 0x7f800000);
    return (lowest & no_number) | (ordered & ~no_number);
}

#endif
