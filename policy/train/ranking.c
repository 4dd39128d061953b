/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/ranking.h"

#include <stdlib.h>

#include "engine/cpu/threads.h"
#include "engine/random.h"
#include "policy/train/baseline.h"
#include "policy/train/examples.h"
#include "policy/train/reinforce.h"
#include "policy/train/rollout.h"
#include "policy/train/subset.h"
#include "policy/train/top.h"

enum { STREAM_RANKING = 0x524B4E47, STREAM_ORDER = 0x524B4E4B };

/* Scratch of one thread. */
struct ranking_worker {
    double *uniforms;        /* [slots] */
    double *work;            /* [2 slots] */
    uint32_t *best, *orders; /* [slots], [students][slots] */
};

struct ranking_state {
    struct training *training;
    struct examples *examples;
    uint32_t students;
    struct ranking_worker *workers; /* [threads] */
    /* Of the step. */
    uint32_t budgets[TRAIN_RATIOS_MAX], budgets_count;
};

/* ---- begin and end ---- */

void ranking_end(struct training *training) {
    struct ranking_state *state = training->stage_state;
    if (state == NULL)
        return;
    for (uint32_t i = 0; state->workers != NULL && i < thread_pool_size(training->threads); i++) {
        free(state->workers[i].uniforms);
        free(state->workers[i].work);
        free(state->workers[i].best);
        free(state->workers[i].orders);
    }
    free(state->workers);
    examples_close(state->examples);
    free(state);
    training->stage_state = NULL;
}

static bool open_workers(struct ranking_state *state, size_t slots) {
    uint32_t threads = thread_pool_size(state->training->threads);
    state->workers = calloc(threads, sizeof *state->workers);
    bool there = state->workers != NULL;
    for (uint32_t i = 0; there && i < threads; i++) {
        struct ranking_worker *worker = &state->workers[i];
        worker->uniforms = malloc(slots * sizeof *worker->uniforms);
        worker->work = malloc(2 * slots * sizeof *worker->work);
        worker->best = malloc(slots * sizeof *worker->best);
        worker->orders = malloc(state->students * slots * sizeof *worker->orders);
        there = worker->uniforms != NULL && worker->work != NULL && worker->best != NULL && worker->orders != NULL;
    }
    return there;
}

int ranking_begin(struct training *training, struct error *error) {
    uint32_t students = training->options->students;
    struct record_plan plan = {.sequences = training->options->sequences};
    struct records *records;
    struct ranking_state *state = calloc(1, sizeof *state);
    training->stage_state = state;
    if (state == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for reward ranking");
    state->training = training;
    state->students = students < ROLLOUT_STUDENTS_MAX ? students : ROLLOUT_STUDENTS_MAX;
    int code = records_create(training, &plan, &records, error);
    if (code != 0)
        return code;
    state->examples = examples_open(training, records, error);
    if (state->examples == NULL)
        return error->code;
    return open_workers(state, records->slots_most) ? 0
                                                    : error_set(error, ERROR_MEMORY, "no memory for reward ranking");
}

/* ---- a step ---- */

double ranking_utility(
    const float *worth, const uint32_t *order, const uint32_t *best, const uint32_t *budgets, uint32_t count) {
    double utility = 0, kept = 0, most = 0;
    uint32_t at = 0;
    for (uint32_t b = 0; b < count; b++) {
        for (; at < budgets[b]; at++) {
            kept += (double)worth[order[at]];
            most += (double)worth[best[at]];
        }
        utility += (most > 0 ? kept / most : 1) / count;
    }
    return utility;
}

static void draw_uniforms(
    const struct training *training, uint32_t student, uint32_t head, uint32_t slots, double *uniforms) {
    for (uint32_t i = 0; i < slots; i++)
        uniforms[i] = random_uniform_fine(
            training->options->seed, STREAM_ORDER + student, (uint32_t)training->stage_step, (uint64_t)head << 32 | i);
}

static void learn(void *context, struct example *example) {
    const struct ranking_state *state = context;
    const struct training *training = state->training;
    struct ranking_worker *worker = &state->workers[example->thread];
    uint32_t slots = example->slots, students = state->students, length = state->budgets[state->budgets_count - 1];
    const float *worth = example->head->targets;
    double rewards[ROLLOUT_STUDENTS_MAX];
    for (uint32_t i = 0; i < slots; i++)
        example->work[i] = (double)worth[i];
    top_of(example->work, slots, length, worker->best);
    example->reward = example->entropy = 0;
    for (uint32_t s = 0; s < students; s++) {
        uint32_t *order = worker->orders + (size_t)s * slots;
        draw_uniforms(training, s, example->head->head, slots, worker->uniforms);
        gumbel_top(example->scores, slots, worker->uniforms, length, order, worker->work);
        double logprob = plackett_luce_logprob(example->scores, slots, order, length, worker->work);
        double entropy = entropy_surrogate(logprob, length);
        rewards[s] = ranking_utility(worth, order, worker->best, state->budgets, state->budgets_count);
        example->reward += rewards[s] / students;
        example->entropy += entropy / students;
        rewards[s] += (double)training->options->entropy * entropy;
    }
    baseline_leave_one_out(rewards, students, rewards);
    for (uint32_t s = 0; s < students; s++)
        plackett_luce_gradient(example->scores, slots, worker->orders + (size_t)s * slots, length,
            -rewards[s] / students / length * example->factor, example->gradient, worker->work);
}

static int compare(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

/* Budgets of all ratios, ascending. */
static void set_budgets(struct ranking_state *state, uint32_t slots) {
    const struct train_options *options = state->training->options;
    state->budgets_count = options->ratios_count;
    for (uint32_t i = 0; i < options->ratios_count; i++) {
        uint32_t budget = records_budget(options->ratios[i], slots);
        state->budgets[i] = budget < slots ? budget : slots;
    }
    qsort(state->budgets, state->budgets_count, sizeof *state->budgets, compare);
}

int ranking_step(struct training *training, struct stage_result *result, struct error *error) {
    struct ranking_state *state = training->stage_state;
    const struct train_options *options = training->options;
    const struct records *records = examples_records(state->examples);
    uint32_t words[4];
    random_philox(options->seed, STREAM_RANKING, 0, training->stage_step, words);
    struct examples_step step = {.sequence = &records->sequences[words[0] % records->count],
        .learn = learn,
        .context = state,
        .optimiser = reinforce_optimiser(options, options->kl_steps)};
    set_budgets(state, step.sequence->seen);
    step.budget = state->budgets[state->budgets_count - 1];
    int code = examples_step(state->examples, &step, error);
    if (code == 0)
        *result = step.result;
    return code;
}
