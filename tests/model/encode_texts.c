/* SPDX-License-Identifier: Apache-2.0
 *
 * encode_texts MODEL [--special]: reads texts from standard input, each a little-endian 32-bit length and so many
 * bytes, and prints the token ids of each on a line of their own. --special parses special tokens.
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

int main(int argc, char **argv) {
    struct error error = {0};
    if (argc < 2) {
        fprintf(stderr, "usage: %s MODEL [--special]\n", argv[0]);
        return 2;
    }
    struct tokenizer *tokenizer = NULL;
    struct gguf *gguf = gguf_open(argv[1], &error);
    if (gguf != NULL)
        tokenizer = tokenizer_create(gguf, &error);
    if (tokenizer != NULL)
        encode_all(tokenizer, argc > 2 && strcmp(argv[2], "--special") == 0, &error);
    if (error.code != 0)
        fprintf(stderr, "%s\n", error.message);
    tokenizer_free(tokenizer);
    gguf_free(gguf);
    return error.code == 0 ? 0 : 1;
}
