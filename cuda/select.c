/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/select.h"

#include "policy/budget.h"

#include <stdlib.h>

/* Rows as they are staged: their groups are found on the way. */
struct select_plan {
    const struct cuda_select_rows *rows;
    enum policy_scope scope;
    float floor_part;
    uint32_t shared_floor; /* scope model */
};

static bool competes(const struct select_row *row) {
    return row->budget != BUDGET_ALL;
}

static uint32_t mean_budget(const struct cuda_select_rows *rows) {
    uint64_t sum = 0, count = 0;
    for (uint32_t r = 0; r < rows->count; r++) {
        sum += competes(&rows->rows[r]) ? rows->rows[r].budget : 0;
        count += competes(&rows->rows[r]);
    }
    return count > 0 ? (uint32_t)(sum / count) : 0;
}

/* Whether a row is of the group of the last one that competes. */
static bool same_group(const struct select_plan *plan, const struct select_row *last, const struct select_row *row) {
    return last != NULL && (plan->scope == SCOPE_MODEL || (plan->scope == SCOPE_LAYER && last->layer == row->layer));
}

/* Groups are written once they are whole: staged memory must not be read. A row that keeps everything between two of a
 * group belongs to it in number alone. */
static uint32_t plan_groups(
    const struct select_plan *plan, struct cuda_select_group *groups, uint32_t *group_of, bool *compete) {
    const struct select_row *last = NULL;
    struct cuda_select_group group = {0};
    uint32_t count = 0;
    *compete = false;
    for (uint32_t r = 0; r < plan->rows->count; r++) {
        const struct select_row *row = &plan->rows->rows[r];
        if (competes(row) && same_group(plan, last, row)) {
            group.count++;
            group.total += row->budget;
            *compete = true;
        } else if (competes(row)) {
            if (last != NULL)
                groups[count++] = group;
            group = (struct cuda_select_group){.first = r, .count = 1, .total = row->budget};
        }
        last = competes(row) ? row : last;
        group_of[r] = count;
    }
    groups[count++] = group;
    return count;
}

static void stage_rows(
    const struct select_plan *plan, const uint32_t *group_of, struct cuda_stage *stage, struct cuda_select_row *to) {
    const struct cuda_select_rows *rows = plan->rows;
    for (uint32_t r = 0; r < rows->count; r++) {
        const struct select_row *row = &rows->rows[r];
        uint32_t floor = plan->scope == SCOPE_MODEL ? plan->shared_floor : budget_part(plan->floor_part, row->budget);
        to[r] = (struct cuda_select_row){
            .view = cuda_view_stage(stage, &rows->views[r]),
            .scores = rows->scores[r],
            .keep = rows->keep[r],
            .kept = rows->kept + r,
            .budget = competes(row) ? (int64_t)row->budget : SELECT_ALL,
            .floor = competes(row) ? floor : 0,
            .group = group_of[r],
        };
    }
}

int cuda_select_slots(struct cuda_backend *cuda, const struct kv_pool *pool, const struct cuda_select_rows *rows,
    enum policy_scope scope, float floor_part, struct cuda_scratch *scratch, struct error *error) {
    cuda_backend(&cuda->base); /* what waits in the queue changes positions */
    struct select_plan plan = {rows, scope, floor_part, UINT32_MAX};
    struct cuda_select_call call = {.pool = *pool, .rows_count = rows->count};
    struct cuda_stage stage;
    size_t row_states = rows->count * sizeof *call.row_states, group_states = rows->count * sizeof *call.group_states;
    size_t bytes =
        cuda_stage_size(rows->count * sizeof *call.rows) + cuda_stage_size(rows->count * sizeof *call.groups);
    uint32_t *group_of = malloc(rows->count * sizeof *group_of + 1);
    for (uint32_t r = 0; r < rows->count; r++) {
        bytes += cuda_view_bytes(&rows->views[r]);
        call.slots_most = rows->views[r].slots > call.slots_most ? rows->views[r].slots : call.slots_most;
    }
    char *states = group_of != NULL ? cuda_scratch_reserve(cuda, scratch, row_states + group_states) : NULL;
    if (states == NULL || rows->count == 0 || !cuda_stage_begin(cuda, bytes, &stage)) {
        free(group_of);
        return rows->count == 0 ? 0 : error_set(error, ERROR_MEMORY, "no memory to select slots");
    }
    if (scope == SCOPE_MODEL)
        plan.shared_floor = budget_part(floor_part, mean_budget(rows));
    const void *at;
    struct cuda_select_group *groups = cuda_stage_add(&stage, rows->count * sizeof *groups, &at);
    call.groups = at;
    call.groups_count = plan_groups(&plan, groups, group_of, &call.compete);
    struct cuda_select_row *to = cuda_stage_add(&stage, rows->count * sizeof *to, &at);
    call.rows = at;
    stage_rows(&plan, group_of, &stage, to);
    free(group_of);
    cuda_stage_send(cuda, &stage);
    call.row_states = (struct cuda_select_row_state *)states;
    call.group_states = (struct cuda_select_group_state *)(states + row_states);
    cuda_check(cuda, cudaMemsetAsync(states, 0, row_states + group_states, cuda->stream), "select");
    launch_select(&call, cuda->stream);
    cuda_check_launch(cuda, "select");
    return 0;
}
