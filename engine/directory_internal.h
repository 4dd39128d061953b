/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of directory.h share.
 */
#ifndef ENGINE_DIRECTORY_INTERNAL_H
#define ENGINE_DIRECTORY_INTERNAL_H

#include <jansson.h>

#include "engine/architecture.h"
#include "engine/gguf_internal.h"

/* Metadata of a GGUF file while it is written. Functions after a failed one do nothing. */
struct metadata {
    char *data;
    size_t bytes, capacity;
    uint64_t pairs;
    bool failed; /* no memory */
};
void metadata_begin(struct metadata *metadata);
void metadata_free(struct metadata *metadata);
void metadata_string(struct metadata *metadata, const char *key, const char *text, size_t bytes);
void metadata_uint32(struct metadata *metadata, const char *key, uint32_t value);
void metadata_float(struct metadata *metadata, const char *key, double value);
void metadata_bool(struct metadata *metadata, const char *key, bool value);
/* An array of strings or of int32: this, then its elements. */
void metadata_array(struct metadata *metadata, const char *key, enum gguf_type type, uint64_t count);
void metadata_element_text(struct metadata *metadata, const char *text, size_t bytes);
void metadata_element_int32(struct metadata *metadata, int32_t value);
/* The file, which takes the memory over. */
struct gguf *metadata_finish(struct metadata *metadata, const char *name, struct error *error);

struct directory {
    const char *path;
    json_t *config; /* objects all */
    json_t *tokenizer;
    json_t *tokenizer_config; /* NULL: there is none */
    json_t *generation;       /* NULL: there is none */
    char *template;           /* NULL: there is none */
    size_t template_bytes;
    /* From config.json: */
    const struct architecture *architecture;
    uint32_t layers, width, heads, kv_heads, head_dim, vocabulary;
    double rope_base;
    const json_t *llama3; /* its rope scaling, NULL: none of that kind */
};

/* Each returns 0 or a code with a message. */
int directory_read_config(struct directory *directory, struct metadata *metadata, struct error *error);
int directory_read_tokenizer(struct directory *directory, struct metadata *metadata, struct error *error);
int directory_read_tensors(const struct directory *directory, struct gguf *gguf, struct error *error);

/* The whole of a text file, with a NUL behind it; *out is NULL when it does not exist and may be absent. */
int directory_read_text(
    const struct directory *directory, const char *name, bool required, char **out, size_t *bytes, struct error *error);
/* One that holds a JSON object. */
int directory_read_json(
    const struct directory *directory, const char *name, bool required, json_t **out, struct error *error);
/* "PATH/NAME", allocated. */
char *directory_join(const struct directory *directory, const char *name);

#endif
