/* SPDX-License-Identifier: Apache-2.0 */
#include "commands/inspect.h"

#include "commands/commands.h"
#include "commands/inspect_policy.h"
#include "engine/model.h"
#include "engine/tokenizer.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { SHOWN_BYTES = 640, /* a whole error message */ LINE_BYTES = 64 };

/* A document being made. Memory that runs out anywhere is noticed once, at the end. */
struct report {
    const struct gguf *gguf;
    const struct model *model; /* NULL: not supported */
    json_t *root;
    json_t *unsupported;
    bool failed;
};

static void put(struct report *report, json_t *object, const char *key, json_t *value) {
    if (json_object_set_new(object, key, value) != 0)
        report->failed = true;
}

static void put_integer(struct report *report, json_t *object, const char *key, uint64_t value) {
    put(report, object, key, json_integer(value > INT64_MAX ? INT64_MAX : (json_int_t)value));
}

static json_t *shown_string(struct gguf_string string) {
    char shown[SHOWN_BYTES];
    json_t *whole = string.bytes == 0 ? json_string("") : json_stringn(string.text, string.bytes);
    return whole != NULL ? whole : json_string(gguf_string_show(string, shown, sizeof shown)); /* it was not UTF-8 */
}

/* Messages hold paths, which may be any bytes, and may be cut anywhere. */
static json_t *shown_text(const char *text) {
    return shown_string((struct gguf_string){text, strlen(text)});
}

static const char *type_name(enum gguf_type type) {
    static const char *const names[] = {"uint8", "int8", "uint16", "int16", "uint32", "int32", "float32", "bool",
        "string", "array", "uint64", "int64", "float64"};
    return names[type];
}

static json_t *number_or_null(double value) {
    json_t *number = json_real(value);
    return number != NULL ? number : json_null(); /* JSON has no infinities */
}

static json_t *pair_value(const struct gguf_pair *pair) {
    struct gguf_pair single = *pair;
    single.element_type = pair->type;
    switch (pair->type) {
    case GGUF_ARRAY:
        return json_pack("{s:s, s:I}", "array_of", type_name(pair->element_type), "count", (json_int_t)pair->count);
    case GGUF_STRING:
        return shown_string(pair->strings[0]);
    case GGUF_FLOAT32:
    case GGUF_FLOAT64:
        return number_or_null(gguf_array_float(&single, 0));
    case GGUF_BOOL:
        return json_boolean(gguf_array_int(&single, 0));
    default:
        return json_integer(gguf_array_int(&single, 0));
    }
}

/* Puts the value of a key under a name of ours, when the file has it. */
static void put_pair(struct report *report, json_t *object, const char *name, const char *key) {
    const struct gguf_pair *pair = gguf_find(report->gguf, key);
    if (pair != NULL)
        put(report, object, name, pair_value(pair));
}

static void put_count(struct report *report, json_t *object, const char *name, const char *key) {
    const struct gguf_pair *pair = gguf_find(report->gguf, key);
    if (pair != NULL)
        put_integer(report, object, name, pair->count);
}

static void add_unsupported(struct report *report, const char *kind, json_t *name, const char *format) {
    json_t *entry = json_object();
    put(report, entry, "kind", json_string(kind));
    put(report, entry, "name", name);
    if (format != NULL)
        put(report, entry, "format", json_string(format));
    if (json_array_append_new(report->unsupported, entry) != 0)
        report->failed = true;
}

static void describe_metadata(struct report *report) {
    json_t *metadata = json_object();
    for (size_t i = 0; i < gguf_pair_count(report->gguf); i++) {
        const struct gguf_pair *pair = gguf_pair_at(report->gguf, i);
        char key[SHOWN_BYTES];
        put(report, metadata, gguf_string_show(pair->key, key, sizeof key), pair_value(pair));
    }
    put(report, report->root, "metadata", metadata);
}

/* The same names as in struct model_shape. */
static void describe_model_shape(struct report *report, json_t *shape) {
    const struct model_shape *from = &report->model->shape;
    const struct {
        const char *name;
        uint32_t value;
    } sizes[] = {{"layers", from->layers}, {"heads", from->heads}, {"kv_heads", from->kv_heads},
        {"head_dim", from->head_dim}, {"width", from->width}, {"ff_width", from->ff_width},
        {"vocabulary", from->vocabulary}, {"context", from->context}, {"rope_dim", from->rope_dim}};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        put_integer(report, shape, sizes[i].name, sizes[i].value);
    put(report, shape, "rope_base", number_or_null(from->rope_base));
    put(report, shape, "norm_epsilon", number_or_null(from->norm_epsilon));
    put_integer(report, shape, "global_layers", from->global_layers);
}

static void describe_foreign_shape(struct report *report, json_t *shape, const char *architecture) {
    static const struct {
        const char *name;
        const char *key;
    } keys[] = {{"layers", "block_count"}, {"heads", "attention.head_count"}, {"kv_heads", "attention.head_count_kv"},
        {"head_dim", "attention.key_length"}, {"width", "embedding_length"}, {"ff_width", "feed_forward_length"},
        {"vocabulary", "vocab_size"}, {"context", "context_length"}, {"rope_dim", "rope.dimension_count"},
        {"rope_base", "rope.freq_base"}, {"norm_epsilon", "attention.layer_norm_rms_epsilon"}};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        char key[2 * SHOWN_BYTES];
        snprintf(key, sizeof key, "%s.%s", architecture, keys[i].key);
        put_pair(report, shape, keys[i].name, key);
    }
}

static void describe_shape(struct report *report) {
    struct gguf_string architecture;
    char shown[SHOWN_BYTES];
    json_t *shape = json_object();
    if (report->model != NULL)
        describe_model_shape(report, shape);
    else if (gguf_get_string(report->gguf, "general.architecture", &architecture, NULL) == 0)
        describe_foreign_shape(report, shape, gguf_string_show(architecture, shown, sizeof shown));
    put(report, report->root, "shape", shape);
}

/* Names of the chat templates: tokenizer.chat_template, .tool_use, ... */
static json_t *list_templates(struct report *report) {
    static const char prefix[] = "tokenizer.chat_template";
    const size_t length = sizeof prefix - 1;
    json_t *names = json_array();
    for (size_t i = 0; i < gguf_pair_count(report->gguf); i++) {
        const struct gguf_pair *pair = gguf_pair_at(report->gguf, i);
        struct gguf_string key = pair->key;
        if (pair->type != GGUF_STRING || key.bytes < length || memcmp(key.text, prefix, length) != 0)
            continue;
        json_t *name = NULL;
        if (key.bytes == length)
            name = json_string("default");
        else if (key.text[length] == '.' && key.bytes > length + 1)
            name = shown_string((struct gguf_string){key.text + length + 1, key.bytes - length - 1});
        else
            continue;
        if (json_array_append_new(names, name) != 0)
            report->failed = true;
    }
    return names;
}

static void describe_tokenizer(struct report *report) {
    json_t *tokenizer = json_object();
    put_pair(report, tokenizer, "model", "tokenizer.ggml.model");
    put_pair(report, tokenizer, "pre", "tokenizer.ggml.pre");
    put_count(report, tokenizer, "tokens", "tokenizer.ggml.tokens");
    put_count(report, tokenizer, "merges", "tokenizer.ggml.merges");
    put_pair(report, tokenizer, "bos", "tokenizer.ggml.bos_token_id");
    put_pair(report, tokenizer, "eos", "tokenizer.ggml.eos_token_id");
    put_pair(report, tokenizer, "adds_bos", "tokenizer.ggml.add_bos_token");
    json_t *templates = list_templates(report);
    put(report, tokenizer, "chat_template", json_boolean(json_array_size(templates) > 0));
    put(report, tokenizer, "chat_templates", templates);
    put(report, report->root, "tokenizer", tokenizer);
}

static void add_to(struct report *report, json_t *sums, const char *key, uint64_t more) {
    put_integer(report, sums, key, (uint64_t)json_integer_value(json_object_get(sums, key)) + more);
}

static void add_to_totals(struct report *report, json_t *sums, uint64_t values, uint64_t bytes) {
    add_to(report, sums, "tensors", 1);
    add_to(report, sums, "values", values);
    add_to(report, sums, "bytes", bytes);
}

static json_t *describe_tensor(struct report *report, const struct gguf_tensor *tensor, uint64_t values) {
    json_t *entry = json_object();
    json_t *shape = json_array();
    for (uint32_t i = tensor->dimensions; i > 0; i--)
        if (json_array_append_new(shape, json_integer((json_int_t)tensor->size[i - 1])) != 0)
            report->failed = true;
    put(report, entry, "name", shown_string(tensor->name));
    put(report, entry, "format", json_string(tensor_type_name(tensor->type)));
    put(report, entry, "shape", shape);
    put_integer(report, entry, "values", values);
    if (tensor->data != NULL)
        put_integer(report, entry, "bytes", tensor->bytes);
    else
        put(report, entry, "bytes", json_null());
    put_integer(report, entry, "offset", tensor->offset);
    return entry;
}

static void describe_tensors(struct report *report) {
    json_t *tensors = json_array();
    json_t *totals = json_pack("{s:i, s:i, s:i}", "tensors", 0, "values", 0, "bytes", 0);
    json_t *formats = json_object();
    for (size_t i = 0; i < gguf_tensor_count(report->gguf); i++) {
        const struct gguf_tensor *tensor = gguf_tensor_at(report->gguf, i);
        const char *format = tensor_type_name(tensor->type);
        uint64_t values = tensor->size[0] * tensor->size[1] * tensor->size[2] * tensor->size[3];
        if (json_object_get(formats, format) == NULL)
            put(report, formats, format, json_object());
        add_to_totals(report, totals, values, tensor->bytes);
        add_to_totals(report, json_object_get(formats, format), values, tensor->bytes);
        if (json_array_append_new(tensors, describe_tensor(report, tensor, values)) != 0)
            report->failed = true;
        if (tensor->data == NULL)
            add_unsupported(report, "format", shown_string(tensor->name), format);
    }
    put(report, totals, "formats", formats);
    put(report, report->root, "tensors", tensors);
    put(report, report->root, "totals", totals);
}

static void append_name(struct report *report, json_t *names, const char *name) {
    if (json_array_append_new(names, json_string(name)) != 0)
        report->failed = true;
}

static void describe_supported(struct report *report) {
    enum { TYPES = 64 }; /* numbers of formats are below */
    json_t *supported = json_object(), *architectures = json_array(), *formats = json_array();
    for (uint32_t i = 0; architecture_at(i) != NULL; i++)
        append_name(report, architectures, architecture_at(i)->name);
    for (uint32_t type = 0; type < TYPES; type++)
        if (tensor_format_find(type) != NULL)
            append_name(report, formats, tensor_format_find(type)->name);
    put(report, supported, "architectures", architectures);
    put(report, supported, "formats", formats);
    put(report, report->root, "supported", supported);
}

/* Names the architecture when it is that, and why the model cannot be run in any case. */
static void describe_refusal(struct report *report, const struct error *error) {
    struct gguf_string text;
    char shown[SHOWN_BYTES];
    put(report, report->root, "reason", shown_text(error->message));
    if (gguf_get_string(report->gguf, "general.architecture", &text, NULL) != 0)
        return;
    gguf_string_show(text, shown, sizeof shown);
    if (architecture_find(shown) == NULL)
        add_unsupported(report, "architecture", json_string(shown), NULL);
    else if (json_array_size(report->unsupported) == 0)
        add_unsupported(report, "model", shown_text(error->message), NULL);
}

static void describe_runnable(struct report *report, const struct error *model_error) {
    struct error error = {0};
    struct tokenizer *tokenizer = report->model == NULL ? NULL : tokenizer_create(report->gguf, &error);
    put(report, report->root, "runnable", json_boolean(tokenizer != NULL));
    if (report->model == NULL) {
        describe_refusal(report, model_error);
    } else if (tokenizer == NULL) {
        put(report, report->root, "reason", shown_text(error.message));
        add_unsupported(report, "tokenizer", shown_text(error.message), NULL);
    }
    if (report->model != NULL)
        put(report, report->root, "fingerprint", json_string(report->model->fingerprint));
    tokenizer_free(tokenizer);
}

static void describe_file(struct report *report, const char *path) {
    put(report, report->root, "file", shown_text(path));
    put_integer(report, report->root, "bytes", gguf_bytes(report->gguf));
    put_integer(report, report->root, "gguf_version", gguf_version(report->gguf));
    put_pair(report, report->root, "architecture", "general.architecture");
    put_pair(report, report->root, "name", "general.name");
}

json_t *inspect_describe(const char *path, struct error *error) {
    struct error model_error = {0};
    if (inspect_policy_is_file(path))
        return inspect_policy_describe(path, error);
    struct gguf *gguf = gguf_open(path, error);
    if (gguf == NULL)
        return NULL;
    struct model *model = model_open(path, &model_error);
    struct report report = {.gguf = gguf, .model = model, .root = json_object(), .unsupported = json_array()};
    describe_file(&report, path);
    describe_shape(&report);
    describe_tokenizer(&report);
    describe_metadata(&report);
    describe_tensors(&report);
    describe_runnable(&report, &model_error);
    describe_supported(&report);
    put(&report, report.root, "unsupported", report.unsupported);
    model_free(model);
    gguf_free(gguf);
    if (report.failed) {
        json_decref(report.root);
        error_set(error, ERROR_MEMORY, "%s: no memory to describe the file", path);
        return NULL;
    }
    return report.root;
}

/* A value in a line of its own: strings are cut and shown without line ends. */
static void print_value(const json_t *value, FILE *out) {
    char shown[LINE_BYTES];
    if (json_is_array(value)) {
        size_t i;
        json_t *item;
        json_array_foreach(value, i, item) fprintf(out, "%s%s", i > 0 ? ", " : "", json_string_value(item));
        fprintf(out, "%s\n", json_array_size(value) == 0 ? "none" : "");
        return;
    }
    if (json_is_string(value)) {
        struct gguf_string text = {json_string_value(value), json_string_length(value)};
        gguf_string_show(text, shown, sizeof shown);
        fprintf(out, "%s%s\n", shown, strlen(shown) < text.bytes ? "..." : "");
    } else if (json_is_object(value)) {
        fprintf(out, "%" JSON_INTEGER_FORMAT " x %s\n", json_integer_value(json_object_get(value, "count")),
            json_string_value(json_object_get(value, "array_of")));
    } else if (json_is_real(value)) {
        fprintf(out, "%g\n", json_real_value(value));
    } else if (json_is_integer(value)) {
        fprintf(out, "%" JSON_INTEGER_FORMAT "\n", json_integer_value(value));
    } else {
        fprintf(out, "%s\n", json_is_true(value) ? "yes" : json_is_false(value) ? "no" : "not a number");
    }
}

static void print_object(const char *title, json_t *object, FILE *out) {
    const char *key;
    json_t *value;
    fprintf(out, "\n%s\n", title);
    json_object_foreach(object, key, value) {
        fprintf(out, "  %-40s ", key);
        print_value(value, out);
    }
}

static void print_shape(const json_t *shape, char *out, size_t size) {
    size_t used = 0;
    out[0] = '\0';
    for (size_t i = 0; i < json_array_size(shape) && used < size; i++)
        used += (size_t)snprintf(out + used, size - used, "%s%" JSON_INTEGER_FORMAT, i == 0 ? "" : " x ",
            json_integer_value(json_array_get(shape, i)));
}

static void print_tensors(const json_t *document, FILE *out) {
    size_t i;
    json_t *tensor;
    fprintf(out, "\ntensors\n");
    json_array_foreach(json_object_get(document, "tensors"), i, tensor) {
        char shape[LINE_BYTES * 2];
        char name[SHOWN_BYTES];
        const json_t *text = json_object_get(tensor, "name");
        const json_t *bytes = json_object_get(tensor, "bytes");
        gguf_string_show((struct gguf_string){json_string_value(text), json_string_length(text)}, name, sizeof name);
        print_shape(json_object_get(tensor, "shape"), shape, sizeof shape);
        fprintf(out, "  %-32s %-8s %20s", name, json_string_value(json_object_get(tensor, "format")), shape);
        if (json_is_integer(bytes))
            fprintf(out, " %14" JSON_INTEGER_FORMAT " bytes\n", json_integer_value(bytes));
        else
            fprintf(out, "  (format not supported)\n");
    }
}

static void print_total(const char *name, const json_t *sums, FILE *out) {
    fprintf(out,
        "  %-8s %5" JSON_INTEGER_FORMAT " tensors %14" JSON_INTEGER_FORMAT " values %14" JSON_INTEGER_FORMAT " bytes\n",
        name, json_integer_value(json_object_get(sums, "tensors")), json_integer_value(json_object_get(sums, "values")),
        json_integer_value(json_object_get(sums, "bytes")));
}

static void print_totals(const json_t *document, FILE *out) {
    json_t *totals = json_object_get(document, "totals");
    const char *format;
    json_t *sums;
    fprintf(out, "\ntotals\n");
    json_object_foreach(json_object_get(totals, "formats"), format, sums) {
        print_total(format, sums, out);
    }
    print_total("all", totals, out);
}

void inspect_print(const json_t *document, FILE *out) {
    static const char *const facts[] = {"file", "bytes", "gguf_version", "architecture", "name", "fingerprint"};
    const char *reason = json_string_value(json_object_get(document, "reason"));
    if (json_object_get(document, "kind") != NULL) {
        inspect_policy_print(document, out);
        return;
    }
    for (size_t i = 0; i < sizeof facts / sizeof facts[0]; i++) {
        const json_t *value = json_object_get(document, facts[i]);
        if (value == NULL)
            continue;
        fprintf(out, "%-14s ", facts[i]);
        if (json_is_string(value) && strcmp(facts[i], "name") != 0)
            fprintf(out, "%s\n", json_string_value(value)); /* not cut */
        else
            print_value(value, out);
    }
    print_object("shape", json_object_get(document, "shape"), out);
    print_object("tokenizer", json_object_get(document, "tokenizer"), out);
    print_object("metadata", json_object_get(document, "metadata"), out);
    print_tensors(document, out);
    print_totals(document, out);
    if (reason != NULL)
        fprintf(out, "\nThis program cannot run it: %s\n", reason);
    else
        fprintf(out, "\nThis program can run it.\n");
}

int command_inspect(const struct config *config) {
    struct error error = {0};
    json_t *document = inspect_describe(config->file, &error);
    if (document == NULL) {
        fprintf(stderr, "distillcache: %s\n", error.message);
        return EXIT_FAILED;
    }
    int code = EXIT_OK;
    if (!config->json)
        inspect_print(document, stdout);
    else if (json_dumpf(document, stdout, JSON_INDENT(1) | JSON_REAL_PRECISION(7)) != 0 || putchar('\n') == EOF)
        code = EXIT_FAILED; /* main reports what is wrong with standard output */
    json_decref(document);
    return code;
}
