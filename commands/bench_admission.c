/* SPDX-License-Identifier: Apache-2.0
 *
 * Admission: how many sequences of --depth tokens the page pool of --kv-memory lets run to their end at once, through
 * the scheduler. Requests that each end at `depth` tokens, prompt and output together, are submitted together, more of
 * them than should fit; counted are the most that ran at one time without one of them being preempted: where the
 * scheduler had to take one back, fewer are submitted in another try. All have to come to their end.
 * Outputs are so long that the first request still decodes when the last that fits has been admitted (but at most half
 * of the depth: short sequences in a large pool may be held back by that).
 * ratio_full is the number over that of the full cache.
 */
#include "commands/bench_case.h"

enum { SPARE = 2, TRIES = 16 };

/* Sequences whose pages fit, while one of them is in its prefill. */
static uint32_t estimate(
    const struct bench *bench, const struct policy_settings *policy, uint32_t prompt, uint32_t depth) {
    struct sequence_demand demand = engine_demand(bench->engine, policy, prompt, depth);
    uint64_t total = kv_cache_pages_total(engine_kv_cache(bench->engine));
    uint64_t last = demand.peak_pages > demand.pages ? demand.peak_pages : demand.pages;
    if (last > total)
        return 0;
    uint64_t others = demand.pages > 0 ? (total - last) / demand.pages : 0, most = engine_batch_rows(bench->engine);
    return (uint32_t)(1 + others < most ? 1 + others : most);
}

/* Tokens of output that let every sequence be admitted before the first one ends: each admission takes the steps of a
 * prefill, and each step gives a decoding sequence one token. */
static uint32_t output_tokens(const struct bench *bench, uint32_t depth) {
    uint64_t most = estimate(bench, NULL, depth, depth), rows = engine_batch_rows(bench->engine);
    for (size_t i = 0; i < bench->policies_count; i++) {
        uint32_t count = estimate(bench, &bench->policies[i], depth, depth);
        most = count > most ? count : most;
    }
    uint64_t free_rows = rows > most + SPARE ? rows - most - SPARE : 1;
    uint64_t tokens = (most + SPARE) * (depth / free_rows + 2);
    return tokens < depth / 2 ? (uint32_t)tokens : depth / 2;
}

static int count_admitted(struct bench *bench, struct bench_server *server, struct bench_case *work, uint32_t output,
    struct bench_admitted *admitted, struct error *error) {
    uint32_t requests = estimate(bench, work->policy, work->depth - output, work->depth) + SPARE;
    for (int i = 0; i < TRIES; i++) {
        int code = bench_admit(server, work->policy, requests, work->depth - output, output, admitted, error);
        if (code != 0 || admitted->preemptions == 0 || admitted->sequences <= 1)
            return code;
        requests = admitted->sequences - 1 - admitted->sequences / 16;
    }
    return error_set(error, ERROR_PAGES, "sequences are preempted even where %u run", admitted->sequences);
}

static int admission_case(struct bench *bench, struct bench_server *server, const struct policy_settings *policy,
    uint32_t depth, uint32_t output, uint32_t *full, struct error *error) {
    struct bench_case work = {.work = "admission", .policy = policy, .depth = depth};
    struct bench_admitted admitted = {0};
    int code = count_admitted(bench, server, &work, output, &admitted, error);
    if (code != 0)
        return bench_name_case(&work, code, error);
    work.batch = admitted.sequences;
    struct bench_run *run = bench_add_run(bench, &work, error);
    if (run == NULL)
        return ERROR_MEMORY;
    run->tokens_per_second = (double)admitted.generated / admitted.seconds;
    run->step_ms = admitted.seconds * 1e3;
    if (policy == NULL)
        *full = admitted.sequences;
    else
        run->ratio_full = (double)admitted.sequences / *full;
    return 0;
}

static int admission_depth(struct bench *bench, struct bench_server *server, uint32_t depth, struct error *error) {
    uint32_t output = output_tokens(bench, depth), full = 0;
    int code = admission_case(bench, server, NULL, depth, output, &full, error);
    for (size_t i = 0; i < bench->policies_count && code == 0; i++)
        if (!policy_settings_keep_all(&bench->policies[i]))
            code = admission_case(bench, server, &bench->policies[i], depth, output, &full, error);
    return code;
}

int bench_admission(struct bench *bench, struct error *error) {
    const struct string_list *depths = &bench->config->depth;
    struct bench_server *server = NULL;
    int code = 0;
    for (size_t i = 0; i < depths->count && code == 0; i++)
        if (bench_list_number(depths, i) < 16)
            code = error_set(error, ERROR_INVALID, "admission of depth %s: sequences have at least 16 tokens (--depth)",
                depths->items[i]);
    if (code == 0 &&
        (server = bench_server_start(bench->engine, engine_batch_rows(bench->engine), NULL, error)) == NULL)
        code = error->code;
    for (size_t i = 0; i < depths->count && code == 0; i++)
        code = admission_depth(bench, server, bench_list_number(depths, i), error);
    bench_server_stop(server);
    return code;
}
