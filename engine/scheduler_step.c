/* SPDX-License-Identifier: Apache-2.0
 *
 * One step: who waits, who runs, what is computed, who gets what.
 */
#include "engine/scheduler_internal.h"

#include <stdlib.h>

#include "engine/clock.h"

/* ---- the batch ---- */

/* Puts count tokens of a running choice into the batch. */
static void add_item(struct scheduler *s, struct choice *choice, uint32_t count) {
    uint32_t first = sequence_length(choice->sequence);
    bool completes = count == choice_remaining(choice);
    struct batch_item *item = &s->items[s->items_count];
    choice_copy_tokens(choice, first, count, s->tokens + s->rows);
    *item = (struct batch_item){
        .sequence = choice->sequence,
        .tokens = s->tokens + s->rows,
        .count = count,
        .want = choice_wants_prompt_rows(choice) ? WANT_ALL
                : completes                      ? WANT_LAST
                                                 : WANT_NONE,
    };
    s->batched[s->items_count++] = (struct batched_choice){choice, first, completes};
    s->rows += count;
}

/* Decoding choices, one token each. Returns the pages that they take. */
static uint64_t add_decoding(struct scheduler *s) {
    uint32_t limit = engine_batch_rows(s->engine);
    uint64_t planned = 0;
    for (uint32_t i = 0; i < s->running_count && s->rows < limit; i++) {
        struct choice *choice = s->running[i];
        if (!choice_is_decoding(choice))
            continue;
        uint64_t needed = scheduler_pages_of_step(s, choice, 1);
        if (!scheduler_make_room(s, choice, planned + needed)) {
            scheduler_give_way(s, choice);
            break;
        }
        planned += needed;
        add_item(s, choice, 1);
    }
    return planned;
}

/* Prompts in order of admission, in chunks of `budget` tokens together. A prompt that is cut by a prune and not by the
 * budget leaves rows to those after it: they must not take the pages that it goes on with. */
static void add_prompts(struct scheduler *s, uint32_t budget, uint64_t planned) {
    uint64_t kept_back = 0;
    for (uint32_t i = 0; i < s->running_count && budget > 0; i++) {
        struct choice *choice = s->running[i];
        if (choice_is_decoding(choice))
            continue;
        uint32_t chunk = choice_chunk(choice), count = chunk < budget ? chunk : budget;
        uint64_t needed = scheduler_pages_of_step(s, choice, count);
        uint64_t available = kv_cache_pages_free(engine_kv_cache(s->engine));
        if (kept_back > 0 && planned + kept_back + needed > available)
            break;
        if (!scheduler_make_room(s, choice, planned + needed)) {
            if (s->items_count == 0)
                scheduler_give_way(s, choice);
            break;
        }
        if (count == chunk && sequence_length(choice->sequence) + count < choice_prompt(choice)->count) {
            uint64_t more = scheduler_pages_of_prompt(s, choice);
            kept_back += more > needed ? more - needed : 0;
        }
        planned += needed;
        add_item(s, choice, count);
        budget -= count;
    }
}

static void build_batch(struct scheduler *s) {
    s->items_count = s->rows = 0;
    uint64_t planned = add_decoding(s);
    uint32_t budget = engine_batch_rows(s->engine) - s->rows;
    if (s->items_count > 0 && budget > s->options.prefill_chunk)
        budget = s->options.prefill_chunk;
    add_prompts(s, budget, planned);
}

/* ---- pruning ---- */

static int prune(struct scheduler *s, struct sequence *const *sequences, uint32_t count, struct error *error) {
    double start = clock_seconds();
    uint32_t before = kv_cache_pages_free(engine_kv_cache(s->engine));
    int code = engine_prune(s->engine, sequences, count, error);
    uint32_t after = kv_cache_pages_free(engine_kv_cache(s->engine));
    s->counters.policy_seconds += clock_seconds() - start;
    s->counters.pages_freed_by_policy += after > before ? after - before : 0;
    return code;
}

/* One sequence of several could not be pruned: each by itself. What finds no pages to copy shared ones into gives way
 * and is computed again; other failures end their request. */
static void prune_each(struct scheduler *s) {
    struct error error;
    for (uint32_t i = 0; i < s->items_count; i++) {
        struct choice *choice = s->batched[i].choice;
        if (choice->state != CHOICE_RUNNING || choice_policy(choice) == NULL)
            continue;
        int code = prune(s, &choice->sequence, 1, &error);
        if (code == ERROR_PAGES && background_reclaim(s->options.background))
            code = prune(s, &choice->sequence, 1, &error);
        if (code == ERROR_PAGES && s->running_count > 1)
            scheduler_preempt(s, choice, false);
        else if (code != 0)
            scheduler_finish_task(s, choice->task, FINISH_ERROR, &error);
    }
}

/* Prunes what is due in the batch, before forks are taken; the rows to sample stay valid. awaiting: those of which the
 * device is still finding what goes, once something was waited for; else the others. */
static void prune_batch(struct scheduler *s, bool awaiting) {
    struct error error;
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->items_count; i++) {
        const struct choice *choice = s->batched[i].choice;
        if (choice->state == CHOICE_RUNNING && choice_policy(choice) != NULL &&
            sequence_prune_awaits_results(choice->sequence) == awaiting)
            s->pruned[count++] = choice->sequence;
    }
    if (count > 0 && prune(s, s->pruned, count, &error) != 0)
        prune_each(s);
}

/* ---- sampling ---- */

/* Makes the arrays of wanted rows hold `count` entries. */
static int reserve_wanted(struct scheduler *s, size_t count) {
    if (count <= s->wanted_capacity)
        return 0;
    size_t capacity = 2 * count;
    void *wanted = realloc(s->wanted, capacity * sizeof *s->wanted);
    s->wanted = wanted ? wanted : s->wanted;
    void *rows = realloc(s->wanted_rows, capacity * sizeof *s->wanted_rows);
    s->wanted_rows = rows ? rows : s->wanted_rows;
    void *params = realloc(s->params, capacity * sizeof *s->params);
    s->params = params ? params : s->params;
    void *results = realloc(s->results, capacity * sizeof *s->results);
    s->results = results ? results : s->results;
    if (wanted == NULL || rows == NULL || params == NULL || results == NULL)
        return ERROR_MEMORY;
    s->wanted_capacity = capacity;
    return 0;
}

static void want_row(struct scheduler *s, struct choice *choice, uint32_t row) {
    size_t at = s->wanted_count++;
    s->wanted[at] = (struct wanted_row){.choice = choice};
    s->wanted_rows[at] = row;
    choice_sample_params(choice, s->end_tokens.ids, (uint32_t)s->end_tokens.count, &s->params[at]);
}

static void want_prompt_rows(
    struct scheduler *s, struct choice *choice, uint32_t first, const struct batch_item *item) {
    for (uint32_t i = 0; i < item->count && first + i + 1 < choice_prompt(choice)->count; i++) {
        size_t at = s->wanted_count++;
        s->wanted[at] = (struct wanted_row){.choice = choice, .of_prompt = true, .position = first + i};
        s->wanted_rows[at] = item->first_row + i;
        choice_prompt_params(choice, first + i, &s->params[at]);
    }
}

/* The prompt is computed: its other choices become running forks, or wait where there is no place for them. */
static void start_followers(struct scheduler *s, struct choice *leader, uint32_t row) {
    uint32_t n = leader->task->request->n;
    for (struct choice *c = leader + 1; c < leader + n; c++) {
        if (c->state != CHOICE_FOLLOWING)
            continue;
        bool can_fork = leader->sequence != NULL && s->running_count < s->options.max_sequences;
        c->sequence = can_fork ? sequence_fork(leader->sequence) : NULL;
        if (c->sequence != NULL)
            scheduler_set_running(s, c);
        else
            scheduler_queue_back(s, c);
        want_row(s, c, row);
    }
}

/* Lists the rows to sample after the forward pass. */
static int collect_wanted(struct scheduler *s) {
    size_t most = 0;
    for (uint32_t i = 0; i < s->items_count; i++)
        most += s->items[i].count + s->batched[i].choice->task->request->n;
    if (reserve_wanted(s, most) != 0)
        return ERROR_MEMORY;
    s->wanted_count = 0;
    for (uint32_t i = 0; i < s->items_count; i++) {
        const struct batch_item *item = &s->items[i];
        struct choice *choice = s->batched[i].choice;
        if (choice->state == CHOICE_FINISHED || choice->task->request->pooling != POOLING_NONE)
            continue;
        if (item->want == WANT_ALL)
            want_prompt_rows(s, choice, s->batched[i].first, item);
        if (!s->batched[i].completes)
            continue;
        uint32_t last_row = item->first_row + (item->want == WANT_ALL ? item->count - 1 : 0);
        if (choice->task->request->max_tokens == 0)
            continue;
        want_row(s, choice, last_row);
        if (choice_is_leader(choice))
            start_followers(s, choice, last_row);
    }
    return 0;
}

/* ---- vectors ---- */

static int reserve_states(struct scheduler *s) {
    size_t width = engine_model(s->engine)->shape.width;
    if (s->states == NULL)
        s->states = malloc(engine_batch_rows(s->engine) * width * sizeof *s->states);
    return s->states != NULL ? 0 : ERROR_MEMORY;
}

static int add_states(struct scheduler *s, uint32_t i, struct error *error) {
    const struct batch_item *item = &s->items[i];
    struct choice *choice = s->batched[i].choice;
    uint32_t count = item->want == WANT_ALL ? item->count : 1;
    uint32_t first = s->batched[i].first + item->count - count;
    int code = engine_hidden(s->engine, item->first_row, count, s->states, error);
    if (code == 0 && choice_accept_states(choice, first, s->states, count, engine_model(s->engine)->shape.width) != 0)
        code = error_set(error, ERROR_MEMORY, "no memory for a vector");
    return code;
}

/* The batch's states of prompts of which vectors are asked for. */
static int collect_states(struct scheduler *s, struct error *error) {
    int code = 0;
    for (uint32_t i = 0; code == 0 && i < s->items_count; i++) {
        if (s->batched[i].choice->task->request->pooling == POOLING_NONE || s->items[i].want == WANT_NONE)
            continue;
        if (reserve_states(s) != 0)
            return error_set(error, ERROR_MEMORY, "no memory for hidden states");
        code = add_states(s, i, error);
    }
    return code;
}

static void deliver_vector(struct scheduler *s, struct choice *choice, double now) {
    struct error error;
    if (pooled_finish(&choice->pooled, choice->task->request->normalise)) {
        scheduler_finish_choice(s, choice, FINISH_STOP, NULL, now);
        return;
    }
    error_set(&error, ERROR_FORMAT, "the model's states are not numbers: its file may be damaged");
    scheduler_finish_choice(s, choice, FINISH_ERROR, &error, now);
}

/* ---- what comes out ---- */

static void deliver_token(struct scheduler *s, struct choice *choice, const struct sample_result *result, double now) {
    struct error error;
    if (choice->grammar_error.code != 0) {
        scheduler_finish_choice(s, choice, FINISH_ERROR, &choice->grammar_error, now);
        return;
    }
    if (result->undefined) { /* an arbitrary token, perhaps an end token, would look like an answer */
        error_set(&error, ERROR_FORMAT, "the model's logits are not numbers: its file may be damaged");
        scheduler_finish_choice(s, choice, FINISH_ERROR, &error, now);
        return;
    }
    int finish = choice_accept_token(choice, result, choice_tokens_max(choice), now);
    s->counters.generated_tokens++;
    if (finish < 0) {
        error_set(&error, ERROR_MEMORY, "no memory for the answer");
        finish = FINISH_ERROR;
    }
    if (finish == FINISH_NONE)
        scheduler_add_output(s, choice_make_output(choice, now));
    else
        scheduler_finish_choice(s, choice, (enum finish_reason)finish, finish == FINISH_ERROR ? &error : NULL, now);
}

static void deliver_results(struct scheduler *s) {
    double now = clock_seconds();
    for (size_t i = 0; i < s->wanted_count; i++) {
        struct choice *choice = s->wanted[i].choice;
        if (choice->state == CHOICE_FINISHED) /* its prune failed */
            continue;
        if (s->wanted[i].of_prompt)
            choice_accept_prompt_result(choice, s->wanted[i].position, &s->results[i]);
        else
            deliver_token(s, choice, &s->results[i], now);
    }
    /* Prompts of which nothing is to be generated are done once their rows are. */
    for (uint32_t i = 0; i < s->items_count; i++) {
        struct choice *choice = s->batched[i].choice;
        if (choice->state == CHOICE_FINISHED || choice->task->request->max_tokens > 0 || !s->batched[i].completes)
            continue;
        if (choice->task->request->pooling != POOLING_NONE)
            deliver_vector(s, choice, now);
        else
            scheduler_finish_prompt(s, choice, now);
    }
}

static void fail_batch(struct scheduler *s, const struct error *error) {
    for (uint32_t i = 0; i < s->items_count; i++)
        if (s->batched[i].choice->state != CHOICE_FINISHED)
            scheduler_finish_task(s, s->batched[i].choice->task, FINISH_ERROR, error);
}

static void run_batch(struct scheduler *s) {
    struct error error;
    build_batch(s);
    if (s->items_count == 0)
        return;
    s->counters.steps++;
    int code = engine_forward(s->engine, s->items, s->items_count, &error);
    if (code == ERROR_PAGES && background_reclaim(s->options.background)) /* nothing changed */
        code = engine_forward(s->engine, s->items, s->items_count, &error);
    if (code == ERROR_PAGES && s->running_count > 1) { /* nothing changed */
        scheduler_preempt(s, s->running[s->running_count - 1], true);
        return;
    }
    if (code != 0) {
        fail_batch(s, &error);
        return;
    }
    prune_batch(s, false);
    if (collect_wanted(s) != 0) {
        error_set(&error, ERROR_MEMORY, "no memory to sample %u sequences", s->items_count);
        fail_batch(s, &error);
        return;
    }
    if (engine_sample(s->engine, s->wanted_rows, s->params, (uint32_t)s->wanted_count, s->results, &error) != 0) {
        fail_batch(s, &error);
        return;
    }
    if (collect_states(s, &error) != 0) {
        fail_batch(s, &error);
        return;
    }
    prune_batch(s, true);
    deliver_results(s);
    scheduler_sweep_running(s);
}

void scheduler_run_step(struct scheduler *s) {
    scheduler_admit(s);
    run_batch(s);
    scheduler_free_finished(s);
}
