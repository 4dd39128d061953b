/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernel of linear_blocks.cuh for blocks of 256.
 */
#include "cuda/linear_blocks.cuh"

void launch_linear_blocks_k(
    const struct linear_call *call, enum linear_format format, uint32_t multiprocessors, cudaStream_t stream) {
    switch (format) {
    case LINEAR_Q2_K:
        return launch_format<LINEAR_Q2_K>(call, multiprocessors, stream);
    case LINEAR_Q3_K:
        return launch_format<LINEAR_Q3_K>(call, multiprocessors, stream);
    case LINEAR_Q4_K:
        return launch_format<LINEAR_Q4_K>(call, multiprocessors, stream);
    case LINEAR_Q5_K:
        return launch_format<LINEAR_Q5_K>(call, multiprocessors, stream);
    default:
        launch_format<LINEAR_Q6_K>(call, multiprocessors, stream);
    }
}
