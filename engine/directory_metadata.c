/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/directory_internal.h"

#include <stdlib.h>
#include <string.h>

static void append(struct metadata *metadata, const void *data, size_t bytes) {
    if (metadata->failed)
        return;
    if (bytes > metadata->capacity - metadata->bytes) {
        size_t capacity = 2 * (metadata->bytes + bytes);
        char *larger = realloc(metadata->data, capacity);
        if (larger == NULL) {
            metadata->failed = true;
            return;
        }
        metadata->data = larger;
        metadata->capacity = capacity;
    }
    if (bytes > 0)
        memcpy(metadata->data + metadata->bytes, data, bytes);
    metadata->bytes += bytes;
}

static void append_u32(struct metadata *metadata, uint32_t value) {
    uint8_t bytes[4] = {(uint8_t)value, (uint8_t)(value >> 8), (uint8_t)(value >> 16), (uint8_t)(value >> 24)};
    append(metadata, bytes, sizeof bytes);
}

static void append_u64(struct metadata *metadata, uint64_t value) {
    append_u32(metadata, (uint32_t)value);
    append_u32(metadata, (uint32_t)(value >> 32));
}

void metadata_element_text(struct metadata *metadata, const char *text, size_t bytes) {
    append_u64(metadata, bytes);
    append(metadata, text, bytes);
}

void metadata_element_int32(struct metadata *metadata, int32_t value) {
    append_u32(metadata, (uint32_t)value);
}

static void begin_pair(struct metadata *metadata, const char *key, enum gguf_type type) {
    metadata->pairs++;
    metadata_element_text(metadata, key, strlen(key));
    append_u32(metadata, type);
}

void metadata_begin(struct metadata *metadata) {
    *metadata = (struct metadata){0};
    append(metadata, "GGUF", 4);
    append_u32(metadata, 3);
    append_u64(metadata, 0); /* tensors are added when it is open */
    append_u64(metadata, 0); /* pairs, when they are counted */
}

void metadata_free(struct metadata *metadata) {
    free(metadata->data);
    *metadata = (struct metadata){0};
}

void metadata_string(struct metadata *metadata, const char *key, const char *text, size_t bytes) {
    begin_pair(metadata, key, GGUF_STRING);
    metadata_element_text(metadata, text, bytes);
}

void metadata_uint32(struct metadata *metadata, const char *key, uint32_t value) {
    begin_pair(metadata, key, GGUF_UINT32);
    append_u32(metadata, value);
}

void metadata_float(struct metadata *metadata, const char *key, double value) {
    float single = (float)value;
    uint32_t bits;
    memcpy(&bits, &single, sizeof bits);
    begin_pair(metadata, key, GGUF_FLOAT32);
    append_u32(metadata, bits);
}

void metadata_bool(struct metadata *metadata, const char *key, bool value) {
    const uint8_t byte = value;
    begin_pair(metadata, key, GGUF_BOOL);
    append(metadata, &byte, 1);
}

void metadata_array(struct metadata *metadata, const char *key, enum gguf_type type, uint64_t count) {
    begin_pair(metadata, key, GGUF_ARRAY);
    append_u32(metadata, type);
    append_u64(metadata, count);
}

struct gguf *metadata_finish(struct metadata *metadata, const char *name, struct error *error) {
    enum { PAIRS_AT = 16 };
    if (metadata->failed) {
        error_set(error, ERROR_MEMORY, "%s: no memory for the metadata", name);
        return NULL;
    }
    for (int i = 0; i < 8; i++)
        metadata->data[PAIRS_AT + i] = (char)(metadata->pairs >> (8 * i));
    struct gguf *gguf = gguf_open_memory(metadata->data, metadata->bytes, name, error);
    if (gguf == NULL)
        return NULL;
    gguf->owned = metadata->data;
    *metadata = (struct metadata){0};
    return gguf;
}
