/* SPDX-License-Identifier: Apache-2.0
 *
 * The JSON of replies: choices, stream chunks, log-probabilities, usage, in the shapes of OpenAI's two APIs.
 *
 * completion         {id, object: "text_completion", created, model, system_fingerprint, choices: [{index, text,
 *                     logprobs, finish_reason}], usage}; chunks have the same shape
 * chat.completion    choices: [{index, message: {role, content, refusal}, logprobs, finish_reason}]
 * chat.completion.chunk  choices: [{index, delta: {role, content}, logprobs, finish_reason}]
 *
 * With calls of tools a message has tool_calls: [{id, type, function: {name, arguments}}], and content null where it is
 * empty; a stream has deltas of its own for them, {tool_calls: [{index, id, type, function: {name, arguments: ""}}]}
 * and then {tool_calls: [{index, function: {arguments}}]} as they come. finish_reason is tool_calls instead of stop.
 *
 * Log-probabilities of completions are four parallel arrays: tokens, token_logprobs, top_logprobs (an object for each
 * token; null altogether when none were asked for), text_offset (characters from the start of the prompt). The chosen
 * token is always among the top ones. Those of chats: content [{token, logprob, bytes, top_logprobs}]. A token that is
 * not whole characters reads `bytes:\xf0\x9f` in completions, `\xf0\x9f` in chats. With echo the first token's is null.
 *
 * list               data: [{object: "embedding", index, embedding}], model, usage: {prompt_tokens, total_tokens}; an
 *                     embedding is an array of numbers with the digits of a float, or its bytes in base64
 *
 * usage has, beside OpenAI's fields, what was kept of the tokens: kv_tokens_seen, kv_tokens_kept, kv_bytes,
 * kv_bytes_full.
 */
#ifndef SERVER_FORMAT_H
#define SERVER_FORMAT_H

#include "engine/scheduler.h"
#include "server/buffer.h"
#include "server/tool_calls.h"

/* What all parts of one reply have in common. */
struct reply {
    bool chat;
    bool vectors; /* embeddings */
    bool base64;  /* of vectors */
    char id[64];  /* cmpl-..., chatcmpl-... */
    int64_t created;
    const char *model;
    const char *fingerprint;
    const struct tokenizer *tokenizer;
    const struct tool_set *tools; /* what calls are looked for; NULL: none */
    int logprobs;                 /* as in struct request */
    bool include_usage;           /* stream: chunks have usage: null */
};

/* One choice's text and log-probabilities, gathered from outputs: of all outputs, or of one for a chunk. */
struct choice_part {
    struct buffer text;   /* or the vector, as it is written */
    struct buffer tokens; /* entries of the arrays, separated by commas; chats use only this one */
    struct buffer token_logprobs;
    struct buffer top_logprobs;
    struct buffer text_offsets;
    struct tool_parser parser; /* with tools: what comes of them, from all outputs */
};
void choice_part_add(struct choice_part *part, const struct reply *reply, const struct output *output);
void choice_part_clear(struct choice_part *part); /* keeps the memory, and calls of tools */
void choice_part_free(struct choice_part *part);
bool choice_part_failed(const struct choice_part *part);

struct usage {
    uint64_t prompt_tokens;
    uint64_t completion_tokens;
    uint64_t cached_tokens;
    /* Of all choices at their ends, added up: */
    uint64_t kv_tokens_seen;
    double kv_tokens_kept; /* mean over layers and KV heads; written as a whole number */
    uint64_t kv_bytes;
    uint64_t kv_bytes_full; /* if every token were kept */
};

/* A whole reply: format_begin, format_choice for each in order, format_end. */
void format_begin(struct buffer *out, const struct reply *reply);
void format_choice(struct buffer *out, const struct reply *reply, uint32_t index, const struct choice_part *part,
    enum finish_reason finish);
void format_end(struct buffer *out, const struct reply *reply, const struct usage *usage);

/* Chunks, each with its `data: ` and blank line. A chat's choice begins with a chunk that has the role and ends with
 * one that has the finish reason and an empty delta. */
void format_chunk_role(struct buffer *out, const struct reply *reply, uint32_t index);
void format_chunk(struct buffer *out, const struct reply *reply, uint32_t index, const struct choice_part *part,
    enum finish_reason finish);
/* What was added to the calls of tools since it was called last; of the last chunk, part may be NULL: no calls. */
void format_chunk_calls(struct buffer *out, const struct reply *reply, uint32_t index, struct choice_part *part);
void format_chunk_finish(struct buffer *out, const struct reply *reply, uint32_t index, const struct choice_part *part,
    enum finish_reason finish);
void format_chunk_usage(struct buffer *out, const struct reply *reply, const struct usage *usage);
void format_done(struct buffer *out);

#endif
