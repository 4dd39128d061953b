/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/rlkv.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/random.h"
#include "engine/replace_file.h"
#include "policy/train/baseline.h"
#include "policy/train/reinforce.h"
#include "policy/train/rollout.h"

enum { STREAM_GATES = 0x47415445, STREAM_MASKS = 0x4741544D };
/* Sequences of the data set before this one are those of other stages. */
#define GATES_FIRST (UINT64_C(1) << 27)

struct gates_state {
    struct training *training;
    const struct model *model;
    uint32_t heads, students;
    uint8_t *masks; /* [students][heads] */
    float *kl;      /* [students][rollout] */
};

/* ---- gates ---- */

struct network_shape rlkv_shape(const struct model *model) {
    return (struct network_shape){.features = FEATURES_CONTENT,
        .inputs = 1 << INPUT_SUM,
        .hidden = 1,
        .layers = model->shape.layers,
        .kv_heads = model->shape.kv_heads,
        .head_dim = model->shape.head_dim};
}

double rlkv_gate(const struct policy_network *network, uint32_t head) {
    return 1 / (1 + exp(-(double)network->skip[head]));
}

static uint32_t heads_of(const struct policy_network *network) {
    return network->shape.layers * network->shape.kv_heads;
}

static struct head_gates *create_gates(const struct policy_network *network) {
    struct head_gates *gates = malloc(sizeof *gates + heads_of(network) * sizeof gates->values[0]);
    if (gates != NULL)
        *gates =
            (struct head_gates){.references = 1, .layers = network->shape.layers, .kv_heads = network->shape.kv_heads};
    return gates;
}

/* gates NULL: no memory. */
static int set_gates(const struct policy_network *network, struct head_gates *gates, struct policy_settings *settings,
    struct error *error) {
    if (gates == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for gates of heads");
    policy_settings_default(policy_find("rlkv"), settings);
    settings->gates = gates;
    settings->interval = network->interval;
    return 0;
}

int rlkv_settings(
    const struct policy_network *network, double ratio, struct policy_settings *settings, struct error *error) {
    struct head_gates *gates = create_gates(network);
    int code = set_gates(network, gates, settings, error);
    if (code != 0)
        return code;
    for (uint32_t h = 0; h < heads_of(network); h++)
        gates->values[h] = (float)rlkv_gate(network, h);
    settings->sparsity = NAN;
    settings->ratio = ratio;
    return 0;
}

/* ---- the file ---- */

static json_t *gates_json(const struct policy_network *network) {
    json_t *root = json_object(), *layers = json_array();
    for (uint32_t layer = 0; layer < network->shape.layers; layer++) {
        json_t *row = json_array();
        for (uint32_t k = 0; k < network->shape.kv_heads; k++)
            json_array_append_new(row, json_real(rlkv_gate(network, layer * network->shape.kv_heads + k)));
        json_array_append_new(layers, row);
    }
    json_object_set_new(root, "gates", layers);
    json_object_set_new(root, "method", json_string("rlkv"));
    json_object_set_new(root, "fingerprint", json_string(network->fingerprint));
    json_object_set_new(root, "record", json_loads(network->record, 0, NULL));
    return root;
}

static bool write_line(void *text, FILE *out) {
    return fputs(text, out) >= 0 && fputc('\n', out) != EOF;
}

int rlkv_save(const struct policy_network *network, const char *file, struct error *error) {
    json_t *root = gates_json(network);
    char *text = json_dumps(root, JSON_INDENT(1) | JSON_REAL_PRECISION(6));
    json_decref(root);
    if (text == NULL)
        return error_set(error, ERROR_MEMORY, "no memory to write %.200s", file);
    int code = replace_file(file, write_line, text, error);
    free(text);
    return code;
}

/* ---- begin and end ---- */

static uint32_t gates_steps(const struct train_options *options) {
    return options->gate_steps;
}

static void gates_end(struct training *training) {
    struct gates_state *state = training->stage_state;
    if (state == NULL)
        return;
    free(state->masks);
    free(state->kl);
    free(state);
    training->stage_state = NULL;
}

static int gates_begin(struct training *training, struct error *error) {
    uint32_t students = training->options->students;
    struct gates_state *state = calloc(1, sizeof *state);
    training->stage_state = state;
    if (state == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for the stage gates");
    state->training = training;
    state->model = engine_model(training->engine);
    state->heads = heads_of(training->network);
    state->students = students < ROLLOUT_STUDENTS_MAX ? students : ROLLOUT_STUDENTS_MAX;
    state->masks = malloc((size_t)state->students * state->heads);
    state->kl = malloc((size_t)state->students * training->options->rollout * sizeof *state->kl);
    return state->masks != NULL && state->kl != NULL ? 0
                                                     : error_set(error, ERROR_MEMORY, "no memory for the stage gates");
}

/* ---- a step ---- */

/* Heads of sliding layers keep their window, whatever their gates say: those stay as they are. */
static bool slides(const struct gates_state *state, uint32_t head) {
    return state->model->windows[head / state->model->shape.kv_heads] != 0;
}

/* Heads that keep everything, and the student that acts by them. */
static int draw_student(
    struct gates_state *state, uint32_t index, struct rollout_student *student, struct error *error) {
    const struct training *training = state->training;
    uint8_t *mask = state->masks + (size_t)index * state->heads;
    struct head_gates *gates = create_gates(training->network);
    uint32_t full = 0, pruned = state->model->shape.global_layers * state->model->shape.kv_heads;
    *student = (struct rollout_student){.choose = NULL};
    int code = set_gates(training->network, gates, &student->settings, error);
    if (code != 0)
        return code;
    for (uint32_t h = 0; h < state->heads; h++) {
        double uniform =
            (double)random_uniform(training->options->seed, STREAM_MASKS + index, (uint32_t)training->stage_step, h);
        mask[h] = uniform < rlkv_gate(training->network, h);
        gates->values[h] = mask[h];
        full += mask[h] != 0 && !slides(state, h);
    }
    student->settings.sparsity = (float)((double)(pruned - full) / pruned);
    return 0;
}

static int roll_out(struct gates_state *state, struct error *error) {
    struct training *training = state->training;
    struct rollout_student students[ROLLOUT_STUDENTS_MAX];
    struct dataset_sequence data;
    uint32_t count = 0;
    int code = dataset_sequence(training->dataset, GATES_FIRST + training->stage_step, &data, error);
    for (; code == 0 && count < state->students; count++)
        code = draw_student(state, count, &students[count], error);
    struct rollout_plan plan = rollout_plan_of(training, &data, students, state->students);
    if (code == 0)
        code = rollout_run(training, &plan, state->kl, NULL, NULL, error);
    for (uint32_t i = 0; i < count; i++)
        policy_settings_release(&students[i].settings);
    return code;
}

void rlkv_gradient(const struct policy_network *network, const uint8_t *masks, const double *rewards, uint32_t students,
    double penalty, float *gradient) {
    double advantages[ROLLOUT_STUDENTS_MAX];
    uint32_t heads = heads_of(network);
    baseline_group(rewards, students, advantages);
    for (uint32_t h = 0; h < heads; h++) {
        double gate = rlkv_gate(network, h), slope = -penalty * gate * (1 - gate);
        for (uint32_t s = 0; s < students; s++)
            slope += advantages[s] * (masks[(size_t)s * heads + h] - gate) / students;
        gradient[h] -= (float)slope;
    }
}

/* Where the logits' gradient lies. */
static float *find_logits(const struct policy_network *network, struct gradient *gradient) {
    struct network_array array;
    size_t at = 0;
    for (uint32_t i = 0; network_array(network, i, &array) && array.values != network->skip; i++)
        at += array.trained ? array.count : 0;
    return gradient->values + at;
}

/* Mean over heads of the entropy of a gate's draw. */
static double mean_entropy(const struct gates_state *state) {
    uint32_t heads = 0;
    double sum = 0;
    for (uint32_t h = 0; h < state->heads; h++) {
        if (slides(state, h))
            continue;
        double gate = rlkv_gate(state->training->network, h);
        sum -= gate * log(fmax(gate, 1e-12)) + (1 - gate) * log(fmax(1 - gate, 1e-12));
        heads++;
    }
    return sum / heads;
}

static int gates_step(struct training *training, struct stage_result *result, struct error *error) {
    struct gates_state *state = training->stage_state;
    const struct train_options *options = training->options;
    struct adamw_options optimiser = reinforce_optimiser(options, options->gate_steps);
    double rewards[ROLLOUT_STUDENTS_MAX];
    int code = roll_out(state, error);
    if (code != 0)
        return code;
    result->reward = 0;
    for (uint32_t s = 0; s < state->students; s++) {
        rewards[s] = rollout_reward(state->kl + (size_t)s * options->rollout, options->rollout);
        result->reward += rewards[s] / state->students;
    }
    result->entropy = mean_entropy(state);
    gradient_clear(training->gradient);
    float *logits = find_logits(training->network, training->gradient);
    rlkv_gradient(training->network, state->masks, rewards, state->students, (double)options->gate_penalty, logits);
    for (uint32_t h = 0; h < state->heads; h++)
        logits[h] = slides(state, h) ? 0 : logits[h];
    result->learning_rate = adamw_rate(&optimiser, training->adamw->step);
    result->gradient_norm = adamw_update(training->adamw, &optimiser, training->gradient, training->network);
    return 0;
}

const struct train_stage stage_gates = {
    .name = "gates", .steps = gates_steps, .begin = gates_begin, .step = gates_step, .end = gates_end};
