/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernel of linear_blocks.cuh for blocks of 32.
 */
#include "cuda/linear_blocks.cuh"

void launch_linear_blocks(
    const struct linear_call *call, enum linear_format format, uint32_t multiprocessors, cudaStream_t stream) {
    switch (format) {
    case LINEAR_Q8_0:
        return launch_format<LINEAR_Q8_0>(call, multiprocessors, stream);
    case LINEAR_Q4_0:
        return launch_format<LINEAR_Q4_0>(call, multiprocessors, stream);
    case LINEAR_Q4_1:
        return launch_format<LINEAR_Q4_1>(call, multiprocessors, stream);
    case LINEAR_Q5_0:
        return launch_format<LINEAR_Q5_0>(call, multiprocessors, stream);
    case LINEAR_Q5_1:
        return launch_format<LINEAR_Q5_1>(call, multiprocessors, stream);
    case LINEAR_IQ4_NL:
        return launch_format<LINEAR_IQ4_NL>(call, multiprocessors, stream);
    case LINEAR_MXFP4:
        return launch_format<LINEAR_MXFP4>(call, multiprocessors, stream);
    default:
        launch_linear_blocks_k(call, format, multiprocessors, stream);
    }
}
