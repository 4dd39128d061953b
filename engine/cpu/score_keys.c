/* SPDX-License-Identifier: Apache-2.0
 *
 * Scores from keys, and the norm of values. Keys are read a page at a time as a block, one slot a lane.
 */
#include "engine/cpu/score.h"

#include <math.h>

static void keys_of_page(const struct score_unit *unit, const struct kv_head_view *view, uint32_t slot, float *block) {
    const struct kv_layout *layout = &unit->pool->layout;
    unit->kernels->formats[layout->format].keys(score_page(unit, view, slot), layout->head_dim, block);
}

void score_key_norm(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    float *keys = unit->scratch->blocks;
    (void)stage;
    for (uint32_t slot = 0; slot < at->view.slots; slot += KV_PAGE_SLOTS) {
        double squares[SCORE_LANES];
        keys_of_page(unit, &at->view, slot, keys);
        unit->kernels->squares(keys, unit->pool->layout.head_dim, squares);
        for (uint32_t lane = 0; lane < score_page_slots(&at->view, slot); lane++)
            at->scores[slot + lane] = (float)-sqrt(squares[lane]);
    }
}

/* Adds the normalised keys of a page, and notes their norms. A key of no length points nowhere. */
static void add_directions(const struct score_unit *unit, const struct score_head *at, const int32_t *positions,
    uint32_t slot, const float *keys, double *norms, double *anchor) {
    double squares[SCORE_LANES], part[SCORE_LANES] = {0};
    unit->kernels->squares(keys, unit->pool->layout.head_dim, squares);
    for (uint32_t lane = 0; lane < score_page_slots(&at->view, slot); lane++) {
        norms[slot + lane] = sqrt(squares[lane]);
        if (positions[slot + lane] != KV_NO_POSITION && norms[slot + lane] > 0)
            part[lane] = 1 / norms[slot + lane];
    }
    for (uint32_t c = 0; c < unit->pool->layout.head_dim; c++) {
        double sum = 0;
        for (uint32_t lane = 0; lane < SCORE_LANES; lane++)
            sum += part[lane] != 0 ? (double)keys[c * SCORE_LANES + lane] * part[lane] : 0;
        anchor[c] += sum;
    }
}

/* The anchor's direction is all that matters: the sum of directions serves as well as their mean. */
void score_key_difference(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    const int32_t *positions = unit->scratch->slots[head].positions;
    uint32_t dim = unit->pool->layout.head_dim;
    float *keys = unit->scratch->blocks, direction[ATTEND_DIM_MAX];
    double *norms = unit->scratch->wide, anchor[ATTEND_DIM_MAX] = {0}, length = 0;
    (void)stage;
    for (uint32_t slot = 0; slot < at->view.slots; slot += KV_PAGE_SLOTS) {
        keys_of_page(unit, &at->view, slot, keys);
        add_directions(unit, at, positions, slot, keys, norms, anchor);
    }
    for (uint32_t c = 0; c < dim; c++)
        length += anchor[c] * anchor[c];
    length = sqrt(length);
    for (uint32_t c = 0; c < dim; c++)
        direction[c] = (float)(length > 0 ? anchor[c] / length : 0);
    for (uint32_t slot = 0; slot < at->view.slots; slot += KV_PAGE_SLOTS) {
        double dots[SCORE_LANES];
        keys_of_page(unit, &at->view, slot, keys);
        unit->kernels->exact_products(keys, SCORE_LANES, direction, dim, 1, 1, dim, dots);
        for (uint32_t lane = 0; lane < score_page_slots(&at->view, slot); lane++)
            at->scores[slot + lane] = (float)(norms[slot + lane] > 0 ? -dots[lane] / norms[slot + lane] : 0);
    }
}
