/* SPDX-License-Identifier: Apache-2.0
 *
 * Options: the one table that declares every option, and what can be done with an entry of it.
 *
 * An option has a name (kv-memory), from which follow its YAML key (kv_memory), its environment variable
 * (DISTILLCACHE_KV_MEMORY) and its command line forms (--kv-memory VALUE, --kv-memory=VALUE). Its value lives in one
 * field of struct config and has a text form, the same in all four sources: option_parse reads it, option_format writes
 * it. To add an option: a field in config.h, an entry in options.c, the example file printed anew (README.md).
 */
#ifndef CONFIG_OPTIONS_H
#define CONFIG_OPTIONS_H

#include "config/config.h"

enum option_type {
    OPTION_STRING,   /* char *: UTF-8 without control characters */
    OPTION_CHOICE,   /* char *: one of choices */
    OPTION_COUNT,    /* uint32_t: minimum to maximum */
    OPTION_SIZE,     /* size_t: bytes, minimum to maximum; text form with K, M or G */
    OPTION_BOOL,     /* bool */
    OPTION_COUNTS,   /* struct string_list of whole numbers, each minimum to maximum; 1 to OPTION_LIST_MAX of them */
    OPTION_RATIOS,   /* struct string_list of decimal numbers above 0 up to 1; 1 to OPTION_LIST_MAX of them */
    OPTION_TEXTS,    /* struct string_list of texts as OPTION_STRING, one a text; up to OPTION_LIST_MAX of them */
    OPTION_RATIO,    /* double: a decimal number above 0 up to 1 */
    OPTION_POLICIES, /* struct string_list of policies with their options, one a text; 1 to OPTION_LIST_MAX of them */
};

enum option_flag {
    OPTION_MAY_BE_EMPTY = 1,
    OPTION_REQUIRED = 2,          /* no default: the user gives it */
    OPTION_NOT_IN_FILE = 4,       /* no YAML key */
    OPTION_ONLY_COMMAND_LINE = 8, /* no YAML key, no environment variable */
    OPTION_POSITIONAL = 16,       /* on the command line it is given without its name */
    OPTION_SECRET = 32,           /* its value is never printed */
};

#define OPTION_LIST_MAX 64
#define OPTION_TEXT_MAX 4096   /* bytes of a value */
#define OPTION_NAME_MAX 64     /* bytes of any form of a name, with the final zero */
#define OPTION_ALLOWED_MAX 400 /* bytes of what is said to be allowed, with the final zero */

struct option {
    const char *name;
    enum option_type type;
    unsigned commands; /* enum config_command, or-ed */
    unsigned flags;    /* enum option_flag, or-ed */
    size_t offset;     /* of the field in struct config */
    uint64_t minimum, maximum;
    const char *choices;       /* "a|b|c" */
    const char *default_value; /* text form */
    const char *argument;      /* what --help calls the value */
    const char *section;       /* heading in --help and in the example file */
    const char *help;          /* one or two sentences without a final full stop */
};

extern const struct option option_table[];
extern const size_t option_count;

/* The names an option goes by in the file and in the environment. */
void option_yaml_key(const struct option *option, char key[static OPTION_NAME_MAX]);
void option_environment_name(const struct option *option, char name[static OPTION_NAME_MAX]);

const struct option *option_find(const char *name); /* kv-memory, or NULL */
/* Two commands may have options of the same name, one of them on the command line only: that of a command, else any. */
const struct option *option_find_for(const char *name, unsigned commands);
const struct option *option_find_key(const char *key); /* kv_memory, or NULL */
/* The option whose name is nearest to a mistyped one (either form), or NULL when none is near. Only options with a bit
 * of commands and without any of the flags are offered. */
const struct option *option_nearest(const char *name, unsigned commands, unsigned without_flags);

bool option_is_list(const struct option *option);

/* Reads a text into the option's field. A list is extended by the text, which may hold several items separated by
 * commas (but one policy). ERROR_INVALID: the message begins with `place`, which names the option ("option --port"),
 * and goes on with the value and what is allowed. ERROR_MEMORY. */
int option_parse(
    const struct option *option, struct config *config, const char *text, const char *place, struct error *error);
/* Empties a list before a source of higher precedence fills it anew. Nothing happens to other types. */
void option_clear_list(const struct option *option, struct config *config);
void option_free(const struct option *option, struct config *config);

/* The value's text form, as YAML when yaml (strings in quotes, lists in brackets), else as on the command line. */
void option_format(const struct option *option, const struct config *config, bool yaml, FILE *out);
bool option_is_empty(const struct option *option, const struct config *config);
/* "a whole number from 1 to 65535", "f16, f32 or bf16", ... */
void option_describe_allowed(const struct option *option, char text[static OPTION_ALLOWED_MAX]);

/* A text fit for a message: in quotes, control characters and bytes that are not UTF-8 escaped, cut after some 80
 * bytes. */
#define OPTION_QUOTE_MAX 128
void option_quote(const char *text, char quoted[static OPTION_QUOTE_MAX]);

#endif
