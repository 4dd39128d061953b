/* SPDX-License-Identifier: Apache-2.0
 *
 * The engine on tiny random models of odd shapes: results do not depend on how tokens are cut into batches, nor on the
 * instruction set or the number of threads, and a failed batch leaves nothing behind.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/engine.h"
#include "tests/unit/tiny_llama.h"

enum { TOKENS = 70, KV_BYTES = 8 << 20 };

static struct model *tiny_model(const struct tiny_llama *options) {
    struct error error = {0};
    char *path = tiny_llama_save(options);
    struct model *model = model_open(path, &error);
    if (model == NULL)
        fail_msg("%s", error.message);
    unlink(path);
    free(path);
    return model;
}

static struct engine *open_engine(const struct model *model, const struct engine_options *options) {
    struct error error = {0};
    struct engine *engine = engine_open(model, options, &error);
    if (engine == NULL)
        fail_msg("%s", error.message);
    return engine;
}

/* Logits after `count` tokens, which go in `chunk` at a time: [vocabulary], the caller frees them. */
static float *compute(const struct model *model, const struct engine_options *options, uint32_t count, uint32_t chunk) {
    struct engine *engine = open_engine(model, options);
    struct sequence *sequence = sequence_create(engine);
    int32_t tokens[TOKENS];
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = (int32_t)(i * 37 % model->shape.vocabulary);
    struct error error = {0};
    for (uint32_t done = 0; done < count; done += chunk) {
        uint32_t left = count - done;
        struct batch_item item = {
            .sequence = sequence, .tokens = tokens + done, .count = left < chunk ? left : chunk, .want = WANT_LAST};
        if (engine_forward(engine, &item, 1, &error) != 0)
            fail_msg("%s", error.message);
    }
    float *logits = malloc(model->shape.vocabulary * sizeof *logits);
    assert_int_equal(engine_logits(engine, 0, logits, &error), 0);
    for (uint32_t i = 0; i < model->shape.vocabulary; i++)
        assert_true(logits[i] - logits[i] == 0); /* finite */
    sequence_free(sequence);
    engine_close(engine);
    return logits;
}

static void check_shape(const struct tiny_llama *shape) {
    static const struct {
        struct backend_options backend;
        uint32_t batch_rows, chunk;
    } ways[] = {{{.cpu_features = "scalar", .threads = 1}, 0, TOKENS},
        {{.cpu_features = "auto", .threads = 1}, 0, TOKENS}, {{.cpu_features = "auto", .threads = 3}, 0, 17},
        {{.cpu_features = "auto", .threads = 1}, 1, 1}, {{.cpu_features = "scalar", .threads = 2}, 5, 5}};
    struct model *model = tiny_model(shape);
    uint32_t count = shape->context < TOKENS ? shape->context : TOKENS;
    for (enum kv_format format = KV_F32; format <= KV_BF16; format++) {
        float *first = NULL;
        for (size_t i = 0; i < sizeof ways / sizeof ways[0]; i++) {
            struct engine_options options = {.backend = ways[i].backend,
                .kv_bytes = KV_BYTES,
                .kv_format = format,
                .batch_rows = ways[i].batch_rows,
                .poison_free = true};
            float *logits = compute(model, &options, count, ways[i].chunk);
            if (first == NULL) {
                first = logits;
                continue;
            }
            assert_memory_equal(logits, first, model->shape.vocabulary * sizeof *logits);
            free(logits);
        }
        free(first);
    }
    model_free(model);
}

static void odd_shapes_do_not_depend_on_how_they_are_computed(void **state) {
    (void)state;
    struct tiny_llama shape = tiny_llama_default();
    shape.layers = 1;
    shape.heads = shape.kv_heads = 3;
    shape.head_dim = 80;
    shape.width = 50; /* no multiple of 32 */
    shape.ff_width = 41;
    shape.vocabulary = 301;
    shape.type = shape.embedding_type = TENSOR_F16;
    check_shape(&shape);
    shape.type = TENSOR_F32;
    shape.embedding_type = TENSOR_BF16;
    shape.tied = false;
    shape.head_dim = 6;
    check_shape(&shape);
    shape = tiny_llama_default();
    shape.heads = 16;
    shape.kv_heads = 1;
    shape.head_dim = 96;
    shape.type = TENSOR_Q4_0;
    shape.embedding_type = TENSOR_Q8_0;
    shape.vocabulary = 323;
    check_shape(&shape);
    shape.heads = 2;
    shape.head_dim = 256;
    shape.type = TENSOR_Q4_1;
    check_shape(&shape);
    shape.context = 1;
    check_shape(&shape);
}

static void failed_batch_leaves_no_rows(void **state) {
    (void)state;
    struct tiny_llama shape = tiny_llama_default();
    struct model *model = tiny_model(&shape);
    struct engine_options options = {.backend = {.threads = 1}, .kv_bytes = KV_BYTES};
    struct engine *engine = open_engine(model, &options);
    struct sequence *sequence = sequence_create(engine);
    struct error error = {0};
    int32_t token = 5;
    float *logits = malloc(model->shape.vocabulary * sizeof *logits);
    struct batch_item item = {.sequence = sequence, .tokens = &token, .count = 1, .want = WANT_LAST};
    assert_int_equal(engine_forward(engine, &item, 1, &error), 0);
    assert_int_equal(engine_logits(engine, item.first_row, logits, &error), 0);
    token = (int32_t)model->shape.vocabulary;
    assert_int_equal(engine_forward(engine, &item, 1, &error), ERROR_INVALID);
    assert_int_equal(sequence_length(sequence), 1);
    assert_int_equal(engine_logits(engine, 0, logits, &error), ERROR_INVALID);
    free(logits);
    sequence_free(sequence);
    engine_close(engine);
    model_free(model);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(odd_shapes_do_not_depend_on_how_they_are_computed),
        cmocka_unit_test(failed_batch_leaves_no_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
