/* SPDX-License-Identifier: Apache-2.0
 *
 * The parameters that /v1/completions and /v1/chat/completions share, read into a `struct plan`.
 *
 * | field          | range                         | default |
 * |----------------|-------------------------------|---------|
 * | model          | the served model's id         | the served model |
 * | n              | 1 to 128                      | 1       |
 * | seed           | 64-bit integer                | random  |
 * | temperature    | 0 to 2; 0 is greedy           | 1       |
 * | top_p          | 0 to 1; 0 keeps one token     | 1       |
 * | top_k          | -1 or 0 (all), or more        | all     |
 * | min_p          | 0 to 1                        | 0       |
 * | best_of        | n to 20, or 0: n; not streamed | n      |
 * | presence_penalty, frequency_penalty | -2 to 2  | 0       |
 * | repetition_penalty | 0.01 to 10                | 1       |
 * | logit_bias     | {token id: -100 to 100}, up to 1,024 | none |
 * | min_tokens     | 0 to max_tokens               | 0       |
 * | stop_token_ids | up to 128 token ids           | none    |
 * | stop           | string or up to 4, not empty  | none    |
 * | ignore_eos     | boolean                       | false   |
 * | stream         | boolean                       | false   |
 * | stream_options | {include_usage}, with stream  | none    |
 * | skip_special_tokens | boolean                  | true    |
 * | response_format, guided_json, guided_choice, guided_regex, structured_outputs | structured.h | any text |
 * | kv_cache       | object (cache_params.h)       | the server's policy |
 * Penalties are those of engine/penalties.h. best_of: so many candidates are generated, and the n whose tokens have the
 * highest mean log-probability returned, best first; usage counts all. Chats have none. Until min_tokens no end token
 * and none of stop_token_ids is chosen; a stop string ends the text all the same. null is the default everywhere.
 * Prompts times n are at most 2,048; with echo, their tokens times n at most 1,048,576.
 */
#ifndef SERVER_PARAMS_H
#define SERVER_PARAMS_H

#include "engine/scheduler.h"
#include "server/fields.h"
#include "server/policy_table.h"
#include "server/tool_calls.h"

enum {
    CHOICES_MAX = 2048,
    ECHOED_MAX = 1 << 20,
    STOPS_MAX = 4,
    N_MAX = 128,
    BEST_OF_MAX = 20,
    BIASES_MAX = 1024,
    STOP_TOKENS_MAX = 128
};

/* What the parsers know of the server. */
struct parse_context {
    const struct tokenizer *tokenizer;
    const struct grammar_vocabulary *grammar_vocabulary; /* NULL: grammars are refused */
    uint32_t vocabulary;
    uint32_t width;       /* numbers of an embedding */
    enum pooling pooling; /* of embeddings that ask for none; NONE: each must ask */
    uint32_t context;     /* most tokens of prompt and completion; the scheduler knows whether they fit the pages */
    uint32_t tokens_max;  /* of a sequence that is not pruned, as clients are told */
    const char *model_id;
    const struct policy_settings *kv_policy;   /* of requests that choose none */
    struct policy_model policy_model;          /* whose trained policies there may be; fingerprint NULL: none */
    struct policy_table *policies;             /* trained ones, and what kv_policy is now; NULL: there are none */
    const struct chat_template *chat_template; /* NULL: chats cannot be served */
    const char *chat_refusal;                  /* why not */
    const char *request_id;                    /* for logs */
};

/* A request ready for the scheduler, and how its reply is written. */
struct plan {
    struct request *request; /* owned */
    bool chat;
    bool base64; /* how vectors are written (request->pooling) */
    bool include_usage;
    struct tool_set tools; /* calls of which are looked for in the answer; none: nothing is. Owned */
    uint32_t n;            /* choices a prompt that are returned: the best of request->n */
    int logprobs;          /* as they are shown; request->logprobs unless only the choice of the best needs them */
};
void plan_free(struct plan *plan);

/* What depends on several fields, when a parser has read all of them. */
int params_finish(struct plan *plan, struct fault *fault);

/* The parsers are safe on any thread; body is the parsed JSON object. On failure plan is to be freed all the same. */
typedef int (*plan_parse)(
    const json_t *body, const struct parse_context *context, struct plan *plan, struct fault *fault);

/* Reads the shared parameters into plan->request, which it creates. */
int params_read(const json_t *body, const struct parse_context *context, struct plan *plan, struct fault *fault);

/* Reads an integer limit from 0 such as max_tokens; larger than the context becomes the context. *present tells whether
 * it was given. */
int params_read_limit(const json_t *body, const char *name, const struct parse_context *context, uint32_t *limit,
    bool *present, struct fault *fault);

/* Takes ids over as the next prompt of the request (which has room) after checking its length. parameter: for faults.
 */
int params_add_prompt(struct request *request, struct token_list *ids, const struct parse_context *context,
    const char *parameter, struct fault *fault);

/* Text as tokens: with the model's BOS token in front if add_special and the model wants one. */
int params_encode(const char *text, size_t bytes, bool add_special, bool parse_special,
    const struct parse_context *context, struct token_list *ids, struct fault *fault);

/* Text as tokens: special ones where no byte of theirs is marked. */
int params_encode_marked(
    const struct template_text *text, const struct parse_context *context, struct token_list *ids, struct fault *fault);

/* Text as a prompt, special tokens parsed. Empty text becomes the BOS token, or else the
 * first end token of the vocabulary, so that there is something to continue. */
int params_encode_prompt(const char *text, size_t bytes, bool add_special, const struct parse_context *context,
    struct token_list *ids, struct fault *fault);

/* A JSON array of token ids. name: of the field, for faults. An empty array is a fault. */
int params_read_tokens(const json_t *array, const char *name, const struct parse_context *context,
    struct token_list *ids, struct fault *fault);

/* The model field: 0 when absent or the served model. */
int params_check_model(const json_t *body, const struct parse_context *context, struct fault *fault);

/* Known to both endpoints, and known but unsupported in both (struct field_unsupported). */
#define PARAMS_KNOWN                                                                                                   \
    "model", "n", "seed", "temperature", "top_p", "top_k", "min_p", "stop", "ignore_eos", "stream", "stream_options",  \
        "skip_special_tokens", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",   \
        "prompt_cache_retention", "prompt_cache_options", "cache_prompt", "request_id",                                \
        "spaces_between_special_tokens", "best_of", "response_format", "guided_json", "guided_choice", "guided_regex", \
        "structured_outputs", "kv_cache", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", \
        "min_tokens", "stop_token_ids"
#define PARAMS_UNSUPPORTED                                                                                             \
    {"repeat_penalty", REFUSE_NOT_ONE}, {"length_penalty", REFUSE_NOT_ONE}, {"typical_p", REFUSE_NOT_ONE},             \
        {"mirostat", REFUSE_NONZERO}, {"dry_multiplier", REFUSE_NONZERO}, {"xtc_probability", REFUSE_NONZERO},         \
        {"use_beam_search", REFUSE_TRUE}, {"early_stopping", REFUSE_TRUE}, {"priority", REFUSE_NONZERO},               \
        {"bad_words", REFUSE_NONEMPTY}, {"allowed_token_ids", REFUSE_NONEMPTY},                                        \
        {"include_stop_str_in_output", REFUSE_TRUE}, {"prompt_logprobs", REFUSE_PRESENT},                              \
        {"truncate_prompt_tokens", REFUSE_PRESENT}, {"logits_processors", REFUSE_NONEMPTY},                            \
        {"return_token_ids", REFUSE_TRUE}, {"return_tokens_as_token_ids", REFUSE_TRUE},                                \
        {"guided_grammar", REFUSE_PRESENT}, {"grammar", REFUSE_NONEMPTY}, {"json_schema", REFUSE_NONEMPTY},            \
        {"n_predict", REFUSE_PRESENT}, {"n_probs", REFUSE_NONZERO}, {"prediction", REFUSE_PRESENT},                    \
        {"moderation", REFUSE_PRESENT}, {"tools", REFUSE_NONEMPTY}, {                                                  \
        "functions", REFUSE_NONEMPTY                                                                                   \
    }

#endif
