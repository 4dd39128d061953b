/* SPDX-License-Identifier: Apache-2.0
 *
 * Which slots stay, on the device: what policy/select.h defines, with the same ties, from scores and positions that are
 * there already, so that a decode step needs no answer from the host. Exact: radix selection, no sorting.
 *
 * Rows that compete form a group, and come in ascending order of layer and head. What a row's group may keep in all is
 * the sum of its budgets; floors are the host's to compute (budget_part). A row that competes with none, or keeps
 * everything, is done by one block at once. Others first mark what is safe in each row, then find the group's last key
 * that stays by six launches, one a digit, each of which does nothing for groups that are done.
 */
#ifndef CUDA_SELECT_H
#define CUDA_SELECT_H

#include "cuda/views.h"

#include <cuda_runtime_api.h>

enum { SELECT_ALL = -1 /* budget: everything stays, and the row takes no part in the competition */ };

/* One row's slots. Device addresses. */
struct cuda_select_row {
    struct cuda_head_view view;
    const float *scores; /* [slots] */
    uint32_t *keep;      /* [slots] out: slots that stay, ascending */
    uint32_t *kept;      /* [1] out: how many */
    int64_t budget;      /* slots, or SELECT_ALL */
    uint32_t floor;      /* slots that are safe when rows compete */
    uint32_t group;
};

/* Rows first .. first + count - 1. */
struct cuda_select_group {
    uint64_t total; /* slots that stay, of all rows */
    uint32_t first, count;
};

/* What launches hand on, zero to begin with. */
struct cuda_select_row_state {
    uint64_t safe_from; /* keys from here on are safe by the floor */
    uint32_t present;   /* slots that are not empty */
    uint32_t tie;       /* one of them has the group's last key */
};

struct cuda_select_group_state {
    uint64_t found;    /* leading digits of the last key that stays */
    uint32_t present;  /* slots that are not empty */
    uint32_t rank;     /* of the key among those with these digits; after the last digit: how many ties stay */
    uint32_t arrived;  /* blocks of a launch */
    uint32_t complete; /* all keys with these digits stay: nothing is left to find */
    uint32_t histogram[2048];
};

struct cuda_select_call {
    struct kv_pool pool; /* positions are read from its pages */
    const struct cuda_select_row *rows;
    const struct cuda_select_group *groups;
    struct cuda_select_row_state *row_states;
    struct cuda_select_group_state *group_states;
    uint32_t rows_count, groups_count;
    uint32_t slots_most; /* of a row */
    bool compete;        /* some group has more than one row */
};

#ifdef __cplusplus
extern "C" {
#endif

void launch_select(const struct cuda_select_call *call, cudaStream_t stream);

#ifdef __cplusplus
}
#else

#include "cuda/cuda_backend.h"
#include "policy/select.h"

/* select_slots for rows whose scores are on the device: views [rows_count] are the host's, scores and keep device
 * [slots] each, kept device [rows_count]. rows: layer, head and budget are read, nothing is written. Does not wait. */
struct cuda_select_rows {
    const struct select_row *rows;
    const struct kv_head_view *views;
    const float *const *scores;
    uint32_t *const *keep;
    uint32_t *kept;
    uint32_t count;
};
int cuda_select_slots(struct cuda_backend *cuda, const struct kv_pool *pool, const struct cuda_select_rows *rows,
    enum policy_scope scope, float floor_part, struct cuda_scratch *scratch, struct error *error);

#endif

#endif
