/* SPDX-License-Identifier: Apache-2.0
 *
 * Files that are whole or as they were, whatever happens: written under FILE.tmp, synced, renamed to FILE, and the
 * folder synced.
 */
#ifndef ENGINE_REPLACE_FILE_H
#define ENGINE_REPLACE_FILE_H

#include "engine/error.h"

#include <stdbool.h>
#include <stdio.h>

/* write fills the file: false when it failed, with errno. ERROR_IO says what failed; ERROR_MEMORY. */
int replace_file(const char *file, bool (*write)(void *context, FILE *out), void *context, struct error *error);

#endif
