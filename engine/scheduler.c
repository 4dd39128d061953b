/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/scheduler_internal.h"

#include <stdlib.h>
#include <string.h>

#include "engine/clock.h"

enum { MAX_SEQUENCES_DEFAULT = 256, MAX_WAITING_DEFAULT = 1024 };

/* ---- the engine thread ---- */

/* Memory of the running sequences. */
static void count_memory(struct scheduler *s) {
    uint64_t seen = 0, slots = 0, pages = 0, pages_full = 0;
    for (uint32_t i = 0; i < s->running_count; i++) {
        const struct kv_sequence *kv = sequence_kv(s->running[i]->sequence);
        uint32_t length = kv_sequence_length(kv);
        seen += length;
        slots += kv_sequence_slots_held(kv);
        pages += kv_sequence_pages_held(kv);
        pages_full += (uint64_t)(length + KV_PAGE_SLOTS - 1) / KV_PAGE_SLOTS * s->heads;
    }
    size_t page_bytes = kv_cache_pool(engine_kv_cache(s->engine))->page_bytes;
    s->counters.kv_tokens_seen = seen;
    s->counters.kv_tokens_kept = slots / s->heads;
    s->counters.kv_bytes = pages * page_bytes;
    s->counters.kv_bytes_full = pages_full * page_bytes;
}

static void publish(struct scheduler *s) {
    struct scheduler_stats *c = &s->counters;
    c->requests_running = s->running_count;
    c->requests_waiting = s->waiting_count;
    c->pages_total = kv_cache_pages_total(engine_kv_cache(s->engine));
    c->pages_free = kv_cache_pages_free(engine_kv_cache(s->engine));
    count_memory(s);
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
            scheduler_cancel_task(s, command->cancel);
        free(command);
        command = next;
    }
}

static void *engine_thread(void *context) {
    struct scheduler *s = context;
    struct command *commands;
    while (take_commands(s, &commands)) {
        run_commands(s, commands);
        scheduler_run_step(s);
        publish(s);
    }
    run_commands(s, commands);
    scheduler_cancel_all(s);
    publish(s);
    return NULL;
}

/* ---- the interface ---- */

static int list_end_tokens(struct scheduler *s) {
    uint32_t vocabulary = tokenizer_vocabulary(s->tokenizer), count = 0;
    for (uint32_t i = 0; i < vocabulary; i++)
        count += tokenizer_is_end(s->tokenizer, (int32_t)i);
    s->end_tokens = malloc((count + 1) * sizeof *s->end_tokens);
    if (s->end_tokens == NULL)
        return ERROR_MEMORY;
    for (uint32_t i = 0; i < vocabulary; i++)
        if (tokenizer_is_end(s->tokenizer, (int32_t)i))
            s->end_tokens[s->end_tokens_count++] = (int32_t)i;
    return 0;
}

static int allocate_arrays(struct scheduler *s) {
    uint32_t rows = engine_batch_rows(s->engine);
    s->running = malloc(s->options.max_sequences * sizeof *s->running);
    s->items = malloc(rows * sizeof *s->items);
    s->batched = malloc(rows * sizeof *s->batched);
    s->tokens = malloc(rows * sizeof *s->tokens);
    s->scratch = malloc(((size_t)engine_tokens_max(s->engine) + 1) * sizeof *s->scratch);
    if (s->running == NULL || s->items == NULL || s->batched == NULL || s->tokens == NULL || s->scratch == NULL)
        return ERROR_MEMORY;
    return list_end_tokens(s);
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
    free(s->tokens);
    free(s->scratch);
    free(s->wanted);
    free(s->wanted_rows);
    free(s->params);
    free(s->results);
    free(s->end_tokens);
    pthread_mutex_destroy(&s->mutex);
    pthread_cond_destroy(&s->changed);
    free(s);
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

static int check_request(const struct scheduler *s, const struct request *request, struct error *error) {
    uint32_t most = engine_tokens_max(s->engine);
    if (request->prompts_count == 0 || request->n == 0)
        return error_set(error, ERROR_INVALID, "a request without a prompt");
    if (request->n > UINT32_MAX / request->prompts_count)
        return error_set(
            error, ERROR_INVALID, "%u choices of %u prompts are too many", request->n, request->prompts_count);
    for (uint32_t p = 0; p < request->prompts_count; p++) {
        uint32_t count = request->prompts[p].count;
        if (count == 0)
            return error_set(error, ERROR_INVALID, "prompt %u is empty", p);
        /* What is only echoed may fill the context; to generate, one place must be left. */
        if (count > most || (count == most && request->max_tokens > 0))
            return error_set(error, ERROR_CONTEXT,
                "this model's maximum context length is %u tokens, but prompt %u has %u%s", most, p, count,
                count == most ? " and leaves no room for the answer" : "");
    }
    return 0;
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
    int code = check_request(s, request, error);
    if (code == 0)
        code = request_prepare(request, s->tokenizer, error);
    if (code != 0)
        return code;
    struct command *command = calloc(1, sizeof *command);
    if (command == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for the request");
    struct task *task = request->task;
    task->submitted_s = clock_seconds();
    command->submit = task;
    request->task = NULL;
    code = send_command(s, command, error);
    if (code != 0) {
        request->task = task;
        free(command);
    }
    return code;
}

void scheduler_cancel(struct scheduler *s, struct request *request) {
    struct command *command = calloc(1, sizeof *command);
    if (command == NULL)
        return; /* the request runs to its end instead */
    command->cancel = request;
    if (send_command(s, command, NULL) != 0)
        free(command);
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
