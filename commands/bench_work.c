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

/* Whether `work` fits: told before the first token is computed. */
static int check_fits(const struct bench_decode *work, uint64_t tokens, struct error *error) {
    struct engine *engine = work->engine;
    uint32_t limit = work->policy == NULL ? engine_tokens_max(engine) : engine_context(engine);
    if (tokens > limit)
        return error_set(error, ERROR_CONTEXT, "%llu tokens are more than a sequence can have, %u",
            (unsigned long long)tokens, limit);
    struct sequence_demand demand = engine_demand(engine, work->policy, work->depth, (uint32_t)tokens);
    uint64_t last = demand.peak_pages > demand.pages ? demand.peak_pages : demand.pages;
    uint64_t needed = (work->batch - 1) * demand.pages + last;
    uint32_t available = kv_cache_pages_free(engine_kv_cache(engine));
    if (needed > available)
        return error_set(
            error, ERROR_PAGES, "%llu KV pages are needed, %u are free", (unsigned long long)needed, available);
    return 0;
}

/* Appends the tokens from the sequence's length to `tokens`, and prunes as its policy says. The hidden row of the last
 * one is asked for on demand. */
static int fill(struct engine *engine, struct sequence *sequence, const int32_t *ids, uint32_t tokens, bool want_last,
    struct error *error) {
    uint32_t rows_max = engine_batch_rows(engine);
    int code = 0;
    for (uint32_t done = sequence_length(sequence); done < tokens && code == 0;) {
        uint32_t count = tokens - done < rows_max ? tokens - done : rows_max, room = sequence_room(sequence);
        count = count < room ? count : room;
        done += count;
        struct batch_item item = {.sequence = sequence,
            .tokens = ids + done - count,
            .count = count,
            .want = want_last && done == tokens ? WANT_LAST : WANT_NONE};
        code = engine_forward(engine, &item, 1, error);
        if (code == 0)
            code = engine_prune(engine, &sequence, 1, error);
    }
    return code;
}

/* Ids of a sequence's first tokens; NULL on failed allocation. */
static int32_t *make_ids(const struct engine *engine, uint32_t number, uint32_t tokens, struct error *error) {
    int32_t *ids = malloc((tokens + (size_t)1) * sizeof *ids);
    if (ids == NULL)
        error_set(error, ERROR_MEMORY, "no memory for %u tokens", tokens);
    for (uint32_t i = 0; ids != NULL && i < tokens; i++)
        ids[i] = fixed_token(engine, number, i);
    return ids;
}

static struct sequence *make_sequence(
    struct engine *engine, const struct policy_settings *policy, uint32_t prompt_tokens, struct error *error) {
    struct sequence *sequence = sequence_create(engine);
    if (sequence == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for a sequence");
        return NULL;
    }
    if (policy != NULL && sequence_set_policy(sequence, policy, prompt_tokens, error) != 0) {
        sequence_free(sequence);
        return NULL;
    }
    return sequence;
}

static const struct sample_params greedy = {.temperature = 0, .top_p = 1, .forced = -1};

int bench_prefill(struct engine *engine, const struct policy_settings *policy, uint32_t tokens, double *seconds,
    struct error *error) {
    struct bench_decode alone = {.engine = engine, .policy = policy, .batch = 1, .depth = tokens};
    int code = check_fits(&alone, tokens, error);
    if (code != 0)
        return code;
    int32_t *ids = make_ids(engine, 0, tokens, error);
    struct sequence *sequence = ids == NULL ? NULL : make_sequence(engine, policy, tokens, error);
    if (sequence != NULL) {
        uint32_t row = 0;
        struct sample_result result;
        double start = clock_seconds();
        code = fill(engine, sequence, ids, tokens, true, error);
        if (code == 0)
            code = engine_sample(engine, &row, &greedy, 1, &result, error);
        *seconds = clock_seconds() - start;
    }
    bool made = sequence != NULL;
    sequence_free(sequence);
    free(ids);
    return made ? code : error->code;
}

/* Gives a pruned sequence pages that nobody else reads, so that no run has to copy them. */
static int own_pages(struct sequence *sequence, const struct model_shape *shape, struct error *error) {
    struct kv_sequence *kv = sequence_kv(sequence);
    int code = 0;
    for (uint32_t layer = 0; layer < shape->layers; layer++)
        for (uint32_t head = 0; head < shape->kv_heads; head++)
            for (uint32_t slot = 0; slot < kv_sequence_slots(kv, layer, head) && code == 0; slot += KV_PAGE_SLOTS)
                code = kv_sequence_own(kv, layer, head, slot, error);
    return code;
}

static int fill_sequence(struct bench_decode *work, uint32_t number, struct error *error) {
    struct engine *engine = work->engine;
    int32_t *ids = make_ids(engine, number, work->depth, error);
    struct sequence *sequence = ids == NULL ? NULL : make_sequence(engine, work->policy, work->depth, error);
    int code = sequence == NULL ? error->code : 0;
    work->filled[number] = sequence;
    if (code == 0 && work->policy != NULL)
        sequence_reuse_prefix(sequence, ids, work->depth);
    if (code == 0)
        code = fill(engine, sequence, ids, work->depth, false, error);
    if (code == 0 && work->policy != NULL)
        code = own_pages(sequence, &engine_model(engine)->shape, error);
    free(ids);
    return code;
}

int bench_decode_prepare(struct bench_decode *work, struct error *error) {
    uint64_t more = (uint64_t)work->steps * (work->policy == NULL ? 1 : work->runs);
    work->filled = NULL;
    if (work->batch > engine_batch_rows(work->engine))
        return error_set(error, ERROR_INVALID, "batch %u is over the %u rows of a step (--batch-tokens)", work->batch,
            engine_batch_rows(work->engine));
    int code = check_fits(work, work->depth + more, error);
    if (code != 0)
        return code;
    work->filled = calloc(work->batch, sizeof *work->filled);
    if (work->filled == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for %u sequences", work->batch);
    for (uint32_t i = 0; i < work->batch && code == 0; i++)
        code = fill_sequence(work, i, error);
    return code;
}

void bench_decode_free(struct bench_decode *work) {
    for (uint32_t i = 0; work->filled != NULL && i < work->batch; i++)
        sequence_free(work->filled[i]);
    free(work->filled);
    work->filled = NULL;
}

double bench_decode_kept(const struct bench_decode *work) {
    const struct model_shape *shape = &engine_model(work->engine)->shape;
    uint64_t slots = 0;
    for (uint32_t i = 0; i < work->batch; i++)
        slots += kv_sequence_tokens_held(sequence_kv(work->filled[i]));
    return (double)slots / ((double)work->batch * shape->layers * shape->kv_heads);
}

size_t bench_decode_statistics(const struct bench_decode *work) {
    size_t bytes = 0;
    for (uint32_t i = 0; i < work->batch; i++)
        bytes += sequence_statistics_bytes(work->filled[i]);
    return bytes;
}

/* What one step of `batch` sequences needs. */
struct decode_step {
    struct batch_item *items;
    struct sequence **sequences; /* forks, or with a policy the filled ones */
    int32_t *tokens;
    uint32_t *rows;
    struct sample_params *params;
    struct sample_result *results;
};

static int decode_step_create(struct decode_step *step, struct bench_decode *work, struct error *error) {
    uint32_t batch = work->batch;
    step->items = calloc(batch, sizeof *step->items);
    step->sequences = calloc(batch, sizeof *step->sequences);
    step->tokens = calloc(batch, sizeof *step->tokens);
    step->rows = calloc(batch, sizeof *step->rows);
    step->params = calloc(batch, sizeof *step->params);
    step->results = calloc(batch, sizeof *step->results);
    if (!step->items || !step->sequences || !step->tokens || !step->rows || !step->params || !step->results)
        return error_set(error, ERROR_MEMORY, "no memory for a batch of %u", batch);
    for (uint32_t i = 0; i < batch; i++) {
        step->params[i] = greedy;
        step->items[i] = (struct batch_item){.tokens = &step->tokens[i], .count = 1, .want = WANT_LAST};
        step->sequences[i] = work->policy == NULL ? sequence_fork(work->filled[i]) : work->filled[i];
        if (step->sequences[i] == NULL)
            return error_set(error, ERROR_MEMORY, "no memory for fork %u of %u", i + 1, batch);
        step->items[i].sequence = step->sequences[i];
    }
    return 0;
}

static void decode_step_free(struct decode_step *step, const struct bench_decode *work) {
    for (uint32_t i = 0; work->policy == NULL && step->sequences != NULL && i < work->batch; i++)
        sequence_free(step->sequences[i]);
    free(step->sequences);
    free(step->items);
    free(step->tokens);
    free(step->rows);
    free(step->params);
    free(step->results);
}

static int decode_once(struct bench_decode *work, struct decode_step *step, struct error *error) {
    for (uint32_t i = 0; i < work->batch; i++)
        step->tokens[i] = fixed_token(work->engine, i, sequence_length(step->sequences[i]));
    int code = engine_forward(work->engine, step->items, work->batch, error);
    if (code != 0)
        return code;
    for (uint32_t i = 0; i < work->batch; i++)
        step->rows[i] = step->items[i].first_row;
    code = engine_sample(work->engine, step->rows, step->params, work->batch, step->results, error);
    if (code == 0 && work->policy != NULL)
        code = engine_prune(work->engine, step->sequences, work->batch, error);
    return code;
}

int bench_decode_run(struct bench_decode *work, double *seconds, struct error *error) {
    struct decode_step step = {0};
    int code = decode_step_create(&step, work, error);
    double start = clock_seconds();
    for (uint32_t i = 0; i < work->steps && code == 0; i++)
        code = decode_once(work, &step, error);
    *seconds = clock_seconds() - start;
    decode_step_free(&step, work);
    return code;
}
