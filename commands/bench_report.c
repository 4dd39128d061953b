/* SPDX-License-Identifier: Apache-2.0 */
#include "commands/bench_report.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_median(double *values, size_t count) {
    qsort(values, count, sizeof *values, compare_doubles);
    return count % 2 == 1 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

double bench_pair_ratio(const double *own, const double *peer, size_t count) {
    double *ratios = malloc(count * sizeof *ratios);
    if (ratios == NULL)
        return 0;
    for (size_t i = 0; i < count; i++)
        ratios[i] = peer[i] / own[i];
    double median = bench_median(ratios, count);
    free(ratios);
    return median;
}

/* The json_object_set_new calls below take NULL (a failed allocation, or text that is not UTF-8) and answer -1; the
 * answers are summed up, so that one check at the end covers all. */
static json_t *phases_json(const struct bench_run *run) {
    int failed = 0;
    json_t *phases = json_object();
    for (uint32_t i = 0; i < run->phases_count; i++) {
        const struct bench_phase *phase = &run->phases[i];
        json_t *entry = json_object();
        failed |= json_object_set_new(entry, "seconds", json_real(phase->seconds));
        if (phase->bytes >= 0)
            failed |= json_object_set_new(entry, "bytes", json_integer((json_int_t)(phase->bytes + 0.5)));
        failed |= json_object_set_new(phases, phase->name, entry);
    }
    if (failed != 0) {
        json_decref(phases);
        return NULL;
    }
    return phases;
}

static json_t *measured_json(double value) {
    return value > 0 ? json_real(value) : json_null();
}

static int set_policy(json_t *object, const struct bench_run *run) {
    bool bounded = run->ratio_full_allowed > 0;
    int failed = json_object_set_new(object, "ratio_full", measured_json(run->ratio_full));
    failed |= json_object_set_new(object, "ratio_full_allowed", measured_json(run->ratio_full_allowed));
    failed |= json_object_set_new(
        object, "ratio_full_reached", measured_json(bounded ? run->ratio_full / run->ratio_full_allowed : 0));
    failed |= json_object_set_new(object, "kv_tokens_kept", measured_json(run->kv_tokens_kept));
    failed |= json_object_set_new(object, "statistics_bytes",
        run->kv_tokens_kept > 0 ? json_integer((json_int_t)run->statistics_bytes) : json_null());
    failed |= json_object_set_new(
        object, "policy_percent", run->has_policy_percent ? json_real(run->policy_percent) : json_null());
    return failed;
}

static json_t *beside_json(const struct bench_run *run) {
    const struct bench_beside *b = &run->beside;
    if (!run->has_beside)
        return json_null();
    return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:o, s:f, s:f, s:f, s:f}", "share", b->share,
        "share_used", b->share_used, "inter_token_ms", b->inter_token_ms, "inter_token_ms_alone",
        b->inter_token_ms_alone, "inter_token_p99_ms", b->inter_token_p99_ms, "inter_token_p99_ms_alone",
        b->inter_token_p99_ms_alone, "growth", b->growth, "growth_allowed", b->growth_allowed,
        "tokens_per_second_alone", b->tokens_per_second_alone, "training_tokens_per_second",
        measured_json(b->training_tokens_per_second), "first_token_ms", b->first_token_ms, "first_token_ms_most",
        b->first_token_ms_most, "first_token_ms_alone", b->first_token_ms_alone, "yield_ms_most", b->yield_ms_most);
}

static json_t *run_json(const struct bench_run *run) {
    json_t *object = json_object();
    int failed = json_object_set_new(object, "work", json_string(run->work));
    failed |= json_object_set_new(object, "batch", json_integer(run->batch));
    failed |= json_object_set_new(object, "depth", json_integer(run->depth));
    failed |= json_object_set_new(object, "kv_policy", json_string(run->kv_policy));
    failed |= json_object_set_new(object, "kv_ratio", measured_json(run->kv_ratio));
    failed |= json_object_set_new(object, "kv_tokens", run->kv_tokens > 0 ? json_integer(run->kv_tokens) : json_null());
    failed |= json_object_set_new(
        object, "kv_settings", run->kv_settings[0] != '\0' ? json_string(run->kv_settings) : json_null());
    failed |= json_object_set_new(object, "tokens_per_second", json_real(run->tokens_per_second));
    failed |= json_object_set_new(object, "step_ms", json_real(run->step_ms));
    failed |= json_object_set_new(object, "phases", phases_json(run));
    failed |= json_object_set_new(object, "bytes_per_step",
        run->bytes_per_step > 0 ? json_integer((json_int_t)(run->bytes_per_step + 0.5)) : json_null());
    failed |= json_object_set_new(object, "read_bandwidth_fraction", measured_json(run->read_bandwidth_fraction));
    failed |= json_object_set_new(object, "peer_tokens_per_second", measured_json(run->peer_tokens_per_second));
    failed |= json_object_set_new(object, "ratio", measured_json(run->ratio));
    failed |= set_policy(object, run);
    failed |= json_object_set_new(object, "training", beside_json(run));
    if (failed != 0) {
        json_decref(object);
        return NULL;
    }
    return object;
}

/* Text from the system and from the peer need not be UTF-8. */
static json_t *text_json(const char *text) {
    json_t *value = json_string(text);
    return value != NULL ? value : json_string("(not UTF-8)");
}

static json_t *machine_json(const struct bench_machine *machine) {
    json_t *object = json_object();
    int failed = json_object_set_new(object, "cpu", text_json(machine->cpu));
    failed |= json_object_set_new(object, "cores", json_integer(machine->cores));
    failed |= json_object_set_new(object, "features", text_json(machine->features));
    failed |= json_object_set_new(object, "memory_bytes", json_integer((json_int_t)machine->memory_bytes));
    failed |= json_object_set_new(object, "core_to_core_ns", measured_json(machine->core_to_core_ns));
    if (machine->load_average >= 0)
        failed |= json_object_set_new(object, "load_average", json_real(machine->load_average));
    failed |= json_object_set_new(object, "os", text_json(machine->os));
    failed |= json_object_set_new(object, "compiler", text_json(machine->compiler));
    failed |= json_object_set_new(object, "backend", text_json(machine->backend));
    failed |= json_object_set_new(object, "threads", json_integer(machine->threads));
    if (machine->peer[0] != '\0')
        failed |= json_object_set_new(object, "peer", text_json(machine->peer));
    if (failed != 0) {
        json_decref(object);
        return NULL;
    }
    return object;
}

char *bench_report_json(const struct bench_report *report) {
    char *text = NULL;
    json_t *document = json_object();
    json_t *runs = json_array();
    int failed = json_object_set(document, "runs", runs);
    for (size_t i = 0; i < report->runs_count; i++)
        failed |= json_array_append_new(runs, run_json(&report->runs[i]));
    failed |= json_object_set_new(document, "machine", machine_json(&report->machine));
    failed |= json_object_set_new(document, "resident_bytes", json_integer((json_int_t)report->resident_bytes));
    if (failed == 0)
        text = json_dumps(document, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    json_decref(runs);
    json_decref(document);
    return text;
}

static void print_phases(const struct bench_run *run, FILE *out) {
    for (uint32_t i = 0; i < run->phases_count; i++) {
        const struct bench_phase *phase = &run->phases[i];
        fprintf(out, "    %-14s %9.3f ms", phase->name, phase->seconds * 1e3);
        if (run->step_ms > 0)
            fprintf(out, " %5.1f %%", phase->seconds * 1e5 / run->step_ms);
        if (phase->bytes > 0)
            fprintf(out, " %9.2f MB", phase->bytes / 1e6);
        fputc('\n', out);
    }
}

static void print_number(FILE *out, int width, int digits, double value) {
    if (value > 0)
        fprintf(out, " %*.*f", width, digits, value);
    else
        fprintf(out, " %*s", width, "-");
}

/* "h2o 0.25", "snapkv 512", "full". */
static void print_cache(const struct bench_run *run, FILE *out) {
    char text[64];
    if (run->kv_settings[0] == '\0')
        snprintf(text, sizeof text, "%s", run->kv_policy);
    else if (run->kv_tokens > 0)
        snprintf(text, sizeof text, "%s %u", run->kv_policy, run->kv_tokens);
    else
        snprintf(text, sizeof text, "%s %g", run->kv_policy, run->kv_ratio);
    fprintf(out, " %-18s", text);
}

static void print_beside(const struct bench_run *run, FILE *out) {
    const struct bench_beside *b = &run->beside;
    fprintf(out,
        "    token to token %.3f ms, alone %.3f ms: times %.3f, allowed %.3f; 99 %% within %.3f ms, alone %.3f ms\n",
        b->inter_token_ms, b->inter_token_ms_alone, b->growth, b->growth_allowed, b->inter_token_p99_ms,
        b->inter_token_p99_ms_alone);
    fprintf(out, "    alone %.1f tokens/s; training had %.3f of the time (%g allowed), %.1f tokens/s in its turns\n",
        b->tokens_per_second_alone, b->share_used, b->share, b->training_tokens_per_second);
    fprintf(out, "    first token %.3f ms, at most %.3f ms, alone %.3f ms; training yields within %.3f ms\n",
        b->first_token_ms, b->first_token_ms_most, b->first_token_ms_alone, b->yield_ms_most);
}

static void print_run(const struct bench_run *run, FILE *out) {
    fprintf(out, "%-12s", run->work);
    print_cache(run, out);
    fprintf(out, " %5u %6u", run->batch, run->depth);
    print_number(out, 10, 1, run->tokens_per_second);
    print_number(out, 9, 3, run->step_ms);
    print_number(out, 9, 2, run->bytes_per_step / 1e6);
    print_number(out, 7, 3, run->read_bandwidth_fraction);
    print_number(out, 10, 1, run->peer_tokens_per_second);
    print_number(out, 6, 3, run->ratio);
    print_number(out, 7, 3, run->ratio_full);
    print_number(out, 7, 3, run->ratio_full_allowed);
    print_number(out, 7, 3, run->ratio_full_allowed > 0 ? run->ratio_full / run->ratio_full_allowed : 0);
    if (run->has_policy_percent)
        fprintf(out, " %8.1f", run->policy_percent);
    fputc('\n', out);
    print_phases(run, out);
    if (run->has_beside)
        print_beside(run, out);
}

void bench_report_table(const struct bench_report *report, FILE *out) {
    const struct bench_machine *machine = &report->machine;
    fprintf(out, "%s, %u cores, %.1f GB memory; %s\n%s; %s\nresident %.1f MB, load before %.2f\n", machine->cpu,
        machine->cores, (double)machine->memory_bytes / 1e9, machine->features, machine->os, machine->backend,
        (double)report->resident_bytes / 1e6, machine->load_average);
    if (machine->core_to_core_ns > 0)
        fprintf(out, "from core to core %.0f ns\n", machine->core_to_core_ns);
    if (machine->peer[0] != '\0')
        fprintf(out, "peer: %s\n", machine->peer);
    fprintf(out, "%-12s %-18s %5s %6s %10s %9s %9s %7s %10s %6s %7s %7s %7s %8s\n", "work", "cache", "batch", "depth",
        "tokens/s", "step ms", "MB/step", "of read", "peer tok/s", "ratio", "of full", "allowed", "reached",
        "policy %");
    for (size_t i = 0; i < report->runs_count; i++)
        print_run(&report->runs[i], out);
}
