/* SPDX-License-Identifier: Apache-2.0
 *
 * Scores and gradients of both networks: the paper's against tests/data/mlp.json, the content network's against central
 * differences of its definition in double, both against policy/network.c and against themselves slot by slot.
 */
#include "policy/train/gradient.h"

#include "engine/random.h"
#include "mlp_case.h"
#include "policy/train/matrix.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static float uniform(uint32_t stream, size_t index) {
    return 2 * random_uniform(77, stream, 0, index) - 1;
}

static float *draw(uint32_t stream, size_t count, float scale) {
    float *values = malloc((count + 1) * sizeof *values);
    assert_non_null(values);
    for (size_t i = 0; i < count; i++)
        values[i] = scale * uniform(stream, i);
    return values;
}

/* ---- the paper's network: the fixture ---- */

static void compare(const char *name, const char *what, const float *values, const json_t *list, size_t count) {
    size_t expected_count;
    float *expected = mlp_numbers(list, &expected_count);
    assert_int_equal(expected_count, count);
    for (size_t i = 0; i < count; i++) {
        double difference = fabs((double)values[i] - (double)expected[i]);
        if (!(difference <= 3e-6 + 1e-5 * fabs((double)expected[i])))
            fail_msg("%s: %s[%zu] is %g, not %g", name, what, i, (double)values[i], (double)expected[i]);
    }
    free(expected);
}

static void check_mlp(const struct mlp_case *mlp) {
    struct gradient *gradient = gradient_create(mlp->network);
    struct network_pass *pass = network_pass_create(&mlp->network->shape, mlp->count);
    struct train_slots slots = {.count = mlp->count, .inputs = mlp->inputs};
    float *scores = calloc(mlp->count, sizeof *scores);
    network_forward(mlp->network, 0, &slots, pass, scores);
    compare(mlp->name, "scores", scores, json_object_get(mlp->object, "scores"), mlp->count);
    network_backward(mlp->network, 0, &slots, pass, mlp->d_scores, gradient);
    struct network_array array;
    size_t offset = 0;
    for (uint32_t i = 0; network_array(mlp->network, i, &array); i++) {
        const json_t *list = json_object_get(json_object_get(mlp->object, "gradients"), array.name);
        if (!array.trained)
            continue;
        if (list != NULL)
            compare(mlp->name, array.name, gradient->values + offset, list, array.count);
        else
            assert_string_equal(array.name, "skip");
        offset += array.count;
    }
    assert_int_equal(offset, gradient->count);
    free(scores);
    network_pass_free(pass);
    free(gradient);
}

static void test_paper_network_of_the_fixture(void **state) {
    (void)state;
    json_t *root = mlp_load();
    assert_true(mlp_cases(root) >= 3);
    for (uint32_t i = 0; i < mlp_cases(root); i++) {
        struct mlp_case mlp = mlp_case_open(root, i);
        check_mlp(&mlp);
        mlp_case_close(&mlp);
    }
    json_decref(root);
}

/* ---- the content network: central differences ---- */

static const uint32_t some_inputs = 1 << INPUT_SUM | 1 << INPUT_MEAN | 1 << INPUT_ENTROPY | 1 << INPUT_OUTPUT_NORM |
                                    1 << INPUT_POSITION | 1 << INPUT_RECENT_4;
static const uint32_t paper_inputs =
    1 << INPUT_MEAN | 1 << INPUT_VALUE_NORM | 1 << INPUT_DEVIATION | 1 << INPUT_ENTROPY | 1 << INPUT_POSITION;

static struct policy_network *make_network(struct network_shape shape) {
    struct error error = {0};
    shape.layers = 2;
    shape.kv_heads = 2;
    struct policy_network *network = network_create(&shape, &error);
    if (network == NULL)
        fail_msg("%s", error.message);
    struct network_array array;
    for (uint32_t i = 0; network_array(network, i, &array); i++) {
        bool around_one = strcmp(array.name, "scale") == 0 || array.name[0] == 'g';
        for (size_t j = 0; j < array.count; j++)
            array.values[j] = 0.5f * uniform(100 + i, j) + (around_one ? 1 : 0);
    }
    return network;
}

/* Slots with inputs of which some are clamped. */
struct slots_data {
    struct train_slots slots;
    float *inputs, *keys, *d_scores;
    float standard[6];
};

static struct slots_data make_slots(const struct policy_network *network, uint32_t count) {
    const struct network_shape *shape = &network->shape;
    uint32_t given = network_inputs_count(shape) - shape->content;
    struct slots_data data = {.inputs = draw(1, (size_t)count * given, 9),
        .keys = draw(2, (size_t)count * shape->head_dim, 3),
        .d_scores = draw(3, count, 1),
        .standard = {0.3f, 1.5f, -0.2f, 0.6f, 0.1f, 0.25f}};
    data.slots = (struct train_slots){.count = count, .inputs = data.inputs, .keys = data.keys};
    return data;
}

/* In data's final place. */
static void use_standard(const struct policy_network *network, struct slots_data *data) {
    if (network->shape.features == FEATURES_PAPER)
        data->slots.standard = data->standard;
}

static void free_slots(struct slots_data *data) {
    free(data->inputs);
    free(data->keys);
    free(data->d_scores);
}

enum { CONTENT, OFFSET, MEAN, SCALE, W1, B1, W2, SKIP, ARRAYS };

static const char *const array_names[ARRAYS] = {"content", "content_offset", "mean", "scale", "w1", "b1", "w2", "skip"};

static uint32_t array_kind(const char *name) {
    uint32_t kind = 0;
    while (kind < ARRAYS && strcmp(array_names[kind], name) != 0)
        kind++;
    return kind;
}

/* Parameters in double. */
struct exact {
    double *values[ARRAYS];
};

/* The definition in network.h; counts the inputs that are clamped. */
static double exact_score(const struct network_shape *shape, const struct exact *exact, uint32_t head,
    const struct slots_data *data, uint32_t slot, uint32_t *clamped) {
    uint32_t inputs = network_inputs_count(shape), content = shape->content, given = inputs - content;
    double x[NETWORK_INPUTS_MAX], score = 0;
    for (uint32_t f = 0; f < inputs; f++) {
        if (f < content) {
            const double *row = exact->values[CONTENT] + ((size_t)head * content + f) * shape->head_dim;
            x[f] = exact->values[OFFSET][head * content + f];
            for (uint32_t d = 0; d < shape->head_dim; d++)
                x[f] += row[d] * (double)data->keys[(size_t)slot * shape->head_dim + d];
        } else {
            x[f] = (double)data->inputs[(size_t)slot * given + f - content];
        }
        x[f] = (x[f] - exact->values[MEAN][head * inputs + f]) * exact->values[SCALE][head * inputs + f];
        *clamped += fabs(x[f]) > 6;
        x[f] = fmax(-6, fmin(6, x[f]));
        score += exact->values[SKIP][head * inputs + f] * x[f];
    }
    for (uint32_t j = 0; j < shape->hidden; j++) {
        double sum = exact->values[B1][head * shape->hidden + j];
        for (uint32_t f = 0; f < inputs; f++)
            sum += exact->values[W1][j * inputs + f] * x[f];
        score += exact->values[W2][j] * fmax(0, sum);
    }
    return score;
}

static double exact_sum(const struct network_shape *shape, const struct exact *exact, uint32_t head,
    const struct slots_data *data, uint32_t *clamped) {
    double total = 0;
    for (uint32_t i = 0; i < data->slots.count; i++)
        total += (double)data->d_scores[i] * exact_score(shape, exact, head, data, i, clamped);
    return total;
}

static struct exact make_exact(const struct policy_network *network) {
    struct exact exact = {{NULL}};
    struct network_array array;
    for (uint32_t i = 0; network_array(network, i, &array); i++) {
        uint32_t kind = array_kind(array.name);
        if (kind == ARRAYS)
            continue;
        exact.values[kind] = malloc((array.count + 1) * sizeof(double));
        for (size_t j = 0; j < array.count; j++)
            exact.values[kind][j] = (double)array.values[j];
    }
    return exact;
}

static const uint32_t heads_used[] = {1, 2};

static double exact_both(
    const struct policy_network *network, const struct exact *exact, const struct slots_data *data, uint32_t *clamped) {
    return exact_sum(&network->shape, exact, heads_used[0], data, clamped) +
           exact_sum(&network->shape, exact, heads_used[1], data, clamped);
}

static void check_differences(
    const struct policy_network *network, const struct slots_data *data, const struct gradient *gradient) {
    struct exact exact = make_exact(network);
    struct network_array array;
    size_t offset = 0;
    uint32_t clamped = 0, all = 2 * data->slots.count * network_inputs_count(&network->shape);
    exact_both(network, &exact, data, &clamped);
    assert_true(clamped > all / 20 && clamped < all / 2);
    for (uint32_t i = 0; network_array(network, i, &array); i++) {
        uint32_t kind = array_kind(array.name);
        if (!array.trained)
            continue;
        assert_true(kind < ARRAYS);
        for (size_t j = 0; j < array.count; j++) {
            const double step = 1e-6;
            double *value = &exact.values[kind][j], was = *value;
            *value = was + step;
            double above = exact_both(network, &exact, data, &clamped);
            *value = was - step;
            double slope = (above - exact_both(network, &exact, data, &clamped)) / (2 * step);
            *value = was;
            double found = (double)gradient->values[offset + j];
            if (!(fabs(found - slope) <= 2e-5 + 2e-5 * fabs(slope)))
                fail_msg("%s[%zu]: %.8g, differences %.8g", array.name, j, found, slope);
        }
        offset += array.count;
    }
    assert_int_equal(offset, gradient->count);
    for (uint32_t k = 0; k < ARRAYS; k++)
        free(exact.values[k]);
}

static void test_content_network_by_differences(void **state) {
    (void)state;
    /* head_dim, hidden and inputs that are and are not whole vectors; with and without content. */
    const struct network_shape shapes[] = {
        {.content = 3, .hidden = 10, .head_dim = 24},
        {.content = 4, .hidden = 32, .head_dim = 16},
        {.content = 0, .hidden = 5, .head_dim = 8},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        struct network_shape shape = shapes[i];
        shape.features = FEATURES_CONTENT;
        shape.inputs = some_inputs;
        struct policy_network *network = make_network(shape);
        struct slots_data data = make_slots(network, 70);
        struct gradient *gradient = gradient_create(network);
        struct network_pass *pass = network_pass_create(&network->shape, 100);
        float *scores = calloc(70, sizeof *scores);
        assert_int_equal(network_pass_capacity(pass), 100);
        for (uint32_t k = 0; k < 2; k++) {
            network_forward(network, heads_used[k], &data.slots, pass, scores);
            network_backward(network, heads_used[k], &data.slots, pass, data.d_scores, gradient);
        }
        check_differences(network, &data, gradient);
        free(scores);
        network_pass_free(pass);
        free(gradient);
        free_slots(&data);
        network_release(network);
    }
}

/* ---- both ---- */

static struct policy_network *network_of(enum network_features features, uint32_t hidden) {
    bool paper = features == FEATURES_PAPER;
    return make_network((struct network_shape){.features = features,
        .inputs = paper ? paper_inputs : some_inputs,
        .content = paper ? 0 : 4,
        .hidden = hidden,
        .head_dim = 16});
}

/* What policy/network.c scores: inputs with content, normalised. */
static void plain_scores(
    const struct policy_network *network, uint32_t head, const struct slots_data *data, float *scores) {
    const struct network_shape *shape = &network->shape;
    uint32_t width = network_inputs_count(shape), content = shape->content, given = width - content;
    float *inputs = calloc((size_t)data->slots.count * width, sizeof *inputs);
    for (uint32_t i = 0; i < data->slots.count; i++) {
        for (uint32_t f = 0; f < content; f++) {
            const float *row = network->content + ((size_t)head * content + f) * shape->head_dim;
            double sum = (double)network->content_offset[head * content + f];
            for (uint32_t d = 0; d < shape->head_dim; d++)
                sum += (double)row[d] * (double)data->keys[(size_t)i * shape->head_dim + d];
            inputs[(size_t)i * width + f] = (float)sum;
        }
        memcpy(inputs + (size_t)i * width + content, data->inputs + (size_t)i * given, given * sizeof *inputs);
    }
    network_normalise(network, head, data->standard, data->slots.count, inputs);
    network_score(network, head, inputs, data->slots.count, scores);
    free(inputs);
}

static void test_scores_are_the_networks(void **state) {
    (void)state;
    enum { COUNT = 200 };
    for (int paper = 0; paper < 2; paper++)
        for (uint32_t hidden = 16; hidden <= 128; hidden += 28) {
            struct policy_network *network = network_of(paper ? FEATURES_PAPER : FEATURES_CONTENT, hidden);
            struct slots_data data = make_slots(network, COUNT);
            struct network_pass *pass = network_pass_create(&network->shape, COUNT);
            float scores[COUNT], expected[COUNT];
            use_standard(network, &data);
            for (uint32_t head = 0; head < 4; head++) {
                network_forward(network, head, &data.slots, pass, scores);
                plain_scores(network, head, &data, expected);
                for (uint32_t i = 0; i < COUNT; i++)
                    if (!(fabsf(scores[i] - expected[i]) <= 2e-5f * (1 + fabsf(expected[i]))))
                        fail_msg("hidden %u, head %u, slot %u: %g, not %g", hidden, head, i, (double)scores[i],
                            (double)expected[i]);
            }
            network_pass_free(pass);
            free_slots(&data);
            network_release(network);
        }
}

/* The sum over blocks of slots is that over single slots; gradients are added to what is there. */
static void test_gradients_add_up(void **state) {
    (void)state;
    enum { COUNT = 150 };
    for (int paper = 0; paper < 2; paper++) {
        struct policy_network *network = network_of(paper ? FEATURES_PAPER : FEATURES_CONTENT, 24);
        struct slots_data data = make_slots(network, COUNT);
        struct network_pass *pass = network_pass_create(&network->shape, COUNT);
        struct gradient *whole = gradient_create(network), *single = gradient_create(network);
        struct gradient *twice = gradient_create(network);
        uint32_t given = network_inputs_count(&network->shape) - network->shape.content;
        float scores[COUNT];
        use_standard(network, &data);
        network_forward(network, 3, &data.slots, pass, scores);
        network_backward(network, 3, &data.slots, pass, data.d_scores, whole);
        for (uint32_t i = 0; i < COUNT; i++) {
            struct train_slots one = data.slots;
            float score;
            one.count = 1;
            one.inputs += (size_t)i * given;
            one.keys += (size_t)i * network->shape.head_dim;
            network_forward(network, 3, &one, pass, &score);
            assert_true(score == scores[i]); /* whatever a slot's neighbours are */
            network_backward(network, 3, &one, pass, data.d_scores + i, single);
        }
        for (size_t i = 0; i < whole->count; i++)
            assert_true(fabsf(whole->values[i] - single->values[i]) <= 1e-4f + 1e-4f * fabsf(whole->values[i]));
        gradient_add(twice, whole);
        gradient_add(twice, whole);
        gradient_scale(twice, 0.5f);
        assert_memory_equal(twice->values, whole->values, whole->count * sizeof(float));
        gradient_clear(twice);
        for (size_t i = 0; i < twice->count; i++)
            assert_true(twice->values[i] == 0);
        free(whole);
        free(single);
        free(twice);
        network_pass_free(pass);
        free_slots(&data);
        network_release(network);
    }
}

/* The same bits whatever else the pass was used for. */
static void test_runs_repeat(void **state) {
    (void)state;
    enum { COUNT = 130 };
    for (int paper = 0; paper < 2; paper++) {
        struct policy_network *network = network_of(paper ? FEATURES_PAPER : FEATURES_CONTENT, 40);
        struct slots_data data = make_slots(network, COUNT);
        struct gradient *gradients[2] = {gradient_create(network), gradient_create(network)};
        float scores[2][COUNT], other[COUNT];
        use_standard(network, &data);
        for (int run = 0; run < 2; run++) {
            struct network_pass *pass = network_pass_create(&network->shape, COUNT + 100 * (uint32_t)run);
            if (run == 1)
                network_forward(network, 0, &data.slots, pass, other);
            network_forward(network, 2, &data.slots, pass, scores[run]);
            network_backward(network, 2, &data.slots, pass, data.d_scores, gradients[run]);
            network_pass_free(pass);
        }
        assert_memory_equal(scores[0], scores[1], sizeof other);
        assert_memory_equal(gradients[0]->values, gradients[1]->values, gradients[0]->count * sizeof(float));
        free(gradients[0]);
        free(gradients[1]);
        free_slots(&data);
        network_release(network);
    }
}

static void test_many_slots_stay_finite(void **state) {
    (void)state;
    enum { COUNT = 4000 };
    for (int paper = 0; paper < 2; paper++) {
        struct policy_network *network = network_of(paper ? FEATURES_PAPER : FEATURES_CONTENT, 32);
        struct slots_data data = make_slots(network, COUNT);
        struct network_pass *pass = network_pass_create(&network->shape, COUNT);
        struct gradient *gradient = gradient_create(network);
        float *scores = calloc(COUNT, sizeof *scores);
        use_standard(network, &data);
        for (uint32_t i = 0; i < COUNT; i++) {
            data.inputs[i] *= 1e6f;
            data.d_scores[i] *= 100;
        }
        network_forward(network, 1, &data.slots, pass, scores);
        network_backward(network, 1, &data.slots, pass, data.d_scores, gradient);
        for (uint32_t i = 0; i < COUNT; i++)
            assert_true(isfinite(scores[i]));
        for (size_t i = 0; i < gradient->count; i++)
            assert_true(isfinite(gradient->values[i]));
        free(scores);
        free(gradient);
        network_pass_free(pass);
        free_slots(&data);
        network_release(network);
    }
}

static void test_no_slots(void **state) {
    (void)state;
    struct policy_network *network = network_of(FEATURES_CONTENT, 8);
    struct network_pass *pass = network_pass_create(&network->shape, 0);
    struct gradient *gradient = gradient_create(network);
    struct train_slots slots = {0};
    network_forward(network, 0, &slots, pass, NULL);
    network_backward(network, 0, &slots, pass, NULL, gradient);
    for (size_t i = 0; i < gradient->count; i++)
        assert_true(gradient->values[i] == 0);
    free(gradient);
    network_pass_free(pass);
    network_release(network);
    network_pass_free(NULL);
}

/* ---- products ---- */

struct sizes {
    uint32_t rows, inner, columns;
};

/* Each product of every tier: the scalar tier's against sums in double, the others' to the bit. */
static void check_products(const struct sizes *sizes, const struct matrix_kernels *kernels, bool plain) {
    enum { STRIDE = 80, ROWS = 80 };
    uint32_t rows = sizes->rows, inner = sizes->inner, columns = sizes->columns;
    float *a = draw(11, ROWS * STRIDE, 1), *b = draw(12, ROWS * STRIDE, 1), *bias = draw(13, STRIDE, 1);
    float *out = draw(14, ROWS * STRIDE, 1), *was = draw(14, ROWS * STRIDE, 1), *same = draw(14, ROWS * STRIDE, 1);
    struct matrix_view view_a = {a, STRIDE}, view_b = {b, STRIDE};
    struct matrix to = {out, STRIDE}, scalar = {same, STRIDE};
    for (int kind = 0; kind < 3; kind++) {
        uint32_t wide = kind == 0 ? (columns + 15) / 16 * 16 : columns;
        const struct matrix_kernels *both[] = {kernels, &matrix_kernels_scalar};
        struct matrix outs[] = {to, scalar};
        for (int i = 0; i < 2; i++) {
            memcpy(outs[i].values, was, ROWS * STRIDE * sizeof(float));
            if (kind == 0)
                both[i]->product(rows, inner, wide, view_a, view_b, bias, outs[i]);
            else if (kind == 1)
                both[i]->outer(inner, rows, columns, view_a, view_b, outs[i]);
            else
                both[i]->dots(rows, inner, columns, view_a, view_b, outs[i]);
        }
        assert_memory_equal(out, same, ROWS * STRIDE * sizeof(float));
        for (uint32_t r = 0; r < ROWS && plain; r++)
            for (uint32_t c = 0; c < STRIDE; c++) {
                double sum = (double)(kind == 0 ? bias[c] : was[r * STRIDE + c]);
                for (uint32_t k = 0; k < inner; k++)
                    sum += (double)(kind == 1 ? a[k * STRIDE + r] : a[r * STRIDE + k]) *
                           (double)(kind == 2 ? b[c * STRIDE + k] : b[k * STRIDE + c]);
                bool inside = r < rows && c < wide;
                double expected = inside ? sum : (double)was[r * STRIDE + c];
                if (!(fabs((double)out[r * STRIDE + c] - expected) <= (inside ? 1e-5 : 0)))
                    fail_msg(
                        "kind %d, row %u, column %u: %g, not %g", kind, r, c, (double)out[r * STRIDE + c], expected);
            }
    }
    free(a);
    free(b);
    free(bias);
    free(out);
    free(was);
    free(same);
}

static void test_products_agree_in_every_tier(void **state) {
    (void)state;
    const struct sizes sizes[] = {{1, 1, 1}, {9, 16, 32}, {64, 5, 16}, {17, 33, 31}, {7, 64, 4}, {65, 70, 70}};
    for (int tier = 0; tier <= (int)cpu_tier_detect(); tier++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            check_products(&sizes[i], matrix_kernels((enum cpu_tier)tier), tier == 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_paper_network_of_the_fixture),
        cmocka_unit_test(test_content_network_by_differences),
        cmocka_unit_test(test_scores_are_the_networks),
        cmocka_unit_test(test_gradients_add_up),
        cmocka_unit_test(test_runs_repeat),
        cmocka_unit_test(test_many_slots_stay_finite),
        cmocka_unit_test(test_no_slots),
        cmocka_unit_test(test_products_agree_in_every_tier),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
