/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/views.h"
#include "cuda/step.h"

#include <math.h>

static uint32_t pages_of(const struct kv_head_view *view) {
    return (view->slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS;
}

size_t cuda_view_bytes(const struct kv_head_view *view) {
    return view->device_pages != NULL ? 0 : cuda_stage_size(pages_of(view) * sizeof *view->pages);
}

struct cuda_head_view cuda_view_stage(struct cuda_stage *stage, const struct kv_head_view *view) {
    const uint32_t *pages = view->device_pages;
    if (pages == NULL)
        pages = cuda_stage_copy(stage, view->pages, pages_of(view) * sizeof *view->pages);
    return (struct cuda_head_view){
        .pages = pages,
        .summary = view->summary,
        .slots = view->slots,
        .first_slot = view->first_slot,
        .from_slot = view->from_slot,
    };
}

void cuda_batch_bound(const struct kv_item *items, uint32_t items_count, const struct kv_head_view *views,
    size_t views_count, const struct kv_statistics *statistics, struct cuda_batch *out) {
    for (uint32_t i = 0; i < items_count; i++) {
        const struct kv_item *item = &items[i];
        out->rows_count += item->rows;
        out->rows_most = item->rows > out->rows_most ? item->rows : out->rows_most;
        uint32_t position = item->position + item->rows - (item->rows > 0);
        out->position_most = position > out->position_most ? position : out->position_most;
    }
    for (size_t i = 0; i < views_count; i++) {
        out->slots_most = views[i].slots > out->slots_most ? views[i].slots : out->slots_most;
        out->needs |= statistics != NULL ? statistics[i].needs : 0;
    }
}

void cuda_batch_vary(const struct kv_batch *batch, struct cuda_batch *out) {
    const float log2_e = 1.4426950408889634f;
    float dim = (float)batch->pool->layout.head_dim;
    out->span = batch->window != 0 && batch->window < ATTEND_SPAN_ALL ? batch->window : ATTEND_SPAN_ALL;
    out->scale = batch->scale != 0 ? batch->scale * log2_e : log2_e / sqrtf(dim);
    out->cap = batch->cap * log2_e;
    out->inverse_cap = out->cap != 0 ? 1 / out->cap : 0;
}

static size_t batch_bytes(const struct kv_batch *batch, const struct cuda_batch *out) {
    uint32_t views = batch->items_count * batch->pool->layout.kv_heads;
    size_t bytes = cuda_stage_size(batch->items_count * sizeof *batch->items) +
                   cuda_stage_size(out->rows_count * sizeof *out->rows) + cuda_stage_size(views * sizeof *out->views);
    if (out->needs != 0)
        bytes += cuda_stage_size(views * sizeof *batch->statistics);
    for (uint32_t i = 0; i < views; i++)
        bytes += cuda_view_bytes(&batch->views[i]);
    return bytes;
}

static void stage_rows(struct cuda_stage *stage, const struct kv_batch *batch, struct cuda_batch *out) {
    const void *device;
    struct cuda_row *row = cuda_stage_add(stage, out->rows_count * sizeof *row, &device);
    out->rows = device;
    for (uint32_t item = 0; item < batch->items_count; item++)
        for (uint32_t token = 0; token < batch->items[item].rows; token++)
            *row++ = (struct cuda_row){item, token};
}

static void stage_views(struct cuda_stage *stage, const struct kv_batch *batch, struct cuda_batch *out) {
    uint32_t views = batch->items_count * batch->pool->layout.kv_heads;
    const void *device;
    struct cuda_head_view *view = cuda_stage_add(stage, views * sizeof *view, &device);
    out->views = device;
    for (uint32_t i = 0; i < views; i++)
        view[i] = cuda_view_stage(stage, &batch->views[i]);
}

bool cuda_batch_stage(struct cuda_backend *cuda, const struct kv_batch *batch, struct cuda_batch *out) {
    if (cuda_step_batch(cuda, batch, out))
        return true;
    *out = (struct cuda_batch){.pool = *batch->pool, .items_count = batch->items_count, .layer = batch->layer};
    cuda_batch_bound(batch->items, batch->items_count, batch->views,
        (size_t)batch->items_count * batch->pool->layout.kv_heads, batch->statistics, out);
    cuda_batch_vary(batch, out);
    struct cuda_stage stage;
    if (out->rows_count == 0 || !cuda_stage_begin(cuda, batch_bytes(batch, out), &stage))
        return false;
    out->items = cuda_stage_copy(&stage, batch->items, batch->items_count * sizeof *batch->items);
    stage_rows(&stage, batch, out);
    stage_views(&stage, batch, out);
    if (out->needs != 0) {
        size_t heads = (size_t)batch->items_count * batch->pool->layout.kv_heads;
        out->statistics = cuda_stage_copy(&stage, batch->statistics, heads * sizeof *batch->statistics);
    }
    return cuda_stage_send(cuda, &stage);
}
