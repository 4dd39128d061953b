/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/scheduler_internal.h"

#include <stdlib.h>
#include <string.h>

#include "engine/clock.h"

enum { MAX_SEQUENCES_DEFAULT = 256, MAX_WAITING_DEFAULT = 1024 };

/* ---- the engine thread ---- */

static void publish(struct scheduler *s) {
    struct scheduler_stats *c = &s->counters;
    c->requests_running = s->running_count;
    c->requests_waiting = s->waiting_count;
    c->pages_total = kv_cache_pages_total(engine_kv_cache(s->engine));
    c->pages_free = kv_cache_pages_free(engine_kv_cache(s->engine));
    scheduler_count_memory(s);
    pthread_mutex_lock(&s->mutex);
    s->stats = *c;
    bool wake = s->outputs == NULL && s->made != NULL;
    if (s->made != NULL) {
        *s->outputs_tail = s->made;
        s->outputs_tail = s->made_tail;
    }
    pthread_mutex_unlock(&s->mutex);
    s->made = NULL;
    s->made_tail = &s->made;
    if (wake && s->options.wake != NULL)
        s->options.wake(s->options.wake_context);
}

/* Takes the commands; waits for one when there is nothing else to do. False when the scheduler is to stop. */
static bool take_commands(struct scheduler *s, struct command **commands) {
    bool idle = s->running_count == 0 && s->waiting_first == NULL;
    pthread_mutex_lock(&s->mutex);
    while (idle && s->commands == NULL && !s->stopping)
        pthread_cond_wait(&s->changed, &s->mutex);
    *commands = s->commands;
    s->commands = NULL;
    s->commands_tail = &s->commands;
    s->commands_submitted = 0;
    bool go_on = !s->stopping;
    pthread_mutex_unlock(&s->mutex);
    return go_on;
}

static void run_commands(struct scheduler *s, struct command *command) {
    while (command != NULL) {
        struct command *next = command->next;
        if (command->submit != NULL)
            scheduler_take_task(s, command->submit);
        else
            scheduler_cancel_task(s, command->cancel, command->expired);
        free(command);
        command = next;
    }
}

static void *engine_thread(void *context) {
    struct scheduler *s = context;
    struct command *commands;
    while (take_commands(s, &commands)) {
        background_take(s->options.background);
        run_commands(s, commands);
        scheduler_run_step(s);
        publish(s);
        bool waiting = s->waiting_first != NULL;
        background_give(s->options.background, waiting || s->running_count > 0, waiting);
    }
    background_take(s->options.background);
    run_commands(s, commands);
    scheduler_cancel_all(s);
    publish(s);
    background_give(s->options.background, false, false);
    return NULL;
}

/* ---- the interface ---- */

static int allocate_arrays(struct scheduler *s) {
    uint32_t rows = engine_batch_rows(s->engine);
    s->running = malloc(s->options.max_sequences * sizeof *s->running);
    s->items = malloc(rows * sizeof *s->items);
    s->batched = malloc(rows * sizeof *s->batched);
    s->pruned = malloc(rows * sizeof *s->pruned);
    s->tokens = malloc(rows * sizeof *s->tokens);
    s->scratch = malloc(((size_t)engine_context(s->engine) + 1) * sizeof *s->scratch);
    if (s->running == NULL || s->items == NULL || s->batched == NULL || s->pruned == NULL || s->tokens == NULL ||
        s->scratch == NULL)
        return ERROR_MEMORY;
    return tokenizer_list_ends(s->tokenizer, &s->end_tokens);
}

static void set_defaults(struct scheduler_options *options, uint32_t batch_rows) {
    if (options->max_sequences == 0)
        options->max_sequences = MAX_SEQUENCES_DEFAULT;
    if (options->max_sequences > batch_rows) /* each takes a row of every step */
        options->max_sequences = batch_rows;
    if (options->max_waiting == 0)
        options->max_waiting = MAX_WAITING_DEFAULT;
    if (options->prefill_chunk == 0 || options->prefill_chunk > batch_rows)
        options->prefill_chunk = batch_rows;
}

static void free_memory(struct scheduler *s) {
    free(s->running);
    free(s->items);
    free(s->batched);
    free(s->pruned);
    free(s->tokens);
    free(s->scratch);
    free(s->states);
    free(s->wanted);
    free(s->wanted_rows);
    free(s->params);
    free(s->results);
    token_list_free(&s->end_tokens);
    policy_settings_release(&s->options.kv_policy);
    pthread_mutex_destroy(&s->mutex);
    pthread_cond_destroy(&s->changed);
    free(s);
}

/* A default that does not work on this model is said now, and not by every request. */
static int check_default_policy(const struct scheduler *s, struct error *error) {
    if (s->options.kv_policy.policy == NULL)
        return 0;
    struct sequence *sequence = sequence_create(s->engine);
    if (sequence == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a sequence");
    int code = sequence_set_policy(sequence, &s->options.kv_policy, 1, error);
    sequence_free(sequence);
    return code;
}

struct scheduler *scheduler_create(struct engine *engine, const struct tokenizer *tokenizer,
    const struct scheduler_options *options, struct error *error) {
    struct scheduler *s = calloc(1, sizeof *s);
    if (s == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for the scheduler");
        return NULL;
    }
    s->engine = engine;
    s->tokenizer = tokenizer;
    s->options = *options;
    policy_settings_copy(&s->options.kv_policy, &options->kv_policy);
    set_defaults(&s->options, engine_batch_rows(engine));
    const struct model_shape *shape = &engine_model(engine)->shape;
    s->heads = shape->layers * shape->kv_heads;
    s->commands_tail = &s->commands;
    s->outputs_tail = &s->outputs;
    s->made_tail = &s->made;
    pthread_mutex_init(&s->mutex, NULL);
    pthread_cond_init(&s->changed, NULL);
    if (allocate_arrays(s) != 0) {
        error_set(error, ERROR_MEMORY, "no memory for the scheduler");
        free_memory(s);
        return NULL;
    }
    if (check_default_policy(s, error) != 0) {
        free_memory(s);
        return NULL;
    }
    publish(s);
    if (pthread_create(&s->thread, NULL, engine_thread, s) != 0) {
        error_set(error, ERROR_IO, "the engine thread could not be started");
        free_memory(s);
        return NULL;
    }
    return s;
}

void scheduler_stop(struct scheduler *s) {
    pthread_mutex_lock(&s->mutex);
    s->stopping = true;
    pthread_cond_signal(&s->changed);
    pthread_mutex_unlock(&s->mutex);
    if (!s->joined)
        pthread_join(s->thread, NULL);
    s->joined = true;
}

void scheduler_free(struct scheduler *s) {
    if (s == NULL)
        return;
    scheduler_stop(s);
    for (struct output_node *node = s->outputs, *next; node != NULL; node = next) {
        next = node->next;
        if (node->output.last)
            request_free(node->output.request);
        output_node_free(node);
    }
    free_memory(s);
}

/* What is only echoed may fill the context; to generate, one place must be left. */
static int check_prompt(const struct scheduler *s, const struct request *request, uint32_t p,
    const struct policy_settings *settings, struct error *error) {
    uint32_t count = request->prompts[p].count, most = scheduler_tokens_max(s, settings, count);
    if (count == 0)
        return error_set(error, ERROR_INVALID, "prompt %u is empty", p);
    if (most == 0 && count <= engine_context(s->engine))
        return error_set(error, ERROR_CONTEXT,
            "prompt %u has %u tokens, which take %llu KV pages before they are pruned, but the cache has %u; "
            "prefill_prune_every prunes earlier",
            p, count, (unsigned long long)engine_demand(s->engine, settings, count, count).peak_pages,
            kv_cache_pages_total(engine_kv_cache(s->engine)));
    if (most == 0)
        most = engine_context(s->engine);
    if (count > most || (count == most && request->max_tokens > 0))
        return error_set(error, ERROR_CONTEXT,
            "this model's maximum context length is %u tokens%s, but prompt %u has %u%s", most,
            most < engine_context(s->engine) ? " (all that the cache has pages for)" : "", p, count,
            count == most ? " and leaves no room for the answer" : "");
    return 0;
}

static int check_request(const struct scheduler *s, const struct request *request,
    const struct policy_settings *settings, struct error *error) {
    if (request->prompts_count == 0 || request->n == 0)
        return error_set(error, ERROR_INVALID, "a request without a prompt");
    if (request->n > UINT32_MAX / request->prompts_count)
        return error_set(
            error, ERROR_INVALID, "%u choices of %u prompts are too many", request->n, request->prompts_count);
    if (request->pooling != POOLING_NONE && (request->n != 1 || request->max_tokens != 0))
        return error_set(error, ERROR_INVALID, "a request for vectors has one choice a prompt, and no tokens");
    int code = 0;
    for (uint32_t p = 0; code == 0 && p < request->prompts_count; p++)
        code = check_prompt(s, request, p, settings, error);
    return code;
}

/* Queues a command; takes it over on success. */
static int send_command(struct scheduler *s, struct command *command, struct error *error) {
    int code = 0;
    pthread_mutex_lock(&s->mutex);
    if (s->stopping) {
        code = error_set(error, ERROR_INVALID, "the scheduler is stopping");
    } else if (command->submit != NULL && s->requests_waiting >= s->options.max_waiting) {
        code = error_set(error, ERROR_PAGES, "the queue is full: %u requests are waiting", s->requests_waiting);
    } else {
        if (command->submit != NULL) {
            s->requests_waiting++;
            s->commands_submitted++;
        }
        *s->commands_tail = command;
        s->commands_tail = &command->next;
        pthread_cond_signal(&s->changed);
    }
    pthread_mutex_unlock(&s->mutex);
    return code;
}

int scheduler_submit(struct scheduler *s, struct request *request, struct error *error) {
    struct policy_settings settings = scheduler_policy(s, request);
    int code = check_request(s, request, &settings, error);
    if (code == 0)
        code = request_prepare(request, s->tokenizer, error);
    if (code != 0)
        return code;
    struct command *command = calloc(1, sizeof *command);
    if (command == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for the request");
    struct task *task = request->task;
    task->submitted_s = clock_seconds();
    task->kv_policy = settings;
    for (uint32_t p = 0; p < request->prompts_count; p++)
        task->prompts[p].tokens_max = scheduler_tokens_max(s, &settings, request->prompts[p].count);
    command->submit = task;
    request->task = NULL;
    code = send_command(s, command, error);
    if (code != 0) {
        request->task = task;
        free(command);
    }
    return code;
}

static void send_end(struct scheduler *s, struct request *request, bool expired) {
    struct command *command = calloc(1, sizeof *command);
    if (command == NULL)
        return; /* the request runs to its end instead */
    command->cancel = request;
    command->expired = expired;
    if (send_command(s, command, NULL) != 0)
        free(command);
}

void scheduler_cancel(struct scheduler *s, struct request *request) {
    send_end(s, request, false);
}

void scheduler_expire(struct scheduler *s, struct request *request) {
    send_end(s, request, true);
}

size_t scheduler_poll(struct scheduler *s, scheduler_handle handle, void *context) {
    pthread_mutex_lock(&s->mutex);
    struct output_node *node = s->outputs;
    s->outputs = NULL;
    s->outputs_tail = &s->outputs;
    pthread_mutex_unlock(&s->mutex);
    size_t count = 0;
    for (struct output_node *next; node != NULL; node = next, count++) {
        next = node->next;
        handle(context, &node->output);
        output_node_free(node);
    }
    return count;
}

void scheduler_get_stats(struct scheduler *s, struct scheduler_stats *out) {
    pthread_mutex_lock(&s->mutex);
    *out = s->stats;
    out->requests_waiting += s->commands_submitted;
    pthread_mutex_unlock(&s->mutex);
}
