/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/fake_scheduler.h"

#include "engine/clock.h"
#include "engine/text_stream.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct fake_output {
    struct output output;
    struct fake_output *next;
};

struct fake_choice {
    struct text_stream *text;
    uint32_t generated, published; /* tokens */
    uint32_t sent_entries;         /* of the log-probabilities */
    uint32_t age;                  /* steps */
    bool finished;
};

struct fake_task {
    struct request *request;
    struct fake_choice *choices;
    uint32_t choices_count, unfinished;
    bool running, cancelled, expired;
    double submitted_s, started_s, first_s;
    struct fake_task *next;
};

struct scheduler {
    struct fake_options options;
    struct tokenizer *tokenizer;
    pthread_t thread;
    pthread_mutex_t lock;
    bool stopping;
    struct fake_task *tasks; /* first come first */
    struct fake_output *outputs, **outputs_tail;
    struct scheduler_stats stats;
};

static void *fake_allocate(size_t bytes) {
    void *memory = calloc(1, bytes == 0 ? 1 : bytes);
    if (memory == NULL)
        abort();
    return memory;
}

int request_prepare(struct request *request, const struct tokenizer *tokenizer, struct error *error) {
    (void)request, (void)tokenizer, (void)error;
    return 0;
}

void request_free(struct request *request) {
    if (request != NULL)
        request_free_parameters(request);
}

/* --- Answers --- */

static bool fake_prompt_is(const struct prompt *prompt, const char *word) {
    size_t length = strlen(word);
    if (prompt->count < length)
        return false;
    for (size_t i = 0; i < length; i++)
        if (prompt->tokens[i] != (unsigned char)word[i])
            return false;
    return true;
}

/* Token `position` of prompt and answer together. */
static int32_t fake_token(const struct prompt *prompt, uint32_t position) {
    return prompt->tokens[position % prompt->count];
}

static void fake_push(
    struct scheduler *s, struct fake_choice *choice, const struct request *request, int32_t token, bool *stopped) {
    size_t bytes;
    const char *text = tokenizer_token_bytes(s->tokenizer, token, &bytes);
    if (request->skip_special && tokenizer_is_special(s->tokenizer, token))
        bytes = 0;
    *stopped = text_stream_push(choice->text, text, bytes) == 1;
}

static float fake_logprob(int32_t token) {
    return -(float)(token % 16) / 16.0f;
}

/* Fills the entries of tokens whose text is released. */
static void fake_add_tokens(
    const struct request *request, const struct prompt *prompt, struct fake_choice *choice, struct output *output) {
    uint32_t first = request->echo ? 0 : prompt->count;
    uint32_t released = (uint32_t)text_stream_tokens_released(choice->text);
    uint32_t count = released - choice->sent_entries;
    if (request->logprobs < 0 || count == 0)
        return;
    output->tokens = fake_allocate(count * sizeof *output->tokens);
    for (uint32_t i = 0; i < count; i++) {
        struct output_token *entry = &output->tokens[i];
        uint32_t position = first + choice->sent_entries + i;
        entry->token = fake_token(prompt, position);
        entry->text_offset = (uint32_t)text_stream_token_offset(choice->text, choice->sent_entries + i) +
                             (request->echo ? 0 : prompt->count);
        entry->from_prompt = position < prompt->count;
        entry->has_logprob = position > 0;
        entry->logprob = fake_logprob(entry->token);
        entry->top_count = (uint32_t)request->logprobs;
        entry->top = fake_allocate(entry->top_count * sizeof *entry->top);
        for (uint32_t k = 0; k < entry->top_count; k++) {
            entry->top[k].token = (entry->token + (int32_t)k) % 256;
            entry->top[k].logprob = entry->logprob - (float)k;
        }
    }
    output->tokens_count = count;
    choice->sent_entries = released;
}

static double fake_kept(const struct request *request, uint32_t seen) {
    bool all = request->kv_policy.policy == NULL || policy_settings_keep_all(&request->kv_policy);
    uint32_t budget = all ? seen : policy_budget(&request->kv_policy, seen);
    return budget < seen ? budget + 0.25 : seen;
}

static struct fake_output *fake_make_output(
    struct fake_task *task, uint32_t number, enum finish_reason finish, const char *message) {
    struct request *request = task->request;
    struct fake_choice *choice = &task->choices[number];
    const struct prompt *prompt = &request->prompts[number / request->n];
    struct fake_output *node = fake_allocate(sizeof *node);
    struct output *output = &node->output;
    output->request = request;
    output->choice = number;
    output->finish = finish;
    const char *text = choice->text == NULL ? "" : text_stream_take(choice->text, &output->text_bytes);
    output->text = fake_allocate(output->text_bytes + 1);
    memcpy(output->text, text, output->text_bytes);
    if (choice->text != NULL)
        fake_add_tokens(request, prompt, choice, output);
    output->generated = choice->generated - choice->published;
    choice->published = choice->generated;
    output->time_s = clock_seconds();
    if (finish == FINISH_NONE)
        return node;
    choice->finished = true;
    if (message != NULL)
        error_set(&output->error, ERROR_IO, "%s", message);
    output->prompt_tokens = prompt->count;
    output->completion_tokens = choice->generated;
    output->cached_tokens = number % request->n == 0 ? prompt->count / 2 : 0;
    output->kv_tokens_seen = prompt->count + choice->generated;
    output->kv_tokens_kept = fake_kept(request, prompt->count + choice->generated);
    output->kv_bytes = (uint64_t)output->kv_tokens_kept * FAKE_TOKEN_BYTES;
    output->kv_bytes_full = output->kv_tokens_seen * FAKE_TOKEN_BYTES;
    output->queued_s = task->started_s > 0 ? task->started_s - task->submitted_s : 0;
    output->prefill_s = task->first_s > 0 ? task->first_s - task->started_s : 0;
    output->decode_s = task->first_s > 0 ? output->time_s - task->first_s : 0;
    output->last = --task->unfinished == 0;
    return node;
}

static void fake_publish(struct scheduler *s, struct fake_output *node) {
    bool was_empty = s->outputs == NULL;
    *s->outputs_tail = node;
    s->outputs_tail = &node->next;
    if (was_empty && s->options.wake != NULL)
        s->options.wake(s->options.wake_context);
}

static struct fake_output *fake_make_vector(struct fake_task *task, uint32_t number) {
    const struct request *request = task->request;
    const struct prompt *prompt = &request->prompts[number];
    struct pooled pooled = {0};
    for (uint32_t i = request->pooling == POOLING_LAST ? prompt->count - 1 : 0; i < prompt->count; i++) {
        const float state[FAKE_WIDTH] = {(float)prompt->tokens[i], 1};
        if (pooled_add(&pooled, state, 1, FAKE_WIDTH) != 0)
            abort();
    }
    pooled_finish(&pooled, request->normalise);
    struct fake_output *node = fake_make_output(task, number, FINISH_STOP, NULL);
    node->output.vector = pooled.sum;
    node->output.vector_width = FAKE_WIDTH;
    return node;
}

/* One token of one choice. */
static void fake_step_choice(struct scheduler *s, struct fake_task *task, uint32_t number) {
    struct request *request = task->request;
    struct fake_choice *choice = &task->choices[number];
    const struct prompt *prompt = &request->prompts[number / request->n];
    enum finish_reason finish = FINISH_NONE;
    bool stopped = false;
    if (fake_prompt_is(prompt, "!slow") && choice->age++ % 10 != 0)
        return;
    if (fake_prompt_is(prompt, "!fail") || (fake_prompt_is(prompt, "!late") && choice->generated == 3)) {
        fake_publish(s, fake_make_output(task, number, FINISH_ERROR, "made to fail"));
        return;
    }
    if (request->pooling != POOLING_NONE) {
        fake_publish(s, fake_make_vector(task, number));
        return;
    }
    if (choice->text == NULL) {
        choice->text = text_stream_create((const char *const *)request->stops, request->stops_count);
        for (uint32_t i = 0; request->echo && i < prompt->count; i++)
            fake_push(s, choice, request, prompt->tokens[i], &stopped);
        stopped = false;
    }
    if (choice->generated < request->max_tokens) {
        int32_t token = fake_token(prompt, prompt->count + choice->generated);
        if (tokenizer_is_end(s->tokenizer, token) && !request->ignore_eos)
            finish = FINISH_STOP;
        fake_push(s, choice, request, token, &stopped);
        choice->generated++;
        s->stats.generated_tokens++;
        if (task->first_s == 0)
            task->first_s = clock_seconds();
    }
    if (stopped)
        finish = FINISH_STOP;
    else if (finish == FINISH_NONE && choice->generated >= request->max_tokens)
        finish = FINISH_LENGTH;
    if (finish != FINISH_NONE && !stopped)
        text_stream_finish(choice->text);
    if (request->stream || choice->generated == 1 || finish != FINISH_NONE)
        fake_publish(s, fake_make_output(task, number, finish, NULL));
}

static void fake_end_task(struct scheduler *s, struct fake_task *task) {
    for (uint32_t i = 0; i < task->choices_count; i++) {
        struct fake_choice *choice = &task->choices[i];
        if (choice->finished)
            continue;
        bool answered = task->expired && choice->generated > 0;
        if (answered)
            text_stream_finish(choice->text);
        fake_publish(s, fake_make_output(task, i, answered ? FINISH_LENGTH : FINISH_CANCELLED, NULL));
    }
}

static void fake_free_task(struct fake_task *task) {
    for (uint32_t i = 0; i < task->choices_count; i++)
        if (task->choices[i].text != NULL)
            text_stream_free(task->choices[i].text);
    free(task->choices);
    free(task);
}

static bool fake_may_start(const struct scheduler *s, const struct fake_task *task, uint32_t running) {
    return running < s->options.max_running && !fake_prompt_is(&task->request->prompts[0], "!never");
}

static void fake_step(struct scheduler *s) {
    uint32_t running = 0;
    s->stats.steps++;
    s->stats.requests_running = s->stats.requests_waiting = 0;
    for (struct fake_task **link = &s->tasks, *task; (task = *link) != NULL;) {
        if (task->cancelled || s->stopping)
            fake_end_task(s, task);
        if (!task->running && fake_may_start(s, task, running)) {
            task->running = true;
            task->started_s = clock_seconds();
            for (uint32_t i = 0; i < task->request->prompts_count; i++) {
                s->stats.prompt_tokens += task->request->prompts[i].count;
                s->stats.prefix_queries += task->request->prompts[i].count;
                s->stats.prefix_hits += task->request->prompts[i].count / 2;
            }
        }
        running += task->running ? task->unfinished : 0;
        for (uint32_t i = 0; task->running && i < task->choices_count; i++)
            if (!task->choices[i].finished)
                fake_step_choice(s, task, i);
        if (task->unfinished == 0) {
            *link = task->next;
            fake_free_task(task);
            continue;
        }
        s->stats.requests_running += task->running ? task->unfinished : 0;
        s->stats.requests_waiting += !task->running;
        link = &task->next;
    }
}

static void *fake_run(void *context) {
    struct scheduler *s = context;
    for (bool stop = false; !stop;) {
        struct timespec pause = {.tv_nsec = (long)s->options.step_us * 1000};
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&s->lock);
        stop = s->stopping;
        fake_step(s);
        pthread_mutex_unlock(&s->lock);
    }
    return NULL;
}

/* --- engine/scheduler.h --- */

struct scheduler *fake_scheduler_create(const struct fake_options *options) {
    struct scheduler *s = fake_allocate(sizeof *s);
    s->options = *options;
    s->outputs_tail = &s->outputs;
    s->stats.pages_total = s->stats.pages_free = 1000;
    s->tokenizer = fake_tokenizer_create(false);
    pthread_mutex_init(&s->lock, NULL);
    if (pthread_create(&s->thread, NULL, fake_run, s) != 0)
        abort();
    return s;
}

static void fake_free_output(struct fake_output *node) {
    for (uint32_t i = 0; i < node->output.tokens_count; i++)
        free(node->output.tokens[i].top);
    free(node->output.tokens);
    free(node->output.text);
    free(node->output.vector);
    free(node);
}

void scheduler_stop(struct scheduler *s) {
    pthread_mutex_lock(&s->lock);
    bool running = !s->stopping;
    s->stopping = true;
    pthread_mutex_unlock(&s->lock);
    if (running)
        pthread_join(s->thread, NULL);
}

void scheduler_free(struct scheduler *s) {
    if (s == NULL)
        return;
    scheduler_stop(s);
    for (struct fake_output *node = s->outputs, *next; node != NULL; node = next) {
        next = node->next;
        if (node->output.last)
            request_free(node->output.request);
        fake_free_output(node);
    }
    pthread_mutex_destroy(&s->lock);
    tokenizer_free(s->tokenizer);
    free(s);
}

int scheduler_submit(struct scheduler *s, struct request *request, struct error *error) {
    for (uint32_t i = 0; i < request->prompts_count; i++)
        if (request->prompts[i].count + (request->max_tokens > 0) > s->options.tokens_max)
            return error_set(
                error, ERROR_CONTEXT, "this model's maximum context length is %u tokens", s->options.tokens_max);
    struct fake_task *task = fake_allocate(sizeof *task);
    task->request = request;
    task->choices_count = task->unfinished = request->prompts_count * request->n;
    task->choices = fake_allocate(task->choices_count * sizeof *task->choices);
    task->submitted_s = clock_seconds();
    pthread_mutex_lock(&s->lock);
    unsigned waiting = 0;
    struct fake_task **link = &s->tasks;
    for (; *link != NULL; link = &(*link)->next)
        waiting += !(*link)->running;
    bool full = waiting >= s->options.max_waiting;
    if (!full)
        *link = task;
    pthread_mutex_unlock(&s->lock);
    if (!full)
        return 0;
    fake_free_task(task);
    return error_set(error, ERROR_PAGES, "the queue of %u requests is full", s->options.max_waiting);
}

static void fake_end_request(struct scheduler *s, const struct request *request, bool expired) {
    pthread_mutex_lock(&s->lock);
    for (struct fake_task *task = s->tasks; task != NULL; task = task->next)
        if (task->request == request) {
            task->cancelled = true;
            task->expired = expired;
        }
    pthread_mutex_unlock(&s->lock);
}

void scheduler_cancel(struct scheduler *s, struct request *request) {
    fake_end_request(s, request, false);
}

void scheduler_expire(struct scheduler *s, struct request *request) {
    fake_end_request(s, request, true);
}

size_t scheduler_poll(struct scheduler *s, scheduler_handle handle, void *context) {
    pthread_mutex_lock(&s->lock);
    struct fake_output *node = s->outputs;
    s->outputs = NULL;
    s->outputs_tail = &s->outputs;
    pthread_mutex_unlock(&s->lock);
    size_t count = 0;
    for (struct fake_output *next; node != NULL; node = next, count++) {
        next = node->next;
        handle(context, &node->output);
        fake_free_output(node);
    }
    return count;
}

static void fake_add_kept(const struct fake_task *task, struct scheduler_stats *out) {
    for (uint32_t i = 0; task->running && i < task->choices_count; i++) {
        if (task->choices[i].finished)
            continue;
        uint32_t seen = task->request->prompts[i / task->request->n].count + task->choices[i].generated;
        uint64_t kept = (uint64_t)fake_kept(task->request, seen);
        out->kv_tokens_seen += seen;
        out->kv_tokens_kept += kept;
        out->kv_bytes += kept * FAKE_TOKEN_BYTES;
        out->kv_bytes_full += (uint64_t)seen * FAKE_TOKEN_BYTES;
    }
}

void scheduler_get_stats(struct scheduler *s, struct scheduler_stats *out) {
    pthread_mutex_lock(&s->lock);
    *out = s->stats;
    out->requests_running = out->requests_waiting = 0;
    for (struct fake_task *task = s->tasks; task != NULL; task = task->next) {
        out->requests_running += task->running ? task->unfinished : 0;
        out->requests_waiting += !task->running;
        fake_add_kept(task, out);
    }
    pthread_mutex_unlock(&s->lock);
}
