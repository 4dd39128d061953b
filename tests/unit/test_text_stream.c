/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "engine/random.h"
#include "engine/text_stream.h"
#include "tests/sanitized.h"

#define RAW_LIMIT 200
#define TEXT_LIMIT (3 * RAW_LIMIT + 1)
#define TOKEN_LIMIT 64

/* The naive oracle: decodes all raw bytes at once, searches every stop string at every end. */
struct character {
    char bytes[4];
    size_t length;
    size_t raw_end; /* where its bytes end in the raw text */
};

static bool is_one_character(const unsigned char *bytes, size_t length) {
    utf8proc_int32_t code_point;
    return utf8proc_iterate(bytes, (utf8proc_ssize_t)length, &code_point) == (utf8proc_ssize_t)length;
}

/* True when some bytes complete this to a character: tries the bounds of every range that UTF-8 has. */
static bool begins_character(const unsigned char *bytes, size_t length, size_t wanted) {
    static const unsigned char tries[] = {0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf};
    unsigned char whole[4];
    if (length == wanted)
        return is_one_character(bytes, length);
    memcpy(whole, bytes, length);
    for (size_t i = 0; i < sizeof tries; i++) {
        whole[length] = tries[i];
        if (begins_character(whole, length + 1, wanted))
            return true;
    }
    return false;
}

static bool may_become_character(const unsigned char *bytes, size_t length) {
    for (size_t wanted = length + 1; wanted <= 4; wanted++)
        if (begins_character(bytes, length, wanted))
            return true;
    return false;
}

/* Decodes raw; an incomplete tail becomes U+FFFD if `final`, otherwise it is left out. Returns the characters. */
static size_t naive_decode(const char *raw, size_t length, bool final, struct character *out) {
    const unsigned char *bytes = (const unsigned char *)raw;
    size_t count = 0;
    for (size_t at = 0; at < length;) {
        size_t used = 0;
        for (size_t n = 1; n <= 4 && n <= length - at && used == 0; n++)
            if (is_one_character(bytes + at, n))
                used = n;
        struct character *next = &out[count];
        if (used > 0) {
            memcpy(next->bytes, bytes + at, used);
            next->length = used;
        } else {
            used = 1;
            while (used < 3 && at + used < length && may_become_character(bytes + at, used + 1))
                used++;
            if (at + used == length && !final && may_become_character(bytes + at, used))
                return count;
            memcpy(next->bytes, "\xef\xbf\xbd", 3);
            next->length = 3;
        }
        at += used;
        next->raw_end = at;
        count++;
    }
    return count;
}

static size_t join(const struct character *characters, size_t count, char *out) {
    size_t length = 0;
    for (size_t i = 0; i < count; i++) {
        memcpy(out + length, characters[i].bytes, characters[i].length);
        length += characters[i].length;
    }
    return length;
}

/* True when a stop string occurs: *cut is the length of the text before it. */
static bool naive_stop(const char *text, size_t length, const char *const *stops, size_t stop_count, size_t *cut) {
    for (size_t end = 1; end <= length; end++) {
        size_t longest = 0;
        for (size_t i = 0; i < stop_count; i++) {
            size_t n = strlen(stops[i]);
            if (n > longest && n <= end && memcmp(text + end - n, stops[i], n) == 0)
                longest = n;
        }
        if (longest > 0) {
            *cut = end - longest;
            return true;
        }
    }
    return false;
}

static size_t naive_held(const char *text, size_t length, const char *const *stops, size_t stop_count) {
    size_t held = 0;
    for (size_t i = 0; i < stop_count; i++)
        for (size_t n = 1; n < strlen(stops[i]) && n <= length; n++)
            if (n > held && memcmp(text + length - n, stops[i], n) == 0)
                held = n;
    return held;
}

struct example {
    char raw[RAW_LIMIT];
    size_t raw_length;
    size_t token_ends[TOKEN_LIMIT]; /* in raw bytes */
    size_t token_count;
    char stop_text[4][48];
    const char *stops[4];
    size_t stop_count;
};

/* Length of the text when all bytes of a token are in it; SIZE_MAX when one is still missing. */
static size_t naive_token_text_end(const struct character *characters, size_t count, size_t raw_end) {
    size_t length = 0;
    for (size_t i = 0; i < count; i++) {
        if (i > 0 ? characters[i - 1].raw_end >= raw_end : raw_end == 0)
            return length;
        length += characters[i].length;
    }
    bool complete = count == 0 ? raw_end == 0 : characters[count - 1].raw_end >= raw_end;
    return complete ? length : SIZE_MAX;
}

static size_t naive_offset(const struct character *characters, size_t count, size_t raw_end) {
    size_t offset = 0;
    while (offset < count && characters[offset].raw_end <= raw_end)
        offset++;
    return offset;
}

static void append_taken(struct text_stream *stream, char *sent, size_t *sent_length) {
    size_t bytes;
    const char *text = text_stream_take(stream, &bytes);
    assert_true(*sent_length + bytes <= TEXT_LIMIT);
    memcpy(sent + *sent_length, text, bytes);
    *sent_length += bytes;
}

/* Checks the stream after a push that did not stop it. */
static void check_state(
    struct text_stream *stream, const struct example *example, size_t pushed, const char *sent, size_t sent_length) {
    struct character characters[RAW_LIMIT];
    char text[TEXT_LIMIT];
    size_t count = naive_decode(example->raw, example->token_ends[pushed - 1], false, characters);
    size_t length = join(characters, count, text);
    size_t safe = length - naive_held(text, length, example->stops, example->stop_count);
    assert_int_equal(sent_length, safe);
    assert_memory_equal(sent, text, safe);
    size_t released = 0;
    while (released < pushed && naive_token_text_end(characters, count, example->token_ends[released]) <= safe)
        released++;
    assert_int_equal(text_stream_tokens_released(stream), released);
    assert_int_equal(text_stream_token_offset(stream, 0), 0);
    for (size_t i = 0; i < pushed; i++)
        assert_int_equal(
            text_stream_token_offset(stream, i + 1), naive_offset(characters, count, example->token_ends[i]));
}

static void check_end(struct text_stream *stream, const struct example *example, size_t pushed) {
    struct character characters[RAW_LIMIT];
    size_t count = naive_decode(example->raw, example->token_ends[pushed - 1], true, characters);
    assert_int_equal(text_stream_tokens_released(stream), pushed);
    for (size_t i = 0; i < pushed; i++)
        assert_int_equal(
            text_stream_token_offset(stream, i + 1), naive_offset(characters, count, example->token_ends[i]));
    assert_int_equal(text_stream_finish(stream), 0);
    size_t bytes;
    text_stream_take(stream, &bytes);
    assert_int_equal(bytes, 0);
}

/* Pushes the tokens and compares every state with the oracle. take_late: nothing is taken before the end. */
static void run_example(const struct example *example, bool take_late) {
    struct text_stream *stream = text_stream_create(example->stops, example->stop_count);
    assert_non_null(stream);
    char sent[TEXT_LIMIT], text[TEXT_LIMIT];
    size_t sent_length = 0, begin = 0, pushed = 0, cut = 0;
    struct character characters[RAW_LIMIT];
    bool stopped = false;
    while (pushed < example->token_count && !stopped) {
        size_t end = example->token_ends[pushed++];
        int result = text_stream_push(stream, example->raw + begin, end - begin);
        begin = end;
        size_t length = join(characters, naive_decode(example->raw, end, false, characters), text);
        stopped = naive_stop(text, length, example->stops, example->stop_count, &cut);
        assert_int_equal(result, stopped ? 1 : 0);
        if (!stopped && !take_late) {
            append_taken(stream, sent, &sent_length);
            check_state(stream, example, pushed, sent, sent_length);
        }
    }
    if (!stopped) {
        assert_int_equal(text_stream_finish(stream), 0);
        cut = join(characters, naive_decode(example->raw, begin, true, characters), text);
    }
    append_taken(stream, sent, &sent_length);
    assert_int_equal(sent_length, cut);
    assert_memory_equal(sent, text, cut);
    if (pushed > 0)
        check_end(stream, example, pushed);
    assert_int_equal(text_stream_push(stream, "late", 4), stopped ? 1 : 0);
    append_taken(stream, sent, &sent_length);
    assert_int_equal(sent_length, cut);
    text_stream_free(stream);
}

struct dice {
    uint64_t seed;
    uint32_t at;
};

static uint32_t roll(struct dice *dice, uint32_t sides) {
    uint32_t out[4];
    random_philox(dice->seed, 7, dice->at++, 0, out);
    return out[0] % sides;
}

enum kind { LETTERS, VALID, BROKEN };

/* A piece of random text: two letters, so that stop strings overlap themselves; characters of every length; broken
 * bytes. */
static size_t random_piece(struct dice *dice, enum kind kind_of_text, char out[4]) {
    static const char *const pieces[] = {"a", "b", "a", "b", "\xc3\xa9", "\xc3\xa8", "\xe2\x82\xac", "\xf0\x9f\x98\x80",
        "\xf0\x9f\x98\x81", "\xef\xbf\xbd", "\x80", "\xe2\x82", "\xf0\x9f\x98", "\xf0", "\xed\xa0\x80", "\xc0\xaf",
        "\xf4\x90"};
    uint32_t kind = roll(dice, kind_of_text == LETTERS ? 4 : kind_of_text == VALID ? 10 : 18);
    if (kind == 17) {
        out[0] = (char)roll(dice, 256);
        return 1;
    }
    size_t length = strlen(pieces[kind]);
    memcpy(out, pieces[kind], length);
    return length;
}

static void make_example(struct dice *dice, struct example *example) {
    memset(example, 0, sizeof *example);
    enum kind kind = roll(dice, 3);
    size_t pieces = roll(dice, 40);
    for (size_t i = 0; i < pieces; i++)
        example->raw_length += random_piece(dice, kind, example->raw + example->raw_length);
    for (size_t end = 0; end < example->raw_length || roll(dice, 4) == 0;) {
        if (example->token_count == TOKEN_LIMIT - 1)
            end = example->raw_length;
        else
            end += roll(dice, 4);
        if (end > example->raw_length)
            end = example->raw_length;
        example->token_ends[example->token_count++] = end;
        if (example->token_count == TOKEN_LIMIT)
            break;
    }
    example->stop_count = roll(dice, 5);
    for (size_t i = 0; i < example->stop_count; i++) {
        size_t length = 0, parts = roll(dice, kind == LETTERS ? 10 : 6);
        for (size_t j = 0; j < parts; j++)
            length += random_piece(dice, kind == LETTERS ? LETTERS : VALID, example->stop_text[i] + length);
        example->stops[i] = example->stop_text[i];
    }
}

static void equals_naive_oracle(void **state) {
    (void)state;
    size_t stopped = 0;
    const uint64_t examples = sanitized() ? 2000 : 20000;
    for (uint64_t seed = 0; seed < examples; seed++) {
        struct dice dice = {seed, 0};
        struct example example;
        make_example(&dice, &example);
        run_example(&example, seed % 2 == 1);
        struct character characters[RAW_LIMIT];
        char text[TEXT_LIMIT];
        size_t cut, length = join(characters, naive_decode(example.raw, example.raw_length, false, characters), text);
        stopped += naive_stop(text, length, example.stops, example.stop_count, &cut);
    }
    assert_in_range(stopped, examples / 5, examples / 5 * 4); /* the examples try both ends */
}

/* Every way to cut a short text into tokens gives the same text. */
static void every_split_gives_the_same_text(void **state) {
    (void)state;
    static const char *const texts[] = {"ab\xf0\x9f\x98\x80x STOP",
        "\xe2\x82\xe2\x82\xac\xff"
        "STO\xf0\x90STOP!",
        "aaaaSTSTOPaa", "no end\xe2\x82"};
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; t++) {
        struct example example = {.stops = {"STOP", "aab"}, .stop_count = 2};
        example.raw_length = strlen(texts[t]);
        memcpy(example.raw, texts[t], example.raw_length);
        for (unsigned cuts = 0; cuts < 1u << (example.raw_length - 1); cuts++) {
            example.token_count = 0;
            for (size_t i = 1; i <= example.raw_length; i++)
                if (i == example.raw_length || (cuts >> (i - 1) & 1))
                    example.token_ends[example.token_count++] = i;
            run_example(&example, cuts & 1);
        }
    }
}

static void expect_text(const char *raw, const char *stop, const char *expected) {
    struct text_stream *stream = text_stream_create(&stop, stop == NULL ? 0 : 1);
    assert_non_null(stream);
    assert_true(text_stream_push(stream, raw, strlen(raw)) >= 0);
    assert_int_equal(text_stream_finish(stream), 0);
    size_t bytes;
    const char *text = text_stream_take(stream, &bytes);
    assert_int_equal(bytes, strlen(expected));
    assert_memory_equal(text, expected, bytes);
    text_stream_free(stream);
}

#define BAD "\xef\xbf\xbd"

/* Unicode standard 15, tables 3-8 to 3-11. */
static void replaces_maximal_parts(void **state) {
    (void)state;
    expect_text("\xc0\xaf\xe0\x80\xbf\xf0\x81\x82\x41", NULL, BAD BAD BAD BAD BAD BAD BAD BAD "A");
    expect_text("\xed\xa0\x80\xed\xbf\xbf\xed\xaf\x41", NULL, BAD BAD BAD BAD BAD BAD BAD BAD "A");
    expect_text("\xf4\x91\x92\x93\xff\x41\x80\xbf\x42", NULL, BAD BAD BAD BAD BAD "A" BAD BAD "B");
    expect_text("\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", NULL, BAD BAD BAD BAD "A");
}

static void stops_match_replacements(void **state) {
    (void)state;
    expect_text("ab\xff"
                "cd",
        "b" BAD "c", "a");
    expect_text("ab\xe2\x82"
                "cd",
        "b" BAD "c", "a");
    expect_text("ab\xe2\x82", "b" BAD, "ab" BAD);    /* written by finish: no stop */
    expect_text("ab\xc3\xa9", "\xa9", "ab\xc3\xa9"); /* not UTF-8: never occurs */
    expect_text("abc", "", "abc");
    expect_text("aababc", "abc", "aab");
}

/* The earliest end wins over the earliest beginning; of two with the same end the longer one. */
static void chooses_among_stops(void **state) {
    (void)state;
    static const char *const stops[] = {"bcdef", "cd", "xyz", "z"};
    struct text_stream *stream = text_stream_create(stops, 4);
    size_t bytes;
    assert_int_equal(text_stream_push(stream, "abcde", 5), 1);
    const char *text = text_stream_take(stream, &bytes);
    assert_int_equal(bytes, 2);
    assert_memory_equal(text, "ab", 2);
    text_stream_free(stream);
    stream = text_stream_create(stops, 4);
    assert_int_equal(text_stream_push(stream, "wxyz", 4), 1);
    text_stream_take(stream, &bytes);
    assert_int_equal(bytes, 1);
    text_stream_free(stream);
}

static void long_stop_and_long_text(void **state) {
    (void)state;
    size_t n = 400000;
    char *stop = malloc(n + 1);
    assert_non_null(stop);
    memset(stop, 'a', n);
    stop[n - 1] = 'b';
    stop[n] = '\0';
    const char *stops[] = {stop};
    struct text_stream *stream = text_stream_create(stops, 1);
    assert_non_null(stream);
    size_t bytes, total = 0;
    for (size_t i = 0; i < 2 * n; i++) {
        assert_int_equal(text_stream_push(stream, "a", 1), 0);
        text_stream_take(stream, &bytes);
        total += bytes;
    }
    assert_int_equal(total, 2 * n - (n - 1));
    assert_int_equal(text_stream_tokens_released(stream), total);
    assert_int_equal(text_stream_push(stream, "b", 1), 1);
    text_stream_take(stream, &bytes);
    assert_int_equal(total + bytes, n + 1);
    text_stream_free(stream);
    free(stop);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_naive_oracle),
        cmocka_unit_test(every_split_gives_the_same_text),
        cmocka_unit_test(replaces_maximal_parts),
        cmocka_unit_test(stops_match_replacements),
        cmocka_unit_test(chooses_among_stops),
        cmocka_unit_test(long_stop_and_long_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
