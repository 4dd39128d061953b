/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/late.h"

#include "cuda/cuda_backend.h"

#include <stdlib.h>

bool cuda_late_reserve(struct cuda_backend *cuda, uint32_t count) {
    struct cuda_late *late = &cuda->late;
    void *numbers = NULL;
    if (count <= late->room - late->count)
        return true;
    cuda_wait(cuda); /* hands over what there is */
    if (cuda->failed != cudaSuccess)
        return false;
    if (count <= late->room)
        return true;
    uint32_t room = count < UINT32_MAX / 2 ? 2 * count : count;
    uint32_t **places = malloc(room * sizeof *places);
    if (places == NULL || cudaHostAlloc(&numbers, room * sizeof *late->numbers, cudaHostAllocDefault) != cudaSuccess) {
        cudaGetLastError();
        free(places);
        return false;
    }
    cuda_late_free(late);
    *late = (struct cuda_late){numbers, places, 0, room};
    return true;
}

uint32_t **cuda_late_fetch(struct cuda_backend *cuda, const uint32_t *device, uint32_t count) {
    struct cuda_late *late = &cuda->late;
    uint32_t **places = late->places + late->count;
    cuda_check(cuda,
        cudaMemcpyAsync(
            late->numbers + late->count, device, count * sizeof *device, cudaMemcpyDeviceToHost, cuda->stream),
        "results");
    late->count += count;
    cuda->busy = true; /* making room may have waited */
    return places;
}

void cuda_late_deliver(struct cuda_late *late) {
    for (uint32_t i = 0; i < late->count; i++)
        if (late->places[i] != NULL)
            *late->places[i] = late->numbers[i];
    late->count = 0;
}

void cuda_late_forget(struct cuda_late *late) {
    late->count = 0;
}

void cuda_late_free(struct cuda_late *late) {
    cudaFreeHost(late->numbers);
    free(late->places);
    *late = (struct cuda_late){0};
}
