/* SPDX-License-Identifier: Apache-2.0 */
#include "server/server.h"

#include "engine/log.h"
#include "server/admin/admin.h"
#include "server/generation.h"
#include "server/metrics.h"
#include "server/tls.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const uint64_t SIGNAL_BURST_NS = 1000000000; /* signals this soon after the first belong to it */
static const uint64_t EXPIRY_MS = 100;              /* how exactly request-timeout is kept */
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

/* --- Certificates --- */

static int server_open_tls(struct server *server, struct error *error) {
    const struct config *config = server->config;
    if (config->tls_cert[0] == '\0')
        return 0;
    struct tls_pair *pair = tls_pair_read(config->tls_cert, config->tls_key, error);
    if (pair != NULL)
        server->tls = tls_create(pair, error);
    return server->tls == NULL ? -1 : 0;
}

static void server_read_pair(uv_work_t *work) {
    struct server *server = work->data;
    server->tls_pair = tls_pair_read(server->config->tls_cert, server->config->tls_key, &server->tls_error);
}

static void server_take_pair(uv_work_t *work, int status) {
    struct server *server = work->data;
    (void)status;
    server->tls_reading = false;
    if (server->tls_pair == NULL) {
        log_event(LOG_ERROR, NULL, "the certificate stays as it is: the new one cannot be used", "message",
            LOG_STRING(server->tls_error.message), NULL);
        return;
    }
    tls_replace(server->tls, server->tls_pair);
    log_event(LOG_INFO, NULL, "certificate read again", "file", LOG_STRING(server->config->tls_cert), NULL);
}

/* The files are read on another thread: a disk may take its time. */
static void server_reload_tls(struct server *server) {
    server->tls_work.data = server;
    if (!server->tls_reading &&
        uv_queue_work(loop_uv(server->loop), &server->tls_work, server_read_pair, server_take_pair) == 0)
        server->tls_reading = true;
}

/* --- Signals --- */

static void server_drain(struct server *server) {
    server->draining = true;
    server->drain_began_ns = uv_hrtime();
    loop_after(server->loop, server->config->drain_timeout, server_cancel_all);
    if (server->admin != NULL)
        admin_drain(server->admin);
    server_check_drained(server);
}

static void server_signalled(void *context, int number) {
    struct server *server = server_of(context);
    if (number == SIGHUP) {
        server_reload_tls(server);
        return;
    }
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
    server_drain(server);
}

/* An engine that can compute nothing any more is no use: the server ends, for somebody to start it again. */
static void server_check_engine(struct server *server) {
    struct error error;
    if (!server->loaded || server->draining || server->model.engine == NULL ||
        engine_check(server->model.engine, &error) == 0)
        return;
    log_event(LOG_ERROR, NULL, "the engine failed: ending", "error", LOG_STRING(error.message), NULL);
    server->load_status = error.code;
    server->load_error = error;
    server_drain(server);
}

int server_accepts_work(const struct server *server, struct fault *fault) {
    if (server->draining)
        return fault_unavailable(fault, "draining", 5, "the server is shutting down");
    if (!server->loaded)
        return fault_unavailable(fault, "loading", 1, "the model is still loading");
    return 0;
}

static void server_expire(uv_timer_t *timer) {
    struct server *server = timer->data;
    if (server->config->request_timeout > 0)
        generation_expire(server, server->config->request_timeout);
    server_check_engine(server); /* a worker may be lost while nothing runs */
}

/* The loop closes the timer at its end. */
static void server_start_expiry(struct server *server) {
    if (server->config->request_timeout == 0 && server->config->world == 1)
        return;
    uv_timer_init(loop_uv(server->loop), &server->expiry);
    server->expiry.data = server;
    uv_timer_start(&server->expiry, server_expire, EXPIRY_MS, EXPIRY_MS);
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
    server_check_engine(server);
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
        .tls = config->tls_cert[0] != '\0',
        .callbacks = &server_callbacks,
        .context = &server->site};
    if (server_open_tls(server, error) != 0)
        goto fail;
    server->keys = keys_create(&config->api_key, config->api_key_file, config->rate_limit, error);
    if (server->keys == NULL)
        goto fail;
    server->site = (struct site){.server = server,
        .routes = server_routes,
        .origins = &config->cors_origin,
        .keys = server->keys,
        .open = server_open_paths};
    server->loop = loop_create(&options, error);
    if (server->loop == NULL)
        goto fail;
    server_start_expiry(server);
    if (config->state_dir[0] != '\0' && (server->admin = admin_create(server, error)) == NULL)
        goto fail;
    log_event(LOG_INFO, NULL, "listening", "host", LOG_STRING(config->host), "port", LOG_INT(loop_port(server->loop)),
        "keys", LOG_INT(keys_count(server->keys)), "tls", LOG_BOOL(server->tls != NULL), NULL);
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
    tls_free(server->tls);
    keys_free(server->keys);
    metrics_free(server->metrics);
    free(server->model_id);
    free(server);
}
