/* SPDX-License-Identifier: Apache-2.0 */
#include "parallel/hosts.h"

#include "engine/model.h"
#include "parallel/parallel.h"
#include "parallel/remote.h"
#include "parallel/worker.h"

#include <string.h>

static void close_all(struct backend *const *inner, uint32_t count) {
    for (uint32_t rank = 0; rank < count; rank++)
        inner[rank]->operations->close(inner[rank]);
}

static struct backend *connect_ranks(struct backend *first, struct link *links, uint32_t world, struct error *error) {
    struct backend *inner[BACKEND_RANKS_MAX] = {first};
    struct communicator *communicator = NULL;
    uint32_t opened = 1;
    for (bool all = true; opened < world && all; opened += all) {
        inner[opened] = remote_open(&links[opened], opened, error);
        all = inner[opened] != NULL;
    }
    if (opened == world)
        communicator = communicator_far_create(inner, world, error);
    if (communicator == NULL) {
        for (uint32_t rank = opened; rank < world; rank++)
            link_close(&links[rank]);
        close_all(inner, opened);
        return NULL;
    }
    for (uint32_t rank = 1; rank < world; rank++)
        remote_set_communicator(inner[rank], communicator);
    return parallel_backend_open(inner, world, communicator, error);
}

struct backend *hosts_lead(struct backend *first, const struct rendezvous *options, struct error *error) {
    struct link links[BACKEND_RANKS_MAX];
    if (rendezvous_lead(options, links, error) != 0) {
        first->operations->close(first);
        return NULL;
    }
    return connect_ranks(first, links, options->world, error);
}

struct backend *parallel_hosts_open(const struct backend_options *options, struct error *error) {
    struct backend_options own = *options;
    own.hosts.world = 0;
    if (options->ranks > 1) {
        error_set(error, ERROR_UNSUPPORTED,
            "tensor-parallel %u in each of %u processes is not supported: give every device a process of its own",
            options->ranks, options->hosts.world);
        return NULL;
    }
    if (options->all_reduce != NULL && strcmp(options->all_reduce, "nccl") == 0) {
        error_set(
            error, ERROR_UNSUPPORTED, "all-reduce nccl among processes is not supported: sums go through the leader");
        return NULL;
    }
    if (options->hosts.world > BACKEND_RANKS_MAX) {
        error_set(
            error, ERROR_INVALID, "a world of %u ranks, allowed are 2 to %d", options->hosts.world, BACKEND_RANKS_MAX);
        return NULL;
    }
    struct backend *first = backend_open(&own, error);
    if (first == NULL)
        return NULL;
    const struct rendezvous rendezvous = {
        .address = options->hosts.rendezvous,
        .key = options->hosts.key,
        .version = options->hosts.version,
        .fingerprint = options->fingerprint,
        .backend = first->operations->name,
        .world = options->hosts.world,
        .patience = COMMUNICATOR_PATIENCE,
    };
    return hosts_lead(first, &rendezvous, error);
}

int hosts_work(const struct model *model, struct backend *backend, const struct rendezvous *options,
    void (*joined)(const struct link *link, uint32_t world), struct error *error) {
    struct rendezvous own = *options;
    struct error lost = {0};
    struct link link;
    uint32_t world;
    own.fingerprint = model->fingerprint;
    own.backend = backend->operations->name;
    int code = rendezvous_join(&own, &link, &world, error);
    if (code != 0)
        return code;
    struct worker *worker = NULL;
    if (model->shape.kv_heads % world != 0 || model->shape.heads % world != 0)
        code = error_set(error, ERROR_UNSUPPORTED, "the model's %u KV heads cannot be shared out evenly over %u ranks",
            model->shape.kv_heads, world);
    else if ((worker = worker_create(model, backend, own.rank, world, SIZE_MAX / 2, error)) == NULL)
        code = error != NULL ? error->code : ERROR_MEMORY;
    if (joined != NULL)
        joined(&link, world);
    if (code == 0)
        code = worker_run(worker, &link, &lost);
    if (lost.code != 0)
        error_set(error, lost.code, "rank %u ends: %s", own.rank, lost.message);
    if (joined != NULL)
        joined(NULL, world);
    worker_free(worker);
    link_close(&link);
    return code;
}
