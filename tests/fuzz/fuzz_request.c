/* SPDX-License-Identifier: Apache-2.0
 *
 * Request bodies: whatever the bytes, the parsers of completions, chats, embeddings and evaluations either fill a
 * request that the scheduler may take, or a configuration, or refuse it with a fault whose text is valid UTF-8.
 * (fuzz_http.c and fuzz_admin.c have the bodies of the other routes.)
 *
 * An input is a body, or, when it begins with CACHE_MARK, four bytes for each field of the kv_cache object of a body:
 * its name, the kind of its value, and the value.
 */
#include "tests/fuzz/fuzz.h"

#include "engine/log.h"
#include "grammar/vocabulary.h"
#include "server/chat.h"
#include "server/completions.h"
#include "server/embeddings.h"
#include "server/evaluation.h"
#include "tests/unit/fake_scheduler.h"

#include <stdlib.h>
#include <string.h>

enum { CACHE_MARK = 'K', FIELD_BYTES = 4 };

/* Takes tools. */
static const char fuzz_template[] =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>{% endfor %}{{ tools | tojson }}";

static void expect(bool condition) {
    if (!condition)
        abort();
}

static void check_request(const struct request *request, const struct parse_context *context) {
    expect(request->prompts_count >= 1 && request->n >= 1 && request->n <= N_MAX);
    expect((uint64_t)request->prompts_count * request->n <= CHOICES_MAX);
    expect(request->max_tokens <= context->context);
    for (uint32_t p = 0; p < request->prompts_count; p++) {
        expect(request->prompts[p].count >= 1 && request->prompts[p].count <= context->context);
        for (uint32_t i = 0; i < request->prompts[p].count; i++)
            expect(request->prompts[p].tokens[i] >= 0 && request->prompts[p].tokens[i] < (int32_t)context->vocabulary);
    }
    const struct sample_params *sampling = &request->sampling;
    expect(sampling->temperature >= 0 && sampling->temperature <= 2 && sampling->top_p > 0 && sampling->top_p <= 1);
    expect(sampling->min_p >= 0 && sampling->min_p <= 1);
    if (request->pooling != POOLING_NONE) {
        expect(request->n == 1 && request->max_tokens == 0);
        return;
    }
    struct error error;
    const struct policy_settings *policy = &request->kv_policy;
    expect(policy->policy != NULL && policy->ratio > 0 && policy->ratio <= 1 && policy->interval >= 1);
    char text[200];
    policy_settings_describe(policy, text, sizeof text);
    expect(policy_budget(policy, 1) >= 1 && policy_budget(policy, 16384) >= 1);
    expect(policy->gates == NULL && policy_settings_check(policy, &error) == 0);
    expect(request->stops_count <= STOPS_MAX && request->logprobs >= -1 && request->logprobs <= SAMPLE_TOP_MAX);
    for (uint32_t i = 0; i < request->stops_count; i++)
        expect(request->stops[i][0] != '\0' && utf8_valid(request->stops[i], strlen(request->stops[i])));
}

static void check_fault(const struct fault *fault) {
    struct buffer reply = {0};
    expect(fault->status == 400 || fault->status == 404);
    fault_write(fault, &reply);
    expect(!reply.failed && utf8_valid(reply.data, reply.length));
    json_t *written = json_loadb(reply.data, reply.length, JSON_REJECT_DUPLICATES, NULL);
    expect(written != NULL);
    json_decref(written);
    buffer_free(&reply);
}

/* body: NULL when there is a fault already. */
static void try_body(plan_parse parse, const json_t *body, struct fault fault, const struct parse_context *context) {
    struct plan plan = {0};
    if (body != NULL && parse(body, context, &plan, &fault) == 0 && params_finish(&plan, &fault) == 0) {
        check_request(plan.request, context);
    } else {
        check_fault(&fault);
    }
    plan_free(&plan);
}

static void try_parser(plan_parse parse, const uint8_t *data, size_t bytes, const struct parse_context *context) {
    struct fault fault = {0};
    json_t *body = fields_parse((const char *)data, bytes, &fault);
    try_body(parse, body, fault, context);
    json_decref(body);
}

static void try_evaluation(const uint8_t *data, size_t bytes) {
    struct fault fault = {0};
    struct config config = {0};
    json_t *body = fields_parse((const char *)data, bytes, &fault);
    if (body != NULL && evaluation_config(body, NULL, NULL, &config, &fault) == 0)
        expect(config.task[0] != '\0');
    else
        check_fault(&fault);
    config_free(&config);
    json_decref(body);
}

static json_t *cache_value(const uint8_t field[static FIELD_BYTES]) {
    static const char *const words[] = {
        "head", "layer", "model", "slide", "keep", "original", "cache", "auto", "h2o", "knorm", "16", "0.5", "", "1e9"};
    int number = (int16_t)(field[2] << 8 | field[3]);
    switch (field[1] % 8) {
    case 0:
        return json_integer(field[2]);
    case 1:
        return json_real(number / 256.0);
    case 2:
        return json_real(number / 65536.0);
    case 3:
        return json_string(words[field[2] % (sizeof words / sizeof words[0])]);
    case 4:
        return json_integer((json_int_t)((uint64_t)number * ((UINT64_C(1) << 48) + 1))); /* wraps */
    case 5:
        return json_real(number * 1e300);
    case 6:
        return json_stringn((const char *)field + 2, 2); /* NULL: not UTF-8 */
    default:
        return number % 3 == 0 ? json_null() : number % 3 == 1 ? json_true() : json_array();
    }
}

static void try_cache(const uint8_t *data, size_t bytes, const struct parse_context *context) {
    json_t *cache = json_object();
    for (; bytes >= FIELD_BYTES; data += FIELD_BYTES, bytes -= FIELD_BYTES) {
        unsigned name = data[0] % (policy_options_count() + 2);
        json_t *value = cache_value(data);
        if (name == policy_options_count())
            json_object_set_new(cache, "policy", json_string(policy_at(data[2] % policy_count())->name));
        else if (value != NULL)
            json_object_set_new_nocheck(
                cache, name < policy_options_count() ? policy_option_name(name) : "unheard", json_incref(value));
        json_decref(value);
    }
    json_t *body = json_pack("{s:s, s:o}", "prompt", "a", "kv_cache", cache);
    expect(body != NULL);
    try_body(completions_parse, body, (struct fault){0}, context);
    json_decref(body);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static struct tokenizer *tokenizer;
    static struct chat_template *chat_template;
    static struct grammar_vocabulary *grammar_vocabulary;
    static bool quiet;
    struct error error;
    if (tokenizer == NULL)
        tokenizer = fake_tokenizer_create(false);
    if (chat_template == NULL)
        chat_template = chat_template_create(fuzz_template, strlen(fuzz_template), tokenizer, &error);
    expect(chat_template != NULL);
    if (grammar_vocabulary == NULL)
        grammar_vocabulary = grammar_vocabulary_create(tokenizer, FAKE_VOCABULARY, &error);
    if (!quiet) /* unknown fields are logged */
        quiet = log_open(LOG_ERROR, false, &error) == 0;
    struct policy_settings kv_policy;
    policy_settings_default(policy_find("h2o"), &kv_policy);
    struct parse_context context = {.tokenizer = tokenizer,
        .grammar_vocabulary = grammar_vocabulary,
        .vocabulary = FAKE_VOCABULARY,
        .width = FAKE_WIDTH,
        .pooling = POOLING_MEAN,
        .context = 300,
        .tokens_max = 200,
        .model_id = "fake",
        .chat_template = chat_template,
        .kv_policy = &kv_policy};
    if (bytes > 0 && data[0] == CACHE_MARK)
        try_cache(data + 1, bytes - 1, &context);
    try_parser(completions_parse, data, bytes, &context);
    try_parser(chat_parse, data, bytes, &context);
    try_parser(embeddings_parse, data, bytes, &context);
    try_evaluation(data, bytes);
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
        "{\"messages\":[{\"role\":\"user\",\"content\":\"h\"}],\"tools\":[{\"type\":\"function\",\"function\":{"
        "\"name\":\"f\","
        "\"parameters\":{\"type\":\"object\",\"properties\":{\"a\":{\"enum\":[1,\"x\"]}}}}},{\"type\":\"function\","
        "\"function\":"
        "{\"name\":\"g\"}}],\"tool_choice\":\"required\",\"parallel_tool_calls\":false}",
        "{\"prompt\":\"a\",\"kv_cache\":{\"policy\":\"snapkv\",\"ratio\":0.25,\"window\":16,\"kernel\":5,"
        "\"decode\":\"keep\",\"interval\":4,\"scope\":\"layer\",\"floor\":0.5,\"protect_sinks\":4}}",
        "{\"prompt\":\"a\",\"kv_cache\":{\"tokens\":64,\"recent\":0.25,\"minimum\":8,\"seed\":null,"
        "\"prefill_prune_every\":512,\"gates\":\"x\"}}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"h\"}],\"kv_cache\":{\"policy\":\"streaming\","
        "\"positions\":\"cache\",\"sinks\":2.0,\"tokens\":1e2}}",
        "{\"input\":[\"a\",\"h\\u00e9\"],\"encoding_format\":\"base64\",\"dimensions\":4,\"pooling\":\"last\","
        "\"normalize\":false,\"embd_normalize\":-1,\"add_special_tokens\":true}",
        /* snapkv, ratio 0.25, window 16, kernel 5, decode keep, scope layer; streaming, tokens 64, positions, sinks */
        "K\x1dx\x07x\x1f\x02@\x01\x0c\x08\x10x\x0d\x08\x05x\x19\x03\x04x\x07\x03\x01x",
        "K\x1dx\x02x\x01\x08@x\x1a\x03\x06x\x09\x08\x02x",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"h\"},{\"role\":\"assistant\",\"content\":null,"
        "\"tool_calls\":[{\"id\":\"i\",\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":"
        "\"{\\\"a\\\": 1}\"}}]},{\"role\":\"tool\",\"content\":\"r\",\"tool_call_id\":\"i\"}],\"tools\":[{"
        "\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{}}}],\"tool_choice\":\"auto\","
        "\"chat_template_kwargs\":{\"x\":1},\"parallel_tool_calls\":false}",
        "{\"messages\":[{\"role\":\"assistant\",\"content\":\"ab \"}],\"continue_final_message\":true,"
        "\"add_special_tokens\":true,\"documents\":[]}",
        "{\"prompt\":\"a\",\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{\"name\":\"n\",\"schema\":"
        "{\"type\":\"object\",\"properties\":{\"a\":{\"enum\":[1,\"x\"]}}}}}}",
        "{\"prompt\":\"a\",\"structured_outputs\":{\"choice\":[\"yes\",\"no\"]},\"guided_regex\":null,\"guided_json\":"
        "null}",
        "{\"task\":\"kl\",\"policies\":[\"h2o,recent=0.5\",\"streaming\"],\"ratios\":[0.25,1],\"tokens\":0,\"lengths\":"
        "[512],"
        "\"data\":null,\"limit\":2,\"seed\":3,\"query_aware\":false,\"continuation\":16}",
        "{\"prompt\":[[1],[2]],\"n\":2,\"max_tokens\":0,\"logprobs\":1}",
        "{\"unknown\":[[[[{}]]]],\"prompt\":\"<|im_start|>\"}",
    };
    if (index >= sizeof seeds / sizeof seeds[0])
        return NULL;
    *bytes = strlen(seeds[index]);
    return (uint8_t *)strdup(seeds[index]);
}
