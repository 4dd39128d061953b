/* SPDX-License-Identifier: Apache-2.0
 *
 * What `distillcache bench` found, as JSON and as a table. Pure: no clock, no engine.
 *
 * The JSON (DESIGN, section 10):
 *   {"runs": [{"work", "batch", "depth", "kv_policy", "kv_ratio", "kv_tokens", "kv_settings", "tokens_per_second",
 *              "step_ms", "phases", "bytes_per_step", "read_bandwidth_fraction", "peer_tokens_per_second", "ratio",
 *              "ratio_full", "ratio_full_allowed", "ratio_full_reached", "kv_tokens_kept", "statistics_bytes",
 *              "policy_percent", "training"}],
 *    "machine": {...}, "resident_bytes"}
 * Every run has all keys. What it did not measure is null: bytes and bandwidth of requests through the scheduler, the
 * peer's figures without a peer, everything about a policy without one; phases is empty. A phase is {"seconds", "bytes"
 * where they are counted} of a step. kv_ratio is null where kv_tokens is the budget, and the other way round.
 * training is null but for the work of this name: {"share", "share_used", "inter_token_ms", "inter_token_ms_alone",
 * "inter_token_p99_ms", "inter_token_p99_ms_alone", "growth", "growth_allowed", "tokens_per_second_alone",
 * "training_tokens_per_second", "first_token_ms", "first_token_ms_most", "first_token_ms_alone", "yield_ms_most"}, see
 * struct bench_beside.
 */
#ifndef COMMANDS_BENCH_REPORT_H
#define COMMANDS_BENCH_REPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum { BENCH_PHASES_MAX = 16 };

struct bench_phase {
    const char *name; /* borrowed, lives as long as the report */
    double seconds;   /* a step */
    double bytes;     /* read a step; negative: not known */
};

/* Live streams beside training, and alone in the same run. Of each pair of runs come a median and a 99th percentile of
 * the time from a token to the stream's next one; these are their medians over the pairs. */
struct bench_beside {
    double share;      /* of the time that training may have while there are requests */
    double share_used; /* what it had in the runs beside it */
    double inter_token_ms, inter_token_ms_alone;
    double inter_token_p99_ms, inter_token_p99_ms_alone;
    double growth;                     /* median over the pairs of the medians' ratio */
    double growth_allowed;             /* 1 / (1 - share) and 10 % */
    double tokens_per_second_alone;    /* of all streams together; beside training: that of the run */
    double training_tokens_per_second; /* computed by the job, per second of its turns; 0: none was told of */
    double first_token_ms;             /* of a request of one token that arrives in idle time, which training uses */
    double first_token_ms_most;
    double first_token_ms_alone;
    double yield_ms_most; /* between two yields of the job: what such a request may have to wait */
};

struct bench_run {
    const char *work; /* "admission", "prefill", "decode", "first_token", "request", "training" */
    uint32_t batch;   /* sequences at once: given; admission: found */
    uint32_t depth; /* decode: cached tokens of each sequence before the first step; admission: tokens of each sequence
                       at its end; else tokens of the prompt */
    const char *kv_policy;
    double kv_ratio;          /* 0: the budget is kv_tokens */
    uint32_t kv_tokens;       /* 0: the budget is kv_ratio */
    char kv_settings[256];    /* policy_settings_describe; empty: full */
    double tokens_per_second; /* of all sequences together */
    double step_ms; /* decode and prefill: of one engine_forward with its sampling and pruning; admission: of all;
                       training: inter_token_ms; else of one request */
    struct bench_phase phases[BENCH_PHASES_MAX];
    uint32_t phases_count;
    double bytes_per_step;          /* 0: not measured */
    double read_bandwidth_fraction; /* 0: not measured */
    double peer_tokens_per_second;  /* 0: no peer */
    double ratio;                   /* median over the pairs of peer seconds / own seconds; 0: no peer */
    double ratio_full;              /* the same against the full cache; admission: of the numbers. 0: it is full */
    double ratio_full_allowed;      /* by the bytes of a step; 0: not measured */
    double kv_tokens_kept;          /* of a sequence, mean over heads, after the last run; 0: not measured */
    uint64_t statistics_bytes;      /* of all sequences, part of bytes_per_step */
    bool has_policy_percent;
    double policy_percent; /* decode: of a step, for statistics, score, select, compact; prefill: added by all of it */
    bool has_beside;
    struct bench_beside beside; /* training */
};

struct bench_machine {
    char cpu[128];
    char features[256]; /* instruction sets that matter here, separated by blanks */
    uint32_t cores;     /* that this process may use */
    uint64_t memory_bytes;
    double core_to_core_ns; /* bench_core_to_core_ns; 0: not measured */
    double load_average; /* of the last minute, before the first run: who else used the processors; negative: unknown */
    char os[256];
    char compiler[128];
    char backend[160]; /* engine_describe: backend, tier, threads */
    uint32_t threads;
    char peer[512]; /* what the peer says of itself; empty: no peer */
};

struct bench_report {
    const struct bench_run *runs;
    size_t runs_count;
    struct bench_machine machine;
    uint64_t resident_bytes; /* of the process after the model was loaded */
};

/* Median; sorts values [count] in place; the mean of the middle two for an even count. count >= 1. */
double bench_median(double *values, size_t count);

/* Median of peer[i] / own[i] over the pairs: how many times faster we are. seconds > 0, count >= 1. 0 on failed
 * allocation. */
double bench_pair_ratio(const double *own, const double *peer, size_t count);

/* The document as text, to be freed; NULL on failed allocation. */
char *bench_report_json(const struct bench_report *report);

void bench_report_table(const struct bench_report *report, FILE *out);

#endif
