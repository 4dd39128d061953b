/* SPDX-License-Identifier: Apache-2.0
 *
 * The values of options: from text, to text, and what is said about a text that is not allowed.
 */
#include "config/options.h"

#include "policy/policy.h"
#include "policy/trained.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#define KIB UINT64_C(1024)
#define MIB (1024 * KIB)
#define GIB (1024 * MIB)

static void *option_field(const struct option *option, struct config *config) {
    return (char *)config + option->offset;
}

static const void *option_field_const(const struct option *option, const struct config *config) {
    return (const char *)config + option->offset;
}

/* Messages. */

void option_quote(const char *text, char quoted[static OPTION_QUOTE_MAX]) {
    const size_t last = OPTION_QUOTE_MAX - 12; /* room for one escaped character, the cut mark, the quote, the zero */
    size_t length = 0, rest = strlen(text);
    quoted[length++] = '"';
    while (rest > 0 && length < last) {
        utf8proc_int32_t code;
        utf8proc_ssize_t used =
            utf8proc_iterate((const utf8proc_uint8_t *)text, rest < 4 ? (utf8proc_ssize_t)rest : 4, &code);
        bool printable = used > 0 && code >= 0x20 && (code < 0x7f || code >= 0xa0) && code != 0x2028 && code != 0x2029;
        if (printable) {
            memcpy(quoted + length, text, (size_t)used);
            length += (size_t)used;
        } else {
            used = 1;
            length += (size_t)snprintf(quoted + length, 5, "\\x%02x", (unsigned)(unsigned char)*text);
        }
        text += used;
        rest -= (size_t)used;
    }
    snprintf(quoted + length, OPTION_QUOTE_MAX - length, "%s\"", rest > 0 ? "..." : "");
}

static void format_size(uint64_t bytes, char text[static 24]) {
    const char *unit = "";
    if (bytes != 0 && bytes % GIB == 0)
        bytes /= GIB, unit = "G";
    else if (bytes != 0 && bytes % MIB == 0)
        bytes /= MIB, unit = "M";
    else if (bytes != 0 && bytes % KIB == 0)
        bytes /= KIB, unit = "K";
    snprintf(text, 24, "%" PRIu64 "%s", bytes, unit);
}

static void describe_choices(const char *choices, char *text) {
    size_t length = 0, size = OPTION_ALLOWED_MAX;
    for (const char *c = choices; *c != '\0'; c += strcspn(c, "|"), c += *c == '|') {
        size_t width = strcspn(c, "|");
        bool last = c[width] == '\0';
        int added =
            snprintf(text + length, size - length, "%s%.*s", c == choices ? "" : (last ? " or " : ", "), (int)width, c);
        if (added < 0 || (size_t)added >= size - length)
            return;
        length += (size_t)added;
    }
}

void option_describe_allowed(const struct option *option, char text[static OPTION_ALLOWED_MAX]) {
    const size_t size = OPTION_ALLOWED_MAX;
    char low[24], high[24];
    switch (option->type) {
    case OPTION_STRING:
        snprintf(text, size, "%s of at most %d bytes of UTF-8 without control characters",
            (option->flags & OPTION_MAY_BE_EMPTY) != 0 ? "a text" : "a text that is not empty,", OPTION_TEXT_MAX - 1);
        break;
    case OPTION_CHOICE:
        describe_choices(option->choices, text);
        break;
    case OPTION_COUNT:
        snprintf(text, size, "a whole number from %" PRIu64 " to %" PRIu64, option->minimum, option->maximum);
        break;
    case OPTION_SIZE:
        format_size(option->minimum, low);
        format_size(option->maximum, high);
        snprintf(text, size, "a number of bytes from %s to %s (K, M, G: powers of 1024)", low, high);
        break;
    case OPTION_BOOL:
        snprintf(text, size, "true or false");
        break;
    case OPTION_TEXTS:
        snprintf(text, size, "at most %d texts of at most %d bytes of UTF-8 without control characters",
            OPTION_LIST_MAX, OPTION_TEXT_MAX - 1);
        break;
    case OPTION_COUNTS:
        snprintf(text, size, "1 to %d whole numbers from %" PRIu64 " to %" PRIu64, OPTION_LIST_MAX, option->minimum,
            option->maximum);
        break;
    case OPTION_RATIO:
        snprintf(text, size, "a number above 0 up to 1");
        break;
    case OPTION_RATIOS:
        snprintf(text, size, "1 to %d numbers above 0 up to 1", OPTION_LIST_MAX);
        break;
    case OPTION_POLICIES:
        snprintf(text, size, "a policy name[:FILE][,option=value...], the name one of %s", policy_names());
        break;
    }
}

static int refuse(const struct option *option, const char *text, const char *place, struct error *error) {
    char quoted[OPTION_QUOTE_MAX], allowed[OPTION_ALLOWED_MAX];
    option_quote((option->flags & OPTION_SECRET) != 0 ? "..." : text, quoted);
    option_describe_allowed(option, allowed);
    return error_set(error, ERROR_INVALID, "%s is %s: must be %s", place, quoted, allowed);
}

/* Reading. */

/* Digits alone (and one unit letter for a size); false when it is anything else or too large for 64 bits. */
static bool parse_number(const char *text, size_t length, bool size, uint64_t *value) {
    uint64_t unit = 1, number = 0;
    if (size && length > 0) {
        char last = text[length - 1];
        unit = last == 'K' ? KIB : last == 'M' ? MIB : last == 'G' ? GIB : 1;
        length -= unit != 1;
    }
    if (length == 0)
        return false;
    for (size_t i = 0; i < length; i++) {
        if (text[i] < '0' || text[i] > '9')
            return false;
        if (__builtin_mul_overflow(number, 10, &number) ||
            __builtin_add_overflow(number, (uint64_t)(text[i] - '0'), &number))
            return false;
    }
    return !__builtin_mul_overflow(number, unit, value);
}

static bool parse_ranged(const struct option *option, const char *text, size_t length, uint64_t *value) {
    return parse_number(text, length, option->type == OPTION_SIZE, value) && *value >= option->minimum &&
           *value <= option->maximum;
}

/* Digits with at most one point among them, above 0 up to 1. */
static bool parse_ratio(const char *text, size_t length) {
    char digits[32];
    size_t points = 0;
    if (length == 0 || length >= sizeof digits)
        return false;
    for (size_t i = 0; i < length; i++) {
        points += text[i] == '.';
        if (points > 1 || (text[i] != '.' && (text[i] < '0' || text[i] > '9')))
            return false;
    }
    memcpy(digits, text, length);
    digits[length] = '\0';
    double value = strtod(digits, NULL);
    return value > 0 && value <= 1;
}

static bool text_is_acceptable(const char *text) {
    size_t rest = strlen(text);
    if (rest >= OPTION_TEXT_MAX)
        return false;
    while (rest > 0) {
        utf8proc_int32_t code;
        utf8proc_ssize_t used =
            utf8proc_iterate((const utf8proc_uint8_t *)text, rest < 4 ? (utf8proc_ssize_t)rest : 4, &code);
        if (used <= 0 || code < 0x20 || (code >= 0x7f && code < 0xa0))
            return false;
        text += used;
        rest -= (size_t)used;
    }
    return true;
}

static bool is_choice(const char *choices, const char *text) {
    size_t length = strlen(text);
    for (const char *c = choices; *c != '\0'; c += strcspn(c, "|"), c += *c == '|')
        if (strcspn(c, "|") == length && strncmp(c, text, length) == 0)
            return true;
    return false;
}

static int set_string(const struct option *option, struct config *config, const char *text, struct error *error) {
    char *copy = strdup(text);
    if (copy == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for the value of %s", option->name);
    char **field = option_field(option, config);
    free(*field);
    *field = copy;
    return 0;
}

static int list_append(struct string_list *list, const char *text, size_t length, struct error *error) {
    if (list->items == NULL) {
        list->items = calloc(OPTION_LIST_MAX, sizeof *list->items);
        if (list->items == NULL)
            return error_set(error, ERROR_MEMORY, "no memory for a list of options");
    }
    char *item = strndup(text, length);
    if (item == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a list of options");
    list->items[list->count++] = item;
    return 0;
}

static bool is_item(const struct option *option, const char *text, size_t length) {
    uint64_t value;
    return option->type == OPTION_RATIOS ? parse_ratio(text, length) : parse_ranged(option, text, length, &value);
}

static int parse_numbers(
    const struct option *option, struct config *config, const char *text, const char *place, struct error *error) {
    struct string_list *list = option_field(option, config);
    const char *item = text;
    for (;;) {
        size_t length = strcspn(item, ",");
        if (!is_item(option, item, length) || list->count == OPTION_LIST_MAX)
            return refuse(option, text, place, error);
        int code = list_append(list, item, length, error);
        if (code != 0)
            return code;
        if (item[length] == '\0')
            return 0;
        item += length + 1;
    }
}

static int parse_text(
    const struct option *option, struct config *config, const char *text, const char *place, struct error *error) {
    struct string_list *list = option_field(option, config);
    if (*text == '\0' || !text_is_acceptable(text) || list->count == OPTION_LIST_MAX)
        return refuse(option, text, place, error);
    return list_append(list, text, strlen(text), error);
}

/* The policy's own message tells what is wrong with it; the files that it names are read, but names of trained
 * policies are for config_policies. */
static int parse_policy(
    const struct option *option, struct config *config, const char *text, const char *place, struct error *error) {
    struct string_list *list = option_field(option, config);
    struct policy_settings settings;
    struct error cause = {0};
    char quoted[OPTION_QUOTE_MAX];
    if (*text == '\0' || !text_is_acceptable(text) || list->count == OPTION_LIST_MAX)
        return refuse(option, text, place, error);
    int code = policy_settings_parse_trained(text, &trained_policies_unknown, &settings, &cause);
    if (code != 0) {
        option_quote(text, quoted);
        return error_set(error, code, "%s is %s: %s", place, quoted, cause.message);
    }
    policy_settings_release(&settings);
    return list_append(list, text, strlen(text), error);
}

int option_parse(
    const struct option *option, struct config *config, const char *text, const char *place, struct error *error) {
    void *field = option_field(option, config);
    uint64_t value;
    if (*text == '\0' && (option->flags & OPTION_MAY_BE_EMPTY) != 0)
        return option_is_list(option) ? 0 : set_string(option, config, text, error);
    switch (option->type) {
    case OPTION_STRING:
        if (*text == '\0' || !text_is_acceptable(text))
            return refuse(option, text, place, error);
        return set_string(option, config, text, error);
    case OPTION_CHOICE:
        if (!is_choice(option->choices, text))
            return refuse(option, text, place, error);
        return set_string(option, config, text, error);
    case OPTION_COUNT:
        if (!parse_ranged(option, text, strlen(text), &value))
            return refuse(option, text, place, error);
        *(uint32_t *)field = (uint32_t)value;
        return 0;
    case OPTION_SIZE:
        if (!parse_ranged(option, text, strlen(text), &value) || value > SIZE_MAX)
            return refuse(option, text, place, error);
        *(size_t *)field = (size_t)value;
        return 0;
    case OPTION_BOOL:
        if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0)
            return refuse(option, text, place, error);
        *(bool *)field = strcmp(text, "true") == 0;
        return 0;
    case OPTION_RATIO:
        if (!parse_ratio(text, strlen(text)))
            return refuse(option, text, place, error);
        *(double *)field = strtod(text, NULL);
        return 0;
    case OPTION_COUNTS:
    case OPTION_RATIOS:
        return parse_numbers(option, config, text, place, error);
    case OPTION_TEXTS:
        return parse_text(option, config, text, place, error);
    case OPTION_POLICIES:
        return parse_policy(option, config, text, place, error);
    }
    return refuse(option, text, place, error);
}

bool option_is_list(const struct option *option) {
    return option->type == OPTION_COUNTS || option->type == OPTION_RATIOS || option->type == OPTION_TEXTS ||
           option->type == OPTION_POLICIES;
}

void option_clear_list(const struct option *option, struct config *config) {
    if (!option_is_list(option))
        return;
    struct string_list *list = option_field(option, config);
    for (size_t i = 0; i < list->count; i++)
        free(list->items[i]);
    list->count = 0;
}

void option_free(const struct option *option, struct config *config) {
    void *field = option_field(option, config);
    if (option_is_list(option)) {
        option_clear_list(option, config);
        free(((struct string_list *)field)->items);
        ((struct string_list *)field)->items = NULL;
    } else if (option->type == OPTION_STRING || option->type == OPTION_CHOICE) {
        free(*(char **)field);
        *(char **)field = NULL;
    }
}

/* Writing. */

bool option_is_empty(const struct option *option, const struct config *config) {
    const void *field = option_field_const(option, config);
    if (option_is_list(option))
        return ((const struct string_list *)field)->count == 0;
    if (option->type != OPTION_STRING && option->type != OPTION_CHOICE)
        return false;
    const char *text = *(char *const *)field;
    return text == NULL || *text == '\0';
}

/* A YAML double-quoted scalar. The text has no control characters; what YAML would take for a line break or refuse in a
 * file (byte order mark, non-characters) is escaped. */
static void print_quoted(const char *text, FILE *out) {
    size_t rest = strlen(text);
    fputc('"', out);
    while (rest > 0) {
        utf8proc_int32_t code;
        utf8proc_ssize_t used =
            utf8proc_iterate((const utf8proc_uint8_t *)text, rest < 4 ? (utf8proc_ssize_t)rest : 4, &code);
        if (used <= 0)
            break;
        if (code == 0x2028 || code == 0x2029 || code == 0xfeff || code == 0xfffe || code == 0xffff)
            fprintf(out, "\\u%04x", (unsigned)code);
        else
            fprintf(out, "%s%.*s", code == '"' || code == '\\' ? "\\" : "", (int)used, text);
        text += used;
        rest -= (size_t)used;
    }
    fputc('"', out);
}

/* As YAML: texts in quotes; one text or ratio, and none, without brackets. Secrets as if there were none. */
static void print_list(const struct option *option, const struct string_list *list, bool yaml, FILE *out) {
    size_t count = (option->flags & OPTION_SECRET) != 0 ? 0 : list->count;
    bool brackets = yaml && (option->type == OPTION_COUNTS || count > 1);
    if (yaml && !brackets && count == 0)
        fputs("\"\"", out);
    fputs(brackets ? "[" : "", out);
    for (size_t i = 0; i < count; i++) {
        fputs(i == 0 ? "" : (yaml ? ", " : ","), out);
        if (yaml && (option->type == OPTION_POLICIES || option->type == OPTION_TEXTS))
            print_quoted(list->items[i], out);
        else
            fputs(list->items[i], out);
    }
    fputs(brackets ? "]" : "", out);
}

void option_format(const struct option *option, const struct config *config, bool yaml, FILE *out) {
    const void *field = option_field_const(option, config);
    const char *text = "";
    char size[24];
    switch (option->type) {
    case OPTION_STRING:
    case OPTION_CHOICE:
        if (*(char *const *)field != NULL && (option->flags & OPTION_SECRET) == 0)
            text = *(char *const *)field;
        if (yaml && (option->type == OPTION_STRING || *text == '\0'))
            print_quoted(text, out);
        else
            fputs(text, out);
        break;
    case OPTION_COUNT:
        fprintf(out, "%" PRIu32, *(const uint32_t *)field);
        break;
    case OPTION_SIZE:
        format_size(*(const size_t *)field, size);
        fputs(size, out);
        break;
    case OPTION_RATIO:
        fprintf(out, "%.15g", *(const double *)field);
        break;
    case OPTION_BOOL:
        fputs(*(const bool *)field ? "true" : "false", out);
        break;
    case OPTION_COUNTS:
    case OPTION_RATIOS:
    case OPTION_TEXTS:
    case OPTION_POLICIES:
        print_list(option, field, yaml, out);
        break;
    }
}
