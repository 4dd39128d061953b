/* SPDX-License-Identifier: Apache-2.0 */
#include "commands/bench_work.h"

#include "engine/clock.h"

#include <stdlib.h>
#include <string.h>

/* Token `position` of sequence `sequence`: no two sequences begin alike. */
static int32_t fixed_token(const struct engine *engine, uint32_t sequence, uint32_t position) {
    uint64_t mixed = 1000 + 7 * (uint64_t)position + 131 * (uint64_t)sequence;
    return (int32_t)(mixed % engine_model(engine)->shape.vocabulary);
}

/* Whether `sequences` empty sequences can have `tokens` tokens each: told before the first of them is computed. */
static int check_fits(struct engine *engine, uint32_t sequences, uint64_t tokens, struct error *error) {
    if (tokens > engine_tokens_max(engine))
        return error_set(error, ERROR_CONTEXT, "%llu tokens are more than a sequence can have, %u",
            (unsigned long long)tokens, engine_tokens_max(engine));
    struct sequence *empty = sequence_create(engine);
    if (empty == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a sequence");
    uint64_t needed = (uint64_t)sequences * sequence_pages_needed(empty, (uint32_t)tokens);
    sequence_free(empty);
    uint32_t available = kv_cache_pages_free(engine_kv_cache(engine));
    if (needed > available)
        return error_set(
            error, ERROR_PAGES, "%llu KV pages are needed, %u are free", (unsigned long long)needed, available);
    return 0;
}

/* Appends `tokens` fixed tokens; the hidden row of the last one is asked for on demand. */
static int fill(struct engine *engine, struct sequence *sequence, uint32_t number, uint32_t tokens, bool want_last,
    struct error *error) {
    int code = 0;
    uint32_t rows_max = engine_batch_rows(engine);
    int32_t *ids = malloc(rows_max * sizeof *ids);
    if (ids == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for %u tokens", rows_max);
    for (uint32_t done = 0; done < tokens && code == 0;) {
        uint32_t count = tokens - done < rows_max ? tokens - done : rows_max;
        for (uint32_t i = 0; i < count; i++)
            ids[i] = fixed_token(engine, number, done + i);
        done += count;
        struct batch_item item = {.sequence = sequence,
            .tokens = ids,
            .count = count,
            .want = want_last && done == tokens ? WANT_LAST : WANT_NONE};
        code = engine_forward(engine, &item, 1, error);
    }
    free(ids);
    return code;
}

static const struct sample_params greedy = {.temperature = 0, .top_p = 1, .forced = -1};

int bench_prefill(struct engine *engine, uint32_t tokens, double *seconds, struct error *error) {
    int code = check_fits(engine, 1, tokens, error);
    if (code != 0)
        return code;
    struct sequence *sequence = sequence_create(engine);
    if (sequence == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a sequence");
    uint32_t row = 0;
    struct sample_result result;
    double start = clock_seconds();
    code = fill(engine, sequence, 0, tokens, true, error);
    if (code == 0)
        code = engine_sample(engine, &row, &greedy, 1, &result, error);
    *seconds = clock_seconds() - start;
    sequence_free(sequence);
    return code;
}

int bench_decode_prepare(struct bench_decode *work, struct engine *engine, uint32_t batch, uint32_t depth,
    uint32_t steps, struct error *error) {
    *work = (struct bench_decode){.engine = engine, .batch = batch, .depth = depth, .steps = steps};
    int code = check_fits(engine, batch, (uint64_t)depth + steps, error);
    if (code != 0)
        return code;
    if (batch > engine_batch_rows(engine))
        return error_set(error, ERROR_INVALID, "batch %u is over the %u rows of a step (--batch-tokens)", batch,
            engine_batch_rows(engine));
    work->filled = calloc(batch, sizeof *work->filled);
    if (work->filled == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for %u sequences", batch);
    for (uint32_t i = 0; i < batch; i++) {
        work->filled[i] = sequence_create(engine);
        if (work->filled[i] == NULL)
            return error_set(error, ERROR_MEMORY, "no memory for sequence %u of %u", i + 1, batch);
        code = fill(engine, work->filled[i], i, depth, false, error);
        if (code != 0)
            return code;
    }
    return 0;
}

void bench_decode_free(struct bench_decode *work) {
    for (uint32_t i = 0; work->filled != NULL && i < work->batch; i++)
        sequence_free(work->filled[i]);
    free(work->filled);
    work->filled = NULL;
}

/* What one step of `batch` sequences needs. */
struct decode_step {
    struct batch_item *items;
    int32_t *tokens;
    uint32_t *rows;
    struct sample_params *params;
    struct sample_result *results;
};

static int decode_step_create(struct decode_step *step, struct bench_decode *work, struct error *error) {
    uint32_t batch = work->batch;
    step->items = calloc(batch, sizeof *step->items);
    step->tokens = calloc(batch, sizeof *step->tokens);
    step->rows = calloc(batch, sizeof *step->rows);
    step->params = calloc(batch, sizeof *step->params);
    step->results = calloc(batch, sizeof *step->results);
    if (!step->items || !step->tokens || !step->rows || !step->params || !step->results)
        return error_set(error, ERROR_MEMORY, "no memory for a batch of %u", batch);
    for (uint32_t i = 0; i < batch; i++) {
        step->params[i] = greedy;
        step->items[i] = (struct batch_item){.tokens = &step->tokens[i], .count = 1, .want = WANT_LAST};
        step->items[i].sequence = sequence_fork(work->filled[i]);
        if (step->items[i].sequence == NULL)
            return error_set(error, ERROR_MEMORY, "no memory for fork %u of %u", i + 1, batch);
    }
    return 0;
}

static void decode_step_free(struct decode_step *step, uint32_t batch) {
    for (uint32_t i = 0; step->items != NULL && i < batch; i++)
        sequence_free(step->items[i].sequence);
    free(step->items);
    free(step->tokens);
    free(step->rows);
    free(step->params);
    free(step->results);
}

static int decode_once(struct bench_decode *work, struct decode_step *step, uint32_t number, struct error *error) {
    for (uint32_t i = 0; i < work->batch; i++)
        step->tokens[i] = fixed_token(work->engine, i, work->depth + number);
    int code = engine_forward(work->engine, step->items, work->batch, error);
    if (code != 0)
        return code;
    for (uint32_t i = 0; i < work->batch; i++)
        step->rows[i] = step->items[i].first_row;
    return engine_sample(work->engine, step->rows, step->params, work->batch, step->results, error);
}

int bench_decode_run(struct bench_decode *work, double *seconds, struct error *error) {
    struct decode_step step = {0};
    int code = decode_step_create(&step, work, error);
    double start = clock_seconds();
    for (uint32_t i = 0; i < work->steps && code == 0; i++)
        code = decode_once(work, &step, i, error);
    *seconds = clock_seconds() - start;
    decode_step_free(&step, work->batch);
    return code;
}
