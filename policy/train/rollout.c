/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/rollout.h"

#include <math.h>
#include <stdlib.h>

#include "engine/kv_cache.h"

static const double reward_offset = 0.02;

struct rollout_plan rollout_plan_of(const struct training *training, const struct dataset_sequence *data,
    const struct rollout_student *students, uint32_t students_count) {
    uint32_t steps = training->options->rollout;
    return (struct rollout_plan){.prompt = data->tokens,
        .prompt_tokens = data->prompt,
        .continuation = data->own || data->count < data->prompt + steps ? NULL : data->tokens + data->prompt,
        .steps = steps,
        .students = students,
        .students_count = students_count};
}

double rollout_reward(const float *kl, uint32_t steps) {
    double sum = 0;
    for (uint32_t t = 1; t < steps; t++)
        sum += (double)kl[t];
    return -log(sum / (steps - 1) + reward_offset);
}

/* A rollout at work. */
struct rollout {
    struct training *training;
    const struct rollout_plan *plan;
    struct token_list ends; /* not chosen by the teacher */
    struct sequence *teacher;
    struct sequence *students[ROLLOUT_STUDENTS_MAX];
    uint32_t prunes[ROLLOUT_STUDENTS_MAX]; /* done */
    int32_t next;                          /* token to feed */
    uint64_t tokens;                       /* computed */
    float *logits;                         /* [vocabulary]; NULL: no entropies are wanted */
};

static void free_sequences(struct rollout *rollout) {
    sequence_free(rollout->teacher);
    rollout->teacher = NULL;
    for (uint32_t i = 0; i < rollout->plan->students_count; i++) {
        sequence_free(rollout->students[i]);
        rollout->students[i] = NULL;
    }
}

/* ---- the prompt ---- */

/* Feeds the prompt to a sequence, in as many calls as prunes and turns ask for. *row: of its last token. prune: those
 * of the prompt itself are done, but the one after it is not. */
static int feed_prompt(struct rollout *rollout, struct sequence *sequence, uint32_t *row, struct error *error) {
    struct training *training = rollout->training;
    const struct rollout_plan *plan = rollout->plan;
    int code = 0;
    while (code == 0 && sequence_length(sequence) < plan->prompt_tokens) {
        uint32_t first = sequence_length(sequence), room = sequence_room(sequence);
        uint32_t count = plan->prompt_tokens - first;
        uint32_t rows = background_rows(training->run->background, engine_batch_rows(training->engine));
        count = count < rows ? count : rows;
        count = count < room ? count : room;
        bool last = first + count == plan->prompt_tokens;
        struct batch_item item = {.sequence = sequence,
            .tokens = plan->prompt + first,
            .count = count,
            .want = last && row != NULL ? WANT_LAST : WANT_NONE};
        code = engine_forward(training->engine, &item, 1, error);
        rollout->tokens += count;
        if (code == 0 && last && row != NULL)
            *row = item.first_row;
        if (code == 0 && !last) {
            code = engine_prune(training->engine, &sequence, 1, error);
            if (code == 0)
                code = train_yield(training);
        }
    }
    return code;
}

/* The token that follows: the plan's, or the teacher's choice at a wanted row. */
static int choose_next(struct rollout *rollout, uint32_t step, uint32_t row, struct error *error) {
    if (rollout->plan->continuation != NULL) {
        rollout->next = rollout->plan->continuation[step];
        return 0;
    }
    struct sample_params greedy = {.temperature = 0,
        .top_p = 1,
        .forced = -1,
        .banned = rollout->ends.ids,
        .banned_count = (uint32_t)rollout->ends.count};
    struct sample_result result;
    int code = engine_sample(rollout->training->engine, &row, &greedy, 1, &result, error);
    rollout->next = result.token;
    return code;
}

static int start_teacher(struct rollout *rollout, struct error *error) {
    uint32_t row = 0;
    rollout->teacher = sequence_create(rollout->training->engine);
    if (rollout->teacher == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a sequence");
    int code = feed_prompt(rollout, rollout->teacher, &row, error);
    return code == 0 ? choose_next(rollout, 0, row, error) : code;
}

/* Where the first student keeps its whole prompt until the prompt's end, the teacher is a fork of it. */
static int fork_teacher(struct rollout *rollout, uint32_t row, struct error *error) {
    struct sequence *fork = sequence_fork(rollout->students[0]);
    if (fork == NULL || sequence_drop_policy(fork, NULL) != 0) {
        sequence_free(fork);
        return start_teacher(rollout, error);
    }
    rollout->teacher = fork;
    return choose_next(rollout, 0, row, error);
}

/* A student by itself. *row: as feed_prompt's. */
static int start_student(struct rollout *rollout, uint32_t index, uint32_t *row, struct error *error) {
    const struct rollout_plan *plan = rollout->plan;
    struct sequence *sequence = sequence_create(rollout->training->engine);
    rollout->students[index] = sequence;
    if (sequence == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a sequence");
    int code = sequence_set_policy(sequence, &plan->students[index].settings, plan->prompt_tokens, error);
    if (code == 0 && sequence_reuse_prefix(sequence, plan->prompt, plan->prompt_tokens) > 0)
        code = train_yield(rollout->training);
    return code == 0 ? feed_prompt(rollout, sequence, row, error) : code;
}

/* All sequences at the end of the prompt. Forks of the first student before its first prune, where the settings allow
 * that; else the prompt is computed again. */
static int start_sequences(struct rollout *rollout, struct error *error) {
    const struct rollout_plan *plan = rollout->plan;
    uint32_t row = 0;
    int code = start_student(rollout, 0, &row, error);
    if (code == 0)
        code = fork_teacher(rollout, row, error);
    struct sequence *stem = rollout->students[0];
    for (uint32_t i = 1; code == 0 && i < plan->students_count; i++) {
        struct sequence *fork = sequence_fork(stem);
        if (fork != NULL && sequence_change_policy(fork, &plan->students[i].settings, NULL) == 0) {
            rollout->students[i] = fork;
            continue;
        }
        sequence_free(fork);
        code = train_yield(rollout->training);
        if (code == 0)
            code = start_student(rollout, i, NULL, error);
        stem = rollout->students[i];
    }
    return code;
}

/* ---- steps ---- */

/* Prunes those that are due: by their own choice, or by their policies. One after the other: the first prune of a long
 * prompt takes as long as a batch of tokens. Rows that were wanted are lost. */
static int prune_students(struct rollout *rollout, struct error *error) {
    const struct rollout_plan *plan = rollout->plan;
    int code = 0;
    for (uint32_t i = 0; code == 0 && i < plan->students_count; i++) {
        const struct rollout_student *student = &plan->students[i];
        if (sequence_room(rollout->students[i]) != 0)
            continue;
        if (student->choose != NULL)
            code = student->choose(student->context, rollout->students[i], rollout->prunes[i]++, error);
        else
            code = engine_prune(rollout->training->engine, &rollout->students[i], 1, error);
        if (code == 0)
            code = train_yield(rollout->training);
    }
    return code;
}

/* Of the distribution of a wanted row. */
static int measure_entropy(struct rollout *rollout, uint32_t row, float *out, struct error *error) {
    uint32_t vocabulary = engine_model(rollout->training->engine)->shape.vocabulary;
    const float *logits = rollout->logits;
    float highest = -INFINITY;
    double sum = 0, weighted = 0;
    int code = engine_logits(rollout->training->engine, row, rollout->logits, error);
    for (uint32_t i = 0; code == 0 && i < vocabulary; i++)
        highest = logits[i] > highest ? logits[i] : highest;
    for (uint32_t i = 0; code == 0 && i < vocabulary; i++) {
        double below = (double)logits[i] - (double)highest, weight = exp(below);
        sum += weight;
        weighted += weight > 0 ? weight * below : 0;
    }
    *out = (float)(log(sum) - weighted / sum);
    return code;
}

/* Feeds the next token to all; kl of this step [students_count], steps apart. */
static int step(struct rollout *rollout, uint32_t index, float *kl, struct error *error) {
    const struct rollout_plan *plan = rollout->plan;
    uint32_t count = plan->students_count, teacher_rows[ROLLOUT_STUDENTS_MAX], rows[ROLLOUT_STUDENTS_MAX];
    struct batch_item items[1 + ROLLOUT_STUDENTS_MAX];
    float values[ROLLOUT_STUDENTS_MAX];
    for (uint32_t i = 0; i <= count; i++)
        items[i] = (struct batch_item){.sequence = i == 0 ? rollout->teacher : rollout->students[i - 1],
            .tokens = &rollout->next,
            .count = 1,
            .want = WANT_LAST};
    int code = engine_forward(rollout->training->engine, items, count + 1, error);
    rollout->tokens += count + 1;
    for (uint32_t i = 0; i < count; i++) {
        teacher_rows[i] = items[0].first_row;
        rows[i] = items[i + 1].first_row;
    }
    if (code == 0)
        code = engine_kl(rollout->training->engine, teacher_rows, rows, count, values, error);
    for (uint32_t i = 0; code == 0 && i < count; i++)
        kl[(size_t)i * plan->steps + index] = values[i];
    if (code == 0 && plan->entropies != NULL)
        code = measure_entropy(rollout, items[0].first_row, &plan->entropies[index], error);
    if (code == 0 && index + 1 < plan->steps)
        code = choose_next(rollout, index, items[0].first_row, error);
    return code == 0 ? prune_students(rollout, error) : code;
}

static int run_once(struct rollout *rollout, float *kl, struct error *error) {
    const struct rollout_plan *plan = rollout->plan;
    int code = start_sequences(rollout, error);
    if (code == 0)
        code = train_yield(rollout->training);
    if (code == 0)
        code = prune_students(rollout, error);
    for (uint32_t i = 0; i < plan->students_count; i++)
        kl[(size_t)i * plan->steps] = 0;
    for (uint32_t i = 1; code == 0 && i < plan->steps; i++) {
        code = train_yield(rollout->training);
        if (code == 0)
            code = step(rollout, i, kl, error);
    }
    return code;
}

int rollout_run(struct training *training, const struct rollout_plan *plan, float *kl, void (*reset)(void *context),
    void *reset_context, struct error *error) {
    struct rollout rollout = {.training = training, .plan = plan};
    int code = tokenizer_list_ends(training->run->tokenizer, &rollout.ends);
    if (code == 0 && plan->entropies != NULL) {
        rollout.logits = malloc(engine_model(training->engine)->shape.vocabulary * sizeof *rollout.logits);
        code = rollout.logits != NULL ? 0 : ERROR_MEMORY;
    }
    if (code != 0) {
        token_list_free(&rollout.ends);
        return error_set(error, ERROR_MEMORY, "no memory for a rollout");
    }
    for (;;) {
        for (uint32_t i = 0; i < plan->students_count; i++)
            rollout.prunes[i] = 0;
        rollout.tokens = 0;
        code = run_once(&rollout, kl, error);
        free_sequences(&rollout);
        if (code == ERROR_PAGES && train_may_wait(training))
            code = TRAIN_AGAIN;
        if (code != TRAIN_AGAIN || (code = train_gave_up(training)) != 0)
            break;
        if (reset != NULL)
            reset(reset_context);
    }
    training->tokens += rollout.tokens;
    token_list_free(&rollout.ends);
    free(rollout.logits);
    return code == ERROR_CANCELLED ? error_set(error, code, "stopped") : code;
}
