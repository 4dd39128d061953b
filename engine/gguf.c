/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/gguf_internal.h"

#include "engine/bytes.h"
#include "engine/directory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utf8proc.h>

enum {
    PAIR_BYTES_MIN = 13,   /* length of the key, type, one byte of value */
    TENSOR_BYTES_MIN = 32, /* length of the name, dimensions, one size, type, offset */
    DIMENSIONS_MAX = 4,
    ALIGNMENT_DEFAULT = 32,
    SHOWN_MAX = 80, /* bytes of a key or name in a message */
};

/* Where reading stands. Every function below returns 0 or a code, the message being set. */
struct reader {
    struct gguf *gguf;
    size_t at;
    struct error *error;
};

char *gguf_string_show(struct gguf_string string, char *out, size_t size) {
    size_t from = 0;
    size_t to = 0;
    while (from < string.bytes) {
        utf8proc_int32_t character;
        size_t left = string.bytes - from;
        utf8proc_ssize_t length =
            utf8proc_iterate((const uint8_t *)string.text + from, left < 4 ? (int)left : 4, &character);
        bool good = length > 0 && character >= 32 && (character < 127 || character >= 160);
        size_t bytes = good ? (size_t)length : 1;
        if (to + bytes >= size)
            break;
        if (good)
            memcpy(out + to, string.text + from, bytes);
        else
            out[to] = '?';
        to += bytes;
        from += length > 0 ? (size_t)length : 1;
    }
    out[to] = '\0';
    return out;
}

static size_t left(const struct reader *reader) {
    return reader->gguf->bytes - reader->at;
}

static int read_bytes(struct reader *reader, uint64_t bytes, const char *what, const uint8_t **out) {
    if (bytes > left(reader))
        return error_set(reader->error, ERROR_FORMAT,
            "%s: truncated or corrupt: %s at byte %zu has %llu bytes, %zu are left", reader->gguf->name, what,
            reader->at, (unsigned long long)bytes, left(reader));
    *out = reader->gguf->data + reader->at;
    reader->at += bytes;
    return 0;
}

static int read_u32(struct reader *reader, const char *what, uint32_t *out) {
    const uint8_t *bytes = NULL;
    int code = read_bytes(reader, 4, what, &bytes);
    if (code == 0)
        *out = load_u32(bytes);
    return code;
}

static int read_u64(struct reader *reader, const char *what, uint64_t *out) {
    const uint8_t *bytes = NULL;
    int code = read_bytes(reader, 8, what, &bytes);
    if (code == 0)
        *out = load_u64(bytes);
    return code;
}

static int read_string(struct reader *reader, const char *what, struct gguf_string *out) {
    uint64_t length = 0;
    const uint8_t *bytes = NULL;
    int code = read_u64(reader, what, &length);
    if (code == 0)
        code = read_bytes(reader, length, what, &bytes);
    if (code == 0)
        *out = (struct gguf_string){(const char *)bytes, length};
    return code;
}

/* Reads a number of things of at least `least` bytes each; one that the rest of the file cannot hold is an error, so
 * that no allocation is larger than the file warrants. */
static int read_count(struct reader *reader, const char *what, size_t least, uint64_t *out) {
    int code = read_u64(reader, what, out);
    if (code == 0 && *out > left(reader) / least)
        code = error_set(reader->error, ERROR_FORMAT, "%s: corrupt: %s is %llu, but only %zu bytes follow",
            reader->gguf->name, what, (unsigned long long)*out, left(reader));
    return code;
}

static int pair_error(const struct reader *reader, const struct gguf_pair *pair, int code, const char *what) {
    char shown[SHOWN_MAX];
    return error_set(reader->error, code, "%s: key \"%s\": %s", reader->gguf->name,
        gguf_string_show(pair->key, shown, sizeof shown), what);
}

/* count scalars, packed. */
static int read_scalars(struct reader *reader, uint32_t type, struct gguf_pair *pair) {
    size_t size = gguf_type_bytes(type);
    const uint8_t *bytes = NULL;
    if (size == 0)
        return pair_error(reader, pair, ERROR_FORMAT, "unknown value type");
    if (pair->count > left(reader) / size)
        return pair_error(reader, pair, ERROR_FORMAT, "truncated or corrupt: the value is longer than the file");
    int code = read_bytes(reader, pair->count * size, "a value", &bytes);
    if (code != 0)
        return code;
    for (uint64_t i = 0; type == GGUF_BOOL && i < pair->count; i++)
        if (bytes[i] > 1)
            return pair_error(reader, pair, ERROR_FORMAT, "a truth value that is neither 0 nor 1");
    pair->data = bytes;
    return 0;
}

static int read_string_array(struct reader *reader, struct gguf_pair *pair) {
    if (pair->count > left(reader) / 8)
        return pair_error(reader, pair, ERROR_FORMAT, "truncated or corrupt: more strings than the file can hold");
    struct gguf_string *strings = calloc(pair->count + 1, sizeof *strings);
    if (strings == NULL)
        return pair_error(reader, pair, ERROR_MEMORY, "no memory to index the strings");
    pair->strings = strings; /* gguf_free finds it there, also after an error */
    int code = 0;
    for (uint64_t i = 0; code == 0 && i < pair->count; i++)
        code = read_string(reader, "a string", &strings[i]);
    return code;
}

static int read_array(struct reader *reader, struct gguf_pair *pair) {
    uint32_t element_type = 0;
    int code = read_u32(reader, "an array's type", &element_type);
    if (code == 0)
        code = read_u64(reader, "an array's length", &pair->count);
    if (code != 0)
        return code;
    pair->element_type = (enum gguf_type)element_type;
    if (element_type == GGUF_ARRAY)
        return pair_error(reader, pair, ERROR_UNSUPPORTED, "arrays of arrays are not supported");
    if (element_type == GGUF_STRING)
        return read_string_array(reader, pair);
    return read_scalars(reader, element_type, pair);
}

static int read_pair(struct reader *reader, size_t place) {
    struct gguf_pair *pair = &reader->gguf->pairs[place];
    uint32_t type = 0;
    int code = read_string(reader, "a key", &pair->key);
    if (code == 0)
        code = read_u32(reader, "a value's type", &type);
    if (code != 0)
        return code;
    pair->type = (enum gguf_type)type;
    pair->count = 1;
    if (type == GGUF_ARRAY)
        return read_array(reader, pair);
    if (type != GGUF_STRING)
        return read_scalars(reader, type, pair);
    struct gguf_string *string = &reader->gguf->single_strings[place];
    pair->strings = string;
    return read_string(reader, "a string", string);
}

static int name_compare(struct gguf_string a, struct gguf_string b) {
    size_t shorter = a.bytes < b.bytes ? a.bytes : b.bytes;
    int order = shorter == 0 ? 0 : memcmp(a.text, b.text, shorter);
    return order != 0 ? order : (a.bytes > b.bytes) - (a.bytes < b.bytes);
}

static int entry_compare(const void *a, const void *b) {
    return name_compare(((const struct name_entry *)a)->name, ((const struct name_entry *)b)->name);
}

/* Sorts index->entries; a name that occurs twice is an error. */
static int index_sort(const struct gguf *gguf, struct name_index *index, const char *what, struct error *error) {
    qsort(index->entries, index->count, sizeof *index->entries, entry_compare);
    for (size_t i = 1; i < index->count; i++) {
        if (entry_compare(&index->entries[i - 1], &index->entries[i]) == 0) {
            char shown[SHOWN_MAX];
            return error_set(error, ERROR_FORMAT, "%s: %s \"%s\" occurs twice", gguf->name, what,
                gguf_string_show(index->entries[i].name, shown, sizeof shown));
        }
    }
    return 0;
}

static int index_allocate(struct reader *reader, struct name_index *index, size_t count) {
    index->count = count;
    index->entries = calloc(count + 1, sizeof *index->entries);
    if (index->entries == NULL)
        return error_set(reader->error, ERROR_MEMORY, "%s: no memory to index the file", reader->gguf->name);
    return 0;
}

/* The place of a name, or SIZE_MAX. */
static size_t index_find(const struct name_index *index, const char *name) {
    struct name_entry wanted = {.name = {name, strlen(name)}};
    const struct name_entry *found = bsearch(&wanted, index->entries, index->count, sizeof wanted, entry_compare);
    return found == NULL ? SIZE_MAX : found->place;
}

static int read_pairs(struct reader *reader, size_t count) {
    struct gguf *gguf = reader->gguf;
    gguf->pairs = calloc(count + 1, sizeof *gguf->pairs);
    gguf->single_strings = calloc(count + 1, sizeof *gguf->single_strings);
    if (gguf->pairs == NULL || gguf->single_strings == NULL)
        return error_set(reader->error, ERROR_MEMORY, "%s: no memory for %zu metadata pairs", gguf->name, count);
    gguf->pair_count = count;
    int code = index_allocate(reader, &gguf->pair_index, count);
    for (size_t i = 0; code == 0 && i < count; i++) {
        code = read_pair(reader, i);
        gguf->pair_index.entries[i] = (struct name_entry){gguf->pairs[i].key, i};
    }
    return code != 0 ? code : index_sort(gguf, &gguf->pair_index, "key", reader->error);
}

static int report_tensor(const char *file, const struct gguf_tensor *tensor, const char *what, struct error *error) {
    char shown[SHOWN_MAX];
    return error_set(
        error, ERROR_FORMAT, "%s: tensor \"%s\": %s", file, gguf_string_show(tensor->name, shown, sizeof shown), what);
}

static int tensor_error(const struct reader *reader, const struct gguf_tensor *tensor, const char *what) {
    return report_tensor(reader->gguf->name, tensor, what, reader->error);
}

static int read_tensor_sizes(struct reader *reader, struct gguf_tensor *tensor) {
    int code = read_u32(reader, "a tensor's number of dimensions", &tensor->dimensions);
    if (code != 0)
        return code;
    if (tensor->dimensions < 1 || tensor->dimensions > DIMENSIONS_MAX)
        return tensor_error(reader, tensor, "the number of dimensions is not 1 to 4");
    for (uint32_t i = 0; i < DIMENSIONS_MAX; i++) {
        tensor->size[i] = 1;
        if (i < tensor->dimensions)
            code = read_u64(reader, "a tensor's size", &tensor->size[i]);
        if (code != 0)
            return code;
    }
    return 0;
}

int gguf_count_bytes(struct gguf_tensor *tensor, const char *file, struct error *error) {
    const struct tensor_format *format = tensor_format_find(tensor->type);
    uint64_t values = 1;
    for (uint32_t i = 0; i < DIMENSIONS_MAX; i++) {
        if (tensor->size[i] == 0)
            return report_tensor(file, tensor, "a size is 0", error);
        if (__builtin_mul_overflow(values, tensor->size[i], &values) || values > INT64_MAX)
            return report_tensor(file, tensor, "the product of the sizes overflows", error);
    }
    if (format == NULL)
        return 0;
    if (tensor->size[0] % format->block_values != 0)
        return report_tensor(file, tensor, "a row is not a whole number of blocks of its format", error);
    if (__builtin_mul_overflow(values / format->block_values, (uint64_t)format->block_bytes, &tensor->bytes))
        return report_tensor(file, tensor, "the number of bytes overflows", error);
    return 0;
}

static int read_tensor(struct reader *reader, struct gguf_tensor *tensor) {
    int code = read_string(reader, "a tensor's name", &tensor->name);
    if (code == 0)
        code = read_tensor_sizes(reader, tensor);
    if (code == 0)
        code = read_u32(reader, "a tensor's type", &tensor->type);
    if (code == 0)
        code = read_u64(reader, "a tensor's offset", &tensor->offset);
    if (code == 0)
        code = gguf_count_bytes(tensor, reader->gguf->name, reader->error);
    return code;
}

static int read_tensors(struct reader *reader, size_t count) {
    struct gguf *gguf = reader->gguf;
    gguf->tensors = calloc(count + 1, sizeof *gguf->tensors);
    if (gguf->tensors == NULL)
        return error_set(reader->error, ERROR_MEMORY, "%s: no memory for %zu tensors", gguf->name, count);
    gguf->tensor_count = count;
    int code = index_allocate(reader, &gguf->tensor_index, count);
    for (size_t i = 0; code == 0 && i < count; i++) {
        code = read_tensor(reader, &gguf->tensors[i]);
        gguf->tensor_index.entries[i] = (struct name_entry){gguf->tensors[i].name, i};
    }
    return code != 0 ? code : index_sort(gguf, &gguf->tensor_index, "tensor", reader->error);
}

static int read_alignment(struct reader *reader, uint32_t *alignment) {
    *alignment = ALIGNMENT_DEFAULT;
    if (gguf_find(reader->gguf, "general.alignment") == NULL)
        return 0;
    int code = gguf_get_uint32(reader->gguf, "general.alignment", alignment, reader->error);
    if (code == 0 && (*alignment == 0 || (*alignment & (*alignment - 1)) != 0))
        code = error_set(reader->error, ERROR_FORMAT, "%s: key \"general.alignment\": %u is not a power of two",
            reader->gguf->name, *alignment);
    return code;
}

/* Turns offsets from the start of the data section into addresses, all inside the file. */
static int place_tensors(struct reader *reader, uint32_t alignment) {
    struct gguf *gguf = reader->gguf;
    uint64_t start = ((uint64_t)reader->at + alignment - 1) & ~(uint64_t)(alignment - 1);
    for (size_t i = 0; i < gguf->tensor_count; i++) {
        struct gguf_tensor *tensor = &gguf->tensors[i];
        if (tensor->offset % alignment != 0)
            return tensor_error(reader, tensor, "the offset is not a multiple of the file's alignment");
        if (start > gguf->bytes || tensor->offset > gguf->bytes - start ||
            tensor->bytes > gguf->bytes - start - tensor->offset)
            return tensor_error(reader, tensor, "truncated or corrupt: the data ends after the file");
        tensor->offset += start;
        tensor->data = tensor_format_find(tensor->type) == NULL ? NULL : gguf->data + tensor->offset;
    }
    return 0;
}

static int read_header(struct reader *reader, uint64_t *tensors, uint64_t *pairs) {
    struct gguf *gguf = reader->gguf;
    if (gguf->bytes < 4 || memcmp(gguf->data, "GGUF", 4) != 0)
        return error_set(reader->error, ERROR_FORMAT, "%s: not a GGUF file", gguf->name);
    reader->at = 4;
    int code = read_u32(reader, "the version", &gguf->version);
    if (code != 0)
        return code;
    if ((gguf->version & 0xffff) == 0 && gguf->version != 0)
        return error_set(reader->error, ERROR_UNSUPPORTED, "%s: big-endian GGUF files are not supported", gguf->name);
    if (gguf->version != 2 && gguf->version != 3)
        return error_set(reader->error, ERROR_UNSUPPORTED, "%s: GGUF version %u is not supported (2 and 3 are)",
            gguf->name, gguf->version);
    code = read_count(reader, "the number of tensors", TENSOR_BYTES_MIN, tensors);
    if (code == 0)
        code = read_count(reader, "the number of metadata pairs", PAIR_BYTES_MIN, pairs);
    return code;
}

static int read_file(struct gguf *gguf, struct error *error) {
    struct reader reader = {.gguf = gguf, .error = error};
    uint64_t tensors = 0;
    uint64_t pairs = 0;
    uint32_t alignment = 0;
    int code = read_header(&reader, &tensors, &pairs);
    if (code == 0)
        code = read_pairs(&reader, pairs);
    if (code == 0)
        code = read_alignment(&reader, &alignment);
    if (code == 0)
        code = read_tensors(&reader, tensors);
    if (code == 0)
        code = place_tensors(&reader, alignment);
    return code;
}

struct gguf *gguf_open_memory(const void *data, size_t bytes, const char *name, struct error *error) {
    struct gguf *gguf = calloc(1, sizeof *gguf);
    if (gguf == NULL || (gguf->name = strdup(name)) == NULL) {
        error_set(error, ERROR_MEMORY, "%s: no memory", name);
        gguf_free(gguf);
        return NULL;
    }
    gguf->data = data;
    gguf->bytes = bytes;
    if (read_file(gguf, error) != 0) {
        gguf_free(gguf);
        return NULL;
    }
    return gguf;
}

/* The descriptor is not needed afterwards. */
int gguf_map_file(const char *path, struct gguf_mapping *out, struct error *error) {
    int code = 0;
    struct stat status;
    /* Without O_NONBLOCK, opening a pipe that nobody writes to would wait for ever. */
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0)
        return error_set(error, ERROR_IO, "%s: cannot open: %s", path, strerror(errno));
    if (fstat(descriptor, &status) != 0) {
        code = error_set(error, ERROR_IO, "%s: cannot read: %s", path, strerror(errno));
        goto done;
    }
    if (!S_ISREG(status.st_mode)) {
        code = error_set(error, ERROR_IO, "%s: not a regular file", path);
        goto done;
    }
    if (status.st_size == 0) {
        code = error_set(error, ERROR_FORMAT, "%s: not a model file (it is empty)", path);
        goto done;
    }
    out->bytes = (size_t)status.st_size;
    out->data = mmap(NULL, out->bytes, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (out->data == MAP_FAILED)
        code = error_set(error, ERROR_IO, "%s: cannot map: %s", path, strerror(errno));
done:
    close(descriptor);
    return code;
}

int gguf_add_mapping(struct gguf *gguf, struct gguf_mapping mapping, struct error *error) {
    struct gguf_mapping *mappings = realloc(gguf->mappings, (gguf->mapping_count + 1) * sizeof *mappings);
    if (mappings == NULL) {
        munmap(mapping.data, mapping.bytes);
        return error_set(error, ERROR_MEMORY, "%s: no memory", gguf->name);
    }
    mappings[gguf->mapping_count++] = mapping;
    gguf->mappings = mappings;
    return 0;
}

int gguf_add_tensors(struct gguf *gguf, const struct gguf_tensor *tensors, size_t count, struct error *error) {
    size_t total = gguf->tensor_count + count;
    struct gguf_tensor *all = realloc(gguf->tensors, (total + 1) * sizeof *all);
    if (all != NULL)
        gguf->tensors = all;
    struct name_entry *entries = realloc(gguf->tensor_index.entries, (total + 1) * sizeof *entries);
    if (entries != NULL)
        gguf->tensor_index.entries = entries;
    if (all == NULL || entries == NULL)
        return error_set(error, ERROR_MEMORY, "%s: no memory for %zu tensors", gguf->name, total);
    for (size_t i = 0; i < count; i++) {
        all[gguf->tensor_count + i] = tensors[i];
        entries[gguf->tensor_count + i] = (struct name_entry){tensors[i].name, gguf->tensor_count + i};
    }
    gguf->tensor_count = gguf->tensor_index.count = total;
    return index_sort(gguf, &gguf->tensor_index, "tensor", error);
}

struct gguf *gguf_open_one(const char *path, struct error *error) {
    struct gguf_mapping mapping = {0};
    if (gguf_map_file(path, &mapping, error) != 0)
        return NULL;
    struct gguf *gguf = gguf_open_memory(mapping.data, mapping.bytes, path, error);
    if (gguf == NULL) {
        munmap(mapping.data, mapping.bytes);
        return NULL;
    }
    if (gguf_add_mapping(gguf, mapping, error) == 0)
        return gguf;
    gguf_free(gguf);
    return NULL;
}

struct gguf *gguf_open(const char *path, struct error *error) {
    if (directory_is(path))
        return directory_open(path, error);
    struct gguf *gguf = gguf_open_one(path, error);
    if (gguf == NULL || gguf_join(gguf, error) == 0)
        return gguf;
    gguf_free(gguf);
    return NULL;
}

void gguf_free(struct gguf *gguf) {
    if (gguf == NULL)
        return;
    for (size_t i = 0; i < gguf->pair_count; i++)
        if (gguf->pairs[i].type == GGUF_ARRAY)
            free((void *)gguf->pairs[i].strings);
    free(gguf->pairs);
    free(gguf->single_strings);
    free(gguf->tensors);
    free(gguf->pair_index.entries);
    free(gguf->tensor_index.entries);
    for (size_t i = 0; i < gguf->mapping_count; i++)
        munmap(gguf->mappings[i].data, gguf->mappings[i].bytes);
    free(gguf->mappings);
    free(gguf->owned);
    free(gguf->names);
    free(gguf->name);
    free(gguf);
}

uint32_t gguf_version(const struct gguf *gguf) {
    return gguf->version;
}

const char *gguf_name(const struct gguf *gguf) {
    return gguf->name;
}

size_t gguf_bytes(const struct gguf *gguf) {
    return gguf->bytes + gguf->other_bytes;
}

size_t gguf_pair_count(const struct gguf *gguf) {
    return gguf->pair_count;
}

const struct gguf_pair *gguf_pair_at(const struct gguf *gguf, size_t index) {
    return &gguf->pairs[index];
}

const struct gguf_pair *gguf_find(const struct gguf *gguf, const char *key) {
    size_t place = index_find(&gguf->pair_index, key);
    return place == SIZE_MAX ? NULL : &gguf->pairs[place];
}

size_t gguf_tensor_count(const struct gguf *gguf) {
    return gguf->tensor_count;
}

const struct gguf_tensor *gguf_tensor_at(const struct gguf *gguf, size_t index) {
    return &gguf->tensors[index];
}

const struct gguf_tensor *gguf_find_tensor(const struct gguf *gguf, const char *name) {
    size_t place = index_find(&gguf->tensor_index, name);
    return place == SIZE_MAX ? NULL : &gguf->tensors[place];
}

void gguf_forget(const struct gguf *gguf, const void *data, size_t bytes) {
    const uint8_t *from = data;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t i = 0; i < gguf->mapping_count; i++) {
        const struct gguf_mapping *mapping = &gguf->mappings[i];
        if (from < mapping->data || from >= mapping->data + mapping->bytes)
            continue;
        size_t offset = (size_t)(from - mapping->data);
        if (bytes > mapping->bytes - offset)
            return;
        size_t first = (offset + page - 1) / page * page;
        size_t end = (offset + bytes) / page * page;
        if (first < end)
            madvise(mapping->data + first, end - first, MADV_DONTNEED);
        return;
    }
}
