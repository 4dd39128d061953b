/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/log_line.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <utf8proc.h>

/* Room that only the end of a line may use: the mark of truncation, the brace, the newline. */
enum { LINE_RESERVE = 32 };

static const char *const level_names[] = {"debug", "info", "warning", "error"};

/* Appends bytes, or nothing when they do not fit before the reserve. */
static bool put_bytes(struct log_line *line, const char *bytes, size_t length) {
    if (line->length + length > LOG_LINE_MAX - LINE_RESERVE)
        return false;
    memcpy(line->text + line->length, bytes, length);
    line->length += length;
    return true;
}

static bool put_text(struct log_line *line, const char *text) {
    return put_bytes(line, text, strlen(text));
}

/* Reads one character; *used: its bytes. A byte that is not UTF-8 reads as U+FFFD. */
static int32_t read_character(const char *text, size_t rest, size_t *used) {
    utf8proc_int32_t code;
    utf8proc_ssize_t length =
        utf8proc_iterate((const utf8proc_uint8_t *)text, rest < 4 ? (utf8proc_ssize_t)rest : 4, &code);
    *used = length > 0 ? (size_t)length : 1;
    return length > 0 ? code : 0xfffd;
}

/* Escaped besides " and \: whatever a terminal or a reader of lines may act upon. */
static bool is_control(int32_t code) {
    return code < 0x20 || (code >= 0x7f && code < 0xa0) || code == 0x2028 || code == 0x2029;
}

/* A character as it stands inside a JSON string. Returns its length. */
static size_t escape_character(int32_t code, const char *text, size_t used, char out[static 8]) {
    if (code == '"' || code == '\\')
        return (size_t)snprintf(out, 8, "\\%c", (char)code);
    if (code == '\n')
        return (size_t)snprintf(out, 8, "\\n");
    if (is_control(code))
        return (size_t)snprintf(out, 8, "\\u%04x", (unsigned)code);
    if (code == 0xfffd)
        return (size_t)snprintf(out, 8, "\xef\xbf\xbd");
    memcpy(out, text, used);
    return used;
}

/* The escaped text, without quotes around it. */
static bool put_escaped(struct log_line *line, const char *text) {
    size_t rest = strlen(text), begin = line->length;
    while (rest > 0) {
        size_t used;
        char escaped[8];
        int32_t code = read_character(text, rest, &used);
        size_t length = escape_character(code, text, used, escaped);
        if (line->length - begin + length > LOG_STRING_MAX - 3)
            return put_text(line, "...");
        if (!put_bytes(line, escaped, length))
            return false;
        text += used;
        rest -= used;
    }
    return true;
}

static bool put_quoted(struct log_line *line, const char *text) {
    return put_text(line, "\"") && put_escaped(line, text) && put_text(line, "\"");
}

/* Whether a string can stand in a text line without quotes. */
static bool is_plain(const char *text) {
    if (*text == '\0')
        return false;
    for (; *text != '\0'; text++)
        if ((unsigned char)*text <= ' ' || (unsigned char)*text >= 0x7f || strchr("\"\\=", *text) != NULL)
            return false;
    return true;
}

static bool put_string(struct log_line *line, bool json, const char *text) {
    if (text == NULL)
        return put_text(line, "null");
    return json || !is_plain(text) || strcmp(text, "null") == 0 ? put_quoted(line, text) : put_escaped(line, text);
}

static bool put_value(struct log_line *line, bool json, const struct log_value *value) {
    char number[40];
    if (value == NULL)
        return put_text(line, "null");
    switch (value->kind) {
    case LOG_VALUE_STRING:
        return put_string(line, json, value->string);
    case LOG_VALUE_INT:
        snprintf(number, sizeof number, "%" PRId64, value->integer);
        return put_text(line, number);
    case LOG_VALUE_FLOAT:
        if (json && !isfinite(value->number)) /* JSON has no such numbers */
            return put_text(line, "null");
        snprintf(number, sizeof number, "%.9g", value->number);
        return put_text(line, number);
    case LOG_VALUE_BOOL:
        return put_text(line, value->integer != 0 ? "true" : "false");
    }
    return put_text(line, "null");
}

static bool put_key(struct log_line *line, bool json, const char *key) {
    if (json)
        return put_text(line, ",") && put_quoted(line, key) && put_text(line, ":");
    return put_text(line, " ") && put_escaped(line, key) && put_text(line, "=");
}

/* A whole pair, or nothing of it. */
static bool put_pair(struct log_line *line, bool json, const char *key, const struct log_value *value) {
    size_t before = line->length;
    if (put_key(line, json, key) && put_value(line, json, value))
        return true;
    line->length = before;
    return false;
}

static void put_time(struct log_line *line, int64_t milliseconds) {
    time_t seconds = (time_t)(milliseconds / 1000);
    struct tm utc;
    char text[64] = "1970-01-01T00:00:00.000Z";
    if (gmtime_r(&seconds, &utc) != NULL)
        snprintf(text, sizeof text, "%04d-%02d-%02dT%02d:%02d:%02d.%03dZ", utc.tm_year + 1900, utc.tm_mon + 1,
            utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec, (int)(milliseconds % 1000));
    put_text(line, text);
}

static void put_head(struct log_line *line, bool json, int64_t milliseconds, enum log_level level, const char *event) {
    if (json)
        put_text(line, "{\"time\":\"");
    put_time(line, milliseconds);
    put_text(line, json ? "\",\"level\":\"" : " ");
    put_text(line, level_names[level]);
    put_text(line, json ? "\",\"event\":\"" : " ");
    put_escaped(line, event);
    if (json)
        put_text(line, "\"");
}

void log_line_format(struct log_line *line, bool json, int64_t milliseconds, enum log_level level, const char *id,
    const char *event, va_list pairs) {
    line->length = 0;
    put_head(line, json, milliseconds, level, event != NULL ? event : "");
    bool complete = id == NULL || put_pair(line, json, "id", LOG_STRING(id));
    for (const char *key; (key = va_arg(pairs, const char *)) != NULL;) {
        const struct log_value *value = va_arg(pairs, const struct log_value *);
        if (!put_pair(line, json, key, value))
            complete = false;
    }
    /* These fit: put_bytes left the reserve free. */
    const char *end = json ? (complete ? "}\n" : ",\"truncated\":true}\n") : (complete ? "\n" : " truncated=true\n");
    memcpy(line->text + line->length, end, strlen(end));
    line->length += strlen(end);
}
