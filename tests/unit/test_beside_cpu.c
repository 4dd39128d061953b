/* SPDX-License-Identifier: Apache-2.0
 *
 * Every policy of the registry on the chosen backend (chosen_backend.h) and on the CPU's: the same slots stay in every
 * step, and the same tokens come out. A tiny random model in float32 throughout, so that what differs are last bits.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/unit/chosen_backend.h"
#include "tests/unit/pruning.h"
#include "tests/unit/tiny_network.h"

enum { PROMPT = 70, TOTAL = 88, STREAMS = 64, SPELLED = 192 };

static struct model *model;
static char folder[64];

/* Budgets and times that every policy can have. */
static const char *const schedules[] = {
    "tokens=24,interval=1",
    "ratio=0.5,minimum=8,interval=5",
    "ratio=0.3,minimum=16,interval=16,prefill_prune_every=32,summary=1",
};
enum { SCHEDULES = sizeof schedules / sizeof schedules[0] };

/* With windows and tails that fit the budget. */
static void spell(const struct policy *policy, const char *schedule, char out[SPELLED]) {
    int end = snprintf(out, SPELLED, "%s,%s", policy->name, schedule);
    if (policy->options & OPTION_WINDOW)
        end += snprintf(out + end, SPELLED - end, ",window=8");
    if (policy->options & OPTION_RECENT_TOKENS)
        end += snprintf(out + end, SPELLED - end, ",recent_tokens=8");
    if (policy->options & OPTION_SINKS)
        end += snprintf(out + end, SPELLED - end, ",sinks=4");
    assert_true(end < SPELLED);
}

static uint32_t largest(const float *logits) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < model->shape.vocabulary; i++)
        best = logits[i] > logits[best] ? i : best;
    return best;
}

static void compare_step(const char *policy, uint32_t step, const float *got, const float *want) {
    for (uint32_t i = 0; i < model->shape.vocabulary; i++)
        if (!(fabsf(got[i] - want[i]) <= 1e-4f * (1 + fabsf(want[i]))))
            fail_msg("%s, step %u: logit %u is %g, not %g", policy, step, i, (double)got[i], (double)want[i]);
    uint32_t token = largest(want);
    if (largest(got) != token && got[largest(got)] - got[token] > 1e-3f)
        fail_msg("%s, step %u: token %u, not %u", policy, step, largest(got), token);
}

static void compare(const char *policy, const struct stream *got, const struct stream *want) {
    for (uint32_t step = 0; step <= TOTAL - PROMPT; step++) {
        size_t row = (size_t)step * model->shape.vocabulary;
        if (got->kept[step] != want->kept[step])
            fail_msg("%s: other positions are kept after step %u", policy, step);
        compare_step(policy, step, got->logits + row, want->logits + row);
    }
}

/* All tokens of a stream differ: in the first layer keys of the same token have the same length, and last bits would
 * decide between them. */
static struct stream *create_stream(struct engine *engine, const char *policy, uint32_t text) {
    struct stream *stream = stream_create(engine, policy, text, PROMPT, TOTAL);
    for (uint32_t i = 0; i < TOTAL; i++)
        stream->tokens[i] = (int32_t)((i * 37 + text * 11) % model->shape.vocabulary);
    return stream;
}

/* Several ranks refuse what needs all heads of a layer in one place. */
static bool works(const struct policy *policy) {
    return chosen_backend_ranks() == 1 || strncmp(policy->name, "laprox", strlen("laprox")) != 0;
}

/* Streams of all policies with one schedule, in batches of all of them. */
static uint32_t run_policies(struct engine *engine, const char *schedule, struct stream **streams) {
    uint32_t count = 0;
    char policy[SPELLED];
    for (uint32_t i = 0; i < policy_count(); i++) {
        if (strcmp(policy_at(i)->name, "full") == 0 || !works(policy_at(i)))
            continue;
        spell(policy_at(i), schedule, policy);
        assert_true(count < STREAMS);
        streams[count++] = create_stream(engine, policy, i);
    }
    streams_run(streams, count, 33);
    return count;
}

/* An emulated device takes long: one schedule alone, and of several devices one for each way in which they add up,
 * unless all are asked for. */
static bool takes_turn(uint32_t schedule) {
    const char *full = getenv("DISTILLCACHE_TEST_FULL"), *all_reduce = chosen_backend_all_reduce();
    if (strcmp(chosen_backend(), "cpu") == 0 || (full != NULL && full[0] != '\0'))
        return true;
    if (chosen_backend_ranks() == 1)
        return schedule == 0;
    return schedule == (all_reduce != NULL && strcmp(all_reduce, "host") == 0 ? SCHEDULES - 1 : 1);
}

static void every_policy_keeps_the_same(void **state) {
    struct engine_options options = {.kv_format = KV_F32, .exact = true};
    struct engine *engine = pruning_engine(model, &options);
    options.backend.cpu_features = "auto";
    struct engine *cpu = pruning_engine(model, &options);
    struct stream *got[STREAMS], *want[STREAMS];
    (void)state;
    for (uint32_t i = 0; i < SCHEDULES; i++) {
        if (!takes_turn(i))
            continue;
        uint32_t count = run_policies(engine, schedules[i], got), pruned = 0;
        assert_int_equal(run_policies(cpu, schedules[i], want), count);
        for (uint32_t k = 0; k < count; k++) {
            char name[SPELLED];
            snprintf(name, sizeof name, "%s, %s", sequence_policy(want[k]->sequence)->policy->name, schedules[i]);
            compare(name, got[k], want[k]);
            pruned += sequence_memory(got[k]->sequence).kept < TOTAL / 2 + 10;
            stream_free(got[k]);
            stream_free(want[k]);
        }
        assert_int_equal(pruned, count);
    }
    engine_close(engine);
    engine_close(cpu);
}

static int open_model(void **state) {
    (void)state;
    struct tiny_llama shape = tiny_llama_default();
    shape.kv_heads *= chosen_backend_ranks();
    shape.heads *= chosen_backend_ranks();
    shape.ff_width = 128;
    model = pruning_model(&shape);
    tiny_folder_create(folder);
    struct engine *engine = pruning_engine(model, &(struct engine_options){.backend.cpu_features = "auto"});
    pruning_ship_networks(engine, folder);
    engine_close(engine);
    return 0;
}

static int close_model(void **state) {
    (void)state;
    model_free(model);
    tiny_folder_remove(folder);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_policy_keeps_the_same),
    };
    return cmocka_run_group_tests_name("beside_cpu", tests, open_model, close_model);
}
