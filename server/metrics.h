/* SPDX-License-Identifier: Apache-2.0
 *
 * What /metrics shows, in Prometheus' text format (version 0.0.4): vLLM's names behind the prefix `distillcache:`, so
 * that a dashboard made for vLLM needs only the prefix changed; label model_name.
 *
 * Gauges and token counters are read from the scheduler when asked for; histograms are kept here. For the loop's
 * thread.
 */
#ifndef SERVER_METRICS_H
#define SERVER_METRICS_H

#include "engine/scheduler.h"
#include "server/buffer.h"

struct metrics; /* opaque */

struct metrics *metrics_create(void); /* NULL on failed allocation */
void metrics_free(struct metrics *metrics);

enum metrics_histogram {
    METRIC_FIRST_TOKEN,   /* seconds from submit to the first token of a request */
    METRIC_INTER_TOKEN,   /* seconds between tokens of one choice */
    METRIC_END_TO_END,    /* seconds from submit to the last output of a request */
    METRIC_QUEUE,         /* seconds from submit to scheduled */
    METRIC_PREFILL,       /* seconds from scheduled to the first token */
    METRIC_DECODE,        /* seconds from the first token to the end */
    METRIC_PROMPT_TOKENS, /* of a request */
    METRIC_GENERATION_TOKENS,
    METRIC_HISTOGRAMS,
};
void metrics_observe(struct metrics *metrics, enum metrics_histogram which, double value, uint64_t count);

/* One choice ended. */
void metrics_count_finish(struct metrics *metrics, enum finish_reason reason);
void metrics_count_response(struct metrics *metrics, unsigned status);

/* Of the training job at work, or the last one. */
struct training_stats {
    bool known;
    uint64_t step, steps; /* done, of all; steps 0: not known yet */
    double reward;        /* NaN: none yet */
    double kl_valid;      /* on held-out prompts; NaN: none yet */
};

/* stats: NULL while there is no scheduler; training: NULL where there is none. */
void metrics_write(const struct metrics *metrics, const char *model, const struct scheduler_stats *stats,
    const struct training_stats *training, struct buffer *out);

#endif
