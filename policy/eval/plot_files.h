/* SPDX-License-Identifier: Apache-2.0
 *
 * What plot.c, plot_positions.c and kept.c share: files of a folder, and names of variants.
 */
#ifndef POLICY_EVAL_PLOT_FILES_H
#define POLICY_EVAL_PLOT_FILES_H

#include <stdio.h>

#include "policy/eval/rows.h"

int plot_folder_create(const char *folder, struct error *error);
/* FOLDER/PREFIX-NAME.ENDING for writing; characters of the name that do not suit a file's name become '_'. */
FILE *plot_file_open(const char *folder, const char *prefix, const char *name, const char *ending, struct error *error);
int plot_file_close(FILE *file, const char *folder, struct error *error);

/* Whether it is the first variant of its policy: those that differ in the budget only share a line and a file. */
bool plot_is_first(const struct eval_setup *setup, uint32_t variant);
void plot_describe_budget(const struct eval_variant *variant, char *text, size_t size);

/* positions-LENGTH.svg of plot.h. */
int plot_positions(const char *folder, const struct eval_setup *setup, const struct eval_rows *rows, uint32_t length,
    struct error *error);

#endif
