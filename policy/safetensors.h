/* SPDX-License-Identifier: Apache-2.0
 *
 * Files of named tensors: the safetensors format, little-endian. The length of a JSON object (u64), the object, then
 * data. The object has for every tensor {"dtype", "shape", "data_offsets": [from, to]} (bytes within data), and may
 * have __metadata__, an object of strings.
 */
#ifndef POLICY_SAFETENSORS_H
#define POLICY_SAFETENSORS_H

#include "engine/error.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SAFETENSORS_HEADER_MAX = 16 << 20, SAFETENSORS_TENSORS_MAX = 64 };

struct safetensors {
    const char *file; /* its name, for messages */
    json_t *header;
    const unsigned char *data; /* borrowed */
    size_t data_size;
};

/* Reads the header and checks all of it: every entry, and that the tensors' data follow each other without overlaps and
 * gaps, to the end. ERROR_FORMAT, ERROR_MEMORY; then there is nothing to close. bytes and name must outlive it. */
int safetensors_open(
    struct safetensors *tensors, const void *bytes, size_t size, const char *name, struct error *error);
void safetensors_close(struct safetensors *tensors);

/* The text of __metadata__; NULL: it has no such key. */
const char *safetensors_metadata(const struct safetensors *tensors, const char *key);

/* The name of tensor `index`; NULL: no more. */
const char *safetensors_name(const struct safetensors *tensors, uint32_t index);

/* Copies an F32 tensor of just these dimensions (0 after the last), all numbers finite; out has room for them.
 * ERROR_FORMAT says what is not as it should be. */
int safetensors_read(
    const struct safetensors *tensors, const char *name, const uint32_t dimensions[3], float *out, struct error *error);

struct safetensors_item {
    const char *name;
    uint32_t dimensions[3]; /* 0 after the last */
    const float *values;
};

/* Writes FILE.tmp, syncs it, renames it to FILE, and syncs the folder. metadata: an object of strings. ERROR_IO,
 * ERROR_MEMORY. */
int safetensors_save(const char *file, const json_t *metadata, const struct safetensors_item *items, uint32_t count,
    struct error *error);

#endif
