/* SPDX-License-Identifier: Apache-2.0
 *
 * The staging ring: host arguments on their way to the device.
 */
#include "cuda/cuda_backend.h"

#include <string.h>

cudaError_t cuda_ring_create(struct cuda_ring *ring, size_t segment_bytes) {
    size_t bytes = CUDA_RING_SEGMENTS * segment_bytes;
    void *host = NULL, *device = NULL;
    cudaError_t result = cudaHostAlloc(&host, bytes, cudaHostAllocDefault);
    if (result == cudaSuccess)
        result = cudaMalloc(&device, bytes);
    *ring = (struct cuda_ring){.host = host, .device = device, .segment_bytes = segment_bytes};
    for (uint32_t i = 0; i < CUDA_RING_SEGMENTS && result == cudaSuccess; i++)
        result = cudaEventCreateWithFlags(&ring->copied[i], cudaEventDisableTiming);
    if (result != cudaSuccess)
        cuda_ring_free(ring);
    return result;
}

void cuda_ring_free(struct cuda_ring *ring) {
    for (uint32_t i = 0; i < CUDA_RING_SEGMENTS; i++)
        if (ring->copied[i] != NULL)
            cudaEventDestroy(ring->copied[i]);
    cudaFree(ring->device);
    cudaFreeHost(ring->host);
    *ring = (struct cuda_ring){0};
}

/* Leaves the segment that is being filled and waits until the copies out of the next one are done. */
static bool next_segment(struct cuda_backend *cuda) {
    struct cuda_ring *ring = &cuda->ring;
    if (!cuda_check(cuda, cudaEventRecord(ring->copied[ring->segment], cuda->stream), "staging"))
        return false;
    ring->segment = (ring->segment + 1) % CUDA_RING_SEGMENTS;
    ring->used = 0;
    return cuda_check(cuda, cuda_wait_event(cuda, ring->copied[ring->segment]), "staging");
}

/* Segments of at least `bytes`: rare, so that it may wait for the stream. */
static bool grow(struct cuda_backend *cuda, size_t bytes) {
    size_t segment = cuda->ring.segment_bytes;
    while (segment < bytes)
        segment *= 2;
    if (!cuda_check(cuda, cuda_wait_stream(cuda), "staging"))
        return false;
    cuda_ring_free(&cuda->ring);
    return cuda_check(cuda, cuda_ring_create(&cuda->ring, segment), "staging");
}

/* Room of the ring; its offset. */
static bool take_room(struct cuda_backend *cuda, size_t bytes, size_t *offset) {
    struct cuda_ring *ring = &cuda->ring;
    if (bytes > ring->segment_bytes ? !grow(cuda, bytes)
                                    : ring->used + bytes > ring->segment_bytes && !next_segment(cuda))
        return false;
    *offset = ring->segment * ring->segment_bytes + ring->used;
    ring->used += bytes;
    return true;
}

bool cuda_stage_begin(struct cuda_backend *cuda, size_t bytes, struct cuda_stage *stage) {
    size_t offset;
    bytes = cuda_stage_size(bytes);
    if (cuda->failed != cudaSuccess || cuda_breaks_capture(cuda) || !take_room(cuda, bytes, &offset))
        return false;
    *stage = (struct cuda_stage){cuda->ring.host + offset, cuda->ring.device + offset, bytes, 0};
    return true;
}

void *cuda_stage_add(struct cuda_stage *stage, size_t bytes, const void **device) {
    char *host = stage->host + stage->used;
    *device = stage->device + stage->used;
    stage->used += cuda_stage_size(bytes);
    return host;
}

const void *cuda_stage_copy(struct cuda_stage *stage, const void *from, size_t bytes) {
    const void *device;
    void *host = cuda_stage_add(stage, bytes, &device);
    if (bytes > 0)
        memcpy(host, from, bytes);
    return device;
}

bool cuda_stage_send(struct cuda_backend *cuda, struct cuda_stage *stage) {
    if (stage->used > stage->bytes) { /* what follows in the ring is overwritten: a mistake of the caller */
        cuda_check(cuda, cudaErrorInvalidValue, "staging more than was asked for");
        return false;
    }
    if (stage->used == 0)
        return true;
    return cuda_check(cuda,
        cudaMemcpyAsync(stage->device, stage->host, stage->used, cudaMemcpyHostToDevice, cuda->stream), "staging");
}

void cuda_upload_bytes(struct cuda_backend *cuda, void *to, const void *from, size_t bytes) {
    for (size_t done = 0, part; done < bytes && cuda->failed == cudaSuccess; done += part) {
        size_t offset, left = bytes - done;
        part = left < cuda->ring.segment_bytes ? left : cuda->ring.segment_bytes;
        if (!take_room(cuda, cuda_stage_size(part) < cuda->ring.segment_bytes ? cuda_stage_size(part) : part, &offset))
            return;
        memcpy(cuda->ring.host + offset, (const char *)from + done, part);
        cuda_check(cuda,
            cudaMemcpyAsync((char *)to + done, cuda->ring.host + offset, part, cudaMemcpyHostToDevice, cuda->stream),
            "upload");
    }
}
