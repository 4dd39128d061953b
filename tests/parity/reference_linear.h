/* SPDX-License-Identifier: Apache-2.0
 *
 * References of `embed` and `linear`, straight from the definitions in engine/tensor.h and engine/backend.h.
 */
#ifndef TESTS_PARITY_REFERENCE_LINEAR_H
#define TESTS_PARITY_REFERENCE_LINEAR_H

#include "engine/tensor.h"

double reference_half(uint16_t bits);         /* value of a binary16 */
double reference_round_to_half(double value); /* nearest binary16, half to even */

/* One row of a weight: values [columns]. */
void reference_weight_row(const struct tensor *tensor, uint32_t row, double *values);

/* out [rows][stride], columns first..first + tensor->rows: what every tier must give bit for bit. exact: as of a
 * weight created with exact. add: added to what is in out. */
void reference_linear_bits(
    const struct tensor *tensor, bool exact, const float *x, uint32_t rows, bool add, float *out, size_t stride);

/* The true product in float64 and how far rounding may move a result from it: value, bound [rows][tensor->rows].
 * rounded_to: what x and weights of block formats were rounded to before they were multiplied: TENSOR_F16, TENSOR_BF16,
 * or TENSOR_F32 for neither. */
void reference_linear_true(const struct tensor *tensor, bool exact, enum tensor_type rounded_to, const float *x,
    uint32_t rows, double *value, double *bound);

#endif
