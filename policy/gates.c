/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/budget.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { GATES_FILE_MAX = 16 << 20, GATES_MAX = 1 << 20 };

struct head_gates *head_gates_take(struct head_gates *gates) {
    if (gates != NULL)
        __atomic_fetch_add(&gates->references, 1, __ATOMIC_RELAXED);
    return gates;
}

void head_gates_release(struct head_gates *gates) {
    if (gates != NULL && __atomic_sub_fetch(&gates->references, 1, __ATOMIC_ACQ_REL) == 0)
        free(gates);
}

/* The shape of the list of lists; error where it is none. */
static int measure_gates(const json_t *rows, const char *name, size_t *layers, size_t *heads, struct error *error) {
    *layers = json_array_size(rows);
    *heads = json_array_size(json_array_get(rows, 0));
    if (*layers == 0 || *heads == 0)
        return error_set(error, ERROR_FORMAT,
            "gate file %.200s: \"gates\" must be a list of layers, each a list of one number per KV head", name);
    if (*layers > GATES_MAX / *heads)
        return error_set(error, ERROR_FORMAT, "gate file %.200s: more than %d gates", name, GATES_MAX);
    return 0;
}

static int read_layer(
    const json_t *row, const char *name, size_t layer, size_t heads, float *out, struct error *error) {
    if (!json_is_array(row) || json_array_size(row) != heads)
        return error_set(
            error, ERROR_FORMAT, "gate file %.200s: layer %zu must be a list of %zu numbers", name, layer, heads);
    for (size_t head = 0; head < heads; head++) {
        const json_t *number = json_array_get(row, head);
        double gate = json_number_value(number);
        if (!json_is_number(number) || !(gate >= 0 && gate <= 1))
            return error_set(error, ERROR_FORMAT,
                "gate file %.200s: the gate of layer %zu, KV head %zu must be a number from 0 to 1", name, layer, head);
        out[head] = (float)gate;
    }
    return 0;
}

static struct head_gates *read_gates(const json_t *root, const char *name, struct error *error) {
    const json_t *rows = json_object_get(root, "gates");
    size_t layers, heads;
    if (measure_gates(rows, name, &layers, &heads, error) != 0)
        return NULL;
    struct head_gates *gates = malloc(sizeof *gates + layers * heads * sizeof gates->values[0]);
    if (gates == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for %zu gates", layers * heads);
        return NULL;
    }
    *gates = (struct head_gates){.references = 1, .layers = (uint32_t)layers, .kv_heads = (uint32_t)heads};
    for (size_t layer = 0; layer < layers; layer++)
        if (read_layer(json_array_get(rows, layer), name, layer, heads, gates->values + layer * heads, error) != 0) {
            head_gates_release(gates);
            return NULL;
        }
    return gates;
}

struct head_gates *head_gates_parse(const char *text, size_t bytes, const char *name, struct error *error) {
    json_error_t where;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &where);
    if (root == NULL) {
        if (json_error_code(&where) == json_error_out_of_memory)
            error_set(error, ERROR_MEMORY, "no memory for gate file %.200s", name);
        else
            error_set(error, ERROR_FORMAT, "gate file %.200s is not JSON: line %d, column %d", name, where.line,
                where.column);
        return NULL;
    }
    struct head_gates *gates = read_gates(root, name, error);
    json_decref(root);
    return gates;
}

/* The whole of a regular file of moderate size; anything else (a pipe, a device) could block or never end. */
static char *read_file(const char *file, size_t *bytes, struct error *error) {
    struct stat status;
    char *text = NULL;
    size_t size = 0;
    ssize_t count = 1;
    int descriptor = open(file, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    *bytes = 0;
    if (descriptor < 0 || fstat(descriptor, &status) != 0) {
        error_set(error, ERROR_IO, "cannot read gate file %.200s: %s", file, strerror(errno));
    } else if (!S_ISREG(status.st_mode) || status.st_size > GATES_FILE_MAX) {
        error_set(error, ERROR_IO, "gate file %.200s must be a regular file of at most %d bytes", file, GATES_FILE_MAX);
    } else if ((text = malloc((size = (size_t)status.st_size) + 1)) == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for gate file %.200s", file);
    }
    while (text != NULL && count > 0 && *bytes < size) {
        count = read(descriptor, text + *bytes, size - *bytes);
        *bytes += count > 0 ? (size_t)count : 0;
    }
    if (text != NULL && count < 0) {
        error_set(error, ERROR_IO, "cannot read gate file %.200s: %s", file, strerror(errno));
        free(text);
        text = NULL;
    }
    if (descriptor >= 0)
        close(descriptor);
    return text;
}

struct head_gates *head_gates_load(const char *file, struct error *error) {
    size_t bytes;
    char *text = read_file(file, &bytes, error);
    struct head_gates *gates = text != NULL ? head_gates_parse(text, bytes, file, error) : NULL;
    free(text);
    return gates;
}
