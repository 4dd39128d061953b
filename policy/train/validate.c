/* SPDX-License-Identifier: Apache-2.0
 *
 * Held-out comparison: the evaluation's own kl (policy/eval/run.h) on prompts that are not trained on, the policy
 * beside h2o with the same budgets and interval. Continuations are the text's and the full model's own, where there is
 * a text.
 */
#include "policy/train/rlkv.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policy/eval/run.h"

enum { LENGTH_LEAST = 512 /* tokens of a prompt, where prompt_most allows */, PARTS = 2 };
static const double least_kl = 1e-9; /* as in kl_geometric of policy/eval */

struct validator {
    uint32_t count;
    struct eval_question *questions; /* [count] */
    bool *has_text;                  /* [count] the first part is a continuation of the prompt */
    double *others;                  /* [count][PARTS][ratios] KL of h2o; NaN: not measured yet */
    double *own;                     /* the same of the policy */
};

static int no_memory(struct error *error) {
    return error_set(error, ERROR_MEMORY, "no memory for held-out prompts");
}

/* ---- prompts ---- */

static int append(struct token_list *to, const int32_t *ids, size_t count, struct error *error) {
    for (size_t i = 0; i < count; i++)
        if (token_list_append(to, ids[i]) != 0)
            return no_memory(error);
    return 0;
}

/* A prompt that nothing follows lends its own beginning, whose part is not counted. */
static int fill_question(struct validator *validator, uint32_t index, const struct dataset_sequence *data,
    uint32_t steps, struct error *error) {
    struct eval_question *question = &validator->questions[index];
    validator->has_text[index] = data->count >= data->prompt + 2;
    const int32_t *text = validator->has_text[index] ? data->tokens + data->prompt : data->tokens;
    uint32_t there = validator->has_text[index] ? data->count - data->prompt : data->prompt;
    int code = append(&question->prompt, data->tokens, data->prompt, error);
    return code == 0 ? append(&question->text, text, there < steps + 1 ? there : steps + 1, error) : code;
}

static struct dataset *load_held_out(const struct training *training, struct error *error) {
    const struct train_options *options = training->options;
    const struct train_run *run = training->run;
    uint32_t least = options->prompt_most < LENGTH_LEAST ? options->prompt_most : LENGTH_LEAST;
    struct dataset_options data = {.tokenizer = run->tokenizer,
        .chat = run->chat,
        .least = options->prompt_least > least ? options->prompt_least : least,
        .most = options->prompt_most,
        .future = options->valid_rollout + 1,
        .copying = options->copying,
        .whole = run->valid != NULL,
        .part = run->valid != NULL ? DATASET_ALL : DATASET_HELD_OUT,
        .seed = options->seed};
    if (run->valid == NULL && run->data != NULL) { /* few lines: any length that is trained on will do */
        struct dataset *dataset = dataset_load(run->data, &data, error);
        if (dataset != NULL || error->code != ERROR_INVALID)
            return dataset;
        data.least = options->prompt_least;
    }
    return dataset_load(run->valid != NULL ? run->valid : run->data, &data, error);
}

struct validator *validator_create(struct training *training, struct error *error) {
    uint32_t count = training->options->valid_prompts;
    size_t results = (size_t)count * PARTS * training->options->ratios_count;
    struct validator *validator = calloc(1, sizeof *validator);
    if (validator == NULL) {
        no_memory(error);
        return NULL;
    }
    validator->questions = calloc(count, sizeof *validator->questions);
    validator->has_text = calloc(count, sizeof *validator->has_text);
    validator->others = malloc(results * sizeof *validator->others);
    validator->own = malloc(results * sizeof *validator->own);
    bool there = validator->questions != NULL && validator->has_text != NULL && validator->others != NULL &&
                 validator->own != NULL;
    int code = there ? 0 : no_memory(error);
    for (size_t i = 0; there && i < results; i++)
        validator->others[i] = NAN;
    struct dataset *dataset = code == 0 ? load_held_out(training, error) : NULL;
    for (uint32_t i = 0; dataset != NULL && code == 0 && i < count; i++) {
        struct dataset_sequence data;
        code = dataset_sequence(dataset, i, &data, error);
        validator->count++;
        if (code == 0)
            code = fill_question(validator, i, &data, training->options->valid_rollout, error);
    }
    bool loaded = dataset != NULL;
    dataset_free(dataset);
    if (loaded && code == 0)
        return validator;
    validator_free(validator);
    return NULL;
}

void validator_free(struct validator *validator) {
    if (validator == NULL)
        return;
    for (uint32_t i = 0; i < validator->count; i++)
        eval_question_free(&validator->questions[i]);
    free(validator->questions);
    free(validator->has_text);
    free(validator->others);
    free(validator->own);
    free(validator);
}

/* ---- a comparison ---- */

/* Variants: full, h2o at each ratio, the policy at each ratio. */
struct comparison {
    struct training *training;
    struct validator *validator;
    uint32_t ratios;
    struct eval_variant variants[1 + 2 * TRAIN_RATIOS_MAX];
    bool wanted[1 + 2 * TRAIN_RATIOS_MAX];
    uint32_t length;
    struct eval_setup setup;
};

static double *place(struct comparison *comparison, uint32_t item, uint32_t part, uint32_t variant) {
    struct validator *validator = comparison->validator;
    bool other = variant <= comparison->ratios;
    uint32_t ratio = variant - 1 - (other ? 0 : comparison->ratios);
    double *values = other ? validator->others : validator->own;
    return &values[((size_t)item * PARTS + part) * comparison->ratios + ratio];
}

static int take_result(void *context, struct eval_result *result, struct error *error) {
    struct comparison *comparison = context;
    (void)error;
    if (result->variant > 0 && result->part < PARTS)
        *place(comparison, result->item, result->part, result->variant) = result->kl;
    if (result->variant >
        comparison->ratios) /* h2o's are counted nowhere: once in a run, or again after a resumption */
        comparison->training->tokens += result->tokens;
    eval_result_clear(result);
    return 0;
}

static int give_way(void *context) {
    struct comparison *comparison = context;
    return train_yield(comparison->training);
}

static int choose_h2o(const struct policy_network *network, struct policy_settings *settings, struct error *error) {
    char text[64];
    snprintf(text, sizeof text, "h2o,interval=%u", network->interval);
    return policy_settings_parse(text, settings, error);
}

static int choose_own(const struct policy_network *network, bool gates, double ratio, struct policy_settings *settings,
    struct error *error) {
    if (gates)
        return rlkv_settings(network, ratio, settings, error);
    policy_settings_default(policy_find("distillcache"), settings);
    policy_settings_use_network(settings, network);
    return 0;
}

static int open_variants(struct comparison *comparison, const struct policy_network *network, struct error *error) {
    const struct train_options *options = comparison->training->options;
    comparison->variants[0].policy = (char *)"full";
    int code = policy_settings_parse("full", &comparison->variants[0].settings, error);
    for (uint32_t i = 0; code == 0 && i < 2 * comparison->ratios; i++) {
        struct eval_variant *variant = &comparison->variants[1 + i];
        bool other = i < comparison->ratios;
        variant->policy = (char *)(other ? "h2o" : "distillcache");
        variant->ratio = options->ratios[other ? i : i - comparison->ratios];
        if (other)
            code = choose_h2o(network, &variant->settings, error);
        else
            code = choose_own(network, options->method == TRAIN_RLKV, variant->ratio, &variant->settings, error);
        variant->settings.ratio = variant->ratio;
    }
    comparison->setup = (struct eval_setup){.model = engine_model(comparison->training->engine)->fingerprint,
        .task = "kl",
        .seed = options->seed,
        .continuation = options->valid_rollout,
        .layers = engine_model(comparison->training->engine)->shape.layers,
        .lengths = &comparison->length,
        .lengths_count = 1,
        .variants = comparison->variants,
        .variants_count = 1 + 2 * comparison->ratios};
    return code;
}

/* One prompt under the policy, and under h2o where that was not measured before; once more when pages were given up, or
 * when there were none because live requests hold them. */
static int compare_prompt(struct comparison *comparison, struct eval_run *run, uint32_t item, struct error *error) {
    struct eval_work work = {
        .question = &comparison->validator->questions[item], .index = item, .wanted = comparison->wanted};
    uint64_t tokens = comparison->training->tokens;
    for (;;) {
        for (uint32_t v = 1; v <= 2 * comparison->ratios; v++)
            comparison->wanted[v] = v > comparison->ratios || isnan(*place(comparison, item, PARTS - 1, v));
        int code = eval_run_question(run, &work, error);
        if (code == ERROR_PAGES && train_may_wait(comparison->training))
            code = TRAIN_AGAIN;
        if (code != TRAIN_AGAIN || (code = train_gave_up(comparison->training)) != 0)
            return code;
        comparison->training->tokens = tokens; /* what is made again is not counted again */
    }
}

/* Geometric means over prompts, parts and ratios. */
static void summarise(struct comparison *comparison, struct validation *out) {
    double own = 0, relative = 0, count = 0;
    for (uint32_t item = 0; item < comparison->validator->count; item++) {
        for (uint32_t part = comparison->validator->has_text[item] ? 0 : 1; part < PARTS; part++) {
            for (uint32_t r = 0; r < comparison->ratios; r++) {
                double other = log(fmax(*place(comparison, item, part, 1 + r), least_kl));
                double mine = log(fmax(*place(comparison, item, part, 1 + comparison->ratios + r), least_kl));
                own += mine;
                relative += mine - other;
                count++;
            }
        }
    }
    *out = (struct validation){.kl = exp(own / count), .relative = exp(relative / count)};
}

int train_validate(
    struct training *training, const struct policy_network *network, struct validation *out, struct error *error) {
    struct comparison *comparison = calloc(1, sizeof *comparison);
    struct eval_run *run = NULL;
    if (comparison == NULL)
        return no_memory(error);
    comparison->training = training;
    comparison->validator = training->validator;
    comparison->ratios = training->options->ratios_count;
    int code = open_variants(comparison, network, error);
    struct eval_run_options options = {.engine = training->engine,
        .tokenizer = training->run->tokenizer,
        .setup = &comparison->setup,
        .emit = take_result,
        .between = give_way,
        .background = training->run->background,
        .context = comparison};
    if (code == 0)
        run = eval_run_create(&options, error);
    if (run == NULL && code == 0)
        code = error->code;
    for (uint32_t item = 0; code == 0 && item < comparison->validator->count; item++)
        code = compare_prompt(comparison, run, item, error);
    if (code == 0)
        summarise(comparison, out);
    eval_run_free(run);
    for (uint32_t v = 0; v < 1 + 2 * comparison->ratios; v++)
        policy_settings_release(&comparison->variants[v].settings);
    free(comparison);
    return code;
}
