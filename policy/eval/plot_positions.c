/* SPDX-License-Identifier: Apache-2.0
 *
 * How many layers and heads keep a prompt's first tokens, and the others by their distance from its end.
 */
#include "policy/eval/plot_files.h"

#include <math.h>
#include <stdlib.h>

#include "policy/eval/chart.h"

enum { CHARTS = 2 };

/* The series of one variant, and its points. */
struct line {
    char name[96];
    struct chart_point first[KEPT_FIRST], distance[KEPT_DISTANCES];
};

static void add_point(struct chart_series *series, double x, double y) {
    if (!isnan(y))
        series->points[series->count++] = (struct chart_point){x, y, y, y};
}

static void fill_line(const struct eval_variant *variant, const struct eval_positions *positions, struct line *line,
    struct chart_series *first, struct chart_series *distance) {
    char budget[24];
    plot_describe_budget(variant, budget, sizeof budget);
    snprintf(line->name, sizeof line->name, "%.60s %s", variant->policy, budget);
    *first = (struct chart_series){.name = line->name, .points = line->first};
    *distance = (struct chart_series){.name = line->name, .points = line->distance};
    for (uint32_t i = 0; i < KEPT_FIRST; i++)
        add_point(first, i, positions->first[i]);
    for (uint32_t n = 0; n < KEPT_DISTANCES; n++)
        add_point(distance, n == 0 ? 1 : 0.75 * (1u << n), positions->distance[n]); /* middles of the ranges */
}

static int write_charts(const char *folder, const struct eval_setup *setup, uint32_t length,
    const struct chart charts[CHARTS], struct error *error) {
    char name[16];
    snprintf(name, sizeof name, "%u", setup->lengths[length]);
    FILE *file = plot_file_open(folder, "positions", name, "svg", error);
    if (file == NULL)
        return error->code;
    chart_write_stack(charts, CHARTS, file);
    return plot_file_close(file, folder, error);
}

int plot_positions(const char *folder, const struct eval_setup *setup, const struct eval_rows *rows, uint32_t length,
    struct error *error) {
    uint32_t variants = setup->variants_count, count = 0;
    struct line *lines = calloc(variants, sizeof *lines);
    struct chart_series *series = calloc((size_t)CHARTS * variants, sizeof *series);
    int code = lines == NULL || series == NULL ? error_set(error, ERROR_MEMORY, "no memory for a plot") : 0;
    for (uint32_t v = 1; v < variants && code == 0; v++) { /* full keeps everything */
        const struct eval_row *row = eval_rows_find(rows, length, v);
        if (row == NULL || !row->positions.present)
            continue;
        fill_line(&setup->variants[v], &row->positions, &lines[count], &series[count], &series[variants + count]);
        count++;
    }
    const struct chart charts[CHARTS] = {
        {.title = "first tokens of the prompt",
            .x_label = "position",
            .y_label = "part of layers and heads that keep the token",
            .series = series,
            .count = count},
        {.title = "the other tokens of the prompt",
            .x_label = "distance from the end (1: the newest)",
            .y_label = "part of layers and heads that keep the token",
            .log_x = true,
            .series = series + (code == 0 ? variants : 0),
            .count = count},
    };
    if (code == 0 && count > 0)
        code = write_charts(folder, setup, length, charts, error);
    free(lines);
    free(series);
    return code;
}
