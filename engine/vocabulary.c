/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/vocabulary.h"

#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#define ALPHABET 324 /* one more than the highest code point that stands for a byte */
#define NO_TOKEN UINT32_MAX

static bool is_own_character(unsigned byte) {
    return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

/* The code point of each byte, and the byte of each code point (-1 where there is none). */
static void fill_alphabet(uint16_t characters[256], int16_t bytes[ALPHABET]) {
    uint16_t next = 256;
    for (size_t i = 0; i < ALPHABET; i++)
        bytes[i] = -1;
    for (unsigned byte = 0; byte < 256; byte++) {
        characters[byte] = is_own_character(byte) ? (uint16_t)byte : next++;
        bytes[characters[byte]] = (int16_t)byte;
    }
}

static uint64_t hash_more(uint64_t hash, struct gguf_string text) {
    for (size_t i = 0; i < text.bytes; i++)
        hash = (hash ^ (unsigned char)text.text[i]) * 0x100000001b3u; /* FNV-1a, Fowler, Noll, Vo */
    return hash;
}

static uint64_t hash_text(struct gguf_string first, struct gguf_string second) {
    uint64_t hash = hash_more(hash_more(0xcbf29ce484222325u, first), second);
    return hash ^ hash >> 32;
}

static bool equals(struct gguf_string text, struct gguf_string first, struct gguf_string second) {
    return text.bytes >= first.bytes && text.bytes - first.bytes == second.bytes &&
           (first.bytes == 0 || memcmp(text.text, first.text, first.bytes) == 0) &&
           (second.bytes == 0 || memcmp(text.text + first.bytes, second.text, second.bytes) == 0);
}

struct gguf_string vocabulary_bytes(const struct vocabulary *vocabulary, uint32_t id) {
    const size_t *begin = vocabulary->begin + id;
    return (struct gguf_string){vocabulary->bytes + begin[0], begin[1] - begin[0]};
}

static struct gguf_string key_of(const struct vocabulary *vocabulary, uint32_t id) {
    return vocabulary->spelling == SPELLING_MARKS ? vocabulary_bytes(vocabulary, id) : vocabulary->texts[id];
}

/* Where the token of a key is in the table, or would be. */
static uint32_t *find_entry(const struct vocabulary *vocabulary, struct gguf_string first, struct gguf_string second) {
    uint64_t at = hash_text(first, second) & vocabulary->mask;
    while (vocabulary->table[at] != NO_TOKEN && !equals(key_of(vocabulary, vocabulary->table[at]), first, second))
        at = (at + 1) & vocabulary->mask;
    return &vocabulary->table[at];
}

int32_t vocabulary_find(const struct vocabulary *vocabulary, struct gguf_string first, struct gguf_string second) {
    uint32_t id = *find_entry(vocabulary, first, second);
    return id == NO_TOKEN ? -1 : (int32_t)id;
}

bool vocabulary_is_special(const struct vocabulary *vocabulary, uint32_t id) {
    enum token_kind kind = vocabulary->kinds[id];
    return kind == TOKEN_CONTROL || (vocabulary->spelling == SPELLING_MARKS && kind == TOKEN_UNKNOWN) ||
           (vocabulary->spelling == SPELLING_ALPHABET && kind == TOKEN_USER_DEFINED);
}

static int index_keys(struct vocabulary *vocabulary, struct error *error) {
    size_t entries = 16;
    while (entries < 2 * (size_t)vocabulary->count)
        entries *= 2;
    vocabulary->table = malloc(entries * sizeof *vocabulary->table);
    if (vocabulary->table == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for an index of %u tokens", vocabulary->count);
    vocabulary->mask = entries - 1;
    memset(vocabulary->table, 0xff, entries * sizeof *vocabulary->table);
    for (uint32_t id = 0; id < vocabulary->count; id++)
        if (vocabulary->spelling == SPELLING_ALPHABET || vocabulary->kinds[id] == TOKEN_NORMAL)
            *find_entry(vocabulary, key_of(vocabulary, id), (struct gguf_string){NULL, 0}) = id;
    return 0;
}

static int read_kinds(struct vocabulary *vocabulary, const struct gguf *gguf, struct error *error) {
    static const char key[] = "tokenizer.ggml.token_type";
    vocabulary->kinds = malloc(vocabulary->count);
    if (vocabulary->kinds == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for %u tokens", vocabulary->count);
    memset(vocabulary->kinds, TOKEN_NORMAL, vocabulary->count);
    const struct gguf_pair *pair = gguf_find(gguf, key);
    if (pair == NULL)
        return 0;
    if (pair->type != GGUF_ARRAY || (pair->element_type != GGUF_INT32 && pair->element_type != GGUF_UINT32))
        return error_set(error, ERROR_FORMAT, "%s is not an array of 32-bit integers", key);
    if (pair->count != vocabulary->count)
        return error_set(error, ERROR_FORMAT, "%s has %llu elements for %u tokens", key,
            (unsigned long long)pair->count, vocabulary->count);
    for (uint32_t id = 0; id < vocabulary->count; id++) {
        int64_t kind = gguf_array_int(pair, id);
        if (kind < TOKEN_NORMAL || kind > TOKEN_BYTE)
            return error_set(error, ERROR_FORMAT, "%s of token %u is %lld, not 1 to 6", key, id, (long long)kind);
        vocabulary->kinds[id] = (uint8_t)kind;
    }
    return 0;
}

/* Writes the bytes that a text spells; their number, or -1 when a character is not of the alphabet. */
static int64_t spell_alphabet(const int16_t alphabet[ALPHABET], struct gguf_string text, char *out) {
    const utf8proc_uint8_t *from = (const utf8proc_uint8_t *)text.text;
    int64_t written = 0;
    for (size_t at = 0; at < text.bytes;) {
        utf8proc_int32_t character;
        utf8proc_ssize_t used = utf8proc_iterate(from + at, (utf8proc_ssize_t)(text.bytes - at), &character);
        if (used <= 0 || character >= ALPHABET || alphabet[character] < 0)
            return -1;
        out[written++] = (char)alphabet[character];
        at += (size_t)used;
    }
    return written;
}

/* The byte of "<0x0A>", or -1. */
static int read_byte_text(struct gguf_string text) {
    static const char digits[] = "0123456789ABCDEFabcdef";
    if (text.bytes != 6 || memcmp(text.text, "<0x", 3) != 0 || text.text[5] != '>')
        return -1;
    const char *high = memchr(digits, text.text[3], sizeof digits - 1);
    const char *low = memchr(digits, text.text[4], sizeof digits - 1);
    if (high == NULL || low == NULL)
        return -1;
    int values[2] = {(int)(high - digits), (int)(low - digits)};
    for (int i = 0; i < 2; i++)
        values[i] -= values[i] > 15 ? 6 : 0;
    return values[0] * 16 + values[1];
}

/* Marks become spaces. */
static int64_t spell_marks(enum token_kind kind, struct gguf_string text, char *out) {
    int byte = kind == TOKEN_BYTE ? read_byte_text(text) : -1;
    if (byte >= 0) {
        out[0] = (char)byte;
        return 1;
    }
    size_t written = 0;
    for (size_t at = 0; at < text.bytes;) {
        bool mark = text.bytes - at >= 3 && memcmp(text.text + at, "\xe2\x96\x81", 3) == 0;
        out[written++] = mark ? ' ' : text.text[at];
        at += mark ? 3 : 1;
    }
    return (int64_t)written;
}

/* As above; -1: the token stands for its text. */
static int64_t spell(const struct vocabulary *vocabulary, const int16_t alphabet[ALPHABET], uint32_t id, char *out) {
    if (vocabulary_is_special(vocabulary, id))
        return -1;
    if (vocabulary->spelling == SPELLING_MARKS)
        return spell_marks(vocabulary->kinds[id], vocabulary->texts[id], out);
    return spell_alphabet(alphabet, vocabulary->texts[id], out);
}

static int spell_tokens(struct vocabulary *vocabulary, const int16_t alphabet[ALPHABET], struct error *error) {
    size_t total = 1; /* no token has more bytes than its text; one more, so that the array is never empty */
    for (uint32_t id = 0; id < vocabulary->count; id++) {
        if (vocabulary->texts[id].bytes > SIZE_MAX - total)
            return error_set(error, ERROR_FORMAT, "the texts of %u tokens are too long", vocabulary->count);
        total += vocabulary->texts[id].bytes;
    }
    vocabulary->bytes = malloc(total);
    vocabulary->begin = malloc(((size_t)vocabulary->count + 1) * sizeof *vocabulary->begin);
    if (vocabulary->bytes == NULL || vocabulary->begin == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for the texts of %u tokens", vocabulary->count);
    size_t at = 0;
    for (uint32_t id = 0; id < vocabulary->count; id++) {
        struct gguf_string text = vocabulary->texts[id];
        vocabulary->begin[id] = at;
        int64_t written = spell(vocabulary, alphabet, id, vocabulary->bytes + at);
        if (written < 0) {
            if (text.bytes > 0)
                memcpy(vocabulary->bytes + at, text.text, text.bytes);
            written = (int64_t)text.bytes;
        }
        at += (size_t)written;
    }
    vocabulary->begin[vocabulary->count] = at;
    return 0;
}

size_t vocabulary_write_alphabet(const struct vocabulary *vocabulary, const char *text, size_t bytes, char *out) {
    size_t written = 0;
    for (size_t i = 0; i < bytes; i++)
        written += (size_t)utf8proc_encode_char(
            vocabulary->characters[(unsigned char)text[i]], (utf8proc_uint8_t *)out + written);
    return written;
}

static void find_byte_tokens(struct vocabulary *vocabulary) {
    for (unsigned byte = 0; byte < 256; byte++) {
        char one = (char)byte, text[4];
        size_t bytes = vocabulary_write_alphabet(vocabulary, &one, 1, text);
        vocabulary->byte_tokens[byte] = -1;
        if (vocabulary->spelling == SPELLING_ALPHABET)
            vocabulary->byte_tokens[byte] =
                vocabulary_find(vocabulary, (struct gguf_string){text, bytes}, (struct gguf_string){NULL, 0});
    }
    for (uint32_t id = 0; vocabulary->spelling == SPELLING_MARKS && id < vocabulary->count; id++)
        if (vocabulary->kinds[id] == TOKEN_BYTE && read_byte_text(vocabulary->texts[id]) >= 0)
            vocabulary->byte_tokens[read_byte_text(vocabulary->texts[id])] = (int32_t)id;
}

int vocabulary_load(
    struct vocabulary *vocabulary, const struct gguf *gguf, enum spelling spelling, struct error *error) {
    static const char key[] = "tokenizer.ggml.tokens";
    *vocabulary = (struct vocabulary){.spelling = spelling};
    const struct gguf_pair *tokens = gguf_find(gguf, key);
    if (tokens == NULL || tokens->type != GGUF_ARRAY || tokens->element_type != GGUF_STRING)
        return error_set(error, ERROR_FORMAT, "%s is %s", key, tokens == NULL ? "missing" : "not an array of strings");
    if (tokens->count == 0 || tokens->count > INT32_MAX)
        return error_set(error, ERROR_FORMAT, "%s has %llu elements, not 1 to %d", key,
            (unsigned long long)tokens->count, INT32_MAX);
    vocabulary->count = (uint32_t)tokens->count;
    vocabulary->texts = tokens->strings;

    int16_t alphabet[ALPHABET];
    fill_alphabet(vocabulary->characters, alphabet);
    int code = read_kinds(vocabulary, gguf, error);
    if (code == 0)
        code = spell_tokens(vocabulary, alphabet, error);
    if (code == 0)
        code = index_keys(vocabulary, error);
    if (code == 0)
        find_byte_tokens(vocabulary);
    return code;
}

void vocabulary_free(struct vocabulary *vocabulary) {
    free(vocabulary->kinds);
    free(vocabulary->bytes);
    free(vocabulary->begin);
    free(vocabulary->table);
    *vocabulary = (struct vocabulary){0};
}
