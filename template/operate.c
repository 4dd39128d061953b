/* SPDX-License-Identifier: Apache-2.0
 *
 * Operators between values, with Python's results. Integers have 64 bits: what does not fit is an error.
 */
#include "template/run.h"
#include "template/text.h"

#include <math.h>
#include <string.h>

static _Noreturn void fail_operands(struct run *run, const char *sign, struct value left, struct value right) {
    if (left.kind == VALUE_UNDEFINED)
        value_fail_undefined(run, left);
    if (right.kind == VALUE_UNDEFINED)
        value_fail_undefined(run, right);
    arena_fail(&run->arena, "unsupported operand types for %s: '%s' and '%s'", sign, value_type_name(left),
        value_type_name(right));
}

static _Noreturn void fail_overflow(struct run *run) {
    arena_fail(&run->arena, "an integer that does not fit 64 bits");
}

static int64_t integer_of(struct value value) {
    return value.kind == VALUE_BOOLEAN ? value.boolean : value.integer;
}

static bool both_integers(struct value left, struct value right) {
    return value_is_number(left) && value_is_number(right) && left.kind != VALUE_FLOAT && right.kind != VALUE_FLOAT;
}

/* Towards minus infinity; the remainder has the sign of b. */
static int64_t floor_divide(struct run *run, int64_t a, int64_t b) {
    if (b == 0)
        arena_fail(&run->arena, "integer division or modulo by zero");
    if (a == INT64_MIN && b == -1)
        fail_overflow(run);
    int64_t quotient = a / b;
    return quotient - (a % b != 0 && (a < 0) != (b < 0));
}

static struct value integer_power(struct run *run, int64_t base, int64_t exponent) {
    if (exponent < 0) {
        if (base == 0)
            arena_fail(&run->arena, "0 cannot be raised to a negative power");
        return value_float(pow((double)base, (double)exponent));
    }
    int64_t result = 1;
    while (exponent > 0) {
        if ((exponent & 1) != 0 && __builtin_mul_overflow(result, base, &result))
            fail_overflow(run);
        exponent >>= 1;
        if (exponent > 0 && __builtin_mul_overflow(base, base, &base))
            fail_overflow(run);
    }
    return value_integer(result);
}

static struct value operate_integers(struct run *run, enum operation operation, int64_t a, int64_t b) {
    int64_t result = 0;
    bool overflow = false;
    switch (operation) {
    case OPERATION_ADD:
        overflow = __builtin_add_overflow(a, b, &result);
        break;
    case OPERATION_SUBTRACT:
        overflow = __builtin_sub_overflow(a, b, &result);
        break;
    case OPERATION_MULTIPLY:
        overflow = __builtin_mul_overflow(a, b, &result);
        break;
    case OPERATION_FLOOR_DIVIDE:
        result = floor_divide(run, a, b);
        break;
    case OPERATION_REMAINDER:
        if (b == -1)
            return value_integer(0);
        result = a - floor_divide(run, a, b) * b;
        break;
    case OPERATION_POWER:
        return integer_power(run, a, b);
    default:
        if (b == 0)
            arena_fail(&run->arena, "division by zero");
        return value_float((double)a / (double)b);
    }
    if (overflow)
        fail_overflow(run);
    return value_integer(result);
}

static struct value operate_floats(struct run *run, enum operation operation, double a, double b) {
    bool divides =
        operation == OPERATION_DIVIDE || operation == OPERATION_FLOOR_DIVIDE || operation == OPERATION_REMAINDER;
    if (divides && b == 0.0)
        arena_fail(&run->arena, "float division by zero");
    switch (operation) {
    case OPERATION_ADD:
        return value_float(a + b);
    case OPERATION_SUBTRACT:
        return value_float(a - b);
    case OPERATION_MULTIPLY:
        return value_float(a * b);
    case OPERATION_DIVIDE:
        return value_float(a / b);
    case OPERATION_POWER:
        return value_float(pow(a, b));
    default:
        break;
    }
    double remainder = fmod(a, b);
    if (remainder != 0.0 && (remainder < 0.0) != (b < 0.0))
        remainder += b;
    if (operation == OPERATION_REMAINDER)
        return value_float(remainder);
    return value_float(floor((a - remainder) / b + 0.5));
}

static struct value repeat(struct run *run, struct value value, int64_t times) {
    if (times < 0)
        times = 0;
    if (value.kind == VALUE_STRING) {
        struct builder text = {.run = run};
        for (int64_t i = 0; i < times && value.string->bytes > 0; i++)
            builder_add(&text, value.string);
        return text_marked_up(run, builder_value(&text), value.string);
    }
    struct value list = value_list(run, value.kind);
    for (int64_t i = 0; i < times && value.list->count > 0; i++) {
        run_step(run, value.list->count);
        for (size_t k = 0; k < value.list->count; k++)
            list_add(run, list.list, value.list->items[k]);
    }
    return list;
}

static bool is_sequence(struct value value) {
    return value.kind == VALUE_STRING || value.kind == VALUE_LIST || value.kind == VALUE_TUPLE;
}

static struct value add(struct run *run, struct value left, struct value right) {
    if (left.kind == VALUE_STRING && right.kind == VALUE_STRING) {
        const struct string either = {.markup = left.string->markup || right.string->markup};
        struct builder text = {.run = run};
        builder_add(&text, either.markup ? text_escaped(run, left).string : left.string);
        builder_add(&text, either.markup ? text_escaped(run, right).string : right.string);
        return text_marked_up(run, builder_value(&text), &either);
    }
    if (left.kind != right.kind || !is_sequence(left))
        fail_operands(run, "+", left, right);
    struct value list = value_list(run, left.kind);
    run_step(run, left.list->count + right.list->count);
    for (size_t i = 0; i < left.list->count; i++)
        list_add(run, list.list, left.list->items[i]);
    for (size_t i = 0; i < right.list->count; i++)
        list_add(run, list.list, right.list->items[i]);
    return list;
}

struct value operate(struct run *run, enum operation operation, struct value left, struct value right) {
    static const char *const signs[] = {[OPERATION_ADD] = "+",
        [OPERATION_SUBTRACT] = "-",
        [OPERATION_MULTIPLY] = "*",
        [OPERATION_DIVIDE] = "/",
        [OPERATION_FLOOR_DIVIDE] = "//",
        [OPERATION_REMAINDER] = "%",
        [OPERATION_POWER] = "**"};
    if (operation == OPERATION_JOIN) {
        struct builder text = {.run = run};
        value_print(&text, left);
        value_print(&text, right);
        return builder_value(&text);
    }
    if (both_integers(left, right))
        return operate_integers(run, operation, integer_of(left), integer_of(right));
    if (value_is_number(left) && value_is_number(right))
        return operate_floats(run, operation, value_number(left), value_number(right));
    if (operation == OPERATION_ADD)
        return add(run, left, right);
    if (operation == OPERATION_MULTIPLY && is_sequence(left) && right.kind == VALUE_INTEGER)
        return repeat(run, left, right.integer);
    if (operation == OPERATION_MULTIPLY && is_sequence(right) && left.kind == VALUE_INTEGER)
        return repeat(run, right, left.integer);
    if (operation == OPERATION_REMAINDER && left.kind == VALUE_STRING)
        return format_percent(run, left.string, right);
    fail_operands(run, signs[operation], left, right);
}

bool compare(struct run *run, enum operation operation, struct value left, struct value right) {
    switch (operation) {
    case OPERATION_EQUAL:
        return value_equal(run, left, right);
    case OPERATION_NOT_EQUAL:
        return !value_equal(run, left, right);
    case OPERATION_LESS:
        return value_order(run, left, right, "<") < 0;
    case OPERATION_LESS_EQUAL:
        return value_order(run, left, right, "<=") <= 0;
    case OPERATION_GREATER:
        return value_order(run, left, right, ">") > 0;
    case OPERATION_GREATER_EQUAL:
        return value_order(run, left, right, ">=") >= 0;
    case OPERATION_IN:
        return value_contains(run, right, left);
    default:
        return !value_contains(run, right, left);
    }
}

/* --- Order --- */

static bool comes_after(struct run *run, const struct sortable *a, const struct sortable *b, bool descending) {
    int order = value_order(run, a->key, b->key, "<");
    return descending ? order < 0 : order > 0;
}

/* From the bottom up, in runs of 1, 2, 4, ... of `from`, merged to `to`. */
void value_sort(struct run *run, struct sortable *items, size_t count, bool descending) {
    struct sortable *from = items, *to = arena_take(&run->arena, count * sizeof *to);
    for (size_t length = 1; length < count; length *= 2) {
        for (size_t begin = 0; begin < count; begin += 2 * length) {
            size_t middle = begin + length < count ? begin + length : count;
            size_t end = begin + 2 * length < count ? begin + 2 * length : count;
            size_t left = begin, right = middle;
            for (size_t i = begin; i < end; i++) {
                bool take_right =
                    left == middle || (right < end && comes_after(run, &from[left], &from[right], descending));
                to[i] = take_right ? from[right++] : from[left++];
            }
        }
        struct sortable *swap = from;
        from = to;
        to = swap;
    }
    if (from != items && count > 0)
        memcpy(items, from, count * sizeof *items);
}
