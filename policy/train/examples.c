/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/examples.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cpu/threads.h"
#include "policy/train/start.h"

enum { CHUNKS = 8 /* of a step's heads: sums are in their order, whatever the threads */ };

/* Work space of one thread. */
struct example_worker {
    struct network_pass *pass;
    float *inputs, *keys, *scores, *gradient;
    double *work;
    uint32_t *order;
};

struct examples {
    struct training *training;
    struct records *records;
    struct policy_network *network; /* with content maps of whitened keys */
    struct example_worker *workers; /* [threads] */
    struct gradient *gradients[CHUNKS];
    double losses[CHUNKS], rewards[CHUNKS], entropies[CHUNKS];
    /* Of the step. */
    const struct examples_step *step;
    uint32_t first_chunk;
};

/* ---- begin and end ---- */

static void close_worker(struct example_worker *worker) {
    network_pass_free(worker->pass);
    free(worker->inputs);
    free(worker->keys);
    free(worker->scores);
    free(worker->gradient);
    free(worker->work);
    free(worker->order);
}

static bool open_worker(const struct records *records, struct example_worker *worker) {
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

void examples_close(struct examples *state) {
    if (state == NULL)
        return;
    for (uint32_t i = 0; state->workers != NULL && i < thread_pool_size(state->training->threads); i++)
        close_worker(&state->workers[i]);
    for (int c = 0; c < CHUNKS; c++)
        free(state->gradients[c]);
    free(state->workers);
    network_release(state->network);
    records_free(state->records);
    free(state);
}

const struct records *examples_records(const struct examples *state) {
    return state->records;
}

static int open_work_space(struct examples *state, struct error *error) {
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
    return there ? 0 : error_set(error, ERROR_MEMORY, "no memory for steps on recorded examples");
}

/* What the data decides of the first network. */
static int start_network(const struct examples *state, struct error *error) {
    struct policy_network *network = state->training->network;
    if (network->shape.features == FEATURES_PAPER)
        return 0;
    int code = records_normalise(state->training, state->records, error);
    if (code != 0)
        return code == ERROR_CANCELLED ? error_set(error, code, "stopped") : code;
    network_start_skip(network);
    if (network->shape.content > 0) {
        network_start_content(network, state->training->options->seed);
        records_unwhiten(state->records, network);
    }
    return 0;
}

struct examples *examples_open(struct training *training, struct records *records, struct error *error) {
    struct examples *state = calloc(1, sizeof *state);
    if (state == NULL) {
        records_free(records);
        error_set(error, ERROR_MEMORY, "no memory for steps on recorded examples");
        return NULL;
    }
    state->training = training;
    state->records = records;
    bool first = training->step == 0 && training->stage_step == 0;
    int code = first ? start_network(state, error) : 0;
    if (code == 0)
        code = open_work_space(state, error);
    if (code == 0)
        return state;
    examples_close(state);
    return NULL;
}

/* ---- a step ---- */

/* Adds a head's gradient and what it reports. */
static void learn_head(struct examples *state, uint32_t thread, const struct recorded_head *head, uint32_t chunk) {
    const struct examples_step *step = state->step;
    const struct recorded_sequence *sequence = step->sequence;
    struct example_worker *worker = &state->workers[thread];
    records_inputs(state->records, sequence, head, step->budget, worker->inputs);
    if (head->keys != NULL)
        records_keys(state->records, head, worker->keys);
    struct train_slots slots = {.count = head->slots,
        .inputs = worker->inputs,
        .keys = head->keys != NULL ? worker->keys : NULL,
        .standard = head->standard};
    network_forward(state->network, head->head, &slots, worker->pass, worker->scores);
    struct example example = {.sequence = sequence,
        .head = head,
        .slots = head->slots,
        .budget = step->budget,
        .factor = 1.0 / sequence->heads_count,
        .loss = NAN,
        .reward = NAN,
        .entropy = NAN,
        .scores = worker->scores,
        .thread = thread,
        .work = worker->work,
        .order = worker->order,
        .gradient = worker->gradient};
    memset(worker->gradient, 0, head->slots * sizeof *worker->gradient);
    step->learn(step->context, &example);
    state->losses[chunk] += example.loss;
    state->rewards[chunk] += example.reward;
    state->entropies[chunk] += example.entropy;
    network_backward(state->network, head->head, &slots, worker->pass, worker->gradient, state->gradients[chunk]);
}

static void learn_chunk(void *context, uint32_t chunk, uint32_t thread) {
    struct examples *state = context;
    const struct recorded_sequence *sequence = state->step->sequence;
    chunk += state->first_chunk;
    gradient_clear(state->gradients[chunk]);
    state->losses[chunk] = state->rewards[chunk] = state->entropies[chunk] = 0;
    for (uint32_t h = chunk; h < sequence->heads_count; h += CHUNKS)
        learn_head(state, thread, &sequence->heads[h], chunk);
}

/* All chunks, giving way in between where others want the processor. */
static int learn(struct examples *state) {
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

/* The trained arrays of one network into the other, of the same shape. */
static void copy_arrays(const struct policy_network *from, struct policy_network *to) {
    struct network_array source, target;
    for (uint32_t i = 0; network_array(from, i, &source) && network_array(to, i, &target); i++)
        memcpy(target.values, source.values, source.count * sizeof *source.values);
}

int examples_step(struct examples *state, struct examples_step *step, struct error *error) {
    struct training *training = state->training;
    bool content = training->network->shape.content > 0;
    state->step = step;
    copy_arrays(training->network, state->network);
    if (content)
        records_whiten(state->records, state->network);
    int code = learn(state);
    if (code != 0)
        return error_set(error, code, "stopped");
    if (step->failure != NULL && *step->failure != 0)
        return error_set(error, *step->failure, "no memory for a step on recorded examples");
    struct stage_result *result = &step->result;
    *result = (struct stage_result){.loss = 0};
    gradient_clear(training->gradient);
    for (int c = 0; c < CHUNKS; c++) {
        result->loss += state->losses[c] / step->sequence->heads_count;
        result->reward += state->rewards[c] / step->sequence->heads_count;
        result->entropy += state->entropies[c] / step->sequence->heads_count;
        gradient_add(training->gradient, state->gradients[c]);
    }
    result->learning_rate = adamw_rate(&step->optimiser, training->adamw->step);
    result->gradient_norm = adamw_update(training->adamw, &step->optimiser, training->gradient, state->network);
    if (content)
        records_unwhiten(state->records, state->network);
    copy_arrays(state->network, training->network);
    return 0;
}
