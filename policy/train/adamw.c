/* SPDX-License-Identifier: Apache-2.0
 *
 * Numbers are kept in float and computed in double. What comes from the mathematical library (the cosine) is rounded to
 * float before it is used, so that libraries which differ in a last bit give the same parameters.
 */
#include "policy/train/adamw.h"

#include <math.h>
#include <stdlib.h>

struct adamw *adamw_create(size_t count) {
    struct adamw *adamw = calloc(1, sizeof *adamw);
    if (adamw == NULL)
        return NULL;
    adamw->count = count;
    adamw->first = calloc(count + 1, sizeof(float));
    adamw->second = calloc(count + 1, sizeof(float));
    if (adamw->first == NULL || adamw->second == NULL) {
        adamw_free(adamw);
        return NULL;
    }
    return adamw;
}

void adamw_free(struct adamw *adamw) {
    if (adamw == NULL)
        return;
    free(adamw->first);
    free(adamw->second);
    free(adamw);
}

double adamw_rate(const struct adamw_options *options, uint64_t step) {
    double peak = (double)options->peak, final = (double)options->final;
    if (step < options->warmup)
        return peak * (double)(step + 1) / options->warmup;
    double length = options->total > options->warmup ? options->total - options->warmup : 1;
    double progress = fmin((double)(step - options->warmup) / length, 1);
    float cosine = (float)cos(M_PI * progress);
    return final + 0.5 * (peak - final) * (1 + (double)cosine);
}

/* base^exponent by squaring. */
static double power(double base, uint64_t exponent) {
    double result = 1;
    for (; exponent > 0; exponent >>= 1) {
        if (exponent & 1)
            result *= base;
        base *= base;
    }
    return result;
}

static double norm_of(const struct gradient *gradient) {
    double squares = 0;
    for (size_t i = 0; i < gradient->count; i++)
        squares += (double)gradient->values[i] * (double)gradient->values[i];
    return sqrt(squares);
}

/* What an update of every number needs. */
struct update {
    double rate, shrink, first_part, second_part; /* parts of the moments' sums so far: 1 - beta^step */
};

static void update_array(struct adamw *adamw, const struct adamw_options *options, const struct update *update,
    size_t offset, const float *gradient, const struct network_array *array) {
    double beta1 = (double)options->beta1, beta2 = (double)options->beta2, epsilon = (double)options->epsilon;
    double shrink = array->matrix ? update->shrink : 1;
    float *first = adamw->first + offset, *second = adamw->second + offset;
    for (size_t i = 0; i < array->count; i++) {
        double g = (double)gradient[offset + i];
        first[i] = (float)(beta1 * (double)first[i] + (1 - beta1) * g);
        second[i] = (float)(beta2 * (double)second[i] + (1 - beta2) * g * g);
        double step = (double)first[i] / update->first_part / (sqrt((double)second[i] / update->second_part) + epsilon);
        array->values[i] = (float)(shrink * (double)array->values[i] - update->rate * step);
    }
}

double adamw_update(struct adamw *adamw, const struct adamw_options *options, struct gradient *gradient,
    struct policy_network *network) {
    double norm = norm_of(gradient), limit = (double)options->clip;
    if (!isfinite(norm))
        return norm;
    if (limit > 0 && norm > limit)
        gradient_scale(gradient, (float)(limit / norm));
    double rate = adamw_rate(options, adamw->step);
    adamw->step++;
    struct update update = {.rate = rate,
        .shrink = 1 - rate * (double)options->decay,
        .first_part = 1 - power((double)options->beta1, adamw->step),
        .second_part = 1 - power((double)options->beta2, adamw->step)};
    struct network_array array;
    size_t offset = 0;
    for (uint32_t index = 0; network_array(network, index, &array); index++) {
        if (!array.trained)
            continue;
        update_array(adamw, options, &update, offset, gradient->values, &array);
        offset += array.count;
    }
    return norm;
}
