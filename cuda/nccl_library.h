/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL's library, loaded when ranks are to be connected by it, so that a program built with it starts on machines that
 * lack it: it serves one device there, and several through host memory.
 */
#ifndef CUDA_NCCL_LIBRARY_H
#define CUDA_NCCL_LIBRARY_H

#include "engine/error.h"

#include <nccl.h>

/* What is used of it: NVIDIA's "NCCL User Guide", API. */
struct nccl_library {
    ncclResult_t (*get_version)(int *version);
    const char *(*get_error_string)(ncclResult_t result);
    ncclResult_t (*init_all)(ncclComm_t *communicators, int count, const int *devices);
    ncclResult_t (*destroy)(ncclComm_t communicator);
    ncclResult_t (*abort)(ncclComm_t communicator);
    ncclResult_t (*get_async_error)(ncclComm_t communicator, ncclResult_t *error);
    ncclResult_t (*all_reduce)(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
        ncclComm_t communicator, cudaStream_t stream);
    ncclResult_t (*all_gather)(
        const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t communicator, cudaStream_t stream);
    ncclResult_t (*group_start)(void);
    ncclResult_t (*group_end)(void);
};

/* Stays loaded. NULL: ERROR_UNSUPPORTED. By one thread at a time. */
const struct nccl_library *nccl_library_load(struct error *error);

#endif
