/* SPDX-License-Identifier: Apache-2.0 */
#include "grammar/vocabulary.h"

#include "grammar/slice.h"

#include <stdlib.h>
#include <string.h>

enum { TOKEN_BYTES_MAX = 1024, SHOWN_MAX = 128 };

struct entry {
    const uint8_t *bytes;
    uint32_t length;
    int32_t token;
    int shown; /* characters; -1: not shown */
};

static int compare_entries(const void *a, const void *b) {
    const struct entry *x = a, *y = b;
    int order = memcmp(x->bytes, y->bytes, x->length < y->length ? x->length : y->length);
    if (order != 0)
        return order;
    if (x->length != y->length)
        return x->length < y->length ? -1 : 1;
    return x->token < y->token ? -1 : x->token > y->token;
}

/* Bytes of the UTF-8 character at `at`; 0: there is no whole one (RFC 3629, table of well-formed sequences). */
static uint32_t character_bytes(const uint8_t *at, uint32_t left) {
    uint32_t count = at[0] < 0x80 ? 1 : at[0] < 0xc2 ? 0 : at[0] < 0xe0 ? 2 : at[0] < 0xf0 ? 3 : at[0] < 0xf5 ? 4 : 0;
    if (count == 0 || count > left)
        return 0;
    uint8_t low = at[0] == 0xe0 ? 0xa0 : at[0] == 0xf0 ? 0x90 : 0x80;
    uint8_t high = at[0] == 0xed ? 0x9f : at[0] == 0xf4 ? 0x8f : 0xbf;
    for (uint32_t i = 1; i < count; i++, low = 0x80, high = 0xbf)
        if (at[i] < low || at[i] > high)
            return 0;
    return count;
}

static int shown_characters(const uint8_t *bytes, uint32_t length) {
    int characters = 0;
    for (uint32_t i = 0, step; i < length; i += step, characters++) {
        step = character_bytes(bytes + i, length - i);
        if (step == 0 || bytes[i] < 0x20 || bytes[i] == '"' || bytes[i] == '\\' || characters == SHOWN_MAX)
            return -1;
    }
    return characters;
}

/* Entries [count] are sorted. rest: without the shown ones. */
static int build_trie(struct trie *trie, const struct entry *entries, uint32_t count, bool rest) {
    size_t most = 1;
    for (uint32_t i = 0; i < count; i++)
        most += entries[i].length;
    uint32_t open[TOKEN_BYTES_MAX], depth = 0; /* nodes on the way to the last entry */
    const struct entry *last = NULL;
    trie->nodes = malloc(most * sizeof *trie->nodes);
    trie->tokens = malloc((count + 1) * sizeof *trie->tokens);
    if (trie->nodes == NULL || trie->tokens == NULL)
        return ERROR_MEMORY;
    for (uint32_t i = 0; i < count; i++) {
        const struct entry *entry = &entries[i];
        if (rest && entry->shown >= 0)
            continue;
        uint32_t same = 0;
        while (last != NULL && same < depth && same < entry->length && entry->bytes[same] == last->bytes[same])
            same++;
        while (depth > same)
            trie->nodes[open[--depth]].skip = trie->count;
        for (; depth < entry->length; depth++) {
            open[depth] = trie->count;
            trie->nodes[trie->count++] =
                (struct trie_node){.first = trie->tokens_count, .depth = (uint16_t)depth, .byte = entry->bytes[depth]};
        }
        struct trie_node *node = &trie->nodes[open[depth - 1]];
        if (node->tokens == UINT8_MAX)
            continue;
        if (node->tokens++ == 0)
            node->first = trie->tokens_count;
        trie->tokens[trie->tokens_count++] = entry->token;
        last = entry;
    }
    while (depth > 0)
        trie->nodes[open[--depth]].skip = trie->count;
    trie->nodes[trie->count] = (struct trie_node){.first = trie->tokens_count};
    struct trie_node *fitting = realloc(trie->nodes, (trie->count + 1) * sizeof *fitting);
    trie->nodes = fitting != NULL ? fitting : trie->nodes;
    return 0;
}

static void set_bit(uint32_t *words, int32_t token) {
    words[(uint32_t)token / 32] |= 1u << (uint32_t)token % 32;
}

static int build_shown(struct grammar_vocabulary *vocabulary, const struct entry *entries, uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        if (entries[i].shown > (int)vocabulary->shown_longest)
            vocabulary->shown_longest = (uint32_t)entries[i].shown;
    size_t words = vocabulary->words;
    vocabulary->shown = calloc((vocabulary->shown_longest + 1) * words, sizeof *vocabulary->shown);
    if (vocabulary->shown == NULL)
        return ERROR_MEMORY;
    for (uint32_t i = 0; i < count; i++)
        if (entries[i].shown >= 0)
            set_bit(vocabulary->shown + (uint32_t)entries[i].shown * words, entries[i].token);
    for (size_t i = words; i < (vocabulary->shown_longest + 1) * words; i++)
        vocabulary->shown[i] |= vocabulary->shown[i - words];
    return 0;
}

/* The tokens that text may be made of; marks end tokens. Returns their number. */
static uint32_t list_entries(struct grammar_vocabulary *vocabulary, struct entry *entries, uint32_t tokens) {
    uint32_t count = 0;
    for (uint32_t token = 0; token < tokens; token++) {
        int32_t id = (int32_t)token;
        if (tokenizer_is_end(vocabulary->tokenizer, id))
            set_bit(vocabulary->ends, id);
        size_t bytes;
        const char *text = tokenizer_token_bytes(vocabulary->tokenizer, id, &bytes);
        if (tokenizer_is_special(vocabulary->tokenizer, id) || tokenizer_is_end(vocabulary->tokenizer, id) ||
            bytes == 0 || bytes > TOKEN_BYTES_MAX)
            continue;
        struct entry *entry = &entries[count++];
        *entry = (struct entry){(const uint8_t *)text, (uint32_t)bytes, id, 0};
        entry->shown = shown_characters(entry->bytes, entry->length);
        vocabulary->longest = entry->length > vocabulary->longest ? entry->length : vocabulary->longest;
    }
    qsort(entries, count, sizeof *entries, compare_entries);
    return count;
}

struct grammar_vocabulary *grammar_vocabulary_create(
    const struct tokenizer *tokenizer, uint32_t vocabulary, struct error *error) {
    struct grammar_vocabulary *new = calloc(1, sizeof *new);
    uint32_t tokens = tokenizer_vocabulary(tokenizer), most = tokens > vocabulary ? tokens : vocabulary;
    struct entry *entries = malloc(((size_t)tokens + 1) * sizeof *entries);
    int code = new == NULL || entries == NULL ? ERROR_MEMORY : 0;
    if (code == 0) {
        new->tokenizer = tokenizer;
        new->words = most / 32 + 1;
        new->ends = calloc(new->words, sizeof *new->ends);
        new->slices = slice_cache_create();
        code = new->ends == NULL || new->slices == NULL ? ERROR_MEMORY : 0;
    }
    if (code == 0) {
        uint32_t count = list_entries(new, entries, tokens);
        if (build_trie(&new->all, entries, count, false) != 0 || build_trie(&new->rest, entries, count, true) != 0 ||
            build_shown(new, entries, count) != 0)
            code = ERROR_MEMORY;
    }
    free(entries);
    if (code == 0)
        return new;
    grammar_vocabulary_free(new);
    error_set(error, code, "no memory for the vocabulary of grammars");
    return NULL;
}

void grammar_vocabulary_free(struct grammar_vocabulary *vocabulary) {
    if (vocabulary == NULL)
        return;
    free(vocabulary->all.nodes);
    free(vocabulary->all.tokens);
    free(vocabulary->rest.nodes);
    free(vocabulary->rest.tokens);
    free(vocabulary->shown);
    free(vocabulary->ends);
    slice_cache_free(vocabulary->slices);
    free(vocabulary);
}
