/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/tables.h"
#include "cuda/cuda_backend.h"

#include <string.h>

static uint32_t pieces_of(const struct kv_table_write *write) {
    return (write->count + TABLE_RANGE_MOST - 1) / TABLE_RANGE_MOST;
}

/* A write's ranges, its numbers lying from `first` on. Returns the place behind them. */
static struct table_range *cut(const struct kv_table_write *write, uint32_t first, struct table_range *range) {
    for (uint32_t done = 0; done < write->count; done += TABLE_RANGE_MOST) {
        uint32_t left = write->count - done;
        *range++ = (struct table_range){
            write->to + done, first + done, left < TABLE_RANGE_MOST ? left : (uint32_t)TABLE_RANGE_MOST};
    }
    return range;
}

void cuda_write_tables(struct backend *backend, const struct kv_table_write *writes, uint32_t count) {
    struct cuda_backend *cuda = cuda_backend(backend);
    size_t numbers = 0, pieces = 0;
    for (uint32_t i = 0; i < count; i++) {
        numbers += writes[i].count;
        pieces += pieces_of(&writes[i]);
    }
    size_t bytes = cuda_stage_size(pieces * sizeof(struct table_range)) + cuda_stage_size(numbers * sizeof(uint32_t));
    struct cuda_stage stage;
    const void *ranges, *list;
    if (numbers == 0 || numbers > UINT32_MAX || !cuda_stage_begin(cuda, bytes, &stage))
        return;
    struct table_range *range = cuda_stage_add(&stage, pieces * sizeof *range, &ranges);
    uint32_t *to = cuda_stage_add(&stage, numbers * sizeof *to, &list);
    for (uint32_t i = 0, first = 0; i < count; first += writes[i++].count) {
        range = cut(&writes[i], first, range);
        memcpy(to + first, writes[i].from, writes[i].count * sizeof *to);
    }
    if (!cuda_stage_send(cuda, &stage))
        return;
    launch_write_tables(ranges, (uint32_t)pieces, list, cuda->stream);
    cuda_check_launch(cuda, "write_tables");
}
