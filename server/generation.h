/* SPDX-License-Identifier: Apache-2.0
 *
 * A generation: one request from its body to its reply, between the HTTP side (exchange) and the scheduler.
 *
 *   body --(parse and tokenise; large bodies on another thread)--> plan --submit--> scheduler
 *   outputs --(loop thread)--> chunks of a stream, or one reply after the last
 *
 * It lives from the submit to the output with last = true, also when the client leaves meanwhile (then the request is
 * cancelled and its outputs go nowhere). Headers are sent with the first output, so that what goes wrong before the
 * first token is a real status; what goes wrong later is `data: {"error": ...}`.
 */
#ifndef SERVER_GENERATION_H
#define SERVER_GENERATION_H

#include "server/http.h"
#include "server/params.h"

/* A route's handler: parses the body with parse and runs what it asks for. */
void generation_handle(struct exchange *exchange, plan_parse parse);

/* scheduler_handle; context is the server. */
void generation_output(void *server, const struct output *output);

void generation_cancel_all(struct server *server);
/* Ends those that were submitted so many seconds ago or earlier: what has tokens is an answer that ends by length, what
 * has none a 503. */
void generation_expire(struct server *server, double seconds);

/* What the parsers need of the server and the exchange. */
struct parse_context generation_context(const struct exchange *exchange);

#endif
