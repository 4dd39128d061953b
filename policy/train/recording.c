/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/recording.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/random.h"

enum { STREAM_LAYERS = 0x4C415952, ALIGNMENT = 16, ARRAYS = 7 /* of a head */ };

static int no_memory(struct error *error) {
    return error_set(error, ERROR_MEMORY, "no memory for recorded examples");
}

/* ---- work space ---- */

int recording_reader_open(struct recording_reader *reader, struct training *training, const struct records *records,
    uint32_t capacity, uint32_t window, struct error *error) {
    struct head_features *features = &reader->features;
    size_t slots = capacity;
    reader->training = training;
    reader->records = records;
    *features = (struct head_features){.capacity = capacity,
        .positions = malloc(slots * sizeof(uint32_t)),
        .sum = malloc(slots * sizeof(float)),
        .squared = malloc(slots * sizeof(float)),
        .entropy = malloc(slots * sizeof(float)),
        .value_norm = malloc(slots * sizeof(float)),
        .output_norm = malloc(slots * sizeof(float))};
    bool lacking = features->positions == NULL || features->sum == NULL || features->squared == NULL ||
                   features->entropy == NULL || features->value_norm == NULL || features->output_norm == NULL;
    if (records->shape.content > 0) {
        features->keys = malloc(slots * records->shape.head_dim * sizeof(float));
        lacking = lacking || features->keys == NULL;
    }
    if (records->outputs) {
        features->window = window;
        features->values = malloc(slots * records->shape.head_dim * sizeof(float));
        features->head_window = malloc((size_t)window * records->group * slots * sizeof *features->head_window);
        lacking = lacking || features->values == NULL || features->head_window == NULL;
    }
    reader->inputs = malloc(slots * (records->fixed + 1) * sizeof(float));
    return lacking || reader->inputs == NULL ? no_memory(error) : 0;
}

void recording_reader_close(struct recording_reader *reader) {
    struct head_features *features = &reader->features;
    free(features->positions);
    free(features->sum);
    free(features->squared);
    free(features->entropy);
    free(features->keys);
    free(features->value_norm);
    free(features->output_norm);
    free(features->values);
    free(features->head_window);
    free(reader->inputs);
}

/* ---- which heads ---- */

size_t recording_slot_bytes(const struct records *records) {
    size_t keys = records->shape.content > 0 ? records->shape.head_dim : 0;
    size_t outputs = records->outputs ? RECORD_QUERIES * records->group + records->shape.head_dim : 0;
    return (keys + records->fixed + outputs) * sizeof(uint16_t) + sizeof(float) + sizeof(uint32_t);
}

/* Of a head, whatever its slots. */
static size_t head_bytes(const struct records *records) {
    size_t later = (size_t)RECORD_QUERIES * records->group * (1 + records->shape.head_dim) * sizeof(float);
    return (records->outputs ? later : 0) + (size_t)ARRAYS * ALIGNMENT;
}

/* All heads of some layers, which the seed draws of those that do not slide. */
static void choose_heads(const struct records *records, uint64_t seed, uint32_t index, struct recorded_sequence *out) {
    uint32_t kv_heads = records->shape.kv_heads, left = records->heads_most / kv_heads, head = 0;
    for (uint32_t i = 0; i < records->layers; i++) { /* each with the chance left / layers to come */
        float chance = random_uniform(seed, STREAM_LAYERS, index, i);
        if (chance * (float)(records->layers - i) >= (float)left)
            continue;
        left--;
        for (uint32_t k = 0; k < kv_heads; k++)
            out->heads[head++].head = records->layer_numbers[i] * kv_heads + k;
    }
    out->heads_count = head;
}

int recording_open(
    const struct records *records, uint64_t seed, uint32_t index, struct recording *example, struct error *error) {
    struct recorded_sequence *out = example->out = &records->sequences[index];
    uint32_t future = example->end - example->at;
    *out = (struct recorded_sequence){.seen = example->at,
        .queries = future < RECORD_QUERIES ? future : RECORD_QUERIES,
        .heads = calloc(records->heads_most, sizeof(struct recorded_head))};
    if (out->heads == NULL)
        return no_memory(error);
    choose_heads(records, seed, index, out);
    example->future = calloc((size_t)out->heads_count * example->at, sizeof *example->future);
    return example->future == NULL ? no_memory(error) : 0;
}

void recording_close(struct recording *example, bool failed) {
    free(example->future);
    if (failed && example->out != NULL) {
        free(example->out->heads);
        free(example->out->memory);
        *example->out = (struct recorded_sequence){0};
    }
    *example = (struct recording){0};
}

/* ---- a cache ---- */

static void *take(char **at, size_t bytes) {
    void *memory = *at;
    *at += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return memory;
}

static int make_room(
    const struct records *records, struct recording *example, struct sequence *sequence, struct error *error) {
    struct recorded_sequence *out = example->out;
    size_t dim = records->shape.content > 0 ? records->shape.head_dim : 0, bytes = 0;
    for (uint32_t h = 0; h < out->heads_count; h++) {
        uint32_t layer = out->heads[h].head / records->shape.kv_heads, k = out->heads[h].head % records->shape.kv_heads;
        out->heads[h].slots = kv_sequence_slots(sequence_kv(sequence), layer, k);
        bytes += out->heads[h].slots * recording_slot_bytes(records) + head_bytes(records);
    }
    char *at = out->memory = malloc(bytes);
    if (at == NULL)
        return no_memory(error);
    for (uint32_t h = 0; h < out->heads_count; h++) {
        struct recorded_head *head = &out->heads[h];
        size_t slots = head->slots;
        head->positions = take(&at, slots * sizeof(uint32_t));
        head->inputs = take(&at, slots * records->fixed * sizeof(uint16_t));
        head->targets = take(&at, slots * sizeof(float));
        head->keys = dim > 0 ? take(&at, slots * dim * sizeof(uint16_t)) : NULL;
        if (!records->outputs)
            continue;
        size_t queries = (size_t)out->queries * records->group;
        head->attention = take(&at, queries * slots * sizeof(uint16_t));
        head->values = take(&at, slots * records->shape.head_dim * sizeof(uint16_t));
        head->later = take(&at, queries * (1 + records->shape.head_dim) * sizeof(float));
    }
    return 0;
}

/* Takes empty slots out. */
static uint32_t compact(const struct records *records, const struct head_features *features) {
    float *numbers[] = {
        features->sum, features->squared, features->entropy, features->value_norm, features->output_norm};
    size_t dim = records->shape.head_dim;
    uint32_t count = 0;
    for (uint32_t i = 0; i < features->slots; i++) {
        if (features->positions[i] == KV_NO_POSITION)
            continue;
        features->positions[count] = features->positions[i];
        for (size_t n = 0; n < sizeof numbers / sizeof *numbers; n++)
            numbers[n][count] = numbers[n][i];
        if (features->keys != NULL && count < i)
            memcpy(features->keys + count * dim, features->keys + i * dim, dim * sizeof(float));
        count++;
    }
    return count;
}

static void narrow(const float *from, size_t count, uint16_t *to) {
    for (size_t i = 0; i < count; i++)
        to[i] = float_to_half(from[i]);
}

/* Reads a head as it is at present, without empty slots, and gathers its inputs. *count: slots. */
static int read_inputs(struct recording_reader *reader, struct sequence *sequence, uint32_t head, uint32_t *count,
    float standard[6], struct error *error) {
    const struct records *records = reader->records;
    struct head_features *features = &reader->features;
    struct network_shape shape = records->shape;
    struct head_features wanted = *features;
    wanted.values = NULL; /* of the queries that follow */
    wanted.head_window = NULL;
    int code = sequence_features(sequence, head / shape.kv_heads, head % shape.kv_heads, &wanted, error);
    if (code != 0)
        return code;
    features->slots = wanted.slots;
    *count = compact(records, features);
    struct network_slots slots = {.count = *count,
        .seen = sequence_length(sequence),
        .budget = sequence_length(sequence),
        .positions = features->positions,
        .sum = features->sum,
        .squared = features->squared,
        .entropy = features->entropy,
        .value_norm = features->value_norm,
        .output_norm = features->output_norm};
    shape.content = 0;
    shape.inputs = records->fixed_mask;
    network_gather(&shape, &slots, reader->inputs);
    network_standardise(&shape, reader->inputs, *count, standard);
    return 0;
}

int recording_standards(
    struct recording_reader *reader, struct sequence *sequence, float (*standards)[6], struct error *error) {
    const struct records *records = reader->records;
    uint32_t kv_heads = records->shape.kv_heads, count;
    int code = 0;
    for (uint32_t i = 0; code == 0 && i < records->layers * kv_heads; i++) {
        uint32_t head = records->layer_numbers[i / kv_heads] * kv_heads + i % kv_heads;
        code = read_inputs(reader, sequence, head, &count, standards[head], error);
        if (code == 0)
            code = train_yield(reader->training);
    }
    return code;
}

static int read_head(
    struct recording_reader *reader, struct sequence *sequence, struct recorded_head *head, struct error *error) {
    const struct records *records = reader->records;
    const struct head_features *features = &reader->features;
    int code = read_inputs(reader, sequence, head->head, &head->slots, head->standard, error);
    if (code != 0)
        return code;
    narrow(reader->inputs, (size_t)head->slots * records->fixed, head->inputs);
    if (head->keys != NULL)
        narrow(features->keys, (size_t)head->slots * records->shape.head_dim, head->keys);
    memcpy(head->positions, features->positions, head->slots * sizeof *head->positions);
    for (uint32_t i = 0; i < head->slots; i++)
        head->targets[i] = expf(features->output_norm[i]);
    return 0;
}

int recording_read(struct recording_reader *reader, struct recording *example, struct sequence *sequence,
    const float (*standards)[6], struct error *error) {
    int code = make_room(reader->records, example, sequence, error);
    for (uint32_t h = 0; code == 0 && h < example->out->heads_count; h++) {
        struct recorded_head *head = &example->out->heads[h];
        code = read_head(reader, sequence, head, error);
        if (code == 0 && standards != NULL)
            memcpy(head->standard, standards[head->head], sizeof head->standard);
        if (code == 0)
            code = train_yield(reader->training);
    }
    return code;
}

/* ---- what the teacher does next ---- */

/* One query head's attention at a query: on the example's slots, and what the tokens after them add. */
static void store_query(
    const struct recording_reader *reader, const uint16_t *row, uint32_t slots, uint16_t *attention, float *later) {
    const struct head_features *features = &reader->features;
    uint32_t dim = reader->records->shape.head_dim;
    memset(later, 0, (1 + dim) * sizeof *later);
    for (uint32_t i = 0; i < features->slots; i++) {
        if (features->positions[i] < slots) {
            attention[features->positions[i]] = row[i];
            continue;
        }
        float p = half_to_float(row[i]);
        later[0] += p;
        for (uint32_t d = 0; d < dim; d++)
            later[1 + d] += p * features->values[(size_t)i * dim + d];
    }
}

/* Of a head that keeps everything: slots are positions. */
static void store_outputs(
    const struct recording_reader *reader, const struct recording *example, struct recorded_head *head) {
    const struct head_features *features = &reader->features;
    const struct records *records = reader->records;
    uint32_t slots = head->slots, dim = records->shape.head_dim, queries = example->out->queries;
    uint32_t future = example->end - example->at;
    for (uint32_t q = 0; q < queries; q++) {
        uint32_t position = example->at + (uint32_t)((uint64_t)(q + 1) * future / queries) - 1;
        for (uint32_t g = 0; g < records->group; g++) {
            size_t row = (size_t)(position % features->window) * records->group + g;
            size_t to = (size_t)q * records->group + g;
            store_query(reader, features->head_window + row * features->capacity, slots, head->attention + to * slots,
                head->later + to * (1 + dim));
        }
    }
    for (uint32_t i = 0; i < features->slots; i++)
        if (features->positions[i] < slots)
            narrow(features->values + (size_t)i * dim, dim, head->values + (size_t)features->positions[i] * dim);
}

/* Of every position seen so far; at the end what they got in between. */
static int read_attention(struct recording_reader *reader, struct recording *example, struct sequence *teacher,
    bool ends, struct error *error) {
    struct head_features wanted = reader->features;
    uint32_t kv_heads = reader->records->shape.kv_heads;
    bool outputs = ends && reader->records->outputs && example->student == RECORDING_TEACHER;
    wanted.squared = wanted.entropy = wanted.keys = wanted.value_norm = wanted.output_norm = NULL;
    if (!outputs) {
        wanted.values = NULL;
        wanted.head_window = NULL;
    }
    for (uint32_t h = 0; h < example->out->heads_count; h++) {
        struct recorded_head *head = &example->out->heads[h];
        float *future = example->future + (size_t)h * example->at;
        int code = sequence_features(teacher, head->head / kv_heads, head->head % kv_heads, &wanted, error);
        if (code != 0)
            return code;
        reader->features.slots = wanted.slots;
        for (uint32_t i = 0; i < wanted.slots; i++)
            if (wanted.positions[i] < example->at)
                future[wanted.positions[i]] = wanted.sum[i] - (ends ? future[wanted.positions[i]] : 0);
        if (outputs)
            store_outputs(reader, example, head);
        code = train_yield(reader->training);
        if (code != 0)
            return code;
    }
    return 0;
}

int recording_begin_future(
    struct recording_reader *reader, struct recording *example, struct sequence *teacher, struct error *error) {
    return read_attention(reader, example, teacher, false, error);
}

int recording_end_future(
    struct recording_reader *reader, struct recording *example, struct sequence *teacher, struct error *error) {
    return read_attention(reader, example, teacher, true, error);
}

void recording_finish(struct recording *example) {
    for (uint32_t h = 0; h < example->out->heads_count; h++) {
        const struct recorded_head *head = &example->out->heads[h];
        const float *future = example->future + (size_t)h * example->at;
        for (uint32_t i = 0; i < head->slots; i++) {
            float attention = future[head->positions[i]];
            head->targets[i] = attention > 0 ? attention * head->targets[i] : 0;
        }
    }
}
