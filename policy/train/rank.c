/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/rank.h"

#include <math.h>
#include <stdlib.h>

#include "engine/random.h"
#include "policy/train/examples.h"
#include "policy/train/foresight.h"
#include "policy/train/listwise.h"

enum { STREAM_RANK = 0x52414E4B };
static const double ratio_least = 0.05, ratio_most = 0.4, final_rate = 0.02;
static const double left_out[] = {0, 0.25, 0.6}; /* parts of B */

static uint32_t rank_steps(const struct train_options *options) {
    return options->rank_steps;
}

static void rank_end(struct training *training) {
    examples_close(training->stage_state);
    training->stage_state = NULL;
}

int rank_begin_on(struct training *training, struct records *records, struct error *error) {
    training->stage_state = examples_open(training, records, error);
    return training->stage_state != NULL ? 0 : ERROR_MEMORY;
}

static int rank_begin(struct training *training, struct error *error) {
    struct records *records;
    int code = records_create(training, false, &records, error);
    return code == 0 ? rank_begin_on(training, records, error) : code;
}

/* What the loss depends on beside a head's scores. */
struct rank_context {
    const struct training *training;
    uint32_t left_out;
};

static void learn(void *context, struct example *example) {
    const struct rank_context *rank = context;
    example->loss = listwise_loss(example->scores, example->head->targets, example->slots, rank->left_out,
        example->factor, example->gradient, example->work, example->order);
}

static void learn_foresight(void *context, struct example *example) {
    const struct training *training = ((const struct rank_context *)context)->training;
    struct foresight_pairs pairs = {training->options->seed, training->stage_step, example->head->head};
    example->loss = foresight_hinge(example->scores, example->head->targets, example->slots, example->budget,
        training->network->protect_recent, &pairs, example->factor, example->gradient, example->work, example->order);
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
    const struct records *records = examples_records(training->stage_state);
    struct rank_context context = {.training = training};
    uint32_t words[4];
    random_philox(training->options->seed, STREAM_RANK, 0, training->stage_step, words);
    struct examples_step step = {.sequence = &records->sequences[words[0] % records->count],
        .learn = training->options->method == TRAIN_FORESIGHT ? learn_foresight : learn,
        .context = &context,
        .optimiser = optimiser(training->options)};
    double ratio = ratio_least * pow(ratio_most / ratio_least, words[1] * 0x1p-32);
    step.budget = records_budget(ratio, step.sequence->slots);
    context.left_out = (uint32_t)(left_out[words[2] % 3] * step.budget);
    int code = examples_step(training->stage_state, &step, error);
    if (code != 0)
        return code;
    result->loss = step.loss;
    result->learning_rate = step.learning_rate;
    result->gradient_norm = step.gradient_norm;
    return 0;
}

const struct train_stage stage_rank = {
    .name = "rank", .steps = rank_steps, .begin = rank_begin, .step = rank_step, .end = rank_end};
