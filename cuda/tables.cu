/* SPDX-License-Identifier: Apache-2.0 */
#include "cuda/device.h"

#include "cuda/tables.h"

enum { THREADS = 128, LANES = 8 }; /* of a range: most are one number long, and a sector holds eight */

static __global__ void __launch_bounds__(THREADS)
    write_tables(const struct table_range *ranges, uint32_t count, const uint32_t *numbers) {
    uint32_t number = (blockIdx.x * THREADS + threadIdx.x) / LANES;
    if (number >= count)
        return;
    struct table_range range;
    *(uint4 *)&range = *(const uint4 *)&ranges[number];
    for (uint32_t i = threadIdx.x % LANES; i < range.count; i += LANES)
        range.to[i] = numbers[range.first + i];
}

void launch_write_tables(
    const struct table_range *ranges, uint32_t count, const uint32_t *numbers, cudaStream_t stream) {
    if (count > 0)
        KERNEL_LAUNCH(write_tables, (count + THREADS / LANES - 1) / (THREADS / LANES), THREADS, 0, stream, ranges,
            count, numbers);
}
