/* SPDX-License-Identifier: Apache-2.0
 *
 * Keys without their rotation, and rotated anew: StreamingLLM's positions in the cache. The turns of low positions,
 * which is where a pruned cache lives, are kept.
 */
#include "engine/cpu/score_state.h"
#include "engine/cpu/vector.h"

#include <stdlib.h>
#include <string.h>

enum { TURNS_KEPT = 4096, ROTATE_SLOTS_PER_CHUNK = 32 };

/* Turns (vector.h, rotate) of positions below TURNS_KEPT, computed when they are first asked for. */
struct rope_turns {
    uint32_t dim;
    float *inverse_freq; /* [dim / 2] that the turns were computed with */
    float *turns;        /* [TURNS_KEPT][2 * dim] */
    bool known[TURNS_KEPT];
};

struct rotate_job {
    struct cpu_backend *cpu;
    const struct rope_turns *turns; /* NULL: compute each turn */
    const struct kv_pool *pool;
    const struct rope_params *rope;
    const uint32_t *pages;
    const uint32_t *slots;
    uint32_t count;
    const uint32_t *to; /* NULL: undo each slot's own rotation */
    const float *keys;  /* in */
    float *out;         /* when undoing */
};

void score_turns_free(struct rope_turns *turns) {
    if (turns == NULL)
        return;
    free(turns->inverse_freq);
    free(turns->turns);
    free(turns);
}

static struct rope_turns *turns_create(const struct rope_params *rope) {
    struct rope_turns *turns = calloc(1, sizeof *turns);
    if (turns == NULL)
        return NULL;
    turns->dim = rope->dim;
    turns->inverse_freq = malloc(rope->dim / 2 * sizeof(float) + 1);
    turns->turns = malloc((size_t)TURNS_KEPT * 2 * rope->dim * sizeof(float) + 1);
    if (turns->inverse_freq == NULL || turns->turns == NULL) {
        score_turns_free(turns);
        return NULL;
    }
    memcpy(turns->inverse_freq, rope->inverse_freq, rope->dim / 2 * sizeof(float));
    return turns;
}

/* The kept turns of these frequencies; NULL when there is no memory. */
static struct rope_turns *turns_get(struct cpu_backend *cpu, const struct rope_params *rope) {
    struct score_state *state = score_state_get(cpu);
    if (state == NULL)
        return NULL;
    struct rope_turns *turns = state->turns;
    if (turns != NULL && turns->dim == rope->dim &&
        memcmp(turns->inverse_freq, rope->inverse_freq, rope->dim / 2 * sizeof(float)) == 0)
        return turns;
    score_turns_free(turns);
    state->turns = turns_create(rope);
    return state->turns;
}

/* Before threads share them. */
static void turns_know(struct rope_turns *turns, const struct rope_params *rope, uint32_t position) {
    if (turns == NULL || position >= TURNS_KEPT || turns->known[position])
        return;
    rope_turn(rope, position, turns->turns + (size_t)position * 2 * rope->dim);
    turns->known[position] = true;
}

static const float *turn_of(const struct rotate_job *job, uint32_t position, float *space) {
    if (job->turns != NULL && position < TURNS_KEPT)
        return job->turns->turns + (size_t)position * 2 * job->rope->dim;
    rope_turn(job->rope, position, space);
    return space;
}

static uint32_t slot_position(const struct rotate_job *job, uint32_t i) {
    char *page = kv_pool_page(job->pool, job->pages[job->slots[i] / KV_PAGE_SLOTS]);
    return (uint32_t)kv_page_positions(&job->pool->layout, page)[job->slots[i] % KV_PAGE_SLOTS];
}

static void key_load(const struct kv_layout *layout, const char *page, uint32_t place, float *key) {
    for (uint32_t channel = 0; channel < layout->head_dim; channel++) {
        size_t at = (size_t)channel * KV_PAGE_SLOTS + place;
        if (layout->format == KV_F32)
            key[channel] = ((const float *)page)[at];
        else if (layout->format == KV_F16)
            key[channel] = half_to_float(((const uint16_t *)page)[at]);
        else
            key[channel] = bfloat_to_float(((const uint16_t *)page)[at]);
    }
}

static void key_store(const struct kv_layout *layout, const void *key, char *page, uint32_t place) {
    size_t bytes = kv_number_bytes(layout->format);
    for (uint32_t channel = 0; channel < layout->head_dim; channel++)
        memcpy(page + ((size_t)channel * KV_PAGE_SLOTS + place) * bytes, (const char *)key + channel * bytes, bytes);
}

/* A slot's stored key, turned back. The key of an unused slot is zero. */
static void slot_unrotate(const struct rotate_job *job, uint32_t i) {
    const struct kv_layout *layout = &job->pool->layout;
    char *page = kv_pool_page(job->pool, job->pages[job->slots[i] / KV_PAGE_SLOTS]);
    uint32_t dim = job->rope->dim, position = slot_position(job, i);
    float *key = job->out + (size_t)i * layout->head_dim;
    float space[2 * ATTEND_DIM_MAX], back[2 * ATTEND_DIM_MAX];
    if (position == KV_NO_POSITION) {
        memset(key, 0, layout->head_dim * sizeof *key);
        return;
    }
    const float *turn = turn_of(job, position, space);
    memcpy(back, turn, dim * sizeof *back);
    for (uint32_t j = 0; j < dim; j++)
        back[dim + j] = -turn[dim + j];
    key_load(layout, page, job->slots[i] % KV_PAGE_SLOTS, key);
    job->cpu->vector->rotate(key, back, dim / 2, key);
}

static void slot_rotate(const struct rotate_job *job, uint32_t i) {
    const struct kv_layout *layout = &job->pool->layout;
    char *page = kv_pool_page(job->pool, job->pages[job->slots[i] / KV_PAGE_SLOTS]);
    float space[2 * ATTEND_DIM_MAX], key[ATTEND_DIM_MAX], narrow[ATTEND_DIM_MAX];
    memcpy(key, job->keys + (size_t)i * layout->head_dim, layout->head_dim * sizeof *key);
    job->cpu->vector->rotate(key, turn_of(job, job->to[i], space), job->rope->dim / 2, key);
    job->cpu->attend->formats[layout->format].narrow(key, layout->head_dim, narrow);
    key_store(layout, narrow, page, job->slots[i] % KV_PAGE_SLOTS);
}

static void rotate_work(void *context, uint32_t chunk, uint32_t thread) {
    const struct rotate_job *job = context;
    uint32_t first = chunk * ROTATE_SLOTS_PER_CHUNK;
    uint32_t end = job->count - first < ROTATE_SLOTS_PER_CHUNK ? job->count : first + ROTATE_SLOTS_PER_CHUNK;
    (void)thread;
    for (uint32_t i = first; i < end; i++) {
        if (job->to != NULL)
            slot_rotate(job, i);
        else
            slot_unrotate(job, i);
    }
}

static void rotate_run(struct rotate_job *job) {
    struct rope_turns *turns = turns_get(job->cpu, job->rope);
    for (uint32_t i = 0; i < job->count; i++)
        turns_know(turns, job->rope, job->to != NULL ? job->to[i] : slot_position(job, i));
    job->turns = turns;
    uint32_t chunks = (job->count + ROTATE_SLOTS_PER_CHUNK - 1) / ROTATE_SLOTS_PER_CHUNK;
    if (chunks == 1)
        rotate_work(job, 0, 0);
    else if (chunks > 1)
        thread_pool_run(job->cpu->threads, chunks, rotate_work, job);
}

void cpu_rotate_slots(struct backend *backend, const struct kv_pool *pool, const struct rope_params *rope,
    const uint32_t *pages, const uint32_t *slots, const float *keys, const uint32_t *to, uint32_t count) {
    struct rotate_job job = {.cpu = cpu_backend(backend),
        .pool = pool,
        .rope = rope,
        .pages = pages,
        .slots = slots,
        .count = count,
        .to = to,
        .keys = keys};
    rotate_run(&job);
}

void cpu_unrotate_slots(struct backend *backend, const struct kv_pool *pool, const struct rope_params *rope,
    const uint32_t *pages, const uint32_t *slots, uint32_t count, float *keys) {
    struct rotate_job job = {.cpu = cpu_backend(backend),
        .pool = pool,
        .rope = rope,
        .pages = pages,
        .slots = slots,
        .count = count,
        .out = keys};
    rotate_run(&job);
}
