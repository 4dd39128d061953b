/* SPDX-License-Identifier: Apache-2.0
 *
 * Request bodies: whatever the bytes, the parsers of /v1/completions and /v1/chat/completions either fill a request
 * that the scheduler may take, or refuse it with a fault whose text is valid UTF-8.
 */
#include "tests/fuzz/fuzz.h"

#include "engine/log.h"
#include "server/chat.h"
#include "server/completions.h"
#include "tests/unit/fake_scheduler.h"

#include <stdlib.h>
#include <string.h>

static void expect(bool condition) {
    if (!condition)
        abort();
}

static void check_request(const struct request *request, const struct parse_context *context) {
    expect(request->prompts_count >= 1 && request->n >= 1 && request->n <= N_MAX);
    expect((uint64_t)request->prompts_count * request->n <= CHOICES_MAX);
    expect(request->max_tokens <= context->tokens_max && (request->max_tokens > 0 || request->echo));
    for (uint32_t p = 0; p < request->prompts_count; p++) {
        expect(request->prompts[p].count >= 1 && request->prompts[p].count <= context->tokens_max);
        for (uint32_t i = 0; i < request->prompts[p].count; i++)
            expect(request->prompts[p].tokens[i] >= 0 && request->prompts[p].tokens[i] < (int32_t)context->vocabulary);
    }
    const struct sample_params *sampling = &request->sampling;
    expect(sampling->temperature >= 0 && sampling->temperature <= 2 && sampling->top_p > 0 && sampling->top_p <= 1);
    expect(sampling->min_p >= 0 && sampling->min_p <= 1);
    struct error error;
    const struct policy_settings *policy = &request->kv_policy;
    expect(policy->policy != NULL && policy->ratio > 0 && policy->ratio <= 1 && policy->interval >= 1);
    expect(policy->gates == NULL && policy_settings_check(policy, &error) == 0);
    expect(request->stops_count <= STOPS_MAX && request->logprobs >= -1 && request->logprobs <= SAMPLE_TOP_MAX);
    for (uint32_t i = 0; i < request->stops_count; i++)
        expect(request->stops[i][0] != '\0' && utf8_valid(request->stops[i], strlen(request->stops[i])));
}

static void try_parser(plan_parse parse, const uint8_t *data, size_t bytes, const struct parse_context *context) {
    struct fault fault = {0};
    struct plan plan = {0};
    struct buffer reply = {0};
    json_t *body = fields_parse((const char *)data, bytes, &fault);
    if (body != NULL && parse(body, context, &plan, &fault) == 0) {
        check_request(plan.request, context);
    } else {
        expect(fault.status == 400 || fault.status == 404);
        fault_write(&fault, &reply);
        expect(!reply.failed && utf8_valid(reply.data, reply.length));
        json_t *written = json_loadb(reply.data, reply.length, JSON_REJECT_DUPLICATES, NULL);
        expect(written != NULL);
        json_decref(written);
        buffer_free(&reply);
    }
    plan_free(&plan);
    json_decref(body);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static struct tokenizer *tokenizer;
    static bool quiet;
    struct error error;
    if (tokenizer == NULL)
        tokenizer = fake_tokenizer_create(false);
    if (!quiet) /* unknown fields are logged */
        quiet = log_open(LOG_ERROR, false, &error) == 0;
    struct policy_settings kv_policy;
    policy_settings_default(policy_find("h2o"), &kv_policy);
    struct parse_context context = {.tokenizer = tokenizer,
        .vocabulary = FAKE_VOCABULARY,
        .tokens_max = 300,
        .model_id = "fake",
        .kv_policy = &kv_policy};
    try_parser(completions_parse, data, bytes, &context);
    try_parser(chat_parse, data, bytes, &context);
    return 0;
}

uint8_t *fuzz_seed(unsigned index, size_t *bytes) {
    static const char *const seeds[] = {
        "{\"model\":\"fake\",\"prompt\":[[1,2.0,3],[258]],\"n\":3,\"seed\":-5,\"temperature\":0.5,\"top_p\":0.25,"
        "\"top_k\":7,\"min_p\":0.125,\"stop\":[\"x\",\"yz\"],\"max_tokens\":9,\"logprobs\":5,\"echo\":true}",
        "{\"prompt\":\"h\\u00e9\\ud83d\\ude00\\u0000\",\"stream\":true,\"stream_options\":{\"include_usage\":true}}",
        "{\"prompt\":[\"a\",\"\"],\"ignore_eos\":true,\"stop\":\"b\",\"user\":null,\"logit_bias\":{},\"best_of\":1}",
        "{\"messages\":[{\"role\":\"system\",\"content\":\"S\"},{\"role\":\"user\",\"content\":[{\"type\":\"text\","
        "\"text\":\"h\"}]},{\"role\":\"assistant\",\"content\":null}],\"logprobs\":true,\"top_logprobs\":3,"
        "\"max_completion_tokens\":5,\"response_format\":{\"type\":\"text\"},\"tool_choice\":\"none\"}",
        "{\"prompt\":\"a\",\"kv_cache\":{\"policy\":\"snapkv\",\"ratio\":0.25,\"window\":16,\"kernel\":5,"
        "\"decode\":\"keep\",\"interval\":4,\"scope\":\"layer\",\"floor\":0.5,\"protect_sinks\":4}}",
        "{\"prompt\":\"a\",\"kv_cache\":{\"tokens\":64,\"recent\":0.25,\"minimum\":8,\"seed\":null,"
        "\"prefill_prune_every\":512,\"gates\":\"x\"}}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"h\"}],\"kv_cache\":{\"policy\":\"streaming\","
        "\"positions\":\"cache\",\"sinks\":2.0,\"tokens\":1e2}}",
        "{\"unknown\":[[[[{}]]]],\"prompt\":\"<|im_start|>\"}",
    };
    if (index >= sizeof seeds / sizeof seeds[0])
        return NULL;
    *bytes = strlen(seeds[index]);
    return (uint8_t *)strdup(seeds[index]);
}
