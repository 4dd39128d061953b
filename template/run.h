/* SPDX-License-Identifier: Apache-2.0
 *
 * One rendering: its memory, its limits, its names, and how values are called. Shared by the files of this folder; the
 * program sees template.h only.
 */
#ifndef TEMPLATE_RUN_H
#define TEMPLATE_RUN_H

#include "template/builder.h"
#include "template/node.h"
#include "template/value.h"

struct run {
    struct arena arena;
    uint64_t steps_left;
    uint32_t depth;
    int64_t now;
    struct builder *out; /* where text goes at the moment */
    struct scope *scope; /* of the names that are seen at the moment */
    size_t bytes_max;    /* of the output */
};

/* Names of one block of the template: found here, or in the parent. */
struct scope {
    struct scope *parent;
    struct variable {
        struct string name;
        struct value value;
    } * variables;
    size_t count, capacity;
};

struct scope *scope_create(struct run *run, struct scope *parent);
void scope_set(struct run *run, struct scope *scope, const struct string *name, struct value value);
/* Undefined when nobody knows the name. */
struct value scope_get(struct run *run, const struct string *name);

/* Counts work, and fails when there was too much of it. */
void run_step(struct run *run, size_t steps);
/* Around whatever calls itself. */
void run_enter(struct run *run);
void run_leave(struct run *run);

struct arguments {
    struct value *items; /* [count] */
    size_t count;
    struct keyword {
        struct string name;
        struct value value;
    } * keywords; /* [keywords_count] */
    size_t keywords_count;
};

enum { PARAMETERS_MAX = 5 };

/* A builtin filter, test, method or function. */
struct builtin {
    const char *name;
    const char *parameters; /* their names, separated by blanks, at most PARAMETERS_MAX; NULL: the function is `any` */
    unsigned required;      /* how many of them must be given */
    /* self: what is filtered, tested or owns the method. args [PARAMETERS_MAX]: VALUE_ABSENT where not given. */
    struct value (*call)(struct run *run, struct value self, const struct value *args);
    struct value (*any)(struct run *run, struct value self, const struct arguments *arguments);
};

extern const struct builtin text_filters[], list_filters[], number_filters[]; /* end with a NULL name */
extern const struct builtin builtin_tests[], builtin_functions[];
extern const struct builtin string_methods[], list_methods[], dict_methods[], loop_methods[];

/* NULL: there is none. */
const struct builtin *builtin_find(const struct builtin *table, const struct string *name);
const struct builtin *filter_find(const struct string *name);
const struct builtin *test_find(const struct string *name);
/* Fail for unknown names and wrong arguments. */
struct value filter_call(
    struct run *run, const struct string *name, struct value self, const struct arguments *arguments);
bool test_call(struct run *run, const struct string *name, struct value self, const struct arguments *arguments);
struct value builtin_call(
    struct run *run, const struct builtin *builtin, struct value self, const struct arguments *arguments);
/* Calls a function, method or macro. */
struct value value_call(struct run *run, struct value callee, const struct arguments *arguments);

/* `object.name`: attributes first, as jinja2; `object[key]`: entries first. Undefined where there is neither. */
struct value value_attribute(struct run *run, struct value object, const struct string *name);
struct value value_entry(struct run *run, struct value object, struct value key);
/* `a.b.c` or an index, as the argument `attribute` of filters has it. */
struct value value_path(struct run *run, struct value object, struct value path);
struct value value_slice(struct run *run, struct value object, const struct value bounds[3]); /* absent ones: none */

struct value operate(struct run *run, enum operation operation, struct value left, struct value right);
bool compare(struct run *run, enum operation operation, struct value left, struct value right);

/* Sorts by keys, ascending or not; equal ones stay in their order. */
struct sortable {
    struct value key, item, second;
};
void value_sort(struct run *run, struct sortable *items, size_t count, bool descending);

/* Text of a value, as Python's str and repr. */
struct string value_str(struct run *run, struct value value);
void value_print(struct builder *out, struct value value); /* str */
void value_repr(struct builder *out, struct value value);
/* repr of a float: the shortest digits that read back as it. */
void float_repr(double number, char out[32]);
/* `format % value`. */
struct value format_percent(struct run *run, const struct string *format, struct value value);

/* As json.dumps: NULL separators are Python's defaults, no indent is one line. */
struct json_style {
    const struct string *indent, *item_separator, *key_separator;
    bool ascii, sort_keys;
};
void json_write(struct builder *out, struct value value, const struct json_style *style);

/* Of arguments: fail when they are given and of another kind. */
int64_t argument_integer(struct run *run, struct value value, int64_t otherwise, const char *name);
bool argument_boolean(struct run *run, struct value value, bool otherwise);
const struct string *argument_string(struct run *run, struct value value, const char *name); /* NULL: absent or none */

/* Statements of a body, in the scope of the moment. */
enum flow {
    FLOW_ON,
    FLOW_BREAK,
    FLOW_CONTINUE,
};
enum flow run_body(struct run *run, const struct node_list *body);
struct value evaluate(struct run *run, const struct node *node);

/* What a macro is. */
struct macro {
    const struct node *node;
    struct scope *scope; /* where it was defined */
};
struct value macro_call(struct run *run, const struct macro *macro, const struct arguments *arguments);

/* What `loop` is. */
struct loop {
    const struct list *items;
    size_t index0;
    struct value *changed; /* what loop.changed was last asked about; absent at first */
};

#endif
