/* SPDX-License-Identifier: Apache-2.0
 *
 * CUDA backends as ranks of one model: what connects them. backend_cuda_connect of cuda.h chooses.
 */
#ifndef CUDA_RANKS_H
#define CUDA_RANKS_H

#include "cuda/cuda_backend.h"
#include "parallel/communicator.h"

/* Both borrow the ranks, which must not be closed while an operation is called. `patience` of the result can be changed
 * before the first one. */

/* Pinned host memory that all devices see. Sums in the order of ranks. ERROR_MEMORY, ERROR_DEVICE. */
struct communicator *cuda_mapped_create(struct cuda_backend *const *ranks, uint32_t count, struct error *error);

/* NCCL. Connects the devices. ERROR_UNSUPPORTED: there is no NCCL; ERROR_MEMORY, ERROR_DEVICE. */
struct communicator *cuda_nccl_create(struct cuda_backend *const *ranks, uint32_t count, struct error *error);

#endif
