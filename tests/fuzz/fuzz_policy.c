/* SPDX-License-Identifier: Apache-2.0
 *
 * Policies in words and gate files: reading fails with a message, or gives settings that can be described, checked and
 * used. A text that begins with { is a gate file.
 */
#include "tests/fuzz/fuzz.h"

#include "policy/budget.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 3, HEADS = 2 };

static void expect(bool condition) {
    if (!condition)
        abort();
}

static void expect_message(int code, const struct error *error) {
    expect(code < 0 && error->code == code && error->message[0] != '\0');
    expect(strpbrk(error->message, "\n\x1b") == NULL);
}

static void use_settings(const struct policy_settings *settings, uint32_t seen) {
    const double preferences[LAYERS] = {1, 5, 2};
    const float gates[LAYERS * HEADS] = {0, 1, 0.5f, 0.5f, 0.25f, 1};
    uint32_t budgets[LAYERS * HEADS], sinks, recent_from;
    struct score_stage stages[SCORE_STAGES_MAX];
    struct budget_input input = {.settings = settings,
        .layers = LAYERS,
        .kv_heads = HEADS,
        .seen = seen,
        .layer_preferences = preferences,
        .gates = gates};
    budget_allocate(&input, budgets);
    policy_protection(settings, seen, policy_budget(settings, seen), &sinks, &recent_from);
    expect(recent_from <= seen);
    expect(policy_stages(settings, stages) <= SCORE_STAGES_MAX);
    expect(policy_needs(settings, true) == 0 || !policy_settings_keep_all(settings));
    policy_fresh_tokens(settings);
}

static void try_settings(const char *text) {
    struct policy_settings settings, copy;
    struct error error = {0};
    char described[256];
    int code = policy_settings_parse(text, &settings, &error);
    if (code != 0) {
        expect_message(code, &error);
        expect(settings.gates == NULL);
        return;
    }
    expect(policy_settings_check(&settings, NULL) == 0);
    policy_settings_describe(&settings, described, sizeof described);
    expect(strncmp(described, settings.policy->name, strlen(settings.policy->name)) == 0);
    policy_settings_copy(&copy, &settings);
    policy_settings_release(&settings);
    static const uint32_t lengths[] = {0, 1, 33, 1000, 131072, 0x7ffffffe};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++)
        use_settings(&copy, lengths[i]);
    policy_settings_release(&copy);
}

static void try_gates(const char *text, size_t bytes) {
    struct error error = {0};
    struct head_gates *gates = head_gates_parse(text, bytes, "fuzz.json", &error);
    if (gates == NULL) {
        expect_message(error.code, &error);
        return;
    }
    for (size_t i = 0; i < (size_t)gates->layers * gates->kv_heads; i++)
        expect(gates->values[i] >= 0 && gates->values[i] <= 1);
    head_gates_release(gates);
}

/* Texts that would open a file are left out. */
static bool names_file(const char *text) {
    static const char *const words[] = {"rlkv:", "hybrid:", "ranker:", "distillcache:", "gates=", "network="};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (strstr(text, words[i]) != NULL)
            return true;
    return false;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    char *text = malloc(bytes + 1);
    if (text == NULL)
        return 0;
    memcpy(text, data, bytes);
    text[bytes] = '\0';
    if (bytes > 0 && data[0] == '{')
        try_gates(text, bytes);
    else if (!names_file(text))
        try_settings(text);
    free(text);
    return 0;
}

uint8_t *fuzz_seed(unsigned index, size_t *bytes) {
    static const char *const seeds[] = {
        "snapkv,ratio=0.25,window=16,kernel=5,decode=keep",
        "h2o,tokens=512,recent=0.3,scope=layer,floor=0.5,interval=4",
        "streaming,sinks=8,positions=cache,prefill_prune_every=256",
        "cake,gamma=1e3,tau1=2,tau2=0.5,protect_recent=8,protect_sinks=2",
        "rlkv,sparsity=auto,sinks=4,recent_tokens=10",
        "hybrid,base=snapkv,full_heads=0.5,ratio=1,minimum=1",
        "restkv,smoothing=0.3,scope=model",
        "expected_attention,epsilon=0.01,future=65536",
        "distillcache,interval=4,summary=1",
        "hybrid,base=ranker,summary=true,minimum=2",
        "random,seed=18446744073709551615",
        "pyramidkv,beta=1000000,tokens=1",
        "scissorhands:file,history=512",
        "full",
        "{\"gates\": [[0, 0.5], [1e-3, 1.0]], \"model\": \"m\"}",
        "{\"gates\": [[1], [0, \"a\"], null, {}]}",
    };
    if (index >= sizeof seeds / sizeof seeds[0])
        return NULL;
    *bytes = strlen(seeds[index]);
    return (uint8_t *)strdup(seeds[index]);
}
