/* SPDX-License-Identifier: Apache-2.0
 *
 * NCCL: communicators of one process.
 */
#include "streams.h"

#include <map>
#include <memory>
#include <nccl.h>
#include <string.h>

enum { RING_FLOATS = 64 /* whose sum begins with the same rank */, FLOAT_BYTES = 4 };

/* What a rank brings to one operation. */
struct nccl_part {
    const float *from;
    float *to;
    size_t count;
    bool gathers;
};

/* The n-th operation of all ranks. */
struct nccl_meeting {
    std::vector<struct nccl_part> parts; /* [ranks] */
    std::vector<bool> here;
    unsigned arrived, left;
    bool done;
};

struct nccl_clique {
    unsigned ranks;
    std::map<uint64_t, std::shared_ptr<struct nccl_meeting>> meetings; /* under way */
};

/* Outlives the communicator, for what is still queued. */
struct nccl_progress {
    bool aborted;
    uint64_t operations; /* that have run: graphs run again what was called once */
};

struct ncclComm {
    std::shared_ptr<struct nccl_clique> clique;
    unsigned rank, device;
    std::shared_ptr<struct nccl_progress> progress;
};

static ncclResult_t nccl_fail_next, nccl_later;

extern "C" ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_MAJOR * 10000 + NCCL_MINOR * 100 + NCCL_PATCH;
    return ncclSuccess;
}

extern "C" const char *ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess:
        return "no error";
    case ncclUnhandledCudaError:
        return "unhandled cuda error";
    case ncclSystemError:
        return "unhandled system error";
    case ncclInternalError:
        return "internal error";
    case ncclInvalidArgument:
        return "invalid argument";
    case ncclInvalidUsage:
        return "invalid usage";
    case ncclRemoteError:
        return "remote process exited or there was a network error";
    case ncclInProgress:
        return "NCCL operation in progress";
    default:
        return "unknown result code";
    }
}

extern "C" ncclResult_t ncclCommInitAll(ncclComm_t *communicators, int count, const int *devices) {
    struct runtime_scope scope;
    if (count < 1)
        return ncclInvalidArgument;
    for (int i = 0; i < count; i++)
        for (int j = 0; j <= i; j++) {
            int device = devices ? devices[i] : i;
            if (device < 0 || (unsigned)device >= settings.devices)
                return ncclInvalidArgument;
            if (j < i && device == (devices ? devices[j] : j))
                return ncclInvalidUsage; /* a device is one rank only */
        }
    auto clique = std::make_shared<struct nccl_clique>();
    clique->ranks = (unsigned)count;
    for (int i = 0; i < count; i++)
        communicators[i] = new ncclComm{
            clique, (unsigned)i, (unsigned)(devices ? devices[i] : i), std::make_shared<struct nccl_progress>()};
    return ncclSuccess;
}

extern "C" ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
    struct runtime_scope scope;
    delete communicator;
    return ncclSuccess;
}

/* Comes back when nothing that is queued, and no graph, has an operation of it left. */
extern "C" ncclResult_t ncclCommAbort(ncclComm_t communicator) {
    struct runtime_scope scope;
    std::shared_ptr<struct nccl_progress> progress = communicator->progress;
    progress->aborted = true;
    delete communicator;
    while (progress.use_count() > 1)
        streams_let_others();
    return ncclSuccess;
}

extern "C" ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *error) {
    struct runtime_scope scope;
    *error = nccl_later;
    return ncclSuccess;
}

/* ---- operations ---- */

static bool nccl_buffers_ok(const struct nccl_part *part, unsigned ranks, unsigned device) {
    size_t bytes = part->count * FLOAT_BYTES;
    bool ok = memory_is_device(part->from) && memory_range_ok(part->from, bytes) &&
              memory_device_of(part->from) == device && memory_is_device(part->to) &&
              memory_range_ok(part->to, part->gathers ? ranks * bytes : bytes) && memory_device_of(part->to) == device;
    if (!ok)
        fault_host("NCCL: the %zu numbers of a rank's buffers are not in one allocation of its device %u", part->count,
            device);
    return ok;
}

static bool nccl_parts_agree(const struct nccl_meeting *meeting) {
    for (const struct nccl_part &part : meeting->parts)
        if (part.count != meeting->parts[0].count || part.gathers != meeting->parts[0].gathers) {
            fault_host("NCCL: ranks call different operations, or with %zu and %zu numbers", part.count,
                meeting->parts[0].count);
            return false;
        }
    return true;
}

static void nccl_gather(const struct nccl_meeting *meeting) {
    size_t count = meeting->parts[0].count;
    for (const struct nccl_part &part : meeting->parts)
        for (size_t rank = 0; rank < meeting->parts.size(); rank++)
            memmove(part.to + rank * count, meeting->parts[rank].from, count * FLOAT_BYTES);
}

static void nccl_reduce(const struct nccl_meeting *meeting) {
    size_t count = meeting->parts[0].count, ranks = meeting->parts.size();
    for (size_t i = 0; i < count; i++) {
        size_t first = i / RING_FLOATS % ranks;
        float sum = meeting->parts[first].from[i];
        for (size_t rank = 1; rank < ranks; rank++)
            sum += meeting->parts[(first + rank) % ranks].from[i];
        for (const struct nccl_part &part : meeting->parts)
            part.to[i] = sum;
    }
}

/* Comes to the meeting; whoever is last computes for all. */
static bool nccl_meet(struct nccl_clique *clique, uint64_t number, unsigned rank, const struct nccl_part &part) {
    std::shared_ptr<struct nccl_meeting> &meeting = clique->meetings[number];
    if (!meeting) {
        meeting = std::make_shared<struct nccl_meeting>();
        meeting->parts.resize(clique->ranks);
        meeting->here.resize(clique->ranks);
    }
    if (!meeting->here[rank]) {
        meeting->here[rank] = true;
        meeting->parts[rank] = part;
        meeting->arrived++;
    }
    if (meeting->arrived < clique->ranks)
        return false;
    if (!meeting->done && nccl_parts_agree(meeting.get()))
        meeting->parts[0].gathers ? nccl_gather(meeting.get()) : nccl_reduce(meeting.get());
    meeting->done = true;
    return true;
}

static void nccl_leave(struct nccl_clique *clique, struct nccl_progress *progress) {
    auto meeting = clique->meetings.find(progress->operations++);
    if (meeting != clique->meetings.end() && ++meeting->second->left == clique->ranks)
        clique->meetings.erase(meeting);
}

static ncclResult_t nccl_add(const struct nccl_part &part, ncclComm_t communicator, cudaStream_t stream) {
    struct runtime_scope scope;
    ncclResult_t failing = nccl_fail_next;
    nccl_fail_next = ncclSuccess;
    if (failing != ncclSuccess)
        return failing;
    unsigned rank = communicator->rank, device = communicator->device;
    if (stream_get(stream)->device != device)
        return ncclInvalidUsage;
    std::shared_ptr<struct nccl_clique> clique = communicator->clique;
    std::shared_ptr<struct nccl_progress> progress = communicator->progress;
    auto ready = [=] {
        if (progress->aborted || !nccl_buffers_ok(&part, clique->ranks, device))
            return true;
        return nccl_meet(clique.get(), progress->operations, rank, part);
    };
    runtime_calls.launches += stream_counts(stream);
    cudaError_t error = stream_add(
        stream, [=] { nccl_leave(clique.get(), progress.get()); }, ready);
    return error == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

extern "C" ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type,
    ncclRedOp_t operation, ncclComm_t communicator, cudaStream_t stream) {
    if (type != ncclFloat32 || operation != ncclSum)
        return ncclInvalidArgument;
    return nccl_add({(const float *)from, (float *)to, count, false}, communicator, stream);
}

extern "C" ncclResult_t ncclAllGather(
    const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t communicator, cudaStream_t stream) {
    if (type != ncclFloat32)
        return ncclInvalidArgument;
    return nccl_add({(const float *)from, (float *)to, count, true}, communicator, stream);
}

/* Work is queued at once: nothing here waits for other ranks when it is called. */
extern "C" ncclResult_t ncclGroupStart(void) {
    return ncclSuccess;
}

extern "C" ncclResult_t ncclGroupEnd(void) {
    return ncclSuccess;
}

/* ---- faults for tests ---- */

extern "C" void emulator_fail_nccl_call(int result) {
    struct runtime_scope scope;
    nccl_fail_next = (ncclResult_t)result;
}

extern "C" void emulator_fail_nccl_later(int result) {
    struct runtime_scope scope;
    nccl_later = (ncclResult_t)result;
}
