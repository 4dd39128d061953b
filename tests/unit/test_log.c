/* SPDX-License-Identifier: Apache-2.0
 *
 * The log, seen from outside: what arrives on standard error.
 */
#include "engine/log.h"
#include "engine/log_line.h"
#include "engine/random.h"

#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <utf8proc.h>

#include <cmocka.h>

static int saved_stderr = -1;
static FILE *captured;

static void capture_begin(void) {
    captured = tmpfile();
    assert_non_null(captured);
    saved_stderr = dup(STDERR_FILENO);
    assert_true(saved_stderr >= 0);
    assert_int_equal(dup2(fileno(captured), STDERR_FILENO), STDERR_FILENO);
}

/* What was written, as a string to be freed. */
static char *capture_end(void) {
    assert_int_equal(dup2(saved_stderr, STDERR_FILENO), STDERR_FILENO);
    close(saved_stderr);
    long size = lseek(fileno(captured), 0, SEEK_END);
    assert_true(size >= 0);
    char *text = calloc(1, (size_t)size + 1);
    assert_non_null(text);
    assert_int_equal(pread(fileno(captured), text, (size_t)size, 0), size);
    fclose(captured);
    return text;
}

static size_t count_lines(const char *text) {
    size_t count = 0;
    for (; *text != '\0'; text++)
        count += *text == '\n';
    return count;
}

/* Splits off the next line, without its newline; NULL at the end. */
static char *next_line(char **rest) {
    char *line = *rest, *end = strchr(line, '\n');
    if (end == NULL) {
        assert_int_equal(*line, '\0'); /* every line is ended */
        return NULL;
    }
    *end = '\0';
    *rest = end + 1;
    return line;
}

static void format_line(
    struct log_line *line, bool json, enum log_level level, const char *id, const char *event, ...) {
    va_list pairs;
    va_start(pairs, event);
    log_line_format(line, json, INT64_C(1795953600123), level, id, event, pairs);
    va_end(pairs);
    assert_true(line->length > 0 && line->length <= LOG_LINE_MAX);
    assert_int_equal(line->text[line->length - 1], '\n');
    line->text[line->length - 1] = '\0';
}

static void test_text_form(void **state) {
    (void)state;
    struct log_line line;
    format_line(&line, false, LOG_INFO, "cmpl-1", "request finished", "status", LOG_INT(200), "seconds",
        LOG_FLOAT(0.25), "cached", LOG_BOOL(true), "path", LOG_STRING("/v1/models"), NULL);
    assert_string_equal(line.text, "2026-11-29T12:00:00.123Z info request finished id=cmpl-1 status=200 seconds=0.25 "
                                   "cached=true path=/v1/models");
    format_line(&line, false, LOG_WARNING, NULL, "odd", "a", LOG_STRING("two words"), "b", LOG_STRING("x\ny\"\\z"), "c",
        LOG_STRING(""), "d", LOG_STRING(NULL), "e", LOG_STRING("null"), "f", LOG_STRING("k=v"), NULL);
    assert_string_equal(line.text, "2026-11-29T12:00:00.123Z warning odd a=\"two words\" b=\"x\\ny\\\"\\\\z\" c=\"\" "
                                   "d=null e=\"null\" f=\"k=v\"");
}

static void test_json_form(void **state) {
    (void)state;
    struct log_line line;
    format_line(&line, true, LOG_ERROR, "cmpl-1", "request finished", "status", LOG_INT(INT64_MIN), "seconds",
        LOG_FLOAT(0.25), "bad", LOG_FLOAT(0.0 / 0.0), "none", LOG_STRING(NULL), "no", LOG_BOOL(false), NULL);
    assert_string_equal(line.text,
        "{\"time\":\"2026-11-29T12:00:00.123Z\",\"level\":\"error\",\"event\":\"request finished\",\"id\":\"cmpl-1\","
        "\"status\":-9223372036854775808,\"seconds\":0.25,\"bad\":null,\"none\":null,\"no\":false}");
}

static void test_control_characters_and_bad_utf8(void **state) {
    (void)state;
    struct log_line line;
    format_line(
        &line, true, LOG_INFO, "\x1b[31m", "e\tv", "k", LOG_STRING("\xff\xc3\xa4\xc2\x85\xe2\x80\xa8\x7f"), NULL);
    assert_non_null(strstr(line.text, "\"id\":\"\\u001b[31m\""));
    assert_non_null(strstr(line.text, "\"event\":\"e\\u0009v\""));
    assert_non_null(strstr(line.text, "\"k\":\"\xef\xbf\xbd\xc3\xa4\\u0085\\u2028\\u007f\""));
}

static void test_too_long(void **state) {
    (void)state;
    char *many = malloc(100001);
    assert_non_null(many);
    memset(many, 'a', 100000);
    many[100000] = '\0';
    for (int json = 0; json < 2; json++) {
        struct log_line line;
        format_line(
            &line, json, LOG_INFO, many, many, "a", LOG_STRING(many), "b", LOG_STRING(many), "small", LOG_INT(7), NULL);
        assert_non_null(strstr(line.text, json ? "\"truncated\":true" : "truncated=true"));
        assert_non_null(strstr(line.text, json ? "\"small\":7" : "small=7"));
        assert_non_null(strstr(line.text, "aaa..."));
    }
    free(many);
}

static uint32_t next_random(uint64_t seed, uint64_t *counter) {
    uint32_t words[4];
    random_philox(seed, 0, 0, (*counter)++, words);
    return words[0];
}

/* Random bytes, never zero, of a random kind and length. */
static void fill_random(char *text, size_t size, uint64_t seed, uint64_t *counter) {
    size_t length = next_random(seed, counter) % size;
    uint32_t kind = next_random(seed, counter) % 4;
    for (size_t i = 0; i < length; i++) {
        uint32_t bits = next_random(seed, counter);
        unsigned char byte = kind == 0   ? (unsigned char)bits
                             : kind == 1 ? (unsigned char)(bits % 0x30)
                             : kind == 2 ? (unsigned char)"\xe2\x80\xa8\xc2\x85\"\\\xf0\x9f\x98\x80\xed\xa0"[bits % 13]
                                         : (unsigned char)(0x20 + bits % 0x60);
        text[i] = byte == 0 ? (char)1 : (char)byte;
    }
    text[length] = '\0';
}

static void assert_valid_utf8(const char *text) {
    size_t rest = strlen(text);
    while (rest > 0) {
        utf8proc_int32_t code;
        utf8proc_ssize_t used = utf8proc_iterate((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)rest, &code);
        assert_true(used > 0);
        assert_true(code >= 0x20);
        text += used;
        rest -= (size_t)used;
    }
}

static void test_every_line_is_json_and_utf8(void **state) {
    (void)state;
    uint64_t counter = 0;
    for (int round = 0; round < 4000; round++) {
        char id[300], event[2000], key[40], value[5000];
        fill_random(id, sizeof id, 42, &counter);
        fill_random(event, sizeof event, 42, &counter);
        fill_random(key, sizeof key, 42, &counter);
        fill_random(value, sizeof value, 42, &counter);
        struct log_line line;
        format_line(&line, true, (enum log_level)(round % 4), id, event, key, LOG_STRING(value), "number",
            LOG_FLOAT((double)round / 7), NULL);
        json_error_t failure;
        json_t *object = json_loads(line.text, 0, &failure);
        if (object == NULL)
            fail_msg("%s in: %s", failure.text, line.text);
        assert_non_null(json_object_get(object, "event"));
        assert_valid_utf8(line.text);
        json_decref(object);
        format_line(&line, false, LOG_INFO, id, event, key, LOG_STRING(value), NULL);
        assert_valid_utf8(line.text);
    }
}

static void test_direct_before_open_and_after_close(void **state) {
    (void)state;
    capture_begin();
    log_event(LOG_INFO, NULL, "early", NULL);
    log_event(LOG_DEBUG, NULL, "not wanted", NULL);
    int opened = log_open(LOG_ERROR, true, NULL);
    struct error error;
    int again = log_open(LOG_ERROR, true, &error);
    log_event(LOG_WARNING, NULL, "not wanted", NULL);
    log_event(LOG_ERROR, NULL, "inside", NULL);
    log_close();
    log_close();
    log_event(LOG_ERROR, NULL, "late", NULL);
    char *text = capture_end(), *rest = text;
    assert_int_equal(opened, 0);
    assert_int_equal(again, ERROR_INVALID);
    assert_string_equal(error.message, "the log is open already");
    assert_non_null(strstr(next_line(&rest), " info early"));
    assert_non_null(strstr(next_line(&rest), "\"event\":\"inside\""));
    assert_non_null(strstr(next_line(&rest), "\"event\":\"late\""));
    assert_null(next_line(&rest));
    free(text);
}

enum { THREADS = 4, EVENTS = 300 };

static void *log_many(void *argument) {
    for (int i = 0; i < EVENTS; i++)
        log_event(LOG_INFO, NULL, "tick", "thread", LOG_INT(*(const int *)argument), "i", LOG_INT(i), NULL);
    return NULL;
}

/* 1200 lines of some 90 bytes fit into the ring: all arrive, each thread's in order. */
static void test_threads(void **state) {
    (void)state;
    pthread_t threads[THREADS];
    int numbers[THREADS], next[THREADS] = {0};
    capture_begin();
    int opened = log_open(LOG_INFO, true, NULL);
    for (int i = 0; i < THREADS; i++) {
        numbers[i] = i;
        pthread_create(&threads[i], NULL, log_many, &numbers[i]);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    log_close();
    char *text = capture_end(), *rest = text;
    assert_int_equal(opened, 0);
    for (char *line; (line = next_line(&rest)) != NULL;) {
        json_t *object = json_loads(line, 0, NULL);
        json_int_t thread = json_integer_value(json_object_get(object, "thread"));
        assert_in_range(thread, 0, THREADS - 1);
        assert_int_equal(json_integer_value(json_object_get(object, "i")), next[thread]++);
        json_decref(object);
    }
    for (int i = 0; i < THREADS; i++)
        assert_int_equal(next[i], EVENTS);
    free(text);
}

/* A reader that does not read until everything was logged: the callers went on, and what was dropped is counted. */
static void *read_all(void *argument) {
    int fd = *(const int *)argument;
    size_t length = 0, size = 1 << 20;
    char *text = calloc(1, size);
    for (ssize_t got; text != NULL && length + 1 < size && (got = read(fd, text + length, size - 1 - length)) > 0;)
        length += (size_t)got;
    return text;
}

static void test_drops_are_counted(void **state) {
    (void)state;
    enum { LINES = 20000 };
    int pipe_ends[2];
    assert_int_equal(pipe2(pipe_ends, O_CLOEXEC), 0);
    saved_stderr = dup(STDERR_FILENO);
    dup2(pipe_ends[1], STDERR_FILENO);
    close(pipe_ends[1]);
    int opened = log_open(LOG_INFO, true, NULL);
    for (int i = 0; i < LINES; i++)
        log_event(LOG_INFO, NULL, "a line of a length that fills the ring soon", "i", LOG_INT(i), NULL);
    pthread_t reader;
    void *result = NULL;
    pthread_create(&reader, NULL, read_all, &pipe_ends[0]);
    log_close();
    dup2(saved_stderr, STDERR_FILENO); /* the last write end: the reader sees the end */
    close(saved_stderr);
    pthread_join(reader, &result);
    close(pipe_ends[0]);
    char *text = result, *rest = text;
    assert_int_equal(opened, 0);
    assert_non_null(text);
    assert_true(count_lines(text) < LINES);
    json_int_t seen = 0, dropped = 0;
    for (char *line; (line = next_line(&rest)) != NULL;) {
        json_t *object = json_loads(line, 0, NULL);
        assert_non_null(object);
        bool tells = strcmp(json_string_value(json_object_get(object, "event")), "log lines dropped") == 0;
        dropped += json_integer_value(json_object_get(object, "count"));
        seen += !tells;
        json_decref(object);
    }
    assert_true(dropped > 0);
    assert_int_equal(seen + dropped, LINES);
    free(text);
}

/* A reader that never reads: log_close ends all the same. */
static void test_close_does_not_wait_for_ever(void **state) {
    (void)state;
    int pipe_ends[2];
    assert_int_equal(pipe2(pipe_ends, O_CLOEXEC), 0);
    saved_stderr = dup(STDERR_FILENO);
    dup2(pipe_ends[1], STDERR_FILENO);
    close(pipe_ends[1]);
    int opened = log_open(LOG_INFO, false, NULL);
    for (int i = 0; i < 5000; i++)
        log_event(LOG_INFO, NULL, "a line of a length that fills the pipe soon", "i", LOG_INT(i), NULL);
    log_close();
    dup2(saved_stderr, STDERR_FILENO);
    close(saved_stderr);
    close(pipe_ends[0]);
    assert_int_equal(opened, 0);
}

static void test_closed_standard_error(void **state) {
    (void)state;
    saved_stderr = dup(STDERR_FILENO);
    close(STDERR_FILENO);
    log_event(LOG_INFO, NULL, "nobody hears", NULL);
    int opened = log_open(LOG_INFO, false, NULL);
    log_event(LOG_INFO, NULL, "nobody hears", NULL);
    log_close();
    dup2(saved_stderr, STDERR_FILENO);
    close(saved_stderr);
    assert_int_equal(opened, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text_form),
        cmocka_unit_test(test_json_form),
        cmocka_unit_test(test_control_characters_and_bad_utf8),
        cmocka_unit_test(test_too_long),
        cmocka_unit_test(test_every_line_is_json_and_utf8),
        cmocka_unit_test(test_direct_before_open_and_after_close),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_drops_are_counted),
        cmocka_unit_test(test_close_does_not_wait_for_ever),
        cmocka_unit_test(test_closed_standard_error),
    };
    signal(SIGPIPE, SIG_IGN);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
