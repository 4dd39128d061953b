/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/fake_train.h"

#include "policy/trained.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NAME_MAX_BYTES = 5000 };

static unsigned fake_number(const char *variable, unsigned otherwise) {
    const char *text = getenv(variable);
    return text == NULL ? otherwise : (unsigned)strtoul(text, NULL, 10);
}

static bool fake_read_data(const char *file, char out[16], struct error *error) {
    FILE *data = fopen(file, "re");
    if (data == NULL)
        return error_set(error, ERROR_IO, "cannot open %.300s", file), false;
    size_t length = fread(out, 1, 15, data);
    out[length] = '\0';
    fclose(data);
    return true;
}

/* ---- checkpoints ---- */

static uint64_t fake_load_checkpoint(const char *directory) {
    char name[NAME_MAX_BYTES];
    unsigned long long step = 0;
    snprintf(name, sizeof name, "%s/checkpoint", directory);
    FILE *file = fopen(name, "re");
    if (file != NULL && fscanf(file, "%llu", &step) != 1)
        step = 0;
    if (file != NULL)
        fclose(file);
    return step;
}

static int fake_write(const char *name, const char *text, struct error *error) {
    char temporary[NAME_MAX_BYTES + 8];
    snprintf(temporary, sizeof temporary, "%s.tmp", name);
    FILE *file = fopen(temporary, "we");
    if (file == NULL || fputs(text, file) < 0 || fclose(file) != 0 || rename(temporary, name) != 0)
        return error_set(error, ERROR_IO, "cannot write %.300s: %s", name, strerror(errno));
    return 0;
}

static int fake_save_network(const char *file, struct error *error) {
    const struct policy_model model = FAKE_TRAIN_MODEL;
    struct network_shape shape = {.features = FEATURES_CONTENT,
        .inputs = 1 << INPUT_SUM | 1 << INPUT_AGE,
        .content = 2,
        .hidden = 3,
        .layers = model.layers,
        .kv_heads = model.kv_heads,
        .head_dim = model.head_dim};
    struct policy_network *network = network_create(&shape, error);
    if (network == NULL)
        return error->code;
    snprintf(network->fingerprint, sizeof network->fingerprint, "%s", model.fingerprint);
    network->method = strdup("distillcache");
    int code = network_save(network, file, error);
    network_release(network);
    return code;
}

static void fake_report(const struct train_run *run, enum train_event_kind kind, uint64_t step, const char *file) {
    char message[80];
    snprintf(message, sizeof message, "%s %llu of %u", kind == TRAIN_EVENT_CHECKPOINT ? "checkpoint at step" : "step",
        (unsigned long long)step, run->options.rank_steps);
    struct train_event event = {.kind = kind,
        .message = message,
        .stage = "rank",
        .step = step,
        .steps = run->options.rank_steps,
        .loss = NAN,
        .reward = -1.0 / (double)step,
        .entropy = 0.5,
        .gradient_norm = NAN,
        .learning_rate = 1e-3,
        .kl_valid = kind == TRAIN_EVENT_CHECKPOINT ? 1.0 / (double)step : NAN,
        .kl_valid_relative = NAN,
        .tokens_per_second = 100,
        .seconds = (double)step,
        .seconds_left = (double)(run->options.rank_steps - step),
        .tokens = step * 10,
        .file = file};
    run->event(run->context, &event);
}

static int fake_save(const struct train_run *run, uint64_t step, struct error *error) {
    char name[NAME_MAX_BYTES], text[32];
    snprintf(name, sizeof name, "%s/policy-%llu.safetensors", run->directory, (unsigned long long)step);
    int code = fake_save_network(name, error);
    if (code != 0)
        return code;
    fake_report(run, TRAIN_EVENT_CHECKPOINT, step, name);
    snprintf(name, sizeof name, "%s/checkpoint", run->directory);
    snprintf(text, sizeof text, "%llu", (unsigned long long)step);
    code = fake_write(name, text, error);
    if (code == 0 && step == fake_number("FAKE_TRAIN_DIE_AT", 0))
        raise(SIGKILL);
    return code;
}

/* ---- the run ---- */

static int fake_wait(const struct train_run *run, const char *data) {
    unsigned left = strncmp(data, "!wait", 5) == 0 ? 1000000 : fake_number("FAKE_TRAIN_STEP_MS", 1);
    for (; left > 0; left--) {
        if (run->stopped(run->context))
            return ERROR_CANCELLED;
        usleep(1000);
    }
    return 0;
}

static int fake_steps(const struct train_run *run, const char *data, struct error *error) {
    uint64_t step = run->resume ? fake_load_checkpoint(run->directory) : 0;
    int code = 0;
    while (step < run->options.rank_steps && code == 0) {
        fake_report(run, TRAIN_EVENT_METRICS, ++step, NULL);
        if (strncmp(data, "!full", 5) == 0)
            return error_set(error, ERROR_IO, "cannot write %.200s: No space left on device", run->directory);
        code = fake_wait(run, data);
        if (code == ERROR_CANCELLED)
            return fake_save(run, step, error) == 0
                       ? error_set(error, code, "stopped at step %llu", (unsigned long long)step)
                       : error->code;
        if (step % run->options.checkpoint_every == 0)
            code = fake_save(run, step, error);
    }
    return code;
}

int fake_train(const struct train_run *run, struct error *error) {
    char data[16];
    if (!fake_read_data(run->data, data, error))
        return error->code;
    if (strncmp(data, "!bad", 4) == 0)
        return error_set(error, ERROR_FORMAT, "%.300s:1: not a JSON object", run->data);
    if (strncmp(data, "!pages", 6) == 0)
        return error_set(error, ERROR_PAGES, "the page pool is too small for a teacher and its students");
    int code = fake_steps(run, data, error);
    if (code != 0)
        return code;
    return strncmp(data, "!garbage", 8) == 0 ? fake_write(run->out, "not a policy", error)
                                             : fake_save_network(run->out, error);
}

/* ---- evaluation ---- */

/* As `distillcache eval` reads them. */
static int fake_read_policies(const struct evaluation_run *run, struct error *error) {
    const struct policy_model model = FAKE_TRAIN_MODEL;
    struct policy_settings *list = NULL;
    size_t count = 0;
    int code = config_policies(run->config, run->trained, &list, &count, error);
    for (size_t i = 0; i < count && code == 0; i++) {
        code = policy_settings_take_trained(run->trained, &list[i], error);
        if (code == 0)
            code = policy_settings_resolve(&list[i], &model, NULL, error);
    }
    config_free_policies(list, count);
    return code;
}

int fake_evaluate(const struct evaluation_run *run, char **report, struct error *error) {
    const struct config *config = run->config;
    char rows[4096] = "";
    run->progress(run->context, 0, 2);
    if (fake_read_policies(run, error) != 0)
        return error->code;
    if (strcmp(config->task, "arithmetic") == 0)
        return error_set(error, ERROR_INVALID, "the task is too hard");
    while (strcmp(config->task, "needle") == 0)
        if (usleep(1000), run->stopped(run->context))
            return ERROR_CANCELLED;
    for (size_t i = 0; i < config->kv_policy.count; i++) {
        size_t at = strlen(rows);
        snprintf(rows + at, sizeof rows - at, "%s{\"kv_policy\":\"%.*s\",\"kl\":0.5}", i == 0 ? "" : ",",
            (int)strcspn(config->kv_policy.items[i], ":,"), config->kv_policy.items[i]);
    }
    if (asprintf(report, "{\"task\":\"%s\",\"rows\":[%s]}", config->task, rows) < 0)
        return error_set(error, ERROR_MEMORY, "no memory");
    run->progress(run->context, 2, 2);
    return 0;
}
