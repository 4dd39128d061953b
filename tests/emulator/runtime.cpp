/* SPDX-License-Identifier: Apache-2.0
 *
 * The runtime's calls for devices, memory and launches.
 */
#include "streams.h"

#include <set>
#include <stdlib.h>
#include <string.h>

/* ---- Devices: some, with the numbers of an RTX 4090 ---- */

enum { THREADS_PER_SM = 1536, SHARED_PER_SM = 100 * 1024, SHARED_RESERVED = 1024, SMS = 128, BLOCKS_PER_SM = 24 };

extern "C" cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

extern "C" cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

extern "C" cudaError_t cudaGetDeviceCount(int *count) {
    struct runtime_scope scope;
    *count = (int)settings.devices;
    return cudaSuccess;
}

static bool device_exists(int device) {
    return device >= 0 && (unsigned)device < settings.devices;
}

extern "C" cudaError_t cudaInitDevice(int device, unsigned, unsigned) {
    return cudaSetDevice(device);
}

extern "C" cudaError_t cudaSetDeviceFlags(unsigned) {
    return cudaSuccess;
}

extern "C" cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    struct runtime_scope scope;
    if (!device_exists(device))
        return runtime_return(cudaErrorInvalidDevice);
    memset(properties, 0, sizeof(*properties));
    strcpy(properties->name, "emulator");
    properties->totalGlobalMem = memory_total();
    properties->sharedMemPerBlock = 48 * 1024;
    properties->sharedMemPerBlockOptin = BLOCK_SHARED_MAX;
    properties->sharedMemPerMultiprocessor = SHARED_PER_SM;
    properties->reservedSharedMemPerBlock = SHARED_RESERVED;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->warpSize = WARP_LANES;
    properties->maxThreadsPerBlock = BLOCK_THREADS_MAX;
    properties->maxThreadsPerMultiProcessor = THREADS_PER_SM;
    properties->maxBlocksPerMultiProcessor = BLOCKS_PER_SM;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->major = 8;
    properties->minor = 9;
    properties->multiProcessorCount = SMS;
    properties->memoryBusWidth = 384;
    properties->l2CacheSize = 72 << 20;
    properties->canMapHostMemory = properties->unifiedAddressing = properties->concurrentKernels = 1;
    properties->asyncEngineCount = 2;
    return runtime_return(cudaSuccess);
}

extern "C" cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp properties;
    cudaError_t error = cudaGetDeviceProperties(&properties, device);
    if (error != cudaSuccess)
        return error;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
        *value = BLOCK_THREADS_MAX;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = (int)properties.sharedMemPerBlock;
        break;
    case cudaDevAttrWarpSize:
        *value = WARP_LANES;
        break;
    case cudaDevAttrMaxRegistersPerBlock:
        *value = properties.regsPerBlock;
        break;
    case cudaDevAttrClockRate:
        *value = 2520000;
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = SMS;
        break;
    case cudaDevAttrMemoryClockRate:
        *value = 10501000;
        break;
    case cudaDevAttrGlobalMemoryBusWidth:
        *value = properties.memoryBusWidth;
        break;
    case cudaDevAttrL2CacheSize:
        *value = properties.l2CacheSize;
        break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        *value = THREADS_PER_SM;
        break;
    case cudaDevAttrComputeCapabilityMajor:
        *value = properties.major;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = properties.minor;
        break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = SHARED_PER_SM;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = BLOCK_SHARED_MAX;
        break;
    default:
        return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

extern "C" cudaError_t cudaDeviceReset(void) {
    return cudaDeviceSynchronize();
}

extern "C" cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    struct runtime_scope scope;
    *total_bytes = memory_total();
    *free_bytes = memory_total() - memory_used(device_current());
    return runtime_return(cudaSuccess);
}

/* ---- Allocation ---- */

extern "C" cudaError_t cudaMalloc(void **memory, size_t bytes) {
    struct runtime_scope scope;
    *memory = NULL;
    if (capture_forbids())
        return runtime_return(cudaErrorStreamCaptureUnsupported);
    if (bytes == 0)
        return runtime_return(cudaSuccess);
    *memory = memory_allocate(bytes, device_current());
    runtime_calls.allocations++;
    return runtime_return(*memory ? cudaSuccess : cudaErrorMemoryAllocation);
}

/* Waits for the memory's device, as the real one does. */
extern "C" cudaError_t cudaFree(void *memory) {
    struct runtime_scope scope;
    if (!memory)
        return runtime_return(cudaSuccess);
    if (capture_forbids())
        return runtime_return(cudaErrorStreamCaptureUnsupported);
    streams_drain(memory_is_device(memory) ? memory_device_of(memory) : device_current());
    if (memory_release(memory))
        return runtime_return(cudaSuccess);
    char what[256];
    memory_describe(memory, what, sizeof(what));
    fault_host("cudaFree of %s", what);
    return runtime_return(cudaErrorInvalidValue);
}

extern "C" cudaError_t cudaMallocAsync(void **memory, size_t bytes, cudaStream_t stream) {
    if (stream && stream->device != device_current())
        fault_host("cudaMallocAsync: the stream is of device %u, the thread's is %u", stream->device, device_current());
    return cudaMalloc(memory, bytes);
}

extern "C" cudaError_t cudaFreeAsync(void *memory, cudaStream_t stream) {
    struct runtime_scope scope;
    return runtime_return(stream_add(stream, [=] { memory_release(memory); }));
}

/* What a pool keeps makes no difference here: there is one for all devices. */
extern "C" cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    struct runtime_scope scope;
    static char the_pool;
    *pool = (cudaMemPool_t)&the_pool;
    return runtime_return(device_exists(device) ? cudaSuccess : cudaErrorInvalidDevice);
}

extern "C" cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
    struct runtime_scope scope;
    bool known = pool != NULL && attribute == cudaMemPoolAttrReleaseThreshold && value != NULL;
    return runtime_return(known ? cudaSuccess : cudaErrorInvalidValue);
}

extern "C" cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned) {
    struct runtime_scope scope;
    if (capture_forbids())
        return runtime_return(cudaErrorStreamCaptureUnsupported);
    size_t rounded = (bytes + 4095) / 4096 * 4096;
    *memory = aligned_alloc(4096, rounded > 0 ? rounded : 4096);
    if (!*memory)
        return runtime_return(cudaErrorMemoryAllocation);
    memory_pin(*memory, bytes);
    return runtime_return(cudaSuccess);
}

extern "C" cudaError_t cudaMallocHost(void **memory, size_t bytes) {
    return cudaHostAlloc(memory, bytes, cudaHostAllocDefault);
}

extern "C" cudaError_t cudaFreeHost(void *memory) {
    struct runtime_scope scope;
    if (!memory)
        return runtime_return(cudaSuccess);
    if (capture_forbids())
        return runtime_return(cudaErrorStreamCaptureUnsupported);
    streams_drain(device_current());
    if (!memory_unpin(memory)) {
        fault_host("cudaFreeHost of %p, which is not from cudaHostAlloc", memory);
        return runtime_return(cudaErrorInvalidValue);
    }
    free(memory);
    return runtime_return(cudaSuccess);
}

extern "C" cudaError_t cudaHostRegister(void *memory, size_t bytes, unsigned) {
    struct runtime_scope scope;
    if (memory_is_pinned(memory, 1))
        return runtime_return(cudaErrorHostMemoryAlreadyRegistered);
    memory_pin(memory, bytes);
    return runtime_return(cudaSuccess);
}

extern "C" cudaError_t cudaHostUnregister(void *memory) {
    struct runtime_scope scope;
    streams_drain(device_current());
    return runtime_return(memory_unpin(memory) ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

extern "C" cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned) {
    struct runtime_scope scope;
    *device = host;
    return runtime_return(memory_is_pinned(host, 1) ? cudaSuccess : cudaErrorInvalidValue);
}

extern "C" cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *memory) {
    struct runtime_scope scope;
    memset(attributes, 0, sizeof(*attributes));
    if (memory_is_device(memory)) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->device = (int)memory_device_of(memory);
        attributes->devicePointer = (void *)memory;
    } else if (memory_is_pinned(memory, 1)) {
        attributes->type = cudaMemoryTypeHost;
        attributes->devicePointer = attributes->hostPointer = (void *)memory;
    } else {
        attributes->hostPointer = (void *)memory;
    }
    return runtime_return(cudaSuccess);
}

/* ---- Copies ---- */

/* Whether an end of a copy of a device's stream is what its kind says; a fault otherwise. */
static bool end_ok(
    unsigned on, const char *call, const char *end, const void *at, size_t bytes, bool device, bool unknown) {
    if (bytes == 0 || (unknown && !memory_is_device(at)))
        return true;
    char what[256];
    memory_describe(at, what, sizeof(what));
    if (!unknown && memory_is_device(at) != device)
        fault_host("%s: its %s should be %s memory: %s", call, end, device ? "device" : "host", what);
    else if (memory_is_device(at) && !memory_range_ok(at, bytes))
        fault_host("%s: %zu bytes of its %s are not in one allocation: %s", call, bytes, end, what);
    else if (memory_is_device(at) && memory_device_of(at) != on)
        fault_host("%s: its stream is of device %u, its %s of another: %s", call, on, end, what);
    else
        return true;
    return false;
}

static bool copy_ok(unsigned on, const char *call, void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    bool any = kind == cudaMemcpyDefault;
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    return end_ok(on, call, "destination", to, bytes, to_device, any) &&
           end_ok(on, call, "source", from, bytes, from_device, any);
}

/* At a launch or copy the memory was there; it has to be there still when the copy runs. */
static void copy_now(void *to, const void *from, size_t bytes) {
    unsigned on = runtime_device();
    if (!end_ok(on, "copy", "destination", to, bytes, true, true) ||
        !end_ok(on, "copy", "source", from, bytes, true, true))
        runtime_set_sticky(cudaErrorIllegalAddress);
    else
        memmove(to, from, bytes);
}

/* Host memory that is not pinned takes part at once: read before the call returns, or waited for. */
static cudaError_t copy_add(
    cudaStream_t stream, void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, const char *call) {
    if (!copy_ok(stream_get(stream)->device, call, to, from, bytes, kind)) {
        runtime_set_sticky(cudaErrorInvalidValue);
        return cudaErrorInvalidValue;
    }
    if (bytes == 0)
        return cudaSuccess;
    bool capturing = stream_get(stream)->capture != NULL;
    if (!capturing) {
        runtime_calls.copies++;
        runtime_calls.copied_bytes += bytes;
    }
    bool pageable_from = !memory_is_device(from) && !memory_is_pinned(from, bytes);
    bool pageable_to = !memory_is_device(to) && !memory_is_pinned(to, bytes);
    if (pageable_from && !capturing) {
        auto staged = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + bytes);
        return stream_add(stream, [=] { copy_now(to, staged->data(), bytes); });
    }
    cudaError_t error = stream_add(stream, [=] { copy_now(to, from, bytes); });
    if (pageable_to && !capturing)
        stream_reach_end(stream_get(stream));
    return error;
}

extern "C" cudaError_t cudaMemcpyAsync(
    void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
    struct runtime_scope scope;
    return runtime_return(copy_add(stream, to, from, bytes, kind, "cudaMemcpyAsync"));
}

extern "C" cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
    size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    struct runtime_scope scope;
    cudaError_t error = cudaSuccess;
    for (size_t row = 0; row < height && error == cudaSuccess; row++)
        error = copy_add(stream, (char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind,
            "cudaMemcpy2DAsync");
    return runtime_return(error);
}

extern "C" cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
    struct runtime_scope scope;
    if (capture_forbids())
        return runtime_return(cudaErrorStreamCaptureUnsupported);
    cudaError_t error = copy_add(NULL, to, from, bytes, kind, "cudaMemcpy");
    stream_reach_end(stream_get(NULL));
    return runtime_return(error);
}

static cudaError_t set_add(cudaStream_t stream, void *memory, int value, size_t bytes, const char *call) {
    if (!end_ok(
            stream_get(stream)->device, call, "destination", memory, bytes, true, memory_is_pinned(memory, bytes))) {
        runtime_set_sticky(cudaErrorInvalidValue);
        return cudaErrorInvalidValue;
    }
    runtime_calls.fills += stream_counts(stream);
    return stream_add(stream, [=] {
        if (end_ok(runtime_device(), call, "destination", memory, bytes, true, true))
            memset(memory, value, bytes);
        else
            runtime_set_sticky(cudaErrorIllegalAddress);
    });
}

extern "C" cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream) {
    struct runtime_scope scope;
    return runtime_return(set_add(stream, memory, value, bytes, "cudaMemsetAsync"));
}

extern "C" cudaError_t cudaMemset(void *memory, int value, size_t bytes) {
    struct runtime_scope scope;
    if (capture_forbids())
        return runtime_return(cudaErrorStreamCaptureUnsupported);
    return runtime_return(set_add(NULL, memory, value, bytes, "cudaMemset"));
}

/* ---- Kernels ---- */

/* "scale_kernel<64, 2>, grid, ...": up to the first comma outside of brackets. */
static void take_name(char *name, size_t capacity, const char *text) {
    int depth = 0;
    size_t length = 0;
    for (; *text && length + 1 < capacity; text++) {
        if (*text == ',' && depth == 0)
            break;
        depth += (*text == '<' || *text == '(') - (*text == '>' || *text == ')');
        name[length++] = *text;
    }
    name[length] = 0;
}

static bool launch_ok(const struct launch *launch) {
    struct dim3 grid = launch->grid, block = launch->block;
    uint64_t threads = (uint64_t)block.x * block.y * block.z, blocks = (uint64_t)grid.x * grid.y * grid.z;
    bool ok = threads >= 1 && threads <= BLOCK_THREADS_MAX && block.z <= 64 && blocks >= 1 && grid.x <= 2147483647 &&
              grid.y <= 65535 && grid.z <= 65535 && launch->shared_bytes <= BLOCK_SHARED_MAX;
    if (!ok)
        fault_host("launch of %s: grid (%u, %u, %u), block (%u, %u, %u), %zu bytes of shared memory (at most %d)",
            launch->name, grid.x, grid.y, grid.z, block.x, block.y, block.z, launch->shared_bytes, BLOCK_SHARED_MAX);
    else if (blocks > 1u << 30)
        fault_host("launch of %s: the emulator runs at most 2^30 blocks", launch->name);
    return ok && blocks <= 1u << 30;
}

extern "C" cudaError_t emulator_launch(const char *name, struct dim3 grid, struct dim3 block, size_t shared_bytes,
    cudaStream_t stream, void (*invoke)(const void *arguments), const void *arguments, size_t arguments_bytes) {
    struct runtime_scope scope;
    auto launch = std::make_shared<struct launch>();
    take_name(launch->name, sizeof(launch->name), name);
    launch->grid = grid;
    launch->block = block;
    launch->shared_bytes = shared_bytes;
    launch->invoke = invoke;
    launch->arguments.assign((const char *)arguments, (const char *)arguments + arguments_bytes);
    if (!launch_ok(launch.get()))
        return runtime_return(cudaErrorInvalidConfiguration);
    launch->device = device_current();
    if (stream_get(stream)->device != launch->device) {
        fault_host("launch of %s on a stream of device %u, the thread's is %u", launch->name,
            stream_get(stream)->device, launch->device);
        return runtime_return(cudaErrorInvalidResourceHandle);
    }
    runtime_calls.launches += stream_counts(stream);
    return runtime_return(stream_add(stream, [launch] {
        if (!workers_run(launch.get()))
            runtime_set_sticky(cudaErrorLaunchFailure);
    }));
}

extern "C" cudaError_t cudaFuncSetAttribute(const void *, enum cudaFuncAttribute attribute, int value) {
    struct runtime_scope scope;
    bool ok = attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value <= BLOCK_SHARED_MAX;
    return runtime_return(ok ? cudaSuccess : cudaErrorInvalidValue);
}

extern "C" cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *) {
    struct runtime_scope scope;
    memset(attributes, 0, sizeof(*attributes));
    attributes->maxThreadsPerBlock = BLOCK_THREADS_MAX;
    attributes->ptxVersion = attributes->binaryVersion = 89;
    attributes->maxDynamicSharedSizeBytes = 48 * 1024;
    return runtime_return(cudaSuccess);
}

extern "C" cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int *blocks, const void *, int block_threads, size_t shared_bytes) {
    struct runtime_scope scope;
    if (block_threads < 1 || block_threads > BLOCK_THREADS_MAX)
        return runtime_return(cudaErrorInvalidValue);
    int rounded = (block_threads + WARP_LANES - 1) / WARP_LANES * WARP_LANES;
    int by_threads = THREADS_PER_SM / rounded;
    int by_shared = (int)(SHARED_PER_SM / (shared_bytes + SHARED_RESERVED));
    *blocks = by_threads < by_shared ? by_threads : by_shared;
    if (*blocks > BLOCKS_PER_SM)
        *blocks = BLOCKS_PER_SM;
    return runtime_return(cudaSuccess);
}

/* ---- Names ---- */

#define NAMES(X)                                                                                                       \
    X(cudaSuccess, "no error")                                                                                         \
    X(cudaErrorInvalidValue, "invalid argument")                                                                       \
    X(cudaErrorMemoryAllocation, "out of memory")                                                                      \
    X(cudaErrorInitializationError, "initialization error")                                                            \
    X(cudaErrorInvalidConfiguration, "invalid configuration argument")                                                 \
    X(cudaErrorInvalidDevice, "invalid device ordinal")                                                                \
    X(cudaErrorInvalidResourceHandle, "invalid resource handle")                                                       \
    X(cudaErrorNotReady, "device not ready")                                                                           \
    X(cudaErrorIllegalAddress, "an illegal memory access was encountered")                                             \
    X(cudaErrorHostMemoryAlreadyRegistered, "part or all of the requested memory range is already mapped")             \
    X(cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region")                   \
    X(cudaErrorLaunchFailure, "unspecified launch failure")                                                            \
    X(cudaErrorNotSupported, "operation not supported")                                                                \
    X(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing")                           \
    X(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture")                    \
    X(cudaErrorStreamCaptureUnmatched, "capture was not initiated in this stream")                                     \
    X(cudaErrorGraphExecUpdateFailure, "the graph update was not performed")

extern "C" const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
#define NAME(code, text)                                                                                               \
    case code:                                                                                                         \
        return #code;
        NAMES(NAME)
    default:
        return "unrecognized error code";
    }
}

extern "C" const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
#define TEXT(code, text)                                                                                               \
    case code:                                                                                                         \
        return text;
        NAMES(TEXT)
    default:
        return "unrecognized error code";
    }
}
