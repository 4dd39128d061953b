/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/gguf_writer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ALIGNMENT = 32 };

struct buffer {
    uint8_t *data;
    size_t bytes;
    size_t capacity;
};

struct gguf_writer {
    struct buffer pairs;
    struct buffer tensors; /* the directory */
    struct buffer data;
    uint64_t pair_count;
    uint64_t tensor_count;
};

static void append(struct buffer *buffer, const void *data, size_t bytes) {
    if (buffer->bytes + bytes > buffer->capacity) {
        buffer->capacity = 2 * (buffer->bytes + bytes);
        buffer->data = realloc(buffer->data, buffer->capacity);
        if (buffer->data == NULL)
            abort();
    }
    if (bytes > 0)
        memcpy(buffer->data + buffer->bytes, data, bytes);
    buffer->bytes += bytes;
}

static void append_number(struct buffer *buffer, uint64_t number, int bytes) {
    for (int i = 0; i < bytes; i++)
        append(buffer, &(uint8_t){(uint8_t)(number >> (8 * i))}, 1);
}

static void append_string(struct buffer *buffer, const char *text) {
    append_number(buffer, strlen(text), 8);
    append(buffer, text, strlen(text));
}

static void align(struct buffer *buffer) {
    while (buffer->bytes % ALIGNMENT != 0)
        append_number(buffer, 0, 1);
}

static void begin_pair(struct gguf_writer *writer, const char *key, uint32_t type) {
    append_string(&writer->pairs, key);
    append_number(&writer->pairs, type, 4);
    writer->pair_count++;
}

struct gguf_writer *gguf_writer_create(void) {
    struct gguf_writer *writer = calloc(1, sizeof *writer);
    if (writer == NULL)
        abort();
    return writer;
}

void gguf_writer_uint32(struct gguf_writer *writer, const char *key, uint32_t value) {
    begin_pair(writer, key, GGUF_UINT32);
    append_number(&writer->pairs, value, 4);
}

void gguf_writer_float(struct gguf_writer *writer, const char *key, float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    begin_pair(writer, key, GGUF_FLOAT32);
    append_number(&writer->pairs, bits, 4);
}

void gguf_writer_bool(struct gguf_writer *writer, const char *key, bool value) {
    begin_pair(writer, key, GGUF_BOOL);
    append_number(&writer->pairs, value, 1);
}

void gguf_writer_string(struct gguf_writer *writer, const char *key, const char *value) {
    begin_pair(writer, key, GGUF_STRING);
    append_string(&writer->pairs, value);
}

void gguf_writer_strings(struct gguf_writer *writer, const char *key, const char *const *values, uint64_t count) {
    begin_pair(writer, key, GGUF_ARRAY);
    append_number(&writer->pairs, GGUF_STRING, 4);
    append_number(&writer->pairs, count, 8);
    for (uint64_t i = 0; i < count; i++)
        append_string(&writer->pairs, values[i]);
}

void gguf_writer_int32s(struct gguf_writer *writer, const char *key, const int32_t *values, uint64_t count) {
    begin_pair(writer, key, GGUF_ARRAY);
    append_number(&writer->pairs, GGUF_INT32, 4);
    append_number(&writer->pairs, count, 8);
    for (uint64_t i = 0; i < count; i++)
        append_number(&writer->pairs, (uint32_t)values[i], 4);
}

void gguf_writer_pair(struct gguf_writer *writer, const char *key, uint32_t type, const void *value, size_t bytes) {
    begin_pair(writer, key, type);
    append(&writer->pairs, value, bytes);
}

void gguf_writer_tensor(struct gguf_writer *writer, const char *name, uint32_t type, uint32_t dimensions,
    const uint64_t *size, const void *data, size_t bytes) {
    append_string(&writer->tensors, name);
    append_number(&writer->tensors, dimensions, 4);
    for (uint32_t i = 0; i < dimensions; i++)
        append_number(&writer->tensors, size[i], 8);
    append_number(&writer->tensors, type, 4);
    align(&writer->data);
    append_number(&writer->tensors, writer->data.bytes, 8);
    append(&writer->data, data, bytes);
    writer->tensor_count++;
}

uint8_t *gguf_writer_finish(struct gguf_writer *writer, size_t *bytes) {
    struct buffer file = {0};
    append(&file, "GGUF", 4);
    append_number(&file, 3, 4);
    append_number(&file, writer->tensor_count, 8);
    append_number(&file, writer->pair_count, 8);
    append(&file, writer->pairs.data, writer->pairs.bytes);
    append(&file, writer->tensors.data, writer->tensors.bytes);
    if (writer->tensor_count > 0)
        align(&file);
    append(&file, writer->data.data, writer->data.bytes);
    free(writer->pairs.data);
    free(writer->tensors.data);
    free(writer->data.data);
    free(writer);
    *bytes = file.bytes;
    return file.data;
}

char *test_file_create(const void *data, size_t bytes) {
    const char *folder = getenv("TMPDIR");
    char path[4096];
    snprintf(path, sizeof path, "%s/distillcache-test-XXXXXX", folder == NULL ? "/tmp" : folder);
    int descriptor = mkstemp(path);
    FILE *file = descriptor < 0 ? NULL : fdopen(descriptor, "wb");
    if (file == NULL || fwrite(data, 1, bytes, file) != bytes || fclose(file) != 0)
        abort();
    return strdup(path);
}
