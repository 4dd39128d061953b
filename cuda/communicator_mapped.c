/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranks that exchange through pinned host memory (exchange.h): option --all-reduce host. No call waits; a rank that
 * waits for others does so in a kernel.
 */
#include "cuda/exchange.h"
#include "cuda/ranks.h"

#include <stdlib.h>
#include <string.h>

enum { ROWS_STEP = 4 /* parts of a matrix begin at multiples of 16 bytes */ };

_Static_assert(sizeof(struct exchange_columns) / sizeof(uint32_t) == BACKEND_RANKS_MAX + 1, "columns of all ranks");

struct mapped_rank {
    _Alignas(64) struct cuda_backend *cuda; /* each in a line of the caches of its own */
    uint32_t *done;                         /* exchanges so far: its device counts */
    float *slots;                           /* [SETS][ranks][EXCHANGE_FLOATS] as its device sees it */
    uint32_t *control;                      /* flags [ranks][EXCHANGE_LINE], then stop: the same */
};

struct mapped_communicator {
    struct communicator base; /* first */
    float *slots;             /* pinned */
    uint32_t *control;        /* pinned */
    struct mapped_rank ranks[BACKEND_RANKS_MAX];
};

static struct mapped_communicator *mapped(struct communicator *communicator) {
    return (struct mapped_communicator *)communicator;
}

static _Atomic uint32_t *stop_of(struct mapped_communicator *c) {
    return (_Atomic uint32_t *)(c->control + c->base.ranks * EXCHANGE_LINE);
}

/* An exchange of the rank: its device knows which. */
static struct exchange begin(struct mapped_communicator *c, uint32_t rank) {
    struct mapped_rank *own = &c->ranks[rank];
    uint32_t ranks = c->base.ranks;
    return (struct exchange){
        .slots = own->slots,
        .flags = own->control,
        .stop = own->control + ranks * EXCHANGE_LINE,
        .ranks = ranks,
        .rank = rank,
        .done = own->done,
        .patience = (uint64_t)(c->base.patience * 1e9),
    };
}

/* Rows of that width that fit in a slot. 0: not enough. */
static uint32_t rows_at_once(uint32_t width) {
    return EXCHANGE_FLOATS / width / ROWS_STEP * ROWS_STEP;
}

static int refuse_width(struct communicator *communicator, uint32_t width) {
    struct error error;
    error_set(&error, ERROR_UNSUPPORTED, "rows of %u numbers are too wide to add up through host memory", width);
    communicator_give_up(communicator, &error);
    return error.code;
}

static int mapped_all_reduce(struct communicator *communicator, uint32_t rank, const struct communicator_sum *sum) {
    struct mapped_communicator *c = mapped(communicator);
    struct cuda_backend *cuda = c->ranks[rank].cuda;
    uint32_t most = rows_at_once(sum->width);
    if (most == 0)
        return refuse_width(communicator, sum->width);
    for (uint32_t first = 0, rows; first < sum->rows; first += rows) {
        int code = communicator_check(communicator, NULL);
        if (code != 0 || cuda_use_device(cuda) != cudaSuccess)
            return code;
        rows = sum->rows - first < most ? sum->rows - first : most;
        size_t at = (size_t)first * sum->width;
        struct exchange exchange = begin(c, rank);
        launch_exchange_sum(&exchange, sum->x + at, rows, sum->width, sum->weight, sum->epsilon,
            sum->weight != NULL ? sum->normed + at : NULL, cuda->stream);
        cuda_check_launch(cuda, "all_reduce");
    }
    return communicator_check(communicator, NULL);
}

static int mapped_gather(struct communicator *communicator, uint32_t rank, const struct communicator_part *part) {
    struct mapped_communicator *c = mapped(communicator);
    struct cuda_backend *cuda = c->ranks[rank].cuda;
    struct exchange_columns columns;
    uint32_t ranks = communicator->ranks, widest = 0;
    memcpy(columns.first, part->first, (ranks + 1) * sizeof *part->first);
    for (uint32_t i = 0; i < ranks; i++) {
        uint32_t width = communicator_part_width(part, i);
        widest = width > widest ? width : widest;
    }
    uint32_t most = rows_at_once(widest);
    if (most == 0)
        return refuse_width(communicator, widest);
    for (uint32_t first = 0, rows; first < part->rows; first += rows) {
        int code = communicator_check(communicator, NULL);
        if (code != 0 || cuda_use_device(cuda) != cudaSuccess)
            return code;
        rows = part->rows - first < most ? part->rows - first : most;
        struct exchange exchange = begin(c, rank);
        launch_exchange_gather(&exchange, part->part + (size_t)first * communicator_part_width(part, rank), rows,
            &columns, part->out + (size_t)first * part->first[ranks], cuda->stream);
        cuda_check_launch(cuda, "gather");
    }
    return communicator_check(communicator, NULL);
}

static int mapped_poll(struct communicator *communicator, uint32_t rank) {
    struct mapped_communicator *c = mapped(communicator);
    if (atomic_load_explicit(stop_of(c), memory_order_relaxed) == EXCHANGE_LATE) {
        struct error error;
        error_set(&error, ERROR_DEVICE, "a rank of %u did not come to a sum within %g seconds (CUDA device %d saw it)",
            communicator->ranks, communicator->patience, c->ranks[rank].cuda->device);
        communicator_give_up(communicator, &error); /* unless it has failed already */
    }
    return communicator_check(communicator, NULL);
}

static void mapped_stop(struct communicator *communicator) {
    atomic_store(stop_of(mapped(communicator)), EXCHANGE_STOPPED);
}

static void mapped_free(struct communicator *communicator) {
    struct mapped_communicator *c = mapped(communicator);
    for (uint32_t rank = 0; rank < communicator->ranks; rank++)
        cudaFree(c->ranks[rank].done);
    cudaFreeHost(c->slots);
    cudaFreeHost(c->control);
    communicator_destroy(communicator);
    free(c);
}

static const struct communicator_operations operations = {
    .name = "host memory",
    .free = mapped_free,
    .all_reduce = mapped_all_reduce,
    .gather = mapped_gather,
    .poll = mapped_poll,
    .stop = mapped_stop,
};

static cudaError_t open_rank(struct mapped_communicator *c, uint32_t rank, struct cuda_backend *cuda) {
    struct mapped_rank *own = &c->ranks[rank];
    own->cuda = cuda;
    cudaError_t result = cuda_use_device(cuda);
    if (result == cudaSuccess)
        result = cudaHostGetDevicePointer((void **)&own->slots, c->slots, 0);
    if (result == cudaSuccess)
        result = cudaHostGetDevicePointer((void **)&own->control, c->control, 0);
    if (result == cudaSuccess)
        result = cudaMalloc((void **)&own->done, sizeof *own->done);
    if (result == cudaSuccess)
        result = cudaMemsetAsync(own->done, 0, sizeof *own->done, cuda->stream);
    return result;
}

struct communicator *cuda_mapped_create(struct cuda_backend *const *ranks, uint32_t count, struct error *error) {
    struct mapped_communicator *c = aligned_alloc(_Alignof(struct mapped_communicator), sizeof *c);
    size_t slots = (size_t)EXCHANGE_SETS * count * EXCHANGE_FLOATS * sizeof(float);
    size_t control = (count + 1) * EXCHANGE_LINE * sizeof(uint32_t);
    if (c == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for the exchange between %u devices", count);
        return NULL;
    }
    memset(c, 0, sizeof *c);
    communicator_init(&c->base, &operations, count);
    c->base.norms = true;
    cudaError_t result = cudaHostAlloc((void **)&c->slots, slots, cudaHostAllocPortable | cudaHostAllocMapped);
    if (result == cudaSuccess)
        result = cudaHostAlloc((void **)&c->control, control, cudaHostAllocPortable | cudaHostAllocMapped);
    if (result == cudaSuccess)
        memset(c->control, 0, control);
    for (uint32_t rank = 0; rank < count && result == cudaSuccess; rank++)
        result = open_rank(c, rank, ranks[rank]);
    if (result == cudaSuccess)
        return &c->base;
    cudaGetLastError();
    error_set(error, result == cudaErrorMemoryAllocation ? ERROR_MEMORY : ERROR_DEVICE,
        "%zu MiB of host memory cannot be shared by %u devices: %s", slots >> 20, count, cudaGetErrorString(result));
    mapped_free(&c->base);
    return NULL;
}
