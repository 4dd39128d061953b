/* SPDX-License-Identifier: Apache-2.0
 *
 * Which slots stay: selection within a head, over a layer's heads or over the whole model. Pure; no backend.
 *
 * Order: score descending (+infinity: protected; NaN counts as -infinity), then position descending, then layer, then
 * head ascending. Scopes layer and model: first the `floor` best slots of every row and all protected ones, then the
 * best of what is left, until the total is reached. A row is one head's slots, or one layer's when all its heads hold
 * the same slots (policy.shared).
 */
#ifndef POLICY_SELECT_H
#define POLICY_SELECT_H

#include "policy/policy.h"

struct select_row {
    uint32_t layer, head;
    uint32_t slots;
    uint32_t budget;           /* BUDGET_ALL: everything stays, and the row takes no part in the competition */
    const float *scores;       /* [slots] */
    const uint32_t *positions; /* [slots] original positions, distinct; KV_NO_POSITION: an empty slot, never kept */
    /* Out. */
    uint32_t kept;
    uint32_t *keep; /* [slots] the kept slots, ascending by slot */
};

struct select_scratch { /* zero to begin with; grows; select_scratch_free */
    void *memory;
    size_t bytes;
};
void select_scratch_free(struct select_scratch *scratch);

/* Fills kept and keep of every row. Rows that compete: each alone (SCOPE_HEAD), those of one layer (SCOPE_LAYER; rows
 * of a layer are neighbours), all (SCOPE_MODEL). The total of competing rows is the sum of their budgets; when their
 * slots do not exceed it, all stay. floor of a row: budget_part(floor_part, budget), SCOPE_MODEL with the mean budget
 * of all rows that compete, rounded down. O(slots) whatever the scores: what a decode step drops, one slot of a row
 * alone, comes from the backend instead (score_head.worst). ERROR_MEMORY: kept and keep are undefined. */
int select_slots(struct select_row *rows, uint32_t rows_count, enum policy_scope scope, float floor_part,
    struct select_scratch *scratch, struct error *error);

#endif
