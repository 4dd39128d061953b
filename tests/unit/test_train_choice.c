/* SPDX-License-Identifier: Apache-2.0
 *
 * Draws of what stays, by enumeration: every outcome is forced through the noise, probabilities add up to 1, and the
 * mean of reward times gradient is the gradient of the expected reward by central differences, also of the
 * leave-one-out estimator. Both samplers, a head alone and the heads of a layer with a floor and protected slots.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <string.h>

#include "policy/train/baseline.h"
#include "policy/train/choice.h"

enum { HEADS_MAX = 2, SLOTS_MAX = 5, ALL_MAX = HEADS_MAX * SLOTS_MAX, OUTCOMES_MAX = 400 };

/* A problem: positions are 0, 1, ... within each head. */
struct problem {
    const char *name;
    enum train_sampler sampler;
    float temperature;
    bool compare;
    uint32_t heads, slots[HEADS_MAX], floor, total, sinks;
    float scores[HEADS_MAX][SLOTS_MAX];
};

/* Scores are multiples of 1/64 with gaps above 2/64, so that differences of 1/64 are exact and reorder nothing. */
static const struct problem problems[] = {
    {"order, a head", SAMPLER_GUMBEL, 1, false, 1, {5}, 0, 3, 0, {{0.5f, -1, 1.25f, 0.125f, -0.375f}}},
    {"set, a head", SAMPLER_SUBSET, 1, false, 1, {5}, 0, 3, 0, {{0.5f, -1, 1.25f, 0.125f, -0.375f}}},
    {"set, colder", SAMPLER_SUBSET, 0.5f, false, 1, {5}, 0, 2, 0, {{0.5f, -1, 1.25f, 0.125f, -0.375f}}},
    {"order, a protected slot", SAMPLER_GUMBEL, 1, false, 1, {5}, 0, 3, 1, {{0.5f, -1, 1.25f, 0.125f, -0.375f}}},
    {"order, a layer", SAMPLER_GUMBEL, 1, true, 2, {4, 3}, 1, 4, 0, {{0.5f, -1, 1.25f, 0.125f}, {1, -0.25f, 0.75f}}},
    {"set, a layer", SAMPLER_SUBSET, 1, true, 2, {4, 3}, 1, 4, 0, {{0.5f, -1, 1.25f, 0.125f}, {1, -0.25f, 0.75f}}},
    {"order, a layer, sinks", SAMPLER_GUMBEL, 1, true, 2, {4, 3}, 1, 4, 1,
        {{0.5f, -1, 1.25f, 0.125f}, {1, -0.25f, 0.75f}}},
    {"set, a layer without floor", SAMPLER_SUBSET, 2, true, 2, {3, 3}, 0, 2, 0,
        {{0.5f, -1, 1.25f}, {1, -0.25f, 0.75f}}},
};

/* One outcome. */
struct outcome {
    double probability, reward;
    uint32_t drawn;
    uint8_t keep[ALL_MAX];
    float gradient[ALL_MAX];
};

struct noise {
    double uniforms[HEADS_MAX][SLOTS_MAX];
};

static double uniform(void *context, uint32_t head, uint32_t slot) {
    return ((struct noise *)context)->uniforms[head][slot];
}

static void draw(
    const struct problem *problem, const float scores[HEADS_MAX][SLOTS_MAX], struct noise *noise, struct outcome *out) {
    static const uint32_t positions[SLOTS_MAX] = {0, 1, 2, 3, 4};
    struct error error = {0};
    struct choice_head heads[HEADS_MAX];
    struct choice choice = {.sampler = problem->sampler,
        .temperature = problem->temperature,
        .compare = problem->compare,
        .sinks = problem->sinks,
        .recent_from = UINT32_MAX,
        .total = problem->total,
        .uniform = uniform,
        .context = noise};
    memset(out, 0, sizeof *out);
    for (uint32_t h = 0; h < problem->heads; h++)
        heads[h] = (struct choice_head){.slots = problem->slots[h],
            .scores = scores[h],
            .positions = positions,
            .floor = problem->floor,
            .keep = out->keep + h * SLOTS_MAX,
            .gradient = out->gradient + h * SLOTS_MAX};
    assert_int_equal(choice_draw(&choice, heads, problem->heads, &error), 0);
    uint32_t kept = 0;
    for (uint32_t i = 0; i < ALL_MAX; i++) {
        kept += out->keep[i];
        out->reward += out->keep[i] ? sin(1 + 3.0 * i) : 0; /* not a sum over slots alone: */
    }
    out->reward *= out->reward;
    assert_int_equal(kept, problem->total);
    out->drawn = choice.drawn;
    out->probability = exp(-choice.entropy * choice.drawn);
}

/* Slots that take part in the draw: those that are not kept when all noise is against them and for others in turn. */
static uint32_t find_candidates(const struct problem *problem, uint32_t candidates[ALL_MAX], uint32_t *drawn) {
    struct outcome outcome;
    struct noise noise;
    uint32_t count = 0;
    for (uint32_t i = 0; i < ALL_MAX; i++) {
        uint32_t h = i / SLOTS_MAX, slot = i % SLOTS_MAX;
        if (h >= problem->heads || slot >= problem->slots[h])
            continue;
        for (uint32_t j = 0; j < ALL_MAX; j++)
            noise.uniforms[j / SLOTS_MAX][j % SLOTS_MAX] = problem->sampler == SAMPLER_SUBSET ? 1e-12 : 0.999;
        noise.uniforms[h][slot] = problem->sampler == SAMPLER_SUBSET ? 1 - 1e-12 : exp(-30);
        draw(problem, problem->scores, &noise, &outcome);
        if (!outcome.keep[i])
            candidates[count++] = i;
        *drawn = outcome.drawn;
    }
    return count;
}

/* All outcomes at these scores; orders, or sets. */
struct enumeration {
    const struct problem *problem;
    const float (*scores)[SLOTS_MAX];
    uint32_t candidates[ALL_MAX], count, drawn;
    uint32_t chosen[ALL_MAX]; /* so far */
    uint32_t outcomes;
    struct outcome *list;
};

static void force(struct enumeration *all) {
    struct noise noise;
    bool set = all->problem->sampler == SAMPLER_SUBSET;
    for (uint32_t i = 0; i < ALL_MAX; i++)
        noise.uniforms[i / SLOTS_MAX][i % SLOTS_MAX] = set ? 1 - 1e-12 : exp(-30);
    for (uint32_t j = 0; j < all->drawn; j++) {
        uint32_t i = all->chosen[j];
        noise.uniforms[i / SLOTS_MAX][i % SLOTS_MAX] = set ? 1e-12 : exp(-exp(10.0 * j - 30));
    }
    assert_true(all->outcomes < OUTCOMES_MAX);
    struct outcome *outcome = &all->list[all->outcomes++];
    draw(all->problem, all->scores, &noise, outcome);
    for (uint32_t j = 0; j < all->drawn; j++)
        assert_int_equal(outcome->keep[all->chosen[j]], 1);
}

static void enumerate(struct enumeration *all, uint32_t depth, uint32_t first) {
    if (depth == all->drawn) {
        force(all);
        return;
    }
    bool set = all->problem->sampler == SAMPLER_SUBSET;
    for (uint32_t c = set ? first : 0; c < all->count; c++) {
        bool taken = false;
        for (uint32_t j = 0; j < depth; j++)
            taken = taken || all->chosen[j] == all->candidates[c];
        all->chosen[depth] = all->candidates[c];
        if (!taken)
            enumerate(all, depth + 1, c + 1);
    }
}

static double expected_reward(const struct enumeration *all) {
    double sum = 0;
    for (uint32_t i = 0; i < all->outcomes; i++)
        sum += all->list[i].probability * all->list[i].reward;
    return sum;
}

/* Of the reward that is expected, by one score. */
static double difference(struct enumeration *all, uint32_t slot) {
    static struct outcome outcomes[OUTCOMES_MAX];
    struct enumeration other = *all;
    float scores[HEADS_MAX][SLOTS_MAX];
    const float step = 1.0f / 64;
    double values[2];
    other.list = outcomes;
    other.scores = scores;
    for (int side = 0; side < 2; side++) {
        memcpy(scores, all->problem->scores, sizeof scores);
        scores[slot / SLOTS_MAX][slot % SLOTS_MAX] += side == 0 ? step : -step;
        other.outcomes = 0;
        enumerate(&other, 0, 0);
        values[side] = expected_reward(&other);
    }
    return (values[0] - values[1]) / (2 * (double)step);
}

/* Means over all outcomes, and over all pairs of them with advantages by leave-one-out. */
static void mean_gradients(const struct enumeration *all, uint32_t slot, double *single, double *pairs) {
    *single = *pairs = 0;
    for (uint32_t a = 0; a < all->outcomes; a++) {
        const struct outcome *x = &all->list[a];
        *single += x->probability * x->reward * (double)x->gradient[slot];
        for (uint32_t b = 0; b < all->outcomes; b++) {
            const struct outcome *y = &all->list[b];
            double rewards[2] = {x->reward, y->reward}, advantages[2];
            baseline_leave_one_out(rewards, 2, advantages);
            *pairs += x->probability * y->probability *
                      (advantages[0] * (double)x->gradient[slot] + advantages[1] * (double)y->gradient[slot]) / 2;
        }
    }
}

static void test_enumeration(void **state) {
    (void)state;
    static struct outcome outcomes[OUTCOMES_MAX];
    for (size_t p = 0; p < sizeof problems / sizeof problems[0]; p++) {
        const struct problem *problem = &problems[p];
        struct enumeration all = {.problem = problem, .scores = problem->scores, .list = outcomes};
        all.count = find_candidates(problem, all.candidates, &all.drawn);
        assert_true(all.drawn > 0 && all.count > all.drawn);
        enumerate(&all, 0, 0);
        double total = 0, largest = 0;
        for (uint32_t i = 0; i < all.outcomes; i++)
            total += outcomes[i].probability;
        assert_true(fabs(total - 1) < 1e-6);
        for (uint32_t h = 0; h < problem->heads; h++) {
            for (uint32_t i = 0; i < problem->slots[h]; i++) {
                uint32_t slot = h * SLOTS_MAX + i;
                double single, pairs, expected = difference(&all, slot) / all.drawn;
                mean_gradients(&all, slot, &single, &pairs);
                if (fabs(single - expected) > 2e-4 || fabs(pairs - expected) > 2e-4)
                    fail_msg("%s, head %u, slot %u: %g and %g, not %g", problem->name, h, i, single, pairs, expected);
                largest = fmax(largest, fabs(expected));
            }
        }
        assert_true(largest > 0.01);
    }
}

/* The floor's and protected slots stay whatever the noise. */
static void test_safe(void **state) {
    (void)state;
    const struct problem *problem = &problems[6];
    struct noise noise;
    struct outcome outcome;
    for (uint32_t round = 0; round < 50; round++) {
        for (uint32_t i = 0; i < ALL_MAX; i++)
            noise.uniforms[i / SLOTS_MAX][i % SLOTS_MAX] = fmod(0.1 + 0.618034 * (round * ALL_MAX + i), 0.98) + 0.01;
        draw(problem, problem->scores, &noise, &outcome);
        assert_int_equal(outcome.keep[0], 1);         /* protected, and with it the floor of head 0 is full */
        assert_int_equal(outcome.keep[SLOTS_MAX], 1); /* of head 1 */
        assert_int_equal(outcome.drawn, 2);
    }
}

/* More protected than may stay: the most recent. Nothing to choose: everything stays, without a gradient. */
static void test_bounds(void **state) {
    (void)state;
    struct problem problem = problems[0];
    struct noise noise = {{{0.5, 0.5, 0.5, 0.5, 0.5}}};
    struct outcome outcome;
    problem.sinks = 5;
    problem.total = 2;
    draw(&problem, problem.scores, &noise, &outcome);
    static const uint8_t expected[] = {0, 0, 0, 1, 1};
    assert_memory_equal(outcome.keep, expected, sizeof expected);
    assert_int_equal(outcome.drawn, 0);
    problem = problems[0];
    problem.total = 5;
    draw(&problem, problem.scores, &noise, &outcome);
    assert_int_equal(outcome.drawn, 0);
    for (uint32_t i = 0; i < 5; i++)
        assert_true(outcome.keep[i] == 1 && outcome.gradient[i] == 0);
    problem.total = 3; /* what is no number goes first */
    problem.scores[0][2] = NAN;
    problem.scores[0][0] = -INFINITY;
    draw(&problem, problem.scores, &noise, &outcome);
    assert_true(outcome.keep[2] == 0 && outcome.keep[0] == 0);
    for (uint32_t i = 0; i < 5; i++)
        assert_true(isfinite(outcome.gradient[i]));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_enumeration),
        cmocka_unit_test(test_safe),
        cmocka_unit_test(test_bounds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
