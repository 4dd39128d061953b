/* SPDX-License-Identifier: Apache-2.0
 *
 * A template's source as tokens, with jinja2's rules for whitespace (trim_blocks and lstrip_blocks on, one newline at
 * the end dropped, \r\n and \r read as \n) applied. Comments and raw blocks are resolved here.
 */
#ifndef TEMPLATE_LEXER_H
#define TEMPLATE_LEXER_H

#include "template/value.h"

enum token_kind {
    TOKEN_TEXT, /* outside of tags */
    TOKEN_BLOCK_BEGIN,
    TOKEN_BLOCK_END,
    TOKEN_PRINT_BEGIN,
    TOKEN_PRINT_END,
    TOKEN_NAME,
    TOKEN_STRING, /* escapes resolved */
    TOKEN_INTEGER,
    TOKEN_FLOAT,
    TOKEN_OPERATOR,
    TOKEN_END, /* the last one */
};

struct token {
    enum token_kind kind;
    uint32_t line;
    struct string text;
    union {
        int64_t integer;
        double number;
    };
};

/* [*count], in the arena, which fails with what is wrong. */
struct token *lexer_run(struct arena *arena, const char *source, size_t bytes, size_t *count);

#endif
