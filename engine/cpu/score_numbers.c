/* SPDX-License-Identifier: Apache-2.0
 *
 * Numbers that depend on a slot's key and value alone (policy/network.h): norms of the value and of what it adds to the
 * layer's output, for the network and for the trainer.
 *
 * No output is formed: the length of v W_h is that of F_h v (score_state.h).
 */
#include "engine/cpu/score_numbers.h"

#include <math.h>

/* ---- norms of one page ---- */

void score_page_norms(const struct score_kernels *kernels, uint32_t dim, const float *factors, uint32_t group,
    const float *values, float *turned, float *value_norm, float *output_norm) {
    double squares[SCORE_LANES], sums[SCORE_LANES] = {0};
    float norms[SCORE_LANES];
    if (value_norm != NULL) {
        kernels->squares(values, dim, squares);
        for (uint32_t lane = 0; lane < SCORE_LANES; lane++)
            norms[lane] = (float)sqrt(squares[lane]);
        kernels->logs(norms, value_norm);
    }
    if (output_norm == NULL)
        return;
    for (uint32_t g = 0; g < group; g++) {
        kernels->products(values, SCORE_LANES, factors + (size_t)g * dim * dim, dim, 1, dim, dim, true, turned);
        kernels->squares(turned, dim, squares);
        for (uint32_t lane = 0; lane < SCORE_LANES; lane++)
            sums[lane] += sqrt(squares[lane]);
    }
    for (uint32_t lane = 0; lane < SCORE_LANES; lane++)
        norms[lane] = (float)(sums[lane] / (double)group);
    kernels->logs(norms, output_norm);
}

/* ---- slot_norms ---- */

struct norms_job {
    const struct score_call *call;
    const struct kv_head_view *view;
    const float *factors; /* [G][d][d] of the head's group; NULL: no output norms */
    float *value_norm, *output_norm;
};

static void norms_work(void *context, uint32_t page, uint32_t thread) {
    const struct norms_job *job = context;
    const struct kv_pool *pool = job->call->pool;
    const struct kv_layout *layout = &pool->layout;
    const struct score_kernels *kernels = job->call->cpu->score;
    char *at = kv_pool_page(pool, job->view->pages[page]);
    const int32_t *positions = kv_page_positions(layout, at);
    float *values = job->call->state->scratch[thread].blocks, *turned = values + (size_t)layout->head_dim * SCORE_LANES;
    float value_norm[SCORE_LANES], output_norm[SCORE_LANES];
    uint32_t first = page * KV_PAGE_SLOTS, count = score_page_slots(job->view, first);
    kernels->formats[layout->format].values(at, at, layout->head_dim, values);
    score_page_norms(kernels, layout->head_dim, job->factors, job->call->heads / layout->kv_heads, values, turned,
        job->value_norm != NULL ? value_norm : NULL, job->output_norm != NULL ? output_norm : NULL);
    for (uint32_t lane = 0; lane < count; lane++) {
        bool empty = positions[lane] == KV_NO_POSITION;
        if (job->value_norm != NULL)
            job->value_norm[first + lane] = empty ? 0 : value_norm[lane];
        if (job->output_norm != NULL)
            job->output_norm[first + lane] = empty ? 0 : output_norm[lane];
    }
}

int cpu_slot_norms(struct backend *backend, const struct kv_pool *pool, const struct kv_head_view *view,
    const struct tensor *output, uint32_t layer, uint32_t head, uint32_t heads, float *value_norm, float *output_norm,
    struct error *error) {
    const struct kv_layout *layout = &pool->layout;
    const struct score_layer of = {.layer = layer, .output = output};
    if (heads == 0 || heads % layout->kv_heads != 0 || layer >= layout->layers || head >= layout->kv_heads ||
        layout->head_dim > ATTEND_DIM_MAX || output->columns != (size_t)heads * layout->head_dim)
        return error_set(error, ERROR_INVALID, "no such head, or not its output matrix");
    struct score_call call = {cpu_backend(backend), score_state_get(cpu_backend(backend)), pool, NULL, 0, heads};
    if (call.state == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for norms of slots");
    int code = score_scratch_prepare(&call, error);
    if (code == 0 && output_norm != NULL)
        code = score_factors_prepare(&call, &of, error);
    if (code != 0)
        return code;
    struct norms_job job = {&call, view, NULL, value_norm, output_norm};
    if (output_norm != NULL)
        job.factors = call.state->matrices[layer].factors +
                      (size_t)head * (heads / layout->kv_heads) * layout->head_dim * layout->head_dim;
    uint32_t pages = (view->slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS;
    thread_pool_run(call.cpu->threads, pages, norms_work, &job);
    return 0;
}
