/* SPDX-License-Identifier: Apache-2.0
 *
 * Penalties: kept up to date token by token, they are what the formula gives of the whole prompt and answer.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/penalties.h"

#include <math.h>
#include <stdlib.h>

enum { VOCABULARY = 40, PROMPT_MAX = 30, ANSWER_MAX = 60 };

static float pick(const float *values, int count) {
    return values[rand() % count];
}

/* z' by the definition in the header, in double. */
static double changed_by_definition(double z, int32_t token, const struct penalty_options *options,
    const int32_t *prompt, uint32_t prompt_count, const int32_t *answer, uint32_t answer_count) {
    uint32_t in_prompt = 0, in_answer = 0;
    for (uint32_t i = 0; i < prompt_count; i++)
        in_prompt += prompt[i] == token;
    for (uint32_t i = 0; i < answer_count; i++)
        in_answer += answer[i] == token;
    if (in_prompt + in_answer > 0)
        z = z > 0 ? z / (double)options->repetition : z * (double)options->repetition;
    for (uint32_t i = 0; i < options->biases_count; i++)
        if (options->biases[i].token == token)
            z += (double)options->biases[i].bias;
    if (in_answer > 0)
        z -= (double)options->presence;
    return z - (double)options->frequency * in_answer;
}

static double changed(const struct penalties *penalties, double z, int32_t token) {
    for (uint32_t i = 0; i < penalties->count; i++) {
        const struct logit_change *change = &penalties->changes[i];
        if (i > 0)
            assert_true(change->token > penalties->changes[i - 1].token);
        if (change->token == token)
            z = z * (double)(z > 0 ? change->positive : change->negative) + (double)change->add;
    }
    return z;
}

static void check_all(const struct penalties *penalties, const struct penalty_options *options, const int32_t *prompt,
    uint32_t prompt_count, const int32_t *answer, uint32_t answer_count) {
    for (int32_t token = 0; token < VOCABULARY; token++)
        for (double z = -7.5; z < 10; z += 5) {
            double wanted = changed_by_definition(z, token, options, prompt, prompt_count, answer, answer_count);
            assert_true(fabs(changed(penalties, z, token) - wanted) < 1e-4);
        }
}

static void test_random(void **state) {
    (void)state;
    static const float additions[] = {0, 0, 1.5f, -2, 0.25f}, repetitions[] = {1, 1, 1.3f, 0.5f};
    srand(3);
    for (int round = 0; round < 300; round++) {
        struct logit_bias biases[5];
        struct penalty_options options = {.presence = pick(additions, 5),
            .frequency = pick(additions, 5),
            .repetition = pick(repetitions, 4),
            .biases = biases,
            .biases_count = (uint32_t)(rand() % 6)};
        for (uint32_t i = 0; i < options.biases_count; i++)
            biases[i] = (struct logit_bias){(int32_t)(i * 8 + (uint32_t)(rand() % 8)), (float)(rand() % 201 - 100)};
        int32_t prompt[PROMPT_MAX], answer[ANSWER_MAX];
        uint32_t prompt_count = 1 + (uint32_t)(rand() % PROMPT_MAX), answer_count = (uint32_t)(rand() % ANSWER_MAX);
        for (uint32_t i = 0; i < prompt_count; i++)
            prompt[i] = rand() % VOCABULARY;
        struct penalties penalties = {0};
        assert_int_equal(penalties_begin(&penalties, &options, prompt, prompt_count), 0);
        check_all(&penalties, &options, prompt, prompt_count, answer, 0);
        for (uint32_t i = 0; i < answer_count; i++) {
            answer[i] = rand() % VOCABULARY;
            assert_int_equal(penalties_add(&penalties, &options, answer[i]), 0);
        }
        check_all(&penalties, &options, prompt, prompt_count, answer, answer_count);
        if (penalty_options_neutral(&options))
            assert_int_equal(penalties.count, 0);
        penalties_free(&penalties);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
