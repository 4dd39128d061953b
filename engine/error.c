/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/error.h"

#include <stdio.h>

int error_set(struct error *error, int code, const char *format, ...) {
    if (error == NULL)
        return code;
    error->code = code;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
    return code;
}
