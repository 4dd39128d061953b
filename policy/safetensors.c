/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/safetensors.h"

#include "engine/replace_file.h"
#include "policy/options.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LENGTH_SIZE = 8, DIMENSIONS_MAX = 8, QUOTE_SIZE = 64 };

static const char metadata_key[] = "__metadata__";

/* ---- reading ---- */

static uint64_t read_length(const unsigned char *bytes) {
    uint64_t length = 0;
    for (int i = LENGTH_SIZE - 1; i >= 0; i--)
        length = length << 8 | bytes[i];
    return length;
}

static int check_metadata(const struct safetensors *tensors, struct error *error) {
    json_t *metadata = json_object_get(tensors->header, metadata_key), *value;
    const char *key;
    if (metadata != NULL && !json_is_object(metadata))
        return error_set(error, ERROR_FORMAT, "%.200s: %s is no object", tensors->file, metadata_key);
    json_object_foreach(metadata, key, value) if (!json_is_string(value)) {
        char quote[QUOTE_SIZE];
        return error_set(error, ERROR_FORMAT, "%.200s: '%s' of %s is no string", tensors->file,
            policy_option_quote(key, quote, sizeof quote), metadata_key);
    }
    return 0;
}

struct extent {
    size_t from, to;
};

/* A whole number that fits the data. */
static bool read_offset(const json_t *value, size_t most, size_t *out) {
    json_int_t number = json_integer_value(value);
    if (!json_is_integer(value) || number < 0 || (uint64_t)number > most)
        return false;
    *out = (size_t)number;
    return true;
}

static bool read_extent(const json_t *entry, size_t data_size, struct extent *out) {
    const json_t *offsets = json_object_get(entry, "data_offsets");
    return json_is_array(offsets) && json_array_size(offsets) == 2 &&
           read_offset(json_array_get(offsets, 0), data_size, &out->from) &&
           read_offset(json_array_get(offsets, 1), data_size, &out->to) && out->from <= out->to;
}

static bool valid_shape(const json_t *shape) {
    if (!json_is_array(shape) || json_array_size(shape) > DIMENSIONS_MAX)
        return false;
    for (size_t i = 0; i < json_array_size(shape); i++)
        if (!json_is_integer(json_array_get(shape, i)) || json_integer_value(json_array_get(shape, i)) < 0)
            return false;
    return true;
}

static int check_entry(const struct safetensors *tensors, const char *name, const json_t *entry, struct extent *extent,
    struct error *error) {
    char quote[QUOTE_SIZE];
    policy_option_quote(name, quote, sizeof quote);
    if (!json_is_string(json_object_get(entry, "dtype")))
        return error_set(error, ERROR_FORMAT, "%.200s: tensor '%s' has no dtype", tensors->file, quote);
    if (!valid_shape(json_object_get(entry, "shape")))
        return error_set(error, ERROR_FORMAT, "%.200s: tensor '%s' has no valid shape", tensors->file, quote);
    if (!read_extent(entry, tensors->data_size, extent))
        return error_set(error, ERROR_FORMAT,
            "%.200s: data_offsets of tensor '%s' are not two offsets within %zu bytes", tensors->file, quote,
            tensors->data_size);
    return 0;
}

static int compare_extents(const void *a, const void *b) {
    const struct extent *x = a, *y = b;
    if (x->from != y->from)
        return x->from < y->from ? -1 : 1;
    return x->to < y->to ? -1 : x->to > y->to;
}

/* Overlaps would let one file mean several things, gaps would hide something. */
static int check_cover(const struct safetensors *tensors, struct extent *extents, uint32_t count, struct error *error) {
    size_t end = 0;
    qsort(extents, count, sizeof extents[0], compare_extents);
    for (uint32_t i = 0; i < count; i++) {
        if (extents[i].from != end)
            return error_set(error, ERROR_FORMAT, "%.200s: tensors %s at byte %zu of the data", tensors->file,
                extents[i].from < end ? "overlap" : "leave a gap", extents[i].from < end ? extents[i].from : end);
        end = extents[i].to;
    }
    if (end != tensors->data_size)
        return error_set(error, ERROR_FORMAT, "%.200s: %zu bytes of data, but its tensors end at %zu", tensors->file,
            tensors->data_size, end);
    return 0;
}

static int check_entries(const struct safetensors *tensors, struct error *error) {
    struct extent extents[SAFETENSORS_TENSORS_MAX];
    uint32_t count = 0;
    const char *name;
    json_t *entry;
    json_object_foreach(tensors->header, name, entry) {
        if (strcmp(name, metadata_key) == 0)
            continue;
        if (count == SAFETENSORS_TENSORS_MAX)
            return error_set(
                error, ERROR_FORMAT, "%.200s: more than %d tensors", tensors->file, SAFETENSORS_TENSORS_MAX);
        int code = check_entry(tensors, name, entry, &extents[count++], error);
        if (code != 0)
            return code;
    }
    return check_cover(tensors, extents, count, error);
}

static int parse_header(struct safetensors *tensors, const char *text, size_t length, struct error *error) {
    json_error_t where;
    tensors->header = json_loadb(text, length, JSON_REJECT_DUPLICATES, &where);
    if (tensors->header == NULL && json_error_code(&where) == json_error_out_of_memory)
        return error_set(error, ERROR_MEMORY, "no memory for the header of %.200s", tensors->file);
    if (tensors->header == NULL)
        return error_set(error, ERROR_FORMAT, "%.200s: its header is not JSON: line %d, column %d", tensors->file,
            where.line, where.column);
    if (!json_is_object(tensors->header))
        return error_set(error, ERROR_FORMAT, "%.200s: its header is no JSON object", tensors->file);
    int code = check_metadata(tensors, error);
    return code == 0 ? check_entries(tensors, error) : code;
}

int safetensors_open(
    struct safetensors *tensors, const void *bytes, size_t size, const char *name, struct error *error) {
    const unsigned char *start = bytes;
    *tensors = (struct safetensors){.file = name};
    if (size < LENGTH_SIZE)
        return error_set(error, ERROR_FORMAT, "%.200s: %zu bytes are too few for a safetensors file", name, size);
    uint64_t length = read_length(start);
    if (length > SAFETENSORS_HEADER_MAX || length > size - LENGTH_SIZE)
        return error_set(error, ERROR_FORMAT, "%.200s: no safetensors file, or cut off: a header of %llu bytes in %zu",
            name, (unsigned long long)length, size);
    tensors->data = start + LENGTH_SIZE + length;
    tensors->data_size = size - LENGTH_SIZE - (size_t)length;
    int code = parse_header(tensors, (const char *)start + LENGTH_SIZE, (size_t)length, error);
    if (code != 0)
        safetensors_close(tensors);
    return code;
}

void safetensors_close(struct safetensors *tensors) {
    json_decref(tensors->header);
    tensors->header = NULL;
}

const char *safetensors_metadata(const struct safetensors *tensors, const char *key) {
    return json_string_value(json_object_get(json_object_get(tensors->header, metadata_key), key));
}

const char *safetensors_name(const struct safetensors *tensors, uint32_t index) {
    const char *name;
    json_t *entry;
    json_object_foreach(tensors->header, name, entry) if (strcmp(name, metadata_key) != 0 && index-- == 0) return name;
    return NULL;
}

static void format_shape(const uint32_t dimensions[3], char out[static QUOTE_SIZE]) {
    size_t length = (size_t)snprintf(out, QUOTE_SIZE, "[");
    for (int i = 0; i < 3 && dimensions[i] != 0; i++)
        length += (size_t)snprintf(out + length, QUOTE_SIZE - length, "%s%u", i > 0 ? ", " : "", dimensions[i]);
    snprintf(out + length, QUOTE_SIZE - length, "]");
}

static bool same_shape(const json_t *shape, const uint32_t dimensions[3]) {
    size_t count = 0;
    while (count < 3 && dimensions[count] != 0)
        count++;
    if (json_array_size(shape) != count)
        return false;
    for (size_t i = 0; i < count; i++)
        if (json_integer_value(json_array_get(shape, i)) != dimensions[i])
            return false;
    return true;
}

int safetensors_read(const struct safetensors *tensors, const char *name, const uint32_t dimensions[3], float *out,
    struct error *error) {
    const json_t *entry = json_object_get(tensors->header, name);
    struct extent extent;
    char text[QUOTE_SIZE];
    size_t count = 1;
    if (entry == NULL)
        return error_set(error, ERROR_FORMAT, "%.200s: there is no tensor '%s'", tensors->file, name);
    if (strcmp(json_string_value(json_object_get(entry, "dtype")), "F32") != 0)
        return error_set(error, ERROR_FORMAT, "%.200s: tensor '%s' is not F32", tensors->file, name);
    format_shape(dimensions, text);
    if (!same_shape(json_object_get(entry, "shape"), dimensions))
        return error_set(error, ERROR_FORMAT, "%.200s: the shape of tensor '%s' is not %s", tensors->file, name, text);
    for (int i = 0; i < 3 && dimensions[i] != 0; i++)
        count *= dimensions[i];
    if (!read_extent(entry, tensors->data_size, &extent) || extent.to - extent.from != count * sizeof out[0])
        return error_set(error, ERROR_FORMAT, "%.200s: the data of tensor '%s' are not the %zu bytes of shape %s",
            tensors->file, name, count * sizeof out[0], text);
    memcpy(out, tensors->data + extent.from, count * sizeof out[0]);
    for (size_t i = 0; i < count; i++)
        if (!isfinite(out[i]))
            return error_set(
                error, ERROR_FORMAT, "%.200s: number %zu of tensor '%s' is not finite", tensors->file, i, name);
    return 0;
}

/* ---- writing ---- */

static size_t count_values(const struct safetensors_item *item) {
    size_t count = 1;
    for (int i = 0; i < 3 && item->dimensions[i] != 0; i++)
        count *= item->dimensions[i];
    return count;
}

static json_t *describe(const struct safetensors_item *item, size_t from) {
    json_t *shape = json_array();
    int failed = 0;
    for (int i = 0; i < 3 && item->dimensions[i] != 0; i++)
        failed |= json_array_append_new(shape, json_integer(item->dimensions[i]));
    if (failed) {
        json_decref(shape);
        return NULL;
    }
    return json_pack("{s:s, s:o, s:[I, I]}", "dtype", "F32", "shape", shape, "data_offsets", (json_int_t)from,
        (json_int_t)(from + count_values(item) * sizeof item->values[0]));
}

/* The length and the text, padded so that the data are aligned. NULL: no memory. */
static char *make_header(const json_t *metadata, const struct safetensors_item *items, uint32_t count, size_t *size) {
    json_t *header = json_object();
    int failed = json_object_set(header, metadata_key, (json_t *)metadata);
    size_t from = 0;
    for (uint32_t i = 0; i < count; i++) {
        failed |= json_object_set_new(header, items[i].name, describe(&items[i], from));
        from += count_values(&items[i]) * sizeof items[i].values[0];
    }
    char *text = failed ? NULL : json_dumps(header, JSON_COMPACT);
    json_decref(header);
    if (text == NULL)
        return NULL;
    size_t length = strlen(text), padded = (length + LENGTH_SIZE - 1) / LENGTH_SIZE * LENGTH_SIZE;
    char *out = malloc(LENGTH_SIZE + padded);
    if (out != NULL) {
        for (int i = 0; i < LENGTH_SIZE; i++)
            out[i] = (char)((uint64_t)padded >> 8 * i);
        memcpy(out + LENGTH_SIZE, text, length);
        memset(out + LENGTH_SIZE + length, ' ', padded - length);
    }
    free(text);
    *size = LENGTH_SIZE + padded;
    return out;
}

/* What a file is written from. */
struct content {
    const char *header;
    size_t header_size;
    const struct safetensors_item *items;
    uint32_t count;
};

static bool write_content(void *context, FILE *out) {
    const struct content *content = context;
    bool written = fwrite(content->header, 1, content->header_size, out) == content->header_size;
    for (uint32_t i = 0; i < content->count && written; i++) {
        size_t values = count_values(&content->items[i]);
        written = fwrite(content->items[i].values, sizeof content->items[i].values[0], values, out) == values;
    }
    return written;
}

int safetensors_save(const char *file, const json_t *metadata, const struct safetensors_item *items, uint32_t count,
    struct error *error) {
    struct content content = {.items = items, .count = count};
    char *header = make_header(metadata, items, count, &content.header_size);
    content.header = header;
    int code = header == NULL ? error_set(error, ERROR_MEMORY, "no memory to write %.200s", file)
                              : replace_file(file, write_content, &content, error);
    free(header);
    return code;
}
