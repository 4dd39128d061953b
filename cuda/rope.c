/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/rope.h"
#include "cuda/cuda_backend.h"

#include <stdlib.h>
#include <string.h>

enum {
    TURNS_LEAST = 4096,   /* positions of the table at first */
    TURNS_MOST = 1 << 17, /* 64 MiB for 64 pairs; positions beyond are computed anew each time */
    TABLES = 4,           /* global and sliding layers of a model have one each */
};

/* The table of one set of frequencies. */
struct rope_table {
    uint64_t last_use; /* 0: never */
    uint32_t pairs;
    float *inverse_freq; /* [pairs] host: what the table was computed with */
    struct rope_turns turns;
};

struct rope_state {
    struct rope_table tables[TABLES];
    uint64_t clock;
};

static void table_clear(struct rope_table *table) {
    cudaFree((void *)table->turns.table);
    cudaFree((void *)table->turns.inverse_freq);
    free(table->inverse_freq);
    *table = (struct rope_table){0};
}

void cuda_rope_free(struct cuda_backend *cuda) {
    if (cuda->rope == NULL)
        return;
    for (uint32_t i = 0; i < TABLES; i++)
        table_clear(&cuda->rope->tables[i]);
    free(cuda->rope);
    cuda->rope = NULL;
}

static bool same_frequencies(const struct rope_table *table, const struct rope_params *rope) {
    return table->inverse_freq != NULL && table->pairs == rope->dim / 2 &&
           memcmp(table->inverse_freq, rope->inverse_freq, table->pairs * sizeof(float)) == 0;
}

/* The table of these frequencies, or the one that was not used for longest. */
static struct rope_table *find_table(struct rope_state *state, const struct rope_params *rope) {
    struct rope_table *oldest = &state->tables[0];
    for (uint32_t i = 0; i < TABLES; i++) {
        struct rope_table *table = &state->tables[i];
        if (same_frequencies(table, rope))
            return table;
        if (table->last_use < oldest->last_use)
            oldest = table;
    }
    return oldest;
}

/* Forgets the table and takes other frequencies. */
static bool table_begin(struct cuda_backend *cuda, struct rope_table *table, const struct rope_params *rope) {
    if (!cuda_check(cuda, cuda_wait_stream(cuda), "rope"))
        return false;
    table_clear(table);
    cuda->generation++;
    size_t bytes = rope->dim / 2 * sizeof(float);
    table->inverse_freq = malloc(bytes + 1);
    void *device = NULL;
    if (table->inverse_freq == NULL)
        return cuda_check(cuda, cudaErrorMemoryAllocation, "rope");
    if (!cuda_check(cuda, cudaMalloc(&device, bytes + 1), "rope"))
        return false;
    memcpy(table->inverse_freq, rope->inverse_freq, bytes);
    table->pairs = rope->dim / 2;
    table->turns.pairs = table->pairs;
    table->turns.inverse_freq = device;
    cuda_upload_bytes(cuda, device, rope->inverse_freq, bytes);
    return true;
}

/* A table of at least `count` positions, up to TURNS_MOST. */
static bool table_extend(struct cuda_backend *cuda, struct rope_table *of, uint32_t count) {
    uint32_t room = of->turns.count > 0 ? 2 * of->turns.count : TURNS_LEAST;
    while (room < count && room < TURNS_MOST)
        room *= 2;
    void *table = NULL;
    if (!cuda_check(cuda, cudaMalloc(&table, (size_t)room * of->pairs * 2 * sizeof(float) + 1), "rope"))
        return false;
    cuda_check(cuda, cuda_wait_stream(cuda), "rope"); /* kernels may read the old one */
    cudaFree((void *)of->turns.table);
    cuda->generation++;
    of->turns.table = table;
    of->turns.count = room;
    launch_rope_turns(&of->turns, 0, room, cuda->stream);
    return cuda_check_launch(cuda, "rope");
}

static bool is_short(const struct rope_table *table, uint32_t position_most) {
    return position_most >= table->turns.count && table->turns.count < TURNS_MOST;
}

bool rope_turns_get(
    struct cuda_backend *cuda, const struct rope_params *rope, uint32_t position_most, struct rope_turns *turns) {
    if (cuda->rope == NULL)
        cuda->rope = calloc(1, sizeof *cuda->rope);
    struct rope_state *state = cuda->rope;
    if (state == NULL)
        return cuda_check(cuda, cudaErrorMemoryAllocation, "rope");
    struct rope_table *table = find_table(state, rope);
    bool changes = !same_frequencies(table, rope), extends = changes || is_short(table, position_most);
    if (extends && cuda_breaks_capture(cuda))
        return false;
    if (changes && !table_begin(cuda, table, rope))
        return false;
    if (extends && !table_extend(cuda, table, position_most + 1))
        return false;
    table->last_use = ++state->clock;
    *turns = table->turns;
    return true;
}

bool rope_turns_prepare(struct cuda_backend *cuda, const struct rope_params *rope, uint32_t position_most) {
    struct rope_turns turns;
    if (!rope_turns_get(cuda, rope, position_most, &turns))
        return false;
    for (uint32_t i = 0; i < TABLES; i++) {
        struct rope_table *table = &cuda->rope->tables[i];
        if (table->turns.table != NULL && is_short(table, position_most) &&
            !table_extend(cuda, table, position_most + 1))
            return false;
    }
    return true;
}

void cuda_rope_and_append(
    struct backend *backend, const struct kv_batch *batch, const struct rope_params *rope, uint32_t heads, float *qkv) {
    struct cuda_backend *cuda = cuda_backend(backend);
    struct cuda_batch staged;
    struct rope_turns turns;
    if (!cuda_batch_stage(cuda, batch, &staged) || !rope_turns_get(cuda, rope, staged.position_most, &turns))
        return;
    launch_rope_append(&staged, &turns, heads, qkv, cuda->stream);
    cuda_check_launch(cuda, "rope_and_append");
}

static const struct slot_address *stage_addresses(
    struct cuda_stage *stage, const uint32_t *pages, const uint32_t *slots, uint32_t count) {
    const void *device;
    struct slot_address *address = cuda_stage_add(stage, count * sizeof *address, &device);
    for (uint32_t i = 0; i < count; i++)
        address[i] = (struct slot_address){pages[slots[i] / KV_PAGE_SLOTS], slots[i] % KV_PAGE_SLOTS};
    return device;
}

void cuda_rotate_slots(struct backend *backend, const struct kv_pool *pool, const struct rope_params *rope,
    const uint32_t *pages, const uint32_t *slots, const float *keys, const uint32_t *to, uint32_t count) {
    struct cuda_backend *cuda = cuda_backend(backend);
    struct cuda_stage stage;
    struct rope_turns turns;
    uint32_t most = 0;
    for (uint32_t i = 0; i < count; i++)
        most = to[i] > most ? to[i] : most;
    size_t bytes = cuda_stage_size(count * sizeof(struct slot_address)) + cuda_stage_size(count * sizeof *to);
    if (count == 0 || !rope_turns_get(cuda, rope, most, &turns) || !cuda_stage_begin(cuda, bytes, &stage))
        return;
    const struct slot_address *addresses = stage_addresses(&stage, pages, slots, count);
    const uint32_t *device_to = cuda_stage_copy(&stage, to, count * sizeof *to);
    if (!cuda_stage_send(cuda, &stage))
        return;
    launch_rotate_slots(pool, &turns, addresses, device_to, keys, count, cuda->stream);
    cuda_check_launch(cuda, "rotate_slots");
}

void cuda_unrotate_slots(struct backend *backend, const struct kv_pool *pool, const struct rope_params *rope,
    const uint32_t *pages, const uint32_t *slots, uint32_t count, float *keys) {
    struct cuda_backend *cuda = cuda_backend(backend);
    struct cuda_stage stage;
    struct rope_turns turns;
    size_t bytes = cuda_stage_size(count * sizeof(struct slot_address));
    if (count == 0 || !rope_turns_get(cuda, rope, 0, &turns) || !cuda_stage_begin(cuda, bytes, &stage))
        return;
    const struct slot_address *addresses = stage_addresses(&stage, pages, slots, count);
    if (!cuda_stage_send(cuda, &stage))
        return;
    launch_unrotate_slots(pool, &turns, addresses, count, keys, cuda->stream);
    cuda_check_launch(cuda, "unrotate_slots");
}
