/* SPDX-License-Identifier: Apache-2.0
 *
 * Float32 to every weight format, for tests that need weights. Straightforward rounding, not what a converter would
 * choose for quality.
 */
#ifndef TESTS_UNIT_QUANTISE_H
#define TESTS_UNIT_QUANTISE_H

#include "engine/tensor.h"

/* values [count] -> out [tensor_row_bytes(type, count)]; count is a multiple of the format's block. */
void test_quantise(enum tensor_type type, const float *values, size_t count, void *out);

#endif
