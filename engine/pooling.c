/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/pooling.h"

#include "engine/error.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>

int pooled_add(struct pooled *pooled, const float *states, uint32_t count, uint32_t width) {
    if (pooled->sum == NULL) {
        pooled->sum = calloc(width, sizeof *pooled->sum);
        if (pooled->sum == NULL)
            return ERROR_MEMORY;
        pooled->width = width;
    }
    for (uint32_t row = 0; row < count; row++)
        for (uint32_t i = 0; i < width; i++)
            pooled->sum[i] += (double)states[(size_t)row * width + i];
    pooled->count += count;
    return 0;
}

bool pooled_finish(struct pooled *pooled, bool normalise) {
    double squares = 0;
    for (uint32_t i = 0; i < pooled->width; i++) {
        pooled->sum[i] /= pooled->count;
        squares += pooled->sum[i] * pooled->sum[i];
    }
    for (uint32_t i = 0; normalise && squares > 0 && i < pooled->width; i++)
        pooled->sum[i] /= sqrt(squares);
    return isfinite(squares);
}

void pooled_free(struct pooled *pooled) {
    free(pooled->sum);
    *pooled = (struct pooled){0};
}
