/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/rank.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cpu/threads.h"
#include "engine/random.h"
#include "policy/train/listwise.h"
#include "policy/train/start.h"

enum { STREAM_RANK = 0x52414E4B, CHUNKS = 8 /* of a step's heads: sums are in their order, whatever the threads */ };
static const double ratio_least = 0.05, ratio_most = 0.4, final_rate = 0.02;
static const double left_out[] = {0, 0.25, 0.6}; /* parts of B */

/* Work space of one thread. */
struct rank_worker {
    struct network_pass *pass;
    float *inputs, *keys, *scores, *gradient;
    double *work;
    uint32_t *order;
};

struct rank_state {
    struct training *training;
    struct records *records;
    struct policy_network *network; /* with content maps of whitened keys */
    struct rank_worker *workers;    /* [threads] */
    struct gradient *gradients[CHUNKS];
    double losses[CHUNKS];
    /* Of the step. */
    const struct recorded_sequence *sequence;
    uint32_t budget, left_out;
    uint32_t first_chunk;
};

static uint32_t rank_steps(const struct train_options *options) {
    return options->rank_steps;
}

/* ---- begin and end ---- */

static void close_worker(struct rank_worker *worker) {
    network_pass_free(worker->pass);
    free(worker->inputs);
    free(worker->keys);
    free(worker->scores);
    free(worker->gradient);
    free(worker->work);
    free(worker->order);
}

static bool open_worker(const struct records *records, struct rank_worker *worker) {
    size_t slots = records->slots_most, dim = records->shape.content > 0 ? records->shape.head_dim : 0;
    worker->pass = network_pass_create(&records->shape, (uint32_t)slots);
    worker->inputs = malloc((slots * records->inputs + 1) * sizeof(float));
    worker->keys = malloc((slots * dim + 1) * sizeof(float));
    worker->scores = malloc(slots * sizeof(float));
    worker->gradient = malloc(slots * sizeof(float));
    worker->work = malloc(slots * sizeof(double));
    worker->order = malloc(slots * sizeof(uint32_t));
    return worker->pass != NULL && worker->inputs != NULL && worker->keys != NULL && worker->scores != NULL &&
           worker->gradient != NULL && worker->work != NULL && worker->order != NULL;
}

static void rank_end(struct training *training) {
    struct rank_state *state = training->stage_state;
    if (state == NULL)
        return;
    for (uint32_t i = 0; state->workers != NULL && i < thread_pool_size(training->threads); i++)
        close_worker(&state->workers[i]);
    for (int c = 0; c < CHUNKS; c++)
        free(state->gradients[c]);
    free(state->workers);
    network_release(state->network);
    records_free(state->records);
    free(state);
    training->stage_state = NULL;
}

static int open_work_space(struct rank_state *state, struct error *error) {
    struct training *training = state->training;
    uint32_t threads = thread_pool_size(training->threads);
    bool there = true;
    state->workers = calloc(threads, sizeof *state->workers);
    state->network = network_copy(training->network);
    for (int c = 0; c < CHUNKS; c++) {
        state->gradients[c] = gradient_create(training->network);
        there = there && state->gradients[c] != NULL;
    }
    there = there && state->workers != NULL && state->network != NULL;
    for (uint32_t i = 0; there && i < threads; i++)
        there = open_worker(state->records, &state->workers[i]);
    return there ? 0 : error_set(error, ERROR_MEMORY, "no memory for the stage rank");
}

/* What the data decides of the first network. */
static int start_network(const struct rank_state *state, struct policy_network *network, struct error *error) {
    if (network->shape.features == FEATURES_PAPER)
        return 0;
    int code = records_normalise(state->records, network, error);
    if (code != 0)
        return code;
    network_start_skip(network);
    if (network->shape.content > 0) {
        network_start_content(network, state->training->options->seed);
        records_unwhiten(state->records, network);
    }
    return 0;
}

int rank_begin_on(struct training *training, struct records *records, struct error *error) {
    struct rank_state *state = calloc(1, sizeof *state);
    if (state == NULL) {
        records_free(records);
        return error_set(error, ERROR_MEMORY, "no memory for the stage rank");
    }
    state->training = training;
    state->records = records;
    training->stage_state = state;
    int code = training->stage_step == 0 ? start_network(state, training->network, error) : 0;
    return code == 0 ? open_work_space(state, error) : code;
}

static int rank_begin(struct training *training, struct error *error) {
    struct records *records;
    int code = records_create(training, &records, error);
    return code == 0 ? rank_begin_on(training, records, error) : code;
}

/* ---- a step ---- */

/* Adds a head's gradient, scaled for the mean over heads; returns its loss. */
static double learn_head(
    struct rank_state *state, struct rank_worker *worker, const struct recorded_head *head, struct gradient *gradient) {
    const struct recorded_sequence *sequence = state->sequence;
    records_inputs(state->records, sequence, head, state->budget, worker->inputs);
    if (head->keys != NULL)
        records_keys(state->records, sequence, head, worker->keys);
    struct train_slots slots = {.count = sequence->slots,
        .inputs = worker->inputs,
        .keys = head->keys != NULL ? worker->keys : NULL,
        .standard = head->standard};
    network_forward(state->network, head->head, &slots, worker->pass, worker->scores);
    double loss = listwise_loss(worker->scores, head->targets, sequence->slots, state->left_out,
        1.0 / sequence->heads_count, worker->gradient, worker->work, worker->order);
    network_backward(state->network, head->head, &slots, worker->pass, worker->gradient, gradient);
    return loss;
}

static void learn_chunk(void *context, uint32_t chunk, uint32_t thread) {
    struct rank_state *state = context;
    chunk += state->first_chunk;
    gradient_clear(state->gradients[chunk]);
    state->losses[chunk] = 0;
    for (uint32_t h = chunk; h < state->sequence->heads_count; h += CHUNKS)
        state->losses[chunk] +=
            learn_head(state, &state->workers[thread], &state->sequence->heads[h], state->gradients[chunk]);
}

/* All chunks, giving way in between where others want the processor. */
static int learn(struct rank_state *state) {
    struct training *training = state->training;
    uint32_t slice = training->run->background != NULL ? thread_pool_size(training->threads) : CHUNKS;
    for (uint32_t first = 0; first < CHUNKS; first += slice) {
        state->first_chunk = first;
        thread_pool_run(training->threads, CHUNKS - first < slice ? CHUNKS - first : slice, learn_chunk, state);
        int code = train_pause(training);
        if (code != 0)
            return code;
    }
    return 0;
}

static void draw_step(struct rank_state *state) {
    const struct training *training = state->training;
    uint32_t words[4];
    random_philox(training->options->seed, STREAM_RANK, 0, training->stage_step, words);
    state->sequence = &state->records->sequences[words[0] % state->records->count];
    double ratio = ratio_least * pow(ratio_most / ratio_least, words[1] * 0x1p-32);
    state->budget = records_budget(ratio, state->sequence->slots);
    state->left_out = (uint32_t)(left_out[words[2] % 3] * state->budget);
}

/* The trained arrays of one network into the other, of the same shape. */
static void copy_arrays(const struct policy_network *from, struct policy_network *to) {
    struct network_array source, target;
    for (uint32_t i = 0; network_array(from, i, &source) && network_array(to, i, &target); i++)
        memcpy(target.values, source.values, source.count * sizeof *source.values);
}

static struct adamw_options optimiser(const struct train_options *options) {
    return (struct adamw_options){.peak = options->rank_rate,
        .final = (float)(options->rank_rate * final_rate),
        .warmup = options->warmup_steps,
        .total = options->rank_steps,
        .beta1 = 0.9f,
        .beta2 = 0.999f,
        .epsilon = 1e-8f,
        .decay = options->weight_decay,
        .clip = options->clip};
}

static int rank_step(struct training *training, struct stage_result *result, struct error *error) {
    struct rank_state *state = training->stage_state;
    struct adamw_options options = optimiser(training->options);
    bool content = training->network->shape.content > 0;
    draw_step(state);
    copy_arrays(training->network, state->network);
    if (content)
        records_whiten(state->records, state->network);
    int code = learn(state);
    if (code != 0)
        return error_set(error, code, "stopped");
    double loss = 0;
    gradient_clear(training->gradient);
    for (int c = 0; c < CHUNKS; c++) {
        loss += state->losses[c];
        gradient_add(training->gradient, state->gradients[c]);
    }
    result->loss = loss / state->sequence->heads_count;
    result->learning_rate = adamw_rate(&options, training->adamw->step);
    result->gradient_norm = adamw_update(training->adamw, &options, training->gradient, state->network);
    if (content)
        records_unwhiten(state->records, state->network);
    copy_arrays(state->network, training->network);
    return 0;
}

const struct train_stage stage_rank = {
    .name = "rank", .steps = rank_steps, .begin = rank_begin, .step = rank_step, .end = rank_end};
