/* SPDX-License-Identifier: Apache-2.0
 *
 * Evaluations of the admin API: what `distillcache eval` does, on a server's engine beside its requests.
 */
#include "commands/serve_evaluate.h"

#include <stdlib.h>

#include "commands/eval_setup.h"
#include "engine/background.h"
#include "policy/eval/report.h"
#include "policy/eval/run.h"

enum { PAGES_TRIES = 20 };

struct evaluate {
    const struct evaluation_run *asked;
    struct eval_plan plan;
    struct eval_results results;
    struct eval_run *run;
    bool *wanted; /* [variants] all */
    bool gave_up; /* the question at work is to be done again */
};

static int evaluate_emit(void *context, struct eval_result *result, struct error *error) {
    struct evaluate *evaluate = context;
    if (eval_results_add(&evaluate->results, result) != 0)
        return error_set(error, ERROR_MEMORY, "no memory for results");
    return 0;
}

static int evaluate_between(void *context) {
    struct evaluate *evaluate = context;
    enum background_turn turn = background_yield(evaluate->asked->background);
    if (turn == BACKGROUND_STOP || evaluate->asked->stopped(evaluate->asked->context))
        return ERROR_CANCELLED;
    evaluate->gave_up = turn == BACKGROUND_GIVE_UP_PAGES;
    return evaluate->gave_up ? ERROR_CANCELLED : 0;
}

static void drop_results(struct eval_results *results, size_t count) {
    while (results->count > count)
        eval_result_clear(&results->list[--results->count]);
}

/* Requests may hold the pages that a question needs: it is begun again when they took them, and some times when there
 * were too few, before the pool counts as too small. */
static int run_question(struct evaluate *evaluate, uint32_t length, uint32_t index, struct error *error) {
    const struct eval_set *set = &evaluate->plan.sets[length];
    struct eval_work work = {.question = &set->questions[index],
        .item = evaluate->plan.setup.answers ? &set->items.items[index] : NULL,
        .length = length,
        .index = index,
        .wanted = evaluate->wanted};
    size_t before = evaluate->results.count;
    uint32_t tries_left = evaluate->asked->background == NULL ? 0 : PAGES_TRIES;
    for (;;) {
        evaluate->gave_up = false;
        int code = eval_run_question(evaluate->run, &work, error);
        if (code == ERROR_PAGES && tries_left > 0)
            tries_left--;
        else if (code == 0 || !evaluate->gave_up)
            return code;
        drop_results(&evaluate->results, before);
        if (background_gave_up(evaluate->asked->background) == BACKGROUND_STOP)
            return error_set(error, ERROR_CANCELLED, "the evaluation was stopped");
    }
}

static int run_questions(struct evaluate *evaluate, struct error *error) {
    const struct evaluation_run *asked = evaluate->asked;
    uint32_t lengths = evaluate->plan.setup.lengths_count;
    uint64_t done = 0, total = 0;
    int code = 0;
    for (uint32_t length = 0; length < lengths; length++)
        total += evaluate->plan.sets[length].count;
    for (uint32_t length = 0; length < lengths; length++)
        for (uint32_t item = 0; item < evaluate->plan.sets[length].count && code == 0; item++) {
            asked->progress(asked->context, done++, total);
            code = run_question(evaluate, length, item, error);
        }
    return code;
}

static int write_report(const struct evaluate *evaluate, char **out, struct error *error) {
    const struct eval_setup *setup = &evaluate->plan.setup;
    struct eval_rows rows;
    struct eval_report report = {
        .setup = setup, .rows = &rows, .model = engine_model(evaluate->asked->engine)->name, .complete = true};
    for (uint32_t i = 0; i < setup->lengths_count; i++) {
        report.items += evaluate->plan.sets[i].count;
        report.skipped += evaluate->plan.sets[i].skipped;
    }
    int code = eval_rows_create(setup, &evaluate->results, &rows, error);
    if (code != 0)
        return code;
    *out = eval_report_json(&report);
    eval_rows_free(&rows);
    return *out == NULL ? error_set(error, ERROR_MEMORY, "no memory for the report") : 0;
}

static int evaluate_prepare(struct evaluate *evaluate, struct error *error) {
    const struct evaluation_run *asked = evaluate->asked;
    int code = eval_plan_create(
        asked->config, asked->trained, asked->engine, asked->tokenizer, &asked->chat, &evaluate->plan, error);
    if (code != 0)
        return code;
    uint32_t variants = evaluate->plan.setup.variants_count;
    evaluate->wanted = malloc(variants * sizeof *evaluate->wanted);
    if (evaluate->wanted == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for %u policies", variants);
    for (uint32_t v = 0; v < variants; v++)
        evaluate->wanted[v] = true;
    struct eval_run_options options = {.engine = asked->engine,
        .tokenizer = asked->tokenizer,
        .setup = &evaluate->plan.setup,
        .emit = evaluate_emit,
        .between = evaluate_between,
        .background = asked->background,
        .context = evaluate};
    evaluate->run = eval_run_create(&options, error);
    return evaluate->run == NULL ? error->code : 0;
}

int serve_evaluate(const struct evaluation_run *asked, char **report, struct error *error) {
    struct evaluate evaluate = {.asked = asked};
    *report = NULL;
    int code = evaluate_prepare(&evaluate, error); /* reads and tokenises: no use of the engine */
    if (code == 0 && background_begin(asked->background) == BACKGROUND_STOP) {
        code = error_set(error, ERROR_CANCELLED, "the evaluation was stopped");
    } else if (code == 0) {
        code = run_questions(&evaluate, error);
        background_end(asked->background);
    }
    eval_run_free(evaluate.run);
    if (code == 0)
        code = write_report(&evaluate, report, error);
    free(evaluate.wanted);
    eval_results_free(&evaluate.results);
    eval_plan_free(&evaluate.plan);
    return code;
}
