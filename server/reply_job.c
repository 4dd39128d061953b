/* SPDX-License-Identifier: Apache-2.0 */
#include "server/reply_job.h"

#include "server/generation.h"

#include <stdlib.h>

struct reply_job {
    struct exchange *exchange;
    struct parse_context context;
    reply_job_run run;
    struct buffer reply;
    struct fault fault;
    int failed;
};

static void reply_job_work(void *state) {
    struct reply_job *job = state;
    const struct buffer *text = &job->exchange->body;
    json_t *body = fields_parse(text->data, text->length, &job->fault);
    job->failed = body == NULL || job->run(body, &job->context, &job->reply, &job->fault) != 0;
    json_decref(body);
}

static void reply_job_done(void *state) {
    struct reply_job *job = state;
    if (!job->failed && job->reply.failed)
        job->failed = fault_memory(&job->fault);
    if (!job->exchange->abandoned && job->failed)
        exchange_fault(job->exchange, &job->fault);
    else if (!job->exchange->abandoned)
        exchange_json(job->exchange, 200, &job->reply);
    buffer_free(&job->reply);
    free(job);
}

void reply_job_start(struct exchange *exchange, reply_job_run run) {
    struct reply_job *job = calloc(1, sizeof *job);
    if (job != NULL)
        *job = (struct reply_job){.exchange = exchange, .context = generation_context(exchange), .run = run};
    if (job == NULL || exchange_work(exchange, reply_job_work, reply_job_done, job) != 0) {
        free(job);
        exchange_fault_memory(exchange);
    }
}
