/* SPDX-License-Identifier: Apache-2.0
 *
 * What a model may write: a JSON document that satisfies a schema, any JSON object, or one of some texts; compiled to
 * expressions (expression.h), which matcher.h follows.
 *
 * The subset of JSON Schema (2020-12), with what is written of it:
 *
 * | keywords                                      | notes                                                         |
 * |-----------------------------------------------|---------------------------------------------------------------|
 * | type (also a list), nullable                  | without: the types that the other keywords speak of, or all   |
 * | enum, const                                   | beside type only                                              |
 * | properties, required, additionalProperties    | in the order of properties; further names after them, none of |
 * |                                               | the listed ones. additionalProperties absent: no further names|
 * |                                               | if there are properties, else any. Names up to 256 bytes      |
 * | items, prefixItems, minItems, maxItems        | items absent: anything                                        |
 * | minLength, maxLength                          | in characters                                                 |
 * | pattern                                       | regex.h; not beside format, minLength, maxLength              |
 * | format                                        | schema_format.c; others are refused                           |
 * | minimum, maximum, exclusiveMinimum,           | of integers any; of numbers whole limits. Integers have at    |
 * | exclusiveMaximum                              | most 15 digits, numbers at most 15 before and behind the point|
 * | multipleOf                                    | 1, of integers                                                |
 * | anyOf, oneOf                                  | with what stands beside them in each branch. Branches of oneOf|
 * |                                               | must differ by type, const or enum, or by a required property |
 * |                                               | with const or enum                                            |
 * | allOf                                         | of schemas that can be merged into one                        |
 * | $ref, $defs, definitions                      | inside the document (#...), recursive too                     |
 *
 * Annotations (title, description, default, examples, ...) and unknown names have no effect, as JSON Schema says; every
 * other keyword of JSON Schema is refused: ERROR_UNSUPPORTED with its name and place.
 *
 * White space: after { [ , and before } ] nothing, a space, or a line feed and up to 20 spaces; after : nothing or a
 * space. None around the document: what is complete can only end.
 */
#ifndef GRAMMAR_GRAMMAR_H
#define GRAMMAR_GRAMMAR_H

#include <jansson.h>

#include "engine/error.h"
#include "grammar/expression.h"

struct grammar {
    struct expression_pool pool;
    uint32_t root;
};

/* A compiled schema, an object or a boolean. Takes time in proportion to the schema; safe on any thread. ERROR_INVALID:
 * it is no schema, or no value satisfies it; ERROR_UNSUPPORTED: outside the subset, or too large; ERROR_MEMORY. */
struct grammar *grammar_of_schema(const json_t *schema, struct error *error);
struct grammar *grammar_of_any_object(struct error *error);
/* One of the texts, as they are: an array of strings, not empty. */
struct grammar *grammar_of_choices(const json_t *texts, struct error *error);
/* A text that a pattern matches as a whole (regex.h). */
struct grammar *grammar_of_pattern(const char *pattern, size_t bytes, struct error *error);

/* Calls of functions as a model writes them: open, 1 to `most` calls with `between` between them, close. A call is
 * begin, the function's name as a JSON string, middle, its arguments, end. */
struct grammar_function {
    const char *name;
    const json_t *parameters; /* a schema, of which the arguments are an object; NULL: there are none */
};
struct grammar_calls {
    const char *open, *begin, *middle, *end, *between, *close;
    bool blank; /* a space may stand before all */
    uint32_t most;
    const struct grammar_function *functions; /* [count] */
    size_t count;
};
/* Errors as of grammar_of_schema; their messages name the function. */
struct grammar *grammar_of_calls(const struct grammar_calls *calls, struct error *error);
void grammar_free(struct grammar *grammar); /* NULL allowed */

#endif
