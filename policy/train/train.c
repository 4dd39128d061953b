/* SPDX-License-Identifier: Apache-2.0
 *
 * The run: opens what stages need, calls them in turn, compares, saves, reports. Times go into events only.
 */
#include "policy/train/train.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/clock.h"
#include "engine/cpu/threads.h"
#include "policy/train/checkpoint.h"
#include "policy/train/record.h"
#include "policy/train/rlkv.h"
#include "policy/train/start.h"

/* In the order in which they run. */
static const struct train_stage *const stages[] = {
    &stage_rank, &stage_rank_pruned, &stage_local, &stage_kl, &stage_kl_parameter, &stage_gates};
enum { STAGES = sizeof stages / sizeof stages[0], REPORTS_MOST = 200 /* of a stage; short ones report every step */ };

struct run {
    struct run_state state; /* first: training is its first member */
    uint64_t steps;         /* of all stages */
    const char *stage_name; /* of the stage at work, or the last one */
    bool begun;             /* has turns of the background */
    double start, last;     /* of the run, of the last report */
    double steps_start;     /* when the stage's preparation was done */
    uint64_t first_step;    /* and which step that was */
    uint64_t first_tokens;  /* computed before the stage's preparation */
    uint64_t last_tokens;
    char message[256];
};

static struct run *run_of(struct training *training) {
    return (struct run *)training;
}

/* ---- giving way ---- */

static bool asked_to_stop(const struct training *training) {
    const struct train_run *run = training->run;
    return run->stopped != NULL && run->stopped(run->context);
}

int train_yield(struct training *training) {
    if (asked_to_stop(training))
        return ERROR_CANCELLED;
    if (training->run->background == NULL)
        return 0;
    switch (background_yield(training->run->background)) {
    case BACKGROUND_GO_ON:
        return 0;
    case BACKGROUND_GIVE_UP_PAGES:
        return TRAIN_AGAIN;
    case BACKGROUND_STOP:
        break;
    }
    return ERROR_CANCELLED;
}

int train_gave_up(struct training *training) {
    return background_gave_up(training->run->background) == BACKGROUND_STOP ? ERROR_CANCELLED : 0;
}

bool train_may_wait(const struct training *training) {
    const struct kv_cache *cache = engine_kv_cache(training->engine);
    return training->run->background != NULL && kv_cache_pages_free(cache) < kv_cache_pages_total(cache);
}

int train_pause(struct training *training) {
    int code = train_yield(training);
    return code == TRAIN_AGAIN ? train_gave_up(training) : code;
}

static int begin_turns(struct run *run) {
    if (run->state.training.run->background == NULL)
        return 0;
    run->begun = background_begin(run->state.training.run->background) != BACKGROUND_STOP;
    return run->begun ? 0 : ERROR_CANCELLED;
}

static void end_turns(struct run *run) {
    if (run->begun)
        background_end(run->state.training.run->background);
    run->begun = false;
}

/* ---- events ---- */

static struct train_event event_of(const struct run *run, enum train_event_kind kind) {
    const struct training *training = &run->state.training;
    return (struct train_event){.kind = kind,
        .message = run->message,
        .stage = run->stage_name,
        .step = training->step,
        .steps = run->steps,
        .loss = NAN,
        .reward = NAN,
        .entropy = NAN,
        .gradient_norm = NAN,
        .learning_rate = NAN,
        .kl_valid = NAN,
        .kl_valid_relative = NAN,
        .tokens_per_second = NAN,
        .seconds_left = NAN,
        .seconds = clock_seconds() - run->start,
        .tokens = training->tokens};
}

static void emit(const struct run *run, const struct train_event *event) {
    const struct train_run *options = run->state.training.run;
    if (options->event != NULL)
        options->event(options->context, event);
}

static void say(struct run *run, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(struct run *run, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(run->message, sizeof run->message, format, arguments);
    va_end(arguments);
    struct train_event event = event_of(run, TRAIN_EVENT_MESSAGE);
    emit(run, &event);
}

void train_progress(struct training *training, const char *what, uint64_t done, uint64_t all) {
    say(run_of(training), "%s: %s %llu of %llu", stages[training->stage]->name, what, (unsigned long long)done,
        (unsigned long long)all);
}

/* Time left by the steps of the stage in this process so far; the preparation of other stages is not foreseen. */
static void add_times(struct run *run, struct train_event *event) {
    double now = clock_seconds();
    uint64_t done = event->step - run->first_step, tokens = event->tokens - run->last_tokens;
    if (done > 0)
        event->seconds_left = (now - run->steps_start) / (double)done * (double)(run->steps - event->step);
    if (now > run->last && event->tokens >= run->last_tokens)
        event->tokens_per_second = (double)tokens / (now - run->last);
    run->last = now;
    run->last_tokens = event->tokens;
}

static void add_sums(struct report_sums *sums, const struct stage_result *result) {
    sums->loss += result->loss;
    sums->reward += result->reward;
    sums->entropy += result->entropy;
    sums->gradient_norm += result->gradient_norm;
    sums->learning_rate = result->learning_rate;
    sums->steps++;
}

/* Means since the last report; validation NULL: none was made at this step. */
static void report(struct run *run, const struct validation *validation) {
    struct report_sums *sums = &run->state.sums;
    struct train_event event = event_of(run, TRAIN_EVENT_METRICS);
    double steps = (double)sums->steps;
    event.loss = sums->loss / steps;
    event.reward = sums->reward / steps;
    event.entropy = sums->entropy / steps;
    event.gradient_norm = sums->gradient_norm / steps;
    event.learning_rate = sums->learning_rate;
    if (validation != NULL) {
        event.kl_valid = validation->kl;
        event.kl_valid_relative = validation->relative;
    }
    add_times(run, &event);
    int at = snprintf(run->message, sizeof run->message, "%s: step %llu of %llu", event.stage,
        (unsigned long long)event.step, (unsigned long long)event.steps);
    if (!isnan(event.loss))
        at += snprintf(run->message + at, sizeof run->message - (size_t)at, ", loss %.4f", event.loss);
    if (!isnan(event.reward))
        at += snprintf(run->message + at, sizeof run->message - (size_t)at, ", reward %.4f", event.reward);
    if (validation != NULL)
        snprintf(run->message + at, sizeof run->message - (size_t)at, ", held-out KL %.4f, %.3f of h2o's",
            validation->kl, validation->relative);
    emit(run, &event);
    *sums = (struct report_sums){0};
}

/* ---- opening ---- */

static int load_data(struct training *training, struct error *error) {
    const struct train_options *options = training->options;
    const struct train_run *run = training->run;
    uint32_t recorded = record_tokens(options, options->pruned_steps > 0, options->interval);
    uint32_t future = recorded > options->rollout ? recorded : options->rollout;
    struct dataset_options data = {.tokenizer = run->tokenizer,
        .chat = run->chat,
        .least = options->prompt_least,
        .most = options->prompt_most,
        .future = future,
        .copying = options->copying,
        .part = run->valid != NULL ? DATASET_ALL : DATASET_TRAIN,
        .seed = options->seed};
    uint32_t tokens = options->prompt_most + future, most = engine_tokens_max(run->engine);
    if (tokens > most)
        return error_set(error, ERROR_INVALID,
            "prompt_most: %u and %u tokens that follow are more than the %u that a sequence can have here",
            options->prompt_most, future, most);
    training->dataset = dataset_load(run->data, &data, error);
    return training->dataset == NULL ? error->code : 0;
}

static int open_run(struct run *run, const struct train_run *options, struct error *error) {
    struct run_state *state = &run->state;
    struct training *training = &state->training;
    uint32_t threads = options->threads > 0 ? options->threads : thread_count_available();
    training->run = options;
    training->options = &options->options;
    training->engine = options->engine;
    for (int s = 0; s < STAGES; s++)
        run->steps += stages[s]->steps(training->options);
    training->network = network_start(training->options, engine_model(options->engine), error);
    if (training->network == NULL)
        return error->code;
    training->threads = thread_pool_create(threads, error);
    if (training->threads == NULL)
        return error->code;
    training->gradient = gradient_create(training->network);
    training->adamw = adamw_create(network_parameters_count(training->network));
    training->baselines = malloc(TRAIN_RATIOS_MAX * sizeof *training->baselines);
    state->validated = calloc(VALIDATED_MAX, sizeof *state->validated);
    if (training->gradient == NULL || training->adamw == NULL || training->baselines == NULL ||
        state->validated == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for the training of a network");
    for (int i = 0; i < TRAIN_RATIOS_MAX; i++)
        training->baselines[i] = NAN;
    int code = load_data(training, error);
    if (code != 0 || training->options->valid_prompts == 0)
        return code;
    training->validator = validator_create(training, error);
    return training->validator == NULL ? error->code : 0;
}

static void close_run(struct run *run) {
    struct run_state *state = &run->state;
    struct training *training = &state->training;
    validator_free(training->validator);
    dataset_free(training->dataset);
    network_release(training->network);
    network_release(training->stage_network);
    network_release(state->best);
    free(state->validated);
    free(training->baselines);
    free(training->gradient);
    adamw_free(training->adamw);
    thread_pool_free(training->threads);
    end_turns(run);
}

/* ---- the record ---- */

static json_t *options_json(const struct train_options *options) {
    json_t *object = json_object();
    char value[256];
    for (uint32_t i = 0; i < train_options_count(); i++) {
        train_option_value(i, options, value, sizeof value);
        json_object_set_new(object, train_option_name(i), json_string(value));
    }
    return object;
}

static json_t *validated_json(const struct run_state *state) {
    json_t *list = json_array();
    for (uint32_t i = 0; i < state->validated_count; i++)
        json_array_append_new(list, json_pack("{s:I, s:f, s:f}", "step", (json_int_t)state->validated[i].step, "kl",
                                        state->validated[i].kl, "relative_to_h2o", state->validated[i].relative));
    return list;
}

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

/* How the network was trained; nothing in it depends on the machine or the time. */
static int write_record(
    const struct run_state *state, struct policy_network *network, uint64_t step, struct error *error) {
    const struct training *training = &state->training;
    json_t *record = json_object();
    json_object_set_new(record, "options", options_json(training->options));
    json_object_set_new(record, "model", json_string(engine_model(training->engine)->name));
    if (training->run->data != NULL)
        json_object_set_new(record, "data", json_string(base_name(training->run->data)));
    if (training->run->valid != NULL)
        json_object_set_new(record, "valid", json_string(base_name(training->run->valid)));
    json_object_set_new(record, "step", json_integer((json_int_t)step));
    json_object_set_new(record, "held_out", validated_json(state));
    char *text = json_dumps(record, JSON_COMPACT | JSON_SORT_KEYS | JSON_REAL_PRECISION(6));
    json_decref(record);
    if (text == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for the record of a training");
    free(network->record);
    network->record = text;
    return 0;
}

/* Layers that slide have learned nothing. What they have of their own is read when the network is carried over to a
 * model whose layers lie otherwise, and is made of that of their neighbours. */
static struct policy_network *copy_for_file(const struct training *training, const struct policy_network *network) {
    const struct model *model = engine_model(training->engine);
    const struct policy_model target = engine_policy_model(training->engine);
    bool plain = model->shape.global_layers == model->shape.layers || training->options->method == TRAIN_RLKV;
    if (plain || !network_can_carry(&network->shape))
        return network_copy(network);
    return network_carry(network, model->global_layers, model->shape.global_layers, &target, NULL);
}

static int save_network(const struct run_state *state, const struct policy_network *network, uint64_t step,
    const char *file, struct error *error) {
    struct policy_network *copy = copy_for_file(&state->training, network);
    if (copy == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a copy of the network");
    int code = write_record(state, copy, step, error);
    if (code == 0)
        code = state->training.options->method == TRAIN_RLKV ? rlkv_save(copy, file, error)
                                                             : network_save(copy, file, error);
    network_release(copy);
    return code;
}

/* ---- checkpoints and comparisons ---- */

/* Told before the state replaces the last one: the caller may see to it that what was told so far stays, since a run
 * that is resumed from this state does not tell it again. */
static int save_checkpoint(struct run *run, struct error *error) {
    struct training *training = &run->state.training;
    char *file = NULL;
    if (asprintf(&file, "%s/policy-%llu.%s", training->run->directory, (unsigned long long)training->step,
            training->options->method == TRAIN_RLKV ? "json" : "safetensors") < 0)
        return error_set(error, ERROR_MEMORY, "no memory for a checkpoint");
    int code = save_network(&run->state, training->network, training->step, file, error);
    if (code == 0) {
        snprintf(run->message, sizeof run->message, "checkpoint at step %llu", (unsigned long long)training->step);
        struct train_event event = event_of(run, TRAIN_EVENT_CHECKPOINT);
        event.file = file;
        emit(run, &event);
        code = checkpoint_save(&run->state, error);
    }
    free(file);
    return code;
}

/* Between pieces of work: live requests do not wait for the disk. */
static int write_checkpoint(struct run *run, struct error *error) {
    end_turns(run);
    int code = save_checkpoint(run, error);
    return code == 0 ? begin_turns(run) : code;
}

static int compare(struct run *run, struct validation *out, struct error *error) {
    struct run_state *state = &run->state;
    struct training *training = &state->training;
    int code = train_validate(training, training->network, out, error);
    if (code != 0)
        return code;
    uint32_t at = state->validated_count < VALIDATED_MAX ? state->validated_count++ : VALIDATED_MAX - 1;
    state->validated[at] = (struct validated){.step = training->step, .kl = out->kl, .relative = out->relative};
    if (state->best != NULL && out->kl >= state->validated[state->best_at].kl)
        return 0;
    struct policy_network *copy = network_copy(training->network);
    if (copy == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a copy of the network");
    network_release(state->best);
    state->best = copy;
    state->best_at = at;
    return 0;
}

/* ---- stages ---- */

static bool every(uint64_t step, uint64_t period) {
    return period > 0 && step % period == 0;
}

static int make_step(struct run *run, struct error *error) {
    struct training *training = &run->state.training;
    struct stage_result result = {
        .loss = NAN, .reward = NAN, .entropy = NAN, .gradient_norm = NAN, .learning_rate = NAN};
    uint64_t tokens = training->tokens;
    int code = stages[training->stage]->step(training, &result, error);
    if (code != 0) {
        training->tokens = tokens;
        return code;
    }
    training->stage_step++;
    training->step++;
    add_sums(&run->state.sums, &result);
    return 0;
}

/* What is due after a step. One that is interrupted here does it when it is resumed. */
static int settle(struct run *run, uint64_t steps, struct error *error) {
    struct training *training = &run->state.training;
    struct validation validation;
    uint64_t step = training->stage_step, period = (steps + REPORTS_MOST - 1) / REPORTS_MOST;
    bool last = step == steps;
    bool compared = training->validator != NULL && (last || every(step, training->options->valid_every));
    uint64_t tokens = training->tokens;
    int code = compared ? compare(run, &validation, error) : 0;
    if (code != 0) {
        training->tokens = tokens;
        return code;
    }
    if (compared || last || every(step, period))
        report(run, compared ? &validation : NULL);
    run->state.settled = training->step;
    return !last && every(step, training->options->checkpoint_every) ? write_checkpoint(run, error) : 0;
}

/* The next stage begins with a new optimiser. */
static void next_stage(struct training *training) {
    network_release(training->stage_network);
    training->stage_network = NULL;
    training->stage++;
    training->stage_step = 0;
    training->adamw->step = 0;
    memset(training->adamw->first, 0, training->adamw->count * sizeof *training->adamw->first);
    memset(training->adamw->second, 0, training->adamw->count * sizeof *training->adamw->second);
}

static bool is_settled(const struct run *run) {
    return run->state.settled == run->state.training.step;
}

static int make_steps(struct run *run, uint64_t steps, struct error *error) {
    struct training *training = &run->state.training;
    int code = 0;
    while (code == 0 && (training->stage_step < steps || !is_settled(run))) {
        if (!is_settled(run))
            code = settle(run, steps, error);
        else if ((code = train_pause(training)) == 0)
            code = make_step(run, error);
    }
    return code;
}

/* Makes the stage's state. What is computed again after a resumption is not counted again. */
static int begin_stage(struct run *run, struct error *error) {
    struct training *training = &run->state.training;
    const struct train_stage *stage = stages[training->stage];
    uint64_t steps = stage->steps(training->options);
    run->first_tokens = training->tokens;
    say(run, "%s: %llu steps", stage->name, (unsigned long long)(steps - training->stage_step));
    if (stage->keeps_network && training->stage_network == NULL) {
        training->stage_network = network_copy(training->network);
        if (training->stage_network == NULL)
            return error_set(error, ERROR_MEMORY, "no memory for a copy of the network");
    }
    int code = stage->begin(training, error);
    if (training->stage_step > 0)
        training->tokens = run->first_tokens;
    return code;
}

/* A stage that only has a comparison left is not begun again. */
static int run_stage(struct run *run, struct error *error) {
    struct training *training = &run->state.training;
    const struct train_stage *stage = stages[training->stage];
    uint64_t steps = stage->steps(training->options);
    bool begins = training->stage_step < steps;
    if (steps > 0)
        run->stage_name = stage->name;
    int code = begins ? begin_stage(run, error) : 0;
    run->steps_start = clock_seconds();
    run->first_step = training->step;
    if (code == 0)
        code = make_steps(run, steps, error);
    if (begins)
        stage->end(training);
    if (code != 0)
        return code;
    next_stage(training);
    return steps > 0 ? write_checkpoint(run, error) : 0;
}

/* Stopped within a step: what is saved is as it was before it. A run that has no step yet has nothing to save. */
static int leave(struct run *run, struct error *error) {
    struct training *training = &run->state.training;
    struct error failure = {0};
    if (training->stage_step == 0) /* the stage will be begun again */
        training->tokens = run->first_tokens;
    if (training->step > 0 && save_checkpoint(run, &failure) != 0)
        return error_set(error, failure.code, "%s", failure.message);
    return error_set(error, ERROR_CANCELLED, "stopped at step %llu of %llu", (unsigned long long)training->step,
        (unsigned long long)run->steps);
}

static int finish(struct run *run, struct error *error) {
    struct run_state *state = &run->state;
    const struct policy_network *best = state->best != NULL ? state->best : state->training.network;
    uint64_t step = state->best != NULL ? state->validated[state->best_at].step : state->training.step;
    return save_network(state, best, step, state->training.run->out, error);
}

static int resume(struct run *run, struct error *error) {
    struct training *training = &run->state.training;
    if (!training->run->resume)
        return 0;
    int code = checkpoint_load(&run->state, error);
    if (code == 0)
        say(run, "resumed at step %llu of %llu", (unsigned long long)training->step, (unsigned long long)run->steps);
    return code == 1 ? 0 : code;
}

static int run_stages(struct run *run, struct error *error) {
    struct training *training = &run->state.training;
    int code = 0;
    run->last_tokens = training->tokens;
    while (code == 0 && training->stage < STAGES)
        code = run_stage(run, error);
    return code;
}

int train_run(const struct train_run *options, struct error *error) {
    struct error ignored;
    struct run *run = calloc(1, sizeof *run);
    error = error != NULL ? error : &ignored;
    if (run == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a training");
    run->start = run->last = clock_seconds();
    run->stage_name = stages[0]->name;
    int code = train_options_check(&options->options, error);
    if (code == 0)
        code = open_run(run, options, error);
    if (code == 0)
        code = resume(run, error);
    if (code == 0 && begin_turns(run) != 0)
        code = error_set(error, ERROR_CANCELLED, "stopped before the first step");
    if (code == 0) {
        code = run_stages(run, error);
        end_turns(run);
        if (code == ERROR_CANCELLED)
            code = leave(run, error);
    }
    if (code == 0)
        code = finish(run, error);
    close_run(run);
    free(run);
    return code;
}
