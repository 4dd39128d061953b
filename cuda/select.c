/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/select.h"

#include "cuda/cuda_backend.h"
#include "policy/budget.h"

#include <stdlib.h>

enum { WORD_SLOTS = 32, ROW_WORDS = 8 /* a row's words begin at a multiple of as many: whole sectors */ };

/* What is kept from call to call (cuda->select). */
struct select_state {
    struct cuda_scratch states, stays;
    uint32_t *words; /* pinned host memory: where results stay until the next call */
    size_t words_room;
};

/* All rows of a call, selection by selection. */
struct select_plan {
    const struct selection *selections;
    uint32_t selections_count, rows_count;
    uint32_t *group_of;               /* [rows_count] */
    struct cuda_select_group *groups; /* [rows_count at most] */
    uint32_t groups_count;
    size_t words; /* of all rows */
};

static struct select_state *select_state_get(struct cuda_backend *cuda) {
    if (cuda->select == NULL)
        cuda->select = calloc(1, sizeof(struct select_state));
    return cuda->select;
}

void cuda_select_free(struct cuda_backend *cuda) {
    struct select_state *state = cuda->select;
    if (state == NULL)
        return;
    cuda_scratch_free(&state->states);
    cuda_scratch_free(&state->stays);
    cudaFreeHost(state->words);
    free(state);
    cuda->select = NULL;
}

static size_t words_of(uint32_t slots) {
    return ((size_t)slots + WORD_SLOTS * ROW_WORDS - 1) / (WORD_SLOTS * ROW_WORDS) * ROW_WORDS;
}

/* ---- groups ---- */

static bool competes(const struct selected_row *row) {
    return row->budget != BUDGET_ALL;
}

static uint32_t mean_budget(const struct selection *selection) {
    uint64_t sum = 0, count = 0;
    for (uint32_t r = 0; r < selection->rows_count; r++) {
        sum += competes(&selection->rows[r]) ? selection->rows[r].budget : 0;
        count += competes(&selection->rows[r]);
    }
    return count > 0 ? (uint32_t)(sum / count) : 0;
}

/* Slots that are safe in a row, when it competes with others. */
static uint32_t row_floor(const struct selection *selection, uint32_t shared, const struct selected_row *row) {
    return selection->scope == SCOPE_MODEL ? shared : budget_part(selection->floor_part, row->budget);
}

/* Rows of a selection from `r` on that compete with one another, up to *end; returns how many. Others may lie between
 * them. */
static uint32_t group_rows(const struct selection *selection, uint32_t r, uint32_t *end, uint64_t *total) {
    const struct selected_row *rows = selection->rows;
    uint32_t count = 0, first = r;
    *total = 0;
    *end = r + 1;
    for (; r < selection->rows_count; r++) {
        if (r > first &&
            (selection->scope == SCOPE_HEAD || (selection->scope == SCOPE_LAYER && rows[r].layer != rows[first].layer)))
            break;
        *end = r + 1;
        count += competes(&rows[r]);
        *total += competes(&rows[r]) ? rows[r].budget : 0;
    }
    return count;
}

static void plan_groups(struct select_plan *plan) {
    uint32_t at = 0; /* the selection's first row */
    for (uint32_t i = 0; i < plan->selections_count; i++) {
        const struct selection *selection = &plan->selections[i];
        for (uint32_t r = 0, end; r < selection->rows_count; r = end) {
            uint64_t total;
            uint32_t count = group_rows(selection, r, &end, &total);
            bool alone = count < 2;
            for (uint32_t row = r; row < end; row++)
                plan->group_of[at + row] =
                    alone || !competes(&selection->rows[row]) ? (uint32_t)SELECT_ALONE : plan->groups_count;
            if (!alone)
                plan->groups[plan->groups_count++] = (struct cuda_select_group){total, at + r, count};
        }
        at += selection->rows_count;
    }
}

static bool plan_create(struct select_plan *plan) {
    for (uint32_t i = 0; i < plan->selections_count; i++)
        plan->rows_count += plan->selections[i].rows_count;
    plan->group_of = malloc(plan->rows_count * sizeof *plan->group_of + 1);
    plan->groups = malloc(plan->rows_count * sizeof *plan->groups + 1);
    if (plan->group_of == NULL || plan->groups == NULL)
        return false;
    plan_groups(plan);
    return true;
}

static void plan_free(struct select_plan *plan) {
    free(plan->group_of);
    free(plan->groups);
}

/* ---- staging ---- */

/* Bytes of the stage; measures the words of all rows, and the longest row. */
static size_t measure(struct select_plan *plan, struct cuda_select_call *call) {
    size_t bytes = cuda_stage_size(plan->rows_count * sizeof *call->rows) +
                   cuda_stage_size(plan->groups_count * sizeof *call->groups);
    for (uint32_t i = 0; i < plan->selections_count; i++) {
        const struct selection *selection = &plan->selections[i];
        for (uint32_t r = 0; r < selection->rows_count; r++) {
            const struct kv_head_view *view = &selection->rows[r].view;
            bytes += cuda_view_bytes(view);
            plan->words += words_of(view->slots);
            call->slots_most = view->slots > call->slots_most ? view->slots : call->slots_most;
        }
    }
    return bytes;
}

/* Rows, in staged memory that must not be read; results at the same places of `stays` and of `words`. */
static void stage_rows(const struct select_plan *plan, uint32_t *stays, const uint32_t *words, struct cuda_stage *stage,
    struct cuda_select_row *to) {
    const uint32_t *group_of = plan->group_of;
    for (uint32_t i = 0; i < plan->selections_count; i++) {
        const struct selection *selection = &plan->selections[i];
        uint32_t shared = budget_part(selection->floor_part, mean_budget(selection));
        for (uint32_t r = 0; r < selection->rows_count; r++) {
            struct selected_row *row = &selection->rows[r];
            *to++ = (struct cuda_select_row){
                .view = cuda_view_stage(stage, &row->view),
                .scores = row->scores,
                .stays = stays,
                .budget = row->budget,
                .floor = competes(row) ? row_floor(selection, shared, row) : 0,
                .group = *group_of++,
            };
            row->stays = words;
            stays += words_of(row->view.slots);
            words += words_of(row->view.slots);
        }
    }
}

/* ---- the operation ---- */

static bool reserve_words(struct select_state *state, size_t count) {
    void *memory = NULL;
    if (count <= state->words_room)
        return true;
    cudaFreeHost(state->words);
    state->words_room = 0;
    if (cudaHostAlloc(&memory, 2 * count * sizeof *state->words, cudaHostAllocDefault) != cudaSuccess) {
        cudaGetLastError();
        memory = NULL;
    }
    state->words = memory;
    state->words_room = memory != NULL ? 2 * count : 0;
    return memory != NULL;
}

static bool run(
    struct cuda_backend *cuda, struct select_state *state, struct select_plan *plan, struct cuda_select_call *call) {
    size_t bytes = measure(plan, call), row_states = plan->rows_count * sizeof *call->row_states;
    size_t group_states = plan->groups_count * sizeof *call->group_states, words = plan->words * sizeof(uint32_t);
    struct cuda_stage stage;
    const void *rows;
    char *states = cuda_scratch_reserve(cuda, &state->states, row_states + group_states);
    uint32_t *stays = cuda_scratch_reserve(cuda, &state->stays, words);
    if (states == NULL || stays == NULL || !reserve_words(state, plan->words) || !cuda_stage_begin(cuda, bytes, &stage))
        return false;
    call->groups = cuda_stage_copy(&stage, plan->groups, plan->groups_count * sizeof *plan->groups);
    struct cuda_select_row *to = cuda_stage_add(&stage, plan->rows_count * sizeof *to, &rows);
    stage_rows(plan, stays, state->words, &stage, to);
    cuda_stage_send(cuda, &stage);
    call->rows = rows;
    call->rows_count = plan->rows_count;
    call->groups_count = plan->groups_count;
    call->row_states = (struct cuda_select_row_state *)states;
    call->group_states = (struct cuda_select_group_state *)(states + row_states);
    if (plan->groups_count > 0)
        cuda_check(cuda, cudaMemsetAsync(states, 0, row_states + group_states, cuda->stream), "select");
    launch_select(call, cuda->stream);
    cuda_check_launch(cuda, "select");
    cuda_check(cuda, cudaMemcpyAsync(state->words, stays, words, cudaMemcpyDeviceToHost, cuda->stream), "select");
    cuda_wait(cuda);
    return true;
}

int cuda_select(struct backend *backend, const struct kv_pool *pool, const struct selection *selections, uint32_t count,
    struct error *error) {
    struct cuda_backend *cuda = cuda_backend(backend);
    struct select_state *state = select_state_get(cuda);
    struct select_plan plan = {.selections = selections, .selections_count = count};
    struct cuda_select_call call = {.pool = *pool};
    bool done = state != NULL && plan_create(&plan) && (plan.rows_count == 0 || run(cuda, state, &plan, &call));
    plan_free(&plan);
    return done ? 0 : error_set(error, ERROR_MEMORY, "no memory to select slots");
}
