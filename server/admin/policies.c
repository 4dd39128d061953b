/* SPDX-License-Identifier: Apache-2.0
 *
 * Trained policies: list, retrieve, activate, deactivate, delete.
 *
 *   {"id": NAME, "object": "policy", "created_at", "method", "active", "shipped", "usable", "problem",
 *    "fine_tuning_job_id", "model_fingerprint", "parameters", "bytes"}
 *
 * A request chooses one by `kv_cache: {"policy": "distillcache:NAME"}`. Activation is for requests that come after it.
 */
#include "server/admin/admin.h"

#include <stdio.h>
#include <string.h>

static const char ACTIVE[] = "active_policy";

static void policies_write(struct buffer *out, const struct policy_entry *entry) {
    bool usable = entry->problem[0] == '\0';
    buffer_string(out, "{\"id\":");
    buffer_json_cstring(out, entry->name);
    buffer_string(out, ",\"object\":\"policy\"");
    admin_write_seconds(out, "created_at", entry->created);
    admin_write_text(out, "method", entry->method[0] == '\0' ? NULL : entry->method);
    buffer_format(out, ",\"active\":%s,\"shipped\":%s,\"usable\":%s", entry->active ? "true" : "false",
        strcmp(entry->name, policy_shipped_name) == 0 ? "true" : "false", usable ? "true" : "false");
    admin_write_text(out, "problem", usable ? NULL : entry->problem);
    admin_write_text(out, "fine_tuning_job_id", entry->job[0] == '\0' ? NULL : entry->job);
    admin_write_text(out, "model_fingerprint", entry->fingerprint[0] == '\0' ? NULL : entry->fingerprint);
    buffer_format(out, ",\"parameters\":%llu,\"bytes\":%llu}", (unsigned long long)entry->parameters,
        (unsigned long long)entry->bytes);
}

static int policies_answer_list(struct admin_call *call, struct database *database, struct error *error) {
    struct policy_entry entry;
    struct page page = {.limit = INT64_MAX};
    struct admin_list list;
    (void)database;
    (void)error;
    admin_list_begin(&list, &call->reply, &page);
    for (uint32_t i = 0; policy_table_at(call->admin->policies, i, &entry); i++)
        if (admin_list_next(&list, entry.name))
            policies_write(&call->reply, &entry);
    admin_list_end(&list);
    return 0;
}

static int policies_answer_one(struct admin_call *call, struct database *database, struct error *error) {
    struct policy_entry entry;
    (void)database;
    (void)error;
    if (!policy_table_find(call->admin->policies, call->id, &entry))
        return admin_not_found(call, "policy");
    policies_write(&call->reply, &entry);
    return 0;
}

static int policies_take_file(void *context, const struct policy_record *policy) {
    struct admin_call *call = context;
    snprintf(call->subject, sizeof call->subject, "%s", policy->file);
    return 1;
}

/* Finds the entry, and its file's name for one that has a record (subject; empty: shipped). An entry whose record is
 * gone is being deleted. */
static int policies_find_entry(
    struct admin_call *call, struct database *database, struct policy_entry *entry, struct error *error) {
    if (!policy_table_find(call->admin->policies, call->id, entry))
        return admin_not_found(call, "policy");
    if (strcmp(entry->name, policy_shipped_name) == 0)
        return 0;
    int found = policies_find(database, call->id, policies_take_file, call, error);
    return found == 0 ? admin_not_found(call, "policy") : found < 0 ? found : 0;
}

/* It is read once more: what is on the disk is what the next start will find. */
static int policies_check_usable(struct admin_call *call, const struct policy_entry *entry) {
    char path[STORE_PATH_MAX];
    struct error problem = {0};
    if (strcmp(entry->method, "rlkv") == 0)
        return fault_set(&call->fault, 400, NULL, NULL,
            "the policy '%.100s' is of method rlkv and cannot be what distillcache means; requests choose it as "
            "rlkv:%.100s",
            call->id, call->id);
    if (entry->problem[0] != '\0')
        return fault_set(
            &call->fault, 400, NULL, NULL, "the policy '%.100s' cannot be used: %s", call->id, entry->problem);
    if (call->subject[0] == '\0')
        return 0;
    int code = store_path(call->admin->store, "policies", call->subject, path, sizeof path) == 0
                   ? policy_table_check_file(call->admin->policies, path, &problem)
                   : error_set(&problem, ERROR_IO, "its path is too long");
    if (code != 0)
        return fault_set(
            &call->fault, 400, NULL, NULL, "the policy '%.100s' cannot be used: %s", call->id, problem.message);
    return 0;
}

/* The name is written here; the table follows when it is on the disk (policies_activated). */
static int policies_answer_activate(struct admin_call *call, struct database *database, struct error *error) {
    struct policy_entry entry;
    int code = policies_find_entry(call, database, &entry, error);
    if (code == 0)
        code = policies_check_usable(call, &entry);
    if (code == 0)
        code = settings_set(database, ACTIVE, call->id, error);
    entry.active = true;
    if (code == 0)
        policies_write(&call->reply, &entry);
    return code;
}

static void policies_activated(struct admin_call *call) {
    policy_table_activate(call->admin->policies, call->id, NULL);
}

static int policies_answer_deactivate(struct admin_call *call, struct database *database, struct error *error) {
    struct policy_entry entry;
    char active[POLICY_NAME_MAX];
    int code = policies_find_entry(call, database, &entry, error);
    if (code == 0)
        code = settings_get(database, ACTIVE, active, sizeof active, error);
    call->changed = code == 0 && strcmp(active, call->id) == 0;
    if (call->changed)
        code = settings_set(database, ACTIVE, NULL, error);
    entry.active = false;
    if (code == 0)
        policies_write(&call->reply, &entry);
    return code;
}

static void policies_deactivated(struct admin_call *call) {
    if (call->changed)
        policy_table_activate(call->admin->policies, NULL, NULL);
}

static int policies_answer_delete(struct admin_call *call, struct database *database, struct error *error) {
    struct policy_entry entry;
    char active[POLICY_NAME_MAX];
    int code = policies_find_entry(call, database, &entry, error);
    if (code == 0 && call->subject[0] == '\0')
        return fault_set(&call->fault, 409, NULL, NULL,
            "the policy '%.100s' ships with the program and cannot be deleted", call->id);
    if (code == 0)
        code = settings_get(database, ACTIVE, active, sizeof active, error);
    if (code == 0 && strcmp(active, call->id) == 0)
        return fault_set(&call->fault, 409, NULL, NULL,
            "the policy '%.100s' is active: activate another one, or deactivate it, before it is deleted", call->id);
    if (code == 0)
        code = policies_delete(database, call->id, error);
    buffer_string(&call->reply, "{\"id\":");
    buffer_json_cstring(&call->reply, call->id);
    buffer_string(&call->reply, ",\"object\":\"policy\",\"deleted\":true}");
    return code < 0 ? code : 0;
}

static void policies_deleted(struct admin_call *call) {
    policy_table_remove(call->admin->policies, call->id, NULL);
    admin_unlink(call->admin, "policies", call->subject);
}

/* --- Routes --- */

static void policies_handle(struct exchange *exchange, admin_answer answer, admin_after after) {
    struct fault fault;
    if (!exchange->server->loaded) {
        fault_unavailable(&fault, "loading", 1, "the model is still loading");
        exchange_fault(exchange, &fault);
        return;
    }
    admin_handle(exchange, answer, after);
}

void policies_list_all(struct exchange *exchange) {
    policies_handle(exchange, policies_answer_list, NULL);
}

void policies_retrieve(struct exchange *exchange) {
    policies_handle(exchange, policies_answer_one, NULL);
}

void policies_activate(struct exchange *exchange) {
    policies_handle(exchange, policies_answer_activate, policies_activated);
}

void policies_remove(struct exchange *exchange) {
    policies_handle(exchange, policies_answer_delete, policies_deleted);
}

void policies_deactivate(struct exchange *exchange) {
    policies_handle(exchange, policies_answer_deactivate, policies_deactivated);
}
