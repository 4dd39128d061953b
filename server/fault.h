/* SPDX-License-Identifier: Apache-2.0
 *
 * What is told to a client whose request cannot be served: the HTTP status and OpenAI's error object.
 *
 * | case                                   | status | type                  | code                    |
 * |----------------------------------------|--------|-----------------------|-------------------------|
 * | bad JSON or value                      | 400    | invalid_request_error | null                    |
 * | prompt over the context                | 400    | invalid_request_error | context_length_exceeded |
 * | missing or wrong key                   | 401    | invalid_request_error | invalid_api_key         |
 * | unknown model                          | 404    | invalid_request_error | model_not_found         |
 * | unknown route, method not allowed      | 404 405| invalid_request_error | null                    |
 * | body, headers too large                | 413 431| invalid_request_error | null                    |
 * | too many requests of a key             | 429    | requests              | rate_limit_exceeded     |
 * | queue full, draining, loading          | 503    | server_error          | queue_full, draining, loading |
 * | over request-timeout, no token yet     | 503    | server_error          | request_timeout         |
 * | anything that is our own fault         | 500    | server_error          | null                    |
 *
 * A client's fault is never a 5xx: the openai client repeats those, unless x-should-retry is false.
 */
#ifndef SERVER_FAULT_H
#define SERVER_FAULT_H

#include "server/buffer.h"

struct fault {
    unsigned status;         /* HTTP; 0: no fault */
    const char *code;        /* a string constant, or NULL for null */
    char parameter[80];      /* name of the field that is wrong; empty: null */
    unsigned retry_after_ms; /* for Retry-After (in seconds, rounded up) and retry-after-ms; 0: no headers */
    bool no_retry;           /* x-should-retry: false, which openai's clients obey: the same request would fail again */
    char message[512];       /* UTF-8 */
};

/* Fills fault and returns -1, so that `return fault_set(...)` reads well. parameter may be NULL. What of the message is
 * not valid UTF-8 (it may quote the client) is replaced. */
int fault_set(struct fault *fault, unsigned status, const char *code, const char *parameter, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* 400 without a code: the usual one. */
int fault_invalid(struct fault *fault, const char *parameter, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* 503 with Retry-After. */
int fault_unavailable(struct fault *fault, const char *code, unsigned retry_after_s, const char *message);

int fault_memory(struct fault *fault);

/* Writes {"error":{"message","type","param","code"}}. */
void fault_write(const struct fault *fault, struct buffer *out);

#endif
