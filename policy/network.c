/* SPDX-License-Identifier: Apache-2.0
 *
 * The network in memory and its plain computation. Sums of products are made in double, so that the order of a backend
 * or trainer that is compared with this one does not matter much. The file is network_file.c's.
 */
#include "policy/network.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    LAYERS_MAX = 1024,
    HEADS_MAX = 1024,
    HEAD_DIM_MAX = 1024,
    NUMBERS_MAX = 1 << 28, /* of all arrays: 1 GiB */
    ARRAYS_MAX = 15,
    STANDARDISED_MAX = 3,
};

static const double TINY = 1e-6;

/* ---- shape ---- */

/* The paper's inputs in their order; those of FEATURES_CONTENT follow the enumeration. */
static const enum network_input paper_order[] = {
    INPUT_MEAN, INPUT_VALUE_NORM, INPUT_DEVIATION, INPUT_ENTROPY, INPUT_POSITION};
enum { PAPER_INPUTS = sizeof paper_order / sizeof paper_order[0] };

static uint32_t paper_mask(void) {
    uint32_t mask = 0;
    for (uint32_t i = 0; i < PAPER_INPUTS; i++)
        mask |= 1u << paper_order[i];
    return mask;
}

static bool has(const struct network_shape *shape, enum network_input input) {
    return (shape->inputs >> input & 1) != 0;
}

uint32_t network_inputs_count(const struct network_shape *shape) {
    return shape->content + (uint32_t)__builtin_popcount(shape->inputs);
}

uint32_t network_inputs_list(const struct network_shape *shape, enum network_input out[INPUT_KINDS]) {
    uint32_t count = 0;
    bool paper = shape->features == FEATURES_PAPER;
    for (uint32_t i = 0; i < (paper ? (uint32_t)PAPER_INPUTS : (uint32_t)INPUT_KINDS); i++) {
        enum network_input input = paper ? paper_order[i] : (enum network_input)i;
        if (has(shape, input))
            out[count++] = input;
    }
    return count;
}

/* The paper's inputs that are standardised come first: how many there are. */
static uint32_t count_standardised(const struct network_shape *shape) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < STANDARDISED_MAX; i++)
        count += has(shape, paper_order[i]);
    return count;
}

uint32_t network_needs(const struct network_shape *shape) {
    uint32_t needs = shape->content > 0 ? STATISTIC_CONTENT : 0;
    if (has(shape, INPUT_SUM) || has(shape, INPUT_MEAN))
        needs |= STATISTIC_SUM;
    if (has(shape, INPUT_DEVIATION))
        needs |= STATISTIC_SUM | STATISTIC_SQUARED;
    if (has(shape, INPUT_ENTROPY))
        needs |= STATISTIC_ENTROPY;
    if (has(shape, INPUT_VALUE_NORM) || has(shape, INPUT_OUTPUT_NORM))
        needs |= STATISTIC_CONTENT;
    if (shape->features == FEATURES_PAPER && count_standardised(shape) > 0)
        needs |= STATISTIC_STANDARD;
    return needs;
}

static int check_number(const char *name, uint32_t value, uint32_t least, uint32_t most, struct error *error) {
    if (value >= least && value <= most)
        return 0;
    return error_set(
        error, ERROR_INVALID, "a policy network's %s is %u: must be from %u to %u", name, value, least, most);
}

static int check_shape(const struct network_shape *shape, struct error *error) {
    bool paper = shape->features == FEATURES_PAPER;
    uint32_t allowed = paper ? paper_mask() : (1u << INPUT_KINDS) - 1;
    if (!paper && shape->features != FEATURES_CONTENT)
        return error_set(error, ERROR_INVALID, "a policy network's features are unknown (%d)", (int)shape->features);
    if ((shape->inputs & ~allowed) != 0)
        return error_set(error, ERROR_INVALID, "a policy network has inputs that its features do not have (mask 0x%x)",
            shape->inputs);
    int code = check_number("content", shape->content, 0, paper ? 0 : NETWORK_CONTENT_MAX, error);
    code = code == 0 ? check_number("hidden", shape->hidden, 1, NETWORK_HIDDEN_MAX, error) : code;
    code = code == 0 ? check_number("layers", shape->layers, 1, LAYERS_MAX, error) : code;
    code = code == 0 ? check_number("kv_heads", shape->kv_heads, 1, HEADS_MAX, error) : code;
    code = code == 0 ? check_number("head_dim", shape->head_dim, 1, HEAD_DIM_MAX, error) : code;
    code =
        code == 0 ? check_number("number of inputs", network_inputs_count(shape), 1, NETWORK_INPUTS_MAX, error) : code;
    return code;
}

/* ---- arrays ---- */

/* An array as the shape has it: name, where its pointer is in struct policy_network, dimensions. */
struct layout {
    const char *name;
    size_t field;
    uint32_t dimensions[3];
    bool trained, matrix;
};

#define FIELD(name) offsetof(struct policy_network, name)

/* What depends on how much is kept. */
static uint32_t list_levels(const struct network_shape *shape, struct layout out[ARRAYS_MAX], uint32_t count) {
    uint32_t layers = shape->layers;
    out[count++] = (struct layout){"layer_budgets", FIELD(layer_budgets), {layers}, .trained = false};
    out[count++] = (struct layout){"layer_budget_slopes", FIELD(layer_budget_slopes), {layers}, .trained = false};
    out[count++] = (struct layout){"summary_offsets", FIELD(summary_offsets), {layers}, .trained = false};
    out[count++] = (struct layout){"summary_slopes", FIELD(summary_slopes), {layers}, .trained = false};
    return count;
}

static uint32_t list_content(const struct network_shape *shape, struct layout out[ARRAYS_MAX]) {
    uint32_t heads = shape->layers * shape->kv_heads, inputs = network_inputs_count(shape), count = 0;
    if (shape->content > 0) {
        out[count++] = (struct layout){
            "content", FIELD(content), {heads, shape->content, shape->head_dim}, .trained = true, .matrix = true};
        out[count++] =
            (struct layout){"content_offset", FIELD(content_offset), {heads, shape->content}, .trained = true};
    }
    out[count++] = (struct layout){"mean", FIELD(mean), {heads, inputs}, .trained = false};
    out[count++] = (struct layout){"scale", FIELD(scale), {heads, inputs}, .trained = false};
    out[count++] = (struct layout){"w1", FIELD(w1), {shape->hidden, inputs}, .trained = true, .matrix = true};
    out[count++] = (struct layout){"b1", FIELD(b1), {heads, shape->hidden}, .trained = true};
    out[count++] = (struct layout){"w2", FIELD(w2), {shape->hidden}, .trained = true, .matrix = true};
    /* Starts as h2o's sum, and decay would pull it away from that. */
    out[count++] = (struct layout){"skip", FIELD(skip), {heads, inputs}, .trained = true};
    return list_levels(shape, out, count);
}

static uint32_t list_paper(const struct network_shape *shape, struct layout out[ARRAYS_MAX]) {
    uint32_t inputs = network_inputs_count(shape), hidden = shape->hidden, count = 0;
    out[count++] = (struct layout){"w1", FIELD(w1), {hidden, inputs}, .trained = true, .matrix = true};
    out[count++] = (struct layout){"b1", FIELD(mlp_b1), {hidden}, .trained = true};
    out[count++] = (struct layout){"g1", FIELD(g1), {hidden}, .trained = true};
    out[count++] = (struct layout){"o1", FIELD(o1), {hidden}, .trained = true};
    out[count++] = (struct layout){"w2", FIELD(w2), {hidden, hidden}, .trained = true, .matrix = true};
    out[count++] = (struct layout){"b2", FIELD(mlp_b2), {hidden}, .trained = true};
    out[count++] = (struct layout){"g2", FIELD(g2), {hidden}, .trained = true};
    out[count++] = (struct layout){"o2", FIELD(o2), {hidden}, .trained = true};
    out[count++] = (struct layout){"w3", FIELD(w3), {1, hidden}, .trained = true, .matrix = true};
    out[count++] = (struct layout){"b3", FIELD(b3), {1}, .trained = true};
    out[count++] = (struct layout){"skip", FIELD(mlp_skip), {1, inputs}, .trained = true, .matrix = true};
    return list_levels(shape, out, count);
}

static uint32_t list_arrays(const struct network_shape *shape, struct layout out[ARRAYS_MAX]) {
    return shape->features == FEATURES_PAPER ? list_paper(shape, out) : list_content(shape, out);
}

static size_t count_numbers(const struct layout *layout) {
    size_t count = 1;
    for (uint32_t i = 0; i < 3 && layout->dimensions[i] != 0; i++)
        count *= layout->dimensions[i];
    return count;
}

static float **pointer_of(const struct policy_network *network, const struct layout *layout) {
    return (float **)((char *)network + layout->field);
}

bool network_array(const struct policy_network *network, uint32_t index, struct network_array *out) {
    struct layout list[ARRAYS_MAX];
    if (index >= list_arrays(&network->shape, list))
        return false;
    const struct layout *layout = &list[index];
    *out = (struct network_array){
        .name = layout->name,
        .values = *pointer_of(network, layout),
        .count = count_numbers(layout),
        .trained = layout->trained,
        .matrix = layout->matrix,
    };
    memcpy(out->dimensions, layout->dimensions, sizeof out->dimensions);
    return true;
}

size_t network_parameters_count(const struct policy_network *network) {
    struct network_array array;
    size_t count = 0;
    for (uint32_t i = 0; network_array(network, i, &array); i++)
        count += array.trained ? array.count : 0;
    return count;
}

/* ---- life ---- */

/* Numbers of all arrays of the shape; 0: too many. */
static size_t count_all(const struct network_shape *shape) {
    struct layout list[ARRAYS_MAX];
    size_t total = 0;
    for (uint32_t i = 0, count = list_arrays(shape, list); i < count; i++) {
        size_t numbers = count_numbers(&list[i]); /* at most 2^20 heads of 2^14 numbers */
        if (numbers > NUMBERS_MAX - total)
            return 0;
        total += numbers;
    }
    return total;
}

/* Everything zero, with the arrays' pointers set. */
static struct policy_network *allocate(const struct network_shape *shape, size_t numbers) {
    struct layout list[ARRAYS_MAX];
    struct policy_network *network = calloc(1, sizeof *network + numbers * sizeof(float));
    if (network == NULL)
        return NULL;
    network->references = 1;
    network->shape = *shape;
    float *next = (float *)(network + 1);
    for (uint32_t i = 0, count = list_arrays(shape, list); i < count; i++) {
        *pointer_of(network, &list[i]) = next;
        next += count_numbers(&list[i]);
    }
    return network;
}

static void fill(float *values, size_t count, float value) {
    for (size_t i = 0; i < count; i++)
        values[i] = value;
}

struct policy_network *network_create(const struct network_shape *shape, struct error *error) {
    if (check_shape(shape, error) != 0)
        return NULL;
    size_t numbers = count_all(shape), heads = (size_t)shape->layers * shape->kv_heads;
    if (numbers == 0) {
        error_set(error, ERROR_INVALID, "a policy network has more than %d numbers", NUMBERS_MAX);
        return NULL;
    }
    struct policy_network *network = allocate(shape, numbers);
    if (network != NULL)
        network->record = strdup("{}");
    if (network == NULL || network->record == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for a policy network of %zu numbers", numbers);
        free(network);
        return NULL;
    }
    if (network->scale != NULL)
        fill(network->scale, heads * network_inputs_count(shape), 1);
    fill(network->layer_budgets, shape->layers, 1);
    network->scope = SCOPE_LAYER;
    network->floor = 0.75f;
    network->interval = 16;
    network->summary = true;
    return network;
}

struct policy_network *network_create_like(
    const struct policy_network *like, const struct network_shape *shape, struct error *error) {
    struct policy_network *network = network_create(shape, error);
    if (network == NULL)
        return NULL;
    char *record = strdup(like->record), *method = like->method != NULL ? strdup(like->method) : NULL;
    if (record == NULL || (like->method != NULL && method == NULL)) {
        error_set(error, ERROR_MEMORY, "no memory for a policy network");
        free(record);
        free(method);
        network_release(network);
        return NULL;
    }
    free(network->record);
    network->record = record;
    network->method = method;
    network->scope = like->scope;
    network->floor = like->floor;
    network->interval = like->interval;
    network->summary = like->summary;
    network->protect_recent = like->protect_recent;
    network->protect_sinks = like->protect_sinks;
    memcpy(network->fingerprint, like->fingerprint, sizeof network->fingerprint);
    return network;
}

struct policy_network *network_copy(const struct policy_network *network) {
    struct policy_network *copy = network_create_like(network, &network->shape, NULL);
    struct network_array source, target;
    if (copy == NULL)
        return NULL;
    for (uint32_t i = 0; network_array(network, i, &source) && network_array(copy, i, &target); i++)
        memcpy(target.values, source.values, source.count * sizeof source.values[0]);
    return copy;
}

struct policy_network *network_take(struct policy_network *network) {
    if (network != NULL)
        __atomic_fetch_add(&network->references, 1, __ATOMIC_RELAXED);
    return network;
}

void network_release(struct policy_network *network) {
    if (network == NULL || __atomic_sub_fetch(&network->references, 1, __ATOMIC_ACQ_REL) != 0)
        return;
    free(network->method);
    free(network->record);
    free(network);
}

/* FNV-1a. */
static uint64_t digest_bytes(uint64_t digest, const void *bytes, size_t size) {
    for (size_t i = 0; i < size; i++)
        digest = (digest ^ ((const unsigned char *)bytes)[i]) * 1099511628211u;
    return digest;
}

uint64_t network_digest(const struct policy_network *network) {
    const struct network_shape *shape = &network->shape;
    const uint32_t numbers[] = {shape->features, shape->inputs, shape->content, shape->hidden, shape->layers,
        shape->kv_heads, shape->head_dim, network->scope, network->interval, network->summary, network->protect_recent,
        network->protect_sinks};
    uint64_t digest = digest_bytes(14695981039346656037u, numbers, sizeof numbers);
    struct network_array array;
    digest = digest_bytes(digest, &network->floor, sizeof network->floor);
    for (uint32_t i = 0; network_array(network, i, &array); i++)
        digest = digest_bytes(digest, array.values, array.count * sizeof array.values[0]);
    return digest;
}

/* ---- levels ---- */

double network_level(uint32_t budget, uint32_t seen) {
    double level = log(4.0 * budget / (seen > 0 ? seen : 1));
    return fmax(-3, fmin(3, level));
}

double network_layer_budget(const struct policy_network *network, uint32_t layer, double level) {
    double slope = (double)network->layer_budget_slopes[layer];
    return (double)network->layer_budgets[layer] * (slope == 0 ? 1 : exp(slope * level));
}

float network_summary_offset(const struct policy_network *network, uint32_t layer, double level) {
    return (float)((double)network->summary_offsets[layer] + (double)network->summary_slopes[layer] * level);
}

/* ---- inputs ---- */

/* What each input is of slot i, before normalisation. */
struct slot_values {
    double seen, budget;
    double position, queries; /* c */
    double sum, squared;      /* A / c, A2 / c */
    double entropy, value_norm, output_norm;
};

static struct slot_values read_slot(const struct network_slots *slots, uint32_t i) {
    uint32_t position = slots->positions[i];
    double queries = slots->seen > position ? slots->seen - position : 1;
    return (struct slot_values){
        .seen = slots->seen,
        .budget = slots->budget,
        .position = position,
        .queries = queries,
        .sum = slots->sum != NULL ? slots->sum[i] / queries : 0,
        .squared = slots->squared != NULL ? slots->squared[i] / queries : 0,
        .entropy = slots->entropy != NULL ? slots->entropy[i] : 0,
        .value_norm = slots->value_norm != NULL ? slots->value_norm[i] : 0,
        .output_norm = slots->output_norm != NULL ? slots->output_norm[i] : 0,
    };
}

static double deviation_of(const struct slot_values *slot) {
    return sqrt(fmax(0, slot->squared - slot->sum * slot->sum));
}

static double paper_input(enum network_input input, const struct slot_values *slot) {
    switch (input) {
    case INPUT_MEAN:
        return log(TINY + slot->sum);
    case INPUT_DEVIATION:
        return log(TINY + deviation_of(slot));
    case INPUT_VALUE_NORM:
        return slot->value_norm;
    case INPUT_ENTROPY:
        return slot->entropy / log(fmax(slot->seen, 2));
    default:
        return slot->position / slot->seen;
    }
}

static double content_input(enum network_input input, const struct slot_values *slot) {
    double age = slot->queries - 1;
    switch (input) {
    case INPUT_SUM:
        return log(TINY + slot->sum * slot->queries);
    case INPUT_MEAN:
        return log(TINY + slot->sum * slot->seen);
    case INPUT_DEVIATION:
        return log(TINY + slot->seen * deviation_of(slot));
    case INPUT_ENTROPY:
        return slot->entropy / log(slot->position + 2);
    case INPUT_VALUE_NORM:
        return slot->value_norm;
    case INPUT_OUTPUT_NORM:
        return slot->output_norm;
    case INPUT_POSITION:
        return slot->position / slot->seen;
    case INPUT_AGE:
        return log(1 + age) / 6;
    case INPUT_BUDGET:
        return log(slot->budget / slot->seen) + 1.5;
    case INPUT_RECENT_8:
        return age < slot->budget / 8;
    case INPUT_RECENT_4:
        return age < slot->budget / 4;
    default:
        return age < slot->budget / 2;
    }
}

void network_gather(const struct network_shape *shape, const struct network_slots *slots, float *out) {
    enum network_input list[INPUT_KINDS];
    uint32_t count = network_inputs_list(shape, list);
    for (uint32_t i = 0; i < slots->count; i++) {
        struct slot_values slot = read_slot(slots, i);
        for (uint32_t j = 0; j < shape->content; j++)
            *out++ = slots->content[(size_t)i * shape->content + j];
        for (uint32_t j = 0; j < count; j++)
            *out++ = (float)(shape->features == FEATURES_PAPER ? paper_input(list[j], &slot)
                                                               : content_input(list[j], &slot));
    }
}

void network_standardise(const struct network_shape *shape, const float *inputs, uint32_t count, float standard[6]) {
    uint32_t width = network_inputs_count(shape);
    if (shape->features != FEATURES_PAPER)
        return;
    memset(standard, 0, 6 * sizeof standard[0]);
    for (uint32_t f = 0; f < count_standardised(shape); f++) {
        double mean = 0, variance = 0;
        for (uint32_t i = 0; i < count; i++)
            mean += inputs[(size_t)i * width + f] / (double)count;
        for (uint32_t i = 0; i < count; i++) {
            double difference = inputs[(size_t)i * width + f] - mean;
            variance += difference * difference / count;
        }
        standard[2 * f] = (float)mean;
        standard[2 * f + 1] = (float)(1 / (sqrt(variance) + TINY));
    }
}

static float clamp(float value, float limit) {
    return value > limit ? limit : value < -limit ? -limit : value; /* not a number stays that */
}

void network_normalise(
    const struct policy_network *network, uint32_t head, const float standard[6], uint32_t count, float *inputs) {
    const struct network_shape *shape = &network->shape;
    uint32_t width = network_inputs_count(shape);
    bool paper = shape->features == FEATURES_PAPER;
    uint32_t standardised = paper ? count_standardised(shape) : 0;
    for (uint32_t i = 0; i < count; i++, inputs += width)
        for (uint32_t f = 0; f < width; f++) {
            size_t at = (size_t)head * width + f;
            if (!paper)
                inputs[f] = clamp((inputs[f] - network->mean[at]) * network->scale[at], 6);
            else if (f < standardised)
                inputs[f] = clamp((inputs[f] - standard[2 * f]) * standard[2 * f + 1], 8);
            else
                inputs[f] = clamp(2 * inputs[f] - 1, 8);
        }
}

/* ---- scores ---- */

static double dot(const float *a, const float *b, uint32_t count) {
    double sum = 0;
    for (uint32_t i = 0; i < count; i++)
        sum += (double)a[i] * b[i];
    return sum;
}

static float score_content(const struct policy_network *network, uint32_t head, const float *inputs, uint32_t width) {
    uint32_t hidden = network->shape.hidden;
    double score = dot(network->skip + (size_t)head * width, inputs, width);
    for (uint32_t j = 0; j < hidden; j++) {
        double unit = network->b1[(size_t)head * hidden + j] + dot(network->w1 + (size_t)j * width, inputs, width);
        score += unit > 0 ? network->w2[j] * unit : 0;
    }
    return (float)score;
}

/* out = max(0, LayerNorm(matrix inputs + bias) gain + offset) */
static void hidden_layer(const float *matrix, const float *bias, const float *gain, const float *offset,
    const float *inputs, uint32_t width, uint32_t hidden, float *out) {
    double sums[NETWORK_HIDDEN_MAX], mean = 0, variance = 0;
    for (uint32_t j = 0; j < hidden; j++) {
        sums[j] = bias[j] + dot(matrix + (size_t)j * width, inputs, width);
        mean += sums[j] / hidden;
    }
    for (uint32_t j = 0; j < hidden; j++)
        variance += (sums[j] - mean) * (sums[j] - mean) / hidden;
    double inverse = 1 / sqrt(variance + 1e-5);
    for (uint32_t j = 0; j < hidden; j++) {
        double normal = (sums[j] - mean) * inverse * gain[j] + offset[j];
        out[j] = normal > 0 ? (float)normal : 0;
    }
}

static float score_paper(const struct policy_network *network, const float *inputs, uint32_t width) {
    float first[NETWORK_HIDDEN_MAX], second[NETWORK_HIDDEN_MAX];
    uint32_t hidden = network->shape.hidden;
    hidden_layer(network->w1, network->mlp_b1, network->g1, network->o1, inputs, width, hidden, first);
    hidden_layer(network->w2, network->mlp_b2, network->g2, network->o2, first, hidden, hidden, second);
    double score = network->b3[0] + dot(network->w3, second, hidden) + dot(network->mlp_skip, inputs, width);
    return (float)score;
}

/* A number that is none must not look like an inactive unit: it goes through to the score. */
static bool all_numbers(const float *inputs, uint32_t width) {
    for (uint32_t f = 0; f < width; f++)
        if (isnan(inputs[f]))
            return false;
    return true;
}

void network_score(
    const struct policy_network *network, uint32_t head, const float *inputs, uint32_t count, float *scores) {
    uint32_t width = network_inputs_count(&network->shape);
    bool paper = network->shape.features == FEATURES_PAPER;
    for (uint32_t i = 0; i < count; i++, inputs += width) {
        if (!all_numbers(inputs, width))
            scores[i] = NAN;
        else
            scores[i] = paper ? score_paper(network, inputs, width) : score_content(network, head, inputs, width);
    }
}
