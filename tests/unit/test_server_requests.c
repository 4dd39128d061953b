/* SPDX-License-Identifier: Apache-2.0
 *
 * Request bodies of /v1/completions and /v1/chat/completions: what is accepted becomes the right request, what is not
 * is refused with the right status, code and parameter.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "server/chat.h"
#include "server/completions.h"
#include "tests/unit/fake_scheduler.h"
#include "tests/unit/gguf_writer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct tokenizer *tokenizer;
static struct chat_template *chat_template;
static struct policy_settings kv_policy;

static struct parse_context context_of(void) {
    return (struct parse_context){.tokenizer = tokenizer,
        .vocabulary = FAKE_VOCABULARY,
        .context = 100,
        .tokens_max = 60,
        .model_id = "fake",
        .kv_policy = &kv_policy,
        .chat_template = chat_template,
        .request_id = "req-test"};
}

static int parse(plan_parse parser, const char *text, size_t bytes, struct plan *plan, struct fault *fault) {
    struct parse_context context = context_of();
    *plan = (struct plan){0};
    *fault = (struct fault){0};
    json_t *body = fields_parse(text, bytes, fault);
    int failed = body == NULL || parser(body, &context, plan, fault) != 0 ? -1 : params_finish(plan, fault);
    json_decref(body);
    assert_int_equal(failed != 0, fault->status != 0);
    return failed;
}

/* Parses what must be accepted. */
static struct plan accepted(plan_parse parser, const char *text) {
    struct plan plan;
    struct fault fault;
    if (parse(parser, text, strlen(text), &plan, &fault) != 0)
        fail_msg("%s: %s", text, fault.message);
    return plan;
}

struct refusal {
    const char *body;
    const char *parameter; /* "" for null */
};

static void refuse(plan_parse parser, const struct refusal *cases, size_t count, unsigned status, const char *code) {
    for (size_t i = 0; i < count; i++) {
        struct plan plan;
        struct fault fault;
        const struct refusal *expected = &cases[i];
        if (parse(parser, expected->body, strlen(expected->body), &plan, &fault) == 0)
            fail_msg("accepted: %s", expected->body);
        if (strcmp(fault.parameter, expected->parameter) != 0 || fault.status != status ||
            strcmp(fault.code == NULL ? "" : fault.code, code) != 0)
            fail_msg("%s: got %u %s %s: %s", expected->body, fault.status, fault.parameter,
                fault.code == NULL ? "null" : fault.code, fault.message);
        assert_true(strlen(fault.message) > 0);
        assert_true(utf8_valid(fault.message, strlen(fault.message)));
        plan_free(&plan);
    }
}

#define REFUSE(parser, cases) refuse(parser, cases, sizeof(cases) / sizeof((cases)[0]), 400, "")

/* --- Bodies of any kind --- */

static void bodies_that_are_not_json_objects_are_refused(void **state) {
    (void)state;
    static const struct refusal cases[] = {
        {"", ""},
        {"{", ""},
        {"nonsense", ""},
        {"[]", ""},
        {"\"text\"", ""},
        {"null", ""},
        {"42", ""},
        {"{\"prompt\": \"a\"} trailing", ""},
        {"{\"prompt\": \"a\"}{}", ""},
        {"{\"prompt\": \"a\", \"prompt\": \"b\"}", ""},
        {"{\"prompt\": \"a\", \"temperature\": NaN}", ""},
        {"{\"prompt\": \"a\", \"temperature\": Infinity}", ""},
        {"{\"prompt\": \"a\", \"temperature\": 1e999}", ""},
        {"{\"prompt\": \"a\", \"seed\": 92233720368547758070}", ""},
        {"{\"prompt\": \"\\ud800\"}", ""},
        {"{\"prompt\": \"\\udc00\\ud800\"}", ""},
        {"{\"prompt\": \"\xff\xfe\"}", ""},
        {"{\"prompt\": \"\xc0\xaf\"}", ""},
        {"{\"prompt\": \"\xed\xa0\x80\"}", ""},
        {"{\"prompt\": \"a\n\"}", ""},
        {"{'prompt': 'a'}", ""},
        {"{\"prompt\": \"a\",}", ""},
        {"\xef\xbb\xbf{\"prompt\": \"a\"}", ""},
    };
    REFUSE(completions_parse, cases);
    REFUSE(chat_parse, cases);
}

static char *nested(unsigned depth, const char *before, const char *after) {
    size_t size = 2 * depth + strlen(before) + strlen(after) + 1;
    char *text = malloc(size);
    assert_non_null(text);
    char *at = stpcpy(text, before);
    memset(at, '[', depth);
    memset(at + depth, ']', depth);
    strcpy(at + 2 * depth, after);
    return text;
}

static void depth_and_number_of_containers_are_limited(void **state) {
    (void)state;
    struct fault fault;
    char *text = nested(63, "{\"x\":", "}");
    json_t *body = fields_parse(text, strlen(text), &fault);
    assert_non_null(body);
    json_decref(body);
    free(text);
    text = nested(64, "{\"x\":", "}");
    assert_null(fields_parse(text, strlen(text), &fault));
    free(text);
    text = nested(1000000, "{\"x\":", "}");
    assert_null(fields_parse(text, strlen(text), &fault));
    free(text);
    /* Brackets inside strings are text. */
    text = nested(100, "{\"x\":\"\\\"", "\"}");
    body = fields_parse(text, strlen(text), &fault);
    free(text);
    assert_non_null(body);
    json_decref(body);
    size_t many = 70000;
    text = malloc(3 * many + 16);
    assert_non_null(text);
    char *at = stpcpy(text, "{\"x\":[[]");
    for (size_t i = 0; i < many; i++)
        at = stpcpy(at, ",[]");
    strcpy(at, "]}");
    assert_null(fields_parse(text, strlen(text), &fault));
    assert_int_equal(fault.status, 400);
    free(text);
}

/* --- Completions --- */

static void completions_have_the_api_defaults(void **state) {
    (void)state;
    /* Trap 10: null is the default everywhere. */
    static const char *const bodies[] = {"{\"prompt\":\"ab\"}",
        "{\"prompt\":\"ab\",\"model\":null,\"n\":null,\"seed\":null,\"temperature\":null,\"top_p\":null,\"top_k\":null,"
        "\"min_p\":null,\"stop\":null,\"max_tokens\":null,\"logprobs\":null,\"echo\":null,\"ignore_eos\":null,"
        "\"stream\":null,\"stream_options\":null,\"suffix\":null,\"logit_bias\":null,\"presence_penalty\":null,"
        "\"frequency_penalty\":null,\"best_of\":null,\"user\":null,\"response_format\":null}"};
    for (size_t i = 0; i < 2; i++) {
        struct plan plan = accepted(completions_parse, bodies[i]);
        const struct request *request = plan.request;
        assert_int_equal(request->prompts_count, 1);
        assert_int_equal(request->prompts[0].count, 2);
        assert_int_equal(request->prompts[0].tokens[0], 'a');
        assert_int_equal(request->prompts[0].tokens[1], 'b');
        assert_int_equal(request->n, 1);
        assert_int_equal(request->max_tokens, 16);
        assert_int_equal(request->logprobs, -1);
        assert_int_equal(request->stops_count, 0);
        assert_false(request->echo || request->stream || request->ignore_eos || plan.include_usage || plan.chat);
        assert_true(request->skip_special);
        assert_true(request->sampling.temperature == 1.0f && request->sampling.top_p == 1.0f);
        assert_true(request->sampling.min_p == 0.0f && request->sampling.top_k == 0);
        plan_free(&plan);
    }
}

static void completions_read_every_parameter(void **state) {
    (void)state;
    struct plan plan = accepted(completions_parse,
        "{\"model\":\"fake\",\"prompt\":[[1,2.0,3],[258]],\"n\":3,\"seed\":-5,\"temperature\":0.5,\"top_p\":0.25,"
        "\"top_k\":7,\"min_p\":0.125,\"stop\":[\"x\",\"yz\"],\"max_tokens\":9,\"logprobs\":5,\"echo\":true,"
        "\"ignore_eos\":true,\"stream\":true,\"stream_options\":{\"include_usage\":true},\"best_of\":3,"
        "\"user\":\"me\",\"skip_special_tokens\":false,\"presence_penalty\":1.5,\"frequency_penalty\":-0.5,"
        "\"repetition_penalty\":2,\"min_tokens\":4,\"stop_token_ids\":[7,8.0],"
        "\"logit_bias\":{\"0\":-100,\"258\":2.5},\"suffix\":\"\",\"response_format\":{\"type\":\"text\"}}");
    const struct request *request = plan.request;
    assert_int_equal(request->prompts_count, 2);
    assert_int_equal(request->prompts[0].count, 3);
    assert_int_equal(request->prompts[0].tokens[1], 2);
    assert_int_equal(request->prompts[1].tokens[0], 258);
    assert_int_equal(request->n, 3);
    assert_true(request->sampling.seed == (uint64_t)-5);
    assert_true(request->sampling.temperature == 0.5f && request->sampling.top_p == 0.25f);
    assert_true(request->sampling.min_p == 0.125f && request->sampling.top_k == 7);
    assert_int_equal(request->stops_count, 2);
    assert_string_equal(request->stops[1], "yz");
    assert_int_equal(request->max_tokens, 9);
    assert_int_equal(request->logprobs, 5);
    assert_true(request->echo && request->ignore_eos && request->stream && plan.include_usage);
    assert_false(request->skip_special);
    assert_true(request->penalties.presence == 1.5f && request->penalties.frequency == -0.5f);
    assert_true(request->penalties.repetition == 2.0f);
    assert_int_equal(request->min_tokens, 4);
    assert_int_equal(request->stop_tokens_count, 2);
    assert_int_equal(request->stop_tokens[1], 8);
    assert_int_equal(request->penalties.biases_count, 2);
    for (uint32_t i = 0; i < 2; i++) {
        const struct logit_bias *bias = &request->penalties.biases[i];
        assert_true(bias->token == 0 ? bias->bias == -100.0f : bias->token == 258 && bias->bias == 2.5f);
    }
    assert_int_equal(plan.n, 3);
    assert_int_equal(plan.logprobs, 5);
    plan_free(&plan);
}

static void candidates_beyond_n_are_generated_with_logprobs(void **state) {
    (void)state;
    struct plan plan = accepted(completions_parse, "{\"prompt\":[\"a\",\"b\"],\"n\":2,\"best_of\":5}");
    assert_int_equal(plan.request->n, 5);
    assert_int_equal(plan.n, 2);
    assert_int_equal(plan.request->logprobs, 0);
    assert_int_equal(plan.logprobs, -1);
    plan_free(&plan);
    plan = accepted(completions_parse, "{\"prompt\":\"a\",\"best_of\":2,\"logprobs\":3}");
    assert_int_equal(plan.request->logprobs, 3);
    assert_int_equal(plan.logprobs, 3);
    plan_free(&plan);
}

static void one_and_one_point_zero_are_one_number(void **state) {
    (void)state;
    struct plan plan = accepted(completions_parse,
        "{\"prompt\":\"a\",\"n\":2.0,\"max_tokens\":5e0,\"temperature\":1,\"top_p\":1,\"seed\":4.0,\"logprobs\":0.0}");
    assert_int_equal(plan.request->n, 2);
    assert_int_equal(plan.request->max_tokens, 5);
    assert_int_equal(plan.request->sampling.seed, 4);
    assert_int_equal(plan.request->logprobs, 0);
    plan_free(&plan);
}

static void completions_at_their_limits_are_accepted(void **state) {
    (void)state;
    static const char *const bodies[] = {"{\"prompt\":\"a\",\"n\":128}", "{\"prompt\":\"a\",\"temperature\":2}",
        "{\"prompt\":\"a\",\"temperature\":0}", "{\"prompt\":\"a\",\"top_p\":0}", "{\"prompt\":\"a\",\"min_p\":1}",
        "{\"prompt\":\"a\",\"top_k\":-1}", "{\"prompt\":\"a\",\"top_k\":0}",
        "{\"prompt\":\"a\",\"max_tokens\":0,\"echo\":true}", "{\"prompt\":\"a\",\"max_tokens\":2147483647}",
        "{\"prompt\":\"a\",\"seed\":9223372036854775807}", "{\"prompt\":\"a\",\"seed\":-9223372036854775808}",
        "{\"prompt\":\"a\",\"stop\":[]}", "{\"prompt\":\"a\",\"stop\":\"b\"}",
        "{\"prompt\":\"a\",\"stop\":[\"1\",\"2\",\"3\",\"4\"]}", "{\"prompt\":\"a\",\"best_of\":1}",
        "{\"prompt\":\"a\",\"stream\":true,\"stream_options\":{}}", "{\"prompt\":\"a\",\"unheard_of\":{\"x\":[1]}}",
        "{\"prompt\":\"\\u0000\"}", "{\"prompt\":[0,258]}", "{\"prompt\":[\"\",\"\"]}"};
    for (size_t i = 0; i < sizeof bodies / sizeof bodies[0]; i++) {
        struct plan plan = accepted(completions_parse, bodies[i]);
        assert_true(plan.request->max_tokens <= 100); /* never more than the context */
        assert_true(plan.request->sampling.top_p > 0);
        plan_free(&plan);
    }
}

static void completions_out_of_range_are_refused(void **state) {
    (void)state;
    static const struct refusal cases[] = {
        {"{}", "prompt"},
        {"{\"prompt\":null}", "prompt"},
        {"{\"prompt\":5}", "prompt"},
        {"{\"prompt\":{}}", "prompt"},
        {"{\"prompt\":true}", "prompt"},
        {"{\"prompt\":[]}", "prompt"},
        {"{\"prompt\":[[]]}", "prompt"},
        {"{\"prompt\":[null]}", "prompt"},
        {"{\"prompt\":[\"a\",1]}", "prompt"},
        {"{\"prompt\":[1,\"a\"]}", "prompt"},
        {"{\"prompt\":[1,[2]]}", "prompt"},
        {"{\"prompt\":[[1],2]}", "prompt"},
        {"{\"prompt\":[[1],\"a\"]}", "prompt"},
        {"{\"prompt\":[1.5]}", "prompt"},
        {"{\"prompt\":[-1]}", "prompt"},
        {"{\"prompt\":[259]}", "prompt"},
        {"{\"prompt\":[4294967297]}", "prompt"},
        {"{\"prompt\":[true]}", "prompt"},
        {"{\"prompt\":\"a\",\"n\":0}", "n"},
        {"{\"prompt\":\"a\",\"n\":129}", "n"},
        {"{\"prompt\":\"a\",\"n\":1.5}", "n"},
        {"{\"prompt\":\"a\",\"n\":\"1\"}", "n"},
        {"{\"prompt\":\"a\",\"n\":true}", "n"},
        {"{\"prompt\":\"a\",\"seed\":1e30}", "seed"},
        {"{\"prompt\":\"a\",\"seed\":\"x\"}", "seed"},
        {"{\"prompt\":\"a\",\"temperature\":-0.1}", "temperature"},
        {"{\"prompt\":\"a\",\"temperature\":2.1}", "temperature"},
        {"{\"prompt\":\"a\",\"temperature\":\"hot\"}", "temperature"},
        {"{\"prompt\":\"a\",\"top_p\":1.01}", "top_p"},
        {"{\"prompt\":\"a\",\"top_p\":-1}", "top_p"},
        {"{\"prompt\":\"a\",\"top_k\":-2}", "top_k"},
        {"{\"prompt\":\"a\",\"top_k\":0.5}", "top_k"},
        {"{\"prompt\":\"a\",\"min_p\":1.5}", "min_p"},
        {"{\"prompt\":\"a\",\"stop\":5}", "stop"},
        {"{\"prompt\":\"a\",\"stop\":\"\"}", "stop"},
        {"{\"prompt\":\"a\",\"stop\":[\"x\",\"\"]}", "stop"},
        {"{\"prompt\":\"a\",\"stop\":[\"x\",null]}", "stop"},
        {"{\"prompt\":\"a\",\"stop\":\"x\\u0000y\"}", "stop"},
        {"{\"prompt\":\"a\",\"stop\":[\"1\",\"2\",\"3\",\"4\",\"5\"]}", "stop"},
        {"{\"prompt\":\"a\",\"max_tokens\":-1}", "max_tokens"},
        {"{\"prompt\":\"a\",\"max_tokens\":\"9\"}", "max_tokens"},
        {"{\"prompt\":\"a\",\"max_tokens\":99999999999}", "max_tokens"},
        {"{\"prompt\":\"a\",\"logprobs\":6}", "logprobs"},
        {"{\"prompt\":\"a\",\"logprobs\":-1}", "logprobs"},
        {"{\"prompt\":\"a\",\"logprobs\":true}", "logprobs"},
        {"{\"prompt\":\"a\",\"echo\":1}", "echo"},
        {"{\"prompt\":\"a\",\"ignore_eos\":\"yes\"}", "ignore_eos"},
        {"{\"prompt\":\"a\",\"stream\":\"true\"}", "stream"},
        {"{\"prompt\":\"a\",\"stream_options\":{\"include_usage\":true}}", "stream_options"},
        {"{\"prompt\":\"a\",\"stream\":true,\"stream_options\":true}", "stream_options"},
        {"{\"prompt\":\"a\",\"stream\":true,\"stream_options\":{\"include_usage\":1}}", "include_usage"},
        {"{\"prompt\":\"a\",\"model\":5}", "model"},
        {"{\"prompt\":\"a\",\"best_of\":21}", "best_of"},
        {"{\"prompt\":\"a\",\"best_of\":2,\"n\":3}", "best_of"},
        {"{\"prompt\":\"a\",\"best_of\":2,\"stream\":true}", "best_of"},
        {"{\"prompt\":\"a\",\"suffix\":\"x\"}", "suffix"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"999999\":5}}", "logit_bias"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"259\":5}}", "logit_bias"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"-1\":5}}", "logit_bias"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"01\":5}}", "logit_bias"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"a\":5}}", "logit_bias"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"\":5}}", "logit_bias"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"1 \":5}}", "logit_bias"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"1\":100.5}}", "logit_bias"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"1\":-101}}", "logit_bias"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"1\":\"5\"}}", "logit_bias"},
        {"{\"prompt\":\"a\",\"logit_bias\":{\"1\":null}}", "logit_bias"},
        {"{\"prompt\":\"a\",\"logit_bias\":[[1,5]]}", "logit_bias"},
        {"{\"prompt\":\"a\",\"presence_penalty\":2.5}", "presence_penalty"},
        {"{\"prompt\":\"a\",\"frequency_penalty\":-2.1}", "frequency_penalty"},
        {"{\"prompt\":\"a\",\"frequency_penalty\":\"1\"}", "frequency_penalty"},
        {"{\"prompt\":\"a\",\"repetition_penalty\":0}", "repetition_penalty"},
        {"{\"prompt\":\"a\",\"repetition_penalty\":-1}", "repetition_penalty"},
        {"{\"prompt\":\"a\",\"repetition_penalty\":10.5}", "repetition_penalty"},
        {"{\"prompt\":\"a\",\"response_format\":{\"type\":\"json_object\"}}", "response_format"},
        {"{\"prompt\":\"a\",\"response_format\":\"text\"}", "response_format"},
        {"{\"prompt\":\"a\",\"tools\":[{}]}", "tools"},
        {"{\"prompt\":\"a\",\"min_tokens\":17}", "min_tokens"},
        {"{\"prompt\":\"a\",\"min_tokens\":4,\"max_tokens\":3}", "min_tokens"},
        {"{\"prompt\":\"a\",\"min_tokens\":-1}", "min_tokens"},
        {"{\"prompt\":\"a\",\"stop_token_ids\":[259]}", "stop_token_ids"},
        {"{\"prompt\":\"a\",\"stop_token_ids\":[-1]}", "stop_token_ids"},
        {"{\"prompt\":\"a\",\"stop_token_ids\":[1.5]}", "stop_token_ids"},
        {"{\"prompt\":\"a\",\"stop_token_ids\":[\"1\"]}", "stop_token_ids"},
        {"{\"prompt\":\"a\",\"stop_token_ids\":5}", "stop_token_ids"},
        {"{\"prompt\":\"a\",\"n_predict\":3}", "n_predict"},
        {"{\"prompt\":\"a\",\"max_completion_tokens\":3}", "max_completion_tokens"},
        {"{\"prompt\":\"a\",\"kv_cache\":{\"policy\":\"fool\"}}", "kv_cache.policy"},
    };
    REFUSE(completions_parse, cases);
}

static char *repeated_prompt(size_t count) {
    char *text = malloc(count + 64);
    assert_non_null(text);
    char *at = stpcpy(text, "{\"prompt\":\"");
    memset(at, 'a', count);
    strcpy(at + count, "\"}");
    return text;
}

static void prompts_over_the_context_are_refused(void **state) {
    (void)state;
    char *text = repeated_prompt(100);
    struct plan plan = accepted(completions_parse, text);
    plan_free(&plan);
    free(text);
    text = repeated_prompt(101);
    struct refusal refusal = {text, "prompt"};
    refuse(completions_parse, &refusal, 1, 400, "context_length_exceeded");
    free(text);
    char chat[256] = "{\"messages\":[{\"role\":\"user\",\"content\":\"";
    memset(chat + strlen(chat), 'a', 100);
    strcat(chat, "\"}]}");
    refusal = (struct refusal){chat, "messages"};
    refuse(chat_parse, &refusal, 1, 400, "context_length_exceeded");
}

static void unknown_models_are_not_found(void **state) {
    (void)state;
    static const struct refusal completion = {"{\"prompt\":\"a\",\"model\":\"gpt-4\"}", "model"};
    static const struct refusal chat = {
        "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"model\":\"gpt-4\"}", "model"};
    refuse(completions_parse, &completion, 1, 404, "model_not_found");
    refuse(chat_parse, &chat, 1, 404, "model_not_found");
}

static void number_of_choices_is_limited(void **state) {
    (void)state;
    struct fault fault;
    struct plan plan;
    for (unsigned prompts = 16; prompts <= 17; prompts++) {
        char text[512], *at = stpcpy(text, "{\"n\":128,\"prompt\":[\"a\"");
        for (unsigned i = 1; i < prompts; i++)
            at = stpcpy(at, ",\"a\"");
        strcpy(at, "]}");
        int failed = parse(completions_parse, text, strlen(text), &plan, &fault);
        assert_int_equal(failed != 0, prompts == 17); /* 16 * 128 = 2048 */
        if (failed != 0) {
            assert_string_equal(fault.parameter, "prompt");
            assert_non_null(strstr(fault.message, "2048"));
        }
        plan_free(&plan);
    }
}

static void empty_prompts_begin_with_the_bos_token(void **state) {
    (void)state;
    struct plan plan = accepted(completions_parse, "{\"prompt\":[\"\",\"a\"]}");
    assert_int_equal(plan.request->prompts[0].count, 1);
    assert_int_equal(plan.request->prompts[0].tokens[0], FAKE_BOS);
    assert_int_equal(plan.request->prompts[1].count, 1);
    assert_int_equal(plan.request->prompts[1].tokens[0], 'a');
    plan_free(&plan);
}

static void models_that_want_a_bos_token_get_one(void **state) {
    (void)state;
    struct tokenizer *plain = tokenizer;
    tokenizer = fake_tokenizer_create(true);
    struct plan plan = accepted(completions_parse, "{\"prompt\":[\"\",\"a\"]}");
    assert_int_equal(plan.request->prompts[0].count, 1);
    assert_int_equal(plan.request->prompts[1].count, 2);
    assert_int_equal(plan.request->prompts[1].tokens[0], FAKE_BOS);
    plan_free(&plan);
    plan = accepted(completions_parse, "{\"prompt\":\"a\",\"add_special_tokens\":false}");
    assert_int_equal(plan.request->prompts[0].count, 1);
    plan_free(&plan);
    plan = accepted(completions_parse, "{\"prompt\":[97]}");
    assert_int_equal(plan.request->prompts[0].count, 1);
    plan_free(&plan);
    tokenizer_free(tokenizer);
    tokenizer = plain;
}

static void seeds_differ_when_none_is_given(void **state) {
    (void)state;
    struct plan first = accepted(completions_parse, "{\"prompt\":\"a\"}");
    struct plan second = accepted(completions_parse, "{\"prompt\":\"a\"}");
    assert_true(first.request->sampling.seed != second.request->sampling.seed);
    plan_free(&first);
    plan_free(&second);
}

/* --- Chats --- */

static void expect_prompt(struct plan *plan, const char *expected) {
    const struct prompt *prompt = &plan->request->prompts[0];
    struct token_list ids = {0};
    assert_int_equal(tokenizer_encode(tokenizer, expected, strlen(expected), true, &ids, NULL), 0);
    assert_int_equal(prompt->count, ids.count);
    assert_memory_equal(prompt->tokens, ids.ids, ids.count * sizeof *ids.ids);
    token_list_free(&ids);
}

static void chats_are_rendered_with_the_template(void **state) {
    (void)state;
    static const char *const bodies[] = {
        "{\"messages\":[{\"role\":\"system\",\"content\":\"S\"},{\"role\":\"user\",\"content\":\"hi\"}]}",
        /* developer is system; parts are joined; name, empty tool lists and unknown fields do no harm (traps 19, 20) */
        "{\"messages\":[{\"role\":\"developer\",\"content\":\"S\",\"name\":\"x\"},{\"role\":\"user\",\"name\":null,"
        "\"extra\":1,\"content\":[{\"type\":\"text\",\"text\":\"h\"},{\"type\":\"text\",\"text\":\"i\"}]}],"
        "\"tools\":[],\"tool_choice\":\"none\",\"modalities\":[\"text\"]}"};
    for (size_t i = 0; i < 2; i++) {
        struct plan plan = accepted(chat_parse, bodies[i]);
        expect_prompt(
            &plan, "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
        assert_true(plan.chat);
        assert_int_equal(plan.request->max_tokens, 100); /* until the context is full */
        assert_int_equal(plan.request->logprobs, -1);
        plan_free(&plan);
    }
}

static void chats_accept_null_content_of_assistants(void **state) {
    (void)state;
    struct plan plan = accepted(chat_parse,
        "{\"messages\":[{\"role\":\"system\",\"content\":\"S\"},{\"role\":\"assistant\",\"content\":null},"
        "{\"role\":\"user\",\"content\":\"\"}]}");
    plan_free(&plan);
    plan = accepted(chat_parse, "{\"messages\":[{\"role\":\"system\",\"content\":\"S\"},{\"role\":\"assistant\"}]}");
    plan_free(&plan);
}

static void chats_read_their_own_parameters(void **state) {
    (void)state;
    struct plan plan = accepted(chat_parse,
        "{\"messages\":[{\"role\":\"user\",\"content\":\"\"}],\"max_tokens\":5,\"max_completion_tokens\":7,"
        "\"logprobs\":true,\"top_logprobs\":20}");
    assert_int_equal(plan.request->max_tokens, 7);
    assert_int_equal(plan.request->logprobs, 20);
    plan_free(&plan);
    /* Trap 9: logprobs without top_logprobs. */
    plan = accepted(chat_parse, "{\"messages\":[{\"role\":\"user\",\"content\":\"\"}],\"logprobs\":true}");
    assert_int_equal(plan.request->logprobs, 0);
    plan_free(&plan);
    plan = accepted(
        chat_parse, "{\"messages\":[{\"role\":\"user\",\"content\":\"\"}],\"max_tokens\":5,\"logprobs\":false}");
    assert_int_equal(plan.request->max_tokens, 5);
    assert_int_equal(plan.request->logprobs, -1);
    plan_free(&plan);
}

#define USER "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]"

static void chats_out_of_range_are_refused(void **state) {
    (void)state;
    static const struct refusal cases[] = {
        {"{}", "messages"},
        {"{\"messages\":null}", "messages"},
        {"{\"messages\":[]}", "messages"},
        {"{\"messages\":\"hi\"}", "messages"},
        {"{\"messages\":[5]}", "messages[0]"},
        {"{\"messages\":[{\"content\":\"a\"}]}", "messages[0].role"},
        {"{\"messages\":[{\"role\":\"wizard\",\"content\":\"a\"}]}", "messages[0].role"},
        {"{\"messages\":[{\"role\":5,\"content\":\"a\"}]}", "messages[0].role"},
        {"{\"messages\":[{\"role\":\"user\"}]}", "messages[0].content"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":null}]}", "messages[0].content"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":5}]}", "messages[0].content"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":{}}]}", "messages[0].content"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":{}}]}]}",
            "messages[0].content"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":[\"a\"]}]}", "messages[0].content"},
        {USER ",\"max_tokens\":-1}", "max_tokens"},
        {USER ",\"max_completion_tokens\":-1}", "max_completion_tokens"},
        {USER ",\"logprobs\":1}", "logprobs"},
        {USER ",\"top_logprobs\":21,\"logprobs\":true}", "top_logprobs"},
        {USER ",\"top_logprobs\":2}", "top_logprobs"},
        {USER ",\"tools\":[{\"type\":\"function\"}]}", "tools[0]"},
        {USER ",\"tools\":{}}", "tools"},
        /* the template has no place for them */
        {USER ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]}", "tools"},
        {USER ",\"parallel_tool_calls\":1}", "parallel_tool_calls"},
        {USER ",\"chat_template_kwargs\":[]}", "chat_template_kwargs"},
        {USER ",\"continue_final_message\":true,\"add_generation_prompt\":true}", "continue_final_message"},
        {USER ",\"documents\":{}}", "documents"},
        {"{\"messages\":[{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":5}]}", "messages[0].tool_calls"},
        {USER ",\"functions\":[{}]}", "functions"},
        {USER ",\"tool_choice\":\"required\"}", "tool_choice"},
        {USER ",\"tool_choice\":{\"type\":\"function\"}}", "tool_choice"},
        {USER ",\"modalities\":[\"audio\"]}", "modalities"},
        {USER ",\"response_format\":{\"type\":\"json_schema\"}}", "response_format"},
        {USER ",\"n\":200}", "n"},
        {"{\"messages\":[{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{}]}]}", "messages[0].tool_calls"},
    };
    REFUSE(chat_parse, cases);
}

/* What strangers write is text, whatever it looks like: it cannot end a message. */
static void special_tokens_in_contents_stay_text(void **state) {
    (void)state;
    struct plan plan = accepted(chat_parse,
        "{\"messages\":[{\"role\":\"system\",\"content\":\"<|im_end|>\"},{\"role\":\"user\",\"content\":"
        "[{\"type\":\"text\",\"text\":\"<|im_\"},{\"type\":\"text\",\"text\":\"start|>\"}]}]}");
    const struct prompt *prompt = &plan.request->prompts[0];
    size_t special = 0;
    for (uint32_t i = 0; i < prompt->count; i++)
        special += prompt->tokens[i] >= 256;
    assert_int_equal(special, 5); /* two messages of two, and the assistant's beginning */
    plan_free(&plan);
}

static void a_last_message_may_be_continued(void **state) {
    (void)state;
    struct plan plan = accepted(chat_parse,
        "{\"messages\":[{\"role\":\"system\",\"content\":\"S\"},{\"role\":\"assistant\",\"content\":\" to S \"}],"
        "\"continue_final_message\":true}");
    expect_prompt(&plan, "<|im_start|>system\nS<|im_end|>\n<|im_start|>assistant\n to S ");
    plan_free(&plan);
    plan = accepted(chat_parse, USER ",\"add_generation_prompt\":false,\"add_special_tokens\":true}");
    assert_int_equal(plan.request->prompts[0].tokens[0], FAKE_BOS);
    assert_int_equal(plan.request->prompts[0].tokens[1], 's'); /* the template begins with it */
    plan_free(&plan);
}

static void models_without_a_template_cannot_chat(void **state) {
    (void)state;
    struct parse_context context = context_of();
    struct plan plan = {0};
    struct fault fault = {0};
    context.chat_template = NULL;
    context.chat_refusal = "no template";
    json_t *body = fields_parse(USER "}", strlen(USER "}"), &fault);
    assert_non_null(body);
    assert_int_not_equal(chat_parse(body, &context, &plan, &fault), 0);
    assert_int_equal(fault.status, 400);
    assert_non_null(strstr(fault.message, "no template"));
    json_decref(body);
    plan_free(&plan);
}

static void expect_chat(const char *more, const char *prompt) {
    char body[500];
    snprintf(body, sizeof body, USER "%s}", more);
    struct plan plan = accepted(chat_parse, body);
    expect_prompt(&plan, prompt);
    plan_free(&plan);
}

/* Tools and documents choose among the templates of a model file, and their absence, too. */
static void requests_choose_a_template(void **state) {
    (void)state;
    struct gguf_writer *writer = gguf_writer_create();
    struct chat_template *usual = chat_template;
    size_t bytes;
    gguf_writer_string(writer, "tokenizer.chat_template", "usual");
    gguf_writer_string(
        writer, "tokenizer.chat_template.tool_use", "<tool_call>{{ tools[0].function.name if tools else '' }}");
    gguf_writer_string(writer, "tokenizer.chat_template.rag", "rag {{ documents[0].title }}");
    uint8_t *data = gguf_writer_finish(writer, &bytes);
    struct gguf *file = gguf_open_memory(data, bytes, "test", NULL);
    chat_template = chat_template_open(file, tokenizer, NULL);
    assert_non_null(chat_template);
#define TOOLS ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]"
#define DOCUMENTS ",\"documents\":[{\"title\":\"d\"}]"
    expect_chat("", "usual");
    expect_chat(TOOLS, "<tool_call>f");
    expect_chat(DOCUMENTS, "rag d");
    expect_chat(TOOLS DOCUMENTS, "<tool_call>f");
    expect_chat(TOOLS ",\"tool_choice\":\"none\"", "usual");
    expect_chat(TOOLS DOCUMENTS ",\"tool_choice\":\"none\"", "rag d");
    expect_chat(",\"tools\":[],\"documents\":[]", "usual");
    chat_template_free(chat_template);
    chat_template = usual;
    gguf_free(file);
    free(data);
}

static int open_tokenizer(void **state) {
    (void)state;
    tokenizer = fake_tokenizer_create(false);
    chat_template = chat_template_create(FAKE_TEMPLATE, strlen(FAKE_TEMPLATE), tokenizer, NULL);
    assert_non_null(chat_template);
    policy_settings_default(policy_find("full"), &kv_policy);
    return 0;
}

static int close_tokenizer(void **state) {
    (void)state;
    chat_template_free(chat_template);
    tokenizer_free(tokenizer);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bodies_that_are_not_json_objects_are_refused),
        cmocka_unit_test(depth_and_number_of_containers_are_limited),
        cmocka_unit_test(completions_have_the_api_defaults),
        cmocka_unit_test(completions_read_every_parameter),
        cmocka_unit_test(candidates_beyond_n_are_generated_with_logprobs),
        cmocka_unit_test(one_and_one_point_zero_are_one_number),
        cmocka_unit_test(completions_at_their_limits_are_accepted),
        cmocka_unit_test(completions_out_of_range_are_refused),
        cmocka_unit_test(prompts_over_the_context_are_refused),
        cmocka_unit_test(unknown_models_are_not_found),
        cmocka_unit_test(number_of_choices_is_limited),
        cmocka_unit_test(empty_prompts_begin_with_the_bos_token),
        cmocka_unit_test(models_that_want_a_bos_token_get_one),
        cmocka_unit_test(seeds_differ_when_none_is_given),
        cmocka_unit_test(chats_are_rendered_with_the_template),
        cmocka_unit_test(chats_accept_null_content_of_assistants),
        cmocka_unit_test(chats_read_their_own_parameters),
        cmocka_unit_test(chats_out_of_range_are_refused),
        cmocka_unit_test(special_tokens_in_contents_stay_text),
        cmocka_unit_test(a_last_message_may_be_continued),
        cmocka_unit_test(models_without_a_template_cannot_chat),
        cmocka_unit_test(requests_choose_a_template),
    };
    return cmocka_run_group_tests_name("server_requests", tests, open_tokenizer, close_tokenizer);
}
