/* SPDX-License-Identifier: Apache-2.0 */
#include "policy/eval/positions.h"

#include <math.h>

#include "policy/eval/json_number.h"

/* ---- measuring ---- */

static double part(double kept, uint32_t tokens, uint32_t heads) {
    return tokens > 0 ? kept / ((double)tokens * heads) : NAN;
}

static double part_of_range(const uint32_t *kept, uint32_t begin, uint32_t end, uint32_t heads) {
    double sum = 0;
    for (uint32_t i = begin; i < end; i++)
        sum += kept[i];
    return part(sum, end > begin ? end - begin : 0, heads);
}

void eval_positions_measure(const uint32_t *kept, uint32_t tokens, uint32_t heads, struct eval_positions *out) {
    uint32_t sinks = tokens < KEPT_SINKS ? tokens : KEPT_SINKS;
    uint32_t recent = tokens - sinks > KEPT_RECENT ? tokens - KEPT_RECENT : sinks;
    out->present = true;
    out->sinks = part_of_range(kept, 0, sinks, heads);
    out->between = part_of_range(kept, sinks, recent, heads);
    out->recent = part_of_range(kept, recent, tokens, heads);
    for (uint32_t i = 0; i < KEPT_FIRST; i++)
        out->first[i] = i < tokens ? part(kept[i], 1, heads) : NAN;
    for (uint32_t n = 0; n < KEPT_DISTANCES; n++) {
        uint32_t least = n == 0 ? 1 : (1u << (n - 1)) + 1, most = 1u << n; /* distances */
        uint32_t begin = most < tokens ? tokens - most : 0, end = least <= tokens ? tokens - least + 1 : 0;
        out->distance[n] = part_of_range(kept, begin > KEPT_FIRST ? begin : KEPT_FIRST, end, heads);
    }
}

/* ---- means ---- */

static void add(double *sum, double *count, double value) {
    if (isnan(value))
        return;
    *sum += value;
    (*count)++;
}

void eval_positions_add(struct eval_positions_sum *sum, const struct eval_positions *positions) {
    struct eval_positions *sums = &sum->sums, *counts = &sum->counts;
    if (!positions->present)
        return;
    sums->present = true;
    add(&sums->sinks, &counts->sinks, positions->sinks);
    add(&sums->recent, &counts->recent, positions->recent);
    add(&sums->between, &counts->between, positions->between);
    for (int i = 0; i < KEPT_FIRST; i++)
        add(&sums->first[i], &counts->first[i], positions->first[i]);
    for (int n = 0; n < KEPT_DISTANCES; n++)
        add(&sums->distance[n], &counts->distance[n], positions->distance[n]);
}

static double mean(double sum, double count) {
    return count > 0 ? sum / count : NAN;
}

void eval_positions_mean(const struct eval_positions_sum *sum, struct eval_positions *out) {
    const struct eval_positions *sums = &sum->sums, *counts = &sum->counts;
    out->present = sums->present;
    out->sinks = mean(sums->sinks, counts->sinks);
    out->recent = mean(sums->recent, counts->recent);
    out->between = mean(sums->between, counts->between);
    for (int i = 0; i < KEPT_FIRST; i++)
        out->first[i] = mean(sums->first[i], counts->first[i]);
    for (int n = 0; n < KEPT_DISTANCES; n++)
        out->distance[n] = mean(sums->distance[n], counts->distance[n]);
}

/* ---- JSON: failed calls answer -1; the answers are summed up. ---- */

static int write_list(json_t *object, const char *name, const double *values, int count) {
    json_t *list = json_array();
    int failed = list == NULL;
    while (count > 0 && isnan(values[count - 1]))
        count--;
    for (int i = 0; i < count; i++)
        failed |= json_array_append_new(list, eval_json_number(values[i]));
    return failed | json_object_set_new(object, name, list);
}

int eval_positions_write(json_t *object, const struct eval_positions *positions) {
    if (!positions->present)
        return 0;
    int failed = json_object_set_new(object, "kept_sinks", eval_json_number(positions->sinks));
    failed |= json_object_set_new(object, "kept_recent", eval_json_number(positions->recent));
    failed |= json_object_set_new(object, "kept_between", eval_json_number(positions->between));
    failed |= write_list(object, "kept_first", positions->first, KEPT_FIRST);
    failed |= write_list(object, "kept_distance", positions->distance, KEPT_DISTANCES);
    return failed;
}

static double number_of(const json_t *value) {
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static bool read_list(const json_t *object, const char *name, double *values, size_t count) {
    const json_t *list = json_object_get(object, name);
    for (size_t i = 0; i < count; i++)
        values[i] = number_of(json_array_get(list, i));
    return json_is_array(list);
}

void eval_positions_read(const json_t *object, struct eval_positions *positions) {
    const json_t *sinks = json_object_get(object, "kept_sinks"), *recent = json_object_get(object, "kept_recent"),
                 *between = json_object_get(object, "kept_between");
    positions->sinks = number_of(sinks);
    positions->recent = number_of(recent);
    positions->between = number_of(between);
    bool lists = read_list(object, "kept_first", positions->first, KEPT_FIRST);
    lists &= read_list(object, "kept_distance", positions->distance, KEPT_DISTANCES);
    positions->present = lists && sinks != NULL && recent != NULL && between != NULL;
}
