/* SPDX-License-Identifier: Apache-2.0 */
#include "template/run.h"
#include "template/text.h"

#include <string.h>

/* --- Members --- */

static const struct builtin *value_methods(struct value value) {
    static const struct builtin none[] = {{.name = NULL}};
    return value.kind == VALUE_STRING                              ? string_methods
           : value.kind == VALUE_LIST || value.kind == VALUE_TUPLE ? list_methods
           : value.kind == VALUE_DICT                              ? dict_methods
                                                                   : none;
}

static struct value value_method(struct run *run, const struct builtin *function, struct value self) {
    struct method *method = arena_take(&run->arena, sizeof *method);
    *method = (struct method){function, self};
    return (struct value){.kind = VALUE_METHOD, .method = method};
}

/* Members of dictionaries and lists that change them: known, but not to be called. */
static bool value_changes(struct value value, const struct string *name) {
    static const char *const dict[] = {"clear", "pop", "popitem", "setdefault", "update", NULL};
    static const char *const list[] = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort", NULL};
    const char *const *names = value.kind == VALUE_DICT ? dict : value.kind == VALUE_LIST ? list : NULL;
    for (; names != NULL && *names != NULL; names++)
        if (string_is(name, *names))
            return true;
    return false;
}

static struct value value_forbidden(struct run *run, struct value object, const struct string *name) {
    struct value value = value_undefined(run, name, value_type_name(object));
    struct builder hint = {.run = run};
    builder_format(&hint, "access to attribute '%.*s' of '%s' object is unsafe.", (int)name->bytes, name->text,
        value_type_name(object));
    struct undefined *undefined = arena_take(&run->arena, sizeof *undefined);
    *undefined = *value.undefined;
    builder_bytes(&hint, "", 1, NULL);
    undefined->hint = hint.text;
    value.undefined = undefined;
    return value;
}

static struct value loop_member(struct run *run, const struct loop *loop, const struct string *name) {
    int64_t index0 = (int64_t)loop->index0, count = (int64_t)loop->items->count;
    if (string_is(name, "index"))
        return value_integer(index0 + 1);
    if (string_is(name, "index0"))
        return value_integer(index0);
    if (string_is(name, "revindex"))
        return value_integer(count - index0);
    if (string_is(name, "revindex0"))
        return value_integer(count - index0 - 1);
    if (string_is(name, "first"))
        return value_boolean(index0 == 0);
    if (string_is(name, "last"))
        return value_boolean(index0 == count - 1);
    if (string_is(name, "length"))
        return value_integer(count);
    if (string_is(name, "depth")) /* of recursive loops, which there are none */
        return value_integer(1);
    if (string_is(name, "depth0"))
        return value_integer(0);
    if (string_is(name, "previtem") && index0 > 0)
        return loop->items->items[index0 - 1];
    if (string_is(name, "nextitem") && index0 + 1 < count)
        return loop->items->items[index0 + 1];
    const struct value self = {.kind = VALUE_LOOP, .loop = loop};
    const struct builtin *function = builtin_find(loop_methods, name);
    return function != NULL ? value_method(run, function, self) : value_undefined(run, name, "LoopContext");
}

struct value value_attribute(struct run *run, struct value object, const struct string *name) {
    run_step(run, 1);
    if (object.kind == VALUE_UNDEFINED)
        value_fail_undefined(run, object);
    if (object.kind == VALUE_LOOP)
        return loop_member(run, object.loop, name);
    if (value_changes(object, name))
        return value_forbidden(run, object, name);
    const struct builtin *method = builtin_find(value_methods(object), name);
    if (method != NULL)
        return value_method(run, method, object);
    if (object.kind == VALUE_DICT || object.kind == VALUE_NAMESPACE) {
        const struct value *found = dict_find(run, object.dict, (struct value){.kind = VALUE_STRING, .string = name});
        if (found != NULL)
            return *found;
    }
    return value_undefined(run, name, value_type_name(object));
}

static struct value value_undefined_key(struct run *run, struct value object, struct value key) {
    struct string name = value_str(run, key);
    return value_undefined(run, &name, value_type_name(object));
}

/* Item `index`, counted from the end where it is negative; false: there is none. */
static bool value_item(struct run *run, struct value object, int64_t index, struct value *item) {
    int64_t count = (int64_t)value_length(run, object);
    index += index < 0 ? count : 0;
    if (index < 0 || index >= count)
        return false;
    if (object.kind == VALUE_STRING) {
        size_t begin = string_offset(object.string, (size_t)index);
        int32_t character;
        size_t end = begin + string_character(object.string, begin, &character);
        *item = value_string(run, string_part(object.string, begin, end));
    } else {
        *item = object.list->items[index];
    }
    return true;
}

struct value value_entry(struct run *run, struct value object, struct value key) {
    run_step(run, 1);
    if (object.kind == VALUE_UNDEFINED)
        value_fail_undefined(run, object);
    if (object.kind == VALUE_DICT) {
        const struct value *found = dict_find(run, object.dict, key);
        if (found != NULL)
            return *found;
    }
    bool ordered = object.kind == VALUE_LIST || object.kind == VALUE_TUPLE || object.kind == VALUE_STRING;
    if (ordered && (key.kind == VALUE_INTEGER || key.kind == VALUE_BOOLEAN)) {
        struct value item;
        if (value_item(run, object, argument_integer(run, key, 0, "an index"), &item))
            return item;
        return value_undefined_key(run, object, key);
    }
    if (key.kind == VALUE_STRING)
        return value_attribute(run, object, key.string);
    return value_undefined_key(run, object, key);
}

struct value value_path(struct run *run, struct value object, struct value path) {
    if (path.kind == VALUE_INTEGER)
        return value_entry(run, object, path);
    const struct string *text = argument_string(run, path, "attribute");
    if (text == NULL)
        return object;
    const struct string point = string_of(".");
    for (size_t at = 0; at <= text->bytes;) {
        size_t end = string_find(text, &point, at);
        end = end == SIZE_MAX ? text->bytes : end;
        struct string part = string_part(text, at, end);
        bool digits = part.bytes > 0 && part.bytes < 10;
        int64_t index = 0;
        for (size_t i = 0; i < part.bytes; i++) {
            digits = digits && part.text[i] >= '0' && part.text[i] <= '9';
            index = digits ? index * 10 + (part.text[i] - '0') : 0;
        }
        object = value_entry(run, object, digits ? value_integer(index) : value_string(run, part));
        at = end + 1;
    }
    return object;
}

/* --- Slices --- */

static int64_t slice_bound(int64_t bound, int64_t low, int64_t high, int64_t count) {
    if (bound < 0)
        bound = bound < -count ? -1 : bound + count;
    return bound < low ? low : bound > high ? high : bound;
}

struct value value_slice(struct run *run, struct value object, const struct value bounds[3]) {
    if (object.kind == VALUE_UNDEFINED)
        value_fail_undefined(run, object);
    if (object.kind != VALUE_STRING && object.kind != VALUE_LIST && object.kind != VALUE_TUPLE)
        return value_undefined(run, &(struct string){.text = "slice", .bytes = 5}, value_type_name(object));
    int64_t count = (int64_t)value_length(run, object);
    int64_t step = argument_integer(run, bounds[2], 1, "a slice's step");
    if (step == 0)
        arena_fail(&run->arena, "slice step cannot be zero");
    int64_t low = step > 0 ? 0 : -1, high = step > 0 ? count : count - 1;
    int64_t begin = bounds[0].kind == VALUE_ABSENT || bounds[0].kind == VALUE_NONE
                        ? (step > 0 ? low : high)
                        : slice_bound(argument_integer(run, bounds[0], 0, "a slice's bound"), low, high, count);
    int64_t end = bounds[1].kind == VALUE_ABSENT || bounds[1].kind == VALUE_NONE
                      ? (step > 0 ? high : low)
                      : slice_bound(argument_integer(run, bounds[1], 0, "a slice's bound"), low, high, count);
    if (object.kind == VALUE_STRING && step == 1) {
        size_t from = string_offset(object.string, (size_t)begin);
        struct string rest = string_part(object.string, from, object.string->bytes);
        size_t bytes = end > begin ? string_offset(&rest, (size_t)(end - begin)) : 0;
        return value_string(run, string_part(&rest, 0, bytes));
    }
    const struct list *items = value_items(run, object);
    struct value list = value_list(run, object.kind == VALUE_TUPLE ? VALUE_TUPLE : VALUE_LIST);
    for (int64_t i = begin; step > 0 ? i < end : i > end; i += step) {
        run_step(run, 1);
        list_add(run, list.list, items->items[i]);
        if (step > count || step < -count)
            break;
    }
    if (object.kind != VALUE_STRING)
        return list;
    struct builder text = {.run = run};
    for (size_t i = 0; i < list.list->count; i++)
        builder_add(&text, list.list->items[i].string);
    return text_marked_up(run, builder_value(&text), object.string);
}

/* --- Expressions --- */

static struct arguments evaluate_arguments(struct run *run, const struct node *node) {
    struct arguments arguments = {.count = node->items.count, .keywords_count = node->others.count};
    arguments.items = arena_take(&run->arena, arguments.count * sizeof *arguments.items);
    arguments.keywords = arena_take(&run->arena, arguments.keywords_count * sizeof *arguments.keywords);
    for (size_t i = 0; i < arguments.count; i++)
        arguments.items[i] = evaluate(run, node->items.items[i]);
    for (size_t i = 0; i < arguments.keywords_count; i++)
        arguments.keywords[i] =
            (struct keyword){node->others.items[i]->name, evaluate(run, node->others.items[i]->left)};
    run->arena.line = node->line;
    return arguments;
}

static struct value evaluate_items(struct run *run, const struct node *node, enum value_kind kind) {
    struct value list = value_list(run, kind);
    for (size_t i = 0; i < node->items.count; i++)
        list_add(run, list.list, evaluate(run, node->items.items[i]));
    return list;
}

static struct value evaluate_dict(struct run *run, const struct node *node) {
    struct value dict = value_dict(run, VALUE_DICT);
    for (size_t i = 0; i < node->items.count; i += 2) {
        struct value key = evaluate(run, node->items.items[i]);
        dict_set(run, dict.dict, key, evaluate(run, node->items.items[i + 1]));
    }
    return dict;
}

static struct value evaluate_slice(struct run *run, const struct node *node) {
    struct value object = evaluate(run, node->left), bounds[3];
    for (size_t i = 0; i < 3; i++)
        bounds[i] =
            node->items.items[i] == NULL ? (struct value){.kind = VALUE_ABSENT} : evaluate(run, node->items.items[i]);
    return value_slice(run, object, bounds);
}

static struct value evaluate_sign(struct run *run, const struct node *node) {
    struct value value = evaluate(run, node->left);
    if (value.kind == VALUE_UNDEFINED)
        value_fail_undefined(run, value);
    if (!value_is_number(value))
        arena_fail(&run->arena, "bad operand type for unary sign: '%s'", value_type_name(value));
    if (node->kind == NODE_POSITIVE)
        return value.kind == VALUE_BOOLEAN ? value_integer(value.boolean) : value;
    if (value.kind == VALUE_FLOAT)
        return value_float(-value.number);
    return operate(run, OPERATION_SUBTRACT, value_integer(0), value);
}

static struct value evaluate_comparison(struct run *run, const struct node *node) {
    struct value left = evaluate(run, node->left);
    for (size_t i = 0; i < node->items.count; i++) {
        const struct node *side = node->items.items[i];
        struct value right = evaluate(run, side->right);
        run->arena.line = side->line;
        if (!compare(run, side->operation, left, right))
            return value_boolean(false);
        left = right;
    }
    return value_boolean(true);
}

static struct value evaluate_call(struct run *run, const struct node *node) {
    struct value callee = evaluate(run, node->left);
    struct arguments arguments = evaluate_arguments(run, node);
    return value_call(run, callee, &arguments);
}

static struct value evaluate_choice(struct run *run, const struct node *node) {
    if (value_truth(run, evaluate(run, node->right)))
        return evaluate(run, node->left);
    if (node->extra != NULL)
        return evaluate(run, node->extra);
    struct undefined *undefined = arena_take(&run->arena, sizeof *undefined);
    undefined->hint = "the inline if-expression evaluated to false and no else section was defined.";
    return (struct value){.kind = VALUE_UNDEFINED, .undefined = undefined};
}

/* `x is defined` and `x is undefined` do not fail where a name of x is not known; nothing special is needed for that,
 * since only members of undefined values fail. */
static struct value evaluate_node(struct run *run, const struct node *node) {
    struct value left;
    struct arguments arguments;
    switch (node->kind) {
    case NODE_CONSTANT:
        return node->constant;
    case NODE_NAME:
        return scope_get(run, &node->name);
    case NODE_LIST:
        return evaluate_items(run, node, VALUE_LIST);
    case NODE_TUPLE:
        return evaluate_items(run, node, VALUE_TUPLE);
    case NODE_DICT:
        return evaluate_dict(run, node);
    case NODE_ATTRIBUTE:
        left = evaluate(run, node->left);
        run->arena.line = node->line;
        return value_attribute(run, left, &node->name);
    case NODE_ENTRY:
        left = evaluate(run, node->left);
        return value_entry(run, left, evaluate(run, node->right));
    case NODE_SLICE:
        return evaluate_slice(run, node);
    case NODE_CALL:
        return evaluate_call(run, node);
    case NODE_FILTER:
        left = evaluate(run, node->left);
        arguments = evaluate_arguments(run, node);
        return filter_call(run, &node->name, left, &arguments);
    case NODE_TEST:
        left = evaluate(run, node->left);
        arguments = evaluate_arguments(run, node);
        return value_boolean(test_call(run, &node->name, left, &arguments));
    case NODE_NEGATIVE:
    case NODE_POSITIVE:
        return evaluate_sign(run, node);
    case NODE_NOT:
        return value_boolean(!value_truth(run, evaluate(run, node->left)));
    case NODE_AND:
        left = evaluate(run, node->left);
        return value_truth(run, left) ? evaluate(run, node->right) : left;
    case NODE_OR:
        left = evaluate(run, node->left);
        return value_truth(run, left) ? left : evaluate(run, node->right);
    case NODE_OPERATION:
        left = evaluate(run, node->left);
        return operate(run, node->operation, left, evaluate(run, node->right));
    case NODE_COMPARE:
        return evaluate_comparison(run, node);
    case NODE_CHOICE:
        return evaluate_choice(run, node);
    default:
        arena_fail(&run->arena, "a statement where an expression should be");
    }
}

struct value evaluate(struct run *run, const struct node *node) {
    run_step(run, 1);
    run_enter(run);
    run->arena.line = node->line;
    struct value value = evaluate_node(run, node);
    run_leave(run);
    return value;
}
