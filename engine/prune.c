/* SPDX-License-Identifier: Apache-2.0
 *
 * engine_prune: which sequences are due, what their slots are worth (one call of the backend for all), which stay
 * (policy/select.h; where scores are not the host's, one more call for all), and what follows from it for pages and
 * statistics. Everything is planned (prune_plan.h) before the first sequence changes.
 */
#include "engine/clock.h"
#include "engine/prune_plan.h"
#include "policy/network.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The prune at this length is over, whether something went or not. */
static void finish(struct sequence *sequence) {
    struct eviction *eviction = &sequence->eviction;
    eviction->handled = sequence_length(sequence);
    if (sequence_next_prune(sequence) == UINT32_MAX && eviction->recorded == 0) { /* decode: keep */
        statistics_free(eviction->statistics);
        eviction->statistics = NULL;
        sequence_charge_less(sequence);
    }
}

/* Chooses those that are due and over budget, and returns their number. Where nothing is to be evicted the prune is
 * over at once. */
static uint32_t choose(struct sequence *const *sequences, uint32_t count) {
    uint32_t chosen = 0;
    for (uint32_t i = 0; i < count; i++) {
        struct eviction *eviction = &sequences[i]->eviction;
        bool due = prune_is_due(sequences[i]);
        eviction->chosen = due && prune_is_over(sequences[i]);
        chosen += eviction->chosen;
        if (due && !eviction->chosen)
            finish(sequences[i]);
    }
    return chosen;
}

/* ---- selection ---- */

/* Scores of a head of a job, where the host can read them. */
static const float *host_scores(const struct prune *prune, const struct prune_job *job, uint32_t head) {
    struct backend *backend = prune->engine->backend;
    const float *scores = job->heads[head].scores;
    if (prune->host_scores == NULL)
        return scores;
    uint32_t rank = backend_rank_of_head(backend, prune->engine->model->shape.kv_heads, head);
    return prune->host_scores + (scores - (float *)backend_address(backend, prune->engine->prune.scores, rank));
}

static void fill_rows(const struct prune *prune, struct prune_job *job) {
    uint32_t kv_heads = prune->engine->model->shape.kv_heads;
    uint32_t *keep = job->keep;
    for (uint32_t r = 0; r < job->rows_count; r++) {
        uint32_t head = prune_head_of_row(job, r);
        job->rows[r] = (struct select_row){
            .layer = head / kv_heads,
            .head = head % kv_heads,
            .slots = job->heads[head].view.slots,
            .budget = job->budgets[head],
            .scores = host_scores(prune, job, head),
            .positions = prune_positions(prune->engine, job->sequence, head),
            .keep = keep,
        };
        keep += job->slots[head];
    }
}

/* A layer whose heads are to hold the same slots does so: only explicit actions can have changed that. */
static int check_shared(const struct prune *prune, const struct prune_job *job, struct error *error) {
    uint32_t kv_heads = prune->engine->model->shape.kv_heads;
    for (uint32_t i = 0; i < engine_heads(prune->engine); i++) {
        uint32_t first = i - i % kv_heads;
        const uint32_t *a = prune_positions(prune->engine, job->sequence, first);
        const uint32_t *b = prune_positions(prune->engine, job->sequence, i);
        if (job->slots[i] != job->slots[first] || (a != b && memcmp(a, b, job->slots[i] * sizeof *a) != 0))
            return error_set(error, ERROR_INVALID, "the heads of layer %u do not hold the same slots", i / kv_heads);
    }
    return 0;
}

/* What goes of a head that keeps `kept` of its slots. A slot that is empty goes too. */
static struct kv_removal removal_of(
    const struct prune_job *job, const uint32_t *keep, uint32_t kept, uint32_t slots, const uint32_t *positions) {
    if (kept == slots)
        return (struct kv_removal){.evict = KV_NO_SLOT};
    if (!job->mark || kept + 1 < slots)
        return (struct kv_removal){.keep = keep, .count = kept, .evict = KV_NO_SLOT};
    uint32_t evict = 0, end = kept;
    while (evict < end) { /* the lists agree up to the slot that is missing */
        uint32_t middle = evict + (end - evict) / 2;
        if (keep[middle] == middle)
            evict = middle + 1;
        else
            end = middle;
    }
    if (positions[evict] == KV_NO_POSITION) /* was marked before, and still is */
        return (struct kv_removal){.evict = KV_NO_SLOT};
    return (struct kv_removal){.evict = evict};
}

static void remove_nothing(struct prune_job *job) {
    for (uint32_t i = 0; i < engine_heads(job->sequence->engine); i++)
        job->removals[i] = (struct kv_removal){.evict = KV_NO_SLOT};
}

/* The backend found what goes. */
static void remove_worst(struct prune_job *job) {
    uint32_t heads = engine_heads(job->sequence->engine), heads_a_row = prune_heads_a_row(job);
    for (uint32_t i = 0; i < heads; i++) {
        uint32_t head = i / heads_a_row * heads_a_row;
        job->removals[i] = (struct kv_removal){.evict = prune_over_by_one(job, head) ? job->worst[head] : KV_NO_SLOT};
    }
}

/* Rows and removals of a job whose scores the host has. */
static int select_on_host(struct prune *prune, struct prune_job *job, struct error *error) {
    const struct policy_settings *settings = &job->sequence->eviction.settings;
    fill_rows(prune, job);
    int code =
        select_slots(job->rows, job->rows_count, settings->scope, settings->floor, &prune->engine->prune.select, error);
    remove_nothing(job);
    for (uint32_t r = 0; r < job->rows_count && code == 0; r++) {
        const struct select_row *row = &job->rows[r];
        uint32_t first = prune_head_of_row(job, r);
        for (uint32_t i = first; i < first + prune_heads_a_row(job); i++)
            job->removals[i] = removal_of(job, row->keep, row->kept, row->slots, row->positions);
    }
    return code;
}

/* ---- selection by the backend ---- */

static bool selects_on_device(const struct prune *prune) {
    return engine_operations(prune->engine)->select != NULL;
}

static struct selection list_selection(struct prune_job *job) {
    const struct policy_settings *settings = &job->sequence->eviction.settings;
    uint32_t kv_heads = job->sequence->engine->model->shape.kv_heads;
    for (uint32_t r = 0; r < job->rows_count; r++) {
        uint32_t number = prune_head_of_row(job, r);
        const struct score_head *head = &job->heads[number];
        job->selected[r] = (struct selected_row){
            .view = head->view,
            .scores = head->scores,
            .positions = prune_positions(job->sequence->engine, job->sequence, number),
            .layer = number / kv_heads,
            .head = number % kv_heads,
            .budget = job->budgets[number],
        };
    }
    return (struct selection){job->selected, job->rows_count, settings->scope, settings->floor};
}

static uint32_t count_bits(const uint32_t *words, uint32_t slots) {
    uint32_t count = 0;
    for (uint32_t word = 0; word < (slots + 31) / 32; word++)
        count += (uint32_t)__builtin_popcount(words[word]);
    return count;
}

/* Slots whose bits are set, or are not. */
static void list_bits(const uint32_t *words, uint32_t slots, bool set, uint32_t *list) {
    for (uint32_t word = 0; word < (slots + 31) / 32; word++) {
        uint32_t left = set ? words[word] : ~words[word], rest = slots - word * 32;
        left &= rest < 32 ? (1u << rest) - 1 : UINT32_MAX;
        for (; left != 0; left &= left - 1)
            *list++ = word * 32 + (uint32_t)__builtin_ctz(left);
    }
}

/* Whether the slots that stay are the shorter list, of those of which more than one goes. */
static bool lists_kept(uint32_t kept, uint32_t slots) {
    return kept < slots - kept && kept + 1 < slots;
}

/* The same as removal_of, from the shorter list. */
static struct kv_removal removal_of_list(
    const struct prune_job *job, const uint32_t *list, uint32_t kept, uint32_t slots, const uint32_t *positions) {
    if (kept == slots || (job->mark && kept + 1 == slots))
        return (struct kv_removal){
            .evict = kept < slots && positions[list[0]] != KV_NO_POSITION ? list[0] : KV_NO_SLOT};
    if (lists_kept(kept, slots))
        return (struct kv_removal){.keep = list, .count = kept, .evict = KV_NO_SLOT};
    return (struct kv_removal){.drop = list, .count = kept, .evict = KV_NO_SLOT};
}

static void remove_selected(struct prune_job *job) {
    const struct engine *engine = job->sequence->engine;
    uint32_t *list = job->keep;
    remove_nothing(job);
    for (uint32_t r = 0; r < job->rows_count; r++) {
        const struct selected_row *row = &job->selected[r];
        uint32_t slots = row->view.slots, kept = count_bits(row->stays, slots);
        list_bits(row->stays, slots, lists_kept(kept, slots), list);
        uint32_t first = prune_head_of_row(job, r);
        for (uint32_t i = first; i < first + prune_heads_a_row(job); i++)
            job->removals[i] = removal_of_list(job, list, kept, slots, prune_positions(engine, job->sequence, i));
        list += slots;
    }
}

/* ---- what goes ---- */

static int check_job(const struct prune *prune, const struct prune_job *job, struct error *error) {
    return job->sequence->eviction.settings.policy->shared ? check_shared(prune, job, error) : 0;
}

/* Removals of all jobs that are done by one call for all, or are there already; job->code of those that cannot be. All
 * that the backend was asked for is there afterwards. */
static int select_together(struct prune *prune, struct error *error) {
    const struct backend_operations *operations = engine_operations(prune->engine);
    uint32_t count = 0;
    int code = 0;
    bool told = false;
    for (uint32_t i = 0; i < prune->count; i++) {
        struct prune_job *job = &prune->jobs[i];
        job->code = check_job(prune, job, told ? NULL : error);
        told = told || job->code != 0; /* the first failure is told */
        if (job->code == 0 && !job->found && !job->one && selects_on_device(prune))
            prune->selections[count++] = list_selection(job);
    }
    if (count > 0)
        code = operations->select(
            prune->engine->backend, kv_cache_pool(prune->engine->cache), prune->selections, count, error);
    if (!operations->host_memory && (count == 0 || code != 0))
        operations->synchronize(prune->engine->backend); /* slots that go may be on their way */
    for (uint32_t i = 0; i < prune->count && code == 0; i++) {
        struct prune_job *job = &prune->jobs[i];
        if (job->code == 0 && job->one)
            remove_worst(job);
        else if (job->code == 0 && !job->found && selects_on_device(prune))
            remove_selected(job);
    }
    return code;
}

/* What select_together has left: where the host selects, one job after the other. */
static int select_job(struct prune *prune, struct prune_job *job, struct error *error) {
    if (job->code != 0 || job->found || job->one || selects_on_device(prune))
        return job->code;
    return select_on_host(prune, job, error);
}

/* ---- compaction ---- */

/* What is about to go, while it is still there. */
static void summarise(void *context) {
    const struct prune_job *job = context;
    const struct sequence *sequence = job->sequence;
    const struct engine *engine = sequence->engine;
    const struct eviction *eviction = &sequence->eviction;
    if (eviction->summaries != NULL)
        summaries_add(eviction->summaries, kv_cache_pool(engine->cache), sequence->kv, job->removals,
            eviction->statistics->heads, engine->prune.identity, eviction->settings.network,
            network_level(job->budget, job->seen), job->summaries_work);
}

/* Pages and tables. Nothing changes on a failure. */
static int compact(struct prune_job *job, struct error *error) {
    struct sequence *sequence = job->sequence;
    struct eviction *eviction = &sequence->eviction;
    int code = sequence_prepare_sinks(sequence, error);
    if (code == 0)
        code = sequence_prepare_summaries(sequence, error);
    if (code == 0)
        code = kv_sequence_prune_after(sequence->kv, job->removals, summarise, job, error);
    sequence_drop_unused_summaries(sequence);
    if (code != 0)
        return code;
    eviction->pruned = true;
    eviction->worst_at = 0;
    job->compacted = true;
    return 0;
}

/* Sums over a window of 256 queries may be 0 modulo 2^32, and are told from none by a row. */
static bool reads_window_rows(const struct policy_settings *settings) {
    struct score_stage stages[SCORE_STAGES_MAX];
    uint32_t count = policy_stages(settings, stages);
    bool reads = (uint64_t)settings->window << STATISTIC_FRACTION_BITS > UINT32_MAX;
    for (uint32_t i = 0; i < count; i++)
        reads |= stages[i].kind == STAGE_WINDOW_SPREAD || stages[i].kind == STAGE_POOL_ADAPTIVE;
    return reads;
}

/* Adds what of a job's statistics follows its slots; what is not needed after the first prune goes. */
static uint32_t follow(struct prune_job *job, struct statistics_prune *out) {
    struct eviction *eviction = &job->sequence->eviction;
    uint32_t needs = sequence_needs(job->sequence, false);
    if (eviction->statistics == NULL)
        return 0;
    if (needs == 0) {
        statistics_free(eviction->statistics);
        eviction->statistics = NULL;
        return 0;
    }
    *out = (struct statistics_prune){
        .statistics = eviction->statistics,
        .removals = job->removals,
        .slots_before = job->slots,
        .needs = needs,
        .rows_stay = job->mark && !reads_window_rows(&eviction->settings),
        .fit = job->seen >= eviction->prompt_tokens && (job->first || job->seen == eviction->prompt_tokens),
        .work = job->statistics_work,
    };
    return 1;
}

/* What follows for jobs before `end` that were compacted since the last time: statistics of all by one call, so that a
 * device gets the moves of all of them at once. */
static void settle(struct prune *prune, uint32_t end) {
    uint32_t count = 0, first = prune->settled;
    prune->settled = end;
    for (uint32_t i = first; i < end; i++)
        if (prune->jobs[i].compacted)
            count += follow(&prune->jobs[i], &prune->follows[count]);
    statistics_prune(prune->follows, count, prune->moves);
    for (uint32_t i = first; i < end; i++) {
        struct sequence *sequence = prune->jobs[i].sequence;
        if (!prune->jobs[i].compacted)
            continue;
        sequence_rotate_sinks(sequence);
        sequence_charge_less(sequence);
        finish(sequence);
    }
}

/* Where pages are short, those that the statistics of the jobs before this one give back may do. */
static int compact_job(struct prune *prune, uint32_t i, struct error *error) {
    int code = compact(&prune->jobs[i], error);
    if (code != ERROR_PAGES || prune->settled == i)
        return code;
    settle(prune, i);
    return compact(&prune->jobs[i], error);
}

static void count_time(struct engine *engine, enum engine_phase phase, double *start) {
    double now = clock_seconds();
    transformer_profile(engine->transformer)->seconds[phase] += now - *start;
    *start = now;
}

/* All scores to host_scores, those of a rank's heads from there. */
static void fetch_scores(struct prune *prune) {
    struct backend *backend = prune->engine->backend;
    if (backend_ranks(backend) == 1) {
        backend->operations->download(
            backend, prune->host_scores, prune->engine->prune.scores, prune->scored_slots * sizeof(float));
        return;
    }
    for (uint32_t i = 0; i < prune->count; i++)
        for (uint32_t head = 0; !prune->jobs[i].found && head < engine_heads(prune->engine); head++) {
            struct backend *on = backend_of_head(backend, prune->engine->model->shape.kv_heads, head);
            const struct score_head *at = &prune->jobs[i].heads[head];
            on->operations->download(
                on, (float *)host_scores(prune, &prune->jobs[i], head), at->scores, at->view.slots * sizeof(float));
        }
}

/* Scores of all jobs, where whoever selects can read them. */
static int score(struct prune *prune, struct error *error) {
    struct engine *engine = prune->engine;
    const struct backend_operations *operations = engine_operations(engine);
    const struct model_shape *shape = &engine->model->shape;
    if (prune->scored == 0)
        return 0;
    int code = operations->score(engine->backend, kv_cache_pool(engine->cache), prune->layers,
        prune->scored * shape->global_layers, shape->heads, error);
    if (code != 0)
        return code;
    if (prune->host_scores != NULL)
        fetch_scores(prune);
    else if (operations->host_memory)
        operations->synchronize(engine->backend);
    return 0;
}

int engine_prune(struct engine *engine, struct sequence *const *sequences, uint32_t count, struct error *error) {
    struct prune prune = {.engine = engine, .use_found = true};
    double start = clock_seconds();
    uint32_t chosen = choose(sequences, count);
    if (chosen == 0)
        return 0;
    for (uint32_t i = 0; i < count; i++)
        sequence_await_found(sequences[i]);
    if (prune_plan(&prune, sequences, count, chosen) != 0)
        return error_set(error, ERROR_MEMORY, "no memory to prune %u sequences", chosen);
    int first = score(&prune, error);
    count_time(engine, PHASE_SCORE, &start);
    if (first == 0)
        first = select_together(&prune, error);
    count_time(engine, PHASE_SELECT, &start);
    if (first != 0)
        return first;
    for (uint32_t i = 0; i < prune.count; i++)
        first = first == 0 ? prune.jobs[i].code : first;
    for (uint32_t i = 0; i < prune.count; i++) {
        struct error *report = first == 0 ? error : NULL; /* the first failure is told */
        int code = select_job(&prune, &prune.jobs[i], report);
        count_time(engine, PHASE_SELECT, &start);
        if (code == 0)
            code = compact_job(&prune, i, report);
        count_time(engine, PHASE_COMPACT, &start);
        first = first == 0 ? code : first;
    }
    settle(&prune, prune.count);
    count_time(engine, PHASE_COMPACT, &start);
    return first;
}

int sequence_scores(struct sequence *sequence, float *out, struct error *error) {
    struct engine *engine = sequence->engine;
    struct prune prune = {.engine = engine, .show_scores = true};
    if (!sequence->eviction.evicts || sequence->swap != NULL || sequence_length(sequence) == 0)
        return error_set(error, ERROR_INVALID, "no policy scores this sequence");
    sequence->eviction.chosen = true;
    if (prune_plan(&prune, &sequence, 1, 1) != 0)
        return error_set(error, ERROR_MEMORY, "no memory to score a sequence");
    int code = score(&prune, error);
    const struct prune_job *job = prune.jobs;
    for (uint32_t i = 0; i < engine_heads(engine) && code == 0; i++) {
        const float *scores = host_scores(&prune, job, i);
        for (uint32_t slot = 0; slot < job->slots[i]; slot++)
            *out++ = job->heads[i].view.slots > 0 ? scores[slot] : INFINITY; /* it keeps everything */
    }
    return code;
}

/* Slots of a head that stay: ascending, distinct, and there. */
static int check_list(
    const struct prune_job *job, uint32_t head, const uint32_t *list, uint32_t count, struct error *error) {
    for (uint32_t i = 0; i < count; i++)
        if (list[i] >= job->slots[head] || (i > 0 && list[i] <= list[i - 1]))
            return error_set(error, ERROR_INVALID, "head %u: slot %u is out of place among %u of %u", head, list[i],
                count, job->slots[head]);
    return 0;
}

int sequence_prune_to(
    struct sequence *sequence, const uint32_t *const *lists, const uint32_t *counts, struct error *error) {
    struct prune prune = {.engine = sequence->engine};
    bool some = false;
    if (!prune_is_due(sequence))
        return error_set(error, ERROR_INVALID, "no prune of this sequence is due");
    sequence->eviction.chosen = true;
    if (prune_prepare(&prune, &sequence, 1, 1) != 0)
        return error_set(error, ERROR_MEMORY, "no memory to prune a sequence");
    struct prune_job *job = prune.jobs;
    float *none = NULL;
    prune_fill_job(job, false, &none);
    remove_nothing(job);
    for (uint32_t i = 0; i < engine_heads(sequence->engine); i++) {
        if (engine_head_slides(sequence->engine, i))
            continue;
        int code = check_list(job, i, lists[i], counts[i], error);
        if (code != 0)
            return code;
        job->removals[i] =
            removal_of(job, lists[i], counts[i], job->slots[i], prune_positions(sequence->engine, sequence, i));
        some = some || job->removals[i].keep != NULL || job->removals[i].evict != KV_NO_SLOT;
    }
    if (!some) {
        finish(sequence);
        return 0;
    }
    int code = compact(job, error);
    settle(&prune, prune.count);
    return code;
}
