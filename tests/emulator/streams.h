/* SPDX-License-Identifier: Apache-2.0
 *
 * Queues of device work. Operations of a stream run in order; nothing runs before somebody waits, or chance says so.
 * Each stream belongs to a device, and whoever waits for one device does not wait for others; but an operation may have
 * to wait for those of other devices, which then go on, or for what their threads have not queued yet.
 * All functions are called with the runtime's lock held.
 */
#ifndef EMULATOR_STREAMS_H
#define EMULATOR_STREAMS_H

#include "emulator.h"
#include "internal.h"

#include <deque>
#include <functional>
#include <memory>
#include <pthread.h>
#include <vector>

/* A point in a stream's queue: reached when the stream has run that many operations. */
struct stream_point {
    struct CUstream_st *stream;
    uint64_t count;
};

struct work {
    std::function<void()> run;   /* with device memory open; may be empty */
    std::function<bool()> ready; /* asked again and again before; empty: always */
};

struct operation {
    struct work work;
    std::vector<struct stream_point> after;
};

struct CUgraph_st {
    std::vector<struct work> operations; /* in an order that respects all dependencies */
};

struct CUgraphExec_st {
    std::shared_ptr<struct CUgraph_st> graph;
};

struct capture {
    struct CUstream_st *origin;
    std::shared_ptr<struct CUgraph_st> graph;
    enum cudaStreamCaptureMode mode;
    pthread_t thread;                          /* that began it */
    std::vector<struct CUstream_st *> streams; /* that take part */
    bool invalid;
};

struct CUstream_st {
    unsigned device;
    bool blocking;
    bool running; /* its first operation, by somebody who may have let others go on */
    std::deque<struct operation> queue;
    uint64_t queued, done;
    std::shared_ptr<struct capture> capture;
    uint64_t capture_count; /* operations it added to a capture */
};

struct CUevent_st {
    unsigned device;
    struct stream_point point;
    std::shared_ptr<struct capture> capture; /* recorded in a stream that is being captured */
    std::shared_ptr<double> milliseconds;    /* when the record was reached */
};

/* Locks the runtime for a scope; creates it at first use. */
struct runtime_scope {
    runtime_scope();
    ~runtime_scope();
};

/* What emulator_calls_read returns. */
extern struct emulator_calls runtime_calls;
/* Whether calls on the stream count: not those that go to a graph. */
bool stream_counts(cudaStream_t stream);

/* NULL: the legacy default stream of the thread's device. */
struct CUstream_st *stream_get(cudaStream_t stream);
/* Queues work, or adds it to the graph that the stream is captured to. */
cudaError_t stream_add(cudaStream_t stream, std::function<void()> run, std::function<bool()> ready = nullptr);
/* Runs what the point needs. */
void stream_reach(struct stream_point point);
void stream_reach_end(struct CUstream_st *stream);
/* Everything of a device. */
void streams_drain(unsigned device);
/* Called by work that waits for others: all devices go on, and the lock is free for a while. */
void streams_let_others(void);

/* The device that cudaSetDevice chose for this thread; that whose work runs, or the same while none does. */
unsigned device_current(void);
unsigned runtime_device(void);
/* Whether a capture forbids calls that wait or allocate. */
bool capture_forbids(void);
/* The sticky error of a device's kernels (set of runtime_device()), and the last error of calls. */
cudaError_t runtime_return(cudaError_t error);
void runtime_set_sticky(cudaError_t error);

#endif
