/* SPDX-License-Identifier: Apache-2.0 */
#include "commands/bench_case.h"

#include "commands/bench_machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint32_t bench_list_number(const struct string_list *list, size_t i) {
    return (uint32_t)strtoul(list->items[i], NULL, 10);
}

uint32_t bench_prefill_steps(const struct bench *bench) {
    uint32_t rows = engine_batch_rows(bench->engine);
    return (bench->config->prefill + rows - 1) / rows;
}

struct bench_run *bench_add_run(struct bench *bench, const struct bench_case *work, struct error *error) {
    if (bench->runs_count == bench->runs_capacity) {
        error_set(error, ERROR_MEMORY, "no memory for run %zu", bench->runs_count + 1);
        return NULL;
    }
    struct bench_run *run = &bench->runs[bench->runs_count++];
    *run = (struct bench_run){
        .work = work->work, .batch = work->batch, .depth = work->depth, .kv_policy = "full", .kv_ratio = 1};
    if (work->policy != NULL) {
        run->kv_policy = work->policy->policy->name;
        run->kv_ratio = work->policy->tokens > 0 ? 0 : work->policy->ratio;
        run->kv_tokens = work->policy->tokens;
        policy_settings_describe(work->policy, run->kv_settings, sizeof run->kv_settings);
    }
    return run;
}

int bench_name_case(const struct bench_case *work, int code, struct error *error) {
    struct error cause = *error;
    char policy[256] = "", size[48];
    if (code == 0)
        return 0;
    if (work->policy != NULL)
        policy_settings_describe(work->policy, policy, sizeof policy);
    if (strcmp(work->work, "prefill") == 0)
        snprintf(size, sizeof size, "of %u tokens", work->depth);
    else
        snprintf(size, sizeof size, "batch %u depth %u", work->batch, work->depth);
    return error_set(error, code, "%s %s%s%s: %.400s%s", work->work, size, policy[0] != '\0' ? " " : "", policy,
        cause.message,
        code == ERROR_PAGES || code == ERROR_CONTEXT ? " (--kv-memory sets the pages, --context the limit)" : "");
}

int bench_run_decode(struct bench *bench, struct bench_case *work, double *seconds, struct error *error) {
    (void)bench;
    return bench_decode_run(&work->decode, seconds, error);
}

/* Bytes and phases of a step, from a run of its own: the profile's clock calls cost time. */
static int profile_run(struct bench *bench, struct bench_case *work, struct bench_run *run, struct error *error) {
    double seconds;
    engine_profile_enable(bench->engine, true);
    int code = work->run_own(bench, work, &seconds, error);
    struct engine_profile profile = *engine_profile_get(bench->engine);
    engine_profile_enable(bench->engine, false);
    if (code != 0)
        return code;
    double steps = profile.steps > 0 ? (double)profile.steps : 1;
    for (int i = 0; i < PHASE_COUNT; i++)
        run->bytes_per_step += profile.bytes[i] / steps;
    for (int i = 0; bench->config->profile && i < PHASE_COUNT; i++)
        run->phases[run->phases_count++] = (struct bench_phase){.name = engine_phase_name((enum engine_phase)i),
            .seconds = profile.seconds[i] / steps,
            .bytes = profile.bytes[i] / steps};
    return 0;
}

/* One run of each side; the order alternates, so that a drift of the machine meets both. */
static int run_pair(struct bench *bench, struct bench_case *work, uint32_t pair, struct error *error) {
    int code = 0;
    if (work->run_other != NULL && pair % 2 == 1)
        code = work->run_other(bench, work, &bench->other_seconds[pair], error);
    if (code == 0)
        code = work->run_own(bench, work, &bench->own_seconds[pair], error);
    if (code == 0 && work->run_other != NULL && pair % 2 == 0)
        code = work->run_other(bench, work, &bench->other_seconds[pair], error);
    return code;
}

uint32_t bench_case_runs(const struct bench *bench) {
    return bench->config->pairs + 2;
}

int bench_case_measure(struct bench *bench, struct bench_case *work, struct bench_run *run, struct error *error) {
    uint32_t pairs = bench->config->pairs;
    int code = run_pair(bench, work, 0, error); /* warms both up */
    if (code == 0)
        code = profile_run(bench, work, run, error);
    for (uint32_t pair = 0; pair < pairs && code == 0; pair++)
        code = run_pair(bench, work, pair, error);
    if (code != 0)
        return code;
    if (work->run_other != NULL)
        work->ratio = bench_pair_ratio(bench->own_seconds, bench->other_seconds, pairs);
    double seconds = bench_median(bench->own_seconds, pairs);
    run->tokens_per_second = (double)work->tokens / seconds;
    run->step_ms = seconds * 1e3 / work->steps;
    return 0;
}
