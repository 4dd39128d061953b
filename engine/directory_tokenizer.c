/* SPDX-License-Identifier: Apache-2.0
 *
 * tokenizer.json and its companions: vocabulary, merges, special tokens and chat templates, as GGUF has them.
 */
#include "engine/directory_internal.h"

#include <stdlib.h>
#include <string.h>

#include "engine/pretokenizer.h"
#include "engine/vocabulary.h"

enum { TOKENS_MAX = 1 << 24 };

struct token_entry {
    const char *text; /* borrowed from the JSON; NULL: no token has this id */
    size_t bytes;
    int32_t kind;
};

struct token_table {
    struct token_entry *tokens;
    uint32_t count;
};

static int tokenizer_error(const struct directory *directory, int code, const char *what, struct error *error) {
    return error_set(error, code, "%s/tokenizer.json: %s", directory->path, what);
}

/* The number of ids: one more than the highest, and at least as many as the model has. */
static int count_tokens(
    const struct directory *directory, const json_t *words, const json_t *added, uint32_t *count, struct error *error) {
    const char *text;
    json_t *value;
    size_t i;
    json_int_t highest = (json_int_t)directory->vocabulary - 1;
    json_object_foreach((json_t *)words, text, value) {
        json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
        if (id < 0 || id >= TOKENS_MAX)
            return tokenizer_error(directory, ERROR_FORMAT, "model.vocab has an id that is none", error);
        highest = id > highest ? id : highest;
    }
    json_array_foreach(added, i, value) {
        const json_t *number = json_object_get(value, "id");
        json_int_t id = json_is_integer(number) ? json_integer_value(number) : -1;
        if (id < 0 || id >= TOKENS_MAX || !json_is_string(json_object_get(value, "content")))
            return tokenizer_error(directory, ERROR_FORMAT, "an entry of added_tokens has no id or no content", error);
        highest = id > highest ? id : highest;
    }
    if (highest < 0 || highest >= TOKENS_MAX)
        return tokenizer_error(directory, ERROR_FORMAT, "there are no tokens, or too many", error);
    *count = (uint32_t)highest + 1;
    return 0;
}

static bool is_byte_text(const char *text) {
    return strlen(text) == 6 && memcmp(text, "<0x", 3) == 0 && text[5] == '>';
}

static void fill_tokens(
    struct token_table *table, const json_t *words, const json_t *added, const char *unknown, bool has_bytes) {
    const char *text;
    json_t *value;
    size_t i;
    json_object_foreach((json_t *)words, text, value) {
        int32_t kind = has_bytes && is_byte_text(text) ? TOKEN_BYTE : TOKEN_NORMAL;
        table->tokens[json_integer_value(value)] = (struct token_entry){text, strlen(text), kind};
    }
    json_array_foreach(added, i, value) {
        const json_t *content = json_object_get(value, "content");
        bool special = json_is_true(json_object_get(value, "special"));
        table->tokens[json_integer_value(json_object_get(value, "id"))] = (struct token_entry){
            json_string_value(content), json_string_length(content), special ? TOKEN_CONTROL : TOKEN_USER_DEFINED};
    }
    for (uint32_t id = 0; has_bytes && unknown != NULL && id < table->count; id++)
        if (table->tokens[id].text != NULL && strcmp(table->tokens[id].text, unknown) == 0)
            table->tokens[id].kind = TOKEN_UNKNOWN;
}

static void write_tokens(const struct token_table *table, struct metadata *metadata) {
    metadata_array(metadata, "tokenizer.ggml.tokens", GGUF_STRING, table->count);
    for (uint32_t id = 0; id < table->count; id++) {
        char padding[32]; /* ids of the model without a token */
        snprintf(padding, sizeof padding, "[PAD%u]", id);
        if (table->tokens[id].text != NULL)
            metadata_element_text(metadata, table->tokens[id].text, table->tokens[id].bytes);
        else
            metadata_element_text(metadata, padding, strlen(padding));
    }
    metadata_array(metadata, "tokenizer.ggml.token_type", GGUF_INT32, table->count);
    for (uint32_t id = 0; id < table->count; id++)
        metadata_element_int32(metadata, table->tokens[id].text != NULL ? table->tokens[id].kind : TOKEN_UNUSED);
}

/* Merges are "left right", or since 2024 ["left", "right"]. */
static int write_merges(
    const struct directory *directory, const json_t *merges, struct metadata *metadata, struct error *error) {
    size_t i;
    json_t *merge;
    metadata_array(metadata, "tokenizer.ggml.merges", GGUF_STRING, json_array_size(merges));
    json_array_foreach(merges, i, merge) {
        if (json_is_string(merge)) {
            metadata_element_text(metadata, json_string_value(merge), json_string_length(merge));
            continue;
        }
        const char *left = json_string_value(json_array_get(merge, 0));
        const char *right = json_string_value(json_array_get(merge, 1));
        char *both = NULL;
        if (left == NULL || right == NULL || json_array_size(merge) != 2 || strchr(left, ' ') != NULL)
            return tokenizer_error(directory, ERROR_FORMAT, "an entry of model.merges is not two texts", error);
        if (asprintf(&both, "%s %s", left, right) < 0)
            return tokenizer_error(directory, ERROR_MEMORY, "no memory for its merges", error);
        metadata_element_text(metadata, both, strlen(both));
        free(both);
    }
    return 0;
}

/* Calls look for a part and for each part of a Sequence of them, until one returns true. */
static const json_t *find_part(const json_t *part, const char *list, const char *type) {
    const char *own = json_string_value(json_object_get(part, "type"));
    size_t i;
    json_t *inner;
    if (own != NULL && strcmp(own, type) == 0)
        return part;
    if (own == NULL || strcmp(own, "Sequence") != 0)
        return NULL;
    json_array_foreach(json_object_get(part, list), i, inner) {
        const char *name = json_string_value(json_object_get(inner, "type"));
        if (name != NULL && strcmp(name, type) == 0)
            return inner;
    }
    return NULL;
}

/* Byte-level: the name of the pattern that text is cut by. */
static int find_pre(const struct directory *directory, const char **name, struct error *error) {
    const json_t *part = json_object_get(directory->tokenizer, "pre_tokenizer");
    const json_t *split = find_part(part, "pretokenizers", "Split");
    const json_t *digits = find_part(part, "pretokenizers", "Digits");
    const json_t *level = find_part(part, "pretokenizers", "ByteLevel");
    const char *regex = json_string_value(json_object_get(json_object_get(split, "pattern"), "Regex"));
    bool by_level = !json_is_false(json_object_get(level, "use_regex"));
    *name = NULL;
    if (regex != NULL && !by_level && digits == NULL)
        *name = pretokenizer_find_pattern(regex);
    else if (split == NULL && by_level && digits != NULL && json_is_true(json_object_get(digits, "individual_digits")))
        *name = "smollm";
    else if (split == NULL && by_level && digits == NULL)
        *name = "gpt-2";
    if (*name != NULL)
        return 0;
    char what[300];
    snprintf(what, sizeof what, "the pre_tokenizer is not supported%s%.200s", regex != NULL ? ": pattern " : "",
        regex != NULL ? regex : "");
    return tokenizer_error(directory, ERROR_UNSUPPORTED, what, error);
}

static int write_byte_level(
    const struct directory *directory, const json_t *model, struct metadata *metadata, struct error *error) {
    const json_t *normalizer = json_object_get(directory->tokenizer, "normalizer");
    const char *pre;
    int code = find_pre(directory, &pre, error);
    if (code != 0)
        return code;
    bool composes = find_part(normalizer, "normalizers", "NFC") != NULL;
    if (normalizer != NULL && !json_is_null(normalizer) && !composes)
        return tokenizer_error(directory, ERROR_UNSUPPORTED, "the normalizer is not supported (NFC is)", error);
    metadata_string(metadata, "tokenizer.ggml.model", "gpt2", 4);
    metadata_string(metadata, "tokenizer.ggml.pre", pre, strlen(pre));
    metadata_bool(metadata, "tokenizer.ggml.ignore_merges", json_is_true(json_object_get(model, "ignore_merges")));
    metadata_bool(metadata, "tokenizer.ggml.nfc", composes);
    return 0;
}

/* SentencePiece's pieces with listed merges: whether a space is put before a text is in either of two places. */
static void write_pieces(const struct directory *directory, struct metadata *metadata) {
    const json_t *normalizer = json_object_get(directory->tokenizer, "normalizer");
    const json_t *pre = json_object_get(directory->tokenizer, "pre_tokenizer");
    const json_t *metaspace = find_part(pre, "pretokenizers", "Metaspace");
    const char *scheme = json_string_value(json_object_get(metaspace, "prepend_scheme"));
    bool adds = find_part(normalizer, "normalizers", "Prepend") != NULL;
    if (metaspace != NULL)
        adds = scheme != NULL ? strcmp(scheme, "never") != 0
                              : !json_is_false(json_object_get(metaspace, "add_prefix_space"));
    metadata_string(metadata, "tokenizer.ggml.model", "llama", 5);
    metadata_bool(metadata, "tokenizer.ggml.add_space_prefix", adds);
}

static int write_vocabulary(
    const struct directory *directory, struct token_table *table, struct metadata *metadata, struct error *error) {
    const json_t *model = json_object_get(directory->tokenizer, "model");
    const json_t *words = json_object_get(model, "vocab"), *merges = json_object_get(model, "merges");
    const json_t *added = json_object_get(directory->tokenizer, "added_tokens");
    const char *type = json_string_value(json_object_get(model, "type"));
    const json_t *pre = json_object_get(directory->tokenizer, "pre_tokenizer");
    const bool is_bytes = find_part(pre, "pretokenizers", "ByteLevel") != NULL;
    const bool has_fallback = json_is_true(json_object_get(model, "byte_fallback"));
    if (type != NULL && strcmp(type, "BPE") != 0)
        return error_set(error, ERROR_UNSUPPORTED, "%s/tokenizer.json: model type \"%.80s\" is not supported (BPE is)",
            directory->path, type);
    if (!json_is_object(words) || !json_is_array(merges))
        return tokenizer_error(directory, ERROR_FORMAT, "model.vocab or model.merges is missing", error);
    if (!is_bytes && !has_fallback)
        return tokenizer_error(
            directory, ERROR_UNSUPPORTED, "neither a ByteLevel pre_tokenizer nor byte_fallback: not supported", error);
    int code = count_tokens(directory, words, added, &table->count, error);
    if (code != 0)
        return code;
    table->tokens = calloc(table->count, sizeof *table->tokens);
    if (table->tokens == NULL)
        return tokenizer_error(directory, ERROR_MEMORY, "no memory for its tokens", error);
    fill_tokens(table, words, added, json_string_value(json_object_get(model, "unk_token")), !is_bytes);
    if (is_bytes)
        code = write_byte_level(directory, model, metadata, error);
    else
        write_pieces(directory, metadata);
    write_tokens(table, metadata);
    return code != 0 ? code : write_merges(directory, merges, metadata, error);
}

/* Special tokens. */

static int64_t find_id(const struct token_table *table, const char *text) {
    for (uint32_t id = 0; text != NULL && id < table->count; id++)
        if (table->tokens[id].text != NULL && strcmp(table->tokens[id].text, text) == 0)
            return id;
    return -1;
}

/* A token of tokenizer_config.json is its text, or an object with it. */
static int64_t find_named(const struct directory *directory, const struct token_table *table, const char *field) {
    const json_t *token = json_object_get(directory->tokenizer_config, field);
    const json_t *content = json_is_object(token) ? json_object_get(token, "content") : token;
    return find_id(table, json_string_value(content));
}

/* Adds an id, or those of an array, to a list without those that are there. */
static void add_ids(const json_t *value, const struct token_table *table, int64_t ids[3], size_t *count) {
    const size_t most = 3;
    size_t entries = json_is_array(value) ? json_array_size(value) : 1;
    for (size_t i = 0; i < entries; i++) {
        const json_t *entry = json_is_array(value) ? json_array_get(value, i) : value;
        int64_t id = json_is_integer(entry) ? json_integer_value(entry) : -1;
        bool known = id < 0 || id >= table->count;
        for (size_t j = 0; j < *count; j++)
            known |= ids[j] == id;
        if (!known && *count < most)
            ids[(*count)++] = id;
    }
}

static int64_t write_ends(
    const struct directory *directory, const struct token_table *table, struct metadata *metadata) {
    static const char *const keys[] = {
        "tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"};
    int64_t ids[3], named = find_named(directory, table, "eos_token");
    size_t count = 0;
    if (named >= 0)
        ids[count++] = named;
    add_ids(json_object_get(directory->config, "eos_token_id"), table, ids, &count);
    add_ids(json_object_get(directory->generation, "eos_token_id"), table, ids, &count);
    for (size_t i = 0; i < count; i++)
        metadata_uint32(metadata, keys[i], (uint32_t)ids[i]);
    return count > 0 ? ids[0] : -1;
}

/* Whether the template of post_processor has the token at its beginning or end. */
static bool is_added(const struct directory *directory, int64_t token, const struct token_table *table, bool first) {
    const json_t *processor = json_object_get(directory->tokenizer, "post_processor");
    const json_t *single = json_object_get(find_part(processor, "processors", "TemplateProcessing"), "single");
    size_t count = json_array_size(single);
    if (token < 0 || count == 0)
        return false;
    const json_t *entry = json_array_get(single, first ? 0 : count - 1);
    const char *text = json_string_value(json_object_get(json_object_get(entry, "SpecialToken"), "id"));
    return text != NULL && find_id(table, text) == token;
}

static void write_frame(const struct directory *directory, const struct token_table *table, struct metadata *metadata) {
    const json_t *adds_bos = json_object_get(directory->tokenizer_config, "add_bos_token");
    const json_t *adds_eos = json_object_get(directory->tokenizer_config, "add_eos_token");
    int64_t bos = find_named(directory, table, "bos_token"), eos = write_ends(directory, table, metadata);
    const json_t *number = json_object_get(directory->config, "bos_token_id");
    if (bos < 0 && json_is_integer(number) && json_integer_value(number) >= 0 &&
        json_integer_value(number) < table->count)
        bos = json_integer_value(number);
    if (bos >= 0)
        metadata_uint32(metadata, "tokenizer.ggml.bos_token_id", (uint32_t)bos);
    metadata_bool(metadata, "tokenizer.ggml.add_bos_token",
        bos >= 0 && (json_is_boolean(adds_bos) ? json_is_true(adds_bos) : is_added(directory, bos, table, true)));
    metadata_bool(metadata, "tokenizer.ggml.add_eos_token",
        eos >= 0 && (json_is_boolean(adds_eos) ? json_is_true(adds_eos) : is_added(directory, eos, table, false)));
}

/* One template, or a list of named ones; a file goes over the one without a name. */
static void write_templates(const struct directory *directory, struct metadata *metadata) {
    static const char key[] = "tokenizer.chat_template";
    const json_t *templates = json_object_get(directory->tokenizer_config, "chat_template");
    const bool has_file = directory->template != NULL;
    size_t i;
    json_t *entry;
    if (has_file)
        metadata_string(metadata, key, directory->template, directory->template_bytes);
    else if (json_is_string(templates))
        metadata_string(metadata, key, json_string_value(templates), json_string_length(templates));
    json_array_foreach(templates, i, entry) {
        static const char *const known[] = {"default", "tool_use", "rag"};
        const char *name = json_string_value(json_object_get(entry, "name"));
        const json_t *text = json_object_get(entry, "template");
        bool again = false; /* of a name that occurs twice the first counts */
        for (size_t j = 0; name != NULL && j < i; j++) {
            const char *other = json_string_value(json_object_get(json_array_get(templates, j), "name"));
            again |= other != NULL && strcmp(other, name) == 0;
        }
        for (size_t j = 0; name != NULL && json_is_string(text) && !again && j < 3; j++) {
            char own[64];
            snprintf(own, sizeof own, "%s%s%s", key, j == 0 ? "" : ".", j == 0 ? "" : known[j]);
            if (strcmp(name, known[j]) == 0 && !(j == 0 && has_file))
                metadata_string(metadata, own, json_string_value(text), json_string_length(text));
        }
    }
}

int directory_read_tokenizer(struct directory *directory, struct metadata *metadata, struct error *error) {
    struct token_table table = {0};
    int code = write_vocabulary(directory, &table, metadata, error);
    if (code == 0) {
        write_frame(directory, &table, metadata);
        write_templates(directory, metadata);
    }
    free(table.tokens);
    return code;
}
