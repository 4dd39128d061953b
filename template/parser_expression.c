/* SPDX-License-Identifier: Apache-2.0 */
#include "template/parser.h"

#include <string.h>

static struct node *parse_unary(struct parser *parser, bool with_filters);

static struct node *parser_constant(struct parser *parser, struct value constant) {
    struct node *node = parser_node(parser, NODE_CONSTANT);
    node->constant = constant;
    return node;
}

static struct node *parser_pair(struct parser *parser, enum node_kind kind, struct node *left, struct node *right) {
    struct node *node = parser_node(parser, kind);
    node->left = left;
    node->right = right;
    return node;
}

static struct value parser_string(struct parser *parser, struct string text) {
    struct string *copy = arena_take(parser->arena, sizeof *copy);
    *copy = text;
    return (struct value){.kind = VALUE_STRING, .string = copy};
}

/* Adjacent strings are one. */
static struct node *parse_string(struct parser *parser) {
    size_t bytes = 0, first = parser->at;
    for (; parser_token(parser)->kind == TOKEN_STRING; parser->at++)
        bytes += parser_token(parser)->text.bytes;
    char *text = arena_take(parser->arena, bytes + 1);
    bytes = 0;
    for (size_t i = first; i < parser->at; i++) {
        memcpy(text + bytes, parser->tokens[i].text.text, parser->tokens[i].text.bytes);
        bytes += parser->tokens[i].text.bytes;
    }
    return parser_constant(parser, parser_string(parser, (struct string){.text = text, .bytes = bytes}));
}

static struct node *parse_list(struct parser *parser) {
    struct node *node = parser_node(parser, NODE_LIST);
    while (!parser_take_operator(parser, "]")) {
        if (node->items.count > 0) {
            parser_expect_operator(parser, ",");
            if (parser_take_operator(parser, "]"))
                break;
        }
        parser_add(parser, &node->items, parse_expression(parser));
    }
    return node;
}

static struct node *parse_dict(struct parser *parser) {
    struct node *node = parser_node(parser, NODE_DICT);
    while (!parser_take_operator(parser, "}")) {
        if (node->items.count > 0) {
            parser_expect_operator(parser, ",");
            if (parser_take_operator(parser, "}"))
                break;
        }
        parser_add(parser, &node->items, parse_expression(parser));
        parser_expect_operator(parser, ":");
        parser_add(parser, &node->items, parse_expression(parser));
    }
    return node;
}

static struct node *parse_parentheses(struct parser *parser) {
    struct node *node;
    if (parser_is_operator(parser, ")"))
        node = parser_node(parser, NODE_TUPLE);
    else
        node = parse_tuple(parser, true);
    parser_expect_operator(parser, ")");
    return node;
}

/* A name that stands for a constant: false for any other. */
static bool parser_named_constant(const struct string *name, struct value *constant) {
    if (string_is(name, "true") || string_is(name, "True"))
        *constant = value_boolean(true);
    else if (string_is(name, "false") || string_is(name, "False"))
        *constant = value_boolean(false);
    else if (string_is(name, "none") || string_is(name, "None"))
        *constant = value_none();
    else
        return false;
    return true;
}

struct node *parse_primary(struct parser *parser) {
    const struct token *token = parser_token(parser);
    struct value constant;
    struct node *node;
    switch (token->kind) {
    case TOKEN_NAME:
        if (parser_named_constant(&token->text, &constant)) {
            node = parser_constant(parser, constant);
        } else {
            node = parser_node(parser, NODE_NAME);
            node->name = token->text;
        }
        parser->at++;
        return node;
    case TOKEN_STRING:
        return parse_string(parser);
    case TOKEN_INTEGER:
        node = parser_constant(parser, value_integer(token->integer));
        parser->at++;
        return node;
    case TOKEN_FLOAT:
        node = parser_constant(parser, value_float(token->number));
        parser->at++;
        return node;
    default:
        break;
    }
    if (parser_take_operator(parser, "("))
        return parse_parentheses(parser);
    if (parser_take_operator(parser, "["))
        return parse_list(parser);
    if (parser_take_operator(parser, "{"))
        return parse_dict(parser);
    parser_fail_token(parser, "an expression");
}

/* Arguments behind "(": positional ones to items, named ones to others. */
static void parse_arguments(struct parser *parser, struct node *node) {
    bool first = true;
    while (!parser_take_operator(parser, ")")) {
        if (!first) {
            parser_expect_operator(parser, ",");
            if (parser_take_operator(parser, ")"))
                break;
        }
        first = false;
        if (parser_is_operator(parser, "*") || parser_is_operator(parser, "**"))
            arena_fail(parser->arena, "unpacked arguments (* and **) are not supported");
        const struct token *next = parser_token(parser) + 1;
        if (parser_token(parser)->kind == TOKEN_NAME && next->kind == TOKEN_OPERATOR && string_is(&next->text, "=")) {
            struct node *keyword = parser_node(parser, NODE_KEYWORD);
            keyword->name = parser_expect_name(parser);
            parser->at++;
            keyword->left = parse_expression(parser);
            parser_add(parser, &node->others, keyword);
        } else if (node->others.count > 0) {
            arena_fail(parser->arena, "an argument without a name follows one with a name");
        } else {
            parser_add(parser, &node->items, parse_expression(parser));
        }
    }
}

static struct node *parse_call(struct parser *parser, struct node *callee) {
    struct node *node = parser_pair(parser, NODE_CALL, callee, NULL);
    parser_expect_operator(parser, "(");
    parse_arguments(parser, node);
    return node;
}

/* One bound of a slice, which may be missing. */
static struct node *parse_bound(struct parser *parser) {
    if (parser_is_operator(parser, ":") || parser_is_operator(parser, "]") || parser_is_operator(parser, ","))
        return NULL;
    return parse_expression(parser);
}

static struct node *parse_subscript(struct parser *parser, struct node *value) {
    struct node *first = parse_bound(parser);
    if (!parser_is_operator(parser, ":")) {
        if (first == NULL)
            parser_fail_token(parser, "an index");
        parser_expect_operator(parser, "]");
        return parser_pair(parser, NODE_ENTRY, value, first);
    }
    struct node *node = parser_pair(parser, NODE_SLICE, value, NULL);
    parser_add(parser, &node->items, first);
    for (int i = 1; i < 3; i++)
        parser_add(parser, &node->items, parser_take_operator(parser, ":") ? parse_bound(parser) : NULL);
    parser_expect_operator(parser, "]");
    return node;
}

static struct node *parse_member(struct parser *parser, struct node *value) {
    const struct token *token = parser_token(parser);
    if (token->kind == TOKEN_INTEGER) {
        struct node *index = parser_constant(parser, value_integer(token->integer));
        parser->at++;
        return parser_pair(parser, NODE_ENTRY, value, index);
    }
    struct node *node = parser_pair(parser, NODE_ATTRIBUTE, value, NULL);
    node->name = parser_expect_name(parser);
    return node;
}

struct node *parse_postfix(struct parser *parser, struct node *value) {
    for (;;) {
        if (parser_take_operator(parser, "."))
            value = parse_member(parser, value);
        else if (parser_take_operator(parser, "["))
            value = parse_subscript(parser, value);
        else if (parser_is_operator(parser, "("))
            value = parse_call(parser, value);
        else
            return value;
    }
}

/* The name of a filter or test, which may have points in it. */
static struct string parse_dotted_name(struct parser *parser) {
    struct string name = parser_expect_name(parser);
    while (parser_take_operator(parser, ".")) {
        struct string part = parser_expect_name(parser);
        char *text = arena_take(parser->arena, name.bytes + part.bytes + 1);
        memcpy(text, name.text, name.bytes);
        text[name.bytes] = '.';
        memcpy(text + name.bytes + 1, part.text, part.bytes);
        name = (struct string){.text = text, .bytes = name.bytes + 1 + part.bytes};
    }
    return name;
}

static struct node *parse_filter(struct parser *parser, struct node *value) {
    struct node *node = parser_pair(parser, NODE_FILTER, value, NULL);
    node->name = parse_dotted_name(parser);
    if (parser_take_operator(parser, "("))
        parse_arguments(parser, node);
    return node;
}

struct node *parse_filters(struct parser *parser, struct node *value, bool inline_first) {
    if (inline_first)
        value = parse_filter(parser, value);
    while (parser_take_operator(parser, "|"))
        value = parse_filter(parser, value);
    return value;
}

static bool parser_begins_argument(const struct parser *parser) {
    const struct token *token = parser_token(parser);
    if (token->kind == TOKEN_NAME)
        return !parser_is_name(parser, "else") && !parser_is_name(parser, "or") && !parser_is_name(parser, "and");
    return token->kind == TOKEN_STRING || token->kind == TOKEN_INTEGER || token->kind == TOKEN_FLOAT ||
           parser_is_operator(parser, "[") || parser_is_operator(parser, "{");
}

/* Behind `is`. */
static struct node *parse_test(struct parser *parser, struct node *value) {
    bool negated = parser_take_name(parser, "not");
    struct node *node = parser_pair(parser, NODE_TEST, value, NULL);
    node->name = parse_dotted_name(parser);
    if (parser_take_operator(parser, "(")) {
        parse_arguments(parser, node);
    } else if (parser_begins_argument(parser)) {
        if (parser_is_name(parser, "is"))
            arena_fail(parser->arena, "tests with `is` cannot be chained");
        parser_add(parser, &node->items, parse_postfix(parser, parse_primary(parser)));
    }
    return negated ? parser_pair(parser, NODE_NOT, node, NULL) : node;
}

static struct node *parse_filters_and_tests(struct parser *parser, struct node *value) {
    for (;;) {
        if (parser_is_operator(parser, "|"))
            value = parse_filters(parser, value, false);
        else if (parser_take_name(parser, "is"))
            value = parse_test(parser, value);
        else if (parser_is_operator(parser, "("))
            value = parse_call(parser, value);
        else
            return value;
    }
}

static struct node *parse_unary(struct parser *parser, bool with_filters) {
    struct node *node;
    parser_enter(parser);
    if (parser_take_operator(parser, "-"))
        node = parser_pair(parser, NODE_NEGATIVE, parse_unary(parser, false), NULL);
    else if (parser_take_operator(parser, "+"))
        node = parser_pair(parser, NODE_POSITIVE, parse_unary(parser, false), NULL);
    else
        node = parse_primary(parser);
    node = parse_postfix(parser, node);
    if (with_filters)
        node = parse_filters_and_tests(parser, node);
    parser_leave(parser);
    return node;
}

/* The operators of one level of precedence, and the level above. */
struct level {
    struct {
        const char *text;
        enum operation operation;
    } operators[4];
    int count;
};
static const struct level levels[] = {
    {{{"+", OPERATION_ADD}, {"-", OPERATION_SUBTRACT}}, 2},
    {{{"~", OPERATION_JOIN}}, 1},
    {{{"*", OPERATION_MULTIPLY}, {"/", OPERATION_DIVIDE}, {"//", OPERATION_FLOOR_DIVIDE}, {"%", OPERATION_REMAINDER}},
        4},
    {{{"**", OPERATION_POWER}}, 1},
};
enum { LEVELS = sizeof levels / sizeof levels[0] };

static bool parser_take_level(struct parser *parser, const struct level *level, enum operation *operation) {
    for (int i = 0; i < level->count; i++) {
        if (parser_take_operator(parser, level->operators[i].text)) {
            *operation = level->operators[i].operation;
            return true;
        }
    }
    return false;
}

/* Chains of one level grow to the left, and are as deep as they are long. */
static struct node *parse_level(struct parser *parser, int number) {
    if (number == LEVELS)
        return parse_unary(parser, true);
    struct node *left = parse_level(parser, number + 1);
    enum operation operation;
    while (parser_take_level(parser, &levels[number], &operation)) {
        left = parser_pair(parser, NODE_OPERATION, left, parse_level(parser, number + 1));
        left->operation = operation;
    }
    return left;
}

static bool parser_take_comparison(struct parser *parser, enum operation *operation) {
    static const struct {
        const char *text;
        enum operation operation;
    } operators[] = {{"==", OPERATION_EQUAL}, {"!=", OPERATION_NOT_EQUAL}, {"<", OPERATION_LESS},
        {"<=", OPERATION_LESS_EQUAL}, {">", OPERATION_GREATER}, {">=", OPERATION_GREATER_EQUAL}};
    for (size_t i = 0; i < sizeof operators / sizeof operators[0]; i++) {
        if (parser_take_operator(parser, operators[i].text)) {
            *operation = operators[i].operation;
            return true;
        }
    }
    *operation = OPERATION_IN;
    if (parser_take_name(parser, "in"))
        return true;
    const struct token *next = parser_token(parser) + 1;
    if (!parser_is_name(parser, "not") || next->kind != TOKEN_NAME || !string_is(&next->text, "in"))
        return false;
    parser->at += 2;
    *operation = OPERATION_NOT_IN;
    return true;
}

static struct node *parse_compare(struct parser *parser) {
    struct node *left = parse_level(parser, 0), *node = NULL;
    enum operation operation;
    while (parser_take_comparison(parser, &operation)) {
        if (node == NULL)
            node = parser_pair(parser, NODE_COMPARE, left, NULL);
        struct node *side = parser_pair(parser, NODE_OPERATION, NULL, parse_level(parser, 0));
        side->operation = operation;
        parser_add(parser, &node->items, side);
    }
    return node == NULL ? left : node;
}

static struct node *parse_not(struct parser *parser) {
    if (!parser_take_name(parser, "not"))
        return parse_compare(parser);
    parser_enter(parser);
    struct node *node = parser_pair(parser, NODE_NOT, parse_not(parser), NULL);
    parser_leave(parser);
    return node;
}

static struct node *parse_and(struct parser *parser) {
    struct node *left = parse_not(parser);
    while (parser_take_name(parser, "and"))
        left = parser_pair(parser, NODE_AND, left, parse_not(parser));
    return left;
}

struct node *parse_or(struct parser *parser) {
    parser_enter(parser);
    struct node *left = parse_and(parser);
    while (parser_take_name(parser, "or"))
        left = parser_pair(parser, NODE_OR, left, parse_and(parser));
    parser_leave(parser);
    return left;
}

struct node *parse_expression(struct parser *parser) {
    struct node *node = parse_or(parser);
    while (parser_take_name(parser, "if")) {
        node = parser_pair(parser, NODE_CHOICE, node, parse_or(parser));
        if (parser_take_name(parser, "else")) {
            parser_enter(parser);
            node->extra = parse_expression(parser);
            parser_leave(parser);
        }
    }
    return node;
}

static bool parser_ends_tuple(const struct parser *parser) {
    enum token_kind kind = parser_token(parser)->kind;
    return kind == TOKEN_BLOCK_END || kind == TOKEN_PRINT_END || kind == TOKEN_END || parser_is_operator(parser, ")") ||
           parser_is_operator(parser, "=") || parser_is_name(parser, "in");
}

struct node *parse_tuple(struct parser *parser, bool with_choice) {
    struct node *first = with_choice ? parse_expression(parser) : parse_or(parser);
    if (!parser_is_operator(parser, ","))
        return first;
    struct node *node = parser_node(parser, NODE_TUPLE);
    parser_add(parser, &node->items, first);
    while (parser_take_operator(parser, ",") && !parser_ends_tuple(parser))
        parser_add(parser, &node->items, with_choice ? parse_expression(parser) : parse_or(parser));
    return node;
}

static struct node *parse_one_target(struct parser *parser) {
    if (parser_take_operator(parser, "(")) {
        parser_enter(parser);
        struct node *inner = parse_target(parser, false);
        parser_leave(parser);
        parser_expect_operator(parser, ")");
        return inner;
    }
    struct node *node = parser_node(parser, NODE_NAME);
    struct value constant;
    node->name = parser_expect_name(parser);
    if (parser_named_constant(&node->name, &constant))
        arena_fail(parser->arena, "can't assign to '%.*s'", (int)node->name.bytes, node->name.text);
    return node;
}

struct node *parse_target(struct parser *parser, bool with_member) {
    struct node *first = parse_one_target(parser);
    if (with_member && first->kind == NODE_NAME && parser_take_operator(parser, ".")) {
        struct node *node = parser_pair(parser, NODE_SET_MEMBER, first, NULL);
        node->name = parser_expect_name(parser);
        return node;
    }
    if (!parser_is_operator(parser, ","))
        return first;
    struct node *node = parser_node(parser, NODE_TUPLE);
    parser_add(parser, &node->items, first);
    while (parser_take_operator(parser, ",") && !parser_ends_tuple(parser))
        parser_add(parser, &node->items, parse_one_target(parser));
    return node;
}
