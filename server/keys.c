/* SPDX-License-Identifier: Apache-2.0 */
#include "server/keys.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

struct key {
    char *text;
    size_t length;
    double left; /* requests in the bucket, as of seen_s */
    double seen_s;
};

struct key_set {
    struct key *keys; /* [count] */
    size_t count, capacity;
    uint32_t per_minute;
};

/* --- Reading --- */

static bool key_is_sane(const char *text, size_t length) {
    if (length == 0 || length > KEY_MAX)
        return false;
    for (size_t i = 0; i < length; i++)
        if (text[i] < 0x21 || text[i] > 0x7e)
            return false;
    return true;
}

/* place: says in messages which key it is. */
static int keys_add(struct key_set *set, const char *text, size_t length, const char *place, struct error *error) {
    if (!key_is_sane(text, length))
        return error_set(
            error, ERROR_INVALID, "%s is not a key: it must be 1 to %d visible ASCII characters", place, KEY_MAX);
    if (set->count == set->capacity) {
        size_t capacity = set->capacity == 0 ? 8 : 2 * set->capacity;
        struct key *grown = realloc(set->keys, capacity * sizeof *grown);
        if (grown == NULL)
            return error_set(error, ERROR_MEMORY, "no memory for keys");
        set->keys = grown;
        set->capacity = capacity;
    }
    char *copy = strndup(text, length);
    if (copy == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for keys");
    set->keys[set->count++] = (struct key){.text = copy, .length = length, .left = set->per_minute};
    return 0;
}

static int keys_add_texts(struct key_set *set, const struct string_list *texts, struct error *error) {
    char place[64];
    for (size_t i = 0; i < texts->count; i++) {
        const char *text = texts->items[i];
        for (;;) {
            size_t length = strcspn(text, ",");
            snprintf(place, sizeof place, "api-key number %zu", set->count + 1);
            int code = keys_add(set, text, length, place, error);
            if (code != 0)
                return code;
            if (text[length] == '\0')
                break;
            text += length + 1;
        }
    }
    return 0;
}

static int keys_add_lines(struct key_set *set, char *text, const char *file, struct error *error) {
    char place[256];
    size_t before = set->count, number = 0;
    for (char *line = text, *next; line != NULL; line = next) {
        next = strchr(line, '\n');
        if (next != NULL)
            *next++ = '\0';
        number++;
        line += strspn(line, " \t\r");
        size_t length = strlen(line);
        while (length > 0 && strchr(" \t\r", line[length - 1]) != NULL)
            length--;
        if (length == 0 || line[0] == '#')
            continue;
        snprintf(place, sizeof place, "line %zu of api-key-file %.180s", number, file);
        int code = keys_add(set, line, length, place, error);
        if (code != 0)
            return code;
    }
    if (set->count == before)
        return error_set(error, ERROR_INVALID, "api-key-file %.180s has no key", file);
    return 0;
}

static int keys_add_file(struct key_set *set, const char *file, struct error *error) {
    FILE *in = fopen(file, "re");
    char *text = in == NULL ? NULL : malloc(KEYS_FILE_MAX + 1);
    int code;
    if (in == NULL)
        code = error_set(error, ERROR_IO, "cannot read api-key-file %.180s: %s", file, strerror(errno));
    else if (text == NULL)
        code = error_set(error, ERROR_MEMORY, "no memory for keys");
    else {
        size_t bytes = fread(text, 1, KEYS_FILE_MAX + 1, in);
        if (ferror(in))
            code = error_set(error, ERROR_IO, "cannot read api-key-file %.180s: %s", file, strerror(errno));
        else if (bytes > KEYS_FILE_MAX || memchr(text, '\0', bytes) != NULL)
            code = error_set(
                error, ERROR_INVALID, "api-key-file %.180s is no text of at most %d bytes", file, KEYS_FILE_MAX);
        else {
            text[bytes] = '\0';
            code = keys_add_lines(set, text, file, error);
        }
    }
    free(text);
    if (in != NULL)
        fclose(in);
    return code;
}

struct key_set *keys_create(
    const struct string_list *texts, const char *file, uint32_t per_minute, struct error *error) {
    struct key_set *set = calloc(1, sizeof *set);
    if (set == NULL) {
        error_set(error, ERROR_MEMORY, "no memory for keys");
        return NULL;
    }
    set->per_minute = per_minute;
    int code = keys_add_texts(set, texts, error);
    if (code == 0 && file[0] != '\0')
        code = keys_add_file(set, file, error);
    if (code == 0)
        return set;
    keys_free(set);
    return NULL;
}

struct key_set *keys_create_one(const char *option, const char *text, struct error *error) {
    struct key_set *set = calloc(1, sizeof *set);
    if (set == NULL)
        error_set(error, ERROR_MEMORY, "no memory for keys");
    else if (text[0] == '\0' || keys_add(set, text, strlen(text), option, error) == 0)
        return set;
    keys_free(set);
    return NULL;
}

void keys_free(struct key_set *set) {
    if (set == NULL)
        return;
    for (size_t i = 0; i < set->count; i++)
        free(set->keys[i].text);
    free(set->keys);
    free(set);
}

size_t keys_count(const struct key_set *set) {
    return set->count;
}

/* --- Checking --- */

/* Takes the same time whatever of the key is right. */
static bool key_equals(const struct key *key, const char *given, size_t given_length) {
    unsigned char difference = given_length != key->length;
    for (size_t i = 0; i < given_length; i++)
        difference |= (unsigned char)(given[i] ^ key->text[i % key->length]);
    return difference == 0;
}

int keys_check(const struct key_set *set, const char *authorization, const char *x_api_key, struct fault *fault) {
    const char *given = x_api_key;
    if (authorization != NULL) {
        if (strncasecmp(authorization, "Bearer ", 7) != 0)
            return fault_set(
                fault, 401, "invalid_api_key", NULL, "the Authorization header is not of the form 'Bearer KEY'");
        given = authorization + 7;
    }
    if (given == NULL)
        return fault_set(fault, 401, "invalid_api_key", NULL,
            "no key was given: send it as 'Authorization: Bearer KEY' or 'X-Api-Key: KEY'");
    given += strspn(given, " ");
    size_t length = strlen(given);
    int number = -1;
    for (size_t i = 0; i < set->count; i++)
        if (key_equals(&set->keys[i], given, length))
            number = (int)i;
    return number >= 0 ? number : fault_set(fault, 401, "invalid_api_key", NULL, "the key that was given is wrong");
}

int keys_take(struct key_set *set, int number, double now_s, struct fault *fault) {
    if (set->per_minute == 0 || number < 0)
        return 0;
    struct key *key = &set->keys[number];
    double limit = set->per_minute, per_second = limit / 60;
    if (key->seen_s > 0)
        key->left = fmin(limit, key->left + (now_s - key->seen_s) * per_second);
    key->seen_s = now_s;
    if (key->left >= 1) {
        key->left -= 1;
        return 0;
    }
    fault_set(fault, 429, "rate_limit_exceeded", NULL, "this key may send %u requests a minute", set->per_minute);
    fault->retry_after_ms = (unsigned)ceil((1 - key->left) / per_second * 1000);
    return -1;
}
