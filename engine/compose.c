/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/compose.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "engine/error.h"

/* Below it every character is composed, and none combines with one before it: a text may be cut in front of it. */
#define FIRST_COMBINING 0x300
#define COMBINING_RUN_MAX 256 /* utf8proc sorts a run in quadratic time */

static bool is_plain(unsigned char first) {
    return first < 0xcc; /* the first byte of U+0300 */
}

/* A part of text that may change: [*begin, end), the end being returned. *begin is the last plain character before its
 * first other one, bytes when there is none. */
static size_t find_part(const char *text, size_t bytes, size_t at, size_t *begin) {
    size_t last = at;
    for (; at < bytes && is_plain((unsigned char)text[at]); at++)
        if (((unsigned char)text[at] & 0xc0) != 0x80)
            last = at;
    *begin = at < bytes ? last : bytes;
    while (at < bytes && (!is_plain((unsigned char)text[at]) || ((unsigned char)text[at] & 0xc0) == 0x80))
        at++;
    return at;
}

/* The longest run of characters that combine. */
static bool has_long_run(const char *text, size_t bytes) {
    size_t run = 0;
    for (size_t at = 0; at < bytes;) {
        utf8proc_int32_t character;
        utf8proc_ssize_t used =
            utf8proc_iterate((const utf8proc_uint8_t *)text + at, (utf8proc_ssize_t)(bytes - at), &character);
        if (used <= 0)
            return true;
        run = utf8proc_get_property(character)->combining_class != 0 ? run + 1 : 0;
        if (run > COMBINING_RUN_MAX)
            return true;
        at += (size_t)used;
    }
    return false;
}

/* The form of one part; *changed stays NULL when it is in it already. */
static int compose_part(const char *text, size_t bytes, char **changed, size_t *length) {
    utf8proc_uint8_t *form = NULL;
    *changed = NULL;
    if (has_long_run(text, bytes))
        return 0;
    utf8proc_ssize_t written = utf8proc_map(
        (const utf8proc_uint8_t *)text, (utf8proc_ssize_t)bytes, &form, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (written == UTF8PROC_ERROR_NOMEM)
        return ERROR_MEMORY;
    if (written < 0 || ((size_t)written == bytes && memcmp(form, text, bytes) == 0)) {
        free(form);
        return 0;
    }
    *changed = (char *)form;
    *length = (size_t)written;
    return 0;
}

/* Text that is written so far; it begins to exist with the first change. */
struct composed {
    char *text;
    size_t length, capacity;
};

static int append(struct composed *out, const char *text, size_t bytes) {
    if (bytes > out->capacity - out->length) {
        size_t capacity = 2 * (out->length + bytes);
        char *larger = realloc(out->text, capacity);
        if (larger == NULL)
            return ERROR_MEMORY;
        out->text = larger;
        out->capacity = capacity;
    }
    memcpy(out->text + out->length, text, bytes);
    out->length += bytes;
    return 0;
}

int compose_text(const char *text, size_t *bytes, char **out) {
    struct composed composed = {0};
    size_t copied = 0; /* bytes of text that are written */
    int code = 0;
    for (size_t at = 0, begin; code == 0 && at < *bytes;) {
        size_t end = find_part(text, *bytes, at, &begin), length = 0;
        char *changed = NULL;
        if (begin < end)
            code = compose_part(text + begin, end - begin, &changed, &length);
        if (changed != NULL) {
            code = append(&composed, text + copied, begin - copied);
            if (code == 0)
                code = append(&composed, changed, length);
            free(changed);
            copied = end;
        }
        at = end;
    }
    *out = NULL;
    if (code == 0 && composed.text != NULL)
        code = append(&composed, text + copied, *bytes - copied);
    if (code != 0 || composed.text == NULL) {
        free(composed.text);
        return code;
    }
    *out = composed.text;
    *bytes = composed.length;
    return 0;
}
