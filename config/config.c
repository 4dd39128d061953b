/* SPDX-License-Identifier: Apache-2.0
 *
 * The four sources of values and their order. The command line is taken apart first, because it may name the file, and
 * its values are applied last.
 */
#include "config/config.h"

#include "config/file.h"
#include "config/options.h"
#include "policy/trained.h"

#include <stdlib.h>
#include <string.h>

static const char environment_prefix[] = "DISTILLCACHE_";
static const char environment_tests[] = "DISTILLCACHE_TEST_";       /* the tests' own */
static const char environment_emulator[] = "DISTILLCACHE_EMULATOR"; /* tests/emulator, and names that begin so */
static const char *const environment_others[] = {
    "DISTILLCACHE_POLICIES",    /* read by policy/network_shipped.c */
    "DISTILLCACHE_CUDA_GRAPHS", /* cuda/step.c */
};

/* One value of the command line. */
struct assignment {
    const struct option *option;
    const char *text;
};

struct command_line {
    enum config_command command;
    int count;
    char *const *arguments;
    int next; /* index of the next argument */
    bool names_ended;
    struct assignment *assignments; /* [count] */
    size_t assignments_count;
};

static const char *command_name(unsigned command) {
    return command == CONFIG_SERVE    ? "serve"
           : command == CONFIG_BENCH  ? "bench"
           : command == CONFIG_EVAL   ? "eval"
           : command == CONFIG_TRAIN  ? "train"
           : command == CONFIG_WORKER ? "worker"
                                      : "inspect";
}

static int set_defaults(struct config *config, struct error *error) {
    for (size_t i = 0; i < option_count; i++) {
        const struct option *option = &option_table[i];
        if (option->default_value == NULL)
            continue;
        int code = option_parse(option, config, option->default_value, option->name, error);
        if (code != 0)
            return code;
    }
    return 0;
}

int config_set_defaults(struct config *config, struct error *error) {
    memset(config, 0, sizeof *config);
    return set_defaults(config, error);
}

/* Command line. */

static void assign(struct command_line *line, const struct option *option, const char *text) {
    line->assignments[line->assignments_count++] = (struct assignment){option, text};
}

static int report_unknown_option(const struct command_line *line, const char *name, struct error *error) {
    char quoted[OPTION_QUOTE_MAX];
    const char *no = "";
    const struct option *nearest = NULL;
    if (strncmp(name, "no-", 3) == 0) {
        nearest = option_nearest(name + 3, line->command, OPTION_POSITIONAL);
        no = nearest != NULL && nearest->type == OPTION_BOOL ? "no-" : "";
    }
    if (nearest == NULL)
        nearest = option_nearest(name, line->command, OPTION_POSITIONAL);
    option_quote(name, quoted);
    quoted[strlen(quoted) - 1] = '\0'; /* without the quotes: the reader sees it as it was written */
    if (nearest != NULL)
        return error_set(
            error, ERROR_INVALID, "unknown option --%s: did you mean --%s%s?", quoted + 1, no, nearest->name);
    return error_set(error, ERROR_INVALID, "unknown option --%s: see distillcache %s --help", quoted + 1,
        command_name(line->command));
}

static int report_other_command(const struct command_line *line, const struct option *option, struct error *error) {
    for (unsigned command = 1; command < CONFIG_EVERY_COMMAND; command *= 2)
        if ((option->commands & command) != 0)
            return error_set(error, ERROR_INVALID, "option --%s belongs to distillcache %s, not to distillcache %s",
                option->name, command_name(command), command_name(line->command));
    return error_set(error, ERROR_INVALID, "option --%s belongs to no command", option->name);
}

static int take_flag(
    struct command_line *line, const struct option *option, bool negated, const char *value, struct error *error) {
    if (negated && value != NULL)
        return error_set(error, ERROR_INVALID, "option --no-%s takes no value", option->name);
    assign(line, option, negated ? "false" : (value != NULL ? value : "true"));
    return 0;
}

/* The value of an option that was written without `=`: the next argument. */
static int take_next_value(struct command_line *line, const struct option *option, struct error *error) {
    const char *value = line->next < line->count ? line->arguments[line->next] : NULL;
    if (value == NULL || strncmp(value, "--", 2) == 0) {
        char allowed[OPTION_ALLOWED_MAX];
        option_describe_allowed(option, allowed);
        return error_set(error, ERROR_INVALID, "option --%s needs a value: %s%s", option->name, allowed,
            value != NULL && value[2] != '\0' ? " (one that begins with -- is joined by =)" : "");
    }
    line->next++;
    assign(line, option, value);
    return 0;
}

/* name: what follows the two dashes, up to `=`. value: what follows `=`, or NULL. */
static int take_option(struct command_line *line, const char *name, const char *value, struct error *error) {
    const struct option *option = option_find_for(name, line->command);
    bool negated = false;
    if (option == NULL && strncmp(name, "no-", 3) == 0) {
        option = option_find_for(name + 3, line->command);
        negated = option != NULL;
    }
    if (option == NULL || (option->flags & OPTION_POSITIONAL) != 0 || (negated && option->type != OPTION_BOOL))
        return report_unknown_option(line, name, error);
    if ((option->commands & line->command) == 0)
        return report_other_command(line, option, error);
    if (option->type == OPTION_BOOL)
        return take_flag(line, option, negated, value, error);
    if (value == NULL)
        return take_next_value(line, option, error);
    assign(line, option, value);
    return 0;
}

static int take_named(struct command_line *line, const char *argument, struct error *error) {
    if (argument[1] != '-') {
        char quoted[OPTION_QUOTE_MAX];
        if (strcmp(argument, "-h") == 0)
            return take_option(line, "help", NULL, error);
        option_quote(argument, quoted);
        return error_set(error, ERROR_INVALID, "unknown option %s: options begin with --", quoted);
    }
    size_t length = strcspn(argument + 2, "=");
    char *name = strndup(argument + 2, length);
    if (name == NULL)
        return error_set(error, ERROR_MEMORY, "no memory to read the command line");
    const char *value = argument[2 + length] == '=' ? argument + 2 + length + 1 : NULL;
    int code = take_option(line, name, value, error);
    free(name);
    return code;
}

static int take_positional(struct command_line *line, const char *argument, struct error *error) {
    const struct option *option = NULL;
    for (size_t i = 0; i < option_count; i++)
        if ((option_table[i].flags & OPTION_POSITIONAL) != 0 && (option_table[i].commands & line->command) != 0)
            option = &option_table[i];
    for (size_t i = 0; i < line->assignments_count && option != NULL; i++)
        if (line->assignments[i].option == option)
            option = NULL;
    if (option == NULL) {
        char quoted[OPTION_QUOTE_MAX];
        option_quote(argument, quoted);
        return error_set(error, ERROR_INVALID, "unexpected argument %s", quoted);
    }
    assign(line, option, argument);
    return 0;
}

static int take_arguments(struct command_line *line, struct error *error) {
    int code = 0;
    while (line->next < line->count && code == 0) {
        const char *argument = line->arguments[line->next++];
        if (!line->names_ended && strcmp(argument, "--") == 0)
            line->names_ended = true;
        else if (!line->names_ended && argument[0] == '-' && argument[1] != '\0')
            code = take_named(line, argument, error);
        else
            code = take_positional(line, argument, error);
    }
    return code;
}

static const char *last_assigned(const struct command_line *line, const struct option *option) {
    const char *text = NULL;
    for (size_t i = 0; i < line->assignments_count; i++)
        if (line->assignments[i].option == option)
            text = line->assignments[i].text;
    return text;
}

static int apply_command_line(const struct command_line *line, struct config *config, struct error *error) {
    for (size_t i = 0; i < line->assignments_count; i++) {
        const struct option *option = line->assignments[i].option;
        char place[OPTION_NAME_MAX + 16];
        bool first = true;
        for (size_t j = 0; j < i; j++)
            first = first && line->assignments[j].option != option;
        if (first) /* a list given here replaces one of the file or the environment */
            option_clear_list(option, config);
        bool positional = (option->flags & OPTION_POSITIONAL) != 0;
        snprintf(place, sizeof place, "%s%s", positional ? "argument " : "option --",
            positional ? option->argument : option->name);
        int code = option_parse(option, config, line->assignments[i].text, place, error);
        if (code != 0)
            return code;
    }
    return 0;
}

/* Environment. */

/* The option of a variable "NAME=value" whose name ends at name_length; NULL: none has that name. */
static const struct option *find_variable(const char *variable, size_t name_length) {
    char name[OPTION_NAME_MAX];
    for (size_t i = 0; i < option_count; i++) {
        option_environment_name(&option_table[i], name);
        if ((option_table[i].flags & OPTION_ONLY_COMMAND_LINE) == 0 && strlen(name) == name_length &&
            strncmp(name, variable, name_length) == 0)
            return &option_table[i];
    }
    return NULL;
}

static int report_unknown_variable(const char *variable, size_t name_length, struct error *error) {
    char *name = strndup(variable, name_length);
    if (name == NULL)
        return error_set(error, ERROR_MEMORY, "no memory to read the environment");
    char quoted[OPTION_QUOTE_MAX], near_name[OPTION_NAME_MAX];
    const struct option *nearest =
        option_nearest(name + strlen(environment_prefix), CONFIG_EVERY_COMMAND, OPTION_ONLY_COMMAND_LINE);
    option_quote(name, quoted);
    free(name);
    if (nearest == NULL)
        return error_set(error, ERROR_INVALID, "unknown environment variable %s", quoted);
    option_environment_name(nearest, near_name);
    return error_set(error, ERROR_INVALID, "unknown environment variable %s: did you mean %s?", quoted, near_name);
}

/* The variable is another part's. */
static bool is_ignored(const char *variable, size_t name_length) {
    for (size_t i = 0; i < sizeof environment_others / sizeof environment_others[0]; i++)
        if (name_length == strlen(environment_others[i]) && strncmp(variable, environment_others[i], name_length) == 0)
            return true;
    return strncmp(variable, environment_prefix, strlen(environment_prefix)) != 0 ||
           strncmp(variable, environment_tests, strlen(environment_tests)) == 0 ||
           strncmp(variable, environment_emulator, strlen(environment_emulator)) == 0;
}

static int apply_environment(char *const *environment, struct config *config, struct error *error) {
    for (; environment != NULL && *environment != NULL; environment++) {
        const char *variable = *environment;
        size_t name_length = strcspn(variable, "=");
        if (is_ignored(variable, name_length) || variable[name_length] == '\0')
            continue;
        const struct option *option = find_variable(variable, name_length);
        if (option == NULL)
            return report_unknown_variable(variable, name_length, error);
        char name[OPTION_NAME_MAX], place[OPTION_NAME_MAX + 32];
        option_environment_name(option, name);
        snprintf(place, sizeof place, "environment variable %s", name);
        option_clear_list(option, config);
        int code = option_parse(option, config, variable + name_length + 1, place, error);
        if (code != 0)
            return code;
    }
    return 0;
}

static const char *variable_value(char *const *environment, const struct option *option) {
    char name[OPTION_NAME_MAX];
    const char *value = NULL;
    option_environment_name(option, name);
    size_t length = strlen(name);
    for (; environment != NULL && *environment != NULL; environment++)
        if (strncmp(*environment, name, length) == 0 && (*environment)[length] == '=')
            value = *environment + length + 1;
    return value;
}

/* All together. */

static int apply_file(
    const struct command_line *line, char *const *environment, struct config *config, struct error *error) {
    const struct option *option = option_find("config");
    const char *path = last_assigned(line, option);
    if (path == NULL)
        path = variable_value(environment, option);
    if (path == NULL || *path == '\0')
        return 0;
    return config_file_apply(path, config, error);
}

static int check_required(enum config_command command, const struct config *config, struct error *error) {
    for (size_t i = 0; i < option_count; i++) {
        const struct option *option = &option_table[i];
        if ((option->flags & OPTION_REQUIRED) == 0 || (option->commands & command) == 0 ||
            !option_is_empty(option, config))
            continue;
        if ((option->flags & OPTION_POSITIONAL) != 0)
            return error_set(error, ERROR_INVALID, "no %s given: distillcache %s %s (%s)", option->name,
                command_name(command), option->argument, option->help);
        char key[OPTION_NAME_MAX], name[OPTION_NAME_MAX];
        option_yaml_key(option, key);
        option_environment_name(option, name);
        return error_set(error, ERROR_INVALID,
            "no %s given: option --%s %s, environment variable %s, or key %s of the configuration file", option->name,
            option->name, option->argument, name, key);
    }
    return 0;
}

/* What can only be seen of the eviction options together. */
static int check_policies(enum config_command command, const struct config *config, struct error *error) {
    struct policy_settings *list = NULL;
    size_t count = 0;
    if ((option_find("kv-policy")->commands & command) == 0)
        return 0;
    bool named = command == CONFIG_SERVE && config->state_dir[0] != '\0';
    int code = config_policies(config, named ? &trained_policies_unknown : NULL, &list, &count, error);
    if (code == 0 && command == CONFIG_SERVE && count != 1)
        code = error_set(error, ERROR_INVALID,
            "kv-policy and kv-ratio give %zu choices: distillcache serve has one policy with one ratio (requests may "
            "choose others)",
            count);
    config_free_policies(list, count);
    return code;
}

static int check_repeated(enum config_command command, const struct config *config, struct error *error) {
    const char *value, *option = command == CONFIG_EVAL ? config_repeated(config, &value) : NULL;
    char quoted[OPTION_QUOTE_MAX];
    if (option == NULL)
        return 0;
    option_quote(value, quoted);
    return error_set(error, ERROR_INVALID, "%s %s is given twice", option, quoted);
}

/* An address that only this machine reaches. */
static bool is_loopback(const char *host) {
    bool four = strncmp(host, "127.", 4) == 0 && strspn(host, "0123456789.") == strlen(host);
    return four || strcmp(host, "localhost") == 0 || strcmp(host, "::1") == 0;
}

static int check_admin(enum config_command command, const struct config *config, struct error *error) {
    if (command != CONFIG_SERVE || config->admin_port == 0)
        return 0;
    if (config->state_dir[0] == '\0')
        return error_set(error, ERROR_INVALID, "admin-port needs state-dir, the folder of what the admin API keeps");
    if (config->admin_key[0] == '\0' && !is_loopback(config->admin_host))
        return error_set(error, ERROR_INVALID,
            "admin-host is %.80s, which others can reach: give an admin-key (best by DISTILLCACHE_ADMIN_KEY)",
            config->admin_host);
    return 0;
}

static int check_world(enum config_command command, const struct config *config, struct error *error) {
    const char *address = config->rendezvous, *colon = strrchr(address, ':');
    bool worker = command == CONFIG_WORKER;
    char host[256];
    if (command == CONFIG_INSPECT || (!worker && config->world == 1))
        return 0;
    if (address[0] == '\0')
        return error_set(error, ERROR_INVALID, "%s needs rendezvous, the address HOST:PORT at which the leader waits",
            worker ? "a worker" : "a world of several processes");
    if (!worker && config->tensor_parallel > 1)
        return error_set(error, ERROR_INVALID,
            "tensor-parallel %u in each of %u processes is not supported: start a worker for each device",
            config->tensor_parallel, config->world);
    if (worker && config->rank == 0)
        return error_set(error, ERROR_INVALID, "a worker needs rank, which of the leader's processes it is, from 1 on");
    bool brackets = address[0] == '[' && colon != NULL && colon[-1] == ']';
    size_t length = colon != NULL ? (size_t)(colon - address) : strlen(address);
    snprintf(host, sizeof host, "%.*s", (int)(brackets ? length - 2 : length), address + brackets);
    if (config->rendezvous_key[0] == '\0' && !is_loopback(host))
        return error_set(error, ERROR_INVALID,
            "rendezvous is %.80s, which others can reach: give a rendezvous-key (best by DISTILLCACHE_RENDEZVOUS_KEY)",
            address);
    return 0;
}

static int check_access(enum config_command command, const struct config *config, struct error *error) {
    if (command != CONFIG_SERVE)
        return 0;
    if ((config->tls_cert[0] == '\0') != (config->tls_key[0] == '\0'))
        return error_set(error, ERROR_INVALID, "tls-cert and tls-key are files that belong together: give both");
    if (config->rate_limit > 0 && config->api_key.count == 0 && config->api_key_file[0] == '\0')
        return error_set(error, ERROR_INVALID, "rate-limit is for each key: give api-key or api-key-file");
    return 0;
}

int config_load(struct config *config, enum config_command command, int arguments_count, char *const *arguments,
    char *const *environment, struct error *error) {
    struct command_line line = {.command = command, .count = arguments_count, .arguments = arguments};
    int code = config_set_defaults(config, error);
    if (code != 0)
        return code;
    line.assignments = calloc((size_t)arguments_count + 1, sizeof *line.assignments);
    if (line.assignments == NULL)
        return error_set(error, ERROR_MEMORY, "no memory to read the command line");
    code = take_arguments(&line, error);
    /* Help is given whatever the file and the environment hold. */
    if (code == 0 && last_assigned(&line, option_find("help")) != NULL) {
        code = apply_command_line(&line, config, error);
        if (code == 0 && config->help)
            goto out;
    }
    if (code == 0)
        code = apply_file(&line, environment, config, error);
    if (code == 0)
        code = apply_environment(environment, config, error);
    if (code == 0)
        code = apply_command_line(&line, config, error);
    if (code == 0 && !config->help && !config->print_config)
        code = check_required(command, config, error);
    if (code == 0 && !config->help)
        code = check_policies(command, config, error);
    if (code == 0 && !config->help)
        code = check_repeated(command, config, error);
    if (code == 0 && !config->help && !config->print_config)
        code = check_admin(command, config, error);
    if (code == 0 && !config->help && !config->print_config)
        code = check_access(command, config, error);
    if (code == 0 && !config->help && !config->print_config)
        code = check_world(command, config, error);
out:
    free(line.assignments);
    return code;
}

void config_free(struct config *config) {
    for (size_t i = 0; i < option_count; i++)
        option_free(&option_table[i], config);
}
