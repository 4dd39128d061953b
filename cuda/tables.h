/* SPDX-License-Identifier: Apache-2.0
 *
 * Page tables in device memory (write_tables of engine/backend.h). All pointers are device addresses.
 */
#ifndef CUDA_TABLES_H
#define CUDA_TABLES_H

#include <cuda_runtime_api.h>
#include <stdint.h>

enum { TABLE_RANGE_MOST = 64 }; /* numbers of a range: longer ones are cut */

/* Numbers [count] from `first` on of one list go to `to`. */
struct __attribute__((aligned(16))) table_range {
    uint32_t *to;
    uint32_t first, count;
};

#ifdef __cplusplus
extern "C" {
#endif

/* Ranges [count] do not overlap; numbers: that list. */
void launch_write_tables(
    const struct table_range *ranges, uint32_t count, const uint32_t *numbers, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
