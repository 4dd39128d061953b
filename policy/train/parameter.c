/* SPDX-License-Identifier: Apache-2.0
 *
 * Stage kl_parameter: a policy gradient in the space of few parameters, on rollouts that prune as serving does. The
 * network's parameters are drawn from a normal distribution around the present ones and each draw acts without noise,
 * which has far more signal than sampling every slot of every head (POLICIES.md, what was measured). Draws come in
 * antithetic pairs. With reward r = -ln(mean KL + 0.02) of a student and epsilon its standard normal draw, the gradient
 * of the expected reward is the mean over students of advantage * epsilon / deviation, advantages by leave-one-out; an
 * Adam step follows it (Sehnke et al. 2010, parameter-exploring policy gradients).
 *
 * What is drawn, by groups of neighbouring layers of those that do not slide:
 *   - the logarithm of the group's layer budgets, and how it changes with the level (policy/network.h);
 *   - where there is a summary slot: the offset of its logit, and how that changes with the level;
 *   - a weight of each input but content, added to the skip weights of all the group's heads;
 * the last three for all layers together as well, and the floor. FEATURES_PAPER has no weights by head.
 *
 * A step moves each parameter by about as many deviations, whether its gradient is signal or noise. So what all layers
 * share, where the signal is, is drawn widely, and how groups differ from it narrowly: else the noise of many groups
 * outweighs what is learned.
 */
#include "policy/train/rollout.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/random.h"
#include "policy/train/baseline.h"

enum { GROUPS_MAX = 10, PROMPTS = 2 /* a step */, STREAM_PARAMETER = 0x50415241 };
/* Sequences of the data set before this one are those of the stage rank. */
#define ROLLOUT_FIRST (UINT64_C(1) << 24)
enum kind {
    BUDGET,
    BUDGET_SLOPE,
    SUMMARY_OFFSET,
    SUMMARY_OFFSET_ALL,
    SUMMARY_SLOPE,
    SUMMARY_SLOPE_ALL,
    WEIGHT,
    WEIGHT_ALL,
    FLOOR,
    KINDS
};

/* How widely each kind is drawn, and within what it stays. */
static const struct {
    double deviation, least, most;
} kinds[KINDS] = {
    [BUDGET] = {0.2, 0.2, 3},
    [BUDGET_SLOPE] = {0.1, -1, 1},
    [SUMMARY_OFFSET] = {0.15, -8, 4},
    [SUMMARY_OFFSET_ALL] = {0.3, -8, 4},
    [SUMMARY_SLOPE] = {0.15, -4, 8},
    [SUMMARY_SLOPE_ALL] = {0.3, -4, 8},
    [WEIGHT] = {0.05, -INFINITY, INFINITY},
    [WEIGHT_ALL] = {0.15, -INFINITY, INFINITY},
    [FLOOR] = {0.08, 0.2, 1},
};

/* The parameters: of each kind `each[kind]` in a row, from `first[kind]` on; groups of layers, of weights
 * [groups][inputs], of weights of all layers [inputs], and one of what else is of all layers. */
struct parameters {
    uint32_t layers;               /* that do not slide */
    const uint32_t *layer_numbers; /* [layers] their places among the model's */
    uint32_t groups, inputs, count;
    uint32_t first[KINDS], each[KINDS];
};

struct parameter_state {
    struct training *training;
    struct parameters parameters;
    uint32_t students;
    struct policy_network *networks[ROLLOUT_STUDENTS_MAX];
    double *draws;    /* [students][count] */
    double *gradient; /* [count] */
    float *kl;        /* [students][rollout] */
};

static uint32_t parameter_steps(const struct train_options *options) {
    return options->parameter_steps;
}

/* ---- parameters and networks ---- */

static struct parameters parameters_of(const struct policy_network *network, const struct model *model) {
    const struct network_shape *shape = &network->shape;
    uint32_t layers = model->shape.global_layers;
    struct parameters p = {
        .layers = layers, .layer_numbers = model->global_layers, .groups = layers < GROUPS_MAX ? layers : GROUPS_MAX};
    if (shape->features == FEATURES_CONTENT)
        p.inputs = network_inputs_count(shape) - shape->content;
    p.each[BUDGET] = p.each[BUDGET_SLOPE] = p.groups;
    p.each[SUMMARY_OFFSET] = p.each[SUMMARY_SLOPE] = network->summary ? p.groups : 0;
    p.each[SUMMARY_OFFSET_ALL] = p.each[SUMMARY_SLOPE_ALL] = network->summary ? 1 : 0;
    p.each[WEIGHT] = p.groups * p.inputs;
    p.each[WEIGHT_ALL] = p.inputs;
    p.each[FLOOR] = 1;
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        p.first[kind] = p.count;
        p.count += p.each[kind];
    }
    return p;
}

/* Of the i-th layer of those that do not slide. */
static uint32_t group_of(const struct parameters *p, uint32_t i) {
    return i * p->groups / p->layers;
}

static double clamp(double x, enum kind kind) {
    return fmax(kinds[kind].least, fmin(kinds[kind].most, x));
}

/* Numbers of layers, each moved by its group's, and by that of all layers where there is one (else all == kind). */
static void add_layers(const struct parameters *p, const double *delta, enum kind kind, enum kind all, float *numbers) {
    for (uint32_t i = 0; i < p->layers && p->each[kind] > 0; i++) {
        float *number = &numbers[p->layer_numbers[i]];
        double moved = (double)*number + delta[p->first[kind] + group_of(p, i)];
        moved += all != kind ? delta[p->first[all]] : 0;
        *number = (float)clamp(moved, kind);
    }
}

/* Budgets with a mean of 1. */
static void add_budgets(const struct parameters *p, const double *delta, struct policy_network *network) {
    double sum = 0;
    for (uint32_t i = 0; i < p->layers; i++) {
        float *budget = &network->layer_budgets[p->layer_numbers[i]];
        *budget = (float)clamp((double)*budget * exp(delta[p->first[BUDGET] + group_of(p, i)]), BUDGET);
        sum += (double)*budget;
    }
    for (uint32_t i = 0; i < p->layers; i++) {
        float *budget = &network->layer_budgets[p->layer_numbers[i]];
        *budget = (float)((double)*budget * p->layers / sum);
    }
}

static void add_weights(const struct parameters *p, const double *delta, struct policy_network *network) {
    const struct network_shape *shape = &network->shape;
    uint32_t all = network_inputs_count(shape);
    for (uint32_t i = 0; i < p->layers * shape->kv_heads; i++) {
        uint32_t layer = p->layer_numbers[i / shape->kv_heads], group = group_of(p, i / shape->kv_heads);
        float *skip = network->skip + ((size_t)layer * shape->kv_heads + i % shape->kv_heads) * all + shape->content;
        for (uint32_t f = 0; f < p->inputs; f++)
            skip[f] += (float)(delta[p->first[WEIGHT] + group * p->inputs + f] + delta[p->first[WEIGHT_ALL] + f]);
    }
}

static void add_parameters(const struct parameters *p, const double *delta, struct policy_network *network) {
    add_budgets(p, delta, network);
    add_layers(p, delta, BUDGET_SLOPE, BUDGET_SLOPE, network->layer_budget_slopes);
    add_layers(p, delta, SUMMARY_OFFSET, SUMMARY_OFFSET_ALL, network->summary_offsets);
    add_layers(p, delta, SUMMARY_SLOPE, SUMMARY_SLOPE_ALL, network->summary_slopes);
    if (p->inputs > 0)
        add_weights(p, delta, network);
    network->floor = (float)clamp((double)network->floor + delta[p->first[FLOOR]], FLOOR);
}

static double deviation_of(const struct parameters *p, uint32_t index) {
    uint32_t kind = KINDS - 1;
    while (index < p->first[kind])
        kind--;
    return kinds[kind].deviation;
}

/* ---- begin and end ---- */

static void parameter_end(struct training *training) {
    struct parameter_state *state = training->stage_state;
    if (state == NULL)
        return;
    for (uint32_t i = 0; i < ROLLOUT_STUDENTS_MAX; i++)
        network_release(state->networks[i]);
    free(state->draws);
    free(state->gradient);
    free(state->kl);
    free(state);
    training->stage_state = NULL;
}

static int parameter_begin(struct training *training, struct error *error) {
    struct parameter_state *state = calloc(1, sizeof *state);
    training->stage_state = state;
    if (state == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for the stage kl_parameter");
    uint32_t students = training->options->students + training->options->students % 2;
    state->training = training;
    state->parameters = parameters_of(training->network, engine_model(training->engine));
    state->students = students < ROLLOUT_STUDENTS_MAX ? students : ROLLOUT_STUDENTS_MAX;
    state->draws = malloc(state->students * state->parameters.count * sizeof *state->draws);
    state->gradient = malloc(state->parameters.count * sizeof *state->gradient);
    state->kl = malloc((size_t)state->students * training->options->rollout * sizeof *state->kl);
    bool there = state->draws != NULL && state->gradient != NULL && state->kl != NULL &&
                 training->adamw->count >= state->parameters.count;
    for (uint32_t i = 0; there && i < state->students; i++) {
        state->networks[i] = network_copy(training->network);
        there = state->networks[i] != NULL;
    }
    return there ? 0 : error_set(error, ERROR_MEMORY, "no memory for the stage kl_parameter");
}

/* ---- a step ---- */

/* A standard normal number (Box and Muller). */
static double draw_normal(const struct training *training, uint32_t prompt, uint64_t index) {
    uint32_t words[4];
    random_philox(training->options->seed, STREAM_PARAMETER + 1 + prompt, (uint32_t)training->stage_step, index, words);
    double u = (words[0] + 0.5) * 0x1p-32, v = (words[1] + 0.5) * 0x1p-32;
    return sqrt(-2 * log(u)) * cos(2 * 3.14159265358979323846 * v);
}

static double draw_parameter(const struct parameter_state *state, uint32_t prompt, uint32_t pair, uint32_t index) {
    const struct parameters *p = &state->parameters;
    return deviation_of(p, index) * draw_normal(state->training, prompt, (uint64_t)pair * p->count + index);
}

/* Draws the students' networks. */
static int draw_students(struct parameter_state *state, uint32_t prompt, struct error *error) {
    const struct parameters *p = &state->parameters;
    for (uint32_t i = 0; i < state->students; i++) {
        double *draw = state->draws + (size_t)i * p->count;
        for (uint32_t j = 0; j < p->count; j++)
            draw[j] = i % 2 == 1 ? -(draw - p->count)[j] : draw_parameter(state, prompt, i / 2, j);
        network_release(state->networks[i]);
        state->networks[i] = network_copy(state->training->network);
        if (state->networks[i] == NULL)
            return error_set(error, ERROR_MEMORY, "no memory for a copy of the network");
        add_parameters(p, draw, state->networks[i]);
    }
    return 0;
}

static void set_student(
    const struct parameter_state *state, uint32_t index, double ratio, struct rollout_student *student) {
    *student = (struct rollout_student){.choose = NULL};
    policy_settings_default(policy_find("distillcache"), &student->settings);
    policy_settings_use_network(&student->settings, state->networks[index]);
    student->settings.ratio = ratio;
}

/* One prompt: adds its part of the gradient. Returns the mean reward by *reward. */
static int learn_prompt(struct parameter_state *state, uint32_t prompt, double *reward, struct error *error) {
    struct training *training = state->training;
    const struct train_options *options = training->options;
    const struct parameters *p = &state->parameters;
    struct rollout_student students[ROLLOUT_STUDENTS_MAX];
    struct dataset_sequence data;
    double rewards[ROLLOUT_STUDENTS_MAX], advantages[ROLLOUT_STUDENTS_MAX];
    uint64_t index = training->stage_step * PROMPTS + prompt;
    double ratio = options->ratios[index % options->ratios_count]; /* in turn: fewer steps are all of one kind */
    int code = dataset_sequence(training->dataset, ROLLOUT_FIRST + index, &data, error);
    if (code == 0)
        code = draw_students(state, prompt, error);
    if (code != 0)
        return code;
    for (uint32_t i = 0; i < state->students; i++)
        set_student(state, i, ratio, &students[i]);
    struct rollout_plan plan = rollout_plan_of(training, &data, students, state->students);
    code = rollout_run(training, &plan, state->kl, NULL, NULL, error);
    for (uint32_t i = 0; i < state->students; i++)
        policy_settings_release(&students[i].settings);
    if (code != 0)
        return code;
    for (uint32_t i = 0; i < state->students; i++) {
        rewards[i] = rollout_reward(state->kl + (size_t)i * options->rollout, options->rollout);
        *reward += rewards[i] / state->students / PROMPTS;
    }
    baseline_leave_one_out(rewards, state->students, advantages);
    for (uint32_t i = 0; i < state->students; i++)
        for (uint32_t j = 0; j < p->count; j++) {
            double epsilon = state->draws[(size_t)i * p->count + j] / deviation_of(p, j);
            state->gradient[j] += advantages[i] * epsilon / state->students / PROMPTS;
        }
    return 0;
}

/* Ascends; steps are in deviations. The moments lie in the optimiser's first places, so that checkpoints hold them. */
static double ascend(struct parameter_state *state, double rate) {
    struct training *training = state->training;
    struct adamw *adamw = training->adamw;
    const struct parameters *p = &state->parameters;
    const double beta1 = 0.9, beta2 = 0.99;
    double norm = 0, t = (double)++adamw->step;
    for (uint32_t j = 0; j < p->count; j++) {
        double g = state->gradient[j];
        norm += g * g;
        adamw->first[j] = (float)(beta1 * adamw->first[j] + (1 - beta1) * g);
        adamw->second[j] = (float)(beta2 * adamw->second[j] + (1 - beta2) * g * g);
        double m = adamw->first[j] / (1 - pow(beta1, t)), v = adamw->second[j] / (1 - pow(beta2, t));
        state->gradient[j] = rate * deviation_of(p, j) * m / (sqrt(v) + 1e-8);
    }
    add_parameters(p, state->gradient, training->network);
    return sqrt(norm);
}

static int parameter_step(struct training *training, struct stage_result *result, struct error *error) {
    struct parameter_state *state = training->stage_state;
    double reward = 0;
    memset(state->gradient, 0, state->parameters.count * sizeof *state->gradient);
    for (uint32_t prompt = 0; prompt < PROMPTS; prompt++) {
        int code = learn_prompt(state, prompt, &reward, error);
        if (code != 0)
            return code;
    }
    struct adamw_options options = {.peak = training->options->parameter_rate,
        .final = training->options->parameter_rate / 20,
        .warmup = 5,
        .total = training->options->parameter_steps};
    result->learning_rate = adamw_rate(&options, training->adamw->step);
    result->gradient_norm = ascend(state, result->learning_rate);
    result->reward = reward;
    return 0;
}

const struct train_stage stage_kl_parameter = {.name = "kl_parameter",
    .steps = parameter_steps,
    .begin = parameter_begin,
    .step = parameter_step,
    .end = parameter_end};
