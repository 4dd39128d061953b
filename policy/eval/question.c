/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/eval/question.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/random.h"
#include "policy/eval/prose.h"

enum { TEXT_BYTES_MAX = 256 * 1024 * 1024, TEXT_STREAM = 0x74657874 };

static void digest_tokens(uint64_t *digest, const struct token_list *list) {
    for (size_t i = 0; i <= list->count; i++) { /* the end of a list counts, as -1 */
        uint32_t word = i < list->count ? (uint32_t)list->ids[i] : UINT32_MAX;
        for (int byte = 0; byte < 4; byte++)
            *digest = (*digest ^ (word >> 8 * byte & 0xff)) * UINT64_C(0x100000001b3); /* FNV-1a */
    }
}

static void digest_question(struct eval_question *question) {
    question->digest = UINT64_C(0xcbf29ce484222325);
    digest_tokens(&question->digest, &question->prompt);
    digest_tokens(&question->digest, &question->asked);
    digest_tokens(&question->digest, &question->gold);
    digest_tokens(&question->digest, &question->text);
}

void eval_question_free(struct eval_question *question) {
    token_list_free(&question->prompt);
    token_list_free(&question->asked);
    token_list_free(&question->gold);
    token_list_free(&question->text);
    *question = (struct eval_question){0};
}

static int encode(const struct tokenizer *tokenizer, const char *text, size_t bytes, bool special,
    struct token_list *out, struct error *error) {
    return tokenizer_encode(tokenizer, text, bytes, special, out, error);
}

/* Finds the one byte of the text that came from the message. */
static bool find_words(const struct template_text *text, char words, size_t *at) {
    size_t found = 0;
    for (size_t i = 0; text->input != NULL && i < text->bytes; i++) {
        if (text->input[i] == 0)
            continue;
        found++;
        *at = i;
    }
    return found == 1 && text->text[*at] == words;
}

/* What stands before (head bytes) and after (from head + 1) a user's words in a conversation of one message. */
static int render_frame(const struct chat_source *chat, struct template_text *text, size_t *head, struct error *error) {
    static const char words[] = "\x01";
    if (chat->template == NULL)
        return error_set(error, ERROR_UNSUPPORTED, "%s",
            chat->refusal != NULL ? chat->refusal : "the model has no chat template, and the task asks in a chat");
    json_t *content = chat_template_content(chat->template, json_string(words));
    json_t *messages = content == NULL ? NULL : json_pack("[{s:s, s:o}]", "role", "user", "content", content);
    if (messages == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a conversation");
    const struct chat_input input = {.messages = messages, .add_generation_prompt = true, .now = CHAT_FIXED_TIME};
    struct error cause = {0};
    int code = chat_template_render(chat->template, &input, text, &cause);
    json_decref(messages);
    if (code != 0)
        return error_set(error, code, "the chat template refuses a user's message: %.300s", cause.message);
    return find_words(text, words[0], head)
               ? 0
               : error_set(error, ERROR_UNSUPPORTED, "the chat template does not write a user's message as it is");
}

static int encode_parts(const struct tokenizer *tokenizer, const struct chat_source *chat, const struct eval_item *item,
    struct token_list *asked, struct eval_question *question, struct error *error) {
    struct template_text frame = {0};
    size_t head = 0;
    int code = item->chat ? render_frame(chat, &frame, &head, error) : 0;
    if (code == 0 && item->chat)
        code = encode(tokenizer, frame.text, head, true, &question->prompt, error);
    else if (code == 0 && tokenizer_adds_bos(tokenizer) && tokenizer_bos(tokenizer) >= 0)
        code = token_list_append(&question->prompt, tokenizer_bos(tokenizer));
    if (code == 0)
        code = encode(tokenizer, item->context, strlen(item->context), false, &question->prompt, error);
    if (code == 0)
        code = encode(tokenizer, item->question, strlen(item->question), false, asked, error);
    if (code == 0 && item->chat)
        code = encode(tokenizer, frame.text + head + 1, frame.bytes - head - 1, true, asked, error);
    template_text_free(&frame);
    return code;
}

/* Whether an answer follows the text without a space. */
static bool joins(const char *text) {
    size_t length = strlen(text);
    return length == 0 || strchr(" \n\t\"'([{", text[length - 1]) != NULL;
}

static int encode_gold(
    const struct tokenizer *tokenizer, const struct eval_item *item, struct token_list *gold, struct error *error) {
    if (item->answers_count == 0 || item->answers[0][0] == '\0')
        return 0;
    const char *before = item->question[0] != '\0' ? item->question : item->context;
    char *text = NULL;
    if (asprintf(&text, "%s%s", item->chat || joins(before) ? "" : " ", item->answers[0]) < 0)
        return error_set(error, ERROR_MEMORY, "no memory for an answer");
    int code = encode(tokenizer, text, strlen(text), false, gold, error);
    free(text);
    return code;
}

static int append_tokens(struct token_list *to, const int32_t *ids, size_t count, struct error *error) {
    for (size_t i = 0; i < count; i++)
        if (token_list_append(to, ids[i]) != 0)
            return error_set(error, ERROR_MEMORY, "no memory for %zu tokens", count);
    return 0;
}

int eval_question_create(const struct tokenizer *tokenizer, const struct chat_source *chat,
    const struct eval_item *item, bool query_aware, struct eval_question *question, struct error *error) {
    *question = (struct eval_question){0};
    struct token_list asked = {0};
    int code = encode_parts(tokenizer, chat, item, &asked, question, error);
    if (code == 0)
        code = encode_gold(tokenizer, item, &question->gold, error);
    if (code == 0)
        code = append_tokens(query_aware ? &question->prompt : &question->asked, asked.ids, asked.count, error);
    if (code == 0 && question->prompt.count == 0) { /* nothing to prune: the question is the prompt */
        code = append_tokens(&question->prompt, asked.ids, asked.count, error);
        question->asked.count = 0;
    }
    if (code == 0 && question->prompt.count == 0)
        code = error_set(error, ERROR_INVALID, "an item without context and question");
    token_list_free(&asked);
    digest_question(question);
    if (code != 0)
        eval_question_free(question);
    return code;
}

char *eval_text_read(const char *name, size_t *bytes, struct error *error) {
    char *text = NULL;
    FILE *file = fopen(name, "rbe");
    if (file == NULL) {
        error_set(error, ERROR_IO, "cannot open %.200s: %s", name, strerror(errno));
        return NULL;
    }
    size_t capacity = 0;
    *bytes = 0;
    do {
        capacity = capacity * 2 + 65536;
        char *grown = capacity <= TEXT_BYTES_MAX ? realloc(text, capacity) : NULL;
        if (grown == NULL) {
            error_set(error, capacity > TEXT_BYTES_MAX ? ERROR_INVALID : ERROR_MEMORY,
                "%.200s: too large for a text to take prompts from (%d MiB)", name, TEXT_BYTES_MAX >> 20);
            goto fail;
        }
        text = grown;
        *bytes += fread(text + *bytes, 1, capacity - 1 - *bytes, file);
    } while (*bytes == capacity - 1);
    if (ferror(file)) {
        error_set(error, ERROR_IO, "cannot read %.200s", name);
        goto fail;
    }
    fclose(file);
    text[*bytes] = '\0';
    return text;
fail:
    fclose(file);
    free(text);
    return NULL;
}

size_t eval_text_half(const char *text, size_t bytes) {
    size_t lines = 0, seen = 0;
    for (size_t i = 0; i < bytes; i++)
        lines += text[i] == '\n';
    for (size_t i = 0; i < bytes && lines > 1; i++) {
        seen += text[i] == '\n';
        if (seen == (lines + 1) / 2)
            return i + 1;
    }
    return 0;
}

static int generate_prose(
    const struct tokenizer *tokenizer, uint64_t seed, uint32_t tokens, struct token_list *out, struct error *error) {
    char sentence[PROSE_SENTENCE_MAX + 2];
    int code = 0;
    for (uint32_t i = 0; out->count < tokens && code == 0; i++) {
        size_t bytes = prose_sentence(seed, TEXT_STREAM, i, sentence);
        strcpy(sentence + bytes, i % 6 == 5 ? "\n" : " ");
        code = encode(tokenizer, sentence, bytes + 1, false, out, error);
    }
    return code;
}

int eval_source_load(const struct tokenizer *tokenizer, const char *file, uint64_t seed, uint32_t tokens,
    struct eval_source *text, struct error *error) {
    *text = (struct eval_source){0};
    if (file == NULL)
        return generate_prose(tokenizer, seed, tokens, &text->tokens, error);
    size_t bytes;
    char *content = eval_text_read(file, &bytes, error);
    if (content == NULL)
        return error->code;
    size_t begin = eval_text_half(content, bytes);
    int code = encode(tokenizer, content + begin, bytes - begin, false, &text->tokens, error);
    free(content);
    return code;
}

void eval_source_free(struct eval_source *text) {
    token_list_free(&text->tokens);
}

int eval_source_question(const struct eval_source *text, uint32_t length, uint32_t steps, uint32_t index,
    uint32_t count, uint64_t seed, struct eval_question *question, struct error *error) {
    size_t needed = (size_t)length + steps + 1, total = text->tokens.count;
    *question = (struct eval_question){0};
    if (total < needed)
        return error_set(error, ERROR_INVALID,
            "the text (its second half) has %zu tokens: length %u and %u steps need %zu", total, length, steps, needed);
    size_t part = total / count, free_places = part > needed ? part - needed : 0;
    size_t start = (size_t)((double)(total - needed) * index / count);
    if (free_places > 0)
        start = part * index + (size_t)(random_uniform(seed, TEXT_STREAM, index, 0) * (float)free_places);
    if (start > total - needed)
        start = total - needed;
    const int32_t *ids = text->tokens.ids + start;
    int code = append_tokens(&question->prompt, ids, length, error);
    if (code == 0)
        code = append_tokens(&question->text, ids + length, steps + 1, error);
    digest_question(question);
    if (code != 0)
        eval_question_free(question);
    return code;
}
