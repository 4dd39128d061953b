/* SPDX-License-Identifier: Apache-2.0
 *
 * Collecting examples: sequences are computed in groups, so that their own continuations decode in one batch.
 */
#include "policy/train/record.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/random.h"

enum { STREAM_LAYERS = 0x4C415952, GROUP_MOST = 8, STATISTICS = STATISTIC_SUM | STATISTIC_SQUARED | STATISTIC_ENTROPY };
enum { MEMORY_MOST = 2000 << 20 /* of all examples */, LAYERS_PART = 3 /* one of so many layers, if memory allows */ };
enum { BUDGET_INPUTS = 1 << INPUT_BUDGET | 1 << INPUT_RECENT_8 | 1 << INPUT_RECENT_4 | 1 << INPUT_RECENT_2 };

/* One sequence of a group. */
struct lane {
    struct sequence *sequence;
    struct recorded_sequence *out;
    int32_t *tokens; /* [count] */
    uint32_t prompt, count, future;
    bool own;
    int32_t next;
    float *norms; /* [heads of the sequence][prompt] output norms */
};

struct recorder {
    struct training *training;
    struct records *records;
    struct token_list ends;
    struct head_features features;
    /* Work space. */
    float *inputs;      /* [slots][fixed] */
    uint32_t *identity; /* [slots] 0, 1, 2, ... */
    float *ordered[5];  /* [slots] by position */
};

static int no_memory(struct error *error) {
    return error_set(error, ERROR_MEMORY, "no memory for recorded examples");
}

static uint32_t align(uint32_t count) {
    return (count + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS * KV_PAGE_SLOTS;
}

/* ---- which heads ---- */

static size_t slot_bytes(const struct records *records) {
    size_t keys = records->shape.content > 0 ? records->shape.head_dim : 0;
    size_t outputs = records->outputs ? RECORD_QUERIES * records->group + records->shape.head_dim : 0;
    return (keys + records->fixed + outputs) * sizeof(uint16_t) + sizeof(float);
}

/* Of a head, whatever its slots. */
static size_t head_bytes(const struct records *records) {
    size_t later = RECORD_QUERIES * records->group * (1 + (size_t)records->shape.head_dim);
    return 96 + (records->outputs ? later * sizeof(float) : 0);
}

/* Layers of a sequence that are recorded. */
static uint32_t layers_of_sequence(const struct records *records, const struct train_options *options) {
    const struct network_shape *shape = &records->shape;
    double slots = ((double)options->prompt_least + options->prompt_most) / 2 * options->sequences;
    double bytes = slots * shape->kv_heads * (double)slot_bytes(records);
    double most = MEMORY_MOST / bytes, wanted = ceil((double)shape->layers / LAYERS_PART);
    double layers = most < wanted ? floor(most) : wanted;
    return layers < 1 ? 1 : (uint32_t)layers;
}

/* The heads of a sequence: all of some layers, which the seed draws. */
static void choose_heads(const struct recorder *recorder, uint32_t index, struct recorded_sequence *out) {
    const struct network_shape *shape = &recorder->records->shape;
    uint32_t left = out->heads_count / shape->kv_heads, head = 0;
    for (uint32_t layer = 0; layer < shape->layers; layer++) { /* each with the chance left / layers to come */
        float chance = random_uniform(recorder->training->options->seed, STREAM_LAYERS, index, layer);
        if (chance * (float)(shape->layers - layer) >= (float)left)
            continue;
        left--;
        for (uint32_t k = 0; k < shape->kv_heads; k++)
            out->heads[head++].head = layer * shape->kv_heads + k;
    }
    out->heads_count = head;
}

static void *take(char **at, size_t bytes) {
    void *memory = *at;
    *at += (bytes + 15) / 16 * 16;
    return memory;
}

static int allocate_sequence(struct recorder *recorder, uint32_t index, const struct lane *lane, struct error *error) {
    const struct records *records = recorder->records;
    struct recorded_sequence *out = lane->out;
    size_t slots = lane->prompt, dim = records->shape.content > 0 ? records->shape.head_dim : 0;
    *out = (struct recorded_sequence){.slots = lane->prompt,
        .heads_count = records->heads_most,
        .queries = lane->future < RECORD_QUERIES ? lane->future : RECORD_QUERIES};
    out->heads = calloc(records->heads_most, sizeof *out->heads);
    out->memory = malloc(records->heads_most * (slots * slot_bytes(records) + head_bytes(records)));
    if (out->heads == NULL || out->memory == NULL)
        return no_memory(error);
    choose_heads(recorder, index, out);
    char *at = out->memory;
    for (uint32_t h = 0; h < out->heads_count; h++) {
        struct recorded_head *head = &out->heads[h];
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

static void clear_sequence(struct recorded_sequence *out) {
    free(out->heads);
    free(out->memory);
    *out = (struct recorded_sequence){0};
}

/* ---- features of a head ---- */

static void narrow(const float *from, size_t count, uint16_t *to) {
    for (size_t i = 0; i < count; i++)
        to[i] = float_to_half(from[i]);
}

static int read_head(struct recorder *recorder, const struct lane *lane, uint32_t head, bool all, struct error *error) {
    struct head_features wanted = recorder->features;
    uint32_t kv_heads = recorder->records->shape.kv_heads;
    if (!all)
        wanted.squared = wanted.entropy = wanted.keys = wanted.value_norm = wanted.output_norm = NULL;
    if (all) { /* of the queries that follow */
        wanted.values = NULL;
        wanted.head_window = NULL;
    }
    int code = sequence_features(lane->sequence, head / kv_heads, head % kv_heads, &wanted, error);
    recorder->features.slots = wanted.slots;
    return code;
}

/* Puts a slot's number where its position is. */
static void order(const struct recorder *recorder, const float *from, uint32_t slots, float *to) {
    for (uint32_t i = 0; i < recorder->features.slots; i++)
        if (recorder->features.positions[i] < slots)
            to[recorder->features.positions[i]] = from[i];
}

static void store_keys(const struct recorder *recorder, const struct recorded_sequence *out, uint16_t *keys) {
    uint32_t dim = recorder->records->shape.head_dim;
    for (uint32_t i = 0; i < recorder->features.slots; i++)
        if (recorder->features.positions[i] < out->slots)
            narrow(
                recorder->features.keys + (size_t)i * dim, dim, keys + (size_t)recorder->features.positions[i] * dim);
}

/* Features at the end of the prompt. Targets hold the attention so far until the future is known. */
static int store_head(struct recorder *recorder, const struct lane *lane, uint32_t index, struct error *error) {
    const struct head_features *features = &recorder->features;
    struct recorded_head *head = &lane->out->heads[index];
    struct network_shape shape = recorder->records->shape;
    uint32_t slots = lane->out->slots;
    const float *from[5] = {
        features->sum, features->squared, features->entropy, features->value_norm, features->output_norm};
    int code = read_head(recorder, lane, head->head, true, error);
    if (code != 0)
        return code;
    for (int i = 0; i < 5; i++)
        order(recorder, from[i], slots, recorder->ordered[i]);
    struct network_slots ordered = {.count = slots,
        .seen = slots,
        .budget = slots,
        .positions = recorder->identity,
        .sum = recorder->ordered[0],
        .squared = recorder->ordered[1],
        .entropy = recorder->ordered[2],
        .value_norm = recorder->ordered[3],
        .output_norm = recorder->ordered[4]};
    shape.content = 0;
    shape.inputs = recorder->records->fixed_mask;
    network_gather(&shape, &ordered, recorder->inputs);
    network_standardise(&shape, recorder->inputs, slots, head->standard);
    narrow(recorder->inputs, (size_t)slots * recorder->records->fixed, head->inputs);
    if (head->keys != NULL)
        store_keys(recorder, lane->out, head->keys);
    for (uint32_t i = 0; i < slots; i++) {
        head->targets[i] = recorder->ordered[0][i];
        lane->norms[(size_t)index * slots + i] = expf(recorder->ordered[4][i]);
    }
    return 0;
}

static int store_prompt(struct recorder *recorder, struct lane *lane, struct error *error) {
    int code = 0;
    lane->norms = malloc((size_t)lane->out->heads_count * lane->out->slots * sizeof *lane->norms);
    if (lane->norms == NULL)
        return no_memory(error);
    for (uint32_t h = 0; code == 0 && h < lane->out->heads_count; h++)
        code = store_head(recorder, lane, h, error);
    return code;
}

/* One query head's attention at a query: on the prompt's slots, and what the tokens after it add. */
static void store_query(
    const struct recorder *recorder, const uint16_t *row, uint32_t slots, uint16_t *attention, float *later) {
    const struct head_features *features = &recorder->features;
    uint32_t dim = recorder->records->shape.head_dim;
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

/* After read_head at the end of the future. */
static void store_outputs(const struct recorder *recorder, const struct lane *lane, struct recorded_head *head) {
    const struct head_features *features = &recorder->features;
    const struct records *records = recorder->records;
    uint32_t slots = lane->out->slots, dim = records->shape.head_dim, queries = lane->out->queries;
    for (uint32_t q = 0; q < queries; q++) {
        uint32_t position = lane->prompt + (uint32_t)((uint64_t)(q + 1) * lane->future / queries) - 1;
        for (uint32_t g = 0; g < records->group; g++) {
            size_t row = (size_t)(position % features->window) * records->group + g;
            size_t to = (size_t)q * records->group + g;
            store_query(recorder, features->head_window + row * features->capacity, slots, head->attention + to * slots,
                head->later + to * (1 + dim));
        }
    }
    for (uint32_t i = 0; i < features->slots; i++)
        if (features->positions[i] < slots)
            narrow(features->values + (size_t)i * dim, dim, head->values + (size_t)features->positions[i] * dim);
}

/* What the queries after the prompt paid to its slots, times what a slot adds to the output. */
static int store_future(struct recorder *recorder, const struct lane *lane, struct error *error) {
    uint32_t slots = lane->out->slots;
    int code = 0;
    for (uint32_t h = 0; code == 0 && h < lane->out->heads_count; h++) {
        struct recorded_head *head = &lane->out->heads[h];
        code = read_head(recorder, lane, head->head, false, error);
        if (code != 0)
            break;
        if (recorder->records->outputs)
            store_outputs(recorder, lane, head);
        order(recorder, recorder->features.sum, slots, recorder->ordered[0]);
        for (uint32_t i = 0; i < slots; i++) {
            float future = recorder->ordered[0][i] - head->targets[i];
            head->targets[i] = future > 0 ? future * lane->norms[(size_t)h * slots + i] : 0;
        }
    }
    return code;
}

/* ---- computing ---- */

static int choose_next(struct recorder *recorder, struct lane *lane, uint32_t row, struct error *error) {
    struct sample_params greedy = {
        .top_p = 1, .forced = -1, .banned = recorder->ends.ids, .banned_count = (uint32_t)recorder->ends.count};
    struct sample_result result;
    int code = engine_sample(recorder->training->engine, &row, &greedy, 1, &result, error);
    if (code == 0 && result.undefined)
        code = error_set(error, ERROR_FORMAT, "the model's logits are not numbers");
    lane->next = result.token;
    return code;
}

/* Appends tokens [count], and chooses the next one when it is wanted. */
static int feed(struct recorder *recorder, struct lane *lane, const int32_t *tokens, uint32_t count, bool choose,
    struct error *error) {
    struct training *training = recorder->training;
    uint32_t most = engine_batch_rows(training->engine);
    int code = 0;
    for (uint32_t done = 0, rows; code == 0 && done < count; done += rows) {
        rows = count - done < most ? count - done : most;
        bool last = choose && done + rows == count;
        struct batch_item item = {
            .sequence = lane->sequence, .tokens = tokens + done, .count = rows, .want = last ? WANT_LAST : WANT_NONE};
        code = engine_forward(training->engine, &item, 1, error);
        training->tokens += rows;
        if (code == 0 && last)
            code = choose_next(recorder, lane, item.first_row, error);
        if (code == 0)
            code = train_yield(training);
    }
    return code;
}

static int compute_prompt(struct recorder *recorder, struct lane *lane, uint32_t index, struct error *error) {
    int code = allocate_sequence(recorder, index, lane, error);
    if (code != 0)
        return code;
    lane->sequence = sequence_create(recorder->training->engine);
    if (lane->sequence == NULL)
        return error_set(error, ERROR_PAGES, "no memory for a sequence");
    code = recorder->records->outputs
               ? sequence_record(lane->sequence, STATISTICS | STATISTIC_HEAD_WINDOW, recorder->features.window, error)
               : sequence_record(lane->sequence, STATISTICS, 0, error);
    if (code == 0)
        code = feed(recorder, lane, lane->tokens, lane->prompt, lane->own, error);
    return code == 0 ? store_prompt(recorder, lane, error) : code;
}

/* The continuations that are the teacher's own, side by side. */
static int decode_own(struct recorder *recorder, struct lane *lanes, uint32_t count, struct error *error) {
    struct training *training = recorder->training;
    struct batch_item items[GROUP_MOST];
    struct lane *owners[GROUP_MOST];
    int code = 0;
    for (uint32_t step = 0;; step++) {
        uint32_t active = 0;
        for (uint32_t i = 0; i < count; i++) {
            if (!lanes[i].own || step >= lanes[i].future)
                continue;
            owners[active] = &lanes[i];
            items[active++] = (struct batch_item){
                .sequence = lanes[i].sequence, .tokens = &lanes[i].next, .count = 1, .want = WANT_LAST};
        }
        if (active == 0)
            return 0;
        code = engine_forward(training->engine, items, active, error);
        for (uint32_t i = 0; code == 0 && i < active; i++)
            code = choose_next(recorder, owners[i], items[i].first_row, error);
        training->tokens += active;
        if (code == 0)
            code = train_yield(training);
        if (code != 0)
            return code;
    }
}

static void clear_lane(struct lane *lane) {
    sequence_free(lane->sequence);
    free(lane->tokens);
    free(lane->norms);
    *lane = (struct lane){0};
}

/* Copies sequence `index` of the data. */
static int open_lane(struct recorder *recorder, uint32_t index, struct lane *lane, struct error *error) {
    struct dataset_sequence data;
    uint32_t future = recorder->training->options->future;
    int code = dataset_sequence(recorder->training->dataset, index, &data, error);
    if (code != 0)
        return code;
    lane->out = &recorder->records->sequences[index];
    lane->own = data.own;
    lane->prompt = data.prompt;
    lane->count = data.count;
    lane->future = !data.own && data.count - data.prompt < future ? data.count - data.prompt : future;
    lane->tokens = malloc(data.count * sizeof *lane->tokens);
    if (lane->tokens == NULL)
        return no_memory(error);
    memcpy(lane->tokens, data.tokens, data.count * sizeof *lane->tokens);
    return 0;
}

static int compute_group(
    struct recorder *recorder, struct lane *lanes, uint32_t first, uint32_t count, struct error *error) {
    int code = 0;
    for (uint32_t i = 0; code == 0 && i < count; i++)
        code = open_lane(recorder, first + i, &lanes[i], error);
    for (uint32_t i = 0; code == 0 && i < count; i++)
        code = compute_prompt(recorder, &lanes[i], first + i, error);
    for (uint32_t i = 0; code == 0 && i < count; i++)
        if (!lanes[i].own)
            code = feed(recorder, &lanes[i], lanes[i].tokens + lanes[i].prompt, lanes[i].future, false, error);
    if (code == 0)
        code = decode_own(recorder, lanes, count, error);
    for (uint32_t i = 0; code == 0 && i < count; i++)
        code = store_future(recorder, &lanes[i], error);
    return code;
}

/* Records sequences [first, first + count). On a failure nothing of them is left. */
static int record_group(struct recorder *recorder, uint32_t first, uint32_t count, struct error *error) {
    struct lane lanes[GROUP_MOST] = {0};
    int code = compute_group(recorder, lanes, first, count, error);
    for (uint32_t i = 0; i < count; i++) {
        clear_lane(&lanes[i]);
        if (code != 0)
            clear_sequence(&recorder->records->sequences[first + i]);
    }
    return code;
}

/* As many side by side as pages allow; begun anew when pages were given up. */
static int record_all(struct recorder *recorder, struct error *error) {
    struct training *training = recorder->training;
    uint32_t group = GROUP_MOST, most = engine_batch_rows(training->engine), count = recorder->records->count;
    int code = 0;
    group = group > most ? most : group;
    for (uint32_t first = 0; code == 0 && first < count;) {
        uint32_t members = count - first < group ? count - first : group;
        code = record_group(recorder, first, members, error);
        if (code == 0) {
            first += members;
            train_progress(training, "recording", first, count);
        } else if (code == TRAIN_AGAIN) {
            train_gave_up(training);
            code = 0;
        } else if (code == ERROR_PAGES && members > 1) {
            group = members / 2;
            code = 0;
        }
    }
    return code;
}

/* ---- keys ---- */

static void add_keys(const struct records *records, const struct recorded_sequence *sequence, double *counts,
    double *sums, double *squares) {
    uint32_t dim = records->shape.head_dim;
    for (uint32_t h = 0; h < sequence->heads_count; h++) {
        const struct recorded_head *head = &sequence->heads[h];
        double *sum = sums + (size_t)head->head * dim, *square = squares + (size_t)head->head * dim;
        counts[head->head] += sequence->slots;
        for (size_t i = 0; i < (size_t)sequence->slots * dim; i++) {
            double value = half_to_float(head->keys[i]);
            sum[i % dim] += value;
            square[i % dim] += value * value;
        }
    }
}

/* In place. */
static void whiten_keys(const struct records *records, const struct recorded_sequence *sequence) {
    uint32_t dim = records->shape.head_dim;
    for (uint32_t h = 0; h < sequence->heads_count; h++) {
        const struct recorded_head *head = &sequence->heads[h];
        const float *mean = records->key_mean + (size_t)head->head * dim;
        const float *scale = records->key_scale + (size_t)head->head * dim;
        for (size_t i = 0; i < (size_t)sequence->slots * dim; i++)
            head->keys[i] = float_to_half((half_to_float(head->keys[i]) - mean[i % dim]) * scale[i % dim]);
    }
}

static int measure_keys(struct records *records, struct error *error) {
    size_t numbers = (size_t)records->heads * records->shape.head_dim;
    uint32_t dim = records->shape.head_dim;
    double *counts = calloc(records->heads, sizeof *counts), *sums = calloc(2 * numbers, sizeof *sums);
    records->key_mean = calloc(numbers, sizeof(float));
    records->key_scale = calloc(numbers, sizeof(float));
    int code = counts == NULL || sums == NULL || records->key_mean == NULL || records->key_scale == NULL
                   ? no_memory(error)
                   : 0;
    for (uint32_t s = 0; code == 0 && s < records->count; s++)
        add_keys(records, &records->sequences[s], counts, sums, sums + numbers);
    for (size_t i = 0; code == 0 && i < numbers; i++) {
        double count = counts[i / dim] > 0 ? counts[i / dim] : 1, mean = sums[i] / count;
        double variance = sums[numbers + i] / count - mean * mean;
        records->key_mean[i] = (float)mean;
        records->key_scale[i] = counts[i / dim] > 0 && variance > 1e-6 ? (float)(1 / sqrt(variance)) : 1;
    }
    for (uint32_t s = 0; code == 0 && s < records->count; s++)
        whiten_keys(records, &records->sequences[s]);
    free(counts);
    free(sums);
    return code;
}

/* ---- all ---- */

static struct records *allocate_records(const struct training *training, bool outputs, struct error *error) {
    const struct model_shape *model = &engine_model(training->engine)->shape;
    struct records *records = calloc(1, sizeof *records);
    if (records == NULL) {
        no_memory(error);
        return NULL;
    }
    struct network_shape bare = records->shape = training->network->shape;
    bare.content = 0;
    records->group = model->heads / model->kv_heads;
    records->outputs = outputs;
    records->inputs = network_inputs_count(&bare);
    records->fixed_mask = bare.inputs &= ~(uint32_t)BUDGET_INPUTS;
    records->fixed = network_inputs_count(&bare);
    records->heads = records->shape.layers * records->shape.kv_heads;
    records->heads_most = layers_of_sequence(records, training->options) * records->shape.kv_heads;
    records->slots_most = training->options->prompt_most;
    records->count = training->options->sequences;
    records->sequences = calloc(records->count, sizeof *records->sequences);
    if (records->sequences != NULL)
        return records;
    free(records);
    no_memory(error);
    return NULL;
}

static int open_recorder(struct recorder *recorder, struct error *error) {
    const struct records *records = recorder->records;
    struct head_features *features = &recorder->features;
    size_t slots = align(records->slots_most + recorder->training->options->future);
    *features = (struct head_features){.capacity = (uint32_t)slots,
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
        features->window = recorder->training->options->future;
        features->values = malloc(slots * records->shape.head_dim * sizeof(float));
        features->head_window = malloc(features->window * records->group * slots * sizeof *features->head_window);
        lacking = lacking || features->values == NULL || features->head_window == NULL;
    }
    recorder->inputs = malloc(slots * (records->fixed + 1) * sizeof(float));
    recorder->identity = malloc(slots * sizeof *recorder->identity);
    for (int i = 0; i < 5; i++) {
        recorder->ordered[i] = malloc(slots * sizeof(float));
        lacking = lacking || recorder->ordered[i] == NULL;
    }
    if (lacking || recorder->inputs == NULL || recorder->identity == NULL)
        return no_memory(error);
    for (uint32_t i = 0; i < slots; i++)
        recorder->identity[i] = i;
    int code = tokenizer_list_ends(recorder->training->run->tokenizer, &recorder->ends);
    return code != 0 ? no_memory(error) : 0;
}

static void close_recorder(struct recorder *recorder) {
    struct head_features *features = &recorder->features;
    free(features->positions);
    free(features->sum);
    free(features->squared);
    free(features->entropy);
    free(features->keys);
    free(features->value_norm);
    free(features->output_norm);
    free(features->values);
    free(features->head_window);
    for (int i = 0; i < 5; i++)
        free(recorder->ordered[i]);
    free(recorder->inputs);
    free(recorder->identity);
    token_list_free(&recorder->ends);
}

int records_create(struct training *training, bool outputs, struct records **out, struct error *error) {
    struct recorder recorder = {.training = training};
    recorder.records = allocate_records(training, outputs, error);
    if (recorder.records == NULL)
        return ERROR_MEMORY;
    int code = open_recorder(&recorder, error);
    if (code == 0)
        code = record_all(&recorder, error);
    if (code == 0 && recorder.records->shape.content > 0)
        code = measure_keys(recorder.records, error);
    close_recorder(&recorder);
    *out = code == 0 ? recorder.records : NULL;
    if (code != 0)
        records_free(recorder.records);
    return code;
}
