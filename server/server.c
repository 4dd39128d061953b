/* SPDX-License-Identifier: Apache-2.0 */
#include "server/server.h"

#include "engine/log.h"
#include "server/admin/admin.h"
#include "server/generation.h"
#include "server/metrics.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const uint64_t SIGNAL_BURST_NS = 1000000000; /* signals this soon after the first belong to it */
static const double FLUSH_SECONDS = 5.0;            /* for last words to clients after the drain timeout */

/* The file's name without directories and ending, unless the configuration names the model. NULL: no memory. */
static char *server_model_name(const struct config *config) {
    if (config->model_alias != NULL && config->model_alias[0] != '\0')
        return strdup(config->model_alias);
    const char *path = config->model == NULL ? "model" : config->model;
    const char *slash = strrchr(path, '/');
    const char *name = slash == NULL ? path : slash + 1;
    const char *dot = strrchr(name, '.');
    return strndup(name, dot == NULL || dot == name ? strlen(name) : (size_t)(dot - name));
}

/* --- Draining --- */

/* What the loop calls has the public site as its context. */
static struct server *server_of(void *context) {
    return ((struct site *)context)->server;
}

static void server_stop(void *context) {
    struct server *server = server_of(context);
    log_event(
        LOG_WARNING, NULL, "stopping with connections still open", "requests", LOG_INT(server->exchanges_active), NULL);
    loop_stop(server->loop);
}

static void server_cancel_all(void *context) {
    struct server *server = server_of(context);
    log_event(LOG_WARNING, NULL, "drain timeout over: cancelling requests", "requests",
        LOG_INT(server->exchanges_active), NULL);
    server->cancelled = true;
    generation_cancel_all(server);
    loop_after(server->loop, FLUSH_SECONDS, server_stop);
}

void server_check_drained(struct server *server) {
    bool jobs_over = server->admin == NULL || admin_is_drained(server->admin);
    if (server->draining && server->exchanges_active == 0 && server->generations_active == 0 && !server->loading &&
        jobs_over)
        loop_stop(server->loop);
}

static void server_signalled(void *context, int number) {
    struct server *server = server_of(context);
    /* One request to end may come as several signals: timeout(1) signals the program and its group, a terminal the
     * wrapper script too, which passes it on. */
    if (server->draining && uv_hrtime() - server->drain_began_ns < SIGNAL_BURST_NS)
        return;
    if (server->draining) {
        log_event(LOG_WARNING, NULL, "second signal: ending at once", "signal", LOG_INT(number), NULL);
        log_close();
        _exit(128 + number);
    }
    log_event(LOG_INFO, NULL, "draining", "signal", LOG_INT(number), "requests", LOG_INT(server->exchanges_active),
        "timeout", LOG_INT(server->config->drain_timeout), NULL);
    server->draining = true;
    server->drain_began_ns = uv_hrtime();
    loop_after(server->loop, server->config->drain_timeout, server_cancel_all);
    if (server->admin != NULL)
        admin_drain(server->admin);
    server_check_drained(server);
}

int server_accepts_work(const struct server *server, struct fault *fault) {
    if (server->draining)
        return fault_unavailable(fault, "draining", 5, "the server is shutting down");
    if (!server->loaded)
        return fault_unavailable(fault, "loading", 1, "the model is still loading");
    return 0;
}

/* --- Loading --- */

static void server_wake(void *context) {
    loop_wake(((struct server *)context)->loop);
}

static void server_woken(void *context) {
    struct server *server = server_of(context);
    if (server->loaded)
        scheduler_poll(server->model.scheduler, generation_output, server);
    if (server->admin != NULL)
        admin_poll(server->admin);
    server_check_drained(server);
}

static int server_open_policies(
    void *context, const struct policy_model *model, const struct trained_policies **trained, struct error *error) {
    struct server *server = context;
    *trained = NULL;
    return server->admin == NULL ? 0 : admin_open_policies(server->admin, model, trained, error);
}

static int server_take_own_policy(void *context, struct policy_settings *own, struct error *error) {
    struct server *server = context;
    return server->admin == NULL ? 0 : admin_take_own_policy(server->admin, own, error);
}

static void server_load_work(uv_work_t *work) {
    struct server *server = work->data;
    const struct server_hooks hooks = {.wake = server_wake,
        .open_policies = server_open_policies,
        .take_own_policy = server_take_own_policy,
        .context = server};
    server->load_status = server->load(server->load_context, &hooks, &server->model, &server->load_error);
    if (server->load_status == 0 && server->admin != NULL)
        server->load_status = admin_load(server->admin, &server->load_error);
}

static void server_load_done(uv_work_t *work, int status) {
    struct server *server = work->data;
    (void)status;
    server->loading = false;
    if (server->load_status == 0 && server->admin != NULL)
        server->load_status = admin_start(server->admin, &server->load_error);
    if (server->load_status != 0) {
        loop_stop(server->loop);
        return;
    }
    server->loaded = true;
    snprintf(server->fingerprint, sizeof server->fingerprint, "fp_%.12s",
        server->model.fingerprint == NULL ? "" : server->model.fingerprint);
    log_event(LOG_INFO, NULL, "ready", "model", LOG_STRING(server->model_id), "host", LOG_STRING(server->config->host),
        "port", LOG_INT(loop_port(server->loop)), NULL);
    server_check_drained(server);
}

/* --- Life --- */

static const struct loop_callbacks server_callbacks = {
    .begin = http_begin,
    .access = http_access,
    .completed = http_completed,
    .gone = http_gone,
    .woken = server_woken,
    .signalled = server_signalled,
};

struct server *server_create(const struct config *config, struct error *error) {
    struct server *server = calloc(1, sizeof *server);
    if (server == NULL) {
        error_set(error, ERROR_MEMORY, "out of memory");
        return NULL;
    }
    server->config = config;
    server->created = time(NULL);
    server->model_id = server_model_name(config);
    server->metrics = metrics_create();
    if (server->model_id == NULL || server->metrics == NULL) {
        error_set(error, ERROR_MEMORY, "out of memory");
        goto fail;
    }
    struct loop_options options = {.host = config->host,
        .port = config->port,
        .max_connections = config->max_connections,
        .keep_alive = config->keep_alive,
        .receive_timeout = config->receive_timeout,
        .callbacks = &server_callbacks,
        .context = &server->site};
    server->site = (struct site){.server = server, .routes = server_routes, .any_origin = true};
    server->loop = loop_create(&options, error);
    if (server->loop == NULL)
        goto fail;
    if (config->state_dir[0] != '\0' && (server->admin = admin_create(server, error)) == NULL)
        goto fail;
    log_event(
        LOG_INFO, NULL, "listening", "host", LOG_STRING(config->host), "port", LOG_INT(loop_port(server->loop)), NULL);
    return server;
fail:
    server_free(server);
    return NULL;
}

/* Every request comes back to us before the scheduler may be freed. */
static void server_take_last_outputs(struct server *server) {
    generation_cancel_all(server);
    while (server->loaded && server->generations_active > 0)
        if (scheduler_poll(server->model.scheduler, generation_output, server) == 0)
            usleep(1000);
}

int server_run(struct server *server, server_load load, void *load_context, struct error *error) {
    server->load_work.data = server;
    server->load = load;
    server->load_context = load_context;
    server->loading = true;
    if (uv_queue_work(loop_uv(server->loop), &server->load_work, server_load_work, server_load_done) != 0)
        return error_set(error, ERROR_MEMORY, "cannot start loading the model");
    loop_run(server->loop);
    while (server->loading)
        uv_run(loop_uv(server->loop), UV_RUN_ONCE);
    if (server->admin != NULL)
        admin_stop(server->admin);
    server_take_last_outputs(server);
    if (server->load_status != 0) {
        *error = server->load_error;
        return server->load_status;
    }
    log_event(LOG_INFO, NULL, "stopped", NULL);
    return 0;
}

void server_free(struct server *server) {
    if (server == NULL)
        return;
    loop_free(server->loop);
    admin_free(server->admin);
    metrics_free(server->metrics);
    free(server->model_id);
    free(server);
}
