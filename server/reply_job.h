/* SPDX-License-Identifier: Apache-2.0
 *
 * Routes whose JSON reply is made from the body alone, with no generation: on another thread where that takes time
 * (exchange_work).
 */
#ifndef SERVER_REPLY_JOB_H
#define SERVER_REPLY_JOB_H

#include "server/http.h"
#include "server/params.h"

/* Writes the reply to a body. 0, or -1 with the fault set. Not on the loop's thread, as a rule. */
typedef int (*reply_job_run)(
    const json_t *body, const struct parse_context *context, struct buffer *reply, struct fault *fault);

/* A route's handler: parses the body and answers with what run writes. */
void reply_job_start(struct exchange *exchange, reply_job_run run);

#endif
