/* SPDX-License-Identifier: Apache-2.0 */
#include "server/buffer.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void buffer_free(struct buffer *buffer) {
    free(buffer->data);
    *buffer = (struct buffer){0};
}

/* Makes room for count more bytes. */
static bool buffer_reserve(struct buffer *buffer, size_t count) {
    if (buffer->failed || count > SIZE_MAX / 4 - buffer->length) {
        buffer->failed = true;
        return false;
    }
    if (buffer->length + count <= buffer->capacity)
        return true;
    size_t capacity = buffer->capacity < 256 ? 256 : buffer->capacity * 2;
    if (capacity < buffer->length + count)
        capacity = buffer->length + count;
    char *data = realloc(buffer->data, capacity);
    if (data == NULL) {
        buffer->failed = true;
        return false;
    }
    buffer->data = data;
    buffer->capacity = capacity;
    return true;
}

void buffer_append(struct buffer *buffer, const char *data, size_t count) {
    if (count == 0 || !buffer_reserve(buffer, count))
        return;
    memcpy(buffer->data + buffer->length, data, count);
    buffer->length += count;
}

void buffer_string(struct buffer *buffer, const char *string) {
    buffer_append(buffer, string, strlen(string));
}

void buffer_format(struct buffer *buffer, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (length < 0 || !buffer_reserve(buffer, (size_t)length + 1)) {
        buffer->failed = true;
        return;
    }
    va_start(arguments, format);
    vsnprintf(buffer->data + buffer->length, (size_t)length + 1, format, arguments);
    va_end(arguments);
    buffer->length += (size_t)length;
}

void buffer_consume(struct buffer *buffer, size_t count) {
    if (count >= buffer->length) {
        buffer->length = 0;
        return;
    }
    memmove(buffer->data, buffer->data + count, buffer->length - count);
    buffer->length -= count;
}

/* First byte of a character -> its length and the range of its second byte; 0 when it starts none. */
static int utf8_lead(unsigned char lead, unsigned char *low, unsigned char *high) {
    *low = 0x80;
    *high = 0xBF;
    if (lead >= 0xC2 && lead <= 0xDF)
        return 2;
    if (lead >= 0xE0 && lead <= 0xEF) {
        if (lead == 0xE0)
            *low = 0xA0;
        if (lead == 0xED)
            *high = 0x9F;
        return 3;
    }
    if (lead >= 0xF0 && lead <= 0xF4) {
        if (lead == 0xF0)
            *low = 0x90;
        if (lead == 0xF4)
            *high = 0x8F;
        return 4;
    }
    return 0;
}

int utf8_next(const char *text, size_t bytes) {
    const unsigned char *s = (const unsigned char *)text;
    if (s[0] < 0x80)
        return 1;
    unsigned char low, high;
    int length = utf8_lead(s[0], &low, &high);
    if (length == 0)
        return -1;
    for (int i = 1; i < length; i++) {
        if ((size_t)i >= bytes || s[i] < low || s[i] > high)
            return -i;
        low = 0x80;
        high = 0xBF;
    }
    return length;
}

bool utf8_valid(const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes;) {
        int length = utf8_next(text + i, bytes - i);
        if (length < 0)
            return false;
        i += (size_t)length;
    }
    return true;
}

size_t utf8_count(const char *text, size_t bytes) {
    size_t count = 0;
    for (size_t i = 0; i < bytes; count++)
        i += (size_t)abs(utf8_next(text + i, bytes - i));
    return count;
}

static void buffer_json_escape(struct buffer *buffer, unsigned char byte) {
    switch (byte) {
    case '"':
        buffer_append(buffer, "\\\"", 2);
        break;
    case '\\':
        buffer_append(buffer, "\\\\", 2);
        break;
    case '\n':
        buffer_append(buffer, "\\n", 2);
        break;
    case '\r':
        buffer_append(buffer, "\\r", 2);
        break;
    case '\t':
        buffer_append(buffer, "\\t", 2);
        break;
    default:
        buffer_format(buffer, "\\u%04x", byte);
    }
}

void buffer_json_string(struct buffer *buffer, const char *text, size_t bytes) {
    buffer_append(buffer, "\"", 1);
    size_t start = 0; /* of the run that can be copied as it is */
    for (size_t i = 0; i < bytes;) {
        unsigned char byte = (unsigned char)text[i];
        bool plain = byte >= 0x20 && byte != '"' && byte != '\\' && byte != 0x7F;
        int length = utf8_next(text + i, bytes - i);
        if (plain && length > 0) {
            i += (size_t)length;
            continue;
        }
        buffer_append(buffer, text + start, i - start);
        if (length < 0)
            buffer_append(buffer, "\xEF\xBF\xBD", 3);
        else
            buffer_json_escape(buffer, byte);
        i += (size_t)abs(length);
        start = i;
    }
    if (start < bytes) /* an empty text may be NULL */
        buffer_append(buffer, text + start, bytes - start);
    buffer_append(buffer, "\"", 1);
}

void buffer_json_cstring(struct buffer *buffer, const char *text) {
    if (text == NULL)
        buffer_string(buffer, "null");
    else
        buffer_json_string(buffer, text, strlen(text));
}

void buffer_json_logprob(struct buffer *buffer, double value) {
    if (isnan(value) || value < -9999.0)
        value = -9999.0;
    if (value > 9999.0)
        value = 9999.0;
    buffer_format(buffer, "%.9g", value == 0.0 ? 0.0 : value);
}
