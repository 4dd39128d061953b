/* SPDX-License-Identifier: Apache-2.0
 *
 * The configuration file: YAML, a mapping from option keys (kv_memory) to values. A list is a sequence, or one scalar
 * with commas. The file may hold options of every command; those of other commands are checked all the same.
 */
#ifndef CONFIG_FILE_H
#define CONFIG_FILE_H

#include "config/config.h"

#define CONFIG_FILE_MAX (1024 * 1024) /* bytes */

/* Reads a file into config. ERROR_IO, ERROR_MEMORY; ERROR_INVALID with file, line, key, value and what is allowed: bad
 * YAML or UTF-8, an unknown or repeated key, a key without a value, a mapping, an anchor, alias or tag, a value that
 * its option does not allow. */
int config_file_apply(const char *path, struct config *config, struct error *error);

/* The same from memory; name stands for the file in messages. */
int config_file_apply_text(
    const char *text, size_t length, const char *name, struct config *config, struct error *error);

#endif
