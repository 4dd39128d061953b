/* SPDX-License-Identifier: Apache-2.0
 *
 * The curves of a training as one SVG: what was measured over the steps.
 */
#ifndef COMMANDS_TRAIN_PLOT_H
#define COMMANDS_TRAIN_PLOT_H

#include "policy/train/train.h"

struct train_plot {             /* zero-initialise */
    struct train_event *events; /* metrics; texts are not kept */
    size_t count, capacity;
};
int train_plot_add(struct train_plot *plot, const struct train_event *event); /* 0 or ERROR_MEMORY */
/* ERROR_IO, ERROR_MEMORY. Nothing measured: a chart without points. */
int train_plot_write(const struct train_plot *plot, const char *file, struct error *error);
void train_plot_free(struct train_plot *plot);

#endif
