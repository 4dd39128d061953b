/* SPDX-License-Identifier: Apache-2.0
 *
 * One step: who waits, who runs, what is computed, who gets what.
 */
#include "engine/scheduler_internal.h"

#include <stdlib.h>

#include "engine/clock.h"

/* ---- the waiting queue ---- */

static void queue_unlink(struct scheduler *s, struct choice *choice) {
    *(choice->previous ? &choice->previous->next : &s->waiting_first) = choice->next;
    *(choice->next ? &choice->next->previous : &s->waiting_last) = choice->previous;
    choice->next = choice->previous = NULL;
    s->waiting_count--;
}

static void queue_push_back(struct scheduler *s, struct choice *choice) {
    choice->state = CHOICE_WAITING;
    choice->previous = s->waiting_last;
    choice->next = NULL;
    *(s->waiting_last ? &s->waiting_last->next : &s->waiting_first) = choice;
    s->waiting_last = choice;
    s->waiting_count++;
}

static void queue_push_front(struct scheduler *s, struct choice *choice) {
    choice->state = CHOICE_WAITING;
    choice->next = s->waiting_first;
    choice->previous = NULL;
    *(s->waiting_first ? &s->waiting_first->previous : &s->waiting_last) = choice;
    s->waiting_first = choice;
    s->waiting_count++;
}

/* ---- life of tasks and choices ---- */

static void add_output(struct scheduler *s, struct output_node *node) {
    if (node == NULL)
        return;
    *s->made_tail = node;
    s->made_tail = &node->next;
}

static void mark_started(struct scheduler *s, struct task *task, double now) {
    if (task->started)
        return;
    task->started = true;
    task->started_s = now;
    pthread_mutex_lock(&s->mutex);
    s->requests_waiting--;
    pthread_mutex_unlock(&s->mutex);
}

static void task_unlink(struct scheduler *s, struct task *task) {
    *(task->previous ? &task->previous->next : &s->tasks) = task->next;
    if (task->next != NULL)
        task->next->previous = task->previous;
}

/* Ends a choice in whatever state it is. With its last choice the task moves to the finished ones. */
static void finish_choice(
    struct scheduler *s, struct choice *choice, enum finish_reason finish, const struct error *error, double now) {
    struct task *task = choice->task;
    if (choice->state == CHOICE_WAITING)
        queue_unlink(s, choice);
    choice->state = CHOICE_FINISHED;
    sequence_free(choice->sequence);
    choice->sequence = NULL;
    struct output_node *node = choice_make_last_output(choice, finish, error, now);
    if (--task->unfinished == 0) {
        node->output.last = true;
        mark_started(s, task, now);
        task_unlink(s, task);
        task->next = s->finished;
        s->finished = task;
    }
    add_output(s, node);
}

/* Drops choices that do not run any more from the running list. */
static void sweep_running(struct scheduler *s) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < s->running_count; i++)
        if (s->running[i]->state == CHOICE_RUNNING)
            s->running[kept++] = s->running[i];
    s->running_count = kept;
}

static void free_finished(struct scheduler *s) {
    while (s->finished != NULL) {
        struct task *task = s->finished;
        s->finished = task->next;
        task_free(task);
    }
}

/* Ends every unfinished choice of a task. */
static void finish_task(struct scheduler *s, struct task *task, enum finish_reason finish, const struct error *error) {
    double now = clock_seconds();
    for (uint32_t i = 0; i < task->choices_count; i++)
        if (task->choices[i].state != CHOICE_FINISHED)
            finish_choice(s, &task->choices[i], finish, error, now);
    sweep_running(s);
}

void scheduler_take_task(struct scheduler *s, struct task *task) {
    task->next = s->tasks;
    task->previous = NULL;
    if (s->tasks != NULL)
        s->tasks->previous = task;
    s->tasks = task;
    for (uint32_t i = 0; i < task->choices_count; i++)
        if (choice_is_leader(&task->choices[i]))
            queue_push_back(s, &task->choices[i]);
}

void scheduler_cancel_task(struct scheduler *s, const struct request *request) {
    for (struct task *task = s->tasks; task != NULL; task = task->next)
        if (task->request == request) {
            finish_task(s, task, FINISH_CANCELLED, NULL);
            return;
        }
}

void scheduler_cancel_all(struct scheduler *s) {
    while (s->tasks != NULL)
        finish_task(s, s->tasks, FINISH_CANCELLED, NULL);
    free_finished(s);
}

/* ---- admission and preemption ---- */

/* Pages that running choices will still take for what they have to compute and one block more. */
static uint64_t pages_promised(const struct scheduler *s) {
    uint64_t pages = 0;
    for (uint32_t i = 0; i < s->running_count; i++)
        pages += sequence_pages_needed(s->running[i]->sequence, choice_remaining(s->running[i])) + s->heads;
    return pages;
}

static bool can_reuse_prefix(const struct choice *choice) {
    return !choice_wants_prompt_rows(choice);
}

/* Whether the pages for all of a waiting choice's tokens are there, beside what running ones will take. */
static bool choice_fits(struct scheduler *s, const struct choice *choice) {
    uint32_t total = choice_total(choice), unheld = 0, matched = 0;
    if (can_reuse_prefix(choice)) {
        choice_copy_tokens(choice, 0, total, s->scratch);
        matched = kv_cache_match_prefix(engine_kv_cache(s->engine), s->scratch, total, total - 1, &unheld);
    }
    uint64_t blocks = (total + KV_PAGE_SLOTS) / KV_PAGE_SLOTS - matched / KV_PAGE_SLOTS;
    uint64_t needed = blocks * s->heads + unheld;
    return needed + pages_promised(s) <= kv_cache_pages_free(engine_kv_cache(s->engine));
}

static int start_choice(struct scheduler *s, struct choice *choice) {
    choice->sequence = sequence_create(s->engine);
    if (choice->sequence == NULL)
        return ERROR_MEMORY;
    uint32_t total = choice_total(choice), reused = 0;
    if (can_reuse_prefix(choice)) {
        choice_copy_tokens(choice, 0, total, s->scratch);
        reused = sequence_reuse_prefix(choice->sequence, s->scratch, total);
    }
    if (choice->looked_up || !choice_is_leader(choice))
        return 0;
    choice->looked_up = true;
    choice->cached_tokens = reused;
    s->counters.prefix_queries += total;
    s->counters.prefix_hits += reused;
    s->counters.prompt_tokens += total;
    return 0;
}

/* The running list is in order of admission without sorting: only the last of it are preempted, and those come back
 * before anything newer. */
static void set_running(struct scheduler *s, struct choice *choice) {
    choice->state = CHOICE_RUNNING;
    s->running[s->running_count++] = choice;
}

/* Nothing is to be generated, and no log-probability of the prompt is asked for. */
static bool needs_no_computing(const struct choice *choice) {
    const struct request *request = choice->task->request;
    return request->max_tokens == 0 && !(request->echo && request->logprobs >= 0);
}

static void finish_prompt(struct scheduler *s, struct choice *leader, double now) {
    uint32_t n = leader->task->request->n;
    struct choice *first = leader;
    for (uint32_t i = 0; i < n; i++)
        if (first[i].state != CHOICE_FINISHED)
            finish_choice(s, &first[i], FINISH_LENGTH, NULL, now);
}

static void admit_waiting(struct scheduler *s) {
    while (s->waiting_first != NULL && s->running_count < s->options.max_sequences) {
        struct choice *choice = s->waiting_first;
        struct task *task = choice->task;
        double now = clock_seconds();
        if (needs_no_computing(choice)) {
            mark_started(s, task, now);
            finish_prompt(s, choice, now);
            continue;
        }
        if (s->running_count > 0 && !choice_fits(s, choice))
            return;
        queue_unlink(s, choice);
        choice->state = CHOICE_RUNNING;
        mark_started(s, task, now);
        if (start_choice(s, choice) != 0) {
            struct error error;
            error_set(&error, ERROR_MEMORY, "no memory for a sequence");
            finish_task(s, task, FINISH_ERROR, &error);
            continue;
        }
        set_running(s, choice);
    }
}

static void preempt(struct scheduler *s, struct choice *choice) {
    sequence_free(choice->sequence);
    choice->sequence = NULL;
    queue_push_front(s, choice);
    sweep_running(s);
    s->counters.preemptions++;
}

/* ---- one step ---- */

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
    s->batched[s->items_count++] = choice;
    s->rows += count;
}

static bool is_batched(const struct scheduler *s, const struct choice *choice) {
    for (uint32_t i = s->items_count; i > 0; i--)
        if (s->batched[i - 1] == choice)
            return true;
    return false;
}

/* Frees pages until `needed` more than `planned` are free, by preempting the choices admitted last, down to but not
 * including `choice` and those in the batch. */
static bool make_room(struct scheduler *s, const struct choice *choice, uint64_t planned, uint64_t needed) {
    while (planned + needed > kv_cache_pages_free(engine_kv_cache(s->engine))) {
        struct choice *victim = s->running[s->running_count - 1];
        if (victim == choice || is_batched(s, victim))
            return false;
        preempt(s, victim);
    }
    return true;
}

/* A choice that finds no page although it is the last one admitted gives up its own. Alone it always fits. */
static void give_way(struct scheduler *s, struct choice *choice) {
    if (s->running_count > 1) {
        preempt(s, choice);
        return;
    }
    struct error error;
    error_set(&error, ERROR_PAGES, "the KV cache is too small for this request");
    finish_task(s, choice->task, FINISH_ERROR, &error);
}

/* Decoding choices first, one token each; then prompts in order of admission, in chunks. */
static void build_batch(struct scheduler *s) {
    uint32_t limit = engine_batch_rows(s->engine);
    uint64_t planned = 0;
    s->items_count = s->rows = 0;
    for (uint32_t i = 0; i < s->running_count && s->rows < limit; i++) {
        struct choice *choice = s->running[i];
        if (!choice_is_decoding(choice))
            continue;
        uint32_t needed = sequence_pages_needed(choice->sequence, 1);
        if (!make_room(s, choice, planned, needed)) {
            give_way(s, choice);
            break;
        }
        planned += needed;
        add_item(s, choice, 1);
    }
    uint32_t budget = limit - s->rows;
    if (s->items_count > 0 && budget > s->options.prefill_chunk)
        budget = s->options.prefill_chunk;
    for (uint32_t i = 0; i < s->running_count && budget > 0; i++) {
        struct choice *choice = s->running[i];
        if (choice_is_decoding(choice))
            continue;
        uint32_t remaining = choice_remaining(choice), count = remaining < budget ? remaining : budget;
        uint32_t needed = sequence_pages_needed(choice->sequence, count);
        if (!make_room(s, choice, planned, needed)) {
            if (s->items_count == 0)
                give_way(s, choice);
            break;
        }
        planned += needed;
        add_item(s, choice, count);
        budget -= count;
    }
}

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
    choice_sample_params(choice, s->end_tokens, s->end_tokens_count, &s->params[at]);
}

static void want_prompt_rows(struct scheduler *s, struct choice *choice, const struct batch_item *item) {
    uint32_t first = sequence_length(choice->sequence) - item->count;
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
        c->sequence = s->running_count < s->options.max_sequences ? sequence_fork(leader->sequence) : NULL;
        if (c->sequence != NULL)
            set_running(s, c);
        else
            queue_push_back(s, c);
        want_row(s, c, row);
    }
}

/* Lists the rows to sample after the forward pass. */
static int collect_wanted(struct scheduler *s) {
    size_t most = 0;
    for (uint32_t i = 0; i < s->items_count; i++)
        most += s->items[i].count + s->batched[i]->task->request->n;
    if (reserve_wanted(s, most) != 0)
        return ERROR_MEMORY;
    s->wanted_count = 0;
    for (uint32_t i = 0; i < s->items_count; i++) {
        const struct batch_item *item = &s->items[i];
        struct choice *choice = s->batched[i];
        if (item->want == WANT_ALL)
            want_prompt_rows(s, choice, item);
        if (choice_remaining(choice) > 0)
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

static void deliver_token(struct scheduler *s, struct choice *choice, const struct sample_result *result, double now) {
    struct error error;
    if (result->undefined) { /* an arbitrary token, perhaps an end token, would look like an answer */
        error_set(&error, ERROR_FORMAT, "the model's logits are not numbers: its file may be damaged");
        finish_choice(s, choice, FINISH_ERROR, &error, now);
        return;
    }
    int finish = choice_accept_token(choice, result, engine_tokens_max(s->engine), now);
    s->counters.generated_tokens++;
    if (finish < 0) {
        error_set(&error, ERROR_MEMORY, "no memory for the answer");
        finish = FINISH_ERROR;
    }
    if (finish == FINISH_NONE)
        add_output(s, choice_make_output(choice, now));
    else
        finish_choice(s, choice, (enum finish_reason)finish, finish == FINISH_ERROR ? &error : NULL, now);
}

static void deliver_results(struct scheduler *s) {
    double now = clock_seconds();
    for (size_t i = 0; i < s->wanted_count; i++) {
        struct choice *choice = s->wanted[i].choice;
        if (s->wanted[i].of_prompt)
            choice_accept_prompt_result(choice, s->wanted[i].position, &s->results[i]);
        else
            deliver_token(s, choice, &s->results[i], now);
    }
    /* Prompts of which nothing is to be generated are done once their rows are. */
    for (uint32_t i = 0; i < s->items_count; i++) {
        struct choice *choice = s->batched[i];
        if (choice->state == CHOICE_RUNNING && choice->task->request->max_tokens == 0 && choice_remaining(choice) == 0)
            finish_prompt(s, choice, now);
    }
}

static void fail_batch(struct scheduler *s, const struct error *error) {
    for (uint32_t i = 0; i < s->items_count; i++)
        if (s->batched[i]->state != CHOICE_FINISHED)
            finish_task(s, s->batched[i]->task, FINISH_ERROR, error);
}

static void run_batch(struct scheduler *s) {
    struct error error;
    build_batch(s);
    if (s->items_count == 0)
        return;
    s->counters.steps++;
    if (engine_forward(s->engine, s->items, s->items_count, &error) != 0) {
        fail_batch(s, &error);
        return;
    }
    if (collect_wanted(s) != 0) {
        error_set(&error, ERROR_MEMORY, "no memory to sample %u sequences", s->items_count);
        fail_batch(s, &error);
        return;
    }
    if (engine_sample(s->engine, s->wanted_rows, s->params, (uint32_t)s->wanted_count, s->results, &error) != 0) {
        fail_batch(s, &error);
        return;
    }
    deliver_results(s);
    sweep_running(s);
}

void scheduler_run_step(struct scheduler *s) {
    admit_waiting(s);
    run_batch(s);
    free_finished(s);
}
