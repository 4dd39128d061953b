/* SPDX-License-Identifier: Apache-2.0
 *
 * From the texts of kv-policy, kv-ratio and kv-tokens to settings of policies.
 */
#include "config/config.h"

#include "config/options.h"
#include "policy/policy.h"
#include "policy/trained.h"

#include <stdlib.h>
#include <string.h>

/* "h2o,ratio=0.1": the text names a budget itself. "full" has none. */
static bool has_own_budget(const char *text) {
    static const char *const budgets[] = {"ratio=", "tokens=", "sparsity="};
    for (const char *comma = strchr(text, ','); comma != NULL; comma = strchr(comma + 1, ','))
        for (size_t i = 0; i < sizeof budgets / sizeof budgets[0]; i++)
            if (strncmp(comma + 1, budgets[i], strlen(budgets[i])) == 0)
                return true;
    return strcspn(text, ",:") == 4 && strncmp(text, "full", 4) == 0;
}

/* Settings so far, and what names stand for. */
struct policy_list {
    const struct trained_policies *trained;
    struct policy_settings *settings;
    size_t *count;
};

/* Adds one policy; option: the budget's, NULL for the policy's own. */
static int add_policy(
    const struct policy_list *list, const char *text, const char *option, const char *value, struct error *error) {
    struct policy_settings *settings = &list->settings[*list->count];
    struct error cause = {0};
    char quoted[OPTION_QUOTE_MAX];
    int code = policy_settings_parse_trained(text, list->trained, settings, &cause);
    if (code == 0) {
        ++*list->count;
        if (option != NULL)
            code = policy_settings_set(settings, option, value, false, &cause);
        if (code == 0)
            code = policy_settings_check(settings, &cause);
    }
    if (code == 0)
        return 0;
    option_quote(text, quoted);
    return error_set(error, code, "kv-policy %s%s%s%s%s: %s", quoted, option != NULL ? " with kv-" : "",
        option != NULL ? option : "", option != NULL ? " " : "", option != NULL ? value : "", cause.message);
}

static int add_policies(
    const struct config *config, const char *text, const struct policy_list *list, struct error *error) {
    char tokens[16];
    if (has_own_budget(text) || (config->kv_tokens == 0 && config->kv_ratio.count == 0))
        return add_policy(list, text, NULL, NULL, error);
    if (config->kv_tokens > 0) {
        snprintf(tokens, sizeof tokens, "%u", config->kv_tokens);
        return add_policy(list, text, "tokens", tokens, error);
    }
    int code = 0;
    for (size_t i = 0; i < config->kv_ratio.count && code == 0; i++)
        code = add_policy(list, text, "ratio", config->kv_ratio.items[i], error);
    return code;
}

/* The first of the items that says what another one says; NULL: they all differ. */
static const char *find_repeated(const struct string_list *list, bool (*same)(const char *, const char *)) {
    for (size_t i = 0; i < list->count; i++)
        for (size_t j = 0; j < i; j++)
            if (same(list->items[i], list->items[j]))
                return list->items[i];
    return NULL;
}

static bool same_text(const char *a, const char *b) {
    return strcmp(a, b) == 0;
}

static bool same_number(const char *a, const char *b) {
    return strtod(a, NULL) == strtod(b, NULL);
}

const char *config_repeated(const struct config *config, const char **value) {
    if ((*value = find_repeated(&config->kv_policy, same_text)) != NULL)
        return "kv-policy";
    if ((*value = find_repeated(&config->kv_ratio, same_number)) != NULL)
        return "kv-ratio";
    return (*value = find_repeated(&config->length, same_number)) != NULL ? "length" : NULL;
}

/* A budget is a part or a number. */
static int check_budgets(const struct config *config, struct error *error) {
    if (config->kv_tokens > 0 && config->kv_ratio.count > 0)
        return error_set(error, ERROR_INVALID,
            "kv-ratio %s and kv-tokens %u exclude each other: give one (--kv-ratio= and --kv-tokens 0 take back what "
            "the file or the environment gave)",
            config->kv_ratio.items[0], config->kv_tokens);
    return 0;
}

int config_policies(const struct config *config, const struct trained_policies *trained, struct policy_settings **list,
    size_t *count, struct error *error) {
    size_t ratios = config->kv_ratio.count > 0 ? config->kv_ratio.count : 1;
    *count = 0;
    *list = calloc(config->kv_policy.count * ratios, sizeof **list);
    if (*list == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for policies");
    const struct policy_list made = {.trained = trained, .settings = *list, .count = count};
    int code = check_budgets(config, error);
    for (size_t i = 0; i < config->kv_policy.count && code == 0; i++)
        code = add_policies(config, config->kv_policy.items[i], &made, error);
    return code;
}

void config_free_policies(struct policy_settings *list, size_t count) {
    for (size_t i = 0; list != NULL && i < count; i++)
        policy_settings_release(&list[i]);
    free(list);
}
