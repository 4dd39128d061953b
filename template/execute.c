/* SPDX-License-Identifier: Apache-2.0 */
#include "template/run.h"

#include <string.h>

static enum flow run_statement(struct run *run, const struct node *node);

enum flow run_body(struct run *run, const struct node_list *body) {
    enum flow flow = FLOW_ON;
    run_enter(run);
    for (size_t i = 0; i < body->count && flow == FLOW_ON; i++)
        flow = run_statement(run, body->items[i]);
    run_leave(run);
    return flow;
}

/* The text that a body writes, in a scope of its own. */
static struct value run_captured(struct run *run, const struct node_list *body, enum flow *flow) {
    struct builder text = {.run = run}, *out = run->out;
    struct scope *scope = run->scope;
    run->out = &text;
    run->scope = scope_create(run, scope);
    *flow = run_body(run, body);
    run->out = out;
    run->scope = scope;
    return builder_value(&text);
}

/* --- Targets --- */

static void assign(struct run *run, const struct node *target, struct value value) {
    if (target->kind == NODE_NAME) {
        scope_set(run, run->scope, &target->name, value);
        return;
    }
    if (target->kind == NODE_SET_MEMBER) {
        struct value object = scope_get(run, &target->left->name);
        if (object.kind != VALUE_NAMESPACE)
            arena_fail(&run->arena, "cannot assign attribute on non-namespace object");
        dict_set(run, object.dict, value_string(run, target->name), value);
        return;
    }
    const struct list *items = value_items(run, value);
    if (items->count != target->items.count)
        arena_fail(&run->arena, "%zu values for %zu names", items->count, target->items.count);
    for (size_t i = 0; i < items->count; i++)
        assign(run, target->items.items[i], items->items[i]);
}

/* A value through the filters of a block; the innermost has no left side. */
static struct value filter_block_value(struct run *run, const struct node *filter, struct value value) {
    if (filter == NULL)
        return value;
    run_enter(run);
    value = filter_block_value(run, filter->left, value);
    run_leave(run);
    struct arguments arguments = {.count = filter->items.count, .keywords_count = filter->others.count};
    arguments.items = arena_take(&run->arena, arguments.count * sizeof *arguments.items);
    arguments.keywords = arena_take(&run->arena, arguments.keywords_count * sizeof *arguments.keywords);
    for (size_t i = 0; i < arguments.count; i++)
        arguments.items[i] = evaluate(run, filter->items.items[i]);
    for (size_t i = 0; i < arguments.keywords_count; i++)
        arguments.keywords[i] =
            (struct keyword){filter->others.items[i]->name, evaluate(run, filter->others.items[i]->left)};
    return filter_call(run, &filter->name, value, &arguments);
}

/* --- Loops --- */

/* The items that the loop's filter lets through. */
static const struct list *loop_items(struct run *run, const struct node *node) {
    const struct list *all = value_items(run, evaluate(run, node->right));
    if (node->extra == NULL)
        return all;
    struct value kept = value_list(run, VALUE_LIST);
    struct scope *scope = run->scope;
    for (size_t i = 0; i < all->count; i++) {
        run->scope = scope_create(run, scope);
        assign(run, node->left, all->items[i]);
        if (value_truth(run, evaluate(run, node->extra)))
            list_add(run, kept.list, all->items[i]);
    }
    run->scope = scope;
    return kept.list;
}

static enum flow run_for(struct run *run, const struct node *node) {
    const struct list *items = loop_items(run, node);
    const struct string name = string_of("loop");
    struct scope *scope = run->scope;
    struct loop *loop = arena_take(&run->arena, sizeof *loop);
    *loop = (struct loop){.items = items, .changed = arena_take(&run->arena, sizeof(struct value))};
    enum flow flow = FLOW_ON;
    for (size_t i = 0; i < items->count && flow != FLOW_BREAK; i++) {
        loop->index0 = i;
        run->scope = scope_create(run, scope);
        scope_set(run, run->scope, &name, (struct value){.kind = VALUE_LOOP, .loop = loop});
        assign(run, node->left, items->items[i]);
        flow = run_body(run, &node->items);
    }
    run->scope = scope;
    if (items->count > 0)
        return FLOW_ON;
    run->scope = scope_create(run, scope);
    flow = run_body(run, &node->others);
    run->scope = scope;
    return flow;
}

/* --- Macros --- */

static struct value keyword_value(const struct arguments *arguments, const struct string *name) {
    for (size_t i = 0; i < arguments->keywords_count; i++)
        if (string_same(&arguments->keywords[i].name, name))
            return arguments->keywords[i].value;
    return (struct value){.kind = VALUE_ABSENT};
}

static bool macro_knows(const struct macro *macro, const struct string *name) {
    for (size_t i = 0; i < macro->node->others.count; i++)
        if (string_same(&macro->node->others.items[i]->name, name))
            return true;
    return string_is(name, "caller");
}

/* Arguments beyond the parameters: the variables varargs and kwargs of the body. */
static void macro_set_rest(struct run *run, const struct macro *macro, const struct arguments *arguments) {
    const struct string varargs = string_of("varargs"), kwargs = string_of("kwargs"), caller = string_of("caller");
    struct value list = value_list(run, VALUE_TUPLE), dict = value_dict(run, VALUE_DICT);
    for (size_t i = macro->node->others.count; i < arguments->count; i++)
        list_add(run, list.list, arguments->items[i]);
    for (size_t i = 0; i < arguments->keywords_count; i++) {
        const struct keyword *keyword = &arguments->keywords[i];
        if (string_same(&keyword->name, &caller))
            scope_set(run, run->scope, &caller, keyword->value);
        else if (!macro_knows(macro, &keyword->name))
            dict_set(run, dict.dict, value_string(run, keyword->name), keyword->value);
    }
    scope_set(run, run->scope, &varargs, list);
    scope_set(run, run->scope, &kwargs, dict);
}

struct value macro_call(struct run *run, const struct macro *macro, const struct arguments *arguments) {
    struct scope *scope = run->scope;
    const struct node_list *parameters = &macro->node->others;
    enum flow flow;
    run_enter(run);
    run->scope = scope_create(run, macro->scope);
    macro_set_rest(run, macro, arguments);
    for (size_t i = 0; i < parameters->count; i++) {
        const struct node *parameter = parameters->items[i];
        struct value value = keyword_value(arguments, &parameter->name);
        if (i < arguments->count && value.kind != VALUE_ABSENT)
            arena_fail(
                &run->arena, "macro got two values for '%.*s'", (int)parameter->name.bytes, parameter->name.text);
        if (i < arguments->count)
            value = arguments->items[i];
        if (value.kind == VALUE_ABSENT)
            value =
                parameter->left != NULL ? evaluate(run, parameter->left) : value_undefined(run, &parameter->name, NULL);
        scope_set(run, run->scope, &parameter->name, value);
    }
    struct value text = run_captured(run, &macro->node->items, &flow);
    run->scope = scope;
    run_leave(run);
    return text;
}

static struct value macro_value(struct run *run, const struct node *node) {
    struct macro *macro = arena_take(&run->arena, sizeof *macro);
    *macro = (struct macro){node, run->scope};
    return (struct value){.kind = VALUE_MACRO, .macro = macro};
}

/* A call with the block as `caller`. */
static void run_call_block(struct run *run, const struct node *node) {
    const struct node *call = node->left;
    struct value callee = evaluate(run, call->left);
    if (callee.kind != VALUE_MACRO)
        arena_fail(&run->arena, "a call block needs a macro, not '%s'", value_type_name(callee));
    struct arguments arguments = {.count = call->items.count, .keywords_count = call->others.count + 1};
    arguments.items = arena_take(&run->arena, arguments.count * sizeof *arguments.items);
    arguments.keywords = arena_take(&run->arena, arguments.keywords_count * sizeof *arguments.keywords);
    for (size_t i = 0; i < arguments.count; i++)
        arguments.items[i] = evaluate(run, call->items.items[i]);
    for (size_t i = 0; i < call->others.count; i++)
        arguments.keywords[i] =
            (struct keyword){call->others.items[i]->name, evaluate(run, call->others.items[i]->left)};
    arguments.keywords[call->others.count] = (struct keyword){string_of("caller"), macro_value(run, node->right)};
    value_print(run->out, macro_call(run, callee.macro, &arguments));
}

/* --- Statements --- */

static enum flow run_scope(struct run *run, const struct node *node) {
    struct scope *scope = run->scope, *inner = scope_create(run, scope);
    for (size_t i = 0; i < node->others.count; i++) {
        struct value value = evaluate(run, node->others.items[i]->right);
        run->scope = inner;
        assign(run, node->others.items[i]->left, value);
        run->scope = scope;
    }
    run->scope = inner;
    enum flow flow = run_body(run, &node->items);
    run->scope = scope;
    return flow;
}

static enum flow run_statement(struct run *run, const struct node *node) {
    enum flow flow = FLOW_ON;
    struct value value;
    run_step(run, 1);
    run->arena.line = node->line;
    switch (node->kind) {
    case NODE_TEXT:
        builder_add(run->out, node->constant.string);
        break;
    case NODE_PRINT:
        value_print(run->out, evaluate(run, node->left));
        break;
    case NODE_IF:
        return run_body(run, value_truth(run, evaluate(run, node->left)) ? &node->items : &node->others);
    case NODE_FOR:
        return run_for(run, node);
    case NODE_SET:
        assign(run, node->left, evaluate(run, node->right));
        break;
    case NODE_SET_BLOCK:
        value = run_captured(run, &node->items, &flow);
        assign(run, node->left, filter_block_value(run, node->right, value));
        break;
    case NODE_MACRO:
        scope_set(run, run->scope, &node->name, macro_value(run, node));
        break;
    case NODE_CALL_BLOCK:
        run_call_block(run, node);
        break;
    case NODE_FILTER_BLOCK:
        value = run_captured(run, &node->items, &flow);
        value_print(run->out, filter_block_value(run, node->right, value));
        break;
    case NODE_SCOPE:
        return run_scope(run, node);
    case NODE_BREAK:
        return FLOW_BREAK;
    case NODE_CONTINUE:
        return FLOW_CONTINUE;
    default:
        arena_fail(&run->arena, "an expression where a statement should be");
    }
    return flow;
}
