/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/budget.h"
#include "policy/network.h"
#include "policy/options.h"
#include "policy/policies.h"
#include "policy/trained.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { QUOTE_SIZE = 64 };

void policy_settings_default(const struct policy *policy, struct policy_settings *settings) {
    *settings = (struct policy_settings){
        .policy = policy,
        .ratio = 0.25,
        .minimum = 32,
        .interval = 1,
        .scope = SCOPE_HEAD,
        .floor = 0.2f,
        .sinks = 4,
        .recent = 0.5f,
        .recent_tokens = 64,
        .window = 32,
        .kernel = 7,
        .history = 400,
        .beta = 20,
        .gamma = 200,
        .tau1 = 1,
        .tau2 = 1,
        .epsilon = 0.01f,
        .future = 512,
        .smoothing = 0.3f,
        .sparsity = 0.5f,
        .full_heads = 0.2f,
    };
    if (policy->defaults != NULL)
        policy->defaults(settings);
}

/* ---- setting ---- */

static int refuse_option(const struct policy *policy, const char *option, struct error *error) {
    char list[384] = "", quote[QUOTE_SIZE];
    size_t length = 0;
    for (uint32_t i = 0; i < policy_options_count() && length < sizeof list; i++)
        if (policy_option_applies(i, policy))
            length += (size_t)snprintf(
                list + length, sizeof list - length, "%s%s", length > 0 ? ", " : "", policy_option_name(i));
    return error_set(error, ERROR_INVALID, "policy %s has no option '%s'; it has %s", policy->name,
        policy_option_quote(option, quote, sizeof quote), list);
}

/* What sets the size of the cache replaces what did before. */
static void replace_budget(struct policy_settings *settings, const char *option) {
    bool ratio = strcmp(option, "ratio") == 0, tokens = strcmp(option, "tokens") == 0;
    if (ratio)
        settings->tokens = 0;
    if (ratio || tokens)
        settings->sparsity = (settings->policy->options & OPTION_SPARSITY) != 0 ? NAN : settings->sparsity;
}

/* What the network was trained with, where nobody chose. */
static void take_defaults(struct policy_settings *settings) {
    const struct policy_network *network = settings->network;
    settings->scope = option_named(settings, "scope") ? settings->scope : network->scope;
    settings->floor = option_named(settings, "floor") ? settings->floor : network->floor;
    settings->interval = option_named(settings, "interval") ? settings->interval : network->interval;
    settings->summary = option_named(settings, "summary") ? settings->summary : network->summary;
    if (!option_named(settings, "protect_recent"))
        settings->protect_recent = network->protect_recent;
    if (!option_named(settings, "protect_sinks"))
        settings->protect_sinks = network->protect_sinks;
}

void policy_settings_use_network(struct policy_settings *settings, const struct policy_network *network) {
    network_release(settings->network);
    settings->network = network_take((struct policy_network *)network);
    take_defaults(settings);
}

/* What follows from an option that was just set. */
static void follow(struct policy_settings *settings, uint32_t index) {
    const char *option = policy_option_name(index);
    settings->named |= (uint64_t)1 << index;
    replace_budget(settings, option);
    if (strcmp(option, "network") == 0)
        take_defaults(settings);
    if (strcmp(option, "base") != 0 || option_named(settings, "network"))
        return;
    network_release(settings->network); /* the one that ships for the base there was */
    settings->network = NULL;
}

int policy_settings_set(
    struct policy_settings *settings, const char *option, const char *value, bool allow_files, struct error *error) {
    for (uint32_t i = 0; i < policy_options_count(); i++) {
        if (strcmp(policy_option_name(i), option) != 0 || !policy_option_applies(i, settings->policy))
            continue;
        int code = option_set(settings, i, value, allow_files, error);
        if (code == 0)
            follow(settings, i);
        return code;
    }
    return refuse_option(settings->policy, option, error);
}

static int accept_name(void *context, const char *name, struct policy_settings *settings, struct error *error) {
    (void)context;
    (void)name;
    (void)settings;
    (void)error;
    return 0;
}

const struct trained_policies trained_policies_unknown = {.apply = accept_name, .files = true};

static bool may_name_files(const struct trained_policies *trained) {
    return trained == NULL || trained->files;
}

/* Changes the text: ends words where separators stand. */
static int parse_options(
    char *rest, const struct trained_policies *trained, struct policy_settings *settings, struct error *error) {
    char quote[QUOTE_SIZE];
    while (rest != NULL) {
        char *option = strsep(&rest, ",");
        char *equals = strchr(option, '=');
        if (equals == NULL)
            return error_set(error, ERROR_INVALID, "policy option '%s': must be key=value",
                policy_option_quote(option, quote, sizeof quote));
        *equals = '\0';
        int code = policy_settings_set(settings, option, equals + 1, may_name_files(trained), error);
        if (code != 0)
            return code;
    }
    return 0;
}

/* What stands behind the colon: a name, or a file of gates or a network. */
static int parse_file(
    const char *file, const struct trained_policies *trained, struct policy_settings *settings, struct error *error) {
    const struct policy *policy = settings->policy;
    char quote[QUOTE_SIZE];
    bool named = trained != NULL && !(trained->files && (strchr(file, '/') != NULL || access(file, F_OK) == 0));
    const char *takes = (policy->options & OPTION_GATES) != 0     ? "gates"
                        : (policy->options & OPTION_NETWORK) != 0 ? "network"
                                                                  : NULL;
    if (takes == NULL)
        return error_set(error, ERROR_INVALID, "policy %s takes no file ('%s')", policy->name,
            policy_option_quote(file, quote, sizeof quote));
    return named ? trained->apply(trained->context, file, settings, error)
                 : policy_settings_set(settings, takes, file, true, error);
}

static int parse_words(
    char *text, const struct trained_policies *trained, struct policy_settings *settings, struct error *error) {
    char quote[QUOTE_SIZE], *rest = text;
    char *name = strsep(&rest, ",");
    char *file = strchr(name, ':');
    if (file != NULL)
        *file++ = '\0';
    const struct policy *policy = policy_find(name);
    if (policy == NULL)
        return error_set(error, ERROR_INVALID, "there is no policy '%s'; there are %s",
            policy_option_quote(name, quote, sizeof quote), policy_names());
    policy_settings_default(policy, settings);
    int code = file != NULL ? parse_file(file, trained, settings, error) : 0;
    if (code == 0)
        code = parse_options(rest, trained, settings, error);
    return code == 0 ? policy_settings_check(settings, error) : code;
}

int policy_settings_parse(const char *text, struct policy_settings *settings, struct error *error) {
    return policy_settings_parse_trained(text, NULL, settings, error);
}

int policy_settings_parse_trained(
    const char *text, const struct trained_policies *trained, struct policy_settings *settings, struct error *error) {
    char *words = strdup(text);
    *settings = (struct policy_settings){0};
    if (words == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a policy's options");
    int code = parse_words(words, trained, settings, error);
    if (code != 0)
        policy_settings_release(settings);
    free(words);
    return code;
}

/* ---- the whole ---- */

/* The slot that stands for evicted tokens needs one beside it. Positions in the cache turn the sinks at every prune:
 * the key of tokens at many positions cannot turn with them. */
static int check_summary(const struct policy_settings *settings, struct error *error) {
    bool sparse = policy_settings_by_sparsity(settings);
    uint32_t least = settings->tokens > 0 ? settings->tokens : settings->minimum;
    if (settings->summary && settings->cache_positions)
        return error_set(error, ERROR_UNSUPPORTED,
            "option summary is 1: must be 0 with positions: cache, a summary slot needs original positions");
    if (sparse)
        least = settings->sinks + settings->recent_tokens;
    if (!settings->summary || policy_settings_keep_all(settings) || least >= 2)
        return 0;
    return error_set(error, ERROR_INVALID,
        "option summary is 1: the budget (%s %u) must be at least 2, a slot beside that of what was evicted",
        sparse                 ? "sinks and recent_tokens"
        : settings->tokens > 0 ? "tokens"
                               : "minimum",
        least);
}

/* The newest token must have a place, or the cache would stay as the first prune left it. */
static int check_tokens(const struct policy_settings *settings, struct error *error) {
    uint32_t sinks = 0, recent = 0;
    if (settings->policy->protect != NULL)
        settings->policy->protect(settings, settings->tokens, &sinks, &recent);
    sinks = sinks > settings->protect_sinks ? sinks : settings->protect_sinks;
    recent = recent > settings->protect_recent ? recent : settings->protect_recent;
    if ((uint64_t)sinks + (recent > 0 ? recent : 1) + settings->summary <= settings->tokens)
        return 0;
    return error_set(error, ERROR_INVALID,
        "option tokens is %u: must be more than the %u first and %u most recent tokens that policy %s protects%s",
        settings->tokens, sinks, recent, settings->policy->name, settings->summary ? ", and the summary slot" : "");
}

int policy_settings_check(const struct policy_settings *settings, struct error *error) {
    if (settings->policy == NULL)
        return error_set(error, ERROR_INVALID, "no policy is chosen; there are %s", policy_names());
    int code = options_check(settings, error);
    if (code != 0)
        return code;
    if (settings->policy == &policy_expected_attention && settings->sinks < 4)
        return error_set(error, ERROR_INVALID,
            "option sinks is %u: must be at least 4 for policy expected_attention, which has no score for the first 4 "
            "tokens",
            settings->sinks);
    code = check_summary(settings, error);
    if (code != 0)
        return code;
    bool by_tokens = settings->tokens > 0 && settings->policy->stages != NULL;
    return by_tokens && !settings->policy->heads_differ ? check_tokens(settings, error) : 0;
}

void policy_settings_copy(struct policy_settings *to, const struct policy_settings *from) {
    *to = *from;
    head_gates_take(to->gates);
    network_take(to->network);
}

void policy_settings_release(struct policy_settings *settings) {
    head_gates_release(settings->gates);
    network_release(settings->network);
    settings->gates = NULL;
    settings->network = NULL;
}

bool policy_settings_by_sparsity(const struct policy_settings *settings) {
    return (settings->policy->options & OPTION_SPARSITY) != 0 && !isnan(settings->sparsity);
}

bool policy_settings_keep_all(const struct policy_settings *settings) {
    if (settings->policy == NULL || settings->policy->stages == NULL)
        return true;
    if (policy_settings_by_sparsity(settings))
        return settings->sparsity == 0;
    return settings->tokens == 0 && settings->ratio >= 1;
}

/* ---- the network ---- */

/* The policy that scores slots, as far as it does so by a network. */
static const struct policy *network_policy(const struct policy_settings *settings) {
    const struct policy *policy = settings->policy;
    if (policy != NULL && (policy->options & OPTION_BASE) != 0)
        policy = settings->base;
    return policy != NULL && (policy->options & OPTION_NETWORK) != 0 ? policy : NULL;
}

bool policy_settings_want_network(const struct policy_settings *settings) {
    return network_policy(settings) != NULL && !policy_settings_keep_all(settings);
}

int policy_settings_take_trained(
    const struct trained_policies *trained, struct policy_settings *settings, struct error *error) {
    if (trained == NULL || !policy_settings_want_network(settings) || settings->network != NULL)
        return 0;
    return trained->apply(trained->context, NULL, settings, error);
}

static bool fits(const struct network_shape *shape, const struct policy_model *model) {
    return shape->layers == model->layers && shape->kv_heads == model->kv_heads && shape->head_dim == model->head_dim;
}

/* The network for a model of another shape. */
static int carry_network(struct policy_settings *settings, const struct policy_model *model, struct error *error) {
    struct error reason = {0};
    struct policy_network *carried = network_carry(settings->network, NULL, 0, model, &reason);
    if (carried == NULL)
        return error_set(error, reason.code, "%s", reason.message);
    network_release(settings->network);
    settings->network = carried;
    return 0;
}

int policy_settings_fit(const struct policy_settings *settings, const struct policy_model *model, struct error *error) {
    const struct network_shape *shape = &settings->network->shape;
    if (fits(shape, model))
        return 0;
    return error_set(error, ERROR_UNSUPPORTED,
        "the policy's network is for %u layers of %u KV heads of width %u, this model has %u of %u of %u",
        shape->layers, shape->kv_heads, shape->head_dim, model->layers, model->kv_heads, model->head_dim);
}

int policy_settings_resolve(
    struct policy_settings *settings, const struct policy_model *model, bool *foreign, struct error *error) {
    if (foreign != NULL)
        *foreign = false;
    if (!policy_settings_want_network(settings))
        return 0;
    if (settings->network == NULL) {
        struct error reason = {0};
        settings->network = network_load_shipped(model->fingerprint, network_policy(settings)->name, &reason);
        if (settings->network == NULL)
            return error_set(error, reason.code, "policy %s: %s", settings->policy->name, reason.message);
    }
    int code = fits(&settings->network->shape, model) ? 0 : carry_network(settings, model, error);
    if (code != 0)
        return code;
    if (foreign != NULL)
        *foreign = strcmp(settings->network->fingerprint, model->fingerprint) != 0;
    take_defaults(settings);
    return policy_settings_check(settings, error);
}

/* ---- what follows from settings ---- */

uint32_t policy_budget(const struct policy_settings *settings, uint32_t seen) {
    if (settings->tokens > 0)
        return settings->tokens;
    uint32_t budget = (uint32_t)floor(settings->ratio * seen);
    return budget > settings->minimum ? budget : settings->minimum;
}

uint32_t policy_needs(const struct policy_settings *settings, bool first) {
    if (policy_settings_keep_all(settings))
        return 0;
    uint32_t needs = settings->policy->needs != NULL ? settings->policy->needs(settings, first) : 0;
    return needs | (settings->summary ? STATISTIC_SUM : 0);
}

uint32_t policy_stages(const struct policy_settings *settings, struct score_stage stages[SCORE_STAGES_MAX]) {
    return policy_settings_keep_all(settings) ? 0 : settings->policy->stages(settings, stages);
}

void policy_protection(
    const struct policy_settings *settings, uint32_t seen, uint32_t budget, uint32_t *sinks, uint32_t *recent_from) {
    uint32_t recent = 0;
    *sinks = 0;
    if (settings->policy->protect != NULL)
        settings->policy->protect(settings, budget, sinks, &recent);
    *sinks = *sinks > settings->protect_sinks ? *sinks : settings->protect_sinks;
    recent = recent > settings->protect_recent ? recent : settings->protect_recent;
    *recent_from = seen > recent ? seen - recent : 0;
}

uint32_t policy_prefix_needs(const struct policy_settings *settings) {
    return policy_needs(settings, true) &
           (STATISTIC_SUM | STATISTIC_SQUARED | STATISTIC_ENTROPY | STATISTIC_NOISY | STATISTIC_MOMENTS);
}

uint32_t policy_fresh_tokens(const struct policy_settings *settings) {
    const uint32_t windows = STATISTIC_WINDOW | STATISTIC_HEAD_WINDOW | STATISTIC_OUTPUTS;
    uint32_t needs = policy_needs(settings, true), fresh = 0;
    if ((needs & windows) != 0)
        fresh = settings->window;
    if ((needs & STATISTIC_ABOVE) != 0 && settings->history > fresh)
        fresh = settings->history;
    return fresh;
}

uint32_t policy_reusable_tokens(const struct policy_settings *settings, uint32_t prompt_tokens) {
    uint32_t end = prompt_tokens, every = settings->prefill_prune_every, fresh = policy_fresh_tokens(settings);
    if (every > 0 && every < end)
        end = every;
    fresh = fresh > 0 ? fresh : 1;
    return end > fresh ? end - fresh : 0;
}

/* ---- in words ---- */

static void append(char *out, size_t size, const char *name, const char *value) {
    size_t length = strlen(out);
    if (length < size)
        snprintf(out + length, size - length, ", %s %s", name, value);
}

/* Options of the budget are named when they count; others as policy_settings_describe says. */
static bool option_described(uint32_t i, const struct policy_settings *settings, const char *value) {
    const char *name = policy_option_name(i);
    bool sparse = policy_settings_by_sparsity(settings);
    if (strcmp(name, "ratio") == 0)
        return settings->tokens == 0 && !sparse;
    if (strcmp(name, "tokens") == 0)
        return settings->tokens > 0 && !sparse;
    if (!policy_option_common(i))
        return true;
    struct policy_settings defaults;
    char usual[64];
    policy_settings_default(settings->policy, &defaults);
    policy_option_value(i, &defaults, usual, sizeof usual);
    return strcmp(value, usual) != 0;
}

void policy_settings_describe(const struct policy_settings *settings, char *out, size_t size) {
    if (size == 0)
        return;
    snprintf(out, size, "%s", settings->policy != NULL ? settings->policy->name : "full");
    if (settings->policy == NULL || settings->policy->stages == NULL)
        return;
    for (uint32_t i = 0; i < policy_options_count(); i++) {
        char value[64];
        if (!policy_option_applies(i, settings->policy))
            continue;
        policy_option_value(i, settings, value, sizeof value);
        if (option_described(i, settings, value))
            append(out, size, policy_option_name(i), value);
    }
}
