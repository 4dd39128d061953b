/* SPDX-License-Identifier: Apache-2.0 */
#include "commands/train_plot.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "policy/eval/chart.h"

/* A chart of the image, and what it shows; left out where nothing was measured. */
struct curve {
    const char *title, *label;
    size_t offset;
    bool log;
};

static const struct curve curves[] = {
    {"loss", "cross-entropy, nats", offsetof(struct train_event, loss), false},
    {"reward", "mean per step", offsetof(struct train_event, reward), false},
    {"entropy", "surrogate, nats per kept slot", offsetof(struct train_event, entropy), false},
    {"held-out KL", "geometric mean, nats", offsetof(struct train_event, kl_valid), true},
    {"held-out KL, as a part of h2o's", "geometric mean, paired", offsetof(struct train_event, kl_valid_relative),
        false},
};
enum { CURVES = sizeof curves / sizeof curves[0] };

int train_plot_add(struct train_plot *plot, const struct train_event *event) {
    if (plot->count == plot->capacity) {
        size_t capacity = plot->capacity == 0 ? 256 : 2 * plot->capacity;
        struct train_event *grown = reallocarray(plot->events, capacity, sizeof *grown);
        if (grown == NULL)
            return ERROR_MEMORY;
        plot->events = grown;
        plot->capacity = capacity;
    }
    plot->events[plot->count] = *event;
    plot->events[plot->count].message = plot->events[plot->count].stage = plot->events[plot->count].file = NULL;
    plot->count++;
    return 0;
}

void train_plot_free(struct train_plot *plot) {
    free(plot->events);
    *plot = (struct train_plot){0};
}

static uint32_t collect(const struct train_plot *plot, const struct curve *curve, struct chart_point *points) {
    uint32_t count = 0;
    for (size_t i = 0; i < plot->count; i++) {
        double value = *(const double *)((const char *)&plot->events[i] + curve->offset);
        if (!isnan(value))
            points[count++] = (struct chart_point){(double)plot->events[i].step, value, value, value};
    }
    return count;
}

int train_plot_write(const struct train_plot *plot, const char *file, struct error *error) {
    struct chart charts[CURVES];
    struct chart_series series[CURVES];
    uint32_t count = 0;
    struct chart_point *points = calloc(CURVES * plot->count + 1, sizeof *points);
    if (points == NULL)
        return error_set(error, ERROR_MEMORY, "no memory for a plot");
    for (int i = 0; i < CURVES; i++) {
        struct chart_point *own = points + (size_t)i * plot->count;
        uint32_t there = collect(plot, &curves[i], own);
        if (there == 0 && !(i == CURVES - 1 && count == 0))
            continue;
        series[count] = (struct chart_series){.name = curves[i].title, .points = own, .count = there};
        charts[count] = (struct chart){.title = curves[i].title,
            .x_label = "step",
            .y_label = curves[i].label,
            .log_y = curves[i].log,
            .series = &series[count],
            .count = 1};
        count++;
    }
    FILE *out = fopen(file, "we");
    if (out != NULL)
        chart_write_stack(charts, count, out);
    bool failed = out == NULL || ferror(out) != 0;
    if (out != NULL && fclose(out) != 0)
        failed = true;
    free(points);
    return failed ? error_set(error, ERROR_IO, "cannot write %.300s: %s", file, strerror(errno)) : 0;
}
