/* SPDX-License-Identifier: Apache-2.0
 *
 * GET /admin/v1/status: what the server does now.
 *
 *   {"object": "status", "version", "state": loading | ready | draining, "model", "system_fingerprint",
 * "uptime_seconds", "requests": {"running", "waiting"}, "memory": {"pages_total", "pages_free", "kv_bytes",
 * "kv_bytes_full", "kv_tokens_seen", "kv_tokens_kept", "swapped_bytes"}, "jobs": {"queued", "running", "paused",
 * "succeeded", "failed", "cancelled"}, "evaluations": {...}, "current": {"id", "kind", "done", "total", "reward"} |
 * null, "policy": {"default", "active"}, "training": {"share", "turns", "seconds", "busy_seconds", "gave_up"}}
 */
#include "config/config.h"
#include "engine/background.h"
#include "server/admin/admin.h"

#include <math.h>
#include <string.h>
#include <time.h>

static void status_write_engine(struct buffer *out, const struct server *server) {
    struct scheduler_stats stats;
    if (!server->loaded) {
        buffer_string(out, ",\"requests\":null,\"memory\":null");
        return;
    }
    scheduler_get_stats(server->model.scheduler, &stats);
    buffer_format(out, ",\"requests\":{\"running\":%u,\"waiting\":%u}", stats.requests_running, stats.requests_waiting);
    buffer_format(out,
        ",\"memory\":{\"pages_total\":%u,\"pages_free\":%u,\"kv_bytes\":%llu,\"kv_bytes_full\":%llu,"
        "\"kv_tokens_seen\":%llu,\"kv_tokens_kept\":%llu,\"swapped_bytes\":%zu}",
        stats.pages_total, stats.pages_free, (unsigned long long)stats.kv_bytes,
        (unsigned long long)stats.kv_bytes_full, (unsigned long long)stats.kv_tokens_seen,
        (unsigned long long)stats.kv_tokens_kept, stats.swapped_bytes);
}

static void status_write_current(struct buffer *out, struct jobs *jobs) {
    struct jobs_state state = {.id = ""};
    if (jobs != NULL)
        jobs_get_state(jobs, &state);
    if (state.id[0] == '\0') {
        buffer_string(out, ",\"current\":null");
        return;
    }
    buffer_string(out, ",\"current\":{\"id\":");
    buffer_json_cstring(out, state.id);
    admin_write_text(out, "kind", state.kind);
    buffer_format(out, ",\"done\":%llu,\"total\":%llu,\"reward\":", (unsigned long long)state.done,
        (unsigned long long)state.total);
    if (isfinite(state.reward))
        buffer_format(out, "%.9g}", state.reward);
    else
        buffer_string(out, "null}");
}

static void status_write_policy(struct buffer *out, struct policy_table *policies) {
    struct policy_settings own;
    struct policy_entry entry;
    char text[200];
    if (policies == NULL) {
        buffer_string(out, ",\"policy\":null");
        return;
    }
    policy_table_own(policies, &own);
    policy_settings_describe(&own, text, sizeof text);
    policy_settings_release(&own);
    buffer_string(out, ",\"policy\":{\"default\":");
    buffer_json_cstring(out, text);
    const char *active = NULL;
    for (uint32_t i = 0; active == NULL && policy_table_at(policies, i, &entry); i++)
        active = entry.active ? entry.name : NULL;
    admin_write_text(out, "active", active);
    buffer_string(out, "}");
}

static void status_write_training(struct buffer *out, const struct server *server) {
    struct background_stats stats = {0};
    if (server->loaded && server->model.background != NULL)
        background_get_stats(server->model.background, &stats);
    buffer_format(out,
        ",\"training\":{\"share\":%.9g,\"turns\":%llu,\"seconds\":%.3f,\"busy_seconds\":%.3f,\"gave_up\":%llu}",
        server->config->training_share, (unsigned long long)stats.turns, stats.seconds, stats.busy_seconds,
        (unsigned long long)stats.gave_up);
}

struct status_counts {
    struct buffer *out;
    bool first;
};

static int status_write_count(void *context, const struct row *row) {
    struct status_counts *counts = context;
    buffer_format(
        counts->out, "%s\"%s\":%lld", counts->first ? "" : ",", row_text(row, 0), (long long)row_integer(row, 1));
    counts->first = false;
    return 0;
}

static int status_write_counts(
    struct buffer *out, struct database *database, const char *name, const char *sql, struct error *error) {
    struct status_counts counts = {.out = out, .first = true};
    buffer_format(out, ",\"%s\":{", name);
    int code = database_query(database, error, status_write_count, &counts, sql, "");
    buffer_string(out, "}");
    return code;
}

/* The counts come from the store; the rest is the loop's. */
static int status_answer(struct admin_call *call, struct database *database, struct error *error) {
    struct buffer *out = &call->reply;
    buffer_string(out, "{\"object\":\"status\"");
    int code = status_write_counts(
        out, database, "jobs", "SELECT status, count(*) FROM jobs GROUP BY status ORDER BY status", error);
    if (code == 0)
        code = status_write_counts(out, database, "evaluations",
            "SELECT status, count(*) FROM evaluations GROUP BY status ORDER BY status", error);
    return code;
}

static void status_complete(struct admin_call *call) {
    const struct server *server = call->admin->server;
    struct buffer *out = &call->reply;
    buffer_string(out, ",\"version\":\"" DISTILLCACHE_VERSION "\"");
    admin_write_text(out, "state", server->draining ? "draining" : server->loaded ? "ready" : "loading");
    admin_write_text(out, "model", server->model_id);
    admin_write_text(out, "system_fingerprint", server->loaded ? server->fingerprint : NULL);
    buffer_format(out, ",\"uptime_seconds\":%lld", (long long)(time(NULL) - server->created));
    status_write_engine(out, server);
    status_write_current(out, call->admin->jobs);
    status_write_policy(out, server->loaded ? call->admin->policies : NULL);
    status_write_training(out, server);
    buffer_string(out, "}");
}

void status_show(struct exchange *exchange) {
    admin_handle(exchange, status_answer, status_complete);
}
