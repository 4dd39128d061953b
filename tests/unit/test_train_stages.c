/* SPDX-License-Identifier: Apache-2.0
 *
 * Short runs of the stages and methods that learn by reinforcement, on a tiny model: what they report, the same bytes
 * on more threads and few pages, and bit for bit the same when they are stopped and resumed.
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
#include <unistd.h>

#include "policy/budget.h"
#include "policy/train/train.h"
#include "tests/sanitized.h"
#include "tests/unit/tiny_llama.h"

enum { EVENTS_MAX = 64, SETTINGS_MAX = 12 };

static struct model *models[2]; /* every layer global; every second one */
static struct tokenizer *tokenizer;
static char folder[] = "/tmp/distillcache-stages-XXXXXX";
static char out[64];

/* What is run; every case has few steps. */
struct run_case {
    const char *name;
    enum train_method method;
    bool paper;
    const char *settings[SETTINGS_MAX][2];
    uint32_t steps;
    bool rewarded; /* its last stage reports a reward and an entropy */
    bool slides;   /* the model's layers 0 and 2 slide, 1 and 3 are pruned */
};

static const struct run_case cases[] = {
    {"paper", TRAIN_DISTILLCACHE, true, {{"kl_steps", "3"}, {"hidden", "8"}, {"valid_prompts", "1"}}, 3, true, false},
    {"paper, one student, layer", TRAIN_DISTILLCACHE, true,
        {{"kl_steps", "3"}, {"hidden", "8"}, {"students", "1"}, {"scope", "layer"}, {"floor", "0.5"}}, 3, true, false},
    {"rollout8, subsets, summary", TRAIN_DISTILLCACHE, true,
        {{"kl_steps", "3"}, {"hidden", "8"}, {"reward", "rollout8"}, {"sampler", "subset"}, {"temperature", "2"},
            {"scope", "layer"}, {"summary", "1"}, {"interval", "3"}},
        3, true, false},
    {"local", TRAIN_RANKER, false, {{"rank_steps", "0"}, {"local_steps", "3"}}, 3, true, false},
    {"rank, local of the paper's features, subsets", TRAIN_RANKER, false,
        {{"features", "paper"}, {"rank_steps", "1"}, {"local_steps", "2"}, {"sampler", "subset"}}, 3, true, false},
    {"ranking", TRAIN_RANKER, false, {{"rank_steps", "0"}, {"kl_steps", "3"}, {"reward", "ranking"}}, 3, true, false},
    {"foresight", TRAIN_FORESIGHT, false,
        {{"rank_steps", "2"}, {"kl_steps", "2"}, {"hidden", "8"}, {"protect_recent", "20"}, {"valid_prompts", "1"}}, 4,
        true, false},
    {"rlkv", TRAIN_RLKV, false,
        {{"gate_steps", "3"}, {"prompt_least", "100"}, {"prompt_most", "120"}, {"students", "3"}, {"ratios", "0.9"},
            {"valid_prompts", "1"}},
        3, true, false},
    {"content, model", TRAIN_RANKER, false, {{"rank_steps", "1"}, {"kl_steps", "2"}, {"scope", "model"}}, 3, true,
        false},
    {"pruned", TRAIN_RANKER, false, {{"rank_steps", "1"}, {"pruned_steps", "4"}, {"pruned_sequences", "2"}}, 5, false,
        false},
    {"pruned, paper", TRAIN_RANKER, false,
        {{"features", "paper"}, {"hidden", "8"}, {"rank_steps", "1"}, {"pruned_steps", "2"}, {"pruned_sequences", "2"},
            {"kl_steps", "1"}},
        4, true, false},
    {"slides: rank, pruned, parameters", TRAIN_RANKER, false,
        {{"rank_steps", "1"}, {"pruned_steps", "1"}, {"pruned_sequences", "2"}, {"parameter_steps", "2"},
            {"valid_prompts", "1"}},
        4, false, true},
    {"slides: the paper's features, layer", TRAIN_RANKER, false,
        {{"features", "paper"}, {"hidden", "8"}, {"rank_steps", "1"}, {"pruned_steps", "1"}, {"pruned_sequences", "2"},
            {"kl_steps", "2"}, {"scope", "layer"}, {"summary", "1"}, {"valid_prompts", "1"}},
        4, true, true},
    {"slides: local, model", TRAIN_RANKER, false,
        {{"rank_steps", "0"}, {"local_steps", "1"}, {"kl_steps", "2"}, {"scope", "model"}}, 3, true, true},
    {"slides: rlkv", TRAIN_RLKV, false,
        {{"gate_steps", "3"}, {"prompt_least", "100"}, {"prompt_most", "120"}, {"students", "3"}, {"ratios", "0.9"},
            {"valid_prompts", "1"}},
        3, true, true},
};
enum { CASES = sizeof cases / sizeof cases[0] };

struct heard {
    uint32_t count;
    struct train_event metrics[EVENTS_MAX];
    uint32_t asked, stop_at; /* the call of `stopped` that says yes; 0: none */
};

static void listen(void *context, const struct train_event *event) {
    struct heard *heard = context;
    if (event->kind == TRAIN_EVENT_METRICS && heard->count < EVENTS_MAX)
        heard->metrics[heard->count++] = *event;
}

static bool stop(void *context) {
    struct heard *heard = context;
    return ++heard->asked == heard->stop_at;
}

static int set_up(void **state) {
    (void)state;
    struct error error = {0};
    for (int slides = 0; slides < 2; slides++) {
        struct tiny_llama options = tiny_llama_default();
        options.layers = slides ? 4 : options.layers;
        options.window = slides ? 20 : 0;
        char *path = tiny_llama_save(&options);
        models[slides] = model_open(path, &error);
        unlink(path);
        free(path);
        if (models[slides] == NULL)
            return -1;
    }
    tokenizer = tokenizer_create(models[0]->file, &error);
    if (tokenizer == NULL || mkdtemp(folder) == NULL)
        return -1;
    snprintf(out, sizeof out, "%s/policy", folder);
    return 0;
}

static void clean(void) {
    DIR *list = opendir(folder);
    assert_non_null(list);
    for (const struct dirent *entry; (entry = readdir(list)) != NULL;) {
        char path[400];
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (entry->d_name[0] != '.')
            assert_int_equal(unlink(path), 0);
    }
    closedir(list);
}

static int tear_down(void **state) {
    (void)state;
    clean();
    tokenizer_free(tokenizer);
    model_free(models[0]);
    model_free(models[1]);
    return rmdir(folder);
}

static void describe(const struct run_case *of, struct heard *heard, struct train_run *run) {
    static const char *const common[][2] = {{"prompt_least", "70"}, {"prompt_most", "90"}, {"future", "8"},
        {"rollout", "8"}, {"sequences", "3"}, {"students", "2"}, {"warmup_steps", "1"}, {"valid_prompts", "0"},
        {"valid_rollout", "4"}, {"checkpoint_every", "1"}, {"interval", "2"}, {"ratios", "0.5,0.4"},
        {"learning_rate", "0.01"}};
    struct error error = {0};
    *run = (struct train_run){
        .tokenizer = tokenizer, .directory = folder, .out = out, .event = listen, .stopped = stop, .context = heard};
    train_options_default(&run->options, of->method, of->paper);
    for (size_t i = 0; i < sizeof common / sizeof common[0]; i++)
        assert_int_equal(train_options_set(&run->options, common[i][0], common[i][1], &error), 0);
    for (size_t i = 0; i < SETTINGS_MAX && of->settings[i][0] != NULL; i++)
        if (train_options_set(&run->options, of->settings[i][0], of->settings[i][1], &error) != 0)
            fail_msg("%s", error.message);
}

static int execute(
    struct train_run *run, const struct model *model, uint32_t threads, size_t kv_bytes, struct error *error) {
    struct engine_options options = {.backend = {.threads = threads},
        .kv_bytes = kv_bytes,
        .kv_format = KV_F16,
        .batch_rows = 64,
        .poison_free = true};
    run->engine = engine_open(model, &options, error);
    if (run->engine == NULL)
        return error->code;
    run->threads = threads;
    uint32_t pages = kv_cache_pages_free(engine_kv_cache(run->engine));
    int code = train_run(run, error);
    assert_int_equal(kv_cache_pages_free(engine_kv_cache(run->engine)), pages);
    engine_close(run->engine);
    return code;
}

static char *read_bytes(size_t *bytes) {
    FILE *file = fopen(out, "rbe");
    assert_non_null(file);
    char *content = malloc(1 << 20);
    assert_non_null(content);
    *bytes = fread(content, 1, 1 << 20, file);
    fclose(file);
    return content;
}

static char *train(const struct run_case *of, uint32_t threads, size_t kv_bytes, struct heard *heard, size_t *bytes) {
    struct error error = {0};
    struct train_run run;
    describe(of, heard, &run);
    clean();
    if (execute(&run, models[of->slides], threads, kv_bytes, &error) != 0)
        fail_msg("%s: %s", of->name, error.message);
    return read_bytes(bytes);
}

static void assert_same(const struct run_case *of, double a, double b) {
    if (!(a == b || (isnan(a) && isnan(b))))
        fail_msg("%s: %g is not %g", of->name, a, b);
}

static void assert_same_metrics(const struct run_case *of, const struct train_event *a, const struct train_event *b) {
    assert_int_equal(a->step, b->step);
    assert_same(of, a->loss, b->loss);
    assert_same(of, a->reward, b->reward);
    assert_same(of, a->entropy, b->entropy);
    assert_same(of, a->gradient_norm, b->gradient_norm);
    assert_same(of, a->kl_valid, b->kl_valid);
    assert_int_equal(a->tokens, b->tokens);
}

static void test_reports(void **state) {
    (void)state;
    for (int c = 0; c < CASES; c++) {
        struct heard heard = {0}, other = {0};
        size_t bytes, again;
        char *content = train(&cases[c], 1, 16 << 20, &heard, &bytes);
        assert_int_equal(heard.count, cases[c].steps);
        const struct train_event *last = &heard.metrics[heard.count - 1];
        if (!(last->gradient_norm > 0 && last->learning_rate >= 0))
            fail_msg("%s: gradient %g", cases[c].name, last->gradient_norm);
        if (cases[c].rewarded && !(isfinite(last->reward) && last->entropy > 0))
            fail_msg("%s: reward %g, entropy %g", cases[c].name, last->reward, last->entropy);
        char *found = train(&cases[c], 2, 600 << 10, &other, &again); /* threads, few pages */
        assert_int_equal(again, bytes);
        assert_memory_equal(found, content, bytes);
        free(found);
        free(content);
    }
}

/* The seed decides. */
static void test_seeds(void **state) {
    (void)state;
    struct heard heard = {0}, other = {0};
    struct error error = {0};
    struct train_run run;
    size_t bytes;
    free(train(&cases[0], 1, 16 << 20, &heard, &bytes));
    describe(&cases[0], &other, &run);
    run.options.seed = 2;
    clean();
    assert_int_equal(execute(&run, models[0], 1, 16 << 20, &error), 0);
    assert_true(heard.metrics[0].reward != other.metrics[0].reward);
}

/* Stopped at some of the points at which a run can be. */
static void test_resume(void **state) {
    (void)state;
    for (int c = 0; c < CASES; c++) {
        struct heard whole = {0}, part;
        size_t bytes, again;
        char *expected = train(&cases[c], 1, 16 << 20, &whole, &bytes);
        uint32_t step = whole.asked / (sanitized() ? 2 : 6) + 1;
        for (uint32_t at = step / 2 + 1; at <= whole.asked; at += step) {
            struct error error = {0};
            struct train_run run;
            part = (struct heard){.stop_at = at};
            describe(&cases[c], &part, &run);
            clean();
            assert_int_equal(execute(&run, models[cases[c].slides], 1, 16 << 20, &error), ERROR_CANCELLED);
            uint32_t before = part.count;
            part.stop_at = 0;
            run.resume = true;
            if (execute(&run, models[cases[c].slides], 1, 16 << 20, &error) != 0)
                fail_msg("%s, stopped at %u: %s", cases[c].name, at, error.message);
            char *found = read_bytes(&again);
            assert_int_equal(again, bytes);
            if (memcmp(found, expected, bytes) != 0)
                fail_msg("%s, stopped at %u: another result", cases[c].name, at);
            free(found);
            assert_int_equal(part.count, whole.count);
            for (uint32_t e = before; e < part.count; e++)
                assert_same_metrics(&cases[c], &part.metrics[e], &whole.metrics[e]);
        }
        free(expected);
    }
}

/* What layers that slide have is not learned: of gates 1/2, of a network of statistics that of their neighbours. */
static void test_sliding_layers(void **state) {
    (void)state;
    static const struct run_case of = {"slides: statistics", TRAIN_RANKER, false,
        {{"content", "0"}, {"rank_steps", "2"}, {"parameter_steps", "2"}, {"scope", "layer"}}, 4, false, true};
    struct heard heard = {0}, other = {0};
    struct error error = {0};
    size_t bytes;
    free(train(&of, 1, 16 << 20, &heard, &bytes));
    struct policy_network *network = network_load(out, &error);
    assert_non_null(network);
    uint32_t layer = network->shape.kv_heads * network_inputs_count(&network->shape);
    assert_int_equal(network->shape.layers, 4);
    assert_memory_equal(network->skip, network->skip + layer, layer * sizeof(float));
    assert_true(memcmp(network->skip + layer, network->skip + 3 * (size_t)layer, layer * sizeof(float)) != 0);
    const float *budgets = network->layer_budgets;
    assert_true(budgets[0] == budgets[1] && budgets[1] != budgets[3]);
    assert_true(fabsf(budgets[1] + budgets[3] - 2) < 1e-5f && fabsf(budgets[2] - 1) < 1e-5f);
    network_release(network);
    for (int c = 0; c < CASES; c++) {
        if (!cases[c].slides || cases[c].method != TRAIN_RLKV)
            continue;
        free(train(&cases[c], 1, 16 << 20, &other, &bytes));
        struct head_gates *gates = head_gates_load(out, &error);
        assert_non_null(gates);
        for (uint32_t h = 0; h < gates->layers * gates->kv_heads; h++)
            assert_true((gates->values[h] == 0.5f) == (h / gates->kv_heads % 2 == 0));
        head_gates_release(gates);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reports),
        cmocka_unit_test(test_seeds),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_sliding_layers),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
