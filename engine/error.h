/* SPDX-License-Identifier: Apache-2.0
 *
 * Errors: how every fallible function of the project reports what went wrong.
 *
 * A function returns 0, or one of the negative codes below and fills `struct error`; functions that return a pointer
 * return NULL and fill it. The message is for a person: it names the thing (file, tensor, parameter), the value and
 * the limit, starts in lower case and has no final full stop. Callers may pass NULL when they need only the code.
 */
#ifndef ENGINE_ERROR_H
#define ENGINE_ERROR_H

#include <stdarg.h>

enum error_code {
    ERROR_NONE = 0,
    ERROR_INVALID = -1,     /* a value outside its range or of the wrong kind */
    ERROR_MEMORY = -2,      /* an allocation failed */
    ERROR_IO = -3,          /* the system refused: open, read, map, socket */
    ERROR_FORMAT = -4,      /* a file or text is not what it should be */
    ERROR_UNSUPPORTED = -5, /* well formed, but nothing here can run it */
    ERROR_CONTEXT = -6,     /* more tokens than the context holds */
    ERROR_PAGES = -7,       /* no free KV page: try again when something was freed */
    ERROR_CANCELLED = -8,   /* somebody asked for it to end */
    ERROR_DEVICE = -9,      /* one of several devices failed: nothing can be computed any more */
};

struct error {
    int code; /* enum error_code */
    char message[512];
};

/* Fills error (may be NULL) and returns code, so that `return error_set(error, ERROR_IO, ...)` reads well. */
int error_set(struct error *error, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
