/* SPDX-License-Identifier: Apache-2.0
 *
 * From generated tokens to text that may be sent: whole UTF-8 characters only, and nothing that may turn out to be
 * the beginning of a stop string.
 *
 * Tokens go in one by one; text that is safe comes out. An incomplete character at the tail is held until its other
 * bytes come, or becomes U+FFFD at the end; bytes that can never become valid UTF-8 become U+FFFD at once (one per
 * maximal invalid part, as the WHATWG decoder and Python's "replace" do). A stop string is searched in the text, not
 * in tokens; the text ends before the first occurrence (the earliest end in the stream; the longest match among
 * those that end at the same place). U+FFFD that stands for invalid bytes is text like any other and may be part of a
 * stop string, except the one that text_stream_finish writes for a character that was never completed.
 *
 * The work is linear in the bytes of the tokens (times the number of stop strings), whatever the tokens and the stop
 * strings are. A push or a finish after the end of the stream changes nothing and repeats the result.
 * Source of the search: Knuth, Morris, Pratt 1977.
 */
#ifndef ENGINE_TEXT_STREAM_H
#define ENGINE_TEXT_STREAM_H

#include "engine/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct text_stream; /* opaque */

/* stops: count strings of UTF-8, copied; empty strings are ignored, and so are strings that are not valid UTF-8 (they
 * cannot occur in the text). NULL on failed allocation. */
struct text_stream *text_stream_create(const char *const *stops, size_t count);
void text_stream_free(struct text_stream *stream);

/* Adds the bytes of one token. Returns 1 when a stop string was completed (the stream is finished, its text ends
 * before the stop), 0 when not, ERROR_MEMORY on failure. */
int text_stream_push(struct text_stream *stream, const char *bytes, size_t count);

/* Ends the stream without a stop: what was held back becomes available. 0 or ERROR_MEMORY. */
int text_stream_finish(struct text_stream *stream);

/* Text that is safe to send and was not taken yet; valid until the next call on the stream. Taking it consumes it. */
const char *text_stream_take(struct text_stream *stream, size_t *bytes);

/* Number of tokens pushed whose text has wholly been made available (or cut by a stop): the token entries that may be
 * sent with it. Equals the tokens pushed once the stream is finished. */
size_t text_stream_tokens_released(const struct text_stream *stream);

/* Code points of text that all tokens before `token` (0-based, <= tokens pushed) decode to: the text_offset of the
 * completions API. A token inside a character has the offset of that character. */
size_t text_stream_token_offset(const struct text_stream *stream, size_t token);

#endif
