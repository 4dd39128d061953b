/* SPDX-License-Identifier: Apache-2.0
 *
 * Acting and learning without an engine: the mean of the gradient over many draws is the exact one by network_backward
 * and differences of the expected reward; the same bits on any number of threads; places that are shared; returns and
 * advantages; and a toy in which one token per head is useful, which training finds.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cpu/threads.h"
#include "engine/random.h"
#include "policy/train/actor.h"
#include "policy/train/adamw.h"
#include "policy/train/reinforce.h"
#include "tests/sanitized.h"
#include "tests/unit/tiny_network.h"

enum { HEADS = 2, SLOTS_MAX = 12, INPUTS = 2 };

/* Two heads of one layer, two inputs. */
static struct policy_network *create_network(enum policy_scope scope, uint32_t seed) {
    struct network_shape shape = {.features = FEATURES_CONTENT,
        .inputs = 1 << INPUT_SUM | 1 << INPUT_ENTROPY,
        .hidden = 4,
        .layers = 1,
        .kv_heads = HEADS,
        .head_dim = 4};
    struct policy_network *network = tiny_network_create(&shape, seed);
    for (uint32_t i = 0; i < HEADS * INPUTS; i++) {
        network->mean[i] = 0;
        network->scale[i] = 1;
    }
    network->scope = scope;
    network->floor = 0.5f;
    return network;
}

static struct thread_pool *open_threads(uint32_t count) {
    struct thread_pool *threads = thread_pool_create(count, NULL);
    assert_non_null(threads);
    return threads;
}

static struct actor *open_actor(const struct policy_network *network, struct thread_pool *threads,
    enum train_sampler sampler, uint32_t students, uint32_t prunes, size_t bytes) {
    struct actor_options options = {.sampler = sampler,
        .temperature = 1,
        .seed = 5,
        .students = students,
        .prunes = prunes,
        .heads_most = HEADS,
        .slots_most = SLOTS_MAX,
        .bytes = bytes,
        .network = network,
        .threads = threads};
    struct actor *actor = actor_create(&options);
    assert_non_null(actor);
    return actor;
}

/* What two heads hold. */
struct scene {
    float inputs[HEADS][SLOTS_MAX][INPUTS];
    uint8_t keep[HEADS][SLOTS_MAX];
    struct actor_head heads[HEADS];
};

static const uint32_t positions[SLOTS_MAX] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};

static void set_scene(struct scene *scene, uint32_t slots, uint32_t budget, uint64_t seed) {
    for (uint32_t h = 0; h < HEADS; h++) {
        for (uint32_t i = 0; i < slots; i++)
            for (uint32_t f = 0; f < INPUTS; f++)
                scene->inputs[h][i][f] = 2 * random_uniform(seed, h, f, i) - 1;
        scene->heads[h] = (struct actor_head){.head = h,
            .budget = budget,
            .slots = {.count = slots, .inputs = scene->inputs[h][0]},
            .positions = positions,
            .keep = scene->keep[h]};
    }
}

static void draw(struct actor *actor, const struct policy_network *network, struct scene *scene, uint64_t step,
    uint32_t student, uint32_t prune) {
    struct error error = {0};
    struct actor_prune part = {.network = network,
        .step = step,
        .student = student,
        .prune = prune,
        .learns = true,
        .recent_from = UINT32_MAX,
        .heads = scene->heads,
        .heads_count = HEADS};
    if (actor_draw(actor, &part, &error) != 0)
        fail_msg("%s", error.message);
}

static double reward_of(const struct scene *scene, uint32_t slots) {
    double sum = 0;
    for (uint32_t h = 0; h < HEADS; h++)
        for (uint32_t i = 0; i < slots; i++)
            sum += scene->keep[h][i] ? sin(1 + 2.0 * i + 5.0 * h) : 0;
    return sum * sum;
}

/* Mean reward over many steps, and of the gradient by RLOO of two students. */
static double sample(const struct policy_network *network, struct thread_pool *threads, enum train_sampler sampler,
    uint32_t rounds, double *mean, double *error_of_mean) {
    struct actor *actor = open_actor(network, threads, sampler, 2, 1, 0);
    struct gradient *gradient = gradient_create(network);
    struct scene scene;
    double total = 0;
    set_scene(&scene, 4, 2, 3);
    for (uint32_t round = 0; round < rounds; round++) {
        double rewards[2][2] = {{0}}, advantages[2], work[2];
        static const uint32_t at[] = {0};
        actor_clear(actor);
        for (uint32_t s = 0; s < 2; s++) {
            draw(actor, network, &scene, round, s, 0);
            rewards[s][1] = reward_of(&scene, 4);
            total += rewards[s][1] / 2 / rounds;
        }
        if (mean == NULL)
            continue;
        struct reinforce_rollouts rollouts = {.students = 2,
            .steps = 2,
            .prunes = 1,
            .rewards = rewards[0],
            .prune_at = at,
            .horizon = UINT32_MAX,
            .discount = 1,
            .average = NAN};
        reinforce_advantages(&rollouts, advantages, work);
        actor_gradient(actor, advantages, gradient);
        for (size_t i = 0; i < gradient->count; i++) {
            mean[i] += (double)gradient->values[i] / rounds;
            error_of_mean[i] += (double)gradient->values[i] * (double)gradient->values[i] / rounds / rounds;
        }
    }
    free(gradient);
    actor_free(actor);
    return total;
}

/* Of 4 slots a head keeps 2: drawn are 2 a head; of a layer's 8 four stay, a floor of one a head, drawn are 2. The
 * exact gradient comes from central differences of the mean reward at the same noise, whose own error is that of a
 * sample too: both agree within what either may be off. */
static void test_mean_gradient(void **state) {
    (void)state;
    enum { ROUNDS = 6000, LONG = 60000 };
    struct thread_pool *threads = open_threads(1);
    static const enum policy_scope scopes[] = {SCOPE_HEAD, SCOPE_LAYER};
    static const enum train_sampler samplers[] = {SAMPLER_GUMBEL, SAMPLER_SUBSET};
    for (int s = 0; s < 4; s++) {
        struct policy_network *network = create_network(scopes[s / 2], 11);
        size_t count = network_parameters_count(network);
        double *mean = calloc(count, sizeof *mean), *spread = calloc(count, sizeof *spread);
        assert_true(mean != NULL && spread != NULL);
        sample(network, threads, samplers[s % 2], ROUNDS, mean, spread);
        /* Along the skip weights of head 0 and of head 1, which come last among the trained arrays. */
        struct network_array array;
        size_t at = 0;
        for (uint32_t i = 0; network_array(network, i, &array) && array.values != network->skip; i++)
            at += array.trained ? array.count : 0;
        for (uint32_t i = 0; i < HEADS * INPUTS; i++) {
            const float step = 0.25f;
            float before = network->skip[i];
            network->skip[i] = before + step;
            double up = sample(network, threads, samplers[s % 2], LONG / 4, NULL, NULL);
            network->skip[i] = before - step;
            double down = sample(network, threads, samplers[s % 2], LONG / 4, NULL, NULL);
            network->skip[i] = before;
            double expected = -(up - down) / (2 * (double)step) / 2; /* descends; of ln pi / 2 drawn */
            double allowed = 4 * sqrt(spread[at + i]) + 0.02;
            if (fabs(mean[at + i] - expected) > allowed)
                fail_msg("case %d, weight %u: %g, not %g +- %g", s, i, mean[at + i], expected, allowed);
        }
        free(mean);
        free(spread);
        network_release(network);
    }
    thread_pool_free(threads);
}

static void test_threads(void **state) {
    (void)state;
    struct policy_network *network = create_network(SCOPE_LAYER, 2);
    struct gradient *gradients[2];
    uint8_t keep[2][HEADS][SLOTS_MAX];
    for (uint32_t t = 0; t < 2; t++) {
        struct thread_pool *threads = open_threads(1 + 2 * t);
        struct actor *actor = open_actor(network, threads, SAMPLER_GUMBEL, 1, 1, 0);
        struct scene scene;
        static const double advantage[] = {0.7};
        set_scene(&scene, SLOTS_MAX, 4, 9);
        draw(actor, network, &scene, 3, 0, 0);
        memcpy(keep[t], scene.keep, sizeof scene.keep);
        gradients[t] = gradient_create(network);
        actor_gradient(actor, advantage, gradients[t]);
        actor_free(actor);
        thread_pool_free(threads);
    }
    assert_memory_equal(keep[0], keep[1], sizeof keep[0]);
    assert_memory_equal(gradients[0]->values, gradients[1]->values, gradients[0]->count * sizeof(float));
    free(gradients[0]);
    free(gradients[1]);
    network_release(network);
}

/* Two places for five prunes: 0 to 2 count by the return of 0, 3 and 4 by that of 3. */
static void test_places(void **state) {
    (void)state;
    struct policy_network *network = create_network(SCOPE_HEAD, 2);
    struct thread_pool *threads = open_threads(1);
    size_t bytes = 2 * network_parameters_count(network) * sizeof(float);
    struct actor *few = open_actor(network, threads, SAMPLER_GUMBEL, 1, 5, bytes);
    struct actor *all = open_actor(network, threads, SAMPLER_GUMBEL, 1, 5, 0);
    struct gradient *a = gradient_create(network), *b = gradient_create(network);
    struct scene scene;
    static const uint32_t first[] = {0, 0, 0, 3, 3};
    static const double advantages[] = {1, 50, -50, -2, 50}, spread[] = {1, 1, 1, -2, -2};
    for (uint32_t p = 0; p < 5; p++) {
        assert_int_equal(actor_first(few, p), first[p]);
        assert_int_equal(actor_first(all, p), p);
        set_scene(&scene, SLOTS_MAX, 4, p);
        draw(few, network, &scene, 0, 0, p);
        draw(all, network, &scene, 0, 0, p);
        assert_true(actor_entropy(all, 0, p) > 0);
        assert_true(actor_entropy(few, 0, p) == actor_entropy(all, 0, p));
    }
    actor_gradient(few, advantages, a);
    actor_gradient(all, spread, b);
    double norm = 0;
    for (size_t i = 0; i < a->count; i++) {
        assert_true(fabsf(a->values[i] - b->values[i]) < 1e-5f);
        norm += fabs((double)a->values[i]);
    }
    assert_true(norm > 0.01);
    actor_clear(all);
    actor_gradient(all, spread, b);
    for (size_t i = 0; i < b->count; i++)
        assert_true(b->values[i] == 0);
    free(a);
    free(b);
    actor_free(few);
    actor_free(all);
    thread_pool_free(threads);
    network_release(network);
}

static void test_advantages(void **state) {
    (void)state;
    static const double rewards[] = {0, 1, 2, 4, 0, 3, 5, 7};
    static const uint32_t at[] = {0, 2};
    double advantages[4], work[2];
    struct reinforce_rollouts rollouts = {.students = 2,
        .steps = 4,
        .prunes = 2,
        .rewards = rewards,
        .prune_at = at,
        .horizon = UINT32_MAX,
        .discount = 0.5,
        .average = NAN};
    reinforce_advantages(&rollouts, advantages, work); /* returns 1 + 1 + 1, 4; 3 + 2.5 + 1.75, 7 */
    static const double expected[] = {-4.25, -3, 4.25, 3};
    for (int i = 0; i < 4; i++)
        assert_true(fabs(advantages[i] - expected[i]) < 1e-12);
    rollouts.horizon = 1;
    reinforce_advantages(&rollouts, advantages, work);
    assert_true(fabs(advantages[0] + 2) < 1e-12 && fabs(advantages[1] + 3) < 1e-12);
    rollouts.group = true;
    reinforce_advantages(&rollouts, advantages, work);
    assert_true(fabs(advantages[0] + 1) < 1e-5 && fabs(advantages[2] - 1) < 1e-5);
    rollouts.students = 1; /* alone: against the average */
    rollouts.group = false;
    rollouts.horizon = UINT32_MAX;
    rollouts.average = 2;
    reinforce_advantages(&rollouts, advantages, work);
    assert_true(fabs(advantages[0] - (3 - 2 * 1.75)) < 1e-12 && fabs(advantages[1] - (4 - 2)) < 1e-12);
    rollouts.average = NAN;
    reinforce_advantages(&rollouts, advantages, work);
    assert_true(fabs(advantages[0] - 3) < 1e-12);
}

/* ---- one useful token per head ---- */

/* Head 0's has a high first input, head 1's a low second one. */
static void set_toy(struct scene *scene, uint64_t seed, uint64_t episode, uint32_t useful[HEADS]) {
    set_scene(scene, SLOTS_MAX, 3, seed * 1000003 + episode);
    for (uint32_t h = 0; h < HEADS; h++) {
        useful[h] = (uint32_t)(random_uniform(seed, 77, h, episode) * SLOTS_MAX);
        scene->inputs[h][useful[h]][h] = h == 0 ? 1.5f : -1.5f;
    }
}

/* The part of useful tokens that the network's three best are among. */
static double keeps(const struct policy_network *network, uint64_t seed) {
    struct scene scene;
    uint32_t useful[HEADS], kept = 0;
    enum { EPISODES = 200 };
    for (uint32_t e = 0; e < EPISODES; e++) {
        set_toy(&scene, seed, 1000000 + e, useful);
        for (uint32_t h = 0; h < HEADS; h++) {
            float scores[SLOTS_MAX];
            uint32_t better = 0;
            network_score(network, h, scene.inputs[h][0], SLOTS_MAX, scores);
            for (uint32_t i = 0; i < SLOTS_MAX; i++)
                better += scores[i] > scores[useful[h]];
            kept += better < 3;
        }
    }
    return kept / (double)(EPISODES * HEADS);
}

static void train_toy(struct policy_network *network, uint64_t seed, enum train_sampler sampler) {
    enum { STEPS = 800, STUDENTS = 4 };
    struct thread_pool *threads = open_threads(1);
    struct actor *actor = open_actor(network, threads, sampler, STUDENTS, 1, 0);
    struct gradient *gradient = gradient_create(network);
    struct adamw *adamw = adamw_create(network_parameters_count(network));
    struct adamw_options optimiser = {
        .peak = 0.03f, .total = STEPS, .warmup = 10, .beta1 = 0.9f, .beta2 = 0.999f, .epsilon = 1e-8f, .clip = 1};
    struct scene scene;
    for (uint32_t step = 0; step < STEPS; step++) {
        double rewards[STUDENTS][2] = {{0}}, advantages[STUDENTS], work[STUDENTS];
        static const uint32_t at[] = {0};
        uint32_t useful[HEADS];
        set_toy(&scene, seed, step, useful);
        actor_clear(actor);
        for (uint32_t s = 0; s < STUDENTS; s++) {
            draw(actor, network, &scene, step, s, 0);
            for (uint32_t h = 0; h < HEADS; h++)
                rewards[s][1] -= scene.keep[h][useful[h]] ? 0 : 1.0 / HEADS;
        }
        struct reinforce_rollouts rollouts = {.students = STUDENTS,
            .steps = 2,
            .prunes = 1,
            .rewards = rewards[0],
            .prune_at = at,
            .horizon = UINT32_MAX,
            .discount = 0.99,
            .average = NAN};
        reinforce_advantages(&rollouts, advantages, work);
        actor_gradient(actor, advantages, gradient);
        adamw_update(adamw, &optimiser, gradient, network);
    }
    adamw_free(adamw);
    free(gradient);
    actor_free(actor);
    thread_pool_free(threads);
}

static void test_toy(void **state) {
    (void)state;
    static const enum train_sampler samplers[] = {SAMPLER_GUMBEL, SAMPLER_SUBSET};
    for (uint64_t seed = 1; seed <= (sanitized() ? 1 : 3); seed++) {
        for (int s = 0; s < 2; s++) {
            struct policy_network *network = create_network(SCOPE_HEAD, (uint32_t)seed);
            double before = keeps(network, seed);
            train_toy(network, seed, samplers[s]);
            double after = keeps(network, seed);
            if (after < 0.98 || before > 0.8)
                fail_msg("seed %d: %g of the useful tokens are kept, before %g", (int)seed, after, before);
            network_release(network);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_advantages),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_places),
        cmocka_unit_test(test_mean_gradient),
        cmocka_unit_test(test_toy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
