/* SPDX-License-Identifier: Apache-2.0
 *
 * The kv_cache object of requests: what is accepted becomes the right settings, what is not is refused with the
 * parameter's name and what would be right.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "server/chat.h"
#include "server/completions.h"
#include "tests/unit/fake_scheduler.h"
#include "tests/unit/tiny_network.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct tokenizer *tokenizer;
static const struct policy_model model = {
    .fingerprint = "00ff00ff00ff00ff00ff00ff00ff00ff00ff00ff00ff00ff00ff00ff00ff00ff",
    .layers = 3,
    .kv_heads = 2,
    .head_dim = 16};
static char networks[64]; /* those that ship: of this model's distillcache and ranker */

/* Parses {"prompt":"a","seed":7,"kv_cache":object} on a server whose policy is `own`. */
static int parse(const char *own, const char *object, struct plan *plan, struct fault *fault) {
    struct policy_settings settings;
    struct error error;
    char body[2000];
    if (policy_settings_parse(own, &settings, &error) != 0)
        fail_msg("%s: %s", own, error.message);
    struct parse_context context = {.tokenizer = tokenizer,
        .vocabulary = FAKE_VOCABULARY,
        .context = 100,
        .tokens_max = 60,
        .model_id = "fake",
        .kv_policy = &settings,
        .policy_model = model,
        .request_id = "req-test"};
    snprintf(body, sizeof body, "{\"prompt\":\"a\",\"seed\":7,\"kv_cache\":%s}", object);
    *plan = (struct plan){0};
    *fault = (struct fault){0};
    json_t *json = fields_parse(body, strlen(body), fault);
    if (json == NULL)
        fail_msg("%s: %s", body, fault->message);
    int failed = completions_parse(json, &context, plan, fault);
    json_decref(json);
    policy_settings_release(&settings);
    return failed;
}

/* The settings that an object must give; the caller frees the plan. */
static const struct policy_settings *accepted(const char *own, const char *object, struct plan *plan) {
    struct fault fault;
    if (parse(own, object, plan, &fault) != 0)
        fail_msg("%s: %s", object, fault.message);
    return &plan->request->kv_policy;
}

static void assert_settings(const char *own, const char *object, const char *policy, double ratio, uint32_t tokens) {
    struct plan plan;
    const struct policy_settings *settings = accepted(own, object, &plan);
    assert_string_equal(settings->policy->name, policy);
    assert_true(settings->ratio == ratio);
    assert_int_equal(settings->tokens, tokens);
    plan_free(&plan);
}

static void the_servers_policy_is_the_default(void **state) {
    (void)state;
    assert_settings("full", "null", "full", 1, 0);
    assert_settings("snapkv,ratio=0.5", "null", "snapkv", 0.5, 0);
    assert_settings("snapkv,ratio=0.5", "{}", "snapkv", 0.5, 0);
    assert_settings("snapkv,ratio=0.5", "{\"policy\":null,\"ratio\":null}", "snapkv", 0.5, 0);
    assert_settings("snapkv,tokens=64", "{}", "snapkv", 0.25, 64);
}

static void fields_change_the_servers_settings(void **state) {
    (void)state;
    struct plan plan;
    assert_settings("snapkv,ratio=0.5", "{\"ratio\":0.125}", "snapkv", 0.125, 0);
    assert_settings("snapkv,ratio=0.5", "{\"tokens\":70}", "snapkv", 0.5, 70);
    assert_settings("snapkv,tokens=64", "{\"ratio\":0.125}", "snapkv", 0.125, 0);
    const struct policy_settings *settings = accepted("snapkv,window=16", "{\"kernel\":5}", &plan);
    assert_int_equal(settings->window, 16);
    assert_int_equal(settings->kernel, 5);
    plan_free(&plan);
    settings = accepted("snapkv,window=16", "{\"policy\":\"snapkv\",\"kernel\":5}", &plan);
    assert_int_equal(settings->window, 16);
    plan_free(&plan);
}

static void another_policy_has_its_own_defaults(void **state) {
    (void)state;
    struct plan plan;
    assert_settings("snapkv,ratio=0.5", "{\"policy\":\"h2o\"}", "h2o", 0.25, 0);
    assert_settings("snapkv,tokens=64", "{\"policy\":\"h2o\"}", "h2o", 0.25, 0);
    assert_settings("snapkv,tokens=64", "{\"policy\":\"full\"}", "full", 1, 0);
    assert_settings("full", "{\"policy\":\"h2o\",\"ratio\":1}", "h2o", 1, 0);
    assert_settings("full", "{\"policy\":\"full\",\"ratio\":0.25}", "full", 0.25, 0);
    const struct policy_settings *settings = accepted("snapkv,window=16", "{\"policy\":\"adakv\"}", &plan);
    assert_int_equal(settings->window, 32);
    plan_free(&plan);
}

static void every_policy_of_the_registry_can_be_chosen(void **state) {
    (void)state;
    char object[100];
    assert_true(policy_count() >= 19);
    for (uint32_t i = 0; i < policy_count(); i++) {
        snprintf(object, sizeof object, "{\"policy\":\"%s\",\"ratio\":0.5}", policy_at(i)->name);
        assert_settings("full", object, policy_at(i)->name, 0.5, 0);
    }
}

static void trained_policies_are_those_of_the_model(void **state) {
    (void)state;
    struct plan plan;
    struct fault fault;
    const struct policy_settings *settings = accepted("full", "{\"policy\":\"distillcache\",\"summary\":false}", &plan);
    assert_non_null(settings->network);
    assert_int_equal(settings->interval, 11); /* the network's default */
    assert_false(settings->summary);          /* the request's choice */
    struct policy_network *network = network_take(settings->network);
    plan_free(&plan);
    settings = accepted("full", "{\"policy\":\"distillcache\",\"interval\":2}", &plan);
    assert_ptr_equal(settings->network, network); /* read once */
    assert_int_equal(settings->interval, 2);
    assert_true(settings->summary);
    plan_free(&plan);
    network_release(network);
    settings = accepted("full", "{\"policy\":\"hybrid\",\"base\":\"ranker\"}", &plan);
    assert_int_equal(settings->network->shape.features, FEATURES_PAPER);
    plan_free(&plan);
    /* Options that do not go with it, and models that have none. */
    assert_int_not_equal(parse("full", "{\"policy\":\"distillcache\",\"tokens\":1}", &plan, &fault), 0);
    plan_free(&plan);
    assert_int_equal(fault.status, 400);
    assert_string_equal(fault.parameter, "kv_cache");
    assert_non_null(strstr(fault.message, "summary"));
    setenv("DISTILLCACHE_POLICIES", "/tmp/there-is-none", 1);
    assert_int_not_equal(parse("full", "{\"policy\":\"ranker\"}", &plan, &fault), 0);
    setenv("DISTILLCACHE_POLICIES", networks, 1);
    plan_free(&plan);
    assert_int_equal(fault.status, 400);
    assert_string_equal(fault.parameter, "kv_cache.policy");
    assert_non_null(strstr(fault.message, "no policy ranker is trained for this model"));
    assert_int_not_equal(parse("full", "{\"policy\":\"ranker\",\"network\":\"/tmp/x\"}", &plan, &fault), 0);
    plan_free(&plan);
    assert_non_null(strstr(fault.message, "cannot name a file"));
}

static void options_take_numbers_and_words(void **state) {
    (void)state;
    struct plan plan;
    const struct policy_settings *settings = accepted("full",
        "{\"ratio\":0.1,\"policy\":\"snapkv\",\"window\":16.0,\"kernel\":5,\"decode\":\"keep\",\"minimum\":8,"
        "\"interval\":4,\"prefill_prune_every\":512,\"protect_recent\":3,\"protect_sinks\":2,\"scope\":\"layer\","
        "\"floor\":0.75}",
        &plan);
    assert_string_equal(settings->policy->name, "snapkv");
    assert_true(settings->ratio == 0.1 && settings->frozen_prompt && settings->scope == SCOPE_LAYER);
    assert_int_equal(settings->window, 16);
    assert_int_equal(settings->kernel, 5);
    assert_int_equal(settings->minimum, 8);
    assert_int_equal(settings->interval, 4);
    assert_int_equal(settings->prefill_prune_every, 512);
    assert_int_equal(settings->protect_recent, 3);
    assert_int_equal(settings->protect_sinks, 2);
    assert_true(settings->floor == 0.75f);
    plan_free(&plan);
    settings = accepted("full", "{\"policy\":\"streaming\",\"positions\":\"cache\",\"sinks\":2}", &plan);
    assert_true(settings->cache_positions && settings->sinks == 2);
    plan_free(&plan);
    settings = accepted("full", "{\"policy\":\"keyformer\",\"recent\":0.5,\"tokens\":1e2}", &plan);
    assert_true(settings->recent == 0.5f && settings->tokens == 100);
    plan_free(&plan);
}

static void chance_follows_the_requests_seed(void **state) {
    (void)state;
    struct plan plan;
    assert_int_equal(accepted("full", "{\"policy\":\"random\"}", &plan)->seed, 7);
    plan_free(&plan);
    assert_int_equal(accepted("random", "null", &plan)->seed, 7);
    plan_free(&plan);
    assert_int_equal(accepted("random,seed=3", "null", &plan)->seed, 3);
    plan_free(&plan);
    assert_int_equal(accepted("full", "{\"policy\":\"random\",\"seed\":5}", &plan)->seed, 5);
    plan_free(&plan);
    assert_int_equal(accepted("full", "{\"policy\":\"random\",\"seed\":0}", &plan)->seed, 7);
    plan_free(&plan);
}

/* words: what the message must have, between bars. */
struct refusal {
    const char *object;
    const char *parameter;
    const char *words;
};

static const struct refusal refusals[] = {
    {"5", "kv_cache", "object|number"},
    {"\"snapkv\"", "kv_cache", "object|string"},
    {"[]", "kv_cache", "object|array"},
    {"true", "kv_cache", "object|boolean"},
    {"{\"policy\":\"h3o\"}", "kv_cache.policy", "h3o|full|h2o|snapkv|streaming|hybrid"},
    {"{\"policy\":\"\"}", "kv_cache.policy", "full|h2o"},
    {"{\"policy\":\"H2O\"}", "kv_cache.policy", "H2O|h2o"},
    {"{\"policy\":\"h2o\\u0000\"}", "kv_cache.policy", "full|h2o"},
    {"{\"policy\":\"rlkv:/etc/passwd\"}", "kv_cache.policy", "full|h2o"},
    {"{\"policy\":\"snapkv,window=3\"}", "kv_cache.policy", "full|h2o"},
    {"{\"policy\":5}", "kv_cache.policy", "string|number|h2o"},
    {"{\"policy\":{\"name\":\"h2o\"}}", "kv_cache.policy", "string|object"},
    {"{\"ratio\":0}", "kv_cache.ratio", "0|1"},
    {"{\"ratio\":-0.5}", "kv_cache.ratio", "-0.5"},
    {"{\"ratio\":1.5}", "kv_cache.ratio", "1.5|1"},
    {"{\"ratio\":1e300}", "kv_cache.ratio", "1e+300"},
    {"{\"ratio\":\"0.5\"}", "kv_cache.ratio", "0.5|string"},
    {"{\"ratio\":\"half\"}", "kv_cache.ratio", "half"},
    {"{\"ratio\":true}", "kv_cache.ratio", "true"},
    {"{\"ratio\":[0.5]}", "kv_cache.ratio", "array"},
    {"{\"ratio\":{}}", "kv_cache.ratio", "object"},
    {"{\"tokens\":0}", "kv_cache.tokens", "0"},
    {"{\"tokens\":-1}", "kv_cache.tokens", "-1"},
    {"{\"tokens\":1.5}", "kv_cache.tokens", "1.5"},
    {"{\"tokens\":4294967296}", "kv_cache.tokens", "4294967296"},
    {"{\"tokens\":1e30}", "kv_cache.tokens", "1e+30"},
    {"{\"tokens\":false}", "kv_cache.tokens", "false"},
    {"{\"ratio\":0.5,\"tokens\":64}", "kv_cache.tokens", "kv_cache.ratio|kv_cache.tokens"},
    {"{\"minimum\":-1}", "kv_cache.minimum", "-1"},
    {"{\"interval\":0}", "kv_cache.interval", "0|1"},
    {"{\"prefill_prune_every\":0.5}", "kv_cache.prefill_prune_every", "0.5"},
    {"{\"protect_recent\":\"x\"}", "kv_cache.protect_recent", "x"},
    {"{\"protect_sinks\":-3}", "kv_cache.protect_sinks", "-3"},
    {"{\"scope\":\"world\"}", "kv_cache.scope", "world|head|layer|model"},
    {"{\"scope\":1}", "kv_cache.scope", "head|layer|model"},
    {"{\"floor\":2}", "kv_cache.floor", "2"},
    {"{\"windw\":3}", "kv_cache.windw", "windw|window|kernel|ratio"},
    {"{\"window\":0}", "kv_cache.window", "0|256"},
    {"{\"window\":257}", "kv_cache.window", "257|256"},
    {"{\"kernel\":-1}", "kv_cache.kernel", "-1"},
    {"{\"decode\":\"freeze\"}", "kv_cache.decode", "freeze|slide|keep"},
    {"{\"decode\":true}", "kv_cache.decode", "true|slide|keep"},
    {"{\"window\":\"1\\u00002\"}", "kv_cache.window", "NUL"},
    {"{\"sinks\":4}", "kv_cache.sinks", "sinks|snapkv|window"},
    {"{\"policy\":\"h2o\",\"window\":4}", "kv_cache.window", "window|h2o|recent"},
    {"{\"policy\":\"h2o\",\"recent\":1.5}", "kv_cache.recent", "1.5"},
    {"{\"policy\":\"full\",\"window\":4}", "kv_cache.window", "window|full"},
    {"{\"policy\":\"streaming\",\"positions\":\"new\"}", "kv_cache.positions", "new|original|cache"},
    {"{\"policy\":\"rlkv\",\"gates\":\"/etc/passwd\"}", "kv_cache.gates", "gates"},
    {"{\"policy\":\"hybrid\",\"gates\":\"gates.json\"}", "kv_cache.gates", "gates"},
    {"{\"\":1}", "kv_cache.", "window"},
    {"{\"\xc3\xa4\":1}", "kv_cache.\xc3\xa4", "window"},
};

static void what_is_wrong_is_named(void **state) {
    (void)state;
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        const struct refusal *expected = &refusals[i];
        struct plan plan;
        struct fault fault;
        char words[200], *rest;
        if (parse("snapkv", expected->object, &plan, &fault) == 0)
            fail_msg("accepted: %s", expected->object);
        if (fault.status != 400 || fault.code != NULL || strcmp(fault.parameter, expected->parameter) != 0)
            fail_msg("%s: got %u %s: %s", expected->object, fault.status, fault.parameter, fault.message);
        snprintf(words, sizeof words, "%s", expected->words);
        for (char *word = strtok_r(words, "|", &rest); word != NULL; word = strtok_r(NULL, "|", &rest))
            if (strstr(fault.message, word) == NULL)
                fail_msg("%s: no '%s' in: %s", expected->object, word, fault.message);
        plan_free(&plan);
    }
}

static void long_names_are_cut(void **state) {
    (void)state;
    char object[1000] = "{\"";
    struct plan plan;
    struct fault fault;
    for (int i = 0; i < 200; i++)
        strcat(object, "\xc3\xa4");
    strcat(object, "\":1}");
    assert_int_not_equal(parse("snapkv", object, &plan, &fault), 0);
    assert_true(utf8_valid(fault.parameter, strlen(fault.parameter)));
    assert_true(utf8_valid(fault.message, strlen(fault.message)));
    plan_free(&plan);
}

static int open_tokenizer(void **state) {
    (void)state;
    tokenizer = fake_tokenizer_create(false);
    tiny_folder_create(networks);
    setenv("DISTILLCACHE_POLICIES", networks, 1);
    for (int i = 0; i < 2; i++) {
        struct network_shape shape = tiny_network_shape(i == 0 ? FEATURES_CONTENT : FEATURES_PAPER, 3, 2, 16);
        struct policy_network *network = tiny_network_create(&shape, 1);
        network->interval = 11;
        tiny_network_ship(network, networks, model.fingerprint, i == 0 ? "distillcache" : "ranker");
    }
    return 0;
}

static int close_tokenizer(void **state) {
    (void)state;
    tokenizer_free(tokenizer);
    tiny_folder_remove(networks);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_servers_policy_is_the_default),
        cmocka_unit_test(fields_change_the_servers_settings),
        cmocka_unit_test(another_policy_has_its_own_defaults),
        cmocka_unit_test(every_policy_of_the_registry_can_be_chosen),
        cmocka_unit_test(trained_policies_are_those_of_the_model),
        cmocka_unit_test(options_take_numbers_and_words),
        cmocka_unit_test(chance_follows_the_requests_seed),
        cmocka_unit_test(what_is_wrong_is_named),
        cmocka_unit_test(long_names_are_cut),
    };
    return cmocka_run_group_tests_name("server_policies", tests, open_tokenizer, close_tokenizer);
}
