/* SPDX-License-Identifier: Apache-2.0
 *
 * Random matrices and activations for cases of matrix products.
 */
#ifndef TESTS_PARITY_PARITY_LINEAR_H
#define TESTS_PARITY_PARITY_LINEAR_H

#include "tests/parity/parity.h"

enum { TENSOR_NAME_BYTES = 32 };

/* The data lies at an odd address, as it may in a file. */
struct test_tensor {
    struct tensor tensor;
    unsigned char *memory; /* freed by the case */
    char name[TENSOR_NAME_BYTES];
};

/* Values of all signs and magnitudes, subnormal ones included; extreme integers. */
void parity_fill_tensor(
    struct parity *parity, struct test_tensor *test, enum tensor_type type, uint32_t rows, uint32_t columns);

/* Rows of different size, blocks of zeros, outliers, and values that fall between two integers. x [rows][columns]. */
void parity_fill_activations(struct parity *parity, float *x, uint32_t rows, uint32_t columns);

#endif
