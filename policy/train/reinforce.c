/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/train/reinforce.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/random.h"
#include "policy/budget.h"
#include "policy/train/actor.h"
#include "policy/train/baseline.h"
#include "policy/train/foresight.h"
#include "policy/train/ranking.h"
#include "policy/train/rollout.h"

enum { STREAM_KL = 0x4B4C5245, BATCH_BYTES = 32 << 20 };
/* Sequences of the data set before this one are those of other stages. */
#define KL_FIRST (UINT64_C(1) << 26)

struct kl_state;

/* One student of the rollout at work. */
struct kl_student {
    struct kl_state *state;
    uint32_t index;
    bool frozen; /* standard is set */
    bool lost_any;
    bool *lost;           /* [heads] something was evicted */
    float (*standard)[6]; /* [heads] FEATURES_PAPER */
};

struct kl_state {
    struct training *training;
    struct actor *actor;
    struct network_shape bare;     /* without content */
    uint32_t heads;                /* of the model */
    uint32_t layers;               /* that are pruned: those that do not slide */
    const uint32_t *layer_numbers; /* [layers] their places among the model's */
    uint32_t students_count, prunes, capacity, batch_layers;
    struct kl_student students[ROLLOUT_STUDENTS_MAX];
    uint32_t prompt;    /* tokens, of the rollout at work */
    uint32_t *prune_at; /* [prunes] */
    /* A head as the engine gives it: [capacity]. */
    struct head_features features;
    /* Heads of a batch: [batch_heads] rows of [capacity]. */
    struct actor_head *batch;
    float *inputs, *keys;
    uint32_t *positions, *slots;
    uint8_t *keep;
    /* A prune. */
    uint32_t *budgets; /* [heads that are pruned] */
    uint32_t *kept;    /* [heads][capacity] */
    const uint32_t **lists;
    uint32_t *counts;
    /* A step. */
    float *kl;          /* [students][rollout] */
    double *rewards;    /* the same */
    double *advantages; /* [students][prunes] */
    double *work;       /* [students] */
    /* Method foresight, else NULL: [rollout] of the teacher's distributions. */
    float *entropies, *sorted;
    bool *low;
};

static uint32_t kl_steps(const struct train_options *options) {
    return options->kl_steps;
}

/* ---- begin and end ---- */

static void close_features(struct head_features *features) {
    free(features->positions);
    free(features->sum);
    free(features->squared);
    free(features->entropy);
    free(features->keys);
    free(features->value_norm);
    free(features->output_norm);
}

static void kl_end(struct training *training) {
    if (training->options->reward == REWARD_RANKING) {
        ranking_end(training);
        return;
    }
    struct kl_state *state = training->stage_state;
    if (state == NULL)
        return;
    actor_free(state->actor);
    for (uint32_t i = 0; i < ROLLOUT_STUDENTS_MAX; i++) {
        free(state->students[i].lost);
        free(state->students[i].standard);
    }
    close_features(&state->features);
    free(state->prune_at);
    free(state->batch);
    free(state->inputs);
    free(state->keys);
    free(state->positions);
    free(state->slots);
    free(state->keep);
    free(state->budgets);
    free(state->kept);
    free(state->lists);
    free(state->counts);
    free(state->kl);
    free(state->rewards);
    free(state->advantages);
    free(state->work);
    free(state->entropies);
    free(state->sorted);
    free(state->low);
    free(state);
    training->stage_state = NULL;
}

/* Heads that are pruned, one after the other: their number, and the place of one among the model's. */
static uint32_t pruned_heads(const struct kl_state *state) {
    return state->layers * state->bare.kv_heads;
}

static uint32_t head_at(const struct kl_state *state, uint32_t index) {
    uint32_t kv_heads = state->bare.kv_heads;
    return state->layer_numbers[index / kv_heads] * kv_heads + index % kv_heads;
}

static bool wants(const struct network_shape *shape, enum network_input input) {
    return (shape->inputs >> input & 1) != 0;
}

/* Room for what the network is fed with; what it is not fed with is not asked for. */
static bool open_features(struct kl_state *state) {
    struct head_features *features = &state->features;
    const struct network_shape *shape = &state->training->network->shape;
    size_t slots = state->capacity;
    bool value = wants(shape, INPUT_VALUE_NORM), output = wants(shape, INPUT_OUTPUT_NORM);
    *features = (struct head_features){.capacity = state->capacity,
        .positions = malloc(slots * sizeof(uint32_t)),
        .sum = malloc(slots * sizeof(float)),
        .squared = malloc(slots * sizeof(float)),
        .entropy = malloc(slots * sizeof(float)),
        .keys = shape->content > 0 ? malloc(slots * shape->head_dim * sizeof(float)) : NULL,
        .value_norm = value ? malloc(slots * sizeof(float)) : NULL,
        .output_norm = output ? malloc(slots * sizeof(float)) : NULL};
    return features->positions != NULL && features->sum != NULL && features->squared != NULL &&
           features->entropy != NULL && (features->keys != NULL || shape->content == 0) &&
           (features->value_norm != NULL || !value) && (features->output_norm != NULL || !output);
}

static uint32_t layers_of_batch(const struct kl_state *state) {
    const struct policy_network *network = state->training->network;
    const struct network_shape *shape = &network->shape;
    size_t slot = (network_inputs_count(shape) + shape->head_dim + 8) * sizeof(float);
    size_t layers = BATCH_BYTES / (slot * state->capacity * shape->kv_heads);
    if (network->scope == SCOPE_MODEL || layers > state->layers)
        return state->layers;
    return layers > 0 ? (uint32_t)layers : 1;
}

static bool open_batch(struct kl_state *state) {
    const struct network_shape *shape = &state->training->network->shape;
    size_t rows = (size_t)state->batch_layers * shape->kv_heads, slots = rows * state->capacity;
    size_t keys = shape->content > 0 ? slots * shape->head_dim : 0;
    state->batch = calloc(rows, sizeof *state->batch);
    state->inputs = malloc((slots * network_inputs_count(&state->bare) + 1) * sizeof *state->inputs);
    state->keys = malloc((keys + 1) * sizeof *state->keys);
    state->positions = malloc(slots * sizeof *state->positions);
    state->slots = malloc(slots * sizeof *state->slots);
    state->keep = malloc(slots);
    state->budgets = malloc(state->heads * sizeof *state->budgets);
    state->kept = malloc((size_t)state->heads * state->capacity * sizeof *state->kept);
    state->lists = calloc(state->heads, sizeof *state->lists);
    state->counts = calloc(state->heads, sizeof *state->counts);
    return state->batch != NULL && state->inputs != NULL && state->keys != NULL && state->positions != NULL &&
           state->slots != NULL && state->keep != NULL && state->budgets != NULL && state->kept != NULL &&
           state->lists != NULL && state->counts != NULL;
}

static bool open_students(struct kl_state *state) {
    for (uint32_t i = 0; i < state->students_count; i++) {
        struct kl_student *student = &state->students[i];
        *student = (struct kl_student){.state = state,
            .index = i,
            .lost = calloc(state->heads, sizeof *student->lost),
            .standard = calloc(state->heads, sizeof *student->standard)};
        if (student->lost == NULL || student->standard == NULL)
            return false;
    }
    return true;
}

static bool open_step(struct kl_state *state) {
    size_t students = state->students_count, steps = state->training->options->rollout;
    state->prune_at = calloc(state->prunes, sizeof *state->prune_at);
    state->kl = malloc(students * steps * sizeof *state->kl);
    state->rewards = malloc(students * steps * sizeof *state->rewards);
    state->advantages = malloc(students * state->prunes * sizeof *state->advantages);
    state->work = malloc(students * sizeof *state->work);
    if (state->training->options->method == TRAIN_FORESIGHT) {
        state->entropies = calloc(steps, sizeof *state->entropies);
        state->sorted = malloc(steps * sizeof *state->sorted);
        state->low = calloc(steps, sizeof *state->low);
        if (state->entropies == NULL || state->sorted == NULL || state->low == NULL)
            return false;
    }
    return state->prune_at != NULL && state->kl != NULL && state->rewards != NULL && state->advantages != NULL &&
           state->work != NULL;
}

static bool open_actor(struct kl_state *state) {
    const struct train_options *options = state->training->options;
    struct actor_options actor = {.sampler = options->sampler,
        .temperature = options->temperature,
        .seed = options->seed,
        .students = state->students_count,
        .prunes = state->prunes,
        .heads_most = state->batch_layers * state->training->network->shape.kv_heads,
        .slots_most = state->capacity,
        .network = state->training->network,
        .threads = state->training->threads};
    state->actor = actor_create(&actor);
    return state->actor != NULL;
}

static int kl_begin(struct training *training, struct error *error) {
    if (training->options->reward == REWARD_RANKING)
        return ranking_begin(training, error);
    const struct train_options *options = training->options;
    const struct network_shape *shape = &training->network->shape;
    struct kl_state *state = calloc(1, sizeof *state);
    training->stage_state = state;
    if (state == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for the stage kl");
    state->training = training;
    state->bare = *shape;
    state->bare.content = 0;
    state->heads = shape->layers * shape->kv_heads;
    state->layers = engine_model(training->engine)->shape.global_layers;
    state->layer_numbers = engine_model(training->engine)->global_layers;
    state->students_count = options->students < ROLLOUT_STUDENTS_MAX ? options->students : ROLLOUT_STUDENTS_MAX;
    state->prunes = 1 + (options->rollout - 2) / training->network->interval; /* those that a step follows */
    state->capacity = (options->prompt_most + options->rollout) / KV_PAGE_SLOTS * KV_PAGE_SLOTS + 2 * KV_PAGE_SLOTS;
    state->batch_layers = layers_of_batch(state);
    bool there =
        open_features(state) && open_batch(state) && open_students(state) && open_step(state) && open_actor(state);
    return there ? 0 : error_set(error, ERROR_MEMORY, "no memory for the stage kl");
}

/* ---- a prune ---- */

/* Reads a head (`index` of those that are pruned) into row `row` of the batch, without empty slots. */
static int read_head(
    struct kl_student *student, struct sequence *sequence, uint32_t index, uint32_t row, struct error *error) {
    struct kl_state *state = student->state;
    uint32_t head = head_at(state, index);
    struct head_features *features = &state->features;
    const struct network_shape *shape = &state->training->network->shape;
    size_t first = (size_t)row * state->capacity, dim = shape->head_dim, width = network_inputs_count(&state->bare);
    int code = sequence_features(sequence, head / shape->kv_heads, head % shape->kv_heads, features, error);
    if (code != 0)
        return code;
    uint32_t count = 0;
    for (uint32_t i = 0; i < features->slots; i++) {
        if (features->positions[i] == KV_NO_POSITION)
            continue;
        float *numbers[] = {
            features->sum, features->squared, features->entropy, features->value_norm, features->output_norm};
        for (size_t n = 0; n < sizeof numbers / sizeof *numbers; n++)
            if (numbers[n] != NULL)
                numbers[n][count] = numbers[n][i];
        if (features->keys != NULL)
            memcpy(state->keys + (first + count) * dim, features->keys + i * dim, dim * sizeof(float));
        state->positions[first + count] = features->positions[i];
        state->slots[first + count++] = i;
    }
    uint32_t seen = sequence_length(sequence);
    struct network_slots slots = {.count = count,
        .seen = seen,
        .budget = policy_budget(sequence_policy(sequence), seen),
        .positions = state->positions + first,
        .sum = features->sum,
        .squared = features->squared,
        .entropy = features->entropy,
        .value_norm = features->value_norm,
        .output_norm = features->output_norm};
    network_gather(&state->bare, &slots, state->inputs + first * width);
    if (!student->frozen)
        network_standardise(&state->bare, state->inputs + first * width, count, student->standard[head]);
    state->batch[row] = (struct actor_head){.head = head,
        .budget = state->budgets[index],
        .slots = {.count = count,
            .inputs = state->inputs + first * width,
            .keys = features->keys != NULL ? state->keys + first * dim : NULL,
            .standard = student->standard[head]},
        .positions = state->positions + first,
        .keep = state->keep + first};
    return 0;
}

/* Budgets of heads as engine_prune has them: a summary slot is one of a head's. */
static void allocate_budgets(const struct kl_student *student, struct sequence *sequence) {
    const struct kl_state *state = student->state;
    const struct policy_settings *settings = sequence_policy(sequence);
    struct budget_input input = {.settings = settings,
        .layers = state->layers,
        .numbers = state->layer_numbers,
        .kv_heads = state->bare.kv_heads,
        .seen = sequence_length(sequence)};
    budget_allocate(&input, state->budgets);
    for (uint32_t i = 0; settings->summary && i < pruned_heads(state); i++) {
        uint32_t h = head_at(state, i);
        uint32_t slots = kv_sequence_slots(sequence_kv(sequence), h / input.kv_heads, h % input.kv_heads);
        bool has = student->lost[h] || slots > state->budgets[i] || settings->scope != SCOPE_HEAD;
        state->budgets[i] -= has && state->budgets[i] > 1;
    }
}

/* Whether engine_prune would evict anything. */
static bool is_over(const struct kl_student *student, struct sequence *sequence) {
    const struct policy_settings *settings = sequence_policy(sequence);
    const struct kl_state *state = student->state;
    uint32_t kv_heads = state->bare.kv_heads, budget = policy_budget(settings, sequence_length(sequence));
    budget -= settings->summary && student->lost_any && budget > 1;
    for (uint32_t i = 0; i < pruned_heads(state); i++) {
        uint32_t h = head_at(state, i);
        if (kv_sequence_tokens(sequence_kv(sequence), h / kv_heads, h % kv_heads) > budget)
            return true;
    }
    return false;
}

/* What stays of the batch's heads, as lists of slots. */
static void list_kept(struct kl_student *student, uint32_t rows) {
    struct kl_state *state = student->state;
    for (uint32_t r = 0; r < rows; r++) {
        const struct actor_head *head = &state->batch[r];
        uint32_t *list = state->kept + (size_t)head->head * state->capacity, count = 0;
        for (uint32_t i = 0; i < head->slots.count; i++)
            if (head->keep[i])
                list[count++] = state->slots[(size_t)r * state->capacity + i];
        state->counts[head->head] = count;
        state->lists[head->head] = list;
        student->lost[head->head] |= count < head->slots.count;
        student->lost_any |= count < head->slots.count;
    }
}

/* Heads of layers [first, end) of those that are pruned. */
static int draw_layers(struct kl_student *student, struct sequence *sequence, uint32_t prune, uint32_t first,
    uint32_t end, struct error *error) {
    struct kl_state *state = student->state;
    uint32_t kv_heads = state->bare.kv_heads, rows = (end - first) * kv_heads, seen = sequence_length(sequence);
    struct actor_prune draw = {.network = state->training->network,
        .step = state->training->stage_step,
        .student = student->index,
        .prune = prune,
        .learns = true,
        .heads = state->batch,
        .heads_count = rows};
    const struct policy_settings *settings = sequence_policy(sequence);
    policy_protection(settings, seen, policy_budget(settings, seen), &draw.sinks, &draw.recent_from);
    int code = 0;
    for (uint32_t r = 0; code == 0 && r < rows; r++)
        code = read_head(student, sequence, first * kv_heads + r, r, error);
    if (code == 0)
        code = actor_draw(state->actor, &draw, error);
    if (code == 0)
        list_kept(student, rows);
    return code;
}

/* Keeps all there is. */
static int keep_all(struct kl_student *student, struct sequence *sequence, struct error *error) {
    struct kl_state *state = student->state;
    for (uint32_t i = 0; i < pruned_heads(state); i++) {
        uint32_t h = head_at(state, i), kv_heads = state->bare.kv_heads,
                 *list = state->kept + (size_t)h * state->capacity;
        state->counts[h] = kv_sequence_slots(sequence_kv(sequence), h / kv_heads, h % kv_heads);
        state->lists[h] = list;
        for (uint32_t slot = 0; slot < state->counts[h]; slot++)
            list[slot] = slot;
    }
    return sequence_prune_to(sequence, state->lists, state->counts, error);
}

/* rollout_student.choose. After the last step nothing depends on it any more. */
static int choose(void *context, struct sequence *sequence, uint32_t prune, struct error *error) {
    struct kl_student *student = context;
    struct kl_state *state = student->state;
    uint32_t at = sequence_length(sequence) - state->prompt, layers = state->layers, step = state->batch_layers;
    if (prune >= state->prunes)
        return keep_all(student, sequence, error);
    state->prune_at[prune] = at;
    if (!is_over(student, sequence))
        return keep_all(student, sequence, error);
    allocate_budgets(student, sequence);
    for (uint32_t first = 0; first < layers; first += step) {
        int code = draw_layers(student, sequence, prune, first, first + step < layers ? first + step : layers, error);
        if (code == 0)
            code = train_yield(state->training);
        if (code != 0)
            return code;
    }
    student->frozen = true;
    return sequence_prune_to(sequence, state->lists, state->counts, error);
}

/* ---- returns ---- */

/* Of the prune after step `at`; *steps: the same of rewards of 1. */
static double return_of(const struct reinforce_rollouts *rollouts, uint32_t student, uint32_t at, double *steps) {
    const double *rewards = rollouts->rewards + (size_t)student * rollouts->steps;
    double sum = 0, factor = 1;
    *steps = 0;
    for (uint32_t t = at + 1; t < rollouts->steps && t - at <= rollouts->horizon; t++) {
        sum += factor * rewards[t];
        *steps += factor;
        factor *= rollouts->discount;
    }
    return sum;
}

void reinforce_advantages(const struct reinforce_rollouts *rollouts, double *advantages, double *work) {
    uint32_t students = rollouts->students;
    for (uint32_t p = 0; p < rollouts->prunes; p++) {
        double steps = 0;
        for (uint32_t s = 0; s < students; s++)
            work[s] = return_of(rollouts, s, rollouts->prune_at[p], &steps);
        if (rollouts->group)
            baseline_group(work, students, work);
        else
            baseline_advantages(work, students, rollouts->average * steps, work);
        for (uint32_t s = 0; s < students; s++)
            advantages[(size_t)s * rollouts->prunes + p] = work[s];
    }
}

struct adamw_options reinforce_optimiser(const struct train_options *options, uint32_t steps) {
    return (struct adamw_options){.peak = options->learning_rate,
        .final = 0,
        .warmup = options->warmup_steps,
        .total = steps,
        .beta1 = 0.9f,
        .beta2 = 0.999f,
        .epsilon = 1e-8f,
        .decay = options->weight_decay,
        .clip = options->clip};
}

void reinforce_keep_content(const struct policy_network *network, struct gradient *gradient) {
    struct network_array array;
    size_t at = 0;
    for (uint32_t i = 0; network_array(network, i, &array); i++) {
        if (!array.trained)
            continue;
        if (array.values == network->content || array.values == network->content_offset)
            memset(gradient->values + at, 0, array.count * sizeof *gradient->values);
        at += array.count;
    }
}

/* ---- a step ---- */

static void reset(void *context) {
    struct kl_state *state = context;
    actor_clear(state->actor);
    for (uint32_t i = 0; i < state->students_count; i++) {
        memset(state->students[i].lost, 0, state->heads * sizeof *state->students[i].lost);
        state->students[i].frozen = state->students[i].lost_any = false;
    }
}

static int roll_out(struct kl_state *state, uint32_t ratio, struct error *error) {
    struct training *training = state->training;
    const struct train_options *options = training->options;
    struct rollout_student students[ROLLOUT_STUDENTS_MAX];
    struct dataset_sequence data;
    int code = dataset_sequence(training->dataset, KL_FIRST + training->stage_step, &data, error);
    if (code != 0)
        return code;
    for (uint32_t i = 0; i < state->students_count; i++) {
        students[i] = (struct rollout_student){.choose = choose, .context = &state->students[i]};
        policy_settings_default(policy_find("distillcache"), &students[i].settings);
        policy_settings_use_network(&students[i].settings, training->network);
        students[i].settings.ratio = options->ratios[ratio];
    }
    struct rollout_plan plan = rollout_plan_of(training, &data, students, state->students_count);
    plan.entropies = state->entropies;
    state->prompt = data.prompt;
    reset(state);
    code = rollout_run(training, &plan, state->kl, reset, state, error);
    for (uint32_t i = 0; i < state->students_count; i++)
        policy_settings_release(&students[i].settings);
    return code;
}

/* Rewards of all steps, and means over students: of -KL per step, of entropy per prune. */
static void reward(struct kl_state *state, struct stage_result *result) {
    const struct train_options *options = state->training->options;
    uint32_t students = state->students_count, steps = options->rollout;
    if (state->entropies != NULL)
        foresight_low_entropy(state->entropies, steps, state->low, state->sorted);
    result->reward = result->entropy = 0;
    for (uint32_t s = 0; s < students; s++) {
        double *rewards = state->rewards + (size_t)s * steps;
        for (uint32_t t = 0; t < steps; t++) {
            rewards[t] = -(double)state->kl[(size_t)s * steps + t];
            result->reward += t > 0 ? rewards[t] / (steps - 1) / students : 0;
            if (state->entropies != NULL && !state->low[t])
                rewards[t] = 0;
        }
        for (uint32_t p = 0; p < state->prunes; p++) {
            double entropy = actor_entropy(state->actor, s, p);
            rewards[state->prune_at[p] + 1] += (double)options->entropy * entropy;
            result->entropy += entropy / state->prunes / students;
        }
    }
}

/* What the rewards were per step, bonus and all. */
static double mean_reward(const struct kl_state *state) {
    size_t steps = state->training->options->rollout, all = state->students_count * steps;
    double sum = 0;
    for (size_t i = 0; i < all; i++)
        sum += i % steps > 0 ? state->rewards[i] : 0;
    return sum / (double)(all - state->students_count);
}

static int kl_step(struct training *training, struct stage_result *result, struct error *error) {
    if (training->options->reward == REWARD_RANKING)
        return ranking_step(training, result, error);
    struct kl_state *state = training->stage_state;
    const struct train_options *options = training->options;
    struct adamw_options optimiser = reinforce_optimiser(options, options->kl_steps);
    uint32_t words[4];
    random_philox(options->seed, STREAM_KL, 0, training->stage_step, words);
    uint32_t ratio = words[0] % options->ratios_count;
    for (uint32_t p = 0; p < state->prunes; p++) /* as they will be, where there is nothing to evict at all too */
        state->prune_at[p] = p * training->network->interval;
    int code = roll_out(state, ratio, error);
    if (code != 0)
        return code;
    reward(state, result);
    struct reinforce_rollouts rollouts = {.students = state->students_count,
        .steps = options->rollout,
        .prunes = state->prunes,
        .rewards = state->rewards,
        .prune_at = state->prune_at,
        .horizon = options->reward == REWARD_ROLLOUT8 ? REINFORCE_HORIZON : UINT32_MAX,
        .discount = (double)options->discount,
        .average = training->baselines[ratio],
        .group = options->method == TRAIN_FORESIGHT};
    reinforce_advantages(&rollouts, state->advantages, state->work);
    training->baselines[ratio] =
        baseline_moving(training->baselines[ratio], mean_reward(state), (double)options->baseline_decay);
    actor_gradient(state->actor, state->advantages, training->gradient);
    reinforce_keep_content(training->network, training->gradient);
    result->learning_rate = adamw_rate(&optimiser, training->adamw->step);
    result->gradient_norm = adamw_update(training->adamw, &optimiser, training->gradient, training->network);
    return 0;
}

const struct train_stage stage_kl = {
    .name = "kl", .steps = kl_steps, .begin = kl_begin, .step = kl_step, .end = kl_end};
