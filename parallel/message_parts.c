/* SPDX-License-Identifier: Apache-2.0 */
#include "parallel/message_parts.h"

#include "engine/gguf.h"
#include "engine/model.h"
#include "engine/score_check.h"

#include <string.h>

enum { WINDOW_MOST = 256, CONTENT_MOST = 16, GROUP_MOST = 1 << 12, NAME_MOST = 128 };

/* ---- pools and pages ---- */

void message_code_pool(
    struct wire *wire, const struct message_context *context, struct message *m, struct message_pages *pages) {
    struct kv_pool *pool = &m->pool;
    struct kv_layout *layout = &pool->layout;
    uint64_t base = (uint64_t)(uintptr_t)pool->base, page_bytes = pool->page_bytes;
    uint32_t format = layout->format;
    wire_u64(wire, &base);
    wire_u64(wire, &page_bytes);
    wire_u32(wire, &layout->layers);
    wire_u32(wire, &layout->kv_heads);
    wire_u32(wire, &layout->head_dim);
    wire_u32(wire, &format);
    wire_u32(wire, &layout->first_head);
    wire_u32(wire, &layout->model_heads);
    wire_u32(wire, &m->heads);
    pool->base = (void *)(uintptr_t)base;
    pool->page_bytes = page_bytes;
    layout->format = (enum kv_format)format;
    *pages = (struct message_pages){.low = UINT32_MAX, .high = 0};
    if (!wire->reading || !wire_require(wire, format <= KV_BF16))
        return;
    const struct model_shape *shape = &context->model->shape;
    uint32_t own = shape->kv_heads / context->world;
    wire_require(wire, layout->layers == shape->layers && layout->kv_heads == own &&
                           layout->head_dim == shape->head_dim && layout->model_heads == shape->kv_heads &&
                           layout->first_head == context->rank * own);
    /* Operations that look at one head alone have no number of heads. */
    wire_require(wire, m->heads == 0 || m->heads == shape->heads / context->world);
    if (!wire->failed)
        wire_require(wire, page_bytes == kv_page_bytes(layout));
}

void message_find_pool(struct wire *wire, struct message *m, const struct message_pages *pages) {
    if (!wire->reading || wire->failed || pages->low > pages->high)
        return;
    uint64_t skipped = (uint64_t)pages->low * m->pool.page_bytes;
    size_t bytes = wire_product((uint64_t)pages->high - pages->low + 1, m->pool.page_bytes, 1, 1);
    char *found = wire_table_find(wire->table, (uint64_t)(uintptr_t)m->pool.base + skipped, bytes);
    wire_require(wire, found != NULL);
    m->pool.base = (void *)((uintptr_t)found - skipped);
}

void message_code_pages(struct wire *wire, struct message_pages *pages, const uint32_t **list, uint32_t count) {
    wire_array(wire, *list, count);
    for (uint32_t i = 0; i < count && !wire->failed; i++) {
        pages->low = (*list)[i] < pages->low ? (*list)[i] : pages->low;
        pages->high = (*list)[i] > pages->high ? (*list)[i] : pages->high;
    }
}

void message_code_view(struct wire *wire, struct message_pages *pages, struct kv_head_view *view, uint32_t head_dim) {
    wire_u32(wire, &view->slots);
    wire_u32(wire, &view->first_slot);
    wire_require(wire, view->slots <= MESSAGE_SLOTS_MAX);
    wire_memory_or_null(wire, view->summary, SUMMARY_NUMBERS((size_t)head_dim) * sizeof(float));
    message_code_pages(wire, pages, &view->pages, (view->slots + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS);
    if (wire->reading)
        view->device_pages = NULL;
}

/* ---- statistics ---- */

/* G and d of the heads that an array is of. */
struct head_shape {
    uint32_t group, head_dim;
};

/* Bytes that a slot takes, and bytes beside, of a statistic's array. */
struct statistic_array {
    uint32_t need;
    size_t place;                          /* of the pointer in struct kv_statistics */
    size_t slot_bytes, window_slot_bytes;  /* the second times the window */
    bool group;                            /* times the group too */
    size_t fixed_bytes, window_head_bytes; /* window_head_bytes: times window, group, head_dim */
};

#define PLACE(name) offsetof(struct kv_statistics, name)
static const struct statistic_array arrays[] = {
    {STATISTIC_SUM, PLACE(sum), .slot_bytes = 8},
    {STATISTIC_SQUARED, PLACE(squared), .slot_bytes = 8},
    {STATISTIC_NOISY, PLACE(noisy), .slot_bytes = 8},
    {STATISTIC_WINDOW, PLACE(window_rows), .window_slot_bytes = 2},
    {STATISTIC_WINDOW, PLACE(window_sum), .slot_bytes = 4},
    {STATISTIC_HEAD_WINDOW, PLACE(head_rows), .window_slot_bytes = 2, .group = true},
    {STATISTIC_OUTPUTS, PLACE(outputs), .window_head_bytes = 4},
    {STATISTIC_ABOVE, PLACE(above), .slot_bytes = STATISTIC_ABOVE_BITS / 8},
    {STATISTIC_ENTROPY, PLACE(entropy), .slot_bytes = 2},
    {STATISTIC_OUTPUT_NORM, PLACE(output_norm), .slot_bytes = 4},
    {STATISTIC_CONTENT, PLACE(content_rows), .slot_bytes = 2}, /* times content + 2 */
    {STATISTIC_STANDARD, PLACE(standard), .fixed_bytes = STATISTIC_STANDARD_NUMBERS * 4},
};

static size_t array_bytes(
    const struct statistic_array *array, const struct kv_statistics *s, const struct head_shape *shape) {
    uint64_t capacity = s->capacity, window = s->window;
    if (array->window_head_bytes > 0)
        return wire_product(window, shape->group, shape->head_dim, array->window_head_bytes);
    if (array->window_slot_bytes > 0)
        return wire_product(window, capacity, array->window_slot_bytes, array->group ? shape->group : 1);
    if (array->need == STATISTIC_CONTENT)
        return wire_product(capacity, (uint64_t)s->content + 2, array->slot_bytes, 1);
    return array->fixed_bytes + wire_product(capacity, array->slot_bytes, 1, 1);
}

static void code_statistics(struct wire *wire, struct kv_statistics *s, const struct head_shape *shape) {
    const uint32_t windowed = STATISTIC_WINDOW | STATISTIC_HEAD_WINDOW | STATISTIC_OUTPUTS;
    uint32_t there = 0, found = 0, missing = 0;
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++)
        there |= !wire->reading && *(void *const *)((const char *)s + arrays[i].place) != NULL ? 1u << i : 0;
    wire_u32(wire, &there);
    wire_u32(wire, &s->needs);
    wire_u32(wire, &s->capacity);
    wire_u32(wire, &s->window);
    wire_u32(wire, &s->history);
    wire_u32(wire, &s->content);
    wire_u64(wire, &s->seed);
    wire_require(wire, s->capacity <= MESSAGE_SLOTS_MAX && s->capacity % KV_PAGE_SLOTS == 0 &&
                           s->window <= WINDOW_MOST && s->history <= STATISTIC_ABOVE_BITS &&
                           s->content <= CONTENT_MOST);
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0] && !wire->failed; i++) {
        void **array = (void **)((char *)s + arrays[i].place);
        if ((there >> i & 1) != 0)
            wire_set(
                wire, *array, wire_memory_of(wire, *array, array_bytes(&arrays[i], s, shape), sizeof(double), false));
        *((there >> i & 1) != 0 ? &found : &missing) |= arrays[i].need;
    }
    if (!wire->reading)
        return;
    s->needs &= found & ~missing; /* what an operation adds to has a place */
    wire_require(wire, (s->needs & windowed) == 0 || s->window > 0);
    wire_require(wire, (s->needs & STATISTIC_ABOVE) == 0 || s->history > 0);
}

/* ---- batches ---- */

static void code_items(struct wire *wire, struct kv_batch *batch, uint32_t *rows) {
    *rows = 0;
    wire_count(wire, &batch->items_count, sizeof *batch->items);
    wire_array(wire, batch->items, batch->items_count);
    for (uint32_t i = 0; i < batch->items_count && !wire->failed; i++) {
        const struct kv_item *item = &batch->items[i];
        if (!wire_require(wire, item->first_row <= MESSAGE_ROWS_MAX && item->rows <= MESSAGE_ROWS_MAX &&
                                    item->position <= MESSAGE_SLOTS_MAX))
            return;
        *rows = item->first_row + item->rows > *rows ? item->first_row + item->rows : *rows;
    }
}

uint32_t message_code_batch(
    struct wire *wire, const struct message_context *context, struct message *m, struct message_pages *pages) {
    struct kv_batch *batch = &m->batch;
    uint32_t rows, heads = m->pool.layout.kv_heads;
    (void)context;
    wire_u32(wire, &batch->layer);
    wire_require(wire, m->heads > 0 && batch->layer < m->pool.layout.layers);
    code_items(wire, batch, &rows);
    bool statistics = wire_is_there(wire, batch->statistics != NULL);
    size_t count = wire->failed ? 0 : (size_t)batch->items_count * heads;
    struct kv_head_view *views = wire_space(wire, batch->views, count, sizeof *views);
    struct kv_statistics *kept = statistics ? wire_space(wire, batch->statistics, count, sizeof *kept) : NULL;
    const struct head_shape shape = {heads > 0 ? m->heads / heads : 0, m->pool.layout.head_dim};
    for (size_t i = 0; i < count && !wire->failed; i++) {
        const struct kv_item *item = &batch->items[i / heads];
        message_code_view(wire, pages, &views[i], shape.head_dim);
        wire_require(wire, views[i].first_slot <= views[i].slots && item->rows <= views[i].slots - views[i].first_slot);
        if (!statistics || wire->failed)
            continue;
        code_statistics(wire, &kept[i], &shape);
        wire_require(wire, kept[i].needs == 0 || kept[i].capacity >= views[i].slots);
    }
    batch->views = views;
    batch->statistics = kept;
    if (wire->reading)
        batch->pool = &m->pool;
    return rows;
}

void message_code_rope(struct wire *wire, struct rope_params *rope, uint32_t head_dim) {
    wire_u32(wire, &rope->dim);
    wire_require(wire, rope->dim <= head_dim && rope->dim % 2 == 0);
    wire_array(wire, rope->inverse_freq, rope->dim / 2);
}

static void code_moments(struct wire *wire, struct query_moments *moments, uint32_t heads, uint32_t head_dim) {
    if (!wire_is_there(wire, moments->sum != NULL))
        return;
    wire_memory(wire, moments->count, sizeof *moments->count);
    wire_memory(wire, moments->sum, wire_product(heads, head_dim, sizeof *moments->sum, 1));
    wire_memory(wire, moments->outer, wire_product(heads, head_dim, head_dim, sizeof *moments->outer));
}

void message_code_moments(
    struct wire *wire, const struct query_moments **moments, uint32_t count, uint32_t heads, uint32_t head_dim) {
    struct query_moments *all = wire_space(wire, *moments, wire->failed ? 0 : count, sizeof *all);
    for (uint32_t i = 0; i < count && !wire->failed; i++)
        code_moments(wire, &all[i], heads, head_dim);
    *moments = all;
}

/* ---- tensors of the model file ---- */

static bool is_part(const struct tensor *tensor, const struct gguf_tensor *of) {
    const struct tensor_format *format = tensor_format_find(of->type);
    uint64_t rows = of->size[1], columns = of->size[0];
    return format != NULL && of->data != NULL && rows <= UINT32_MAX && columns <= UINT32_MAX && tensor->rows > 0 &&
           tensor->columns > 0 && tensor->rows <= rows && tensor->first_row <= rows - tensor->rows &&
           tensor->columns <= columns && tensor->first_column <= columns - tensor->columns &&
           columns % format->block_values == 0 && tensor->columns % format->block_values == 0 &&
           tensor->first_column % format->block_values == 0;
}

void message_code_tensor(struct wire *wire, const struct message_context *context, struct tensor *tensor) {
    char name[NAME_MOST];
    if (!wire->reading)
        memccpy(name, tensor->name, '\0', sizeof name);
    wire_text(wire, name, sizeof name);
    wire_u32(wire, &tensor->rows);
    wire_u32(wire, &tensor->columns);
    wire_u32(wire, &tensor->first_row);
    wire_u32(wire, &tensor->first_column);
    if (!wire->reading || wire->failed)
        return;
    const struct gguf_tensor *found = gguf_find_tensor(context->model->file, name);
    if (!wire_require(wire, found != NULL && is_part(tensor, found)))
        return;
    char *kept = wire_space(wire, NULL, 1, sizeof name);
    if (kept == NULL)
        return;
    memcpy(kept, name, sizeof name);
    const struct tensor whole = {.name = kept,
        .type = (enum tensor_type)found->type,
        .rows = (uint32_t)found->size[1],
        .columns = (uint32_t)found->size[0],
        .data = found->data,
        .bytes = found->bytes};
    if (!wire_require(wire, tensor_check_size(&whole, NULL) == 0))
        return;
    struct tensor rows = tensor_cut_rows(&whole, tensor->first_row, tensor->rows);
    *tensor = tensor->columns < whole.columns ? tensor_cut_columns(&rows, tensor->first_column, tensor->columns) : rows;
}

/* ---- prunes ---- */

static void code_stages(struct wire *wire, struct score_layer *layer) {
    wire_u32(wire, &layer->stages_count);
    if (!wire_require(wire, layer->stages_count <= SCORE_STAGES_MAX))
        return;
    struct score_stage *stages = wire_space(wire, layer->stages, layer->stages_count, sizeof *stages);
    for (uint32_t i = 0; i < layer->stages_count && !wire->failed; i++) {
        uint32_t kind = stages[i].kind;
        wire_u32(wire, &kind);
        wire_float(wire, &stages[i].x);
        wire_u32(wire, &stages[i].n);
        wire_set(wire, stages[i].kind, (enum score_stage_kind)kind);
    }
    wire_set(wire, layer->stages, stages);
}

static void require_order(struct wire *wire, const struct score_head *head) {
    uint32_t found = 0, last = KV_NO_SLOT;
    if (head->order == NULL || wire->failed)
        return;
    for (uint32_t i = 0; i < head->order_count && !wire->failed; i++) {
        last = head->order[i];
        wire_require(wire, last < head->view.slots || last == KV_NO_SLOT);
        found += last != KV_NO_SLOT;
    }
    wire_require(wire, found == head->view.slots && (found == 0 || last != KV_NO_SLOT));
}

static void code_head(
    struct wire *wire, struct score_head *head, const struct head_shape *shape, struct message_pages *pages) {
    message_code_view(wire, pages, &head->view, shape->head_dim);
    code_statistics(wire, &head->statistics, shape);
    wire_require(wire, head->statistics.needs == 0 || head->statistics.capacity >= head->view.slots);
    wire_u32(wire, &head->sinks);
    wire_u32(wire, &head->recent_from);
    wire_memory_or_null(wire, head->scores, wire_product(head->view.slots, sizeof *head->scores, 1, 1));
    bool worst = wire_is_there(wire, head->worst != NULL);
    wire_array_or_null(wire, head->positions, head->view.slots);
    wire_u32(wire, &head->order_count);
    wire_array_or_null(wire, head->order, head->order_count);
    if (!wire->reading)
        return;
    head->worst_rank = NULL; /* costs more to send than it spares */
    head->worst = worst ? wire_space(wire, NULL, 1, sizeof *head->worst) : NULL;
    require_order(wire, head);
}

/* The networks of a message were sent before it, and have places. */
static void code_place(struct wire *wire, const struct message_context *context, struct score_layer *layer) {
    uint32_t place = 0;
    while (!wire->reading && place < MESSAGE_NETWORKS && context->networks[place] != layer->network)
        place++;
    wire_u32(wire, &place);
    if (wire->reading && wire_require(wire, place < MESSAGE_NETWORKS))
        layer->network = context->networks[place];
    wire_require(wire, layer->network != NULL);
}

/* What stages take beside the heads. */
static void code_sources(
    struct wire *wire, const struct message_context *context, const struct message *m, struct score_layer *layer) {
    uint32_t head_dim = m->pool.layout.head_dim;
    code_moments(wire, &layer->moments, m->heads, head_dim);
    if (wire_is_there(wire, layer->rope != NULL)) {
        struct rope_params *rope = wire_space(wire, layer->rope, 1, sizeof *rope);
        if (rope != NULL)
            message_code_rope(wire, rope, head_dim);
        wire_set(wire, layer->rope, rope);
    }
    if (wire_is_there(wire, layer->output != NULL)) {
        struct tensor *output = wire_space(wire, layer->output, 1, sizeof *output);
        if (output != NULL)
            message_code_tensor(wire, context, output);
        wire_set(wire, layer->output, output);
        if (wire->reading && output != NULL)
            wire_require(wire, output->rows == context->model->shape.width);
    }
    if (wire_is_there(wire, layer->network != NULL))
        code_place(wire, context, layer);
}

static void code_layer(struct wire *wire, const struct message_context *context, struct message *m,
    struct score_layer *layer, struct message_pages *pages) {
    uint32_t kv_heads = m->pool.layout.kv_heads;
    const struct head_shape shape = {m->heads / kv_heads, m->pool.layout.head_dim};
    wire_u32(wire, &layer->layer);
    wire_u32(wire, &layer->seen);
    wire_u32(wire, &layer->budget);
    wire_u32(wire, &layer->window);
    wire_u64(wire, &layer->seed);
    wire_bool(wire, &layer->freeze);
    wire_require(wire, layer->layer < m->pool.layout.layers && layer->window <= WINDOW_MOST);
    code_stages(wire, layer);
    if (m->operation == MESSAGE_SCORE)
        code_sources(wire, context, m, layer);
    struct score_head *heads = wire_space(wire, layer->heads, kv_heads, sizeof *heads);
    for (uint32_t head = 0; head < kv_heads && !wire->failed; head++)
        code_head(wire, &heads[head], &shape, pages);
    wire_set(wire, layer->heads, heads);
}

/* window_preference looks at nothing before it begins. */
static void require_windows(struct wire *wire, const struct score_layer *layer, uint32_t kv_heads) {
    for (uint32_t head = 0; head < kv_heads && !wire->failed; head++) {
        const struct kv_statistics *s = &layer->heads[head].statistics;
        wire_require(wire, s->head_rows != NULL && s->window > 0 && s->capacity >= layer->heads[head].view.slots);
    }
}

void message_code_layers(
    struct wire *wire, const struct message_context *context, struct message *m, struct message_pages *pages) {
    uint32_t kv_heads = m->pool.layout.kv_heads;
    wire_require(wire, m->heads > 0);
    wire_count(wire, &m->count, 32);
    if (wire->failed)
        return;
    struct score_layer *layers = wire_space(wire, m->layers, m->count, sizeof *layers);
    for (uint32_t i = 0; i < m->count && !wire->failed; i++) {
        code_layer(wire, context, m, &layers[i], pages);
        if (wire->reading && m->operation == MESSAGE_PREFERENCE)
            require_windows(wire, &layers[i], kv_heads);
    }
    m->layers = layers;
}

static void code_update(
    struct wire *wire, struct summary_update *update, uint32_t head_dim, struct message_pages *pages) {
    message_code_view(wire, pages, &update->view, head_dim);
    wire_u32(wire, &update->capacity);
    wire_u32(wire, &update->seen);
    wire_float(wire, &update->offset);
    wire_require(wire, update->capacity >= update->view.slots);
    wire_memory(wire, update->sum, wire_product(update->capacity, 2 * sizeof *update->sum, 1, 1));
    wire_memory(wire, update->summary, SUMMARY_NUMBERS((size_t)head_dim) * sizeof *update->summary);
    wire_array(wire, update->positions, update->view.slots);
    wire_count(wire, &update->count, sizeof *update->slots);
    wire_array(wire, update->slots, update->count);
    for (uint32_t i = 0; wire->reading && i < update->count && !wire->failed; i++)
        wire_require(wire, update->slots[i] < update->view.slots);
}

void message_code_updates(struct wire *wire, struct message *m, struct message_pages *pages) {
    wire_count(wire, &m->count, 32);
    if (wire->failed)
        return;
    struct summary_update *updates = wire_space(wire, m->updates, m->count, sizeof *updates);
    for (uint32_t i = 0; i < m->count && !wire->failed; i++)
        code_update(wire, &updates[i], m->pool.layout.head_dim, pages);
    m->updates = updates;
}

static void require_slots(struct wire *wire, const uint32_t *slots, uint32_t count, uint32_t capacity) {
    for (uint32_t i = 0; i < count && !wire->failed; i++)
        wire_require(wire, slots[i] < capacity);
}

static void code_move(struct wire *wire, struct statistics_move *move, const struct head_shape *shape) {
    struct kv_statistics *from = wire_space(wire, move->from, 1, sizeof *from);
    struct kv_statistics *to = wire_space(wire, move->to, 1, sizeof *to);
    if (from == NULL || to == NULL)
        return;
    code_statistics(wire, from, shape);
    code_statistics(wire, to, shape);
    wire_set(wire, move->from, from);
    wire_set(wire, move->to, to);
    bool lists = wire_is_there(wire, move->from_slots != NULL);
    wire_u32(wire, &move->count);
    wire_u32(wire, &move->clear_first);
    wire_u32(wire, &move->clear_end);
    wire_bool(wire, &move->rows_stay);
    if (lists) {
        wire_array(wire, move->from_slots, move->count);
        wire_array(wire, move->to_slots, move->count);
    }
    if (!wire->reading || wire->failed)
        return;
    wire_require(wire, move->clear_first <= move->clear_end && move->clear_end <= to->capacity);
    /* Rows of both are walked with the measures of one. */
    wire_require(wire, from->window == to->window && from->content == to->content);
    if (lists) {
        require_slots(wire, move->from_slots, move->count, from->capacity);
        require_slots(wire, move->to_slots, move->count, to->capacity);
    } else {
        wire_require(wire, move->count <= from->capacity && move->count <= to->capacity);
    }
}

void message_code_moves(struct wire *wire, struct message *m) {
    wire_count(wire, &m->count, 24);
    wire_u32(wire, &m->group);
    wire_u32(wire, &m->head_dim);
    if (!wire_require(wire, m->group <= GROUP_MOST && m->head_dim <= SCORE_HEAD_DIM_MAX) || wire->failed)
        return;
    const struct head_shape shape = {m->group, m->head_dim};
    struct statistics_move *moves = wire_space(wire, m->moves, m->count, sizeof *moves);
    for (uint32_t i = 0; i < m->count && !wire->failed; i++)
        code_move(wire, &moves[i], &shape);
    m->moves = moves;
}
