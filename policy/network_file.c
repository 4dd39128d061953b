/* SPDX-License-Identifier: Apache-2.0
 *
 * Networks as safetensors files (network.h), and where those that ship with the program are.
 */
#include "policy/network.h"

#include "policy/options.h"
#include "policy/safetensors.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum {
    FILE_MAX = (1 << 30) + SAFETENSORS_HEADER_MAX + 8,
    METHOD_MAX = 64,
    INPUTS_TEXT_MAX = 192,
    ARRAYS_MAX = 16,
    QUOTE_SIZE = 64,
};

static const char format_name[] = "distillcache-policy-1";
static const char *const feature_names[] = {[FEATURES_CONTENT] = "content", [FEATURES_PAPER] = "paper"};
static const char *const input_names[] = {
    [INPUT_SUM] = "sum",
    [INPUT_MEAN] = "mean",
    [INPUT_DEVIATION] = "deviation",
    [INPUT_ENTROPY] = "entropy",
    [INPUT_VALUE_NORM] = "value_norm",
    [INPUT_OUTPUT_NORM] = "output_norm",
    [INPUT_POSITION] = "position",
    [INPUT_AGE] = "age",
    [INPUT_BUDGET] = "budget",
    [INPUT_RECENT_8] = "recent_8",
    [INPUT_RECENT_4] = "recent_4",
    [INPUT_RECENT_2] = "recent_2",
};
static const char *const scope_names[] = {[SCOPE_HEAD] = "head", [SCOPE_LAYER] = "layer", [SCOPE_MODEL] = "model"};

static const char *const keys[] = {"format", "method", "features", "inputs", "content", "hidden", "layers", "kv_heads",
    "head_dim", "fingerprint", "scope", "floor", "interval", "summary", "protect_recent", "protect_sinks", "record"};
enum { KEYS = sizeof keys / sizeof keys[0] };

const char *network_input_name(enum network_input input) {
    return input_names[input];
}

const char *network_features_name(enum network_features features) {
    return feature_names[features];
}

/* "content,sum,mean": what the network is fed with, in order. */
static void write_inputs(const struct network_shape *shape, char out[static INPUTS_TEXT_MAX]) {
    enum network_input list[INPUT_KINDS];
    uint32_t count = network_inputs_list(shape, list);
    size_t length = (size_t)snprintf(out, INPUTS_TEXT_MAX, "%s", shape->content > 0 ? "content" : "");
    for (uint32_t i = 0; i < count; i++)
        length += (size_t)snprintf(
            out + length, INPUTS_TEXT_MAX - length, "%s%s", length > 0 ? "," : "", input_names[list[i]]);
}

/* ---- metadata ---- */

static int find_word(const char *const *words, int count, const char *text) {
    for (int i = 0; i < count; i++)
        if (strcmp(words[i], text) == 0)
            return i;
    return -1;
}

static int refuse(
    const struct safetensors *file, const char *key, const char *value, const char *must, struct error *error) {
    char quote[QUOTE_SIZE];
    return error_set(error, ERROR_FORMAT, "%.200s: %s is '%s': must be %s", file->file, key,
        policy_option_quote(value, quote, sizeof quote), must);
}

static int read_whole(
    const struct safetensors *file, const char *key, uint32_t most, uint32_t *out, struct error *error) {
    const char *text = safetensors_metadata(file, key);
    char *end, must[64];
    errno = 0;
    unsigned long long value = isdigit((unsigned char)text[0]) ? strtoull(text, &end, 10) : 0;
    if (isdigit((unsigned char)text[0]) && *end == '\0' && errno == 0 && value <= most) {
        *out = (uint32_t)value;
        return 0;
    }
    snprintf(must, sizeof must, "a whole number from 0 to %" PRIu32, most);
    return refuse(file, key, text, must, error);
}

/* All keys are there, none beside them. */
static int check_keys(const struct safetensors *file, struct error *error) {
    const char *format = safetensors_metadata(file, "format"), *key;
    json_t *value;
    if (format == NULL || strcmp(format, format_name) != 0)
        return error_set(
            error, ERROR_FORMAT, "%.200s: no policy file: its metadata do not have format %s", file->file, format_name);
    for (int i = 0; i < KEYS; i++)
        if (safetensors_metadata(file, keys[i]) == NULL)
            return error_set(error, ERROR_FORMAT, "%.200s: its metadata do not have '%s'", file->file, keys[i]);
    json_object_foreach(json_object_get(file->header, "__metadata__"), key, value) if (find_word(keys, KEYS, key) < 0) {
        char quote[QUOTE_SIZE];
        return error_set(error, ERROR_FORMAT, "%.200s: its metadata have an unknown key '%s'", file->file,
            policy_option_quote(key, quote, sizeof quote));
    }
    return 0;
}

/* The mask of the names, in any order: the caller compares. false: an unknown name, or too long a list. */
static bool read_input_names(const char *text, uint32_t *mask) {
    char words[INPUTS_TEXT_MAX], *rest = words, *name;
    if (strlen(text) >= sizeof words)
        return false;
    strcpy(words, text);
    *mask = 0;
    while (text[0] != '\0' && (name = strsep(&rest, ",")) != NULL) {
        int input = find_word(input_names, INPUT_KINDS, name);
        if (input < 0 && strcmp(name, "content") != 0)
            return false;
        *mask |= input >= 0 ? 1u << input : 0;
    }
    return true;
}

static int read_inputs(const struct safetensors *file, struct network_shape *shape, struct error *error) {
    const char *text = safetensors_metadata(file, "inputs");
    char known[INPUTS_TEXT_MAX];
    if (!read_input_names(text, &shape->inputs))
        return refuse(file, "inputs", text, "names of known inputs; this feature set is another one", error);
    write_inputs(shape, known);
    if (strcmp(known, text) == 0)
        return 0;
    return refuse(file, "inputs", text, known, error); /* another order, a name twice, content without a number of it */
}

static int read_shape(const struct safetensors *file, struct network_shape *shape, struct error *error) {
    const char *features = safetensors_metadata(file, "features");
    int known = find_word(feature_names, 2, features);
    if (known < 0)
        return refuse(file, "features", features, "content or paper; this feature set is not known here", error);
    shape->features = (enum network_features)known;
    int code = read_whole(file, "content", NETWORK_CONTENT_MAX, &shape->content, error);
    code = code == 0 ? read_inputs(file, shape, error) : code;
    code = code == 0 ? read_whole(file, "hidden", NETWORK_HIDDEN_MAX, &shape->hidden, error) : code;
    code = code == 0 ? read_whole(file, "layers", UINT32_MAX, &shape->layers, error) : code;
    code = code == 0 ? read_whole(file, "kv_heads", UINT32_MAX, &shape->kv_heads, error) : code;
    return code == 0 ? read_whole(file, "head_dim", UINT32_MAX, &shape->head_dim, error) : code;
}

static int read_floor(const struct safetensors *file, float *out, struct error *error) {
    const char *text = safetensors_metadata(file, "floor");
    char *end;
    *out = strtof(text, &end);
    bool number = text[0] != '\0' && text[strspn(text, "0123456789.eE+-")] == '\0' && *end == '\0';
    return number && *out >= 0 && *out <= 1 ? 0 : refuse(file, "floor", text, "a number from 0 to 1", error);
}

static int read_defaults(const struct safetensors *file, struct policy_network *network, struct error *error) {
    const char *scope = safetensors_metadata(file, "scope"), *summary = safetensors_metadata(file, "summary");
    int word = find_word(scope_names, 3, scope);
    if (word < 0)
        return refuse(file, "scope", scope, "head, layer or model", error);
    network->scope = (enum policy_scope)word;
    if (strcmp(summary, "0") != 0 && strcmp(summary, "1") != 0)
        return refuse(file, "summary", summary, "0 or 1", error);
    network->summary = summary[0] == '1';
    int code = read_floor(file, &network->floor, error);
    code = code == 0 ? read_whole(file, "interval", 65536, &network->interval, error) : code;
    if (code == 0 && network->interval == 0)
        return refuse(file, "interval", "0", "at least 1", error);
    code = code == 0 ? read_whole(file, "protect_recent", 1 << 30, &network->protect_recent, error) : code;
    return code == 0 ? read_whole(file, "protect_sinks", 1 << 30, &network->protect_sinks, error) : code;
}

static bool valid_fingerprint(const char *text) {
    size_t length = strlen(text);
    return (length == 0 || length == 64) && text[strspn(text, "0123456789abcdef")] == '\0';
}

/* Why the record is none; NULL: it is one. */
static const char *record_fault(const char *text) {
    json_t *record = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    const char *fault = json_is_object(record) ? NULL : "a JSON object";
    json_decref(record);
    return fault;
}

static int read_texts(const struct safetensors *file, struct policy_network *network, struct error *error) {
    const char *fingerprint = safetensors_metadata(file, "fingerprint");
    const char *method = safetensors_metadata(file, "method"), *record = safetensors_metadata(file, "record");
    if (!valid_fingerprint(fingerprint))
        return refuse(file, "fingerprint", fingerprint, "64 hexadecimal digits, or nothing", error);
    memcpy(network->fingerprint, fingerprint, strlen(fingerprint) + 1);
    if (strlen(method) > METHOD_MAX || method[strspn(method, "abcdefghijklmnopqrstuvwxyz0123456789_-")] != '\0')
        return refuse(file, "method", method, "a short name", error);
    if (record_fault(record) != NULL)
        return refuse(file, "record", record, record_fault(record), error);
    free(network->record);
    network->method = method[0] != '\0' ? strdup(method) : NULL;
    network->record = strdup(record);
    if (network->record == NULL || (method[0] != '\0' && network->method == NULL))
        return error_set(error, ERROR_MEMORY, "no memory for the record of %.200s", file->file);
    return 0;
}

/* ---- tensors ---- */

static int read_arrays(const struct safetensors *file, struct policy_network *network, struct error *error) {
    struct network_array array;
    for (uint32_t i = 0; network_array(network, i, &array); i++) {
        int code = safetensors_read(file, array.name, array.dimensions, array.values, error);
        if (code != 0)
            return code;
    }
    for (uint32_t layer = 0; layer < network->shape.layers; layer++)
        if (network->layer_budgets[layer] < 0)
            return error_set(error, ERROR_FORMAT, "%.200s: the budget of layer %u is negative", file->file, layer);
    return 0;
}

static bool known_array(const struct policy_network *network, const char *name) {
    struct network_array array;
    for (uint32_t i = 0; network_array(network, i, &array); i++)
        if (strcmp(array.name, name) == 0)
            return true;
    return false;
}

static int check_names(const struct safetensors *file, const struct policy_network *network, struct error *error) {
    const char *name;
    for (uint32_t i = 0; (name = safetensors_name(file, i)) != NULL; i++)
        if (!known_array(network, name)) {
            char quote[QUOTE_SIZE];
            return error_set(error, ERROR_FORMAT, "%.200s: there is an unknown tensor '%s'", file->file,
                policy_option_quote(name, quote, sizeof quote));
        }
    return 0;
}

/* The network of this shape, if the file has as many numbers: a few bytes must not ask for much memory. */
static struct policy_network *create_for(
    const struct safetensors *file, const struct network_shape *shape, struct error *error) {
    struct error reason = {0};
    uint64_t heads = (uint64_t)shape->layers * shape->kv_heads;
    uint64_t least = shape->features == FEATURES_PAPER
                         ? shape->layers
                         : heads * (shape->hidden + (shape->content > 0 ? (uint64_t)shape->head_dim : 0));
    if (shape->layers > 1 << 20 || shape->kv_heads > 1 << 20 || least > file->data_size / sizeof(float)) {
        error_set(error, ERROR_FORMAT, "%.200s: %zu bytes of data are too few for its %u layers of %u KV heads",
            file->file, file->data_size, shape->layers, shape->kv_heads);
        return NULL;
    }
    struct policy_network *network = network_create(shape, &reason);
    if (network == NULL)
        error_set(
            error, reason.code == ERROR_INVALID ? ERROR_FORMAT : reason.code, "%.200s: %s", file->file, reason.message);
    return network;
}

static struct policy_network *read_network(const struct safetensors *file, struct error *error) {
    struct network_shape shape = {0};
    if (check_keys(file, error) != 0 || read_shape(file, &shape, error) != 0)
        return NULL;
    struct policy_network *network = create_for(file, &shape, error);
    if (network == NULL)
        return NULL;
    if (check_names(file, network, error) != 0 || read_arrays(file, network, error) != 0 ||
        read_defaults(file, network, error) != 0 || read_texts(file, network, error) != 0) {
        network_release(network);
        return NULL;
    }
    return network;
}

struct policy_network *network_parse(const void *bytes, size_t size, const char *name, struct error *error) {
    struct safetensors file;
    if (safetensors_open(&file, bytes, size, name, error) != 0)
        return NULL;
    struct policy_network *network = read_network(&file, error);
    safetensors_close(&file);
    return network;
}

/* The whole of a regular file; anything else (a pipe, a device) could block or never end. */
static unsigned char *read_file(const char *file, size_t *bytes, struct error *error) {
    struct stat status;
    unsigned char *content = NULL;
    size_t size = 0;
    ssize_t count = 1;
    int descriptor = open(file, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    *bytes = 0;
    if (descriptor < 0 || fstat(descriptor, &status) != 0)
        error_set(error, ERROR_IO, "cannot read policy file %.200s: %s", file, strerror(errno));
    else if (!S_ISREG(status.st_mode) || status.st_size > FILE_MAX)
        error_set(error, ERROR_IO, "policy file %.200s must be a regular file of at most %d bytes", file, FILE_MAX);
    else if ((content = malloc((size = (size_t)status.st_size) + 1)) == NULL)
        error_set(error, ERROR_MEMORY, "no memory for policy file %.200s", file);
    while (content != NULL && count > 0 && *bytes < size) {
        count = read(descriptor, content + *bytes, size - *bytes);
        *bytes += count > 0 ? (size_t)count : 0;
    }
    if (content != NULL && count < 0) {
        error_set(error, ERROR_IO, "cannot read policy file %.200s: %s", file, strerror(errno));
        free(content);
        content = NULL;
    }
    if (descriptor >= 0)
        close(descriptor);
    return content;
}

struct policy_network *network_load(const char *file, struct error *error) {
    size_t size;
    unsigned char *bytes = read_file(file, &size, error);
    struct policy_network *network = bytes != NULL ? network_parse(bytes, size, file, error) : NULL;
    free(bytes);
    return network;
}

/* ---- writing ---- */

static int put_text(json_t *metadata, const char *key, const char *value) {
    return json_object_set_new(metadata, key, json_string(value));
}

static int put_whole(json_t *metadata, const char *key, uint32_t value) {
    char text[32];
    snprintf(text, sizeof text, "%" PRIu32, value);
    return put_text(metadata, key, text);
}

static int put_number(json_t *metadata, const char *key, float value) {
    char text[32];
    snprintf(text, sizeof text, "%.9g", (double)value); /* reads back as the same float */
    return put_text(metadata, key, text);
}

static json_t *make_metadata(const struct policy_network *network) {
    const struct network_shape *shape = &network->shape;
    char inputs[INPUTS_TEXT_MAX];
    json_t *metadata = json_object();
    write_inputs(shape, inputs);
    int failed = put_text(metadata, "format", format_name);
    failed |= put_text(metadata, "method", network->method != NULL ? network->method : "");
    failed |= put_text(metadata, "features", feature_names[shape->features]);
    failed |= put_text(metadata, "inputs", inputs);
    failed |= put_whole(metadata, "content", shape->content);
    failed |= put_whole(metadata, "hidden", shape->hidden);
    failed |= put_whole(metadata, "layers", shape->layers);
    failed |= put_whole(metadata, "kv_heads", shape->kv_heads);
    failed |= put_whole(metadata, "head_dim", shape->head_dim);
    failed |= put_text(metadata, "fingerprint", network->fingerprint);
    failed |= put_text(metadata, "scope", scope_names[network->scope]);
    failed |= put_number(metadata, "floor", network->floor);
    failed |= put_whole(metadata, "interval", network->interval);
    failed |= put_whole(metadata, "summary", network->summary);
    failed |= put_whole(metadata, "protect_recent", network->protect_recent);
    failed |= put_whole(metadata, "protect_sinks", network->protect_sinks);
    failed |= put_text(metadata, "record", network->record);
    if (!failed)
        return metadata;
    json_decref(metadata);
    return NULL;
}

static int list_items(const struct policy_network *network, const char *file, struct safetensors_item items[ARRAYS_MAX],
    uint32_t *count, struct error *error) {
    struct network_array array;
    for (*count = 0; network_array(network, *count, &array); ++*count) {
        for (size_t i = 0; i < array.count; i++)
            if (!isfinite(array.values[i]))
                return error_set(
                    error, ERROR_INVALID, "cannot write %.200s: number %zu of %s is not finite", file, i, array.name);
        items[*count] = (struct safetensors_item){.name = array.name, .values = array.values};
        memcpy(items[*count].dimensions, array.dimensions, sizeof array.dimensions);
    }
    return 0;
}

int network_save(const struct policy_network *network, const char *file, struct error *error) {
    struct safetensors_item items[ARRAYS_MAX];
    uint32_t count;
    int code = list_items(network, file, items, &count, error);
    if (code != 0)
        return code;
    if (record_fault(network->record) != NULL || !valid_fingerprint(network->fingerprint))
        return error_set(error, ERROR_INVALID, "cannot write %.200s: its record or fingerprint is none", file);
    json_t *metadata = make_metadata(network);
    if (metadata == NULL)
        return error_set(error, ERROR_MEMORY, "no memory to write %.200s", file);
    code = safetensors_save(file, metadata, items, count, error);
    json_decref(metadata);
    return code;
}
