/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files behind gguf.h share: the file as it is opened, split files, directories in another format.
 */
#ifndef ENGINE_GGUF_INTERNAL_H
#define ENGINE_GGUF_INTERNAL_H

#include "engine/gguf.h"

/* Sorted names, so that no choice of names makes looking one up slow, as a hash table's could. */
struct name_entry {
    struct gguf_string name;
    size_t place;
};
struct name_index {
    struct name_entry *entries;
    size_t count;
};

/* Memory that belongs to a file, by mmap. */
struct gguf_mapping {
    uint8_t *data;
    size_t bytes;
};

struct gguf {
    char *name; /* of the file, for messages */
    const uint8_t *data;
    size_t bytes;
    struct gguf_mapping *mappings; /* tensors lie in them; the first is data, unless it is borrowed or owned */
    size_t mapping_count;
    void *owned;        /* data, where it was allocated; else NULL */
    size_t other_bytes; /* of further files */
    uint32_t version;
    struct gguf_pair *pairs;
    size_t pair_count;
    struct gguf_string *single_strings; /* [pair_count], the values of pairs that are one string */
    struct gguf_tensor *tensors;
    size_t tensor_count;
    struct name_index pair_index;
    struct name_index tensor_index;
    void *names; /* of tensors that were added; NULL: none */
};

/* Maps a whole regular file that is not empty. ERROR_IO, ERROR_FORMAT. */
int gguf_map_file(const char *path, struct gguf_mapping *out, struct error *error);
/* Takes a mapping over, also when it fails (ERROR_MEMORY). */
int gguf_add_mapping(struct gguf *gguf, struct gguf_mapping mapping, struct error *error);
/* Adds tensors, whose names and data must live as long as gguf. ERROR_MEMORY; ERROR_FORMAT when a name occurs twice. */
int gguf_add_tensors(struct gguf *gguf, const struct gguf_tensor *tensors, size_t count, struct error *error);
/* Counts a tensor's values and bytes from its sizes; bytes stay 0 when its format is not known. ERROR_FORMAT. */
int gguf_count_bytes(struct gguf_tensor *tensor, const char *file, struct error *error);
/* One file, without looking for others. */
struct gguf *gguf_open_one(const char *path, struct error *error);

/* The other files of a split model, where gguf is the first of one. */
int gguf_join(struct gguf *gguf, struct error *error);

#endif
