/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/engine_internal.h"

#include <stdlib.h>
#include <string.h>

#include "engine/clock.h"

enum { BATCH_ROWS_DEFAULT = 512 };

static int allocate_host(struct engine *engine, struct error *error) {
    uint32_t rows = engine->batch_rows;
    engine->tokens = malloc(rows * sizeof *engine->tokens);
    engine->wanted = malloc(rows * sizeof *engine->wanted);
    engine->items = malloc(rows * sizeof *engine->items);
    if (engine->tokens == NULL || engine->wanted == NULL || engine->items == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for batches of %u tokens", rows);
    return 0;
}

static int check_ranks(const struct engine *engine, struct error *error) {
    const struct model_shape *s = &engine->model->shape;
    uint32_t ranks = backend_ranks(engine->backend);
    const struct {
        const char *name;
        uint32_t count;
    } shared[] = {{"KV heads", s->kv_heads}, {"heads", s->heads}, {"feed-forward columns", s->ff_width}};
    for (size_t i = 0; i < sizeof shared / sizeof shared[0]; i++)
        if (shared[i].count % ranks != 0)
            return error_set(error, ERROR_UNSUPPORTED, "the model's %u %s cannot be shared out evenly over %u devices",
                shared[i].count, shared[i].name, ranks);
    return 0;
}

static int create_cache(struct engine *engine, const struct engine_options *options, struct error *error) {
    const struct model_shape *shape = &engine->model->shape;
    struct kv_cache_options cache = {
        .layout = {.layers = shape->layers,
            .kv_heads = shape->kv_heads,
            .head_dim = shape->head_dim,
            .format = options->kv_format},
        .bytes = options->kv_bytes,
        .prefix_sharing = options->prefix_sharing,
        .poison_free = options->poison_free,
        .windows = engine->model->windows,
        .append_most = engine->batch_rows,
    };
    engine->cache = kv_cache_create(engine->backend, &cache, error);
    if (engine->cache == NULL)
        return error ? error->code : ERROR_MEMORY;
    uint32_t context = options->context == 0 ? shape->context : options->context;
    if (context > shape->context)
        return error_set(error, ERROR_INVALID, "context %u is over the model's %u tokens", context, shape->context);
    engine->context = context;
    uint32_t held = kv_cache_tokens_max(engine->cache);
    engine->tokens_max = held < context ? held : context;
    return 0;
}

struct engine *engine_open(const struct model *model, const struct engine_options *options, struct error *error) {
    struct engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for the engine");
        return NULL;
    }
    engine->model = model;
    engine->batch_rows = options->batch_rows == 0 ? BATCH_ROWS_DEFAULT : options->batch_rows;
    struct backend_options backend = options->backend;
    backend.fingerprint = model->fingerprint;
    engine->backend = backend_open(&backend, error);
    if (engine->backend == NULL || check_ranks(engine, error) != 0 || allocate_host(engine, error) != 0 ||
        create_cache(engine, options, error) != 0)
        goto fail;
    engine->transformer = transformer_create(engine->backend, model, engine->batch_rows, options->exact, error);
    if (engine->transformer == NULL)
        goto fail;
    return engine;
fail:
    engine_close(engine);
    return NULL;
}

void engine_close(struct engine *engine) {
    if (engine == NULL)
        return;
    transformer_free(engine->transformer);
    prune_space_free(engine);
    if (engine->cache != NULL)
        kv_cache_free(engine->cache);
    if (engine->backend != NULL)
        engine->backend->operations->close(engine->backend);
    free(engine->tokens);
    free(engine->wanted);
    free(engine->items);
    free(engine->views);
    free(engine->statistics);
    free(engine->moments);
    free(engine);
}

const struct model *engine_model(const struct engine *engine) {
    return engine->model;
}

struct policy_model engine_policy_model(const struct engine *engine) {
    const struct model_shape *shape = &engine->model->shape;
    return (struct policy_model){
        .fingerprint = engine->model->fingerprint,
        .layers = shape->layers,
        .kv_heads = shape->kv_heads,
        .head_dim = shape->head_dim,
    };
}

struct kv_cache *engine_kv_cache(const struct engine *engine) {
    return engine->cache;
}

const char *engine_describe(const struct engine *engine) {
    return engine->backend->operations->describe(engine->backend);
}

int engine_check(const struct engine *engine, struct error *error) {
    return backend_check(engine->backend, error);
}

uint32_t engine_batch_rows(const struct engine *engine) {
    return engine->batch_rows;
}

uint32_t engine_tokens_max(const struct engine *engine) {
    return engine->tokens_max;
}

uint32_t engine_context(const struct engine *engine) {
    return engine->context;
}

size_t engine_weight_bytes(const struct engine *engine) {
    return transformer_weight_bytes(engine->transformer);
}

static int check_item(const struct engine *engine, const struct batch_item *item, struct error *error) {
    if (item->count == 0 || item->count > engine->batch_rows)
        return error_set(
            error, ERROR_INVALID, "a batch item of %u tokens, allowed are 1 to %u", item->count, engine->batch_rows);
    uint32_t limit = item->sequence->eviction.evicts ? engine->context : engine->tokens_max;
    if ((uint64_t)sequence_length(item->sequence) + item->count > limit)
        return error_set(error, ERROR_CONTEXT, "%u tokens after %u are more than the limit of %u", item->count,
            sequence_length(item->sequence), limit);
    if (item->sequence->swap != NULL)
        return error_set(error, ERROR_INVALID, "a sequence that is swapped out cannot go on");
    if (item->count > sequence_room(item->sequence))
        return error_set(error, ERROR_INVALID, "%u tokens where the next prune is due after %u", item->count,
            sequence_room(item->sequence));
    for (uint32_t i = 0; i < item->count; i++)
        if (item->tokens[i] < 0 || (uint32_t)item->tokens[i] >= engine->model->shape.vocabulary)
            return error_set(error, ERROR_INVALID, "token id %d is outside the vocabulary of %u", item->tokens[i],
                engine->model->shape.vocabulary);
    return 0;
}

/* Work space for views and statistics of a batch of `count` sequences. */
static int reserve_views(struct engine *engine, uint32_t count, struct error *error) {
    const struct model_shape *shape = &engine->model->shape;
    size_t views = (size_t)shape->layers * count * shape->kv_heads;
    if (views <= engine->views_capacity)
        return 0;
    struct kv_head_view *grown = realloc(engine->views, views * sizeof *grown);
    engine->views = grown != NULL ? grown : engine->views;
    struct kv_statistics *statistics = realloc(engine->statistics, views * sizeof *statistics);
    engine->statistics = statistics != NULL ? statistics : engine->statistics;
    struct query_moments *moments = realloc(engine->moments, views * sizeof *moments);
    engine->moments = moments != NULL ? moments : engine->moments;
    if (grown == NULL || statistics == NULL || moments == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a batch of %u sequences", count);
    engine->views_capacity = views;
    return 0;
}

/* Statistics grow before pages are counted, since they take some of them. They may stay grown when the batch fails. */
static int reserve_statistics(const struct batch_item *items, uint32_t count, struct error *error) {
    int code = 0;
    for (uint32_t i = 0; i < count && code == 0; i++)
        code = sequence_reserve_statistics(items[i].sequence, items[i].count, error);
    return code;
}

/* Checks everything that can fail without harm, and prepares memory, before the first sequence changes. */
static int prepare_batch(struct engine *engine, const struct batch_item *items, uint32_t count, struct error *error) {
    uint64_t rows = 0, pages = 0;
    for (uint32_t i = 0; i < count; i++) {
        int code = check_item(engine, &items[i], error);
        if (code != 0)
            return code;
        rows += items[i].count;
        pages += sequence_pages_needed(items[i].sequence, items[i].count);
        if (sequence_reserve_tokens(items[i].sequence, items[i].count) != 0)
            return error_set(error, ERROR_MEMORY, "no memory for a sequence's tokens");
    }
    if (rows > engine->batch_rows)
        return error_set(error, ERROR_INVALID, "a batch of %llu tokens, allowed are %u", (unsigned long long)rows,
            engine->batch_rows);
    if (pages > kv_cache_pages_free(engine->cache))
        return error_set(error, ERROR_PAGES, "%llu KV pages are needed, %u are free", (unsigned long long)pages,
            kv_cache_pages_free(engine->cache));
    int code = reserve_views(engine, count, error);
    return code == 0 ? reserve_statistics(items, count, error) : code;
}

/* Rows of an item that will have left the window before the next prune. */
static uint32_t window_from(const struct sequence *sequence, uint32_t position, uint32_t rows) {
    uint32_t next = sequence_next_prune(sequence), window = sequence->eviction.settings.window;
    bool recorded = (sequence->eviction.recorded & STATISTICS_WINDOWED) != 0; /* may be read before */
    if (recorded || next == UINT32_MAX || next < window || next - window <= position)
        return 0;
    uint32_t from = next - window - position;
    return from < rows ? from : rows;
}

/* Appends the items' tokens to their sequences; fills tokens, items, wanted and the items' first_row. */
static int append_items(struct engine *engine, struct batch_item *items, uint32_t count, struct error *error) {
    uint32_t row = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct sequence *sequence = items[i].sequence;
        uint32_t length = sequence_length(sequence), added = items[i].count;
        int code = kv_sequence_append(sequence->kv, added, error);
        if (code != 0)
            return code;
        memcpy(sequence->tokens + length, items[i].tokens, added * sizeof *sequence->tokens);
        memcpy(engine->tokens + row, items[i].tokens, added * sizeof *engine->tokens);
        engine->items[i] = (struct kv_item){
            .first_row = row,
            .rows = added,
            .position = length,
            .window_from = window_from(sequence, length, added),
            .prompt = sequence->eviction.prompt_tokens,
        };
        items[i].first_row = engine->wanted_count;
        uint32_t first = items[i].want == WANT_ALL ? 0 : added - 1;
        for (uint32_t r = items[i].want == WANT_NONE ? added : first; r < added; r++)
            engine->wanted[engine->wanted_count++] = row + r;
        row += added;
    }
    return 0;
}

static void send_tables(struct engine *engine, const struct batch_item *items, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        kv_sequence_gather_tables(items[i].sequence->kv);
    kv_cache_send_tables(engine->cache);
}

static void collect_layer(const struct sequence *sequence, uint32_t layer, struct kv_head_view *views) {
    uint32_t kv_heads = sequence->engine->model->shape.kv_heads;
    const struct summaries *summaries = sequence->eviction.summaries;
    kv_sequence_views(sequence->kv, layer, views);
    for (uint32_t head = 0; summaries != NULL && head < kv_heads; head++)
        views[head].summary = summaries_slot(summaries, layer * kv_heads + head);
}

static void collect_views(struct engine *engine, const struct batch_item *items, uint32_t count) {
    const struct model_shape *shape = &engine->model->shape;
    struct kv_head_view *views = engine->views;
    for (uint32_t layer = 0; layer < shape->layers; layer++)
        for (uint32_t i = 0; i < count; i++, views += shape->kv_heads)
            collect_layer(items[i].sequence, layer, views);
}

/* Returns the needs of all. Where they are none the work space is left as it is. */
static uint32_t collect_statistics(struct engine *engine, const struct batch_item *items, uint32_t count) {
    const struct model_shape *shape = &engine->model->shape;
    struct kv_statistics *heads = engine->statistics;
    struct query_moments *moments = engine->moments;
    uint32_t needs = 0;
    for (uint32_t i = 0; i < count; i++)
        if (items[i].sequence->eviction.statistics != NULL)
            needs |= items[i].sequence->eviction.statistics->needs;
    for (uint32_t layer = 0; needs != 0 && layer < shape->layers; layer++)
        for (uint32_t i = 0; i < count; i++, heads += shape->kv_heads, moments++) {
            const struct statistics *from = items[i].sequence->eviction.statistics;
            size_t bytes = shape->kv_heads * sizeof *heads;
            if (from != NULL)
                memcpy(heads, &from->heads[(size_t)layer * shape->kv_heads], bytes);
            else
                memset(heads, 0, bytes);
            bool wanted = from != NULL && engine->model->windows[layer] == 0;
            *moments = wanted ? from->moments[layer] : (struct query_moments){0};
        }
    return needs;
}

int engine_forward(struct engine *engine, struct batch_item *items, uint32_t items_count, struct error *error) {
    engine->wanted_count = 0;
    int code = prepare_batch(engine, items, items_count, error);
    if (code != 0 || items_count == 0)
        return code;
    code = append_items(engine, items, items_count, error);
    if (code != 0) {
        engine->wanted_count = 0; /* what the rows hold is another batch's */
        return code;
    }
    send_tables(engine, items, items_count);
    collect_views(engine, items, items_count);
    uint32_t needs = collect_statistics(engine, items, items_count);
    const struct score_layer *scored = engine_plan_ahead(engine, items, items_count);
    const struct kv_item *last = &engine->items[items_count - 1];
    struct transformer_batch batch = {
        .tokens = engine->tokens,
        .rows = last->first_row + last->rows,
        .pool = kv_cache_pool(engine->cache),
        .items = engine->items,
        .items_count = items_count,
        .views = engine->views,
        .statistics = needs & ~(uint32_t)STATISTIC_MOMENTS ? engine->statistics : NULL,
        .moments = needs & STATISTIC_MOMENTS ? engine->moments : NULL,
        .scored = scored,
        .wanted = engine->wanted,
        .wanted_count = engine->wanted_count,
    };
    transformer_forward(engine->transformer, &batch);
    code = backend_check(engine->backend, error);
    if (code != 0) {
        engine->wanted_count = 0;
        return code;
    }
    engine_score_ahead(engine);
    for (uint32_t i = 0; i < items_count; i++) {
        struct sequence *sequence = items[i].sequence;
        if (!sequence->unshared) {
            kv_sequence_publish(sequence->kv, sequence->tokens);
            sequence_leave_snapshot(sequence);
        }
        kv_sequence_slide(sequence->kv);
    }
    return 0;
}

static int check_rows(const struct engine *engine, const uint32_t *rows, uint32_t count, struct error *error) {
    for (uint32_t i = 0; i < count; i++)
        if (rows[i] >= engine->wanted_count)
            return error_set(
                error, ERROR_INVALID, "row %u was not asked for: the batch has %u", rows[i], engine->wanted_count);
    return 0;
}

static uint32_t tile_rows(uint32_t count, uint32_t done) {
    return count - done < TRANSFORMER_TILE ? count - done : TRANSFORMER_TILE;
}

int engine_sample(struct engine *engine, const uint32_t *rows, const struct sample_params *params, uint32_t count,
    struct sample_result *results, struct error *error) {
    int code = check_rows(engine, rows, count, error);
    if (code != 0)
        return code;
    for (uint32_t done = 0, tile; done < count; done += tile) {
        tile = tile_rows(count, done);
        const float *logits = transformer_logits(engine->transformer, rows + done, tile, 0, error);
        if (logits == NULL)
            return error ? error->code : ERROR_MEMORY;
        double start = clock_seconds();
        engine->backend->operations->sample(
            engine->backend, logits, tile, engine->model->shape.vocabulary, params + done, results + done);
        transformer_profile(engine->transformer)->seconds[PHASE_SAMPLE] += clock_seconds() - start;
    }
    return 0;
}

int engine_logits(struct engine *engine, uint32_t row, float *out, struct error *error) {
    int code = check_rows(engine, &row, 1, error);
    if (code != 0)
        return code;
    const float *logits = transformer_logits(engine->transformer, &row, 1, 0, error);
    if (logits == NULL)
        return error ? error->code : ERROR_MEMORY;
    engine->backend->operations->download(
        engine->backend, out, logits, engine->model->shape.vocabulary * sizeof(float));
    return 0;
}

int engine_hidden(struct engine *engine, uint32_t row, uint32_t count, float *out, struct error *error) {
    if (count > engine->wanted_count || row > engine->wanted_count - count)
        return error_set(error, ERROR_INVALID, "rows %u to %llu were not asked for: the batch has %u", row,
            (unsigned long long)row + count, engine->wanted_count);
    const float *rows = transformer_hidden(engine->transformer, row);
    engine->backend->operations->download(
        engine->backend, out, rows, (size_t)count * engine->model->shape.width * sizeof *out);
    return backend_check(engine->backend, error);
}

/* Each different row of `rows` once, in `distinct`; where[i]: of row i there. Returns their number. */
static uint32_t list_distinct(const uint32_t *rows, uint32_t count, uint32_t *distinct, uint32_t *where) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < count; i++) {
        where[i] = 0;
        while (where[i] < found && distinct[where[i]] != rows[i])
            where[i]++;
        if (where[i] == found)
            distinct[found++] = rows[i];
    }
    return found;
}

int engine_kl(struct engine *engine, const uint32_t *p_rows, const uint32_t *q_rows, uint32_t count, float *out,
    struct error *error) {
    int code = check_rows(engine, p_rows, count, error);
    if (code == 0)
        code = check_rows(engine, q_rows, count, error);
    if (code != 0)
        return code;
    for (uint32_t done = 0, tile; done < count; done += tile) {
        tile = tile_rows(count, done);
        uint32_t distinct[TRANSFORMER_TILE], where[TRANSFORMER_TILE];
        uint32_t found = list_distinct(p_rows + done, tile, distinct, where);
        const float *p = transformer_logits(engine->transformer, distinct, found, 0, error);
        const float *q = transformer_logits(engine->transformer, q_rows + done, tile, 1, error);
        if (p == NULL || q == NULL)
            return error ? error->code : ERROR_MEMORY;
        engine->backend->operations->kl(
            engine->backend, p, where, q, tile, engine->model->shape.vocabulary, out + done);
    }
    return 0;
}

const char *engine_phase_name(enum engine_phase phase) {
    static const char *const names[PHASE_COUNT] = {"embed", "norm", "qkv", "rope", "attend", "attn_output", "gate_up",
        "silu", "down", "logits", "sample", "score", "select", "compact"};
    return names[phase];
}

void engine_profile_enable(struct engine *engine, bool enable) {
    transformer_profile_enable(engine->transformer, enable);
}

const struct engine_profile *engine_profile_get(const struct engine *engine) {
    return transformer_profile(engine->transformer);
}
