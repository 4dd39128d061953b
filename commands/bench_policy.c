/* SPDX-License-Identifier: Apache-2.0
 *
 * The part of `bench` about eviction policies. Each policy runs in pairs with the full cache: ratio_full is the median
 * of the full cache's seconds / the policy's.
 *
 * Decode: a step reads weights, what is cached, and the policy's statistics; ratio_full_allowed is what the full
 * cache's bytes over the policy's would give, ratio_full_reached the part of it that was reached. The full cache's
 * sequences are the same at each run; those of a policy go on from run to run, up to (pairs + 2) x --decode tokens
 * deeper at last, which does not flatter them. With --profile statistics are timed too: attention keeps them, and most
 * policies' scores of a decode step are computed there as well. The policy's sequences therefore take turns with as
 * many of a full cache that hold as many tokens, in 7 pairs of profiled runs; the median difference of their attend
 * phases is the phase `statistics`, which is part of `attend`. policy_percent is the share that statistics, score,
 * select and compact have of a step. Prefill: policy_percent is the time that statistics and the prune after the prompt
 * add to that of the full cache.
 */
#include "commands/bench_case.h"

#include "commands/bench_machine.h"

#include <string.h>

enum { STATISTICS_PAIRS = 7 };

static int prefill_policy(struct bench *bench, struct bench_case *work, double *seconds, struct error *error) {
    return bench_prefill(bench->engine, work->policy, work->depth, seconds, error);
}

static int prefill_full(struct bench *bench, struct bench_case *work, double *seconds, struct error *error) {
    return bench_prefill(bench->engine, NULL, work->depth, seconds, error);
}

static int decode_full(struct bench *bench, struct bench_case *work, double *seconds, struct error *error) {
    (void)bench;
    return bench_decode_run(work->full, seconds, error);
}

static int measure_prefill(struct bench *bench, struct bench_case *work, struct error *error) {
    struct bench_run *run = bench_add_run(bench, work, error);
    int code = run == NULL ? ERROR_MEMORY : bench_case_measure(bench, work, run, error);
    if (code != 0)
        return code;
    run->ratio_full = work->ratio;
    run->has_policy_percent = true;
    run->policy_percent = 100 * (1 / work->ratio - 1);
    run->read_bandwidth_fraction =
        bench_read_seconds((uint64_t)run->bytes_per_step, bench->threads) * 1e3 / run->step_ms;
    return 0;
}

int bench_policy_prefill(struct bench *bench, struct error *error) {
    int code = 0;
    for (size_t i = 0; i < bench->policies_count && code == 0; i++) {
        if (policy_settings_keep_all(&bench->policies[i]))
            continue;
        struct bench_case work = {.work = "prefill",
            .policy = &bench->policies[i],
            .batch = 1,
            .depth = bench->config->prefill,
            .steps = bench_prefill_steps(bench),
            .tokens = bench->config->prefill,
            .run_own = prefill_policy,
            .run_other = prefill_full};
        code = bench_name_case(&work, measure_prefill(bench, &work, error), error);
    }
    return code;
}

/* Seconds of a step in the attend phase. */
static int attend_seconds(struct bench *bench, struct bench_case *work, double *seconds, struct error *error) {
    struct engine_profile profile;
    int code = bench_case_profile(bench, work, &profile, error);
    if (code == 0)
        *seconds = profile.seconds[PHASE_ATTEND] / (double)profile.steps;
    return code;
}

static int time_statistics(
    struct bench *bench, struct bench_case *work, struct bench_case *plain, double *seconds, struct error *error) {
    double with, without, differences[STATISTICS_PAIRS];
    int code = attend_seconds(bench, plain, &without, error); /* warms up */
    for (int pair = 0; pair < STATISTICS_PAIRS && code == 0; pair++) {
        code = attend_seconds(bench, pair % 2 == 0 ? work : plain, pair % 2 == 0 ? &with : &without, error);
        if (code == 0)
            code = attend_seconds(bench, pair % 2 == 0 ? plain : work, pair % 2 == 0 ? &without : &with, error);
        differences[pair] = with - without;
    }
    *seconds = code == 0 ? bench_median(differences, STATISTICS_PAIRS) : 0;
    return code;
}

/* Adds the phase of statistics, and says what part of a step the policy takes. */
static int measure_statistics(
    struct bench *bench, struct bench_case *work, struct bench_run *run, struct error *error) {
    struct bench_case plain = *work;
    double statistics = 0;
    plain.policy = plain.decode.policy = NULL;
    plain.depth = plain.decode.depth = (uint32_t)run->kv_tokens_kept;
    plain.decode.runs = STATISTICS_PAIRS + 1;
    int code = bench_decode_prepare(&plain.decode, error);
    if (code == 0)
        code = time_statistics(bench, work, &plain, &statistics, error);
    bench_decode_free(&plain.decode);
    code = bench_name_case(&plain, code, error);
    /* Less than nothing is the noise of the clock. */
    statistics = statistics > 0 ? statistics : 0;
    run->phases[run->phases_count++] = (struct bench_phase){"statistics", statistics, (double)run->statistics_bytes};
    double policy = statistics;
    for (uint32_t i = 0; i < run->phases_count; i++)
        for (int phase = PHASE_SCORE; phase <= PHASE_COMPACT; phase++)
            if (strcmp(run->phases[i].name, engine_phase_name((enum engine_phase)phase)) == 0)
                policy += run->phases[i].seconds;
    run->has_policy_percent = true;
    run->policy_percent = policy * 1e5 / run->step_ms;
    return code;
}

static int measure_decode(
    struct bench *bench, struct bench_case *work, const struct bench_run *full_run, struct error *error) {
    struct bench_run *run = bench_add_run(bench, work, error);
    int code = run == NULL ? ERROR_MEMORY : bench_case_measure(bench, work, run, error);
    if (code != 0)
        return code;
    run->statistics_bytes = bench_decode_statistics(&work->decode);
    run->bytes_per_step += (double)run->statistics_bytes;
    run->kv_tokens_kept = bench_decode_kept(&work->decode);
    run->ratio_full = work->ratio;
    run->ratio_full_allowed = full_run->bytes_per_step / run->bytes_per_step;
    run->read_bandwidth_fraction =
        bench_read_seconds((uint64_t)run->bytes_per_step, bench->threads) * 1e3 / run->step_ms;
    return bench->config->profile ? measure_statistics(bench, work, run, error) : 0;
}

int bench_policy_decode(
    struct bench *bench, struct bench_decode *full, const struct bench_run *full_run, struct error *error) {
    int code = 0;
    for (size_t i = 0; i < bench->policies_count && code == 0; i++) {
        if (policy_settings_keep_all(&bench->policies[i]))
            continue;
        struct bench_case work = {.work = "decode",
            .policy = &bench->policies[i],
            .batch = full->batch,
            .depth = full->depth,
            .steps = full->steps,
            .tokens = (uint64_t)full->steps * full->batch,
            .decode = *full,
            .full = full,
            .run_own = bench_run_decode,
            .run_other = decode_full};
        work.decode.policy = &bench->policies[i];
        work.decode.runs = bench_case_runs(bench) + (bench->config->profile ? STATISTICS_PAIRS : 0);
        code = bench_decode_prepare(&work.decode, error);
        if (code == 0)
            code = measure_decode(bench, &work, full_run, error);
        bench_decode_free(&work.decode);
        code = bench_name_case(&work, code, error);
    }
    return code;
}
