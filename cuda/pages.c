/* SPDX-License-Identifier: Apache-2.0
 *
 * Lists of moves are made in order; kernels do them at once. What must be read before it is written is found here.
 */
#include "cuda/pages.h"
#include "cuda/cuda_backend.h"

#include <stdlib.h>
#include <string.h>

/* ---- pages ---- */

void cuda_copy_pages(
    struct backend *backend, const struct kv_pool *pool, const uint32_t *from, const uint32_t *to, uint32_t count) {
    struct cuda_backend *cuda = cuda_backend(backend);
    struct cuda_stage stage;
    size_t bytes = count * sizeof *from;
    if (count == 0 || !cuda_stage_begin(cuda, 2 * cuda_stage_size(bytes), &stage))
        return;
    const uint32_t *device_from = cuda_stage_copy(&stage, from, bytes);
    const uint32_t *device_to = cuda_stage_copy(&stage, to, bytes);
    if (!cuda_stage_send(cuda, &stage))
        return;
    launch_copy_pages(pool, device_from, device_to, count, cuda->stream);
    cuda_check_launch(cuda, "copy_pages");
}

void cuda_poison_pages(struct backend *backend, const struct kv_pool *pool, const uint32_t *pages, uint32_t count) {
    struct cuda_backend *cuda = cuda_backend(backend);
    struct cuda_stage stage;
    if (count == 0 || !cuda_stage_begin(cuda, count * sizeof *pages, &stage))
        return;
    const uint32_t *device_pages = cuda_stage_copy(&stage, pages, count * sizeof *pages);
    if (!cuda_stage_send(cuda, &stage))
        return;
    launch_poison_pages(pool, device_pages, count, cuda->stream);
    cuda_check_launch(cuda, "poison_pages");
}

void cuda_clear_slots(
    struct backend *backend, const struct kv_pool *pool, const uint32_t *pages, uint32_t first, uint32_t end) {
    if (first < end)
        cuda_queue_clear((struct cuda_backend *)backend, pool, pages, first, end);
}

/* ---- lists of moves ---- */

static bool ascends(const uint32_t *slots, uint32_t count) {
    for (uint32_t i = 1; i < count; i++)
        if (slots[i] <= slots[i - 1])
            return false;
    return true;
}

/* Both lists ascend: whether no slot is in both. */
static bool disjoint(const uint32_t *from, const uint32_t *to, uint32_t count) {
    uint32_t i = 0, j = 0;
    while (i < count && j < count) {
        if (from[i] == to[j])
            return false;
        if (from[i] < to[j])
            i++;
        else
            j++;
    }
    return true;
}

static bool to_the_front(const uint32_t *from, const uint32_t *to, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        if (to[i] > from[i])
            return false;
    return true;
}

static enum move_order order_of(const uint32_t *from, const uint32_t *to, uint32_t count) {
    if (!ascends(from, count) || !ascends(to, count))
        return MOVE_SERIAL;
    if (disjoint(from, to, count))
        return MOVE_ANY;
    return to_the_front(from, to, count) ? MOVE_ASCENDING : MOVE_SERIAL;
}

/* What a list of moves in order comes to: writes (from, to) so that all are read before any is written, each target
 * once; from, to may be the given lists. Returns their number, or UINT32_MAX when there is no memory. */
static uint32_t resolve(
    const uint32_t *from, const uint32_t *to, uint32_t count, uint32_t *out_from, uint32_t *out_to) {
    uint32_t slots = 0, moves = 0;
    for (uint32_t i = 0; i < count; i++) {
        slots = from[i] >= slots ? from[i] + 1 : slots;
        slots = to[i] >= slots ? to[i] + 1 : slots;
    }
    uint32_t *holds = malloc(slots * sizeof *holds + 1);
    if (holds == NULL)
        return UINT32_MAX;
    for (uint32_t slot = 0; slot < slots; slot++)
        holds[slot] = slot;
    for (uint32_t i = 0; i < count; i++)
        holds[to[i]] = holds[from[i]];
    for (uint32_t slot = 0; slot < slots; slot++) {
        if (holds[slot] == slot)
            continue;
        out_from[moves] = holds[slot];
        out_to[moves++] = slot;
    }
    free(holds);
    return moves;
}

static uint64_t pool_slot(const uint32_t *pages, uint32_t slot) {
    return (uint64_t)pages[slot / KV_PAGE_SLOTS] * KV_PAGE_SLOTS + slot % KV_PAGE_SLOTS;
}

static const struct slot_pair *stage_pairs(
    struct cuda_backend *cuda, const uint32_t *pages, const uint32_t *from, const uint32_t *to, uint32_t count) {
    struct cuda_stage stage;
    const void *device;
    if (!cuda_stage_begin(cuda, count * sizeof(struct slot_pair), &stage))
        return NULL;
    struct slot_pair *pairs = cuda_stage_add(&stage, count * sizeof *pairs, &device);
    for (uint32_t i = 0; i < count; i++)
        pairs[i] = (struct slot_pair){pool_slot(pages, from[i]), pool_slot(pages, to[i])};
    return cuda_stage_send(cuda, &stage) ? device : NULL;
}

/* Moves that read what others write: through memory outside of the pages. */
static void move_through(struct cuda_backend *cuda, const struct kv_pool *pool, const uint32_t *pages,
    const uint32_t *from, const uint32_t *to, uint32_t count) {
    uint32_t *lists = malloc(2 * (size_t)count * sizeof *lists);
    uint32_t moves = lists != NULL ? resolve(from, to, count, lists, lists + count) : UINT32_MAX;
    void *space = NULL;
    if (moves == UINT32_MAX)
        cuda_check(cuda, cudaErrorMemoryAllocation, "move_slots");
    else if (moves > 0)
        space = cuda_scratch_reserve(cuda, &cuda->moved, moves * launch_slot_bytes(&pool->layout));
    const struct slot_pair *pairs = NULL;
    if (space != NULL)
        pairs = stage_pairs(cuda, pages, lists, lists + count, moves);
    if (pairs != NULL) {
        launch_move_slots_through(pool, pairs, moves, space, cuda->stream);
        cuda_check_launch(cuda, "move_slots");
    }
    free(lists);
}

void cuda_move_slots(struct backend *backend, const struct kv_pool *pool, const uint32_t *pages, const uint32_t *from,
    const uint32_t *to, uint32_t count) {
    if (count > 0 && order_of(from, to, count) == MOVE_ANY)
        cuda_queue_moves((struct cuda_backend *)backend, pool, pages, from, to, count);
    else if (count > 0)
        move_through(cuda_backend(backend), pool, pages, from, to, count);
}

/* ---- statistics ---- */

enum { ARRAYS_MOST = 12 }; /* of one head */

/* Where a list of slots lies on the device, and how it may be moved within an array and between two. */
struct slot_list {
    const uint32_t *from, *to;
    enum move_order within, between;
};

/* Arrays that both sides have. */
static uint32_t list_arrays(
    const struct statistics_move *move, const struct slot_list *list, uint32_t group, struct array_move *out) {
    const struct kv_statistics *from = move->from, *to = move->to;
    const struct {
        const void *from;
        void *to;
        size_t bytes, rows;
    } arrays[] = {
        {from->sum, to->sum, sizeof *to->sum, 2},
        {from->squared, to->squared, sizeof *to->squared, 2},
        {from->noisy, to->noisy, sizeof *to->noisy, 2},
        {from->window_rows, to->window_rows, sizeof *to->window_rows, to->window},
        {from->window_sum, to->window_sum, sizeof *to->window_sum, 1},
        {from->head_rows, to->head_rows, sizeof *to->head_rows, (size_t)to->window * group},
        {from->above, to->above, STATISTIC_ABOVE_BITS / 8, 1},
        {from->entropy, to->entropy, sizeof *to->entropy, 1},
        {from->output_norm, to->output_norm, sizeof *to->output_norm, 1},
        {from->content_rows, to->content_rows, sizeof *to->content_rows, (size_t)to->content + 2},
    };
    uint32_t count = 0;
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        if (arrays[i].from == NULL || arrays[i].to == NULL)
            continue;
        out[count++] = (struct array_move){
            .from = arrays[i].from,
            .to = arrays[i].to,
            .from_slots = list->from,
            .to_slots = list->to,
            .element_bytes = (uint32_t)arrays[i].bytes,
            .rows = (uint32_t)arrays[i].rows,
            .from_stride = from->capacity,
            .to_stride = to->capacity,
            .count = move->count,
            .clear_first = move->clear_first,
            .clear_end = move->clear_end,
            .order = arrays[i].from == arrays[i].to ? list->within : list->between,
        };
    }
    return count;
}

/* What is copied as a whole when the arrays are others. */
static uint32_t list_whole(const void *from, void *to, size_t numbers, struct array_move *out) {
    if (from == NULL || to == NULL || from == to)
        return 0;
    *out = (struct array_move){
        .from = from, .to = to, .element_bytes = sizeof(float), .rows = 1, .count = (uint32_t)numbers};
    return 1;
}

static uint32_t list_head(const struct statistics_move *move, const struct slot_list *list, uint32_t group,
    uint32_t head_dim, struct array_move *out) {
    size_t outputs = (size_t)move->to->window * group * head_dim;
    uint32_t count = list_arrays(move, list, group, out);
    count += list_whole(move->from->outputs, move->to->outputs, outputs, out + count);
    count += list_whole(move->from->standard, move->to->standard, STATISTIC_STANDARD_NUMBERS, out + count);
    return count;
}

static struct slot_list stage_list(struct cuda_stage *stage, const struct statistics_move *move) {
    if (move->from_slots == NULL)
        return (struct slot_list){NULL, NULL, MOVE_ANY, MOVE_ANY};
    return (struct slot_list){
        .from = cuda_stage_copy(stage, move->from_slots, move->count * sizeof(uint32_t)),
        .to = cuda_stage_copy(stage, move->to_slots, move->count * sizeof(uint32_t)),
        .within = order_of(move->from_slots, move->to_slots, move->count),
        .between = ascends(move->to_slots, move->count) ? MOVE_ANY : MOVE_SERIAL,
    };
}

/* Heads whose arrays, `arrays` in all, are moved by one copy and one launch. */
static void move_heads(struct cuda_backend *cuda, const struct statistics_move *moves, uint32_t count, uint32_t group,
    uint32_t head_dim, uint32_t arrays, size_t bytes) {
    struct cuda_stage stage;
    const void *device;
    uint32_t done = 0, rows_most = 0;
    if (arrays == 0 || !cuda_stage_begin(cuda, bytes, &stage))
        return;
    struct array_move *out = cuda_stage_add(&stage, arrays * sizeof *out, &device);
    for (uint32_t i = 0; i < count; i++) {
        struct slot_list list = stage_list(&stage, &moves[i]);
        uint32_t end = done + list_head(&moves[i], &list, group, head_dim, out + done);
        for (; done < end; done++)
            rows_most = out[done].rows > rows_most ? out[done].rows : rows_most;
    }
    if (!cuda_stage_send(cuda, &stage))
        return;
    launch_move_arrays(device, arrays, rows_most, cuda->stream);
    cuda_check_launch(cuda, "move_statistics");
}

/* In parts that fit the staging ring as it is, if the heads do. */
void cuda_move_statistics(
    struct backend *backend, const struct statistics_move *moves, uint32_t count, uint32_t group, uint32_t head_dim) {
    static const struct slot_list unknown;
    struct cuda_backend *cuda = cuda_backend(backend);
    uint32_t first = 0, arrays = 0;
    size_t bytes = CUDA_STAGE_ALIGNMENT;
    for (uint32_t i = 0; i < count; i++) {
        struct array_move space[ARRAYS_MOST];
        uint32_t more = list_head(&moves[i], &unknown, group, head_dim, space);
        size_t more_bytes = more * sizeof space[0];
        if (moves[i].from_slots != NULL)
            more_bytes += 2 * cuda_stage_size(moves[i].count * sizeof(uint32_t));
        if (bytes + more_bytes > cuda->ring.segment_bytes && i > first) {
            move_heads(cuda, moves + first, i - first, group, head_dim, arrays, bytes);
            first = i;
            arrays = 0;
            bytes = CUDA_STAGE_ALIGNMENT;
        }
        arrays += more;
        bytes += more_bytes;
    }
    move_heads(cuda, moves + first, count - first, group, head_dim, arrays, bytes);
}
