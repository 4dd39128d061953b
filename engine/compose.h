/* SPDX-License-Identifier: Apache-2.0
 *
 * Unicode's normalisation form C (NFC), which some models' texts are brought to before they become tokens.
 */
#ifndef ENGINE_COMPOSE_H
#define ENGINE_COMPOSE_H

#include <stddef.h>

/* The form of text [*bytes], which is valid UTF-8: allocated, with *bytes its length; NULL and *bytes as it is when the
 * text is in that form already. A run of more than 256 combining characters stays as it is. The time is O(n). 0 or
 * ERROR_MEMORY. Source: Unicode Standard Annex 15. */
int compose_text(const char *text, size_t *bytes, char **out);

#endif
