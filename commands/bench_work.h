/* SPDX-License-Identifier: Apache-2.0
 *
 * The work that `bench` measures. Prefill and decode drive the engine directly; first_token and request go through
 * the scheduler, as requests of the server do.
 *
 * Tokens are fixed, so that every run does the same work; what is sampled is not fed back.
 */
#ifndef COMMANDS_BENCH_WORK_H
#define COMMANDS_BENCH_WORK_H

#include "engine/engine.h"
#include "engine/scheduler.h"

/* Prefill of one prompt of `tokens` tokens in steps of the engine's batch_rows, and its first token, greedily. */
int bench_prefill(struct engine *engine, uint32_t tokens, double *seconds, struct error *error);

/* Decode: `batch` sequences of `depth` cached tokens each, in pages of their own (no prefix is shared between them, so
 * that attention reads what `batch` different requests would make it read). They are filled once; every run forks
 * them, decodes `steps` tokens in each, and drops the forks. What cannot fit is refused before anything is computed:
 * ERROR_CONTEXT, ERROR_PAGES. */
struct bench_decode {
    struct engine *engine;
    uint32_t batch;
    uint32_t depth;
    uint32_t steps;           /* of a run */
    struct sequence **filled; /* [batch] */
};
int bench_decode_prepare(struct bench_decode *work, struct engine *engine, uint32_t batch, uint32_t depth,
    uint32_t steps, struct error *error);
int bench_decode_run(struct bench_decode *work, double *seconds, struct error *error);
void bench_decode_free(struct bench_decode *work); /* also after a failed prepare */

/* One request through the scheduler, in seconds. */
struct bench_request_times {
    double total;   /* scheduler_submit to the delivery of the last output; first_token: of the first token */
    double queued;  /* the scheduler's own account: submit to first scheduled */
    double prefill; /* first scheduled to first token */
    double cancel;  /* of a decoding request: scheduler_cancel to the delivery of its last output; else 0 */
};

struct bench_server; /* a scheduler and the thread that waits for its outputs; opaque */
/* engine must be used by nobody else until bench_server_stop. */
struct bench_server *bench_server_start(struct engine *engine, struct error *error);
void bench_server_stop(struct bench_server *server); /* NULL allowed */

/* A prompt of `tokens` tokens that shares no prefix with an earlier one; one token is generated. */
int bench_first_token(
    struct bench_server *server, uint32_t tokens, struct bench_request_times *times, struct error *error);
/* A prompt of one token: one token is generated; then the same again without a limit, cancelled at its first token. */
int bench_request(struct bench_server *server, struct bench_request_times *times, struct error *error);

#endif
