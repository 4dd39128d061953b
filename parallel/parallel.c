/* SPDX-License-Identifier: Apache-2.0 */
#include "parallel/internal.h"

#include "cuda/cuda.h"
#include "engine/cpu/threads.h"
#include "parallel/remote.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- ranks ---- */

static void run(struct parallel *p, crew_work work, void *context) {
    if (communicator_check(p->communicator, NULL) == 0)
        crew_run(p->crew, work, context);
}

static void sum_on_rank(void *context, uint32_t rank) {
    struct parallel *p = context;
    struct communicator_sum sum = p->pending;
    sum.x = parallel_address(&p->base, sum.x, rank);
    sum.weight = parallel_address(&p->base, sum.weight, rank);
    sum.normed = parallel_address(&p->base, sum.normed, rank);
    p->communicator->operations->all_reduce(p->communicator, rank, &sum);
}

static void add_pending(struct parallel *p) {
    if (p->pending.x == NULL)
        return;
    run(p, sum_on_rank, p);
    p->pending = (struct communicator_sum){0};
}

void parallel_run(struct parallel *p, crew_work work, void *context) {
    add_pending(p);
    run(p, work, context);
}

void parallel_sum_on_rank(struct parallel *p, uint32_t rank, float *x, uint32_t rows, uint32_t width) {
    const struct communicator_sum sum = {.x = x, .rows = rows, .width = width};
    if (!p->communicator->norms)
        p->communicator->operations->all_reduce(p->communicator, rank, &sum);
}

void parallel_sum_later(struct parallel *p, float *x, uint32_t rows, uint32_t width) {
    if (p->communicator->norms)
        p->pending = (struct communicator_sum){.x = x, .rows = rows, .width = width};
}

void parallel_fail(struct parallel *p, int code, const char *what) {
    struct error error;
    error_set(&error, code, "%s", what);
    communicator_give_up(p->communicator, &error);
}

static int check(struct backend *backend, struct error *error) {
    struct parallel *p = parallel_of(backend);
    for (uint32_t rank = 0; rank < p->ranks_count; rank++)
        if (remote_is(p->inner[rank]))
            remote_look(p->inner[rank]);
    return communicator_check(p->communicator, error);
}

static const char *describe(struct backend *backend) {
    return parallel_of(backend)->description;
}

static void close_ranks(struct backend *const *inner, uint32_t ranks) {
    for (uint32_t rank = 0; rank < ranks; rank++)
        inner[rank]->operations->close(inner[rank]);
}

static void close_backend(struct backend *backend) {
    struct parallel *p = parallel_of(backend);
    if (backend == NULL)
        return;
    for (uint32_t rank = 0; rank < p->ranks_count; rank++) {
        struct rank *of = &p->ranks[rank];
        of->backend->operations->release(of->backend, of->logits);
        of->backend->operations->release(of->backend, of->scores);
        free(of->batch.memory);
        free(of->score.memory);
        free(of->step_space.memory);
    }
    crew_free(p->crew);
    close_ranks(p->inner, p->ranks_count);
    p->communicator->operations->free(p->communicator);
    select_scratch_free(&p->select_scratch);
    free(p->select.memory);
    free(p->memory);
    free(p);
}

/* ---- memory ---- */

void *parallel_reserve(struct host_space *space, size_t bytes) {
    bytes = bytes > 0 ? bytes : 1;
    if (bytes <= space->bytes)
        return space->memory;
    void *grown = malloc(bytes + bytes / 2);
    if (grown == NULL)
        return NULL;
    free(space->memory);
    *space = (struct host_space){grown, bytes + bytes / 2};
    return grown;
}

bool parallel_reserve_ranks(struct parallel *p, size_t space, size_t bytes, const char *what) {
    for (uint32_t rank = 0; rank < p->ranks_count; rank++)
        if (parallel_reserve((struct host_space *)((char *)&p->ranks[rank] + space), bytes) == NULL) {
            parallel_fail(p, ERROR_MEMORY, what);
            return false;
        }
    return true;
}

/* The last allocation that begins at or before an address; memory_count when there is none. */
static uint32_t find_before(const struct parallel *p, const void *memory) {
    uint32_t low = 0, high = p->memory_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if ((uintptr_t)p->memory[middle].base[0] <= (uintptr_t)memory)
            low = middle + 1;
        else
            high = middle;
    }
    return low > 0 ? low - 1 : p->memory_count;
}

/* What allocate did not give has no address on other ranks. */
void *parallel_address(struct backend *backend, const void *memory, uint32_t rank) {
    const struct parallel *p = parallel_of(backend);
    if (rank == 0 || memory == NULL)
        return (void *)memory;
    uint32_t at = find_before(p, memory);
    size_t offset = at < p->memory_count ? (size_t)((const char *)memory - p->memory[at].base[0]) : SIZE_MAX;
    return at < p->memory_count && offset <= p->memory[at].bytes ? p->memory[at].base[rank] + offset : NULL;
}

static int reserve_entry(struct parallel *p) {
    if (p->memory_count < p->memory_capacity)
        return 0;
    uint32_t capacity = p->memory_capacity == 0 ? 64 : 2 * p->memory_capacity;
    struct rank_memory *grown = realloc(p->memory, capacity * sizeof *grown);
    if (grown == NULL)
        return ERROR_MEMORY;
    p->memory = grown;
    p->memory_capacity = capacity;
    return 0;
}

static void release_all(struct parallel *p, const struct rank_memory *memory) {
    for (uint32_t rank = 0; rank < p->ranks_count; rank++)
        p->inner[rank]->operations->release(p->inner[rank], memory->base[rank]);
}

static void *allocate(struct backend *backend, size_t bytes) {
    struct parallel *p = parallel_of(backend);
    struct rank_memory memory = {.bytes = bytes};
    bool all = reserve_entry(p) == 0;
    for (uint32_t rank = 0; rank < p->ranks_count && all; rank++) {
        memory.base[rank] = p->inner[rank]->operations->allocate(p->inner[rank], bytes);
        all = memory.base[rank] != NULL;
    }
    if (!all) {
        release_all(p, &memory);
        return NULL;
    }
    uint32_t before = find_before(p, memory.base[0]), at = before < p->memory_count ? before + 1 : 0;
    memmove(p->memory + at + 1, p->memory + at, (p->memory_count - at) * sizeof memory);
    p->memory[at] = memory;
    p->memory_count++;
    return memory.base[0];
}

static void release(struct backend *backend, void *memory) {
    struct parallel *p = parallel_of(backend);
    if (memory == NULL)
        return;
    add_pending(p);
    uint32_t at = find_before(p, memory);
    release_all(p, &p->memory[at]);
    p->memory_count--;
    memmove(p->memory + at, p->memory + at + 1, (p->memory_count - at) * sizeof *p->memory);
}

static void upload(struct backend *backend, void *to, const void *from, size_t bytes) {
    struct parallel *p = parallel_of(backend);
    add_pending(p);
    for (uint32_t rank = 0; rank < p->ranks_count; rank++)
        p->inner[rank]->operations->upload(p->inner[rank], parallel_address(backend, to, rank), from, bytes);
}

static void download(struct backend *backend, void *to, const void *from, size_t bytes) {
    struct parallel *p = parallel_of(backend);
    add_pending(p);
    p->inner[0]->operations->download(p->inner[0], to, from, bytes);
}

static void synchronize(struct backend *backend) {
    struct parallel *p = parallel_of(backend);
    add_pending(p);
    for (uint32_t rank = 0; rank < p->ranks_count; rank++)
        p->inner[rank]->operations->synchronize(p->inner[rank]);
}

/* ---- what all ranks do alike ---- */

struct rows_call {
    struct backend *backend;
    const float *x, *weight;
    float epsilon;
    const uint32_t *rows_wanted;
    uint32_t rows, width;
    float *out;
};

static void norm_on_rank(void *context, uint32_t rank) {
    const struct rows_call *call = context;
    struct backend *on = parallel_of(call->backend)->inner[rank];
    on->operations->rms_norm(on, parallel_address(call->backend, call->x, rank),
        parallel_address(call->backend, call->weight, rank), call->epsilon, call->rows, call->width,
        parallel_address(call->backend, call->out, rank));
}

static void rms_norm(struct backend *backend, const float *x, const float *weight, float epsilon, uint32_t rows,
    uint32_t width, float *out) {
    struct rows_call call = {backend, x, weight, epsilon, NULL, rows, width, out};
    struct communicator_sum *sum = &parallel_of(backend)->pending;
    if (sum->x == x && x != out && sum->rows == rows && sum->width == width) {
        sum->weight = weight;
        sum->epsilon = epsilon;
        sum->normed = out;
        add_pending(parallel_of(backend));
        return;
    }
    parallel_run(parallel_of(backend), norm_on_rank, &call);
}

static void silu_on_rank(void *context, uint32_t rank) {
    const struct rows_call *call = context;
    struct backend *on = parallel_of(call->backend)->inner[rank];
    on->operations->silu_mul(on, parallel_address(call->backend, call->x, rank), call->rows, call->width,
        parallel_address(call->backend, call->out, rank));
}

static void silu_mul(struct backend *backend, const float *gate_up, uint32_t rows, uint32_t width, float *out) {
    struct rows_call call = {.backend = backend, .x = gate_up, .rows = rows, .width = width, .out = out};
    parallel_run(parallel_of(backend), silu_on_rank, &call);
}

static void gather_on_rank(void *context, uint32_t rank) {
    const struct rows_call *call = context;
    struct backend *on = parallel_of(call->backend)->inner[rank];
    on->operations->gather_rows(on, parallel_address(call->backend, call->x, rank), call->rows_wanted, call->rows,
        call->width, parallel_address(call->backend, call->out, rank));
}

static void gather_rows(
    struct backend *backend, const float *x, const uint32_t *rows_wanted, uint32_t count, uint32_t width, float *out) {
    struct rows_call call = {
        .backend = backend, .x = x, .rows_wanted = rows_wanted, .rows = count, .width = width, .out = out};
    parallel_run(parallel_of(backend), gather_on_rank, &call);
}

/* ---- what rank 0 does ---- */

static void wait_for_others(struct parallel *p) {
    for (uint32_t rank = 1; rank < p->ranks_count; rank++)
        p->inner[rank]->operations->synchronize(p->inner[rank]);
}

static void sample(struct backend *backend, const float *logits, uint32_t rows, uint32_t vocabulary,
    const struct sample_params *params, struct sample_result *results) {
    struct parallel *p = parallel_of(backend);
    add_pending(p);
    p->inner[0]->operations->sample(p->inner[0], logits, rows, vocabulary, params, results);
    wait_for_others(p);
}

static void kl(struct backend *backend, const float *distribution, const uint32_t *p_rows, const float *q,
    uint32_t rows, uint32_t vocabulary, float *out) {
    struct parallel *p = parallel_of(backend);
    add_pending(p);
    p->inner[0]->operations->kl(p->inner[0], distribution, p_rows, q, rows, vocabulary, out);
    wait_for_others(p);
}

/* ---- the backend ---- */

static const struct backend_operations operations = {
    .name = "parallel",
    .host_memory = false, /* a head's is not where rank 0's addresses say */
    .describe = describe,
    .close = close_backend,
    .allocate = allocate,
    .release = release,
    .upload = upload,
    .download = download,
    .synchronize = synchronize,
    .address = parallel_address,
    .check = check,
    .weight_split = parallel_weight_split,
    .weight_free = parallel_weight_free,
    .weight_bytes = parallel_weight_bytes,
    .embed = parallel_embed,
    .rms_norm = rms_norm,
    .linear = parallel_linear,
    .rope_and_append = parallel_rope_and_append,
    .step_begin = parallel_step_begin,
    .step_start = parallel_step_start,
    .step_end = parallel_step_end,
    .write_tables = parallel_write_tables,
    .attend = parallel_attend,
    .query_moments = parallel_query_moments,
    .score = parallel_score,
    .select = parallel_select,
    .summarise = parallel_summarise,
    .slot_norms = parallel_slot_norms,
    .window_preference = parallel_window_preference,
    .rotate_slots = parallel_rotate_slots,
    .unrotate_slots = parallel_unrotate_slots,
    .silu_mul = silu_mul,
    .gather_rows = gather_rows,
    .sample = sample,
    .kl = kl,
    .copy_pages = parallel_copy_pages,
    .move_slots = parallel_move_slots,
    .clear_slots = parallel_clear_slots,
    .move_statistics = parallel_move_statistics,
    .poison_pages = parallel_poison_pages,
};

/* What is done by ranks that all have it. */
static void leave_out(struct parallel *p) {
    for (uint32_t rank = 0; rank < p->ranks_count; rank++) {
        const struct backend_operations *own = p->inner[rank]->operations;
        if (own->step_begin == NULL)
            p->operations.step_begin = NULL;
        if (own->write_tables == NULL)
            p->operations.write_tables = NULL;
    }
}

struct backend *parallel_backend_open(
    struct backend *const *inner, uint32_t ranks, struct communicator *communicator, struct error *error) {
    struct parallel *p = calloc(1, sizeof *p);
    struct crew *crew = NULL;
    if (p == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for %u devices", ranks);
        goto fail;
    }
    crew = crew_create(ranks, error);
    if (crew == NULL)
        goto fail;
    p->operations = operations;
    p->base = (struct backend){.operations = &p->operations, .ranks = ranks, .inner = p->inner};
    p->ranks_count = ranks;
    p->communicator = communicator;
    p->crew = crew;
    for (uint32_t rank = 0; rank < ranks; rank++)
        p->inner[rank] = p->ranks[rank].backend = inner[rank];
    leave_out(p);
    p->base.by_name = inner[ranks - 1]->by_name;
    snprintf(p->description, sizeof p->description, "%u ranks of %s, sums by %s", ranks,
        inner[0]->operations->describe(inner[0]), communicator->operations->name);
    return &p->base;

fail:
    close_ranks(inner, ranks);
    communicator->operations->free(communicator);
    free(p);
    return NULL;
}

/* Ranks that could be opened, with what connects them. */
static struct backend *put_together(
    struct backend *const *inner, uint32_t ranks, struct communicator *communicator, struct error *error) {
    if (communicator != NULL)
        return parallel_backend_open(inner, ranks, communicator, error);
    close_ranks(inner, ranks);
    return NULL;
}

struct backend *parallel_cpu_open(const struct backend_options *options, struct error *error) {
    struct backend *inner[BACKEND_RANKS_MAX];
    struct backend_options each = *options;
    uint32_t threads = options->threads > 0 ? options->threads : thread_count_available(), ranks = options->ranks;
    each.threads = threads > ranks ? threads / ranks : 1;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        inner[rank] = backend_cpu_open(&each, error);
        if (inner[rank] == NULL) {
            close_ranks(inner, rank);
            return NULL;
        }
    }
    return put_together(inner, ranks, communicator_host_create(ranks, error), error);
}

struct backend *parallel_cuda_open(const struct backend_options *options, struct error *error) {
    struct backend *inner[BACKEND_RANKS_MAX] = {NULL};
    struct backend_options each = *options;
    uint32_t ranks = options->ranks;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        each.device = rank;
        inner[rank] = backend_cuda_open(&each, error);
        if (inner[rank] == NULL) {
            close_ranks(inner, rank);
            return NULL;
        }
    }
    return put_together(inner, ranks, backend_cuda_connect(inner, ranks, options->all_reduce, error), error);
}
