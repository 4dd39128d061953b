/* SPDX-License-Identifier: Apache-2.0 */
#include "server/fault.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Cuts at the end of the last whole character and replaces what is not UTF-8 with '?', in place. */
static void fault_clean(char *text) {
    size_t length = strlen(text);
    for (size_t i = 0; i < length;) {
        int step = utf8_next(text + i, length - i);
        if (step > 0) {
            i += (size_t)step;
            continue;
        }
        for (; step < 0; step++)
            text[i++] = '?';
    }
}

/* nonnull: else the sanitizers' check of the format makes a path without one, of which gcc warns. */
__attribute__((nonnull(5))) static void fault_fill(struct fault *fault, unsigned status, const char *code,
    const char *parameter, const char *format, va_list arguments) {
    *fault = (struct fault){.status = status, .code = code};
    if (parameter != NULL)
        snprintf(fault->parameter, sizeof fault->parameter, "%s", parameter);
    vsnprintf(fault->message, sizeof fault->message, format, arguments);
    fault_clean(fault->parameter);
    fault_clean(fault->message);
}

int fault_set(struct fault *fault, unsigned status, const char *code, const char *parameter, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fault_fill(fault, status, code, parameter, format, arguments);
    va_end(arguments);
    return -1;
}

int fault_invalid(struct fault *fault, const char *parameter, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fault_fill(fault, 400, NULL, parameter, format, arguments);
    va_end(arguments);
    return -1;
}

int fault_unavailable(struct fault *fault, const char *code, unsigned retry_after_s, const char *message) {
    fault_set(fault, 503, code, NULL, "%s", message);
    fault->retry_after_ms = 1000 * retry_after_s;
    return -1;
}

int fault_memory(struct fault *fault) {
    return fault_set(fault, 500, NULL, NULL, "out of memory");
}

void fault_write(const struct fault *fault, struct buffer *out) {
    buffer_string(out, "{\"error\":{\"message\":");
    buffer_json_cstring(out, fault->message);
    const char *type = fault->status == 429   ? "requests" /* as OpenAI names what there are too many of */
                       : fault->status >= 500 ? "server_error"
                                              : "invalid_request_error";
    buffer_format(out, ",\"type\":\"%s\"", type);
    buffer_string(out, ",\"param\":");
    buffer_json_cstring(out, fault->parameter[0] == '\0' ? NULL : fault->parameter);
    buffer_string(out, ",\"code\":");
    buffer_json_cstring(out, fault->code);
    buffer_string(out, "}}");
}
