/* SPDX-License-Identifier: Apache-2.0
 *
 * Jinja templates as chat models bring them: parsed once, rendered with JSON values. The output is, byte by byte, that
 * of Python's jinja2 with the settings of transformers (trim_blocks, lstrip_blocks, loop controls, its `tojson`,
 * raise_exception, strftime_now, generation blocks): the README lists what there is and what differs.
 *
 * A template is not trusted: it may come inside a model file. Parsing and rendering have limits of memory, of work and
 * of depth; what is wrong is an error that names the line.
 *
 * A parsed template never changes: any number of threads may render it at the same time.
 * Sources: the Jinja template designer documentation; the behaviour of jinja2 3.1 and of transformers'
 * chat_template_utils.
 */
#ifndef TEMPLATE_TEMPLATE_H
#define TEMPLATE_TEMPLATE_H

#include "engine/error.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct template; /* opaque */

/* source: UTF-8, need not live on. NULL and ERROR_FORMAT with "line N: ...", or ERROR_MEMORY. */
struct template *template_parse(const char *source, size_t bytes, struct error *error);
void template_free(struct template *template); /* NULL allowed */

struct template_variable {
    const char *name;
    const json_t *value;
    bool input;            /* the strings in it are a stranger's: marked in the output */
    const char *plain_key; /* but not those under this key of the value, or of the objects of a list, itself: the caller
                              has checked them. Deeper ones are marked. NULL: none */
};

struct template_options {
    const struct template_variable *variables; /* [count]; those with a value of NULL are left out */
    size_t count;
    int64_t now;        /* Unix time, for strftime_now (local time) */
    uint64_t steps_max; /* of work: about one for each part of an expression; 0: TEMPLATE_STEPS */
    size_t bytes_max;   /* of the output and of each text on the way; 0: TEMPLATE_BYTES */
};
enum { TEMPLATE_STEPS = 10000000, TEMPLATE_BYTES = 64 << 20, TEMPLATE_MEMORY = 256 << 20 };

struct template_text {
    char *text;     /* [bytes] and a NUL; the caller frees it */
    uint8_t *input; /* [bytes]: not 0 where a byte comes from a variable that is input; NULL: nowhere. The caller's */
    size_t bytes;
};
void template_text_free(struct template_text *text);

/* ERROR_FORMAT with "line N: ..." (also what raise_exception said), or ERROR_MEMORY; *out is empty then. */
int template_render(const struct template *template, const struct template_options *options, struct template_text *out,
    struct error *error);

#endif
