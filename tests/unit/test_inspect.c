/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commands/inspect.h"
#include "commands/inspect_policy.h"
#include "tests/unit/tiny_llama.h"
#include "tests/unit/tiny_network.h"

/* The document of a file made by writer. */
static json_t *describe(struct gguf_writer *writer) {
    size_t bytes;
    struct error error = {0};
    uint8_t *data = gguf_writer_finish(writer, &bytes);
    char *path = test_file_create(data, bytes);
    json_t *document = inspect_describe(path, &error);
    if (document == NULL)
        fail_msg("%s", error.message);
    unlink(path);
    free(path);
    free(data);
    return document;
}

static char *text_of(const json_t *document) {
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    assert_non_null(out);
    inspect_print(document, out);
    fclose(out);
    return text;
}

static struct gguf_writer *tiny_writer(void) {
    struct tiny_llama options = tiny_llama_default();
    struct gguf_writer *writer = gguf_writer_create();
    options.type = TENSOR_Q4_1;
    tiny_llama_write_shape(writer, &options);
    tiny_llama_write_tokenizer(writer, &options);
    tiny_llama_write_tensors(writer, &options);
    return writer;
}

/* A list of templates, whatever else has such a key. */
static void lists_chat_templates(void **state) {
    (void)state;
    struct gguf_writer *writer = tiny_writer();
    gguf_writer_string(writer, "tokenizer.chat_template.rag", "c");
    gguf_writer_string(writer, "tokenizer.chat_template", "a");
    gguf_writer_string(writer, "tokenizer.chat_template.tool_use", "b");
    gguf_writer_string(writer, "tokenizer.chat_template.", "d");
    gguf_writer_strings(writer, "tokenizer.chat_templates", (const char *[]){"rag", "tool_use"}, 2);
    json_t *document = describe(writer), *expected = json_pack("[s, s, s]", "rag", "default", "tool_use");
    const json_t *tokenizer = json_object_get(document, "tokenizer");
    assert_true(json_equal(json_object_get(tokenizer, "chat_templates"), expected));
    assert_true(json_is_true(json_object_get(tokenizer, "chat_template")));
    char *text = text_of(document);
    assert_non_null(strstr(text, " rag, default, tool_use\n"));
    free(text);
    json_decref(expected);
    json_decref(document);
    document = describe(tiny_writer());
    tokenizer = json_object_get(document, "tokenizer");
    assert_int_equal(json_array_size(json_object_get(tokenizer, "chat_templates")), 0);
    assert_true(json_is_false(json_object_get(tokenizer, "chat_template")));
    json_decref(document);
}

static void describes_a_model_that_runs(void **state) {
    (void)state;
    int runnable;
    int layers;
    int heads;
    int rows;
    int columns;
    int count;
    int tokens;
    json_t *document = describe(tiny_writer());
    assert_int_equal(
        json_unpack(document, "{s:b, s:{s:i, s:i}, s:{s:{s:{s:i}}}, s:{s:i}}", "runnable", &runnable, "shape", "layers",
            &layers, "heads", &heads, "totals", "formats", "Q4_1", "tensors", &count, "tokenizer", "tokens", &tokens),
        0);
    assert_true(runnable);
    assert_int_equal(layers, 2);
    assert_int_equal(heads, 4);
    assert_int_equal(count, 14);
    assert_int_equal(tokens, 320);
    json_t *key_matrix = NULL;
    size_t i;
    json_t *tensor;
    json_array_foreach(json_object_get(document, "tensors"), i, tensor) {
        if (strcmp(json_string_value(json_object_get(tensor, "name")), "blk.0.attn_k.weight") == 0)
            key_matrix = json_object_get(tensor, "shape");
    }
    assert_int_equal(json_unpack(key_matrix, "[i, i]", &rows, &columns), 0);
    assert_int_equal(rows, 32);
    assert_int_equal(columns, 64);
    assert_int_equal(json_array_size(json_object_get(document, "unsupported")), 0);
    char *text = text_of(document);
    assert_non_null(strstr(text, "This program can run it."));
    assert_non_null(strstr(text, "blk.1.ffn_down.weight"));
    free(text);
    json_decref(document);
}

/* The first of the document's "unsupported". */
static void assert_unsupported(struct gguf_writer *writer, const char *kind, const char *part) {
    const char *found_kind;
    const char *name;
    const char *reason;
    json_t *document = describe(writer);
    assert_int_equal(json_unpack(document, "{s:s, s:[{s:s, s:s}]}", "reason", &reason, "unsupported", "kind",
                         &found_kind, "name", &name),
        0);
    assert_string_equal(found_kind, kind);
    assert_non_null(strstr(name, part));
    assert_true(json_is_false(json_object_get(document, "runnable")));
    char *text = text_of(document);
    assert_non_null(strstr(text, reason));
    free(text);
    json_decref(document);
}

static void says_what_is_unsupported(void **state) {
    (void)state;
    static const uint8_t data[512];
    struct gguf_writer *writer = gguf_writer_create();
    gguf_writer_string(writer, "general.architecture", "gemma");
    assert_unsupported(writer, "architecture", "gemma");

    writer = tiny_writer();
    gguf_writer_tensor(writer, "blk.0.ffn_gate.bias", TENSOR_F32, 1, (uint64_t[]){64}, data, 256);
    assert_unsupported(writer, "model", "blk.0.ffn_gate.bias");

    writer = tiny_writer();
    gguf_writer_tensor(writer, "extra", 16 /* IQ2_XXS */, 2, (uint64_t[]){256, 1}, data, 66);
    assert_unsupported(writer, "format", "extra");

    struct tiny_llama options = tiny_llama_default();
    writer = gguf_writer_create();
    tiny_llama_write_shape(writer, &options);
    tiny_llama_write_tensors(writer, &options); /* and no tokenizer */
    assert_unsupported(writer, "tokenizer", "tokenizer.ggml.model");
}

/* Well formed, but of other kinds than expected, with values that JSON or text cannot hold. */
static void odd_metadata_is_described(void **state) {
    (void)state;
    struct gguf_writer *writer = gguf_writer_create();
    gguf_writer_uint32(writer, "general.architecture", 3);
    gguf_writer_strings(writer, "general.name", NULL, 0);
    gguf_writer_string(writer, "bytes", "\xff\xfe");
    gguf_writer_string(writer, "k\xff", "");
    gguf_writer_float(writer, "nan", (float)(0.0 / 0.0));
    gguf_writer_pair(writer, "large", GGUF_UINT64, "\xff\xff\xff\xff\xff\xff\xff\xff", 8);
    gguf_writer_bool(writer, "tokenizer.ggml.tokens", true);
    json_t *document = describe(writer);
    json_t *metadata = json_object_get(document, "metadata");
    assert_true(json_is_false(json_object_get(document, "runnable")));
    assert_string_equal(json_string_value(json_object_get(metadata, "bytes")), "??");
    assert_non_null(json_object_get(metadata, "k?"));
    assert_true(json_is_null(json_object_get(metadata, "nan")));
    assert_true(json_integer_value(json_object_get(metadata, "large")) == INT64_MAX);
    char *text = text_of(document);
    assert_non_null(strstr(text, "not a number"));
    free(text);
    json_decref(document);
}

static void broken_files_are_errors(void **state) {
    (void)state;
    struct error error = {0};
    assert_null(inspect_describe("/nonexistent/\xff.gguf", &error));
    assert_int_equal(error.code, ERROR_IO);
    char *path = test_file_create("GGUF\x03", 5);
    assert_null(inspect_describe(path, &error));
    assert_int_equal(error.code, ERROR_FORMAT);
    assert_non_null(strstr(error.message, path));
    unlink(path);
    free(path);
}

/* A path that is not UTF-8 must not spoil the document. */
static void odd_paths_are_described(void **state) {
    (void)state;
    struct error error = {0};
    struct gguf_writer *writer = gguf_writer_create();
    size_t bytes;
    gguf_writer_string(writer, "general.architecture", "none");
    uint8_t *data = gguf_writer_finish(writer, &bytes);
    char *path = test_file_create(data, bytes);
    char *odd = malloc(strlen(path) + 2);
    strcat(strcpy(odd, path), "\xff");
    assert_int_equal(rename(path, odd), 0);
    json_t *document = inspect_describe(odd, &error);
    assert_non_null(document);
    assert_non_null(strstr(json_string_value(json_object_get(document, "reason")), "architecture \"none\""));
    json_decref(document);
    unlink(odd);
    free(odd);
    free(path);
    free(data);
}

/* ---- policy files ---- */

static char *save_policy(const char *folder) {
    static char path[128];
    struct error error;
    struct network_shape shape = tiny_network_shape(FEATURES_CONTENT, 3, 2, 16);
    struct policy_network *network = tiny_network_create(&shape, 1);
    memset(network->fingerprint, 'e', 64);
    free(network->record);
    network->record = strdup("{\"steps\": 300, \"data\": \"a\\u001b[31m\", \"loss\": 0.125}");
    memcpy(network->layer_budgets, (const float[]){0.5f, 1, 1.5f}, 3 * sizeof(float));
    snprintf(path, sizeof path, "%s/policy", folder);
    if (network_save(network, path, &error) != 0)
        fail_msg("%s", error.message);
    network_release(network);
    return path;
}

static void describes_a_policy_file(void **state) {
    (void)state;
    char folder[64];
    struct error error;
    tiny_folder_create(folder);
    const char *path = save_policy(folder);
    json_t *document = inspect_describe(path, &error);
    if (document == NULL)
        fail_msg("%s", error.message);
    const json_t *shape = json_object_get(document, "shape"), *defaults = json_object_get(document, "defaults");
    const json_t *inputs = json_object_get(document, "inputs"), *budgets = json_object_get(document, "layer_budgets");
    assert_string_equal(json_string_value(json_object_get(document, "kind")), "policy");
    assert_string_equal(json_string_value(json_object_get(document, "method")), "distillcache");
    assert_string_equal(json_string_value(json_object_get(document, "features")), "content");
    assert_int_equal(strlen(json_string_value(json_object_get(document, "fingerprint"))), 64);
    assert_int_equal(json_array_size(inputs), 13);
    assert_string_equal(json_string_value(json_array_get(inputs, 0)), "content");
    assert_string_equal(json_string_value(json_array_get(inputs, 12)), "recent_2");
    assert_int_equal(json_integer_value(json_object_get(shape, "layers")), 3);
    assert_int_equal(json_integer_value(json_object_get(shape, "hidden")), 8);
    assert_string_equal(json_string_value(json_object_get(defaults, "scope")), "layer");
    assert_int_equal(json_integer_value(json_object_get(defaults, "interval")), 16);
    assert_true(json_is_true(json_object_get(defaults, "summary")));
    assert_true(json_real_value(json_array_get(budgets, 2)) == 1.5);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(document, "record"), "steps")), 300);
    /* 6 heads: 4 x 16 of the content map and 4 offsets, 8 biases, 16 of the skip; 8 x 16, 8. */
    assert_int_equal(json_integer_value(json_object_get(document, "parameters")), 6 * (64 + 4 + 8 + 16) + 128 + 8);
    char *text = text_of(document);
    static const char *const lines[] = {"\nfeatures       content\n", "\ninputs         content, sum, mean, ",
        "\n  hidden                   8\n", "\n  summary                  yes\n", "\n  0.5 1 1.5\n",
        "\n  steps                    300\n", "\n  data                     a?[31m\n",
        "\n  loss                     0.125\n"};
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++)
        if (strstr(text, lines[i]) == NULL)
            fail_msg("no \"%s\" in:\n%s", lines[i], text);
    free(text);
    json_decref(document);
    tiny_folder_remove(folder);
}

static void broken_policy_files_are_errors(void **state) {
    (void)state;
    char folder[64];
    struct error error = {0};
    tiny_folder_create(folder);
    const char *path = save_policy(folder);
    assert_int_equal(truncate(path, 3000), 0);
    assert_null(inspect_describe(path, &error));
    assert_int_equal(error.code, ERROR_FORMAT);
    assert_int_equal(strncmp(error.message, path, strlen(path)), 0);
    tiny_folder_remove(folder);
    assert_false(inspect_policy_is_file("/dev/stdin"));
    assert_false(inspect_policy_is_file(path));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(describes_a_model_that_runs),
        cmocka_unit_test(lists_chat_templates),
        cmocka_unit_test(says_what_is_unsupported),
        cmocka_unit_test(odd_metadata_is_described),
        cmocka_unit_test(broken_files_are_errors),
        cmocka_unit_test(odd_paths_are_described),
        cmocka_unit_test(describes_a_policy_file),
        cmocka_unit_test(broken_policy_files_are_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
