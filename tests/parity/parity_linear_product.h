/* SPDX-License-Identifier: Apache-2.0
 *
 * One random matrix product of the CUDA backend, for cases that ask for one of its paths.
 */
#ifndef TESTS_PARITY_PARITY_LINEAR_PRODUCT_H
#define TESTS_PARITY_PARITY_LINEAR_PRODUCT_H

#include "cuda/linear.h"
#include "tests/parity/parity_linear.h"

/* Block formats first, then those that are multiplied as they are. */
struct product_kind {
    enum tensor_type type;
    bool exact;
    const char *name;
};
enum { PRODUCT_BLOCK_KINDS = 12, PRODUCT_F16 = PRODUCT_BLOCK_KINDS, PRODUCT_KINDS = 15 };
extern const struct product_kind product_kinds[PRODUCT_KINDS];

struct product {
    const struct product_kind *kind;
    uint32_t weight_rows, columns, rows;
    bool add;
    struct test_tensor tensor;
    struct backend_weight *weight;
    float *x;      /* [rows][columns], as the cases' other arrays on the host */
    float *before; /* [rows][weight_rows] what is in out */
    float *got;    /* the case's own, freed with the product; NULL at first */
};

/* columns are rounded up to whole blocks. */
struct product product_create(struct parity *parity, const struct product_kind *kind, uint32_t weight_rows,
    uint32_t columns, uint32_t rows, bool add);
void product_free(struct parity *parity, struct product *product);

/* x [rows][columns] times the weight, added to the first rows of `before` when add; the result is new host memory. */
float *product_multiply(struct parity *parity, const struct product *product, const float *x, uint32_t rows);

static inline struct cuda_backend *product_cuda(const struct parity *parity) {
    return (struct cuda_backend *)parity->backend;
}

/* What tests change; to be put back. */
static inline struct linear_limits *product_limits(const struct parity *parity) {
    return &cuda_linear_state(product_cuda(parity))->limits;
}

#endif
