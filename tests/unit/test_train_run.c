/* SPDX-License-Identifier: Apache-2.0
 *
 * Whole runs on a tiny model: the same bytes whatever the threads, the page pool and the batch, and when a run is
 * stopped, wherever that is, and resumed; events; what a checkpoint refuses; files that cannot be written.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "policy/train/train.h"
#include "tests/sanitized.h"
#include "tests/unit/chosen_backend.h"
#include "tests/unit/tiny_llama.h"

enum { STEPS = 7, EVENTS_MAX = 200 };

static struct model *model;
static struct tokenizer *tokenizer;
static char folder[] = "/tmp/distillcache-run-XXXXXX";
static char data[64], out[64], state_file[64];

/* What a run told. */
struct heard {
    uint32_t count, checkpoints;
    struct train_event metrics[EVENTS_MAX];
    uint32_t asked, stop_at; /* the call of `stopped` that says yes; 0: none */
};

static void listen(void *context, const struct train_event *event) {
    struct heard *heard = context;
    assert_non_null(event->message);
    assert_non_null(event->stage);
    if (event->kind == TRAIN_EVENT_METRICS && heard->count < EVENTS_MAX)
        heard->metrics[heard->count++] = *event;
    if (event->kind == TRAIN_EVENT_CHECKPOINT) {
        assert_int_equal(access(event->file, R_OK), 0);
        if (++heard->checkpoints == 1) /* of a run that began anew: what is told comes before the state */
            assert_int_equal(access(state_file, F_OK), -1);
    }
}

static bool stop(void *context) {
    struct heard *heard = context;
    return ++heard->asked == heard->stop_at;
}

static int set_up(void **state) {
    (void)state;
    struct error error = {0};
    struct tiny_llama options = tiny_llama_default();
    char *path = tiny_llama_save(&options);
    model = model_open(path, &error);
    unlink(path);
    free(path);
    tokenizer = model != NULL ? tokenizer_create(model->file, &error) : NULL;
    if (tokenizer == NULL || mkdtemp(folder) == NULL)
        return -1;
    snprintf(data, sizeof data, "%s/data.txt", folder);
    snprintf(out, sizeof out, "%s/policy.safetensors", folder);
    snprintf(state_file, sizeof state_file, "%s/checkpoint.state", folder);
    FILE *file = fopen(data, "we");
    for (uint32_t i = 0; file != NULL && i < 900; i++)
        fprintf(file, "%c%u %c%s", 'a' + i * i % 26, i * 7919 % 1000, 'A' + i * 31 % 26, i % 9 == 0 ? "\n" : "-");
    return file == NULL || fclose(file) != 0;
}

/* Everything in the folder but the data. */
static void clean(void) {
    DIR *list = opendir(folder);
    assert_non_null(list);
    for (const struct dirent *entry; (entry = readdir(list)) != NULL;) {
        char path[400];
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (entry->d_name[0] != '.' && strcmp(path, data) != 0)
            assert_int_equal(unlink(path), 0);
    }
    closedir(list);
}

static int tear_down(void **state) {
    (void)state;
    clean();
    unlink(data);
    tokenizer_free(tokenizer);
    model_free(model);
    return rmdir(folder);
}

struct machine {
    uint32_t threads, rows;
    size_t kv_bytes;
    uint32_t ranks;
    const char *backend, *all_reduce; /* NULL: the CPU */
};
static const struct machine usual = {.threads = 1, .rows = 64, .kv_bytes = 16 << 20, .ranks = 1};

static struct train_run describe(struct heard *heard) {
    struct train_run run = {.tokenizer = tokenizer,
        .data = data,
        .directory = folder,
        .out = out,
        .threads = 1,
        .event = listen,
        .stopped = stop,
        .context = heard};
    train_options_default(&run.options, TRAIN_RANKER, false);
    run.options.prompt_least = 70;
    run.options.prompt_most = 100;
    run.options.future = run.options.rollout = 12;
    run.options.sequences = 6;
    run.options.rank_steps = STEPS;
    run.options.warmup_steps = 2;
    run.options.valid_prompts = 2;
    run.options.valid_rollout = 6;
    run.options.valid_every = 3;
    run.options.checkpoint_every = 2;
    run.options.interval = 3;
    run.options.ratios_count = 2;
    run.options.ratios[0] = 0.5;
    run.options.ratios[1] = 0.4;
    return run;
}

static int execute(struct train_run *run, const struct machine *machine, struct error *error) {
    struct engine_options options = {.backend = {.name = machine->backend,
                                         .threads = machine->threads,
                                         .ranks = machine->ranks,
                                         .all_reduce = machine->all_reduce},
        .kv_bytes = machine->kv_bytes,
        .kv_format = KV_F16,
        .batch_rows = machine->rows,
        .poison_free = true};
    run->engine = engine_open(model, &options, error);
    if (run->engine == NULL)
        return error->code;
    run->threads = machine->threads;
    uint32_t pages = kv_cache_pages_free(engine_kv_cache(run->engine));
    int code = train_run(run, error);
    assert_int_equal(kv_cache_pages_free(engine_kv_cache(run->engine)), pages); /* nothing is left behind */
    engine_close(run->engine);
    return code;
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

static char *train_whole(const struct machine *machine, struct heard *heard, size_t *bytes) {
    struct error error = {0};
    struct train_run run = describe(heard);
    clean();
    if (execute(&run, machine, &error) != 0)
        fail_msg("%s", error.message);
    return read_bytes(out, bytes);
}

static void assert_same(double a, double b) {
    assert_true(a == b || (isnan(a) && isnan(b)));
}

static void assert_same_metrics(const struct train_event *a, const struct train_event *b) {
    assert_int_equal(a->step, b->step);
    assert_same(a->loss, b->loss);
    assert_same(a->gradient_norm, b->gradient_norm);
    assert_same(a->learning_rate, b->learning_rate);
    assert_same(a->kl_valid, b->kl_valid);
    assert_same(a->kl_valid_relative, b->kl_valid_relative);
    assert_int_equal(a->tokens, b->tokens);
}

static void test_events(void **state) {
    (void)state;
    struct heard heard = {0};
    size_t bytes;
    free(train_whole(&usual, &heard, &bytes));
    assert_int_equal(heard.count, STEPS);
    assert_int_equal(heard.checkpoints, 4); /* after steps 2, 4, 6, and the stage */
    for (uint32_t i = 0; i < heard.count; i++) {
        const struct train_event *event = &heard.metrics[i];
        assert_int_equal(event->step, i + 1);
        assert_int_equal(event->steps, STEPS);
        assert_true(event->loss > 0 && event->gradient_norm > 0 && event->learning_rate > 0);
        assert_true(isnan(event->reward) && isnan(event->entropy));
        bool compared = (i + 1) % 3 == 0 || i + 1 == STEPS;
        assert_int_equal(!isnan(event->kl_valid), compared);
        assert_true(!compared || (event->kl_valid > 0 && event->kl_valid_relative > 0));
        assert_true(event->tokens > 6 * 70);
    }
    struct error error = {0};
    struct policy_network *network = network_load(out, &error);
    if (network == NULL)
        fail_msg("%s", error.message);
    assert_string_equal(network->method, "ranker");
    assert_string_equal(network->fingerprint, model->fingerprint);
    assert_int_equal(network->interval, 3);
    assert_non_null(strstr(network->record, "\"seed\":\"1\""));
    assert_non_null(strstr(network->record, "\"data\":\"data.txt\""));
    assert_non_null(strstr(network->record, "\"held_out\":[{"));
    network_release(network);
}

static void require_near(double got, double want, double part, const char *what) {
    if (!(isnan(got) && isnan(want)) && !(fabs(got - want) <= part * fabs(want) + 1e-9))
        fail_msg("%s is %g on ranks and %g on the CPU", what, got, want);
}

/* Rollouts on two ranks, of the CPU or of the chosen backend: other last bits, the same rewards but for them. */
static void test_ranks(void **state) {
    (void)state;
    struct machine machines[] = {usual, usual};
    machines[1].ranks = 2;
    machines[1].backend = chosen_backend();
    machines[1].all_reduce = chosen_backend_all_reduce();
    uint32_t sequences = chosen_backend_share(4, 2), prompt = chosen_backend_share(70, 40);
    struct heard heard[2] = {0};
    for (uint32_t i = 0; i < 2; i++) {
        struct error error = {0};
        struct train_run run = describe(&heard[i]);
        clean();
        train_options_default(&run.options, TRAIN_DISTILLCACHE, false);
        run.options.prompt_least = prompt;
        run.options.prompt_most = prompt + 30;
        run.options.pruned_steps = run.options.local_steps = run.options.parameter_steps = 0;
        run.options.rank_steps = 2;
        run.options.sequences = sequences;
        run.options.future = 12;
        run.options.kl_steps = 3;
        run.options.rollout = 8;
        run.options.students = 3;
        run.options.valid_prompts = 2;
        run.options.valid_rollout = 6;
        run.options.valid_every = 3;
        if (execute(&run, &machines[i], &error) != 0)
            fail_msg("%s", error.message);
    }
    assert_int_equal(heard[0].count, 5);
    assert_int_equal(heard[1].count, 5);
    for (uint32_t i = 0; i < 5; i++) {
        const struct train_event *one = &heard[0].metrics[i], *two = &heard[1].metrics[i];
        assert_true(i < 2 ? one->loss > 0 : one->reward < 0);
        assert_int_equal(two->tokens, one->tokens);
        require_near(two->loss, one->loss, 1e-2, "the loss");
        require_near(two->reward, one->reward, 1e-2, "the reward");
        require_near(two->entropy, one->entropy, 1e-2, "the entropy");
        require_near(two->kl_valid, one->kl_valid, 1e-2, "the held-out KL");
    }
}

/* Threads, few pages and small batches change nothing. */
static void test_same_bytes_anywhere(void **state) {
    (void)state;
    static const struct machine machines[] = {
        {2, 64, 16 << 20, 1, NULL, NULL}, {1, 16, 16 << 20, 1, NULL, NULL}, {2, 300, 400 << 10, 1, NULL, NULL}};
    struct heard heard = {0}, other;
    size_t bytes, again;
    char *expected = train_whole(&usual, &heard, &bytes);
    for (size_t i = 0; i < sizeof machines / sizeof machines[0]; i++) {
        other = (struct heard){0};
        char *found = train_whole(&machines[i], &other, &again);
        assert_int_equal(again, bytes);
        assert_memory_equal(found, expected, bytes);
        for (uint32_t e = 0; e < heard.count; e++)
            assert_same(heard.metrics[e].kl_valid, other.metrics[e].kl_valid);
        free(found);
    }
    free(expected);
}

/* Stopped at every point at which a run can be, with sanitizers at every fifth: the file and the metrics are those of
 * an undisturbed run. */
static void test_resume(void **state) {
    (void)state;
    struct heard whole = {0}, part;
    size_t bytes, again;
    char *expected = train_whole(&usual, &whole, &bytes);
    uint32_t stops = 0;
    for (uint32_t at = 1;; at += sanitized() ? 5 : 1) {
        struct error error = {0};
        part = (struct heard){.stop_at = at};
        struct train_run run = describe(&part);
        clean();
        int code = execute(&run, &usual, &error);
        if (code == 0)
            break; /* it is asked no more often */
        assert_int_equal(code, ERROR_CANCELLED);
        assert_int_equal(access(out, F_OK), -1);
        stops++;
        uint32_t heard_before = part.count;
        part.stop_at = 0;
        run.resume = true;
        if (execute(&run, &usual, &error) != 0)
            fail_msg("stopped at %u: %s", at, error.message);
        char *found = read_bytes(out, &again);
        assert_int_equal(again, bytes);
        assert_memory_equal(found, expected, bytes);
        free(found);
        assert_int_equal(part.count, whole.count);
        for (uint32_t e = heard_before; e < part.count; e++)
            assert_same_metrics(&part.metrics[e], &whole.metrics[e]);
    }
    assert_true(stops > (sanitized() ? 4 : 20));
    free(expected);
}

/* The paper's features take the same way; their means are those of each prompt. */
static void test_paper_features(void **state) {
    (void)state;
    struct heard heard = {0};
    struct error error = {0};
    clean();
    struct train_run run = describe(&heard);
    assert_int_equal(train_options_set(&run.options, "features", "paper", &error), 0);
    run.options.hidden = 8;
    if (execute(&run, &usual, &error) != 0)
        fail_msg("%s", error.message);
    struct policy_network *network = network_load(out, &error);
    assert_non_null(network);
    assert_int_equal(network->shape.features, FEATURES_PAPER);
    assert_true(heard.metrics[STEPS - 1].kl_valid > 0);
    network_release(network);
}

static void assert_resume_fails(struct train_run *run, int code, const char *text) {
    struct error error = {0};
    run->resume = true;
    assert_int_equal(execute(run, &usual, &error), code);
    if (strstr(error.message, text) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", error.message, text);
}

static void test_checkpoint_errors(void **state) {
    (void)state;
    struct heard heard = {0};
    size_t bytes;
    char path[128];
    free(train_whole(&usual, &heard, &bytes));
    struct train_run run = describe(&heard);
    run.options.hidden = 16;
    assert_resume_fails(&run, ERROR_INVALID, "the run was begun with hidden=32, not hidden=16");
    run = describe(&heard);
    snprintf(path, sizeof path, "%s/checkpoint.state", folder);
    char *content = read_bytes(path, &bytes);
    content[bytes / 2] ^= 1;
    for (int cut = 0; cut < 2; cut++) { /* a bit that is wrong, then half a file */
        FILE *file = fopen(path, "wbe");
        assert_int_equal(fwrite(content, 1, cut == 0 ? bytes : bytes / 2, file), cut == 0 ? bytes : bytes / 2);
        fclose(file);
        assert_resume_fails(&run, ERROR_FORMAT, "the checkpoint is not whole");
    }
    free(content);
}

static void test_failures(void **state) {
    (void)state;
    struct heard heard = {0};
    struct error error = {0};
    clean();
    struct train_run run = describe(&heard);
    run.directory = "/nowhere";
    assert_int_equal(execute(&run, &usual, &error), ERROR_IO);
    assert_non_null(strstr(error.message, "/nowhere/"));
    run = describe(&heard);
    run.data = "/nowhere/data.txt";
    assert_int_equal(execute(&run, &usual, &error), ERROR_IO);
    run = describe(&heard);
    run.out = "/nowhere/policy.safetensors";
    assert_int_equal(execute(&run, &usual, &error), ERROR_IO);
    run = describe(&heard);
    run.options.prompt_most = 600;
    assert_int_equal(execute(&run, &usual, &error), ERROR_INVALID);
    assert_non_null(strstr(error.message, "prompt_most: 600"));
    run = describe(&heard);
    struct machine small = usual;
    small.kv_bytes = 24 << 10; /* a page has 16 slots of one head: 100 tokens do not fit */
    assert_int_equal(execute(&run, &small, &error), ERROR_INVALID);
    assert_non_null(strstr(error.message, "that a sequence can have here"));
}

int main(void) {
    const struct CMUnitTest on_device[] = {cmocka_unit_test(test_ranks)}; /* the others are about files */
    if (strcmp(chosen_backend(), "cpu") != 0)
        return cmocka_run_group_tests(on_device, set_up, tear_down);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_events),
        cmocka_unit_test(test_same_bytes_anywhere),
        cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_paper_features),
        cmocka_unit_test(test_checkpoint_errors),
        cmocka_unit_test(test_failures),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
