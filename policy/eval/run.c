/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/eval/run_internal.h"

#include <stdlib.h>
#include <string.h>

#include "engine/background.h"
#include "engine/clock.h"

/* ---- the run ---- */

static int allocate_steps(struct eval_run *run, struct error *error) {
    size_t lanes = run->options.setup->variants_count + 1, most = BRANCHES * lanes;
    run->lanes = calloc(lanes, sizeof *run->lanes);
    run->items = calloc(most, sizeof *run->items);
    run->sequences = calloc(most, sizeof *run->sequences);
    run->active = calloc(most, sizeof *run->active);
    run->owners = calloc(most, sizeof *run->owners);
    run->rows = calloc(most, sizeof *run->rows);
    run->teacher_rows = calloc(most, sizeof *run->teacher_rows);
    run->params = calloc(most, sizeof *run->params);
    run->samples = calloc(most, sizeof *run->samples);
    run->kl = calloc(most, sizeof *run->kl);
    if (run->lanes == NULL || run->items == NULL || run->sequences == NULL || run->active == NULL ||
        run->owners == NULL || run->rows == NULL || run->teacher_rows == NULL || run->params == NULL ||
        run->samples == NULL || run->kl == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for steps of %zu sequences", most);
    return 0;
}

struct eval_run *eval_run_create(const struct eval_run_options *options, struct error *error) {
    struct eval_run *run = calloc(1, sizeof *run);
    if (run == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for an evaluation");
        return NULL;
    }
    const struct model_shape *shape = &engine_model(options->engine)->shape;
    run->options = *options;
    if (engine_batch_rows(options->engine) < 2 * BRANCHES) {
        error_set(
            error, ERROR_INVALID, "an evaluation needs batches of at least %d tokens (--batch-tokens)", 2 * BRANCHES);
        eval_run_free(run);
        return NULL;
    }
    run->heads = shape->layers * shape->kv_heads;
    int code = tokenizer_list_ends(options->tokenizer, &run->ends);
    if (code != 0)
        error_set(error, code, "no memory for end tokens");
    if (code != 0 || allocate_steps(run, error) != 0) {
        eval_run_free(run);
        return NULL;
    }
    return run;
}

void eval_run_free(struct eval_run *run) {
    if (run == NULL)
        return;
    token_list_free(&run->ends);
    free(run->lanes);
    free(run->items);
    free(run->sequences);
    free(run->active);
    free(run->owners);
    free(run->rows);
    free(run->teacher_rows);
    free(run->params);
    free(run->samples);
    free(run->kl);
    free(run);
}

/* ---- lanes ---- */

static void lane_clear(struct lane *lane) {
    for (int b = 0; b < BRANCHES; b++) {
        branch_close(&lane->branches[b]);
        free(lane->branches[b].output);
        text_stream_free(lane->branches[b].stream);
    }
    sequence_free(lane->sequence);
    free(lane->kept);
    memset(lane, 0, sizeof *lane);
}

static void clear_wave(struct eval_run *run) {
    for (uint32_t i = 0; i < run->lanes_count; i++)
        lane_clear(&run->lanes[i]);
    run->lanes_count = 0;
}

/* ---- stems ---- */

static void drop_stem(struct eval_run *run) {
    sequence_free(run->stem.sequence);
    run->stem = (struct stem){0};
}

/* Every item has random numbers of its own. */
static int choose_policy(struct eval_run *run, uint32_t variant, struct error *error) {
    if (variant == 0)
        return 0;
    struct policy_settings settings = run->options.setup->variants[variant].settings; /* gates are borrowed */
    settings.seed += run->work->index;
    return sequence_set_policy(run->stem.sequence, &settings, (uint32_t)run->work->question->prompt.count, error);
}

/* Computes the prompt; all its prunes but the last. */
static int prefill(struct eval_run *run, struct error *error) {
    struct engine *engine = run->options.engine;
    struct stem *stem = &run->stem;
    const struct eval_question *question = run->work->question;
    uint32_t count = (uint32_t)question->prompt.count, rows, row = 0;
    double start = clock_seconds();
    uint32_t done = sequence_reuse_prefix(stem->sequence, question->prompt.ids, count);
    int code = done > 0 ? give_way(run) : 0; /* much may have been copied */
    for (; code == 0 && done < count; done += rows) {
        uint32_t most = background_rows(run->options.background, engine_batch_rows(engine));
        rows = count - done;
        rows = rows > most ? most : rows;
        rows = rows > sequence_room(stem->sequence) ? sequence_room(stem->sequence) : rows;
        bool last = done + rows == count;
        struct batch_item item = {.sequence = stem->sequence,
            .tokens = question->prompt.ids + done,
            .count = rows,
            .want = last && question->asked.count == 0 ? WANT_LAST : WANT_NONE};
        code = engine_forward(engine, &item, 1, error);
        if (code == 0 && !last)
            code = engine_prune(engine, &stem->sequence, 1, error);
        if (code == 0 && !last) /* rows of the last stay valid for first_results */
            code = give_way(run);
        row = item.first_row;
        stem->tokens += rows;
    }
    if (code != 0)
        return code;
    stem->seconds = clock_seconds() - start;
    code = question->asked.count == 0 ? first_results(run, row, stem->first, error) : 0;
    return code == 0 ? give_way(run) : code;
}

/* Whether the prompt of one serves the other: nothing but the budget differs, and it does not matter before the last
 * prune. */
static bool share_stem(const struct eval_run *run, uint32_t a, uint32_t b) {
    const struct eval_variant *x = &run->options.setup->variants[a], *y = &run->options.setup->variants[b];
    return a > 0 && b > 0 && strcmp(x->policy, y->policy) == 0 && x->settings.prefill_prune_every == 0 &&
           !policy_settings_keep_all(&x->settings) && !policy_settings_keep_all(&y->settings);
}

static int create_stem(struct eval_run *run, uint32_t variant, struct error *error) {
    drop_stem(run);
    run->stem.variant = variant;
    run->stem.sequence = sequence_create(run->options.engine);
    if (run->stem.sequence == NULL)
        return error_set(error, ERROR_PAGES, "no memory for a sequence");
    int code = choose_policy(run, variant, error);
    return code == 0 ? prefill(run, error) : code;
}

/* The lane's sequence, and the last prune of its prompt. */
static int take_stem(struct eval_run *run, struct lane *lane, struct error *error) {
    struct stem *stem = &run->stem;
    const struct policy_settings *settings = &run->options.setup->variants[lane->variant].settings;
    int code = 0;
    if (stem->sequence == NULL || (stem->variant != lane->variant && !share_stem(run, stem->variant, lane->variant)))
        code = create_stem(run, lane->variant, error);
    if (code != 0)
        return code;
    lane->sequence = sequence_fork(stem->sequence);
    if (lane->sequence == NULL)
        return error_set(error, ERROR_PAGES, "no memory for a fork of a sequence");
    if (stem->variant != lane->variant)
        code = sequence_set_budget(lane->sequence, settings->ratio, settings->tokens, error);
    double start = clock_seconds();
    if (code == 0)
        code = engine_prune(run->options.engine, &lane->sequence, 1, error);
    lane->seconds = stem->seconds + clock_seconds() - start;
    lane->tokens = stem->tokens;
    return code;
}

/* ---- lanes of a wave ---- */

/* The prompt of one variant, pruned; its branches when no question follows. */
static int add_lane(struct eval_run *run, uint32_t variant, struct error *error) {
    struct lane *lane = &run->lanes[run->lanes_count++];
    lane->variant = variant;
    int code = take_stem(run, lane, error);
    if (code == 0)
        code = record_kept(run, lane, error);
    if (code == 0 && variant == 0) { /* held, so that the others find its prefix */
        run->teacher = run->stem.sequence;
        run->stem.sequence = NULL;
    }
    if (code == 0 && run->work->question->asked.count == 0)
        code = open_branches(run, lane, run->stem.first, error);
    return code == 0 ? give_way(run) : code;
}

/* `full` once more, for what further waves are compared with. */
static int add_teacher(struct eval_run *run, struct error *error) {
    struct lane *lane = &run->lanes[run->lanes_count++];
    lane->silent = true;
    lane->sequence = sequence_fork(run->teacher);
    if (lane->sequence == NULL)
        return error_set(error, ERROR_PAGES, "no memory for a fork of a sequence");
    return open_branches(run, lane, NULL, error);
}

/* ---- waves ---- */

/* Pages that a lane will take beyond what it holds: both branches grow, and a pruned fork copies the pages in which it
 * evicts. An estimate: what it misses is found when pages run out. */
static uint64_t lane_growth(const struct eval_run *run, struct lane *lane) {
    const struct eval_work *work = run->work;
    struct sequence *sequence = lane->sequence != NULL ? lane->sequence : lane->branches[0].sequence;
    uint32_t steps = work->item != NULL ? work->item->max_tokens : (uint32_t)work->question->text.count;
    steps += (uint32_t)work->question->asked.count;
    uint64_t growth = (uint64_t)run->heads * (steps / KV_PAGE_SLOTS + 2) * BRANCHES;
    if (lane->variant == 0 || sequence == NULL)
        return growth;
    size_t page = kv_cache_pool(engine_kv_cache(run->options.engine))->page_bytes;
    return growth + kv_sequence_pages_held(sequence_kv(sequence)) + 2 * sequence_statistics_bytes(sequence) / page;
}

static bool has_room(const struct eval_run *run) {
    uint64_t growth = 0;
    for (uint32_t i = 0; i < run->lanes_count; i++)
        growth += lane_growth(run, &run->lanes[i]);
    return growth <= kv_cache_pages_free(engine_kv_cache(run->options.engine));
}

static void remove_last_lane(struct eval_run *run) {
    lane_clear(&run->lanes[--run->lanes_count]);
}

/* Fills the wave with variants of order [*next, count), as many as fit and at most `limit`; *next moves on. */
static int fill_wave(
    struct eval_run *run, const uint32_t *order, uint32_t count, uint32_t limit, uint32_t *next, struct error *error) {
    uint32_t begin = *next;
    if (*next > 0 && run->work->item == NULL) {
        int code = add_teacher(run, error);
        if (code != 0)
            return code;
    }
    while (*next < count && *next - begin < limit) {
        int code = add_lane(run, order[*next], error);
        if (code == 0 && has_room(run)) {
            ++*next;
            continue;
        }
        if (code == 0 && *next == begin) { /* alone: tried, whatever the estimate says */
            ++*next;
            return 0;
        }
        if (*next == begin || (code != 0 && code != ERROR_PAGES))
            return code;
        remove_last_lane(run);
        return 0;
    }
    return 0;
}

/* Names the item and says what helps. */
static int name_item(const struct eval_run *run, int code, struct error *error) {
    struct error cause = *error;
    if (code == 0)
        return 0;
    return error_set(error, code, "item %u, length %u: %.380s%s", run->work->index,
        run->options.setup->lengths[run->work->length], cause.message,
        code == ERROR_PAGES || code == ERROR_CONTEXT ? " (--kv-memory sets the pages, --context the limit)" : "");
}

static int run_waves(struct eval_run *run, const uint32_t *order, uint32_t count, struct error *error) {
    uint32_t limit = engine_batch_rows(run->options.engine) / BRANCHES, next = 0;
    int code = 0;
    limit = limit > 2 ? limit - 1 : 1;
    while (next < count && code == 0) {
        uint32_t begin = next;
        code = fill_wave(run, order, count, limit, &next, error);
        drop_stem(run); /* its pages are wanted */
        uint32_t lanes = next - begin;
        if (code == 0)
            code = run_wave(run, error);
        if (code == 0)
            code = emit_wave(run, error);
        if (code == ERROR_PAGES && lanes > 1) { /* the estimate was too low: again with fewer */
            limit = lanes / 2;
            next = begin;
            code = 0;
        }
        clear_wave(run);
        if (next == 0) {
            sequence_free(run->teacher);
            run->teacher = NULL;
        }
    }
    return code;
}

int eval_run_question(struct eval_run *run, const struct eval_work *work, struct error *error) {
    uint32_t variants = run->options.setup->variants_count, count = 1;
    uint32_t *order = calloc(variants, sizeof *order); /* [0] is full */
    if (order == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for %u policies", variants);
    for (uint32_t v = 1; v < variants; v++)
        if (work->wanted[v])
            order[count++] = v;
    run->work = work;
    int code = name_item(run, run_waves(run, order, count, error), error);
    clear_wave(run);
    sequence_free(run->teacher);
    run->teacher = NULL;
    free(order);
    return code;
}
