/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/eval/plot.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "policy/eval/chart.h"
#include "policy/eval/plot_files.h"

/* What may be drawn of a row. */
struct value {
    const char *name, *label;
    bool log;
    bool (*read)(const struct eval_row *row, struct chart_point *point);
};

static void set_point(struct chart_point *point, const struct bootstrap_interval *interval) {
    point->y = interval->mean;
    point->low = interval->low;
    point->high = interval->high;
}

static bool read_kl(const struct eval_row *row, struct chart_point *point) {
    set_point(point, &row->kl);
    return row->has_kl;
}

static bool read_score(const struct eval_row *row, struct chart_point *point) {
    set_point(point, &row->score);
    return row->has_score;
}

static bool read_gold(const struct eval_row *row, struct chart_point *point) {
    set_point(point, &row->gold_logprob);
    return row->has_gold;
}

static const struct value values[] = {
    {.name = "kl", .label = "mean KL per step (nats)", .log = true, .read = read_kl},
    {.name = "score", .label = "score", .read = read_score},
    {.name = "gold_logprob", .label = "log-probability of the right answer (nats)", .read = read_gold},
};
enum { VALUES = sizeof values / sizeof values[0] };

/* ---- lines ---- */

static int compare_points(const void *a, const void *b) {
    double x = ((const struct chart_point *)a)->x, y = ((const struct chart_point *)b)->x;
    return (x > y) - (x < y);
}

/* Series with room for `points` each; one allocation behind the other. */
static struct chart_series *allocate_series(uint32_t count, uint32_t points, struct error *error) {
    struct chart_series *series = calloc(count, sizeof *series);
    struct chart_point *all = calloc((size_t)count * points, sizeof *all);
    if (series == NULL || all == NULL) {
        free(series);
        free(all);
        error_set(error, ERROR_MEMORY, "no memory for a plot");
        return NULL;
    }
    for (uint32_t i = 0; i < count; i++)
        series[i].points = all + (size_t)i * points;
    return series;
}

static int write_lines(const char *folder, const char *prefix, const char *name, struct chart *chart,
    struct chart_series *series, uint32_t count, struct error *error) {
    uint32_t used = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (series[i].count == 0)
            continue;
        qsort(series[i].points, series[i].count, sizeof *series[i].points, compare_points);
        series[used++] = series[i];
    }
    if (used == 0)
        return 0;
    chart->series = series;
    chart->count = used;
    FILE *file = plot_file_open(folder, prefix, name, "svg", error);
    if (file == NULL)
        return error->code;
    chart_write_lines(chart, file);
    return plot_file_close(file, folder, error);
}

static int plot_budget(const char *folder, const struct eval_setup *setup, const struct eval_rows *rows,
    const struct value *value, uint32_t length, struct error *error) {
    char title[200], name[64];
    uint32_t variants = setup->variants_count;
    struct chart_series *series = allocate_series(variants, variants, error);
    if (series == NULL)
        return error->code;
    struct chart_point *all = series[0].points;
    for (uint32_t v = 0; v < variants; v++) {
        const struct eval_row *row = eval_rows_find(rows, length, v);
        uint32_t line = 0;
        while (strcmp(setup->variants[line].policy, setup->variants[v].policy) != 0)
            line++;
        series[line].name = setup->variants[line].policy;
        struct chart_point point = {.x = row != NULL ? row->tokens_kept / row->tokens_seen : NAN};
        if (row != NULL && value->read(row, &point))
            series[line].points[series[line].count++] = point;
    }
    snprintf(title, sizeof title, "%s, length %u", setup->task, setup->lengths[length]);
    snprintf(name, sizeof name, "%s-%u", value->name, setup->lengths[length]);
    struct chart chart = {.title = title,
        .x_label = "part of the tokens kept at the end (mean over layers and heads)",
        .y_label = value->label,
        .log_x = true,
        .log_y = value->log};
    int code = write_lines(folder, "budget", name, &chart, series, variants, error);
    free(all);
    free(series);
    return code;
}

static int plot_length(const char *folder, const struct eval_setup *setup, const struct eval_rows *rows,
    const struct value *value, struct error *error) {
    uint32_t variants = setup->variants_count;
    struct chart_series *series = allocate_series(variants, setup->lengths_count, error);
    char(*names)[96] = calloc(variants, sizeof *names);
    if (series == NULL || names == NULL) {
        free(names);
        return error_set(error, ERROR_MEMORY, "no memory for a plot");
    }
    struct chart_point *all = series[0].points;
    for (uint32_t v = 0; v < variants; v++) {
        char budget[24];
        plot_describe_budget(&setup->variants[v], budget, sizeof budget);
        snprintf(names[v], sizeof names[v], "%.60s %s", setup->variants[v].policy, budget);
        series[v].name = names[v];
        for (uint32_t length = 0; length < setup->lengths_count; length++) {
            const struct eval_row *row = eval_rows_find(rows, length, v);
            struct chart_point point = {.x = setup->lengths[length]};
            if (row != NULL && value->read(row, &point))
                series[v].points[series[v].count++] = point;
        }
    }
    struct chart chart = {.title = setup->task,
        .x_label = "length (tokens)",
        .y_label = value->label,
        .log_x = true,
        .log_y = value->log};
    int code = write_lines(folder, "length", value->name, &chart, series, variants, error);
    free(all);
    free(series);
    free(names);
    return code;
}

/* ---- maps ---- */

/* Mean of the maps of a variant at one length: out [layers * KEPT_BINS]; false: there is none. */
static bool mean_map(const struct eval_setup *setup, const struct eval_results *results, uint32_t length,
    uint32_t variant, double *out) {
    size_t cells = (size_t)setup->layers * KEPT_BINS, count = 0;
    memset(out, 0, cells * sizeof *out);
    for (size_t i = 0; i < results->count; i++) {
        const struct eval_result *result = &results->list[i];
        if (result->length != length || result->variant != variant || result->kept == NULL)
            continue;
        for (size_t c = 0; c < cells; c++)
            out[c] += (result->kept[c] - '0') / 63.0;
        count++;
    }
    for (size_t c = 0; c < cells && count > 0; c++)
        out[c] /= (double)count;
    return count > 0;
}

/* Depths are the groups "depth D" in order of appearance: rows; lengths: columns. */
static uint32_t list_depths(const struct eval_rows *rows, const char **depths, uint32_t most) {
    uint32_t count = 0;
    for (size_t i = 0; i < rows->groups_count; i++) {
        const char *group = rows->groups[i].group;
        bool known = strncmp(group, "depth ", 6) != 0 || count == most;
        for (uint32_t d = 0; d < count && !known; d++)
            known = strcmp(depths[d], group) == 0;
        if (!known)
            depths[count++] = group;
    }
    return count;
}

static bool depth_map(const struct eval_setup *setup, const struct eval_rows *rows, const char *const *depths,
    uint32_t depths_count, uint32_t variant, double *out) {
    bool any = false;
    for (size_t c = 0; c < (size_t)depths_count * setup->lengths_count; c++)
        out[c] = NAN;
    for (size_t i = 0; i < rows->groups_count; i++) {
        const struct eval_row *row = &rows->groups[i];
        for (uint32_t d = 0; d < depths_count; d++) {
            if (row->variant != variant || !row->has_score || strcmp(row->group, depths[d]) != 0)
                continue;
            out[(size_t)d * setup->lengths_count + row->length] = row->score.mean;
            any = true;
        }
    }
    return any;
}

/* One file a policy, with a map for each of its budgets. */
struct maps_plot {
    const char *prefix;
    struct chart_maps chart;
    uint32_t rows, columns;
    double *values; /* [variants][rows][columns] */
    bool *present;  /* [variants] */
};

static int write_policy_maps(
    const char *folder, const struct eval_setup *setup, struct maps_plot *plot, uint32_t policy, struct error *error) {
    struct chart_map *maps = calloc(setup->variants_count, sizeof *maps);
    char(*titles)[32] = calloc(setup->variants_count, sizeof *titles);
    char title[200];
    int code = 0;
    if (maps == NULL || titles == NULL)
        code = error_set(error, ERROR_MEMORY, "no memory for a plot");
    uint32_t count = 0;
    for (uint32_t v = policy; v < setup->variants_count && code == 0; v++) {
        if (!plot->present[v] || strcmp(setup->variants[v].policy, setup->variants[policy].policy) != 0)
            continue;
        plot_describe_budget(&setup->variants[v], titles[count], sizeof titles[count]);
        maps[count] = (struct chart_map){.title = titles[count],
            .values = plot->values + (size_t)v * plot->rows * plot->columns,
            .rows = plot->rows,
            .columns = plot->columns};
        count++;
    }
    if (code == 0 && count > 0) {
        snprintf(title, sizeof title, "%s, %.100s, by budget", setup->task, setup->variants[policy].policy);
        plot->chart.title = title;
        plot->chart.maps = maps;
        plot->chart.count = count;
        FILE *file = plot_file_open(folder, plot->prefix, setup->variants[policy].policy, "svg", error);
        if (file != NULL)
            chart_write_maps(&plot->chart, file);
        code = file != NULL ? plot_file_close(file, folder, error) : error->code;
    }
    free(maps);
    free(titles);
    return code;
}

static int write_maps(const char *folder, const struct eval_setup *setup, struct maps_plot *plot, struct error *error) {
    int code = 0;
    for (uint32_t v = 0; v < setup->variants_count && code == 0; v++)
        if (plot_is_first(setup, v))
            code = write_policy_maps(folder, setup, plot, v, error);
    return code;
}

static int allocate_maps(const struct eval_setup *setup, struct maps_plot *plot, struct error *error) {
    plot->values = calloc((size_t)setup->variants_count * plot->rows * plot->columns + 1, sizeof *plot->values);
    plot->present = calloc(setup->variants_count, sizeof *plot->present);
    return plot->values == NULL || plot->present == NULL ? error_set(error, ERROR_MEMORY, "no memory for plots") : 0;
}

static int plot_retained(
    const char *folder, const struct eval_setup *setup, const struct eval_results *results, struct error *error) {
    char last[16];
    uint32_t longest = 0;
    for (uint32_t i = 1; i < setup->lengths_count; i++)
        longest = setup->lengths[i] > setup->lengths[longest] ? i : longest;
    snprintf(last, sizeof last, "%u", setup->layers - 1);
    struct maps_plot plot = {.prefix = "retained",
        .rows = setup->layers,
        .columns = KEPT_BINS,
        .chart = {.x_label = "position in the prompt; dark: kept by all heads",
            .y_label = "layer",
            .first_row = "0",
            .last_row = last,
            .first_column = "begin",
            .last_column = "end"}};
    int code = allocate_maps(setup, &plot, error);
    for (uint32_t v = 0; v < setup->variants_count && code == 0; v++)
        plot.present[v] = mean_map(setup, results, longest, v, plot.values + (size_t)v * plot.rows * plot.columns);
    if (code == 0)
        code = write_maps(folder, setup, &plot, error);
    free(plot.values);
    free(plot.present);
    return code;
}

static int plot_depth(
    const char *folder, const struct eval_setup *setup, const struct eval_rows *rows, struct error *error) {
    const char *depths[16];
    uint32_t count = list_depths(rows, depths, 16);
    char first[16], last[16];
    if (count == 0)
        return 0;
    snprintf(first, sizeof first, "%u", setup->lengths[0]);
    snprintf(last, sizeof last, "%u", setup->lengths[setup->lengths_count - 1]);
    struct maps_plot plot = {.prefix = "depth",
        .rows = count,
        .columns = setup->lengths_count,
        .chart = {.x_label = "length (tokens); dark: right",
            .y_label = "depth",
            .first_row = depths[0] + 6,
            .last_row = depths[count - 1] + 6,
            .first_column = first,
            .last_column = setup->lengths_count > 1 ? last : "",
            .numbers = true}};
    int code = allocate_maps(setup, &plot, error);
    for (uint32_t v = 0; v < setup->variants_count && code == 0; v++)
        plot.present[v] = depth_map(setup, rows, depths, count, v, plot.values + (size_t)v * plot.rows * plot.columns);
    if (code == 0)
        code = write_maps(folder, setup, &plot, error);
    free(plot.values);
    free(plot.present);
    return code;
}

int eval_plot_write(const char *folder, const struct eval_setup *setup, const struct eval_results *results,
    const struct eval_rows *rows, struct error *error) {
    int code = plot_folder_create(folder, error);
    for (int i = 0; i < VALUES && code == 0; i++) {
        for (uint32_t length = 0; length < setup->lengths_count && code == 0; length++)
            code = plot_budget(folder, setup, rows, &values[i], length, error);
        if (code == 0 && setup->lengths_count > 1)
            code = plot_length(folder, setup, rows, &values[i], error);
    }
    for (uint32_t length = 0; length < setup->lengths_count && code == 0; length++)
        code = plot_positions(folder, setup, rows, length, error);
    if (code == 0)
        code = plot_retained(folder, setup, results, error);
    return code == 0 ? plot_depth(folder, setup, rows, error) : code;
}
