/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/policies.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static const struct policy *const policies[] = {
    &policy_full,
    &policy_random,
    &policy_streaming,
    &policy_h2o,
    &policy_h2o_mean,
    &policy_scissorhands,
    &policy_tova,
    &policy_snapkv,
    &policy_pyramidkv,
    &policy_adakv,
    &policy_criticalkv,
    &policy_keydiff,
    &policy_knorm,
    &policy_keyformer,
    &policy_expected_attention,
    &policy_cake,
    &policy_laprox,
    &policy_laprox_head,
    &policy_restkv,
    &policy_rlkv,
    &policy_ranker,
    &policy_distillcache,
    &policy_hybrid,
};

enum { POLICIES_COUNT = sizeof policies / sizeof policies[0], NAMES_SIZE = 512 };

uint32_t policy_count(void) {
    return POLICIES_COUNT;
}

const struct policy *policy_at(uint32_t index) {
    return index < POLICIES_COUNT ? policies[index] : NULL;
}

const struct policy *policy_find(const char *name) {
    for (uint32_t i = 0; i < POLICIES_COUNT; i++)
        if (strcmp(policies[i]->name, name) == 0)
            return policies[i];
    return NULL;
}

static char names[NAMES_SIZE];

static void write_names(void) {
    size_t length = 0;
    for (uint32_t i = 0; i < POLICIES_COUNT && length < sizeof names; i++)
        length += (size_t)snprintf(names + length, sizeof names - length, "%s%s", i > 0 ? ", " : "", policies[i]->name);
}

const char *policy_names(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, write_names);
    return names;
}
