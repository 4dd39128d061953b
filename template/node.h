/* SPDX-License-Identifier: Apache-2.0
 *
 * A template as a tree, as the parser makes it and the evaluator walks it.
 */
#ifndef TEMPLATE_NODE_H
#define TEMPLATE_NODE_H

#include "template/value.h"

enum operation {
    OPERATION_ADD,
    OPERATION_SUBTRACT,
    OPERATION_MULTIPLY,
    OPERATION_DIVIDE,
    OPERATION_FLOOR_DIVIDE,
    OPERATION_REMAINDER,
    OPERATION_POWER,
    OPERATION_JOIN, /* ~ */
    OPERATION_EQUAL,
    OPERATION_NOT_EQUAL,
    OPERATION_LESS,
    OPERATION_LESS_EQUAL,
    OPERATION_GREATER,
    OPERATION_GREATER_EQUAL,
    OPERATION_IN,
    OPERATION_NOT_IN,
};

/* In parentheses: which fields of struct node they use, beside line. */
enum node_kind {
    /* Expressions */
    NODE_CONSTANT,  /* (constant) */
    NODE_NAME,      /* (name) */
    NODE_LIST,      /* (items) */
    NODE_TUPLE,     /* (items) */
    NODE_DICT,      /* (items: key, value, key, value, ...) */
    NODE_ATTRIBUTE, /* (left, name) */
    NODE_ENTRY,     /* (left, right) */
    NODE_SLICE,     /* (left, items: three, each may be NULL) */
    NODE_CALL,      /* (left, items: arguments, others: NODE_KEYWORD) */
    NODE_KEYWORD,   /* (name, left) */
    NODE_FILTER,    /* (left: NULL for a filter of a block, name, items, others) */
    NODE_TEST,      /* (left, name, items, others) */
    NODE_NEGATIVE,  /* (left) */
    NODE_POSITIVE,  /* (left) */
    NODE_NOT,       /* (left) */
    NODE_AND,       /* (left, right) */
    NODE_OR,        /* (left, right) */
    NODE_OPERATION, /* (operation, left, right) */
    NODE_COMPARE,   /* (left, items: NODE_OPERATION with a right side each) */
    NODE_CHOICE,    /* left if right else extra (NULL: undefined) */
    /* Statements */
    NODE_TEXT,       /* (constant) */
    NODE_PRINT,      /* (left) */
    NODE_IF,         /* (left: condition, items: body, others: else) */
    NODE_FOR,        /* (left: target, right: what is gone through, extra: filter or NULL, items: body, others: else) */
    NODE_SET,        /* (left: target, right) */
    NODE_SET_BLOCK,  /* (left: target, right: filter or NULL, items: body) */
    NODE_SET_MEMBER, /* as NODE_SET's target: (left: name of a namespace, name) */
    NODE_MACRO,      /* (name, items: body, others: NODE_KEYWORD, left NULL without a default) */
    NODE_CALL_BLOCK, /* (left: call, right: macro) */
    NODE_FILTER_BLOCK, /* (right: filter, items: body) */
    NODE_SCOPE,        /* (items: body, others: NODE_SET evaluated before) */
    NODE_BREAK,
    NODE_CONTINUE,
};

struct node_list {
    struct node **items; /* [count] */
    size_t count, capacity;
};

struct node {
    enum node_kind kind;
    enum operation operation;
    uint32_t line;
    struct string name;
    struct value constant;
    struct node *left, *right, *extra;
    struct node_list items, others;
};

#endif
