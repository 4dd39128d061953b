/* SPDX-License-Identifier: Apache-2.0
 *
 * Policies and their settings: names, options and messages, what each policy needs and of which stages it is made.
 */
#include "policy/budget.h"
#include "policy/policy.h"
#include "tests/unit/tiny_network.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* What a network with all inputs of its features needs. */
#define NETWORK (STATISTIC_SUM | STATISTIC_SQUARED | STATISTIC_ENTROPY | STATISTIC_CONTENT)

static struct policy_settings parse(const char *text) {
    struct policy_settings settings;
    struct error error = {0};
    if (policy_settings_parse(text, &settings, &error) != 0)
        fail_msg("%s: %s", text, error.message);
    return settings;
}

/* Fails with this code and a message that has all the words (NULL at the end). */
static void expect_refused(const char *text, int code, const char *const *words) {
    struct policy_settings settings;
    struct error error = {0};
    assert_int_equal(policy_settings_parse(text, &settings, &error), code);
    assert_int_equal(error.code, code);
    assert_null(settings.gates);
    for (; *words != NULL; words++)
        if (strstr(error.message, *words) == NULL)
            fail_msg("%s: no \"%s\" in: %s", text, *words, error.message);
}

#define EXPECT_INVALID(text, ...) expect_refused(text, ERROR_INVALID, (const char *const[]){__VA_ARGS__, NULL})

static void test_registry(void **state) {
    (void)state;
    static const char *const names = "full, random, streaming, h2o, h2o_mean, scissorhands, tova, snapkv, pyramidkv, "
                                     "adakv, criticalkv, keydiff, knorm, keyformer, expected_attention, cake, laprox, "
                                     "laprox_head, restkv, rlkv, ranker, distillcache, hybrid";
    assert_string_equal(policy_names(), names);
    assert_int_equal(policy_count(), 23);
    assert_null(policy_at(policy_count()));
    assert_null(policy_find("h2"));
    assert_null(policy_find(""));
    for (uint32_t i = 0; i < policy_count(); i++)
        assert_ptr_equal(policy_find(policy_at(i)->name), policy_at(i));
}

static void test_defaults(void **state) {
    (void)state;
    for (uint32_t i = 0; i < policy_count(); i++) {
        struct policy_settings settings;
        policy_settings_default(policy_at(i), &settings);
        assert_int_equal(policy_settings_check(&settings, NULL), 0);
        assert_true(settings.ratio == (i == 0 ? 1 : 0.25));
        assert_int_equal(settings.minimum, 32);
    }
    assert_int_equal(parse("snapkv").interval, 1);
    assert_int_equal(parse("criticalkv").interval, 16);
    assert_int_equal(parse("laprox").interval, 16);
    assert_int_equal(parse("restkv").interval, 16);
    assert_int_equal(parse("expected_attention").interval, 16);
    assert_int_equal(parse("adakv").scope, SCOPE_LAYER);
    assert_int_equal(parse("tova").scope, SCOPE_LAYER);
    assert_int_equal(parse("laprox_head").scope, SCOPE_MODEL);
    assert_int_equal(parse("rlkv").sinks, 16);
    assert_int_equal(parse("streaming").sinks, 4);
    assert_int_equal(parse("scissorhands").recent_tokens, 10);
    for (int i = 0; i < 2; i++) {
        struct policy_settings settings = parse(i == 0 ? "distillcache" : "ranker");
        assert_int_equal(settings.scope, SCOPE_LAYER);
        assert_true(settings.floor == 0.75f && !settings.summary && settings.network == NULL);
        assert_int_equal(settings.interval, 16);
    }
}

static void test_options_are_set(void **state) {
    (void)state;
    struct policy_settings s = parse("snapkv,ratio=0.125,minimum=8,interval=4,prefill_prune_every=512,protect_recent=3,"
                                     "protect_sinks=2,scope=model,floor=0.5,window=16,kernel=5,decode=keep");
    assert_true(s.ratio == 0.125);
    assert_int_equal(s.minimum, 8);
    assert_int_equal(s.interval, 4);
    assert_int_equal(s.prefill_prune_every, 512);
    assert_int_equal(s.protect_recent, 3);
    assert_int_equal(s.protect_sinks, 2);
    assert_int_equal(s.scope, SCOPE_MODEL);
    assert_true(s.floor == 0.5f);
    assert_int_equal(s.window, 16);
    assert_int_equal(s.kernel, 5);
    assert_true(s.frozen_prompt);
    assert_false(parse("snapkv,decode=slide").frozen_prompt);
    assert_true(parse("streaming,positions=cache").cache_positions);
    assert_true(parse("random,seed=18446744073709551615").seed == UINT64_MAX);
    assert_true(parse("cake,gamma=1e2,tau1=2,tau2=.5").tau2 == 0.5f);
    assert_ptr_equal(parse("hybrid,base=knorm").base, policy_find("knorm"));
    assert_ptr_equal(parse("hybrid,base=ranker").base, policy_find("ranker"));
    assert_true(parse("streaming,summary=1").summary && parse("streaming,summary=true").summary);
    assert_false(parse("streaming,summary=0").summary || parse("streaming,summary=1,summary=false").summary);
}

/* Of what sets the size, the last counts. */
static void test_last_size_counts(void **state) {
    (void)state;
    struct policy_settings s = parse("h2o,tokens=100,ratio=0.5");
    assert_int_equal(s.tokens, 0);
    assert_int_equal(policy_budget(&s, 1000), 500);
    s = parse("h2o,ratio=0.5,tokens=100");
    assert_int_equal(policy_budget(&s, 1000), 100);
    assert_true(isnan(parse("rlkv,ratio=0.5").sparsity));
    assert_true(isnan(parse("rlkv,tokens=200").sparsity));
    assert_true(isnan(parse("rlkv,sparsity=auto").sparsity));
    assert_true(parse("rlkv,ratio=0.5,sparsity=0.75").sparsity == 0.75f);
    assert_true(parse("rlkv").sparsity == 0.5f);
}

static void test_names_are_checked(void **state) {
    (void)state;
    EXPECT_INVALID("snapk", "'snapk'", policy_names());
    EXPECT_INVALID("", "''", policy_names());
    EXPECT_INVALID("snapkv,windw=3", "snapkv", "'windw'", "window", "kernel", "decode", "prefill_prune_every");
    EXPECT_INVALID("streaming,window=3", "'window'", "sinks", "positions");
    EXPECT_INVALID("snapkv,window", "'window'", "key=value");
    EXPECT_INVALID("snapkv,", "key=value");
    EXPECT_INVALID("snapkv:file.json", "snapkv takes no file", "file.json");
}

static void test_values_are_checked(void **state) {
    (void)state;
    EXPECT_INVALID("snapkv,window=0", "window", "'0'", "1 to 256");
    EXPECT_INVALID("snapkv,window=257", "'257'");
    EXPECT_INVALID("snapkv,window=-1", "'-1'", "whole number");
    EXPECT_INVALID("snapkv,window=1.5", "'1.5'");
    EXPECT_INVALID("snapkv,window= 2", "' 2'");
    EXPECT_INVALID("snapkv,window=99999999999999999999", "window");
    EXPECT_INVALID("snapkv,window=4294967297", "window"); /* not 1 */
    EXPECT_INVALID("snapkv,kernel=6", "kernel", "'6'", "odd");
    EXPECT_INVALID("snapkv,ratio=0", "ratio", "'0'", "above 0", "at most 1");
    EXPECT_INVALID("snapkv,ratio=1.01", "'1.01'");
    EXPECT_INVALID("snapkv,ratio=nan", "'nan'");
    EXPECT_INVALID("snapkv,ratio=0x1p-2", "ratio");
    EXPECT_INVALID("snapkv,ratio=", "''");
    EXPECT_INVALID("snapkv,floor=1.5", "floor", "0 to 1");
    EXPECT_INVALID("snapkv,scope=heads", "scope", "'heads'", "head, layer or model");
    EXPECT_INVALID("snapkv,decode=kept", "decode", "slide or keep");
    EXPECT_INVALID("streaming,positions=true", "original or cache");
    EXPECT_INVALID("hybrid,base=cake", "base", "'cake'", "h2o, snapkv, streaming, knorm, distillcache or ranker");
    EXPECT_INVALID("h2o,summary=2", "summary", "'2'", "0 or 1");
    EXPECT_INVALID("h2o,summary=yes", "'yes'");
    EXPECT_INVALID("scissorhands,history=513", "history", "512");
    EXPECT_INVALID("restkv,smoothing=1e-60", "smoothing", "above 0");
    EXPECT_INVALID("rlkv,sparsity=nan", "sparsity", "auto");
    EXPECT_INVALID("random,seed=18446744073709551616", "seed");
}

/* Whatever stands in a value, a message is one line of ASCII and short. */
static void test_messages_are_clean(void **state) {
    (void)state;
    EXPECT_INVALID("snapkv,window=a\n\x1b[31m\xff", "'a??[31m?'");
    char text[4096] = "snapkv,window=";
    memset(text + strlen(text), 'x', 4000);
    EXPECT_INVALID(text, "xxx...'", "must be a whole number from 1 to 256");
    memset(text, 'y', 4000);
    EXPECT_INVALID(text, "yyy...'", policy_names());
}

static void test_the_whole_is_checked(void **state) {
    (void)state;
    EXPECT_INVALID("streaming,tokens=4", "tokens is 4", "4 first", "streaming");
    parse("streaming,tokens=5");
    EXPECT_INVALID("scissorhands,tokens=9", "10 most recent");
    EXPECT_INVALID("knorm,tokens=10,protect_sinks=5,protect_recent=6", "5 first", "6 most recent");
    parse("knorm,tokens=11,protect_sinks=5,protect_recent=6");
    parse("h2o,tokens=1");
    parse("snapkv,tokens=1");
    EXPECT_INVALID("expected_attention,sinks=3", "sinks is 3", "at least 4");
    EXPECT_INVALID("knorm,tokens=1,summary=1", "summary is 1", "tokens 1", "at least 2");
    EXPECT_INVALID("knorm,minimum=1,summary=1", "minimum 1", "at least 2");
    EXPECT_INVALID("rlkv,sinks=0,recent_tokens=1,summary=1", "sinks and recent_tokens 1");
    EXPECT_INVALID("streaming,tokens=5,summary=1", "tokens is 5", "summary slot");
    parse("streaming,tokens=6,summary=1");
    parse("knorm,tokens=2,minimum=1,summary=1");
    parse("knorm,minimum=1,ratio=1,summary=1");
    struct policy_settings settings = parse("snapkv");
    struct error error;
    settings.window = 0; /* as a program may have set it */
    assert_int_equal(policy_settings_check(&settings, &error), ERROR_INVALID);
    assert_non_null(strstr(error.message, "window"));
    settings = parse("snapkv");
    settings.ratio = NAN;
    assert_int_equal(policy_settings_check(&settings, &error), ERROR_INVALID);
    settings.policy = NULL;
    assert_int_equal(policy_settings_check(&settings, &error), ERROR_INVALID);
}

/* A failed set leaves what was there. */
static void test_failures_change_nothing(void **state) {
    (void)state;
    struct policy_settings settings = parse("snapkv,window=16,tokens=40"), before = settings;
    assert_int_equal(policy_settings_set(&settings, "window", "0", false, NULL), ERROR_INVALID);
    assert_int_equal(policy_settings_set(&settings, "ratio", "2", false, NULL), ERROR_INVALID);
    assert_int_equal(policy_settings_set(&settings, "scope", "x", false, NULL), ERROR_INVALID);
    assert_memory_equal(&settings, &before, sizeof settings);
}

/* ---- gates ---- */

static void write_file(char *name, const char *text) {
    int descriptor = mkstemp(name);
    assert_true(descriptor >= 0);
    assert_int_equal(write(descriptor, text, strlen(text)), (ssize_t)strlen(text));
    close(descriptor);
}

static void test_gate_files(void **state) {
    (void)state;
    char name[] = "/tmp/test_policy_gates_XXXXXX", text[128];
    write_file(name, "{\"model\": \"any\", \"gates\": [[0, 0.5], [1, 0.25], [0.125, 1]]}");
    snprintf(text, sizeof text, "rlkv:%s,sparsity=0.25", name);
    struct policy_settings settings = parse(text), copy;
    assert_non_null(settings.gates);
    assert_int_equal(settings.gates->layers, 3);
    assert_int_equal(settings.gates->kv_heads, 2);
    assert_true(settings.gates->values[2] == 1 && settings.gates->values[4] == 0.125f);
    assert_int_equal(policy_needs(&settings, true), 0);
    policy_settings_copy(&copy, &settings);
    assert_int_equal(settings.gates->references, 2);
    policy_settings_release(&settings);
    assert_null(settings.gates);
    assert_true(copy.gates->values[1] == 0.5f);
    snprintf(text, sizeof text, "gates=%s", name);
    assert_int_equal(policy_settings_set(&copy, "gates", name, true, NULL), 0); /* replaces, and drops the old ones */
    assert_int_equal(copy.gates->references, 1);
    policy_settings_release(&copy);
    policy_settings_release(&copy); /* nothing left to drop */

    settings = parse("hybrid");
    struct error error;
    assert_int_equal(policy_settings_set(&settings, "gates", name, false, &error), ERROR_INVALID);
    assert_non_null(strstr(error.message, "cannot name a file"));
    snprintf(text, sizeof text, "rlkv:%s,sparsity=7", name); /* fails after the file was read */
    EXPECT_INVALID(text, "sparsity");
    unlink(name);
    snprintf(text, sizeof text, "rlkv:%s", name);
    expect_refused(text, ERROR_IO, (const char *const[]){"gates", name, NULL});
    expect_refused("rlkv:/dev/null", ERROR_IO, (const char *const[]){"regular file", NULL});
    expect_refused("rlkv:/tmp", ERROR_IO, (const char *const[]){"regular file", NULL});
}

/* ---- networks ---- */

/* A network of 3 layers of 2 heads of width 16 in a file; model: of that shape. */
static char network_file[96], network_folder[64];
static const struct policy_model model = {
    .fingerprint = "0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f",
    .layers = 3,
    .kv_heads = 2,
    .head_dim = 16,
};

static int set_up_networks(void **state) {
    (void)state;
    for (int i = 0; i < 2; i++) {
        enum network_features features = i == 0 ? FEATURES_CONTENT : FEATURES_PAPER;
        struct network_shape shape = tiny_network_shape(features, 3, 2, 16);
        struct policy_network *network = tiny_network_create(&shape, 1);
        network->scope = SCOPE_MODEL;
        network->floor = 0.5f;
        network->interval = 7;
        network->protect_recent = 3;
        network->protect_sinks = 2;
        if (i == 0)
            tiny_folder_create(network_folder);
        tiny_network_ship(network, network_folder, model.fingerprint, i == 0 ? "distillcache" : "ranker");
    }
    snprintf(network_file, sizeof network_file, "%s/network", network_folder);
    struct network_shape shape = tiny_network_shape(FEATURES_CONTENT, 3, 2, 16);
    struct policy_network *network = tiny_network_create(&shape, 2);
    network->interval = 9;
    int failed = network_save(network, network_file, NULL);
    network_release(network);
    return failed;
}

static int remove_networks(void **state) {
    (void)state;
    tiny_folder_remove(network_folder);
    return 0;
}

static struct policy_settings parse_with_file(const char *format) {
    char text[256];
    snprintf(text, sizeof text, format, network_file);
    return parse(text);
}

static void expect_defaults(const struct policy_settings *s, enum policy_scope scope, float floor, uint32_t interval,
    bool summary, uint32_t recent, uint32_t sinks) {
    assert_int_equal(s->scope, scope);
    assert_true(s->floor == floor);
    assert_int_equal(s->interval, interval);
    assert_int_equal(s->summary, summary);
    assert_int_equal(s->protect_recent, recent);
    assert_int_equal(s->protect_sinks, sinks);
}

static void test_network_files(void **state) {
    (void)state;
    struct error error;
    char text[256];
    struct policy_settings settings = parse_with_file("distillcache:%s,ratio=0.1,floor=0.25"), copy;
    assert_non_null(settings.network);
    expect_defaults(&settings, SCOPE_LAYER, 0.25f, 9, true, 0, 0);
    policy_settings_copy(&copy, &settings);
    assert_int_equal(settings.network->references, 2);
    policy_settings_release(&settings);
    assert_null(settings.network);
    assert_int_equal(copy.network->references, 1);
    policy_settings_describe(&copy, text, sizeof text);
    assert_string_equal(
        text, "distillcache, ratio 0.1, interval 9, floor 0.25, summary 1, network distillcache content");
    assert_int_equal(policy_needs(&copy, true), NETWORK);
    policy_settings_release(&copy);
    policy_settings_release(&copy);
    /* What was named before the file counts, too. */
    settings = parse_with_file("ranker,interval=2,summary=0,network=%s");
    expect_defaults(&settings, SCOPE_LAYER, 0.75f, 2, false, 0, 0);
    assert_int_equal(policy_settings_set(&settings, "network", network_file, false, &error), ERROR_INVALID);
    assert_non_null(strstr(error.message, "cannot name a file"));
    assert_int_equal(policy_settings_set(&settings, "network", network_file, true, &error), 0); /* drops the old one */
    policy_settings_release(&settings);
    settings = parse_with_file("hybrid,base=distillcache,network=%s");
    assert_int_equal(settings.network->references, 1);
    policy_settings_release(&settings);
    snprintf(text, sizeof text, "ranker:%s,interval=0", network_file); /* fails after the file was read */
    EXPECT_INVALID(text, "interval");
    EXPECT_INVALID("h2o:file", "takes no file");
    expect_refused("ranker:/tmp/none", ERROR_IO, (const char *const[]){"option network", "/tmp/none", NULL});
    expect_refused("distillcache:/dev/null", ERROR_IO, (const char *const[]){"regular file", NULL});
}

static void test_resolve(void **state) {
    (void)state;
    struct error error;
    struct policy_model other = model;
    bool foreign = true;
    setenv("DISTILLCACHE_POLICIES", network_folder, 1);
    struct policy_settings settings = parse("distillcache,interval=4"), second = parse("ranker");
    assert_int_equal(policy_settings_resolve(&settings, &model, &foreign, &error), 0);
    assert_false(foreign);
    assert_int_equal(settings.network->shape.features, FEATURES_CONTENT);
    expect_defaults(&settings, SCOPE_MODEL, 0.5f, 4, true, 3, 2);
    /* A change by name after that is not taken back. */
    assert_int_equal(policy_settings_set(&settings, "scope", "head", false, NULL), 0);
    assert_int_equal(policy_settings_resolve(&settings, &model, NULL, &error), 0);
    expect_defaults(&settings, SCOPE_HEAD, 0.5f, 4, true, 3, 2);
    assert_int_equal(policy_settings_resolve(&second, &model, &foreign, &error), 0);
    assert_int_equal(second.network->shape.features, FEATURES_PAPER);
    assert_int_equal(policy_needs(&second, false), NETWORK | STATISTIC_STANDARD);
    /* Another model's: what reads statistics alone is carried over to another shape. */
    other.fingerprint = "abcd";
    other.layers = 7;
    assert_int_equal(policy_settings_resolve(&second, &other, &foreign, &error), 0);
    assert_true(foreign);
    assert_int_equal(second.network->shape.layers, 7);
    assert_int_equal(policy_settings_fit(&second, &other, &error), 0);
    assert_int_equal(policy_settings_fit(&second, &model, &error), ERROR_UNSUPPORTED);
    policy_settings_release(&second);
    other.layers = model.layers;
    assert_int_equal(policy_settings_resolve(&settings, &other, &foreign, &error), 0);
    assert_true(foreign);
    other.head_dim = 32;
    assert_int_equal(policy_settings_resolve(&settings, &other, &foreign, &error), ERROR_UNSUPPORTED);
    assert_non_null(strstr(error.message, "width 16, this model has 3 of 2 of 32"));
    policy_settings_release(&settings);
    settings = parse("distillcache");
    assert_int_equal(policy_settings_resolve(&settings, &other, &foreign, &error), ERROR_IO);
    assert_non_null(strstr(error.message, "policy distillcache"));
    assert_non_null(strstr(error.message, "trained for this model"));
    /* Who wants none gets none. */
    settings = parse("h2o");
    assert_int_equal(policy_settings_resolve(&settings, &model, &foreign, &error), 0);
    assert_null(settings.network);
    settings = parse("distillcache,ratio=1");
    assert_false(policy_settings_want_network(&settings));
    assert_int_equal(policy_settings_resolve(&settings, &other, &foreign, &error), 0);
    assert_null(settings.network);
    unsetenv("DISTILLCACHE_POLICIES");
}

/* What the network wants may not go with the budget. */
static void test_resolve_checks(void **state) {
    (void)state;
    struct error error;
    setenv("DISTILLCACHE_POLICIES", network_folder, 1);
    struct policy_settings settings = parse("distillcache,tokens=5"); /* 2 sinks, 3 recent, a summary */
    assert_int_equal(policy_settings_resolve(&settings, &model, NULL, &error), ERROR_INVALID);
    assert_non_null(strstr(error.message, "tokens is 5"));
    policy_settings_release(&settings);
    settings = parse("distillcache,tokens=5,protect_sinks=0");
    assert_int_equal(policy_settings_resolve(&settings, &model, NULL, &error), 0);
    policy_settings_release(&settings);
    unsetenv("DISTILLCACHE_POLICIES");
}

/* Another base takes the network that ships for it, but keeps a file that was named. */
static void test_network_of_a_base(void **state) {
    (void)state;
    setenv("DISTILLCACHE_POLICIES", network_folder, 1);
    struct policy_settings settings = parse("hybrid,base=distillcache");
    assert_true(policy_settings_want_network(&settings));
    assert_int_equal(policy_settings_resolve(&settings, &model, NULL, NULL), 0);
    assert_int_equal(settings.network->shape.features, FEATURES_CONTENT);
    assert_int_equal(policy_settings_set(&settings, "base", "ranker", false, NULL), 0);
    assert_null(settings.network);
    assert_int_equal(policy_settings_resolve(&settings, &model, NULL, NULL), 0);
    assert_int_equal(settings.network->shape.features, FEATURES_PAPER);
    assert_int_equal(policy_settings_set(&settings, "base", "h2o", false, NULL), 0);
    assert_null(settings.network);
    assert_false(policy_settings_want_network(&settings));
    policy_settings_release(&settings);
    settings = parse_with_file("hybrid,network=%s,base=ranker");
    assert_non_null(settings.network);
    policy_settings_release(&settings);
    unsetenv("DISTILLCACHE_POLICIES");
}

/* ---- what a policy is made of ---- */

struct made_of {
    const char *text;
    uint32_t needs_first, needs;
    uint32_t fresh;
    enum score_stage_kind kinds[6]; /* up to STAGE_KIND_COUNT */
};

#define END STAGE_KIND_COUNT
static const struct made_of policies_made_of[] = {
    {"full", 0, 0, 0, {END}},
    {"random", 0, 0, 0, {STAGE_RANDOM, STAGE_PROTECT, END}},
    {"streaming", 0, 0, 0, {STAGE_POSITION, STAGE_PROTECT, END}},
    {"h2o", STATISTIC_SUM, STATISTIC_SUM, 0, {STAGE_SUM, STAGE_PROTECT, END}},
    {"h2o_mean", STATISTIC_SUM, STATISTIC_SUM, 0, {STAGE_SUM_PER_QUERY, STAGE_PROTECT, END}},
    {"scissorhands,history=300", STATISTIC_ABOVE, STATISTIC_ABOVE, 300, {STAGE_ABOVE, STAGE_PROTECT, END}},
    {"tova", STATISTIC_WINDOW, STATISTIC_WINDOW, 1, {STAGE_WINDOW_SUM, STAGE_LAYER_MEAN, STAGE_PROTECT, END}},
    {"snapkv,window=20", STATISTIC_WINDOW, STATISTIC_WINDOW, 20,
        {STAGE_WINDOW_SUM, STAGE_PROTECT, STAGE_POOL_MAX, END}},
    {"pyramidkv", STATISTIC_WINDOW, STATISTIC_WINDOW, 32, {STAGE_WINDOW_SUM, STAGE_PROTECT, STAGE_POOL_MAX, END}},
    {"adakv", STATISTIC_WINDOW, STATISTIC_WINDOW, 32, {STAGE_WINDOW_SUM, STAGE_PROTECT, STAGE_POOL_MAX, END}},
    {"criticalkv", STATISTIC_WINDOW | STATISTIC_OUTPUT_NORM, STATISTIC_WINDOW | STATISTIC_OUTPUT_NORM, 32,
        {STAGE_WINDOW_SUM, STAGE_PROTECT, STAGE_POOL_MAX, STAGE_PROTECT_BEST, STAGE_TIMES_OUTPUT_NORM, END}},
    {"keydiff", 0, 0, 0, {STAGE_KEY_DIFFERENCE, STAGE_PROTECT, END}},
    {"knorm", 0, 0, 0, {STAGE_KEY_NORM, STAGE_PROTECT, END}},
    {"keyformer", STATISTIC_NOISY, STATISTIC_NOISY, 0, {STAGE_NOISY, STAGE_PROTECT, END}},
    {"expected_attention", STATISTIC_MOMENTS, STATISTIC_MOMENTS, 0,
        {STAGE_EXPECTED_ATTENTION, STAGE_TIMES_VALUE_NORM, STAGE_PROTECT, END}},
    {"cake", STATISTIC_WINDOW | STATISTIC_HEAD_WINDOW, STATISTIC_WINDOW, 32, {STAGE_WINDOW_SPREAD, STAGE_PROTECT, END}},
    {"laprox", STATISTIC_HEAD_WINDOW | STATISTIC_OUTPUTS, STATISTIC_HEAD_WINDOW | STATISTIC_OUTPUTS, 32,
        {STAGE_LAPROX, STAGE_PROTECT, END}},
    {"laprox_head", STATISTIC_HEAD_WINDOW | STATISTIC_OUTPUTS, STATISTIC_HEAD_WINDOW | STATISTIC_OUTPUTS, 32,
        {STAGE_LAPROX_HEAD, STAGE_PROTECT, END}},
    {"restkv", STATISTIC_HEAD_WINDOW | STATISTIC_OUTPUTS | STATISTIC_WINDOW,
        STATISTIC_HEAD_WINDOW | STATISTIC_OUTPUTS | STATISTIC_WINDOW, 32,
        {STAGE_DROP_ERROR, STAGE_PROTECT, STAGE_POOL_ADAPTIVE, END}},
    {"rlkv", STATISTIC_WINDOW, 0, 32, {STAGE_POSITION, STAGE_PROTECT, END}},
    {"hybrid", STATISTIC_SUM | STATISTIC_WINDOW, STATISTIC_SUM, 32, {STAGE_SUM, STAGE_PROTECT, END}},
    {"hybrid,base=snapkv", STATISTIC_WINDOW, STATISTIC_WINDOW, 32,
        {STAGE_WINDOW_SUM, STAGE_PROTECT, STAGE_POOL_MAX, END}},
    {"hybrid,base=streaming,window=8", STATISTIC_WINDOW, 0, 8, {STAGE_POSITION, STAGE_PROTECT, END}},
    {"hybrid,base=knorm", STATISTIC_WINDOW, 0, 32, {STAGE_KEY_NORM, STAGE_PROTECT, END}},
    /* The network is not known yet: what the default one needs. */
    {"distillcache", NETWORK, NETWORK, 0, {STAGE_NETWORK, STAGE_LOG_SOFTMAX, STAGE_PROTECT, END}},
    {"ranker,scope=head", NETWORK, NETWORK, 0, {STAGE_NETWORK, STAGE_PROTECT, END}},
    {"ranker,scope=model", NETWORK, NETWORK, 0, {STAGE_NETWORK, STAGE_LOG_SOFTMAX, STAGE_PROTECT, END}},
    {"hybrid,base=ranker", NETWORK | STATISTIC_WINDOW, NETWORK, 32, {STAGE_NETWORK, STAGE_PROTECT, END}},
    /* A summary slot needs the sum of every policy. */
    {"streaming,summary=1", STATISTIC_SUM, STATISTIC_SUM, 0, {STAGE_POSITION, STAGE_PROTECT, END}},
    {"snapkv,summary=1", STATISTIC_WINDOW | STATISTIC_SUM, STATISTIC_WINDOW | STATISTIC_SUM, 32,
        {STAGE_WINDOW_SUM, STAGE_PROTECT, STAGE_POOL_MAX, END}},
    {"knorm,summary=1,ratio=1", 0, 0, 0, {END}},
    {"full,summary=1", 0, 0, 0, {END}},
    /* Nothing is evicted: nothing is needed. */
    {"h2o,ratio=1", 0, 0, 0, {END}},
    {"rlkv,sparsity=0", 0, 0, 0, {END}},
};

static void test_needs_and_stages(void **state) {
    (void)state;
    const uint32_t over_all_queries =
        STATISTIC_SUM | STATISTIC_SQUARED | STATISTIC_ENTROPY | STATISTIC_NOISY | STATISTIC_MOMENTS;
    for (size_t i = 0; i < sizeof policies_made_of / sizeof policies_made_of[0]; i++) {
        const struct made_of *expected = &policies_made_of[i];
        struct policy_settings settings = parse(expected->text);
        struct score_stage stages[SCORE_STAGES_MAX];
        uint32_t count = policy_stages(&settings, stages);
        assert_int_equal(policy_needs(&settings, true), expected->needs_first);
        assert_int_equal(policy_needs(&settings, false), expected->needs);
        assert_int_equal(policy_fresh_tokens(&settings), expected->fresh);
        assert_int_equal(policy_prefix_needs(&settings), expected->needs_first & over_all_queries);
        assert_int_equal(policy_settings_keep_all(&settings), expected->kinds[0] == END);
        assert_int_equal(expected->kinds[count], END);
        for (uint32_t s = 0; s < count; s++)
            assert_int_equal(stages[s].kind, expected->kinds[s]);
    }
    struct policy_settings absolute = parse("h2o,ratio=1,tokens=64");
    assert_false(policy_settings_keep_all(&absolute));
}

static void test_stage_parameters(void **state) {
    (void)state;
    struct score_stage stages[SCORE_STAGES_MAX];
    struct policy_settings s = parse("snapkv,kernel=9");
    policy_stages(&s, stages);
    assert_int_equal(stages[2].n, 9);
    s = parse("criticalkv");
    policy_stages(&s, stages);
    assert_true(stages[4].x == 1e-4f);
    s = parse("cake,gamma=3");
    policy_stages(&s, stages);
    assert_true(stages[0].x == 3);
    s = parse("restkv,smoothing=0.25");
    policy_stages(&s, stages);
    assert_true(stages[0].x == 0.25f);
    s = parse("expected_attention,epsilon=0.5,future=100");
    policy_stages(&s, stages);
    assert_true(stages[0].x == 0.5f && stages[0].n == 100);
}

static void test_protection_options(void **state) {
    (void)state;
    uint32_t sinks, recent_from;
    struct policy_settings s = parse("h2o,recent=0.3");
    policy_protection(&s, 100, 10, &sinks, &recent_from);
    assert_int_equal(sinks, 0);
    assert_int_equal(recent_from, 97); /* heavy floor(0.7 * 10) */
    s = parse("streaming,protect_sinks=9,protect_recent=20");
    policy_protection(&s, 100, 50, &sinks, &recent_from);
    assert_int_equal(sinks, 9);
    assert_int_equal(recent_from, 80);
    policy_protection(&s, 15, 50, &sinks, &recent_from);
    assert_int_equal(recent_from, 0);
    s = parse("snapkv,protect_recent=3");
    policy_protection(&s, 100, 50, &sinks, &recent_from);
    assert_int_equal(recent_from, 75); /* the larger counts */
    s = parse("hybrid");
    policy_protection(&s, 100, BUDGET_ALL, &sinks, &recent_from); /* a head that keeps everything */
    assert_int_equal(recent_from, 0);
    s = parse("rlkv");
    policy_protection(&s, 1000, 80, &sinks, &recent_from);
    assert_int_equal(sinks, 16);
    assert_int_equal(recent_from, 1000);
}

static void test_descriptions(void **state) {
    (void)state;
    static const char *const cases[][2] = {
        {"snapkv", "snapkv, ratio 0.25, window 32, kernel 7, decode slide"},
        {"snapkv,tokens=100,interval=4,ratio=0.1", "snapkv, ratio 0.1, interval 4, window 32, kernel 7, decode slide"},
        {"h2o,tokens=100,scope=layer", "h2o, tokens 100, scope layer, recent 0.5"},
        {"full", "full"},
        {"rlkv", "rlkv, sinks 16, recent_tokens 64, sparsity 0.5, gates from attention"},
        {"distillcache,interval=8", "distillcache, ratio 0.25, interval 8, network of the model"},
        {"rlkv,ratio=0.3", "rlkv, ratio 0.3, sinks 16, recent_tokens 64, sparsity auto, gates from attention"},
    };
    char text[256];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct policy_settings settings = parse(cases[i][0]);
        policy_settings_describe(&settings, text, sizeof text);
        assert_string_equal(text, cases[i][1]);
    }
    struct policy_settings settings = parse("snapkv");
    char *small = malloc(10); /* of exactly that size, so that a sanitizer sees a byte too many */
    policy_settings_describe(&settings, small, 10);
    assert_string_equal(small, "snapkv, r");
    free(small);
}

/* What the table says of a value can be set again, and gives the same. */
static void test_values_read_back(void **state) {
    (void)state;
    for (uint32_t p = 0; p < policy_count(); p++)
        for (uint32_t i = 0; i < policy_options_count(); i++) {
            struct policy_settings settings, before;
            char value[64], allowed[128];
            if (!policy_option_applies(i, policy_at(p)) || strcmp(policy_option_name(i), "gates") == 0 ||
                strcmp(policy_option_name(i), "network") == 0)
                continue;
            policy_settings_default(policy_at(p), &settings);
            before = settings;
            policy_option_value(i, &settings, value, sizeof value);
            policy_option_allowed(i, allowed, sizeof allowed);
            assert_true(strlen(allowed) > 0 && strlen(policy_option_help(i)) > 0);
            assert_int_equal(policy_settings_set(&settings, policy_option_name(i), value, false, NULL), 0);
            settings.sparsity = before.sparsity; /* setting a size replaces it */
            assert_true(settings.named == (uint64_t)1 << i);
            settings.named = 0;
            assert_memory_equal(&settings, &before, sizeof settings);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_registry),
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_options_are_set),
        cmocka_unit_test(test_last_size_counts),
        cmocka_unit_test(test_names_are_checked),
        cmocka_unit_test(test_values_are_checked),
        cmocka_unit_test(test_messages_are_clean),
        cmocka_unit_test(test_the_whole_is_checked),
        cmocka_unit_test(test_failures_change_nothing),
        cmocka_unit_test(test_gate_files),
        cmocka_unit_test(test_network_files),
        cmocka_unit_test(test_resolve),
        cmocka_unit_test(test_resolve_checks),
        cmocka_unit_test(test_network_of_a_base),
        cmocka_unit_test(test_needs_and_stages),
        cmocka_unit_test(test_stage_parameters),
        cmocka_unit_test(test_protection_options),
        cmocka_unit_test(test_descriptions),
        cmocka_unit_test(test_values_read_back),
    };
    return cmocka_run_group_tests(tests, set_up_networks, remove_networks);
}
