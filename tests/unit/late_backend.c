/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/late_backend.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "engine/cpu/attend.h"
#include "policy/select.h"

enum { LATE_MAX = 4096 };

static const struct backend_operations *plain;
static struct backend_operations operations;
static struct late_counts counts;
static bool busy, fails;

/* Slots that were found, and where they are awaited. */
static uint32_t late_count, numbers[LATE_MAX], *places[LATE_MAX];

static uint32_t *stays; /* of the last selection */

/* ---- waiting ---- */

static void deliver(void) {
    for (uint32_t i = 0; i < late_count; i++)
        *places[i] = numbers[i];
    late_count = 0;
    counts.waits += busy;
    busy = false;
}

static void late_synchronize(struct backend *backend) {
    plain->synchronize(backend);
    deliver();
}

static void late_download(struct backend *backend, void *to, const void *from, size_t bytes) {
    busy = true;
    plain->download(backend, to, from, bytes);
    deliver();
}

static void late_sample(struct backend *backend, const float *logits, uint32_t rows, uint32_t vocabulary,
    const struct sample_params *params, struct sample_result *results) {
    busy = true;
    plain->sample(backend, logits, rows, vocabulary, params, results);
    deliver();
}

static void late_preference(struct backend *backend, const struct kv_pool *pool, const struct score_layer *layers,
    uint32_t count, uint32_t heads, double *entropy, double *variance) {
    busy = true;
    plain->window_preference(backend, pool, layers, count, heads, entropy, variance);
    deliver();
}

static void late_attend(
    struct backend *backend, const struct kv_batch *batch, uint32_t heads, const float *qkv, float *out) {
    busy = true;
    assert_null(batch->scored);
    plain->attend(backend, batch, heads, qkv, out);
}

static void late_move_statistics(
    struct backend *backend, const struct statistics_move *moves, uint32_t count, uint32_t group, uint32_t head_dim) {
    busy = true;
    counts.moves++;
    plain->move_statistics(backend, moves, count, group, head_dim);
}

/* ---- scores ---- */

/* A layer's heads as a device sees them. Their slots that go are kept apart. */
static void take_heads(const struct score_layer *layer, uint32_t kv_heads, struct score_head *out) {
    for (uint32_t k = 0; k < kv_heads; k++) {
        out[k] = layer->heads[k];
        out[k].positions = out[k].order = NULL;
        assert_null(layer->heads[k].order); /* the host need not keep it */
        if (out[k].worst == NULL)
            continue;
        assert_true(late_count < LATE_MAX);
        places[late_count] = out[k].worst;
        out[k].worst = &numbers[late_count++];
    }
}

static int late_score(struct backend *backend, const struct kv_pool *pool, const struct score_layer *layers,
    uint32_t count, uint32_t heads, struct error *error) {
    uint32_t kv_heads = pool->layout.kv_heads, before = late_count;
    struct score_layer *copies = malloc(count * sizeof *copies);
    struct score_head *copied = malloc((size_t)count * kv_heads * sizeof *copied);
    assert_true(copies != NULL && copied != NULL);
    busy = true;
    counts.scores += count;
    for (uint32_t i = 0; i < count; i++) {
        copies[i] = layers[i];
        copies[i].heads = copied + (size_t)i * kv_heads;
        take_heads(&layers[i], kv_heads, copied + (size_t)i * kv_heads);
    }
    int code = plain->score(backend, pool, copies, count, heads, error);
    late_count = code == 0 ? late_count : before;
    free(copies);
    free(copied);
    return code;
}

/* ---- selection ---- */

static void read_row(const struct kv_pool *pool, const struct selected_row *row, uint32_t *positions, uint32_t *keep,
    struct select_row *out) {
    for (uint32_t slot = 0; slot < row->view.slots; slot++) {
        char *page = (char *)pool->base + row->view.pages[slot / KV_PAGE_SLOTS] * pool->page_bytes;
        positions[slot] = (uint32_t)kv_page_positions(&pool->layout, page)[slot % KV_PAGE_SLOTS];
    }
    *out = (struct select_row){.layer = row->layer,
        .head = row->head,
        .slots = row->view.slots,
        .budget = row->budget,
        .scores = row->scores,
        .positions = positions,
        .keep = keep};
}

static void select_one(const struct kv_pool *pool, const struct selection *selection, uint32_t *words) {
    struct select_row *rows = calloc(selection->rows_count, sizeof *rows);
    struct select_scratch scratch = {0};
    size_t slots = 0, at = 0;
    for (uint32_t r = 0; r < selection->rows_count; r++)
        slots += selection->rows[r].view.slots;
    uint32_t *positions = malloc((slots + 1) * sizeof *positions), *keep = malloc((slots + 1) * sizeof *keep);
    for (uint32_t r = 0; r < selection->rows_count; at += selection->rows[r++].view.slots)
        read_row(pool, &selection->rows[r], positions + at, keep + at, &rows[r]);
    assert_int_equal(
        select_slots(rows, selection->rows_count, selection->scope, selection->floor_part, &scratch, NULL), 0);
    for (uint32_t r = 0; r < selection->rows_count; r++) {
        selection->rows[r].stays = words;
        for (uint32_t i = 0; i < rows[r].kept; i++)
            words[rows[r].keep[i] / 32] |= 1u << rows[r].keep[i] % 32;
        words += (rows[r].slots + 31) / 32;
    }
    select_scratch_free(&scratch);
    free(positions);
    free(keep);
    free(rows);
}

static size_t words_of(const struct selection *selection) {
    size_t words = 0;
    for (uint32_t r = 0; r < selection->rows_count; r++)
        words += (selection->rows[r].view.slots + 31) / 32;
    return words;
}

static int late_select(struct backend *backend, const struct kv_pool *pool, const struct selection *selections,
    uint32_t count, struct error *error) {
    size_t words = 0, at = 0;
    (void)backend;
    if (fails)
        return error_set(error, ERROR_MEMORY, "no memory to select");
    busy = true;
    counts.selections += count;
    for (uint32_t i = 0; i < count; i++)
        words += words_of(&selections[i]);
    free(stays);
    stays = calloc(words + 1, sizeof *stays);
    for (uint32_t i = 0; i < count; at += words_of(&selections[i++]))
        select_one(pool, &selections[i], stays + at);
    deliver();
    return 0;
}

/* ---- operations ---- */

void late_backend_begin(struct backend *backend) {
    plain = backend->operations;
    operations = *plain;
    operations.host_memory = false;
    operations.synchronize = late_synchronize;
    operations.download = late_download;
    operations.sample = late_sample;
    operations.window_preference = late_preference;
    operations.attend = late_attend;
    operations.attend_scores = NULL;
    operations.score = late_score;
    operations.select = late_select;
    operations.move_statistics = late_move_statistics;
    backend->operations = &operations;
    busy = fails = false;
    counts = (struct late_counts){0};
}

void late_backend_end(struct backend *backend) {
    assert_int_equal(late_count, 0);
    backend->operations = plain;
    free(stays);
    stays = NULL;
}

struct late_counts late_backend_counts(void) {
    struct late_counts found = counts;
    counts = (struct late_counts){0};
    return found;
}

void late_backend_fail_select(bool fail) {
    fails = fail;
}
