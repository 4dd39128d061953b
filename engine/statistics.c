/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/statistics.h"

#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 64 };

static const struct backend_operations *operations(const struct statistics *s) {
    return s->backend->operations;
}

static uint32_t heads_count(const struct statistics *s) {
    return s->shape.layers * s->shape.kv_heads;
}

/* Who has the memory of a head. */
static struct backend *backend_of(const struct statistics *s, uint32_t head) {
    return backend_of_head(s->backend, s->shape.kv_heads, head);
}

static uint32_t rank_of(const struct statistics *s, uint32_t head) {
    return backend_rank_of_head(s->backend, s->shape.kv_heads, head);
}

static uint32_t shape_ranks(const struct statistics_shape *shape) {
    return shape->ranks > 1 ? shape->ranks : 1;
}

static void release_memory(const struct statistics *s, uint32_t head) {
    struct backend *on = backend_of(s, head);
    on->operations->release(on, s->memory[head]);
}

static uint32_t whole_pages(uint32_t slots) {
    uint32_t rest = slots % KV_PAGE_SLOTS;
    return rest == 0 ? slots : slots + (KV_PAGE_SLOTS - rest);
}

uint32_t statistics_room_for(uint32_t slots) {
    return whole_pages(slots + slots / 64 + KV_PAGE_SLOTS);
}

/* The next array of a head's allocation: NULL without `base` (only counting), or when it is not needed. */
static void *place(char *base, size_t *at, bool needed, size_t bytes) {
    if (!needed)
        return NULL;
    void *array = base != NULL ? base + *at : NULL;
    *at += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return array;
}

size_t statistics_lay_out(
    const struct statistics_shape *shape, uint32_t needs, uint32_t capacity, char *base, struct kv_statistics *out) {
    size_t at = 0, slots = capacity, window = shape->window, rows = window * shape->group;
    size_t numbers = (size_t)shape->content + 2;
    *out = (struct kv_statistics){
        .needs = needs & ~(uint32_t)STATISTIC_MOMENTS,
        .capacity = capacity,
        .window = shape->window,
        .history = shape->history,
        .seed = shape->seed,
        .content = shape->content,
    };
    if (capacity == 0)
        return 0;
    out->sum = place(base, &at, needs & STATISTIC_SUM, 2 * slots * sizeof *out->sum);
    out->squared = place(base, &at, needs & STATISTIC_SQUARED, 2 * slots * sizeof *out->squared);
    out->noisy = place(base, &at, needs & STATISTIC_NOISY, 2 * slots * sizeof *out->noisy);
    out->above = place(base, &at, needs & STATISTIC_ABOVE, slots * STATISTIC_ABOVE_BITS / 8);
    out->output_norm = place(base, &at, needs & STATISTIC_OUTPUT_NORM, slots * sizeof *out->output_norm);
    out->entropy = place(base, &at, needs & STATISTIC_ENTROPY, slots * sizeof *out->entropy);
    out->window_sum = place(base, &at, needs & STATISTIC_WINDOW, slots * sizeof *out->window_sum);
    out->window_rows = place(base, &at, needs & STATISTIC_WINDOW, window * slots * sizeof *out->window_rows);
    out->head_rows = place(base, &at, needs & STATISTIC_HEAD_WINDOW, rows * slots * sizeof *out->head_rows);
    out->outputs = place(base, &at, needs & STATISTIC_OUTPUTS, rows * shape->head_dim * sizeof *out->outputs);
    out->content_rows = place(base, &at, needs & STATISTIC_CONTENT, numbers * slots * sizeof *out->content_rows);
    out->standard = place(base, &at, needs & STATISTIC_STANDARD, STATISTIC_STANDARD_NUMBERS * sizeof *out->standard);
    return at;
}

size_t statistics_head_bytes(const struct statistics_shape *shape, uint32_t needs, uint32_t slots) {
    struct kv_statistics head;
    return statistics_lay_out(shape, needs, whole_pages(slots), NULL, &head);
}

/* Of one layer, of the heads of a rank: count, sum and outer, each from a multiple of ALIGNMENT on. */
static size_t moments_layer_bytes(const struct statistics_shape *shape) {
    size_t heads = (size_t)shape->kv_heads / shape_ranks(shape) * shape->group, d = shape->head_dim, at = ALIGNMENT;
    place(NULL, &at, true, heads * d * sizeof(double));
    place(NULL, &at, true, heads * d * d * sizeof(double));
    return at;
}

size_t statistics_moments_bytes(const struct statistics_shape *shape, uint32_t needs) {
    return needs & STATISTIC_MOMENTS ? shape_ranks(shape) * shape->layers * moments_layer_bytes(shape) : 0;
}

static size_t moments_missing(const struct statistics *s) {
    return s->moments[0].count == NULL ? statistics_moments_bytes(&s->shape, s->needs) : 0;
}

static int moments_create(struct statistics *s) {
    size_t bytes = moments_missing(s), layer_bytes = moments_layer_bytes(&s->shape);
    if (bytes == 0)
        return 0;
    char *base = operations(s)->allocate(s->backend, bytes / shape_ranks(&s->shape));
    if (base == NULL)
        return ERROR_MEMORY;
    size_t sums =
        (size_t)s->shape.kv_heads / shape_ranks(&s->shape) * s->shape.group * s->shape.head_dim * sizeof(double);
    for (uint32_t layer = 0; layer < s->shape.layers; layer++) {
        char *at = base + layer * layer_bytes;
        size_t offset = ALIGNMENT;
        s->moments[layer].count = (uint32_t *)at;
        s->moments[layer].sum = place(at, &offset, true, sums);
        s->moments[layer].outer = (double *)(at + offset);
    }
    s->bytes += bytes;
    return 0;
}

/* The moments' one allocation begins with layer 0. */
static void moments_release(struct statistics *s) {
    if (s->moments[0].count == NULL)
        return;
    operations(s)->release(s->backend, s->moments[0].count);
    memset(s->moments, 0, s->shape.layers * sizeof *s->moments);
    s->bytes -= statistics_moments_bytes(&s->shape, STATISTIC_MOMENTS);
}

struct statistics *statistics_create(
    struct backend *backend, const struct statistics_shape *shape, uint32_t needs, struct error *error) {
    size_t heads = (size_t)shape->layers * shape->kv_heads;
    struct statistics *s = calloc(1, sizeof *s + heads * sizeof s->heads[0]);
    if (s != NULL) {
        s->moments = calloc(shape->layers, sizeof *s->moments);
        s->memory = calloc(heads, sizeof *s->memory);
    }
    if (s == NULL || s->moments == NULL || s->memory == NULL) {
        if (s != NULL) {
            free(s->moments);
            free(s->memory);
            free(s);
        }
        error_set(error, ERROR_MEMORY, "no memory for the statistics of a sequence");
        return NULL;
    }
    s->backend = backend;
    s->shape = *shape;
    s->needs = needs;
    for (size_t i = 0; i < heads; i++)
        statistics_lay_out(
            shape, 0, 0, NULL, &s->heads[i]); /* no arrays yet: some have bytes without slots, and none are held */
    return s;
}

void statistics_free(struct statistics *s) {
    if (s == NULL)
        return;
    for (uint32_t i = 0; i < heads_count(s); i++)
        release_memory(s, i);
    moments_release(s);
    free(s->moments);
    free(s->memory);
    free(s);
}

/* Arrays of a head (by its number) that hold nothing yet. */
static int create_arrays(const struct statistics *s, uint32_t number, uint32_t needs, uint32_t capacity,
    struct kv_statistics *head, void **memory) {
    size_t bytes = statistics_lay_out(&s->shape, needs, capacity, NULL, head);
    struct backend *on = backend_of(s, number);
    *memory = NULL;
    if (bytes == 0)
        return 0;
    *memory = on->operations->allocate(on, bytes);
    if (*memory == NULL)
        return ERROR_MEMORY;
    statistics_lay_out(&s->shape, needs, capacity, *memory, head);
    return 0;
}

static size_t arrays_bytes(const struct statistics *s, const struct kv_statistics *head) {
    struct kv_statistics unused;
    return statistics_lay_out(&s->shape, head->needs, head->capacity, NULL, &unused);
}

/* Puts new arrays in the place of a head's. */
static void replace_arrays(struct statistics *s, uint32_t head, const struct kv_statistics *arrays, void *memory) {
    s->bytes += arrays_bytes(s, arrays) - arrays_bytes(s, &s->heads[head]);
    release_memory(s, head);
    s->heads[head] = *arrays;
    s->memory[head] = memory;
}

static int copy_on_rank(struct backend *on, void *to, const void *from, size_t bytes) {
    if (on->operations->host_memory) {
        on->operations->upload(on, to, from, bytes);
        return 0;
    }
    void *host = malloc(bytes);
    if (host == NULL)
        return ERROR_MEMORY;
    on->operations->download(on, host, from, bytes);
    on->operations->upload(on, to, host, bytes);
    free(host);
    return 0;
}

int statistics_copy_device(struct backend *backend, void *to, const void *from, size_t bytes) {
    uint32_t ranks = backend_ranks(backend);
    int code = 0;
    for (uint32_t rank = 0; rank < ranks && code == 0; rank++)
        code = copy_on_rank(backend_of_rank(backend, rank), backend_address(backend, to, rank),
            backend_address(backend, from, rank), bytes / ranks);
    return code;
}

void statistics_download(struct backend *backend, void *host, const void *from, size_t bytes) {
    uint32_t ranks = backend_ranks(backend);
    for (uint32_t rank = 0; rank < ranks; rank++) {
        struct backend *on = backend_of_rank(backend, rank);
        on->operations->download(
            on, (char *)host + rank * (bytes / ranks), backend_address(backend, from, rank), bytes / ranks);
    }
}

void statistics_upload(struct backend *backend, void *to, const void *host, size_t bytes) {
    uint32_t ranks = backend_ranks(backend);
    for (uint32_t rank = 0; rank < ranks; rank++) {
        struct backend *on = backend_of_rank(backend, rank);
        on->operations->upload(
            on, backend_address(backend, to, rank), (const char *)host + rank * (bytes / ranks), bytes / ranks);
    }
}

static int fork_head(struct statistics *fork, const struct statistics *from, uint32_t head) {
    struct kv_statistics arrays;
    void *memory;
    if (create_arrays(from, head, from->heads[head].needs, from->heads[head].capacity, &arrays, &memory) != 0)
        return ERROR_MEMORY;
    replace_arrays(fork, head, &arrays, memory);
    return 0;
}

struct statistics *statistics_fork(const struct statistics *from, struct error *error) {
    struct statistics *fork = statistics_create(from->backend, &from->shape, from->needs, error);
    uint32_t heads = heads_count(from);
    struct statistics_move *moves = calloc(heads, sizeof *moves);
    size_t moments = from->moments[0].count != NULL ? statistics_moments_bytes(&from->shape, from->needs) : 0;
    if (fork == NULL || moves == NULL || (from->moments[0].count != NULL && moments_create(fork) != 0))
        goto failed;
    for (uint32_t i = 0; i < heads; i++) {
        if (fork_head(fork, from, i) != 0)
            goto failed;
        moves[i] = (struct statistics_move){
            .rank = rank_of(from, i), .from = &from->heads[i], .to = &fork->heads[i], .count = from->heads[i].capacity};
    }
    if (moments > 0 &&
        statistics_copy_device(from->backend, fork->moments[0].count, from->moments[0].count, moments) != 0)
        goto failed;
    operations(from)->move_statistics(from->backend, moves, heads, from->shape.group, from->shape.head_dim);
    free(moves);
    return fork;

failed:
    error_set(error, ERROR_MEMORY, "no memory to copy the statistics of a sequence");
    free(moves);
    statistics_free(fork);
    return NULL;
}

/* Room that a head needs for `count` slots more, 0 when it has enough. */
static uint32_t room_missing(
    const struct statistics *s, const struct kv_sequence *kv, uint32_t head, uint32_t count, uint32_t hint) {
    uint32_t layer = head / s->shape.kv_heads;
    if (statistics_slides(&s->shape, layer))
        return 0;
    uint32_t needed = kv_sequence_slots(kv, layer, head % s->shape.kv_heads) + count;
    if (needed <= s->heads[head].capacity)
        return 0;
    return needed <= hint ? whole_pages(hint) : statistics_room_for(needed);
}

size_t statistics_reserve_bytes(
    const struct statistics *s, const struct kv_sequence *kv, uint32_t count, uint32_t hint) {
    size_t bytes = moments_missing(s);
    struct kv_statistics unused;
    for (uint32_t i = 0; i < heads_count(s); i++) {
        uint32_t room = room_missing(s, kv, i, count, hint);
        if (room > 0)
            bytes += statistics_lay_out(&s->shape, s->needs, room, NULL, &unused) - arrays_bytes(s, &s->heads[i]);
    }
    return bytes;
}

int statistics_reserve(
    struct statistics *s, const struct kv_sequence *kv, uint32_t count, uint32_t hint, struct error *error) {
    if (moments_create(s) != 0)
        return error_set(error, ERROR_MEMORY, "no memory for the moments of queries");
    for (uint32_t i = 0; i < heads_count(s); i++) {
        uint32_t room = room_missing(s, kv, i, count, hint);
        if (room == 0)
            continue;
        struct kv_statistics arrays;
        void *memory;
        if (create_arrays(s, i, s->needs, room, &arrays, &memory) != 0)
            return error_set(error, ERROR_MEMORY, "no memory for the statistics of %u slots", room);
        struct statistics_move move = {
            .rank = rank_of(s, i), .from = &s->heads[i], .to = &arrays, .count = s->heads[i].capacity};
        if (move.count > 0)
            operations(s)->move_statistics(s->backend, &move, 1, s->shape.group, s->shape.head_dim);
        replace_arrays(s, i, &arrays, memory);
    }
    return 0;
}

/* Work space of a prune. */
struct prune_work {
    struct kv_statistics *arrays; /* [heads] those that replace a head's */
    void **memory;                /* [heads] of them; NULL: the head's own stay */
    uint32_t *slots;              /* lists of moves */
};

size_t statistics_prune_work(const struct statistics *s, size_t slots) {
    struct prune_work *work;
    return heads_count(s) * (sizeof *work->arrays + sizeof *work->memory) + 2 * slots * sizeof *work->slots;
}

static struct prune_work cut_work(const struct statistics *s, void *space) {
    struct prune_work work = {.arrays = space};
    work.memory = (void **)(work.arrays + heads_count(s));
    work.slots = (uint32_t *)(work.memory + heads_count(s));
    return work;
}

static uint32_t slots_left(const struct kv_removal *removal, uint32_t slots_before) {
    return kv_removal_compacts(removal) ? removal->count : slots_before;
}

/* Smaller arrays for a head that can do with them. false: it keeps its own. */
static bool replacement(const struct statistics *s, uint32_t number, uint32_t slots, uint32_t needs, bool fit,
    struct kv_statistics *arrays, void **memory) {
    const struct kv_statistics *head = &s->heads[number];
    uint32_t room = statistics_room_for(slots);
    *memory = NULL;
    if (head->capacity <= (fit ? room : 2 * room) && (needs | STATISTIC_MOMENTS) == (head->needs | STATISTIC_MOMENTS))
        return false;
    if (room > head->capacity)
        room = head->capacity;
    return create_arrays(s, number, needs, room, arrays, memory) == 0 && *memory != NULL;
}

/* Lists every slot that stays, to fill other arrays: place i gets slot from[i], as kv_removal_moves has it. */
static void list_all(const struct kv_removal *removal, uint32_t slots_before, uint32_t *from, uint32_t *to) {
    uint32_t moves = kv_removal_moves(removal, slots_before, from, to), moved = moves;
    for (uint32_t place = removal->count;
         place-- > 0;) { /* from the end: lists are not overwritten before they are read */
        bool moves_here = moved > 0 && to[moved - 1] == place;
        from[place] = moves_here ? from[--moved] : place;
        to[place] = place;
    }
}

/* The move of one head; returns how many entries of work->slots it took. */
static uint32_t plan_head(
    const struct statistics_prune *prune, uint32_t i, struct prune_work *work, struct statistics_move *move) {
    struct statistics *s = prune->statistics;
    const struct kv_removal *removal = &prune->removals[i];
    uint32_t slots_before = prune->slots_before[i];
    bool replaced = work->memory[i] != NULL;
    *move = (struct statistics_move){
        .rank = rank_of(s, i), .from = &s->heads[i], .to = replaced ? &work->arrays[i] : &s->heads[i]};
    uint32_t *from = work->slots, *to = from + removal->count;
    if (!kv_removal_compacts(removal)) {
        move->count = replaced ? slots_before : 0;
        if (removal->evict != KV_NO_SLOT) {
            move->clear_first = removal->evict;
            move->clear_end = removal->evict + 1;
            move->rows_stay = prune->rows_stay;
        }
        return 0;
    }
    move->from_slots = from;
    move->to_slots = to;
    if (replaced) {
        list_all(removal, slots_before, from, to);
        move->count = removal->count;
        return 2 * removal->count;
    }
    move->count = kv_removal_moves(removal, slots_before, from, to);
    move->clear_first = removal->count;
    move->clear_end = slots_before;
    return 2 * removal->count;
}

/* Nothing is recorded by slot any more. */
static void drop_arrays(struct statistics *s) {
    struct kv_statistics none;
    statistics_lay_out(&s->shape, 0, 0, NULL, &none);
    for (uint32_t i = 0; i < heads_count(s); i++)
        replace_arrays(s, i, &none, NULL);
}

static bool keeps_arrays(uint32_t needs) {
    return (needs & ~(uint32_t)STATISTIC_MOMENTS) != 0;
}

/* The moves of one sequence; returns how many. */
static uint32_t plan_prune(const struct statistics_prune *prune, struct statistics_move *moves) {
    struct statistics *s = prune->statistics;
    struct prune_work work = cut_work(s, prune->work);
    uint32_t count = 0;
    s->needs = prune->needs;
    if (!(prune->needs & STATISTIC_MOMENTS))
        moments_release(s);
    if (!keeps_arrays(prune->needs)) {
        drop_arrays(s);
        return 0;
    }
    for (uint32_t i = 0; i < heads_count(s); i++) {
        const struct kv_removal *removal = &prune->removals[i];
        uint32_t before = prune->slots_before[i], slots = slots_left(removal, before);
        bool replaced = replacement(s, i, slots, prune->needs, prune->fit, &work.arrays[i], &work.memory[i]);
        if (!replaced && !kv_removal_compacts(removal) && removal->evict == KV_NO_SLOT)
            continue;
        work.slots += plan_head(prune, i, &work, &moves[count++]);
    }
    return count;
}

static void replace_moved(const struct statistics_prune *prune) {
    struct statistics *s = prune->statistics;
    const struct prune_work work = cut_work(s, prune->work);
    for (uint32_t i = 0; keeps_arrays(prune->needs) && i < heads_count(s); i++)
        if (work.memory[i] != NULL)
            replace_arrays(s, i, &work.arrays[i], work.memory[i]);
}

void statistics_prune(struct statistics_prune *prunes, uint32_t count, struct statistics_move *moves) {
    uint32_t moves_count = 0;
    for (uint32_t i = 0; i < count; i++)
        moves_count += plan_prune(&prunes[i], moves + moves_count);
    if (moves_count > 0) {
        const struct statistics *first = prunes[0].statistics;
        operations(first)->move_statistics(
            first->backend, moves, moves_count, first->shape.group, first->shape.head_dim);
    }
    for (uint32_t i = 0; i < count; i++)
        replace_moved(&prunes[i]);
}

void statistics_keep(
    struct statistics *s, uint32_t head, const uint32_t *slots, uint32_t count, uint32_t slots_before) {
    /* In runs: places ascend by one along with the slots of each. */
    uint32_t from[KV_PAGE_SLOTS], to[KV_PAGE_SLOTS];
    for (uint32_t done = 0; done <= count; done += KV_PAGE_SLOTS) {
        struct statistics_move move = {.rank = rank_of(s, head),
            .from = &s->heads[head],
            .to = &s->heads[head],
            .from_slots = from,
            .to_slots = to};
        for (; move.count < KV_PAGE_SLOTS && done + move.count < count; move.count++) {
            from[move.count] = slots[done + move.count];
            to[move.count] = done + move.count;
        }
        if (done + KV_PAGE_SLOTS > count) {
            move.clear_first = count;
            move.clear_end = slots_before;
        }
        operations(s)->move_statistics(s->backend, &move, 1, s->shape.group, s->shape.head_dim);
    }
}

void statistics_save(struct statistics *s, void *host) {
    char *to = host;
    for (uint32_t i = 0; i < heads_count(s); i++) {
        if (s->memory[i] == NULL)
            continue;
        size_t bytes = arrays_bytes(s, &s->heads[i]);
        struct backend *on = backend_of(s, i);
        on->operations->download(on, to, s->memory[i], bytes);
        release_memory(s, i);
        s->memory[i] = NULL;
        to += bytes;
    }
    size_t bytes = statistics_moments_bytes(&s->shape, s->needs), held = s->bytes;
    s->moments_saved = s->moments[0].count != NULL;
    if (s->moments_saved)
        statistics_download(s->backend, to, s->moments[0].count, bytes);
    moments_release(s);
    s->bytes = held;
}

int statistics_restore(struct statistics *s, const void *host, struct error *error) {
    const char *from = host;
    size_t held = s->bytes;
    if (s->moments_saved && moments_create(s) != 0)
        goto failed;
    s->bytes = held;
    for (uint32_t i = 0; i < heads_count(s); i++) {
        struct kv_statistics *head = &s->heads[i];
        struct backend *on = backend_of(s, i);
        if (create_arrays(s, i, head->needs, head->capacity, head, &s->memory[i]) != 0)
            goto failed;
        size_t bytes = arrays_bytes(s, head);
        if (bytes > 0)
            on->operations->upload(on, s->memory[i], from, bytes);
        from += bytes;
    }
    if (s->moments_saved)
        statistics_upload(s->backend, s->moments[0].count, from, statistics_moments_bytes(&s->shape, s->needs));
    return 0;

failed:
    for (uint32_t i = 0; i < heads_count(s); i++) {
        release_memory(s, i);
        s->memory[i] = NULL;
    }
    moments_release(s);
    s->bytes = held;
    return error_set(error, ERROR_MEMORY, "no memory for %zu bytes of statistics", held);
}
