/* SPDX-License-Identifier: Apache-2.0 */
#include "server/metrics.h"

#include <math.h>
#include <stdlib.h>

enum { BUCKETS_MAX = 24, STATUS_CLASSES = 6 };

static const char PREFIX[] = "distillcache:";

struct histogram_kind {
    const char *name;
    const char *help;
    double bounds[BUCKETS_MAX]; /* ascending; a 0 ends it */
};

/* Bounds as vLLM's, with finer ones below for small models. */
#define SECONDS_LONG                                                                                                   \
    { 0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0 }
#define TOKENS                                                                                                         \
    { 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000 }

static const struct histogram_kind kinds[METRIC_HISTOGRAMS] = {
    [METRIC_FIRST_TOKEN] = {"time_to_first_token_seconds", "Seconds from submit to the first token",
        {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0}},
    [METRIC_INTER_TOKEN] = {"inter_token_latency_seconds", "Seconds between tokens of one choice",
        {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0}},
    [METRIC_END_TO_END] = {"e2e_request_latency_seconds", "Seconds from submit to the end of a request", SECONDS_LONG},
    [METRIC_QUEUE] = {"request_queue_time_seconds", "Seconds a request waited in the queue", SECONDS_LONG},
    [METRIC_PREFILL] = {"request_prefill_time_seconds", "Seconds from scheduled to the first token", SECONDS_LONG},
    [METRIC_DECODE] = {"request_decode_time_seconds", "Seconds from the first token to the end", SECONDS_LONG},
    [METRIC_PROMPT_TOKENS] = {"request_prompt_tokens", "Prompt tokens of a request", TOKENS},
    [METRIC_GENERATION_TOKENS] = {"request_generation_tokens", "Tokens generated for a request", TOKENS},
};

struct histogram {
    uint64_t counts[BUCKETS_MAX + 1]; /* not cumulative; the last is above all bounds */
    double sum;
};

struct metrics {
    struct histogram histograms[METRIC_HISTOGRAMS];
    uint64_t finished[FINISH_ERROR + 1];
    uint64_t responses[STATUS_CLASSES]; /* by status / 100; 0: none was sent */
};

struct metrics *metrics_create(void) {
    return calloc(1, sizeof(struct metrics));
}

void metrics_free(struct metrics *metrics) {
    free(metrics);
}

void metrics_observe(struct metrics *metrics, enum metrics_histogram which, double value, uint64_t count) {
    const double *bounds = kinds[which].bounds;
    struct histogram *histogram = &metrics->histograms[which];
    if (!isfinite(value) || value < 0.0)
        value = 0.0;
    size_t i = 0;
    while (i < BUCKETS_MAX && bounds[i] != 0.0 && value > bounds[i])
        i++;
    if (i < BUCKETS_MAX && bounds[i] == 0.0)
        i = BUCKETS_MAX;
    histogram->counts[i] += count;
    histogram->sum += value * (double)count;
}

void metrics_count_finish(struct metrics *metrics, enum finish_reason reason) {
    metrics->finished[reason]++;
}

void metrics_count_response(struct metrics *metrics, unsigned status) {
    metrics->responses[status / 100 < STATUS_CLASSES ? status / 100 : 0]++;
}

static void metrics_head(struct buffer *out, const char *name, const char *type, const char *help) {
    buffer_format(out, "# HELP %s%s %s\n# TYPE %s%s %s\n", PREFIX, name, help, PREFIX, name, type);
}

static void metrics_value(
    struct buffer *out, const char *name, const char *type, const char *help, const char *label, double value) {
    metrics_head(out, name, type, help);
    buffer_format(out, "%s%s{%s} %.17g\n", PREFIX, name, label, value);
}

static void metrics_write_histogram(
    const struct histogram *histogram, const struct histogram_kind *kind, const char *label, struct buffer *out) {
    metrics_head(out, kind->name, "histogram", kind->help);
    uint64_t total = 0;
    for (size_t i = 0; i < BUCKETS_MAX && kind->bounds[i] != 0.0; i++) {
        total += histogram->counts[i];
        buffer_format(out, "%s%s_bucket{%s,le=\"%g\"} %llu\n", PREFIX, kind->name, label, kind->bounds[i],
            (unsigned long long)total);
    }
    total += histogram->counts[BUCKETS_MAX];
    buffer_format(out, "%s%s_bucket{%s,le=\"+Inf\"} %llu\n", PREFIX, kind->name, label, (unsigned long long)total);
    buffer_format(out, "%s%s_sum{%s} %.17g\n", PREFIX, kind->name, label, histogram->sum);
    buffer_format(out, "%s%s_count{%s} %llu\n", PREFIX, kind->name, label, (unsigned long long)total);
}

static void metrics_write_stats(const struct scheduler_stats *stats, const char *label, struct buffer *out) {
    double used = stats->pages_total == 0 ? 0.0 : 1.0 - (double)stats->pages_free / stats->pages_total;
    metrics_value(out, "num_requests_running", "gauge", "Sequences that are prefilling or decoding", label,
        stats->requests_running);
    metrics_value(out, "num_requests_waiting", "gauge", "Requests queued or preempted", label, stats->requests_waiting);
    metrics_value(out, "kv_cache_usage_perc", "gauge", "KV pages in use, 1 is all", label, used);
    metrics_value(out, "kv_bytes", "gauge", "KV bytes held by running sequences", label, (double)stats->kv_bytes);
    metrics_value(out, "kv_bytes_full", "gauge", "KV bytes of running sequences if all tokens were kept", label,
        (double)stats->kv_bytes_full);
    metrics_value(out, "kv_tokens_seen", "gauge", "Tokens of running sequences", label, (double)stats->kv_tokens_seen);
    metrics_value(out, "kv_tokens_kept", "gauge",
        "Tokens of running sequences that are cached, mean over layers and heads", label,
        (double)stats->kv_tokens_kept);
    metrics_value(out, "prefix_cache_queries_total", "counter", "Prompt tokens looked up in shared prefixes", label,
        (double)stats->prefix_queries);
    metrics_value(out, "prefix_cache_hits_total", "counter", "Prompt tokens reused from shared prefixes", label,
        (double)stats->prefix_hits);
    metrics_value(out, "prefix_snapshot_bytes", "gauge", "Bytes of policies' statistics kept with shared prefixes",
        label, (double)stats->snapshot_bytes);
    metrics_value(out, "prompt_tokens_total", "counter", "Prompt tokens", label, (double)stats->prompt_tokens);
    metrics_value(
        out, "generation_tokens_total", "counter", "Tokens generated", label, (double)stats->generated_tokens);
    metrics_value(out, "num_preemptions_total", "counter", "Sequences preempted for want of pages", label,
        (double)stats->preemptions);
    metrics_value(
        out, "kv_swaps_total", "counter", "Preempted sequences that went to host memory", label, (double)stats->swaps);
    metrics_value(out, "kv_replays_total", "counter", "Preempted pruned sequences that are computed again", label,
        (double)stats->replays);
    metrics_value(
        out, "kv_swapped_bytes", "gauge", "Bytes of sequences in host memory", label, (double)stats->swapped_bytes);
    metrics_value(out, "kv_pages_freed_by_policy_total", "counter", "KV pages that eviction gave back", label,
        (double)stats->pages_freed_by_policy);
    metrics_value(
        out, "policy_seconds", "counter", "Seconds spent on scoring and evicting", label, stats->policy_seconds);
    metrics_value(out, "steps_total", "counter", "Steps of the engine", label, (double)stats->steps);
}

/* Label values escape backslash, quote and line feed. */
static void metrics_label(const char *model, struct buffer *out) {
    buffer_string(out, "model_name=\"");
    for (; *model != '\0'; model++) {
        if (*model == '\\' || *model == '"')
            buffer_append(out, "\\", 1);
        if (*model == '\n')
            buffer_append(out, "\\n", 2);
        else
            buffer_append(out, model, 1);
    }
    buffer_append(out, "\"", 2); /* with its NUL */
}

static void metrics_write_training(const struct training_stats *training, const char *label, struct buffer *out) {
    if (!training->known)
        return;
    metrics_value(out, "training_step", "gauge", "Steps done of the training job at work, or the last one", label,
        (double)training->step);
    metrics_value(
        out, "training_steps", "gauge", "Steps that it makes in all; 0: not known yet", label, (double)training->steps);
    if (isfinite(training->reward))
        metrics_value(out, "training_reward", "gauge", "Reward of its last step that had one", label, training->reward);
    if (isfinite(training->kl_valid))
        metrics_value(out, "training_kl_valid", "gauge", "KL of the pruned model on held-out prompts, last comparison",
            label, training->kl_valid);
}

void metrics_write(const struct metrics *metrics, const char *model, const struct scheduler_stats *stats,
    const struct training_stats *training, struct buffer *out) {
    static const struct {
        enum finish_reason reason;
        const char *name;
    } reasons[] = {
        {FINISH_STOP, "stop"}, {FINISH_LENGTH, "length"}, {FINISH_CANCELLED, "abort"}, {FINISH_ERROR, "error"}};
    struct buffer label = {0};
    metrics_label(model, &label);
    if (label.failed) {
        out->failed = true;
        goto done;
    }
    if (stats != NULL)
        metrics_write_stats(stats, label.data, out);
    if (training != NULL)
        metrics_write_training(training, label.data, out);
    metrics_head(out, "request_success_total", "counter", "Choices that ended, by reason");
    for (size_t i = 0; i < sizeof reasons / sizeof reasons[0]; i++)
        buffer_format(out, "%srequest_success_total{%s,finished_reason=\"%s\"} %llu\n", PREFIX, label.data,
            reasons[i].name, (unsigned long long)metrics->finished[reasons[i].reason]);
    metrics_head(out, "http_responses_total", "counter", "Responses by class of status; 0xx: the client left before");
    for (unsigned i = 0; i < STATUS_CLASSES; i++)
        buffer_format(out, "%shttp_responses_total{%s,status=\"%uxx\"} %llu\n", PREFIX, label.data, i,
            (unsigned long long)metrics->responses[i]);
    for (size_t i = 0; i < METRIC_HISTOGRAMS; i++)
        metrics_write_histogram(&metrics->histograms[i], &kinds[i], label.data, out);
done:
    buffer_free(&label);
}
