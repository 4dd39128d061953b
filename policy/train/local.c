/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/local.h"

#include <stdlib.h>

#include "engine/cpu/threads.h"
#include "engine/random.h"
#include "policy/train/baseline.h"
#include "policy/train/choice.h"
#include "policy/train/examples.h"
#include "policy/train/output.h"
#include "policy/train/reinforce.h"
#include "policy/train/rollout.h"

enum { STREAM_LOCAL = 0x4C4F4341, STREAM_SET = 0x4C4F4345 };

/* Scratch of one thread. */
struct local_worker {
    float *output;    /* output_work */
    uint8_t *keep;    /* [slots] */
    float *gradients; /* [students][slots] */
};

struct local_state {
    struct training *training;
    struct examples *examples;
    float *grams;
    uint32_t students, slots_most;
    uint32_t *positions;          /* [slots] 0, 1, 2, ... */
    struct local_worker *workers; /* [threads] */
    _Atomic int failure;          /* of a draw */
};

static uint32_t local_steps(const struct train_options *options) {
    return options->local_steps;
}

/* ---- begin and end ---- */

static void local_end(struct training *training) {
    struct local_state *state = training->stage_state;
    if (state == NULL)
        return;
    for (uint32_t i = 0; state->workers != NULL && i < thread_pool_size(training->threads); i++) {
        free(state->workers[i].output);
        free(state->workers[i].keep);
        free(state->workers[i].gradients);
    }
    free(state->workers);
    free(state->positions);
    free(state->grams);
    examples_close(state->examples);
    free(state);
    training->stage_state = NULL;
}

static bool open_workers(struct local_state *state, const struct records *records) {
    uint32_t threads = thread_pool_size(state->training->threads), slots = records->slots_most;
    state->slots_most = slots;
    state->workers = calloc(threads, sizeof *state->workers);
    state->positions = malloc(slots * sizeof *state->positions);
    bool there = state->workers != NULL && state->positions != NULL;
    for (uint32_t i = 0; there && i < slots; i++)
        state->positions[i] = i;
    for (uint32_t i = 0; there && i < threads; i++) {
        struct local_worker *worker = &state->workers[i];
        worker->output = malloc(output_work(records, slots) * sizeof *worker->output);
        worker->keep = malloc(slots);
        worker->gradients = malloc((size_t)state->students * slots * sizeof *worker->gradients);
        there = worker->output != NULL && worker->keep != NULL && worker->gradients != NULL;
    }
    return there;
}

static int local_begin(struct training *training, struct error *error) {
    uint32_t students = training->options->students;
    struct record_plan plan = {.sequences = training->options->sequences, .outputs = true};
    struct records *records;
    struct local_state *state = calloc(1, sizeof *state);
    training->stage_state = state;
    if (state == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for the stage local");
    state->training = training;
    state->students = students < ROLLOUT_STUDENTS_MAX ? students : ROLLOUT_STUDENTS_MAX;
    state->grams = output_grams(training, engine_model(training->engine), error);
    if (state->grams == NULL)
        return error->code;
    int code = records_create(training, &plan, &records, error);
    if (code != 0)
        return code;
    state->examples = examples_open(training, records, error);
    if (state->examples == NULL)
        return error->code;
    return open_workers(state, records) ? 0 : error_set(error, ERROR_MEMORY, "no memory for the stage local");
}

/* ---- a step ---- */

/* A draw's noise. */
struct local_noise {
    const struct training *training;
    uint32_t student;
    uint64_t head;
};

static double uniform(void *context, uint32_t head, uint32_t slot) {
    const struct local_noise *noise = context;
    (void)head;
    return random_uniform_fine(noise->training->options->seed, STREAM_SET + noise->student,
        (uint32_t)noise->training->stage_step, noise->head << 32 | slot);
}

static void protect(const struct training *training, uint32_t slots, struct choice *choice) {
    const struct policy_network *network = training->network;
    choice->sinks = network->protect_sinks;
    choice->recent_from = slots > network->protect_recent ? slots - network->protect_recent : 0;
}

/* One draw: its gradient [slots]; returns its reward. */
static double draw(struct local_state *state, const struct example *example, const struct output *output,
    uint32_t student, float *gradient, double *entropy) {
    const struct train_options *options = state->training->options;
    uint8_t *keep = state->workers[example->thread].keep;
    struct local_noise noise = {state->training, student, example->head->head};
    struct choice_head head = {.slots = example->slots,
        .scores = example->scores,
        .positions = state->positions,
        .keep = keep,
        .gradient = gradient};
    struct choice choice = {.sampler = options->sampler,
        .temperature = options->temperature,
        .total = example->budget,
        .uniform = uniform,
        .context = &noise};
    protect(state->training, example->slots, &choice);
    if (choice_draw(&choice, &head, 1, NULL) != 0) {
        state->failure = ERROR_MEMORY;
        return 0;
    }
    *entropy = choice.entropy;
    return -output_error(output, keep);
}

static void learn(void *context, struct example *example) {
    struct local_state *state = context;
    struct local_worker *worker = &state->workers[example->thread];
    double rewards[ROLLOUT_STUDENTS_MAX], advantages[ROLLOUT_STUDENTS_MAX];
    struct output output;
    output_open(
        examples_records(state->examples), example->sequence, example->head, state->grams, worker->output, &output);
    example->reward = example->entropy = 0;
    for (uint32_t s = 0; s < state->students; s++) {
        double entropy = 0;
        rewards[s] = draw(state, example, &output, s, worker->gradients + (size_t)s * example->slots, &entropy);
        example->reward += rewards[s] / state->students;
        example->entropy += entropy / state->students;
        rewards[s] += (double)state->training->options->entropy * entropy;
    }
    baseline_leave_one_out(rewards, state->students, advantages);
    for (uint32_t s = 0; s < state->students; s++) {
        double factor = -advantages[s] / state->students * example->factor;
        const float *gradient = worker->gradients + (size_t)s * example->slots;
        for (uint32_t i = 0; i < example->slots; i++)
            example->gradient[i] += (float)(factor * (double)gradient[i]);
    }
}

static int local_step(struct training *training, struct stage_result *result, struct error *error) {
    struct local_state *state = training->stage_state;
    const struct train_options *options = training->options;
    const struct records *records = examples_records(state->examples);
    uint32_t words[4];
    random_philox(options->seed, STREAM_LOCAL, 0, training->stage_step, words);
    struct examples_step step = {.sequence = &records->sequences[words[0] % records->count],
        .learn = learn,
        .context = state,
        .failure = &state->failure,
        .optimiser = reinforce_optimiser(options, options->local_steps)};
    step.budget = records_budget(options->ratios[words[1] % options->ratios_count], step.sequence->seen);
    int code = examples_step(state->examples, &step, error);
    if (code == 0)
        *result = step.result;
    return code;
}

const struct train_stage stage_local = {
    .name = "local", .steps = local_steps, .begin = local_begin, .step = local_step, .end = local_end};
