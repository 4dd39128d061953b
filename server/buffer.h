/* SPDX-License-Identifier: Apache-2.0
 *
 * A growing byte buffer, and the writing of JSON into it. Replies are written field by field with these functions, so
 * that their fields come in a fixed order and no tree is built for each streamed token.
 *
 * Failure is sticky: when an allocation fails the buffer is marked `failed`, later calls do nothing, and the writer
 * checks once at the end.
 */
#ifndef SERVER_BUFFER_H
#define SERVER_BUFFER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct buffer { /* zero-initialise */
    char *data; /* [length], not NUL-terminated; NULL while empty */
    size_t length;
    size_t capacity;
    bool failed;
};

void buffer_free(struct buffer *buffer); /* also makes it empty again */
void buffer_append(struct buffer *buffer, const char *data, size_t count);
void buffer_string(struct buffer *buffer, const char *string); /* as it is, without its NUL */
void buffer_format(struct buffer *buffer, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Drops the first count bytes. */
void buffer_consume(struct buffer *buffer, size_t count);

/* A JSON string with quotes. What is not UTF-8 becomes U+FFFD, one per maximal invalid part, so that the output always
 * is. */
void buffer_json_string(struct buffer *buffer, const char *text, size_t bytes);
/* The same for a C string; NULL reads null. */
void buffer_json_cstring(struct buffer *buffer, const char *text);
/* A number with the digits of a float; JSON has no infinities, so values beyond +-9999 (log-probabilities of impossible
 * tokens) and NaN are written as +-9999, as OpenAI does. */
void buffer_json_logprob(struct buffer *buffer, double value);

/* Length of the valid UTF-8 character at text (of `bytes` > 0 bytes); negative: the length of the maximal invalid part
 * (Unicode 15, section 3.9, table 3-7). */
int utf8_next(const char *text, size_t bytes);
bool utf8_valid(const char *text, size_t bytes);
size_t utf8_count(const char *text, size_t bytes); /* characters; an invalid part counts as one */

#endif
