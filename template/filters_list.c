/* SPDX-License-Identifier: Apache-2.0
 *
 * Filters over sequences. Those that are lazy in jinja2 make their list at once here.
 */
#include "template/run.h"
#include "template/text.h"

#include <string.h>

static struct value filter_length(struct run *run, struct value self, const struct value *args) {
    (void)args;
    return value_integer((int64_t)value_length(run, self));
}

static struct value no_item(struct run *run, const char *hint) {
    struct undefined *undefined = arena_take(&run->arena, sizeof *undefined);
    undefined->hint = hint;
    return (struct value){.kind = VALUE_UNDEFINED, .undefined = undefined};
}

static struct value filter_first(struct run *run, struct value self, const struct value *args) {
    (void)args;
    const struct list *items = value_items(run, self);
    return items->count > 0 ? items->items[0] : no_item(run, "No first item, sequence was empty.");
}

static struct value filter_last(struct run *run, struct value self, const struct value *args) {
    (void)args;
    const struct list *items = value_items(run, self);
    return items->count > 0 ? items->items[items->count - 1] : no_item(run, "No last item, sequence was empty.");
}

static struct value list_copy(struct run *run, const struct list *items) {
    struct value list = value_list(run, VALUE_LIST);
    run_step(run, items->count);
    for (size_t i = 0; i < items->count; i++)
        list_add(run, list.list, items->items[i]);
    return list;
}

static struct value filter_list(struct run *run, struct value self, const struct value *args) {
    (void)args;
    return list_copy(run, value_items(run, self));
}

static struct value pair(struct run *run, struct value first, struct value second) {
    struct value tuple = value_list(run, VALUE_TUPLE);
    list_add(run, tuple.list, first);
    list_add(run, tuple.list, second);
    return tuple;
}

static struct value filter_items(struct run *run, struct value self, const struct value *args) {
    (void)args;
    struct value list = value_list(run, VALUE_LIST);
    if (self.kind == VALUE_UNDEFINED)
        return list;
    if (self.kind != VALUE_DICT)
        arena_fail(&run->arena, "Can only get item pairs from a mapping.");
    for (size_t i = 0; i < self.dict->count; i++)
        list_add(run, list.list, pair(run, self.dict->entries[i].key, self.dict->entries[i].value));
    return list;
}

static struct value filter_reverse(struct run *run, struct value self, const struct value *args) {
    (void)args;
    const struct value backwards[3] = {{.kind = VALUE_ABSENT}, {.kind = VALUE_ABSENT}, value_integer(-1)};
    if (self.kind == VALUE_STRING)
        return value_slice(run, self, backwards);
    struct value list = value_list(run, VALUE_LIST);
    const struct list *items = value_items(run, self);
    for (size_t i = items->count; i > 0; i--)
        list_add(run, list.list, items->items[i - 1]);
    return list;
}

static struct value filter_join(struct run *run, struct value self, const struct value *args) {
    struct string between = args[0].kind == VALUE_ABSENT ? string_of("") : value_str(run, args[0]);
    const struct list *items = value_items(run, self);
    if (args[1].kind != VALUE_ABSENT && args[1].kind != VALUE_NONE) {
        struct value list = list_copy(run, items);
        for (size_t i = 0; i < list.list->count; i++)
            list.list->items[i] = value_path(run, list.list->items[i], args[1]);
        items = list.list;
    }
    return text_join(run, items, &between);
}

/* What an item is sorted or compared by: its attribute, strings in lower case unless case counts. */
static struct value sort_key(struct run *run, struct value item, struct value attribute, bool case_sensitive) {
    struct value key = attribute.kind == VALUE_ABSENT ? item : value_path(run, item, attribute);
    return key.kind == VALUE_STRING && !case_sensitive ? text_cased(run, key.string, TEXT_LOWER) : key;
}

static struct value sorted_items(struct run *run, struct sortable *sortable, size_t count, bool descending) {
    struct value list = value_list(run, VALUE_LIST);
    value_sort(run, sortable, count, descending);
    for (size_t i = 0; i < count; i++)
        list_add(run, list.list, sortable[i].item);
    return list;
}

/* By several attributes ("a,b"): the key is a tuple. */
static struct value sort_keys(struct run *run, struct value item, struct value attribute, bool case_sensitive) {
    const struct string comma = string_of(",");
    if (attribute.kind != VALUE_STRING || string_find(attribute.string, &comma, 0) == SIZE_MAX)
        return sort_key(run, item, attribute, case_sensitive);
    const struct list *names = text_split(run, attribute.string, &comma, -1, false).list;
    struct value keys = value_list(run, VALUE_TUPLE);
    for (size_t i = 0; i < names->count; i++)
        list_add(run, keys.list, sort_key(run, item, names->items[i], case_sensitive));
    return keys;
}

static struct value filter_sort(struct run *run, struct value self, const struct value *args) {
    const struct list *items = value_items(run, self);
    struct sortable *sortable = arena_take(&run->arena, items->count * sizeof *sortable);
    struct value attribute = args[2].kind == VALUE_NONE ? (struct value){.kind = VALUE_ABSENT} : args[2];
    bool case_sensitive = argument_boolean(run, args[1], false);
    for (size_t i = 0; i < items->count; i++)
        sortable[i] = (struct sortable){
            .key = sort_keys(run, items->items[i], attribute, case_sensitive), .item = items->items[i]};
    return sorted_items(run, sortable, items->count, argument_boolean(run, args[0], false));
}

static struct value filter_dictsort(struct run *run, struct value self, const struct value *args) {
    if (self.kind != VALUE_DICT)
        arena_fail(&run->arena, "dictsort needs a mapping, not '%s'", value_type_name(self));
    const struct string *by = argument_string(run, args[1], "by");
    bool case_sensitive = argument_boolean(run, args[0], false), values = by != NULL && string_is(by, "value");
    if (by != NULL && !values && !string_is(by, "key"))
        arena_fail(&run->arena, "You can only sort by either \"key\" or \"value\"");
    struct sortable *sortable = arena_take(&run->arena, self.dict->count * sizeof *sortable);
    for (size_t i = 0; i < self.dict->count; i++) {
        const struct entry *entry = &self.dict->entries[i];
        sortable[i].key =
            sort_key(run, values ? entry->value : entry->key, (struct value){.kind = VALUE_ABSENT}, case_sensitive);
        sortable[i].item = pair(run, entry->key, entry->value);
    }
    return sorted_items(run, sortable, self.dict->count, argument_boolean(run, args[2], false));
}

static struct value filter_unique(struct run *run, struct value self, const struct value *args) {
    const struct list *items = value_items(run, self);
    struct value list = value_list(run, VALUE_LIST), keys = value_list(run, VALUE_LIST);
    for (size_t i = 0; i < items->count; i++) {
        struct value key = sort_key(run, items->items[i], args[1], argument_boolean(run, args[0], false));
        if (value_contains(run, keys, key))
            continue;
        list_add(run, keys.list, key);
        list_add(run, list.list, items->items[i]);
    }
    return list;
}

/* The least (sign -1) or largest (sign 1) item. */
static struct value extreme(struct run *run, struct value self, const struct value *args, int sign) {
    const struct list *items = value_items(run, self);
    bool case_sensitive = argument_boolean(run, args[0], false);
    if (items->count == 0)
        return no_item(run, "No aggregated item, sequence was empty.");
    struct value best = items->items[0], best_key = sort_key(run, best, args[1], case_sensitive);
    for (size_t i = 1; i < items->count; i++) {
        struct value key = sort_key(run, items->items[i], args[1], case_sensitive);
        if (value_order(run, key, best_key, "<") * sign <= 0)
            continue;
        best = items->items[i];
        best_key = key;
    }
    return best;
}

static struct value filter_min(struct run *run, struct value self, const struct value *args) {
    return extreme(run, self, args, -1);
}

static struct value filter_max(struct run *run, struct value self, const struct value *args) {
    return extreme(run, self, args, 1);
}

static struct value filter_sum(struct run *run, struct value self, const struct value *args) {
    const struct list *items = value_items(run, self);
    struct value sum = args[1].kind == VALUE_ABSENT ? value_integer(0) : args[1];
    for (size_t i = 0; i < items->count; i++) {
        bool member = args[0].kind != VALUE_ABSENT && args[0].kind != VALUE_NONE;
        sum = operate(run, OPERATION_ADD, sum, member ? value_path(run, items->items[i], args[0]) : items->items[i]);
    }
    return sum;
}

static struct value filter_batch(struct run *run, struct value self, const struct value *args) {
    const struct list *items = value_items(run, self);
    int64_t size = argument_integer(run, args[0], 0, "linecount");
    if (size < 1)
        arena_fail(&run->arena, "batch needs a size above 0");
    struct value batches = value_list(run, VALUE_LIST), batch = batches;
    for (size_t i = 0; i < items->count; i++) {
        if (i % (size_t)size == 0) {
            batch = value_list(run, VALUE_LIST);
            list_add(run, batches.list, batch);
        }
        list_add(run, batch.list, items->items[i]);
    }
    bool fill = args[1].kind != VALUE_ABSENT && args[1].kind != VALUE_NONE && items->count > 0;
    while (fill && batch.list->count < (size_t)size)
        list_add(run, batch.list, args[1]);
    return batches;
}

static struct value filter_attr(struct run *run, struct value self, const struct value *args) {
    struct string name = value_str(run, args[0]);
    struct value value = value_undefined(run, &name, value_type_name(self));
    return self.kind == VALUE_DICT ? value : value_attribute(run, self, value_string(run, name).string);
}

/* Items with the same attribute together, by its order: tuples of it and a list. */
static struct value filter_groupby(struct run *run, struct value self, const struct value *args) {
    const struct list *items = value_items(run, self);
    struct sortable *sortable = arena_take(&run->arena, items->count * sizeof *sortable);
    bool case_sensitive = argument_boolean(run, args[2], false);
    for (size_t i = 0; i < items->count; i++) {
        struct value key = value_path(run, items->items[i], args[0]);
        if (key.kind == VALUE_UNDEFINED && args[1].kind != VALUE_ABSENT)
            key = args[1];
        struct value folded = sort_key(run, key, (struct value){.kind = VALUE_ABSENT}, case_sensitive);
        sortable[i] = (struct sortable){folded, items->items[i], key};
    }
    value_sort(run, sortable, items->count, false);
    struct value groups = value_list(run, VALUE_LIST), group = groups;
    for (size_t i = 0; i < items->count; i++) {
        if (i == 0 || !value_equal(run, sortable[i - 1].key, sortable[i].key)) {
            group = value_list(run, VALUE_LIST);
            list_add(run, groups.list, pair(run, sortable[i].second, group));
        }
        list_add(run, group.list, sortable[i].item);
    }
    return groups;
}

/* --- map, select, reject: of anything that is false (none too) they make an empty list --- */

static const struct list *items_if_any(struct run *run, struct value self) {
    static const struct list empty;
    return value_truth(run, self) ? value_items(run, self) : &empty;
}

static struct value keyword_of(const struct arguments *arguments, const char *name) {
    for (size_t i = 0; i < arguments->keywords_count; i++)
        if (string_is(&arguments->keywords[i].name, name))
            return arguments->keywords[i].value;
    return (struct value){.kind = VALUE_ABSENT};
}

/* The arguments behind the first `used` ones. */
static struct arguments rest_of(const struct arguments *arguments, size_t used) {
    struct arguments rest = *arguments;
    rest.items += used;
    rest.count -= used;
    return rest;
}

static struct value filter_map(struct run *run, struct value self, const struct arguments *arguments) {
    const struct list *items = items_if_any(run, self);
    struct value list = value_list(run, VALUE_LIST), attribute = keyword_of(arguments, "attribute");
    struct value otherwise = keyword_of(arguments, "default");
    if (attribute.kind == VALUE_ABSENT && arguments->count == 0)
        arena_fail(&run->arena, "map requires a filter argument");
    const struct string *name =
        attribute.kind == VALUE_ABSENT ? argument_string(run, arguments->items[0], "a filter's name") : NULL;
    for (size_t i = 0; i < items->count; i++) {
        struct value item = items->items[i];
        if (name != NULL) {
            struct arguments rest = rest_of(arguments, 1);
            item = filter_call(run, name, item, &rest);
        } else {
            item = value_path(run, item, attribute);
            if (item.kind == VALUE_UNDEFINED && otherwise.kind != VALUE_ABSENT)
                item = otherwise;
        }
        list_add(run, list.list, item);
    }
    return list;
}

/* Items that pass (or with keep false: fail) a test: the named one, else their truth. */
static struct value selected(
    struct run *run, struct value self, const struct arguments *arguments, bool by_attribute, bool keep) {
    const struct list *items = items_if_any(run, self);
    struct value list = value_list(run, VALUE_LIST);
    size_t used = by_attribute;
    if (arguments->count < used)
        arena_fail(&run->arena, "the name of an attribute is missing");
    const struct string *test =
        arguments->count > used ? argument_string(run, arguments->items[used], "a test's name") : NULL;
    struct arguments rest = rest_of(arguments, used + (test != NULL));
    for (size_t i = 0; i < items->count; i++) {
        struct value value = by_attribute ? value_path(run, items->items[i], arguments->items[0]) : items->items[i];
        bool passes = test == NULL ? value_truth(run, value) : test_call(run, test, value, &rest);
        if (passes == keep)
            list_add(run, list.list, items->items[i]);
    }
    return list;
}

static struct value filter_select(struct run *run, struct value self, const struct arguments *arguments) {
    return selected(run, self, arguments, false, true);
}

static struct value filter_reject(struct run *run, struct value self, const struct arguments *arguments) {
    return selected(run, self, arguments, false, false);
}

static struct value filter_selectattr(struct run *run, struct value self, const struct arguments *arguments) {
    return selected(run, self, arguments, true, true);
}

static struct value filter_rejectattr(struct run *run, struct value self, const struct arguments *arguments) {
    return selected(run, self, arguments, true, false);
}

const struct builtin list_filters[] = {
    {"length", "", 0, filter_length, NULL},
    {"count", "", 0, filter_length, NULL},
    {"first", "", 0, filter_first, NULL},
    {"last", "", 0, filter_last, NULL},
    {"list", "", 0, filter_list, NULL},
    {"items", "", 0, filter_items, NULL},
    {"reverse", "", 0, filter_reverse, NULL},
    {"join", "d attribute", 0, filter_join, NULL},
    {"sort", "reverse case_sensitive attribute", 0, filter_sort, NULL},
    {"dictsort", "case_sensitive by reverse", 0, filter_dictsort, NULL},
    {"unique", "case_sensitive attribute", 0, filter_unique, NULL},
    {"min", "case_sensitive attribute", 0, filter_min, NULL},
    {"max", "case_sensitive attribute", 0, filter_max, NULL},
    {"sum", "attribute start", 0, filter_sum, NULL},
    {"batch", "linecount fill_with", 1, filter_batch, NULL},
    {"attr", "name", 1, filter_attr, NULL},
    {"groupby", "attribute default case_sensitive", 1, filter_groupby, NULL},
    {"map", NULL, 0, NULL, filter_map},
    {"select", NULL, 0, NULL, filter_select},
    {"reject", NULL, 0, NULL, filter_reject},
    {"selectattr", NULL, 0, NULL, filter_selectattr},
    {"rejectattr", NULL, 0, NULL, filter_rejectattr},
    {NULL, NULL, 0, NULL, NULL},
};
