/* SPDX-License-Identifier: Apache-2.0
 *
 * A training run beside live requests, on a page pool that is too small for both: requests answer as without training,
 * the run writes the same bytes as one that is undisturbed, although its pages are taken back; when it is stopped while
 * it waits for pages, it ends.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "policy/train/train.h"
#include "tests/unit/serving.h"

enum { REQUESTS = 6, PAGES = 200, METRICS_MAX = 64 };

/* A run on a thread of its own. */
struct job {
    struct train_run run;
    char folder[64], out[96];
    pthread_t thread;
    atomic_bool ended;
    int code;
    struct error error;
    struct train_event metrics[METRICS_MAX];
    uint32_t metrics_count;
};

static void take_event(void *context, const struct train_event *event) {
    struct job *job = context;
    if (event->kind == TRAIN_EVENT_METRICS && job->metrics_count < METRICS_MAX)
        job->metrics[job->metrics_count++] = *event;
}

static void *train(void *context) {
    struct job *job = context;
    job->code = train_run(&job->run, &job->error);
    atomic_store(&job->ended, true);
    return NULL;
}

/* Stages rank, rank_pruned and kl_parameter on generated prompts: recordings, rollouts and comparisons hold pages. */
static void open_job(struct job *job, struct serving *serving, struct background *background) {
    *job = (struct job){.folder = "/tmp/distillcache-beside-XXXXXX"};
    assert_non_null(mkdtemp(job->folder));
    snprintf(job->out, sizeof job->out, "%s/policy.safetensors", job->folder);
    job->run = (struct train_run){.engine = serving_engine(serving),
        .tokenizer = serving_tokenizer(serving),
        .background = background,
        .directory = job->folder,
        .out = job->out,
        .threads = 2,
        .event = take_event,
        .context = job};
    struct train_options *options = &job->run.options;
    train_options_default(options, TRAIN_DISTILLCACHE, false);
    options->prompt_least = 80;
    options->prompt_most = 120;
    options->future = options->rollout = 12;
    options->sequences = 4;
    options->rank_steps = 4;
    options->pruned_steps = 2;
    options->pruned_sequences = 2;
    options->local_steps = options->kl_steps = 0;
    options->parameter_steps = 2;
    options->students = 2;
    options->warmup_steps = 1;
    options->valid_prompts = 1;
    options->valid_rollout = 6;
    options->checkpoint_every = 2;
    options->interval = 3;
    options->ratios_count = 1;
    options->ratios[0] = 0.5;
}

static void start_job(struct job *job, struct serving *serving, struct background *background) {
    open_job(job, serving, background);
    assert_int_equal(pthread_create(&job->thread, NULL, train, job), 0);
}

static void close_job(struct job *job) {
    DIR *list = opendir(job->folder);
    assert_non_null(list);
    for (const struct dirent *entry; (entry = readdir(list)) != NULL;) {
        char path[400];
        snprintf(path, sizeof path, "%s/%s", job->folder, entry->d_name);
        if (entry->d_name[0] != '.')
            assert_int_equal(unlink(path), 0);
    }
    closedir(list);
    assert_int_equal(rmdir(job->folder), 0);
}

static char *read_bytes(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rbe");
    assert_non_null(file);
    char *content = malloc(1 << 20);
    assert_non_null(content);
    *bytes = fread(content, 1, 1 << 20, file);
    fclose(file);
    return content;
}

/* Some that keep everything and some that prune, of which a few hold most of the pool together. */
static void submit(struct serving *serving, struct call **calls) {
    struct error error = {0};
    for (uint32_t i = 0; i < REQUESTS; i++) {
        struct request *request = serving_request(80 + 50 * i, 700 + i, 30);
        serving_set_policy(request, i % 2 == 0 ? "full" : "h2o,ratio=0.5,minimum=8");
        request->ignore_eos = true;
        calls[i] = serving_submit(serving, request, &error);
        if (calls[i] == NULL)
            fail_msg("refused: %s", error.message);
    }
}

static void answer(struct serving *serving, struct call **calls) {
    submit(serving, calls);
    serving_wait_all(serving);
}

static struct background_stats stats_of(struct background *background) {
    struct background_stats stats;
    background_get_stats(background, &stats);
    return stats;
}

static void assert_same_metrics(const struct job *a, const struct job *b) {
    assert_int_equal(a->metrics_count, b->metrics_count);
    for (uint32_t i = 0; i < a->metrics_count; i++) {
        const struct train_event *x = &a->metrics[i], *y = &b->metrics[i];
        assert_int_equal(x->step, y->step);
        assert_int_equal(x->tokens, y->tokens);
        assert_true(x->loss == y->loss || (isnan(x->loss) && isnan(y->loss)));
        assert_true(x->reward == y->reward || (isnan(x->reward) && isnan(y->reward)));
        assert_true(x->kl_valid == y->kl_valid || (isnan(x->kl_valid) && isnan(y->kl_valid)));
    }
}

/* Both by themselves. */
struct alone {
    struct call *calls[REQUESTS];
    struct job job;
    char *policy;
    size_t bytes;
};

static void run_alone(struct alone *alone) {
    struct serving *other = serving_create(&(struct serving_options){.threads = 2});
    open_job(&alone->job, other, NULL);
    train(&alone->job);
    if (alone->job.code != 0)
        fail_msg("%s", alone->job.error.message);
    alone->policy = read_bytes(alone->job.out, &alone->bytes);
    close_job(&alone->job);
    serving_free(other);
}

static void assert_same_policy(const struct job *job, const struct alone *alone) {
    size_t bytes;
    char *policy = read_bytes(job->out, &bytes);
    assert_int_equal(bytes, alone->bytes);
    assert_memory_equal(policy, alone->policy, bytes);
    free(policy);
}

/* A whole run beside requests, both as alone; returns how often its pages were taken back. */
static uint64_t run_beside(const struct alone *alone) {
    static struct job job;
    struct call *beside[REQUESTS];
    struct background *background = background_create(0.25, NULL);
    struct serving *serving =
        serving_create(&(struct serving_options){.threads = 2, .kv_pages = PAGES, .background = background});
    start_job(&job, serving, background);
    while (stats_of(background).turns == 0 && !atomic_load(&job.ended))
        ;
    while (!atomic_load(&job.ended)) { /* now and then, so that the run is met at many points */
        answer(serving, beside);
        for (uint32_t i = 0; i < REQUESTS; i++)
            assert_true(answers_equal(&beside[i]->answers[0], &alone->calls[i]->answers[0]));
        for (uint64_t turns = stats_of(background).turns;
             !atomic_load(&job.ended) && stats_of(background).turns < turns + 4;)
            usleep(1000);
    }
    pthread_join(job.thread, NULL);
    if (job.code != 0)
        fail_msg("%s", job.error.message);
    assert_same_policy(&job, alone);
    assert_same_metrics(&job, &alone->job);
    uint64_t gave_up = stats_of(background).gave_up;
    close_job(&job);
    serving_free(serving);
    background_free(background);
    return gave_up;
}

static void neither_changes_the_other(void **state) {
    (void)state;
    static struct alone alone;
    struct serving *first = serving_create(&(struct serving_options){.threads = 2});
    answer(first, alone.calls);
    run_alone(&alone);
    uint64_t gave_up = 0;
    for (uint32_t again = 0; gave_up < 3 && again < 50; again++) /* a quick run may be over before it lacks any */
        gave_up += run_beside(&alone);
    assert_true(gave_up >= 3);
    free(alone.policy);
    serving_free(first);
}

/* Stops the run while it waits for pages; returns how many turns it had after that. */
static uint64_t stop_without_pages(struct job *job, struct serving *serving, struct background *background) {
    struct call *calls[REQUESTS];
    start_job(job, serving, background);
    uint64_t gave_up = stats_of(background).gave_up;
    while (stats_of(background).gave_up == gave_up && !atomic_load(&job->ended)) {
        submit(serving, calls);
        for (uint32_t wait = 0; wait < 50 && stats_of(background).gave_up == gave_up; wait++)
            usleep(1000);
        if (stats_of(background).gave_up == gave_up)
            serving_wait_all(serving);
    }
    uint64_t turns = stats_of(background).turns;
    background_stop(background);
    pthread_join(job->thread, NULL);
    turns = stats_of(background).turns - turns;
    background_allow(background);
    serving_wait_all(serving);
    return turns;
}

static void a_run_that_waits_for_pages_can_be_stopped(void **state) {
    (void)state;
    static struct alone alone;
    static struct job job;
    run_alone(&alone);
    struct background *background = background_create(0.25, NULL);
    struct serving *serving =
        serving_create(&(struct serving_options){.threads = 2, .kv_pages = PAGES, .background = background});
    /* One turn, to end. More it has when the machine holds this thread up for long before the stop, none when it ended
     * before it lacked pages. */
    uint64_t turns = stop_without_pages(&job, serving, background);
    for (uint32_t again = 0; turns != 1 && again < 50; again++) {
        close_job(&job);
        turns = stop_without_pages(&job, serving, background);
    }
    assert_int_equal(turns, 1);
    assert_int_equal(job.code, ERROR_CANCELLED);
    assert_int_equal(access(job.out, F_OK), -1);
    job.run.resume = true;
    job.metrics_count = 0;
    train(&job);
    if (job.code != 0)
        fail_msg("%s", job.error.message);
    assert_same_policy(&job, &alone);
    free(alone.policy);
    close_job(&job);
    serving_free(serving);
    background_free(background);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(neither_changes_the_other),
        cmocka_unit_test(a_run_that_waits_for_pages_can_be_stopped),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
