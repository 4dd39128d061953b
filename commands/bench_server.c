/* SPDX-License-Identifier: Apache-2.0
 *
 * The part of bench_work.h that goes through the scheduler. */
#include "commands/bench_work.h"

#include "engine/clock.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { WAITING_MAX = 65536 };

struct bench_server {
    struct tokenizer *tokenizer;
    struct scheduler *scheduler;
    uint32_t vocabulary;
    uint32_t prompts_made;
    pthread_mutex_t lock;
    pthread_cond_t wakened;
    bool outputs_ready;
};

/* Streams whose tokens are timed by the ends of the engine's steps. */
struct group {
    struct bench_streams *streams;
    uint32_t started; /* have their first token */
    bool ended;       /* one of them has */
    double from;      /* when all had started */
};

/* What is waited for, filled by handle_output. */
struct wait {
    struct group *group; /* NULL: not timed */
    double token_at;     /* the last one */
    bool first;          /* the first token is there, or there will be none */
    bool last;           /* the request is ours again */
    double last_at;      /* clock_seconds at delivery */
    double queued;
    double prefill;
    uint32_t generated;
    enum finish_reason finish;
    struct error error;
};

static void wake(void *context) {
    struct bench_server *server = context;
    pthread_mutex_lock(&server->lock);
    server->outputs_ready = true;
    pthread_cond_signal(&server->wakened);
    pthread_mutex_unlock(&server->lock);
}

struct bench_server *bench_server_start(
    struct engine *engine, uint32_t max_sequences, struct background *background, struct error *error) {
    struct bench_server *server = calloc(1, sizeof *server);
    if (server == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for the scheduler");
        return NULL;
    }
    pthread_mutex_init(&server->lock, NULL);
    pthread_cond_init(&server->wakened, NULL);
    server->vocabulary = engine_model(engine)->shape.vocabulary;
    server->tokenizer = tokenizer_create(engine_model(engine)->file, error);
    struct scheduler_options options = {.max_sequences = max_sequences,
        .background = background,
        .wake = wake,
        .wake_context = server,
        .max_waiting = WAITING_MAX};
    if (server->tokenizer != NULL)
        server->scheduler = scheduler_create(engine, server->tokenizer, &options, error);
    if (server->scheduler == NULL) {
        bench_server_stop(server);
        return NULL;
    }
    return server;
}

void bench_server_stop(struct bench_server *server) {
    if (server == NULL)
        return;
    if (server->scheduler != NULL)
        scheduler_free(server->scheduler);
    tokenizer_free(server->tokenizer);
    pthread_cond_destroy(&server->wakened);
    pthread_mutex_destroy(&server->lock);
    free(server);
}

/* Outputs of tokens that come together are as if they came evenly. */
static void time_tokens(struct wait *wait, const struct output *output) {
    struct group *group = wait->group;
    if (output->generated > 0 && wait->generated == 0) {
        if (++group->started == group->streams->count)
            group->from = output->time_s;
    } else if (group->started == group->streams->count && wait->token_at >= group->from && !group->ended) {
        for (uint32_t i = 0; i < output->generated; i++)
            group->streams->gaps[group->streams->gaps_count++] = (output->time_s - wait->token_at) / output->generated;
        group->streams->seconds = output->time_s - group->from;
    }
    group->ended |= output->finish != FINISH_NONE;
    if (output->generated > 0)
        wait->token_at = output->time_s;
}

static void handle_output(void *context, const struct output *output) {
    (void)context;
    struct wait *wait = output->request->user;
    if (wait->group != NULL)
        time_tokens(wait, output);
    if (output->generated > 0 || output->last)
        wait->first = true;
    wait->generated += output->generated;
    if (output->finish != FINISH_NONE) {
        wait->finish = output->finish;
        wait->error = output->error;
        wait->queued = output->queued_s;
        wait->prefill = output->prefill_s;
    }
    if (output->last) {
        wait->last = true;
        wait->last_at = clock_seconds();
    }
}

/* Waits for outputs and delivers them. */
static void deliver(struct bench_server *server) {
    pthread_mutex_lock(&server->lock);
    while (!server->outputs_ready)
        pthread_cond_wait(&server->wakened, &server->lock);
    server->outputs_ready = false;
    pthread_mutex_unlock(&server->lock);
    scheduler_poll(server->scheduler, handle_output, NULL);
}

static void wait_until(struct bench_server *server, const bool *flag) {
    while (!*flag)
        deliver(server);
}

static struct request *make_request(struct bench_server *server, uint32_t tokens, uint32_t max_tokens) {
    struct request *request = request_create();
    if (request == NULL)
        return NULL;
    request->prompts = calloc(1, sizeof *request->prompts);
    if (request->prompts != NULL) {
        request->prompts_count = 1;
        request->prompts[0].tokens = malloc(tokens * sizeof *request->prompts[0].tokens);
    }
    if (request->prompts == NULL || request->prompts[0].tokens == NULL) {
        request_free(request);
        return NULL;
    }
    /* The first token differs from prompt to prompt and the stride from that of bench_work.c: no prefix is shared. */
    uint64_t first = 1000 + server->prompts_made++;
    for (uint32_t i = 0; i < tokens; i++)
        request->prompts[0].tokens[i] = (int32_t)((first + 11 * (uint64_t)i) % server->vocabulary);
    request->prompts[0].count = tokens;
    strcpy(request->id, "bench");
    request->n = 1;
    request->max_tokens = max_tokens;
    request->sampling = (struct sample_params){.temperature = 0, .top_p = 1, .forced = -1};
    request->ignore_eos = true;
    request->stream = true;
    request->logprobs = -1;
    return request;
}

/* Runs one request to its end; cancelled at its first token when asked. times->cancel is filled then, else the rest. */
static int run_request(struct bench_server *server, uint32_t tokens, uint32_t max_tokens, bool cancel,
    struct bench_request_times *times, struct error *error) {
    struct wait wait = {0};
    struct request *request = make_request(server, tokens, max_tokens);
    if (request == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a request of %u tokens", tokens);
    request->user = &wait;
    double start = clock_seconds();
    int code = scheduler_submit(server->scheduler, request, error);
    if (code != 0) {
        request_free(request);
        return code;
    }
    if (cancel) {
        wait_until(server, &wait.first);
        double cancelled = clock_seconds();
        scheduler_cancel(server->scheduler, request);
        wait_until(server, &wait.last);
        times->cancel = wait.last_at - cancelled;
    } else {
        wait_until(server, &wait.last);
        times->total = wait.last_at - start;
        times->queued = wait.queued;
        times->prefill = wait.prefill;
    }
    request_free(request);
    if (wait.finish == FINISH_ERROR)
        return error_set(error, wait.error.code, "%s", wait.error.message);
    return 0;
}

int bench_first_token(
    struct bench_server *server, uint32_t tokens, struct bench_request_times *times, struct error *error) {
    *times = (struct bench_request_times){0};
    return run_request(server, tokens, 1, false, times, error);
}

int bench_request(struct bench_server *server, struct bench_request_times *times, struct error *error) {
    enum { LONG_ENOUGH = 256 };
    *times = (struct bench_request_times){0};
    int code = run_request(server, 1, 1, false, times, error);
    if (code == 0)
        code = run_request(server, 1, LONG_ENOUGH, true, times, error);
    return code;
}

/* Waits until the first `count` requests are ours again, and counts those that run meanwhile. */
static void wait_for_all(
    struct bench_server *server, const struct wait *waits, uint32_t count, struct bench_admitted *admitted) {
    struct scheduler_stats stats;
    for (uint32_t done = 0; done < count;) {
        if (waits[done].last) {
            done++;
            continue;
        }
        deliver(server);
        scheduler_get_stats(server->scheduler, &stats);
        if (stats.requests_running > admitted->sequences)
            admitted->sequences = stats.requests_running;
    }
}

/* Submits requests of one kind, and waits until all are done. waits [count] are the caller's, filled here. */
static int run_requests(struct bench_server *server, const struct policy_settings *policy, uint32_t count,
    uint32_t prompt_tokens, uint32_t max_tokens, struct wait *waits, struct bench_admitted *admitted,
    struct error *error) {
    struct request **made = calloc(count, sizeof(struct request *));
    uint32_t submitted = 0;
    int code = made == NULL ? error_set(error, ERROR_MEMORY, "no memory for requests") : 0;
    for (uint32_t i = 0; i < count && code == 0; i++) {
        made[i] = make_request(server, prompt_tokens, max_tokens);
        if (made[i] == NULL) {
            code = error_set(error, ERROR_MEMORY, "no memory for request %u of %u", i + 1, count);
            break;
        }
        made[i]->user = &waits[i];
        if (policy != NULL)
            policy_settings_copy(&made[i]->kv_policy, policy);
    }
    double start = clock_seconds();
    while (submitted < count && code == 0) {
        code = scheduler_submit(server->scheduler, made[submitted], error);
        submitted += code == 0;
    }
    for (uint32_t i = 0; i < submitted && code != 0; i++)
        scheduler_cancel(server->scheduler, made[i]);
    wait_for_all(server, waits, submitted, admitted);
    admitted->seconds = clock_seconds() - start;
    for (uint32_t i = 0; i < submitted; i++) {
        admitted->generated += waits[i].generated;
        if (waits[i].finish == FINISH_ERROR && code == 0)
            code = error_set(error, waits[i].error.code, "%s", waits[i].error.message);
    }
    for (uint32_t i = 0; made != NULL && i < count; i++)
        request_free(made[i]);
    free(made);
    return code;
}

int bench_admit(struct bench_server *server, const struct policy_settings *policy, uint32_t requests,
    uint32_t prompt_tokens, uint32_t max_tokens, struct bench_admitted *admitted, struct error *error) {
    struct scheduler_stats before, after;
    struct wait *waits = calloc(requests, sizeof *waits);
    *admitted = (struct bench_admitted){0};
    if (waits == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for requests");
    scheduler_get_stats(server->scheduler, &before);
    int code = run_requests(server, policy, requests, prompt_tokens, max_tokens, waits, admitted, error);
    scheduler_get_stats(server->scheduler, &after);
    admitted->preemptions = after.preemptions - before.preemptions;
    free(waits);
    return code;
}

int bench_stream(struct bench_server *server, struct bench_streams *streams, struct error *error) {
    struct bench_admitted admitted = {0};
    struct group group = {.streams = streams};
    struct wait *waits = calloc(streams->count, sizeof *waits);
    if (waits == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for requests");
    for (uint32_t i = 0; i < streams->count; i++)
        waits[i].group = &group;
    streams->gaps_count = 0;
    streams->seconds = 0;
    int code =
        run_requests(server, NULL, streams->count, streams->prompt_tokens, streams->tokens, waits, &admitted, error);
    free(waits);
    return code;
}
