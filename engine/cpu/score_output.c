/* SPDX-License-Identifier: Apache-2.0
 *
 * Scores that weigh what a slot adds to the layer's output: u_{h,i} = v_i W_h.
 *
 * No u is ever formed: lengths of v W_h are those of F_h v, products of two are v_i^T (W_h W_g^T) v_j (score_state.h).
 */
#include "engine/cpu/score_state.h"

#include <math.h>
#include <string.h>

/* ---- norm of the layer's output over the window ---- */

/* Outputs of up to sixteen queries of the window as a block [H * d][16], ring rows first .. first + count - 1. */
static void outputs_block(const struct score_unit *unit, uint32_t first, uint32_t count, float *block) {
    uint32_t row = unit->group * unit->pool->layout.head_dim;
    memset(block, 0, (size_t)unit->heads * unit->pool->layout.head_dim * SCORE_LANES * sizeof *block);
    for (uint32_t head = 0; head < unit->pool->layout.kv_heads; head++) {
        const float *outputs = unit->layer->heads[head].statistics.outputs + (size_t)first * row;
        for (uint32_t t = 0; t < count; t++) {
            for (uint32_t c = 0; c < row; c++)
                block[((size_t)head * row + c) * SCORE_LANES + t] = outputs[(size_t)t * row + c];
        }
    }
}

/* Sum of squares of some rows of W_o times a block of outputs. */
static double rows_squares(
    const struct score_unit *unit, const float *rows, uint32_t rows_count, const float *block, float *products) {
    uint32_t columns = unit->layer->output->columns;
    double squares[SCORE_LANES], sum = 0;
    unit->kernels->products(block, SCORE_LANES, rows, columns, 1, rows_count, columns, false, products);
    unit->kernels->squares(products, rows_count, squares);
    for (uint32_t lane = 0; lane < SCORE_LANES; lane++)
        sum += squares[lane];
    return sum;
}

/* Frobenius norm of the outputs of the window's queries: W_o is read once, some rows at a time. */
static double window_output_norm(const struct score_unit *unit) {
    const struct tensor *output = unit->layer->output;
    uint32_t queries = score_window_rows(unit, &unit->layer->heads[0].statistics);
    float *rows = unit->scratch->blocks, *products = rows + (size_t)SCORE_MATRIX_ROWS * output->columns;
    float *blocks = products + (size_t)SCORE_MATRIX_ROWS * SCORE_LANES;
    size_t block_floats = (size_t)output->columns * SCORE_LANES;
    double sum = 0;
    for (uint32_t t = 0; t < queries; t += SCORE_LANES)
        outputs_block(
            unit, t, queries - t < SCORE_LANES ? queries - t : SCORE_LANES, blocks + t / SCORE_LANES * block_floats);
    for (uint32_t row = 0; row < output->rows; row += SCORE_MATRIX_ROWS) {
        uint32_t left = output->rows - row, count = left < SCORE_MATRIX_ROWS ? left : SCORE_MATRIX_ROWS;
        for (uint32_t i = 0; i < count; i++)
            tensor_dequantise_row(output, row + i, rows + (size_t)i * output->columns);
        for (uint32_t t = 0; t < queries; t += SCORE_LANES)
            sum += rows_squares(unit, rows, count, blocks + t / SCORE_LANES * block_floats, products);
    }
    return sqrt(sum);
}

/* ---- laprox ---- */

/* Where a page's numbers lie in scratch. */
struct laprox_space {
    float *values;   /* [K][d][16] */
    float *products; /* [d][16] */
    float *p;        /* [H][window][16] */
};

/* Values and probabilities of KV head k at the slots of one page. */
static void laprox_load(const struct score_unit *unit, uint32_t k, uint32_t slot, const struct laprox_space *space) {
    const struct score_head *at = &unit->layer->heads[k];
    const struct kv_statistics *statistics = &at->statistics;
    uint32_t queries = score_window_rows(unit, statistics), dim = unit->pool->layout.head_dim;
    score_page_values(unit, &at->view, slot, space->values + (size_t)k * dim * SCORE_LANES);
    for (uint32_t g = 0; g < unit->group; g++) {
        float *p = space->p + (size_t)(k * unit->group + g) * queries * SCORE_LANES;
        const uint16_t *rows = statistics->head_rows + (size_t)g * statistics->capacity + slot;
        for (uint32_t t = 0; t < queries; t++)
            unit->kernels->halves(rows + (size_t)t * unit->group * statistics->capacity, p + (size_t)t * SCORE_LANES);
    }
}

/* Adds (sum over t of p_h p_g) u_h . u_g of a pair of heads, twice for two different ones. */
static void laprox_pair(
    const struct score_unit *unit, uint32_t h, uint32_t g, const struct laprox_space *space, double *total) {
    uint32_t dim = unit->pool->layout.head_dim;
    uint32_t queries = score_window_rows(unit, &unit->layer->heads[0].statistics);
    size_t p_floats = (size_t)queries * SCORE_LANES, value_floats = (size_t)dim * SCORE_LANES;
    const float *of_h = space->values + h / unit->group * value_floats;
    const float *of_g = space->values + g / unit->group * value_floats;
    double weight[SCORE_LANES], length[SCORE_LANES];
    unit->kernels->dots(space->p + h * p_floats, space->p + g * p_floats, queries, weight);
    if (h == g) {
        const float *factor = unit->matrix->factors + (size_t)h * dim * dim;
        unit->kernels->products(of_h, SCORE_LANES, factor, dim, 1, dim, dim, true, space->products);
        unit->kernels->squares(space->products, dim, length);
    } else {
        const float *gram = unit->matrix->grams[(size_t)h * unit->heads + g];
        unit->kernels->products(of_g, SCORE_LANES, gram, dim, 1, dim, dim, false, space->products);
        unit->kernels->dots(of_h, space->products, dim, length);
    }
    for (uint32_t lane = 0; lane < SCORE_LANES; lane++)
        total[lane] += (h == g ? 1 : 2) * weight[lane] * length[lane];
}

static void laprox_page(const struct score_unit *unit, uint32_t first, uint32_t end, uint32_t slot, double norm,
    const struct laprox_space *space, float *scores) {
    double total[SCORE_LANES] = {0};
    for (uint32_t k = first / unit->group; k * unit->group < end; k++)
        laprox_load(unit, k, slot, space);
    for (uint32_t h = first; h < end; h++) {
        for (uint32_t g = h; g < end; g++)
            laprox_pair(unit, h, g, space, total);
    }
    for (uint32_t lane = 0; lane < SCORE_LANES; lane++)
        scores[lane] = (float)(norm > 0 ? sqrt(total[lane] > 0 ? total[lane] : 0) / norm : 0);
}

/* Scores of the slots of KV head `of` by query heads [first, end). */
static void laprox_heads(const struct score_unit *unit, uint32_t of, uint32_t first, uint32_t end, double norm) {
    const struct score_head *at = &unit->layer->heads[of];
    uint32_t dim = unit->pool->layout.head_dim;
    struct laprox_space space = {.values = unit->scratch->blocks};
    space.products = space.values + (size_t)unit->pool->layout.kv_heads * dim * SCORE_LANES;
    space.p = space.products + (size_t)dim * SCORE_LANES;
    for (uint32_t slot = 0; slot < at->view.slots; slot += KV_PAGE_SLOTS) {
        float scores[SCORE_LANES];
        laprox_page(unit, first, end, slot, norm, &space, scores);
        memcpy(at->scores + slot, scores, score_page_slots(&at->view, slot) * sizeof *scores);
    }
}

void score_laprox(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *heads = unit->layer->heads;
    (void)stage;
    (void)head;
    laprox_heads(unit, 0, 0, unit->heads, window_output_norm(unit));
    for (uint32_t k = 1; k < unit->pool->layout.kv_heads; k++)
        memcpy(heads[k].scores, heads[0].scores, heads[0].view.slots * sizeof(float));
}

void score_laprox_head(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    double norm = window_output_norm(unit);
    (void)stage;
    (void)head;
    for (uint32_t k = 0; k < unit->pool->layout.kv_heads; k++)
        laprox_heads(unit, k, k * unit->group, (k + 1) * unit->group, norm);
}

/* ---- restkv's error ---- */

/* The window of one KV head, in order of time, and space for one page. */
struct drop_window {
    uint32_t queries;
    uint32_t *rows; /* [queries] ring rows */
    float *outputs; /* [G][queries][d] F_h o_h */
    float *excess;  /* [G][queries] sum of p over slots, less 1 */
    float *values;  /* [d][16] */
    float *turned;  /* [d][16] F_h times values; first the outputs of sixteen queries */
    float *squares; /* [queries][16] */
    float *total;   /* [queries][16] */
};

/* p is stored with 11 bits, and 1 - p of a large p would be mostly its rounding error. Over all slots p sums to 1, but
 * for what was evicted since: what the stored ones sum to beyond 1 is, within what rounding can be, that error. */
static float row_excess(const struct score_unit *unit, uint32_t head, const uint16_t *p) {
    const int32_t *positions = unit->scratch->slots[head].positions;
    uint32_t slots = unit->layer->heads[head].view.slots;
    float part[SCORE_LANES];
    double sum = 0;
    for (uint32_t slot = 0; slot < slots; slot += SCORE_LANES) {
        unit->kernels->halves(p + slot, part);
        for (uint32_t lane = 0; lane < SCORE_LANES && slot + lane < slots; lane++)
            sum += positions[slot + lane] != KV_NO_POSITION ? (double)part[lane] : 0; /* exact in any order */
    }
    return (float)(sum - 1);
}

/* F_h o_h of all queries of the window, sixteen at a time. */
static void turn_outputs(const struct score_unit *unit, uint32_t head, const struct drop_window *window, uint32_t g) {
    const struct kv_statistics *statistics = &unit->layer->heads[head].statistics;
    uint32_t dim = unit->pool->layout.head_dim;
    const float *factor = unit->matrix->factors + (size_t)(head * unit->group + g) * dim * dim;
    for (uint32_t first = 0; first < window->queries; first += SCORE_LANES) {
        uint32_t count = window->queries - first < SCORE_LANES ? window->queries - first : SCORE_LANES;
        memset(window->values, 0, (size_t)dim * SCORE_LANES * sizeof(float));
        for (uint32_t t = 0; t < count; t++) {
            const float *output = statistics->outputs + ((size_t)window->rows[first + t] * unit->group + g) * dim;
            for (uint32_t c = 0; c < dim; c++)
                window->values[c * SCORE_LANES + t] = output[c];
        }
        unit->kernels->products(window->values, SCORE_LANES, factor, dim, 1, dim, dim, true, window->turned);
        for (uint32_t t = 0; t < count; t++) {
            float *to = window->outputs + ((size_t)g * window->queries + first + t) * dim;
            for (uint32_t c = 0; c < dim; c++)
                to[c] = window->turned[c * SCORE_LANES + t];
        }
    }
}

static struct drop_window drop_window(const struct score_unit *unit, uint32_t head) {
    const struct kv_statistics *statistics = &unit->layer->heads[head].statistics;
    uint32_t dim = unit->pool->layout.head_dim, queries = score_window_rows(unit, statistics);
    struct drop_window window = {.queries = queries, .values = unit->scratch->blocks};
    window.turned = window.values + (size_t)dim * SCORE_LANES;
    window.squares = window.turned + (size_t)dim * SCORE_LANES;
    window.total = window.squares + (size_t)queries * SCORE_LANES;
    window.outputs = window.total + (size_t)queries * SCORE_LANES;
    window.excess = window.outputs + (size_t)unit->group * queries * dim;
    window.rows = (uint32_t *)(window.excess + (size_t)unit->group * queries);
    for (uint32_t t = 0; t < queries; t++)
        window.rows[t] = (unit->layer->seen - queries + t) % statistics->window;
    for (uint32_t g = 0; g < unit->group; g++) {
        turn_outputs(unit, head, &window, g);
        for (uint32_t t = 0; t < queries; t++) {
            size_t row = (size_t)window.rows[t] * unit->group + g;
            window.excess[g * queries + t] = row_excess(unit, head, statistics->head_rows + row * statistics->capacity);
        }
    }
    return window;
}

/* Errors of the slots of one page at all queries, and their smoothed end. */
static void drop_page(const struct score_unit *unit, uint32_t head, const struct drop_window *window, uint32_t slot,
    float smoothing, float *scores) {
    const struct score_head *at = &unit->layer->heads[head];
    const struct kv_statistics *statistics = &at->statistics;
    uint32_t dim = unit->pool->layout.head_dim, queries = window->queries;
    double smooth[SCORE_LANES];
    memset(window->total, 0, (size_t)queries * SCORE_LANES * sizeof(float));
    score_page_values(unit, &at->view, slot, window->values);
    for (uint32_t g = 0; g < unit->group; g++) {
        const float *factor = unit->matrix->factors + (size_t)(head * unit->group + g) * dim * dim;
        const float *outputs = window->outputs + (size_t)g * queries * dim;
        const uint16_t *p = statistics->head_rows + (size_t)g * statistics->capacity + slot;
        unit->kernels->products(window->values, SCORE_LANES, factor, dim, 1, dim, dim, true, window->turned);
        unit->kernels->distances(window->turned, outputs, dim, queries, dim, window->squares);
        unit->kernels->drop_errors(p, (size_t)unit->group * statistics->capacity, window->rows,
            window->excess + (size_t)g * queries, window->squares, queries, window->total);
    }
    for (uint32_t lane = 0; lane < SCORE_LANES; lane++)
        smooth[lane] = (double)window->total[lane];
    for (uint32_t t = 1; t < queries; t++) {
        for (uint32_t lane = 0; lane < SCORE_LANES; lane++)
            smooth[lane] += (double)smoothing * ((double)window->total[t * SCORE_LANES + lane] - smooth[lane]);
    }
    for (uint32_t lane = 0; lane < SCORE_LANES; lane++)
        scores[lane] = (float)smooth[lane];
}

void score_drop_error(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    struct drop_window window = drop_window(unit, head);
    for (uint32_t slot = 0; slot < at->view.slots; slot += KV_PAGE_SLOTS) {
        float scores[SCORE_LANES];
        drop_page(unit, head, &window, slot, stage->x, scores);
        memcpy(at->scores + slot, scores, score_page_slots(&at->view, slot) * sizeof *scores);
    }
}

/* ---- norms ---- */

void score_times_output_norm(const struct score_unit *unit, const struct score_stage *stage, uint32_t head) {
    const struct score_head *at = &unit->layer->heads[head];
    const float *norms = at->statistics.output_norm;
    for (uint32_t slot = 0; slot < at->view.slots; slot++) {
        float *score = &at->scores[slot];
        *score = *score == INFINITY ? *score : (*score + stage->x) * norms[slot];
    }
}
