/* SPDX-License-Identifier: Apache-2.0 */
#include "server/generation.h"

#include "engine/clock.h"
#include "engine/log.h"
#include "server/admin/admin.h"
#include "server/format.h"
#include "server/metrics.h"
#include "server/server.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { POLICY_TEXT_MAX = 200 };

struct choice_state {
    struct choice_part part;
    enum finish_reason finish;
    bool begun;         /* stream: its first chunk was written */
    double last_time_s; /* of its newest tokens; 0: none yet */
    double logprob_sum; /* of its tokens; for the choice of the best */
    uint64_t logprobs_count;
    bool taken; /* it is one of the best */
};

struct generation {
    struct server *server;
    struct exchange *exchange; /* a reference */
    struct request *request;
    struct reply reply;
    struct tool_set tools;
    struct choice_state *choices; /* [choices_count] */
    uint32_t choices_count;
    uint32_t n; /* choices a prompt that are returned, of request->n */
    struct usage usage;
    struct fault fault; /* the first thing that went wrong */
    bool streaming;     /* headers were sent */
    bool expired;       /* over request-timeout */
    double submitted_s;
    bool first_token_seen;
    struct buffer scratch; /* chunks of one output */
    struct generation *next, *previous;
};

/* --- Life --- */

static void generation_free(struct generation *generation) {
    for (uint32_t i = 0; generation->choices != NULL && i < generation->choices_count; i++)
        choice_part_free(&generation->choices[i].part);
    free(generation->choices);
    tool_set_free(&generation->tools);
    buffer_free(&generation->scratch);
    request_free(generation->request);
    free(generation);
}

static void generation_link(struct generation *generation) {
    struct server *server = generation->server;
    generation->next = server->generations;
    if (generation->next != NULL)
        generation->next->previous = generation;
    server->generations = generation;
    server->generations_active++;
}

static void generation_unlink(struct generation *generation) {
    struct server *server = generation->server;
    if (generation->previous != NULL)
        generation->previous->next = generation->next;
    else
        server->generations = generation->next;
    if (generation->next != NULL)
        generation->next->previous = generation->previous;
    server->generations_active--;
}

/* The client left. */
static void generation_abandon(void *state) {
    struct generation *generation = state;
    log_event(LOG_INFO, generation->exchange->id, "client left: request cancelled", NULL);
    scheduler_cancel(generation->server->model.scheduler, generation->request);
}

void generation_cancel_all(struct server *server) {
    for (struct generation *generation = server->generations; generation != NULL; generation = generation->next)
        scheduler_cancel(server->model.scheduler, generation->request);
}

void generation_expire(struct server *server, double seconds) {
    double now = clock_seconds();
    for (struct generation *generation = server->generations; generation != NULL; generation = generation->next) {
        if (generation->expired || now - generation->submitted_s < seconds)
            continue;
        generation->expired = true;
        log_event(LOG_INFO, generation->exchange->id, "request ended: over request-timeout", NULL);
        scheduler_expire(server->model.scheduler, generation->request);
    }
}

static struct generation *generation_create(struct exchange *exchange, struct plan *plan) {
    struct generation *generation = calloc(1, sizeof *generation);
    if (generation == NULL)
        return NULL;
    struct server *server = exchange->server;
    generation->choices_count = plan->request->prompts_count * plan->request->n;
    generation->choices = calloc(generation->choices_count, sizeof *generation->choices);
    if (generation->choices == NULL) {
        free(generation);
        return NULL;
    }
    generation->server = server;
    generation->exchange = exchange;
    generation->request = plan->request;
    generation->n = plan->n;
    plan->request = NULL;
    generation->tools = plan->tools;
    plan->tools = (struct tool_set){0};
    generation->reply = (struct reply){.chat = plan->chat,
        .vectors = generation->request->pooling != POOLING_NONE,
        .base64 = plan->base64,
        .created = time(NULL),
        .model = server->model_id,
        .fingerprint = server->fingerprint,
        .tokenizer = server->model.tokenizer,
        .tools = generation->tools.count > 0 ? &generation->tools : NULL,
        .logprobs = plan->logprobs,
        .include_usage = plan->include_usage};
    for (uint32_t i = 0; i < generation->request->prompts_count; i++)
        generation->usage.prompt_tokens += generation->request->prompts[i].count;
    return generation;
}

/* The reply's id; the request's id too, unless the client gave one. */
static void generation_name(struct generation *generation) {
    struct exchange *exchange = generation->exchange;
    struct reply *reply = &generation->reply;
    const char *prefix = reply->vectors ? "embd-" : reply->chat ? "chatcmpl-" : "cmpl-";
    http_make_id(reply->id, sizeof reply->id, prefix);
    if (exchange->id_is_ours)
        snprintf(exchange->id, sizeof exchange->id, "%s", reply->id);
    snprintf(exchange->completion_id, sizeof exchange->completion_id, "%s", reply->id);
    snprintf(generation->request->id, sizeof generation->request->id, "%s", exchange->id);
}

static void generation_fault_of(const struct error *error, const struct reply *reply, struct fault *fault) {
    const char *prompts = reply->vectors ? "input" : reply->chat ? "messages" : "prompt";
    switch (error->code) {
    case ERROR_CONTEXT:
        fault_set(fault, 400, "context_length_exceeded", prompts, "%s", error->message);
        break;
    case ERROR_PAGES:
        fault_unavailable(fault, "queue_full", 1, error->message);
        break;
    case ERROR_INVALID:
        fault_invalid(fault, NULL, "%s", error->message);
        break;
    case ERROR_UNSUPPORTED: /* a policy that this model cannot have */
        fault_invalid(fault, "kv_cache", "%s", error->message);
        break;
    default:
        fault_set(fault, 500, NULL, NULL, "%s", error->message);
    }
}

/* Hands the plan's request to the scheduler, or answers why not. */
static void generation_start(struct exchange *exchange, struct plan *plan) {
    struct server *server = exchange->server;
    struct fault fault;
    struct error error = {0};
    if (server->cancelled) {
        fault_unavailable(&fault, "draining", 5, "the server is shutting down");
        exchange_fault(exchange, &fault);
        return;
    }
    struct generation *generation = generation_create(exchange, plan);
    if (generation == NULL) {
        exchange_fault_memory(exchange);
        return;
    }
    generation_name(generation);
    const struct prompt *first = &generation->request->prompts[0];
    prefix_hash_write(first->tokens, first->count, server->config->prefix_hash_tokens, exchange->prefix);
    generation->request->user = generation;
    generation->submitted_s = clock_seconds();
    if (scheduler_submit(server->model.scheduler, generation->request, &error) != 0) {
        generation_fault_of(&error, &generation->reply, &fault);
        generation_free(generation);
        exchange_fault(exchange, &fault);
        return;
    }
    generation_link(generation);
    exchange_retain(exchange);
    exchange->abandon = generation_abandon;
    exchange->state = generation;
}

/* --- The body --- */

struct generation_job {
    struct exchange *exchange;
    plan_parse parse;
    struct parse_context context;
    struct plan plan;
    struct fault fault;
    int failed;
};

struct parse_context generation_context(const struct exchange *exchange) {
    const struct server *server = exchange->server;
    return (struct parse_context){.tokenizer = server->model.tokenizer,
        .grammar_vocabulary = server->model.grammar_vocabulary,
        .vocabulary = server->model.vocabulary,
        .width = server->model.width,
        .pooling = server->model.pooling,
        .context = server->model.context,
        .tokens_max = server->model.tokens_max,
        .model_id = server->model_id,
        .kv_policy = &server->model.kv_policy,
        .policy_model = server->model.policy_model,
        .policies = server->admin == NULL ? NULL : server->admin->policies,
        .chat_template = server->model.chat_template,
        .chat_refusal = server->model.chat_refusal,
        .request_id = exchange->id};
}

static void generation_job_run(void *state) {
    struct generation_job *job = state;
    const struct buffer *text = &job->exchange->body;
    struct error error;
    json_t *body = fields_parse(text->data, text->length, &job->fault);
    job->failed = body == NULL || job->parse(body, &job->context, &job->plan, &job->fault) != 0;
    json_decref(body);
    if (!job->failed)
        job->failed = params_finish(&job->plan, &job->fault) != 0;
    if (!job->failed && request_prepare(job->plan.request, job->context.tokenizer, &error) != 0)
        job->failed = fault_memory(&job->fault);
}

static void generation_job_done(void *state) {
    struct generation_job *job = state;
    if (job->exchange->abandoned)
        log_event(LOG_INFO, job->exchange->id, "client left: request dropped", NULL);
    else if (job->failed)
        exchange_fault(job->exchange, &job->fault);
    else
        generation_start(job->exchange, &job->plan);
    plan_free(&job->plan);
    free(job);
}

void generation_handle(struct exchange *exchange, plan_parse parse) {
    struct generation_job *job = calloc(1, sizeof *job);
    if (job != NULL)
        *job = (struct generation_job){.exchange = exchange, .parse = parse, .context = generation_context(exchange)};
    if (job == NULL || exchange_work(exchange, generation_job_run, generation_job_done, job) != 0) {
        free(job);
        exchange_fault_memory(exchange);
    }
}

/* --- Outputs --- */

static void generation_measure(struct generation *generation, const struct output *output) {
    struct metrics *metrics = generation->server->metrics;
    struct choice_state *choice = &generation->choices[output->choice];
    if (output->generated > 0) {
        if (!generation->first_token_seen)
            metrics_observe(metrics, METRIC_FIRST_TOKEN, output->time_s - generation->submitted_s, 1);
        if (choice->last_time_s > 0.0)
            metrics_observe(metrics, METRIC_INTER_TOKEN, (output->time_s - choice->last_time_s) / output->generated,
                output->generated);
        generation->first_token_seen = true;
        choice->last_time_s = output->time_s;
    }
    if (output->finish == FINISH_NONE)
        return;
    metrics_count_finish(metrics, output->finish);
    generation->usage.completion_tokens += output->completion_tokens;
    generation->usage.kv_tokens_seen += output->kv_tokens_seen;
    generation->usage.kv_tokens_kept += output->kv_tokens_kept;
    generation->usage.kv_bytes += output->kv_bytes;
    generation->usage.kv_bytes_full += output->kv_bytes_full;
    if (output->choice % generation->request->n == 0)
        generation->usage.cached_tokens += output->cached_tokens;
    if (output->finish != FINISH_STOP && output->finish != FINISH_LENGTH)
        return;
    if (output->choice == 0) {
        metrics_observe(metrics, METRIC_QUEUE, output->queued_s, 1);
        metrics_observe(metrics, METRIC_PREFILL, output->prefill_s, 1);
        metrics_observe(metrics, METRIC_DECODE, output->decode_s, 1);
    }
}

/* There is nothing to show for the time. The same request would most likely fare the same. */
static void generation_fault_expired(struct generation *generation) {
    fault_set(&generation->fault, 503, "request_timeout", NULL,
        "no token was generated within the %u seconds that a request may take",
        generation->server->config->request_timeout);
    generation->fault.no_retry = true;
}

/* Remembers the first failure. */
static void generation_note_failure(struct generation *generation, const struct output *output) {
    if (generation->fault.status != 0)
        return;
    if (output->finish == FINISH_ERROR)
        generation_fault_of(&output->error, &generation->reply, &generation->fault);
    else if (generation->expired && !generation->server->cancelled)
        generation_fault_expired(generation);
    else
        fault_unavailable(&generation->fault, "draining", 5, "the server is shutting down");
}

/* Writes what one output adds to a stream. */
static void generation_stream_output(struct generation *generation, const struct output *output) {
    struct choice_state *choice = &generation->choices[output->choice];
    const struct reply *reply = &generation->reply;
    struct buffer *out = &generation->scratch;
    bool failed = output->finish == FINISH_ERROR || output->finish == FINISH_CANCELLED;
    if (!generation->streaming && !failed) {
        generation->streaming = true;
        exchange_stream(generation->exchange);
    }
    if (reply->chat && !choice->begun && !failed)
        format_chunk_role(out, reply, output->choice);
    bool echoed = generation->request->echo && !choice->begun && !failed; /* the prompt, all at once */
    choice->begun = true;
    choice_part_clear(&choice->part);
    choice_part_add(&choice->part, reply, output);
    bool content = choice->part.text.length > 0 || choice->part.tokens.length > 0;
    bool finished = output->finish == FINISH_STOP || output->finish == FINISH_LENGTH;
    bool in_one = finished && !reply->chat; /* a completion's last chunk has text and reason */
    if ((content && !failed) || in_one)
        format_chunk(out, reply, output->choice, &choice->part, in_one ? output->finish : FINISH_NONE);
    if (!failed)
        format_chunk_calls(out, reply, output->choice, &choice->part);
    if (finished && !in_one)
        format_chunk_finish(out, reply, output->choice, &choice->part, output->finish);
    if (choice_part_failed(&choice->part))
        out->failed = true;
    if (echoed)
        exchange_allow_backlog(generation->exchange, out->length);
}

static void generation_send_scratch(struct generation *generation) {
    struct buffer *out = &generation->scratch;
    if (out->failed) { /* memory ran out: what is missing cannot be told otherwise */
        buffer_free(out);
        exchange_abandon(generation->exchange);
        return;
    }
    exchange_write(generation->exchange, out->data, out->length);
    out->length = 0;
}

/* The end of a stream that has begun. */
static void generation_end_stream(struct generation *generation) {
    struct buffer *out = &generation->scratch;
    if (generation->fault.status != 0) {
        buffer_string(out, "data: ");
        fault_write(&generation->fault, out);
        buffer_string(out, "\n\n");
    } else if (generation->reply.include_usage) {
        format_chunk_usage(out, &generation->reply, &generation->usage);
    }
    format_done(out);
    generation_send_scratch(generation);
    exchange_end(generation->exchange);
}

static double choice_quality(const struct choice_state *choice) {
    return choice->logprobs_count == 0 ? 0 : choice->logprob_sum / (double)choice->logprobs_count;
}

/* Choice `index` of the reply: in order, or the best of a prompt's candidates that are left, the first of equal ones.
 */
static struct choice_state *generation_pick(struct generation *generation, uint32_t index) {
    uint32_t candidates = generation->request->n;
    if (candidates == generation->n)
        return &generation->choices[index];
    struct choice_state *own = &generation->choices[index / generation->n * candidates], *best = NULL;
    for (uint32_t i = 0; i < candidates; i++)
        if (!own[i].taken && (best == NULL || choice_quality(&own[i]) > choice_quality(best)))
            best = &own[i];
    best->taken = true;
    return best;
}

static void generation_answer_whole(struct generation *generation) {
    struct buffer body = {0};
    format_begin(&body, &generation->reply);
    for (uint32_t i = 0; i < generation->request->prompts_count * generation->n; i++) {
        struct choice_state *choice = generation_pick(generation, i);
        format_choice(&body, &generation->reply, i, &choice->part, choice->finish);
        if (choice_part_failed(&choice->part))
            body.failed = true;
        choice_part_free(&choice->part); /* the memory is needed for the reply */
    }
    format_end(&body, &generation->reply, &generation->usage);
    if (!body.failed) {
        exchange_json(generation->exchange, 200, &body);
        return;
    }
    buffer_free(&body);
    exchange_fault_memory(generation->exchange);
}

static void generation_answer(struct generation *generation) {
    if (generation->streaming)
        generation_end_stream(generation);
    else if (generation->fault.status != 0)
        exchange_fault(generation->exchange, &generation->fault);
    else
        generation_answer_whole(generation);
}

/* The last output came: the request is ours again. */
static void generation_finish(struct generation *generation) {
    struct server *server = generation->server;
    struct exchange *exchange = generation->exchange;
    char policy[POLICY_TEXT_MAX];
    exchange->abandon = NULL;
    exchange->state = NULL;
    if (generation->fault.status == 0) {
        metrics_observe(server->metrics, METRIC_END_TO_END, clock_seconds() - generation->submitted_s, 1);
        metrics_observe(server->metrics, METRIC_PROMPT_TOKENS, (double)generation->usage.prompt_tokens, 1);
        metrics_observe(server->metrics, METRIC_GENERATION_TOKENS, (double)generation->usage.completion_tokens, 1);
    }
    policy_settings_describe(&generation->request->kv_policy, policy, sizeof policy);
    log_event(LOG_INFO, exchange->id, "generation ended", "prompt_tokens", LOG_INT(generation->usage.prompt_tokens),
        "completion_tokens", LOG_INT(generation->usage.completion_tokens), "cached_tokens",
        LOG_INT(generation->usage.cached_tokens), "kv_policy", LOG_STRING(policy), "kv_tokens_seen",
        LOG_INT(generation->usage.kv_tokens_seen), "kv_tokens_kept", LOG_INT(generation->usage.kv_tokens_kept),
        "choices", LOG_INT(generation->choices_count), "seconds", LOG_FLOAT(clock_seconds() - generation->submitted_s),
        NULL);
    if (!exchange->abandoned)
        generation_answer(generation);
    generation_unlink(generation);
    generation_free(generation);
    exchange_release(exchange);
    server_check_drained(server);
}

void generation_output(void *server, const struct output *output) {
    struct generation *generation = output->request->user;
    struct choice_state *choice = &generation->choices[output->choice];
    bool reader = !generation->exchange->abandoned;
    (void)server;
    generation_measure(generation, output);
    if (output->finish == FINISH_ERROR || output->finish == FINISH_CANCELLED)
        generation_note_failure(generation, output);
    if (output->finish != FINISH_NONE)
        choice->finish = output->finish;
    for (uint32_t i = 0; i < output->tokens_count; i++)
        if (!output->tokens[i].from_prompt) {
            choice->logprob_sum += (double)output->tokens[i].logprob;
            choice->logprobs_count++;
        }
    if (reader && generation->request->stream && (generation->fault.status == 0 || generation->streaming)) {
        generation_stream_output(generation, output);
        generation_send_scratch(generation);
    } else if (reader && generation->fault.status == 0) {
        choice_part_add(&choice->part, &generation->reply, output);
    }
    if (output->last)
        generation_finish(generation);
}
