/* SPDX-License-Identifier: Apache-2.0
 *
 * Device memory. Sequences come and go while others are computed: with the device's memory pool neither waits for the
 * stream, as cudaMalloc and cudaFree may. Pools are optional; what a pool has it keeps for the next allocation.
 */
#include "cuda/cuda_backend.h"

#include <string.h>

void cuda_memory_prepare(struct cuda_backend *cuda) {
    cudaMemPool_t pool;
    uint64_t keep = UINT64_MAX;
    cuda->pooled = cudaDeviceGetDefaultMemPool(&pool, cuda->device) == cudaSuccess &&
                   cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep) == cudaSuccess;
    if (!cuda->pooled)
        cudaGetLastError();
}

void *cuda_allocate(struct backend *backend, size_t bytes) {
    struct cuda_backend *cuda = cuda_backend(backend);
    void *memory = NULL;
    bytes += bytes == 0;
    if (cuda->failed != cudaSuccess)
        return NULL;
    if ((cuda->pooled ? cudaMallocAsync(&memory, bytes, cuda->stream) : cudaMalloc(&memory, bytes)) != cudaSuccess) {
        cudaGetLastError(); /* no error of the backend: the caller hears of it */
        return NULL;
    }
    cuda_check(cuda, cudaMemsetAsync(memory, 0, bytes, cuda->stream), "allocate");
    return memory;
}

/* Operations that were called before may still use it. */
void cuda_release(struct backend *backend, void *memory) {
    struct cuda_backend *cuda = cuda_backend(backend);
    if (memory == NULL)
        return;
    if (cuda->pooled) {
        cuda_check(cuda, cudaFreeAsync(memory, cuda->stream), "release");
        return;
    }
    cuda_check(cuda, cuda_wait_stream(cuda), "release");
    cuda_check(cuda, cudaFree(memory), "release");
}

void cuda_upload(struct backend *backend, void *to, const void *from, size_t bytes) {
    cuda_upload_bytes(cuda_backend(backend), to, from, bytes);
}

void cuda_download(struct backend *backend, void *to, const void *from, size_t bytes) {
    struct cuda_backend *cuda = cuda_backend(backend);
    if (bytes > 0)
        cuda_check(cuda, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, cuda->stream), "download");
    cuda_wait(cuda);
    if (cuda->failed != cudaSuccess) /* a rank, whose caller has yet to hear of it */
        memset(to, 0, bytes);
}

/* Costs nothing when nothing was called since the last wait. */
void cuda_synchronize(struct backend *backend) {
    struct cuda_backend *cuda = (struct cuda_backend *)backend;
    if (cuda->busy || cuda->queue.filled)
        cuda_wait(cuda_backend(backend));
}
