/* SPDX-License-Identifier: Apache-2.0
 *
 * What the parts of `bench` share: its state, and how a case is measured in pairs with something else.
 */
#ifndef COMMANDS_BENCH_CASE_H
#define COMMANDS_BENCH_CASE_H

#include "commands/bench_peer.h"
#include "commands/bench_report.h"
#include "commands/bench_work.h"
#include "config/config.h"
#include "policy/policy.h"

struct bench {
    const struct config *config;
    struct model *model;
    struct engine *engine;
    struct bench_peer *peer; /* NULL: none */
    uint32_t threads;
    struct policy_settings *policies; /* of the configuration, those that keep everything included */
    size_t policies_count;
    double *own_seconds;   /* [pairs] */
    double *other_seconds; /* [pairs] */
    struct bench_run *runs;
    size_t runs_count, runs_capacity;
    struct bench_report report;
};

/* A piece of work that the engine and another side can both do. */
struct bench_case {
    const char *work;
    const struct policy_settings *policy; /* NULL: full */
    uint32_t batch;
    uint32_t depth;
    uint32_t steps;  /* calls of engine_forward in a run */
    uint64_t tokens; /* computed in a run */
    struct bench_decode decode;
    struct bench_decode *full; /* the full cache's side of a policy's case */
    int (*run_own)(struct bench *bench, struct bench_case *work, double *seconds, struct error *error);
    /* The peer, or the full cache; NULL: none. */
    int (*run_other)(struct bench *bench, struct bench_case *work, double *seconds, struct error *error);
    double ratio; /* out: median over the pairs of the other's seconds / own seconds; 0: no other */
};

/* A new run of the report, of the case's work, batch, depth and policy. NULL on failed allocation. */
struct bench_run *bench_add_run(struct bench *bench, const struct bench_case *work, struct error *error);

/* Runs the case once to warm up, once for its bytes and phases, then --pairs times beside the other. Fills run. */
int bench_case_measure(struct bench *bench, struct bench_case *work, struct bench_run *run, struct error *error);
/* Runs in which bench_case_measure uses a case. */
uint32_t bench_case_runs(const struct bench *bench);

/* Says in error which case it was that failed. Returns code. */
int bench_name_case(const struct bench_case *work, int code, struct error *error);

int bench_run_decode(struct bench *bench, struct bench_case *work, double *seconds, struct error *error);
uint32_t bench_prefill_steps(const struct bench *bench);

/* Items of the lists of numbers, which the configuration checked. */
uint32_t bench_list_number(const struct string_list *list, size_t i);

/* bench_policy.c: prefill with each policy beside full; decode with each policy beside `full`, which is prepared. */
int bench_policy_prefill(struct bench *bench, struct error *error);
int bench_policy_decode(
    struct bench *bench, struct bench_decode *full, const struct bench_run *full_run, struct error *error);

/* bench_admission.c: sequences that fit, with the full cache and with each policy, for each --depth. */
int bench_admission(struct bench *bench, struct error *error);

/* bench_training.c: live streams beside a training job, for each --batch and --depth. */
int bench_training(struct bench *bench, struct error *error);

#endif
