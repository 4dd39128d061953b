/* SPDX-License-Identifier: Apache-2.0
 *
 * Which slots stay, on the device (backend.h, select): what policy/select.h defines, with the same ties, from scores
 * and positions that are there already. Exact: radix selection, no sorting. A slot comes to the host as one bit.
 *
 * Rows that compete form a group, and come in ascending order of layer and head. What a group may keep in all is the
 * sum of its rows' budgets; floors are the host's to compute (budget_part). A row that competes with none, or keeps
 * everything, is done by one block at once. Others first mark what is safe in each row, then find the group's last key
 * that stays by six launches, one a digit, each of which does nothing for groups that are done.
 */
#ifndef CUDA_SELECT_H
#define CUDA_SELECT_H

#include "cuda/views.h"

#include <cuda_runtime_api.h>

enum { SELECT_ALONE = 0xffffffffu /* group: none */ };

/* One row's slots. Device addresses. */
struct cuda_select_row {
    struct cuda_head_view view;
    const float *scores; /* [slots] */
    uint32_t *stays;     /* [(slots + 31) / 32] out: bits of slots that stay; 32-byte aligned */
    uint32_t budget;     /* of a row that is alone; UINT32_MAX: everything stays */
    uint32_t floor;      /* slots that are safe when rows compete */
    uint32_t group;      /* of rows that compete with others */
    uint32_t padding;
};

/* `count` rows from `first` on; between them may lie some that are alone. */
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
};

#ifdef __cplusplus
extern "C" {
#endif

void launch_select(const struct cuda_select_call *call, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
