/* SPDX-License-Identifier: Apache-2.0
 *
 * Records of files: reading, decompression, fields.
 */
#include "policy/eval/files_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

enum {
    MOST_BYTES = 1 << 30, /* of a file, decompressed */
    MOST_ANSWER = 1 << 16,
    MOST_TEXTS = 4096, /* of a list */
    CHUNK = 1 << 16,
};

int eval_out_of_memory(struct error *error) {
    return error_set(error, ERROR_MEMORY, "out of memory for evaluation items");
}

char *eval_print(const char *format, ...) {
    char *text;
    va_list arguments;
    va_start(arguments, format);
    int length = vasprintf(&text, format, arguments);
    va_end(arguments);
    return length < 0 ? NULL : text;
}

/* Opens a regular file, and never waits for one that is none. */
static gzFile open_file(const char *name, struct error *error) {
    struct stat status;
    int descriptor = open(name, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0 || fstat(descriptor, &status) != 0) {
        error_set(error, ERROR_IO, "cannot open %s: %s", name, strerror(errno));
        goto fail;
    }
    if (!S_ISREG(status.st_mode)) {
        error_set(error, ERROR_IO, "%s is not a file", name);
        goto fail;
    }
    gzFile file = gzdopen(descriptor, "rb");
    if (file != NULL)
        return file;
    eval_out_of_memory(error);
fail:
    if (descriptor >= 0)
        close(descriptor);
    return NULL;
}

struct bytes {
    char *at;
    size_t count, capacity;
};

static int reserve_chunk(struct bytes *bytes, const char *name, struct error *error) {
    if (bytes->capacity - bytes->count >= CHUNK)
        return 0;
    if (bytes->count >= MOST_BYTES)
        return error_set(error, ERROR_FORMAT, "%s: more than %d MiB of text", name, MOST_BYTES >> 20);
    size_t capacity = bytes->capacity == 0 ? 4 * CHUNK : 2 * bytes->capacity;
    char *grown = realloc(bytes->at, capacity);
    if (grown == NULL)
        return eval_out_of_memory(error);
    bytes->at = grown;
    bytes->capacity = capacity;
    return 0;
}

/* Reads and decompresses a whole file. */
static int read_file(const char *name, struct bytes *bytes, struct error *error) {
    int code = 0, got = 0;
    gzFile file = open_file(name, error);
    if (file == NULL)
        return error == NULL ? ERROR_IO : error->code;
    while ((code = reserve_chunk(bytes, name, error)) == 0 && (got = gzread(file, bytes->at + bytes->count, CHUNK)) > 0)
        bytes->count += (size_t)got;
    if (code == 0 && got < 0) {
        int kind;
        const char *message = gzerror(file, &kind);
        code = error_set(error, kind == Z_ERRNO ? ERROR_IO : ERROR_FORMAT, "cannot read %s: %s", name,
            kind == Z_ERRNO ? strerror(errno) : message);
    }
    int closed = gzclose(file);
    if (code == 0 && closed == Z_BUF_ERROR)
        code = error_set(error, ERROR_FORMAT, "%s ends within its compressed data", name);
    return code;
}

static int add_record(struct eval_data *data, json_t *value, size_t number, struct error *error) {
    if (data->count == data->capacity) {
        size_t capacity = data->capacity == 0 ? 64 : 2 * data->capacity;
        struct eval_record *grown = reallocarray(data->records, capacity, sizeof *grown);
        if (grown == NULL)
            return eval_out_of_memory(error);
        data->records = grown;
        data->capacity = capacity;
    }
    data->records[data->count++] = (struct eval_record){json_incref(value), number};
    return 0;
}

/* The parser's message quotes the file: nothing of it may act on a terminal. */
static int json_problem(const char *name, size_t line, const json_error_t *problem, struct error *error) {
    if (json_error_code(problem) == json_error_out_of_memory)
        return eval_out_of_memory(error);
    char text[JSON_ERROR_TEXT_LENGTH];
    size_t i = 0;
    for (; problem->text[i] != '\0' && i + 1 < sizeof text; i++)
        text[i] = (unsigned char)problem->text[i] < 32 || problem->text[i] == 127 ? '?' : problem->text[i];
    text[i] = '\0';
    return error_set(error, ERROR_FORMAT, "%s: line %zu: not JSON: %s", name, line, text);
}

static int read_line(struct eval_data *data, const char *line, size_t bytes, size_t number, struct error *error) {
    json_error_t problem;
    size_t blank = 0;
    while (blank < bytes && strchr(" \t\r", line[blank]) != NULL && line[blank] != '\0')
        blank++;
    if (blank == bytes)
        return 0;
    json_t *value = json_loadb(line, bytes, 0, &problem);
    if (value == NULL)
        return json_problem(data->name, number, &problem, error);
    int code = json_is_object(value)
                   ? add_record(data, value, number, error)
                   : error_set(error, ERROR_FORMAT, "%s: line %zu: not a JSON object", data->name, number);
    json_decref(value);
    return code;
}

static int check_not_empty(const struct eval_data *data, struct error *error) {
    return data->count > 0 ? 0 : error_set(error, ERROR_FORMAT, "%s: has no %ss", data->name, data->unit);
}

int eval_data_read_lines(const char *file, struct eval_data *data, struct error *error) {
    struct bytes bytes = {0};
    size_t number = 1;
    *data = (struct eval_data){.name = file, .unit = "line"};
    int code = read_file(file, &bytes, error);
    for (size_t start = 0; code == 0 && start < bytes.count; number++) {
        const char *line = bytes.at + start, *end = memchr(line, '\n', bytes.count - start);
        size_t length = end == NULL ? bytes.count - start : (size_t)(end - line);
        code = read_line(data, line, length, number, error);
        start += length + 1;
    }
    free(bytes.at);
    return code != 0 ? code : check_not_empty(data, error);
}

int eval_data_read_examples(const char *file, struct eval_data *data, struct error *error) {
    struct bytes bytes = {0};
    json_error_t problem;
    json_t *document = NULL;
    *data = (struct eval_data){.name = file, .unit = "example"};
    int code = read_file(file, &bytes, error);
    if (code == 0 && (document = json_loadb(bytes.at, bytes.count, 0, &problem)) == NULL)
        code = json_problem(file, problem.line > 0 ? (size_t)problem.line : 1, &problem, error);
    const json_t *examples = json_object_get(document, "examples");
    if (code == 0 && !json_is_array(examples))
        code = error_set(error, ERROR_FORMAT, "%s: field examples: not a list", file);
    for (size_t i = 0; code == 0 && i < json_array_size(examples); i++) {
        json_t *value = json_array_get(examples, i);
        code = json_is_object(value)
                   ? add_record(data, value, i + 1, error)
                   : error_set(error, ERROR_FORMAT, "%s: example %zu: not a JSON object", file, i + 1);
    }
    json_decref(document);
    free(bytes.at);
    return code != 0 ? code : check_not_empty(data, error);
}

void eval_data_free(struct eval_data *data) {
    for (size_t i = 0; i < data->count; i++)
        json_decref(data->records[i].value);
    free(data->records);
    *data = (struct eval_data){0};
}

int eval_field_error(struct eval_place place, struct error *error, const char *field, const char *problem) {
    return error_set(error, ERROR_FORMAT, "%s: %s %zu: field %s: %s", place.data->name, place.data->unit,
        place.record->number, field, problem);
}

static int copy_text(const json_t *value, char **text, struct error *error) {
    *text = strdup(json_string_value(value));
    return *text == NULL ? eval_out_of_memory(error) : 0;
}

int eval_field_text(
    struct eval_place place, const json_t *object, const char *field, bool required, char **text, struct error *error) {
    const json_t *value = json_object_get(object == NULL ? place.record->value : object, field);
    *text = NULL;
    if (value == NULL || json_is_null(value))
        return required ? eval_field_error(place, error, field, "missing") : 0;
    if (!json_is_string(value))
        return eval_field_error(place, error, field, "not a text");
    return copy_text(value, text, error);
}

int eval_field_texts(struct eval_place place, const char *field, char ***texts, uint32_t *count, struct error *error) {
    const json_t *list = json_object_get(place.record->value, field);
    size_t length = json_array_size(list);
    if (list == NULL)
        return eval_field_error(place, error, field, "missing");
    if (!json_is_array(list) || length == 0)
        return eval_field_error(place, error, field, "not a list of texts");
    if (length > MOST_TEXTS)
        return eval_field_error(place, error, field, "more than 4,096 texts");
    *texts = calloc(length, sizeof **texts);
    if (*texts == NULL)
        return eval_out_of_memory(error);
    for (size_t i = 0; i < length; i++) {
        const json_t *value = json_array_get(list, i);
        if (!json_is_string(value))
            return eval_field_error(place, error, field, "not a list of texts");
        if (json_string_length(value) > MOST_ANSWER)
            return eval_field_error(place, error, field, "longer than 65,536 bytes");
        int code = copy_text(value, &(*texts)[i], error);
        if (code != 0)
            return code;
        *count = (uint32_t)i + 1;
    }
    return 0;
}

int eval_item_answer(struct eval_item *item, char *answer, struct error *error) {
    item->answers = malloc(sizeof *item->answers);
    if (item->answers == NULL) {
        free(answer);
        return eval_out_of_memory(error);
    }
    item->answers[0] = answer;
    item->answers_count = 1;
    return 0;
}
