/* SPDX-License-Identifier: Apache-2.0
 *
 * `distillcache bench`: how fast this machine runs the model, by work:
 *   prefill      --prefill tokens into an empty sequence, and the first token
 *   decode       --decode steps for every batch of --batch and every depth of --depth: `batch` sequences, each with
 *                `depth` cached tokens before the first step
 *   first_token  a request of --prefill tokens through the idle scheduler, until its first token is delivered
 *   request      a request of one token through the idle scheduler, until its end is delivered; its phases say how long
 *                it was queued and how long a cancellation takes
 *   admission    with --admission: how many sequences of `depth` tokens run to their end at once (bench_admission.c)
 *   training     with --training: `batch` live streams alone and beside a training job (bench_training.c)
 * Each is run once to warm up and once with the engine's profile (bytes, and with --profile the phases), then --pairs
 * times for the figures, which are medians. With --peer every run of prefill and decode is paired with one of the peer,
 * in alternating order, and `ratio` is the median of peer seconds / own seconds. Own decode and prefill seconds contain
 * the logits and the choice of the most likely token; the peer's (scripts/peer_llama_cpp.py) the logits alone.
 * Prefill, decode and admission are measured with the full cache first, then with each eviction policy of --kv-policy
 * and --kv-ratio, in pairs with the full cache (bench_policy.c).
 *
 * read_bandwidth_fraction: bytes_per_step / step time, as a share of the bandwidth that a plain read of as many bytes
 * reaches with the same threads in the same process. Caches that keep part of the weights from step to step can lift it
 * somewhat above 1.
 *
 * Output: a table, or with --json the document of bench_report.h, on standard output; messages on standard error.
 */
#include "commands/commands.h"

#include "commands/bench_case.h"
#include "commands/bench_machine.h"
#include "commands/engine_config.h"
#include "engine/cpu/threads.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int prefill_own(struct bench *bench, struct bench_case *work, double *seconds, struct error *error) {
    return bench_prefill(bench->engine, NULL, work->depth, seconds, error);
}

static int prefill_peer(struct bench *bench, struct bench_case *work, double *seconds, struct error *error) {
    return bench_peer_prefill(bench->peer, work->depth, seconds, error);
}

static int decode_peer(struct bench *bench, struct bench_case *work, double *seconds, struct error *error) {
    return bench_peer_decode(bench->peer, work->steps, work->depth, work->batch, seconds, error);
}

/* A case of the full cache, beside the peer where there is one. */
static int measure_full(struct bench *bench, struct bench_case *work, struct bench_run *run, struct error *error) {
    int code = bench_case_measure(bench, work, run, error);
    if (code != 0)
        return code;
    if (bench->peer != NULL) {
        run->ratio = work->ratio;
        run->peer_tokens_per_second = (double)work->tokens / bench_median(bench->other_seconds, bench->config->pairs);
    }
    run->read_bandwidth_fraction =
        bench_read_seconds((uint64_t)run->bytes_per_step, bench->threads) * 1e3 / run->step_ms;
    return 0;
}

static int bench_prefill_case(struct bench *bench, struct error *error) {
    struct bench_case work = {.work = "prefill",
        .batch = 1,
        .depth = bench->config->prefill,
        .steps = bench_prefill_steps(bench),
        .tokens = bench->config->prefill,
        .run_own = prefill_own,
        .run_other = bench->peer != NULL ? prefill_peer : NULL};
    struct bench_run *run = bench_add_run(bench, &work, error);
    int code = run == NULL ? ERROR_MEMORY : measure_full(bench, &work, run, error);
    return bench_name_case(&work, code, error);
}

/* The full cache, then the policies beside it. */
static int bench_decode_case(struct bench *bench, uint32_t batch, uint32_t depth, struct error *error) {
    uint32_t steps = bench->config->decode;
    struct bench_case work = {.work = "decode",
        .batch = batch,
        .depth = depth,
        .steps = steps,
        .tokens = (uint64_t)steps * batch,
        .decode = {.engine = bench->engine, .batch = batch, .depth = depth, .steps = steps},
        .run_own = bench_run_decode,
        .run_other = bench->peer != NULL ? decode_peer : NULL};
    struct bench_run *run = NULL;
    int code = bench_decode_prepare(&work.decode, error);
    if (code == 0 && (run = bench_add_run(bench, &work, error)) == NULL)
        code = ERROR_MEMORY;
    if (code == 0)
        code = measure_full(bench, &work, run, error);
    code = bench_name_case(&work, code, error);
    if (code == 0)
        code = bench_policy_decode(bench, &work.decode, run, error);
    bench_decode_free(&work.decode);
    return code;
}

static int bench_decode_cases(struct bench *bench, struct error *error) {
    const struct config *config = bench->config;
    int code = 0;
    for (size_t b = 0; b < config->batch.count && code == 0; b++)
        for (size_t d = 0; d < config->depth.count && code == 0; d++)
            code = bench_decode_case(
                bench, bench_list_number(&config->batch, b), bench_list_number(&config->depth, d), error);
    return code;
}

enum { TIMES_TOTAL, TIMES_QUEUED, TIMES_PREFILL, TIMES_CANCEL, TIMES_COUNT };

/* Medians over `pairs` requests of one kind: out [TIMES_COUNT]. */
static int measure_requests(
    struct bench *bench, struct bench_server *server, uint32_t tokens, bool cancel, double *out, struct error *error) {
    uint32_t pairs = bench->config->pairs;
    struct bench_request_times times;
    double *all = calloc((size_t)TIMES_COUNT * pairs, sizeof *all);
    if (all == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for %u times", pairs);
    int code = 0;
    for (uint32_t i = 0; i <= pairs && code == 0; i++) { /* the first one warms up and is overwritten */
        uint32_t at = i > 0 ? i - 1 : 0;
        code = cancel ? bench_request(server, &times, error) : bench_first_token(server, tokens, &times, error);
        all[TIMES_TOTAL * pairs + at] = times.total;
        all[TIMES_QUEUED * pairs + at] = times.queued;
        all[TIMES_PREFILL * pairs + at] = times.prefill;
        all[TIMES_CANCEL * pairs + at] = times.cancel;
    }
    for (int i = 0; i < TIMES_COUNT; i++)
        out[i] = bench_median(all + (size_t)i * pairs, pairs);
    free(all);
    return code;
}

static int add_request_run(struct bench *bench, const char *work, uint32_t tokens, uint32_t counted, bool cancel,
    const double *times, struct error *error) {
    struct bench_run *run =
        bench_add_run(bench, &(struct bench_case){.work = work, .batch = 1, .depth = tokens}, error);
    if (run == NULL)
        return ERROR_MEMORY;
    run->step_ms = times[TIMES_TOTAL] * 1e3;
    run->tokens_per_second = counted / times[TIMES_TOTAL];
    run->phases[run->phases_count++] = (struct bench_phase){"queued", times[TIMES_QUEUED], -1};
    run->phases[run->phases_count++] = (struct bench_phase){"prefill", times[TIMES_PREFILL], -1};
    if (cancel)
        run->phases[run->phases_count++] = (struct bench_phase){"cancel", times[TIMES_CANCEL], -1};
    return 0;
}

static int bench_request_cases(struct bench *bench, struct error *error) {
    double times[TIMES_COUNT];
    uint32_t tokens = bench->config->prefill;
    struct bench_server *server = bench_server_start(bench->engine, 0, NULL, error);
    if (server == NULL)
        return error->code;
    int code = measure_requests(bench, server, tokens, false, times, error);
    if (code == 0)
        code = add_request_run(bench, "first_token", tokens, tokens, false, times, error);
    if (code == 0)
        code = measure_requests(bench, server, 1, true, times, error);
    if (code == 0)
        code = add_request_run(bench, "request", 1, 1, true, times, error);
    bench_server_stop(server);
    return code;
}

static int open_engine(struct bench *bench, struct error *error) {
    struct engine_options options = engine_options_of(bench->config);
    bench->model = engine_open_model(bench->config, error);
    if (bench->model == NULL)
        return engine_error_of_file(bench->config, error);
    bench->engine = engine_open(bench->model, &options, error);
    return bench->engine == NULL ? error->code : 0;
}

/* The peer starts before the engine does, so that it inherits nothing of the engine's threads. */
static int start_peer(struct bench *bench, struct error *error) {
    const struct config *config = bench->config;
    if (config->peer == NULL || config->peer[0] == '\0')
        return 0;
    if (strcmp(config->peer, "llama-cpp-python") != 0)
        return error_set(error, ERROR_INVALID, "no peer '%s', there is: llama-cpp-python", config->peer);
    struct bench_peer_options options = {
        .python = config->peer_python, .model = config->model, .threads = bench->threads};
    bench->peer = bench_peer_start(&options, error);
    return bench->peer == NULL ? error->code : 0;
}

static int open_bench(struct bench *bench, const struct config *config, struct error *error) {
    bench->config = config;
    bench->threads = config->threads != 0 ? config->threads : thread_count_available();
    int code = config_policies(config, NULL, &bench->policies, &bench->policies_count, error);
    if (code != 0)
        return code;
    /* Prefill, decode and admission, with the full cache and with each policy; two kinds of requests; training. */
    size_t runs = (1 + bench->policies_count) * (1 + (config->batch.count + 1) * config->depth.count) + 2 +
                  config->batch.count * config->depth.count;
    bench->runs_capacity = runs;
    bench->runs = calloc(runs, sizeof *bench->runs);
    bench->own_seconds = calloc(config->pairs, sizeof *bench->own_seconds);
    bench->other_seconds = calloc(config->pairs, sizeof *bench->other_seconds);
    if (bench->runs == NULL || bench->own_seconds == NULL || bench->other_seconds == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for %zu runs of %u pairs", runs, config->pairs);
    code = start_peer(bench, error);
    code = code != 0 ? code : open_engine(bench, error);
    return code != 0 ? code : engine_resolve_policies(bench->engine, bench->policies, bench->policies_count, error);
}

static void close_bench(struct bench *bench) {
    engine_close(bench->engine);
    model_free(bench->model);
    bench_peer_stop(bench->peer);
    free(bench->runs);
    free(bench->own_seconds);
    free(bench->other_seconds);
    config_free_policies(bench->policies, bench->policies_count);
}

static void describe(struct bench *bench) {
    struct bench_report *report = &bench->report;
    struct bench_machine *machine = &report->machine;
    report->resident_bytes = bench_resident_bytes();
    bench_machine_describe(machine);
    machine->threads = bench->threads;
    snprintf(machine->backend, sizeof machine->backend, "%s", engine_describe(bench->engine));
    if (bench->peer != NULL)
        snprintf(machine->peer, sizeof machine->peer, "%s", bench_peer_description(bench->peer));
}

static int print_report(struct bench *bench, struct error *error) {
    bench->report.runs = bench->runs;
    bench->report.runs_count = bench->runs_count;
    if (!bench->config->json) {
        bench_report_table(&bench->report, stdout);
    } else {
        char *text = bench_report_json(&bench->report);
        if (text == NULL)
            return error_set(error, ERROR_MEMORY, "no memory for the report");
        puts(text);
        free(text);
    }
    if (fflush(stdout) != 0 || ferror(stdout))
        return error_set(error, ERROR_IO, "cannot write the report: %s", strerror(errno));
    return 0;
}

int command_bench(const struct config *config) {
    struct bench bench = {0};
    struct error error = {0};
    int code = open_bench(&bench, config, &error);
    if (code == 0) {
        describe(&bench);
        code = bench_prefill_case(&bench, &error);
    }
    if (code == 0)
        code = bench_policy_prefill(&bench, &error);
    if (code == 0)
        code = bench_decode_cases(&bench, &error);
    if (code == 0)
        code = bench_request_cases(&bench, &error);
    if (code == 0 && config->admission)
        code = bench_admission(&bench, &error);
    if (code == 0 && config->training)
        code = bench_training(&bench, &error);
    if (code == 0)
        code = print_report(&bench, &error);
    if (code != 0)
        fprintf(stderr, "distillcache bench: %s\n", error.message);
    close_bench(&bench);
    return code == 0 ? EXIT_OK : EXIT_FAILED;
}
