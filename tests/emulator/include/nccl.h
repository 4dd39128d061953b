/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL as the emulator offers it: names, numbers and meaning of NVIDIA's "NCCL User Guide", API section (version 2.28),
 * only what this project uses. C17 and C++.
 *
 * A collective operation is work of a stream that runs once every rank's has come to the front of its stream: a rank
 * that never calls it leaves the others' streams waiting, as on the device, until their communicators are aborted. Sums
 * are taken in an order that depends on the place in the buffer, as rings do; of two ranks it makes no difference.
 */
#ifndef EMULATOR_NCCL_H
#define EMULATOR_NCCL_H

#include <cuda_runtime_api.h>
#include <stddef.h>

#define NCCL_MAJOR 2
#define NCCL_MINOR 28
#define NCCL_PATCH 9

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ncclComm *ncclComm_t;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7
} ncclResult_t;

typedef enum { ncclFloat32 = 7 } ncclDataType_t;
typedef enum { ncclSum = 0 } ncclRedOp_t;

ncclResult_t ncclGetVersion(int *version);
const char *ncclGetErrorString(ncclResult_t result);
/* devices NULL: the first `count` ones. */
ncclResult_t ncclCommInitAll(ncclComm_t *communicators, int count, const int *devices);
ncclResult_t ncclCommDestroy(ncclComm_t communicator);
ncclResult_t ncclCommAbort(ncclComm_t communicator);
ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t *error);
ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
    ncclComm_t communicator, cudaStream_t stream);
ncclResult_t ncclAllGather(
    const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t communicator, cudaStream_t stream);

ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

#ifdef __cplusplus
}
#endif

#endif
