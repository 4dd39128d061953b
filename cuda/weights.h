/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrices on the device. struct backend_weight is private to the files that implement these functions and cuda_linear:
 * nobody else looks into it.
 */
#ifndef CUDA_WEIGHTS_H
#define CUDA_WEIGHTS_H

#include "cuda/cuda_backend.h"

/* As weight_create, weight_free, weight_bytes and embed in backend.h. The tensor's data lies in host memory, may be
 * unaligned, and may be forgotten when cuda_weight_create returns (cuda_upload_bytes copies without waiting). */
struct backend_weight *cuda_weight_create(struct backend *, const struct tensor *, bool exact, struct error *);
void cuda_weight_free(struct backend *, struct backend_weight *);
size_t cuda_weight_bytes(const struct backend_weight *);

/* Rows by token id; tokens is host memory: it is staged. */
void cuda_embed(struct backend *, const struct backend_weight *, const int32_t *tokens, uint32_t rows, float *out);

#endif
