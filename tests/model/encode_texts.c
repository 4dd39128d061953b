/* SPDX-License-Identifier: Apache-2.0
 *
 * encode_texts MODEL [--special]: reads texts from standard input, each a little-endian 32-bit length and so many
 * bytes, and prints the token ids of each on a line of their own. --special parses special tokens.
 * encode_texts MODEL --decode: reads such lines, and prints the text of each with a NUL behind it.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/bytes.h"
#include "engine/tokenizer.h"

/* The next text, allocated; NULL at the end of the input. */
static char *read_text(size_t *bytes) {
    unsigned char length[4];
    if (fread(length, 1, sizeof length, stdin) != sizeof length)
        return NULL;
    *bytes = load_u32(length);
    char *text = malloc(*bytes + 1);
    if (text == NULL || fread(text, 1, *bytes, stdin) != *bytes) {
        free(text);
        return NULL;
    }
    return text;
}

static int encode_all(const struct tokenizer *tokenizer, bool parse_special, struct error *error) {
    size_t bytes;
    int code = 0;
    for (char *text; code == 0 && (text = read_text(&bytes)) != NULL; free(text)) {
        struct token_list list = {0};
        code = tokenizer_encode(tokenizer, text, bytes, parse_special, &list, error);
        for (size_t i = 0; i < list.count; i++)
            printf(i == 0 ? "%d" : " %d", list.ids[i]);
        putchar('\n');
        token_list_free(&list);
    }
    return code;
}

/* One line of ids: its text as a whole, without special tokens. */
static void decode_line(const struct tokenizer *tokenizer, char *line) {
    bool first = true;
    for (char *at = strtok(line, " \n"); at != NULL; at = strtok(NULL, " \n")) {
        int32_t token = atoi(at);
        size_t bytes;
        if (tokenizer_is_special(tokenizer, token))
            continue;
        const char *text = tokenizer_token_bytes(tokenizer, token, &bytes);
        size_t skip = first ? tokenizer_leading_space(tokenizer, token) : 0;
        fwrite(text + skip, 1, bytes - skip, stdout);
        first = false;
    }
    putchar('\0');
}

static void decode_all(const struct tokenizer *tokenizer) {
    char *line = NULL;
    size_t capacity = 0;
    while (getline(&line, &capacity, stdin) > 0)
        decode_line(tokenizer, line);
    free(line);
}

int main(int argc, char **argv) {
    struct error error = {0};
    if (argc < 2) {
        fprintf(stderr, "usage: %s MODEL [--special | --decode]\n", argv[0]);
        return 2;
    }
    struct tokenizer *tokenizer = NULL;
    struct gguf *gguf = gguf_open(argv[1], &error);
    if (gguf != NULL)
        tokenizer = tokenizer_create(gguf, &error);
    if (tokenizer != NULL && argc > 2 && strcmp(argv[2], "--decode") == 0)
        decode_all(tokenizer);
    else if (tokenizer != NULL)
        encode_all(tokenizer, argc > 2 && strcmp(argv[2], "--special") == 0, &error);
    if (error.code != 0)
        fprintf(stderr, "%s\n", error.message);
    tokenizer_free(tokenizer);
    gguf_free(gguf);
    return error.code == 0 ? 0 : 1;
}
