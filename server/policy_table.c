/* SPDX-License-Identifier: Apache-2.0 */
#include "server/policy_table.h"

#include "policy/budget.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

const char policy_shipped_name[] = "shipped";
static const char policy_active_use[] = "distillcache"; /* the policy that the active one is for */

struct policy_item {
    struct policy_entry entry;
    struct head_gates *gates; /* of method rlkv, instead of a network */
    struct policy_item *next;
};

struct policy_table {
    pthread_mutex_t mutex;
    char fingerprint[65];
    struct policy_model model;
    struct policy_settings own;
    struct policy_item *items;
    struct policy_item *active;
};

/* --- Life --- */

struct policy_table *policy_table_create(const struct policy_model *model) {
    struct policy_table *table = calloc(1, sizeof *table);
    if (table == NULL)
        return NULL;
    pthread_mutex_init(&table->mutex, NULL);
    snprintf(table->fingerprint, sizeof table->fingerprint, "%s", model->fingerprint == NULL ? "" : model->fingerprint);
    table->model = *model;
    table->model.fingerprint = table->fingerprint;
    return table;
}

static void policy_item_free(struct policy_item *item) {
    if (item == NULL)
        return;
    network_release(item->entry.network);
    head_gates_release(item->gates);
    free(item);
}

void policy_table_free(struct policy_table *table) {
    if (table == NULL)
        return;
    for (struct policy_item *item = table->items, *next; item != NULL; item = next) {
        next = item->next;
        policy_item_free(item);
    }
    policy_settings_release(&table->own);
    pthread_mutex_destroy(&table->mutex);
    free(table);
}

/* --- Files --- */

static int policy_check_shape(const struct policy_table *table, const char *file, uint32_t layers, uint32_t kv_heads,
    uint32_t head_dim, struct error *error) {
    const struct policy_model *model = &table->model;
    if (layers == model->layers && kv_heads == model->kv_heads && (head_dim == model->head_dim || head_dim == 0))
        return 0;
    return error_set(error, ERROR_UNSUPPORTED,
        "%.200s: for a model with %u layers of %u KV heads (head size %u); this one has %u of %u (%u)", file, layers,
        kv_heads, head_dim, model->layers, model->kv_heads, model->head_dim);
}

static bool policy_file_has_gates(const char *file) {
    const char *ending = strrchr(file, '.');
    return ending != NULL && strcmp(ending, ".json") == 0;
}

static int policy_read_gates(
    const struct policy_table *table, const char *file, struct policy_item *item, struct error *error) {
    item->gates = head_gates_load(file, error);
    if (item->gates == NULL)
        return error->code;
    int code = policy_check_shape(table, file, item->gates->layers, item->gates->kv_heads, 0, error);
    if (code != 0)
        return code;
    snprintf(item->entry.method, sizeof item->entry.method, "rlkv");
    item->entry.parameters = (uint64_t)item->gates->layers * item->gates->kv_heads;
    return 0;
}

/* Takes the network over, also on failure. */
static int policy_take_network(const struct policy_table *table, const char *file, struct policy_network *network,
    struct policy_item *item, struct error *error) {
    item->entry.network = network;
    snprintf(item->entry.fingerprint, sizeof item->entry.fingerprint, "%s", network->fingerprint);
    const struct network_shape *shape = &network->shape;
    int code = policy_check_shape(table, file, shape->layers, shape->kv_heads, shape->head_dim, error);
    if (code != 0 && !network_can_carry(shape))
        return code;
    if (code != 0) { /* of a model of another shape */
        item->entry.network = network_carry(network, NULL, 0, &table->model, error);
        network_release(network);
        if ((network = item->entry.network) == NULL)
            return error->code;
    }
    snprintf(item->entry.method, sizeof item->entry.method, "%s", network->method == NULL ? "" : network->method);
    item->entry.parameters = network_parameters_count(network);
    return 0;
}

static int policy_read_file(
    const struct policy_table *table, const char *file, struct policy_item *item, struct error *error) {
    struct stat status;
    if (stat(file, &status) == 0)
        item->entry.bytes = (uint64_t)status.st_size;
    if (policy_file_has_gates(file))
        return policy_read_gates(table, file, item, error);
    struct policy_network *network = network_load(file, error);
    return network == NULL ? error->code : policy_take_network(table, file, network, item, error);
}

int policy_table_check_file(const struct policy_table *table, const char *file, struct error *error) {
    struct policy_item item = {.next = NULL};
    int code = policy_read_file(table, file, &item, error);
    network_release(item.entry.network);
    head_gates_release(item.gates);
    return code;
}

/* --- Entries --- */

static struct policy_item *policy_table_item(const struct policy_table *table, const char *name) {
    for (struct policy_item *item = table->items; item != NULL; item = item->next)
        if (strcmp(item->entry.name, name) == 0)
            return item;
    return NULL;
}

/* Puts the item at the end, or in the place of one of its name. */
static void policy_table_put(struct policy_table *table, struct policy_item *item) {
    pthread_mutex_lock(&table->mutex);
    struct policy_item **place = &table->items;
    while (*place != NULL && strcmp((*place)->entry.name, item->entry.name) != 0)
        place = &(*place)->next;
    struct policy_item *old = *place;
    item->next = old == NULL ? NULL : old->next;
    *place = item;
    if (old != NULL && table->active == old)
        table->active = item->entry.problem[0] == '\0' ? item : NULL;
    pthread_mutex_unlock(&table->mutex);
    policy_item_free(old);
}

int policy_table_load(struct policy_table *table, const char *name, const char *file, const char *job, int64_t created,
    struct error *error) {
    struct error local = {0};
    struct policy_item *item = calloc(1, sizeof *item);
    if (item == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a policy");
    snprintf(item->entry.name, sizeof item->entry.name, "%s", name);
    snprintf(item->entry.job, sizeof item->entry.job, "%s", job == NULL ? "" : job);
    item->entry.created = created;
    int code = policy_read_file(table, file, item, &local);
    if (code != 0) {
        snprintf(item->entry.problem, sizeof item->entry.problem, "%.255s", local.message);
        network_release(item->entry.network);
        item->entry.network = NULL;
        head_gates_release(item->gates);
        item->gates = NULL;
        if (error != NULL)
            *error = local;
    }
    policy_table_put(table, item);
    return code;
}

void policy_table_load_shipped(struct policy_table *table) {
    struct error error;
    struct policy_network *network = network_load_shipped(table->fingerprint, policy_active_use, &error);
    struct policy_item *item = network == NULL ? NULL : calloc(1, sizeof *item);
    if (item == NULL || policy_take_network(table, policy_shipped_name, network, item, &error) != 0) {
        if (item == NULL)
            network_release(network);
        policy_item_free(item);
        return;
    }
    snprintf(item->entry.name, sizeof item->entry.name, "%s", policy_shipped_name);
    policy_table_put(table, item);
}

int policy_table_activate(struct policy_table *table, const char *name, struct error *error) {
    int code = 0;
    pthread_mutex_lock(&table->mutex);
    struct policy_item *item = name == NULL || name[0] == '\0' ? NULL : policy_table_item(table, name);
    if (name != NULL && name[0] != '\0' && item == NULL)
        code = error_set(error, ERROR_INVALID, "there is no policy '%.128s'", name);
    else if (item != NULL && item->entry.problem[0] != '\0')
        code = error_set(error, ERROR_INVALID, "the policy '%.128s' cannot be used: %s", name, item->entry.problem);
    else if (item != NULL && item->entry.network == NULL)
        code = error_set(error, ERROR_INVALID,
            "the policy '%.128s' has no network (its method is %s): it is chosen as rlkv:%.128s", name,
            item->entry.method, name);
    else
        table->active = item;
    pthread_mutex_unlock(&table->mutex);
    return code;
}

int policy_table_remove(struct policy_table *table, const char *name, struct error *error) {
    pthread_mutex_lock(&table->mutex);
    struct policy_item **place = &table->items;
    while (*place != NULL && strcmp((*place)->entry.name, name) != 0)
        place = &(*place)->next;
    struct policy_item *item = *place;
    if (item != NULL)
        *place = item->next;
    if (table->active == item)
        table->active = NULL;
    pthread_mutex_unlock(&table->mutex);
    if (item == NULL)
        return error_set(error, ERROR_INVALID, "there is no policy '%.128s'", name);
    policy_item_free(item);
    return 0;
}

static void policy_entry_copy(
    const struct policy_table *table, const struct policy_item *item, struct policy_entry *out) {
    *out = item->entry;
    out->network = NULL;
    out->active = item == table->active;
}

bool policy_table_at(struct policy_table *table, uint32_t index, struct policy_entry *out) {
    pthread_mutex_lock(&table->mutex);
    const struct policy_item *item = table->items;
    for (; item != NULL && index > 0; index--)
        item = item->next;
    if (item != NULL)
        policy_entry_copy(table, item, out);
    pthread_mutex_unlock(&table->mutex);
    return item != NULL;
}

bool policy_table_find(struct policy_table *table, const char *name, struct policy_entry *out) {
    pthread_mutex_lock(&table->mutex);
    const struct policy_item *item = policy_table_item(table, name);
    if (item != NULL)
        policy_entry_copy(table, item, out);
    pthread_mutex_unlock(&table->mutex);
    return item != NULL;
}

/* --- Settings --- */

/* What scores the slots: hybrid has another policy for that. */
static const struct policy *policy_scorer(const struct policy_settings *settings) {
    bool based = (settings->policy->options & OPTION_BASE) != 0 && settings->base != NULL;
    return based ? settings->base : settings->policy;
}

static bool policy_is_for_active(const struct policy_settings *settings) {
    return strcmp(policy_scorer(settings)->name, policy_active_use) == 0;
}

static void policy_set_network(struct policy_settings *settings, struct policy_network *network) {
    network = network_take(network);
    network_release(settings->network);
    settings->network = network;
}

static void policy_set_gates(struct policy_settings *settings, struct head_gates *gates) {
    gates = head_gates_take(gates);
    head_gates_release(settings->gates);
    settings->gates = gates;
}

void policy_table_set_own(struct policy_table *table, const struct policy_settings *own) {
    pthread_mutex_lock(&table->mutex);
    policy_settings_release(&table->own);
    policy_settings_copy(&table->own, own);
    pthread_mutex_unlock(&table->mutex);
}

void policy_table_own(struct policy_table *table, struct policy_settings *settings) {
    pthread_mutex_lock(&table->mutex);
    policy_settings_copy(settings, &table->own);
    if (table->active != NULL && policy_is_for_active(settings)) {
        policy_set_network(settings, table->active->entry.network);
        /* Its defaults; the shape was checked, so nothing else can be wrong than what was chosen for another network.
         */
        policy_settings_resolve(settings, &table->model, NULL, NULL);
    }
    pthread_mutex_unlock(&table->mutex);
}

/* The item's file suits the policy: a network for what is scored by one, gates for gated heads. */
static int policy_apply_item(const struct policy_item *item, struct policy_settings *settings, struct error *error) {
    if (item->entry.problem[0] != '\0')
        return error_set(
            error, ERROR_INVALID, "the policy '%s' cannot be used: %s", item->entry.name, item->entry.problem);
    if (item->gates != NULL && (settings->policy->options & OPTION_GATES) != 0)
        policy_set_gates(settings, item->gates);
    else if (item->entry.network != NULL && (policy_scorer(settings)->options & OPTION_NETWORK) != 0)
        policy_set_network(settings, item->entry.network);
    else
        return error_set(error, ERROR_INVALID, "%s cannot use '%s', which was trained by method %s",
            settings->policy->name, item->entry.name, item->entry.method);
    return 0;
}

int policy_table_apply(
    struct policy_table *table, const char *name, struct policy_settings *settings, struct error *error) {
    int code = 0;
    pthread_mutex_lock(&table->mutex);
    if (name == NULL) {
        const struct policy_item *item =
            table->active != NULL ? table->active : policy_table_item(table, policy_shipped_name);
        if (item != NULL && item->entry.network != NULL && policy_is_for_active(settings))
            policy_set_network(settings, item->entry.network);
    } else {
        const struct policy_item *item = policy_table_item(table, name);
        code = item == NULL ? error_set(error, ERROR_INVALID, "there is no trained policy '%.128s'", name)
                            : policy_apply_item(item, settings, error);
    }
    pthread_mutex_unlock(&table->mutex);
    return code;
}

static int policy_apply_name(void *context, const char *name, struct policy_settings *settings, struct error *error) {
    return policy_table_apply(context, name, settings, error);
}

struct trained_policies policy_table_names(struct policy_table *table, bool files) {
    return (struct trained_policies){.apply = policy_apply_name, .context = table, .files = files};
}
