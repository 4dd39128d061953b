/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/cuda_backend.h"

#include "cuda/cuda.h"
#include "engine/log.h"

#include <stdio.h>
#include <stdlib.h>

enum { CAPABILITY_LEAST = 80 }; /* cp.async, bfloat16 and int8 tensor cores */

/* ---- errors ---- */

static void give_up(struct cuda_backend *cuda, const char *what) {
    struct error error;
    error_set(
        &error, ERROR_DEVICE, "CUDA device %d failed in %s: %s", cuda->device, what, cudaGetErrorString(cuda->failed));
    communicator_give_up(cuda->communicator, &error);
}

bool cuda_check(struct cuda_backend *cuda, cudaError_t result, const char *what) {
    if (result == cudaSuccess)
        return cuda->failed == cudaSuccess;
    cudaGetLastError(); /* so that the next launch is not taken for what failed */
    if (cuda->failed == cudaSuccess) {
        cuda->failed = result;
        log_event(LOG_ERROR, NULL, "the CUDA backend failed", "device", LOG_INT(cuda->device), "operation",
            LOG_STRING(what), "error", LOG_STRING(cudaGetErrorString(result)), NULL);
        if (cuda->communicator != NULL)
            give_up(cuda, what);
    }
    return false;
}

bool cuda_check_launch(struct cuda_backend *cuda, const char *what) {
    return cuda_check(cuda, cudaGetLastError(), what);
}

void cuda_wait(struct cuda_backend *cuda) {
    if (cuda_check(cuda, cuda_wait_stream(cuda), "synchronize")) {
        cuda->busy = false;
        cuda_late_deliver(&cuda->late);
        return;
    }
    if (cuda->communicator != NULL) {
        cuda_late_forget(&cuda->late);
        return;
    }
    log_event(LOG_ERROR, NULL, "the program ends, since nothing that this device computes can be trusted", NULL);
    log_close();
    _Exit(EXIT_FAILURE);
}

/* ---- scratch ---- */

void *cuda_scratch_reserve(struct cuda_backend *cuda, struct cuda_scratch *scratch, size_t bytes) {
    if (bytes <= scratch->bytes && scratch->memory != NULL)
        return scratch->memory;
    size_t room = bytes < 2 * scratch->bytes ? 2 * scratch->bytes : bytes + (bytes == 0);
    if (cuda_breaks_capture(cuda))
        return NULL;
    cuda->generation++;
    if (!cuda_check(cuda, cuda_wait_stream(cuda), "scratch memory")) /* kernels may use it */
        return NULL;
    cuda_scratch_free(scratch);
    if (!cuda_check(cuda, cudaMalloc(&scratch->memory, room), "scratch memory")) {
        scratch->memory = NULL;
        return NULL;
    }
    scratch->bytes = room;
    return scratch->memory;
}

void cuda_scratch_free(struct cuda_scratch *scratch) {
    cudaFree(scratch->memory);
    *scratch = (struct cuda_scratch){NULL, 0};
}

/* ---- opening and closing ---- */

static int check_device(uint32_t device, struct cudaDeviceProp *properties, struct error *error) {
    int count = 0;
    cudaError_t result = cudaGetDeviceCount(&count);
    if (result == cudaSuccess && count > 0 && device >= (uint32_t)count)
        return error_set(error, ERROR_UNSUPPORTED, "CUDA device %u is asked for, there are %d", device, count);
    if (result == cudaSuccess && count > 0)
        result = cudaGetDeviceProperties(properties, (int)device);
    else if (result == cudaSuccess)
        result = cudaErrorNoDevice;
    if (result != cudaSuccess) {
        cudaGetLastError();
        return error_set(error, ERROR_UNSUPPORTED, "no CUDA device: %s", cudaGetErrorString(result));
    }
    if (10 * properties->major + properties->minor < CAPABILITY_LEAST)
        return error_set(error, ERROR_UNSUPPORTED,
            "the CUDA device %s has compute capability %d.%d, at least %d.%d is needed", properties->name,
            properties->major, properties->minor, CAPABILITY_LEAST / 10, CAPABILITY_LEAST % 10);
    return 0;
}

bool backend_cuda_built(void) {
    return true;
}

bool backend_cuda_offered(struct error *error) {
#ifdef CUDA_EMULATED
    return error_set(error, ERROR_UNSUPPORTED, "this build emulates its CUDA device") == 0;
#else
    struct cudaDeviceProp properties;
    return check_device(0, &properties, error) == 0;
#endif
}

const char *cuda_describe(struct backend *backend) {
    return cuda_backend(backend)->description;
}

void cuda_close(struct backend *backend) {
    if (backend == NULL)
        return;
    struct cuda_backend *cuda = cuda_backend(backend);
    if (cuda->stream != NULL)
        cuda_wait_stream(cuda);
    for (size_t i = 0; cuda_family_frees[i] != NULL; i++)
        cuda_family_frees[i](cuda);
    cuda_queue_free(&cuda->queue);
    cuda_late_free(&cuda->late);
    cuda_scratch_free(&cuda->moved);
    cuda_scratch_free(&cuda->results);
    cuda_ring_free(&cuda->ring);
    if (cuda->stream != NULL)
        cudaStreamDestroy(cuda->stream);
    free(cuda);
}

static void describe(struct cuda_backend *cuda, const struct cudaDeviceProp *properties) {
    cuda->multiprocessors = (uint32_t)properties->multiProcessorCount;
    cuda->capability = (uint32_t)(10 * properties->major + properties->minor);
    cuda->shared_bytes_max = properties->sharedMemPerBlockOptin;
    snprintf(cuda->description, sizeof cuda->description, "cuda, %s, sm_%u, %u multiprocessors, %zu MiB",
        properties->name, cuda->capability, cuda->multiprocessors, properties->totalGlobalMem >> 20);
}

struct backend *backend_cuda_open(const struct backend_options *options, struct error *error) {
    struct cudaDeviceProp properties;
    if (check_device(options->device, &properties, error) != 0)
        return NULL;
    struct cuda_backend *cuda = calloc(1, sizeof *cuda);
    if (cuda == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for the CUDA backend");
        return NULL;
    }
    cuda->base.operations = &cuda_operations;
    cuda->device = (int)options->device;
    describe(cuda, &properties);
    cudaError_t result = cuda_use_device(cuda);
    if (result == cudaSuccess)
        result = cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking);
    cuda_memory_prepare(cuda);
    if (result == cudaSuccess)
        result = cuda_ring_create(&cuda->ring, options->ranks > 1 ? CUDA_RANK_SEGMENT_BYTES : CUDA_SEGMENT_BYTES);
    if (result != cudaSuccess) {
        error_set(error, result == cudaErrorMemoryAllocation ? ERROR_MEMORY : ERROR_UNSUPPORTED,
            "the CUDA device %s cannot be used: %s", properties.name, cudaGetErrorString(result));
        cudaGetLastError();
        cuda_close(&cuda->base);
        return NULL;
    }
    return &cuda->base;
}
