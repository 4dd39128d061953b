/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/text_stream.h"

#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

/* Knuth-Morris-Pratt search for one stop string; `matched` is the length of the longest suffix of the text so far
 * that is a prefix of the stop string. */
struct stop {
    unsigned char *bytes;
    size_t length;
    size_t *fallback; /* [length]: longest proper prefix of bytes[0..i] that is also its suffix */
    size_t matched;
};

/* What is known of one token once the character that holds its last byte is decoded. */
struct token_mark {
    size_t raw_end;     /* bytes of all tokens up to and with this one */
    size_t text_end;    /* length of the text when the token's last character is in it */
    size_t next_offset; /* code points that end within the tokens up to this one */
};

struct text_stream {
    struct stop *stops;
    size_t stop_count;

    /* The character being read: what it still needs and the range its next byte must lie in. */
    unsigned char partial[4];
    size_t partial_length;
    unsigned needed;
    unsigned char lowest, highest;

    char *text; /* decoded text that was not dropped: [taken | available | held back] */
    size_t text_length;
    size_t text_capacity;
    size_t dropped;   /* bytes of the whole text before text[0] */
    size_t taken;     /* in bytes of the whole text, like available */
    size_t available; /* text before this is safe to send */

    struct token_mark *marks; /* [tokens] */
    size_t tokens;
    size_t mark_capacity;
    size_t resolved; /* leading marks whose text_end and next_offset are known */
    size_t released;
    size_t raw_length; /* bytes decoded so far, without the partial character */
    size_t code_points;

    bool stopped;  /* a stop string was found: the text is complete */
    bool finished; /* no token may follow */
};

static const char replacement[] = "\xef\xbf\xbd"; /* U+FFFD */

static bool is_valid_utf8(const char *text, size_t length) {
    const utf8proc_uint8_t *at = (const utf8proc_uint8_t *)text;
    while (length > 0) {
        utf8proc_int32_t code_point;
        utf8proc_ssize_t used = utf8proc_iterate(at, (utf8proc_ssize_t)length, &code_point);
        if (used <= 0)
            return false;
        at += used;
        length -= (size_t)used;
    }
    return true;
}

static int stop_prepare(struct stop *stop, const char *text, size_t length) {
    stop->bytes = malloc(length);
    stop->fallback = calloc(length, sizeof *stop->fallback);
    if (stop->bytes == NULL || stop->fallback == NULL) {
        free(stop->bytes);
        free(stop->fallback);
        return ERROR_MEMORY;
    }
    memcpy(stop->bytes, text, length);
    stop->length = length;
    stop->matched = 0;
    for (size_t i = 1, k = 0; i < length; i++) {
        while (k > 0 && stop->bytes[i] != stop->bytes[k])
            k = stop->fallback[k - 1];
        if (stop->bytes[i] == stop->bytes[k])
            k++;
        stop->fallback[i] = k;
    }
    return 0;
}

/* Takes the next byte of text; true when it completes the stop string. */
static bool stop_advance(struct stop *stop, unsigned char byte) {
    while (stop->matched > 0 && stop->bytes[stop->matched] != byte)
        stop->matched = stop->fallback[stop->matched - 1];
    if (stop->bytes[stop->matched] == byte)
        stop->matched++;
    return stop->matched == stop->length;
}

struct text_stream *text_stream_create(const char *const *stops, size_t count) {
    struct text_stream *stream = calloc(1, sizeof *stream);
    if (stream == NULL)
        return NULL;
    if (count > 0) {
        stream->stops = calloc(count, sizeof *stream->stops);
        if (stream->stops == NULL)
            goto failed;
    }
    for (size_t i = 0; i < count; i++) {
        size_t length = strlen(stops[i]);
        if (length == 0 || !is_valid_utf8(stops[i], length))
            continue;
        if (stop_prepare(&stream->stops[stream->stop_count], stops[i], length) != 0)
            goto failed;
        stream->stop_count++;
    }
    return stream;

failed:
    text_stream_free(stream);
    return NULL;
}

void text_stream_free(struct text_stream *stream) {
    if (stream == NULL)
        return;
    for (size_t i = 0; i < stream->stop_count; i++) {
        free(stream->stops[i].bytes);
        free(stream->stops[i].fallback);
    }
    free(stream->stops);
    free(stream->text);
    free(stream->marks);
    free(stream);
}

/* Makes room for `more` elements behind `length`. */
static int grow(void **array, size_t *capacity, size_t length, size_t more, size_t element_bytes) {
    if (more <= *capacity - length)
        return 0;
    if (more > SIZE_MAX / 4 / element_bytes - length)
        return ERROR_MEMORY;
    size_t wanted = length + more;
    if (wanted < *capacity * 2)
        wanted = *capacity * 2;
    if (wanted < 64)
        wanted = 64;
    void *larger = realloc(*array, wanted * element_bytes);
    if (larger == NULL)
        return ERROR_MEMORY;
    *array = larger;
    *capacity = wanted;
    return 0;
}

/* Drops text that was taken, when that at least halves the buffer (so that moving costs no more than adding did). */
static void drop_taken(struct text_stream *stream) {
    size_t gone = stream->taken - stream->dropped;
    if (gone == 0 || gone < stream->text_length - gone)
        return;
    memmove(stream->text, stream->text + gone, stream->text_length - gone);
    stream->text_length -= gone;
    stream->dropped = stream->taken;
}

/* Everything a push of `count` bytes can need, so that nothing fails half-way: each byte becomes at most one
 * U+FFFD of three bytes, and so may the partial character. */
static int reserve(struct text_stream *stream, size_t count) {
    if (count > SIZE_MAX / 16)
        return ERROR_MEMORY;
    drop_taken(stream);
    if (grow((void **)&stream->text, &stream->text_capacity, stream->text_length, 3 * (count + 2), 1) != 0)
        return ERROR_MEMORY;
    return grow((void **)&stream->marks, &stream->mark_capacity, stream->tokens, 1, sizeof *stream->marks);
}

/* Runs the stop search over one character. When it completes a stop string, the length of the longest one that ends
 * there, else 0. */
static size_t search_stops(struct text_stream *stream, const char *character, size_t length) {
    size_t longest = 0;
    for (size_t i = 0; i < stream->stop_count; i++) {
        struct stop *stop = &stream->stops[i];
        for (size_t j = 0; j < length; j++)
            /* Stop strings are whole characters, so a match can only be at the last byte. */
            if (stop_advance(stop, (unsigned char)character[j]) && stop->length > longest)
                longest = stop->length;
    }
    return longest;
}

static size_t longest_partial_stop(const struct text_stream *stream) {
    size_t longest = 0;
    for (size_t i = 0; i < stream->stop_count; i++)
        if (stream->stops[i].matched > longest)
            longest = stream->stops[i].matched;
    return longest;
}

static size_t text_total(const struct text_stream *stream) {
    return stream->dropped + stream->text_length;
}

/* Settles the marks of tokens whose last byte is now decoded. The character that was just added is the last of
 * code_points; a token that ends inside it ends before it as far as offsets go, but needs it to be complete. */
static void resolve_marks(struct text_stream *stream) {
    while (stream->resolved < stream->tokens && stream->marks[stream->resolved].raw_end <= stream->raw_length) {
        struct token_mark *mark = &stream->marks[stream->resolved++];
        mark->text_end = text_total(stream);
        mark->next_offset = stream->code_points - (mark->raw_end < stream->raw_length ? 1 : 0);
    }
}

/* Adds one character that was made of raw_bytes bytes of tokens. After a stop only the bookkeeping goes on. */
static void add_character(struct text_stream *stream, const char *character, size_t length, size_t raw_bytes) {
    stream->code_points++;
    stream->raw_length += raw_bytes;
    if (!stream->stopped) {
        memcpy(stream->text + stream->text_length, character, length);
        stream->text_length += length;
        size_t stop = stream->finished ? 0 : search_stops(stream, character, length);
        if (stop > 0) {
            stream->stopped = true;
            stream->text_length -= stop;
        }
    }
    resolve_marks(stream);
}

static void flush_partial(struct text_stream *stream) {
    size_t length = stream->partial_length;
    stream->partial_length = 0;
    stream->needed = 0;
    if (length > 0)
        add_character(stream, replacement, 3, length);
}

/* Starts a character of several bytes; the ranges exclude overlong forms, surrogates and values past U+10FFFF
 * (Unicode standard, table 3-7). False when no character starts with this byte. */
static bool begin_character(struct text_stream *stream, unsigned char byte) {
    stream->lowest = 0x80;
    stream->highest = 0xbf;
    if (byte >= 0xc2 && byte <= 0xdf)
        stream->needed = 1;
    else if (byte >= 0xe0 && byte <= 0xef)
        stream->needed = 2;
    else if (byte >= 0xf0 && byte <= 0xf4)
        stream->needed = 3;
    else
        return false;
    if (byte == 0xe0)
        stream->lowest = 0xa0;
    else if (byte == 0xed)
        stream->highest = 0x9f;
    else if (byte == 0xf0)
        stream->lowest = 0x90;
    else if (byte == 0xf4)
        stream->highest = 0x8f;
    stream->partial[0] = byte;
    stream->partial_length = 1;
    return true;
}

static void decode_byte(struct text_stream *stream, unsigned char byte) {
    if (stream->partial_length > 0) {
        if (byte >= stream->lowest && byte <= stream->highest) {
            stream->partial[stream->partial_length++] = byte;
            stream->lowest = 0x80;
            stream->highest = 0xbf;
            if (--stream->needed == 0) {
                size_t length = stream->partial_length;
                stream->partial_length = 0;
                add_character(stream, (const char *)stream->partial, length, length);
            }
            return;
        }
        flush_partial(stream);
    }
    if (byte < 0x80)
        add_character(stream, (const char *)&byte, 1, 1);
    else if (!begin_character(stream, byte))
        add_character(stream, replacement, 3, 1);
}

/* Brings `available` and `released` up to date. */
static void release(struct text_stream *stream) {
    size_t held = stream->finished ? 0 : longest_partial_stop(stream);
    stream->available = text_total(stream) - held;
    if (stream->finished) {
        stream->released = stream->tokens;
        return;
    }
    while (stream->released < stream->resolved && stream->marks[stream->released].text_end <= stream->available)
        stream->released++;
}

int text_stream_push(struct text_stream *stream, const char *bytes, size_t count) {
    if (stream->finished)
        return stream->stopped ? 1 : 0;
    if (reserve(stream, count) != 0)
        return ERROR_MEMORY;
    stream->marks[stream->tokens].raw_end = stream->raw_length + stream->partial_length + count;
    stream->tokens++;
    for (size_t i = 0; i < count; i++)
        decode_byte(stream, (unsigned char)bytes[i]);
    if (stream->stopped) {
        stream->finished = true;
        flush_partial(stream);
    }
    if (stream->partial_length == 0)
        resolve_marks(stream); /* a token without bytes added no character */
    release(stream);
    return stream->stopped ? 1 : 0;
}

int text_stream_finish(struct text_stream *stream) {
    if (stream->finished)
        return 0;
    if (reserve(stream, 0) != 0)
        return ERROR_MEMORY;
    stream->finished = true;
    flush_partial(stream);
    release(stream);
    return 0;
}

const char *text_stream_take(struct text_stream *stream, size_t *bytes) {
    size_t from = stream->taken - stream->dropped;
    *bytes = stream->available - stream->taken;
    stream->taken = stream->available;
    return *bytes == 0 ? "" : stream->text + from;
}

size_t text_stream_tokens_released(const struct text_stream *stream) {
    return stream->released;
}

size_t text_stream_token_offset(const struct text_stream *stream, size_t token) {
    if (token == 0)
        return 0;
    return token <= stream->resolved ? stream->marks[token - 1].next_offset : stream->code_points;
}
