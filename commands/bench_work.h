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

/* Prefill of one prompt of `tokens` tokens in steps of the engine's batch_rows, and its first token, greedily. With a
 * policy (NULL: none) statistics and the prune after the prompt are part of it. */
int bench_prefill(
    struct engine *engine, const struct policy_settings *policy, uint32_t tokens, double *seconds, struct error *error);

/* Decode: `batch` sequences of `depth` cached tokens each, in pages of their own (no prefix is shared between them, so
 * that attention reads what `batch` different requests would make it read). They are filled once, one after another.
 * Without a policy every run forks them, decodes `steps` tokens in each, and drops the forks.
 * With one each sequence is pruned before the next is filled, so that the fill needs the pages of one whole prompt
 * beside what the others kept. Where an earlier sequence of the same tokens is still cached, as that of a case without
 * a policy is, its keys and values are copied as far as the policy's statistics allow (sequence_reuse_prefix), so that
 * a fill may take no time. Runs prune after every step, and go on where the last run ended, at most `runs` times: a
 * fork would have to copy each page in which a slot is reused, within the time that is measured.
 * What cannot fit is refused before anything is computed: ERROR_CONTEXT, ERROR_PAGES. */
struct bench_decode {
    struct engine *engine;
    const struct policy_settings *policy; /* NULL: none */
    uint32_t batch;
    uint32_t depth;
    uint32_t steps;           /* of a run */
    uint32_t runs;            /* with a policy */
    struct sequence **filled; /* [batch] */
};
/* The caller sets all but filled. */
int bench_decode_prepare(struct bench_decode *work, struct error *error);
int bench_decode_run(struct bench_decode *work, double *seconds, struct error *error);
void bench_decode_free(struct bench_decode *work);         /* also after a failed prepare */
double bench_decode_kept(const struct bench_decode *work); /* tokens of a sequence, mean over sequences and heads */
size_t bench_decode_statistics(const struct bench_decode *work); /* bytes of all sequences */

/* One request through the scheduler, in seconds. */
struct bench_request_times {
    double total;   /* scheduler_submit to the delivery of the last output; first_token: of the first token */
    double queued;  /* the scheduler's own account: submit to first scheduled */
    double prefill; /* first scheduled to first token */
    double cancel;  /* of a decoding request: scheduler_cancel to the delivery of its last output; else 0 */
};

struct bench_server; /* a scheduler and the thread that waits for its outputs; opaque */
/* engine must be used by nobody else until bench_server_stop. max_sequences: running at once; 0: the default. */
struct bench_server *bench_server_start(struct engine *engine, uint32_t max_sequences, struct error *error);
void bench_server_stop(struct bench_server *server); /* NULL allowed */

/* A prompt of `tokens` tokens that shares no prefix with an earlier one; one token is generated. */
int bench_first_token(
    struct bench_server *server, uint32_t tokens, struct bench_request_times *times, struct error *error);
/* A prompt of one token: one token is generated; then the same again without a limit, cancelled at its first token. */
int bench_request(struct bench_server *server, struct bench_request_times *times, struct error *error);

/* Requests that were submitted together, and came to their end. */
struct bench_admitted {
    uint32_t sequences;   /* most that ran at one time */
    uint64_t preemptions; /* of one of them */
    uint64_t generated;   /* tokens, of all */
    double seconds;       /* until all were done */
};
/* `requests` requests (at least 1) of prompt_tokens tokens that share no prefix, each with max_tokens tokens of output.
 * policy NULL: full. */
int bench_admit(struct bench_server *server, const struct policy_settings *policy, uint32_t requests,
    uint32_t prompt_tokens, uint32_t max_tokens, struct bench_admitted *admitted, struct error *error);

#endif
