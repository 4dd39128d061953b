/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors as they lie in a model file, and the meaning of their storage formats.
 *
 * A matrix is [rows, columns] with the columns of a row contiguous; a row is a whole number of blocks. A vector has
 * one row. Formats and block layouts: GGUF specification and ggml's quantisation types (facts only).
 *   F32, F16, BF16   one value a block
 *   Q8_0  32 values: f16 d, int8 q[32]                        value = d * q
 *   Q4_0  32 values: f16 d, uint8 q[16]                       value = d * (nibble - 8)
 *   Q4_1  32 values: f16 d, f16 m, uint8 q[16]                value = d * nibble + m
 * Value j < 16 of a 4-bit block is the low nibble of byte j, value j >= 16 the high nibble of byte j - 16.
 *   Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, MXFP4     see block.h
 * All numbers are little-endian.
 */
#ifndef ENGINE_TENSOR_H
#define ENGINE_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/error.h"

/* Numbers are GGUF's ggml_type. */
enum tensor_type {
    TENSOR_F32 = 0,
    TENSOR_F16 = 1,
    TENSOR_Q4_0 = 2,
    TENSOR_Q4_1 = 3,
    TENSOR_Q5_0 = 6,
    TENSOR_Q5_1 = 7,
    TENSOR_Q8_0 = 8,
    TENSOR_Q2_K = 10,
    TENSOR_Q3_K = 11,
    TENSOR_Q4_K = 12,
    TENSOR_Q5_K = 13,
    TENSOR_Q6_K = 14,
    TENSOR_IQ4_NL = 20,
    TENSOR_BF16 = 30,
    TENSOR_MXFP4 = 39,
};

struct tensor {
    const char *name; /* borrowed from the model */
    enum tensor_type type;
    uint32_t rows;
    uint32_t columns;
    const void *data; /* borrowed from the file's mapping; may be unaligned */
    size_t bytes;
    size_t stride; /* bytes from one row to the next, of columns cut out of a wider matrix; 0: rows follow each other */
    uint32_t first_row, first_column; /* of a part: where it begins in the matrix of that name */
};

/* What the program knows of a format; NULL for one that it cannot read. */
struct tensor_format {
    enum tensor_type type;
    const char *name;      /* "Q4_1" */
    uint32_t block_values; /* values a block: 1, 32 or 256 */
    uint32_t block_bytes;
};
const struct tensor_format *tensor_format_find(uint32_t type);

/* Writes the names of all of them, "F32, F16, ...". */
enum { TENSOR_FORMAT_NAMES_BYTES = 128 };
void tensor_format_names(char names[TENSOR_FORMAT_NAMES_BYTES]);

/* GGUF's name of any ggml_type, also of those we cannot run (for messages); "type 99" style text for unknown ones. */
const char *tensor_type_name(uint32_t type);

/* Bytes of one row; columns must be a multiple of block_values. */
size_t tensor_row_bytes(enum tensor_type type, uint32_t columns);

/* Where a row begins. */
const void *tensor_row(const struct tensor *tensor, uint32_t row);
/* Parts of a matrix of a known format, which borrow its data: rows [first, first + count); columns, both multiples of
 * block_values. */
struct tensor tensor_cut_rows(const struct tensor *tensor, uint32_t first, uint32_t count);
struct tensor tensor_cut_columns(const struct tensor *tensor, uint32_t first, uint32_t count);

/* Whether a tensor of a known format has rows of whole blocks, and its bytes are there. ERROR_FORMAT. */
int tensor_check_size(const struct tensor *tensor, struct error *error);

/* Writes row `row` of tensor as float32: out [columns]. The plain reference of every weight format. */
void tensor_dequantise_row(const struct tensor *tensor, uint32_t row, float *out);

float half_to_float(uint16_t half);    /* IEEE 754 binary16 -> binary32, exact */
uint16_t float_to_half(float value);   /* round to nearest even; overflow to infinity; NaN stays NaN */
float bfloat_to_float(uint16_t value); /* exact */
uint16_t float_to_bfloat(float value); /* round to nearest even */

#endif
