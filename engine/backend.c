/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/backend.h"

#include "cuda/cuda.h"
#include "engine/log.h"
#include "parallel/hosts.h"
#include "parallel/parallel.h"

#include <string.h>

/* The best backend there is. */
static struct backend *open_best(const struct backend_options *options, struct error *error) {
    struct error why;
    if (backend_cuda_offered(&why))
        return backend_cuda_open(options, error);
    if (backend_cuda_built())
        log_event(LOG_INFO, NULL, "the CPU computes", "reason", LOG_STRING(why.message), NULL);
    return backend_cpu_open(options, error);
}

static struct backend *refuse_name(const char *name, struct error *error) {
    error_set(error, ERROR_INVALID, "backend '%s' is unknown, it must be auto, cpu or cuda", name);
    return NULL;
}

static struct backend *open_ranks(const struct backend_options *options, struct error *error) {
    const char *name = options->name;
    if (options->ranks > BACKEND_RANKS_MAX) {
        error_set(error, ERROR_INVALID, "tensor parallel over %u devices, allowed are 1 to %d", options->ranks,
            BACKEND_RANKS_MAX);
        return NULL;
    }
    if (name == NULL || strcmp(name, "cpu") == 0 || (strcmp(name, "auto") == 0 && !backend_cuda_offered(NULL)))
        return parallel_cpu_open(options, error);
    if (strcmp(name, "cuda") == 0 || strcmp(name, "auto") == 0)
        return parallel_cuda_open(options, error);
    return refuse_name(name, error);
}

struct backend *backend_open(const struct backend_options *options, struct error *error) {
    const char *name = options->name;
    if (options->hosts.world > 1)
        return parallel_hosts_open(options, error);
    if (options->ranks > 1)
        return open_ranks(options, error);
    if (name == NULL || strcmp(name, "cpu") == 0)
        return backend_cpu_open(options, error);
    if (strcmp(name, "cuda") == 0)
        return backend_cuda_open(options, error);
    if (strcmp(name, "auto") == 0)
        return open_best(options, error);
    return refuse_name(name, error);
}
