/* SPDX-License-Identifier: Apache-2.0
 *
 * One log line in memory: how an event becomes text or JSON. Private to log.c and its tests.
 */
#ifndef ENGINE_LOG_LINE_H
#define ENGINE_LOG_LINE_H

#include "engine/log.h"

#include <stdarg.h>
#include <stddef.h>

/* Bytes of a line with its newline. Not more than PIPE_BUF, so that a line written to a pipe is never interleaved with
 * another process's. */
#define LOG_LINE_MAX 4096
#define LOG_STRING_MAX 1024 /* bytes of one escaped string; a longer one is cut and ends in "..." */

struct log_line {
    size_t length;
    char text[LOG_LINE_MAX];
};

/* milliseconds: since 1970, UTC. pairs: as log_event's. Pairs that no longer fit are left out and `truncated=true` is
 * added. The line ends with a newline and has no other line break. */
void log_line_format(struct log_line *line, bool json, int64_t milliseconds, enum log_level level, const char *id,
    const char *event, va_list pairs);

#endif
