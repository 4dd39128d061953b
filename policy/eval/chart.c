/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/eval/chart.h"

#include <math.h>
#include <string.h>
#include <utf8proc.h>

enum { WIDTH = 900, HEIGHT = 520, LEFT = 80, TOP = 50, RIGHT = 240, BOTTOM = 60, TICKS = 5 };

static bool is_allowed(utf8proc_int32_t code) {
    return code >= 0x20 ? code != 0xfffe && code != 0xffff && !(code >= 0xd800 && code < 0xe000)
                        : code == '\t' || code == '\n';
}

void chart_write_text(const char *text, FILE *out) {
    size_t rest = strlen(text);
    while (rest > 0) {
        utf8proc_int32_t code;
        utf8proc_ssize_t used =
            utf8proc_iterate((const utf8proc_uint8_t *)text, rest < 4 ? (utf8proc_ssize_t)rest : 4, &code);
        if (used <= 0 || !is_allowed(code)) {
            used = used <= 0 ? 1 : used;
            fputc('?', out);
        } else if (code == '<' || code == '>' || code == '&' || code == '"') {
            fputs(code == '<' ? "&lt;" : code == '>' ? "&gt;" : code == '&' ? "&amp;" : "&quot;", out);
        } else {
            fwrite(text, 1, (size_t)used, out);
        }
        text += used;
        rest -= (size_t)used;
    }
}

static void begin(double width, double height, FILE *out) {
    fprintf(out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 %.0f %.0f\" "
        "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
        width, height, width, height);
}

static void write_label(double x, double y, const char *anchor, const char *extra, const char *text, FILE *out) {
    fprintf(out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\"%s>", x, y, anchor, extra);
    chart_write_text(text, out);
    fputs("</text>\n", out);
}

/* ---- lines ---- */

struct axis {
    bool log;
    double low, high; /* after the logarithm */
    double from, to;  /* pixels */
};

static double scaled(const struct axis *axis, double value) {
    return axis->log ? log10(value) : value;
}

static bool can_place(const struct axis *axis, double value) {
    return isfinite(value) && (!axis->log || value > 0);
}

static double place(const struct axis *axis, double value) {
    double part = (scaled(axis, value) - axis->low) / (axis->high - axis->low);
    part = part < 0 ? 0 : part > 1 ? 1 : part;
    return axis->from + part * (axis->to - axis->from);
}

static void widen(struct axis *axis, double value) {
    if (!can_place(axis, value))
        return;
    axis->low = fmin(axis->low, scaled(axis, value));
    axis->high = fmax(axis->high, scaled(axis, value));
}

/* Some room around the values, and never an empty range. */
static void finish_axis(struct axis *axis) {
    if (!isfinite(axis->low) || !isfinite(axis->high))
        axis->low = 0, axis->high = 1;
    double range = axis->high - axis->low;
    double room = range > 0 ? 0.05 * range : 0.5;
    axis->low -= room;
    axis->high += room;
}

static bool is_drawn(const struct axis *x, const struct axis *y, const struct chart_point *point) {
    return can_place(x, point->x) && can_place(y, point->y);
}

static void measure_axes(const struct chart *chart, struct axis *x, struct axis *y) {
    for (uint32_t s = 0; s < chart->count; s++) {
        for (uint32_t i = 0; i < chart->series[s].count; i++) {
            const struct chart_point *point = &chart->series[s].points[i];
            if (!is_drawn(x, y, point))
                continue;
            widen(x, point->x);
            widen(y, point->y);
        }
    }
    finish_axis(x);
    finish_axis(y);
}

static void write_tick(const struct axis *axis, bool horizontal, double value, FILE *out) {
    char text[32];
    double at = place(axis, value);
    snprintf(text, sizeof text, "%.3g", value);
    if (horizontal) {
        fprintf(
            out, "<line x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\" stroke=\"#ddd\"/>\n", at, TOP, at, HEIGHT - BOTTOM);
        write_label(at, HEIGHT - BOTTOM + 18, "middle", "", text, out);
    } else {
        fprintf(
            out, "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", LEFT, at, WIDTH - RIGHT, at);
        write_label(LEFT - 8, at + 4, "end", "", text, out);
    }
}

/* The step of 1, 2 or 5 times a power of ten that gives about TICKS of them. */
static double round_step(double range) {
    double power = pow(10, floor(log10(range / TICKS))), part = range / TICKS / power;
    return power * (part > 5 ? 10 : part > 2 ? 5 : part > 1 ? 2 : 1);
}

/* Ticks at round values; a logarithmic axis has 1, 2 and 5 of each power of ten. */
static void write_axis(const struct axis *axis, bool horizontal, FILE *out) {
    static const double digits[] = {1, 2, 5};
    if (axis->log) {
        for (double power = floor(axis->low); power <= axis->high; power++)
            for (int i = 0; i < 3; i++)
                if (power + log10(digits[i]) >= axis->low && power + log10(digits[i]) <= axis->high)
                    write_tick(axis, horizontal, pow(10, power) * digits[i], out);
        return;
    }
    double step = round_step(axis->high - axis->low);
    double first = ceil(axis->low / step);
    for (int i = 0; (first + i) * step <= axis->high; i++)
        write_tick(axis, horizontal, (first + i) * step, out);
}

/* Colours that differ: steps of the golden angle around the circle, in three lightnesses. */
static void colour_of(uint32_t index, char out[static 32]) {
    snprintf(out, 32, "hsl(%u, 70%%, %u%%)", (uint32_t)(index * 137.508) % 360, 35 + 12 * (index % 3));
}

static bool has_points(const struct chart_series *series, const struct axis *x, const struct axis *y) {
    for (uint32_t i = 0; i < series->count; i++)
        if (is_drawn(x, y, &series->points[i]))
            return true;
    return false;
}

static void write_series(
    const struct chart_series *series, uint32_t index, const struct axis *x, const struct axis *y, FILE *out) {
    char colour[32];
    colour_of(index, colour);
    fprintf(out, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"1.8\" points=\"", colour);
    for (uint32_t i = 0; i < series->count; i++)
        if (is_drawn(x, y, &series->points[i]))
            fprintf(out, "%.1f,%.1f ", place(x, series->points[i].x), place(y, series->points[i].y));
    fputs("\"/>\n", out);
    for (uint32_t i = 0; i < series->count; i++) {
        const struct chart_point *point = &series->points[i];
        if (!is_drawn(x, y, point))
            continue;
        double at = place(x, point->x);
        if (point->low < point->high && can_place(y, point->low) && can_place(y, point->high))
            fprintf(out,
                "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\" stroke-opacity=\"0.4\"/>\n", at,
                place(y, point->low), at, place(y, point->high), colour);
        fprintf(out, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n", at, place(y, point->y), colour);
    }
    double row = TOP + 16.0 * index;
    fprintf(
        out, "<rect x=\"%d\" y=\"%.1f\" width=\"14\" height=\"4\" fill=\"%s\"/>\n", WIDTH - RIGHT + 16, row, colour);
    write_label(WIDTH - RIGHT + 36, row + 6, "start", "", series->name, out);
}

static double chart_height(const struct chart *chart) {
    return fmax(HEIGHT, TOP + 16.0 * chart->count + 20);
}

static void write_chart(const struct chart *chart, FILE *out) {
    struct axis x = {.log = chart->log_x, .low = INFINITY, .high = -INFINITY, .from = LEFT, .to = WIDTH - RIGHT};
    struct axis y = {.log = chart->log_y, .low = INFINITY, .high = -INFINITY, .from = HEIGHT - BOTTOM, .to = TOP};
    measure_axes(chart, &x, &y);
    write_label(LEFT, 28, "start", " font-size=\"15\"", chart->title, out);
    write_axis(&x, true, out);
    write_axis(&y, false, out);
    write_label((LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 16, "middle", "", chart->x_label, out);
    write_label(LEFT, TOP - 8, "start", " fill=\"#555\"", chart->y_label, out);
    for (uint32_t s = 0, drawn = 0; s < chart->count; s++)
        if (has_points(&chart->series[s], &x, &y))
            write_series(&chart->series[s], drawn++, &x, &y, out);
}

void chart_write_lines(const struct chart *chart, FILE *out) {
    begin(WIDTH, chart_height(chart), out);
    write_chart(chart, out);
    fputs("</svg>\n", out);
}

void chart_write_stack(const struct chart *charts, uint32_t count, FILE *out) {
    double height = 0;
    for (uint32_t i = 0; i < count; i++)
        height += chart_height(&charts[i]);
    begin(WIDTH, height, out);
    height = 0;
    for (uint32_t i = 0; i < count; i++) {
        fprintf(out, "<g transform=\"translate(0,%.0f)\">\n", height);
        write_chart(&charts[i], out);
        fputs("</g>\n", out);
        height += chart_height(&charts[i]);
    }
    fputs("</svg>\n", out);
}

/* ---- maps ---- */

enum {
    MAP_LEFT = 70,
    MAP_TOP = 70,
    MAP_GAP = 24,
    CELL_WIDTH = 14,
    CELL_HEIGHT = 10,
    NUMBER_WIDTH = 40,
    NUMBER_HEIGHT = 22
};

/* From white to dark blue. */
static void cell_colour(double value, char out[static 32]) {
    if (!isfinite(value)) {
        strcpy(out, "#eee");
        return;
    }
    value = value < 0 ? 0 : value > 1 ? 1 : value;
    snprintf(out, 32, "rgb(%d,%d,%d)", (int)(255 - 247 * value), (int)(255 - 207 * value), (int)(255 - 148 * value));
}

static void write_map(const struct chart_maps *maps, const struct chart_map *map, double left, FILE *out) {
    int width = maps->numbers ? NUMBER_WIDTH : CELL_WIDTH, height = maps->numbers ? NUMBER_HEIGHT : CELL_HEIGHT;
    char colour[32], text[16];
    write_label(left, MAP_TOP - 8, "start", "", map->title, out);
    for (uint32_t row = 0; row < map->rows; row++) {
        for (uint32_t column = 0; column < map->columns; column++) {
            double value = map->values[(size_t)row * map->columns + column];
            double x = left + (double)column * width, y = MAP_TOP + (double)row * height;
            cell_colour(value, colour);
            fprintf(out, "<rect x=\"%.0f\" y=\"%.0f\" width=\"%d\" height=\"%d\" fill=\"%s\"/>\n", x, y, width, height,
                colour);
            if (!maps->numbers || !isfinite(value))
                continue;
            snprintf(text, sizeof text, "%.2f", value);
            write_label(x + width / 2.0, y + height / 2.0 + 4, "middle",
                value > 0.5 ? " fill=\"white\" font-size=\"10\"" : " font-size=\"10\"", text, out);
        }
    }
    double bottom = MAP_TOP + (double)map->rows * height, right = left + (double)map->columns * width;
    fprintf(out, "<rect x=\"%.0f\" y=\"%d\" width=\"%.0f\" height=\"%.0f\" fill=\"none\" stroke=\"#999\"/>\n", left,
        MAP_TOP, right - left, bottom - MAP_TOP);
    write_label(left, bottom + 16, "start", " font-size=\"10\"", maps->first_column, out);
    write_label(right, bottom + 16, "end", " font-size=\"10\"", maps->last_column, out);
}

void chart_write_maps(const struct chart_maps *maps, FILE *out) {
    int cell = maps->numbers ? NUMBER_WIDTH : CELL_WIDTH, height = maps->numbers ? NUMBER_HEIGHT : CELL_HEIGHT;
    double width = MAP_LEFT, most = 0;
    for (uint32_t i = 0; i < maps->count; i++) {
        double own = (double)maps->maps[i].columns * cell;
        width += fmax(own, 7.0 * (double)strlen(maps->maps[i].title)) + MAP_GAP;
        most = fmax(most, (double)maps->maps[i].rows * height);
    }
    begin(fmax(width, MAP_LEFT + 7.5 * (double)strlen(maps->title)), MAP_TOP + most + 60, out);
    write_label(16, 28, "start", " font-size=\"15\"", maps->title, out);
    write_label(16, MAP_TOP - 8, "start", " fill=\"#555\"", maps->y_label, out);
    write_label(MAP_LEFT - 6, MAP_TOP + 10, "end", " font-size=\"10\"", maps->first_row, out);
    write_label(MAP_LEFT - 6, MAP_TOP + most, "end", " font-size=\"10\"", maps->last_row, out);
    write_label(MAP_LEFT, MAP_TOP + most + 40, "start", " fill=\"#555\"", maps->x_label, out);
    double left = MAP_LEFT;
    for (uint32_t i = 0; i < maps->count; i++) {
        write_map(maps, &maps->maps[i], left, out);
        left += fmax((double)maps->maps[i].columns * cell, 7.0 * (double)strlen(maps->maps[i].title)) + MAP_GAP;
    }
    fputs("</svg>\n", out);
}
