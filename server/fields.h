/* SPDX-License-Identifier: Apache-2.0
 *
 * JSON request bodies: parsing with limits, and reading of checked fields.
 *
 * Rules that hold for every body: it is one JSON object in valid UTF-8, without duplicate keys, lone surrogates, NaN,
 * numbers that overflow, or anything behind its end; at most 64 levels deep and 65,536 arrays and objects (which bounds
 * the memory a small body can claim). `null` is the same as an absent field. 1 and 1.0 are the same number. \u0000 is
 * allowed in strings.
 *
 * The readers return 0, or -1 with a fault that names the field, the value and what is allowed. An absent field leaves
 * *value alone.
 */
#ifndef SERVER_FIELDS_H
#define SERVER_FIELDS_H

#include "server/fault.h"

#include <jansson.h>

/* A new reference, or NULL and a fault. */
json_t *fields_parse(const char *body, size_t bytes, struct fault *fault);

/* The value of a field; NULL when it is absent or null. Borrowed. */
json_t *field_get(const json_t *object, const char *name);

int field_integer(const json_t *object, const char *name, int64_t low, int64_t high, int64_t *value, struct fault *);
int field_number(const json_t *object, const char *name, double low, double high, double *value, struct fault *);
int field_boolean(const json_t *object, const char *name, bool *value, struct fault *);
int field_string(const json_t *object, const char *name, const char **value, struct fault *); /* without NUL inside */

const char *field_type(const json_t *value); /* "an array", "a number", ...: for messages */

/* The integer a JSON number stands for (also 2.0); false for anything else. */
bool fields_as_integer(const json_t *number, int64_t *value);

/* Fields that are known but not supported: present with a value that asks for something, they are a 400 that names
 * them; with the value that asks for nothing they are ignored. */
enum field_refusal {
    REFUSE_NONZERO,  /* numbers: anything but 0 */
    REFUSE_NOT_ONE,  /* numbers: anything but 1 */
    REFUSE_TRUE,     /* booleans: true */
    REFUSE_NONEMPTY, /* strings, arrays, objects: not empty; also any number or true */
    REFUSE_PRESENT,  /* anything but null */
};
struct field_unsupported {
    const char *name;
    enum field_refusal refusal;
};
/* tables end with a NULL name. Fields in neither table are ignored and logged, once for each name. */
int fields_check(const json_t *object, const char *const *known, const struct field_unsupported *unsupported,
    const char *request_id, struct fault *fault);

#endif
