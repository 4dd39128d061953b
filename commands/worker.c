/* SPDX-License-Identifier: Apache-2.0
 *
 * `distillcache worker`: a rank of a model that another process leads.
 */
#include "commands/commands.h"
#include "commands/engine_config.h"
#include "engine/log.h"
#include "engine/model.h"
#include "parallel/communicator.h"
#include "parallel/hosts.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>

static _Atomic bool asked_to_end;
static const struct link *_Atomic link_of_leader; /* NULL: there is none yet, or none any more */

static void end(int number) {
    (void)number;
    atomic_store(&asked_to_end, true);
    const struct link *link = atomic_load(&link_of_leader);
    if (link != NULL)
        link_stop(link);
}

static void joined(const struct link *link, uint32_t world) {
    atomic_store(&link_of_leader, link);
    if (link == NULL)
        return;
    log_event(LOG_INFO, NULL, "working for the leader", "world", LOG_INT(world), NULL);
    if (atomic_load(&asked_to_end)) /* a signal that came before there was a link */
        link_stop(link);
}

static void watch_signals(void) {
    const struct sigaction action = {.sa_handler = end};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
}

static int work(const struct config *config, struct error *error) {
    const struct engine_options options = engine_options_of(config);
    struct backend_options own = options.backend;
    const struct rendezvous rendezvous = {
        .address = config->rendezvous,
        .key = config->rendezvous_key,
        .version = DISTILLCACHE_VERSION,
        .rank = config->rank,
        .patience = COMMUNICATOR_PATIENCE,
        .cancelled = &asked_to_end,
    };
    own.ranks = 1;
    own.hosts.world = 0; /* an option of who leads */
    struct model *model = model_open(config->model, error);
    if (model == NULL)
        return engine_error_of_file(config, error);
    struct backend *backend = backend_open(&own, error);
    int code = backend == NULL ? error->code : 0;
    if (code == 0) {
        log_event(LOG_INFO, NULL, "model opened", "file", LOG_STRING(config->model), "backend",
            LOG_STRING(backend->operations->describe(backend)), "rank", LOG_INT(config->rank), NULL);
        code = hosts_work(model, backend, &rendezvous, joined, error);
        backend->operations->close(backend);
    }
    model_free(model);
    return code;
}

int command_worker(const struct config *config) {
    struct error error = {0};
    watch_signals();
    int code = work(config, &error);
    if (atomic_load(&asked_to_end)) {
        log_event(LOG_INFO, NULL, "ended by a signal", NULL);
        return EXIT_OK;
    }
    if (code != 0) {
        fprintf(stderr, "distillcache: %s\n", error.message);
        return EXIT_FAILED;
    }
    log_event(LOG_INFO, NULL, "the leader has ended", NULL);
    return EXIT_OK;
}
