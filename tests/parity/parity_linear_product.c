/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/parity/parity_linear_product.h"

#include <stdlib.h>

const struct product_kind product_kinds[PRODUCT_KINDS] = {
    {TENSOR_Q8_0, false, "q8_0"},
    {TENSOR_Q4_0, false, "q4_0"},
    {TENSOR_Q4_1, false, "q4_1"},
    {TENSOR_Q5_0, false, "q5_0"},
    {TENSOR_Q5_1, false, "q5_1"},
    {TENSOR_IQ4_NL, false, "iq4_nl"},
    {TENSOR_MXFP4, false, "mxfp4"},
    {TENSOR_Q2_K, false, "q2_k"},
    {TENSOR_Q3_K, false, "q3_k"},
    {TENSOR_Q4_K, false, "q4_k"},
    {TENSOR_Q5_K, false, "q5_k"},
    {TENSOR_Q6_K, false, "q6_k"},
    {TENSOR_F16, false, "f16"},
    {TENSOR_BF16, false, "bf16"},
    {TENSOR_F32, true, "f32"},
};

struct product product_create(struct parity *parity, const struct product_kind *kind, uint32_t weight_rows,
    uint32_t columns, uint32_t rows, bool add) {
    struct product p = {.kind = kind, .weight_rows = weight_rows, .columns = columns, .rows = rows, .add = add};
    struct error error = {.message = ""};
    size_t count = (size_t)rows * weight_rows;
    uint32_t values = tensor_format_find(kind->type)->block_values;
    if (values > 32)
        p.columns = columns = (columns + values - 1) / values * values;
    parity_fill_tensor(parity, &p.tensor, kind->type, weight_rows, columns);
    p.x = parity_host((size_t)rows * columns * sizeof *p.x);
    p.before = parity_host(count * sizeof *p.before);
    parity_fill_activations(parity, p.x, rows, columns);
    parity_fill_normal(parity, p.before, count, 1);
    p.weight = parity->operations->weight_create(parity->backend, &p.tensor.tensor, kind->exact, &error);
    parity_check_true(parity, p.weight != NULL, "%s", error.message);
    return p;
}

void product_free(struct parity *parity, struct product *p) {
    parity->operations->weight_free(parity->backend, p->weight);
    free(p->tensor.memory);
    free(p->x);
    free(p->before);
    free(p->got);
}

float *product_multiply(struct parity *parity, const struct product *p, const float *x, uint32_t rows) {
    size_t out_bytes = (size_t)rows * p->weight_rows * sizeof *p->before;
    const struct backend_weight *weights[] = {p->weight};
    float *device_x = parity_upload(parity, x, (size_t)rows * p->columns * sizeof *p->x);
    float *device_out = parity_upload(parity, p->before, out_bytes);
    parity->operations->linear(parity->backend, weights, 1, device_x, rows, p->add, device_out);
    float *got = parity_download(parity, device_out, out_bytes);
    parity_release(parity, device_x);
    parity_release(parity, device_out);
    return got;
}
