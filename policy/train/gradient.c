/* SPDX-License-Identifier: Apache-2.0
 *
 * Slots are taken in blocks that stay in the first-level cache; rows are slots, padded with zeros to whole vectors.
 * Sums over slots run in ascending order, across blocks too.
 */
#include "policy/train/gradient.h"

#include "policy/train/matrix.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK_SLOTS = 64 };

static const float CONTENT_LIMIT = 6; /* inputs are clamped to +- this (network.h) */
static const float LAYER_NORM_EPSILON = 1e-5f;

struct gradient *gradient_create(const struct policy_network *network) {
    size_t count = network_parameters_count(network);
    struct gradient *gradient = calloc(1, sizeof *gradient + count * sizeof(float));
    if (gradient != NULL)
        gradient->count = count;
    return gradient;
}

void gradient_clear(struct gradient *gradient) {
    memset(gradient->values, 0, gradient->count * sizeof(float));
}

void gradient_add(struct gradient *to, const struct gradient *from) {
    for (size_t i = 0; i < to->count; i++)
        to->values[i] += from->values[i];
}

void gradient_scale(struct gradient *gradient, float factor) {
    for (size_t i = 0; i < gradient->count; i++)
        gradient->values[i] *= factor;
}

/* Where the gradient of one of the network's trained arrays lies. */
static float *gradient_of(const struct policy_network *network, struct gradient *gradient, const float *values) {
    struct network_array array;
    size_t offset = 0;
    for (uint32_t index = 0; network_array(network, index, &array); index++) {
        if (array.values == values)
            break;
        offset += array.trained ? array.count : 0;
    }
    return gradient->values + offset;
}

/* A hidden layer of the paper's network as backward needs it: normalised sums, 1 / deviations, and the layer's output
 * after gain, offset and ReLU. */
struct normalised_layer {
    float *unit;    /* [capacity][hidden_stride] */
    float *inverse; /* [capacity] */
    float *output;  /* [capacity][hidden_stride] */
};

struct network_pass {
    struct network_shape shape;
    const struct matrix_kernels *kernels;
    uint32_t capacity, inputs, inputs_stride, hidden_stride;
    float *memory;
    float *x;                          /* [capacity][inputs_stride] normalised inputs */
    struct normalised_layer layers[2]; /* content: only layers[0].output, after ReLU */
    float *d_first, *d_second;         /* [BLOCK_SLOTS][hidden_stride] gradients, sums */
    float *d_content;                  /* [BLOCK_SLOTS][content] */
    float *packed;                     /* [BLOCK_SLOTS][inputs] */
    /* Parameters as the products want them, of the last forward. */
    float *mean, *scale;  /* [inputs_stride] */
    float *first;         /* [inputs][hidden_stride] w1 transposed */
    float *first_bias;    /* [hidden_stride] */
    float *second;        /* [hidden][hidden_stride] the paper's w2 transposed */
    float *second_padded; /* [hidden][hidden_stride] and as it is */
    float *second_bias;   /* [hidden_stride] */
};

static uint32_t whole_lanes(uint32_t count) {
    return (count + MATRIX_LANES - 1) / MATRIX_LANES * MATRIX_LANES;
}

struct network_pass *network_pass_create(const struct network_shape *shape, uint32_t count) {
    struct network_pass *pass = calloc(1, sizeof *pass);
    if (pass == NULL)
        return NULL;
    bool paper = shape->features == FEATURES_PAPER;
    uint32_t inputs = network_inputs_count(shape), inputs_stride = whole_lanes(inputs);
    uint32_t hidden_stride = whole_lanes(shape->hidden);
    *pass = (struct network_pass){.shape = *shape,
        .kernels = matrix_kernels(cpu_tier_detect()),
        .capacity = count,
        .inputs = inputs,
        .inputs_stride = inputs_stride,
        .hidden_stride = hidden_stride};
    size_t rows = count, square = paper ? (size_t)shape->hidden * hidden_stride : 0;
    struct {
        float **array;
        size_t count;
    } parts[] = {{&pass->x, rows * inputs_stride}, {&pass->layers[0].output, rows * hidden_stride},
        {&pass->layers[0].unit, paper ? rows * hidden_stride : 0}, {&pass->layers[0].inverse, paper ? rows : 0},
        {&pass->layers[1].output, paper ? rows * hidden_stride : 0},
        {&pass->layers[1].unit, paper ? rows * hidden_stride : 0}, {&pass->layers[1].inverse, paper ? rows : 0},
        {&pass->d_first, (size_t)BLOCK_SLOTS * hidden_stride}, {&pass->d_second, (size_t)BLOCK_SLOTS * hidden_stride},
        {&pass->d_content, (size_t)BLOCK_SLOTS * shape->content}, {&pass->packed, (size_t)BLOCK_SLOTS * inputs},
        {&pass->mean, inputs_stride}, {&pass->scale, inputs_stride}, {&pass->first, (size_t)inputs * hidden_stride},
        {&pass->first_bias, hidden_stride}, {&pass->second, square}, {&pass->second_padded, square},
        {&pass->second_bias, hidden_stride}};
    size_t total = 1, at = 0, parts_count = sizeof parts / sizeof *parts;
    for (size_t i = 0; i < parts_count; i++)
        total += parts[i].count;
    pass->memory = calloc(total, sizeof(float));
    if (pass->memory == NULL) {
        free(pass);
        return NULL;
    }
    for (size_t i = 0; i < parts_count; i++) {
        *parts[i].array = pass->memory + at;
        at += parts[i].count;
    }
    return pass;
}

void network_pass_free(struct network_pass *pass) {
    if (pass == NULL)
        return;
    free(pass->memory);
    free(pass);
}

uint32_t network_pass_capacity(const struct network_pass *pass) {
    return pass->capacity;
}

/* Matrices of the products. */

static struct matrix_view view(const float *values, size_t stride) {
    return (struct matrix_view){values, stride};
}

static struct matrix_view hidden_rows(const struct network_pass *pass, const float *values, uint32_t row) {
    return view(values + (size_t)row * pass->hidden_stride, pass->hidden_stride);
}

static struct matrix_view input_rows(const struct network_pass *pass, uint32_t row) {
    return view(pass->x + (size_t)row * pass->inputs_stride, pass->inputs_stride);
}

/* out [columns] += the sum over rows of weights[row] * b[row]. weights NULL: 1. */
static void add_rows(const struct network_pass *pass, uint32_t rows, uint32_t columns, const float *weights,
    struct matrix_view b, float *out) {
    const float one = 1;
    struct matrix_view a = weights == NULL ? view(&one, 0) : view(weights, 1);
    pass->kernels->outer(rows, 1, columns, a, b, (struct matrix){out, columns});
}

/* from [rows][columns] -> to [columns][stride]. */
static void transpose(const float *from, uint32_t rows, uint32_t columns, float *to, size_t stride) {
    for (uint32_t column = 0; column < columns; column++)
        for (uint32_t row = 0; row < rows; row++)
            to[column * stride + row] = from[(size_t)row * columns + column];
}

/* Forward: inputs. */

/* FEATURES_CONTENT: content from the keys, then the given inputs; normalised and clamped. */
static void content_inputs(const struct policy_network *network, uint32_t head, const struct train_slots *slots,
    struct network_pass *pass, uint32_t row, uint32_t rows) {
    uint32_t content = pass->shape.content, given = pass->inputs - content, head_dim = pass->shape.head_dim;
    size_t stride = pass->inputs_stride;
    float *x = pass->x + row * stride;
    for (uint32_t r = 0; r < rows; r++) {
        if (content > 0)
            memcpy(x + r * stride, network->content_offset + (size_t)head * content, content * sizeof *x);
        if (given > 0)
            memcpy(x + r * stride + content, slots->inputs + (size_t)(row + r) * given, given * sizeof *x);
    }
    if (content > 0)
        pass->kernels->dots(rows, head_dim, content, view(slots->keys + (size_t)row * head_dim, head_dim),
            view(network->content + (size_t)head * content * head_dim, head_dim), (struct matrix){x, stride});
    const float *mean = pass->mean, *scale = pass->scale;
    for (uint32_t r = 0; r < rows; r++) {
        float *values = x + r * stride;
        for (size_t f = 0; f < stride; f++) {
            float value = (values[f] - mean[f]) * scale[f];
            value = value > CONTENT_LIMIT ? CONTENT_LIMIT : value;
            values[f] = value < -CONTENT_LIMIT ? -CONTENT_LIMIT : value;
        }
    }
}

static void paper_inputs(const struct policy_network *network, uint32_t head, const struct train_slots *slots,
    struct network_pass *pass, uint32_t row, uint32_t rows) {
    uint32_t inputs = pass->inputs;
    memcpy(pass->packed, slots->inputs + (size_t)row * inputs, (size_t)rows * inputs * sizeof(float));
    if (slots->standard != NULL)
        network_normalise(network, head, slots->standard, rows, pass->packed);
    for (uint32_t r = 0; r < rows; r++)
        memcpy(pass->x + (size_t)(row + r) * pass->inputs_stride, pass->packed + (size_t)r * inputs,
            inputs * sizeof(float));
}

/* Forward: layers. */

static void content_hidden(struct network_pass *pass, uint32_t row, uint32_t rows) {
    float *out = pass->layers[0].output + (size_t)row * pass->hidden_stride;
    pass->kernels->product(rows, pass->inputs, pass->hidden_stride, input_rows(pass, row),
        hidden_rows(pass, pass->first, 0), pass->first_bias, (struct matrix){out, pass->hidden_stride});
    for (size_t i = 0; i < (size_t)rows * pass->hidden_stride; i++)
        out[i] = out[i] > 0 ? out[i] : 0;
}

/* Sum of a[i] b[i]: sixteen partial sums, then a tree. b NULL: of a[i]. */
static float row_sum(const float *a, const float *b, uint32_t count) {
    float parts[MATRIX_LANES] = {0};
    uint32_t i = 0;
    for (; i + MATRIX_LANES <= count; i += MATRIX_LANES)
        for (uint32_t lane = 0; lane < MATRIX_LANES; lane++)
            parts[lane] += b != NULL ? a[i + lane] * b[i + lane] : a[i + lane];
    for (uint32_t lane = 0; i < count; i++, lane++)
        parts[lane] += b != NULL ? a[i] * b[i] : a[i];
    for (uint32_t half = MATRIX_LANES / 2; half > 0; half /= 2)
        for (uint32_t lane = 0; lane < half; lane++)
            parts[lane] += parts[lane + half];
    return parts[0];
}

/* LayerNorm and ReLU of sums [rows][hidden_stride]. */
static void normalise_rows(struct network_pass *pass, const float *sums, const float *gain, const float *offset,
    struct normalised_layer *layer, uint32_t row, uint32_t rows) {
    uint32_t hidden = pass->shape.hidden;
    for (uint32_t r = 0; r < rows; r++) {
        const float *from = sums + (size_t)r * pass->hidden_stride;
        float *unit = layer->unit + (size_t)(row + r) * pass->hidden_stride;
        float *output = layer->output + (size_t)(row + r) * pass->hidden_stride;
        float mean = row_sum(from, NULL, hidden) / (float)hidden;
        for (uint32_t j = 0; j < hidden; j++)
            unit[j] = from[j] - mean;
        float inverse = 1 / sqrtf(row_sum(unit, unit, hidden) / (float)hidden + LAYER_NORM_EPSILON);
        layer->inverse[row + r] = inverse;
        for (uint32_t j = 0; j < hidden; j++) {
            unit[j] *= inverse;
            float value = unit[j] * gain[j] + offset[j];
            output[j] = value > 0 ? value : 0;
        }
    }
}

static void paper_hidden(const struct policy_network *network, struct network_pass *pass, uint32_t row, uint32_t rows) {
    struct matrix sums = {pass->d_first, pass->hidden_stride};
    pass->kernels->product(rows, pass->inputs, pass->hidden_stride, input_rows(pass, row),
        hidden_rows(pass, pass->first, 0), pass->first_bias, sums);
    normalise_rows(pass, sums.values, network->g1, network->o1, &pass->layers[0], row, rows);
    pass->kernels->product(rows, pass->shape.hidden, pass->hidden_stride,
        hidden_rows(pass, pass->layers[0].output, row), hidden_rows(pass, pass->second, 0), pass->second_bias, sums);
    normalise_rows(pass, sums.values, network->g2, network->o2, &pass->layers[1], row, rows);
}

/* The parameters in the products' layout. */
static void lay_out_parameters(const struct policy_network *network, uint32_t head, struct network_pass *pass) {
    uint32_t hidden = pass->shape.hidden, inputs = pass->inputs;
    bool paper = pass->shape.features == FEATURES_PAPER;
    transpose(network->w1, hidden, inputs, pass->first, pass->hidden_stride);
    memcpy(pass->first_bias, paper ? network->mlp_b1 : network->b1 + (size_t)head * hidden, hidden * sizeof(float));
    if (!paper) {
        memcpy(pass->mean, network->mean + (size_t)head * inputs, inputs * sizeof(float));
        memcpy(pass->scale, network->scale + (size_t)head * inputs, inputs * sizeof(float));
        return;
    }
    transpose(network->w2, hidden, hidden, pass->second, pass->hidden_stride);
    for (uint32_t j = 0; j < hidden; j++)
        memcpy(pass->second_padded + (size_t)j * pass->hidden_stride, network->w2 + (size_t)j * hidden,
            hidden * sizeof(float));
    memcpy(pass->second_bias, network->mlp_b2, hidden * sizeof(float));
}

void network_forward(const struct policy_network *network, uint32_t head, const struct train_slots *slots,
    struct network_pass *pass, float *scores) {
    bool paper = pass->shape.features == FEATURES_PAPER;
    const struct normalised_layer *last = &pass->layers[paper ? 1 : 0];
    const float *weights = paper ? network->w3 : network->w2;
    const float *skip = paper ? network->mlp_skip : network->skip + (size_t)head * pass->inputs;
    lay_out_parameters(network, head, pass);
    for (uint32_t row = 0; row < slots->count; row += BLOCK_SLOTS) {
        uint32_t rows = slots->count - row < BLOCK_SLOTS ? slots->count - row : BLOCK_SLOTS;
        if (paper) {
            paper_inputs(network, head, slots, pass, row, rows);
            paper_hidden(network, pass, row, rows);
        } else {
            content_inputs(network, head, slots, pass, row, rows);
            content_hidden(pass, row, rows);
        }
        for (uint32_t r = 0; r < rows; r++)
            scores[row + r] = paper ? network->b3[0] : 0;
        struct matrix out = {scores + row, 1};
        pass->kernels->dots(
            rows, pass->shape.hidden, 1, hidden_rows(pass, last->output, row), view(weights, pass->shape.hidden), out);
        pass->kernels->dots(rows, pass->inputs, 1, input_rows(pass, row), view(skip, pass->inputs), out);
    }
}

/* Backward. */

/* Gradients of the trained arrays, those of the head where there are more. */
struct places {
    float *content, *content_offset, *w1, *b1, *w2, *skip;
    float *g1, *o1, *b2, *g2, *o2, *w3, *b3;
};

static struct places find_places(
    const struct policy_network *network, uint32_t head, const struct network_pass *pass, struct gradient *gradient) {
    const struct network_shape *shape = &pass->shape;
    struct places places = {
        .w1 = gradient_of(network, gradient, network->w1), .w2 = gradient_of(network, gradient, network->w2)};
    if (shape->features == FEATURES_PAPER) {
        places.b1 = gradient_of(network, gradient, network->mlp_b1);
        places.g1 = gradient_of(network, gradient, network->g1);
        places.o1 = gradient_of(network, gradient, network->o1);
        places.b2 = gradient_of(network, gradient, network->mlp_b2);
        places.g2 = gradient_of(network, gradient, network->g2);
        places.o2 = gradient_of(network, gradient, network->o2);
        places.w3 = gradient_of(network, gradient, network->w3);
        places.b3 = gradient_of(network, gradient, network->b3);
        places.skip = gradient_of(network, gradient, network->mlp_skip);
        return places;
    }
    places.b1 = gradient_of(network, gradient, network->b1) + (size_t)head * shape->hidden;
    places.skip = gradient_of(network, gradient, network->skip) + (size_t)head * pass->inputs;
    if (shape->content > 0) {
        size_t numbers = (size_t)head * shape->content;
        places.content = gradient_of(network, gradient, network->content) + numbers * shape->head_dim;
        places.content_offset = gradient_of(network, gradient, network->content_offset) + numbers;
    }
    return places;
}

/* out [count] = factor weights where the layer's output is above 0, else 0. */
static void through_relu(
    uint32_t count, float factor, const float *restrict weights, const float *restrict output, float *restrict out) {
    for (uint32_t j = 0; j < count; j++) {
        float passes = output[j] > 0 ? 1.0f : 0.0f;
        out[j] = factor * weights[j] * passes;
    }
}

/* out [rows][hidden_stride]: gradients of the last layer's output before ReLU. */
static void through_last_layer(const struct network_pass *pass, const float *d, const float *weights,
    const float *outputs, uint32_t row, uint32_t rows, float *out) {
    size_t stride = pass->hidden_stride;
    for (uint32_t r = 0; r < rows; r++)
        through_relu(pass->shape.hidden, d[r], weights, outputs + (row + r) * stride, out + r * stride);
}

/* From the hidden sums' gradient d_first to the content map. */
static void through_content(const struct policy_network *network, uint32_t head, const struct train_slots *slots,
    struct network_pass *pass, const float *d, uint32_t row, uint32_t rows, const struct places *places) {
    uint32_t content = pass->shape.content, head_dim = pass->shape.head_dim;
    const float *skip = network->skip + (size_t)head * pass->inputs;
    struct matrix out = {pass->d_content, content};
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t f = 0; f < content; f++)
            pass->d_content[r * content + f] = d[r] * skip[f];
    pass->kernels->dots(
        rows, pass->shape.hidden, content, hidden_rows(pass, pass->d_first, 0), hidden_rows(pass, pass->first, 0), out);
    for (uint32_t r = 0; r < rows; r++) {
        const float *x = pass->x + (size_t)(row + r) * pass->inputs_stride;
        for (uint32_t f = 0; f < content; f++) {
            float passes = fabsf(x[f]) < CONTENT_LIMIT ? pass->scale[f] : 0;
            pass->d_content[r * content + f] *= passes;
        }
    }
    struct matrix_view d_content = view(pass->d_content, content);
    add_rows(pass, rows, content, NULL, d_content, places->content_offset);
    pass->kernels->outer(rows, content, head_dim, d_content, view(slots->keys + (size_t)row * head_dim, head_dim),
        (struct matrix){places->content, head_dim});
}

static void content_backward(const struct policy_network *network, uint32_t head, const struct train_slots *slots,
    struct network_pass *pass, const float *d, uint32_t row, uint32_t rows, const struct places *places) {
    uint32_t hidden = pass->shape.hidden;
    const float *outputs = pass->layers[0].output;
    add_rows(pass, rows, hidden, d, hidden_rows(pass, outputs, row), places->w2);
    add_rows(pass, rows, pass->inputs, d, input_rows(pass, row), places->skip);
    through_last_layer(pass, d, network->w2, outputs, row, rows, pass->d_first);
    struct matrix_view d_sums = hidden_rows(pass, pass->d_first, 0);
    add_rows(pass, rows, hidden, NULL, d_sums, places->b1);
    pass->kernels->outer(
        rows, hidden, pass->inputs, d_sums, input_rows(pass, row), (struct matrix){places->w1, pass->inputs});
    if (pass->shape.content > 0)
        through_content(network, head, slots, pass, d, row, rows, places);
}

/* In place: gradients of the layer's output before ReLU (0 where it was cut off) to those of its sums; adds those of
 * gain and offset. */
static void through_layer_norm(struct network_pass *pass, const struct normalised_layer *layer, const float *gain,
    uint32_t row, uint32_t rows, float *d, float *d_gain, float *d_offset) {
    uint32_t hidden = pass->shape.hidden;
    for (uint32_t r = 0; r < rows; r++, d += pass->hidden_stride) {
        const float *unit = layer->unit + (size_t)(row + r) * pass->hidden_stride;
        for (uint32_t j = 0; j < hidden; j++) {
            d_gain[j] += d[j] * unit[j];
            d_offset[j] += d[j];
            d[j] *= gain[j];
        }
        float mean = row_sum(d, NULL, hidden) / (float)hidden, slope = row_sum(d, unit, hidden) / (float)hidden;
        float inverse = layer->inverse[row + r];
        for (uint32_t j = 0; j < hidden; j++)
            d[j] = inverse * (d[j] - mean - unit[j] * slope);
    }
}

static void paper_backward(const struct policy_network *network, struct network_pass *pass, const float *d,
    uint32_t row, uint32_t rows, const struct places *places) {
    uint32_t hidden = pass->shape.hidden;
    const float *first = pass->layers[0].output, *second = pass->layers[1].output;
    struct matrix_view d_first = hidden_rows(pass, pass->d_first, 0), d_second = hidden_rows(pass, pass->d_second, 0);
    const float one = 1;
    add_rows(pass, rows, hidden, d, hidden_rows(pass, second, row), places->w3);
    add_rows(pass, rows, 1, d, view(&one, 0), places->b3);
    add_rows(pass, rows, pass->inputs, d, input_rows(pass, row), places->skip);
    through_last_layer(pass, d, network->w3, second, row, rows, pass->d_second);
    through_layer_norm(pass, &pass->layers[1], network->g2, row, rows, pass->d_second, places->g2, places->o2);
    add_rows(pass, rows, hidden, NULL, d_second, places->b2);
    pass->kernels->outer(
        rows, hidden, hidden, d_second, hidden_rows(pass, first, row), (struct matrix){places->w2, hidden});
    pass->kernels->product(rows, hidden, pass->hidden_stride, d_second, hidden_rows(pass, pass->second_padded, 0), NULL,
        (struct matrix){pass->d_first, pass->hidden_stride});
    for (size_t i = 0; i < (size_t)rows * pass->hidden_stride; i++)
        pass->d_first[i] = first[(size_t)row * pass->hidden_stride + i] > 0 ? pass->d_first[i] : 0;
    through_layer_norm(pass, &pass->layers[0], network->g1, row, rows, pass->d_first, places->g1, places->o1);
    add_rows(pass, rows, hidden, NULL, d_first, places->b1);
    pass->kernels->outer(
        rows, hidden, pass->inputs, d_first, input_rows(pass, row), (struct matrix){places->w1, pass->inputs});
}

void network_backward(const struct policy_network *network, uint32_t head, const struct train_slots *slots,
    struct network_pass *pass, const float *d_scores, struct gradient *gradient) {
    struct places places = find_places(network, head, pass, gradient);
    for (uint32_t row = 0; row < slots->count; row += BLOCK_SLOTS) {
        uint32_t rows = slots->count - row < BLOCK_SLOTS ? slots->count - row : BLOCK_SLOTS;
        if (pass->shape.features == FEATURES_PAPER)
            paper_backward(network, pass, d_scores + row, row, rows, &places);
        else
            content_backward(network, head, slots, pass, d_scores + row, row, rows, &places);
    }
}
