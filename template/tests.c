/* SPDX-License-Identifier: Apache-2.0
 *
 * Tests: what may stand behind `is`.
 */
#include "template/run.h"
#include "template/text.h"

#include <math.h>
#include <string.h>

#define TEST(name, condition)                                                                                          \
    static struct value name(struct run *run, struct value self, const struct value *args) {                           \
        (void)run, (void)self, (void)args;                                                                             \
        return value_boolean(condition);                                                                               \
    }

static int64_t integer_of(struct run *run, struct value value) {
    if (value.kind == VALUE_UNDEFINED)
        value_fail_undefined(run, value);
    if (value.kind == VALUE_FLOAT && !(fabs(value.number) < 9e18))
        arena_fail(&run->arena, "a number that does not fit 64 bits");
    if (value.kind == VALUE_FLOAT)
        return (int64_t)value.number;
    if (value.kind == VALUE_NONE)
        arena_fail(&run->arena, "unsupported operand type for %%: 'NoneType'");
    return argument_integer(run, value, 0, "the operand");
}

static bool divisible(struct run *run, struct value value, int64_t by) {
    return operate(run, OPERATION_REMAINDER, value_integer(integer_of(run, value)), value_integer(by)).integer == 0;
}

static bool is_sequence(struct value value) {
    return value.kind == VALUE_STRING || value.kind == VALUE_LIST || value.kind == VALUE_TUPLE ||
           value.kind == VALUE_DICT || value.kind == VALUE_UNDEFINED;
}

static bool is_callable(struct value value) {
    return value.kind == VALUE_FUNCTION || value.kind == VALUE_METHOD || value.kind == VALUE_MACRO ||
           value.kind == VALUE_UNDEFINED;
}

static bool is_same(struct value a, struct value b) {
    if (a.kind != b.kind)
        return false;
    switch (a.kind) {
    case VALUE_NONE:
        return true;
    case VALUE_BOOLEAN:
        return a.boolean == b.boolean;
    case VALUE_INTEGER:
        return a.integer == b.integer;
    case VALUE_STRING:
        return string_same(a.string, b.string);
    case VALUE_FLOAT:
        return false;
    default:
        return a.list == b.list;
    }
}

static bool is_case(struct run *run, struct value value, enum text_case form) {
    struct string text = value_str(run, value);
    struct value mapped = text_cased(run, &text, form),
                 other = text_cased(run, &text, form == TEXT_UPPER ? TEXT_LOWER : TEXT_UPPER);
    return string_same(mapped.string, &text) && !string_same(other.string, &text);
}

TEST(test_defined, self.kind != VALUE_UNDEFINED)
TEST(test_undefined, self.kind == VALUE_UNDEFINED)
TEST(test_none, self.kind == VALUE_NONE)
TEST(test_string, self.kind == VALUE_STRING)
TEST(test_mapping, self.kind == VALUE_DICT)
TEST(test_sequence, is_sequence(self))
TEST(test_iterable, is_sequence(self) || self.kind == VALUE_LOOP)
TEST(test_number, value_is_number(self))
TEST(test_integer, self.kind == VALUE_INTEGER)
TEST(test_float, self.kind == VALUE_FLOAT)
TEST(test_boolean, self.kind == VALUE_BOOLEAN)
TEST(test_true, self.kind == VALUE_BOOLEAN && self.boolean)
TEST(test_false, self.kind == VALUE_BOOLEAN && !self.boolean)
TEST(test_callable, is_callable(self))
TEST(test_even, divisible(run, self, 2))
TEST(test_odd, !divisible(run, self, 2))
TEST(test_divisibleby, divisible(run, self, integer_of(run, args[0])))
TEST(test_eq, compare(run, OPERATION_EQUAL, self, args[0]))
TEST(test_ne, compare(run, OPERATION_NOT_EQUAL, self, args[0]))
TEST(test_lt, compare(run, OPERATION_LESS, self, args[0]))
TEST(test_le, compare(run, OPERATION_LESS_EQUAL, self, args[0]))
TEST(test_gt, compare(run, OPERATION_GREATER, self, args[0]))
TEST(test_ge, compare(run, OPERATION_GREATER_EQUAL, self, args[0]))
TEST(test_in, value_contains(run, args[0], self))
TEST(test_sameas, is_same(self, args[0]))
TEST(test_upper, is_case(run, self, TEXT_UPPER))
TEST(test_lower, is_case(run, self, TEXT_LOWER))
TEST(test_escaped, self.kind == VALUE_STRING && self.string->markup)
TEST(test_filter, self.kind == VALUE_STRING && filter_find(self.string) != NULL)
TEST(test_test, self.kind == VALUE_STRING && test_find(self.string) != NULL)

const struct builtin builtin_tests[] = {
    {"defined", "", 0, test_defined, NULL},
    {"undefined", "", 0, test_undefined, NULL},
    {"none", "", 0, test_none, NULL},
    {"string", "", 0, test_string, NULL},
    {"mapping", "", 0, test_mapping, NULL},
    {"sequence", "", 0, test_sequence, NULL},
    {"iterable", "", 0, test_iterable, NULL},
    {"number", "", 0, test_number, NULL},
    {"integer", "", 0, test_integer, NULL},
    {"float", "", 0, test_float, NULL},
    {"boolean", "", 0, test_boolean, NULL},
    {"true", "", 0, test_true, NULL},
    {"false", "", 0, test_false, NULL},
    {"callable", "", 0, test_callable, NULL},
    {"even", "", 0, test_even, NULL},
    {"odd", "", 0, test_odd, NULL},
    {"divisibleby", "num", 1, test_divisibleby, NULL},
    {"eq", "other", 1, test_eq, NULL},
    {"equalto", "other", 1, test_eq, NULL},
    {"==", "other", 1, test_eq, NULL},
    {"ne", "other", 1, test_ne, NULL},
    {"!=", "other", 1, test_ne, NULL},
    {"lt", "other", 1, test_lt, NULL},
    {"lessthan", "other", 1, test_lt, NULL},
    {"<", "other", 1, test_lt, NULL},
    {"le", "other", 1, test_le, NULL},
    {"<=", "other", 1, test_le, NULL},
    {"gt", "other", 1, test_gt, NULL},
    {"greaterthan", "other", 1, test_gt, NULL},
    {">", "other", 1, test_gt, NULL},
    {"ge", "other", 1, test_ge, NULL},
    {">=", "other", 1, test_ge, NULL},
    {"in", "seq", 1, test_in, NULL},
    {"sameas", "other", 1, test_sameas, NULL},
    {"upper", "", 0, test_upper, NULL},
    {"lower", "", 0, test_lower, NULL},
    {"escaped", "", 0, test_escaped, NULL},
    {"filter", "", 0, test_filter, NULL},
    {"test", "", 0, test_test, NULL},
    {NULL, NULL, 0, NULL, NULL},
};
