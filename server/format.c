/* SPDX-License-Identifier: Apache-2.0 */
#include "server/format.h"

#include "server/forced_calls.h"

#include <math.h>
#include <nettle/base64.h>
#include <string.h>

/* --- Log-probabilities --- */

/* A token as a JSON string. */
static void format_token(struct buffer *out, const struct reply *reply, int32_t token) {
    size_t count;
    const char *bytes = tokenizer_token_bytes(reply->tokenizer, token, &count);
    if (utf8_valid(bytes, count)) {
        buffer_json_string(out, bytes, count);
        return;
    }
    buffer_string(out, reply->chat ? "\"" : "\"bytes:");
    for (size_t i = 0; i < count; i++)
        buffer_format(out, "\\\\x%02x", (unsigned char)bytes[i]);
    buffer_string(out, "\"");
}

static void format_token_bytes(struct buffer *out, const struct reply *reply, int32_t token) {
    size_t count;
    const char *bytes = tokenizer_token_bytes(reply->tokenizer, token, &count);
    buffer_string(out, "[");
    for (size_t i = 0; i < count; i++)
        buffer_format(out, i == 0 ? "%u" : ",%u", (unsigned char)bytes[i]);
    buffer_string(out, "]");
}

static bool format_same_text(const struct reply *reply, int32_t a, int32_t b) {
    size_t a_count, b_count;
    const char *a_bytes = tokenizer_token_bytes(reply->tokenizer, a, &a_count);
    const char *b_bytes = tokenizer_token_bytes(reply->tokenizer, b, &b_count);
    return a_count == b_count && memcmp(a_bytes, b_bytes, a_count) == 0;
}

/* The object of a completion's token: its keys are texts, so of tokens with the same text the likeliest is named. */
static void format_top_object(struct buffer *out, const struct reply *reply, const struct output_token *token) {
    bool chosen_named = false, first = true;
    buffer_string(out, "{");
    for (uint32_t i = 0; i < token->top_count; i++) {
        bool named = false;
        for (uint32_t j = 0; j < i && !named; j++)
            named = format_same_text(reply, token->top[i].token, token->top[j].token);
        if (named)
            continue;
        chosen_named = chosen_named || format_same_text(reply, token->top[i].token, token->token);
        if (!first)
            buffer_string(out, ",");
        first = false;
        format_token(out, reply, token->top[i].token);
        buffer_string(out, ":");
        buffer_json_logprob(out, token->top[i].logprob);
    }
    if (!chosen_named) {
        if (!first)
            buffer_string(out, ",");
        format_token(out, reply, token->token);
        buffer_string(out, ":");
        buffer_json_logprob(out, token->logprob);
    }
    buffer_string(out, "}");
}

static void format_completion_token(
    struct choice_part *part, const struct reply *reply, const struct output_token *token) {
    if (part->tokens.length > 0) {
        buffer_string(&part->tokens, ",");
        buffer_string(&part->token_logprobs, ",");
        buffer_string(&part->top_logprobs, ",");
        buffer_string(&part->text_offsets, ",");
    }
    format_token(&part->tokens, reply, token->token);
    buffer_format(&part->text_offsets, "%u", token->text_offset);
    if (!token->has_logprob) {
        buffer_string(&part->token_logprobs, "null");
        buffer_string(&part->top_logprobs, "null");
        return;
    }
    buffer_json_logprob(&part->token_logprobs, token->logprob);
    format_top_object(&part->top_logprobs, reply, token);
}

static void format_chat_entry(struct buffer *out, const struct reply *reply, int32_t token, float logprob) {
    buffer_string(out, "{\"token\":");
    format_token(out, reply, token);
    buffer_string(out, ",\"logprob\":");
    buffer_json_logprob(out, logprob);
    buffer_string(out, ",\"bytes\":");
    format_token_bytes(out, reply, token);
}

static void format_chat_token(struct choice_part *part, const struct reply *reply, const struct output_token *token) {
    struct buffer *out = &part->tokens;
    if (out->length > 0)
        buffer_string(out, ",");
    format_chat_entry(out, reply, token->token, token->logprob);
    buffer_string(out, ",\"top_logprobs\":[");
    for (uint32_t i = 0; i < token->top_count; i++) {
        if (i > 0)
            buffer_string(out, ",");
        format_chat_entry(out, reply, token->top[i].token, token->top[i].logprob);
        buffer_string(out, "}");
    }
    buffer_string(out, "]}");
}

/* --- Vectors --- */

/* The bytes of floats as this machine has them: little-endian, as x86 is. */
static void format_base64(struct buffer *out, const double *vector, uint32_t width) {
    enum { FLOATS = 48, BYTES = FLOATS * sizeof(float) }; /* whole groups of three bytes */
    char text[BASE64_ENCODE_RAW_LENGTH(BYTES)];
    buffer_string(out, "\"");
    for (uint32_t done = 0, count; done < width; done += count) {
        float floats[FLOATS];
        count = width - done < FLOATS ? width - done : FLOATS;
        for (uint32_t i = 0; i < count; i++)
            floats[i] = (float)vector[done + i];
        size_t bytes = count * sizeof *floats;
        base64_encode_raw(text, bytes, (const uint8_t *)floats);
        buffer_append(out, text, BASE64_ENCODE_RAW_LENGTH(bytes));
    }
    buffer_string(out, "\"");
}

static void format_vector(struct buffer *out, const struct reply *reply, const double *vector, uint32_t width) {
    if (reply->base64) {
        format_base64(out, vector, width);
        return;
    }
    buffer_string(out, "[");
    for (uint32_t i = 0; i < width; i++)
        buffer_format(out, i == 0 ? "%.9g" : ",%.9g", (double)(float)vector[i]);
    buffer_string(out, "]");
}

/* --- Parts --- */

/* The output's text into content and calls. */
static void choice_part_parse(struct choice_part *part, const struct reply *reply, const struct output *output) {
    struct tool_parser *parser = &part->parser;
    if (parser->set == NULL)
        tool_parser_begin(
            parser, reply->tools, reply->tools->forced ? forced_calls_opening(reply->tools->format) : NULL);
    tool_parser_push(parser, output->text, output->text_bytes);
    if (output->finish != FINISH_NONE)
        tool_parser_finish(parser);
    buffer_append(&part->text, parser->content.data, parser->content.length);
    parser->content.length = 0;
}

void choice_part_add(struct choice_part *part, const struct reply *reply, const struct output *output) {
    if (output->vector != NULL)
        format_vector(&part->text, reply, output->vector, output->vector_width);
    if (reply->tools == NULL)
        buffer_append(&part->text, output->text, output->text_bytes);
    else
        choice_part_parse(part, reply, output);
    if (reply->logprobs < 0)
        return;
    for (uint32_t i = 0; i < output->tokens_count; i++) {
        if (reply->chat)
            format_chat_token(part, reply, &output->tokens[i]);
        else
            format_completion_token(part, reply, &output->tokens[i]);
    }
}

void choice_part_clear(struct choice_part *part) {
    part->text.length = part->tokens.length = part->token_logprobs.length = 0;
    part->top_logprobs.length = part->text_offsets.length = 0;
}

void choice_part_free(struct choice_part *part) {
    buffer_free(&part->text);
    buffer_free(&part->tokens);
    buffer_free(&part->token_logprobs);
    buffer_free(&part->top_logprobs);
    buffer_free(&part->text_offsets);
    tool_parser_free(&part->parser);
}

bool choice_part_failed(const struct choice_part *part) {
    return part->text.failed || part->tokens.failed || part->token_logprobs.failed || part->top_logprobs.failed ||
           part->text_offsets.failed || tool_parser_failed(&part->parser);
}

static void format_array(struct buffer *out, const char *name, const struct buffer *entries) {
    buffer_format(out, "\"%s\":[", name);
    buffer_append(out, entries->data, entries->length);
    buffer_string(out, "]");
}

static void format_logprobs(struct buffer *out, const struct reply *reply, const struct choice_part *part) {
    buffer_string(out, ",\"logprobs\":");
    if (reply->logprobs < 0) {
        buffer_string(out, "null");
        return;
    }
    buffer_string(out, "{");
    if (reply->chat) {
        format_array(out, "content", &part->tokens);
        buffer_string(out, ",\"refusal\":null}");
        return;
    }
    format_array(out, "tokens", &part->tokens);
    buffer_string(out, ",");
    format_array(out, "token_logprobs", &part->token_logprobs);
    buffer_string(out, ",");
    if (reply->logprobs == 0)
        buffer_string(out, "\"top_logprobs\":null");
    else
        format_array(out, "top_logprobs", &part->top_logprobs);
    buffer_string(out, ",");
    format_array(out, "text_offset", &part->text_offsets);
    buffer_string(out, "}");
}

/* part: NULL where there can be no calls. */
static void format_finish(struct buffer *out, const struct choice_part *part, enum finish_reason finish) {
    bool calls = part != NULL && part->parser.calls_count > 0;
    const char *stop = calls ? "\"tool_calls\"" : "\"stop\"";
    const char *reason = finish == FINISH_STOP ? stop : finish == FINISH_LENGTH ? "\"length\"" : "null";
    buffer_format(out, ",\"finish_reason\":%s}", reason);
}

/* --- Whole replies --- */

static void format_head(struct buffer *out, const struct reply *reply, const char *object) {
    buffer_format(out, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":", reply->id, object,
        (long long)reply->created);
    buffer_json_cstring(out, reply->model);
    buffer_string(out, ",\"system_fingerprint\":");
    buffer_json_cstring(out, reply->fingerprint);
    buffer_string(out, ",\"choices\":[");
}

void format_begin(struct buffer *out, const struct reply *reply) {
    if (reply->vectors) {
        buffer_string(out, "{\"object\":\"list\",\"data\":[");
        return;
    }
    format_head(out, reply, reply->chat ? "chat.completion" : "text_completion");
}

static void format_call(struct buffer *out, const struct tool_call *call, size_t index) {
    buffer_format(
        out, "%s{\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":", index > 0 ? "," : "", call->id);
    buffer_json_cstring(out, call->name);
    buffer_string(out, ",\"arguments\":");
    buffer_json_string(out, call->arguments.data, call->arguments.length);
    buffer_string(out, "}}");
}

static void format_message(struct buffer *out, const struct choice_part *part) {
    const struct tool_parser *parser = &part->parser;
    buffer_string(out, "\"message\":{\"role\":\"assistant\",\"content\":");
    if (part->text.length == 0 && parser->calls_count > 0)
        buffer_string(out, "null");
    else
        buffer_json_string(out, part->text.data, part->text.length);
    buffer_string(out, ",\"refusal\":null");
    if (parser->calls_count > 0) {
        buffer_string(out, ",\"tool_calls\":[");
        for (size_t i = 0; i < parser->calls_count; i++)
            format_call(out, &parser->calls[i], i);
        buffer_string(out, "]");
    }
    buffer_string(out, "}");
}

void format_choice(struct buffer *out, const struct reply *reply, uint32_t index, const struct choice_part *part,
    enum finish_reason finish) {
    buffer_format(out, index == 0 ? "{\"index\":%u," : ",{\"index\":%u,", index);
    if (reply->vectors) {
        buffer_string(out, "\"object\":\"embedding\",\"embedding\":");
        buffer_append(out, part->text.data, part->text.length);
        buffer_string(out, "}");
        return;
    }
    if (reply->chat) {
        format_message(out, part);
    } else {
        buffer_string(out, "\"text\":");
        buffer_json_string(out, part->text.data, part->text.length);
    }
    format_logprobs(out, reply, part);
    format_finish(out, part, finish);
}

static void format_usage(struct buffer *out, const struct usage *usage) {
    buffer_format(out,
        "{\"prompt_tokens\":%llu,\"completion_tokens\":%llu,\"total_tokens\":%llu,"
        "\"prompt_tokens_details\":{\"cached_tokens\":%llu},\"kv_tokens_seen\":%llu,\"kv_tokens_kept\":%.0f,"
        "\"kv_bytes\":%llu,\"kv_bytes_full\":%llu}",
        (unsigned long long)usage->prompt_tokens, (unsigned long long)usage->completion_tokens,
        (unsigned long long)(usage->prompt_tokens + usage->completion_tokens), (unsigned long long)usage->cached_tokens,
        (unsigned long long)usage->kv_tokens_seen, round(usage->kv_tokens_kept), (unsigned long long)usage->kv_bytes,
        (unsigned long long)usage->kv_bytes_full);
}

void format_end(struct buffer *out, const struct reply *reply, const struct usage *usage) {
    if (reply->vectors) {
        buffer_string(out, "],\"model\":");
        buffer_json_cstring(out, reply->model);
        buffer_format(out, ",\"usage\":{\"prompt_tokens\":%llu,\"total_tokens\":%llu}}",
            (unsigned long long)usage->prompt_tokens, (unsigned long long)usage->prompt_tokens);
        return;
    }
    buffer_string(out, "],\"usage\":");
    format_usage(out, usage);
    buffer_string(out, "}");
}

/* --- Chunks --- */

static void format_chunk_begin(struct buffer *out, const struct reply *reply) {
    buffer_string(out, "data: ");
    format_head(out, reply, reply->chat ? "chat.completion.chunk" : "text_completion");
}

static void format_chunk_end(struct buffer *out, const struct reply *reply) {
    buffer_string(out, reply->include_usage ? "],\"usage\":null}\n\n" : "]}\n\n");
}

void format_chunk_role(struct buffer *out, const struct reply *reply, uint32_t index) {
    format_chunk_begin(out, reply);
    buffer_format(out, "{\"index\":%u,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null", index);
    format_finish(out, NULL, FINISH_NONE);
    format_chunk_end(out, reply);
}

void format_chunk(struct buffer *out, const struct reply *reply, uint32_t index, const struct choice_part *part,
    enum finish_reason finish) {
    format_chunk_begin(out, reply);
    buffer_format(out, "{\"index\":%u,", index);
    buffer_string(out, reply->chat ? "\"delta\":{\"content\":" : "\"text\":");
    buffer_json_string(out, part->text.data, part->text.length);
    if (reply->chat)
        buffer_string(out, "}");
    format_logprobs(out, reply, part);
    format_finish(out, part, finish);
    format_chunk_end(out, reply);
}

/* A delta of one call; announce: its id and name, else the arguments that were not sent. */
static void format_chunk_call(struct buffer *out, const struct reply *reply, uint32_t index, size_t number,
    struct tool_call *call, bool announce) {
    format_chunk_begin(out, reply);
    buffer_format(out, "{\"index\":%u,\"delta\":{\"tool_calls\":[{\"index\":%zu,", index, number);
    if (announce) {
        buffer_format(out, "\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":", call->id);
        buffer_json_cstring(out, call->name);
        buffer_string(out, ",\"arguments\":\"\"");
        call->announced = true;
    } else {
        buffer_string(out, "\"function\":{\"arguments\":");
        size_t left = call->arguments.length - call->sent;
        buffer_json_string(out, left == 0 ? NULL : call->arguments.data + call->sent, left);
        call->sent = call->arguments.length;
    }
    buffer_string(out, "}}]},\"logprobs\":null");
    format_finish(out, NULL, FINISH_NONE);
    format_chunk_end(out, reply);
}

void format_chunk_calls(struct buffer *out, const struct reply *reply, uint32_t index, struct choice_part *part) {
    for (size_t i = 0; i < part->parser.calls_count; i++) {
        struct tool_call *call = &part->parser.calls[i];
        if (!call->announced)
            format_chunk_call(out, reply, index, i, call, true);
        if (call->sent < call->arguments.length)
            format_chunk_call(out, reply, index, i, call, false);
    }
}

void format_chunk_finish(struct buffer *out, const struct reply *reply, uint32_t index, const struct choice_part *part,
    enum finish_reason finish) {
    format_chunk_begin(out, reply);
    buffer_format(out, "{\"index\":%u,", index);
    buffer_string(out, reply->chat ? "\"delta\":{}" : "\"text\":\"\"");
    buffer_string(out, ",\"logprobs\":null");
    format_finish(out, part, finish);
    format_chunk_end(out, reply);
}

void format_chunk_usage(struct buffer *out, const struct reply *reply, const struct usage *usage) {
    format_chunk_begin(out, reply);
    buffer_string(out, "],\"usage\":");
    format_usage(out, usage);
    buffer_string(out, "}\n\n");
}

void format_done(struct buffer *out) {
    buffer_string(out, "data: [DONE]\n\n");
}
