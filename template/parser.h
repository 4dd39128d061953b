/* SPDX-License-Identifier: Apache-2.0
 *
 * Tokens to a tree (node.h), by jinja2's grammar and its precedence of operators.
 */
#ifndef TEMPLATE_PARSER_H
#define TEMPLATE_PARSER_H

#include "template/lexer.h"
#include "template/node.h"

enum { PARSER_DEPTH_MAX = 200 };

struct parser {
    struct arena *arena;
    const struct token *tokens;
    size_t at;
    uint32_t depth;
    uint32_t loops; /* around the place that is parsed, within one macro */
};

/* The statements of a whole template. */
struct node_list parser_run(struct arena *arena, const char *source, size_t bytes);

/* For parser_statement.c and parser_expression.c. */
struct node *parser_node(struct parser *parser, enum node_kind kind);
void parser_add(struct parser *parser, struct node_list *list, struct node *node);
void parser_enter(struct parser *parser);
void parser_leave(struct parser *parser);

const struct token *parser_token(const struct parser *parser);
bool parser_is_operator(const struct parser *parser, const char *text);
bool parser_is_name(const struct parser *parser, const char *text);
bool parser_take_operator(struct parser *parser, const char *text); /* if it is there */
bool parser_take_name(struct parser *parser, const char *text);
void parser_expect_operator(struct parser *parser, const char *text);
struct string parser_expect_name(struct parser *parser); /* any */
_Noreturn void parser_fail_token(struct parser *parser, const char *expected);

struct node *parse_expression(struct parser *parser);
struct node *parse_or(struct parser *parser); /* an expression without `if` */
/* One expression, or several separated by commas as a tuple. */
struct node *parse_tuple(struct parser *parser, bool with_choice);
/* A name, several, or (with_member) a member of a namespace. */
struct node *parse_target(struct parser *parser, bool with_member);
/* `| name(...)` after a value or, without the bar, at the head of a block: value NULL. */
struct node *parse_filters(struct parser *parser, struct node *value, bool inline_first);
struct node *parse_postfix(struct parser *parser, struct node *value);
struct node *parse_primary(struct parser *parser);

#endif
