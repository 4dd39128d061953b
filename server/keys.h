/* SPDX-License-Identifier: Apache-2.0
 *
 * Keys: who is let in, and how often.
 *
 * A client sends its key as `Authorization: Bearer KEY` or as `X-Api-Key: KEY`; with both, the first counts. A key is 1
 * to KEY_MAX visible ASCII characters. Comparisons take the same time for every key of the set,
 * whatever of it is right (its length may show). Keys are never logged and appear in no answer.
 *
 * Rates: each key has a bucket of `per_minute` requests that fills evenly within a minute and begins full; a request
 * takes one. So a key that was idle may send per_minute at once, and in any longer time the rate holds.
 *
 * All functions are for one thread.
 */
#ifndef SERVER_KEYS_H
#define SERVER_KEYS_H

#include "config/config.h"
#include "server/fault.h"

enum { KEY_MAX = 1024, KEYS_FILE_MAX = 1 << 20 /* bytes */ };

struct key_set; /* opaque */

/* Reads keys from texts (each may hold several, separated by commas) and from a file: one a line, blanks around it do
 * not count, empty lines and those that begin with # are left out. file: empty for none. ERROR_IO: the file cannot be
 * read; ERROR_INVALID: it has no key, or a key is none (told by its place, not its text); ERROR_MEMORY. per_minute: 0
 * for no limit. */
struct key_set *keys_create(
    const struct string_list *texts, const char *file, uint32_t per_minute, struct error *error);
/* Of one key without a limit, or of none if the text is empty. option: where it comes from, for messages. */
struct key_set *keys_create_one(const char *option, const char *text, struct error *error);
void keys_free(struct key_set *keys); /* NULL allowed */

size_t keys_count(const struct key_set *keys); /* 0: everybody is let in */

/* The number of the key that these headers (NULL: absent) give, or -1 and a 401. */
int keys_check(const struct key_set *keys, const char *authorization, const char *x_api_key, struct fault *fault);

/* Takes a request of key `number` from its bucket: 0, or -1 and a 429 that says when there will be one. now_s: of any
 * clock that does not go back. */
int keys_take(struct key_set *keys, int number, double now_s, struct fault *fault);

#endif
