/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside the schema compiler: schema.c compiles, schema_values.c has the types, schema_combine.c merges and compares
 * schemas, schema_format.c knows the formats.
 *
 * Functions that return an expression return EXPRESSION_NONE after a failure; compiler.code tells it from a schema that
 * nothing satisfies.
 */
#ifndef GRAMMAR_SCHEMA_H
#define GRAMMAR_SCHEMA_H

#include "grammar/grammar.h"
#include "grammar/text.h"

enum json_types { /* bits */
    TYPE_OBJECT = 1,
    TYPE_ARRAY = 2,
    TYPE_STRING = 4,
    TYPE_INTEGER = 8,
    TYPE_NUMBER = 16, /* integers too */
    TYPE_BOOLEAN = 32,
    TYPE_NULL = 64,
    TYPES_ALL = 127 - TYPE_INTEGER,
};

enum { SCHEMA_WORK_MAX = 50000, SCHEMA_MEMBERS_MAX = 4096 };

/* A $ref's target, which is compiled once. */
struct schema_target {
    const json_t *schema;
    uint32_t rule, expression;
    char path[256];
};

struct compiler {
    struct expression_pool *pool;
    const json_t *root;
    struct error *error;
    int code;      /* of the first failure */
    uint32_t work; /* steps so far, at most SCHEMA_WORK_MAX: schemas visited, keywords merged, names required */
    uint32_t depth;
    char path[256];    /* of the schema at work, a JSON pointer behind #; the end may be missing */
    size_t path_bytes; /* of the whole */
    json_t *made;      /* an array that owns merged schemas */
    struct schema_target *targets;
    uint32_t targets_count, targets_capacity, targets_done;
    uint32_t space, comma, colon; /* expressions */
    uint32_t any;                 /* a rule's expression: any value; EXPRESSION_NONE until it is needed */
    uint32_t free_character, plain_character;
};

uint32_t schema_fail(struct compiler *c, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Goes into a part of the schema: "/items", "/properties/" with a name. Returns what schema_leave takes. */
size_t schema_enter(struct compiler *c, const char *keyword, const char *name);
void schema_leave(struct compiler *c, size_t before);

/* schema.c */
uint32_t schema_compile(struct compiler *c, const json_t *schema);
uint32_t schema_any(struct compiler *c);
/* What a "$ref" points to; NULL: nothing there. */
const json_t *schema_resolve(const struct compiler *c, const char *reference);
/* The types that a schema without combining keywords allows; 0 after a failure. */
unsigned schema_types(struct compiler *c, const json_t *schema);
unsigned schema_type_of(const json_t *value);

/* schema_values.c: a value of one type. */
uint32_t schema_object(struct compiler *c, const json_t *schema);
uint32_t schema_array(struct compiler *c, const json_t *schema);
uint32_t schema_string(struct compiler *c, const json_t *schema);
uint32_t schema_number(struct compiler *c, const json_t *schema, bool integer);
/* Reads a count; absent: left alone. */
int schema_count(struct compiler *c, const json_t *schema, const char *keyword, uint32_t *count);

/* schema_combine.c. merged: owned by compiler.made, NULL after a failure. */
const json_t *schema_merge(struct compiler *c, const json_t *a, const json_t *b);
/* Whether no value satisfies both. */
bool schema_disjoint(struct compiler *c, const json_t *a, const json_t *b);
bool schema_values_equal(const json_t *a, const json_t *b);

/* schema_format.c: the pattern of a format, NULL for an unknown one. */
const char *schema_format(const char *name);

#endif
