/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks that exchange by NCCL, one communicator a device (NVIDIA, "NCCL User Guide": "Using multiple NCCL communicators
 * concurrently", "Fault tolerance"). NCCL waits for other ranks in kernels, which nothing but an abort of the
 * communicator ends: whoever hears of a failure first aborts all of them, but for those that a thread is calling just
 * now, which that thread aborts itself. An abort ends the kernels at once, but comes back only when no graph is left
 * that has some of them; graphs are destroyed when the backends are closed. So it has a thread of its own.
 */
#include "cuda/ranks.h"

#ifdef CUDA_NCCL

#include "cuda/nccl_library.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FIRST_FLOATS = 1 << 16 /* of the exchange by which connections are made */ };

struct nccl_rank {
    _Alignas(64) pthread_mutex_t lock; /* of its communicator: calls and the abort */
    ncclComm_t communicator;           /* NULL: aborted */
    pthread_t aborter;                 /* that aborts it */
    bool aborting;
    struct cuda_backend *cuda;
    struct cuda_scratch gathered; /* [ranks][rows][columns of the widest] */
};

struct nccl_communicator {
    struct communicator base; /* first */
    struct communicator_operations operations;
    const struct nccl_library *library;
    struct nccl_rank ranks[BACKEND_RANKS_MAX];
    char name[32];
};

static struct nccl_communicator *nccl(struct communicator *communicator) {
    return (struct nccl_communicator *)communicator;
}

/* ---- failures ---- */

static int fail(struct nccl_communicator *c, uint32_t rank, ncclResult_t result, const char *what) {
    struct error error;
    error_set(&error, ERROR_DEVICE, "NCCL failed on CUDA device %d (%s): %s", c->ranks[rank].cuda->device, what,
        c->library->get_error_string(result));
    communicator_give_up(&c->base, &error);
    return ERROR_DEVICE;
}

struct abort_job {
    const struct nccl_library *library;
    ncclComm_t communicator;
};

static void *abort_main(void *argument) {
    struct abort_job *job = argument;
    job->library->abort(job->communicator);
    free(job);
    return NULL;
}

/* With the rank's lock held. */
static void abort_locked(struct nccl_communicator *c, uint32_t rank) {
    struct nccl_rank *own = &c->ranks[rank];
    if (own->communicator == NULL)
        return;
    struct abort_job *job = malloc(sizeof *job);
    if (job != NULL) {
        *job = (struct abort_job){c->library, own->communicator};
        own->aborting = pthread_create(&own->aborter, NULL, abort_main, job) == 0;
    }
    if (!own->aborting) { /* at the worst it waits for graphs */
        free(job);
        c->library->abort(own->communicator);
    }
    own->communicator = NULL;
}

static void nccl_stop(struct communicator *communicator) {
    struct nccl_communicator *c = nccl(communicator);
    for (uint32_t rank = 0; rank < communicator->ranks; rank++)
        if (pthread_mutex_trylock(&c->ranks[rank].lock) == 0) {
            abort_locked(c, rank);
            pthread_mutex_unlock(&c->ranks[rank].lock);
        }
}

/* The end of a call: looks whether there was a failure meanwhile. */
static int unlock_rank(struct nccl_communicator *c, uint32_t rank) {
    int code = communicator_check(&c->base, NULL);
    if (code != 0)
        abort_locked(c, rank);
    pthread_mutex_unlock(&c->ranks[rank].lock);
    /* One that came between the two found the rank locked. */
    return code == 0 ? communicator_check(&c->base, NULL) : code;
}

static int nccl_poll(struct communicator *communicator, uint32_t rank) {
    struct nccl_communicator *c = nccl(communicator);
    struct nccl_rank *own = &c->ranks[rank];
    ncclResult_t result = ncclSuccess, later = ncclSuccess;
    pthread_mutex_lock(&own->lock);
    if (communicator_check(communicator, NULL) != 0)
        abort_locked(c, rank);
    if (own->communicator != NULL)
        result = c->library->get_async_error(own->communicator, &later);
    pthread_mutex_unlock(&own->lock);
    if (result == ncclSuccess && later != ncclInProgress)
        result = later;
    return result != ncclSuccess ? fail(c, rank, result, "later") : communicator_check(communicator, NULL);
}

/* ---- operations ---- */

/* Takes the rank's lock; NULL: the communicator has failed, and the lock is free. */
static ncclComm_t lock_rank(struct nccl_communicator *c, uint32_t rank) {
    struct nccl_rank *own = &c->ranks[rank];
    if (communicator_check(&c->base, NULL) != 0 || cuda_use_device(own->cuda) != cudaSuccess)
        return NULL;
    pthread_mutex_lock(&own->lock);
    if (own->communicator == NULL)
        pthread_mutex_unlock(&own->lock);
    return own->communicator;
}

static int nccl_all_reduce(struct communicator *communicator, uint32_t rank, const struct communicator_sum *sum) {
    struct nccl_communicator *c = nccl(communicator);
    size_t count = (size_t)sum->rows * sum->width;
    ncclComm_t own = lock_rank(c, rank);
    if (own == NULL)
        return communicator_check(communicator, NULL);
    ncclResult_t result =
        c->library->all_reduce(sum->x, sum->x, count, ncclFloat32, ncclSum, own, c->ranks[rank].cuda->stream);
    int code = unlock_rank(c, rank);
    return result != ncclSuccess ? fail(c, rank, result, "all-reduce") : code;
}

/* Columns that were gathered to where they belong. */
static void place_columns(struct nccl_communicator *c, const struct communicator_part *part, size_t count) {
    struct cuda_backend *cuda = c->ranks[0].cuda;
    const float *gathered = c->ranks[0].gathered.memory;
    size_t out_width = part->first[c->base.ranks];
    for (uint32_t rank = 0; rank < c->base.ranks; rank++) {
        size_t bytes = communicator_part_width(part, rank) * sizeof *gathered;
        cuda_check(cuda,
            cudaMemcpy2DAsync(part->out + part->first[rank], out_width * sizeof *gathered, gathered + rank * count,
                bytes, bytes, part->rows, cudaMemcpyDeviceToDevice, cuda->stream),
            "gather");
    }
}

/* All ranks get all parts: NCCL's gather to one is no faster. */
static int nccl_gather(struct communicator *communicator, uint32_t rank, const struct communicator_part *part) {
    struct nccl_communicator *c = nccl(communicator);
    struct nccl_rank *own = &c->ranks[rank];
    uint32_t ranks = communicator->ranks, widest = 0;
    for (uint32_t i = 0; i < ranks; i++) {
        uint32_t width = communicator_part_width(part, i);
        widest = width > widest ? width : widest;
    }
    size_t count = (size_t)part->rows * widest,
           own_bytes = part->rows * communicator_part_width(part, rank) * sizeof(float);
    if (communicator_check(communicator, NULL) != 0 || cuda_use_device(own->cuda) != cudaSuccess)
        return communicator_check(communicator, NULL);
    float *gathered = cuda_scratch_reserve(own->cuda, &own->gathered, ranks * count * sizeof *gathered);
    if (gathered == NULL || !cuda_check(own->cuda,
                                cudaMemcpyAsync(gathered + rank * count, part->part, own_bytes,
                                    cudaMemcpyDeviceToDevice, own->cuda->stream),
                                "gather"))
        return communicator_check(communicator, NULL);
    ncclComm_t connected = lock_rank(c, rank);
    if (connected == NULL)
        return communicator_check(communicator, NULL);
    ncclResult_t result =
        c->library->all_gather(gathered + rank * count, gathered, count, ncclFloat32, connected, own->cuda->stream);
    int code = unlock_rank(c, rank);
    if (result != ncclSuccess)
        return fail(c, rank, result, "all-gather");
    if (rank == 0)
        place_columns(c, part, count);
    return code;
}

/* ---- opening and closing ---- */

static void nccl_free(struct communicator *communicator) {
    struct nccl_communicator *c = nccl(communicator);
    for (uint32_t rank = 0; rank < communicator->ranks; rank++) {
        struct nccl_rank *own = &c->ranks[rank];
        cuda_scratch_free(&own->gathered);
        if (own->aborting)
            pthread_join(own->aborter, NULL);
        if (own->communicator != NULL)
            c->library->destroy(own->communicator);
        pthread_mutex_destroy(&own->lock);
    }
    communicator_destroy(communicator);
    free(c);
}

static const struct communicator_operations operations = {
    .free = nccl_free,
    .all_reduce = nccl_all_reduce,
    .gather = nccl_gather,
    .poll = nccl_poll,
    .stop = nccl_stop,
};

static int init_all(struct nccl_communicator *c, struct error *error) {
    ncclComm_t communicators[BACKEND_RANKS_MAX];
    int devices[BACKEND_RANKS_MAX];
    for (uint32_t rank = 0; rank < c->base.ranks; rank++)
        devices[rank] = c->ranks[rank].cuda->device;
    ncclResult_t result = c->library->init_all(communicators, (int)c->base.ranks, devices);
    if (result != ncclSuccess)
        return error_set(error, ERROR_DEVICE, "NCCL cannot connect %u devices: %s", c->base.ranks,
            c->library->get_error_string(result));
    for (uint32_t rank = 0; rank < c->base.ranks; rank++)
        c->ranks[rank].communicator = communicators[rank];
    return 0;
}

/* Connections are made by the first exchange, in which all ranks must take part: not in the midst of requests. */
static int exchange_once(struct nccl_communicator *c, struct error *error) {
    ncclResult_t result = c->library->group_start();
    for (uint32_t rank = 0; rank < c->base.ranks && result == ncclSuccess; rank++) {
        struct nccl_rank *own = &c->ranks[rank];
        float *numbers = cuda_scratch_reserve(own->cuda, &own->gathered, FIRST_FLOATS * sizeof *numbers);
        if (numbers == NULL ||
            !cuda_check(own->cuda, cudaMemsetAsync(numbers, 0, FIRST_FLOATS * sizeof *numbers, own->cuda->stream),
                "all-reduce"))
            result = ncclUnhandledCudaError;
        else
            result = c->library->all_reduce(
                numbers, numbers, FIRST_FLOATS, ncclFloat32, ncclSum, own->communicator, own->cuda->stream);
    }
    if (result == ncclSuccess)
        result = c->library->group_end();
    for (uint32_t rank = 0; rank < c->base.ranks && result == ncclSuccess; rank++)
        if (cuda_use_device(c->ranks[rank].cuda) != cudaSuccess ||
            !cuda_check(c->ranks[rank].cuda, cudaStreamSynchronize(c->ranks[rank].cuda->stream), "all-reduce"))
            result = ncclUnhandledCudaError;
    if (result == ncclSuccess)
        return 0;
    return error_set(error, ERROR_DEVICE, "NCCL cannot add up on %u devices: %s", c->base.ranks,
        c->library->get_error_string(result));
}

struct communicator *cuda_nccl_create(struct cuda_backend *const *ranks, uint32_t count, struct error *error) {
    const struct nccl_library *library = nccl_library_load(error);
    int version = 0;
    if (library == NULL)
        return NULL;
    struct nccl_communicator *c = aligned_alloc(_Alignof(struct nccl_communicator), sizeof *c);
    if (c == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for the exchange between %u devices", count);
        return NULL;
    }
    memset(c, 0, sizeof *c);
    library->get_version(&version);
    snprintf(c->name, sizeof c->name, "NCCL %d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    c->operations = operations;
    c->operations.name = c->name;
    c->library = library;
    communicator_init(&c->base, &c->operations, count);
    for (uint32_t rank = 0; rank < count; rank++) {
        c->ranks[rank].cuda = ranks[rank];
        pthread_mutex_init(&c->ranks[rank].lock, NULL);
    }
    if (init_all(c, error) == 0 && exchange_once(c, error) == 0)
        return &c->base;
    nccl_free(&c->base);
    return NULL;
}

#else

struct communicator *cuda_nccl_create(struct cuda_backend *const *ranks, uint32_t count, struct error *error) {
    (void)ranks;
    (void)count;
    error_set(error, ERROR_UNSUPPORTED, "this build lacks NCCL: its header was not there");
    return NULL;
}

#endif
