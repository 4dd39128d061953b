/* SPDX-License-Identifier: Apache-2.0
 *
 * Makes GGUF files in memory, for tests: version 3, little-endian, alignment 32. It checks nothing, so that tests can
 * make broken files too. Functions abort when memory runs out.
 *
 *   struct gguf_writer *writer = gguf_writer_create();
 *   gguf_writer_string(writer, "general.architecture", "llama");
 *   gguf_writer_tensor(writer, "output_norm.weight", TENSOR_F32, 1, (uint64_t[]){64}, data, sizeof data);
 *   uint8_t *bytes = gguf_writer_finish(writer, &size);      // frees the writer; the caller frees bytes
 */
#ifndef TESTS_UNIT_GGUF_WRITER_H
#define TESTS_UNIT_GGUF_WRITER_H

#include "engine/gguf.h"

struct gguf_writer;

struct gguf_writer *gguf_writer_create(void);

/* Metadata. Strings end at their NUL. */
void gguf_writer_uint32(struct gguf_writer *writer, const char *key, uint32_t value);
void gguf_writer_float(struct gguf_writer *writer, const char *key, float value);
void gguf_writer_bool(struct gguf_writer *writer, const char *key, bool value);
void gguf_writer_string(struct gguf_writer *writer, const char *key, const char *value);
void gguf_writer_strings(struct gguf_writer *writer, const char *key, const char *const *values, uint64_t count);
void gguf_writer_int32s(struct gguf_writer *writer, const char *key, const int32_t *values, uint64_t count);
/* Any pair: type and the bytes of the value as they are to stand in the file. */
void gguf_writer_pair(struct gguf_writer *writer, const char *key, uint32_t type, const void *value, size_t bytes);

/* A tensor; size has the fastest dimension first. The data is copied. */
void gguf_writer_tensor(struct gguf_writer *writer, const char *name, uint32_t type, uint32_t dimensions,
    const uint64_t *size, const void *data, size_t bytes);

/* The whole file, which ends with the last byte of the last tensor. Frees the writer. */
uint8_t *gguf_writer_finish(struct gguf_writer *writer, size_t *bytes);

/* Writes bytes to a new temporary file (below TMPDIR) and returns its path; the caller unlinks and frees it. */
char *test_file_create(const void *data, size_t bytes);

#endif
