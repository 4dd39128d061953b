/* SPDX-License-Identifier: Apache-2.0
 *
 * Outputs of a choice while each allocation in turn fails: nothing is lost, nothing half made comes out, and
 * every output says whose it is; and which special tokens come out.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/choice.h"
#include "engine/model.h"
#include "tests/unit/failing_malloc.h"
#include "tests/unit/tiny_llama.h"

enum { PROMPT = 5, GENERATED = 12, TOKEN_A = 3 + 'a' }; /* tiny_llama.h: the bytes from 3 on */

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

/* The text of a special token is left out, unless the request keeps that one. */
static void special_tokens_come_out_where_they_are_kept(void **state) {
    for (int kept = 0; kept < 2; kept++) {
        struct request *request;
        struct task *task = begin(*state, &request);
        struct sample_result result = {.token = 1}; /* <|im_start|> */
        request->kept_special[0] = kept ? 1 : 2;
        request->kept_special_count = 1;
        assert_int_equal(choice_accept_token(&task->choices[0], &result, 512, 2), FINISH_NONE);
        struct output_node *node = choice_make_last_output(&task->choices[0], FINISH_LENGTH, NULL, 3);
        assert_string_equal(node->output.text, kept ? "ba<|im_start|>" : "ba");
        output_node_free(node);
        task_free(task);
        request_free(request);
    }
}

/* Tokens of one letter each, so that the stream holds some of them back for the stop string. */
static int32_t letter(uint32_t i) {
    return TOKEN_A - 'a' + "abcdefgh"[i % 8];
}

static struct request *make_request(bool echo, int logprobs) {
    struct request *request = request_create();
    request->prompts = calloc(1, sizeof *request->prompts);
    request->prompts_count = 1;
    request->prompts[0].tokens = calloc(PROMPT, sizeof(int32_t));
    request->prompts[0].count = PROMPT;
    for (uint32_t i = 0; i < PROMPT; i++)
        request->prompts[0].tokens[i] = letter(i);
    request->stops = calloc(1, sizeof *request->stops);
    request->stops[0] = strdup("cdefgX");
    request->stops_count = 1;
    request->max_tokens = GENERATED;
    request->stream = true;
    request->echo = echo;
    request->logprobs = logprobs;
    return request;
}

/* What came out of one choice. */
struct sum {
    size_t bytes;
    uint32_t entries;
    uint32_t generated;
    enum finish_reason finish;
};

static void take(struct sum *sum, struct output_node *node, const struct request *request) {
    if (node == NULL)
        return;
    const struct output *output = &node->output;
    assert_ptr_equal(output->request, request);
    assert_int_equal(output->choice, 0);
    assert_true(output->text != NULL || output->text_bytes == 0);
    assert_true(output->tokens != NULL || output->tokens_count == 0);
    assert_true(output->time_s > 0);
    sum->bytes += output->text_bytes;
    sum->entries += output->tokens_count;
    sum->generated += output->generated;
    sum->finish = output->finish;
    output_node_free(node);
}

/* Returns false when the task could not be created. */
static bool live(const struct tokenizer *tokenizer, struct request *request, struct sum *sum) {
    struct task *task = task_create(request, tokenizer);
    if (task == NULL)
        return false;
    struct choice *choice = &task->choices[0];
    int finish = FINISH_NONE;
    for (uint32_t i = 0; finish == FINISH_NONE; i++) {
        struct sample_result result = {.token = letter(i), .logprob = -1, .top_count = 1, .top = {{letter(i), -1}}};
        finish = choice_accept_token(choice, &result, 1000, 1);
        if (finish == FINISH_NONE)
            take(sum, choice_make_output(choice, 2), request);
    }
    struct error error = {.code = ERROR_MEMORY, .message = "no memory for the answer"};
    take(sum, choice_make_last_output(choice, finish < 0 ? FINISH_ERROR : (enum finish_reason)finish, &error, 3),
        request);
    task_free(task);
    return true;
}

static void every_failed_allocation_is_survived(void **state) {
    const struct ground *ground = *state;
    for (int kind = 0; kind < 4; kind++) {
        struct request *request = make_request(kind % 2 == 1, kind < 2 ? -1 : 2);
        uint32_t tokens = GENERATED + (request->echo ? PROMPT : 0), errors = 0, whole = 0;
        bool failed = true;
        for (uint32_t allocations = 0; failed; allocations++) {
            struct sum sum = {0};
            failing_malloc_arm(allocations);
            bool lived = live(ground->tokenizer, request, &sum);
            failed = failing_malloc_disarm();
            assert_true(lived || failed);
            if (!lived)
                continue;
            assert_true(sum.finish == FINISH_LENGTH || (failed && sum.finish == FINISH_ERROR));
            errors += sum.finish == FINISH_ERROR;
            if (sum.finish == FINISH_ERROR)
                continue;
            whole += failed;
            assert_int_equal(sum.bytes, tokens);
            assert_int_equal(sum.generated, GENERATED);
            assert_int_equal(sum.entries, request->logprobs < 0 ? 0 : tokens);
        }
        assert_true(errors > 1 && whole > 1);
        request_free(request);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(next_output_makes_up_for_a_failed_one),
        cmocka_unit_test(special_tokens_come_out_where_they_are_kept),
        cmocka_unit_test(last_output_is_whole_or_an_error),
        cmocka_unit_test(every_failed_allocation_is_survived),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
