/* SPDX-License-Identifier: Apache-2.0
 *
 * GGUF files, read by mmap: metadata and tensors. Nothing is copied; strings and tensor data point into the mapping.
 *
 * The file is not trusted: every count, length, offset and string is checked against the file's size before use
 * (versions 2 and 3, little-endian; arrays of arrays are not supported). A file must not shrink while it is open: its
 * pages are gone then, and reading them ends the process. Replace a model file by renaming another over it. Source:
 * GGUF specification (ggml project, docs/gguf.md).
 */
#ifndef ENGINE_GGUF_H
#define ENGINE_GGUF_H

#include "engine/error.h"
#include "engine/tensor.h"

enum gguf_type { /* numbers as in the file */
    GGUF_UINT8 = 0,
    GGUF_INT8 = 1,
    GGUF_UINT16 = 2,
    GGUF_INT16 = 3,
    GGUF_UINT32 = 4,
    GGUF_INT32 = 5,
    GGUF_FLOAT32 = 6,
    GGUF_BOOL = 7,
    GGUF_STRING = 8,
    GGUF_ARRAY = 9,
    GGUF_UINT64 = 10,
    GGUF_INT64 = 11,
    GGUF_FLOAT64 = 12,
};

struct gguf_string { /* not NUL-terminated, may hold any byte */
    const char *text;
    size_t bytes;
};

/* One metadata pair. Arrays of strings are indexed once at open; other arrays are read in place. */
struct gguf_pair {
    struct gguf_string key;
    enum gguf_type type;
    enum gguf_type element_type;       /* of an array */
    uint64_t count;                    /* elements of an array, else 1 */
    const void *data;                  /* the scalar or the packed elements, unaligned; NULL for strings */
    const struct gguf_string *strings; /* [count] for a string or an array of strings */
};

struct gguf_tensor {
    struct gguf_string name;
    uint32_t type; /* ggml_type; may be one that tensor_format_find does not know */
    uint32_t dimensions;
    uint64_t size[4]; /* fastest dimension first; unused ones are 1 */
    const void *data; /* NULL when the type is unknown (its bytes cannot be counted) */
    size_t bytes;     /* 0 when unknown */
    uint64_t offset;  /* from the start of its file */
};

struct gguf; /* opaque; owns the mappings */

/* Opens and checks the whole directory of the file, and of its other parts where path is the first of a split model
 * (NAME-00001-of-00003.gguf): their tensors are all here then. A directory
 * with safetensors files is opened as directory.h says. NULL with a message that names the file and what is
 * wrong. */
struct gguf *gguf_open(const char *path, struct error *error);
/* The same over bytes in memory, which must outlive the result (tests, fuzzing). name is used in messages. */
struct gguf *gguf_open_memory(const void *data, size_t bytes, const char *name, struct error *error);
void gguf_free(struct gguf *gguf);

uint32_t gguf_version(const struct gguf *gguf);
const char *gguf_name(const struct gguf *gguf); /* path or name it was opened with */
size_t gguf_bytes(const struct gguf *gguf);     /* of the whole file, or of all files */
size_t gguf_pair_count(const struct gguf *gguf);
const struct gguf_pair *gguf_pair_at(const struct gguf *gguf, size_t index);
const struct gguf_pair *gguf_find(const struct gguf *gguf, const char *key); /* NULL when absent */
size_t gguf_tensor_count(const struct gguf *gguf);
const struct gguf_tensor *gguf_tensor_at(const struct gguf *gguf, size_t index);
const struct gguf_tensor *gguf_find_tensor(const struct gguf *gguf, const char *name);

/* Scalars by key, converted between integer widths where the value fits. ERROR_FORMAT when absent or of another
 * kind or range; the message names the key. */
int gguf_get_uint32(const struct gguf *gguf, const char *key, uint32_t *out, struct error *error);
int gguf_get_float(const struct gguf *gguf, const char *key, float *out, struct error *error);
int gguf_get_bool(const struct gguf *gguf, const char *key, bool *out, struct error *error);
int gguf_get_string(const struct gguf *gguf, const char *key, struct gguf_string *out, struct error *error);

/* Element i of an integer or float array, as the wide type. i < pair->count. */
int64_t gguf_array_int(const struct gguf_pair *pair, uint64_t i);
double gguf_array_float(const struct gguf_pair *pair, uint64_t i);

/* Bytes of a scalar; 0 for strings, arrays and numbers that are no type. */
size_t gguf_type_bytes(uint32_t type);

/* Copies a string for people to read: UTF-8 cut to size (at least 1) with a final NUL; control characters and bytes
 * that are not UTF-8 become '?'. Returns out. */
char *gguf_string_show(struct gguf_string string, char *out, size_t size);

/* Tells the kernel that [data, data + bytes) of the mapping is no longer needed (weights that were repacked). */
void gguf_forget(const struct gguf *gguf, const void *data, size_t bytes);

#endif
