/* SPDX-License-Identifier: Apache-2.0
 *
 * From output matrices: factors and products per pair of query heads, computed when a stage first needs them, and the
 * output norms of slots. Both before the stages of a call run, so that those only read.
 *
 * A matrix is W_o [D][H * d]; W_h are its columns h * d .. h * d + d - 1. Sums over D are in double.
 */
#include "engine/cpu/score_state.h"

#include "engine/cpu/memory.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- products of pairs of heads ---- */

struct pair_task {
    uint32_t h, g; /* h == g: the factor */
};

/* The missing pairs of one layer. */
struct pair_job {
    const struct score_kernels *kernels;
    const struct tensor *output;
    uint32_t dim, heads;
    float *dense;   /* [D][H * d] W_o, and SCORE_LANES floats that are read but not used */
    double *square; /* [threads][d * d] */
    double *block;  /* [threads][d * 16] */
    struct score_matrix *matrix;
    const struct pair_task *tasks;
};

static void dequantise_work(void *context, uint32_t chunk, uint32_t thread) {
    const struct pair_job *job = context;
    (void)thread;
    tensor_dequantise_row(job->output, chunk, job->dense + (size_t)chunk * job->output->columns);
}

/* square [d][d] = W_h W_g^T, sixteen channels of h at a time. */
static void multiply_pair(const struct pair_job *job, struct pair_task task, double *block, double *square) {
    uint32_t dim = job->dim;
    size_t columns = job->output->columns;
    for (uint32_t first = 0; first < dim; first += SCORE_LANES) {
        job->kernels->exact_products(job->dense + (size_t)task.h * dim + first, columns,
            job->dense + (size_t)task.g * dim, 1, columns, dim, job->output->rows, block);
        for (uint32_t i = first; i < dim && i < first + SCORE_LANES; i++) {
            for (uint32_t j = 0; j < dim; j++)
                square[(size_t)i * dim + j] = block[(size_t)j * SCORE_LANES + i - first];
        }
    }
}

/* F, lower triangular, with F^T F = square, by Cholesky's method from the last channel on. A matrix without full rank
 * has pivots of zero but for rounding: those channels add nothing. Overwrites square. */
static void factorise(double *square, uint32_t dim, float *factor) {
    for (uint32_t j = dim; j-- > 0;) {
        double *row = square + (size_t)j * dim, pivot = row[j], whole = row[j];
        for (uint32_t k = j + 1; k < dim; k++)
            pivot -= square[(size_t)k * dim + j] * square[(size_t)k * dim + j];
        double root = pivot > whole * 1e-11 ? sqrt(pivot) : 0;
        for (uint32_t i = 0; i < j; i++) {
            double sum = row[i];
            for (uint32_t k = j + 1; k < dim; k++)
                sum -= square[(size_t)k * dim + i] * square[(size_t)k * dim + j];
            row[i] = root > 0 ? sum / root : 0;
        }
        row[j] = root;
        for (uint32_t i = 0; i < dim; i++)
            factor[(size_t)j * dim + i] = i <= j ? (float)row[i] : 0;
    }
}

static void pair_work(void *context, uint32_t chunk, uint32_t thread) {
    const struct pair_job *job = context;
    struct pair_task task = job->tasks[chunk];
    size_t numbers = (size_t)job->dim * job->dim;
    double *square = job->square + thread * numbers;
    multiply_pair(job, task, job->block + (size_t)thread * job->dim * SCORE_LANES, square);
    if (task.h == task.g) {
        factorise(square, job->dim, job->matrix->factors + task.h * numbers);
        return;
    }
    float *gram = job->matrix->grams[(size_t)task.h * job->heads + task.g];
    for (size_t i = 0; i < numbers; i++)
        gram[i] = (float)square[i];
}

static void matrix_free(struct score_matrix *matrix, uint32_t heads) {
    for (size_t i = 0; matrix->grams != NULL && i < (size_t)heads * heads; i++)
        cpu_memory_release(matrix->grams[i]);
    free(matrix->grams);
    cpu_memory_release(matrix->factors);
    *matrix = (struct score_matrix){0};
}

void score_matrices_free(struct score_state *state) {
    for (uint32_t layer = 0; layer < state->layers; layer++)
        matrix_free(&state->matrices[layer], state->heads);
    free(state->matrices);
    state->matrices = NULL;
    state->layers = 0;
}

/* Room for the matrices of a pool's layers. */
static int matrices_get(const struct score_call *call, struct error *error) {
    struct score_state *state = call->state;
    const struct kv_layout *layout = &call->pool->layout;
    if (state->layers == layout->layers && state->heads == call->heads && state->dim == layout->head_dim)
        return 0;
    score_matrices_free(state);
    state->matrices = calloc(layout->layers, sizeof *state->matrices);
    if (state->matrices == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for scoring");
    state->layers = layout->layers;
    state->heads = call->heads;
    state->dim = layout->head_dim;
    return 0;
}

/* Adds the task of a pair that is not there yet; its memory is taken now, and is zero until the task has run. */
static int add_pair(
    const struct score_state *state, struct score_matrix *matrix, uint32_t h, uint32_t g, struct pair_task *task) {
    float **at = &matrix->grams[(size_t)h * state->heads + g];
    if (*at != NULL)
        return 0;
    *at = cpu_memory_allocate((size_t)state->dim * state->dim * sizeof **at);
    if (*at == NULL)
        return ERROR_MEMORY;
    *task = (struct pair_task){h, g};
    return 1;
}

/* Lists what the layer's stages need and the matrix lacks: returns how many tasks, or ERROR_MEMORY. */
static int list_pairs(const struct score_call *call, const struct score_layer *layer, struct score_matrix *matrix,
    struct pair_task *tasks) {
    const struct score_state *state = call->state;
    uint32_t heads = state->heads, group = heads / call->pool->layout.kv_heads;
    bool all = score_has_stage(layer, STAGE_LAPROX), groups = score_has_stage(layer, STAGE_LAPROX_HEAD);
    int count = 0;
    if (matrix->factors == NULL) {
        matrix->factors = cpu_memory_allocate((size_t)heads * state->dim * state->dim * sizeof *matrix->factors);
        if (matrix->factors == NULL)
            return ERROR_MEMORY;
        for (uint32_t h = 0; h < heads; h++)
            tasks[count++] = (struct pair_task){h, h};
    }
    if (matrix->grams == NULL)
        matrix->grams = calloc((size_t)heads * heads, sizeof *matrix->grams);
    if (matrix->grams == NULL)
        return ERROR_MEMORY;
    for (uint32_t h = 0; h < heads; h++) {
        for (uint32_t g = h + 1; g < heads; g++) {
            if (!all && !(groups && g / group == h / group))
                continue;
            int added = add_pair(state, matrix, h, g, &tasks[count]);
            if (added < 0)
                return added;
            count += added;
        }
    }
    return count;
}

static int run_pairs(const struct score_call *call, struct pair_job *job, uint32_t count) {
    size_t numbers = (size_t)job->dim * job->dim, threads = call->state->threads;
    size_t dense = (size_t)job->output->rows * job->output->columns + SCORE_LANES;
    job->dense = cpu_memory_allocate(dense * sizeof *job->dense);
    job->square = cpu_memory_allocate(threads * (numbers + (size_t)job->dim * SCORE_LANES) * sizeof *job->square);
    job->block = job->square != NULL ? job->square + threads * numbers : NULL;
    bool ready = job->dense != NULL && job->square != NULL;
    if (ready) {
        thread_pool_run(call->cpu->threads, job->output->rows, dequantise_work, job);
        thread_pool_run(call->cpu->threads, count, pair_work, job);
    }
    cpu_memory_release(job->dense);
    cpu_memory_release(job->square);
    return ready ? 0 : ERROR_MEMORY;
}

static bool needs_pairs(const struct score_layer *layer) {
    return score_has_stage(layer, STAGE_LAPROX) || score_has_stage(layer, STAGE_LAPROX_HEAD) ||
           score_has_stage(layer, STAGE_DROP_ERROR) ||
           (score_has_stage(layer, STAGE_NETWORK) && score_network_weighs(&layer->network->shape));
}

static int prepare_pairs(const struct score_call *call, const struct score_layer *layer) {
    struct score_matrix *matrix = &call->state->matrices[layer->layer];
    struct pair_task *tasks = malloc(((size_t)call->heads * (call->heads + 1) / 2) * sizeof *tasks);
    if (matrix->data != layer->output->data)
        matrix_free(matrix, call->heads);
    matrix->data = layer->output->data;
    int count = tasks != NULL ? list_pairs(call, layer, matrix, tasks) : ERROR_MEMORY, code = count < 0 ? count : 0;
    if (count > 0) {
        struct pair_job job = {.kernels = call->cpu->score,
            .output = layer->output,
            .dim = call->pool->layout.head_dim,
            .heads = call->heads,
            .matrix = matrix,
            .tasks = tasks};
        code = run_pairs(call, &job, (uint32_t)count);
    }
    if (code != 0)
        matrix_free(matrix, call->heads);
    free(tasks);
    return code;
}

/* ---- output norms ---- */

/* The slots of a page whose norm is not known. */
struct norm_block {
    const struct score_head *head;
    uint32_t slot;
    uint32_t head_number;
    uint32_t next; /* block of the same matrix, UINT32_MAX: none */
    double sums[SCORE_LANES];
};

/* All blocks that are multiplied by the same matrix, in the order of the call: so it is read once. */
struct norm_list {
    const struct tensor *output;
    uint32_t first, last;
};

struct norm_job {
    const struct score_call *call;
    struct norm_list *lists;
    struct norm_block *blocks;
};

static bool is_known(const struct norm_job *job, const struct norm_block *block, uint32_t lane) {
    const struct score_head *head = block->head;
    if (block->slot + lane >= head->view.slots || head->statistics.output_norm[block->slot + lane] != 0)
        return true;
    char *page = kv_pool_page(job->call->pool, head->view.pages[block->slot / KV_PAGE_SLOTS]);
    return kv_page_positions(&job->call->pool->layout, page)[lane] == KV_NO_POSITION;
}

/* Some rows of a matrix with one block: adds the absolute values of their products, over the group's heads. */
static void add_rows(
    const struct norm_job *job, struct norm_block *block, const float *rows, uint32_t rows_count, float *values) {
    const struct kv_pool *pool = job->call->pool;
    const struct score_kernels *kernels = job->call->cpu->score;
    uint32_t dim = pool->layout.head_dim, group = job->call->heads / pool->layout.kv_heads;
    size_t columns = (size_t)job->call->heads * dim;
    float products[SCORE_MATRIX_ROWS * SCORE_LANES];
    char *page = kv_pool_page(pool, block->head->view.pages[block->slot / KV_PAGE_SLOTS]);
    kernels->formats[pool->layout.format].values(page, page, dim, values);
    for (uint32_t g = 0; g < group; g++) {
        const float *part = rows + ((size_t)block->head_number * group + g) * dim;
        kernels->products(values, SCORE_LANES, part, columns, 1, rows_count, dim, false, products);
        kernels->add_absolute(products, rows_count, block->sums);
    }
}

static void store_norms(const struct norm_job *job, const struct norm_block *block) {
    uint32_t group = job->call->heads / job->call->pool->layout.kv_heads;
    for (uint32_t lane = 0; lane < SCORE_LANES; lane++) {
        if (!is_known(job, block, lane))
            block->head->statistics.output_norm[block->slot + lane] = (float)(block->sums[lane] / (double)group);
    }
}

static void norm_work(void *context, uint32_t chunk, uint32_t thread) {
    const struct norm_job *job = context;
    const struct norm_list *list = &job->lists[chunk];
    float *rows = job->call->state->scratch[thread].blocks;
    float *values = rows + (size_t)SCORE_MATRIX_ROWS * list->output->columns;
    if (list->first == UINT32_MAX)
        return;
    for (uint32_t row = 0; row < list->output->rows; row += SCORE_MATRIX_ROWS) {
        uint32_t left = list->output->rows - row, count = left < SCORE_MATRIX_ROWS ? left : SCORE_MATRIX_ROWS;
        for (uint32_t i = 0; i < count; i++)
            tensor_dequantise_row(list->output, row + i, rows + (size_t)i * list->output->columns);
        for (uint32_t at = list->first; at != UINT32_MAX; at = job->blocks[at].next)
            add_rows(job, &job->blocks[at], rows, count, values);
    }
    for (uint32_t at = list->first; at != UINT32_MAX; at = job->blocks[at].next)
        store_norms(job, &job->blocks[at]);
}

/* The list of a matrix, begun where there is none. */
static struct norm_list *find_list(struct norm_list *lists, uint32_t *count, const struct tensor *output) {
    for (uint32_t i = 0; i < *count; i++) {
        if (lists[i].output->data == output->data)
            return &lists[i];
    }
    lists[*count] = (struct norm_list){output, UINT32_MAX, UINT32_MAX};
    return &lists[(*count)++];
}

/* Adds the blocks of a head that have a slot without a norm. blocks NULL: only counts them (at most). */
static uint32_t list_blocks(
    struct norm_job *job, struct norm_list *list, const struct score_head *head, uint32_t head_number, uint32_t count) {
    for (uint32_t slot = 0; slot < head->view.slots; slot += KV_PAGE_SLOTS) {
        struct norm_block block = {.head = head, .slot = slot, .head_number = head_number, .next = UINT32_MAX};
        uint32_t unknown = 0;
        for (uint32_t lane = 0; lane < SCORE_LANES; lane++)
            unknown += !is_known(job, &block, lane);
        if (unknown == 0)
            continue;
        if (job->blocks != NULL) {
            job->blocks[count] = block;
            if (list->last != UINT32_MAX)
                job->blocks[list->last].next = count;
            else
                list->first = count;
            list->last = count;
        }
        count++;
    }
    return count;
}

/* Goes over all heads whose norms are wanted: returns how many blocks there are, and lists them if there is room. */
static uint32_t list_norms(struct norm_job *job, uint32_t *lists_count) {
    const struct score_call *call = job->call;
    uint32_t count = 0;
    *lists_count = 0;
    for (uint32_t i = 0; i < call->count; i++) {
        const struct score_layer *layer = &call->layers[i];
        if (!score_has_stage(layer, STAGE_TIMES_OUTPUT_NORM))
            continue;
        struct norm_list *list = find_list(job->lists, lists_count, layer->output);
        for (uint32_t head = 0; head < call->pool->layout.kv_heads; head++)
            count = list_blocks(job, list, &layer->heads[head], head, count);
    }
    return count;
}

static int prepare_norms(const struct score_call *call) {
    struct norm_job job = {.call = call};
    uint32_t lists_count, wanted = 0;
    int code = 0;
    for (uint32_t i = 0; i < call->count; i++)
        wanted += score_has_stage(&call->layers[i], STAGE_TIMES_OUTPUT_NORM);
    if (wanted == 0)
        return 0;
    job.lists = malloc(wanted * sizeof *job.lists);
    if (job.lists == NULL)
        return ERROR_MEMORY;
    uint32_t blocks = list_norms(&job, &lists_count);
    if (blocks > 0) {
        job.blocks = malloc(blocks * sizeof *job.blocks);
        code = job.blocks != NULL ? 0 : ERROR_MEMORY;
    }
    if (job.blocks != NULL) {
        list_norms(&job, &lists_count);
        thread_pool_run(call->cpu->threads, lists_count, norm_work, &job);
    }
    free(job.blocks);
    free(job.lists);
    return code;
}

int score_factors_prepare(const struct score_call *call, const struct score_layer *layer, struct error *error) {
    int code = matrices_get(call, error);
    if (code == 0 && prepare_pairs(call, layer) != 0)
        code = error_set(error, ERROR_MEMORY, "no memory for products of the output matrix of layer %u", layer->layer);
    return code;
}

int score_matrices_prepare(const struct score_call *call, struct error *error) {
    for (uint32_t i = 0; i < call->count; i++) {
        int code = needs_pairs(&call->layers[i]) ? score_factors_prepare(call, &call->layers[i], error) : 0;
        if (code != 0)
            return code;
    }
    if (prepare_norms(call) != 0)
        return error_set(error, ERROR_MEMORY, "no memory for output norms");
    return 0;
}
