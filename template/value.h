/* SPDX-License-Identifier: Apache-2.0
 *
 * Values of a rendering, as Python's: their kinds, equality, order, truth and text. All of their memory belongs to the
 * rendering's arena; a value is copied by assignment and never changes, except namespaces and what is still being
 * built.
 *
 * Strings are UTF-8 and may hold NUL. Beside its bytes a string may have one mark a byte: not 0 where the byte came
 * from a variable that was given as input. Whatever copies bytes copies their marks; comparisons do not look at them.
 */
#ifndef TEMPLATE_VALUE_H
#define TEMPLATE_VALUE_H

#include "template/arena.h"

#include <stdbool.h>

enum value_kind {
    VALUE_ABSENT, /* an argument that was not given: never seen by templates */
    VALUE_UNDEFINED,
    VALUE_NONE,
    VALUE_BOOLEAN,
    VALUE_INTEGER,
    VALUE_FLOAT,
    VALUE_STRING,
    VALUE_LIST,
    VALUE_TUPLE,
    VALUE_DICT,
    VALUE_NAMESPACE,
    VALUE_FUNCTION, /* a builtin one */
    VALUE_METHOD,   /* a builtin one with the value it belongs to */
    VALUE_MACRO,
    VALUE_LOOP, /* the variable `loop` */
};

struct string {
    const char *text;     /* [bytes] */
    const uint8_t *input; /* [bytes] marks; NULL: none is set */
    size_t bytes;
    bool markup; /* made by `safe` or `escape`: what it is joined with by + is escaped for HTML (markupsafe's Markup) */
};

struct value {
    enum value_kind kind;
    union {
        bool boolean;
        int64_t integer;
        double number;
        const struct string *string;
        struct list *list; /* of tuples too */
        struct dict *dict; /* of namespaces too */
        const struct undefined *undefined;
        const struct builtin *function;
        const struct method *method;
        const struct macro *macro;
        const struct loop *loop;
    };
};

struct list {
    struct value *items; /* [count] */
    size_t count, capacity;
};

struct dict { /* in order of insertion */
    struct entry {
        struct value key, value;
    } * entries; /* [count] */
    size_t count, capacity;
};

/* What is said when somebody uses it: "'name' is undefined", or "'owner' has no attribute 'name'". */
struct undefined {
    struct string name;
    const char *owner; /* NULL: a variable */
    const char *hint;  /* instead of both; NULL: none */
};

struct method {
    const struct builtin *function;
    struct value self;
};

struct run;

struct string string_of(const char *text); /* without marks */
bool string_is(const struct string *string, const char *text);
bool string_same(const struct string *a, const struct string *b);
/* Characters; bytes that are not UTF-8 count as one each. */
size_t string_length(const struct string *string);
/* The byte at which character `index` begins; bytes when there are not so many. */
size_t string_offset(const struct string *string, size_t index);
struct string string_part(const struct string *string, size_t begin, size_t end); /* bytes [begin, end) */
/* Bytes of the character at `at`, at least 1; *character: its code point, or -1. */
size_t string_character(const struct string *string, size_t at, int32_t *character);
bool character_is_space(int32_t character); /* as Python's str.isspace */
/* Without the characters of `set` (NULL: whitespace) at its left, right. */
struct string string_strip(const struct string *string, const struct string *set, bool left, bool right);
/* The first byte >= from at which `part` is found; SIZE_MAX: nowhere. */
size_t string_find(const struct string *string, const struct string *part, size_t from);

struct value value_none(void);
struct value value_boolean(bool boolean);
struct value value_integer(int64_t integer);
struct value value_float(double number);
struct value value_string(struct run *run, struct string string);
struct value value_text(struct run *run, const char *text); /* not copied */
struct value value_undefined(struct run *run, const struct string *name, const char *owner);
struct value value_list(struct run *run, enum value_kind kind); /* an empty list or tuple */
struct value value_dict(struct run *run, enum value_kind kind); /* an empty dictionary or namespace */
void list_add(struct run *run, struct list *list, struct value item);
void dict_set(struct run *run, struct dict *dict, struct value key, struct value value);
/* NULL: there is none. */
const struct value *dict_find(struct run *run, const struct dict *dict, struct value key);
const struct value *dict_find_text(struct run *run, const struct dict *dict, const char *key);

bool value_is_number(struct value value);        /* boolean, integer or float */
double value_number(struct value value);         /* of one */
const char *value_type_name(struct value value); /* Python's: "str", "dict", ... */
bool value_truth(struct run *run, struct value value);
bool value_equal(struct run *run, struct value a, struct value b);
/* < 0, 0, > 0. Fails for kinds that have no order. operation: for the message. */
int value_order(struct run *run, struct value a, struct value b, const char *operation);
/* What `for`, list() and others go through: items of lists, keys of dictionaries, characters. Fails for others. */
const struct list *value_items(struct run *run, struct value value);
bool value_contains(struct run *run, struct value container, struct value item);
size_t value_length(struct run *run, struct value value); /* fails for what has none */

/* Fails with what is wrong about an undefined value. */
_Noreturn void value_fail_undefined(struct run *run, struct value value);

#endif
