/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/rank.h"

#include <math.h>
#include <stdlib.h>

#include "engine/random.h"
#include "policy/train/examples.h"
#include "policy/train/foresight.h"
#include "policy/train/listwise.h"

enum { STREAM_RANK = 0x52414E4B, STREAM_PRUNED = 0x52414E50 };
static const double ratio_least = 0.05, ratio_most = 0.4, final_rate = 0.02;
static const double left_out[] = {0, 0.25, 0.6}; /* parts of B; the last one not where a student prunes */
enum { PARTS = 3, PARTS_OF_STUDENTS = 2, TEACHERS = 2 /* rank_pruned: one of so many steps is as in rank */ };
/* rank_pruned: its learning rate, and its sequences of the data: those before are of other stages. */
static const double pruned_rate = 1.0 / 3;
#define PRUNED_FIRST (UINT64_C(1) << 27)

static uint32_t rank_steps(const struct train_options *options) {
    return options->rank_steps;
}

static uint32_t pruned_steps(const struct train_options *options) {
    return options->pruned_steps;
}

static void rank_end(struct training *training) {
    examples_close(training->stage_state);
    training->stage_state = NULL;
}

int rank_begin_on(struct training *training, struct records *records, struct error *error) {
    training->stage_state = examples_open(training, records, error);
    return training->stage_state != NULL ? 0 : error->code;
}

static int rank_begin(struct training *training, struct error *error) {
    struct record_plan plan = {.sequences = training->options->sequences};
    struct records *records;
    int code = records_create(training, &plan, &records, error);
    return code == 0 ? rank_begin_on(training, records, error) : code;
}

static int pruned_begin(struct training *training, struct error *error) {
    struct record_plan plan = {
        .sequences = training->options->pruned_sequences, .first = PRUNED_FIRST, .students = training->stage_network};
    struct records *records;
    int code = records_create(training, &plan, &records, error);
    return code == 0 ? rank_begin_on(training, records, error) : code;
}

/* What the loss depends on beside a head's scores. */
struct rank_context {
    const struct training *training;
    double left_out; /* part of what stays whose order is settled */
};

/* A head of a student kept at the prune before what it has now but for the tokens since. */
static void learn(void *context, struct example *example) {
    const struct rank_context *rank = context;
    uint32_t kept = example->budget, fresh = example->sequence->fresh;
    if (example->sequence->budget > 0)
        kept = example->slots > fresh ? example->slots - fresh : 0;
    example->loss = listwise_loss(example->scores, example->head->targets, example->slots,
        (uint32_t)(rank->left_out * kept), example->factor, example->gradient, example->work, example->order);
}

static void learn_foresight(void *context, struct example *example) {
    const struct training *training = ((const struct rank_context *)context)->training;
    struct foresight_pairs pairs = {training->options->seed, training->stage_step, example->head->head};
    example->loss = foresight_hinge(example->scores, example->head->targets, example->slots, example->budget,
        training->network->protect_recent, &pairs, example->factor, example->gradient, example->work, example->order);
}

static struct adamw_options optimiser(const struct train_options *options, bool students) {
    double peak = (double)options->rank_rate * (students ? pruned_rate : 1);
    return (struct adamw_options){.peak = (float)peak,
        .final = (float)(peak * final_rate),
        .warmup = options->warmup_steps,
        .total = students ? options->pruned_steps : options->rank_steps,
        .beta1 = 0.9f,
        .beta2 = 0.999f,
        .epsilon = 1e-8f,
        .decay = options->weight_decay,
        .clip = options->clip};
}

/* Which example of a sequence of the data: the teacher's, or one of its students'. */
static uint32_t draw_example(const struct records *records, uint32_t word) {
    uint32_t students = records->each - 1;
    return students == 0 || word % TEACHERS == 0 ? 0 : 1 + word / TEACHERS % students;
}

static int rank_step(struct training *training, struct stage_result *result, struct error *error) {
    const struct records *records = examples_records(training->stage_state);
    bool students = records->each > 1;
    uint32_t words[4];
    random_philox(training->options->seed, students ? STREAM_PRUNED : STREAM_RANK, 0, training->stage_step, words);
    uint32_t first = words[0] % (records->count / records->each) * records->each;
    const struct recorded_sequence *sequence = &records->sequences[first + draw_example(records, words[3])];
    double ratio = ratio_least * pow(ratio_most / ratio_least, words[1] * 0x1p-32);
    bool pruned = sequence->budget > 0;
    struct rank_context context = {
        .training = training, .left_out = left_out[words[2] % (pruned ? PARTS_OF_STUDENTS : PARTS)]};
    struct examples_step step = {.sequence = sequence,
        .budget = pruned ? sequence->budget : records_budget(ratio, sequence->seen),
        .learn = training->options->method == TRAIN_FORESIGHT ? learn_foresight : learn,
        .context = &context,
        .optimiser = optimiser(training->options, students)};
    int code = examples_step(training->stage_state, &step, error);
    if (code == 0)
        *result = step.result;
    return code;
}

const struct train_stage stage_rank = {
    .name = "rank", .steps = rank_steps, .begin = rank_begin, .step = rank_step, .end = rank_end};
const struct train_stage stage_rank_pruned = {.name = "rank_pruned",
    .keeps_network = true,
    .steps = pruned_steps,
    .begin = pruned_begin,
    .step = rank_step,
    .end = rank_end};
