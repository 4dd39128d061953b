/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/ranks.h"

#include "cuda/cuda.h"
#include "engine/clock.h"
#include "engine/log.h"
#include "engine/spin.h"

#include <string.h>
#include <unistd.h>

/* ---- devices of threads ---- */

static _Thread_local int used_device = -1;

cudaError_t cuda_use_device(struct cuda_backend *cuda) {
    if (used_device == cuda->device)
        return cudaSuccess;
    cudaError_t result = cudaSetDevice(cuda->device);
    used_device = result == cudaSuccess ? cuda->device : -1; /* a device that has failed may be chosen all the same */
    if (result != cudaSuccess)
        cuda_check(cuda, result, "choosing the device");
    return result;
}

/* ---- waiting ---- */

enum { PAUSE_MICROSECONDS = 50 };

/* A process that was stopped meanwhile has not waited: the time between two looks counts up to this. */
static const double LOOK_SECONDS_MOST = 0.01;
/* What a thread spins, since most waits are short. */
static const double SPIN_SECONDS = 0.02;
/* For which a device may go on after the communicator has failed: whatever it waited for was stopped. */
static const double STOP_SECONDS = 10;

static cudaError_t look(struct cuda_backend *cuda, cudaEvent_t event) {
    cudaError_t result = event != NULL ? cudaEventQuery(event) : cudaStreamQuery(cuda->stream);
    if (result == cudaErrorNotReady)
        cudaGetLastError(); /* it counts as one */
    return result;
}

static void complain(struct cuda_backend *cuda) {
    struct error error;
    error_set(&error, ERROR_DEVICE, "CUDA device %d was not done after %g seconds", cuda->device,
        cuda->communicator->patience);
    communicator_give_up(cuda->communicator, &error);
}

static int look_for_errors(struct cuda_backend *cuda) {
    struct communicator *communicator = cuda->communicator;
    const struct communicator_operations *operations = communicator->operations;
    return operations->poll != NULL ? operations->poll(communicator, cuda->rank)
                                    : communicator_check(communicator, NULL);
}

static cudaError_t wait_as_rank(struct cuda_backend *cuda, cudaEvent_t event) {
    double waited = 0, failed = 0, last = clock_seconds();
    for (;;) {
        cudaError_t result = look(cuda, event);
        if (result == cudaSuccess)
            look_for_errors(cuda); /* a kernel that waited for others may have ended without them */
        if (result != cudaErrorNotReady)
            return result;
        double now = clock_seconds(), passed = now - last < LOOK_SECONDS_MOST ? now - last : LOOK_SECONDS_MOST;
        last = now;
        waited += passed;
        if (look_for_errors(cuda) != 0)
            failed += passed;
        else if (waited > cuda->communicator->patience)
            complain(cuda);
        if (failed > STOP_SECONDS)
            return cudaErrorUnknown;
        if (waited < SPIN_SECONDS)
            spin_pause();
        else
            usleep(PAUSE_MICROSECONDS);
    }
}

cudaError_t cuda_wait_stream(struct cuda_backend *cuda) {
    cuda_use_device(cuda);
    return cuda->communicator != NULL ? wait_as_rank(cuda, NULL) : cudaStreamSynchronize(cuda->stream);
}

cudaError_t cuda_wait_event(struct cuda_backend *cuda, cudaEvent_t event) {
    return cuda->communicator != NULL ? wait_as_rank(cuda, event) : cudaEventSynchronize(event);
}

/* ---- connecting ---- */

static struct communicator *create(
    struct cuda_backend *const *ranks, uint32_t count, const char *all_reduce, struct error *error) {
    bool any = all_reduce == NULL || strcmp(all_reduce, "auto") == 0;
    if (!any && strcmp(all_reduce, "nccl") != 0 && strcmp(all_reduce, "host") != 0) {
        error_set(error, ERROR_INVALID, "all-reduce '%s' is unknown, it must be auto, nccl or host", all_reduce);
        return NULL;
    }
    if (any || strcmp(all_reduce, "nccl") == 0) {
        struct error why;
        struct communicator *communicator = cuda_nccl_create(ranks, count, &why);
        if (communicator != NULL)
            return communicator;
        if (!any || why.code != ERROR_UNSUPPORTED) {
            error_set(error, why.code, "%s", why.message);
            return NULL;
        }
        log_event(LOG_INFO, NULL, "sums go through host memory", "reason", LOG_STRING(why.message), NULL);
    }
    return cuda_mapped_create(ranks, count, error);
}

struct communicator *backend_cuda_connect(
    struct backend *const *ranks, uint32_t count, const char *all_reduce, struct error *error) {
    struct cuda_backend *own[BACKEND_RANKS_MAX];
    for (uint32_t rank = 0; rank < count; rank++)
        own[rank] = (struct cuda_backend *)ranks[rank];
    struct communicator *communicator = create(own, count, all_reduce, error);
    used_device = -1; /* libraries may have chosen another */
    for (uint32_t rank = 0; communicator != NULL && rank < count; rank++) {
        own[rank]->communicator = communicator;
        own[rank]->rank = rank;
    }
    return communicator;
}
