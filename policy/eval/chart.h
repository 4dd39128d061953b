/* SPDX-License-Identifier: Apache-2.0
 *
 * A line chart and a heat map as SVG. Texts are escaped; the output is well-formed XML whatever they are.
 */
#ifndef POLICY_EVAL_CHART_H
#define POLICY_EVAL_CHART_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct chart_point {
    double x, y;
    double low, high; /* error bar; equal: none */
};

struct chart_series {
    const char *name;
    struct chart_point *points;
    uint32_t count;
};

struct chart {
    const char *title, *x_label, *y_label;
    bool log_x, log_y; /* points that are not positive are left out there */
    const struct chart_series *series;
    uint32_t count;
};

void chart_write_lines(const struct chart *chart, FILE *out);
/* Several in one image, one below the other. */
void chart_write_stack(const struct chart *charts, uint32_t count, FILE *out);

/* Values in [0, 1]; NaN: a cell without one. */
struct chart_map {
    const char *title;
    const double *values; /* [rows][columns] */
    uint32_t rows, columns;
};

struct chart_maps {
    const char *title, *x_label, *y_label;
    const char *first_row, *last_row, *first_column, *last_column; /* what stands at the ends of the axes */
    const struct chart_map *maps;                                  /* side by side, the first row at the top */
    uint32_t count;
    bool numbers; /* write values into the cells */
};

void chart_write_maps(const struct chart_maps *maps, FILE *out);

/* Writes text with XML's special characters escaped; bytes that XML does not allow become '?'. */
void chart_write_text(const char *text, FILE *out);

#endif
