/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/model.h"
#include "tests/unit/tiny_llama.h"

struct file {
    uint8_t *data;
    size_t bytes;
};

static struct file tiny_file(void) {
    struct tiny_llama options = tiny_llama_default();
    struct file file;
    file.data = tiny_llama_create(&options, &file.bytes);
    return file;
}

static struct model *open_and_free(struct file file, struct error *error) {
    char *path = test_file_create(file.data, file.bytes);
    struct model *model = model_open(path, error);
    unlink(path);
    free(path);
    free(file.data);
    return model;
}

/* Opening must fail with this code and a message that begins with the path and holds part. */
static void assert_refused(struct file file, int code, const char *part) {
    struct error error = {0};
    assert_null(open_and_free(file, &error));
    assert_int_equal(error.code, code);
    if (strstr(error.message, "distillcache-test-") == NULL || strstr(error.message, part) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", error.message, part);
}

/* The place of a text in the file, which must be there. */
static uint8_t *find(struct file file, const char *text) {
    uint8_t *found = memmem(file.data, file.bytes, text, strlen(text));
    assert_non_null(found);
    return found;
}

/* The tiny model with a key or tensor renamed: the last letter becomes X. */
static struct file without(const char *name) {
    struct file file = tiny_file();
    find(file, name)[strlen(name) - 1] = 'X';
    return file;
}

/* The tiny model with the value of a 32-bit key replaced. */
static struct file with_value(const char *key, uint32_t value) {
    struct file file = tiny_file();
    memcpy(find(file, key) + strlen(key) + 4, &value, 4);
    return file;
}

/* The tiny model with more pairs or tensors. */
static struct file with_more(void (*add)(struct gguf_writer *)) {
    struct tiny_llama options = tiny_llama_default();
    struct gguf_writer *writer = gguf_writer_create();
    struct file file;
    tiny_llama_write_shape(writer, &options);
    tiny_llama_write_tokenizer(writer, &options);
    tiny_llama_write_tensors(writer, &options);
    add(writer);
    file.data = gguf_writer_finish(writer, &file.bytes);
    return file;
}

static void reads_shape_and_tensors(void **state) {
    (void)state;
    struct error error = {0};
    struct model *model = open_and_free(tiny_file(), &error);
    if (model == NULL)
        fail_msg("%s", error.message);
    assert_string_equal(model->name, "tiny");
    assert_string_equal(model->architecture->name, "llama");
    const struct model_shape expected = {.layers = 2,
        .heads = 4,
        .kv_heads = 2,
        .head_dim = 16,
        .width = 64,
        .ff_width = 96,
        .vocabulary = 320,
        .context = 512,
        .rope_dim = 16,
        .rope_base = 10000,
        .norm_epsilon = 1e-5f,
        .rope_scaling = {.factor = 1},
        .global_layers = 2};
    assert_memory_equal(&model->shape, &expected, sizeof expected);
    assert_ptr_equal(model->output.data, model->token_embedding.data);
    assert_string_equal(model->layers[1].attn_k.name, "blk.1.attn_k.weight");
    assert_int_equal(model->layers[1].attn_k.rows, 32);
    assert_int_equal(model->layers[1].attn_k.columns, 64);
    assert_int_equal(model->layers[0].ffn_down.rows, 64);
    assert_int_equal(model->layers[0].ffn_down.columns, 96);
    assert_int_equal(model->output_norm.rows, 1);
    assert_int_equal(model->output_norm.columns, 64);
    const struct gguf_tensor *source = gguf_find_tensor(model->file, "blk.1.ffn_up.weight");
    assert_ptr_equal(model->layers[1].ffn_up.data, source->data);
    model_free(model);
}

static void reads_every_format(void **state) {
    (void)state;
    static const enum tensor_type types[] = {
        TENSOR_F32, TENSOR_F16, TENSOR_BF16, TENSOR_Q8_0, TENSOR_Q4_0, TENSOR_Q4_1};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        struct tiny_llama options = tiny_llama_default();
        struct error error = {0};
        options.type = options.embedding_type = types[i];
        options.tied = false;
        char *path = tiny_llama_save(&options);
        struct model *model = model_open(path, &error);
        assert_non_null(model);
        assert_int_equal(model->output.type, types[i]);
        assert_ptr_not_equal(model->output.data, model->token_embedding.data);
        assert_int_equal(model->layers[0].attn_q.type, types[i]);
        assert_int_equal(model->layers[0].attn_norm.type, TENSOR_F32);
        model_free(model);
        unlink(path);
        free(path);
    }
}

static void optional_keys_have_defaults(void **state) {
    (void)state;
    struct error error = {0};
    struct file file = without("llama.rope.dimension_count");
    find(file, "llama.rope.freq_base")[0] = 'X';
    find(file, "llama.attention.key_length")[0] = 'X';
    find(file, "llama.attention.value_length")[0] = 'X';
    find(file, "llama.vocab_size")[0] = 'X';
    struct model *model = open_and_free(file, &error);
    assert_non_null(model);
    assert_int_equal(model->shape.head_dim, 16); /* width / heads */
    assert_int_equal(model->shape.rope_dim, 16);
    assert_true(model->shape.rope_base == 10000);
    model_free(model);
}

static void a_file_without_a_name_is_called_by_its_own(void **state) {
    (void)state;
    struct error error = {0};
    struct file file = without("general.name");
    char *path = test_file_create(file.data, file.bytes);
    char *renamed = malloc(strlen(path) + 10);
    strcat(strcpy(renamed, path), ".v2.gguf");
    assert_int_equal(rename(path, renamed), 0);
    struct model *model = model_open(renamed, &error);
    assert_non_null(model);
    strcpy(renamed, path);
    strcat(renamed, ".v2");
    assert_string_equal(model->name, strrchr(renamed, '/') + 1);
    unlink(strcat(renamed, ".gguf"));
    model_free(model);
    free(renamed);
    free(path);
    free(file.data);
}

static void missing_things_are_named(void **state) {
    (void)state;
    static const char *const keys[] = {"general.architecture", "llama.block_count", "llama.context_length",
        "llama.embedding_length", "llama.feed_forward_length", "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon"};
    static const char *const tensors[] = {"token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight",
        "blk.0.attn_q.weight", "blk.1.attn_k.weight", "blk.1.attn_v.weight", "blk.0.attn_output.weight",
        "blk.0.ffn_norm.weight", "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight", "blk.1.ffn_down.weight"};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        assert_refused(without(keys[i]), ERROR_FORMAT, keys[i]);
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        assert_refused(without(tensors[i]), ERROR_FORMAT, tensors[i]);
}

static void wrong_values_are_named(void **state) {
    (void)state;
    assert_refused(with_value("llama.block_count", 3), ERROR_FORMAT, "3 layers need more than the file's 20 tensors");
    assert_refused(with_value("llama.block_count", 1), ERROR_UNSUPPORTED, "tensor blk.1.attn_norm.weight");
    assert_refused(with_value("llama.block_count", 0), ERROR_FORMAT, "llama.block_count");
    assert_refused(with_value("llama.block_count", UINT32_MAX), ERROR_FORMAT, "llama.block_count");
    assert_refused(with_value("llama.context_length", 0), ERROR_FORMAT, "llama.context_length");
    assert_refused(with_value("llama.embedding_length", 96), ERROR_FORMAT, "tensor token_embd.weight has sizes");
    assert_refused(with_value("llama.feed_forward_length", 64), ERROR_FORMAT, "tensor blk.0.ffn_gate.weight has sizes");
    assert_refused(with_value("llama.attention.head_count_kv", 3), ERROR_FORMAT, "no multiple of 3 KV heads");
    assert_refused(with_value("llama.attention.head_count_kv", 0), ERROR_FORMAT, "llama.attention.head_count_kv");
    assert_refused(with_value("llama.attention.key_length", 0), ERROR_FORMAT, "llama.attention.key_length");
    assert_refused(with_value("llama.attention.key_length", 32), ERROR_UNSUPPORTED, "keys of 32 and values of 16");
    assert_refused(with_value("llama.rope.dimension_count", 18), ERROR_FORMAT, "llama.rope.dimension_count");
    assert_refused(with_value("llama.rope.dimension_count", 15), ERROR_FORMAT, "llama.rope.dimension_count");
    assert_refused(with_value("llama.rope.freq_base", 0x7fc00000), ERROR_FORMAT, "llama.rope.freq_base");
    assert_refused(with_value("llama.rope.freq_base", 0xbf800000), ERROR_FORMAT, "llama.rope.freq_base");
    assert_refused(with_value("llama.attention.layer_norm_rms_epsilon", 0xbf800000), ERROR_FORMAT, "epsilon");
    assert_refused(with_value("llama.vocab_size", 321), ERROR_FORMAT, "llama.vocab_size is 321");
}

static void odd_and_wide_heads_are_unsupported(void **state) {
    (void)state;
    struct tiny_llama options = tiny_llama_default();
    struct file file;
    options.head_dim = 15;
    file.data = tiny_llama_create(&options, &file.bytes);
    assert_refused(file, ERROR_UNSUPPORTED, "heads of 15 numbers");
    options.head_dim = 258;
    file.data = tiny_llama_create(&options, &file.bytes);
    assert_refused(file, ERROR_UNSUPPORTED, "heads of 258 numbers");
}

static void the_tokenizer_must_agree_with_the_embedding(void **state) {
    (void)state;
    struct tiny_llama options = tiny_llama_default();
    struct gguf_writer *writer = gguf_writer_create();
    struct file file;
    tiny_llama_write_shape(writer, &options);
    gguf_writer_strings(writer, "tokenizer.ggml.tokens", (const char *const[]){"a", "b"}, 2);
    tiny_llama_write_tensors(writer, &options);
    file.data = gguf_writer_finish(writer, &file.bytes);
    assert_refused(file, ERROR_FORMAT, "320 rows, but the tokenizer 2 tokens");
}

static void other_architectures_and_formats_are_named(void **state) {
    (void)state;
    struct file file = tiny_file();
    memcpy(find(file, "llama"), "gemma", 5); /* the first is the value of general.architecture */
    assert_refused(file, ERROR_UNSUPPORTED, "architecture \"gemma\" is not supported");
    file = tiny_file();
    static const char name[] = "blk.1.ffn_gate.weight";
    *(find(file, name) + strlen(name) + 4 + 16) = 17; /* the type, after dimensions and two sizes */
    assert_refused(file, ERROR_UNSUPPORTED, "tensor blk.1.ffn_gate.weight has format IQ2_XS");
}

static void add_yarn(struct gguf_writer *writer) {
    gguf_writer_string(writer, "llama.rope.scaling.type", "yarn");
    gguf_writer_float(writer, "llama.rope.scaling.factor", 4);
}
static void add_whole_yarn(struct gguf_writer *writer) {
    add_yarn(writer);
    gguf_writer_uint32(writer, "llama.rope.scaling.original_context_length", 32);
}
static void add_longrope(struct gguf_writer *writer) {
    gguf_writer_string(writer, "llama.rope.scaling.type", "longrope");
}
static void add_long_factors(struct gguf_writer *writer) {
    static const float factors[8];
    gguf_writer_tensor(writer, "rope_factors_long.weight", TENSOR_F32, 1, (uint64_t[]){8}, factors, sizeof factors);
}
static void add_factor(struct gguf_writer *writer) {
    gguf_writer_float(writer, "llama.rope.scaling.factor", 2);
}
static void add_small_factor(struct gguf_writer *writer) {
    gguf_writer_float(writer, "llama.rope.scaling.factor", 0.5F);
}
static void add_infinite_factor(struct gguf_writer *writer) {
    gguf_writer_float(writer, "llama.rope.scaling.factor", INFINITY);
}
static void add_old_factor(struct gguf_writer *writer) {
    gguf_writer_float(writer, "llama.rope.scale_linear", 4);
}
static void add_window(struct gguf_writer *writer) {
    gguf_writer_uint32(writer, "llama.attention.sliding_window", 20);
}
static void add_wide_window(struct gguf_writer *writer) {
    gguf_writer_uint32(writer, "llama.attention.sliding_window", 1 << 20);
}
static void add_window_pattern(struct gguf_writer *writer) {
    add_window(writer);
    gguf_writer_uint32(writer, "llama.attention.sliding_window_pattern", 2);
}
static void add_good_divisors(struct gguf_writer *writer) {
    static const float divisors[8] = {1, 1, 1, 2, 3, 4, 8, 8};
    gguf_writer_tensor(writer, "rope_freqs.weight", TENSOR_F32, 1, (uint64_t[]){8}, divisors, sizeof divisors);
}
static void add_biases(struct gguf_writer *writer) {
    static const float bias[64];
    static const char *const names[] = {"q", "k", "v"};
    for (uint32_t layer = 0; layer < 2; layer++)
        for (uint32_t i = 0; i < 3; i++) {
            char name[40];
            uint64_t size = i == 0 ? 64 : 32;
            snprintf(name, sizeof name, "blk.%u.attn_%s.bias", layer, names[i]);
            gguf_writer_tensor(writer, name, TENSOR_F32, 1, &size, bias, size * sizeof *bias);
        }
}
static void add_no_scaling(struct gguf_writer *writer) {
    gguf_writer_string(writer, "llama.rope.scaling.type", "none");
    gguf_writer_float(writer, "llama.rope.scaling.factor", 1);
}
static void add_rope_factors(struct gguf_writer *writer) {
    static const float factors[8];
    gguf_writer_tensor(writer, "rope_freqs.weight", TENSOR_F32, 1, (uint64_t[]){8}, factors, sizeof factors);
}
static void add_bias(struct gguf_writer *writer) {
    static const float bias[64];
    gguf_writer_tensor(writer, "blk.0.attn_q.bias", TENSOR_F32, 1, (uint64_t[]){64}, bias, sizeof bias);
}
static void add_twisted_name(struct gguf_writer *writer) {
    gguf_writer_tensor(writer, "blk.01.attn_q.weight", TENSOR_F32, 1, (uint64_t[]){1}, "1234", 4);
}
static void add_experts(struct gguf_writer *writer) {
    gguf_writer_uint32(writer, "llama.expert_count", 8);
}

static void variants_that_would_compute_something_else_are_refused(void **state) {
    (void)state;
    struct error error = {0};
    assert_refused(with_more(add_yarn), ERROR_FORMAT, "llama.rope.scaling.original_context_length");
    assert_refused(with_more(add_longrope), ERROR_UNSUPPORTED, "rope scaling \"longrope\"");
    assert_refused(with_more(add_long_factors), ERROR_UNSUPPORTED, "tensor rope_factors_long.weight");
    assert_refused(with_more(add_small_factor), ERROR_FORMAT, "llama.rope.scaling.factor");
    assert_refused(with_more(add_infinite_factor), ERROR_FORMAT, "llama.rope.scaling.factor");
    assert_refused(with_more(add_rope_factors), ERROR_FORMAT, "tensor rope_freqs.weight");
    assert_refused(with_more(add_bias), ERROR_FORMAT, "tensor blk.0.attn_k.bias is missing");
    assert_refused(with_more(add_twisted_name), ERROR_UNSUPPORTED, "tensor blk.01.attn_q.weight");
    assert_refused(with_more(add_experts), ERROR_UNSUPPORTED, "mixtures of experts (8)");
    struct model *model = open_and_free(with_more(add_no_scaling), &error);
    assert_non_null(model);
    model_free(model);
}

static void variants_of_the_architecture_are_read(void **state) {
    (void)state;
    struct error error = {0};
    struct model *model = open_and_free(with_more(add_factor), &error);
    assert_int_equal(model->shape.rope_scaling.kind, ROPE_LINEAR);
    assert_true(model->shape.rope_scaling.factor == 2);
    model_free(model);
    model = open_and_free(with_more(add_old_factor), &error);
    assert_true(model->shape.rope_scaling.factor == 4);
    model_free(model);
    model = open_and_free(with_more(add_whole_yarn), &error);
    assert_int_equal(model->shape.rope_scaling.kind, ROPE_YARN);
    assert_int_equal(model->shape.rope_scaling.original_context, 32);
    model_free(model);
    model = open_and_free(with_more(add_good_divisors), &error);
    assert_non_null(model->rope_divisors.data);
    model_free(model);
    model = open_and_free(with_more(add_biases), &error);
    assert_non_null(model->layers[1].bias_v.data);
    model_free(model);
}

static void windows_say_which_layers_slide(void **state) {
    (void)state;
    struct error error = {0};
    struct model *model = open_and_free(with_more(add_window), &error);
    assert_int_equal(model->shape.global_layers, 0);
    assert_int_equal(model->windows[0], 20);
    assert_int_equal(model->layers[1].window, 20);
    model_free(model);
    model = open_and_free(with_more(add_wide_window), &error);
    assert_int_equal(model->shape.global_layers, model->shape.layers);
    assert_int_equal(model->windows[0], 0);
    model_free(model);
    model = open_and_free(with_more(add_window_pattern), &error);
    assert_int_equal(model->shape.global_layers, 1);
    assert_int_equal(model->global_layers[0], 1);
    assert_int_equal(model->windows[0], 20);
    assert_int_equal(model->windows[1], 0);
    model_free(model);
}

static uint32_t pooling_type;
static void add_pooling(struct gguf_writer *writer) {
    gguf_writer_uint32(writer, "llama.pooling_type", pooling_type);
}
static void add_pooling_of_words(struct gguf_writer *writer) {
    gguf_writer_string(writer, "llama.pooling_type", "mean");
}

static void pooling_is_what_the_file_asks_for(void **state) {
    (void)state;
    static const struct {
        uint32_t type;
        enum pooling pooling;
    } cases[] = {{0, POOLING_MEAN}, {1, POOLING_MEAN}, {2, POOLING_NONE}, {3, POOLING_LAST}, {4, POOLING_NONE},
        {UINT32_MAX, POOLING_NONE}};
    struct error error = {0};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        pooling_type = cases[i].type;
        struct model *model = open_and_free(with_more(add_pooling), &error);
        assert_non_null(model);
        assert_int_equal(model->pooling, cases[i].pooling);
        model_free(model);
    }
    struct model *model = open_and_free(tiny_file(), &error);
    assert_int_equal(model->pooling, POOLING_MEAN);
    model_free(model);
    assert_refused(with_more(add_pooling_of_words), ERROR_FORMAT, "llama.pooling_type");
}

static void get_fingerprint(struct file file, char *out) {
    struct error error = {0};
    struct model *model = open_and_free(file, &error);
    assert_non_null(model);
    memcpy(out, model->fingerprint, sizeof model->fingerprint);
    model_free(model);
}

static void fingerprints_follow_the_weights_only(void **state) {
    (void)state;
    char first[65];
    char other[65];
    get_fingerprint(tiny_file(), first);
    assert_int_equal(strlen(first), 64);
    assert_int_equal(strspn(first, "0123456789abcdef"), 64);
    struct file file = tiny_file();
    memcpy(find(file, "tiny"), "name", 4);
    get_fingerprint(file, other);
    assert_string_equal(first, other);
    file = tiny_file();
    file.data[file.bytes - 1] ^= 1; /* the end of the last tensor */
    get_fingerprint(file, other);
    assert_string_not_equal(first, other);
    struct tiny_llama options = tiny_llama_default();
    options.seed = 2;
    file.data = tiny_llama_create(&options, &file.bytes);
    get_fingerprint(file, other);
    assert_string_not_equal(first, other);
}

/* The header of a whole model, byte by byte: a truncated one is never opened. */
static void truncated_models_are_refused(void **state) {
    (void)state;
    struct file file = tiny_file();
    for (size_t bytes = 1; bytes < file.bytes; bytes += bytes < 2000 ? 37 : 4999) {
        struct file part = {malloc(bytes), bytes};
        memcpy(part.data, file.data, bytes);
        assert_refused(part, ERROR_FORMAT, "");
    }
    free(file.data);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_shape_and_tensors),
        cmocka_unit_test(reads_every_format),
        cmocka_unit_test(optional_keys_have_defaults),
        cmocka_unit_test(a_file_without_a_name_is_called_by_its_own),
        cmocka_unit_test(missing_things_are_named),
        cmocka_unit_test(wrong_values_are_named),
        cmocka_unit_test(odd_and_wide_heads_are_unsupported),
        cmocka_unit_test(the_tokenizer_must_agree_with_the_embedding),
        cmocka_unit_test(other_architectures_and_formats_are_named),
        cmocka_unit_test(variants_that_would_compute_something_else_are_refused),
        cmocka_unit_test(variants_of_the_architecture_are_read),
        cmocka_unit_test(windows_say_which_layers_slide),
        cmocka_unit_test(pooling_is_what_the_file_asks_for),
        cmocka_unit_test(fingerprints_follow_the_weights_only),
        cmocka_unit_test(truncated_models_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
