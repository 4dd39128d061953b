/* SPDX-License-Identifier: Apache-2.0
 *
 * distillcache COMMAND ...: reads the configuration, opens the log, runs the command.
 */
#include "commands/commands.h"

#include "config/config.h"
#include "engine/log.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct command {
    const char *name;
    enum config_command config;
    int (*run)(const struct config *);
    const char *help;
};

static const struct command commands[] = {
    {"serve", CONFIG_SERVE, command_serve, "serve a model over an OpenAI-compatible HTTP API"},
    {"bench", CONFIG_BENCH, command_bench, "measure how fast a model runs on this machine"},
    {"eval", CONFIG_EVAL, command_eval, "compare eviction policies with the full cache"},
    {"train", CONFIG_TRAIN, command_train, "train an eviction policy for a model"},
    {"worker", CONFIG_WORKER, command_worker, "compute a part of a model for another process"},
    {"inspect", CONFIG_INSPECT, command_inspect, "describe a model file or a policy file"},
};
enum { COMMANDS = sizeof commands / sizeof commands[0] };

static void print_usage(FILE *out) {
    fputs("usage: distillcache COMMAND [options]\n\n", out);
    for (size_t i = 0; i < COMMANDS; i++)
        fprintf(out, "  %-10s %s\n", commands[i].name, commands[i].help);
    fputs("\n  --help     print this text\n  --version  print the version\n\n"
          "distillcache COMMAND --help lists the command's options.\n",
        out);
}

static const struct command *find_command(const char *name) {
    for (size_t i = 0; i < COMMANDS; i++)
        if (strcmp(commands[i].name, name) == 0)
            return &commands[i];
    return NULL;
}

/* Standard output may be a full disk or a closed pipe: that is a failure like any other. */
static int finish_output(void) {
    if (fflush(stdout) == 0 && !ferror(stdout))
        return EXIT_OK;
    perror("distillcache: cannot write to standard output");
    return EXIT_FAILED;
}

static enum log_level parse_level(const char *name) {
    static const char *const names[] = {"debug", "info", "warning", "error"};
    for (int level = LOG_DEBUG; level < LOG_ERROR; level++)
        if (strcmp(name, names[level]) == 0)
            return (enum log_level)level;
    return LOG_ERROR;
}

static int run_with_log(const struct command *command, const struct config *config) {
    struct error error;
    if (log_open(parse_level(config->log_level), strcmp(config->log_format, "json") == 0, &error) != 0) {
        fprintf(stderr, "distillcache: %s\n", error.message);
        return EXIT_FAILED;
    }
    int code = command->run(config);
    log_close();
    int output = finish_output();
    return code != EXIT_OK ? code : output;
}

static int run_command(const struct command *command, int count, char *const *arguments) {
    struct config config;
    struct error error;
    int code = EXIT_OK;
    if (config_load(&config, command->config, count, arguments, environ, &error) != 0) {
        fprintf(stderr, "distillcache: %s\n", error.message);
        code = error.code == ERROR_INVALID ? EXIT_USAGE : EXIT_FAILED;
    } else if (config.help) {
        config_print_help(command->config, stdout);
        code = finish_output();
    } else if (config.print_config) {
        config_print_example(&config, stdout);
        code = finish_output();
    } else {
        code = run_with_log(command, &config);
    }
    config_free(&config);
    return code;
}

int main(int count, char **arguments) {
    signal(SIGPIPE, SIG_IGN);
    if (count < 2) {
        print_usage(stderr);
        return EXIT_USAGE;
    }
    const char *name = arguments[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
        print_usage(stdout);
        return finish_output();
    }
    if (strcmp(name, "--version") == 0) {
        puts("distillcache " DISTILLCACHE_VERSION);
        return finish_output();
    }
    const struct command *command = find_command(name);
    if (command == NULL) {
        fprintf(stderr, "distillcache: unknown command \"%.80s\"\n", name);
        print_usage(stderr);
        return EXIT_USAGE;
    }
    return run_command(command, count - 2, arguments + 2);
}
