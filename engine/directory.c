/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/directory.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "engine/directory_internal.h"

enum { TEXT_BYTES_MAX = 256 << 20 };

bool directory_is(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

char *directory_join(const struct directory *directory, const char *name) {
    char *path = NULL;
    return asprintf(&path, "%s/%s", directory->path, name) < 0 ? NULL : path;
}

int directory_read_text(const struct directory *directory, const char *name, bool required, char **out, size_t *bytes,
    struct error *error) {
    struct gguf_mapping mapping = {0};
    struct stat status;
    char *path = directory_join(directory, name);
    *out = NULL;
    *bytes = 0;
    if (path == NULL)
        return error_set(error, ERROR_MEMORY, "%s: no memory", directory->path);
    if (!required && stat(path, &status) != 0 && errno == ENOENT) {
        free(path);
        return 0;
    }
    int code = gguf_map_file(path, &mapping, error);
    if (code == 0 && mapping.bytes > TEXT_BYTES_MAX) {
        code = error_set(
            error, ERROR_UNSUPPORTED, "%s: it has %zu bytes; at most %d", path, mapping.bytes, TEXT_BYTES_MAX);
    } else if (code == 0) {
        *out = malloc(mapping.bytes + 1);
        if (*out == NULL) {
            code = error_set(error, ERROR_MEMORY, "%s: no memory to read it", path);
        } else {
            memcpy(*out, mapping.data, mapping.bytes);
            (*out)[mapping.bytes] = '\0';
            *bytes = mapping.bytes;
        }
    }
    if (mapping.data != NULL && mapping.data != MAP_FAILED)
        munmap(mapping.data, mapping.bytes);
    free(path);
    return code;
}

int directory_read_json(
    const struct directory *directory, const char *name, bool required, json_t **out, struct error *error) {
    char *text;
    size_t bytes;
    json_error_t problem;
    int code = directory_read_text(directory, name, required, &text, &bytes, error);
    *out = NULL;
    if (code != 0 || text == NULL)
        return code;
    *out = json_loadb(text, bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &problem);
    free(text);
    if (*out == NULL)
        return error_set(error, ERROR_FORMAT, "%s/%s: line %d: %s", directory->path, name, problem.line, problem.text);
    if (!json_is_object(*out))
        return error_set(error, ERROR_FORMAT, "%s/%s: it is not a JSON object", directory->path, name);
    return 0;
}

static int read_texts(struct directory *directory, struct error *error) {
    int code = directory_read_json(directory, "config.json", true, &directory->config, error);
    if (code == 0)
        code = directory_read_json(directory, "tokenizer.json", true, &directory->tokenizer, error);
    if (code == 0)
        code = directory_read_json(directory, "tokenizer_config.json", false, &directory->tokenizer_config, error);
    if (code == 0)
        code = directory_read_json(directory, "generation_config.json", false, &directory->generation, error);
    if (code == 0)
        code = directory_read_text(
            directory, "chat_template.jinja", false, &directory->template, &directory->template_bytes, error);
    return code;
}

/* The last part of the path. */
static void write_name(const char *path, struct metadata *metadata) {
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/')
        end--;
    size_t begin = end;
    while (begin > 0 && path[begin - 1] != '/')
        begin--;
    metadata_string(metadata, "general.name", path + begin, end - begin);
}

struct gguf *directory_open(const char *path, struct error *error) {
    struct directory directory = {.path = path};
    struct metadata metadata;
    struct gguf *gguf = NULL;
    metadata_begin(&metadata);
    write_name(path, &metadata);
    int code = read_texts(&directory, error);
    if (code == 0)
        code = directory_read_config(&directory, &metadata, error);
    if (code == 0)
        code = directory_read_tokenizer(&directory, &metadata, error);
    if (code == 0)
        gguf = metadata_finish(&metadata, path, error);
    if (gguf != NULL && directory_read_tensors(&directory, gguf, error) != 0) {
        gguf_free(gguf);
        gguf = NULL;
    }
    metadata_free(&metadata);
    json_decref(directory.config);
    json_decref(directory.tokenizer);
    json_decref(directory.tokenizer_config);
    json_decref(directory.generation);
    free(directory.template);
    return gguf;
}
