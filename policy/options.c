/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of options and all that follows from it: texts, setting, range checks (policy/options.h).
 */
#include "policy/options.h"

#include "policy/budget.h"
#include "policy/network.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum kind {
    KIND_COUNT,  /* uint32_t */
    KIND_ODD,    /* uint32_t, odd */
    KIND_SEED,   /* uint64_t */
    KIND_NUMBER, /* float */
    KIND_DOUBLE,
    KIND_SPARSITY, /* float, or `auto`: NaN */
    KIND_SCOPE,    /* enum policy_scope */
    KIND_FLAG,     /* bool, by two words: false, true */
    KIND_SWITCH,   /* bool, 0 or 1, also false and true */
    KIND_BASE,     /* a policy that hybrid can use */
    KIND_GATES,    /* a file */
    KIND_NETWORK,  /* a file */
};

struct option {
    const char *name;
    uint32_t bit; /* enum policy_option; 0: common */
    enum kind kind;
    size_t offset; /* in struct policy_settings */
    double least, most;
    bool above; /* the least value itself is not allowed */
    const char *words[7];
    const char *help;
};

enum { TOKENS_MAX = 1 << 30, VALUE_SHOWN_MAX = 48 };

#define FIELD(name) offsetof(struct policy_settings, name)

static const struct option options[] = {
    {"ratio", 0, KIND_DOUBLE, FIELD(ratio), 0, 1, true, {0}, "part of all tokens that each head keeps"},
    {"tokens", 0, KIND_COUNT, FIELD(tokens), 0, TOKENS_MAX, false, {0},
        "slots per head instead of a ratio; 0: by ratio"},
    {"minimum", 0, KIND_COUNT, FIELD(minimum), 1, TOKENS_MAX, false, {0}, "fewest slots per head of a ratio"},
    {"interval", 0, KIND_COUNT, FIELD(interval), 1, 65536, false, {0}, "decode steps from one prune to the next"},
    {"prefill_prune_every", 0, KIND_COUNT, FIELD(prefill_prune_every), 0, TOKENS_MAX, false, {0},
        "prune at every multiple of this within the prompt; 0: after it only"},
    {"protect_recent", 0, KIND_COUNT, FIELD(protect_recent), 0, TOKENS_MAX, false, {0},
        "most recent tokens that stay in any case"},
    {"protect_sinks", 0, KIND_COUNT, FIELD(protect_sinks), 0, TOKENS_MAX, false, {0},
        "first tokens that stay in any case"},
    {"scope", 0, KIND_SCOPE, FIELD(scope), 0, 0, false, {"head", "layer", "model"}, "what slots compete within"},
    {"floor", 0, KIND_NUMBER, FIELD(floor), 0, 1, false, {0},
        "scopes layer and model: part of B that every head keeps"},
    {"summary", 0, KIND_SWITCH, FIELD(summary), 0, 0, false, {"0", "1"},
        "1: one slot of each head stands for the tokens that it evicted"},
    {"sinks", OPTION_SINKS, KIND_COUNT, FIELD(sinks), 0, TOKENS_MAX, false, {0}, "first tokens that stay"},
    {"recent", OPTION_RECENT, KIND_NUMBER, FIELD(recent), 0, 1, false, {0},
        "part of B that goes to the most recent tokens"},
    {"recent_tokens", OPTION_RECENT_TOKENS, KIND_COUNT, FIELD(recent_tokens), 1, TOKENS_MAX, false, {0},
        "most recent tokens that stay"},
    {"window", OPTION_WINDOW, KIND_COUNT, FIELD(window), 1, 256, false, {0}, "last queries that scores are made from"},
    {"kernel", OPTION_KERNEL, KIND_ODD, FIELD(kernel), 1, 255, false, {0}, "positions that are pooled"},
    {"history", OPTION_HISTORY, KIND_COUNT, FIELD(history), 1, STATISTIC_ABOVE_BITS, false, {0},
        "last queries that are counted"},
    {"beta", OPTION_BETA, KIND_NUMBER, FIELD(beta), 0.5, 1e6, false, {0},
        "the last layer gets 1/beta of the mean budget beyond the window"},
    {"gamma", OPTION_GAMMA, KIND_NUMBER, FIELD(gamma), 0, 1e6, false, {0}, "weight of the variance"},
    {"tau1", OPTION_TAU, KIND_NUMBER, FIELD(tau1), 0.01, 100, false, {0},
        "temperature of the entropy in layer budgets"},
    {"tau2", OPTION_TAU, KIND_NUMBER, FIELD(tau2), 0.01, 100, false, {0}, "temperature of the variance there"},
    {"epsilon", OPTION_EPSILON, KIND_NUMBER, FIELD(epsilon), 0, 1, false, {0},
        "added to a slot's probability before the value's norm counts"},
    {"future", OPTION_FUTURE, KIND_COUNT, FIELD(future), 1, 65536, false, {0},
        "next positions whose rotations are averaged"},
    {"smoothing", OPTION_SMOOTHING, KIND_NUMBER, FIELD(smoothing), 0, 1, true, {0},
        "weight of the newer query in the moving average"},
    {"sparsity", OPTION_SPARSITY, KIND_SPARSITY, FIELD(sparsity), 0, 1, false, {0},
        "part of the heads that do not keep everything"},
    {"full_heads", OPTION_FULL_HEADS, KIND_NUMBER, FIELD(full_heads), 0, 1, false, {0},
        "most heads, as a part, that keep everything"},
    {"base", OPTION_BASE, KIND_BASE, FIELD(base), 0, 0, false,
        {"h2o", "snapkv", "streaming", "knorm", "distillcache", "ranker"},
        "policy of the heads that do not keep everything"},
    {"decode", OPTION_DECODE, KIND_FLAG, FIELD(frozen_prompt), 0, 0, false, {"slide", "keep"},
        "keep: nothing is evicted any more once the prompt was pruned"},
    {"positions", OPTION_POSITIONS, KIND_FLAG, FIELD(cache_positions), 0, 0, false, {"original", "cache"},
        "cache: keys are rotated by their place in the cache"},
    {"gates", OPTION_GATES, KIND_GATES, FIELD(gates), 0, 0, false, {0},
        "JSON file with the heads' gates; without: from attention"},
    {"network", OPTION_NETWORK, KIND_NETWORK, FIELD(network), 0, 0, false, {0},
        "policy file; without: the one that ships for the model"},
    {"seed", OPTION_SEED, KIND_SEED, FIELD(seed), 0, 18446744073709551615.0, false, {0}, "of the random numbers"},
};

enum { OPTIONS_COUNT = sizeof options / sizeof options[0] };

uint32_t policy_options_count(void) {
    return OPTIONS_COUNT;
}

bool policy_option_exists(const char *name) {
    for (uint32_t i = 0; i < policy_options_count(); i++)
        if (strcmp(name, policy_option_name(i)) == 0)
            return true;
    return false;
}

const char *policy_option_name(uint32_t index) {
    return options[index].name;
}

const char *policy_option_help(uint32_t index) {
    return options[index].help;
}

bool policy_option_common(uint32_t index) {
    return options[index].bit == 0;
}

bool policy_option_applies(uint32_t index, const struct policy *policy) {
    return options[index].bit == 0 || (options[index].bit & policy->options) != 0;
}

/* ---- texts ---- */

static void format_words(const struct option *option, char *out, size_t size) {
    size_t length = 0;
    for (uint32_t i = 0; option->words[i] != NULL && length < size; i++) {
        const char *before = i == 0 ? "" : option->words[i + 1] == NULL ? " or " : ", ";
        length += (size_t)snprintf(out + length, size - length, "%s%s", before, option->words[i]);
    }
}

static void format_range(const struct option *option, const char *what, char *out, size_t size) {
    if (option->above)
        snprintf(out, size, "%s above %.15g, at most %.15g", what, option->least, option->most);
    else
        snprintf(out, size, "%s from %.15g to %.15g", what, option->least, option->most);
}

void policy_option_allowed(uint32_t index, char *out, size_t size) {
    const struct option *option = &options[index];
    switch (option->kind) {
    case KIND_COUNT:
        format_range(option, "a whole number", out, size);
        break;
    case KIND_ODD:
        format_range(option, "an odd number", out, size);
        break;
    case KIND_SEED:
        snprintf(out, size, "a whole number from 0 to %" PRIu64, UINT64_MAX);
        break;
    case KIND_NUMBER:
    case KIND_DOUBLE:
        format_range(option, "a number", out, size);
        break;
    case KIND_SPARSITY:
        format_range(option, "auto (by the budget) or a number", out, size);
        break;
    case KIND_GATES:
    case KIND_NETWORK:
        snprintf(out, size, "a file name");
        break;
    default:
        format_words(option, out, size);
    }
}

/* The shortest text that reads back as the same float. */
static void format_float(float value, char *out, size_t size) {
    char text[32] = "";
    for (int digits = 6; digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)value);
        if (strtof(text, NULL) == value)
            break;
    }
    snprintf(out, size, "%s", text);
}

static void format_double(double value, char *out, size_t size) {
    char text[32] = "";
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value)
            break;
    }
    snprintf(out, size, "%s", text);
}

/* How it was trained and what it looks at, in two words. */
static void format_network(const struct policy_network *network, char *out, size_t size) {
    if (network == NULL)
        snprintf(out, size, "of the model");
    else
        snprintf(out, size, "%.32s %s", network->method != NULL ? network->method : "untrained",
            network_features_name(network->shape.features));
}

void policy_option_value(uint32_t index, const struct policy_settings *settings, char *out, size_t size) {
    const struct option *option = &options[index];
    const void *field = (const char *)settings + option->offset;
    switch (option->kind) {
    case KIND_COUNT:
    case KIND_ODD:
        snprintf(out, size, "%" PRIu32, *(const uint32_t *)field);
        break;
    case KIND_SEED:
        snprintf(out, size, "%" PRIu64, *(const uint64_t *)field);
        break;
    case KIND_SPARSITY:
    case KIND_NUMBER:
        if (isnan(*(const float *)field))
            snprintf(out, size, "auto");
        else
            format_float(*(const float *)field, out, size);
        break;
    case KIND_DOUBLE:
        format_double(*(const double *)field, out, size);
        break;
    case KIND_SCOPE:
        snprintf(out, size, "%s", option->words[*(const enum policy_scope *)field]);
        break;
    case KIND_FLAG:
    case KIND_SWITCH:
        snprintf(out, size, "%s", option->words[*(const bool *)field]);
        break;
    case KIND_BASE:
        snprintf(out, size, "%s", settings->base != NULL ? settings->base->name : "");
        break;
    case KIND_GATES:
        snprintf(out, size, "%s", settings->gates != NULL ? "from a file" : "from attention");
        break;
    case KIND_NETWORK:
        format_network(settings->network, out, size);
    }
}

const char *policy_option_quote(const char *value, char *out, size_t size) {
    size_t length = strnlen(value, VALUE_SHOWN_MAX), shown = 0;
    for (size_t i = 0; i < length && shown + 4 < size; i++)
        out[shown++] = value[i] >= ' ' && value[i] <= '~' ? value[i] : '?';
    snprintf(out + shown, size - shown, "%s", value[length] != '\0' ? "..." : "");
    return out;
}

/* ---- reading ---- */

static int refuse(uint32_t index, const char *value, struct error *error) {
    char shown[VALUE_SHOWN_MAX + 8], allowed[128];
    policy_option_allowed(index, allowed, sizeof allowed);
    return error_set(error, ERROR_INVALID, "option %s is '%s': must be %s", options[index].name,
        policy_option_quote(value, shown, sizeof shown), allowed);
}

static bool read_whole(const char *text, uint64_t *value) {
    char *end;
    if (text[0] < '0' || text[0] > '9')
        return false;
    errno = 0;
    *value = strtoull(text, &end, 10);
    return *end == '\0' && errno == 0;
}

/* Decimal only: no spaces, hexadecimals, infinities. */
static bool read_number(const char *text, double *value) {
    char *end;
    if (text[0] == '\0' || text[strspn(text, "0123456789.eE+-")] != '\0')
        return false;
    *value = strtod(text, &end);
    return *end == '\0' && isfinite(*value);
}

static bool in_range(const struct option *option, double value) {
    return (option->above ? value > option->least : value >= option->least) && value <= option->most;
}

static int find_word(const struct option *option, const char *text) {
    for (int i = 0; option->words[i] != NULL; i++)
        if (strcmp(option->words[i], text) == 0)
            return i;
    return -1;
}

static bool set_whole(const struct option *option, const char *text, void *field) {
    uint64_t value;
    if (!read_whole(text, &value))
        return false;
    if (option->kind == KIND_SEED) {
        *(uint64_t *)field = value;
        return true;
    }
    if (!in_range(option, (double)value) || (option->kind == KIND_ODD && value % 2 == 0))
        return false;
    *(uint32_t *)field = (uint32_t)value;
    return true;
}

static bool set_number(const struct option *option, const char *text, void *field) {
    double value;
    if (option->kind == KIND_SPARSITY && strcmp(text, "auto") == 0) {
        *(float *)field = NAN;
        return true;
    }
    if (!read_number(text, &value))
        return false;
    if (option->kind == KIND_DOUBLE) {
        if (!in_range(option, value))
            return false;
        *(double *)field = value;
        return true;
    }
    if (!in_range(option, (float)value)) /* a tiny number may become 0 */
        return false;
    *(float *)field = (float)value;
    return true;
}

static bool set_word(const struct option *option, const char *text, void *field) {
    int word = find_word(option, text);
    if (option->kind == KIND_SWITCH && word < 0)
        word = strcmp(text, "false") == 0 ? 0 : strcmp(text, "true") == 0 ? 1 : -1;
    if (word < 0)
        return false;
    if (option->kind == KIND_SCOPE)
        *(enum policy_scope *)field = (enum policy_scope)word;
    else if (option->kind == KIND_FLAG || option->kind == KIND_SWITCH)
        *(bool *)field = word == 1;
    else
        *(const struct policy **)field = policy_find(text);
    return true;
}

static int set_gates(struct policy_settings *settings, const char *file, bool allow_files, struct error *error) {
    if (!allow_files)
        return error_set(
            error, ERROR_INVALID, "option gates: a request cannot name a file; the server's own policy can");
    struct error reason = {0};
    struct head_gates *gates = head_gates_load(file, &reason);
    if (gates == NULL)
        return error_set(error, reason.code, "option gates: %s", reason.message);
    head_gates_release(settings->gates);
    settings->gates = gates;
    return 0;
}

static int set_network(struct policy_settings *settings, const char *file, bool allow_files, struct error *error) {
    if (!allow_files)
        return error_set(
            error, ERROR_INVALID, "option network: a request cannot name a file; the server's own policy can");
    struct error reason = {0};
    struct policy_network *network = network_load(file, &reason);
    if (network == NULL)
        return error_set(error, reason.code, "option network: %s", reason.message);
    network_release(settings->network);
    settings->network = network;
    return 0;
}

int option_set(
    struct policy_settings *settings, uint32_t index, const char *value, bool allow_files, struct error *error) {
    const struct option *option = &options[index];
    void *field = (char *)settings + option->offset;
    bool valid;
    switch (option->kind) {
    case KIND_GATES:
        return set_gates(settings, value, allow_files, error);
    case KIND_NETWORK:
        return set_network(settings, value, allow_files, error);
    case KIND_COUNT:
    case KIND_ODD:
    case KIND_SEED:
        valid = set_whole(option, value, field);
        break;
    case KIND_NUMBER:
    case KIND_DOUBLE:
    case KIND_SPARSITY:
        valid = set_number(option, value, field);
        break;
    default:
        valid = set_word(option, value, field);
    }
    return valid ? 0 : refuse(index, value, error);
}

bool option_named(const struct policy_settings *settings, const char *name) {
    for (uint32_t i = 0; i < OPTIONS_COUNT; i++)
        if (strcmp(options[i].name, name) == 0)
            return (settings->named >> i & 1) != 0;
    return false;
}

static bool field_valid(const struct option *option, const void *field) {
    switch (option->kind) {
    case KIND_COUNT:
        return in_range(option, *(const uint32_t *)field);
    case KIND_ODD:
        return in_range(option, *(const uint32_t *)field) && *(const uint32_t *)field % 2 == 1;
    case KIND_NUMBER:
        return in_range(option, *(const float *)field);
    case KIND_DOUBLE:
        return in_range(option, *(const double *)field);
    case KIND_SPARSITY:
        return isnan(*(const float *)field) || in_range(option, *(const float *)field);
    case KIND_SCOPE:
        return *(const enum policy_scope *)field <= SCOPE_MODEL;
    case KIND_BASE:
        return *(const struct policy *const *)field != NULL &&
               find_word(option, (*(const struct policy *const *)field)->name) >= 0;
    default:
        return true;
    }
}

int options_check(const struct policy_settings *settings, struct error *error) {
    for (uint32_t i = 0; i < OPTIONS_COUNT; i++) {
        if (!policy_option_applies(i, settings->policy) ||
            field_valid(&options[i], (const char *)settings + options[i].offset))
            continue;
        char value[64] = "unknown";
        if (options[i].kind != KIND_SCOPE)
            policy_option_value(i, settings, value, sizeof value);
        return refuse(i, value, error);
    }
    return 0;
}
