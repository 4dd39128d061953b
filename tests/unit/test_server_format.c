/* SPDX-License-Identifier: Apache-2.0
 *
 * What the server writes: JSON strings, faults, replies and chunks (read back with jansson), metrics.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "server/fault.h"
#include "server/format.h"
#include "server/metrics.h"
#include "tests/unit/fake_scheduler.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static struct tokenizer *tokenizer;

static json_t *read_json(const struct buffer *buffer) {
    assert_false(buffer->failed);
    json_error_t error;
    json_t *value =
        json_loadb(buffer->data, buffer->length, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL, &error);
    if (value == NULL)
        fail_msg("%s: %.*s", error.text, (int)buffer->length, buffer->data);
    return value;
}

static void expect_json_string(const char *text, size_t bytes, const char *expected, size_t expected_bytes) {
    struct buffer buffer = {0};
    buffer_json_string(&buffer, text, bytes);
    json_t *value = read_json(&buffer);
    assert_int_equal(json_string_length(value), expected_bytes);
    assert_memory_equal(json_string_value(value), expected, expected_bytes);
    json_decref(value);
    buffer_free(&buffer);
}

static void strings_survive_json(void **state) {
    (void)state;
    char text[256];
    for (int i = 0; i < 128; i++)
        text[i] = (char)i;
    expect_json_string(text, 128, text, 128);
    expect_json_string("", 0, "", 0);
    expect_json_string(NULL, 0, "", 0);
    expect_json_string("h\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", 10, "h\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", 10);
}

/* One U+FFFD for each maximal invalid part: the examples of Unicode 15, tables 3-8 to 3-11. */
static void invalid_utf8_becomes_replacement_characters(void **state) {
    (void)state;
#define R "\xef\xbf\xbd"
    static const struct {
        const char *text, *expected;
    } cases[] = {
        {"\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41", R R R R R R R R "A"},
        {"\xed\xa0\x80\xed\xbf\xbf\xed\xaf\x41", R R R R R R R R "A"},
        {"\xf4\x91\x92\x93\xff\x41\x80\xbf\x42", R R R R R "A" R R "B"},
        {"\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", R R R R "A"},
        {"\xf0\x9f\x98", R},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        expect_json_string(cases[i].text, strlen(cases[i].text), cases[i].expected, strlen(cases[i].expected));
}

static void faults_have_all_four_fields(void **state) {
    (void)state;
    struct fault fault;
    struct buffer buffer = {0};
    fault_invalid(&fault, NULL, "bad \xff \"%s\"", "x");
    fault_write(&fault, &buffer);
    json_t *value = read_json(&buffer), *error = json_object_get(value, "error");
    assert_int_equal(json_object_size(error), 4);
    assert_string_equal(json_string_value(json_object_get(error, "message")), "bad ? \"x\"");
    assert_string_equal(json_string_value(json_object_get(error, "type")), "invalid_request_error");
    assert_true(json_is_null(json_object_get(error, "param")));
    assert_true(json_is_null(json_object_get(error, "code")));
    json_decref(value);
    buffer_free(&buffer);
    fault_unavailable(&fault, "queue_full", 3, "full");
    assert_int_equal(fault.status, 503);
    assert_int_equal(fault.retry_after_ms, 3000);
    fault_write(&fault, &buffer);
    value = read_json(&buffer);
    error = json_object_get(value, "error");
    assert_string_equal(json_string_value(json_object_get(error, "type")), "server_error");
    assert_string_equal(json_string_value(json_object_get(error, "code")), "queue_full");
    json_decref(value);
    buffer_free(&buffer);
}

static struct reply reply_of(bool chat, int logprobs) {
    return (struct reply){.chat = chat,
        .id = "cmpl-1",
        .created = 7,
        .model = "m\"1",
        .fingerprint = "fp_1",
        .tokenizer = tokenizer,
        .logprobs = logprobs};
}

/* Three tokens: the prompt's first (no log-probability), half a character, and "A" whose likeliest are B and A. */
static struct output_token *some_tokens(void) {
    struct output_token *tokens = calloc(3, sizeof *tokens);
    assert_non_null(tokens);
    tokens[0] = (struct output_token){.token = 'x', .from_prompt = true};
    tokens[1] = (struct output_token){.token = 0xf0, .text_offset = 1, .has_logprob = true, .logprob = -1.5f};
    tokens[2] = (struct output_token){.token = 'A', .text_offset = 1, .has_logprob = true, .logprob = -INFINITY};
    tokens[2].top_count = 2;
    tokens[2].top = calloc(2, sizeof *tokens[2].top);
    assert_non_null(tokens[2].top);
    tokens[2].top[0].token = 'B';
    tokens[2].top[0].logprob = -0.25f;
    tokens[2].top[1].token = 'C';
    tokens[2].top[1].logprob = -0.5f;
    return tokens;
}

static json_t *some_reply(const struct reply *reply) {
    struct output_token *tokens = some_tokens();
    struct output output = {.text = "x\xef\xbf\xbd"
                                    "A",
        .text_bytes = 5,
        .tokens = tokens,
        .tokens_count = 3};
    struct choice_part part = {0};
    struct buffer buffer = {0};
    struct usage usage = {.prompt_tokens = 1,
        .completion_tokens = 2,
        .kv_tokens_seen = 3,
        .kv_tokens_kept = 1.5,
        .kv_bytes = 5000000000,
        .kv_bytes_full = 10000000000};
    choice_part_add(&part, reply, &output);
    assert_false(choice_part_failed(&part));
    format_begin(&buffer, reply);
    format_choice(&buffer, reply, 0, &part, FINISH_STOP);
    format_choice(&buffer, reply, 1, &part, FINISH_LENGTH);
    format_end(&buffer, reply, &usage);
    json_t *value = read_json(&buffer);
    buffer_free(&buffer);
    choice_part_free(&part);
    free(tokens[2].top);
    free(tokens);
    return value;
}

static void expect_equal_json(const json_t *value, const char *expected) {
    json_t *other = json_loads(expected, 0, NULL);
    assert_non_null(other);
    if (!json_equal(value, other)) {
        char *text = json_dumps(value, JSON_COMPACT);
        fail_msg("%s is not %s", text, expected);
    }
    json_decref(other);
}

static void completions_have_their_shape(void **state) {
    (void)state;
    struct reply reply = reply_of(false, 2);
    json_t *value = some_reply(&reply);
    expect_equal_json(value,
        "{\"id\":\"cmpl-1\",\"object\":\"text_completion\",\"created\":7,\"model\":\"m\\\"1\","
        "\"system_fingerprint\":\"fp_1\",\"choices\":["
        "{\"index\":0,\"text\":\"x\\ufffdA\",\"finish_reason\":\"stop\",\"logprobs\":{"
        "\"tokens\":[\"x\",\"bytes:\\\\xf0\",\"A\"],\"token_logprobs\":[null,-1.5,-9999],"
        "\"top_logprobs\":[null,{\"bytes:\\\\xf0\":-1.5},{\"B\":-0.25,\"C\":-0.5,\"A\":-9999}],"
        "\"text_offset\":[0,1,1]}},"
        "{\"index\":1,\"text\":\"x\\ufffdA\",\"finish_reason\":\"length\",\"logprobs\":{"
        "\"tokens\":[\"x\",\"bytes:\\\\xf0\",\"A\"],\"token_logprobs\":[null,-1.5,-9999],"
        "\"top_logprobs\":[null,{\"bytes:\\\\xf0\":-1.5},{\"B\":-0.25,\"C\":-0.5,\"A\":-9999}],"
        "\"text_offset\":[0,1,1]}}],"
        "\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":2,\"total_tokens\":3,"
        "\"prompt_tokens_details\":{\"cached_tokens\":0},\"kv_tokens_seen\":3,\"kv_tokens_kept\":2,"
        "\"kv_bytes\":5000000000,\"kv_bytes_full\":10000000000}}");
    json_decref(value);
}

static void logprobs_are_null_when_not_asked_for(void **state) {
    (void)state;
    struct reply reply = reply_of(false, 0);
    json_t *value = some_reply(&reply);
    json_t *logprobs = json_object_get(json_array_get(json_object_get(value, "choices"), 0), "logprobs");
    assert_true(json_is_null(json_object_get(logprobs, "top_logprobs")));
    assert_int_equal(json_array_size(json_object_get(logprobs, "token_logprobs")), 3);
    json_decref(value);
    reply = reply_of(false, -1);
    value = some_reply(&reply);
    assert_true(json_is_null(json_object_get(json_array_get(json_object_get(value, "choices"), 0), "logprobs")));
    json_decref(value);
}

static void chats_have_their_shape(void **state) {
    (void)state;
    struct reply reply = reply_of(true, 2);
    json_t *value = some_reply(&reply);
    expect_equal_json(json_array_get(json_object_get(value, "choices"), 1),
        "{\"index\":1,\"message\":{\"role\":\"assistant\",\"content\":\"x\\ufffdA\",\"refusal\":null},"
        "\"finish_reason\":\"length\",\"logprobs\":{\"refusal\":null,\"content\":["
        "{\"token\":\"x\",\"logprob\":0,\"bytes\":[120],\"top_logprobs\":[]},"
        "{\"token\":\"\\\\xf0\",\"logprob\":-1.5,\"bytes\":[240],\"top_logprobs\":[]},"
        "{\"token\":\"A\",\"logprob\":-9999,\"bytes\":[65],\"top_logprobs\":["
        "{\"token\":\"B\",\"logprob\":-0.25,\"bytes\":[66]},{\"token\":\"C\",\"logprob\":-0.5,\"bytes\":[67]}]}]}}");
    assert_string_equal(json_string_value(json_object_get(value, "object")), "chat.completion");
    json_decref(value);
}

/* `data: {json}` and a blank line. */
static json_t *read_chunk(struct buffer *buffer) {
    assert_true(buffer->length > 8);
    assert_memory_equal(buffer->data, "data: ", 6);
    assert_memory_equal(buffer->data + buffer->length - 2, "\n\n", 2);
    struct buffer inner = {.data = buffer->data + 6, .length = buffer->length - 8};
    assert_null(memchr(inner.data, '\n', inner.length));
    json_t *value = read_json(&inner);
    buffer_free(buffer);
    return value;
}

static void chunks_have_their_shape(void **state) {
    (void)state;
    struct reply reply = reply_of(true, -1);
    struct choice_part part = {0};
    struct buffer buffer = {0};
    struct usage usage = {0};
    buffer_string(&part.text, "a\n\"");
    format_chunk_role(&buffer, &reply, 3);
    json_t *value = read_chunk(&buffer);
    assert_string_equal(json_string_value(json_object_get(value, "object")), "chat.completion.chunk");
    assert_null(json_object_get(value, "usage"));
    expect_equal_json(json_object_get(value, "choices"),
        "[{\"index\":3,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}]");
    json_decref(value);
    format_chunk(&buffer, &reply, 3, &part, FINISH_NONE);
    value = read_chunk(&buffer);
    expect_equal_json(json_object_get(value, "choices"),
        "[{\"index\":3,\"delta\":{\"content\":\"a\\n\\\"\"},\"logprobs\":null,\"finish_reason\":null}]");
    json_decref(value);
    format_chunk_finish(&buffer, &reply, 3, NULL, FINISH_LENGTH);
    value = read_chunk(&buffer);
    expect_equal_json(json_object_get(value, "choices"),
        "[{\"index\":3,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"length\"}]");
    json_decref(value);
    reply = reply_of(false, -1);
    reply.include_usage = true;
    format_chunk(&buffer, &reply, 0, &part, FINISH_STOP);
    value = read_chunk(&buffer);
    assert_true(json_is_null(json_object_get(value, "usage")));
    expect_equal_json(json_object_get(value, "choices"),
        "[{\"index\":0,\"text\":\"a\\n\\\"\",\"logprobs\":null,\"finish_reason\":\"stop\"}]");
    json_decref(value);
    format_chunk_usage(&buffer, &reply, &usage);
    value = read_chunk(&buffer);
    assert_int_equal(json_array_size(json_object_get(value, "choices")), 0);
    assert_true(json_is_object(json_object_get(value, "usage")));
    assert_true(json_is_integer(json_object_get(json_object_get(value, "usage"), "kv_tokens_kept")));
    json_decref(value);
    choice_part_free(&part);
}

static void metrics_count_what_was_observed(void **state) {
    (void)state;
    struct metrics *metrics = metrics_create();
    struct scheduler_stats stats = {.requests_running = 2,
        .pages_total = 8,
        .pages_free = 2,
        .prefix_hits = 992,
        .swaps = 3,
        .replays = 4,
        .swapped_bytes = 5,
        .snapshot_bytes = 7,
        .pages_freed_by_policy = 6,
        .policy_seconds = 0.5,
        .kv_tokens_seen = 9,
        .kv_tokens_kept = 7};
    struct buffer buffer = {0};
    assert_non_null(metrics);
    metrics_observe(metrics, METRIC_FIRST_TOKEN, 0.01, 1);
    metrics_observe(metrics, METRIC_FIRST_TOKEN, 1e9, 2);
    metrics_observe(metrics, METRIC_FIRST_TOKEN, NAN, 1);
    metrics_count_finish(metrics, FINISH_STOP);
    metrics_count_response(metrics, 404);
    metrics_write(metrics, "a\"b\\c\nd", &stats, NULL, &buffer);
    buffer_append(&buffer, "", 1);
    assert_false(buffer.failed);
#define LABEL "model_name=\"a\\\"b\\\\c\\nd\""
    static const char *const lines[] = {
        "\ndistillcache:num_requests_running{" LABEL "} 2\n",
        "\ndistillcache:kv_cache_usage_perc{" LABEL "} 0.75\n",
        "\ndistillcache:prefix_cache_hits_total{" LABEL "} 992\n",
        "\ndistillcache:prefix_snapshot_bytes{" LABEL "} 7\n",
        "\n# TYPE distillcache:kv_pages_freed_by_policy_total counter\n",
        "\ndistillcache:kv_pages_freed_by_policy_total{" LABEL "} 6\n",
        "\ndistillcache:policy_seconds{" LABEL "} 0.5\n",
        "\ndistillcache:kv_swaps_total{" LABEL "} 3\n",
        "\ndistillcache:kv_replays_total{" LABEL "} 4\n",
        "\ndistillcache:kv_swapped_bytes{" LABEL "} 5\n",
        "\ndistillcache:kv_tokens_seen{" LABEL "} 9\n",
        "\ndistillcache:kv_tokens_kept{" LABEL "} 7\n",
        "\n# TYPE distillcache:time_to_first_token_seconds histogram\n",
        "\ndistillcache:time_to_first_token_seconds_bucket{" LABEL ",le=\"0.005\"} 1\n",
        "\ndistillcache:time_to_first_token_seconds_bucket{" LABEL ",le=\"0.01\"} 2\n",
        "\ndistillcache:time_to_first_token_seconds_bucket{" LABEL ",le=\"80\"} 2\n",
        "\ndistillcache:time_to_first_token_seconds_bucket{" LABEL ",le=\"+Inf\"} 4\n",
        "\ndistillcache:time_to_first_token_seconds_count{" LABEL "} 4\n",
        "\ndistillcache:request_success_total{" LABEL ",finished_reason=\"stop\"} 1\n",
        "\ndistillcache:request_success_total{" LABEL ",finished_reason=\"length\"} 0\n",
        "\ndistillcache:http_responses_total{" LABEL ",status=\"4xx\"} 1\n",
    };
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++)
        if (strstr(buffer.data, lines[i]) == NULL)
            fail_msg("missing %s in %s", lines[i], buffer.data);
    buffer_free(&buffer);
    metrics_free(metrics);
}

static int open_tokenizer(void **state) {
    (void)state;
    tokenizer = fake_tokenizer_create(false);
    return 0;
}

static int close_tokenizer(void **state) {
    (void)state;
    tokenizer_free(tokenizer);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(strings_survive_json),
        cmocka_unit_test(invalid_utf8_becomes_replacement_characters),
        cmocka_unit_test(faults_have_all_four_fields),
        cmocka_unit_test(completions_have_their_shape),
        cmocka_unit_test(logprobs_are_null_when_not_asked_for),
        cmocka_unit_test(chats_have_their_shape),
        cmocka_unit_test(chunks_have_their_shape),
        cmocka_unit_test(metrics_count_what_was_observed),
    };
    return cmocka_run_group_tests_name("server_format", tests, open_tokenizer, close_tokenizer);
}
