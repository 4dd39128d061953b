/* SPDX-License-Identifier: Apache-2.0
 *
 * Logs: one line per event on standard error, as text or JSON. Lines go through a ring to a writer thread, so that no
 * caller waits for a disk or a terminal; when the ring is full, lines are dropped and their number is logged.
 *
 *   log_event(LOG_INFO, "cmpl-1", "request finished", "status", LOG_INT(200), "seconds", LOG_FLOAT(0.25), NULL);
 *   text: 2026-11-29T12:00:00.123Z info request finished id=cmpl-1 status=200 seconds=0.25
 *   json: {"time":"...","level":"info","event":"request finished","id":"cmpl-1","status":200,"seconds":0.25}
 * Strings are escaped in both forms: an event is always exactly one line of valid UTF-8.
 */
#ifndef ENGINE_LOG_H
#define ENGINE_LOG_H

#include "engine/error.h"

#include <stdbool.h>
#include <stdint.h>

enum log_level { LOG_DEBUG, LOG_INFO, LOG_WARNING, LOG_ERROR };

struct log_value {
    enum { LOG_VALUE_STRING, LOG_VALUE_INT, LOG_VALUE_FLOAT, LOG_VALUE_BOOL } kind;
    const char *string; /* copied by log_event; NULL reads null */
    int64_t integer;
    double number;
};
#define LOG_STRING(x) (&(const struct log_value){.kind = LOG_VALUE_STRING, .string = (x)})
#define LOG_INT(x) (&(const struct log_value){.kind = LOG_VALUE_INT, .integer = (int64_t)(x)})
#define LOG_FLOAT(x) (&(const struct log_value){.kind = LOG_VALUE_FLOAT, .number = (x)})
#define LOG_BOOL(x) (&(const struct log_value){.kind = LOG_VALUE_BOOL, .integer = (x)})

/* Starts the writer thread. Before log_open (and after log_close) events are written directly. */
int log_open(enum log_level level, bool json, struct error *error);
void log_close(void); /* writes what is left */

/* id: the request's, or NULL. Then pairs of (const char *key, const struct log_value *), ended by NULL. Any thread. */
void log_event(enum log_level level, const char *id, const char *event, ...) __attribute__((sentinel));

#endif
