/* SPDX-License-Identifier: Apache-2.0
 *
 * The text stream. An input is up to three stop strings, each ended by a zero, then a byte that cuts the rest into
 * tokens. The text must be valid UTF-8 and the same as when each byte is a token of its own; the tokens released and
 * their offsets never go back.
 */
#include "tests/fuzz/fuzz.h"

#include "engine/text_stream.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#define STOPS 3
#define SEED(text)                                                                                                     \
    { text, sizeof text - 1 } /* texts that hold zeros */

static void expect(bool condition) {
    if (!condition)
        abort();
}

struct result {
    char *text;
    size_t bytes;
    bool stopped;
};

static void take(struct text_stream *stream, struct result *result) {
    size_t bytes;
    const char *text = text_stream_take(stream, &bytes);
    memcpy(result->text + result->bytes, text, bytes);
    result->bytes += bytes;
}

static void check_tokens(const struct text_stream *stream, size_t pushed, size_t *released) {
    size_t now = text_stream_tokens_released(stream);
    expect(now >= *released && now <= pushed);
    *released = now;
    for (size_t i = pushed > 8 ? pushed - 8 : 0; i < pushed; i++)
        expect(text_stream_token_offset(stream, i) <= text_stream_token_offset(stream, i + 1));
}

/* cut: tokens have 0 to 3 bytes by its bits in turn; 0: one byte each. */
static struct result run(const char *const *stops, size_t stop_count, const char *data, size_t bytes, unsigned cut) {
    struct result result = {malloc(3 * bytes + 1), 0, false};
    struct text_stream *stream = text_stream_create(stops, stop_count);
    expect(stream != NULL && result.text != NULL);
    size_t pushed = 0, released = 0;
    for (size_t at = 0; at < bytes && !result.stopped; pushed++) {
        size_t length = cut == 0 ? 1 : cut >> 2 * (pushed % 4) & 3;
        if (length > bytes - at)
            length = bytes - at;
        int code = text_stream_push(stream, data + at, length);
        expect(code >= 0);
        at += length;
        result.stopped = code == 1;
        if (cut % 3 == 0)
            take(stream, &result);
        check_tokens(stream, pushed + 1, &released);
    }
    expect(text_stream_finish(stream) == 0);
    take(stream, &result);
    expect(text_stream_tokens_released(stream) == pushed);
    text_stream_free(stream);
    return result;
}

static void expect_valid(const struct result *result) {
    utf8proc_int32_t character;
    for (size_t at = 0; at < result->bytes;) {
        utf8proc_ssize_t used = utf8proc_iterate(
            (const utf8proc_uint8_t *)result->text + at, (utf8proc_ssize_t)(result->bytes - at), &character);
        expect(used > 0);
        at += (size_t)used;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    const char *stops[STOPS];
    size_t stop_count = 0, at = 0;
    const uint8_t *end;
    while (stop_count < STOPS && at < bytes && (end = memchr(data + at, 0, bytes - at)) != NULL) {
        stops[stop_count++] = (const char *)data + at;
        at = (size_t)(end - data) + 1;
    }
    if (at == bytes)
        return 0;
    unsigned cut = data[at] == 0 ? 1 : data[at];
    const char *text = (const char *)data + at + 1;
    struct result whole = run(stops, stop_count, text, bytes - at - 1, cut);
    struct result bytewise = run(stops, stop_count, text, bytes - at - 1, 0);
    expect_valid(&whole);
    expect(whole.stopped == bytewise.stopped && whole.bytes == bytewise.bytes);
    expect(memcmp(whole.text, bytewise.text, whole.bytes) == 0);
    free(whole.text);
    free(bytewise.text);
    return 0;
}

uint8_t *fuzz_seed(unsigned index, size_t *bytes) {
    static const struct {
        const char *text;
        size_t bytes;
    } seeds[] = {SEED("STOP\0\0ab\0\xe4no stop here \xf0\x9f\x98\x80 ST STO \xc3\xa9 STOP after"),
        SEED("aab\0\xef\xbf\xbd!\0\xf0\x9f\x98\x80\0\x1b"
             "aaaab \xe2\x82 \xff! \xf0\x9f\x98\x80\xf0\x9f"),
        SEED("\0\0\0\x06\xed\xa0\x80\xf4\x91\x92\x93\xff\x41\x80\xbf\x42 abc")};
    if (index >= sizeof seeds / sizeof seeds[0])
        return NULL;
    uint8_t *seed = malloc(seeds[index].bytes);
    expect(seed != NULL);
    memcpy(seed, seeds[index].text, seeds[index].bytes);
    *bytes = seeds[index].bytes;
    return seed;
}
