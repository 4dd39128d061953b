/* SPDX-License-Identifier: Apache-2.0
 *
 * Statistics follow their slots: columns of per-slot arrays are moved and zeroed. Heads are independent; every decode
 * step of a pruned sequence zeroes one column of each; the rows of its window only where somebody reads them.
 */
#include "engine/cpu/cpu.h"

#include <string.h>

enum { MOVES_A_CHUNK = 16 };

struct moves {
    const struct statistics_move *moves;
    uint32_t count;
    uint32_t group;
    uint32_t head_dim;
};

/* One row of an array: `move` applied to elements of `bytes` bytes. */
static inline void move_row(const struct statistics_move *move, const char *from, char *to, size_t bytes) {
    if (move->from_slots != NULL)
        for (uint32_t i = 0; i < move->count; i++)
            memcpy(to + move->to_slots[i] * bytes, from + move->from_slots[i] * bytes, bytes);
    else if (from != to && move->count > 0)
        memcpy(to, from, move->count * bytes);
    if (move->clear_end == move->clear_first + 1)
        memset(to + move->clear_first * bytes, 0, bytes);
    else if (move->clear_end > move->clear_first)
        memset(to + move->clear_first * bytes, 0, (move->clear_end - move->clear_first) * bytes);
}

/* Rows of one array, each as long as the capacity. Sizes are spelled out, so that elements move as numbers. */
static void move_array(const struct statistics_move *move, const void *from, void *to, size_t bytes, uint32_t rows) {
    if (from == NULL || to == NULL)
        return;
    size_t from_row = move->from->capacity * bytes, to_row = move->to->capacity * bytes;
    for (uint32_t row = 0; row < rows; row++) {
        const char *source = (const char *)from + row * from_row;
        char *target = (char *)to + row * to_row;
        if (bytes == sizeof(uint16_t))
            move_row(move, source, target, sizeof(uint16_t));
        else if (bytes == sizeof(uint32_t))
            move_row(move, source, target, sizeof(uint32_t));
        else if (bytes == sizeof(uint64_t))
            move_row(move, source, target, sizeof(uint64_t));
        else
            move_row(move, source, target, bytes);
    }
}

static void move_head(const struct moves *all, const struct statistics_move *move) {
    const struct kv_statistics *from = move->from, *to = move->to;
    size_t outputs = (size_t)to->window * all->group * all->head_dim;
    move_array(move, from->sum, to->sum, sizeof *to->sum, 2);
    move_array(move, from->squared, to->squared, sizeof *to->squared, 2);
    move_array(move, from->noisy, to->noisy, sizeof *to->noisy, 2);
    struct statistics_move rows = *move;
    if (move->rows_stay)
        rows.clear_end = rows.clear_first;
    move_array(&rows, from->window_rows, to->window_rows, sizeof *to->window_rows, to->window);
    move_array(move, from->window_sum, to->window_sum, sizeof *to->window_sum, 1);
    move_array(move, from->head_rows, to->head_rows, sizeof *to->head_rows, to->window * all->group);
    move_array(move, from->above, to->above, STATISTIC_ABOVE_BITS / 8, 1);
    move_array(move, from->entropy, to->entropy, sizeof *to->entropy, 1);
    move_array(move, from->output_norm, to->output_norm, sizeof *to->output_norm, 1);
    move_array(move, from->content_rows, to->content_rows, sizeof *to->content_rows, to->content + 2);
    if (from->outputs != NULL && to->outputs != NULL && from->outputs != to->outputs)
        memcpy(to->outputs, from->outputs, outputs * sizeof *to->outputs);
    if (from->standard != NULL && to->standard != NULL && from->standard != to->standard)
        memcpy(to->standard, from->standard, STATISTIC_STANDARD_NUMBERS * sizeof *to->standard);
}

static void move_chunk(void *context, uint32_t chunk, uint32_t thread) {
    const struct moves *all = context;
    (void)thread;
    uint32_t end = (chunk + 1) * MOVES_A_CHUNK;
    for (uint32_t i = chunk * MOVES_A_CHUNK; i < end && i < all->count; i++)
        move_head(all, &all->moves[i]);
}

void cpu_move_statistics(
    struct backend *backend, const struct statistics_move *moves, uint32_t count, uint32_t group, uint32_t head_dim) {
    struct moves all = {moves, count, group, head_dim};
    thread_pool_run(cpu_backend(backend)->threads, (count + MOVES_A_CHUNK - 1) / MOVES_A_CHUNK, move_chunk, &all);
}
