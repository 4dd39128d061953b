/* SPDX-License-Identifier: Apache-2.0
 *
 * Models in several files, NAME-00001-of-00003.gguf and so on: the first has all metadata, each has tensors. Keys
 * split.no (from 0), split.count and split.tensors.count. Source: llama.cpp's gguf-split.
 */
#include "engine/gguf_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PARTS_MAX = 99999, ENDING_BYTES = sizeof "-00001-of-00003.gguf" - 1 };

static void write_ending(char ending[ENDING_BYTES + 1], uint32_t number, uint32_t count) {
    snprintf(ending, ENDING_BYTES + 1, "-%05u-of-%05u.gguf", number % (PARTS_MAX + 1), count % (PARTS_MAX + 1));
}

/* The name of part `number`, counted from 1; allocated. NULL when the file's own name is not that of a part. */
static char *part_name(const char *name, uint32_t own, uint32_t number, uint32_t count) {
    char ending[ENDING_BYTES + 1];
    size_t bytes = strlen(name);
    write_ending(ending, own, count);
    if (bytes < ENDING_BYTES || strcmp(name + bytes - ENDING_BYTES, ending) != 0)
        return NULL;
    char *other = strdup(name);
    if (other != NULL) {
        write_ending(ending, number, count);
        memcpy(other + bytes - ENDING_BYTES, ending, ENDING_BYTES);
    }
    return other;
}

static int read_numbers(const struct gguf *gguf, uint32_t *number, uint32_t *count, struct error *error) {
    int code = gguf_get_uint32(gguf, "split.no", number, error);
    if (code == 0)
        code = gguf_get_uint32(gguf, "split.count", count, error);
    if (code == 0 && (*count > PARTS_MAX || *number >= *count))
        code = error_set(
            error, ERROR_FORMAT, "%s: keys split.no and split.count are %u and %u", gguf->name, *number, *count);
    return code;
}

static int check_part(const struct gguf *part, uint32_t number, uint32_t count, struct error *error) {
    uint32_t own = 0, own_count = 0;
    int code = read_numbers(part, &own, &own_count, error);
    if (code == 0 && (own != number || own_count != count))
        code = error_set(error, ERROR_FORMAT, "%s: it says that it is part %u of %u, not %u of %u", part->name, own + 1,
            own_count, number + 1, count);
    return code;
}

/* Moves a part's tensors and its memory. */
static int take_part(struct gguf *gguf, struct gguf *part, struct error *error) {
    int code = gguf_add_mapping(gguf, part->mappings[0], error);
    part->mapping_count = 0; /* it is gguf's now, also after a failure */
    gguf->other_bytes += part->bytes;
    return code != 0 ? code : gguf_add_tensors(gguf, part->tensors, part->tensor_count, error);
}

static int join_part(struct gguf *gguf, uint32_t number, uint32_t count, struct error *error) {
    char *name = part_name(gguf->name, 1, number + 1, count);
    if (name == NULL)
        return error_set(error, ERROR_FORMAT,
            "%s: it is part 1 of %u, whose names must be NAME-00001-of-%05u.gguf and so on", gguf->name, count, count);
    struct gguf *part = gguf_open_one(name, error);
    free(name);
    if (part == NULL)
        return ERROR_IO; /* the message has its code */
    int code = check_part(part, number, count, error);
    if (code == 0)
        code = take_part(gguf, part, error);
    gguf_free(part);
    return code;
}

static int check_total(const struct gguf *gguf, struct error *error) {
    static const char key[] = "split.tensors.count";
    uint32_t total = 0;
    if (gguf_find(gguf, key) == NULL)
        return 0;
    int code = gguf_get_uint32(gguf, key, &total, error);
    if (code == 0 && total != gguf->tensor_count)
        code = error_set(error, ERROR_FORMAT, "%s: key %s is %u, but its parts have %zu tensors", gguf->name, key,
            total, gguf->tensor_count);
    return code;
}

int gguf_join(struct gguf *gguf, struct error *error) {
    uint32_t number = 0, count = 1;
    int code = gguf_find(gguf, "split.count") == NULL ? 0 : read_numbers(gguf, &number, &count, error);
    if (code != 0 || count <= 1)
        return code;
    if (number != 0) {
        char *first = part_name(gguf->name, number + 1, 1, count);
        code = error_set(error, ERROR_FORMAT, "%s: it is part %u of %u of a split model: give its first part%s%s",
            gguf->name, number + 1, count, first != NULL ? ", " : "", first != NULL ? first : "");
        free(first);
        return code;
    }
    for (uint32_t i = 1; code == 0 && i < count; i++)
        code = join_part(gguf, i, count, error);
    return code != 0 ? code : check_total(gguf, error);
}
