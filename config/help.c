/* SPDX-License-Identifier: Apache-2.0
 *
 * What is printed from the option table: --help and the annotated example file.
 */
#include "config/options.h"

#include <string.h>

enum { HELP_COLUMN = 28, HELP_WIDTH = 110, COMMENT_WIDTH = 110 };

/* Prints text in lines of at most `width` columns; every line after the first begins with `indent`. column: where the
 * first one stands. */
static void print_wrapped(const char *text, size_t column, size_t width, const char *indent, FILE *out) {
    bool line_empty = true;
    while (*text != '\0') {
        size_t word = strcspn(text, " ");
        if (!line_empty && column + 1 + word > width) {
            fprintf(out, "\n%s", indent);
            column = strlen(indent);
            line_empty = true;
        }
        fprintf(out, "%s%.*s", line_empty ? "" : " ", (int)word, text);
        column += word + (line_empty ? 0 : 1);
        line_empty = false;
        text += word;
        text += strspn(text, " ");
    }
    fputc('\n', out);
}

/* "help: allowed values [default]", for a person at a terminal. */
static void compose_help(const struct option *option, char *text, size_t size) {
    char allowed[OPTION_ALLOWED_MAX] = "";
    bool has_allowed = option->type == OPTION_CHOICE || option_is_list(option);
    if (has_allowed)
        option_describe_allowed(option, allowed);
    const char *value = option->default_value != NULL ? option->default_value : "";
    bool show_default = *value != '\0' && (option->type != OPTION_BOOL || strcmp(value, "true") == 0);
    snprintf(text, size, "%s%s%s%s%s%s%s", option->help, has_allowed ? ": " : "", allowed, show_default ? " [" : "",
        show_default ? value : "", show_default ? "]" : "",
        (option->flags & OPTION_REQUIRED) != 0 ? " (required)" : "");
}

static void print_option_help(const struct option *option, FILE *out) {
    char form[OPTION_NAME_MAX + 40], text[900], indent[HELP_COLUMN + 1];
    if ((option->flags & OPTION_POSITIONAL) != 0)
        snprintf(form, sizeof form, "  %s", option->argument);
    else if (option->type == OPTION_BOOL && strcmp(option->default_value, "true") == 0)
        snprintf(form, sizeof form, "  --no-%s", option->name);
    else
        snprintf(form, sizeof form, "  --%s%s%s", option->name, option->argument != NULL ? " " : "",
            option->argument != NULL ? option->argument : "");
    memset(indent, ' ', HELP_COLUMN);
    indent[HELP_COLUMN] = '\0';
    fputs(form, out);
    size_t column = strlen(form);
    if (column + 1 >= HELP_COLUMN)
        fprintf(out, "\n%s", indent);
    else
        fprintf(out, "%s", indent + column);
    if (option->type == OPTION_BOOL && strcmp(option->default_value, "true") == 0)
        snprintf(text, sizeof text, "turn off: %s", option->help);
    else
        compose_help(option, text, sizeof text);
    print_wrapped(text, HELP_COLUMN, HELP_WIDTH, indent, out);
}

void config_print_help(enum config_command command, FILE *out) {
    const char *usage = command == CONFIG_SERVE    ? "serve --model FILE"
                        : command == CONFIG_BENCH  ? "bench --model FILE"
                        : command == CONFIG_EVAL   ? "eval --model FILE --task T"
                        : command == CONFIG_TRAIN  ? "train --model FILE --data FILE --out POLICY"
                        : command == CONFIG_WORKER ? "worker --model FILE --rank R --rendezvous HOST:PORT"
                                                   : "inspect FILE";
    const char *purpose = command == CONFIG_SERVE    ? "Serves a model over an OpenAI-compatible HTTP API."
                          : command == CONFIG_BENCH  ? "Measures how fast a model runs here."
                          : command == CONFIG_EVAL   ? "Compares eviction policies with the full cache."
                          : command == CONFIG_TRAIN  ? "Trains an eviction policy for a model."
                          : command == CONFIG_WORKER ? "Computes a part of a model for a leader, another process."
                                                     : "Describes a model file or a policy file.";
    fprintf(out, "usage: distillcache %s [options]\n\n%s\n", usage, purpose);
    const char *section = NULL;
    for (size_t i = 0; i < option_count; i++) {
        const struct option *option = &option_table[i];
        if ((option->commands & command) == 0)
            continue;
        if (section == NULL || strcmp(section, option->section) != 0)
            fprintf(out, "\n%s\n", option->section);
        section = option->section;
        print_option_help(option, out);
    }
    fputs("\n--option=value is the same as --option value; --flag has a --no-flag. Values come, in rising precedence,\n"
          "from defaults, the file named by --config, environment variables (--kv-memory: DISTILLCACHE_KV_MEMORY) and\n"
          "the command line.\n",
        out);
}

/* The comment's second line: what is allowed, and the default. */
static void print_allowed(const struct option *option, FILE *out) {
    char allowed[OPTION_ALLOWED_MAX], text[OPTION_ALLOWED_MAX + 80];
    option_describe_allowed(option, allowed);
    bool required = (option->flags & OPTION_REQUIRED) != 0;
    const char *value = required ? "" : *option->default_value == '\0' ? "empty" : option->default_value;
    snprintf(text, sizeof text, "%s%s%s%s", option->type != OPTION_STRING ? allowed : "",
        option->type != OPTION_STRING ? "; " : "", required ? "required" : "default: ", value);
    fputs("# ", out);
    print_wrapped(text, 2, COMMENT_WIDTH, "# ", out);
}

static void print_option_example(const struct option *option, const struct config *config, FILE *out) {
    char key[OPTION_NAME_MAX];
    option_yaml_key(option, key);
    fputs("\n# ", out);
    print_wrapped(option->help, 2, COMMENT_WIDTH, "# ", out);
    print_allowed(option, out);
    bool absent = option_is_empty(option, config) && (option->flags & OPTION_MAY_BE_EMPTY) == 0;
    fprintf(out, "%s%s: ", absent ? "#" : "", key);
    option_format(option, config, true, out);
    fputc('\n', out);
}

void config_print_example(const struct config *config, FILE *out) {
    struct config defaults;
    bool use_defaults = config == NULL;
    if (use_defaults && config_set_defaults(&defaults, NULL) != 0) {
        config_free(&defaults);
        return;
    }
    fputs(
        "# Configuration of distillcache serve: every option with its help and a value. Printed by\n"
        "# distillcache serve --print-config; start with distillcache serve --config FILE.\n"
        "# Environment variables (kv_memory: DISTILLCACHE_KV_MEMORY) and the command line (--kv-memory) override it.\n",
        out);
    const char *section = NULL;
    for (size_t i = 0; i < option_count; i++) {
        const struct option *option = &option_table[i];
        if ((option->commands & CONFIG_SERVE) == 0 ||
            (option->flags & (OPTION_NOT_IN_FILE | OPTION_ONLY_COMMAND_LINE)) != 0)
            continue;
        if (section == NULL || strcmp(section, option->section) != 0)
            fprintf(out, "\n# ---- %s ----\n", option->section);
        section = option->section;
        print_option_example(option, use_defaults ? &defaults : config, out);
    }
    if (use_defaults)
        config_free(&defaults);
}
