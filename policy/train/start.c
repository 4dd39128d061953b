/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/start.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/random.h"
#include "policy/train/rlkv.h"

enum { STREAM_START = 0x53544152 };
enum { ARRAY_W1, ARRAY_B1, ARRAY_W2, ARRAY_W3, ARRAY_CONTENT };

static const float last_layer = 0.1f; /* small: scores begin as what the skip says */

static void fill(float *values, size_t count, float width, uint64_t seed, uint32_t array) {
    for (size_t i = 0; i < count; i++)
        values[i] = (2 * random_uniform(seed, STREAM_START, array, i) - 1) * width;
}

static void fill_ones(float *values, size_t count) {
    for (size_t i = 0; i < count; i++)
        values[i] = 1;
}

static void start_content(struct policy_network *network, uint64_t seed) {
    const struct network_shape *shape = &network->shape;
    uint32_t inputs = network_inputs_count(shape);
    size_t heads = (size_t)shape->layers * shape->kv_heads;
    fill(network->w1, (size_t)shape->hidden * inputs, 1 / sqrtf((float)inputs), seed, ARRAY_W1);
    fill(network->b1, heads * shape->hidden, 0.1f, seed, ARRAY_B1);
    fill(network->w2, shape->hidden, last_layer / sqrtf((float)shape->hidden), seed, ARRAY_W2);
}

static void start_paper(struct policy_network *network, uint64_t seed) {
    const struct network_shape *shape = &network->shape;
    uint32_t inputs = network_inputs_count(shape), hidden = shape->hidden;
    fill(network->w1, (size_t)hidden * inputs, 1 / sqrtf((float)inputs), seed, ARRAY_W1);
    fill(network->w2, (size_t)hidden * hidden, 1 / sqrtf((float)hidden), seed, ARRAY_W2);
    fill(network->w3, hidden, last_layer / sqrtf((float)hidden), seed, ARRAY_W3);
    fill_ones(network->g1, hidden);
    fill_ones(network->g2, hidden);
}

struct policy_network *network_start(
    const struct train_options *options, const struct model *model, struct error *error) {
    struct network_shape shape = {.features = options->features,
        .inputs = options->inputs,
        .content = options->content,
        .hidden = options->hidden,
        .layers = model->shape.layers,
        .kv_heads = model->shape.kv_heads,
        .head_dim = model->shape.head_dim};
    if (model->shape.global_layers == 0) {
        error_set(error, ERROR_UNSUPPORTED, "%s: no policy can be trained: all layers slide, and none is pruned",
            model->path);
        return NULL;
    }
    if (options->method == TRAIN_RLKV)
        shape = rlkv_shape(model);
    struct policy_network *network = network_create(&shape, error);
    if (network == NULL)
        return NULL;
    network->scope = options->scope;
    network->floor = options->floor;
    network->interval = options->interval;
    network->summary = options->summary;
    network->protect_recent = options->protect_recent;
    snprintf(network->fingerprint, sizeof network->fingerprint, "%s", model->fingerprint);
    network->method = strdup(train_method_name(options->method));
    if (network->method == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for a network");
        network_release(network);
        return NULL;
    }
    if (options->method == TRAIN_RLKV)
        return network; /* gates of 1/2 */
    if (options->features == FEATURES_PAPER)
        start_paper(network, options->seed);
    else
        start_content(network, options->seed);
    return network;
}

void network_start_skip(struct policy_network *network) {
    const struct network_shape *shape = &network->shape;
    enum network_input list[INPUT_KINDS];
    uint32_t count = network_inputs_list(shape, list), chosen = count;
    for (uint32_t i = 0; i < count; i++)
        if (list[i] == INPUT_SUM || (list[i] == INPUT_MEAN && chosen == count))
            chosen = i;
    for (uint32_t head = 0; head < shape->layers * shape->kv_heads && chosen < count; head++) {
        size_t at = (size_t)head * (shape->content + count) + shape->content + chosen;
        network->skip[at] = 1 / network->scale[at];
    }
}

void network_start_content(struct policy_network *network, uint64_t seed) {
    const struct network_shape *shape = &network->shape;
    size_t count = (size_t)shape->layers * shape->kv_heads * shape->content * shape->head_dim;
    fill(network->content, count, sqrtf(3 / (float)shape->head_dim), seed, ARRAY_CONTENT);
}
