/* SPDX-License-Identifier: Apache-2.0
 *
 * `distillcache train`: a policy for a model, from data to file (policy/train/README.md). With --json standard output
 * has one object a line; else a terminal gets a line of progress, anything else lines on standard error. SIGINT and
 * SIGTERM end the run after the step at work and leave a checkpoint; the same command with --resume goes on. A second
 * one ends the program.
 */
#include "commands/commands.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "commands/engine_config.h"
#include "commands/train_plot.h"
#include "policy/train/train.h"

struct train {
    const struct config *config;
    struct train_options options;
    struct model *model;
    struct tokenizer *tokenizer;
    struct chat_config chat;
    struct engine *engine;
    struct train_plot plot;
    bool terminal, line_open;
    int failure; /* of writing events */
};

static volatile sig_atomic_t interrupted;

static void interrupt(int signal) {
    (void)signal;
    interrupted = 1;
}

static void install_signals(void) {
    struct sigaction action = {.sa_handler = interrupt, .sa_flags = (int)SA_RESETHAND};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

static bool is_stopped(void *context) {
    (void)context;
    return interrupted != 0;
}

/* ---- options ---- */

static int set_pair(struct train_options *options, const char *text, struct error *error) {
    const char *equals = strchr(text, '=');
    char name[64];
    if (equals == NULL || (size_t)(equals - text) >= sizeof name)
        return error_set(error, ERROR_INVALID, "option --set %.80s: must be NAME=VALUE", text);
    snprintf(name, sizeof name, "%.*s", (int)(equals - text), text);
    if (strcmp(name, "method") == 0 || strcmp(name, "recipe") == 0)
        return error_set(error, ERROR_INVALID, "option --set %.80s: give --%s instead", text, name);
    return train_options_set(options, name, equals + 1, error);
}

static int set_ratios(struct train_options *options, const struct string_list *ratios, struct error *error) {
    char text[1024] = "";
    for (size_t i = 0; i < ratios->count; i++) {
        size_t at = strlen(text);
        snprintf(text + at, sizeof text - at, "%s%.24s", i > 0 ? "," : "", ratios->items[i]);
    }
    return ratios->count > 0 ? train_options_set(options, "ratios", text, error) : 0;
}

/* Presets first, then what was set by name, then the number of steps. */
static int read_options(const struct config *config, struct train_options *options, struct error *error) {
    int method = train_method_find(config->method), code = 0;
    train_options_default(options, (enum train_method)method, strcmp(config->recipe, "paper") == 0);
    options->seed = config->seed;
    if (config->students > 0)
        options->students = config->students;
    code = set_ratios(options, &config->ratio, error);
    for (size_t i = 0; code == 0 && i < config->settings.count; i++)
        code = set_pair(options, config->settings.items[i], error);
    if (code == 0 && config->steps > 0)
        code = train_options_scale(options, config->steps, error);
    return code == 0 ? train_options_check(options, error) : code;
}

/* ---- events ---- */

static bool print_json(const struct train_event *event) {
    static const char *const kinds[] = {"message", "metrics", "checkpoint"};
    json_t *object = train_event_json(event);
    json_object_set_new(object, "event", json_string(kinds[event->kind]));
    if (event->file != NULL)
        json_object_set_new(object, "file", json_string(event->file));
    json_object_set_new(object, "message", json_string(event->message));
    bool printed = json_dumpf(object, stdout, JSON_COMPACT | JSON_REAL_PRECISION(TRAIN_EVENT_DIGITS)) == 0 &&
                   fputc('\n', stdout) != EOF && fflush(stdout) == 0;
    json_decref(object);
    return printed;
}

/* A terminal's line is written over, but for comparisons, which stay. */
static void print_progress(struct train *train, const struct train_event *event) {
    bool stays = !train->terminal || (event->kind == TRAIN_EVENT_METRICS && !isnan(event->kl_valid));
    fprintf(stderr, "%s%s", train->terminal ? "\r\033[K" : "distillcache train: ", event->message);
    if (event->kind == TRAIN_EVENT_METRICS && event->tokens_per_second > 0)
        fprintf(stderr, ", %.0f tokens/s", event->tokens_per_second);
    if (event->kind == TRAIN_EVENT_METRICS && !isnan(event->seconds_left))
        fprintf(stderr, ", %.0f:%02.0f left", floor(event->seconds_left / 60), floor(fmod(event->seconds_left, 60)));
    fputs(stays ? "\n" : "", stderr);
    train->line_open = !stays;
}

static void take_event(void *context, const struct train_event *event) {
    struct train *train = context;
    if (event->kind == TRAIN_EVENT_METRICS && train->config->plot[0] != '\0' &&
        train_plot_add(&train->plot, event) != 0)
        train->failure = ERROR_MEMORY;
    if (train->config->json) {
        if (!print_json(event))
            train->failure = ERROR_IO;
    } else {
        print_progress(train, event);
    }
}

/* ---- the run ---- */

static int open_train(struct train *train, struct error *error) {
    struct engine_options options = engine_options_of(train->config);
    train->model = engine_open_model(train->config, error);
    if (train->model == NULL)
        return engine_error_of_file(train->config, error);
    train->tokenizer = tokenizer_create(train->model->file, error);
    if (train->tokenizer == NULL)
        return engine_error_of_file(train->config, error);
    int code = chat_config_open(train->config, train->model, train->tokenizer, &train->chat, error);
    if (code != 0)
        return code;
    train->engine = engine_open(train->model, &options, error);
    return train->engine == NULL ? error->code : 0;
}

/* The checkpoints' folder beside the policy file. */
static char *make_directory(const char *out, struct error *error) {
    char *directory = NULL;
    if (asprintf(&directory, "%s.run", out) < 0) {
        error_set(error, ERROR_MEMORY, "no memory for a name");
        return NULL;
    }
    if (mkdir(directory, 0777) == 0 || errno == EEXIST)
        return directory;
    error_set(error, ERROR_IO, "cannot make the folder %.300s: %s", directory, strerror(errno));
    free(directory);
    return NULL;
}

static int run_train(struct train *train, const char *directory, struct error *error) {
    const struct config *config = train->config;
    struct train_run run = {.options = train->options,
        .engine = train->engine,
        .tokenizer = train->tokenizer,
        .chat = chat_config_source(&train->chat),
        .data = config->data[0] != '\0' ? config->data : NULL,
        .valid = config->valid[0] != '\0' ? config->valid : NULL,
        .directory = directory,
        .out = config->out,
        .resume = config->resume_run,
        .threads = config->threads,
        .event = take_event,
        .stopped = is_stopped,
        .context = train};
    int code = train_run(&run, error);
    if (train->line_open)
        fputc('\n', stderr);
    if (config->plot[0] != '\0' && (code == 0 || code == ERROR_CANCELLED)) {
        struct error failure;
        int plotted = train_plot_write(&train->plot, config->plot, &failure);
        if (plotted != 0 && code == 0)
            code = error_set(error, plotted, "%s", failure.message);
    }
    if (code == 0 && train->failure != 0)
        code = error_set(error, train->failure, "cannot keep or write the events");
    return code;
}

int command_train(const struct config *config) {
    struct train train = {.config = config, .terminal = isatty(STDERR_FILENO) == 1};
    struct error error = {0};
    char *directory = NULL;
    install_signals();
    int code = read_options(config, &train.options, &error);
    if (code == 0 && (directory = make_directory(config->out, &error)) == NULL)
        code = error.code;
    if (code == 0)
        code = open_train(&train, &error);
    if (code == 0)
        code = run_train(&train, directory, &error);
    if (code == ERROR_CANCELLED)
        fprintf(stderr, "distillcache train: %s; --resume goes on\n", error.message);
    else if (code != 0)
        fprintf(stderr, "distillcache train: %s\n", error.message);
    engine_close(train.engine);
    chat_config_close(&train.chat);
    tokenizer_free(train.tokenizer);
    model_free(train.model);
    train_plot_free(&train.plot);
    free(directory);
    return code == 0 ? EXIT_OK : EXIT_FAILED;
}
