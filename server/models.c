/* SPDX-License-Identifier: Apache-2.0 */
#include "server/models.h"

#include "server/admin/admin.h"
#include "server/metrics.h"
#include "server/openapi_text.h"
#include "server/server.h"

#include <math.h>
#include <string.h>

static void models_write_policies(struct buffer *out) {
    buffer_string(out, ",\"kv_policies\":[");
    for (uint32_t i = 0; i < policy_count(); i++) {
        buffer_string(out, i == 0 ? "" : ",");
        buffer_json_cstring(out, policy_at(i)->name);
    }
    buffer_string(out, "]");
}

static void models_write_default_policy(const struct policy_settings *settings, struct buffer *out) {
    buffer_string(out, ",\"kv_cache\":{\"policy\":");
    buffer_json_cstring(out, settings->policy->name);
    bool sparse = (settings->policy->options & OPTION_SPARSITY) != 0 && !isnan(settings->sparsity);
    if (sparse)
        buffer_format(out, ",\"sparsity\":%.6g}", (double)settings->sparsity);
    else if (settings->tokens > 0)
        buffer_format(out, ",\"tokens\":%u}", settings->tokens);
    else
        buffer_format(out, ",\"ratio\":%.6g}", settings->ratio);
}

static void models_write(const struct server *server, struct buffer *out) {
    buffer_string(out, "{\"id\":");
    buffer_json_cstring(out, server->model_id);
    buffer_format(out, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"distillcache\",\"max_model_len\":",
        (long long)server->created);
    if (server->loaded) {
        buffer_format(out, "%u", server->model.tokens_max);
        models_write_default_policy(&server->model.kv_policy, out);
    } else {
        buffer_string(out, "null,\"kv_cache\":null");
    }
    models_write_policies(out);
    buffer_string(out, "}");
}

void models_list(struct exchange *exchange) {
    struct buffer body = {0};
    buffer_string(&body, "{\"object\":\"list\",\"data\":[");
    models_write(exchange->server, &body);
    buffer_string(&body, "]}");
    exchange_json(exchange, 200, &body);
}

void models_retrieve(struct exchange *exchange) {
    const char *id = exchange_path_rest(exchange);
    struct buffer body = {0};
    struct fault fault;
    if (strcmp(id, exchange->server->model_id) != 0) {
        fault_set(&fault, 404, "model_not_found", "model", "the model '%.128s' does not exist; this server has '%s'",
            id, exchange->server->model_id);
        exchange_fault(exchange, &fault);
        return;
    }
    models_write(exchange->server, &body);
    exchange_json(exchange, 200, &body);
}

void models_health(struct exchange *exchange) {
    struct buffer body = {0};
    buffer_string(&body, "{\"status\":\"ok\"}");
    exchange_json(exchange, 200, &body);
}

void models_ready(struct exchange *exchange) {
    struct buffer body = {0};
    struct fault fault;
    if (server_accepts_work(exchange->server, &fault) != 0) {
        exchange_fault(exchange, &fault);
        return;
    }
    buffer_string(&body, "{\"status\":\"ready\"}");
    exchange_json(exchange, 200, &body);
}

void models_version(struct exchange *exchange) {
    struct buffer body = {0};
    buffer_string(&body, "{\"version\":\"" DISTILLCACHE_VERSION "\",\"model\":");
    buffer_json_cstring(&body, exchange->server->model_id);
    buffer_string(&body, ",\"system_fingerprint\":");
    buffer_json_cstring(&body, exchange->server->loaded ? exchange->server->fingerprint : NULL);
    buffer_string(&body, "}");
    exchange_json(exchange, 200, &body);
}

void models_openapi(struct exchange *exchange) {
    struct buffer body = {0};
    buffer_append(&body, openapi_text, sizeof openapi_text - 1);
    exchange_json(exchange, 200, &body);
}

void models_metrics(struct exchange *exchange) {
    struct server *server = exchange->server;
    struct buffer body = {0};
    struct scheduler_stats stats;
    if (server->loaded)
        scheduler_get_stats(server->model.scheduler, &stats);
    struct training_stats training = {.known = false};
    if (server->admin != NULL && server->admin->jobs != NULL) {
        struct jobs_state state;
        jobs_get_state(server->admin->jobs, &state);
        training = (struct training_stats){.known = state.trained,
            .step = state.step,
            .steps = state.steps,
            .reward = state.reward,
            .kl_valid = state.kl_valid};
    }
    metrics_write(server->metrics, server->model_id, server->loaded ? &stats : NULL, &training, &body);
    exchange_text(exchange, 200, "text/plain; version=0.0.4; charset=utf-8", &body);
}
