/* SPDX-License-Identifier: Apache-2.0
 *
 * `distillcache eval`: eviction policies against the full cache, on the same items (policy/eval/README.md). Standard
 * output has the table, or with --json the document of policy/eval/report.h; progress goes to standard error. SIGINT
 * and SIGTERM end the evaluation after the item at work, and what was measured is reported; a second one ends the
 * program.
 */
#include "commands/commands.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "commands/engine_config.h"
#include "commands/eval_setup.h"
#include "engine/clock.h"
#include "policy/eval/plot.h"
#include "policy/eval/report.h"
#include "policy/eval/resume.h"
#include "policy/eval/run.h"

struct eval {
    const struct config *config;
    struct model *model;
    struct tokenizer *tokenizer;
    struct chat_config chat;
    struct engine *engine;
    struct eval_plan plan;
    struct eval_results results;
    struct eval_resume resume; /* file NULL: none */
    struct eval_run *run;
    uint8_t *found;       /* [variants] bit n: part n has a result */
    bool *wanted;         /* [variants] */
    uint8_t **kept;       /* [variants] of the first item; NULL: not asked for */
    uint64_t done, total; /* results, for the time left */
    uint64_t computed;
    double start;
};

static volatile sig_atomic_t stopped;

static void stop(int signal) {
    (void)signal;
    stopped = 1;
}

static void install_signals(void) {
    struct sigaction action = {.sa_handler = stop, .sa_flags = (int)SA_RESETHAND};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

/* ---- opening ---- */

static int open_engine(struct eval *eval, struct error *error) {
    struct engine_options options = engine_options_of(eval->config);
    eval->model = engine_open_model(eval->config, error);
    if (eval->model == NULL)
        return engine_error_of_file(eval->config, error);
    eval->tokenizer = tokenizer_create(eval->model->file, error);
    if (eval->tokenizer == NULL)
        return engine_error_of_file(eval->config, error);
    int code = chat_config_open(eval->config, eval->model, eval->tokenizer, &eval->chat, error);
    if (code != 0)
        return code;
    eval->engine = engine_open(eval->model, &options, error);
    return eval->engine == NULL ? error->code : 0;
}

static int emit(void *context, struct eval_result *result, struct error *error) {
    struct eval *eval = context;
    int code = 0;
    eval->computed++;
    if (eval->resume.file != NULL)
        code = eval_resume_append(&eval->resume, &eval->plan.setup, result, error);
    if (eval_results_add(&eval->results, result) != 0 && code == 0)
        code = error_set(error, ERROR_MEMORY, "no memory for results");
    return code;
}

/* Results of the file count for the very same item only. */
static void drop_others(struct eval *eval) {
    size_t kept = 0;
    for (size_t i = 0; i < eval->results.count; i++) {
        struct eval_result *result = &eval->results.list[i];
        const struct eval_set *set = &eval->plan.sets[result->length];
        if (result->item < set->count && set->questions[result->item].digest == result->digest)
            eval->results.list[kept++] = *result;
        else
            eval_result_clear(result);
    }
    eval->results.count = kept;
}

static int open_resume(struct eval *eval, struct error *error) {
    if (eval->config->resume[0] == '\0')
        return 0;
    int code = eval_resume_open(&eval->resume, eval->config->resume, &eval->plan.setup, &eval->results, error);
    if (code != 0)
        return code;
    if (eval->resume.torn > 0)
        fprintf(stderr, "distillcache eval: %s: %u lines are not whole and were passed over\n", eval->config->resume,
            eval->resume.torn);
    drop_others(eval);
    return 0;
}

/* Files are created before the work, so that a wrong name is told at once. */
static int check_outputs(const struct config *config, struct error *error) {
    FILE *file = config->csv[0] != '\0' ? fopen(config->csv, "ae") : NULL;
    if (config->csv[0] != '\0' && file == NULL)
        return error_set(error, ERROR_IO, "cannot write %.200s: %s", config->csv, strerror(errno));
    if (file != NULL)
        fclose(file);
    return 0;
}

static int open_eval(struct eval *eval, const struct config *config, struct error *error) {
    eval->config = config;
    struct chat_source chat;
    int code = check_outputs(config, error);
    if (code == 0)
        code = open_engine(eval, error);
    chat = chat_config_source(&eval->chat);
    if (code == 0)
        code = eval_plan_create(config, NULL, eval->engine, eval->tokenizer, &chat, &eval->plan, error);
    if (code != 0)
        return code;
    uint32_t variants = eval->plan.setup.variants_count;
    eval->wanted = calloc(variants, sizeof *eval->wanted);
    eval->found = calloc(variants, sizeof *eval->found);
    eval->kept = config->svg[0] != '\0' ? calloc(variants, sizeof *eval->kept) : NULL;
    if (eval->wanted == NULL || eval->found == NULL || (eval->kept == NULL && config->svg[0] != '\0'))
        return error_set(error, ERROR_MEMORY, "no memory for %u policies", variants);
    struct eval_run_options options = {.engine = eval->engine,
        .tokenizer = eval->tokenizer,
        .setup = &eval->plan.setup,
        .emit = emit,
        .context = eval};
    eval->run = eval_run_create(&options, error);
    return eval->run == NULL ? error->code : open_resume(eval, error);
}

static void close_eval(struct eval *eval) {
    for (uint32_t v = 0; eval->kept != NULL && v < eval->plan.setup.variants_count; v++)
        free(eval->kept[v]);
    free(eval->kept);
    free(eval->wanted);
    free(eval->found);
    eval_run_free(eval->run);
    eval_resume_close(&eval->resume);
    eval_results_free(&eval->results);
    eval_plan_free(&eval->plan);
    engine_close(eval->engine);
    chat_config_close(&eval->chat);
    tokenizer_free(eval->tokenizer);
    model_free(eval->model);
}

/* ---- running ---- */

static uint32_t parts(const struct eval *eval) {
    return eval->plan.setup.answers ? 1 : 2;
}

/* Marks the variants without all results for the item; returns how many. */
static uint32_t mark_wanted(struct eval *eval, uint32_t length, uint32_t item) {
    uint32_t missing = 0, variants = eval->plan.setup.variants_count;
    memset(eval->found, 0, variants * sizeof *eval->found);
    for (size_t i = 0; i < eval->results.count; i++) {
        const struct eval_result *result = &eval->results.list[i];
        if (result->length == length && result->item == item && result->part < parts(eval))
            eval->found[result->variant] |= (uint8_t)(1u << result->part);
    }
    for (uint32_t v = 0; v < variants; v++) {
        eval->wanted[v] = eval->found[v] != (1u << parts(eval)) - 1;
        missing += eval->wanted[v];
    }
    return missing;
}

static void report_progress(struct eval *eval, uint32_t length, uint32_t item) {
    double seconds = clock_seconds() - eval->start;
    uint64_t left = eval->total - eval->done;
    double remaining = eval->computed > 0 ? seconds / (double)eval->computed * (double)left : 0;
    fprintf(stderr, "distillcache eval: %s, length %u, item %u of %u; %llu of %llu results, %.0f:%02.0f left\n",
        eval->plan.setup.task, eval->plan.lengths[length], item + 1, eval->plan.sets[length].count,
        (unsigned long long)eval->done, (unsigned long long)eval->total, floor(remaining / 60), fmod(remaining, 60));
}

static int write_kept(struct eval *eval, const struct token_list *prompt, struct error *error) {
    return eval_kept_write(eval->config->svg, &eval->plan.setup, eval->tokenizer, prompt, eval->kept, error);
}

static int run_item(struct eval *eval, uint32_t length, uint32_t index, struct error *error) {
    const struct eval_set *set = &eval->plan.sets[length];
    bool show = eval->kept != NULL && length == 0 && index == 0;
    struct eval_work work = {.question = &set->questions[index],
        .item = eval->plan.setup.answers ? &set->items.items[index] : NULL,
        .length = length,
        .index = index,
        .wanted = eval->wanted,
        .kept = show ? eval->kept : NULL};
    int code = eval_run_question(eval->run, &work, error);
    return code == 0 && show ? write_kept(eval, &work.question->prompt, error) : code;
}

static int run_all(struct eval *eval, struct error *error) {
    uint32_t lengths = eval->plan.setup.lengths_count;
    int code = 0;
    eval->start = clock_seconds();
    for (uint32_t length = 0; length < lengths; length++)
        eval->total += (uint64_t)eval->plan.sets[length].count * eval->plan.setup.variants_count * parts(eval);
    for (uint32_t length = 0; length < lengths; length++) {
        for (uint32_t item = 0; item < eval->plan.sets[length].count && code == 0 && !stopped; item++) {
            uint32_t missing = mark_wanted(eval, length, item);
            if (missing > 0)
                code = run_item(eval, length, item, error);
            eval->done += (uint64_t)eval->plan.setup.variants_count * parts(eval);
            if (missing > 0 && code == 0)
                report_progress(eval, length, item);
        }
    }
    return code;
}

/* ---- reporting ---- */

static int write_csv(const struct eval *eval, const struct eval_report *report, struct error *error) {
    if (eval->config->csv[0] == '\0')
        return 0;
    FILE *file = fopen(eval->config->csv, "we");
    if (file == NULL)
        return error_set(error, ERROR_IO, "cannot write %.200s: %s", eval->config->csv, strerror(errno));
    eval_report_csv(report, file);
    bool failed = ferror(file) != 0;
    if (fclose(file) != 0 || failed)
        return error_set(error, ERROR_IO, "cannot write %.200s: %s", eval->config->csv, strerror(errno));
    return 0;
}

static int print_report(const struct eval *eval, const struct eval_report *report, struct error *error) {
    if (eval->config->json) {
        char *text = eval_report_json(report);
        if (text == NULL)
            return error_set(error, ERROR_MEMORY, "no memory for the report");
        puts(text);
        free(text);
    } else {
        eval_report_table(report, stdout);
    }
    if (fflush(stdout) != 0 || ferror(stdout))
        return error_set(error, ERROR_IO, "cannot write the report: %s", strerror(errno));
    return 0;
}

static int report(struct eval *eval, struct error *error) {
    struct eval_rows rows;
    struct eval_report report = {
        .setup = &eval->plan.setup, .rows = &rows, .model = eval->model->name, .complete = eval->done == eval->total};
    for (uint32_t i = 0; i < eval->plan.setup.lengths_count; i++) {
        report.items += eval->plan.sets[i].count;
        report.skipped += eval->plan.sets[i].skipped;
    }
    int code = eval_rows_create(&eval->plan.setup, &eval->results, &rows, error);
    if (code != 0)
        return code;
    code = write_csv(eval, &report, error);
    if (code == 0 && eval->config->svg[0] != '\0')
        code = eval_plot_write(eval->config->svg, &eval->plan.setup, &eval->results, &rows, error);
    if (code == 0)
        code = print_report(eval, &report, error);
    eval_rows_free(&rows);
    return code;
}

int command_eval(const struct config *config) {
    struct eval eval = {0};
    struct error error = {0};
    install_signals();
    int code = open_eval(&eval, config, &error);
    if (code == 0)
        code = run_all(&eval, &error);
    if (code == 0)
        code = report(&eval, &error);
    if (code != 0)
        fprintf(stderr, "distillcache eval: %s\n", error.message);
    close_eval(&eval);
    return code == 0 ? EXIT_OK : EXIT_FAILED;
}
