/* SPDX-License-Identifier: Apache-2.0
 *
 * The emulator as tests see it (README.md): traffic of kernels, faults, settings. C17 and C++. The emulator finds by
 * itself what is set in the environment:
 *   DISTILLCACHE_EMULATOR=fast            no checks, no counts
 *   DISTILLCACHE_EMULATOR_SEED=N          order of threads and of queued work, 1 by default
 *   DISTILLCACHE_EMULATOR_DEVICES=N       devices that are there, 1 to 4; 4 by default
 *   DISTILLCACHE_EMULATOR_THREADS=N       OS threads that run blocks, as many as the machine has (16 at most) by
 * default
 */
#ifndef EMULATOR_H
#define EMULATOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Of all launches of one kernel since the last reset. A warp access is the n-th execution of a place in the code by the
 * lanes of a warp since they last met; it moves the distinct 32-byte sectors that its lanes touch. */
struct emulator_traffic {
    const char *kernel; /* as written at its launch, template arguments included */
    uint64_t launches;
    uint64_t sectors_read; /* of global memory */
    uint64_t sectors_written;
    uint64_t sectors_atomic;
    uint64_t unique_read; /* distinct sectors in a launch: what DRAM moves when caches are ideal */
    uint64_t unique_written;
    uint64_t shared_wavefronts; /* passes that shared memory makes */
    uint64_t shared_ideal;      /* without bank conflicts */
};

void emulator_traffic_reset(void);
/* Sum over the kernels of that name; without template arguments: all of its instances. False when none ran. */
bool emulator_traffic_read(const char *kernel, struct emulator_traffic *traffic);
/* All kernels, at most capacity; the number of kernels. */
size_t emulator_traffic_list(struct emulator_traffic *traffics, size_t capacity);

/* What the host asked of the runtime since the last reset; captured work counts when its graph is launched, as one. */
struct emulator_calls {
    uint64_t launches; /* of kernels */
    uint64_t graphs;
    uint64_t copies, copied_bytes; /* in any direction */
    uint64_t fills;
    uint64_t waits; /* for a stream, an event or the device */
    uint64_t allocations;
};
void emulator_calls_reset(void);
struct emulator_calls emulator_calls_read(void);

/* The first fault since the last clear, or NULL: one text of several lines. Clearing also clears the runtime's sticky
 * error. Faults are printed on standard error unless quiet. */
const char *emulator_fault(void);
void emulator_fault_clear(void);
void emulator_set_quiet(bool quiet);

/* The device fails with this error (a cudaError_t) from now on, as after a fault of a kernel; cleared as that is. */
void emulator_fail_device(int device, int error);

/* NCCL: the next operation that anybody calls is refused with this error (an ncclResult_t); who asks for a
 * communicator's asynchronous error is told this one, until it is set to 0. */
void emulator_fail_nccl_call(int result);
void emulator_fail_nccl_later(int result);

/* Takes SIGSEGV (again, after a test framework took it), by which a host that touches device memory is found. */
void emulator_catch_signals(void);

/* Settings; they wait for queued work. */
uint64_t emulator_seed(void);
void emulator_set_seed(uint64_t seed);
bool emulator_fast(void);
void emulator_set_fast(bool fast);

#ifdef __cplusplus
}
#endif

#endif
