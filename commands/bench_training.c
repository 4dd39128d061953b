/* SPDX-License-Identifier: Apache-2.0
 *
 * Training beside traffic: what live streams lose to a training job on the same engine and scheduler, and what it gets.
 * `batch` requests of `depth` tokens stream --decode tokens each, --pairs times beside the job, which may have
 * --training-share of the time, and as often while it may have none; the order alternates. In the idle time after each
 * pair, of which the job has all, requests of one token arrive one after the other.
 * The job is train_run as the admin API runs it, on a thread of its own: a small run on generated prompts (recordings,
 * the stages rank and kl_parameter, comparisons, checkpoints in a temporary folder), over and over with other seeds.
 */
#include "commands/bench_case.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/background.h"
#include "policy/train/train.h"

enum { ARRIVALS = 4 /* in idle time, after each pair */, PROMPT_LEAST = 256, PROMPT_MOST = 1024 };

struct job {
    struct train_run run;
    struct tokenizer *tokenizer;
    char folder[512], out[544];
    pthread_t thread;
    bool started;
    atomic_bool stopped;
    _Atomic uint64_t tokens; /* of all runs */
    uint64_t tokens_before;  /* of those that ended */
    int code;                /* of the run that failed */
    struct error error;
};

/* ---- the job ---- */

static bool is_stopped(void *context) {
    return atomic_load(&((struct job *)context)->stopped);
}

static void take_event(void *context, const struct train_event *event) {
    struct job *job = context;
    atomic_store(&job->tokens, job->tokens_before + event->tokens);
}

static void *train(void *context) {
    struct job *job = context;
    while (job->code == 0 && !atomic_load(&job->stopped)) {
        job->code = train_run(&job->run, &job->error);
        job->tokens_before = atomic_load(&job->tokens);
        job->run.options.seed++;
    }
    return NULL;
}

static void choose_run(const struct engine *engine, struct train_options *options) {
    uint32_t most = engine_tokens_max(engine) / 2;
    train_options_default(options, TRAIN_DISTILLCACHE, false);
    options->prompt_most = most < PROMPT_MOST ? most : PROMPT_MOST;
    options->prompt_least = options->prompt_most < PROMPT_LEAST ? options->prompt_most : PROMPT_LEAST;
    options->future = options->rollout = options->valid_rollout = 16;
    options->sequences = 4;
    options->students = 4;
    options->rank_steps = 20;
    options->parameter_steps = 2;
    options->pruned_steps = options->local_steps = options->kl_steps = 0;
    options->valid_every = 0;
    options->valid_prompts = 1;
    options->checkpoint_every = 10;
}

static int start_job(struct bench *bench, struct background *background, struct job *job, struct error *error) {
    const char *folder = getenv("TMPDIR");
    snprintf(job->folder, sizeof job->folder, "%.480s/distillcache-bench-XXXXXX", folder != NULL ? folder : "/tmp");
    if (mkdtemp(job->folder) == NULL) {
        int code = error_set(error, ERROR_IO, "cannot make the folder %s: %s", job->folder, strerror(errno));
        job->folder[0] = '\0';
        return code;
    }
    snprintf(job->out, sizeof job->out, "%s/policy.safetensors", job->folder);
    job->tokenizer = tokenizer_create(bench->model->file, error);
    if (job->tokenizer == NULL)
        return error->code;
    job->run = (struct train_run){.engine = bench->engine,
        .tokenizer = job->tokenizer,
        .background = background,
        .directory = job->folder,
        .out = job->out,
        .threads = bench->threads,
        .event = take_event,
        .stopped = is_stopped,
        .context = job};
    choose_run(bench->engine, &job->run.options);
    job->started = pthread_create(&job->thread, NULL, train, job) == 0;
    return job->started ? 0 : error_set(error, ERROR_MEMORY, "cannot start a thread for training");
}

static void remove_folder(const char *folder) {
    DIR *list = folder[0] != '\0' ? opendir(folder) : NULL;
    char path[800];
    for (const struct dirent *entry; list != NULL && (entry = readdir(list)) != NULL;) {
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (entry->d_name[0] != '.')
            unlink(path);
    }
    if (list == NULL)
        return;
    closedir(list);
    rmdir(folder);
}

static int stop_job(struct job *job, struct background *background, struct error *error) {
    atomic_store(&job->stopped, true);
    background_stop(background);
    if (job->started)
        pthread_join(job->thread, NULL);
    tokenizer_free(job->tokenizer);
    remove_folder(job->folder);
    if (job->code == 0 || job->code == ERROR_CANCELLED)
        return 0;
    return error_set(error, job->code, "the job: %.400s", job->error.message);
}

/* ---- measuring ---- */

/* Of each pair. */
struct side {
    double *medians, *p99s, *rates; /* [pairs] */
};

struct measurement {
    struct bench *bench;
    struct bench_server *server;
    struct background *background;
    struct bench_streams streams;
    struct side alone, beside;
    double *first;           /* [pairs * ARRIVALS] seconds */
    double busy, foreground; /* seconds of the job's turns and of the streams' steps, beside */
};

static int run_side(struct measurement *m, bool beside, uint32_t pair, struct error *error) {
    struct side *side = beside ? &m->beside : &m->alone;
    struct bench_streams *streams = &m->streams;
    struct background_stats before, after;
    background_set_share(m->background, beside ? m->bench->config->training_share : 0);
    background_get_stats(m->background, &before);
    int code = bench_stream(m->server, streams, error);
    background_get_stats(m->background, &after);
    if (code != 0)
        return code;
    if (streams->gaps_count == 0 || streams->seconds <= 0)
        return error_set(error, ERROR_INVALID, "streams of %u tokens do not overlap (--decode)", streams->tokens);
    side->medians[pair] = bench_median(streams->gaps, streams->gaps_count); /* and sorts them */
    side->p99s[pair] = streams->gaps[(size_t)(0.99 * (streams->gaps_count - 1) + 0.5)];
    side->rates[pair] = streams->gaps_count / streams->seconds;
    m->busy += beside ? after.busy_seconds - before.busy_seconds : 0;
    m->foreground += beside ? after.foreground_seconds - before.foreground_seconds : 0;
    return 0;
}

/* Requests that arrive at all kinds of moments. */
static int run_arrivals(struct measurement *m, double *first, struct error *error) {
    struct bench_request_times times;
    int code = 0;
    for (uint32_t i = 0; i < ARRIVALS && code == 0; i++) {
        nanosleep(&(struct timespec){.tv_nsec = 150000000 + 37000000 * (long)i}, NULL);
        code = bench_first_token(m->server, 1, &times, error);
        first[i] = times.total;
    }
    return code;
}

static int measure_pairs(struct measurement *m, struct error *error) {
    uint32_t pairs = m->bench->config->pairs;
    int code = run_side(m, true, 0, error); /* warms up, and is overwritten */
    m->busy = m->foreground = 0;
    for (uint32_t pair = 0; pair < pairs && code == 0; pair++) {
        code = run_side(m, pair % 2 == 1, pair, error);
        if (code == 0)
            code = run_side(m, pair % 2 == 0, pair, error);
        if (code == 0)
            code = run_arrivals(m, m->first + (size_t)pair * ARRIVALS, error);
    }
    return code;
}

static void summarise(struct measurement *m, const struct job *job, double first_alone, struct bench_run *run) {
    uint32_t pairs = m->bench->config->pairs;
    struct bench_beside *out = &run->beside;
    struct background_stats stats;
    background_get_stats(m->background, &stats);
    run->has_beside = true;
    out->share = m->bench->config->training_share;
    out->share_used = m->busy / (m->busy + m->foreground);
    out->growth = bench_pair_ratio(m->alone.medians, m->beside.medians, pairs);
    out->growth_allowed = 1 / (1 - out->share) * 1.1;
    out->inter_token_ms = bench_median(m->beside.medians, pairs) * 1e3;
    out->inter_token_ms_alone = bench_median(m->alone.medians, pairs) * 1e3;
    out->inter_token_p99_ms = bench_median(m->beside.p99s, pairs) * 1e3;
    out->inter_token_p99_ms_alone = bench_median(m->alone.p99s, pairs) * 1e3;
    out->tokens_per_second_alone = bench_median(m->alone.rates, pairs);
    out->training_tokens_per_second = stats.seconds > 0 ? (double)atomic_load(&job->tokens) / stats.seconds : 0;
    out->first_token_ms = bench_median(m->first, (size_t)pairs * ARRIVALS) * 1e3; /* and sorts them */
    out->first_token_ms_most = m->first[pairs * ARRIVALS - 1] * 1e3;
    out->first_token_ms_alone = first_alone * 1e3;
    out->yield_ms_most = stats.longest * 1e3;
    run->tokens_per_second = bench_median(m->beside.rates, pairs);
    run->step_ms = out->inter_token_ms;
}

/* ---- a case ---- */

/* Before the job starts; the first request warms up. */
static int measure_first_alone(struct measurement *m, double *median, struct error *error) {
    double *first = m->first;
    int code = run_arrivals(m, first, error);
    if (code == 0)
        code = run_arrivals(m, first, error);
    *median = code == 0 ? bench_median(first, ARRIVALS) : 0;
    return code;
}

static bool open_side(struct side *side, uint32_t pairs) {
    side->medians = calloc(pairs, sizeof *side->medians);
    side->p99s = calloc(pairs, sizeof *side->p99s);
    side->rates = calloc(pairs, sizeof *side->rates);
    return side->medians != NULL && side->p99s != NULL && side->rates != NULL;
}

static void close_side(struct side *side) {
    free(side->medians);
    free(side->p99s);
    free(side->rates);
}

static int open_measurement(struct measurement *m, const struct bench_case *work, struct error *error) {
    const struct config *config = m->bench->config;
    uint32_t pairs = config->pairs;
    /* One token more than are timed from one to the next. */
    m->streams = (struct bench_streams){
        .count = work->batch, .prompt_tokens = work->depth > 0 ? work->depth : 1, .tokens = config->decode + 1};
    m->streams.gaps = malloc((size_t)work->batch * m->streams.tokens * sizeof *m->streams.gaps);
    m->first = malloc((size_t)pairs * ARRIVALS * sizeof *m->first);
    bool there = open_side(&m->alone, pairs);
    there = open_side(&m->beside, pairs) && there;
    if (!there || m->streams.gaps == NULL || m->first == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for the times of %u streams", work->batch);
    m->background = background_create(config->training_share, error);
    if (m->background == NULL)
        return error->code;
    m->server = bench_server_start(m->bench->engine, 0, m->background, error);
    return m->server == NULL ? error->code : 0;
}

static void close_measurement(struct measurement *m) {
    bench_server_stop(m->server);
    background_free(m->background);
    close_side(&m->alone);
    close_side(&m->beside);
    free(m->streams.gaps);
    free(m->first);
}

static int training_case(struct bench *bench, uint32_t batch, uint32_t depth, struct error *error) {
    struct bench_case work = {.work = "training", .batch = batch, .depth = depth};
    struct measurement m = {.bench = bench};
    struct job job = {0};
    struct error failure = {0};
    double first_alone = 0;
    int code = open_measurement(&m, &work, error);
    if (code == 0)
        code = measure_first_alone(&m, &first_alone, error);
    if (code == 0)
        code = start_job(bench, m.background, &job, error);
    if (code == 0)
        code = measure_pairs(&m, error);
    int stopped = stop_job(&job, m.background, &failure);
    if (code == 0 && stopped != 0)
        code = error_set(error, stopped, "%s", failure.message);
    struct bench_run *run = code == 0 ? bench_add_run(bench, &work, error) : NULL;
    if (run != NULL)
        summarise(&m, &job, first_alone, run);
    else if (code == 0)
        code = ERROR_MEMORY;
    close_measurement(&m);
    return bench_name_case(&work, code, error);
}

int bench_training(struct bench *bench, struct error *error) {
    const struct config *config = bench->config;
    int code = 0;
    for (size_t b = 0; b < config->batch.count && code == 0; b++)
        for (size_t d = 0; d < config->depth.count && code == 0; d++)
            code =
                training_case(bench, bench_list_number(&config->batch, b), bench_list_number(&config->depth, d), error);
    return code;
}
