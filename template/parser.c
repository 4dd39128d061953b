/* SPDX-License-Identifier: Apache-2.0 */
#include "template/parser.h"

#include <stdio.h>
#include <string.h>

/* --- Tokens --- */

struct node *parser_node(struct parser *parser, enum node_kind kind) {
    struct node *node = arena_take(parser->arena, sizeof *node);
    node->kind = kind;
    node->line = parser_token(parser)->line;
    return node;
}

void parser_add(struct parser *parser, struct node_list *list, struct node *node) {
    list->items = arena_grow(parser->arena, list->items, &list->capacity, list->count + 1, sizeof *list->items);
    list->items[list->count++] = node;
}

void parser_enter(struct parser *parser) {
    if (++parser->depth > PARSER_DEPTH_MAX)
        arena_fail(parser->arena, "nested more than %d deep", PARSER_DEPTH_MAX);
}

void parser_leave(struct parser *parser) {
    parser->depth--;
}

const struct token *parser_token(const struct parser *parser) {
    const struct token *token = &parser->tokens[parser->at];
    parser->arena->line = token->line;
    return token;
}

bool parser_is_operator(const struct parser *parser, const char *text) {
    const struct token *token = parser_token(parser);
    return token->kind == TOKEN_OPERATOR && string_is(&token->text, text);
}

bool parser_is_name(const struct parser *parser, const char *text) {
    const struct token *token = parser_token(parser);
    return token->kind == TOKEN_NAME && string_is(&token->text, text);
}

bool parser_take_operator(struct parser *parser, const char *text) {
    bool is = parser_is_operator(parser, text);
    parser->at += is;
    return is;
}

bool parser_take_name(struct parser *parser, const char *text) {
    bool is = parser_is_name(parser, text);
    parser->at += is;
    return is;
}

void parser_fail_token(struct parser *parser, const char *expected) {
    const struct token *token = parser_token(parser);
    arena_fail(parser->arena, "expected %s, got '%.*s'", expected, token->text.bytes > 60 ? 60 : (int)token->text.bytes,
        token->text.text);
}

void parser_expect_operator(struct parser *parser, const char *text) {
    char expected[8];
    snprintf(expected, sizeof expected, "'%s'", text);
    if (!parser_take_operator(parser, text))
        parser_fail_token(parser, expected);
}

struct string parser_expect_name(struct parser *parser) {
    const struct token *token = parser_token(parser);
    if (token->kind != TOKEN_NAME)
        parser_fail_token(parser, "a name");
    parser->at++;
    return token->text;
}

static void parser_expect_block_end(struct parser *parser) {
    if (parser_token(parser)->kind != TOKEN_BLOCK_END)
        parser_fail_token(parser, "the end of the statement");
    parser->at++;
}

/* --- Statements --- */

static void parse_statement(struct parser *parser, struct node_list *list);

/* Whether the tag behind the current "{%" begins with one of the names; ends with NULL. */
static bool parser_at_tag(const struct parser *parser, const char *const *names) {
    const struct token *next = &parser->tokens[parser->at + 1];
    for (; next->kind == TOKEN_NAME && *names != NULL; names++)
        if (string_is(&next->text, *names))
            return true;
    return false;
}

/* Statements up to a tag that begins with one of `ends`, whose name is then the current token; NULL: to the end. */
static struct node_list parse_body(struct parser *parser, const char *const *ends) {
    struct node_list list = {0};
    parser_enter(parser);
    for (;;) {
        const struct token *token = parser_token(parser);
        if (token->kind == TOKEN_END) {
            if (ends != NULL)
                arena_fail(parser->arena, "the template ends before '%s'", ends[0]);
            break;
        }
        if (token->kind == TOKEN_TEXT) {
            struct node *node = parser_node(parser, NODE_TEXT);
            node->constant = (struct value){.kind = VALUE_STRING, .string = &token->text};
            parser->at++;
            parser_add(parser, &list, node);
        } else if (token->kind == TOKEN_PRINT_BEGIN) {
            struct node *node = parser_node(parser, NODE_PRINT);
            parser->at++;
            node->left = parse_tuple(parser, true);
            if (parser_token(parser)->kind != TOKEN_PRINT_END)
                parser_fail_token(parser, "'}}'");
            parser->at++;
            parser_add(parser, &list, node);
        } else {
            bool ended = ends != NULL && parser_at_tag(parser, ends);
            parser->at++;
            if (ended)
                break;
            parse_statement(parser, &list);
        }
    }
    parser_leave(parser);
    return list;
}

/* The body of a tag up to "{% end %}", which is consumed. */
static struct node_list parse_whole_body(struct parser *parser, const char *end) {
    const char *const ends[] = {end, NULL};
    parser_expect_block_end(parser);
    struct node_list body = parse_body(parser, ends);
    parser->at++;
    parser_expect_block_end(parser);
    return body;
}

/* Behind `if` or `elif`. */
static struct node *parse_if(struct parser *parser) {
    static const char *const ends[] = {"endif", "elif", "else", NULL};
    struct node *first = parser_node(parser, NODE_IF), *node = first;
    for (;;) {
        node->left = parse_tuple(parser, false);
        parser_expect_block_end(parser);
        node->items = parse_body(parser, ends);
        if (!parser_take_name(parser, "elif"))
            break;
        struct node *next = parser_node(parser, NODE_IF);
        parser_add(parser, &node->others, next);
        node = next;
    }
    if (parser_take_name(parser, "else"))
        node->others = parse_whole_body(parser, "endif");
    else {
        parser->at++;
        parser_expect_block_end(parser);
    }
    return first;
}

static struct node *parse_for(struct parser *parser) {
    static const char *const ends[] = {"endfor", "else", NULL};
    struct node *node = parser_node(parser, NODE_FOR);
    node->left = parse_target(parser, false);
    if (!parser_take_name(parser, "in"))
        parser_fail_token(parser, "'in'");
    node->right = parse_tuple(parser, false);
    if (parser_take_name(parser, "if"))
        node->extra = parse_expression(parser);
    if (parser_is_name(parser, "recursive"))
        arena_fail(parser->arena, "recursive loops are not supported");
    parser_expect_block_end(parser);
    parser->loops++;
    node->items = parse_body(parser, ends);
    parser->loops--;
    if (parser_take_name(parser, "else")) {
        node->others = parse_whole_body(parser, "endfor");
    } else {
        parser->at++;
        parser_expect_block_end(parser);
    }
    return node;
}

static struct node *parse_set(struct parser *parser) {
    struct node *node = parser_node(parser, NODE_SET);
    node->left = parse_target(parser, true);
    if (parser_take_operator(parser, "=")) {
        node->right = parse_tuple(parser, true);
        parser_expect_block_end(parser);
        return node;
    }
    node->kind = NODE_SET_BLOCK;
    node->right = parse_filters(parser, NULL, false);
    node->items = parse_whole_body(parser, "endset");
    return node;
}

/* Parameters in parentheses. */
static void parse_parameters(struct parser *parser, struct node *macro) {
    parser_expect_operator(parser, "(");
    while (!parser_take_operator(parser, ")")) {
        if (macro->others.count > 0) {
            parser_expect_operator(parser, ",");
            if (parser_take_operator(parser, ")"))
                break;
        }
        struct node *parameter = parser_node(parser, NODE_KEYWORD);
        parameter->name = parser_expect_name(parser);
        if (parser_take_operator(parser, "="))
            parameter->left = parse_expression(parser);
        else if (macro->others.count > 0 && macro->others.items[macro->others.count - 1]->left != NULL)
            arena_fail(parser->arena, "a parameter without a default follows one with a default");
        parser_add(parser, &macro->others, parameter);
    }
}

static struct node_list parse_macro_body(struct parser *parser, const char *end) {
    uint32_t loops = parser->loops;
    parser->loops = 0;
    struct node_list body = parse_whole_body(parser, end);
    parser->loops = loops;
    return body;
}

static struct node *parse_macro(struct parser *parser) {
    struct node *node = parser_node(parser, NODE_MACRO);
    node->name = parser_expect_name(parser);
    parse_parameters(parser, node);
    node->items = parse_macro_body(parser, "endmacro");
    return node;
}

static struct node *parse_call_block(struct parser *parser) {
    struct node *node = parser_node(parser, NODE_CALL_BLOCK), *macro = parser_node(parser, NODE_MACRO);
    macro->name = string_of("caller");
    if (parser_is_operator(parser, "("))
        parse_parameters(parser, macro);
    node->left = parse_expression(parser);
    if (node->left->kind != NODE_CALL)
        arena_fail(parser->arena, "expected a call");
    macro->items = parse_macro_body(parser, "endcall");
    node->right = macro;
    return node;
}

static struct node *parse_filter_block(struct parser *parser) {
    struct node *node = parser_node(parser, NODE_FILTER_BLOCK);
    node->right = parse_filters(parser, NULL, true);
    node->items = parse_whole_body(parser, "endfilter");
    return node;
}

static struct node *parse_with(struct parser *parser) {
    struct node *node = parser_node(parser, NODE_SCOPE);
    while (parser_token(parser)->kind != TOKEN_BLOCK_END) {
        if (node->others.count > 0)
            parser_expect_operator(parser, ",");
        struct node *set = parser_node(parser, NODE_SET);
        set->left = parse_target(parser, false);
        parser_expect_operator(parser, "=");
        set->right = parse_expression(parser);
        parser_add(parser, &node->others, set);
    }
    node->items = parse_whole_body(parser, "endwith");
    return node;
}

static struct node *parse_generation(struct parser *parser) {
    struct node *node = parser_node(parser, NODE_SCOPE);
    node->items = parse_whole_body(parser, "endgeneration");
    return node;
}

static struct node *parse_loop_control(struct parser *parser, enum node_kind kind) {
    struct node *node = parser_node(parser, kind);
    if (parser->loops == 0)
        arena_fail(parser->arena, "'%s' outside of a loop", kind == NODE_BREAK ? "break" : "continue");
    parser_expect_block_end(parser);
    return node;
}

static struct node *parse_break(struct parser *parser) {
    return parse_loop_control(parser, NODE_BREAK);
}

static struct node *parse_continue(struct parser *parser) {
    return parse_loop_control(parser, NODE_CONTINUE);
}

/* Behind "{%". */
static void parse_statement(struct parser *parser, struct node_list *list) {
    static const struct {
        const char *name;
        struct node *(*parse)(struct parser *parser);
    } statements[] = {{"if", parse_if}, {"for", parse_for}, {"set", parse_set}, {"macro", parse_macro},
        {"call", parse_call_block}, {"filter", parse_filter_block}, {"with", parse_with},
        {"generation", parse_generation}, {"break", parse_break}, {"continue", parse_continue}};
    static const char *const refused[] = {
        "include", "import", "from", "extends", "block", "autoescape", "print", "do", "trans"};
    const struct token *token = parser_token(parser);
    struct string name = parser_expect_name(parser);
    for (size_t i = 0; i < sizeof statements / sizeof statements[0]; i++) {
        if (string_is(&name, statements[i].name)) {
            parser_add(parser, list, statements[i].parse(parser));
            return;
        }
    }
    parser->arena->line = token->line;
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
        if (string_is(&name, refused[i]))
            arena_fail(parser->arena, "the statement '%s' is not supported in chat templates", refused[i]);
    arena_fail(parser->arena, "unknown statement '%.*s'", name.bytes > 60 ? 60 : (int)name.bytes, name.text);
}

struct node_list parser_run(struct arena *arena, const char *source, size_t bytes) {
    size_t count;
    const struct token *tokens = lexer_run(arena, source, bytes, &count);
    struct parser parser = {.arena = arena, .tokens = tokens};
    return parse_body(&parser, NULL);
}
