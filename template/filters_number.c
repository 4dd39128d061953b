/* SPDX-License-Identifier: Apache-2.0
 *
 * Filters that make numbers, and `default`.
 */
#include "template/run.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct value filter_abs(struct run *run, struct value self, const struct value *args) {
    (void)args;
    if (self.kind == VALUE_FLOAT)
        return value_float(fabs(self.number));
    if (self.kind != VALUE_INTEGER && self.kind != VALUE_BOOLEAN)
        arena_fail(&run->arena, "bad operand type for abs(): '%s'", value_type_name(self));
    int64_t integer = argument_integer(run, self, 0, "abs");
    return integer < 0 ? operate(run, OPERATION_SUBTRACT, value_integer(0), value_integer(integer))
                       : value_integer(integer);
}

/* The text without blanks around and single underscores between digits; false: it is too long to be a number. */
static bool number_text(const struct string *string, char *out, size_t size) {
    struct string text = string_strip(string, NULL, true, true);
    size_t count = 0;
    for (size_t i = 0; i < text.bytes; i++) {
        char c = text.text[i];
        if (c == '_' && i > 0 && i + 1 < text.bytes && text.text[i - 1] != '_' && text.text[i + 1] != '_')
            continue;
        if (c == '\0' || count + 1 >= size)
            return false;
        out[count++] = c;
    }
    out[count] = '\0';
    return count > 0;
}

static bool text_to_float(const struct string *string, double *number) {
    char text[400], *end;
    if (!number_text(string, text, sizeof text) || strpbrk(text, "xXpP(") != NULL)
        return false;
    *number = strtod(text, &end);
    return *end == '\0';
}

static bool text_to_integer(const struct string *string, int base, int64_t *integer) {
    char text[400], *end;
    if (!number_text(string, text, sizeof text) || strchr(" \t\n", text[0]) != NULL)
        return false;
    const char *digits = text + (text[0] == '-' || text[0] == '+');
    bool prefixed = digits[0] == '0' && digits[1] != '\0' && strchr("xXoObB", digits[1]) != NULL;
    if (prefixed && base == 10)
        return false;
    errno = 0;
    *integer = strtoll(text, &end, base);
    return *end == '\0' && errno == 0;
}

static struct value filter_int(struct run *run, struct value self, const struct value *args) {
    struct value otherwise = args[0].kind == VALUE_ABSENT ? value_integer(0) : args[0];
    int64_t base = argument_integer(run, args[1], 10, "base"), integer;
    double number = 0.0;
    if (base < 2 || base > 36)
        arena_fail(&run->arena, "base must be 2 to 36");
    if (self.kind == VALUE_INTEGER || self.kind == VALUE_BOOLEAN)
        return value_integer(argument_integer(run, self, 0, "int"));
    if (self.kind == VALUE_STRING) {
        if (text_to_integer(self.string, (int)base, &integer))
            return value_integer(integer);
        if (!text_to_float(self.string, &number))
            return otherwise;
    } else if (self.kind == VALUE_FLOAT) {
        number = self.number;
    } else if (self.kind == VALUE_UNDEFINED) {
        value_fail_undefined(run, self);
    } else {
        return otherwise;
    }
    return fabs(number) < 9.2e18 ? value_integer((int64_t)number) : otherwise;
}

static struct value filter_float(struct run *run, struct value self, const struct value *args) {
    double number;
    if (self.kind == VALUE_UNDEFINED)
        value_fail_undefined(run, self);
    if (value_is_number(self))
        return value_float(value_number(self));
    if (self.kind == VALUE_STRING && text_to_float(self.string, &number))
        return value_float(number);
    return args[0].kind == VALUE_ABSENT ? value_float(0.0) : args[0];
}

/* Half to even in decimal, as Python's round. */
static double round_common(double number, int64_t precision) {
    char text[400], *end;
    if (precision < 0) {
        double scale = pow(10.0, (double)-precision);
        return rint(number / scale) * scale;
    }
    if (precision > 300 || !isfinite(number) || fabs(number) > 1e22)
        return number;
    snprintf(text, sizeof text, "%.*f", (int)precision, number);
    return strtod(text, &end);
}

static struct value filter_round(struct run *run, struct value self, const struct value *args) {
    int64_t precision = argument_integer(run, args[0], 0, "precision");
    const struct string *method = argument_string(run, args[1], "method");
    if (self.kind == VALUE_UNDEFINED)
        value_fail_undefined(run, self);
    if (!value_is_number(self))
        arena_fail(&run->arena, "type %s doesn't define a round method", value_type_name(self));
    double number = value_number(self);
    if (method == NULL || string_is(method, "common")) {
        if (self.kind == VALUE_FLOAT)
            return value_float(round_common(number, precision));
        double rounded = precision < 0 ? round_common(number, precision) : 0.0;
        return precision < 0 && fabs(rounded) < 9e15 ? value_integer((int64_t)rounded) : self;
    }
    double scale = pow(10.0, (double)precision);
    if (string_is(method, "ceil"))
        return value_float(ceil(number * scale) / scale);
    if (!string_is(method, "floor"))
        arena_fail(&run->arena, "method must be common, ceil or floor");
    return value_float(floor(number * scale) / scale);
}

static struct value filter_default(struct run *run, struct value self, const struct value *args) {
    bool missing = self.kind == VALUE_UNDEFINED || (argument_boolean(run, args[1], false) && !value_truth(run, self));
    if (!missing)
        return self;
    return args[0].kind == VALUE_ABSENT ? value_text(run, "") : args[0];
}

const struct builtin number_filters[] = {
    {"abs", "", 0, filter_abs, NULL},
    {"int", "default base", 0, filter_int, NULL},
    {"float", "default", 0, filter_float, NULL},
    {"round", "precision method", 0, filter_round, NULL},
    {"default", "default_value boolean", 0, filter_default, NULL},
    {"d", "default_value boolean", 0, filter_default, NULL},
    {NULL, NULL, 0, NULL, NULL},
};
