/* SPDX-License-Identifier: Apache-2.0
 *
 * The part of `bench` about eviction policies. Each policy runs in pairs with the full cache: ratio_full is the median
 * of the full cache's seconds / the policy's.
 *
 * Decode: a step reads weights, what is cached, and the policy's statistics; ratio_full_allowed is what the full
 * cache's bytes over the policy's would give, ratio_full_reached the part of it that was reached. The full cache's
 * sequences are the same at each run; those of a policy go on from run to run, up to (pairs + 2) x --decode tokens
 * deeper at last, which does not flatter them. With --profile the policy's own part of a step is measured: its
 * sequences take turns with as many of a full cache that hold as many tokens, in 48 pairs of runs of 4 steps, so short
 * that what else the machine does meets both; or, where a policy prunes less often, in as many steps of whole
 * intervals, at least 12 pairs. policy_percent is the median over the pairs of what the policy's step takes longer, as
 * a part of it; the phase `statistics`, which is part of `attend`, the median difference of their attend phases:
 * attention keeps statistics, and most policies' scores of a decode step are computed there as well. Prefill:
 * policy_percent is the time that statistics and the prune after the prompt add to that of the full cache.
 */
#include "commands/bench_case.h"

#include "commands/bench_machine.h"

enum { PART_PAIRS = 48, PART_PAIRS_LEAST = 12, PART_STEPS = 4 };

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

/* Each run has to hold as many prunes as the others: a median over runs of which few prune would leave them out. */
static uint32_t part_steps(const struct policy_settings *policy) {
    return (PART_STEPS + policy->interval - 1) / policy->interval * policy->interval;
}

static uint32_t part_pairs(uint32_t steps) {
    uint32_t pairs = PART_PAIRS * PART_STEPS / steps;
    return pairs > PART_PAIRS_LEAST ? pairs : PART_PAIRS_LEAST;
}

/* Seconds of a step, and of its attend phase. */
struct step_seconds {
    double step, attend;
};

static int profile_short(
    struct bench *bench, struct bench_case *work, struct step_seconds *seconds, struct error *error) {
    double total;
    engine_profile_enable(bench->engine, true);
    int code = bench_decode_run(&work->decode, &total, error);
    seconds->attend = engine_profile_get(bench->engine)->seconds[PHASE_ATTEND] / work->decode.steps;
    seconds->step = total / work->decode.steps;
    engine_profile_enable(bench->engine, false);
    return code;
}

/* Fills policy_percent and *statistics. */
static int measure_pairs(struct bench *bench, struct bench_case *work, struct bench_case *plain, struct bench_run *run,
    double *statistics, struct error *error) {
    double parts[PART_PAIRS], differences[PART_PAIRS];
    struct step_seconds with, without;
    uint32_t pairs = part_pairs(work->decode.steps);
    int code = profile_short(bench, plain, &without, error); /* warms up */
    for (uint32_t pair = 0; pair < pairs && code == 0; pair++) {
        bool first = pair % 2 == 0;
        code = profile_short(bench, first ? work : plain, first ? &with : &without, error);
        if (code == 0)
            code = profile_short(bench, first ? plain : work, first ? &without : &with, error);
        parts[pair] = 1 - without.step / with.step;
        differences[pair] = with.attend - without.attend;
    }
    if (code != 0)
        return code;
    run->has_policy_percent = true;
    run->policy_percent = 100 * bench_median(parts, pairs);
    double difference = bench_median(differences, pairs);
    *statistics = difference > 0 ? difference : 0; /* less than nothing is the noise of the clock */
    return 0;
}

static int measure_part(struct bench *bench, struct bench_case *work, struct bench_run *run, struct error *error) {
    struct bench_case plain = *work;
    double statistics;
    plain.policy = plain.decode.policy = NULL;
    plain.depth = plain.decode.depth = (uint32_t)run->kv_tokens_kept;
    plain.decode.steps = work->decode.steps = part_steps(work->policy);
    plain.decode.runs = part_pairs(plain.decode.steps) + 1;
    int code = bench_decode_prepare(&plain.decode, error);
    if (code == 0)
        code = measure_pairs(bench, work, &plain, run, &statistics, error);
    bench_decode_free(&plain.decode);
    if (code == 0)
        run->phases[run->phases_count++] =
            (struct bench_phase){"statistics", statistics, (double)run->statistics_bytes};
    return bench_name_case(&plain, code, error);
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
    return bench->config->profile ? measure_part(bench, work, run, error) : 0;
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
        work.decode.runs = bench_case_runs(bench);
        uint32_t part = part_steps(work.policy);
        if (bench->config->profile)
            work.decode.runs += (part_pairs(part) * part + full->steps - 1) / full->steps;
        code = bench_decode_prepare(&work.decode, error);
        if (code == 0)
            code = measure_decode(bench, &work, full_run, error);
        bench_decode_free(&work.decode);
        code = bench_name_case(&work, code, error);
    }
    return code;
}
