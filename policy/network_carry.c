/* SPDX-License-Identifier: Apache-2.0
 *
 * A network for layers and heads other than those that it was trained for (network.h). Layers correspond by their
 * depth: the middle of layer l of n is at (l + 1/2) / n.
 */
#include "policy/network.h"

#include <string.h>

/* Where a layer's numbers come from: two layers of the source, and the second one's part. */
struct place {
    uint32_t low, high;
    float part;
};

struct carrying {
    const struct policy_network *from;
    struct policy_network *to;
    const uint32_t *layers; /* [count] of the source's, ascending; NULL: all */
    uint32_t count;
};

static uint32_t layer_at(const struct carrying *carrying, uint32_t i) {
    return carrying->layers != NULL ? carrying->layers[i] : i;
}

static double depth_of(uint32_t layer, uint32_t layers) {
    return (layer + 0.5) / layers;
}

/* Between the two neighbours among the source's layers; beyond the first and the last one it is theirs. */
static struct place find_place(const struct carrying *carrying, uint32_t layer) {
    uint32_t all = carrying->from->shape.layers, next = 0;
    double depth = depth_of(layer, carrying->to->shape.layers);
    while (next < carrying->count && depth_of(layer_at(carrying, next), all) < depth)
        next++;
    uint32_t high = layer_at(carrying, next < carrying->count ? next : carrying->count - 1);
    uint32_t low = next > 0 ? layer_at(carrying, next - 1) : high;
    double first = depth_of(low, all), last = depth_of(high, all);
    return (struct place){low, high, last > first ? (float)((depth - first) / (last - first)) : 1};
}

/* out [width]: the mean over a layer's heads. */
static void mean_of_heads(const float *values, uint32_t heads, uint32_t width, float *out) {
    for (uint32_t i = 0; i < width; i++) {
        double sum = 0;
        for (uint32_t head = 0; head < heads; head++)
            sum += (double)values[(size_t)head * width + i];
        out[i] = (float)(sum / heads);
    }
}

static void mix(const float *low, const float *high, float part, uint32_t width, float *out) {
    for (uint32_t i = 0; i < width; i++)
        out[i] = part == 1 ? high[i] : low[i] + part * (high[i] - low[i]);
}

/* One layer of an array that has `width` numbers a head. */
static void carry_layer(const struct carrying *carrying, const float *from, uint32_t width, uint32_t layer, float *to) {
    uint32_t source_heads = carrying->from->shape.kv_heads, heads = carrying->to->shape.kv_heads;
    size_t stride = (size_t)source_heads * width;
    struct place place = find_place(carrying, layer);
    const float *low = from + place.low * stride, *high = from + place.high * stride;
    float *out = to + (size_t)layer * heads * width;
    if (place.part == 1 && source_heads == heads) { /* a layer's own numbers */
        memcpy(out, high, stride * sizeof *out);
        return;
    }
    float means[2][NETWORK_INPUTS_MAX + NETWORK_HIDDEN_MAX];
    mean_of_heads(low, source_heads, width, means[0]);
    mean_of_heads(high, source_heads, width, means[1]);
    for (uint32_t head = 0; head < heads; head++)
        mix(means[0], means[1], place.part, width, out + (size_t)head * width);
}

static void carry_heads(const struct carrying *carrying, const float *from, uint32_t width, float *to) {
    for (uint32_t layer = 0; layer < carrying->to->shape.layers; layer++)
        carry_layer(carrying, from, width, layer, to);
}

static void carry_layers(const struct carrying *carrying, const float *from, float *to) {
    for (uint32_t layer = 0; layer < carrying->to->shape.layers; layer++) {
        struct place place = find_place(carrying, layer);
        mix(from + place.low, from + place.high, place.part, 1, to + layer);
    }
}

static void carry_all(const struct carrying *carrying) {
    const struct policy_network *from = carrying->from;
    struct policy_network *to = carrying->to;
    struct network_array source, target;
    for (uint32_t i = 0; network_array(from, i, &source) && network_array(to, i, &target); i++) {
        const float *values = source.values;
        if (values == from->mean || values == from->scale || values == from->skip || values == from->b1)
            carry_heads(carrying, values, source.dimensions[1], target.values);
        else if (values == from->layer_budgets || values == from->layer_budget_slopes ||
                 values == from->summary_offsets || values == from->summary_slopes)
            carry_layers(carrying, values, target.values);
        else /* shared by all heads */
            memcpy(target.values, values, source.count * sizeof *values);
    }
}

bool network_can_carry(const struct network_shape *shape) {
    return shape->content == 0;
}

struct policy_network *network_carry(const struct policy_network *network, const uint32_t *layers, uint32_t count,
    const struct policy_model *model, struct error *error) {
    struct network_shape shape = network->shape;
    if (!network_can_carry(&shape)) {
        error_set(error, ERROR_UNSUPPORTED,
            "the policy's network is for %u layers of %u KV heads of width %u, this model has %u of %u of %u; a "
            "network that reads keys (content %u) serves no other model, one of statistics does (content=0, "
            "features=paper)",
            shape.layers, shape.kv_heads, shape.head_dim, model->layers, model->kv_heads, model->head_dim,
            shape.content);
        return NULL;
    }
    shape.layers = model->layers;
    shape.kv_heads = model->kv_heads;
    shape.head_dim = model->head_dim;
    struct policy_network *to = network_create_like(network, &shape, error);
    if (to == NULL)
        return NULL;
    struct carrying carrying = {
        .from = network, .to = to, .layers = layers, .count = layers != NULL ? count : network->shape.layers};
    carry_all(&carrying);
    return to;
}
