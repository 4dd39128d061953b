/* SPDX-License-Identifier: Apache-2.0
 *
 * Outputs of a choice while each allocation in turn fails: nothing is lost, and nothing half made comes out.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <unistd.h>

#include "engine/choice.h"
#include "engine/model.h"
#include "tests/unit/failing_malloc.h"
#include "tests/unit/tiny_llama.h"

enum { TOKEN_A = 3 + 'a' }; /* tiny_llama.h: the bytes from 3 on */

struct ground {
    struct model *model;
    struct tokenizer *tokenizer;
};

static int set_up(void **state) {
    struct ground *ground = calloc(1, sizeof *ground);
    struct tiny_llama options = tiny_llama_default();
    char *path = tiny_llama_save(&options);
    ground->model = model_open(path, NULL);
    assert_non_null(ground->model);
    ground->tokenizer = tokenizer_create(ground->model->file, NULL);
    assert_non_null(ground->tokenizer);
    unlink(path);
    free(path);
    *state = ground;
    return 0;
}

static int tear_down(void **state) {
    struct ground *ground = *state;
    tokenizer_free(ground->tokenizer);
    model_free(ground->model);
    free(ground);
    return 0;
}

/* A request that streams with log-probabilities and echo, its first choice one token on. */
static struct task *begin(const struct ground *ground, struct request **request) {
    *request = request_create();
    (*request)->prompts = calloc(1, sizeof *(*request)->prompts);
    (*request)->prompts_count = 1;
    (*request)->prompts[0].tokens = calloc(1, sizeof(int32_t));
    (*request)->prompts[0].tokens[0] = TOKEN_A + 1;
    (*request)->prompts[0].count = 1;
    (*request)->stream = (*request)->echo = true;
    (*request)->logprobs = 1;
    struct task *task = task_create(*request, ground->tokenizer);
    assert_non_null(task);
    struct sample_result result = {.token = TOKEN_A, .logprob = -1, .top_count = 1};
    assert_int_equal(choice_accept_token(&task->choices[0], &result, 512, 1), FINISH_NONE);
    return task;
}

static void check_whole(const struct output *output) {
    assert_string_equal(output->text, "ba");
    assert_int_equal(output->text_bytes, 2);
    assert_int_equal(output->tokens_count, 2);
    assert_int_equal(output->tokens[1].token, TOKEN_A);
    assert_int_equal(output->generated, 1);
}

static void next_output_makes_up_for_a_failed_one(void **state) {
    struct request *request;
    struct task *task = begin(*state, &request);
    uint32_t failures = 0;
    struct output_node *node = NULL;
    while (node == NULL) {
        failing_malloc_arm(failures);
        node = choice_make_output(&task->choices[0], 2);
        bool failed = failing_malloc_disarm();
        assert_int_equal(node == NULL, failed);
        failures += failed;
    }
    assert_true(failures >= 3);
    check_whole(&node->output);
    output_node_free(node);
    task_free(task);
    request_free(request);
}

static void last_output_is_whole_or_an_error(void **state) {
    bool failed = true;
    for (uint32_t allocations = 0; failed; allocations++) {
        struct request *request;
        struct task *task = begin(*state, &request);
        failing_malloc_arm(allocations);
        struct output_node *node = choice_make_last_output(&task->choices[0], FINISH_LENGTH, NULL, 2);
        failed = failing_malloc_disarm();
        assert_non_null(node);
        assert_int_equal(node->output.finish, failed ? FINISH_ERROR : FINISH_LENGTH);
        assert_int_equal(node->output.error.code, failed ? ERROR_MEMORY : 0);
        if (failed) {
            assert_null(node->output.text);
            assert_int_equal(node->output.text_bytes, 0);
            assert_null(node->output.tokens);
            assert_int_equal(node->output.tokens_count, 0);
        } else {
            check_whole(&node->output);
        }
        output_node_free(node);
        task_free(task);
        request_free(request);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(next_output_makes_up_for_a_failed_one),
        cmocka_unit_test(last_output_is_whole_or_an_error),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
