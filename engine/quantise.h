/* SPDX-License-Identifier: Apache-2.0
 *
 * Weights in a smaller format than their file has, made when they are loaded (option --quantize).
 *
 * A block of 32 values x, with a = the value of the largest magnitude (the first of equals):
 *   Q8_0   d = |a| / 127, q = round(x / d), halves away from zero
 *   Q4_0   d = a / -8,    q = min(15, floor(x / d + 8.5))
 * d is stored as f16, but codes are computed with d as float32 (1 / d first). Source: the Python package gguf.
 */
#ifndef ENGINE_QUANTISE_H
#define ENGINE_QUANTISE_H

#include "engine/tensor.h"

/* The format of an option's value: "q8_0", "q4_0"; TENSOR_F32 for "none". ERROR_INVALID for others. */
int quantise_find_format(const char *name, enum tensor_type *format);

/* Whether a tensor can be brought to a format: a matrix in F32, F16 or BF16 with rows of whole blocks. */
bool quantise_takes(const struct tensor *tensor, enum tensor_type format);

/* The same tensor in that format: *out borrows its name, and its data is *memory, to be freed. Row by row, so that no
 * other copy is made. ERROR_MEMORY; ERROR_FORMAT when a value is too large for the format, or none. */
int quantise_tensor(
    const struct tensor *tensor, enum tensor_type format, struct tensor *out, void **memory, struct error *error);

#endif
